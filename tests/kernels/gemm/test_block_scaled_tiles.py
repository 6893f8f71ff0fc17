"""Middle batches by e4m3 weights with scales by block: as exact as torch, split along K or not, a row the same in any company."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.gemm.block_scaled_tiles import block_scaled_linear, row_form, takes
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, TileScratch, quantize_rows_reference
from holdfast.kernels.geometry import BLOCK_SCALED_BLOCK_N, block_scaled_splits
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.gemm_references import quantized_linear_reference
from kernels.quantized_cases import (
    codable_rows,
    exact_rows,
    exact_weight,
    random_weight,
    room_amid,
    slack,
    weight_amid,
    weight_on,
    widest_on,
)
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

# A block of which all is NaN is right where a row is.
pytestmark = [QUIET, pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")]

CPU = torch.device("cpu")


def scratch_amid(zones, num_rows, size_n, size_k) -> TileScratch:
    """Exactly what a product of this shape takes: partial sums are poison, counters zeros."""
    partials = zones.allocate(block_scaled_splits(size_n, size_k) * num_rows * size_n).fill_(NAN)
    arrived = zones.allocate(-(-size_n // BLOCK_SCALED_BLOCK_N), dtype=torch.int32)
    return TileScratch(partials, arrived, zones.allocate(1, dtype=torch.int32))


def coded(zones, x_MK, weight) -> QuantizedRows:
    """Rows as the reference codes them, between red zones."""
    room = room_amid(zones, len(x_MK), weight)
    assert room is not None
    host = QuantizedRows(torch.empty(x_MK.shape, dtype=torch.float8_e4m3fn), torch.empty(room.scales_TB.shape))
    quantize_rows_reference(x_MK, host)
    room.codes_TK.copy_(host.codes_TK)
    room.scales_TB.copy_(host.scales_TB)
    return room._replace(scratch=scratch_amid(zones, len(x_MK), *weight.shape))


def rows_of(num_rows, size_k, seed=0) -> torch.Tensor:
    return codable_rows(num_rows, size_k, seed, FP8_BLOCK.block_columns)


def run(x_MK, weight, bias_N, device, out_dtype) -> torch.Tensor:
    """The kernel amid poison, twice over the same scratch: the first time over the rows in another order."""
    zones, size_n = RedZones(device), weight.shape[0]
    rows = coded(zones, x_MK, weight)
    bias, weight = None if bias_N is None else amid(bias_N, device), weight_amid(weight, device)
    backwards = rows._replace(codes_TK=_backwards(rows.codes_TK), scales_TB=_backwards(rows.scales_TB))
    results = []
    for one in (backwards, rows):
        out = zones.allocate(len(x_MK), size_n, dtype=out_dtype).fill_(NAN)
        assert block_scaled_linear(one, weight, bias, out) is out
        results.append(out.cpu())
        assert not rows.scratch.arrived.any()
    zones.check()
    assert same_bits(results[0].flip(0), results[1])
    return results[1]


def _backwards(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[list(range(len(tensor)))[::-1]].contiguous()


def judge(x_MK, weight, bias_N, device, out_dtype=None) -> None:
    out_dtype = out_dtype or x_MK.dtype
    y = run(x_MK, weight, bias_N, device, out_dtype)
    rows = coded(RedZones(CPU), x_MK, weight)
    empty = torch.empty(y.shape, dtype=out_dtype)
    in_torch = quantized_linear_reference(x_MK, weight, bias_N, empty, rows, is_coded=True)
    exact = exact_rows(x_MK, weight.scheme) @ exact_weight(weight).T
    exact = exact if bias_N is None else exact + bias_N.double()
    assert_as_exact_as_torch(y, in_torch, exact, magnitude=10.0 * slack(device, weight.scheme))


@pytest.mark.each_value
@pytest.mark.parametrize("num_rows", [1, 2, 17, 32, 33, 64], ids=lambda count: f"{count} rows")
def test_block_scaled_linear_is_exact_for_every_number_of_rows(device, num_rows):
    weight = random_weight(130, 2200, FP8_BLOCK)
    judge(rows_of(num_rows, 2200).to(widest_on(device)), weight, None, device)


@pytest.mark.parametrize(("size_n", "size_k"), [(1, 1), (2, 3), (33, 128), (129, 1333), (200, 4096), (64, 2048)])
def test_block_scaled_linear_with_bias_is_exact_at_every_size(device, size_n, size_k):
    x, weight = rows_of(19, size_k, seed=2), random_weight(size_n, size_k, FP8_BLOCK, seed=3)
    judge(x.to(widest_on(device)), weight, random(size_n, seed=5).to(widest_on(device)), device)


@hypothesis_settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 40), size_n=st.integers(1, 200), size_k=st.integers(1, 2600), has_bias=st.booleans())
def test_block_scaled_linear_is_exact_at_any_size(device, rows, size_n, size_k, has_bias):
    x, weight = rows_of(rows, size_k, seed=rows), random_weight(size_n, size_k, FP8_BLOCK, seed=size_n)
    bias = random(size_n, seed=7).to(widest_on(device)) if has_bias else None
    judge(x.to(widest_on(device)), weight, bias, device)


def test_block_scaled_linear_is_exact_in_half_and_float32_output(device):
    x, weight = rows_of(17, 1024, seed=3).half(), random_weight(80, 1024, FP8_BLOCK)
    judge(x, weight, random(80, seed=5).half(), device)
    judge(x, weight, None, device, out_dtype=torch.float32)


def test_block_scaled_linear_split_sums_of_integers_are_exact(device):
    """Small integers by powers of two: every sum is exact in any order, and so a block that is lost or taken twice shows."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(-2, 3, (2, 140, 4224), generator=generator).float()
    values[1, :, ::128] = 448.0  # so that scales of rows are one
    scales = 2.0 ** torch.randint(-2, 3, (2, 33), generator=generator).float()
    weight = QuantizedWeight(FP8_BLOCK, (140, 4224), values[0].to(torch.float8_e4m3fn), scales)
    assert block_scaled_splits(140, 4224) == 4
    expected = values[1, :20].double() @ exact_weight(weight).T
    y = run(values[1, :20], weight, None, device, torch.float32)
    assert (y.double() - expected).abs().max() <= (0 if device.type == "cpu" else 2**-9 * expected.abs().max())


def test_block_scaled_linear_is_batch_invariant(device):
    assert block_scaled_splits(65, 2200) > 1
    x, weight = rows_of(64, 2200).to(widest_on(device)), random_weight(65, 2200, FP8_BLOCK)
    whole = run(x, weight, None, device, torch.float32)
    for some in ([63], [5, 3], list(range(17)), list(range(1, 34))):
        assert same_bits(run(x[some], weight, None, device, torch.float32), whole[some])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_block_scaled_linear_nonfinite_input_stays_in_its_row(device, bad):
    weight, x = random_weight(80, 2200, FP8_BLOCK), rows_of(18, 2200).to(widest_on(device))
    clean = run(x, weight, None, device, torch.float32)
    x[1, 850] = bad
    y, others = run(x, weight, None, device, torch.float32), [row for row in range(18) if row != 1]
    assert y[1].isnan().all()
    assert same_bits(y[others], clean[others])


@given(size_n=st.integers(1, 60000), size_k=st.integers(1, 60000))
def test_block_scaled_splits_follow_the_shape_and_are_never_empty(size_n, size_k):
    splits, k_blocks = block_scaled_splits(size_n, size_k), -(-size_k // 128)
    of_split = -(-k_blocks // splits)
    assert (splits - 1) * of_split < k_blocks <= splits * of_split
    assert splits == 1 or (of_split > 4 and splits <= 4)


def test_block_scaled_splits_of_deepseek_v4_flash_are_known():
    """Products of attention, then of the shared expert: few outputs are split."""
    shapes = ((1536, 4096), (32768, 1024), (8192, 1024), (4096, 8192), (4096, 4096), (4096, 2048))
    assert [block_scaled_splits(*shape) for shape in shapes] == [4, 1, 1, 4, 4, 2]


def test_block_scaled_takes_chooses_by_scheme_and_rows():
    weight, scratch = random_weight(130, 260, FP8_BLOCK), scratch_amid(RedZones(CPU), 1, 64, 64)
    assert [takes(weight, num_rows, scratch) for num_rows in (1, 64, 65)] == [True, True, False]
    assert not takes(weight, 2, None)
    for scheme in (FP8, INT8):
        assert not takes(random_weight(130, 260, scheme), 2, scratch)
    forms = [row_form(num_rows) for num_rows in range(1, 100)]
    assert [forms.index(form) + 1 for form in dict.fromkeys(forms)] == [1, 17, 33, 65]


def test_block_scaled_linear_misfit_operands_are_refused(device):
    weight = weight_on(random_weight(70, 4224, FP8_BLOCK), device)
    rows, out = coded(RedZones(device), rows_of(20, 4224), weight), torch.empty(20, 70, device=device)
    small = TileScratch(
        *(torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32, torch.int32))
    )
    with pytest.raises(AssertionError, match="partials"):
        block_scaled_linear(rows._replace(scratch=small), weight, None, out)
    with pytest.raises(AssertionError, match="no room"):
        block_scaled_linear(rows._replace(scratch=None), weight, None, out)
    with pytest.raises(AssertionError, match=r"out_MN\.shape"):
        block_scaled_linear(rows, weight, None, out[:, :35].contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 16, 64], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize(("size_n", "size_k"), [(1536, 4096), (8192, 1024), (4096, 8192)])
def test_block_scaled_linear_bfloat16_is_exact_at_model_sizes(device, num_rows, size_n, size_k):
    x, weight = rows_of(num_rows, size_k).bfloat16(), random_weight(size_n, size_k, FP8_BLOCK)
    judge(x, weight, random(size_n, seed=5).bfloat16(), device)


@pytest.mark.gpu
def test_block_scaled_linear_allocates_nothing(device):
    zones, weight = RedZones(device), weight_on(random_weight(256, 4096, FP8_BLOCK), device)
    rows = coded(zones, rows_of(17, 4096), weight)
    out = torch.empty(17, 256, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: block_scaled_linear(rows, weight, None, out))

"""Middle batches by e4m3 weights with scales by row: as exact as torch, split along K or not, and a row the same in any company."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.activation import REFERENCES
from holdfast.kernels.gemm.quantize_activations import (
    QuantizedRows,
    RowAmaxBits,
    TileScratch,
    quantize_rows_by_amax,
    quantize_rows_reference,
)
from holdfast.kernels.gemm.row_scaled_tiles import (
    num_stages,
    row_form,
    row_scaled_gate,
    row_scaled_linear,
    takes,
    takes_gate,
)
from holdfast.kernels.geometry import (
    ROW_SCALED_BLOCK_K,
    ROW_SCALED_BLOCK_N,
    ROW_SCALED_ROWS,
    ROW_SCALED_SPLIT_ROWS,
    row_scaled_splits,
)
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.gemm_references import row_scaled_gate_reference, row_scaled_linear_reference
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

HOPPER_SHARED = 227 * 1024
ROWS = pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32, 33, 64, 65, 128], ids=lambda count: f"{count} rows")
SPLIT = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
KINDS = pytest.mark.parametrize("kind", sorted(REFERENCES))


def scratch_amid(zones, num_rows, size_n, size_k) -> TileScratch:
    """Exactly what a product of this shape takes: partial sums and amax are poison, counters zeros."""
    num_blocks = -(-size_n // ROW_SCALED_BLOCK_N)
    partials = zones.allocate(row_scaled_splits(size_n, size_k) * num_rows * size_n).fill_(NAN)
    arrived = zones.allocate(num_blocks, dtype=torch.int32)
    return TileScratch(partials, arrived, zones.allocate(num_rows * num_blocks, dtype=torch.int32).fill_(-1))


def coded(zones, x_MK, weight) -> QuantizedRows:
    """Rows as the reference codes them, between red zones."""
    room = room_amid(zones, len(x_MK), weight)
    assert room is not None
    host = QuantizedRows(torch.empty(x_MK.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x_MK), 1))
    quantize_rows_reference(x_MK, host)
    room.codes_TK.copy_(host.codes_TK)
    room.scales_TB.copy_(host.scales_TB)
    return room


def run(x_MK, weight, bias_N, device, out_dtype, split=True) -> torch.Tensor:
    """The kernel amid poison, twice over the same scratch: the first time over the rows in another order."""
    zones, (size_n, size_k) = RedZones(device), weight.shape
    rows = coded(zones, x_MK, weight)
    if split:
        rows = rows._replace(scratch=scratch_amid(zones, len(x_MK), size_n, size_k))
    bias, weight = None if bias_N is None else amid(bias_N, device), weight_amid(weight, device)
    backwards = rows._replace(codes_TK=_backwards(rows.codes_TK), scales_TB=_backwards(rows.scales_TB))
    results = []
    for one in (backwards, rows):
        out = zones.allocate(len(x_MK), size_n, dtype=out_dtype).fill_(NAN)
        assert row_scaled_linear(one, weight, bias, out) is out
        results.append(out.cpu())
        assert rows.scratch is None or not rows.scratch.arrived.any()
    zones.check()
    assert same_bits(results[0].flip(0), results[1])
    return results[1]


def _backwards(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[list(range(len(tensor)))[::-1]].contiguous()


def run_gate(x_MK, weight, bias_N, kind, device, out_dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What the gated kernel stores, and the largest amax that it leaves for each row."""
    zones, size_i = RedZones(device), weight.shape[0] // 2
    rows = coded(zones, x_MK, weight)._replace(scratch=scratch_amid(zones, len(x_MK), size_i, weight.shape[1]))
    out = zones.allocate(len(x_MK), size_i, dtype=out_dtype).fill_(NAN)
    bias = None if bias_N is None else amid(bias_N, device)
    amax = row_scaled_gate(rows, weight_amid(weight, device), bias, kind, out)
    zones.check()
    assert amax.num_amax == -(-size_i // ROW_SCALED_BLOCK_N)
    return out.cpu(), amax.bits.view(len(x_MK), amax.num_amax).amax(-1).cpu()


def bits_of(y_MN) -> torch.Tensor:
    return (y_MN.float().view(torch.int32) & 0x7FFFFFFF).amax(-1)


def judge(x_MK, weight, bias_N, device, out_dtype=None, split=True) -> None:
    out_dtype = out_dtype or x_MK.dtype
    y = run(x_MK, weight, bias_N, device, out_dtype, split)
    rows = coded(RedZones(torch.device("cpu")), x_MK, weight)
    in_torch = row_scaled_linear_reference(rows, weight, bias_N, torch.empty(y.shape, dtype=out_dtype))
    exact = exact_rows(x_MK, weight.scheme) @ exact_weight(weight).T
    exact = exact if bias_N is None else exact + bias_N.double()
    assert_as_exact_as_torch(y, in_torch, exact, magnitude=10.0 * slack(device, weight.scheme))


@pytest.mark.each_value
@SPLIT
@ROWS
def test_row_scaled_linear_is_exact_for_every_number_of_rows(device, num_rows, split):
    weight = random_weight(65, 1100, FP8)
    judge(codable_rows(num_rows, 1100).to(widest_on(device)), weight, None, device, split=split)


@pytest.mark.parametrize(("size_n", "size_k"), [(1, 1), (2, 3), (33, 128), (63, 600), (129, 1333), (64, 2048)])
def test_row_scaled_linear_with_bias_is_exact_at_every_size(device, size_n, size_k):
    for scheme in (FP8, FP8_TENSOR):
        x, weight = codable_rows(19, size_k, seed=2), random_weight(size_n, size_k, scheme, seed=3)
        judge(x.to(widest_on(device)), weight, random(size_n, seed=5).to(widest_on(device)), device)


@hypothesis_settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 40), size_n=st.integers(1, 200), size_k=st.integers(1, 1500), has_bias=st.booleans())
def test_row_scaled_linear_is_exact_at_any_size(device, rows, size_n, size_k, has_bias):
    x, weight = codable_rows(rows, size_k, seed=rows), random_weight(size_n, size_k, FP8, seed=size_n)
    bias = random(size_n, seed=7).to(widest_on(device)) if has_bias else None
    judge(x.to(widest_on(device)), weight, bias, device)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
def test_row_scaled_linear_is_exact_in_half_and_float32_output(device, dtype):
    x, weight = codable_rows(17, 1024, seed=3).to(dtype), random_weight(80, 1024, FP8)
    judge(x, weight, random(80, seed=5).to(dtype), device)
    judge(x, weight, None, device, out_dtype=torch.float32)


def test_row_scaled_linear_split_sums_of_integers_are_exact(device):
    """Small integers: every sum is exact in any order, and so a block of K that is lost or taken twice shows."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(-2, 3, (2, 70, 4224), generator=generator).float()
    values[:, :, 0] = 448.0  # so that scales are one
    weight = QuantizedWeight(FP8, (70, 4224), values[0].to(torch.float8_e4m3fn), torch.ones(70))
    assert row_scaled_splits(70, 4224) > 4
    expected = values[1, :20].double() @ values[0].double().T
    for split in (False, True):
        y = run(values[1, :20], weight, None, device, torch.float32, split)
        assert (y.double() - expected).abs().max() <= (0 if device.type == "cpu" else 2**-9 * expected.max())


@SPLIT
def test_row_scaled_linear_is_batch_invariant(device, split):
    assert row_scaled_splits(65, 1100) > 2
    x, weight = codable_rows(64, 1100).to(widest_on(device)), random_weight(65, 1100, FP8)
    whole = run(x, weight, None, device, torch.float32, split)
    for some in ([63], [5, 3], list(range(17)), list(range(1, 34))):
        assert same_bits(run(x[some], weight, None, device, torch.float32, split), whole[some])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_row_scaled_tiles_nonfinite_input_stays_in_its_row(device, bad):
    weight, gate_up = random_weight(80, 900, FP8), random_weight(160, 900, FP8)
    x = codable_rows(18, 900).to(widest_on(device))
    clean = run(x, weight, None, device, torch.float32)
    clean_gate, clean_amax = run_gate(x, gate_up, None, "silu", device, torch.float32)
    x[1, 850] = bad
    y = run(x, weight, None, device, torch.float32)
    gate, amax = run_gate(x, gate_up, None, "silu", device, torch.float32)
    others = [row for row in range(18) if row != 1]
    assert y[1].isnan().all()
    assert gate[1].isnan().all()
    assert amax[1] > 0x7F800000
    assert same_bits(y[others], clean[others])
    assert same_bits(gate[others], clean_gate[others])
    assert torch.equal(amax[others], clean_amax[others])


def test_row_scaled_linear_nonfinite_weight_stays_in_its_outputs(device):
    x, weight = codable_rows(18, 1300).to(widest_on(device)), random_weight(80, 1300, FP8)
    clean = run(x, weight, None, device, torch.float32)
    weight.scales[77] = NAN
    weight.codes.view(torch.uint8)[3, 5] = 0x7F
    y = run(x, weight, None, device, torch.float32)
    bad = [3, 77]
    others = [column for column in range(80) if column not in bad]
    assert y[:, bad].isnan().all()
    assert same_bits(y[:, others].contiguous(), clean[:, others].contiguous())


def test_row_scaled_linear_zero_row_is_the_bias(device):
    x, weight, bias = codable_rows(18, 700).to(widest_on(device)), random_weight(80, 700, FP8), random(80, seed=6)
    x[4] = 0.0
    assert same_bits(run(x, weight, bias, device, torch.float32)[4], bias)


@pytest.mark.each_value
@KINDS
@pytest.mark.parametrize(("num_rows", "size_i", "size_k"), [(1, 3, 5), (17, 64, 300), (40, 101, 640)])
def test_row_scaled_gate_matches_torch_and_leaves_row_amax(device, kind, num_rows, size_i, size_k):
    dtype = widest_on(device)
    x, weight = codable_rows(num_rows, size_k).to(dtype), random_weight(2 * size_i, size_k, FP8)
    for bias, out_dtype in ((None, dtype), (random(2 * size_i, seed=5).to(dtype), torch.float16)):
        y, amax = run_gate(x, weight, bias, kind, device, out_dtype)
        zones = RedZones(torch.device("cpu"))
        rows = coded(zones, x, weight)._replace(scratch=scratch_amid(zones, num_rows, size_i, size_k))
        in_torch = torch.empty(y.shape, dtype=out_dtype)
        left = row_scaled_gate_reference(rows, weight, bias, kind, in_torch)
        exact = exact_rows(x, FP8) @ exact_weight(weight).T
        gate, up = (exact if bias is None else exact + bias.double()).chunk(2, dim=-1)
        assert_as_exact_as_torch(y, in_torch, REFERENCES[kind](gate) * up, magnitude=40.0 * slack(device, FP8))
        assert torch.equal(amax, bits_of(y))
        assert torch.equal(left.bits[:num_rows], bits_of(in_torch))


@pytest.mark.parametrize("num_amax", [1, 3, 400])
@pytest.mark.parametrize("width", [1, 100, 2048, 2049, 6000], ids=lambda width: f"K{width}")
def test_quantize_rows_given_amax_changes_no_code(device, width, num_amax):
    zones, x = RedZones(device), random(5, width)
    x[1], x[2, 0], x[3, width - 1], x[4, width // 2] = -0.0, NAN, float("inf"), -0.0
    bits = torch.zeros(5, num_amax, dtype=torch.int32)
    bits[:, num_amax // 2] = bits_of(x)
    amax_bits = zones.allocate(5, num_amax, dtype=torch.int32).copy_(bits)
    codes = zones.allocate(5, width, dtype=torch.uint8).fill_(0x55).view(torch.float8_e4m3fn)
    room = QuantizedRows(codes, zones.allocate(5, 1).fill_(7.0))
    assert quantize_rows_by_amax(amid(x, device), RowAmaxBits(amax_bits, num_amax), room) is room
    zones.check()
    host = QuantizedRows(torch.empty(5, width, dtype=torch.float8_e4m3fn), torch.empty(5, 1))
    quantize_rows_reference(x, host)
    assert torch.equal(room.codes_TK.cpu().view(torch.uint8), host.codes_TK.view(torch.uint8))
    assert torch.equal(room.scales_TB.cpu().isnan(), host.scales_TB.isnan())
    assert same_bits(room.scales_TB.cpu().nan_to_num(0), host.scales_TB.nan_to_num(0))


def test_row_form_follows_tile_heights():
    forms = [row_form(num_rows) for num_rows in range(1, 200)]
    assert [forms.index(form) + 1 for form in dict.fromkeys(forms)] == [1, 17, 33, 65, 129]
    assert forms[15:17] + forms[127:129] == [16, 32, 128, 0]


@given(size_n=st.integers(1, 60000), size_k=st.integers(1, 60000))
def test_row_scaled_splits_follow_the_shape_and_are_never_empty(size_n, size_k):
    splits, num_blocks = row_scaled_splits(size_n, size_k), -(-size_n // ROW_SCALED_BLOCK_N)
    k_blocks = -(-size_k // ROW_SCALED_BLOCK_K)
    of_split = -(-k_blocks // splits)
    assert (splits - 1) * of_split < k_blocks <= splits * of_split
    assert splits == 1 or (of_split >= 3 and splits <= 8)
    assert splits == 1 or splits * num_blocks <= 2 * 132
    assert num_stages(32, num_blocks * splits, False, HOPPER_SHARED) in (4, 6)


@given(num_programs=st.integers(1, 2000), gated=st.booleans(), shared=st.sampled_from([HOPPER_SHARED, 99 * 1024]))
def test_row_scaled_stages_of_few_rows_let_all_programs_run_at_once(num_programs, gated, shared):
    """If there is room for three stages each; a program alone never takes more than there is."""
    stages = num_stages(16, num_programs, gated, shared)
    num_bytes = stages * (144 if gated else 80) * 128
    assert 3 <= stages <= 10
    assert num_bytes <= shared
    assert stages == 3 or -(-num_programs // 132) * (num_bytes + 1024) <= shared
    more = num_bytes // stages * (stages + 1)
    assert stages == 10 or -(-num_programs // 132) * (more + 1024) > shared


def test_row_scaled_stages_of_qwen3_32b_are_known():
    """qkv, o, gate and up, down, with their programs."""
    programs = ((160, False), (160, False), (400, True), (240, False))
    for block_m, expected in ((16, [10, 10, 3, 10]), (32, [6, 6, 4, 6]), (64, [6, 6, 4, 6]), (128, [4, 4, 4, 4])):
        assert [num_stages(block_m, *one, HOPPER_SHARED) for one in programs] == expected


def test_row_scaled_splits_of_qwen3_32b_are_known():
    shapes = ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600))
    assert [row_scaled_splits(*shape) for shape in shapes] == [1, 2, 1, 3]


def test_row_scaled_takes_chooses_by_rows_and_shape():
    scratch = scratch_amid(RedZones(torch.device("cpu")), 1, 64, 64)
    wide, narrow = random_weight(132 * 64, 32, FP8), random_weight(64, 4096, FP8_TENSOR)
    for num_rows, of_wide, of_narrow in ((1, True, True), (64, True, True), (65, False, True), (128, False, True)):
        assert takes(wide, num_rows, scratch) == of_wide
        assert takes(narrow, num_rows, scratch) == of_narrow
        assert takes(narrow, num_rows, None) == of_wide
        assert takes_gate(wide, narrow, num_rows, scratch) == of_wide
        assert not takes_gate(wide, narrow, num_rows, None)
    assert not takes(narrow, 129, scratch)
    for other in (random(64, 64), random_weight(128, 128, FP8_BLOCK), random_weight(64, 64, INT8)):
        assert not takes(other, 20, scratch)
        assert not takes_gate(wide, other, 20, scratch)
        assert not takes_gate(other, narrow, 20, scratch)
    assert (ROW_SCALED_ROWS, ROW_SCALED_SPLIT_ROWS) == (64, 128)


def test_row_scaled_linear_misfit_operands_are_refused(device):
    weight = weight_on(random_weight(70, 4224, FP8), device)
    rows = coded(RedZones(device), codable_rows(20, 4224), weight)
    small = TileScratch(
        *(torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32, torch.int32))
    )
    out = torch.empty(20, 70, device=device)
    with pytest.raises(AssertionError, match="partials"):
        row_scaled_linear(rows._replace(scratch=small), weight, None, out)
    with pytest.raises(AssertionError, match="amax"):
        row_scaled_gate(rows._replace(scratch=small), weight, None, "silu", out[:, :35].contiguous())
    with pytest.raises(AssertionError, match="needs amax"):
        row_scaled_gate(rows, weight, None, "silu", out[:, :35].contiguous())
    with pytest.raises(AssertionError, match=r"weight\.shape"):
        row_scaled_linear(rows, weight, None, out[:, :35].contiguous())
    many = coded(RedZones(device), codable_rows(129, 4224), weight)
    with pytest.raises(AssertionError, match="129 rows"):
        row_scaled_linear(many, weight, None, torch.empty(129, 70, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [16, 17, 64, 128], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize(("size_n", "size_k"), [(5120, 8192), (2560, 25600), (8448, 1024)])
def test_row_scaled_linear_bfloat16_is_exact_at_model_sizes(device, num_rows, size_n, size_k):
    x, weight = codable_rows(num_rows, size_k).bfloat16(), random_weight(size_n, size_k, FP8)
    judge(x, weight, random(size_n, seed=5).bfloat16(), device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [17, 128], ids=lambda count: f"{count} rows")
def test_row_scaled_tiles_allocate_nothing(device, num_rows):
    zones = RedZones(device)
    x, weight = codable_rows(num_rows, 4096), weight_on(random_weight(256, 4096, FP8), device)
    rows = coded(zones, x, weight)._replace(scratch=scratch_amid(zones, num_rows, 256, 4096))
    out = torch.empty(num_rows, 256, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: row_scaled_linear(rows, weight, None, out))
    gated = torch.empty(num_rows, 128, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: row_scaled_gate(rows, weight, None, "silu", gated))

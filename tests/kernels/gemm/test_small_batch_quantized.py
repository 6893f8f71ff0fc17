"""Small batches by quantized weights: exact beside the codes, rows quantized by their amax, and a row the same in any company."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.gemm.deferred_rms_norm import (
    AmaxScratch,
    NormedRows,
    ResidualStream,
    RowAmax,
    SmallBatchScratch,
    defer_rms_norm,
    defer_rms_norm_reference,
    row_amax,
)
from holdfast.kernels.gemm.gemv import num_k_splits
from holdfast.kernels.gemm.small_batch import QUANTIZED_BLOCK_K, linear_add, normed_linear, takes_weight
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, NUM_GATE_AMAX
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import LEAST_E4M3_SCALE
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4
from kernels.exactness import random, same_bits
from kernels.gemm_references import (
    linear_add_reference,
    normed_linear_reference,
    quantized_sums_reference,
    row_amax_reference,
)
from kernels.quantized_cases import (
    E4M3_SLACK,
    ROW_SCHEMES,
    codable_rows,
    quantized,
    random_weight,
    scheme_id,
    weight_on,
    widest_on,
)
from kernels.small_batch_cases import (
    CPU,
    EPS,
    Guarded,
    amax_of,
    exact_sums,
    judge_add,
    judge_normed,
    judge_part,
    quantized_case,
    run_add,
    run_normed,
    squares_of,
)
from kernels.tiled_cases import NAN
from kernels.triton_cases import QUIET, assert_allocates_nothing

# A block of which all is NaN is right where a row is.
pytestmark = [QUIET, pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")]

SCHEMES = pytest.mark.parametrize("scheme", ROW_SCHEMES, ids=scheme_id)
BOTH = pytest.mark.parametrize("scheme", [FP8, INT8], ids=scheme_id)
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
ROWS = pytest.mark.parametrize("num_rows", [2, 3, 7, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")


@pytest.mark.each_value
@BOTH
@ROWS
@GATED
def test_quantized_normed_linear_is_exact_for_any_number_of_rows(device, scheme, num_rows, gated):
    judge_normed(
        quantized_case(num_rows, 65, 320, widest_on(device), scheme, gated, with_bias=num_rows % 2 == 1), device
    )


@pytest.mark.each_value
@SCHEMES
@ROWS
def test_quantized_linear_add_is_exact_for_every_number_of_rows(device, scheme, num_rows):
    judge_add(quantized_case(num_rows, 65, 320, widest_on(device), scheme, with_bias=num_rows % 2 == 0), device)


@SCHEMES
@pytest.mark.parametrize("num_rows", [1, 3, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")
def test_quantized_small_batch_partial_sum_is_exact(device, scheme, num_rows):
    for size_k in (320, 1024) if num_rows == 3 else (320,):
        judge_part(quantized_case(num_rows, 65, size_k, widest_on(device), scheme, with_bias=num_rows == 3), device)


@BOTH
@pytest.mark.parametrize(("size_n", "size_k"), [(2, 3), (33, 100), (64, 256), (129, 257)])
def test_quantized_small_batch_is_exact_for_odd_and_even_sizes(device, scheme, size_n, size_k):
    dtype = widest_on(device)
    judge_normed(quantized_case(3, size_n, size_k, dtype, scheme), device)
    judge_normed(quantized_case(2, size_n, size_k, dtype, scheme, gated=True, with_bias=True), device)
    judge_add(quantized_case(3, size_n, size_k, dtype, scheme, with_bias=True), device)


@pytest.mark.parametrize(
    ("scheme", "size_k", "splits"), [(FP8, 768, 1), (FP8, 512, 2), (FP8, 1024, 4), (INT8, 1536, 2), (INT8, 2048, 8)]
)
def test_quantized_small_batch_split_k_is_exact(device, scheme, size_k, splits):
    assert num_k_splits(70, size_k, QUANTIZED_BLOCK_K) == splits
    judge_add(quantized_case(FUSED_DECODE_ROWS - 1, 70, size_k, widest_on(device), scheme, with_bias=True), device)
    judge_normed(quantized_case(2, 70, size_k, widest_on(device), scheme, with_bias=True), device)


@BOTH
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
def test_quantized_small_batch_half_precision_is_exact(device, scheme, dtype):
    for gated in (False, True):
        judge_normed(quantized_case(3, 65, 256, dtype, scheme, gated, with_bias=True), device)
    judge_normed(quantized_case(3, 65, 256, dtype, scheme), device, out_dtype=torch.float32)  # logits
    judge_add(quantized_case(FUSED_DECODE_ROWS, 65, 256, dtype, scheme, with_bias=True), device)


@pytest.mark.parametrize("num_blocks", [1, 3, 96])
def test_quantized_normed_linear_accepts_any_number_of_blocks(device, num_blocks):
    judge_normed(quantized_case(3, 9, 192, widest_on(device), FP8), device, num_blocks)


@pytest.mark.parametrize("num_amax", [1, 5, NUM_GATE_AMAX], ids=["one", "some", "those of a gated product"])
def test_quantized_linear_add_accepts_given_row_amax(device, num_amax):
    judge_add(quantized_case(3, 65, 320, widest_on(device), FP8), device, num_amax)


@hypothesis_settings(max_examples=6)
@given(
    num_rows=st.integers(2, FUSED_DECODE_ROWS),
    size_n=st.integers(2, 150),
    size_k=st.integers(2, 600),
    scheme=st.sampled_from(ROW_SCHEMES),
    gated=st.booleans(),
    with_bias=st.booleans(),
    num_blocks=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_quantized_small_batch_is_exact_for_any_shape(
    device, num_rows, size_n, size_k, scheme, gated, with_bias, num_blocks, seed
):
    shape = num_rows, size_n, size_k, widest_on(device), scheme
    judge_normed(quantized_case(*shape, gated, with_bias, seed), device, num_blocks)
    judge_add(quantized_case(*shape, False, with_bias, seed), device, num_blocks)


@SCHEMES
def test_quantized_small_batch_codes_any_row_like_reference(device, scheme):
    """Not only those whose codes are beyond doubt; a GPU divides less exactly, which may move a number to the next code."""
    case = quantized_case(7, 65, 320, widest_on(device), scheme)
    case.x_MK = (random(7, 320, seed=8) * random(7, 1, seed=9).exp()).to(case.x_MK.dtype)
    tolerance = 1e-5 if device.type == "cpu" else 2e-2
    got, expected = run_normed(normed_linear, case, device), run_normed(normed_linear_reference, case, CPU)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def check_companies(device, dtype, scheme, size_n, size_k, companies) -> None:
    for gated in (False, True):
        case = quantized_case(FUSED_DECODE_ROWS, size_n, size_k, dtype, scheme, gated, with_bias=True).to(device)
        whole = run_normed(normed_linear, case, device)
        for rows in companies:
            assert same_bits(run_normed(normed_linear, case.rows(rows), device), whole[rows]), f"{gated=} {rows=}"
    case = quantized_case(FUSED_DECODE_ROWS, size_n, size_k, dtype, scheme).to(device)
    added = run_add(linear_add, case, device)
    for rows in companies:
        some = run_add(linear_add, case.rows(rows), device)
        for mine, theirs in zip(some[:3], added[:3], strict=True):
            assert same_bits(mine, theirs[rows]), f"{rows=}"


@pytest.mark.parametrize(("scheme", "size_n", "size_k"), [(FP8, 70, 512), (INT8, 70, 512), (FP8, 33, 200)])
def test_quantized_small_batch_is_batch_invariant_from_two_rows(device, scheme, size_n, size_k):
    companies = ([15, 3], [4, 9, 2, 11, 7, 1, 0])
    check_companies(device, widest_on(device), scheme, size_n, size_k, companies)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize(("size_n", "size_k"), [(640, 4096), (2560, 4096), (5120, 2560), (8192, 1024), (1000, 576)])
def test_quantized_small_batch_bfloat16_is_batch_invariant(device, scheme, size_n, size_k):
    companies = [
        *(list(range(count)) for count in range(2, FUSED_DECODE_ROWS)),
        list(range(FUSED_DECODE_ROWS))[::-1],
        [11, 2],
    ]
    check_companies(device, torch.bfloat16, scheme, size_n, size_k, companies)


@BOTH
def test_quantized_small_batch_zero_row_is_the_bias_alone(device, scheme):
    others = [0, 2, 3]
    for gated in (False, True):
        case = quantized_case(4, 65, 300, widest_on(device), scheme, gated, with_bias=True)
        clean = run_normed(normed_linear, case, device)
        case.x_MK[1] = 0.0
        y = run_normed(normed_linear, case, device)
        assert same_bits(y[others], clean[others])
        gate, up = case.bias_N.float().chunk(2) if gated else (case.bias_N.float(), None)
        expected = gate if up is None else torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(y[1].float(), expected.to(y.dtype).float(), rtol=1e-3, atol=1e-6)
    case = quantized_case(4, 65, 300, widest_on(device), scheme)
    case.x_MK[1] = 0.0
    x, *_ = run_add(linear_add, case, device)
    assert same_bits(x[1], case.residual_MN[1])


@pytest.mark.parametrize("scheme", [FP8, INT8], ids=scheme_id)
@pytest.mark.parametrize("num_rows", [1, 3], ids=lambda count: f"{count} rows")
def test_quantized_small_batch_rows_of_any_scale_are_exact(device, scheme, num_rows):
    """Each is as exact as it would be alone: nothing is shared between rows, and only the least scale is a limit."""
    sizes = (1e15, 1.0, 1e-3) if device.type == "cpu" else (1e2, 1.0, 1e-1)
    slack = 1.0 if device.type == "cpu" or scheme is INT8 else E4M3_SLACK
    case = quantized_case(3, 65, 300, widest_on(device), scheme)
    case.x_MK = (case.x_MK.float() * torch.tensor(sizes).unsqueeze(1)).to(case.x_MK.dtype)
    case.residual_MN = torch.zeros_like(case.residual_MN)
    for first in range(0, 3, num_rows):
        some = case.rows(list(range(first, first + num_rows)))
        x, *_ = run_add(linear_add, some, device)
        expected = exact_sums(some)
        for row in range(num_rows):
            allowed = slack * 1e-6 + torch.finfo(x.dtype).eps * expected[row].abs().max() / sizes[first + row]
            assert (x[row].double() - expected[row]).abs().max() <= 4 * allowed * sizes[first + row], f"{first + row=}"


def test_quantized_small_batch_tiny_row_stays_finite(device):
    case = quantized_case(3, 65, 300, torch.float32, FP8)
    case.x_MK[1] = codable_rows(1, 300, seed=5)[0] * (150 * LEAST_E4M3_SCALE / 3)
    case.x_MK[2] = 1e-30
    case.residual_MN = torch.zeros_like(case.residual_MN)
    x, *_ = run_add(linear_add, case, device)
    expected = exact_sums(case)
    slack = 1.0 if device.type == "cpu" else E4M3_SLACK
    assert (x[1].double() - expected[1]).abs().max() <= 1e-6 * slack * expected[1].abs().max()
    assert not x[2].any()


@pytest.mark.each_value
@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_quantized_small_batch_nonfinite_input_stays_in_its_row(device, scheme, bad):
    others = [0, 2]
    for gated in (False, True):
        case = quantized_case(3, 70, 512, widest_on(device), scheme, gated)
        clean = run_normed(normed_linear, case, device)
        case.x_MK[1, 300] = bad
        y = run_normed(normed_linear, case, device)
        assert y[1].isnan().all()
        assert same_bits(y[others], clean[others])
    for name, column in (("x_MK", 300), ("residual_MN", 66)):
        case = quantized_case(3, 70, 512, widest_on(device), scheme)
        clean = run_add(linear_add, case, device)
        getattr(case, name)[1, column] = bad
        hurt = run_add(linear_add, case, device)
        for mine, theirs in zip(hurt[:3], clean[:3], strict=True):
            assert not mine[1].isfinite().all()
            assert same_bits(mine[others], theirs[others])


@BOTH
@pytest.mark.parametrize("num_rows", [1, 3], ids=lambda count: f"{count} rows")
def test_quantized_small_batch_nonfinite_weight_stays_in_column(device, scheme, num_rows):
    case = quantized_case(num_rows, 70, 512, widest_on(device), scheme)
    clean, *_ = run_add(linear_add, case, device)
    if scheme is FP8:
        case.weight_NK.codes.view(torch.uint8)[66, 511] = 0x7F
    else:
        case.weight_NK.scales[66] = NAN
    y, *_ = run_add(linear_add, case, device)
    others = [column for column in range(70) if column != 66]
    assert y[:, 66].isnan().all()
    assert same_bits(y[:, others], clean[:, others])


@pytest.mark.parametrize("num_rows", [1, 3], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("function", [normed_linear, normed_linear_reference], ids=["kernel", "reference"])
def test_gated_product_amax_only_rises(device, num_rows, function):
    """Blocks of one row share places, so each raises what is there; the kernel before must clear them."""
    case = quantized_case(num_rows, 65, 320, widest_on(device), FP8, gated=True).to(device)
    guarded = Guarded(case, device, 1)
    guarded.scratch.squares[:num_rows] = squares_of(case.x_MK, 1).flatten()
    guarded.scratch.amax.normed[:num_rows] = amax_of(case.x_MK, 1).flatten()
    places = guarded.scratch.amax.gated.view(torch.float32).view(num_rows, NUM_GATE_AMAX)
    places[0] = 1e9
    y = guarded.filled((num_rows, 65), case.x_MK.dtype)
    function(NormedRows(case.x_MK, 1, EPS), case.weight_NK, None, True, y, guarded.scratch)
    guarded.check()
    assert (places[0] == 1e9).all()
    assert torch.equal(places[1:].amax(-1), y[1:].float().abs().amax(-1))


def step_of(device, scheme, num_rows, functions) -> torch.Tensor:
    """Layers as a step runs them: amax pass from one to the next, and scratch is used again and again."""
    begin, amax, normed, add = functions
    dtype = widest_on(device)
    places = torch.full((num_rows * NUM_GATE_AMAX,), 0x7E000000, dtype=torch.int32, device=device)
    scratch = SmallBatchScratch(
        torch.full((num_rows * 40,), NAN, device=device),
        torch.full((num_rows * 128,), NAN, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
        AmaxScratch(
            torch.full((num_rows * 40,), NAN, device=device), torch.full((num_rows,), NAN, device=device), places
        ),
    )
    x, norm = random(num_rows, 128).to(device, dtype), (1 + 0.1 * random(128, seed=9)).to(device, dtype)
    shapes = ((32, 128), (128, 32), (2 * 40, 128), (128, 40))
    qkv, out, gate_up, down = (
        weight_on(random_weight(*shape, scheme, seed), device) for seed, shape in enumerate(shapes)
    )
    rows = begin(ResidualStream(x, norm, EPS, torch.empty_like(x), scratch))
    for _ in range(1 if num_rows == 1 else 2):
        y = normed(rows, qkv, None, False, x.new_empty(num_rows, 32), scratch)
        found = amax(y, scratch.amax.inputs, scratch.amax.gated)
        rows = add(y, out, None, ResidualStream(x, norm, EPS, torch.empty_like(x), scratch), found)
        active = normed(rows, gate_up, None, True, x.new_empty(num_rows, 40), scratch)
        if scheme is not INT8:
            left = places.view(torch.float32).view(num_rows, NUM_GATE_AMAX).amax(-1)
            assert torch.equal(left, active.float().abs().amax(-1)), "amax of the layer before were not cleared"
        found = RowAmax(scratch.amax.gated, NUM_GATE_AMAX)
        rows = add(active, down, None, ResidualStream(x, norm, EPS, torch.empty_like(x), scratch), found)
    assert not scratch.arrived.any()
    return x.float().cpu()


@BOTH
@pytest.mark.parametrize("num_rows", [1, 3], ids=lambda count: f"{count} rows")
def test_quantized_small_batch_scratch_serves_later_products(device, scheme, num_rows):
    x = step_of(device, scheme, num_rows, (defer_rms_norm, row_amax, normed_linear, linear_add))
    references = (defer_rms_norm_reference, row_amax_reference, normed_linear_reference, linear_add_reference)
    expected = step_of(CPU, scheme, num_rows, references)
    # Where a sum's last digit decides between two codes, the rest of the row moves a little.
    tolerance = 1e-5 if scheme is INT8 and device.type == "cpu" else 0.05
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


def test_takes_weight_accepts_row_scaled_schemes_only():
    for scheme, takes in ((FP8, True), (FP8_TENSOR, True), (INT8, True), (FP8_BLOCK, False), (MXFP4, False)):
        assert takes_weight(random_weight(4, 64, scheme)) == takes, scheme.name
    weight = random_weight(4, 64, FP8)
    stacked = QuantizedWeight(FP8, (2, 2, 64), weight.codes.view(2, 2, 64), weight.scales.view(2, 2))
    assert not takes_weight(stacked)
    assert not takes_weight(torch.zeros(4, 64))


def test_quantized_sums_reference_multiplies_integers_exactly():
    """Rows whose amax is 448 have a scale of one, and so have rows of a weight."""
    x = torch.randint(-8, 9, (3, 100)).float()
    values = torch.randint(-8, 9, (5, 100)).float()
    x[:, 0], values[:, 0] = 448.0, 448.0
    got = quantized_sums_reference(x, quantized(values, FP8), RowAmax(amax_of(x, 4).flatten(), 4))
    assert torch.equal(got, x @ values.T)
    values[:, 0] = 127.0
    assert torch.equal(quantized_sums_reference(x, quantized(values, INT8), None), x @ values.T)


def test_quantized_small_batch_without_amax_fails(device):
    case = quantized_case(2, 5, 64, widest_on(device), FP8).to(device)
    scratch = SmallBatchScratch(torch.zeros(2, device=device), torch.zeros(0), torch.zeros(0, dtype=torch.int32))
    more = (case.norm_N, EPS, torch.empty_like(case.residual_MN))
    with pytest.raises(AssertionError, match="needs amax"):
        linear_add(case.x_MK, case.weight_NK, None, ResidualStream(case.residual_MN, *more, scratch))
    for function, where in ((linear_add, device), (linear_add_reference, CPU)):
        host = case.to(where)
        more = (host.norm_N, EPS, torch.empty_like(host.residual_MN))
        with pytest.raises(AssertionError, match="rows that become codes need amax"):
            function(
                host.x_MK, host.weight_NK, None, ResidualStream(host.residual_MN, *more, Guarded(host, where).scratch)
            )


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("num_rows", [1, 2, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")
def test_quantized_small_batch_bfloat16_is_exact_at_model_sizes(device, scheme, num_rows):
    judge_normed(quantized_case(num_rows, 4096, 2560, torch.bfloat16, scheme, gated=True), device, num_squares=40)
    judge_normed(quantized_case(num_rows, 5120, 2560, torch.bfloat16, scheme), device, num_squares=320)
    judge_add(quantized_case(num_rows, 2560, 4096, torch.bfloat16, scheme), device, NUM_GATE_AMAX)
    judge_add(quantized_case(num_rows, 640, 4096, torch.bfloat16, scheme), device)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("num_rows", [1, 2, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")
def test_quantized_small_batch_is_deterministic(device, scheme, num_rows):
    """Whichever program arrives last."""
    case = quantized_case(num_rows, 2560, 4096, torch.bfloat16, scheme).to(device)
    expected = run_add(linear_add, case, device)
    for _ in range(20):
        assert all(same_bits(*pair) for pair in zip(run_add(linear_add, case, device)[:3], expected[:3], strict=True))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("num_rows", [1, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")
def test_quantized_small_batch_allocates_nothing(device, scheme, num_rows):
    x, a, scaled = (random(num_rows, 1024, seed=seed).to(device, torch.bfloat16) for seed in range(3))
    weight, norm = weight_on(random_weight(1024, 1024, scheme), device), random(1024).to(device, torch.bfloat16)
    gate_up = weight_on(random_weight(2048, 1024, scheme), device)
    places = torch.zeros(FUSED_DECODE_ROWS * NUM_GATE_AMAX, dtype=torch.int32, device=device)
    squares, amax = torch.empty(2, FUSED_DECODE_ROWS * 512, device=device)
    scratch = SmallBatchScratch(
        squares,
        torch.empty(FUSED_DECODE_ROWS * 8192, device=device),
        torch.zeros(16, dtype=torch.int32, device=device),
        AmaxScratch(amax, torch.empty(FUSED_DECODE_ROWS, device=device), places),
    )

    def step():
        found = row_amax(a, scratch.amax.inputs, places)
        rows = linear_add(a, weight, None, ResidualStream(x, norm, EPS, scaled, scratch), found)
        normed_linear(rows, gate_up, None, True, a, scratch)
        rows = linear_add(
            a, weight, None, ResidualStream(x, norm, EPS, scaled, scratch), RowAmax(places, NUM_GATE_AMAX)
        )
        normed_linear(rows, weight, None, False, a, scratch)

    assert_allocates_nothing(step)

"""GEMV of quantized weights, and how a GEMV and split-K cut a weight; plain weights are in test_small_batch.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.gemm import small_batch
from holdfast.kernels.gemm.gemv import MAX_K_SPLITS, num_k_splits, plain_gemv_blocks, quantized_gemv_blocks
from holdfast.kernels.gemm.small_batch import linear_add, normed_linear, single_row_linear
from holdfast.kernels.geometry import GEMV_MIN_BLOCK_N, NUM_GATE_AMAX, SMALL_BATCH_BLOCK_N, SPLIT_K_PROGRAMS
from holdfast.quant.weight_schemes import FP8, INT8
from kernels.exactness import random, same_bits
from kernels.quantized_cases import ROW_SCHEMES, scheme_id, widest_on
from kernels.small_batch_cases import judge_add, judge_normed, quantized_case, run_add, run_normed
from kernels.tiled_cases import amid
from kernels.triton_cases import QUIET

# A block of which all is NaN is right where a row is.
pytestmark = [QUIET, pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")]

SCHEMES = pytest.mark.parametrize("scheme", ROW_SCHEMES, ids=scheme_id)
BOTH = pytest.mark.parametrize("scheme", [FP8, INT8], ids=scheme_id)


@SCHEMES
@pytest.mark.parametrize(("size_n", "size_k"), [(2, 192), (9, 256)])
def test_quantized_gemv_one_row_is_exact(device, scheme, size_n, size_k):
    for with_bias in (False, True):
        for gated in (False, True):
            judge_normed(quantized_case(1, size_n, size_k, widest_on(device), scheme, gated, with_bias), device)
        judge_add(quantized_case(1, size_n, size_k, widest_on(device), scheme, with_bias=with_bias), device)


DEEP_SIZES = (128, 640, 768, 1024, 4096, 4608, 5120)
"""Sizes of K for every number of loads whose sums begin in half precision, and for several such sums."""


@pytest.mark.parametrize(
    ("scheme", "size_k"),
    [*((FP8, size_k) for size_k in (3, 100, 777, *DEEP_SIZES)), (INT8, 777), (INT8, 1024)],
    ids=lambda value: scheme_id(value) if value in (FP8, INT8) else f"K{value}",
)
def test_quantized_gemv_is_exact_for_every_k_blocking(device, scheme, size_k):
    judge_normed(quantized_case(1, 5, size_k, widest_on(device), scheme), device)
    judge_normed(quantized_case(1, 3, size_k, widest_on(device), scheme, gated=True), device)
    judge_add(quantized_case(1, 9, size_k, widest_on(device), scheme), device)


def test_quantized_gemv_blocks_take_every_number_of_loads():
    for residual in (False, True):
        blocks = [quantized_gemv_blocks(size_k, False, residual, quantized=True) for size_k in DEEP_SIZES]
        assert {one.depth for one in blocks} == {1, 2, 3, 4, 5}
        assert any(size_k > one.block_k * one.depth for size_k, one in zip(DEEP_SIZES, blocks, strict=True))


@BOTH
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
def test_quantized_gemv_half_precision_is_exact(device, scheme, dtype):
    for gated in (False, True):
        judge_normed(quantized_case(1, 9, 256, dtype, scheme, gated, with_bias=True), device)
    judge_normed(quantized_case(1, 9, 256, dtype, scheme), device, out_dtype=torch.float32)  # logits
    judge_add(quantized_case(1, 9, 256, dtype, scheme, with_bias=True), device)


@pytest.mark.parametrize("num_blocks", [1, 96])
def test_quantized_gemv_accepts_any_number_of_square_blocks(device, num_blocks):
    judge_normed(quantized_case(1, 9, 192, widest_on(device), FP8), device, num_blocks)


@pytest.mark.parametrize("num_amax", [1, 5, NUM_GATE_AMAX], ids=["one", "some", "those of a gated product"])
def test_quantized_gemv_accepts_given_row_amax(device, num_amax):
    judge_add(quantized_case(1, 17, 320, widest_on(device), FP8), device, num_amax)


def test_gated_gemv_blocks_sharing_an_amax_place_keep_the_larger(device):
    """The larger of two that share a place stays."""
    size_n = (NUM_GATE_AMAX + 1) * quantized_gemv_blocks(128, gated=True, residual=False, quantized=True).block_n
    case = quantized_case(1, size_n, 128, widest_on(device), FP8, gated=True, with_bias=True)
    case.bias_N[[1, size_n + 1]] = 20.0  # in the first block, whose place the last one shares
    y = run_normed(normed_linear, case, device)  # which looks for the amax of what it has left
    assert int(y.abs().argmax()) == 1, f"{y[0, 1]} is not the amax of what is tried"


@BOTH
def test_quantized_gemv_zero_row_is_the_bias(device, scheme):
    case = quantized_case(1, 33, 300, widest_on(device), scheme, with_bias=True)
    case.x_MK.zero_()
    assert same_bits(run_normed(normed_linear, case, device)[0], case.bias_N)
    case.bias_N = None
    assert same_bits(run_add(linear_add, case, device)[0], case.residual_MN)


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_quantized_gemv_nonfinite_row_is_visible(device, scheme, bad):
    for gated in (False, True):
        case = quantized_case(1, 33, 300, widest_on(device), scheme, gated)
        case.x_MK[0, 299] = bad
        assert run_normed(normed_linear, case, device).isnan().all()
    case = quantized_case(1, 33, 300, widest_on(device), scheme)
    case.x_MK[0, 0] = bad
    assert not run_add(linear_add, case, device)[0].isfinite().any()


@given(st.integers(1, 40_000), st.booleans(), st.booleans(), st.booleans())
def test_quantized_gemv_blocks_are_powers_of_two(size_k, gated, residual, quantized):
    blocks = quantized_gemv_blocks(size_k, gated, residual, quantized)
    for size in (blocks.block_n, blocks.block_k, blocks.num_warps):
        assert size & (size - 1) == 0
    assert blocks.block_n >= GEMV_MIN_BLOCK_N, "squares and amax have room for no more blocks"
    assert 0 <= blocks.depth <= 5, "more products could exceed half precision"
    assert blocks.depth == 0 or (quantized and size_k % (blocks.block_k * blocks.depth) == 0)


@given(st.integers(1, 40_000), st.booleans())
def test_plain_gemv_blocks_are_powers_of_two(size_k, gated):
    blocks = plain_gemv_blocks(size_k, gated)
    for size in (blocks.block_n, blocks.block_k, blocks.num_warps):
        assert size & (size - 1) == 0
    assert blocks.block_n >= GEMV_MIN_BLOCK_N, "squares have room for no more blocks"
    assert blocks.depth == 0


@pytest.mark.parametrize("size_k", [640, 1536, 2048])
def test_quantized_gemv_sums_of_largest_codes_stay_finite(device, size_k):
    """All weights and all of the row are 448, of one sign or the other."""
    for gated in (False, True):
        case = quantized_case(1, 3, size_k, torch.float32, FP8, gated)
        case.weight_NK.codes.fill_(448.0)
        case.weight_NK.scales.fill_(1e-3)
        case.x_MK.fill_(3.0 if gated else -3.0)
        y = run_normed(normed_linear, case, device)
        gate = torch.full((1, 3), (0.448 if gated else -0.448) * size_k)  # times 3, over an rms of 3
        expected = torch.nn.functional.silu(gate) * gate if gated else gate
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=0)


@given(
    size_n=st.integers(1, 200_000),
    size_k=st.integers(1, 500).map(lambda blocks: 64 * blocks),
    block_k=st.sampled_from([small_batch.BLOCK_K, small_batch.QUANTIZED_BLOCK_K]),
)
def test_num_k_splits_gives_whole_blocks_and_no_spare_split(size_n: int, size_k: int, block_k: int) -> None:
    splits, num_blocks = num_k_splits(size_n, size_k, block_k), -(-size_n // SMALL_BATCH_BLOCK_N)
    assert splits in (1, 2, 4, 8)
    assert splits <= MAX_K_SPLITS
    assert splits == 1 or size_k % (splits * block_k) == 0
    assert splits == 1 or num_blocks * splits // 2 < SPLIT_K_PROGRAMS, "half as many would have been enough"
    more = 2 * splits
    assert more > MAX_K_SPLITS or num_blocks * splits >= SPLIT_K_PROGRAMS or size_k % (more * block_k), (
        "more would have been better"
    )


@pytest.mark.parametrize(
    ("groups", "group_rows", "size_k"),
    [(1, 1, 1), (1, 257, 300), (1, 24, 4096), (3, 5, 130), (8, 16, 512), (2, 6, 1024)],
    ids=str,
)
def test_single_row_linear_gives_each_group_its_columns(device, guarded, groups, group_rows, size_k):
    size_n = groups * group_rows
    x, weight = random(1, groups * size_k), random(size_n, size_k, seed=1)
    out = guarded(1, size_n, dtype=torch.float32).fill_(torch.nan)
    assert single_row_linear(amid(x, device), amid(weight, device), out, groups) is out
    exact = torch.einsum(
        "gk,gnk->gn", x.double().view(groups, size_k), weight.double().view(groups, group_rows, size_k)
    )
    torch.testing.assert_close(out.cpu().double(), exact.view(1, -1), rtol=1e-5, atol=1e-4)


def test_single_row_linear_is_the_same_for_a_share_of_the_weight(device):
    x, weight = random(1, 600).half().to(device), random(96, 600, seed=1).half().to(device)
    whole = single_row_linear(x, weight, torch.empty(1, 96, device=device))
    part = single_row_linear(x, weight[40:80], torch.empty(1, 40, device=device))
    assert same_bits(part, whole[:, 40:80])


def test_single_row_linear_refuses_misfit_operands(device):
    x, weight, out = (torch.zeros(shape, device=device) for shape in ((1, 64), (8, 32), (1, 8)))
    with pytest.raises(AssertionError, match=r"x_1X\.shape"):
        single_row_linear(x, weight, out)
    with pytest.raises(AssertionError, match=r"out_1N\.shape"):
        single_row_linear(x, weight, out[:, :4].contiguous(), 2)

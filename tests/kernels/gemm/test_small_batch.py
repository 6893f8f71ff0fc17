"""Small batches by plain weights, GEMV and tensor cores: as exact as torch at every size, and a row the same in any company."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.activation import silu_mul_reference
from holdfast.kernels.gemm.deferred_rms_norm import ResidualStream, SmallBatchScratch, defer_rms_norm
from holdfast.kernels.gemm.gemv import num_k_splits
from holdfast.kernels.gemm.linear import plain_linear_reference
from holdfast.kernels.gemm.small_batch import BLOCK_K, linear_add, normed_linear
from holdfast.kernels.geometry import FUSED_DECODE_ROWS
from holdfast.kernels.norm import rms_norm_reference
from holdfast.kernels.triton_compat import INTERPRET_VARIABLE
from kernels.exactness import random, same_bits
from kernels.quantized_cases import widest_on
from kernels.small_batch_cases import (
    EPS,
    MANY,
    ROWS,
    judge_add,
    judge_normed,
    judge_part,
    run_add,
    run_normed,
    small_batch_case,
)
from kernels.tiled_cases import NAN
from kernels.triton_cases import QUIET, assert_allocates_nothing

pytestmark = QUIET

HALF = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
BIAS = pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
EVERY_ROWS = pytest.mark.parametrize("num_rows", ROWS, ids=lambda count: f"{count} rows")
LEAST_WIDTH = 1 if os.environ.get(INTERPRET_VARIABLE) == "1" else 2
"""A width of one is compiled in as a constant, which the kernels do not expect, and no model has it."""
WIDTHS = (LEAST_WIDTH, 63, 64, 65, 200)


@pytest.fixture
def widest(device) -> torch.dtype:
    return widest_on(device)


@pytest.mark.each_pair
@EVERY_ROWS
@GATED
@pytest.mark.parametrize("size_k", [64, 128, 192, 576], ids=lambda size: f"K{size}")
def test_normed_linear_is_exact_for_every_number_of_rows(device, widest, num_rows, size_k, gated):
    judge_normed(small_batch_case(num_rows, 65, size_k, widest, gated, with_bias=gated), device)


@pytest.mark.each_pair
@pytest.mark.parametrize("num_rows", [1, 3, MANY], ids=lambda count: f"{count} rows")
@BIAS
@GATED
@pytest.mark.parametrize("size_n", WIDTHS, ids=lambda size: f"N{size}")
def test_normed_linear_is_exact_for_every_number_of_outputs(device, widest, num_rows, size_n, gated, with_bias):
    judge_normed(small_batch_case(num_rows, size_n, 192, widest, gated, with_bias), device)


@pytest.mark.each_pair
@EVERY_ROWS
@BIAS
@pytest.mark.parametrize("size_k", [64, 128, 192, 1024], ids=lambda size: f"K{size}")
def test_linear_add_is_exact_for_every_number_of_rows(device, widest, num_rows, size_k, with_bias):
    judge_add(small_batch_case(num_rows, 65, size_k, widest, with_bias=with_bias), device)


@pytest.mark.parametrize("num_rows", [1, 3, MANY], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("size_n", WIDTHS, ids=lambda size: f"N{size}")
def test_linear_add_is_exact_for_every_number_of_outputs(device, widest, num_rows, size_n):
    judge_add(small_batch_case(num_rows, size_n, 256, widest, with_bias=True), device)


@pytest.mark.each_value
@EVERY_ROWS
@BIAS
@pytest.mark.parametrize(("size_n", "size_k"), [(65, 192), (64, 1024), (200, 64)])
def test_small_batch_partial_sum_is_exact(device, widest, num_rows, size_n, size_k, with_bias):
    """As a rank leaves its part of a sum."""
    judge_part(small_batch_case(num_rows, size_n, size_k, widest, with_bias=with_bias), device)


@pytest.mark.parametrize("num_rows", [1, 2, MANY], ids=lambda count: f"{count} rows")
def test_small_batch_thousand_outputs_are_exact(device, widest, num_rows):
    judge_add(small_batch_case(num_rows, 1000, 256, widest), device)
    judge_normed(small_batch_case(num_rows, 1000, 128, widest), device)


@pytest.mark.each_value
@pytest.mark.parametrize("num_rows", [1, 5], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("size_k", [640, 1100, 1280, 2880, 5120, 6208, 8192, 16448], ids=lambda size: f"K{size}")
def test_small_batch_long_rows_are_exact(device, widest, num_rows, size_k):
    """Each way in which blocks along K are chosen."""
    judge_normed(small_batch_case(num_rows, 5, size_k, widest), device)
    judge_add(small_batch_case(num_rows, 5, size_k, widest), device)


@pytest.mark.each_value
@pytest.mark.parametrize("num_rows", [2, MANY], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize(
    ("size_k", "splits"), [(128, 1), (640, 1), (256, 2), (1280, 2), (512, 4), (1024, 8), (4096, 8)]
)
def test_small_batch_split_k_is_exact(device, widest, num_rows, size_k, splits):
    assert num_k_splits(70, size_k, BLOCK_K) == splits
    judge_add(small_batch_case(num_rows, 70, size_k, widest, with_bias=True), device)
    judge_normed(small_batch_case(num_rows, 70, size_k, widest, with_bias=True), device)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")
def test_small_batch_half_precision_is_exact(device, dtype, num_rows):
    for gated in (False, True):
        judge_normed(small_batch_case(num_rows, 65, 256, dtype, gated, with_bias=True), device)
    judge_normed(small_batch_case(num_rows, 65, 256, dtype), device, out_dtype=torch.float32)  # logits
    judge_add(small_batch_case(num_rows, 65, 256, dtype, with_bias=True), device)


@pytest.mark.each_pair
@pytest.mark.parametrize("num_rows", [1, MANY], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("num_squares", [1, 2, 33, 96])
def test_normed_linear_accepts_any_number_of_square_blocks(device, widest, num_rows, num_squares):
    judge_normed(small_batch_case(num_rows, 9, 192, widest), device, num_squares)


@hypothesis_settings(max_examples=8)
@given(
    num_rows=st.integers(1, FUSED_DECODE_ROWS),
    size_n=st.integers(1, 150),
    blocks_k=st.integers(1, 16),
    gated=st.booleans(),
    with_bias=st.booleans(),
    num_squares=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_small_batch_is_exact_for_any_shape(device, num_rows, size_n, blocks_k, gated, with_bias, num_squares, seed):
    dtype = widest_on(device)
    size_n = max(LEAST_WIDTH, size_n)
    judge_normed(small_batch_case(num_rows, size_n, 64 * blocks_k, dtype, gated, with_bias, seed), device, num_squares)
    judge_add(small_batch_case(num_rows, size_n, 64 * blocks_k, dtype, False, with_bias, seed), device)


@pytest.mark.parametrize("num_rows", [1, 3], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("size_k", [64, 1024], ids=["one split", "split-K"])
def test_linear_add_rounds_outputs_before_the_residual(device, num_rows, size_k):
    """Whole numbers, whose sums are exact: half precision rounds those beyond 2048, and once more with x."""
    case = small_batch_case(num_rows, 70, size_k, torch.float16)
    case.x_MK.copy_(torch.randint(-60, 61, case.x_MK.shape, generator=torch.Generator().manual_seed(1)))
    case.weight_NK.copy_(torch.randint(-20, 21, case.weight_NK.shape, generator=torch.Generator().manual_seed(2)))
    case.residual_MN.copy_(torch.arange(case.residual_MN.numel()).view(case.residual_MN.shape) % 7 - 3)
    y = (case.x_MK.double() @ case.weight_NK.double().T).half()
    assert (y.abs() > 2048).sum() > 20, "nothing is rounded"
    x, *_ = run_add(linear_add, case, device)
    assert same_bits(x, (case.residual_MN.float() + y.float()).half())


def small_companies() -> list[list[int]]:
    """All rows in reverse, and some of them in any order; two at least."""
    generator = torch.Generator().manual_seed(0)
    shuffled = [torch.randperm(FUSED_DECODE_ROWS, generator=generator)[:count].tolist() for count in (2, 9)]
    return [list(range(FUSED_DECODE_ROWS))[::-1], *shuffled]


def check_companies(device, dtype, size_n, size_k) -> None:
    for gated in (False, True):
        case = small_batch_case(FUSED_DECODE_ROWS, size_n, size_k, dtype, gated, with_bias=True).to(device)
        whole = run_normed(normed_linear, case, device)
        for rows in small_companies():
            assert same_bits(run_normed(normed_linear, case.rows(rows), device), whole[rows]), f"{gated=} {rows=}"
    case = small_batch_case(FUSED_DECODE_ROWS, size_n, size_k, dtype).to(device)
    added, scaled, squares, _ = run_add(linear_add, case, device)
    for rows in small_companies():
        some, some_scaled, some_squares, _ = run_add(linear_add, case.rows(rows), device)
        assert same_bits(some, added[rows]), f"{rows=}"
        assert same_bits(some_scaled, scaled[rows]), f"{rows=}"
        assert same_bits(some_squares, squares[rows]), f"{rows=}"


@pytest.mark.parametrize(("size_n", "size_k"), [(70, 512), (64, 192)], ids=["split-K", "one split"])
def test_small_batch_is_batch_invariant_from_two_rows(device, widest, size_n, size_k):
    check_companies(device, widest, size_n, size_k)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size_n", "size_k"), [(5120, 8192), (10240, 5120), (5120, 25600), (1000, 576)], ids=["o", "qkv", "down", "odd"]
)
def test_small_batch_bfloat16_is_batch_invariant_from_two_rows(device, size_n, size_k):
    check_companies(device, torch.bfloat16, size_n, size_k)


@pytest.mark.each_value
@pytest.mark.parametrize("num_rows", [3, MANY], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_small_batch_nonfinite_input_stays_in_its_row(device, widest, num_rows, bad):
    others = [row for row in range(num_rows) if row != 1]
    for gated in (False, True):
        case = small_batch_case(num_rows, 70, 256, widest, gated)
        clean = run_normed(normed_linear, case, device)
        case.x_MK[1, 200] = bad
        y = run_normed(normed_linear, case, device)
        assert y[1].isnan().all()
        assert same_bits(y[others], clean[others])
    for name in ("x_MK", "residual_MN"):
        case = small_batch_case(num_rows, 70, 256, widest)
        clean = run_add(linear_add, case, device)
        getattr(case, name)[1, 66] = bad
        hurt = run_add(linear_add, case, device)
        for mine, theirs in zip(hurt[:3], clean[:3], strict=True):
            assert not mine[1].isfinite().all()
            assert same_bits(mine[others], theirs[others])


@pytest.mark.parametrize("num_rows", [1, 3, MANY], ids=lambda count: f"{count} rows")
def test_small_batch_nonfinite_weight_stays_in_its_column(device, widest, num_rows):
    case = small_batch_case(num_rows, 70, 256, widest)
    clean, *_ = run_add(linear_add, case, device)
    case.weight_NK[66, 255] = NAN
    y, *_ = run_add(linear_add, case, device)
    others = [column for column in range(70) if column != 66]
    assert y[:, 66].isnan().all()
    assert same_bits(y[:, others], clean[:, others])


def test_small_batch_scratch_serves_successive_products(device, widest):
    """As in a step: squares pass from one to the next, and partial sums and counters are used again and again."""
    scratch = SmallBatchScratch(
        torch.full((3 * 40,), NAN, device=device),
        torch.full((8 * 3 * 128,), NAN, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )
    x, norm = random(3, 128).to(device, widest), (1 + 0.1 * random(128, seed=9)).to(device, widest)
    qkv, out, gate_up, down = (
        random(*shape, seed=seed, scale=0.1).to(device, widest)
        for seed, shape in enumerate([(96, 128), (128, 96 * 4), (2 * 192, 128), (128, 192)])
    )
    expected = x.float().cpu().clone()
    rows = defer_rms_norm(ResidualStream(x, norm, EPS, torch.empty_like(x), scratch))
    for _ in range(2):
        y = normed_linear(rows, qkv, None, False, x.new_empty(3, 96), scratch)
        rows = linear_add(y.repeat(1, 4), out, None, ResidualStream(x, norm, EPS, torch.empty_like(x), scratch))
        active = normed_linear(rows, gate_up, None, True, x.new_empty(3, 192), scratch)
        rows = linear_add(active, down, None, ResidualStream(x, norm, EPS, torch.empty_like(x), scratch))
        host = [weight.float().cpu() for weight in (qkv, out, gate_up, down)]
        normed = rms_norm_reference(expected, norm.float().cpu(), EPS)
        expected = expected + plain_linear_reference(
            plain_linear_reference(normed, host[0], None).repeat(1, 4), host[1], None
        )
        normed = rms_norm_reference(expected, norm.float().cpu(), EPS)
        gated = silu_mul_reference(plain_linear_reference(normed, host[2], None))
        expected = expected + plain_linear_reference(gated, host[3], None)
    assert not scratch.arrived.any()
    tolerance = 1e-5 if widest == torch.float32 else 2e-2
    torch.testing.assert_close(x.float().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")
def test_small_batch_bfloat16_is_exact_at_model_sizes(device, num_rows):
    judge_normed(small_batch_case(num_rows, 25600, 5120, torch.bfloat16, gated=True), device, num_squares=80)
    judge_normed(small_batch_case(num_rows, 10240, 5120, torch.bfloat16), device, num_squares=2560)
    judge_add(small_batch_case(num_rows, 5120, 25600, torch.bfloat16), device)
    judge_add(small_batch_case(num_rows, 5120, 8192, torch.bfloat16), device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")
def test_small_batch_split_sums_are_deterministic(device, num_rows):
    """Partial sums arrive in any order, and are added in one."""
    case = small_batch_case(num_rows, 1024, 8192, torch.bfloat16)
    expected = run_add(linear_add, case, device)
    for _ in range(50):
        assert all(same_bits(*pair) for pair in zip(run_add(linear_add, case, device)[:3], expected[:3], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")
def test_small_batch_allocates_nothing(device, num_rows):
    x, a, scaled = (random(num_rows, 1024, seed=seed).to(device, torch.bfloat16) for seed in range(3))
    weight, norm = random(1024, 1024).to(device, torch.bfloat16), random(1024).to(device, torch.bfloat16)
    scratch = SmallBatchScratch(
        torch.empty(FUSED_DECODE_ROWS * 512, device=device),
        torch.empty(FUSED_DECODE_ROWS * 8192, device=device),
        torch.zeros(16, dtype=torch.int32, device=device),
    )

    def step():
        rows = linear_add(a, weight, None, ResidualStream(x, norm, EPS, scaled, scratch))
        normed_linear(rows, weight, None, False, a, scratch)

    assert_allocates_nothing(step)

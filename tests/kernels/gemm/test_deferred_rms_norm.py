"""Deferred RMSNorm, begun, and amax of rows: to the bit, amid poison, and a row the same in any company."""

from dataclasses import FrozenInstanceError

import pytest
import torch

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
from holdfast.kernels.norm import rms_norm_reference
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.gemm_references import row_amax_reference
from kernels.small_batch_cases import EPS
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import DTYPES, QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

CPU = torch.device("cpu")
SIZES = (1, 63, 64, 65, 128, 192, 576, 1000, 1024, 5120)


def run(function, x_MK, norm_K, device) -> tuple[torch.Tensor, torch.Tensor, NormedRows]:
    """The scaled rows and their squares, each NaN before and between red zones."""
    zones = RedZones(device)
    num_rows = len(x_MK)
    scaled = zones.allocate(*x_MK.shape, dtype=x_MK.dtype).fill_(NAN)
    squares = zones.allocate(num_rows).fill_(NAN)
    parts, arrived = zones.allocate(0), zones.allocate(0, dtype=torch.int32)
    x = amid(x_MK, device)
    rows = function(ResidualStream(x, amid(norm_K, device), EPS, scaled, SmallBatchScratch(squares, parts, arrived)))
    zones.check()
    assert same_bits(x.cpu(), x_MK), "the rows stay as they were"
    assert rows.scaled_MK is scaled
    return scaled.cpu(), squares.cpu(), rows


def run_with_amax(function, x_MK, norm_K, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scaled rows, their squares and their amax; the amax of others stay as they are."""
    zones = RedZones(device)
    num_rows = len(x_MK)
    scaled = zones.allocate(*x_MK.shape, dtype=x_MK.dtype).fill_(NAN)
    squares, normed, inputs = (zones.allocate(num_rows).fill_(NAN) for _ in range(3))
    gated = zones.allocate(num_rows * 64, dtype=torch.int32).fill_(7)
    empty, amax = zones.allocate(0, dtype=torch.int32), AmaxScratch(normed, inputs, gated)
    scratch = SmallBatchScratch(squares, squares, empty, amax)
    function(ResidualStream(amid(x_MK, device), amid(norm_K, device), EPS, scaled, scratch))
    zones.check()
    assert inputs.isnan().all()
    assert (gated == 7).all()
    return scaled.cpu(), squares.cpu(), normed.cpu()


def inputs(num_rows, size, dtype=torch.float32):
    return random(num_rows, size, seed=1).to(dtype), (1 + 0.3 * random(size, seed=2)).to(dtype)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"K{size}")
def test_defer_rms_norm_scales_to_the_bit_and_squares_exactly(device, size, dtype):
    for num_rows in (1, 3, 32):
        x, norm = inputs(num_rows, size, dtype)
        scaled, squares, rows = run(defer_rms_norm, x, norm, device)
        in_torch, torch_squares, torch_rows = run(defer_rms_norm_reference, x, norm, CPU)
        assert same_bits(scaled, in_torch)
        exact = x.double().square().sum(-1)
        assert_as_exact_as_torch(squares, torch_squares, exact, magnitude=4 * float(exact.max()))
        assert (rows.num_squares, rows.eps) == (torch_rows.num_squares, torch_rows.eps) == (1, EPS)


@DTYPES
def test_deferred_row_with_its_squares_is_the_norm(device, dtype):
    x, norm = inputs(5, 200, dtype)
    scaled, squares, _ = run(defer_rms_norm, x, norm, device)
    normed = scaled.double() * (squares.double() / 200 + EPS).rsqrt().unsqueeze(1)
    exact = rms_norm_reference(x.double(), norm.double(), EPS)
    torch.testing.assert_close(normed, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("function", [defer_rms_norm, defer_rms_norm_reference], ids=["kernel", "reference"])
def test_defer_rms_norm_amax_is_of_scaled_rows(device, function, dtype):
    """As it was stored; and with or without them the rest is the same."""
    for size in (1, 63, 577):
        x, norm = inputs(3, size, dtype)
        scaled, squares, amax = run_with_amax(function, x, norm, device)
        assert same_bits(amax, scaled.float().abs().amax(-1))
        alone = run(function, x, norm, device)
        assert same_bits(scaled, alone[0])
        assert same_bits(squares, alone[1])


@pytest.mark.parametrize("function", [defer_rms_norm, defer_rms_norm_reference], ids=["kernel", "reference"])
def test_deferred_amax_is_that_of_its_row(device, function):
    x, norm = inputs(4, 100)
    _, _, clean = run_with_amax(function, x, norm, device)
    x[1], x[2, 50] = 0.0, float("inf")
    _, _, amax = run_with_amax(function, x, norm, device)
    assert amax.tolist() == [clean[0], 0.0, float("inf"), clean[3]]


def test_defer_rms_norm_half_squares_do_not_overflow(device):
    x, norm = (random(2, 100) * 2000).half(), torch.ones(100).half()
    _, squares, _ = run(defer_rms_norm, x, norm, device)
    torch.testing.assert_close(squares.double(), x.double().square().sum(-1), rtol=1e-6, atol=0)


@DTYPES
def test_defer_rms_norm_is_batch_invariant(device, dtype):
    x, norm = inputs(9, 577, dtype)
    whole = run(defer_rms_norm, x, norm, device)
    for rows in companies(9):
        some = run(defer_rms_norm, x[rows], norm, device)
        assert same_bits(some[0], whole[0][rows]), f"{rows=}"
        assert same_bits(some[1], whole[1][rows]), f"{rows=}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_defer_rms_norm_nonfinite_value_stays_in_its_row(device, bad):
    x, norm = inputs(4, 100)
    clean = run(defer_rms_norm, x, norm, device)
    x[2, 99] = bad
    scaled, squares, _ = run(defer_rms_norm, x, norm, device)
    assert not squares[2].isfinite()
    assert not scaled[2, 99].isfinite()
    assert same_bits(scaled[[0, 1, 3]], clean[0][[0, 1, 3]])
    assert same_bits(squares[[0, 1, 3]], clean[1][[0, 1, 3]])


def test_defer_rms_norm_may_run_in_place(device):
    x, norm = inputs(3, 100)
    expected, *_ = run(defer_rms_norm, x, norm, device)
    x, norm = x.to(device), norm.to(device)
    scratch = SmallBatchScratch(x.new_empty(3), x.new_empty(0), torch.empty(0, dtype=torch.int32, device=device))
    assert same_bits(defer_rms_norm(ResidualStream(x, norm, EPS, x, scratch)).scaled_MK.cpu(), expected)


def run_delta(function, x_MK, delta_MK, norm_K, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, NormedRows]:
    """x behind it, the scaled rows and their squares."""
    zones = RedZones(device)
    x = zones.allocate(*x_MK.shape, dtype=x_MK.dtype).copy_(x_MK)
    scaled = zones.allocate(*x_MK.shape, dtype=x_MK.dtype).fill_(NAN)
    squares = zones.allocate(len(x_MK)).fill_(NAN)
    scratch = SmallBatchScratch(squares, zones.allocate(0), zones.allocate(0, dtype=torch.int32))
    delta = amid(delta_MK, device)
    rows = function(ResidualStream(x, amid(norm_K, device), EPS, scaled, scratch), delta)
    zones.check()
    assert same_bits(delta.cpu(), delta_MK), "what is added stays as it was"
    assert rows.scaled_MK is scaled
    return x.cpu(), scaled.cpu(), squares.cpu(), rows


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"K{size}")
def test_defer_rms_norm_rounds_sum_as_if_stored(device, size, dtype):
    for num_rows in (1, 3, 16):
        x, norm = inputs(num_rows, size, dtype)
        delta = random(num_rows, size, seed=3, scale=3.0).to(dtype)
        total, scaled, squares, rows = run_delta(defer_rms_norm, x, delta, norm, device)
        assert same_bits(total, (x.float() + delta.float()).to(dtype))
        afterwards = run(defer_rms_norm, total, norm, device)
        assert same_bits(scaled, afterwards[0])
        assert same_bits(squares, afterwards[1])
        assert (rows.num_squares, rows.eps) == (1, EPS)
        in_torch = run_delta(defer_rms_norm_reference, x, delta, norm, CPU)
        assert same_bits(total, in_torch[0])
        assert same_bits(scaled, in_torch[1])


def test_defer_rms_norm_with_delta_is_batch_invariant(device):
    x, norm = inputs(9, 577)
    delta = random(9, 577, seed=3)
    whole = run_delta(defer_rms_norm, x, delta, norm, device)
    for rows in companies(9):
        some = run_delta(defer_rms_norm, x[rows], delta[rows], norm, device)
        for mine, theirs in zip(some[:3], whole[:3], strict=True):
            assert same_bits(mine, theirs[rows]), f"{rows=}"
    delta[2, 50] = NAN
    hurt, others = run_delta(defer_rms_norm, x, delta, norm, device), [0, 1, *range(3, 9)]
    assert hurt[0][2].isnan().sum() == 1
    assert hurt[2][2].isnan()
    for mine, theirs in zip(hurt[:3], whole[:3], strict=True):
        assert same_bits(mine[others], theirs[others])


@pytest.mark.parametrize("function", [defer_rms_norm, defer_rms_norm_reference], ids=["kernel", "reference"])
def test_defer_rms_norm_with_delta_amax_is_of_the_sum(device, function):
    """What a product codes is x + delta, scaled."""
    x, norm = inputs(3, 100)
    delta = -x.clone()
    x[1, 7] += 5.0
    zones = RedZones(device)
    amax = AmaxScratch(zones.allocate(3).fill_(NAN), zones.allocate(0), zones.allocate(0, dtype=torch.int32))
    scratch = SmallBatchScratch(zones.allocate(3), zones.allocate(0), zones.allocate(0, dtype=torch.int32), amax)
    scaled = zones.allocate(3, 100)
    function(ResidualStream(x.to(device), norm.to(device), EPS, scaled, scratch), delta.to(device))
    zones.check()
    assert same_bits(amax.normed.cpu(), scaled.cpu().abs().amax(-1))
    assert amax.normed[[0, 2]].tolist() == [0.0, 0.0]
    assert float(amax.normed[1]) == pytest.approx(5.0 * float(norm[7].abs()), rel=1e-5)


def test_normed_rows_are_frozen():
    with pytest.raises(FrozenInstanceError):
        NormedRows(torch.empty(0), 1, EPS).num_squares = 2  # type: ignore[misc]


@pytest.mark.gpu
def test_defer_rms_norm_allocates_nothing(device):
    x, norm = (tensor.to(device, torch.bfloat16) for tensor in inputs(3, 5120))
    scaled, squares = torch.empty_like(x), torch.empty(3, device=device)
    scratch = SmallBatchScratch(squares, squares, squares)
    assert_allocates_nothing(lambda: defer_rms_norm(ResidualStream(x, norm, EPS, scaled, scratch)))


BOTH_AMAX = pytest.mark.parametrize("function", [row_amax, row_amax_reference], ids=["kernel", "reference"])
AMAX_SIZES = (1, 63, 64, 577, 5120)


def run_row_amax(function, x_MK, device, num_cleared: int = 0) -> torch.Tensor:
    """The amax, NaN before; what is cleared holds the bits of large numbers before and zeros behind."""
    zones = RedZones(device)
    values = zones.allocate(len(x_MK)).fill_(NAN)
    cleared = zones.allocate(num_cleared, dtype=torch.int32).fill_(0x7E000000)
    x = amid(x_MK, device)
    assert function(x, values, cleared) == RowAmax(values, 1)
    zones.check()
    assert same_bits(x.cpu(), x_MK), "the rows stay as they were"
    assert not cleared.any(), f"{int(cleared.count_nonzero())} of {num_cleared} were left"
    return values.cpu()


@BOTH_AMAX
@DTYPES
def test_row_amax_is_exact_for_every_size(device, function, dtype):
    for size in AMAX_SIZES:
        for num_rows in (1, 3):
            x = random(num_rows, size, seed=size).to(dtype)
            assert same_bits(run_row_amax(function, x, device, 64 * num_rows), x.float().abs().amax(-1)), (
                f"{size=} {num_rows=}"
            )


@BOTH_AMAX
@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 100, 700])
def test_row_amax_clears_all_given_places(device, function, num_rows, size):
    """Whether rows are wider than their share of it or not, and whether shares are equal or not."""
    for num_cleared in (0, 64 * num_rows, 1025):
        run_row_amax(function, random(num_rows, size), device, num_cleared)


@BOTH_AMAX
def test_row_amax_finds_either_sign_in_any_column(device, function):
    for place in (0, 1, 64, 99):
        for sign in (1, -1):
            x = random(2, 100).clamp(-3, 3)
            x[1, place] = 4.0 * sign
            assert run_row_amax(function, x, device)[1] == 4.0


@BOTH_AMAX
def test_row_amax_of_zeros_is_zero(device, function):
    assert same_bits(run_row_amax(function, torch.full((2, 70), -0.0), device, 128), torch.zeros(2))


@BOTH_AMAX
def test_row_amax_is_batch_invariant(device, function):
    x = random(9, 200)
    whole = run_row_amax(function, x, device, 576)
    for rows in companies(9):
        assert same_bits(run_row_amax(function, x[rows], device, 576), whole[rows]), f"{rows=}"


@BOTH_AMAX
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_row_amax_nonfinite_value_stays_in_its_row(device, function, bad):
    """Whatever the amax of a row with a NaN is: the NaN itself is quantized as NaN."""
    x = random(4, 100)
    clean = run_row_amax(function, x, device)
    x[2, 50] = bad
    amax = run_row_amax(function, x, device)
    assert same_bits(amax[[0, 1, 3]], clean[[0, 1, 3]])
    if bad == bad:
        assert amax[2] == bad


@pytest.mark.gpu
def test_row_amax_allocates_nothing(device):
    x = random(16, 8192).to(device, torch.bfloat16)
    values = torch.empty(16, device=device)
    cleared = torch.empty(1024, dtype=torch.int32, device=device)
    assert_allocates_nothing(lambda: row_amax(x, values, cleared))

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.gemm.deferred_rms_norm import (
    NormedRows,
    SkinnyScratch,
    begin_rows,
    finish_rows,
    finish_rows_reference,
)
from holdfast.kernels.norm import rms_norm_reference
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.skinny_cases import EPS, squares_of
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import DTYPES, QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("function", [finish_rows, finish_rows_reference], ids=["kernel", "reference"])
SIZES = (1, 63, 64, 65, 128, 576, 1000, 5120)


def run(function, scaled_MK, squares_MJ, device, eps: float = EPS) -> torch.Tensor:
    """The finished rows: NaN before and between red zones, as is all that is read."""
    zones = RedZones(device)
    out = zones.allocate(*scaled_MK.shape, dtype=scaled_MK.dtype).fill_(NAN)
    scaled, squares = amid(scaled_MK, device), amid(squares_MJ.flatten(), device)
    scratch = SkinnyScratch(squares, zones.allocate(0), zones.allocate(0, dtype=torch.int32))
    assert function(NormedRows(scaled, squares_MJ.shape[1], eps), scratch, out) is out
    zones.check()
    assert same_bits(scaled.cpu(), scaled_MK), "the rows stay as they were"
    assert same_bits(squares.cpu(), squares_MJ.flatten()), "the squares stay as they were"
    return out.cpu()


def inputs(num_rows, size, dtype=torch.float32, num_squares: int = 1):
    """x * norm_weight of some x, and the squares of x, which are not those of what was scaled."""
    x, norm = random(num_rows, size, seed=1), 1 + 0.3 * random(size, seed=2)
    return (x * norm).to(dtype), squares_of(x, num_squares)


def exact(scaled_MK, squares_MJ, eps: float = EPS) -> torch.Tensor:
    mean_M1 = squares_MJ.double().sum(-1, keepdim=True) / scaled_MK.shape[1]
    return scaled_MK.double() * (mean_M1 + eps).rsqrt()


def judge(scaled, squares, device, eps: float = EPS) -> None:
    found, in_torch = (
        run(finish_rows, scaled, squares, device, eps),
        run(finish_rows_reference, scaled, squares, CPU, eps),
    )
    assert found.dtype == scaled.dtype
    assert_as_exact_as_torch(found, in_torch, exact(scaled, squares, eps))


@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"K{size}")
def test_every_size(device, size, dtype):
    for num_rows in (1, 3, 16):
        judge(*inputs(num_rows, size, dtype), device)


@pytest.mark.parametrize("num_squares", [1, 2, 3, 33, 96])
def test_squares_in_any_number_of_blocks(device, num_squares):
    """As one row leaves them or as several do; those of the next row lie right behind."""
    judge(*inputs(3, 192, num_squares=num_squares), device)


@hypothesis_settings(max_examples=30)
@given(
    num_rows=st.integers(1, 16),
    size=st.integers(1, 700),
    num_squares=st.integers(1, 200),
    eps=st.sampled_from([0.0, 1e-6, 1e-5, 0.5]),
)
def test_any_rows(device, num_rows, size, num_squares, eps):
    judge(*inputs(num_rows, size, num_squares=num_squares), device, eps)


@BOTH
@DTYPES
def test_what_was_begun_becomes_the_norm(device, function, dtype):
    x, norm = random(5, 200, seed=1).to(dtype), (1 + 0.3 * random(200, seed=2)).to(dtype)
    scratch = SkinnyScratch(*(torch.full((5,), NAN, device=device) for _ in range(3)))
    rows = begin_rows(x.to(device), norm.to(device), EPS, torch.empty_like(x, device=device), scratch)
    found = function(rows, scratch, torch.empty_like(x, device=device)).cpu()
    wanted = rms_norm_reference(x.double(), norm.double(), EPS)
    # Rounded twice: when it was scaled, and when it was finished.
    torch.testing.assert_close(found.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@BOTH
def test_it_may_take_the_place_of_its_rows(device, function):
    for num_rows, size in ((1, 100), (3, 577)):
        scaled, squares = inputs(num_rows, size, num_squares=7)
        expected = run(function, scaled, squares, device)
        rows = amid(scaled, device)
        scratch = SkinnyScratch(*(squares.flatten().to(device) for _ in range(3)))
        assert same_bits(function(NormedRows(rows, 7, EPS), scratch, rows).cpu(), expected)


@DTYPES
def test_a_row_is_the_same_to_the_bit_in_any_company(device, dtype):
    scaled, squares = inputs(9, 577, dtype, num_squares=10)
    whole = run(finish_rows, scaled, squares, device)
    for rows in companies(9):
        assert same_bits(run(finish_rows, scaled[rows], squares[rows], device), whole[rows]), f"{rows=}"


@BOTH
def test_a_row_of_zeros_stays_one(device, function):
    scaled, squares = inputs(3, 100, num_squares=2)
    scaled[1], squares[1] = 0.0, 0.0
    found = run(function, scaled, squares, device)
    assert same_bits(found[1], torch.zeros(100))
    assert found[[0, 2]].abs().amin() > 0


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(device, function, bad):
    scaled, squares = inputs(4, 100, num_squares=3)
    clean = run(function, scaled, squares, device)
    scaled[2, 99], squares[2, 2] = bad, bad
    hurt = run(function, scaled, squares, device)
    assert hurt[2, 99].isnan(), "infinity over infinity is no number either"
    assert same_bits(hurt[[0, 1, 3]], clean[[0, 1, 3]])


def test_half_precision_that_grew_beyond_its_range_when_squared_is_finished(device):
    x = (random(2, 100) * 2000).half()
    judge(x, squares_of(x, 5), device)


@pytest.mark.gpu
def test_nothing_is_allocated(device):
    scaled, squares = inputs(16, 5120, torch.bfloat16, num_squares=80)
    rows, squares = NormedRows(scaled.to(device), 80, EPS), squares.flatten().to(device)
    scratch, out = SkinnyScratch(squares, squares, squares), torch.empty_like(rows.scaled_MK)
    assert_allocates_nothing(lambda: finish_rows(rows, scratch, out))

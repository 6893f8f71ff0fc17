from dataclasses import FrozenInstanceError

import pytest
import torch

from holdfast.kernels.begin_rows import NormedRows, SkinnyScratch, begin_rows, begin_rows_reference
from holdfast.kernels.rms_norm import rms_norm_reference
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.skinny_cases import EPS
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
    rows = function(x, amid(norm_K, device), EPS, scaled, SkinnyScratch(squares, parts, arrived))
    zones.check()
    assert same_bits(x.cpu(), x_MK), "the rows stay as they were"
    assert rows.scaled_MK is scaled
    return scaled.cpu(), squares.cpu(), rows


def inputs(num_rows, size, dtype=torch.float32):
    return random(num_rows, size, seed=1).to(dtype), (1 + 0.3 * random(size, seed=2)).to(dtype)


@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"K{size}")
def test_scaled_to_the_bit_and_squares_as_exact_as_torch(device, size, dtype):
    for num_rows in (1, 3, 32):
        x, norm = inputs(num_rows, size, dtype)
        scaled, squares, rows = run(begin_rows, x, norm, device)
        in_torch, torch_squares, torch_rows = run(begin_rows_reference, x, norm, CPU)
        assert same_bits(scaled, in_torch)
        exact = x.double().square().sum(-1)
        assert_as_exact_as_torch(squares, torch_squares, exact, magnitude=4 * float(exact.max()))
        assert (rows.num_squares, rows.eps) == (torch_rows.num_squares, torch_rows.eps) == (1, EPS)


@DTYPES
def test_with_its_squares_a_row_is_the_norm(device, dtype):
    x, norm = inputs(5, 200, dtype)
    scaled, squares, _ = run(begin_rows, x, norm, device)
    normed = scaled.double() * (squares.double() / 200 + EPS).rsqrt().unsqueeze(1)
    exact = rms_norm_reference(x.double(), norm.double(), EPS)
    torch.testing.assert_close(normed, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_squares_of_half_precision_do_not_overflow(device):
    x, norm = (random(2, 100) * 2000).half(), torch.ones(100).half()
    _, squares, _ = run(begin_rows, x, norm, device)
    torch.testing.assert_close(squares.double(), x.double().square().sum(-1), rtol=1e-6, atol=0)


@DTYPES
def test_a_row_is_the_same_to_the_bit_in_any_company(device, dtype):
    x, norm = inputs(9, 577, dtype)
    whole = run(begin_rows, x, norm, device)
    for rows in companies(9):
        some = run(begin_rows, x[rows], norm, device)
        assert same_bits(some[0], whole[0][rows]), f"{rows=}"
        assert same_bits(some[1], whole[1][rows]), f"{rows=}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(device, bad):
    x, norm = inputs(4, 100)
    clean = run(begin_rows, x, norm, device)
    x[2, 99] = bad
    scaled, squares, _ = run(begin_rows, x, norm, device)
    assert not squares[2].isfinite()
    assert not scaled[2, 99].isfinite()
    assert same_bits(scaled[[0, 1, 3]], clean[0][[0, 1, 3]])
    assert same_bits(squares[[0, 1, 3]], clean[1][[0, 1, 3]])


def test_it_may_take_the_place_of_its_rows(device):
    x, norm = inputs(3, 100)
    expected, *_ = run(begin_rows, x, norm, device)
    x, norm = x.to(device), norm.to(device)
    scratch = SkinnyScratch(x.new_empty(3), x.new_empty(0), torch.empty(0, dtype=torch.int32, device=device))
    assert same_bits(begin_rows(x, norm, EPS, x, scratch).scaled_MK.cpu(), expected)


def test_values_stay_as_they_are():
    with pytest.raises(FrozenInstanceError):
        NormedRows(torch.empty(0), 1, EPS).num_squares = 2  # type: ignore[misc]


@pytest.mark.gpu
def test_nothing_is_allocated(device):
    x, norm = (tensor.to(device, torch.bfloat16) for tensor in inputs(3, 5120))
    scaled, squares = torch.empty_like(x), torch.empty(3, device=device)
    scratch = SkinnyScratch(squares, squares, squares)
    assert_allocates_nothing(lambda: begin_rows(x, norm, EPS, scaled, scratch))

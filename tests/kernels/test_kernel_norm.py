"""RMSNorm on a CPU: as exact as torch at any size and magnitude, and a row the same in any company."""

import pytest
import torch

from holdfast.kernels.norm import rms_norm, rms_norm_reference
from kernels.exactness import assert_as_exact_as_torch, companies, island, num_threads, random, same_bits

pytestmark = pytest.mark.usefixtures("native")

SIZES = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 100, 128, 577, 2048)
EPS = 1e-5


def exact_norm(x, weight, eps):
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.5])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"D{size}")
def test_rms_norm_is_as_exact_as_torch(size, eps):
    weight = random(size, seed=1)
    for num_rows in (1, 2, 9, 17, 63, 129):
        x = random(num_rows, size)
        exact = exact_norm(x, weight, eps)
        assert_as_exact_as_torch(rms_norm(x, weight, eps), rms_norm_reference(x, weight, eps), exact)


@pytest.mark.parametrize("size", [1, 5, 64, 577], ids=lambda size: f"D{size}")
def test_rms_norm_adds_offset_to_the_weight(size):
    x, weight = random(9, size), random(size, seed=1)
    y = rms_norm(x, weight, EPS, offset=1.0)
    assert same_bits(y, rms_norm(x, weight + 1.0, EPS))
    exact = exact_norm(x, weight.double() + 1.0, EPS)
    assert_as_exact_as_torch(y, rms_norm_reference(x, weight, EPS, offset=1.0), exact)


@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e-10, 1e10, 1e15])
def test_rms_norm_is_exact_at_any_magnitude(scale):
    x, weight = random(3, 100) * scale, random(100, seed=1)
    exact = exact_norm(x, weight, EPS)
    assert_as_exact_as_torch(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS), exact)


def test_rms_norm_flattens_leading_dimensions():
    x, weight = random(4, 3, 5, 24), random(24, seed=1)
    rows = rms_norm(x.view(60, 24), weight, EPS)
    assert same_bits(rms_norm(x, weight, EPS).view(60, 24), rows)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"D{size}")
def test_rms_norm_is_batch_invariant(size):
    x, weight = random(129, size), random(size, seed=1)
    alone = torch.cat([rms_norm(x[row : row + 1], weight, EPS) for row in range(129)])
    for threads in (1, 2):
        with num_threads(threads):
            for rows in companies(129):
                assert same_bits(rms_norm(x[rows], weight, EPS), alone[rows]), f"{threads=} {rows=}"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"D{size}")
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_native_rms_norm_stays_within_its_buffers(native, guarded_host, num_rows, size):
    x, weight, y = island(random(num_rows, size)), island(random(size, seed=1)), guarded_host(num_rows, size)
    native.holdfast_rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), num_rows, size, EPS, 0.0)
    assert same_bits(y, rms_norm(x, weight, EPS))
    assert y.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rms_norm_nonfinite_value_stays_in_its_row(bad):
    x, weight = random(5, 37), random(37, seed=1)
    clean = rms_norm(x, weight, EPS)
    x[2, 36] = bad
    y = rms_norm(x, weight, EPS)
    others = [0, 1, 3, 4]
    assert y[2].isnan().any()
    assert same_bits(y[others], clean[others])
    assert torch.equal(y.isnan(), rms_norm_reference(x, weight, EPS).isnan())


def test_rms_norm_without_rows_is_empty():
    assert rms_norm(torch.empty(0, 8), torch.ones(8), EPS).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_half_types_keep_float32_statistics(dtype):
    x, weight = (random(7, 100) * 200).to(dtype), random(100, seed=1).to(dtype)  # squares overflow float16
    exact = exact_norm(x, weight, EPS)
    y = rms_norm(x, weight, EPS)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=3 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_rms_norm_out_holds_the_same_result(guarded_host, num_rows):
    x, weight = random(num_rows, 37), random(37, seed=1)
    expected = rms_norm(x, weight, EPS)
    out = guarded_host(num_rows, 37).fill_(float("nan"))
    assert rms_norm(x, weight, EPS, out) is out
    assert same_bits(out, expected)
    wide = torch.full((2, num_rows, 41), float("nan"))
    wide[0, :, 2:39] = x
    rms_norm(wide[0, :, 2:39], weight, EPS, wide[1, :, 2:39])
    assert same_bits(wide[1, :, 2:39], expected), "rows that lie apart are computed as those side by side"
    assert wide[1, :, :2].isnan().all()
    assert wide[1, :, 39:].isnan().all()
    assert rms_norm(x, weight, EPS, x) is x
    assert same_bits(x, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_half_types_accept_out(dtype):
    x, weight = random(5, 37).to(dtype), random(37, seed=1).to(dtype)
    out = torch.full((5, 40), float("nan"), dtype=dtype)[:, :37]
    assert rms_norm(x, weight, EPS, out) is out
    assert same_bits(out, rms_norm_reference(x, weight, EPS))

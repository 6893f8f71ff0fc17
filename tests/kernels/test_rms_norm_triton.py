import pytest
import torch

from holdfast.kernels.norm import rms_norm, rms_norm_reference, rms_norm_triton
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing

pytestmark = QUIET

SIZES = (1, 2, 3, 63, 64, 100, 577, 1000, 5120)
EPS = 1e-5
POISON = float("nan")


def exact_norm(x, weight, eps=EPS):
    return rms_norm_reference(x.double(), weight.double(), eps)


@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"D{size}")
def test_as_exact_as_torch_amid_poison(device, guarded, size, dtype):
    weight = random(size, seed=1).to(dtype)
    for num_rows in (1, 7):
        x = random(num_rows, size).to(dtype)
        out = guarded(num_rows, size, dtype=dtype).fill_(POISON)
        y = rms_norm_triton(amid_poison(x, device), amid_poison(weight[None], device)[0], EPS, out)
        assert y is out
        assert_as_exact_as_torch(out.cpu(), rms_norm_reference(x, weight, EPS), exact_norm(x, weight))


@DTYPES
def test_out_changes_where_the_result_lies_and_nothing_else(device, poison, dtype):
    x, weight = random(5, 100).to(device, dtype), random(100, seed=1).to(device, dtype)
    alone = rms_norm_triton(x, weight, EPS)
    assert alone.is_contiguous()
    wide = torch.full((5, 132), POISON, dtype=dtype, device=device)
    rms_norm_triton(x, weight, EPS, wide[:, 16:116])
    assert same_bits(wide[:, 16:116], alone)
    assert wide[:, :16].isnan().all()
    assert wide[:, 116:].isnan().all()
    rms_norm_triton(x, weight, EPS, x)
    assert same_bits(x, alone)


@DTYPES
@pytest.mark.parametrize("size", [63, 128, 1000], ids=lambda size: f"D{size}")
def test_a_row_is_the_same_to_the_bit_in_any_company(device, size, dtype):
    x, weight = random(9, size).to(device, dtype), random(size, seed=1).to(device, dtype)
    alone = torch.cat([rms_norm_triton(x[row : row + 1], weight, EPS) for row in range(9)])
    for rows in companies(9):
        assert same_bits(rms_norm_triton(x[rows], weight, EPS), alone[rows]), f"{rows=}"


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-10, 1e10, 1e15])
def test_any_magnitude(device, scale):
    x, weight = random(3, 100) * scale, random(100, seed=1)
    y = rms_norm_triton(x.to(device), weight.to(device), EPS).cpu()
    assert_as_exact_as_torch(y, rms_norm_reference(x, weight, EPS), exact_norm(x, weight))


def test_half_types_keep_float32_statistics(device):
    x, weight = (random(3, 100) * 2000).half(), random(100, seed=1).half()  # squares overflow float16
    y = rms_norm_triton(x.to(device), weight.to(device), EPS).cpu()
    assert_as_exact_as_torch(y, rms_norm_reference(x, weight, EPS), exact_norm(x, weight))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(device, bad):
    x, weight = random(4, 37).to(device), random(37, seed=1).to(device)
    clean = rms_norm_triton(x, weight, EPS)
    x[2, 36] = bad
    y = rms_norm_triton(x, weight, EPS)
    assert y[2].isnan().any()
    assert same_bits(y[[0, 1, 3]], clean[[0, 1, 3]])


def test_every_leading_shape_is_rows(device):
    x, weight = random(4, 3, 5, 24).to(device), random(24, seed=1).to(device)
    assert same_bits(rms_norm_triton(x, weight, EPS).view(60, 24), rms_norm_triton(x.view(60, 24), weight, EPS))


def test_no_rows_give_no_rows(device):
    x, out = torch.empty(2, 0, 8, device=device)
    assert rms_norm_triton(x, torch.ones(8, device=device), EPS, out) is out


def test_elements_that_lie_apart_are_refused(device):
    weight = torch.ones(8, device=device)
    with pytest.raises(AssertionError, match="side by side"):
        rms_norm_triton(torch.ones(8, 3, device=device).T, weight, EPS)
    with pytest.raises(AssertionError, match="side by side"):
        rms_norm_triton(torch.ones(3, 8, device=device), weight, EPS, torch.ones(8, 3, device=device).T)


@pytest.mark.gpu
def test_nothing_is_allocated(device):
    x, weight, out = (random(3, 640).to(device, torch.bfloat16) for _ in range(3))
    assert_allocates_nothing(lambda: rms_norm(x[:, :512], weight[0, :512], EPS, out[:, :512]))

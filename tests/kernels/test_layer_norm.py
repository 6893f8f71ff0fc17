import pytest
import torch
import torch.nn.functional as F

from holdfast.kernels import norm as module
from holdfast.kernels.norm import layer_norm, layer_norm_reference
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import DTYPES, QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

SIZES = (1, 2, 63, 64, 100, 577, 1000, 5120)
EPS = 1e-5


@pytest.fixture
def on_triton(monkeypatch):
    """The kernel, in the interpreter too."""
    monkeypatch.setattr(module, "can_run", lambda tensor: True)


def inputs(num_rows, size, dtype=torch.float32):
    """Rows far from zero: their mean has to be taken off before anything is squared."""
    return (random(num_rows, size) + 5).to(dtype), random(size, seed=1).to(dtype), random(size, seed=2).to(dtype)


def run(x, weight, bias, device) -> torch.Tensor:
    zones = RedZones(device)
    out = zones.allocate(*x.shape, dtype=x.dtype).fill_(NAN)
    assert layer_norm(amid(x, device), amid(weight, device), amid(bias, device), EPS, out) is out
    zones.check()
    return out.cpu()


def judge(out, x, weight, bias) -> None:
    exact = F.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), EPS)
    in_torch = layer_norm_reference(x, weight, bias, EPS, torch.empty_like(x))
    assert_as_exact_as_torch(out, in_torch, exact, magnitude=max(20.0, float(exact.abs().max())))


@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"D{size}")
def test_as_exact_as_torch_amid_poison(on_triton, device, size, dtype):
    for num_rows in (1, 7):
        operands = inputs(num_rows, size, dtype)
        judge(run(*operands, device), *operands)


@DTYPES
def test_the_result_may_take_the_place_of_its_rows(on_triton, device, dtype):
    x, weight, bias = (tensor.to(device) for tensor in inputs(5, 100, dtype))
    expected = layer_norm(x, weight, bias, EPS, torch.empty_like(x))
    assert layer_norm(x, weight, bias, EPS, x) is x
    assert same_bits(x, expected)


@DTYPES
def test_a_row_is_the_same_to_the_bit_in_any_company(on_triton, device, dtype):
    x, weight, bias = inputs(9, 577, dtype)
    whole = run(x, weight, bias, device)
    for rows in companies(9):
        assert same_bits(run(x[rows], weight, bias, device), whole[rows]), f"{rows=}"


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e6, 1e15])
def test_any_magnitude(on_triton, device, scale):
    x, weight, bias = inputs(3, 100)
    x = random(3, 100) * scale
    judge(run(x, weight, bias, device), x, weight, bias)


def test_a_constant_row_is_the_bias(on_triton, device):
    """No deviation: eps keeps the division finite."""
    _, weight, bias = inputs(1, 64)
    assert torch.equal(run(torch.full((2, 64), 4.0), weight, bias, device), bias.expand(2, 64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(on_triton, device, bad):
    x, weight, bias = inputs(4, 37)
    clean = run(x, weight, bias, device)
    x[2, 36] = bad
    y = run(x, weight, bias, device)
    assert y[2].isnan().all()
    assert same_bits(y[[0, 1, 3]], clean[[0, 1, 3]])


def test_no_rows_change_nothing(on_triton, device):
    x, out = torch.empty(2, 0, 8, device=device)
    weight = torch.ones(8, device=device)
    assert layer_norm(x, weight, weight, EPS, out) is out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_cpu_runs_it_in_torch(dtype):
    x, weight, bias = inputs(7, 100, dtype)
    out = torch.full_like(x, NAN)
    assert layer_norm(x, weight, bias, EPS, out) is out
    assert same_bits(out, F.layer_norm(x, (100,), weight, bias, EPS))
    assert layer_norm(x, weight, bias, EPS, x) is x
    assert same_bits(x, out)


@pytest.mark.gpu
def test_nothing_is_allocated(device):
    x, weight, bias = (tensor.to(device) for tensor in inputs(3, 512, torch.bfloat16))
    assert_allocates_nothing(lambda: layer_norm(x, weight, bias, EPS, x))

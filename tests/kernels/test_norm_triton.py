"""Norms as Triton kernels: as exact as torch amid poison, with and without a sum before, and a row the same in any company."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.kernels import operation
from holdfast.kernels.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)
from kernels.exactness import assert_as_exact_as_torch, companies, island, random, same_bits
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

SIZES = (1, 2, 3, 63, 64, 100, 577, 1000, 5120)
EPS = 1e-5
POISON = float("nan")


def exact_norm(x, weight, eps=EPS):
    return rms_norm_reference(x.double(), weight.double(), eps)


@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"D{size}")
def test_rms_norm_triton_is_as_exact_as_torch_amid_poison(device, guarded, size, dtype):
    weight = random(size, seed=1).to(dtype)
    for num_rows in (1, 7):
        x = random(num_rows, size).to(dtype)
        out = guarded(num_rows, size, dtype=dtype).fill_(POISON)
        y = rms_norm_triton(amid_poison(x, device), amid_poison(weight[None], device)[0], EPS, out)
        assert y is out
        assert_as_exact_as_torch(out.cpu(), rms_norm_reference(x, weight, EPS), exact_norm(x, weight))


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_triton_float32_weights_and_offset_round_once(device, offset, dtype):
    x, delta, weight = random(5, 100).to(dtype), random(5, 100, seed=2).to(dtype), random(100, seed=1)
    summed, on_device = x + delta, [tensor.to(device, copy=True) for tensor in (x, delta, weight)]
    for rows, y in (
        (x, rms_norm_triton(x.to(device), weight.to(device), EPS, offset=offset)),
        (x, rms_norm_reference(x, weight, EPS, offset=offset)),
        (summed, add_rms_norm_triton(*on_device, EPS, on_device[1], offset)),
        (summed, add_rms_norm_reference(x.clone(), delta, weight, EPS, torch.empty_like(x), offset)),
    ):
        exact = exact_norm(rows, weight.double() + offset)
        assert y.dtype == dtype
        # One rounding of a result that float32 holds to a few units.
        assert ((y.cpu().double() - exact).abs() <= exact.abs() * (torch.finfo(dtype).eps / 2 + 1e-6) + 1e-9).all()


@DTYPES
def test_rms_norm_triton_out_holds_the_same_result(device, poison, dtype):
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


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("size", [63, 128, 1000], ids=lambda size: f"D{size}")
def test_rms_norm_triton_is_batch_invariant(device, size, dtype):
    x, weight = random(9, size).to(device, dtype), random(size, seed=1).to(device, dtype)
    alone = torch.cat([rms_norm_triton(x[row : row + 1], weight, EPS) for row in range(9)])
    for rows in companies(9):
        assert same_bits(rms_norm_triton(x[rows], weight, EPS), alone[rows]), f"{rows=}"


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-10, 1e10, 1e15])
def test_rms_norm_triton_is_exact_at_any_magnitude(device, scale):
    x, weight = random(3, 100) * scale, random(100, seed=1)
    y = rms_norm_triton(x.to(device), weight.to(device), EPS).cpu()
    assert_as_exact_as_torch(y, rms_norm_reference(x, weight, EPS), exact_norm(x, weight))


def test_rms_norm_triton_half_types_keep_float32_statistics(device):
    x, weight = (random(3, 100) * 2000).half(), random(100, seed=1).half()  # squares overflow float16
    y = rms_norm_triton(x.to(device), weight.to(device), EPS).cpu()
    assert_as_exact_as_torch(y, rms_norm_reference(x, weight, EPS), exact_norm(x, weight))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rms_norm_triton_nonfinite_stays_in_its_row(device, bad):
    x, weight = random(4, 37).to(device), random(37, seed=1).to(device)
    clean = rms_norm_triton(x, weight, EPS)
    x[2, 36] = bad
    y = rms_norm_triton(x, weight, EPS)
    assert y[2].isnan().any()
    assert same_bits(y[[0, 1, 3]], clean[[0, 1, 3]])


def test_rms_norm_triton_flattens_leading_dimensions(device):
    x, weight = random(4, 3, 5, 24).to(device), random(24, seed=1).to(device)
    assert same_bits(rms_norm_triton(x, weight, EPS).view(60, 24), rms_norm_triton(x.view(60, 24), weight, EPS))


def test_rms_norm_triton_without_rows_is_empty(device):
    x, out = torch.empty(2, 0, 8, device=device)
    assert rms_norm_triton(x, torch.ones(8, device=device), EPS, out) is out


def test_rms_norm_triton_refuses_strided_elements(device):
    weight = torch.ones(8, device=device)
    with pytest.raises(AssertionError, match="side by side"):
        rms_norm_triton(torch.ones(8, 3, device=device).T, weight, EPS)
    with pytest.raises(AssertionError, match="side by side"):
        rms_norm_triton(torch.ones(3, 8, device=device), weight, EPS, torch.ones(8, 3, device=device).T)


@pytest.mark.gpu
def test_rms_norm_triton_allocates_nothing(device):
    x, weight, out = (random(3, 640).to(device, torch.bfloat16) for _ in range(3))
    assert_allocates_nothing(lambda: rms_norm(x[:, :512], weight[0, :512], EPS, out[:, :512]))


SIZES_ADD_RMS_NORM = (1, 3, 64, 100, 577, 1000, 5120)


def inputs(num_rows, size, dtype=torch.float32):
    return random(num_rows, size).to(dtype), random(num_rows, size, seed=1).to(dtype), random(size, seed=2).to(dtype)


@pytest.mark.parametrize("size", SIZES_ADD_RMS_NORM, ids=lambda size: f"D{size}")
@pytest.mark.parametrize("num_rows", [0, 1, 3, 17])
def test_add_rms_norm_in_c_equals_sum_then_norm(native, guarded_host, num_rows, size):
    x, delta, weight = inputs(num_rows, size)
    summed = x + delta
    stream, out = island(x), guarded_host(num_rows, size).fill_(POISON)
    assert add_rms_norm(stream, island(delta), island(weight), EPS, out) is out
    assert same_bits(stream, summed)
    assert same_bits(out, rms_norm(summed, weight, EPS))


@pytest.mark.usefixtures("native")
def test_add_rms_norm_in_c_may_overwrite_delta():
    x, delta, weight = inputs(5, 100)
    expected = rms_norm(x + delta, weight, EPS)
    assert same_bits(add_rms_norm(x, delta, weight, EPS, delta), expected)
    assert same_bits(delta, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_add_rms_norm_half_types_use_torch_on_cpu(dtype):
    x, delta, weight = inputs(5, 100, dtype)
    summed, out = x + delta, torch.empty_like(x)
    add_rms_norm(x, delta, weight, EPS, out)
    assert same_bits(x, summed)
    assert same_bits(out, rms_norm_reference(summed, weight, EPS))


@DTYPES
@pytest.mark.parametrize("size", SIZES_ADD_RMS_NORM, ids=lambda size: f"D{size}")
def test_add_rms_norm_is_as_exact_as_torch_amid_poison(device, guarded, size, dtype):
    for num_rows in (1, 7):
        x, delta, weight = inputs(num_rows, size, dtype)
        stream, out = guarded(num_rows, size, dtype=dtype), guarded(num_rows, size, dtype=dtype).fill_(POISON)
        stream.copy_(x)
        weight_amid_poison = amid_poison(weight[None], device)[0]
        assert add_rms_norm_triton(stream, amid_poison(delta, device), weight_amid_poison, EPS, out) is out
        in_torch = torch.empty_like(x)
        add_rms_norm_reference(x, delta, weight, EPS, in_torch)
        assert same_bits(stream.cpu(), x), "the sum is rounded as torch rounds it"
        assert_as_exact_as_torch(out.cpu(), in_torch, rms_norm_reference(x.double(), weight.double(), EPS))


@DTYPES
def test_add_rms_norm_is_the_norm_of_stored_rows(device, dtype):
    """Not of the sum before it was rounded: a step that starts from the stored stream gives the same."""
    x, delta, weight = (tensor.to(device) for tensor in inputs(7, 100, dtype))
    out = torch.empty_like(x)
    add_rms_norm_triton(x, delta, weight, EPS, out)
    assert same_bits(out, rms_norm_triton(x, weight, EPS))


@DTYPES
def test_add_rms_norm_takes_strided_rows_and_out_as_delta(device, dtype):
    x, delta, weight = (tensor.to(device) for tensor in inputs(5, 100, dtype))
    wide = [torch.full((5, 148), POISON, dtype=dtype, device=device) for _ in range(2)]
    stream, added = (tensor[:, 16:116] for tensor in wide)
    stream.copy_(x)
    added.copy_(delta)
    expected = torch.empty_like(x)
    add_rms_norm_triton(x, delta, weight, EPS, expected)
    add_rms_norm_triton(stream, added, weight, EPS, added)
    assert same_bits(stream, x)
    assert same_bits(added, expected)
    for tensor in wide:
        assert tensor[:, :16].isnan().all()
        assert tensor[:, 116:].isnan().all()


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("size", [63, 128, 1000], ids=lambda size: f"D{size}")
def test_add_rms_norm_is_batch_invariant(device, size, dtype):
    x, delta, weight = (tensor.to(device) for tensor in inputs(9, size, dtype))

    def run(rows):
        stream, out = x[rows], torch.empty_like(x[rows])
        add_rms_norm_triton(stream, delta[rows], weight, EPS, out)
        return stream, out

    alone = [torch.cat(parts) for parts in zip(*(run([row]) for row in range(9)), strict=True)]
    for rows in companies(9):
        for mine, theirs in zip(run(rows), alone, strict=True):
            assert same_bits(mine, theirs[rows]), f"{rows=}"


def test_add_rms_norm_nonfinite_value_stays_in_its_row(device):
    x, delta, weight = (tensor.to(device) for tensor in inputs(4, 37))
    clean, soiled = torch.empty_like(x), torch.empty_like(x)
    delta[2, 36] = POISON
    add_rms_norm_triton(x.clone(), delta.nan_to_num(0), weight, EPS, clean)
    add_rms_norm_triton(x, delta, weight, EPS, soiled)
    assert soiled[2].isnan().all()
    assert same_bits(soiled[[0, 1, 3]], clean[[0, 1, 3]])


def test_add_rms_norm_without_rows_is_empty(device):
    x, delta, out = torch.empty(3, 0, 8, device=device)
    assert add_rms_norm_triton(x, delta, torch.ones(8, device=device), EPS, out) is out


@pytest.mark.gpu
def test_add_rms_norm_allocates_nothing(device):
    x, delta, weight = (tensor.to(device) for tensor in inputs(3, 512, torch.bfloat16))
    assert_allocates_nothing(lambda: add_rms_norm(x, delta, weight, EPS, delta))


SIZES_LAYER_NORM = (1, 2, 63, 64, 100, 577, 1000, 5120)


@pytest.fixture
def on_triton(monkeypatch):
    """The kernel, in the interpreter too."""
    monkeypatch.setattr(operation, "can_run", lambda tensor: True)


def inputs_layer_norm(num_rows, size, dtype=torch.float32):
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
@pytest.mark.parametrize("size", SIZES_LAYER_NORM, ids=lambda size: f"D{size}")
def test_layer_norm_is_as_exact_as_torch_amid_poison(on_triton, device, size, dtype):
    for num_rows in (1, 7):
        operands = inputs_layer_norm(num_rows, size, dtype)
        judge(run(*operands, device), *operands)


@DTYPES
def test_layer_norm_may_run_in_place(on_triton, device, dtype):
    x, weight, bias = (tensor.to(device) for tensor in inputs_layer_norm(5, 100, dtype))
    expected = layer_norm(x, weight, bias, EPS, torch.empty_like(x))
    assert layer_norm(x, weight, bias, EPS, x) is x
    assert same_bits(x, expected)


@DTYPES
def test_layer_norm_is_batch_invariant(on_triton, device, dtype):
    x, weight, bias = inputs_layer_norm(9, 577, dtype)
    whole = run(x, weight, bias, device)
    for rows in companies(9):
        assert same_bits(run(x[rows], weight, bias, device), whole[rows]), f"{rows=}"


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e6, 1e15])
def test_layer_norm_is_exact_at_any_magnitude(on_triton, device, scale):
    x, weight, bias = inputs_layer_norm(3, 100)
    x = random(3, 100) * scale
    judge(run(x, weight, bias, device), x, weight, bias)


def test_layer_norm_constant_row_is_the_bias(on_triton, device):
    """No deviation: eps keeps the division finite."""
    _, weight, bias = inputs_layer_norm(1, 64)
    assert torch.equal(run(torch.full((2, 64), 4.0), weight, bias, device), bias.expand(2, 64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_layer_norm_nonfinite_value_stays_in_its_row(on_triton, device, bad):
    x, weight, bias = inputs_layer_norm(4, 37)
    clean = run(x, weight, bias, device)
    x[2, 36] = bad
    y = run(x, weight, bias, device)
    assert y[2].isnan().all()
    assert same_bits(y[[0, 1, 3]], clean[[0, 1, 3]])


def test_layer_norm_without_rows_is_empty(on_triton, device):
    x, out = torch.empty(2, 0, 8, device=device)
    weight = torch.ones(8, device=device)
    assert layer_norm(x, weight, weight, EPS, out) is out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_layer_norm_on_cpu_uses_torch(dtype):
    x, weight, bias = inputs_layer_norm(7, 100, dtype)
    out = torch.full_like(x, NAN)
    assert layer_norm(x, weight, bias, EPS, out) is out
    assert same_bits(out, F.layer_norm(x, (100,), weight, bias, EPS))
    assert layer_norm(x, weight, bias, EPS, x) is x
    assert same_bits(x, out)


@pytest.mark.gpu
def test_layer_norm_allocates_nothing(device):
    x, weight, bias = (tensor.to(device) for tensor in inputs_layer_norm(3, 512, torch.bfloat16))
    assert_allocates_nothing(lambda: layer_norm(x, weight, bias, EPS, x))

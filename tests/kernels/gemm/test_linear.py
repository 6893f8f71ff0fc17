"""x @ w.T + bias: plain weights in C and in torch to the bit, and where plain and quantized weights go."""

import pytest
import torch

from holdfast.kernels.gemm import linear as module
from holdfast.kernels.gemm.linear import (
    linear,
    linear_float32,
    plain_linear,
    plain_linear_float32,
    plain_linear_reference,
    quantized_linear,
)
from holdfast.quant.weight_schemes import FP8, INT8
from kernels.exactness import assert_as_exact_as_torch, companies, island, num_threads, random, same_bits
from kernels.gemm_references import plain_linear_float32_reference
from kernels.quantized_cases import EVERY_SCHEME, random_weight, room_amid, scheme_id
from kernels.triton_cases import assert_allocates_nothing
from red_zones import RedZones

pytestmark = pytest.mark.usefixtures("native")

SCHEMES = pytest.mark.parametrize("scheme", EVERY_SCHEME, ids=scheme_id)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
CPU = torch.device("cpu")


@DTYPES
def test_linear_plain_weight_uses_plain_linear(guarded_host, dtype):
    x, weight, bias = (random(*shape).to(dtype) for shape in ((5, 37), (70, 37), (70,)))
    for some_bias in (None, bias):
        expected = plain_linear(x, weight, some_bias)
        assert same_bits(linear(x, weight, some_bias), expected)
        out = guarded_host(5, 70, dtype=dtype)
        assert linear(x, weight, some_bias, out) is out
        assert same_bits(out, expected)
        near = plain_linear_reference(x, weight, some_bias)
        torch.testing.assert_close(near, expected, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-2)
    out = guarded_host(5, 70)
    assert linear_float32(x, weight, out) is out
    assert same_bits(out, plain_linear_float32(x, weight, torch.empty(5, 70)))
    wide = plain_linear_float32_reference(x, weight, torch.empty(5, 70))
    torch.testing.assert_close(wide, out, rtol=1e-5, atol=1e-4)


@SCHEMES
@DTYPES
def test_linear_quantized_weight_uses_quantized_linear(guarded_host, scheme, dtype):
    x, weight, bias = random(5, 96).to(dtype), random_weight(70, 96, scheme), random(70, seed=3).to(dtype)
    room = room_amid(RedZones(CPU), 5, weight)
    for some_bias in (None, bias):
        expected = quantized_linear(x, weight, some_bias, torch.empty(5, 70, dtype=dtype), room)
        alone = linear(x, weight, some_bias, quantized=room)
        assert alone.dtype == dtype
        assert same_bits(alone, expected)
        out = guarded_host(5, 70, dtype=dtype)
        assert linear(x, weight, some_bias, out, room) is out
        assert same_bits(out, expected)
    wide = quantized_linear(x, weight, None, torch.empty(5, 70), room)
    out = guarded_host(5, 70)
    assert linear_float32(x, weight, out, room) is out
    assert same_bits(out, wide)


def test_linear_without_buffers_for_codes_fails():
    x = random(3, 64)
    assert linear(x, random_weight(5, 64, INT8), None).shape == (3, 5)
    for call in (lambda weight: linear(x, weight, None), lambda weight: linear_float32(x, weight, torch.empty(3, 5))):
        with pytest.raises(AssertionError, match="needs buffers"):
            call(random_weight(5, 64, FP8))


ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 63, 129)
ODD = (1, 3, 5, 63, 100, 577)


def operands(num_rows, n_size, k_size, with_bias=True, seed=0):
    x = random(num_rows, k_size, seed=seed)
    weight = random(n_size, k_size, seed=seed + 1)
    return x, weight, random(n_size, seed=seed + 2) if with_bias else None


def judge(x, weight, bias):
    exact = plain_linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    magnitude = float((x.abs() @ weight.abs().T).max())
    assert_as_exact_as_torch(plain_linear(x, weight, bias), plain_linear_reference(x, weight, bias), exact, magnitude)


@pytest.mark.each_pair
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("k_size", ODD, ids=lambda size: f"K{size}")
@pytest.mark.parametrize("n_size", ODD, ids=lambda size: f"N{size}")
def test_plain_linear_is_exact_for_odd_shapes(n_size, k_size, with_bias):
    for num_rows in ROWS:
        judge(*operands(num_rows, n_size, k_size, with_bias))


@pytest.mark.parametrize("k_size", [*range(1, 35), 64, 576, 1536], ids=lambda size: f"K{size}")
def test_plain_linear_is_exact_for_every_k_tail(k_size):
    for num_rows in (1, 2, 3, 4, 5):
        judge(*operands(num_rows, 13, k_size))


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e15])
def test_plain_linear_is_exact_at_any_magnitude(scale):
    x, weight, _ = operands(5, 7, 100)
    judge(x * scale, weight, None)


@pytest.mark.each_value
@pytest.mark.parametrize("n_size", [1, 3, 47, 48, 49, 100], ids=lambda size: f"N{size}")
@pytest.mark.parametrize("k_size", [1, 5, 64, 577], ids=lambda size: f"K{size}")
def test_plain_linear_is_batch_invariant(n_size, k_size):
    x, weight, bias = operands(129, n_size, k_size)
    alone = torch.cat([plain_linear(x[row : row + 1], weight, bias) for row in range(129)])
    for threads in (1, 2):
        with num_threads(threads):
            for rows in companies(129):
                assert same_bits(plain_linear(x[rows], weight, bias), alone[rows]), f"{threads=} {rows=}"


def test_plain_linear_columns_do_not_depend_on_each_other():
    x, weight, bias = operands(6, 100, 77)
    whole = plain_linear(x, weight, bias)
    for low, high in ((0, 1), (0, 3), (5, 9), (47, 50), (96, 100), (1, 100)):
        part = plain_linear(x, weight[low:high].contiguous(), bias[low:high].contiguous())
        assert same_bits(part, whole[:, low:high].contiguous()), f"{low=} {high=}"


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 65], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize(("n_size", "k_size"), [(1, 1), (3, 5), (7, 63), (50, 100)])
def test_native_linear_stays_within_its_buffers(native, guarded_host, num_rows, n_size, k_size):
    x, weight, bias = (island(values) for values in operands(num_rows, n_size, k_size))
    y = guarded_host(num_rows, n_size)
    native.holdfast_linear(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), y.data_ptr(), num_rows, n_size, k_size)
    assert same_bits(y, plain_linear(x, weight, bias))
    assert y.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("num_rows", [2, 4, 7])
def test_plain_linear_nonfinite_input_stays_in_its_row(bad, num_rows):
    x, weight, bias = operands(num_rows, 11, 37)
    clean = plain_linear(x, weight, bias)
    for bad_row in range(num_rows):
        hurt = x.clone()
        hurt[bad_row, 36] = bad
        y = plain_linear(hurt, weight, bias)
        assert not y[bad_row].isfinite().any()
        others = [row for row in range(num_rows) if row != bad_row]
        assert same_bits(y[others], clean[others])


def test_plain_linear_nonfinite_weight_stays_in_its_column():
    x, weight, bias = operands(5, 9, 20)
    clean = plain_linear(x, weight, bias)
    weight[4, 19] = float("nan")
    y = plain_linear(x, weight, bias)
    others = [column for column in range(9) if column != 4]
    assert y[:, 4].isnan().all()
    assert same_bits(y[:, others], clean[:, others])


def test_plain_linear_without_rows_is_empty():
    assert plain_linear(torch.empty(0, 8), torch.ones(3, 8), None).shape == (0, 3)


def test_plain_linear_accepts_strided_rows():
    x, weight, bias = operands(10, 6, 8)
    torch.testing.assert_close(plain_linear(x[::2], weight, bias), plain_linear(x[::2].contiguous(), weight, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_linear_half_types_use_torch(dtype):
    x, weight, bias = (values.to(dtype) for values in operands(3, 4, 8))
    assert same_bits(plain_linear(x, weight, bias), plain_linear_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "n_size", "k_size"), [(1, 5, 3), (7, 100, 64), (3, 3000, 700)])
def test_plain_linear_rounds_half_precision_once(dtype, num_rows, n_size, k_size):
    x, weight, bias = (
        random(*shape, seed=n_size).to(dtype) for shape in ((num_rows, k_size), (n_size, k_size), (n_size,))
    )
    exact = x.double() @ weight.double().T + bias.double()
    got = plain_linear(x, weight, bias)
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps * exact.abs().clamp_min(0.1)
    assert ((got.double() - exact).abs() <= step).all()
    assert torch.equal(plain_linear(x[:1], weight, bias), got[:1])


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [plain_linear, plain_linear_reference], ids=lambda function: function.__name__)
def test_plain_linear_out_holds_the_same_result(guarded_host, function, dtype, with_bias):
    x, weight, bias = (None if values is None else values.to(dtype) for values in operands(5, 70, 37, with_bias))
    alone = function(x, weight, bias)
    out = guarded_host(5, 70, dtype=dtype).fill_(float("nan"))
    assert function(x, weight, bias, out) is out
    torch.testing.assert_close(out, alone, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    if function is plain_linear:
        assert same_bits(out, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_linear_accepts_strided_out(dtype):
    x, weight, bias = (values.to(dtype) for values in operands(5, 70, 37))
    wide = torch.full((5, 90), float("nan"), dtype=dtype)
    out = wide[:, 10:80]
    assert plain_linear(x, weight, bias, out) is out
    torch.testing.assert_close(out, plain_linear(x, weight, bias))
    assert wide[:, :10].isnan().all()
    assert wide[:, 80:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "n_size", "k_size"), [(1, 5, 3), (7, 100, 64), (3, 300, 700), (0, 4, 8)])
def test_plain_linear_float32_keeps_full_precision(guarded_host, dtype, num_rows, n_size, k_size):
    x, weight = (values.to(dtype) for values in operands(num_rows, n_size, k_size, with_bias=False)[:2])
    out = guarded_host(num_rows, n_size).fill_(float("nan"))
    assert plain_linear_float32(x, weight, out) is out
    in_torch = plain_linear_float32_reference(x, weight, torch.empty(num_rows, n_size))
    exact = x.double() @ weight.double().T
    magnitude = float((x.double().abs() @ weight.double().abs().T).max()) if num_rows else 1.0
    assert_as_exact_as_torch(out, in_torch, exact, magnitude)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_plain_linear_float32_is_batch_invariant(dtype):
    x, weight = (values.to(dtype) for values in operands(17, 50, 100, with_bias=False)[:2])
    whole = plain_linear_float32(x, weight, torch.empty(17, 50))
    for rows in companies(17):
        assert same_bits(plain_linear_float32(x[rows], weight, torch.empty(len(rows), 50)), whole[rows]), f"{rows=}"


def test_plain_linear_widens_a_wide_weight_in_parts(monkeypatch):
    """Wherever the parts meet, every column is there once."""
    x, weight, bias = (values.half() for values in operands(3, 50, 64))
    expected = plain_linear(x, weight, bias), plain_linear_float32(x, weight, torch.empty(3, 50))
    for elements in (1, 64, 65, 7 * 64, 49 * 64, 50 * 64):
        monkeypatch.setattr(module, "WIDENED_ELEMENTS", elements)
        assert same_bits(plain_linear(x, weight, bias), expected[0]), f"{elements=}"
        assert same_bits(plain_linear_float32(x, weight, torch.empty(3, 50)), expected[1]), f"{elements=}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 33])
def test_plain_linear_float32_on_gpu_allocates_nothing(device, dtype, num_rows):
    x, weight = (values.to(device, dtype) for values in operands(num_rows, 1000, 512, with_bias=False)[:2])
    out = torch.full((num_rows, 1000), float("nan"), device=device)
    assert plain_linear_float32(x, weight, out) is out
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-3)
    half = torch.empty(num_rows, 1000, dtype=dtype, device=device)
    assert_allocates_nothing(lambda: (plain_linear_float32(x, weight, out), plain_linear(x, weight, None, half)))

"""Quantized weights on a CPU: C gives the product of what codes stand for, to the bit, on any threads and in any company."""

from dataclasses import replace

import pytest
import torch

from holdfast.kernels.gemm import linear as module
from holdfast.kernels.gemm.linear import native_quantized_linear, native_quantized_linear_reference, plain_linear
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, MXFP4, WeightScheme
from kernels.exactness import companies, island, num_threads, random, same_bits
from kernels.quantized_cases import EVERY_SCHEME, quantized, random_weight, scheme_id, weight_amid
from red_zones import RedZones

pytestmark = pytest.mark.usefixtures("native")

CPU = torch.device("cpu")
NAN = float("nan")
ODD_BLOCKS = replace(FP8_BLOCK, block_rows=3, block_columns=24)
"""Blocks that neither lines of codes nor rows of a tile end with."""
SCHEMES = pytest.mark.parametrize(
    "scheme",
    [*EVERY_SCHEME, ODD_BLOCKS],
    ids=lambda scheme: "odd blocks" if scheme is ODD_BLOCKS else scheme_id(scheme),
)
CODES = {"float8_e4m3fn": FP8, "int8": INT8, "uint8": MXFP4}


def width(size_k: int, scheme: WeightScheme) -> int:
    """As many columns, or a few more where codes come in whole blocks."""
    return -(-size_k // 32) * 32 if scheme is MXFP4 else size_k


def run(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Amid poison, and between red zones."""
    zones = RedZones(CPU)
    out = zones.allocate(len(x), weight.shape[0]).fill_(NAN)
    operands = island(x), weight_amid(weight, CPU), None if bias is None else island(bias)
    assert native_quantized_linear(*operands, out) is out
    zones.check()
    return out


def product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What the kernel for numbers makes of the numbers that codes stand for."""
    return plain_linear(x, dequantize(weight), bias)


def coded_bytes(codes: torch.Tensor, scheme: WeightScheme, scales: torch.Tensor) -> QuantizedWeight:
    """Bytes [N, B] as they are, under scales for all rows or blocks."""
    dtype = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8, "uint8": torch.uint8}[scheme.code_dtype]
    shape = (codes.shape[0], codes.shape[1] * scheme.codes_per_byte)
    weight = QuantizedWeight(scheme, shape, codes.view(dtype), scales.expand(scheme.scale_shape(shape)).contiguous())
    weight.check()
    return weight


@pytest.mark.each_pair
@SCHEMES
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 65], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("size_k", [1, 15, 16, 37, 160, 576, 1024, 1067], ids=lambda size: f"K{size}")
def test_native_quantized_linear_equals_dequantized_product(scheme, num_rows, size_k):
    size_k = width(size_k, scheme)
    for size_n in (1, 3, 8, 50, 131):
        x, weight = random(num_rows, size_k), random_weight(size_n, size_k, scheme)
        bias = random(size_n, seed=3)
        assert same_bits(run(x, weight, bias), product(x, weight, bias)), f"{size_n=}"
        assert same_bits(run(x, weight), product(x, weight)), f"{size_n=} without bias"


@pytest.mark.each_value
@SCHEMES
@pytest.mark.parametrize(("size_n", "size_k"), [(1, 1), (7, 63), (50, 577), (100, 1100)])
def test_native_quantized_linear_is_batch_invariant(scheme, size_n, size_k):
    size_k = width(size_k, scheme)
    x, weight, bias = random(129, size_k), random_weight(size_n, size_k, scheme), random(size_n, seed=3)
    whole = product(x, weight, bias)
    for threads in (1, 2, 3):
        with num_threads(threads):
            for rows in companies(129):
                out = torch.full((len(rows), size_n), NAN)
                assert same_bits(native_quantized_linear(x[rows], weight, bias, out), whole[rows]), (
                    f"{threads=} {rows=}"
                )


@pytest.mark.parametrize("num_rows", [1, 2], ids=["one row", "two rows"])
@pytest.mark.parametrize("scheme", CODES.values(), ids=scheme_id)
def test_native_quantized_linear_decodes_every_code_anywhere(scheme, num_rows):
    """A row of x that is one in one place and zero elsewhere picks a column of the weight."""
    codes = torch.arange(256, dtype=torch.uint8)
    if scheme is FP8:
        codes = codes.masked_fill(codes % 128 == 127, 0x2A)
    rows = torch.stack([codes.roll(shift) for shift in range(17)])
    scale = torch.tensor(129, dtype=torch.uint8) if scheme is MXFP4 else torch.tensor(0.3)
    weight = coded_bytes(rows, scheme, scale)
    numbers, size_k = dequantize(weight), weight.shape[1]
    picks = torch.eye(size_k)
    for start in range(0, size_k, num_rows):
        out = torch.full((num_rows, 17), NAN)
        native_quantized_linear(picks[start : start + num_rows], weight, None, out)
        assert torch.equal(out, numbers[:, start : start + num_rows].T), f"{start=}"


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("scheme", [FP8, FP8_BLOCK, MXFP4, INT8], ids=scheme_id)
def test_native_quantized_linear_nonfinite_stays_in_its_row(scheme, num_rows):
    """In its row of x; in its row of the weight for a code or a scale that is no number."""
    x, weight = random(num_rows, 160), random_weight(133, 160, scheme)
    clean = run(x, weight)
    for bad in (NAN, float("inf")):
        hurt = x.clone()
        hurt[0, 159] = bad
        y = run(hurt, weight)
        assert not y[0].isfinite().any()
        assert same_bits(y[1:], clean[1:])
    for column in (0, 63, 159):
        codes, scales = weight.codes.clone(), weight.scales.clone()
        if scheme.code_dtype == "float8_e4m3fn":
            codes.view(torch.uint8)[130, column] = 0x7F if column else 0xFF
        elif scheme is MXFP4:
            scales[130, column // 32] = 255
        else:
            scales[130] = NAN
        y = run(x, replace(weight, codes=codes, scales=scales))
        assert y[:, 130].isnan().all()
        others = [row for row in range(133) if row != 130]
        assert same_bits(y[:, others], clean[:, others])


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-30, 255.9, 256.0, 1e4, 1e36, 3e38, -0.5, float("inf")])
@pytest.mark.parametrize("scheme", [FP8, INT8], ids=scheme_id)
def test_native_quantized_linear_takes_any_scale(scheme, scale, num_rows):
    """Rows with scales far apart, which are not all turned back in one way, and numbers below the normal ones."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 127, (9, 100), generator=generator, dtype=torch.uint8)
    scales = torch.full((9,), 0.01)
    scales[[1, 6, 8]] = scale
    weight = coded_bytes(codes, scheme, scales)
    x = random(num_rows, 100).abs()
    y, expected = run(x, weight), product(x, weight)
    assert torch.equal(y.isnan(), expected.isnan())
    assert same_bits(y.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("num_rows", [1, 3])
def test_native_quantized_linear_takes_every_mxfp4_exponent(num_rows):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (255, 32), generator=generator, dtype=torch.uint8)
    exponents, x = torch.arange(255, dtype=torch.uint8), random(num_rows, 64)
    for others in (exponents, exponents.flip(0)):
        weight = coded_bytes(codes, MXFP4, torch.stack([exponents, others], dim=1))
        y, expected = run(x, weight), product(x, weight)
        assert torch.equal(y.isnan(), expected.isnan())
        assert same_bits(y.nan_to_num(), expected.nan_to_num())
        assert expected[:, 40:210].isfinite().all(), "nothing was compared"


@pytest.mark.parametrize("num_rows", [1, 3])
def test_native_quantized_linear_nan_exponent_makes_its_row_nan(num_rows):
    """One block among others; were it an infinity, ones would show it as such."""
    scales = torch.full((6, 3), 127, dtype=torch.uint8)
    scales[4, 1] = 255
    y = run(torch.ones(num_rows, 96), coded_bytes(torch.full((6, 48), 0x22, dtype=torch.uint8), MXFP4, scales))
    assert y[:, 4].isnan().all()
    assert (y[:, [0, 1, 2, 3, 5]] == 96.0).all()


def test_native_quantized_linear_int8_takes_code_minus_128():
    weight = coded_bytes(torch.full((5, 20), 0x80, dtype=torch.uint8), INT8, torch.tensor(0.5))
    assert torch.equal(run(torch.ones(1, 20), weight), torch.full((1, 5), -128 * 0.5 * 20))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_native_quantized_linear_keeps_small_codes_under_flush(num_rows):
    """A thread that takes subnormal numbers for zeros."""
    weight = coded_bytes(torch.arange(8, dtype=torch.uint8).repeat(5, 4), FP8, torch.tensor(0.25))
    x = torch.ones(num_rows, 32)
    with num_threads(1):
        if not torch.set_flush_denormal(True):
            pytest.skip("this machine has no such mode")
        try:
            y = native_quantized_linear(x, weight, None, torch.empty(num_rows, 5))
        finally:
            torch.set_flush_denormal(False)
    assert torch.equal(y, torch.full((num_rows, 5), 4 * 28 * 2.0**-9 * 0.25))


@SCHEMES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_native_quantized_linear_rounds_other_dtypes_once(monkeypatch, scheme, dtype):
    x, weight, bias = random(7, 96), random_weight(33, 96, scheme), random(33, seed=3).to(dtype)
    wide = product(x, weight, bias.float())
    for elements in (1, 33, 100, 2**20):
        monkeypatch.setattr(module, "WIDE_RESULTS", elements)
        zones = RedZones(CPU)
        out = zones.allocate(7, 33, dtype=dtype).fill_(NAN)
        assert native_quantized_linear(x, weight, bias, out) is out
        zones.check()
        assert same_bits(out, wide.to(dtype)), f"{elements=}"


def test_native_quantized_linear_accepts_strided_operands():
    x, weight = random(10, 96), random_weight(33, 96, FP8)
    wide = torch.full((5, 50), NAN)
    out = wide[:, 8:41]
    assert native_quantized_linear(x[::2].contiguous(), weight, None, out) is out
    assert same_bits(out, product(x[::2].contiguous(), weight))
    assert wide[:, :8].isnan().all()
    assert wide[:, 41:].isnan().all()
    torch.testing.assert_close(native_quantized_linear(x[::2], weight, None, torch.empty(5, 33)), out)


@SCHEMES
def test_quantized_linear_reference_dequantizes_in_parts(monkeypatch, scheme):
    """Wherever the parts meet, in the midst of a block of scales too, every column is there once."""
    size_k = width(160, scheme)
    x, weight, bias = random(3, size_k), random_weight(150, size_k, scheme), random(150, seed=3)
    expected = native_quantized_linear(x, weight, bias, torch.empty(3, 150))
    for rows in (0, 1, 7, 130, 149, 150):
        monkeypatch.setattr(module, "WIDENED_ELEMENTS", rows * size_k + 1)
        assert same_bits(native_quantized_linear_reference(x, weight, bias, torch.empty(3, 150)), expected), f"{rows=}"


def test_native_quantized_linear_never_dequantizes_in_torch(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was turned back in plain torch")

    x, weight = random(3, 96), random_weight(33, 96, INT8)
    expected = product(x, weight)
    monkeypatch.setattr(module, "dequantize", refuse)
    assert same_bits(run(x, weight), expected)
    with pytest.raises(AssertionError, match="in plain torch"):
        native_quantized_linear(x[:, :].double().float().T.contiguous().T, weight, None, torch.empty(3, 33))


def test_native_quantized_linear_without_compiler_uses_torch(monkeypatch):
    x, weight, bias = random(3, 96), random_weight(33, 96, MXFP4), random(33, seed=3)
    expected = run(x, weight, bias)
    monkeypatch.setattr("holdfast.kernels.native_library.native_library", lambda: None)
    torch.testing.assert_close(native_quantized_linear(x, weight, bias, torch.empty(3, 33)), expected)


@SCHEMES
def test_native_quantized_linear_takes_one_of_stacked_experts(scheme):
    """Codes and scales of one of some stacked weights are planes of a weight as they lie."""
    scheme = scheme if scheme.block_rows == 1 else replace(scheme, block_rows=8)
    weights = [random_weight(24, 96, scheme, seed=seed) for seed in (1, 2, 3)]
    codes, scales = (torch.stack([getattr(weight, plane) for weight in weights]) for plane in ("codes", "scales"))
    stack = QuantizedWeight(scheme, (3, 24, 96), codes, scales)
    stack.check()
    x = random(4, 96)
    for index, weight in enumerate(weights):
        one = replace(stack, shape=(24, 96), codes=stack.codes[index], scales=stack.scales[index])
        assert same_bits(native_quantized_linear(x, one, None, torch.empty(4, 24)), product(x, weight))


@SCHEMES
def test_native_quantized_linear_without_rows_is_empty(scheme):
    assert run(torch.empty(0, 96), random_weight(33, 96, scheme)).shape == (0, 33)
    assert (
        native_quantized_linear(
            torch.empty(0, 96), random_weight(3, 96, scheme), None, torch.empty(0, 3).half()
        ).numel()
        == 0
    )


def test_native_quantized_linear_without_columns_is_the_bias():
    weight = coded_bytes(torch.empty(5, 0, dtype=torch.uint8), INT8, torch.tensor(1.0))
    bias = random(5)
    for num_rows in (1, 2):
        assert torch.equal(run(torch.empty(num_rows, 0), weight, bias), bias.repeat(num_rows, 1))


def test_native_quantized_linear_refuses_mismatched_sizes():
    weight = quantized(random(33, 96), FP8)
    x, out = random(3, 96), torch.empty(3, 33)
    with pytest.raises(AssertionError, match=r"x_TK\.shape"):
        native_quantized_linear(x[:, :95], weight, None, out)
    with pytest.raises(AssertionError, match=r"out_TN\.shape"):
        native_quantized_linear(x, weight, None, out[:, 1:])
    with pytest.raises(AssertionError, match=r"bias_N\.shape"):
        native_quantized_linear(x, weight, random(32), out)
    with pytest.raises(AssertionError, match="codes of a weight"):
        native_quantized_linear(x, replace(weight, codes=weight.codes[1:]), None, out)
    with pytest.raises(AssertionError, match=r"scales\.shape"):
        native_quantized_linear(x, replace(weight, scales=weight.scales[1:]), None, out)
    with pytest.raises(AssertionError, match="with strides"):
        native_quantized_linear(x, replace(weight, codes=weight.codes.T.contiguous().T), None, out)

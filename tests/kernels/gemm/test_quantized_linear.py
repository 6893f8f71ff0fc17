"""Products with quantized weights, whichever kernel takes them: of what codes stand for, in room that is given."""

import pytest
import torch

from holdfast.kernels.gemm import packed_gemv
from holdfast.kernels.gemm.linear import (
    dequantize_rows,
    quantized_linear,
    quantized_view,
    room_for_codes,
    takes_scaled_product,
)
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, quantize_rows, quantize_rows_reference
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.gemm_references import quantized_linear_reference
from kernels.quantized_cases import (
    EVERY_SCHEME,
    HALF_SLACK,
    codable_rows,
    exact_rows,
    exact_weight,
    quantized,
    random_weight,
    room_amid,
    scheme_id,
    slack,
    weight_amid,
    weight_on,
)
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import assert_allocates_nothing
from red_zones import RedZones

SCHEMES = pytest.mark.parametrize("scheme", EVERY_SCHEME, ids=scheme_id)
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
CPU = torch.device("cpu")


def run(function, x_TK, weight, bias_N, device=CPU, out_dtype=torch.float32) -> torch.Tensor:
    """Amid poison: results and room for codes NaN before and between red zones."""
    zones = RedZones(device)
    out = zones.allocate(len(x_TK), weight.shape[0], dtype=out_dtype).fill_(NAN)
    bias = None if bias_N is None else amid(bias_N, device)
    operands = amid(x_TK, device), weight_amid(weight, device), bias, out
    assert function(*operands, room_amid(zones, len(x_TK), weight)) is out
    zones.check()
    return out.cpu()


def rows_as_taken(x_TK, weight) -> torch.Tensor:
    """Rows that went through codes and back where the scheme wants codes."""
    room = room_amid(RedZones(CPU), len(x_TK), weight)
    return x_TK.float() if room is None else dequantize_rows(quantize_rows_reference(x_TK, room))


@SCHEMES
@pytest.mark.parametrize("num_rows", [1, 5, 33], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("function", [quantized_linear, quantized_linear_reference], ids=["chosen", "reference"])
def test_quantized_linear_on_cpu_is_the_dequantized_product(function, scheme, num_rows):
    x, weight, bias = random(num_rows, 160), random_weight(67, 160, scheme), random(67, seed=3)
    y = run(function, x, weight, bias)
    expected = rows_as_taken(x, weight) @ dequantize(weight).T + bias
    assert (y - expected).abs().max() <= 1e-6 * expected.abs().max()


@SCHEMES
def test_quantized_linear_multiplies_integers_exactly(scheme):
    """Numbers that are their own codes, under scales that are one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (5, 256), generator=generator).float()
    values = torch.randint(-6, 7, (140, 256), generator=generator).float()
    x[:, ::128] = 448.0
    values[:, ::32] = {"int8": 127.0, "mxfp4": 6.0}.get(scheme.name, 448.0)
    if scheme is MXFP4:
        values[values.abs() == 5.0] = 3.0
    weight = quantized(values, scheme)
    assert torch.equal(dequantize(weight), values), "what is tried are no codes"
    assert torch.equal(run(quantized_linear, x, weight, None), x @ values.T)


@SCHEMES
def test_quantized_linear_rounds_half_precision_once(scheme):
    x, weight, bias = codable_rows(3, 96), random_weight(33, 96, scheme), random(33, seed=3)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = x.to(dtype)
        exact = exact_rows(rounded, scheme) @ exact_weight(weight).T + bias.to(dtype).double()
        y = run(quantized_linear, rounded, weight, bias.to(dtype), out_dtype=dtype)
        assert ((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs().clamp_min(0.1)).all()
        wide = run(quantized_linear, rounded, weight, bias.to(dtype))
        assert (wide.double() - exact).abs().max() <= 1e-5


@SCHEMES
@pytest.mark.usefixtures("native")
def test_quantized_linear_is_batch_invariant(scheme):
    x, weight = random(17, 160), random_weight(35, 160, scheme)
    whole = run(quantized_linear, x, weight, None)
    for rows in companies(17):
        assert same_bits(run(quantized_linear, x[rows], weight, None), whole[rows]), f"{rows=}"


@SCHEMES
@pytest.mark.usefixtures("native")
def test_quantized_linear_on_cpu_equals_reference_to_the_bit(scheme):
    """Numbers are added in one order, whether C turns codes back or torch does."""
    x, weight, bias = random(3, 160), random_weight(150, 160, scheme), random(150, seed=3)
    for num_rows in (1, 3):
        expected = run(quantized_linear_reference, x[:num_rows], weight, bias)
        assert same_bits(run(quantized_linear, x[:num_rows], weight, bias), expected), f"{num_rows=}"


@SCHEMES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_quantized_linear_nonfinite_input_stays_in_its_row(scheme, bad):
    x, weight = random(4, 160), random_weight(33, 160, scheme)
    clean = run(quantized_linear, x, weight, None)
    x[1, 100] = bad
    y = run(quantized_linear, x, weight, None)
    assert not y[1].isfinite().any()
    assert same_bits(y[[0, 2, 3]], clean[[0, 2, 3]])


@SCHEMES
def test_quantized_linear_zero_row_is_the_bias(scheme):
    weight, bias = random_weight(33, 96, scheme), random(33, seed=3)
    assert same_bits(run(quantized_linear, torch.zeros(2, 96), weight, bias), bias.repeat(2, 1))


@SCHEMES
def test_quantized_linear_without_rows_is_empty(scheme):
    assert run(quantized_linear, torch.empty(0, 96), random_weight(33, 96, scheme), None).shape == (0, 33)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8])
@pytest.mark.parametrize("as_vectors", [True, False], ids=["vectors", "matrices"])
def test_quantized_view_covers_the_rows_only(num_rows, as_vectors):
    room = QuantizedRows(torch.zeros(8 * 300, dtype=torch.float8_e4m3fn), torch.zeros(8 * 3))
    if not as_vectors:
        room = QuantizedRows(room.codes_TK.view(8, 300), room.scales_TB.view(8, 3))
    for scheme, size_k, num_blocks in ((FP8, 300, 1), (FP8_TENSOR, 77, 1), (FP8_BLOCK, 300, 3), (FP8_BLOCK, 128, 1)):
        view = quantized_view(room, random_weight(5, size_k, scheme), num_rows)
        assert view.codes_TK.shape == (num_rows, size_k)
        assert view.scales_TB.shape == (num_rows, num_blocks)
        assert view.codes_TK.is_contiguous()
        assert view.scales_TB.is_contiguous()
        assert view.codes_TK.untyped_storage().data_ptr() == room.codes_TK.untyped_storage().data_ptr()
        assert view.codes_TK.storage_offset() == view.scales_TB.storage_offset() == 0


def test_quantized_linear_writes_codes_of_its_rows_only():
    for scheme, num_blocks in ((FP8, 1), (FP8_BLOCK, 2)):
        codes = torch.full((5 * 200,), 0x55, dtype=torch.uint8)
        scales = torch.full((5 * 2,), -7.0)
        weight = random_weight(9, 200, scheme)
        x, out = random(3, 200), torch.empty(3, 9)
        quantized_linear(x, weight, None, out, QuantizedRows(codes.view(torch.float8_e4m3fn), scales))
        assert (codes[3 * 200 :] == 0x55).all()
        assert (scales[3 * num_blocks :] == -7.0).all()
        assert (scales[: 3 * num_blocks] > 0).all()


def test_quantized_linear_takes_rows_that_are_already_codes():
    """The product is of the codes that lie in the room, whatever the rows are."""
    x, other = random(3, 200), random(3, 200, seed=9)
    for scheme in (FP8, FP8_TENSOR, FP8_BLOCK):
        weight = random_weight(9, 200, scheme)
        room = QuantizedRows(torch.zeros(600, dtype=torch.float8_e4m3fn), torch.zeros(6))
        for function in (quantized_linear, quantized_linear_reference):
            expected = function(x, weight, None, torch.empty(3, 9), room)
            assert same_bits(function(other, weight, None, torch.empty(3, 9), room, is_coded=True), expected)
            assert not same_bits(function(other, weight, None, torch.empty(3, 9), room), expected)


def test_room_for_codes_has_a_scale_for_each_row_or_block():
    room = QuantizedRows(torch.zeros(600, dtype=torch.float8_e4m3fn), torch.zeros(6))
    for scheme, num_scales in ((FP8, 1), (FP8_TENSOR, 1), (FP8_BLOCK, 2)):
        found = room_for_codes(room, random_weight(9, 200, scheme), 3)
        assert (found.codes_TK.shape, found.scales_TB.shape) == ((3, 200), (3, num_scales))
    for other in (random(9, 200), random_weight(9, 200, INT8)):
        assert room_for_codes(room, other, 3) is None


def test_quantized_linear_needs_buffers_only_for_codes():
    for scheme in (INT8, MXFP4):
        assert quantized_view(None, random_weight(5, 64, scheme), 3) is None
        assert quantized_linear(random(3, 64), random_weight(5, 64, scheme), None, torch.empty(3, 5)).isfinite().all()
    for function in (quantized_linear, quantized_linear_reference):
        with pytest.raises(AssertionError, match="fp8 needs buffers for the codes of 3 rows"):
            function(random(3, 64), random_weight(5, 64, FP8), None, torch.empty(3, 5))


@pytest.mark.parametrize("size_k", [1, 100, 128, 129, 300])
def test_dequantize_rows_is_near_the_quantized_rows(size_k):
    x = random(4, size_k) * torch.tensor([[1.0], [1e-2], [1e6], [0.0]])
    for num_blocks in {1, -(-size_k // 128)}:
        rows_fp8 = QuantizedRows(torch.empty(4, size_k, dtype=torch.float8_e4m3fn), torch.empty(4, num_blocks))
        back = dequantize_rows(quantize_rows(x, rows_fp8))
        assert back.dtype == torch.float32
        assert back.is_contiguous()
        amax = x.abs().amax(-1, keepdim=True)
        assert ((back - x).abs() <= x.abs() / 16 + amax * 2.0**-18).all()


@pytest.mark.parametrize(
    ("scheme", "shape", "dtype", "chosen"),
    [
        (FP8, (48, 64), torch.bfloat16, True),
        (FP8_TENSOR, (16, 16), torch.bfloat16, True),
        (FP8, (48, 64), torch.float32, False),
        (FP8, (48, 64), torch.float16, False),
        (FP8, (40, 64), torch.bfloat16, False),
        (FP8, (48, 72), torch.bfloat16, False),
        (FP8_BLOCK, (128, 128), torch.bfloat16, False),
    ],
)
def test_takes_scaled_product_chooses_by_scheme_shape_and_dtype(scheme, shape, dtype, chosen):
    out = torch.empty(3, shape[0], dtype=dtype)
    assert takes_scaled_product(random_weight(*shape, scheme), out) == chosen


@pytest.mark.gpu
@SCHEMES
@HALF
@pytest.mark.parametrize("num_rows", [1, 16, 17, 130], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize(("size_n", "size_k"), [(272, 512), (101, 224)], ids=["whole", "odd"])
def test_quantized_linear_on_gpu_is_as_exact_as_torch(device, scheme, dtype, num_rows, size_n, size_k):
    """Whichever kernel multiplies; with float32 out too, as logits are."""
    rows = codable_rows(num_rows, size_k, block_columns=scheme.block_columns if scheme.quantizes_activations else 0)
    x, weight, bias = rows.to(dtype), random_weight(size_n, size_k, scheme), random(size_n, seed=3).to(dtype)
    exact = exact_rows(x, scheme) @ exact_weight(weight).T
    adds_in_half = packed_gemv.takes(weight, num_rows) and dtype == torch.bfloat16
    magnitude = 10.0 * max(slack(device, scheme), HALF_SLACK if adds_in_half else 1.0)
    for out_dtype, some_bias in ((dtype, bias), (dtype, None), (torch.float32, None)):
        y = run(quantized_linear, x, weight, some_bias, device, out_dtype)
        in_torch = run(quantized_linear_reference, x, weight, some_bias, CPU, out_dtype)
        wanted = exact if some_bias is None else exact + bias.double()
        assert_as_exact_as_torch(y, in_torch, wanted, magnitude=magnitude)


@pytest.mark.gpu
@SCHEMES
@pytest.mark.parametrize("num_rows", [3, 130], ids=lambda count: f"{count} rows")
def test_quantized_linear_on_gpu_nonfinite_stays_in_its_row(device, scheme, num_rows):
    x, weight = codable_rows(num_rows, 256).bfloat16(), random_weight(64, 256, scheme)
    clean = run(quantized_linear, x, weight, None, device, torch.bfloat16)
    x[1, 100] = NAN
    y = run(quantized_linear, x, weight, None, device, torch.bfloat16)
    assert y[1].isnan().all()
    others = [row for row in range(num_rows) if row != 1]
    assert same_bits(y[others], clean[others])


@pytest.mark.gpu
@SCHEMES
@pytest.mark.parametrize("num_rows", [1, 33], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_quantized_linear_on_gpu_allocates_nothing(device, scheme, num_rows, with_bias):
    x, weight = random(num_rows, 512).to(device, torch.bfloat16), weight_on(random_weight(256, 512, scheme), device)
    bias = random(256).to(device, torch.bfloat16) if with_bias else None
    half, wide = (torch.empty(num_rows, 256, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    room = room_amid(RedZones(device), num_rows, weight)
    assert_allocates_nothing(
        lambda: (quantized_linear(x, weight, bias, half, room), quantized_linear(x, weight, None, wide, room))
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("size_n", "size_k"), [(32768, 1024), (4096, 8192), (4096, 2048)], ids=str)
def test_shares_with_the_form_of_the_whole_have_its_bits(device, size_n, size_k):
    """What exact ranks of DeepSeek-V4 rely on: queries, the output projection, the shared expert, of 1, 2 and 4 ranks."""
    whole = weight_on(random_weight(size_n, size_k, FP8_BLOCK), device)
    for num_rows in (1, 2, 16, 17, 64, 130):
        x = codable_rows(num_rows, size_k, block_columns=128).to(device, torch.bfloat16)

        def multiply(weight: QuantizedWeight, x: torch.Tensor = x) -> torch.Tensor:
            out = torch.empty(len(x), weight.shape[0], dtype=torch.bfloat16, device=device)
            return quantized_linear(x, weight, None, out, room_amid(RedZones(device), len(x), weight))

        y = multiply(whole)
        for num_ranks in (2, 4):
            rows = slice(size_n - size_n // num_ranks, size_n)
            codes, scales = whole.codes[rows], whole.scales[rows.start // 128 :]
            share = QuantizedWeight(FP8_BLOCK, (len(codes), size_k), codes, scales, whole_rows=size_n)
            assert torch.equal(multiply(share), y[:, rows]), f"{num_rows} rows, {num_ranks} ranks"

"""Tensor-core tiles for quantized weights: as exact as torch for every scheme and size; and codes of four bits, looked up."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from holdfast.kernels.gemm.e2m1 import E2M1_ASM_TEXT, e2m1_parts, e2m1_wide_asm, e8m0_numbers
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, quantize_rows_reference
from holdfast.kernels.gemm.quantized_tiles import OperandKind, operands_of, tile_linear
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, tl
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import E2M1_VALUES, e8m0_values
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, MXFP4
from kernels.assembler import run_assembler
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.expert_cases import SCHEMES, expert_case, quantized_case_rows
from kernels.gemm_references import quantized_linear_reference
from kernels.quantized_cases import (
    EVERY_SCHEME,
    codable_rows,
    exact_rows,
    exact_weight,
    random_weight,
    room_amid,
    scheme_id,
    slack,
    weight_amid,
    weight_on,
    widest_on,
)
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

TILE_SCHEMES = pytest.mark.parametrize("scheme", EVERY_SCHEME, ids=scheme_id)
KINDS = (FP8, replace(FP8_BLOCK, block_rows=8), INT8, MXFP4)
"""A scheme of each kind of operands: whatever is for rows or sizes is tried with each."""
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)


def inputs(num_rows, size_n, size_k, scheme, seed=0) -> tuple[torch.Tensor, QuantizedWeight]:
    if scheme is MXFP4:
        size_k = -(-size_k // 32) * 32
    rows = codable_rows(num_rows, size_k, seed, scheme.block_columns if scheme.quantizes_activations else 0)
    return rows, random_weight(size_n, size_k, scheme, seed + 1)


def run(x_MK, weight, bias_N, device, out_dtype) -> torch.Tensor:
    """The kernel amid poison: rows as the reference quantizes them, results NaN before and between red zones."""
    zones = RedZones(device)
    quantized = room_amid(zones, len(x_MK), weight)
    if quantized is not None:
        host = QuantizedRows(torch.empty(x_MK.shape, dtype=torch.float8_e4m3fn), torch.empty(quantized.scales_TB.shape))
        quantize_rows_reference(x_MK, host)
        quantized.codes_TK.copy_(host.codes_TK)
        quantized.scales_TB.copy_(host.scales_TB)
    out = zones.allocate(len(x_MK), weight.shape[0], dtype=out_dtype).fill_(NAN)
    bias = None if bias_N is None else amid(bias_N, device)
    assert tile_linear(amid(x_MK, device), weight_amid(weight, device), bias, out, quantized) is out
    zones.check()
    return out.cpu()


def judge(x_MK, weight, bias_N, device, out_dtype=None) -> None:
    out_dtype = out_dtype or x_MK.dtype
    y = run(x_MK, weight, bias_N, device, out_dtype)
    room = room_amid(RedZones(torch.device("cpu")), len(x_MK), weight)
    in_torch = torch.empty(y.shape, dtype=out_dtype)
    quantized_linear_reference(x_MK, weight, bias_N, in_torch, room)
    exact = exact_rows(x_MK, weight.scheme) @ exact_weight(weight).T
    exact = exact if bias_N is None else exact + bias_N.double()
    assert_as_exact_as_torch(y, in_torch, exact, magnitude=10.0 * slack(device, weight.scheme))


@pytest.mark.parametrize("scheme", KINDS, ids=scheme_id)
@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 33, 130], ids=lambda count: f"{count} rows")
def test_tile_linear_is_exact_for_every_number_of_rows(device, scheme, num_rows):
    x, weight = inputs(num_rows, 65, 160, scheme)
    judge(x.to(widest_on(device)), weight, None, device)


@pytest.mark.parametrize("scheme", KINDS, ids=scheme_id)
@pytest.mark.parametrize(("size_n", "size_k"), [(2, 3), (33, 128), (63, 100), (129, 333)])
def test_tile_linear_with_bias_is_exact_at_every_size(device, scheme, size_n, size_k):
    x, weight = inputs(3, size_n, size_k, scheme, seed=2)
    judge(x.to(widest_on(device)), weight, random(size_n, seed=5).to(widest_on(device)), device)


@TILE_SCHEMES
@DTYPES
def test_tile_linear_half_input_is_exact_in_either_output(device, scheme, dtype):
    x, weight = inputs(17, 33, 192, scheme, seed=3)
    judge(x.to(dtype), weight, random(33, seed=5).to(dtype), device)
    # Four bits times a power of two, or eight, are exact in half precision, unless they are too small for it.
    judge(x.to(dtype), weight, None, device, out_dtype=torch.float32)


@pytest.mark.parametrize("scheme", [INT8, MXFP4], ids=scheme_id)
def test_tile_linear_multiplies_integers_exactly(device, scheme):
    """Scales are one, so that sums of integers are what they are."""
    generator = torch.Generator().manual_seed(4)
    if scheme is INT8:
        codes = torch.randint(-127, 128, (35, 96), generator=generator).to(torch.int8)
        weight = QuantizedWeight(INT8, (35, 96), codes, torch.ones(35))
    else:
        codes = torch.randint(0, 256, (35, 48), generator=generator).to(torch.uint8)
        weight = QuantizedWeight(MXFP4, (35, 96), codes, torch.full((35, 3), 127, dtype=torch.uint8))
    x = 2.0 * torch.randint(-8, 9, (5, 96), generator=generator).float()
    expected = x.double() @ exact_weight(weight).T
    assert torch.equal(run(x.to(widest_on(device)), weight, None, device, torch.float32).double(), expected)


def test_tile_linear_multiplies_e4m3_codes_exactly(device):
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(-8, 9, (2, 130, 256), generator=generator).float()
    values[:, :, ::128] = 448.0  # so that scales are one
    for scheme in (FP8, FP8_BLOCK, replace(FP8_BLOCK, block_rows=8)):
        weight = QuantizedWeight(scheme, (130, 256), values[0].to(torch.float8_e4m3fn), torch.ones(130))
        if scheme is not FP8:
            weight = replace(weight, scales=torch.ones(scheme.scale_shape((130, 256))))
        weight.check()
        y = run(values[1, :7], weight, None, device, torch.float32)
        expected = values[1, :7].double() @ values[0].double().T
        assert (y.double() - expected).abs().max() <= (0 if device.type == "cpu" else 2**-8 * expected.max())


def test_tile_linear_decodes_every_mxfp4_code_and_scale(device):
    """A row with a single one picks the numbers of a column; exponents go from 2^-127 to 2^125."""
    codes = (torch.arange(16).repeat(16) | torch.arange(16).repeat_interleave(16) << 4).to(torch.uint8).view(16, 16)
    exponents = torch.tensor([0, 1, 2, 100, 110, 120, 126, 127, 128, 130, 140, 150, 200, 250, 251, 252])
    if not is_interpreted():  # where numbers are multiplied in 16 bits
        exponents = exponents.clamp(2, 240)
    weight = QuantizedWeight(MXFP4, (16, 32), codes, exponents.to(torch.uint8).view(16, 1))
    weight.check()
    dtype = torch.float32 if is_interpreted() else torch.bfloat16
    y = run(torch.eye(32).to(dtype), weight, None, device, torch.float32)
    assert torch.equal(y.T.double(), exact_weight(weight))


def test_tile_linear_applies_each_block_its_own_scale(device):
    """Blocks of rows and columns with scales of very different sizes."""
    for scheme in (FP8_BLOCK, replace(FP8_BLOCK, block_rows=8), MXFP4):
        x, weight = inputs(5, 139, 320, scheme)
        if scheme is MXFP4:
            offsets = torch.arange(weight.scales.numel()) % 7
            weight.scales.copy_((124 + offsets).to(torch.uint8).view(weight.scales.shape))
        else:
            weight.scales.mul_(2.0 ** (torch.arange(weight.scales.numel()) % 5 - 3).view(weight.scales.shape))
        sizes = 2.0 ** (torch.arange(320) // 128 - 2)
        x *= sizes if scheme.quantizes_activations else 1
        exact = exact_rows(x, scheme) @ exact_weight(weight).T
        y = run(x.to(widest_on(device)), weight, None, device, torch.float32)
        allowed = slack(device, scheme) if device.type == "cpu" or scheme is not MXFP4 else 2**10
        assert (y.double() - exact).abs().max() <= 4e-6 * allowed * exact.abs().max()


@TILE_SCHEMES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_tile_linear_nonfinite_input_stays_in_its_row(device, scheme, bad):
    x, weight = inputs(5, 33, 160, scheme)
    x = x.to(widest_on(device))
    clean = run(x, weight, None, device, torch.float32)
    x[1, 140] = bad
    y = run(x, weight, None, device, torch.float32)
    assert not y[1].isfinite().any()
    others = [0, 2, 3, 4]
    assert same_bits(y[others], clean[others])


def test_tile_linear_zero_row_is_the_bias(device):
    for scheme in EVERY_SCHEME:
        x, weight = inputs(2, 33, 160, scheme)
        x[1] = 0.0
        bias = random(33, seed=6)
        assert same_bits(run(x.to(widest_on(device)), weight, bias, device, torch.float32)[1], bias)


@TILE_SCHEMES
def test_tile_linear_nonfinite_weight_stays_in_its_rows(device, scheme):
    x, weight = inputs(3, 33, 160, scheme)
    x = x.to(widest_on(device))
    clean = run(x, weight, None, device, torch.float32)
    weight.scales.view(len(weight.scales), -1)[-1, -1] = 255 if scheme is MXFP4 else NAN
    y = run(x, weight, None, device, torch.float32)
    first = 32 // scheme.block_rows * scheme.block_rows
    assert not y[:, first:].isfinite().any()
    assert same_bits(y[:, :first], clean[:, :first])


def test_tile_linear_takes_codes_only_if_the_scheme_needs_them(device):
    for scheme in (FP8, INT8):
        x, weight = inputs(3, 33, 160, scheme)
        other = room_amid(RedZones(device), 3, random_weight(33, 160, FP8)) if scheme is INT8 else None
        with pytest.raises(AssertionError, match=scheme.name):
            tile_linear(x.to(device), weight_on(weight, device), None, torch.empty(3, 33, device=device), other)


@pytest.mark.gpu
@TILE_SCHEMES
@pytest.mark.parametrize("num_rows", [1, 17, 64, 300], ids=lambda count: f"{count} rows")
def test_tile_linear_bfloat16_is_exact_at_model_sizes(device, scheme, num_rows):
    x, weight = inputs(num_rows, 2560, 4096, scheme)
    judge(x.bfloat16(), weight, random(2560, seed=5).bfloat16(), device)


@pytest.mark.gpu
@TILE_SCHEMES
@pytest.mark.parametrize("num_rows", [1, 130], ids=lambda count: f"{count} rows")
def test_tile_linear_allocates_nothing(device, scheme, num_rows):
    x, weight = inputs(num_rows, 256, 512, scheme)
    x, weight = x.to(device, torch.bfloat16), weight_on(weight, device)
    out = torch.empty(num_rows, 256, dtype=torch.bfloat16, device=device)
    quantized = room_amid(RedZones(device), num_rows, weight)
    assert_allocates_nothing(lambda: tile_linear(x, weight, None, out, quantized))


VALUES = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
BYTES = torch.arange(256, dtype=torch.uint8)
LOW, HIGH = VALUES[BYTES.long() & 15], VALUES[BYTES.long() >> 4]


def test_e2m1_asm_looks_up_every_code():
    low, high = run_assembler(E2M1_ASM_TEXT, [BYTES.numpy()], 2)
    for found, expected in ((low, LOW), (high, HIGH)):
        assert torch.equal(torch.from_numpy(found.view(np.uint8)).view(torch.float8_e4m3fn).float(), expected)


def test_e2m1_wide_asm_looks_up_both_bytes():
    out = run_assembler(e2m1_wide_asm(), [BYTES.numpy()], 4)
    for first, expected in ((0, LOW), (2, HIGH)):
        words = np.stack(out[first : first + 2], axis=-1).view(np.int16).reshape(-1)
        assert torch.equal(torch.from_numpy(words).view(torch.bfloat16).float(), expected)


@jit
def _parts_kernel(p_codes, p_low, p_high, p_powers, PLAIN: constexpr):
    o = tl.arange(0, 256)
    b_codes = tl.load(p_codes + o)
    b_low, b_high = e2m1_parts(b_codes, PLAIN)
    tl.store(p_low + o, b_low.to(tl.float32))
    tl.store(p_high + o, b_high.to(tl.float32))
    tl.store(p_powers + o, e8m0_numbers(b_codes))


def test_e2m1_kernel_decodes_every_byte(device):
    low, high, powers = (torch.full((256,), float("nan"), device=device) for _ in range(3))
    _parts_kernel[(1,)](BYTES.to(device), low, high, powers, PLAIN=is_interpreted(), num_warps=1)
    assert torch.equal(low.cpu(), LOW)
    assert torch.equal(high.cpu(), HIGH)
    assert torch.equal(powers.cpu()[:255], e8m0_values(BYTES[:255]))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_operands_of_reports_the_scheme_of_the_weight(scheme):
    case = expert_case((1, 1, 2, 6, 192), True, scheme)
    quantized = quantized_case_rows(case)
    found = operands_of(case.x_XK, case.weight, quantized)
    expected = {
        None: (OperandKind.PLAIN, 1, 0, 1),
        "fp8": (OperandKind.FP8_ROWS, 1, 0, 1),
        "fp8_tensor": (OperandKind.FP8_ROWS, 1, 0, 1),
        "fp8_block": (OperandKind.FP8_BLOCKS, 2, 128, 2),
        "int8": (OperandKind.INT8_ROWS, 1, 0, 1),
        "mxfp4": (OperandKind.E2M1_GROUPS, 1, 0, 1),
    }
    assert found[1:] == expected[scheme]
    rows = case.x_XK if quantized is None else quantized.codes_TK
    assert found.tensors[0].data_ptr() == rows.data_ptr()


def test_operands_of_without_codes_fails_if_rows_are_quantized():
    case = expert_case((1, 1, 2, 6, 64), scheme="fp8")
    with pytest.raises(AssertionError, match="fp8 with quantized=None"):
        operands_of(case.x_XK, case.weight, None)

"""GEMV by block-scaled e4m3 weights, bound by memory: each program quantizes the one row itself.

M rows, N outputs, K inputs, G blocks of 128 columns

Every thread holds sixteen columns for all outputs of its program, so the row is quantized once a program, in the registers
that multiply it. Weights are converted to half precision and multiplied two at a time. A half-precision sum has four
products of inputs / 16 (4 x 448 x 28 stays below 65504); then float32 takes over with the scales of both blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.fp8 import (
    BLOCK_COLUMNS,
    LEAST_SCALE,
    as_kernels_read,
    e4m3_of,
    e4m3_scale,
    e4m3_value,
    float32_of,
    size_bits,
)
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, kernel_constant, next_power_of_two, tl
from holdfast.quant.quantized_weight import QuantizedWeight

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


MOST_ROWS = 1
"""Two rows would read the weight twice, which pays for few shapes."""
ALIGNED_COLUMNS = 16
"""Codes per load: rows of a weight must begin at multiples of this."""
WARP_COLUMNS = 32 * ALIGNED_COLUMNS
"""Columns per load of a warp."""
WIDTH = kernel_constant(BLOCK_COLUMNS)


def block_products_asm() -> str:
    """Assembler: $4 to $7 are sixteen e4m3 weights, $8 to $11 inputs 0 and 1 of each four in half precision, $12 to $15 inputs 2 and 3, $0 to $3 sums."""
    lines = ["{", ".reg .b16 low, high;", ".reg .b32 a, b, c, d;"]
    for word in range(4):
        sums = "cd"[word // 2]
        lines += [f"mov.b32 {{low, high}}, ${4 + word};", "cvt.rn.f16x2.e4m3x2 a, low;", "cvt.rn.f16x2.e4m3x2 b, high;"]
        first = f"mul.rn.f16x2 {sums}, a, ${8 + word};"
        lines += [first if word % 2 == 0 else f"fma.rn.f16x2 {sums}, a, ${8 + word}, {sums};"]
        lines += [f"fma.rn.f16x2 {sums}, b, ${12 + word}, {sums};"]
    for half, sums in enumerate("cd"):
        lines += [f"mov.b32 {{low, high}}, {sums};"]
        lines += [f"cvt.f32.f16 ${2 * half}, low;", f"cvt.f32.f16 ${2 * half + 1}, high;"]
    return "\n".join([*lines, "}"])


PAIRS_ASM_TEXT = """{
.reg .b16 codes;
.reg .b32 pair, sixteenth;
mov.b32 sixteenth, 0x2C002C00;
cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1;
cvt.rn.f16x2.e4m3x2 pair, codes;
mul.rn.f16x2 $0, pair, sixteenth;
}"""
"""$1, $2: two quotients; $0: a sixteenth of the nearest e4m3 numbers, in half precision."""
PAIRS_ASM = kernel_constant(PAIRS_ASM_TEXT)
INVERSE_ASM = kernel_constant("rcp.approx.ftz.f32 $0, $1;")
PRODUCTS_ASM = kernel_constant(block_products_asm())


class BlockGemvForm(NamedTuple):
    """Outputs of a program, its warps of 512 columns each, and if it loads columns one step ahead."""

    block_n: int
    num_warps: int
    ahead: bool


def row_form(num_rows: int) -> bool:
    """Return True if these kernels take this many rows: the specialization for the number of rows."""
    return num_rows <= MOST_ROWS


def takes(weight: QuantizedWeight, num_rows: int) -> bool:
    """Return True if these kernels take this many rows and this weight: block-scaled e4m3 with aligned rows."""
    scheme = weight.scheme
    in_blocks = scheme.quantizes_activations and scheme.block_columns == BLOCK_COLUMNS and len(weight.shape) == 2
    return in_blocks and weight.shape[1] % ALIGNED_COLUMNS == 0 and row_form(num_rows)


def gemv_form(size_n: int, size_k: int) -> BlockGemvForm:
    """Return the fastest launch for this shape, or for the nearest measured one (H200, docs/log.md).

    Few outputs get many warps each, which load all of the weight early. Many outputs get few warps, which synchronize
    less.
    """
    if size_n < 1024:
        form = BlockGemvForm(1, 16, ahead=False)
    elif size_n < 3072:
        form = BlockGemvForm(16, 8, ahead=False)
    elif size_n < 6144:
        form = BlockGemvForm(8, 4, ahead=False)
    elif size_k > 2048:
        form = BlockGemvForm(8, 2, ahead=True)
    else:
        form = BlockGemvForm(16, 4 if size_n < 16384 else 1, ahead=False)
    return form._replace(num_warps=min(form.num_warps, next_power_of_two(-(-size_k // WARP_COLUMNS))))


def block_scaled_gemv(x_MK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor) -> Tensor:
    """Compute x @ weight.T + bias into `out_MN`, in its type. `takes` must accept the weight and rows."""
    (num_rows, size_k), size_n = x_MK.shape, weight.shape[0]
    assert weight.shape == (size_n, size_k), f"{weight.shape=} {x_MK.shape=}"
    assert out_MN.shape == (num_rows, size_n), f"{out_MN.shape=} {weight.shape=} {x_MK.shape=}"
    assert x_MK.stride(1) == 1, f"{x_MK.stride()=}: columns lie apart"
    constants = gemv_constants(weight, bias_N is not None)
    block_scaled_gemv_kernel[(-(-size_n // constants["BLOCK_N"]), num_rows)](
        as_kernels_read(x_MK), weight.codes.view(torch.int32), weight.scales,
        bias_N if bias_N is not None else weight.scales, out_MN, size_n, weight.scales.shape[1], x_MK.stride(0),
        **constants, **pdl_flags(x_MK),
    )  # fmt: skip
    return out_MN


def gemv_constants(weight: QuantizedWeight, has_bias: bool) -> dict[str, int]:
    """Return the constants of a launch, its warps included."""
    (size_n, size_k), block_rows = weight.shape, weight.scheme.block_rows
    form = gemv_form(weight.form_rows, size_k)
    # A program stays within a block of rows: the largest power of two that divides it.
    block_n, block_k = min(form.block_n, block_rows & -block_rows), WARP_COLUMNS * form.num_warps
    return {
        "SIZE_K": size_k, "BLOCK_ROWS": block_rows, "EVEN_N": size_n % block_n == 0, "HAS_BIAS": has_bias,
        "EVEN_K": size_k % block_k == 0, "BLOCK_N": block_n, "BLOCK_K": block_k, "AHEAD": form.ahead,
        "PLAIN": is_interpreted(), "num_warps": form.num_warps,
    }  # fmt: skip


@jit
def _load_words(p_w, o_w, num_words, EVEN_K: constexpr):
    """Load words of four codes; zeros after the last."""
    if EVEN_K:
        b_w = tl.load(p_w, eviction_policy="evict_first")
    else:
        b_w = tl.load(p_w, mask=(o_w < num_words)[None, :], other=0, eviction_policy="evict_first")
    return b_w


@jit
def _divided(b_x, b_divisor, b_inverse, EXACT: constexpr):
    """Return x / divisor rounded once: a product with an inverse at most two units off, corrected by its remainder.

    EXACT corrects twice, for x in float32; 16-bit numbers need it once.
    """
    b_q = b_x * b_inverse
    b_q = tl.fma(tl.fma(-b_q, b_divisor, b_x), b_inverse, b_q)
    if EXACT:
        b_q = tl.fma(tl.fma(-b_q, b_divisor, b_x), b_inverse, b_q)
    return b_q


@jit
def _scale_and_quotients(b_x, EXACT: constexpr, PLAIN: constexpr):
    """Return scales and quotients of blocks of columns, as `quantize_rows` computes them before rounding."""
    b_bits = tl.max(size_bits(b_x), axis=1)
    if PLAIN or EXACT:
        b_scale = e4m3_scale(b_bits)
    else:
        b_amax = b_bits.to(tl.float32, bitcast=True)
        b_scale = _divided(b_amax, tl.full(b_amax.shape, 448.0, tl.float32), 1.0 / 448.0, False)
        b_scale = tl.where(b_bits < 0x7F800000, tl.maximum(b_scale, LEAST_SCALE), float("nan"))
    b_divisor = tl.broadcast_to(b_scale[:, None], b_x.shape)
    if PLAIN:
        b_quotient = tl.div_rn(b_x, b_divisor)
    elif EXACT:
        b_quotient = _divided(b_x, b_divisor, tl.div_rn(b_scale * 0 + 1.0, b_scale)[:, None], True)
    else:
        b_inverse = tl.inline_asm_elementwise(INVERSE_ASM, "=f,f", [b_scale], dtype=tl.float32, is_pure=True, pack=1)
        b_quotient = _divided(b_x, b_divisor, b_inverse[:, None], False)
    return b_scale, b_quotient


@jit
def _coded_pairs(b_even, b_odd, PLAIN: constexpr):
    """Round quotients to e4m3, and pack two of them / 16 per word, in half precision."""
    if PLAIN:
        b_low = (e4m3_value(e4m3_of(b_even)) * 0.0625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        b_high = (e4m3_value(e4m3_of(b_odd)) * 0.0625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        b_words = (b_low & 0xFFFF) | (b_high << 16)
    else:
        b_words = tl.inline_asm_elementwise(PAIRS_ASM, "=r,f,f", [b_even, b_odd], dtype=tl.int32, is_pure=True, pack=1)
    return b_words


@jit
def _coded_row(p_x, p_scales, k, size_k, scale_columns, EVEN_K: constexpr, BLOCK_K: constexpr, PLAIN: constexpr):
    """Return inputs 0 and 1 of every four as a word, 2 and 3 as another, and the factor of their products."""
    GROUPS: constexpr = BLOCK_K // WIDTH
    o_g = tl.arange(0, GROUPS)
    o_k = k + o_g[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    i_g = k // WIDTH + o_g
    if EVEN_K:
        b_x = float32_of(tl.load(p_x + o_k))
        b_factor = tl.load(p_scales + i_g)
    else:
        b_x = float32_of(tl.load(p_x + o_k, mask=o_k < size_k, other=0))
        b_factor = tl.load(p_scales + i_g, mask=i_g < scale_columns, other=0.0)
    b_scale, b_quotient = _scale_and_quotients(b_x, p_x.dtype.element_ty == tl.float32, PLAIN)
    b_even, b_odd = tl.split(tl.reshape(b_quotient, (GROUPS, WIDTH // 2, 2)))
    b_pairs = tl.reshape(_coded_pairs(b_even, b_odd, PLAIN), (GROUPS, WIDTH // 4, 2))
    b_first, b_second = tl.split(b_pairs)
    b_factor = tl.broadcast_to((b_factor * (b_scale * 16.0))[:, None], (GROUPS, WIDTH // 16))
    WORDS: constexpr = BLOCK_K // 4
    return tl.reshape(b_first, (WORDS,)), tl.reshape(b_second, (WORDS,)), tl.reshape(b_factor, (WORDS // 4,))


@jit
def _half_value(b_words, SHIFT: constexpr):
    """Convert the half precision number in the low or high bits of words to float32."""
    return (b_words >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _products(b_w, b_row, PLAIN: constexpr):
    """Sum the sixteen products of a thread, times their scales."""
    b_first = tl.broadcast_to(b_row[0][None, :], b_w.shape)
    b_second = tl.broadcast_to(b_row[1][None, :], b_w.shape)
    if PLAIN:
        b_sums = e4m3_value(b_w & 0xFF) * _half_value(b_first, 0)
        b_sums += e4m3_value(b_w >> 8 & 0xFF) * _half_value(b_first, 16)
        b_sums += e4m3_value(b_w >> 16 & 0xFF) * _half_value(b_second, 0)
        b_sums += e4m3_value(b_w >> 24 & 0xFF) * _half_value(b_second, 16)
    else:
        b_sums = tl.inline_asm_elementwise(
            PRODUCTS_ASM, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r", [b_w, b_first, b_second],
            dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    b_sums = tl.sum(tl.reshape(b_sums, (b_w.shape[0], b_w.shape[1] // 4, 4)), axis=2)
    return b_sums * b_row[2][None, :]


@jit
def block_scaled_gemv_kernel(
    p_x, p_codes, p_scales, p_bias, p_out, size_n, scale_columns, x_stride,
    SIZE_K: constexpr, BLOCK_ROWS: constexpr, EVEN_N: constexpr, HAS_BIAS: constexpr, EVEN_K: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, AHEAD: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(1)
    block_row_program(
        p_x + i_row * x_stride, p_codes, p_scales, p_bias, p_out + i_row * size_n, tl.program_id(0), size_n, scale_columns,
        SIZE_K, BLOCK_ROWS, EVEN_N, HAS_BIAS, EVEN_K, BLOCK_N, BLOCK_K, AHEAD, PLAIN, PDL,
    )  # fmt: skip


@jit
def block_row_program(
    p_x, p_codes, p_scales, p_bias, p_out, i_n, size_n, scale_columns,
    SIZE_K: constexpr, BLOCK_ROWS: constexpr, EVEN_N: constexpr, HAS_BIAS: constexpr, EVEN_K: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, AHEAD: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    """Compute a block of a row's outputs."""
    first = i_n * BLOCK_N
    o_n = first + tl.arange(0, BLOCK_N)
    m_n = o_n < size_n
    o_w = tl.arange(0, BLOCK_K // 4)
    NUM_WORDS: constexpr = SIZE_K // 4
    o_r = tl.arange(0, BLOCK_N)
    if not EVEN_N:
        o_r = tl.minimum(o_n, size_n - 1) - first
    p_w = p_codes + first.to(tl.int64) * NUM_WORDS + (o_r[:, None] * NUM_WORDS + o_w[None, :])
    p_scales += first // BLOCK_ROWS * scale_columns
    # Load the first block of the weight before the wait: it is a constant.
    b_w = _load_words(p_w, o_w, NUM_WORDS, EVEN_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_sum = tl.zeros((BLOCK_N, BLOCK_K // 16), tl.float32)
    LAST: constexpr = (SIZE_K - 1) // BLOCK_K * BLOCK_K
    for k in range(0, LAST, BLOCK_K):
        word = (k + BLOCK_K) // 4
        if AHEAD:
            b_next = _load_words(p_w + word, word + o_w, NUM_WORDS, EVEN_K)
        b_row = _coded_row(p_x, p_scales, k, SIZE_K, scale_columns, True, BLOCK_K, PLAIN)
        b_sum += _products(b_w, b_row, PLAIN)
        if AHEAD:
            b_w = b_next
        else:
            b_w = _load_words(p_w + word, word + o_w, NUM_WORDS, EVEN_K)
    b_sum += _products(b_w, _coded_row(p_x, p_scales, LAST, SIZE_K, scale_columns, EVEN_K, BLOCK_K, PLAIN), PLAIN)
    if PDL:
        # Release late: programs of the next kernel would take occupancy from this one.
        tl.extra.cuda.gdc_launch_dependents()
    b_y = tl.sum(b_sum, axis=1)
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_out + o_n, b_y.to(p_out.dtype.element_ty), mask=m_n)

"""GEMV by weights of packed 4-bit codes, bound by memory: dense ones, and those of a pair's expert.

P pairs of token and expert (dense: rows), N outputs, K inputs, R rows of the weight in a program, U units of 32 columns

A thread loads one unit of a row at a time: four words of eight codes, as they are stored, and their scale. All threads of
a warp lie along K, so a thread has the inputs of its unit for all rows of its program. They become half precision, times
the power of two that gives the largest one the exponent 14. A word becomes four pairs: inputs 0 and 4, 1 and 5, 2 and 6,
3 and 7. One instruction multiplies a pair. Products of 8-bit and 2-bit significands are exact in half precision. Two
sums of 16 columns each stay below 16 x 12; then float32 takes over with the scale. float32 and float16 rows are
multiplied in float32.

A new scheme is a `PackedForm` in PACKED_FORMS. Its codes are a case of `packed_numbers`, and of `_products` with assembler
that decodes a word to pairs. Its scales are a case of `scale_numbers`. Loads and launchers stay as they are. Scales for
16 columns would multiply both sums of a unit before they are added. A zero point adds the sum of a unit's inputs times
-zero * scale.

Loops are not unrolled: straight code of several units exceeds the instruction cache, which costs up to half the speed.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.activation import SILU_HALVES, GateForm, gated_numbers
from holdfast.kernels.fp8 import as_kernels_read, float32_of
from holdfast.kernels.gemm.e2m1 import PAIR_EXPONENT, e2m1_numbers, e2m1_pair_lines, e8m0_numbers
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit,
    kernel_constant,
    next_power_of_two,
    tl,
    wait_then_release,
)
from holdfast.quant.quantized_weight import QuantizedWeight

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


class PackedForm(NamedTuple):
    """How a scheme packs its weights. Both numbers select code of kernels at compile time."""

    codes: int
    """Code type: E2M1."""
    scales: int
    """Scale type: E8M0."""
    group: int
    """Columns that share a scale: a multiple of 8, and of 32 if above."""


E2M1, E8M0 = kernel_constant(0), kernel_constant(0)
PACKED_FORMS = {"mxfp4": PackedForm(0, 0, 32)}
"""Schemes by name."""
MOST_ROWS = 1
"""Dense weights: a second row would read the weight again."""
UNIT = 32
"""Columns of a thread's load: four words. Rows of a weight must begin at multiples of this."""
BLOCK_ROWS = 8
"""Rows of a weight in a program: more registers would leave too few warps."""
MOST_PADDING, MOST_GATED_PADDING = 1.125, 1.5
INPUT_EXPONENT = 14
"""Exponent of a unit's largest input in half precision."""
FIELDS = kernel_constant(2 * 127 + INPUT_EXPONENT)
"""Sum of the exponent fields of that input and of the unit's scale; as `PAIR_EXPONENT` is 14 too, also of scale and factor."""
DECODED = kernel_constant(2.0**-PAIR_EXPONENT)
PAIR_ASM = kernel_constant("cvt.rn.f16x2.f32 $0, $2, $1;")


def products_asm(pair_lines: Callable[[str], list[tuple[int, list[str]]]]) -> str:
    """Assembler: $1 to $4 are words of codes; $5 + 4 i + p are inputs p and p + 4 of the i-th word; $0 is the sum of 32 products."""
    lines = ["{", ".reg .b32 u, v, w, h, s, t;", ".reg .b16 low, high;", ".reg .f32 a, b;"]
    for word in range(4):
        total = "st"[word // 2]
        for place, (pair, decoding) in enumerate(pair_lines(f"${1 + word}")):
            factors = f"h, ${5 + 4 * word + pair}"
            is_first = word % 2 == 0 and place == 0
            lines += [
                *decoding,
                f"mul.rn.f16x2 {total}, {factors};" if is_first else f"fma.rn.f16x2 {total}, {factors}, {total};",
            ]
    lines += ["add.rn.f16x2 s, s, t;", "mov.b32 {low, high}, s;"]
    return "\n".join([*lines, "cvt.f32.f16 a, low;", "cvt.f32.f16 b, high;", "add.f32 $0, a, b;", "}"])


E2M1_PRODUCTS = kernel_constant(products_asm(e2m1_pair_lines))
PRODUCT_REGISTERS = kernel_constant(",".join(["=f"] + ["r"] * 20))


class PackedGemvForm(NamedTuple):
    """Rows of the weight in a program, units of 32 columns in a step, and warps."""

    block_rows: int
    units: int
    num_warps: int


class PackedProduct(NamedTuple):
    """Operands of a GEMV."""

    x_XK: Tensor
    """A row for each pair, or for each run of pairs."""
    weight: QuantizedWeight
    """[N, K], or [E, N, K] by expert; twice as many rows if gated."""
    out_PN: Tensor
    bias: Tensor | None = None
    ids_P: Tensor | None = None
    """Expert of each pair, -1 for none; None: the weight is dense."""
    gated: bool = False
    form: GateForm = SILU_HALVES


def row_form(num_rows: int) -> bool:
    """Return True if these kernels take this many rows of a dense product: the specialization for the number of rows."""
    return num_rows <= MOST_ROWS


def takes(weight: QuantizedWeight, num_rows: int) -> bool:
    """Return True if these kernels take this many rows and this dense weight."""
    return weight.scheme.name in PACKED_FORMS and len(weight.shape) == 2 and row_form(num_rows)


def gemv_form(size_k: int, gated: bool) -> PackedGemvForm:
    """Return the launch for rows of this width: as many warps as it fills, with little padding (H200, docs/log.md).

    Gate and up have more programs, so they take more padding for fewer registers.
    """
    num_units = -(-size_k // UNIT)
    if num_units < 32:
        return PackedGemvForm(BLOCK_ROWS, next_power_of_two(num_units), 1)
    padded = {warps: -(-num_units // (32 * warps)) * 32 * warps for warps in (4, 2, 1)}
    most = MOST_GATED_PADDING if gated else MOST_PADDING
    num_warps = next((warps for warps, units in padded.items() if units <= most * num_units), 1)
    return PackedGemvForm(BLOCK_ROWS, 32 * num_warps, num_warps)


def packed_gemv(product: PackedProduct) -> Tensor:
    """Multiply each pair's row by its weight, add the bias and apply the gate, into `out_PN`, in its type."""
    x_XK, weight, out_PN, bias, ids_P, gated, gate = product
    (num_pairs, size_n), size_k = out_PN.shape, x_XK.shape[1]
    if not num_pairs:
        return out_PN
    packed = PACKED_FORMS[weight.scheme.name]
    assert weight.shape[-2:] == (size_n * (2 if gated else 1), size_k), f"{weight.shape=} {x_XK.shape=} {out_PN.shape=}"
    assert size_k % UNIT == 0, f"{size_k=} is no multiple of {UNIT}"
    form = gemv_form(size_k, gated)
    packed_gemv_kernel[(-(-weight.shape[-2] // form.block_rows), num_pairs)](
        as_kernels_read(x_XK), weight.codes.view(torch.int32), weight.scales, out_PN if bias is None else bias,
        out_PN if ids_P is None else ids_P, out_PN, size_n, x_XK.stride(0),
        SIZE_K=size_k, CODES=packed.codes, SCALES=packed.scales, SCALE_COLUMNS=packed.group,
        IN_HALVES=x_XK.dtype == torch.bfloat16, HAS_IDS=ids_P is not None, HAS_BIAS=bias is not None,
        PAIRS_PER_ROW=num_pairs // len(x_XK), BLOCK_R=form.block_rows, UNITS=form.units,
        PLAIN=is_interpreted(), num_warps=form.num_warps, **gate.flags(gated), **pdl_flags(x_XK),
    )  # fmt: skip
    return out_PN


@jit
def packed_numbers(b_codes, CODES: constexpr):
    """Decode codes (int32) to float32, without scales."""
    tl.static_assert(CODES == E2M1)
    return e2m1_numbers(b_codes).to(tl.float32)


@jit
def scale_numbers(b_scales, SCALES: constexpr):
    """Convert loaded scales to float32."""
    tl.static_assert(SCALES == E8M0)
    return e8m0_numbers(b_scales)


@jit
def _codes_and_scales(p_w, p_s, k, SIZE_K: constexpr, SCALE_COLUMNS: constexpr, UNITS: constexpr, MASKED: constexpr):
    """Load words of codes and scales of each unit. After the last column both are 0."""
    if MASKED:
        m_w = k + tl.arange(0, 4 * UNITS) // 4 * 32 < SIZE_K
        m_u = k + tl.arange(0, UNITS) * 32 < SIZE_K
        b_w = tl.load(p_w + k // 8, mask=m_w[None, :], other=0)
        b_s = tl.load(p_s + k // SCALE_COLUMNS, mask=m_u[None, :], other=0)
    else:
        b_w = tl.load(p_w + k // 8)
        b_s = tl.load(p_s + k // SCALE_COLUMNS)
    return b_w, b_s


@jit
def _half_pairs(b_low, b_high, PLAIN: constexpr):
    """Round pairs of numbers to half precision, in one word each."""
    if PLAIN:
        b_low = b_low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        b_words = (b_low & 0xFFFF) | (b_high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        b_words = tl.inline_asm_elementwise(PAIR_ASM, "=r,f,f", [b_low, b_high], dtype=tl.int32, is_pure=True, pack=1)
    return b_words


@jit
def _inputs(p_x, o_k, i_word: constexpr, SIZE_K: constexpr, UNITS: constexpr, MASKED: constexpr):
    """Load the inputs of one word of each unit: [U, 8]."""
    o_x = o_k[:, None] + (8 * i_word + tl.arange(0, 8))[None, :]
    if MASKED:
        b_x = tl.load(p_x + o_x, mask=tl.broadcast_to((o_k < SIZE_K)[:, None], (UNITS, 8)), other=0)
    else:
        b_x = tl.load(p_x + o_x)
    return float32_of(b_x)


@jit
def _pairs(b_x, b_scale, UNITS: constexpr, PLAIN: constexpr):
    """Return inputs p and p + 4 of words, for p = 0 to 3, in half precision."""
    b_low, b_high = tl.split(tl.permute(tl.reshape(b_x * b_scale[:, None], (UNITS, 2, 4)), (0, 2, 1)))
    b_even, b_odd = tl.split(tl.reshape(_half_pairs(b_low, b_high, PLAIN), (UNITS, 2, 2)))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return b_0, b_1, b_2, b_3


@jit
def _singles(b_x, UNITS: constexpr):
    """Return the eight inputs of words in float32."""
    b_even, b_odd = tl.split(tl.reshape(b_x, (UNITS, 2, 2, 2)))
    b_04, b_26 = tl.split(b_even)
    b_15, b_37 = tl.split(b_odd)
    b_0, b_4 = tl.split(b_04)
    b_2, b_6 = tl.split(b_26)
    b_1, b_5 = tl.split(b_15)
    b_3, b_7 = tl.split(b_37)
    return b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7


@jit
def _row(p_x, o_k, SIZE_K: constexpr, IN_HALVES: constexpr, UNITS: constexpr, MASKED: constexpr, PLAIN: constexpr):
    """Return the inputs of the four words of each unit, and the factor of their products."""
    b_0 = _inputs(p_x, o_k, 0, SIZE_K, UNITS, MASKED)
    b_1 = _inputs(p_x, o_k, 1, SIZE_K, UNITS, MASKED)
    b_2 = _inputs(p_x, o_k, 2, SIZE_K, UNITS, MASKED)
    b_3 = _inputs(p_x, o_k, 3, SIZE_K, UNITS, MASKED)
    if IN_HALVES:
        # A row's NaN may be no maximum: it is NaN in half precision.
        b_sizes = tl.maximum(tl.maximum(tl.abs(b_0), tl.abs(b_1)), tl.maximum(tl.abs(b_2), tl.abs(b_3)))
        b_field = tl.minimum(-(tl.max(b_sizes, axis=1).to(tl.int32, bitcast=True) >> 23) + FIELDS, 254)
        b_scale = (b_field << 23).to(tl.float32, bitcast=True)
        b_factors = ((-b_field + FIELDS) << 23).to(tl.float32, bitcast=True)
        b_row = (
            _pairs(b_0, b_scale, UNITS, PLAIN),
            _pairs(b_1, b_scale, UNITS, PLAIN),
            _pairs(b_2, b_scale, UNITS, PLAIN),
            _pairs(b_3, b_scale, UNITS, PLAIN),
        )
    else:
        b_factors = tl.full((UNITS,), 1.0, tl.float32)
        b_row = (_singles(b_0, UNITS), _singles(b_1, UNITS), _singles(b_2, UNITS), _singles(b_3, UNITS))
    return b_row, b_factors


@jit
def _number(b_words, i: constexpr, IN_HALVES: constexpr):
    """Return the inputs that meet the i-th code of a word."""
    if IN_HALVES:
        b_x = (b_words[i % 4] >> (16 * (i // 4))).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        b_x = b_words[i]
    return b_x[None, :]


@jit
def _products(
    b_w, b_row, IN_HALVES: constexpr, CODES: constexpr, BLOCK_R: constexpr, UNITS: constexpr, PLAIN: constexpr
):
    """Sum the products of each unit: [R, U]."""
    b_even, b_odd = tl.split(tl.reshape(b_w, (BLOCK_R, UNITS, 2, 2)))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    x_0, x_1, x_2, x_3 = b_row
    if IN_HALVES and not PLAIN:
        b_sums = tl.inline_asm_elementwise(
            E2M1_PRODUCTS, PRODUCT_REGISTERS,
            [
                b_0, b_1, b_2, b_3,
                x_0[0][None, :], x_0[1][None, :], x_0[2][None, :], x_0[3][None, :],
                x_1[0][None, :], x_1[1][None, :], x_1[2][None, :], x_1[3][None, :],
                x_2[0][None, :], x_2[1][None, :], x_2[2][None, :], x_2[3][None, :],
                x_3[0][None, :], x_3[1][None, :], x_3[2][None, :], x_3[3][None, :],
            ],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        b_sums = tl.zeros((BLOCK_R, UNITS), tl.float32)
        for i in tl.static_range(8):
            b_sums += packed_numbers(b_0 >> (4 * i) & 15, CODES) * _number(x_0, i, IN_HALVES)
            b_sums += packed_numbers(b_1 >> (4 * i) & 15, CODES) * _number(x_1, i, IN_HALVES)
            b_sums += packed_numbers(b_2 >> (4 * i) & 15, CODES) * _number(x_2, i, IN_HALVES)
            b_sums += packed_numbers(b_3 >> (4 * i) & 15, CODES) * _number(x_3, i, IN_HALVES)
        if IN_HALVES:
            b_sums *= DECODED
    return b_sums


@jit
def packed_gemv_kernel(
    p_x, p_words, p_scales, p_bias, p_ids, p_out, size_n, x_stride,
    SIZE_K: constexpr, CODES: constexpr, SCALES: constexpr, SCALE_COLUMNS: constexpr, IN_HALVES: constexpr,
    HAS_IDS: constexpr, HAS_BIAS: constexpr, PAIRS_PER_ROW: constexpr, GATED: constexpr, INTERLEAVED: constexpr,
    LIMIT: constexpr, IS_SCALED: constexpr, BLOCK_R: constexpr, UNITS: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_pair = tl.program_id(1)
    STEP: constexpr = UNITS * 32
    IS_LOOP: constexpr = SIZE_K > STEP
    MASKED: constexpr = SIZE_K % STEP != 0
    NUM_WORDS: constexpr = SIZE_K // 8
    NUM_SCALES: constexpr = SIZE_K // SCALE_COLUMNS
    # A gate and its up are neighbours in a block, wherever they lie.
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    num_rows = size_n * (2 if GATED else 1)
    if GATED and not INTERLEAVED:
        b_rows = o_r // 2 + o_r % 2 * size_n
    else:
        b_rows = o_r
    b_rows = tl.minimum(b_rows, num_rows - 1)
    if GATED:
        wait_then_release(PDL)
    first_row = tl.zeros((), tl.int64)
    if HAS_IDS:
        expert = tl.load(p_ids + i_pair).to(tl.int64)
        if expert < 0:  # its expert is on another rank
            if not GATED:
                wait_then_release(PDL)
            return
        first_row = expert * num_rows
    o_w = tl.arange(0, 4 * UNITS)
    o_u = tl.arange(0, UNITS)
    p_w = p_words + first_row * NUM_WORDS + (b_rows[:, None] * NUM_WORDS + o_w[None, :])
    p_s = p_scales + first_row * NUM_SCALES + (b_rows[:, None] * NUM_SCALES + (o_u * 32 // SCALE_COLUMNS)[None, :])
    # Each thread loads its own scales: wider loads would pass through shared memory.
    p_s = tl.max_contiguous(p_s, [1, 1])
    p_x += i_pair // PAIRS_PER_ROW * x_stride
    b_w, b_s = _codes_and_scales(p_w, p_s, 0, SIZE_K, SCALE_COLUMNS, UNITS, MASKED)
    if not GATED:
        # Ids are older than the kernel before this one: gate and up waited for them before it released this one.
        wait_then_release(PDL)
    b_sum = tl.zeros((BLOCK_R, UNITS), tl.float32)
    for k in tl.range(0, SIZE_K, STEP, loop_unroll_factor=1):
        if IS_LOOP:
            b_next_w, b_next_s = _codes_and_scales(p_w, p_s, k + STEP, SIZE_K, SCALE_COLUMNS, UNITS, True)
        b_row, b_factors = _row(p_x, k + o_u * 32, SIZE_K, IN_HALVES, UNITS, MASKED, PLAIN)
        b_products = _products(b_w, b_row, IN_HALVES, CODES, BLOCK_R, UNITS, PLAIN)
        if IN_HALVES:
            b_products *= b_factors[None, :]
        b_sum += b_products * scale_numbers(b_s, SCALES)
        if IS_LOOP:
            b_w = b_next_w
            b_s = b_next_s
    b_y = tl.sum(b_sum, axis=1)
    if HAS_BIAS:
        b_y += tl.load(p_bias + first_row + b_rows).to(tl.float32)
    OUTPUTS: constexpr = BLOCK_R // 2 if GATED else BLOCK_R
    o_n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if GATED:
        b_gate, b_up = tl.split(tl.reshape(b_y, (OUTPUTS, 2)))
        b_y = gated_numbers(b_gate, b_up, LIMIT, IS_SCALED)
    tl.store(p_out + i_pair.to(tl.int64) * size_n + o_n, b_y.to(p_out.dtype.element_ty), mask=o_n < size_n)

"""Bit-level functions for kernels: quantize and pack KV heads; convert fp8 (e4m3), bf16 and e8m0 from and to float32.

A head is four blocks, its quarters. A word packs the same column of several quarters, or adjacent columns of one.
Results are the same on a GPU and in the interpreter. bfloat16 is passed as int16, because the interpreter does not
round it; e4m3 as uint8, because not every GPU has it. Bytes that become float32 are exponents (e8m0), a type that
Triton lacks.
"""

import torch
from torch import Tensor

from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, kernel_constant, tl
from holdfast.quant.weight_quantize import LEAST_E4M3_SCALE

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

LEAST_SCALE = kernel_constant(LEAST_E4M3_SCALE)
BLOCK_COLUMNS = 128
"""Columns of a row that share a scale if it has several: as many as in a block of an fp8_block weight."""
E4M3_PAIR_ASM = kernel_constant("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;")
BFLOAT16_PAIR_ASM = kernel_constant("cvt.rn.bf16x2.f32 $0, $2, $1;")


@jit
def quarters(p_x, m_x, HEAD_DIM: constexpr):
    """Load the quarters of heads as float32, from pointers to the first."""
    b_0 = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_1 = tl.load(p_x + HEAD_DIM // 4, mask=m_x, other=0.0).to(tl.float32)
    b_2 = tl.load(p_x + 2 * (HEAD_DIM // 4), mask=m_x, other=0.0).to(tl.float32)
    b_3 = tl.load(p_x + 3 * (HEAD_DIM // 4), mask=m_x, other=0.0).to(tl.float32)
    return b_0, b_1, b_2, b_3


@jit
def sum_of_products(b_x, b_y):
    """Return the dot product of each head."""
    return tl.sum(b_x[0] * b_y[0] + b_x[1] * b_y[1] + b_x[2] * b_y[2] + b_x[3] * b_y[3], axis=1)


@jit
def _quotient(b_x, b_y):
    """Return a scale, at most the largest float16; NaN stays NaN."""
    b_scale = tl.div_rn(b_x, b_y)
    return tl.where(b_scale > 65504.0, 65504.0, b_scale)


@jit
def _fp8_codes(b_x):
    """Return the e4m3 codes of heads as int32, by quarter, and the scale that maps the largest of a head to 448."""
    # Compare as integers: NaN is above all numbers, so it is not lost.
    b_amax = tl.maximum(size_bits(b_x[0]), size_bits(b_x[1]))
    b_amax = tl.maximum(b_amax, tl.maximum(size_bits(b_x[2]), size_bits(b_x[3])))
    b_amax = tl.max(b_amax, axis=1).to(tl.float32, bitcast=True)
    b_scale = _quotient(b_amax, tl.full(b_amax.shape, 448.0, tl.float32)).to(tl.float16)
    b_divisor = tl.where(b_scale == 0, 1.0, b_scale.to(tl.float32))
    b_factor = tl.where(b_scale == 0, 0.0, tl.div_rn(tl.full(b_scale.shape, 1.0, tl.float32), b_divisor))[:, None]
    b_0, b_1 = e4m3_code(b_x[0] * b_factor), e4m3_code(b_x[1] * b_factor)
    b_2, b_3 = e4m3_code(b_x[2] * b_factor), e4m3_code(b_x[3] * b_factor)
    return (b_0, b_1, b_2, b_3), b_scale


@jit
def e4m3_code(b_x):
    """Round to the nearest even e4m3 number, at most 448; return its bits as int32."""
    # In integers: not every GPU has the instruction, and the interpreter rounds wrongly.
    b_size = tl.minimum(size_bits(b_x), 0x43E00000)
    b_normal = (b_size + 0x7FFFF + (b_size >> 20 & 1) >> 20) - 960
    # Below 2^-6 the steps are 2^-9: those of float32 at 2^14, where the sum rounds.
    b_small = (b_size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    b_code = tl.where(b_size < 0x3C800000, b_small, b_normal)
    b_code = tl.where(b_x != b_x, 0x7F, b_code)
    return b_code | b_x.to(tl.int32, bitcast=True) >> 24 & 0x80


@jit
def _nearest_codes(b_x, HEAD_DIM: constexpr, BITS: constexpr, GAIN: constexpr, MAGNITUDES: constexpr):
    """Return the norm of heads; then by quarter: indices of magnitudes, 1 for a negative sign, and the magnitudes."""
    m_x = (tl.arange(0, b_x[0].shape[1]) < HEAD_DIM // 4)[None, :]
    b_norm = tl.sqrt_rn(sum_of_products(b_x, b_x))
    b_factor = tl.div_rn(tl.full(b_norm.shape, GAIN, tl.float32), tl.where(b_norm > 0, b_norm, 1.0))[:, None]
    b_0, b_1 = (
        nearest_magnitudes(b_x[0] * b_factor, m_x, BITS, MAGNITUDES),
        nearest_magnitudes(b_x[1] * b_factor, m_x, BITS, MAGNITUDES),
    )
    b_2, b_3 = (
        nearest_magnitudes(b_x[2] * b_factor, m_x, BITS, MAGNITUDES),
        nearest_magnitudes(b_x[3] * b_factor, m_x, BITS, MAGNITUDES),
    )
    b_numbers = b_0[0], b_1[0], b_2[0], b_3[0]
    b_signs = b_0[1], b_1[1], b_2[1], b_3[1]
    return b_norm, b_numbers, b_signs, (b_0[2], b_1[2], b_2[2], b_3[2])


@jit
def nearest_magnitudes(b_x, m_x, BITS: constexpr, MAGNITUDES: constexpr):
    b_size = tl.abs(b_x)
    b_number = tl.zeros(b_x.shape, tl.int32)
    b_magnitude = tl.full(b_x.shape, MAGNITUDES[0], tl.float32)
    for i in tl.static_range(1, 2 ** (BITS - 1)):
        # NaN is above every boundary, which makes it the most negative code.
        m_below = b_size <= (MAGNITUDES[i - 1] + MAGNITUDES[i]) / 2
        b_number = tl.where(m_below, b_number, i)
        b_magnitude = tl.where(m_below, b_magnitude, MAGNITUDES[i])
    return b_number, tl.where(b_x > 0, 0, 1), tl.where(m_x, b_magnitude, 0.0)


@jit
def store_keys(
    p_codes, p_signs, i_place, m_store, b_x,
    HEAD_DIM: constexpr, BITS: constexpr, GAIN: constexpr, MAGNITUDES: constexpr,
):  # fmt: skip
    """Store the codes of keys in the pages: bytes, or 32-bit words for 4 bits; return their scales."""
    QUARTER: constexpr = HEAD_DIM // 4
    if BITS == 8:
        b_codes, b_scale = _fp8_codes(b_x)
        for i in tl.static_range(4):
            _store_words(p_codes, i_place, m_store, b_codes[i], 1, i * QUARTER, QUARTER, HEAD_DIM)
    else:
        b_norm, b_numbers, b_signs, b_sizes = _nearest_codes(b_x, HEAD_DIM, BITS, GAIN, MAGNITUDES)
        b_scale = _quotient(b_norm, tl.sqrt_rn(sum_of_products(b_sizes, b_sizes)))
        o_d = tl.arange(0, b_x[0].shape[1])[None, :]
        for i in tl.static_range(2):
            if BITS == 4:
                o_k = o_d % 4
                b_bits = b_numbers[i] << 4 * o_k | b_numbers[i + 2] << 4 * o_k + 16
                b_bits = b_bits | b_signs[i] << 8 * o_k + 7 | b_signs[i + 2] << 8 * o_k + 3
                _store_words(p_codes, i_place, m_store, b_bits, 4, i * (QUARTER // 4), QUARTER // 4, HEAD_DIM // 8)
            elif BITS == 5:
                o_k = 4 * (o_d // 2 % 2)
                for j in tl.static_range(2 * i, 2 * i + 2):
                    b_bits = b_numbers[j] << o_k
                    _store_split_words(p_codes, i_place, m_store, b_bits, j * (QUARTER // 4), QUARTER // 4, 2 * QUARTER)
            else:
                o_k = 4 * (o_d // 2 % 2)
                b_bits = b_numbers[i] << o_k | b_numbers[i + 2] << o_k + 2
                _store_split_words(p_codes, i_place, m_store, b_bits, i * (QUARTER // 4), QUARTER // 4, QUARTER)
        if BITS != 4:
            o_j = o_d % 2
            b_bits = b_signs[0] << o_j | b_signs[2] << o_j + 2 | b_signs[1] << o_j + 4 | b_signs[3] << o_j + 6
            _store_words(p_signs, i_place, m_store, b_bits, 2, 0, QUARTER // 2, HEAD_DIM // 8)
    return b_scale.to(tl.float16)


@jit
def store_values(
    p_codes, p_signs, i_place, m_store, b_x,
    HEAD_DIM: constexpr, BITS: constexpr, GAIN: constexpr, MAGNITUDES: constexpr,
):  # fmt: skip
    """Like `store_keys` for values, as 16-bit words."""
    QUARTER: constexpr = HEAD_DIM // 4
    if BITS == 8:
        b_codes, b_scale = _fp8_codes(b_x)
        for i in tl.static_range(2):
            b_bits = b_codes[i] | b_codes[i + 2] << 8
            _store_words(p_codes, i_place, m_store, b_bits, 1, i * QUARTER, QUARTER, HEAD_DIM // 2)
    else:
        _, b_numbers, b_signs, b_sizes = _nearest_codes(b_x, HEAD_DIM, BITS, GAIN, MAGNITUDES)
        # A code has the sign of its number, so magnitudes are enough.
        b_along = sum_of_products((tl.abs(b_x[0]), tl.abs(b_x[1]), tl.abs(b_x[2]), tl.abs(b_x[3])), b_sizes)
        b_scale = _quotient(b_along, sum_of_products(b_sizes, b_sizes))
        SIDE_BY_SIDE: constexpr = 2 if BITS == 4 else 4
        WIDTH: constexpr = 8 // SIDE_BY_SIDE
        MASK: constexpr = 2**WIDTH - 1
        COUNT: constexpr = QUARTER // SIDE_BY_SIDE
        b_0, b_1 = _rising(b_numbers[0], b_signs[0], BITS), _rising(b_numbers[1], b_signs[1], BITS)
        b_2, b_3 = _rising(b_numbers[2], b_signs[2], BITS), _rising(b_numbers[3], b_signs[3], BITS)
        o_j = WIDTH * (tl.arange(0, b_0.shape[1])[None, :] % SIDE_BY_SIDE)
        b_bits = (b_0 & MASK) << o_j | (b_2 & MASK) << o_j + 8
        _store_words(p_codes, i_place, m_store, b_bits, SIDE_BY_SIDE, 0, COUNT, 2 * COUNT)
        b_bits = (b_1 & MASK) << o_j | (b_3 & MASK) << o_j + 8
        _store_words(p_codes, i_place, m_store, b_bits, SIDE_BY_SIDE, COUNT, COUNT, 2 * COUNT)
        if BITS == 3:
            b_bits = b_0 >> 2 << o_j | b_1 >> 2 << o_j + 1 | b_2 >> 2 << o_j + 8 | b_3 >> 2 << o_j + 9
            _store_words(p_signs, i_place, m_store, b_bits, SIDE_BY_SIDE, 0, COUNT, COUNT)
    return b_scale.to(tl.float16)


@jit
def _rising(b_number, b_sign, BITS: constexpr):
    SIDE: constexpr = 2 ** (BITS - 1)
    return tl.where(b_sign == 1, SIDE - 1 - b_number, SIDE + b_number)


@jit
def _store_words(
    p_words, i_place, m_store, b_bits, SIDE_BY_SIDE: constexpr, FIRST: constexpr, COUNT: constexpr, STRIDE: constexpr
):
    """Add the disjoint bits of neighbours to words, and store `COUNT` of a head's `STRIDE` words from `FIRST` on."""
    WORDS: constexpr = b_bits.shape[1] // SIDE_BY_SIDE
    b_words = b_bits
    if SIDE_BY_SIDE > 1:
        b_words = tl.sum(tl.reshape(b_bits, (b_bits.shape[0], WORDS, SIDE_BY_SIDE)), axis=2)
    o_word = tl.arange(0, WORDS)[None, :]
    p_y = p_words + i_place[:, None] * STRIDE + FIRST + o_word
    tl.store(p_y, b_words.to(p_words.dtype.element_ty), mask=m_store[:, None] & (o_word < COUNT))


@jit
def _store_split_words(p_bytes, i_place, m_store, b_bits, FIRST: constexpr, COUNT: constexpr, STRIDE: constexpr):
    """Store pairs of columns of 3-bit or 5-bit keys. The even pair has bytes 0 and 2 of a word, the odd one 1 and 3: a word may
    span two quarters, a byte does not."""
    PAIRS: constexpr = b_bits.shape[1] // 4
    b_bytes = tl.sum(tl.reshape(b_bits, (b_bits.shape[0], PAIRS, 2, 2)), axis=2)
    o_pair, o_part = tl.arange(0, PAIRS)[None, :, None], tl.arange(0, 2)[None, None, :]
    o_byte = (FIRST + o_pair) // 2 * 4 + (FIRST + o_pair) % 2 + 2 * o_part
    m_byte = m_store[:, None, None] & (o_pair < COUNT)
    tl.store(p_bytes + i_place[:, None, None] * STRIDE + o_byte, b_bytes.to(tl.uint8), mask=m_byte)


AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by bytes of an element."""
EXPONENT_BITS = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e8m0fnu: 0xFF,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
"""Exponent mask by type: all its bits are set only in NaN and infinities. Other types have neither."""


def as_bits(tensor: Tensor) -> Tensor:
    """View a tensor as integers of its element size."""
    return tensor.view(AS_INTEGERS[tensor.element_size()])


def as_kernels_read(tensor: Tensor) -> Tensor:
    """View a tensor as a type that `float32_of` takes: bfloat16 and e4m3 as integers."""
    return as_bits(tensor) if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn) else tensor


@jit
def float32_of(b_x):
    """Convert loaded numbers to float32; int16 is bfloat16. float64 rounds to nearest."""
    is_bfloat16: constexpr = b_x.dtype == tl.int16
    return (b_x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if is_bfloat16 else b_x.to(tl.float32)


@jit
def float32_to_odd(b_x):
    """Like `float32_of`, but float64 rounds to odd, so that the next rounding is exact."""
    b_near = float32_of(b_x)
    if b_x.dtype == tl.float64:
        b_bits, b_back = b_near.to(tl.int32, bitcast=True), b_near.to(tl.float64)
        m_cut = (b_back != b_x) & (b_x == b_x) & (b_bits & 1 == 0)
        b_outward = tl.where(tl.abs(b_back) < tl.abs(b_x), 1, -1)
        b_near = tl.where(m_cut, b_bits + b_outward, b_bits).to(tl.float32, bitcast=True)
    return b_near


@jit
def size_bits(b_x):
    """Return the bits of float32 magnitudes, which sort like them; NaN is above all."""
    return b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def finite_bits(b_x):
    """Like `size_bits`, with 0 for values that are not finite."""
    b_size = size_bits(b_x)
    return tl.where(b_size < 0x7F800000, b_size, 0)


@jit
def bfloat16_bits(b_x):
    """Round to the nearest even bfloat16; return its bits as int16."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    # Unsigned, so that the carry and the shift leave the sign alone.
    b_round = (b_bits.to(tl.uint32, bitcast=True) + 0x7FFF + (b_bits >> 16 & 1).to(tl.uint32)) >> 16
    return tl.where(b_x == b_x, b_round, 0x7FC0).to(tl.int16)


@jit
def e4m3_scale(b_bits):
    """Return the scale of rows from the bits of their amax."""
    b_amax = b_bits.to(tl.float32, bitcast=True)
    b_scale = tl.maximum(tl.div_rn(b_amax, b_amax * 0 + 448.0), LEAST_SCALE)
    return tl.where(b_bits < 0x7F800000, b_scale, float("nan"))


@jit
def e4m3_of(b_x):
    """Like `e4m3_code`, with NaN without a sign."""
    return tl.where(b_x == b_x, e4m3_code(b_x), 0x7F)


@jit
def e4m3_quotients(b_x, scale, PLAIN: constexpr, IS_HALF: constexpr = False):
    """Return `e4m3_of` of the rounded x / scale as uint8. Scales are at least 2^-18 or NaN; |x| is at most 448 times them.

    If IS_HALF, x are numbers of a 16-bit type, and the scales `e4m3_scale` of the largest of them.
    """
    if PLAIN:
        b_codes = e4m3_of(tl.div_rn(b_x, tl.zeros_like(b_x) + scale)).to(tl.uint8)
    else:
        b_codes = _e4m3_near(b_x, scale, IS_HALF).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return b_codes


@jit
def _e4m3_near(b_x, scale, IS_HALF: constexpr):
    """Return numbers with the e4m3 codes of the rounded x / scale, without a division for each."""
    if IS_HALF:
        inverse, rest = inverse_parts(scale)
        b_quotient = tl.fma(b_x, tl.zeros_like(b_x) + inverse, b_x * rest)
    else:
        # A division is many instructions, and a call if x is zero. A product with the rounded inverse, corrected twice by
        # its remainder, is the rounded quotient; below 2^-100 it may not be, but its code is zero anyway.
        b_scale, b_inverse = tl.zeros_like(b_x) + scale, tl.zeros_like(b_x) + tl.div_rn(scale * 0 + 1.0, scale)
        b_product = b_x * b_inverse
        b_quotient = tl.fma(tl.fma(-b_product, b_scale, b_x), b_inverse, b_product)
        b_quotient = tl.fma(tl.fma(-b_quotient, b_scale, b_x), b_inverse, b_quotient)
        # A zero remainder would drop the sign of -0.
        b_quotient = tl.where(b_quotient == 0, b_product, b_quotient)
    return b_quotient


@jit
def inverse_parts(scale):
    """Return 1 / scale rounded down, and the rest: x times their sum gives 16-bit x the e4m3 codes of x / scale.

    A rest below zero would drop the sign of -0. Every bfloat16 below every amax was tried (docs/log.md).
    """
    inverse = tl.div_rn(scale * 0 + 1.0, scale)
    is_above = tl.fma(-inverse, scale, 1.0) < 0
    inverse = tl.where(is_above, (inverse.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), inverse)
    return inverse, tl.fma(-inverse, scale, 1.0) * inverse


@jit
def e4m3_words(b_low, b_high, scale, PLAIN: constexpr):
    """Like `e4m3_quotients` of two numbers of a 16-bit type, as the bytes of int16."""
    if PLAIN:
        b_first = e4m3_quotients(b_low, scale, PLAIN).to(tl.int32)
        b_words = (b_first | e4m3_quotients(b_high, scale, PLAIN).to(tl.int32) << 8).to(tl.int16)
    else:
        b_near = [_e4m3_near(b_low, scale, True), _e4m3_near(b_high, scale, True)]
        b_words = tl.inline_asm_elementwise(E4M3_PAIR_ASM, "=h,f,f", b_near, dtype=tl.int16, is_pure=True, pack=1)
    return b_words


@jit
def low_bfloat16(b_words):
    """Return the float32 value of the first bfloat16 of int32 words."""
    return (b_words << 16).to(tl.float32, bitcast=True)


@jit
def high_bfloat16(b_words):
    """Return the float32 value of the second bfloat16 of int32 words."""
    return (b_words & -65536).to(tl.float32, bitcast=True)


@jit
def bfloat16_words(b_low, b_high, PLAIN: constexpr):
    """Round two numbers to the nearest even bfloat16; return both in an int32."""
    if PLAIN:
        b_words = bfloat16_bits(b_low).to(tl.int32) & 0xFFFF | bfloat16_bits(b_high).to(tl.int32) << 16
    else:
        b_words = tl.inline_asm_elementwise(
            BFLOAT16_PAIR_ASM, "=r,f,f", [b_low, b_high], dtype=tl.int32, is_pure=True, pack=1
        )
    return b_words


@jit
def store_coded_groups(
    p_codes, p_scales, b_y, m_y, group_stride, size, GROUP: constexpr, PLAIN: constexpr, IS_HALF: constexpr = False
):  # fmt: skip
    """Store numbers of a row as e4m3 codes, with a scale for every group of columns; `m_y` masks codes."""
    BLOCK: constexpr = b_y.shape[0]
    o_g = tl.arange(0, BLOCK // GROUP)
    b_groups = tl.reshape(b_y, (BLOCK // GROUP, GROUP))
    b_scale = e4m3_scale(tl.max(size_bits(b_groups), axis=1))
    b_codes = e4m3_quotients(b_groups, tl.broadcast_to(b_scale[:, None], (BLOCK // GROUP, GROUP)), PLAIN, IS_HALF)
    tl.store(p_codes, tl.reshape(b_codes, (BLOCK,)), mask=m_y)
    tl.store(p_scales + o_g.to(tl.int64) * group_stride, b_scale, mask=o_g * GROUP < size)


@jit
def int8_of(b_x):
    """Round to the nearest even integer in -127 to 127; return its byte as int32; 0 for NaN."""
    # At 1.5 * 2^23 the steps of float32 are 1: the sum rounds, and its last byte is the integer.
    b_near = tl.minimum(tl.maximum(tl.where(b_x == b_x, b_x, 0.0), -127.0), 127.0) + 12582912.0
    return b_near.to(tl.int32, bitcast=True) & 0xFF


@jit
def e2m1_of(b_x):
    """Round to the nearest even e2m1 number; return its code as int32. Zero has no sign, and NaN is zero."""
    b_size = tl.abs(b_x)
    b_code = (b_size > 0.25).to(tl.int32) + (b_size >= 0.75).to(tl.int32) + (b_size > 1.25).to(tl.int32)
    b_code += (b_size >= 1.75).to(tl.int32) + (b_size > 2.5).to(tl.int32) + (b_size >= 3.5).to(tl.int32)
    b_code += (b_size > 5.0).to(tl.int32)
    return tl.where((b_code > 0) & (b_x < 0), b_code + 8, b_code)


@jit
def e4m3_value(b_code):
    """Decode e4m3 codes (int32) to float32."""
    b_size = b_code & 0x7F
    b_normal = ((b_size << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    b_value = tl.where(b_size < 8, b_size.to(tl.float32) * 0.001953125, b_normal)
    b_value = tl.where(b_size == 0x7F, float("nan"), b_value)
    # Set the sign bit: a minus would be a subtraction, which loses -0.
    return (b_value.to(tl.int32, bitcast=True) | (b_code & 0x80) << 24).to(tl.float32, bitcast=True)


@jit
def e8m0_bits(b_code):
    """Return the float32 bits of 2^(e - 127) for byte exponents, as int32; NaN for 255."""
    b_exponent = b_code.to(tl.int32)
    b_bits = tl.where(b_exponent == 0, 0x400000, b_exponent << 23)  # 2^-127 is below the normal numbers
    return tl.where(b_exponent == 255, 0x7FC00000, b_bits)


@jit
def narrowed_bits(b_x, TARGET: constexpr):
    """Convert loaded numbers to "float64", "float32", "float16" or "bfloat16", rounded once; return their bits.

    Bytes are exponents of two, for "float32" only.
    """
    if TARGET == "bfloat16":
        b_bits = bfloat16_bits(float32_to_odd(b_x))
    elif TARGET == "float16":
        b_bits = float32_to_odd(b_x).to(tl.float16).to(tl.int16, bitcast=True)
    elif TARGET == "float32":
        b_bits = e8m0_bits(b_x) if b_x.dtype == tl.uint8 else float32_of(b_x).to(tl.int32, bitcast=True)
    else:
        b_bits = float32_of(b_x).to(tl.float64).to(tl.int64, bitcast=True)
    return b_bits


@jit
def quantized_numbers(b_x, PLAIN: constexpr):
    """Round float32 to an e4m3 operand; in the interpreter, to the same numbers in half precision."""
    if PLAIN:
        b_numbers = e4m3_value(e4m3_code(b_x)).to(tl.float16)
    else:
        # The instruction saturates, and rounds as `e4m3_code` does.
        b_numbers = b_x.to(tl.float8e4nv)
    return b_numbers


@jit
def loaded_numbers(b_codes, PLAIN: constexpr):
    """Convert loaded codes to an e4m3 operand; the interpreter loads bytes (see `kernel_codes`)."""
    if PLAIN:
        b_numbers = e4m3_value(b_codes.to(tl.int32)).to(tl.float16)
    else:
        b_numbers = b_codes
    return b_numbers


def kernel_codes(codes: Tensor) -> Tensor:
    """View codes as a kernel takes them: the interpreter takes e4m3 as bytes."""
    return codes.view(torch.uint8) if is_interpreted() and codes.dtype == torch.float8_e4m3fn else codes

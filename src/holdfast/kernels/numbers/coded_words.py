"""Pieces of kernels that code heads: the nearest codes, e4m3 numbers, scales, and the words of a page (quant/head_codes.py).

A head is four blocks, its quarters: what a word holds lies at the same place of several of them, or side by side in one.
"""

# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false

# ruff: noqa: ANN001, ANN201, ANN202 the arguments of kernels have no types

from holdfast.kernels.triton_compat import constexpr, jit, tl


@jit
def quarters(p_x, m_x, HEAD_DIM: constexpr):
    """The quarters of heads as float32, from pointers to the first."""
    b_0 = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_1 = tl.load(p_x + HEAD_DIM // 4, mask=m_x, other=0.0).to(tl.float32)
    b_2 = tl.load(p_x + 2 * (HEAD_DIM // 4), mask=m_x, other=0.0).to(tl.float32)
    b_3 = tl.load(p_x + 3 * (HEAD_DIM // 4), mask=m_x, other=0.0).to(tl.float32)
    return b_0, b_1, b_2, b_3


@jit
def sum_of_products(b_x, b_y):
    """A number for each head."""
    return tl.sum(b_x[0] * b_y[0] + b_x[1] * b_y[1] + b_x[2] * b_y[2] + b_x[3] * b_y[3], axis=1)


@jit
def _quotient(b_x, b_y):
    """A scale: at most what float16 holds. NaN stays."""
    b_scale = tl.div_rn(b_x, b_y)
    return tl.where(b_scale > 65504.0, 65504.0, b_scale)


@jit
def _fp8_codes(b_x):
    """The e4m3 numbers of heads as int32, quarter by quarter, and the scale that takes the largest of a head to 448."""
    # As integers: NaN is above all numbers there, and is not lost.
    b_largest = tl.maximum(_size_bits(b_x[0]), _size_bits(b_x[1]))
    b_largest = tl.maximum(b_largest, tl.maximum(_size_bits(b_x[2]), _size_bits(b_x[3])))
    b_largest = tl.max(b_largest, axis=1).to(tl.float32, bitcast=True)
    b_scale = _quotient(b_largest, tl.full(b_largest.shape, 448.0, tl.float32)).to(tl.float16)
    b_divisor = tl.where(b_scale == 0, 1.0, b_scale.to(tl.float32))
    b_factor = tl.where(b_scale == 0, 0.0, tl.div_rn(tl.full(b_scale.shape, 1.0, tl.float32), b_divisor))[:, None]
    b_0, b_1 = e4m3_code(b_x[0] * b_factor), e4m3_code(b_x[1] * b_factor)
    b_2, b_3 = e4m3_code(b_x[2] * b_factor), e4m3_code(b_x[3] * b_factor)
    return (b_0, b_1, b_2, b_3), b_scale


@jit
def _size_bits(b_x):
    """The bits of absolute values, which rise with them."""
    return b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def e4m3_code(b_x):
    """The bits of the nearest e4m3 number as int32: of two the even one, and no larger than 448."""
    # In integers, because not every GPU has the instruction, and the interpreter has it wrong.
    b_size = tl.minimum(_size_bits(b_x), 0x43E00000)
    b_normal = (b_size + 0x7FFFF + (b_size >> 20 & 1) >> 20) - 960
    # Below 2^-6 the steps are 2^-9: those of float32 at 2^14, where the sum rounds.
    b_small = (b_size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    b_code = tl.where(b_size < 0x3C800000, b_small, b_normal)
    b_code = tl.where(b_x != b_x, 0x7F, b_code)
    return b_code | b_x.to(tl.int32, bitcast=True) >> 24 & 0x80


@jit
def _nearest_codes(b_x, HEAD_DIM: constexpr, BITS: constexpr, GAIN: constexpr, MAGNITUDES: constexpr):
    """The norm of heads; then by quarter: numbers of magnitudes, 1 where the sign is negative, and the magnitudes."""
    m_x = (tl.arange(0, b_x[0].shape[1]) < HEAD_DIM // 4)[None, :]
    b_norm = tl.sqrt_rn(sum_of_products(b_x, b_x))
    b_factor = tl.div_rn(tl.full(b_norm.shape, GAIN, tl.float32), tl.where(b_norm > 0, b_norm, 1.0))[:, None]
    b_0, b_1 = _nearest(b_x[0] * b_factor, m_x, BITS, MAGNITUDES), _nearest(b_x[1] * b_factor, m_x, BITS, MAGNITUDES)
    b_2, b_3 = _nearest(b_x[2] * b_factor, m_x, BITS, MAGNITUDES), _nearest(b_x[3] * b_factor, m_x, BITS, MAGNITUDES)
    b_numbers = b_0[0], b_1[0], b_2[0], b_3[0]
    b_signs = b_0[1], b_1[1], b_2[1], b_3[1]
    return b_norm, b_numbers, b_signs, (b_0[2], b_1[2], b_2[2], b_3[2])


@jit
def _nearest(b_x, m_x, BITS: constexpr, MAGNITUDES: constexpr):
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
    p_codes,
    p_signs,
    i_place,
    m_store,
    b_x,
    HEAD_DIM: constexpr,
    BITS: constexpr,
    GAIN: constexpr,
    MAGNITUDES: constexpr,
):
    """Code heads into their places among all heads of the pages: bytes, or 32-bit words for 4 bits; gives their scales."""
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
            else:
                o_k = 4 * (o_d // 2 % 2)
                b_bits = b_numbers[i] << o_k | b_numbers[i + 2] << o_k + 2
                _store_split_words(p_codes, i_place, m_store, b_bits, i * (QUARTER // 4), QUARTER // 4, QUARTER)
        if BITS == 3:
            o_j = o_d % 2
            b_bits = b_signs[0] << o_j | b_signs[2] << o_j + 2 | b_signs[1] << o_j + 4 | b_signs[3] << o_j + 6
            _store_words(p_signs, i_place, m_store, b_bits, 2, 0, QUARTER // 2, HEAD_DIM // 8)
    return b_scale.to(tl.float16)


@jit
def store_values(
    p_codes,
    p_signs,
    i_place,
    m_store,
    b_x,
    HEAD_DIM: constexpr,
    BITS: constexpr,
    GAIN: constexpr,
    MAGNITUDES: constexpr,
):
    """The same for values, as 16-bit words."""
    QUARTER: constexpr = HEAD_DIM // 4
    if BITS == 8:
        b_codes, b_scale = _fp8_codes(b_x)
        for i in tl.static_range(2):
            b_bits = b_codes[i] | b_codes[i + 2] << 8
            _store_words(p_codes, i_place, m_store, b_bits, 1, i * QUARTER, QUARTER, HEAD_DIM // 2)
    else:
        _, b_numbers, b_signs, b_sizes = _nearest_codes(b_x, HEAD_DIM, BITS, GAIN, MAGNITUDES)
        # A code has the sign of its number, so that sizes will do.
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
    p_words,
    i_place,
    m_store,
    b_bits,
    SIDE_BY_SIDE: constexpr,
    FIRST: constexpr,
    COUNT: constexpr,
    STRIDE: constexpr,
):
    """Bits of neighbours, which share no place, become words: `COUNT` of each head from its `FIRST`, of `STRIDE` in all."""
    WORDS: constexpr = b_bits.shape[1] // SIDE_BY_SIDE
    b_words = b_bits
    if SIDE_BY_SIDE > 1:
        b_words = tl.sum(tl.reshape(b_bits, (b_bits.shape[0], WORDS, SIDE_BY_SIDE)), axis=2)
    o_word = tl.arange(0, WORDS)[None, :]
    p_y = p_words + i_place[:, None] * STRIDE + FIRST + o_word
    tl.store(p_y, b_words.to(p_words.dtype.element_ty), mask=m_store[:, None] & (o_word < COUNT))


@jit
def _store_split_words(p_bytes, i_place, m_store, b_bits, FIRST: constexpr, COUNT: constexpr, STRIDE: constexpr):
    """Pairs of columns of keys of 3 bits. A word of two pairs may lie in two quarters, but a byte is one part of one pair:
    the even pair's bytes are 0 and 2 of a word, the odd one's 1 and 3."""
    PAIRS: constexpr = b_bits.shape[1] // 4
    b_bytes = tl.sum(tl.reshape(b_bits, (b_bits.shape[0], PAIRS, 2, 2)), axis=2)
    o_pair, o_part = tl.arange(0, PAIRS)[None, :, None], tl.arange(0, 2)[None, None, :]
    o_byte = (FIRST + o_pair) // 2 * 4 + (FIRST + o_pair) % 2 + 2 * o_part
    m_byte = m_store[:, None, None] & (o_pair < COUNT)
    tl.store(p_bytes + i_place[:, None, None] * STRIDE + o_byte, b_bytes.to(tl.uint8), mask=m_byte)

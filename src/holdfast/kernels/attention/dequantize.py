"""Decoding of codes inside a kernel: words of a page to half-precision operands, two or four numbers per instruction.

A part of a head is one bit field of all its words (quant/kv_quantize.py). Keys are looked up: the magnitudes in a word select
bytes of eight e4m3 numbers (prmt; two of them for 5 bits), and its signs are at e4m3's sign bits. Values are computed: their bits are or-ed into the
mantissa of 512, and a cubic in packed half precision does the rest.

PLAIN computes the same bits without assembler, for the interpreter.
"""

from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl
from holdfast.quant.kv_quantize import CUBIC_3_BITS, CUBIC_4_BITS, KEY_CODEBOOKS
from holdfast.quant.latent_quantize import LATENT_STEP

# Triton resolves branches on constants at compile time, so both sides must stand in an if and an else.
# Triton cannot unpack into a tuple, but adds tuples.


def fp8_byte(number: float) -> int:
    """Return the e4m3 byte of a positive number that e4m3 represents."""
    exponent = 7
    while number >= 2:
        number, exponent = number / 2, exponent + 1
    while number < 1:
        number, exponent = number * 2, exponent - 1
    return exponent << 3 | int((number - 1) * 8)


def fp8_word(magnitudes: tuple[float, ...]) -> str:
    """Return four e4m3 bytes as an assembler constant."""
    return f"0x{sum(fp8_byte(number) << 8 * i for i, number in enumerate(magnitudes)):08x}"


def fp16_twice(number: float) -> str:
    """Return a float16 twice, as an assembler constant; it has few bits and either sign."""
    if number < 0:
        return f"0x{int(fp16_twice(-number), 16) | 0x80008000:08x}"
    exponent = 15
    while number >= 2:
        number, exponent = number / 2, exponent + 1
    while number < 1:
        number, exponent = number * 2, exponent - 1
    bits = exponent << 10 | int((number - 1) * 1024)
    return f"0x{bits << 16 | bits:08x}"


_KEY_5, _KEY_4, _KEY_3 = (KEY_CODEBOOKS[bits].magnitudes for bits in (5, 4, 3))
KEYS_4_TEXT = f"""{{
.reg .b32 m, s, t;
and.b32 m, $2, 0x77777777;
prmt.b32 t, {fp8_word(_KEY_4[:4])}, {fp8_word(_KEY_4[4:])}, m;
lop3.b32 $0, t, $2, 0x80808080, 0xF8;
shr.u32 m, m, 16;
prmt.b32 t, {fp8_word(_KEY_4[:4])}, {fp8_word(_KEY_4[4:])}, m;
shl.b32 s, $2, 4;
lop3.b32 $1, t, s, 0x80808080, 0xF8;
}}"""
"""$2: four bytes of codes; $0, $1: four e4m3 numbers each of parts 0 and 1. 0xF8 is a | (b & c)."""


def keys_5_asm(is_halved: bool) -> str:
    """Return assembler from code bytes of parts 0 and 1, those of parts 2 and 3, and sign bits to four parts; or from code
    bytes of the lower half of columns, those of the upper half, and sign bytes to four parts each.

    A selector of 8 and above copies the sign of a byte, which is 0: so one permutation knows the lower magnitudes, another
    the upper ones, and the result is both or-ed. Sign bits are those of `keys_3_asm`.
    """
    lower, upper = (f"{fp8_word(half[:4])}, {fp8_word(half[4:])}" for half in (_KEY_5[:8], _KEY_5[8:]))
    lines = ["{", ".reg .b32 m, n, s, t, u, v;"]
    if is_halved:
        halves = ((("$8", "$9"), "$12", 0), (("$10", "$11"), "$12", 4))
    else:
        halves = ((("$4", "$5"), "v", 0),)
        lines += ["shr.u32 s, $6, 4;", "lop3.b32 v, $6, s, $7, 0xD8;"]
    for half, (pieces, signs, first_bit) in enumerate(halves):
        for part in range(4):
            if part % 2:
                lines += ["shr.u32 m, m, 16;", "shr.u32 n, n, 16;"]
            else:
                lines += [f"mov.b32 m, {pieces[part // 2]};", "xor.b32 n, m, 0x88888888;"]
            lines += [
                f"prmt.b32 t, {lower}, m;",
                f"prmt.b32 u, {upper}, n;",
                f"shl.b32 s, {signs}, {7 - part - first_bit};",
            ]
            lines += ["and.b32 s, s, 0x80808080;", f"lop3.b32 ${4 * half + part}, t, u, s, 0xFE;"]
    return "\n".join([*lines, "}"])


def keys_3_asm(is_halved: bool) -> str:
    """Return assembler from code bytes and sign bits to four parts; or from bytes of both halves to four parts each.

    The sign bits of a column's parts are the lower half of a byte; the upper half for columns of the upper half.
    """
    if is_halved:
        halves = (("$8", "$10", 0), ("$9", "$10", 4))
        lines = ["{", ".reg .b32 m, n, s, t;"]
    else:
        halves = (("$4", "s", 0),)
        lines = ["{", ".reg .b32 m, n, s, t;", "shr.u32 s, $5, 4;", "lop3.b32 s, $5, s, $6, 0xD8;"]
        lines += [".reg .b32 v;", "mov.b32 v, s;"]
        halves = (("$4", "v", 0),)
    for half, (codes, signs, first_bit) in enumerate(halves):
        lines += [f"and.b32 m, {codes}, 0x33333333;", f"shr.u32 n, {codes}, 2;", "and.b32 n, n, 0x33333333;"]
        for part, selector in enumerate(("m", "m", "n", "n")):
            if part % 2:
                lines.append(f"shr.u32 {selector}, {selector}, 16;")
            lines.append(f"prmt.b32 t, {fp8_word(_KEY_3)}, {fp8_word(_KEY_3)}, {selector};")
            lines.append(f"shl.b32 s, {signs}, {7 - part - first_bit};")
            lines.append(f"lop3.b32 ${4 * half + part}, t, s, 0x80808080, 0xF8;")
    return "\n".join([*lines, "}"])


def _cubic_lines(out: str, shift: int, middle: float, beta: float) -> list[str]:
    """Return lines that compute t + beta t^3, with t = n - middle and x = 512 + n 2^shift."""
    lines = [f"mov.b32 c, {fp16_twice(-(512 / 2**shift + middle))};", "add.rn.f16x2 t, x, c;"]
    if shift:
        lines[1:] = [f"mov.b32 f, {fp16_twice(2.0**-shift)};", "fma.rn.f16x2 t, x, f, c;"]
    lines += [f"mov.b32 b, {fp16_twice(beta)};", f"mov.b32 i, {fp16_twice(1.0)};"]
    return [*lines, "mul.rn.f16x2 u, t, t;", "fma.rn.f16x2 u, u, b, i;", f"mul.rn.f16x2 {out}, u, t;"]


def values_4_asm() -> str:
    # Shifted by one, so that a code is a whole number above 512, whose mantissa counts halves.
    lines = ["{", ".reg .b32 y, z, x, t, u, b, c, f, i;", "shl.b32 y, $4, 1;", "shr.u32 z, $4, 7;"]
    for part in range(4):
        mask = 0x001E001E << 4 * (part % 2)
        lines.append(f"lop3.b32 x, {'yz'[part // 2]}, 0x{mask:08x}, 0x60006000, 0xEA;")
        lines += _cubic_lines(f"${part}", 4 * (part % 2), 7.5, CUBIC_4_BITS)
    return "\n".join([*lines, "}"])


def values_3_asm() -> str:
    # $8: two words of two bits a part; $9: two words of third bits; $10: 1 where the odd ones of them belong to the column.
    lines = ["{", ".reg .b32 y, z, h, yh, zh, x, t, u, b, c, f, i;", "shl.b32 y, $8, 1;", "shr.u32 z, $8, 7;"]
    lines += ["shr.u32 h, $9, 1;", "lop3.b32 h, $9, h, $10, 0xD8;", "shl.b32 yh, h, 3;", "shr.u32 zh, h, 5;"]
    for part in range(8):
        low, high = 0x00060006 << 2 * (part % 4), 0x00080008 << 2 * (part % 4)
        lines.append(f"lop3.b32 x, {'yz'[part // 4]}, 0x{low:08x}, 0x60006000, 0xEA;")
        lines.append(f"lop3.b32 x, x, {'yz'[part // 4]}h, 0x{high:08x}, 0xF8;")
        lines += _cubic_lines(f"${part}", 2 * (part % 4), 3.5, CUBIC_3_BITS)
    return "\n".join([*lines, "}"])


def latents_4_asm() -> str:
    # Bits 4 j to 4 j + 3 of two words become whole numbers above 16 or 256; t is exact, and the cubic has no coefficient.
    lines = ["{", ".reg .b32 y, z, x, t, u, b, c, i;", "shl.b32 y, $4, 2;", "shr.u32 z, $4, 6;"]
    lines += [f"mov.b32 b, {fp16_twice(LATENT_STEP)};", f"mov.b32 i, {fp16_twice(1.0)};"]
    for part in range(4):
        above, mask = (16, 0x03C003C0) if part % 2 else (256, 0x003C003C)
        lines.append(f"lop3.b32 x, {'yz'[part // 2]}, 0x{mask:08x}, {fp16_twice(above)}, 0xEA;")
        lines += [f"mov.b32 c, {fp16_twice(-(above + 7.5) * LATENT_STEP)};", "fma.rn.f16x2 t, x, b, c;"]
        lines += ["fma.rn.f16x2 u, t, t, i;", f"mul.rn.f16x2 ${part}, u, t;"]
    return "\n".join([*lines, "}"])


VALUES_8_TEXT = """{
.reg .b32 a, b;
.reg .b16 p, q, r, s;
prmt.b32 a, $2, 0, 0x3120;
mov.b32 {p, q}, a;
cvt.rn.f16x2.e4m3x2 $0, p;
cvt.rn.f16x2.e4m3x2 $1, q;
}"""
"""$2: two words of two bytes; $0: both lower bytes, $1: both upper bytes, as half precision."""

KEYS_5_ASM = kernel_constant(keys_5_asm(is_halved=False))
KEYS_5_HALVES_ASM = kernel_constant(keys_5_asm(is_halved=True))
KEYS_4_ASM = kernel_constant(KEYS_4_TEXT)
KEYS_3_ASM = kernel_constant(keys_3_asm(is_halved=False))
KEYS_3_HALVES_ASM = kernel_constant(keys_3_asm(is_halved=True))
VALUES_8_ASM = kernel_constant(VALUES_8_TEXT)
VALUES_4_ASM = kernel_constant(values_4_asm())
VALUES_3_ASM = kernel_constant(values_3_asm())
LATENTS_4_ASM = kernel_constant(latents_4_asm())
KEY_5 = kernel_constant(_KEY_5)
STEP = kernel_constant(LATENT_STEP)
CUBIC_4 = kernel_constant(CUBIC_4_BITS)
CUBIC_3 = kernel_constant(CUBIC_3_BITS)
EXP2_ASM = kernel_constant("ex2.approx.ftz.f32 $0, $1;")
LOG2_ASM = kernel_constant("lg2.approx.ftz.f32 $0, $1;")


@jit
def fast_exp2(x, PLAIN: constexpr):
    """Return 2 ** x, with denormal results flushed to zero."""
    if PLAIN:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(EXP2_ASM, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def fast_log2(x, PLAIN: constexpr):
    """Return log2 of a positive number; -inf for zero."""
    if PLAIN:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(LOG2_ASM, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def key_numbers(b_codes, PLAIN: constexpr):
    """Decode 8-bit keys: one part, in half precision."""
    if PLAIN:
        return _fp8_numbers(b_codes.to(tl.int32))
    else:
        return b_codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@jit
def key_parts_4(b_codes, o_c, PLAIN: constexpr):
    """Decode 4-bit keys: two parts. `b_codes` are bytes; if PLAIN, the word of each column, by column."""
    if PLAIN:
        k = (o_c % 4)[None, :]
        b_0 = _looked_up_4(b_codes >> (4 * k) & 7, b_codes >> (8 * k + 7) & 1)
        b_1 = _looked_up_4(b_codes >> (4 * k + 16) & 7, b_codes >> (8 * k + 3) & 1)
        return b_0, b_1
    else:
        b_0, b_1 = tl.inline_asm_elementwise(
            KEYS_4_ASM, "=r,=r,r", [b_codes], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
        )
        return b_0.to(tl.float16), b_1.to(tl.float16)


@jit
def key_parts_5(b_lower, b_upper, b_signs, o_c, HALF_COLUMNS: constexpr, PLAIN: constexpr):
    """Decode 5-bit keys: four parts, from codes of the first two and of the other two. Signs lie as those of 3 bits."""
    if PLAIN:
        k = 4 * (o_c % 4)[None, :]
        b_bits = b_signs.to(tl.int32) >> tl.where(o_c < HALF_COLUMNS, 0, 4)[None, :]
        b_0 = _looked_up_5(b_lower >> k & 15, b_bits & 1)
        b_1 = _looked_up_5(b_lower >> (k + 16) & 15, b_bits >> 1 & 1)
        b_2 = _looked_up_5(b_upper >> k & 15, b_bits >> 2 & 1)
        b_3 = _looked_up_5(b_upper >> (k + 16) & 15, b_bits >> 3 & 1)
        return b_0, b_1, b_2, b_3
    else:
        b_half = tl.where(o_c < HALF_COLUMNS, 0, 255).to(tl.uint8)[None, :]
        b_half = tl.broadcast_to(b_half, b_lower.shape)
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            KEYS_5_ASM, "=r,=r,=r,=r,r,r,r,r", [b_lower, b_upper, b_signs, b_half],
            (tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv), True, 4,
        )  # fmt: skip
        return b_0.to(tl.float16), b_1.to(tl.float16), b_2.to(tl.float16), b_3.to(tl.float16)


@jit
def key_parts_3(b_codes, b_signs, o_c, HALF_COLUMNS: constexpr, PLAIN: constexpr):
    """Decode 3-bit keys: four parts. `b_signs` has each sign byte twice: for a column and the one half a row later."""
    if PLAIN:
        k = 4 * (o_c % 4)[None, :]
        b_bits = b_signs.to(tl.int32) >> tl.where(o_c < HALF_COLUMNS, 0, 4)[None, :]
        b_0 = _looked_up_3(b_codes >> k & 3, b_bits & 1)
        b_1 = _looked_up_3(b_codes >> (k + 16) & 3, b_bits >> 1 & 1)
        b_2 = _looked_up_3(b_codes >> (k + 2) & 3, b_bits >> 2 & 1)
        b_3 = _looked_up_3(b_codes >> (k + 18) & 3, b_bits >> 3 & 1)
        return b_0, b_1, b_2, b_3
    else:
        b_upper = tl.where(o_c < HALF_COLUMNS, 0, 255).to(tl.uint8)[None, :]
        b_upper = tl.broadcast_to(b_upper, b_codes.shape)
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            KEYS_3_ASM, "=r,=r,=r,=r,r,r,r", [b_codes, b_signs, b_upper],
            (tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv), True, 4,
        )  # fmt: skip
        return b_0.to(tl.float16), b_1.to(tl.float16), b_2.to(tl.float16), b_3.to(tl.float16)


@jit
def key_parts_3_halves(b_lower, b_upper, b_signs):
    """Decode 3-bit keys if a half row is whole words: four parts of the lower and of the upper half of columns."""
    b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = tl.inline_asm_elementwise(
        KEYS_3_HALVES_ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [b_lower, b_upper, b_signs],
        (tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv),
        True, 4,
    )  # fmt: skip
    b_0, b_1, b_2, b_3 = b_0.to(tl.float16), b_1.to(tl.float16), b_2.to(tl.float16), b_3.to(tl.float16)
    return b_0, b_1, b_2, b_3, b_4.to(tl.float16), b_5.to(tl.float16), b_6.to(tl.float16), b_7.to(tl.float16)


@jit
def key_parts_5_halves(b_lower_0, b_lower_2, b_upper_0, b_upper_2, b_signs):
    """Decode 5-bit keys if a half row is whole words: four parts of the lower and of the upper half of columns.

    Of each half: codes of parts 0 and 1, and of parts 2 and 3.
    """
    b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = tl.inline_asm_elementwise(
        KEYS_5_HALVES_ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r", [b_lower_0, b_lower_2, b_upper_0, b_upper_2, b_signs],
        (tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv),
        True, 4,
    )  # fmt: skip
    b_0, b_1, b_2, b_3 = b_0.to(tl.float16), b_1.to(tl.float16), b_2.to(tl.float16), b_3.to(tl.float16)
    return b_0, b_1, b_2, b_3, b_4.to(tl.float16), b_5.to(tl.float16), b_6.to(tl.float16), b_7.to(tl.float16)


@jit
def value_parts_8(b_words, PLAIN: constexpr):
    """Decode 8-bit values: two parts."""
    if PLAIN:
        b_words = b_words.to(tl.int32)
        return _fp8_numbers(b_words & 255), _fp8_numbers(b_words >> 8 & 255)
    else:
        return tl.inline_asm_elementwise(
            VALUES_8_ASM, "=r,=r,r", [b_words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@jit
def value_parts_4(b_words, PLAIN: constexpr):
    """Decode 4-bit values: four parts."""
    if PLAIN:
        b_words = b_words.to(tl.int32)
        b_parts = ()
        for i in tl.static_range(4):
            b_parts = b_parts + (_cubic((b_words >> 4 * i & 15).to(tl.float32) - 7.5, CUBIC_4),)
        return b_parts
    else:
        return tl.inline_asm_elementwise(
            VALUES_4_ASM, "=r,=r,=r,=r,r", [b_words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )


@jit
def latent_parts_4(b_words, PLAIN: constexpr):
    """Decode 4-bit latents: four parts, without their scale."""
    if PLAIN:
        b_words = b_words.to(tl.int32)
        b_parts = ()
        for i in tl.static_range(4):
            b_parts = b_parts + (_cubic(((b_words >> 4 * i & 15).to(tl.float32) - 7.5) * STEP, 1.0),)
        return b_parts
    else:
        return tl.inline_asm_elementwise(
            LATENTS_4_ASM, "=r,=r,=r,=r,r", [b_words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )


@jit
def upper_columns(p_upper, o_c):
    """Return [C, 1]: -1 for columns in the upper half of a row of words, else 0.

    The mask is loaded (negative means upper). If computed, codes could not go straight from shared memory to operands.
    Only the two bytes with a number's sign are read.
    """
    PIECES: constexpr = p_upper.dtype.element_ty.primitive_bitwidth // 16
    return tl.load(p_upper.to(tl.pointer_type(tl.int16)) + (o_c[:, None] * PIECES + PIECES - 1)) >> 15


@jit
def value_parts_3(b_words, b_signs, b_upper, PLAIN: constexpr):
    """Decode 3-bit values: eight parts.

    `b_signs` has each word of third bits twice: even bits for a column, odd bits for the one half a row later, where `b_upper`
    is -1.
    """
    if PLAIN:
        b_words = b_words.to(tl.int32)
        b_bits = b_signs.to(tl.int32) >> (b_upper.to(tl.int32) & 1)
        b_parts = ()
        for i in tl.static_range(8):
            b_number = (b_words >> 2 * i & 3) + (b_bits >> 2 * i & 1) * 4
            b_parts = b_parts + (_cubic(b_number.to(tl.float32) - 3.5, CUBIC_3),)
        return b_parts
    else:
        b_upper = tl.broadcast_to(b_upper, b_words.shape)
        return tl.inline_asm_elementwise(
            VALUES_3_ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [b_words, b_signs, b_upper],
            (tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            True, 2,
        )  # fmt: skip


@jit
def _fp8_numbers(b_bytes):
    """Convert e4m3 bytes in int32 to half precision."""
    b_exponent = b_bytes >> 3 & 15
    b_mantissa = (b_bytes & 7).to(tl.float32)
    b_normal = (8.0 + b_mantissa) * tl.exp2((b_exponent - 10).to(tl.float32))
    b_size = tl.where(b_exponent == 0, b_mantissa * 0.001953125, b_normal)
    return tl.where((b_bytes >> 7 & 1) == 1, -b_size, b_size).to(tl.float16)


@jit
def _looked_up_5(b_index, b_sign):
    b_size = tl.full(b_index.shape, KEY_5[0], tl.float32)
    for i in tl.static_range(1, 16):
        b_size = tl.where(b_index == i, KEY_5[i], b_size)
    return tl.where(b_sign == 1, -b_size, b_size).to(tl.float16)


@jit
def _looked_up_4(b_index, b_sign):
    b_low = tl.where(b_index < 2, tl.where(b_index == 0, 0.140625, 0.40625), tl.where(b_index == 2, 0.6875, 1.0))
    b_high = tl.where(b_index < 6, tl.where(b_index == 4, 1.375, 1.75), tl.where(b_index == 6, 2.25, 3.0))
    b_size = tl.where(b_index < 4, b_low, b_high)
    return tl.where(b_sign == 1, -b_size, b_size).to(tl.float16)


@jit
def _looked_up_3(b_index, b_sign):
    b_size = tl.where(b_index < 2, tl.where(b_index == 0, 0.1875, 0.5625), tl.where(b_index == 2, 1.0, 1.625))
    return tl.where(b_sign == 1, -b_size, b_size).to(tl.float16)


@jit
def _cubic(b_t, BETA: constexpr):
    """Compute t + BETA t^3, rounded where half precision rounds."""
    b_u = (b_t * b_t * BETA + 1.0).to(tl.float16).to(tl.float32)
    return (b_u * b_t).to(tl.float16)

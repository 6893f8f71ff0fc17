"""Decoding of 4-bit codes (e2m1) and of their scales (e8m0: powers of two), for kernels.

A byte holds the codes of two neighbouring inputs, the first in its low half. A scale is a byte for 32 inputs of a row.
Each kernel decodes codes in the order in which it multiplies them:

    e2m1_pair_lines    half precision, two codes of a word at once    GEMV (kernels/gemm/packed_gemv.py)
    E2M1_PAIRS_ASM     bfloat16 with scales, two codes at once        tiles on Hopper (kernels/gemm/packed_tiles.py)
    e2m1_wide_parts    bfloat16, both halves of a byte                grouped GEMM on other GPUs (kernels/moe/grouped_gemm.py)
    e2m1_parts         half precision, both halves of a byte          the same, for odd sizes and other types
    e2m1_numbers       half precision, one code                       dense tiles, and every kernel in the interpreter
"""

from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl

E2M1_ASM_TEXT = """{
.reg .b32 m, s, t, u;
and.b32 m, $2, 0x77777777;
prmt.b32 t, 0x3C383000, 0x4C484440, m;
shr.u32 m, m, 16;
prmt.b32 u, 0x3C383000, 0x4C484440, m;
shl.b32 s, $2, 4;
prmt.b32 m, t, u, 0x6420;
lop3.b32 $0, m, s, 0x80808080, 0xF8;
prmt.b32 m, t, u, 0x7531;
lop3.b32 $1, m, $2, 0x80808080, 0xF8;
}"""
"""$2: four bytes of codes; $0: their lower halves as e4m3, looked up among 0 0.5 1 1.5 2 3 4 6; $1: their upper halves.
0xF8 is a | (b & c)."""


def e2m1_wide_asm() -> str:
    """Assembler: $4 is four bytes of codes; $0, $1 are their low nibbles as bfloat16 by table lookup; $2, $3 the high ones."""
    lines = ["{", ".reg .b32 m, s, t, u, v;", "and.b32 m, $4, 0x77777777;"]
    for half, (low, high) in enumerate((("$0", "$2"), ("$1", "$3"))):
        if half:
            lines.append("shr.u32 m, m, 16;")
        lines += ["prmt.b32 t, 0x3F3F3F00, 0x40404040, m;", "prmt.b32 u, 0xC0800000, 0xC0804000, m;"]
        lines += [f"prmt.b32 s, $4, 0x0, {('0x1404', '0x3424')[half]};"]  # each byte becomes the high one of a number
        lines += ["prmt.b32 v, u, t, 0x7351;", f"lop3.b32 {high}, v, s, 0x80008000, 0xF8;"]
        lines += ["shl.b32 s, s, 4;", "prmt.b32 v, u, t, 0x6240;", f"lop3.b32 {low}, v, s, 0x80008000, 0xF8;"]
    return "\n".join([*lines, "}"])


PAIR_EXPONENT = 14
"""`e2m1_pair_lines` decodes to numbers times 2^-14: bits of a code are those of a number in half precision, three further left."""


def e2m1_pair_lines(word: str) -> list[tuple[int, list[str]]]:
    """Return pairs p with assembler that leaves codes p and p + 4 of a word in `h`, in half precision; it uses u, v, w.

    Half precision has a sign, five bits of the exponent and the rest: a code's sign, and three bits further right its other
    bits. 0xE4 is c ? a : b. Twice the lower code of a byte plus 0x70 carries its sign to bit 7, and keeps the others.
    """
    mask, upper = "0x8E008E00", [f"shr.u32 u, {word}, 3;", f"lop3.b32 w, {word}, u, 0x80808080, 0xE4;"]
    lower = [f"and.b32 v, {word}, 0x0F0F0F0F;", "mad.lo.u32 w, v, 2, 0x70707070;"]
    high_byte, low_byte = [f"and.b32 h, w, {mask};"], ["shl.b32 w, w, 8;", f"and.b32 h, w, {mask};"]
    return [(3, upper + high_byte), (1, low_byte), (2, lower + high_byte), (0, low_byte)]


def e2m1_pairs_asm() -> str:
    """Assembler: $8 and $9 are words of eight codes; $0 to $3 are the pairs (0, 4), (1, 5), (2, 6), (3, 7) of the first.

    $4 to $7 are those of the second, in bfloat16 too. $10 holds their factor, twice. The product of a nibble by 2^6 + 2^12
    puts sign and exponent into place. The number is 2^126 times too small then, and subnormal codes are subnormal numbers.
    """
    lines = ["{", ".reg .b32 m, q;"]
    for pair in range(8):
        word = f"${8 + pair // 4}"
        if pair % 4 == 2:
            lines.append(f"shr.u32 q, {word}, 8;")
        mask, factor = (("0x000F000F", 0x1040), ("0x00F000F0", 0x104))[pair % 2]
        lines += [f"and.b32 m, {word if pair % 4 < 2 else 'q'}, {mask};", f"mul.lo.u32 m, m, {factor};"]
        lines += ["and.b32 m, m, 0x81C081C0;", f"mul.rn.bf16x2 ${pair}, m, $10;"]
    return "\n".join([*lines, "}"])


E2M1_ASM = kernel_constant(E2M1_ASM_TEXT)
E2M1_PAIRS_ASM = kernel_constant(e2m1_pairs_asm())
E2M1_WIDE_ASM = kernel_constant(e2m1_wide_asm())


@jit
def e2m1_parts(b_codes, PLAIN: constexpr):
    """Decode the low and the high nibbles of bytes (uint8) to half precision, without scales."""
    if PLAIN:
        b_codes = b_codes.to(tl.int32)
        return e2m1_numbers(b_codes & 15), e2m1_numbers(b_codes >> 4)
    else:
        b_low, b_high = tl.inline_asm_elementwise(
            E2M1_ASM, "=r,=r,r", [b_codes], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
        )
        return b_low.to(tl.float16), b_high.to(tl.float16)


@jit
def e2m1_wide_parts(b_codes):
    """Like `e2m1_parts`, to bfloat16; not for the interpreter."""
    return tl.inline_asm_elementwise(
        E2M1_WIDE_ASM, "=r,=r,=r,=r,r", [b_codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@jit
def e2m1_numbers(b_codes):
    """Decode 4-bit codes (int32) to half precision: place them in its high bits, then multiply by 2^14."""
    b_bits = ((b_codes & 7) << 9) | ((b_codes & 8) << 12)
    return (b_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0).to(tl.float16)


@jit
def e8m0_numbers(b_exponents):
    """Return 2^(e - 127) of bytes in float32. 255 becomes inf, not NaN: loading a checkpoint rejects it."""
    return tl.maximum(b_exponents.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)

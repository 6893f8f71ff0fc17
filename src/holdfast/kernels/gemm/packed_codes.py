"""Decoding of packed codes for tensor cores: sixteen bytes of a row at once, as exact integers in half precision.

A scheme is a row of `CODE_ROWS`. Its codes become integers in assembler: bits of a code are set into the mantissa of 128
(bfloat16) or of 1024 (half precision), and a product and sum take that away, or the weight's minimum does. Sixteen bytes
of a row are columns of two operands, "low" and "high" codes, of one thread four neighbours each. Codes of a table or of 8
bits are made byte by byte.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.quant.packed_blocks import E2M1_VALUES, NONLINEAR_VALUES

CHUNK_COLUMNS = 256
"""Columns that are decoded between two steps of a pipeline: a block of the K types."""


class CodeRow(NamedTuple):
    """How the codes of a family become integers."""

    kind: str
    """"nibbles", "fifth" (a word for 32), "fifth_k", "six", "table" or "bytes"."""
    center: int = 0
    """The code that stands for 0."""
    has_offset: bool = False
    """True if values have a minimum or a zero point: it multiplies the sum of inputs."""
    table: tuple[int, ...] = ()
    extra: str = ""
    """Plane of upper bits."""
    extra_bytes: int = 0
    """Its bytes in a chunk of columns."""


CODE_ROWS: Mapping[str, CodeRow] = {
    "q4_0": CodeRow("nibbles", 8),
    "q4_1": CodeRow("nibbles", has_offset=True),
    "q4_k": CodeRow("nibbles", has_offset=True),
    "q5_0": CodeRow("fifth", 16, extra="fifth", extra_bytes=32),
    "q5_1": CodeRow("fifth", has_offset=True, extra="fifth", extra_bytes=32),
    "q5_k": CodeRow("fifth_k", has_offset=True, extra="fifth", extra_bytes=32),
    "q6_k": CodeRow("six", 32, extra="high", extra_bytes=64),
    "q8_0": CodeRow("bytes"),
    "iq4_nl": CodeRow("table", table=NONLINEAR_VALUES),
    "iq4_xs": CodeRow("table", table=NONLINEAR_VALUES),
    "block_mxfp4": CodeRow("table", table=E2M1_VALUES),
    "nvfp4": CodeRow("table", table=E2M1_VALUES),
    "int4": CodeRow("nibbles", 8),
    "int4_zeros": CodeRow("nibbles", has_offset=True),
}
"""By `code_key` of kernels/packed_kernels.py."""


class Half(NamedTuple):
    """A type of operands: the base whose mantissa takes a code, and how assembler names it."""

    name: str
    base: int
    bits: int
    """Bits of the base, twice."""
    one: int


BFLOAT16 = Half("bf16", 128, 0x43004300, 0x3F803F80)
FLOAT16 = Half("f16", 1024, 0x64006400, 0x3C003C00)


def half_of(is_bfloat16: bool) -> Half:
    return BFLOAT16 if is_bfloat16 else FLOAT16


def number_bits(value: float, half: Half) -> int:
    """Return the bits of an exact number in a type."""
    if half.name == "f16":
        return struct.unpack("<H", struct.pack("<e", value))[0]
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


def code_base(key: str, is_bfloat16: bool) -> int:
    """Return what decoded codes of a family with an offset have too much."""
    return half_of(is_bfloat16).base if CODE_ROWS[key].has_offset else 0


def decode_lines(key: str, is_bfloat16: bool, index: int) -> str:
    """Return the assembler that decodes four bytes of the `index`-th sixteen bytes of a chunk.

    Outputs are pairs: low codes of bytes 0 and 1, of 2 and 3, then high codes; with codes of 8 bits only the first two.
    """
    row, half = CODE_ROWS[key], half_of(is_bfloat16)
    if row.kind == "table":
        return _table_lines(row.table, half)
    if row.kind == "bytes":
        return _byte_lines(half)
    lines = ["{", ".reg .b32 t, u, v;", "prmt.b32 t, $4, 0x0, 0x3120;"]
    if row.kind in ("fifth_k", "six"):
        lines.append("prmt.b32 u, $5, 0x0, 0x3120;")
    elif row.kind == "fifth":
        lines.append("shr.u32 u, $5, $9;")
    for place, (out, shift) in enumerate((("$0", 0), ("$2", 4), ("$1", 8), ("$3", 12))):
        if shift:
            lines.append(f"shr.u32 v, t, {shift};")
        lines.append(f"lop3.b32 {out}, {'v' if shift else 't'}, 0x000F000F, {half.bits:#x}, 0xEA;")
        is_high, pair = place % 2, place // 2
        if row.kind == "fifth_k":
            lines += _upper_bits(out, 8 * pair + 2 * (index // 2) + is_high, 1)
        elif row.kind == "six":
            lines += _upper_bits(out, 8 * pair + 2 * (index % 4 // 2) + 4 * is_high, 3)
        elif row.kind == "fifth":
            # Bits 0 and 1 go to bits 4 and 20.
            lines += [f"shr.u32 v, u, {16 * is_high + 2 * pair};", "and.b32 v, v, 0x3;", "mul.lo.u32 v, v, 0x80010;"]
            lines.append(f"lop3.b32 {out}, v, 0x00100010, {out}, 0xEA;")
    if not row.has_offset:
        center = number_bits(-(half.base + row.center), half) * 0x10001
        lines += [f"mov.b32 u, {half.one:#x};", f"mov.b32 v, {center:#x};"]
        lines += [f"fma.rn.{half.name}x2 ${out}, ${out}, u, v;" for out in range(4)]
    return "\n".join([*lines, "}"])


def _upper_bits(out: str, shift: int, mask: int) -> list[str]:
    """Set upper bits, which stand at bit `shift` of both halves of u, from bit 4 on."""
    moved = f"shr.u32 v, u, {shift - 4};" if shift > 4 else f"shl.b32 v, u, {4 - shift};"
    name = "u" if shift == 4 else "v"
    return ([] if shift == 4 else [moved]) + [f"lop3.b32 {out}, {name}, {mask * 0x00100010:#x}, {out}, 0xEA;"]


def _table_lines(values: tuple[int, ...], half: Half) -> str:
    """Look up both bytes of each number: entries of codes below 8, of those above, then one of them by the upper bit."""
    numbers = [number_bits(value, half) for value in values]
    words = {
        (part, i): sum((number >> 8 * part & 0xFF) << 8 * j for j, number in enumerate(numbers[4 * i : 4 * i + 4]))
        for part in range(2)
        for i in range(4)
    }
    lines = ["{", ".reg .b32 w, s, p, a, b, low, high;"]
    for pair in range(2):
        lines.append("mov.b32 w, $4;" if pair == 0 else "shr.u32 w, $4, 16;")
        lines += ["and.b32 s, w, 0x7777;", "shr.u32 p, w, 1;", "lop3.b32 p, p, 0x4444, 0x3210, 0xEA;"]
        for part, name in enumerate(("low", "high")):
            entries = [f"{words[part, i]:#x}" for i in range(4)]
            lines += [f"mov.b32 a, {entries[0]};", f"prmt.b32 a, a, {entries[1]}, s;"]
            lines += [f"mov.b32 b, {entries[2]};", f"prmt.b32 b, b, {entries[3]}, s;", f"prmt.b32 {name}, a, b, p;"]
        lines += [f"prmt.b32 ${pair}, low, high, 0x6240;", f"prmt.b32 ${2 + pair}, low, high, 0x7351;"]
    return "\n".join([*lines, "}"])


def _byte_lines(half: Half) -> str:
    """Signed bytes: each becomes the low byte of 2^23 in float32, whose difference is exact."""
    lines = ["{", ".reg .b32 u, a, b;", "xor.b32 u, $2, 0x80808080;"]
    for pair in range(2):
        for name, place in (("a", 2 * pair), ("b", 2 * pair + 1)):
            lines += [f"prmt.b32 {name}, u, 0x4B000000, {0x7650 + place:#x};"]
            lines += [f"sub.f32 {name}, {name}, 0f4B000080;"]
        lines.append(f"cvt.rn.{half.name}x2.f32 ${pair}, b, a;")
    return "\n".join([*lines, "}"])


def decode_texts(key: str, is_bfloat16: bool) -> tuple[str, ...]:
    """Return the assembler of each sixteen bytes of a chunk."""
    return tuple(decode_lines(key, is_bfloat16, index) for index in range(CHUNK_COLUMNS // 32))


def decode_registers(kind: str) -> str:
    """Return the registers of that assembler."""
    inputs = {"fifth": 9, "fifth_k": 2, "six": 2}.get(kind, 1)
    return ",".join(["=r"] * (2 if kind == "bytes" else 4) + ["r"] * inputs)


EVEN_ODD_ASM = """{
prmt.b32 $0, $4, $5, 0x5410;
prmt.b32 $1, $6, $7, 0x5410;
prmt.b32 $2, $4, $5, 0x7632;
prmt.b32 $3, $6, $7, 0x7632;
}"""
"""Four words of two neighbouring inputs: their first ones, then their second ones."""

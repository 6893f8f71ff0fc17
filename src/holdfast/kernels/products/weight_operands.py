"""How a weight is coded, as the kernels of products are told it, and codes of four bits taken apart inside a kernel."""

# A branch on a constant is taken when the kernel is compiled, so both must stand in an if and an else.
# ruff: noqa: ANN001, ANN201, RET505 the arguments of kernels have no types

from enum import IntEnum
from typing import NamedTuple

import torch

from holdfast.kernels.numbers.e4m3_parts import kernel_codes
from holdfast.kernels.products.quantize_rows import CodedRows
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl
from holdfast.quant.quantized_weight import QuantizedWeight


class Coding(IntEnum):
    """What a product is made of."""

    PLAIN_NUMBERS = 0
    CODED_ROWS = 1
    """e4m3 by e4m3, with a scale for each row of the weight and each row of x."""
    CODED_BLOCKS = 2
    """The same, with scales for blocks of columns too."""
    INT8_ROWS = 3
    """x by int8, with a scale for each row of the weight."""
    E2M1_GROUPS = 4
    """x by e2m1, two to a byte, with a power of two for every 32 columns."""


CODED_ROWS, CODED_BLOCKS, INT8_ROWS, E2M1_GROUPS = (
    kernel_constant(int(coding))
    for coding in (Coding.CODED_ROWS, Coding.CODED_BLOCKS, Coding.INT8_ROWS, Coding.E2M1_GROUPS)
)
_E2M1_ASM = """{
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


def _e2m1_wide_asm() -> str:
    """$4: four bytes of codes; $0, $1: their lower halves as bfloat16, whose two bytes are looked up; $2, $3: their upper halves."""
    lines = ["{", ".reg .b32 m, s, t, u, v;", "and.b32 m, $4, 0x77777777;"]
    for half, (low, high) in enumerate((("$0", "$2"), ("$1", "$3"))):
        if half:
            lines.append("shr.u32 m, m, 16;")
        lines += ["prmt.b32 t, 0x3F3F3F00, 0x40404040, m;", "prmt.b32 u, 0xC0800000, 0xC0804000, m;"]
        lines += [f"prmt.b32 s, $4, 0x0, {('0x1404', '0x3424')[half]};"]  # the bytes as upper ones of two numbers
        lines += ["prmt.b32 v, u, t, 0x7351;", f"lop3.b32 {high}, v, s, 0x80008000, 0xF8;"]
        lines += ["shl.b32 s, s, 4;", "prmt.b32 v, u, t, 0x6240;", f"lop3.b32 {low}, v, s, 0x80008000, 0xF8;"]
    return "\n".join([*lines, "}"])


E2M1_ASM = kernel_constant(_E2M1_ASM)
E2M1_WIDE_ASM = kernel_constant(_e2m1_wide_asm())


class WeightOperands(NamedTuple):
    """What kernels are given for a product with a weight."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """Rows and their scales, weight and its scales; anything in the place of scales that are not there."""
    coding: Coding
    block_rows: int = 1
    """Rows of the weight that share a scale."""
    group: int = 0
    """Columns of weight and rows that share a scale; 0: all."""
    scale_columns: int = 1


def operands_of(x_XK: torch.Tensor, weight: torch.Tensor | QuantizedWeight, coded: CodedRows | None) -> WeightOperands:
    """The operands of x by the weight; `coded` are the same rows as codes, for a scheme that takes them so."""
    if isinstance(weight, torch.Tensor):
        return WeightOperands((x_XK, x_XK, weight, weight), Coding.PLAIN_NUMBERS)
    scheme = weight.scheme
    assert (coded is not None) == scheme.codes_activations, f"{scheme.name} with {coded=}"
    if coded is None:
        coding = Coding.E2M1_GROUPS if scheme.codes_per_byte == 2 else Coding.INT8_ROWS
        return WeightOperands((x_XK, x_XK, weight.codes, weight.scales), coding)
    tensors = (kernel_codes(coded.codes_TK), coded.scales_TB, kernel_codes(weight.codes), weight.scales)
    if scheme.block_columns == 0:
        return WeightOperands(tensors, Coding.CODED_ROWS)
    num_columns = coded.scales_TB.shape[1]
    assert weight.scales.shape[-1] == num_columns, f"{weight.scales.shape=} {coded.scales_TB.shape=}"
    return WeightOperands(tensors, Coding.CODED_BLOCKS, scheme.block_rows, scheme.block_columns, num_columns)


@jit
def e2m1_parts(b_codes, PLAIN: constexpr):
    """The numbers of the lower and of the upper halves of bytes (uint8), without their scales, in half precision."""
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
    """The same as bfloat16, without a way for the interpreter."""
    return tl.inline_asm_elementwise(
        E2M1_WIDE_ASM, "=r,=r,=r,=r,r", [b_codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@jit
def e2m1_numbers(b_codes):
    """Codes of four bits (int32) in half precision: their bits are its upper ones, of numbers 2^14 times as small."""
    b_bits = ((b_codes & 7) << 9) | ((b_codes & 8) << 12)
    return (b_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0).to(tl.float16)


@jit
def e8m0_numbers(b_exponents):
    """2^(e - 127) of bytes, in float32. 255 becomes infinite and not NaN: a load finds it, and few ask to go on with it."""
    return tl.maximum(b_exponents.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)

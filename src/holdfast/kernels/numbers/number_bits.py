"""Pieces of kernels that take numbers apart into bits and put them together, alike on a GPU and in the interpreter.

bfloat16 comes and goes as int16, because the interpreter does not round it; e4m3 as uint8, because not every GPU has it.
Bytes that become float32 are exponents (e8m0), a type that Triton does not know.
"""

# ruff: noqa: ANN001, ANN201 the arguments of kernels have no types

import torch

from holdfast.kernels.numbers.coded_words import e4m3_code
from holdfast.kernels.triton_compat import constexpr, jit, tl

AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of the same size by bytes of an element."""
EXPONENT_BITS = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e8m0fnu: 0xFF,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
"""Bits that are all set in what is not finite, and in no other number; other types have no such bits."""


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return tensor.view(AS_INTEGERS[tensor.element_size()])


def as_kernels_read(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that `float32_of` takes: bfloat16 and e4m3 as integers."""
    return as_bits(tensor) if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn) else tensor


@jit
def float32_of(b_x):
    """Loaded numbers as float32: int16 stands for bfloat16. From float64 to the nearest, all others as they are."""
    is_bfloat16: constexpr = b_x.dtype == tl.int16
    return (b_x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if is_bfloat16 else b_x.to(tl.float32)


@jit
def float32_to_odd(b_x):
    """The same for a result that is rounded again: what is cut off a float64 stays as an odd last bit."""
    b_near = float32_of(b_x)
    if b_x.dtype == tl.float64:
        b_bits, b_back = b_near.to(tl.int32, bitcast=True), b_near.to(tl.float64)
        m_cut = (b_back != b_x) & (b_x == b_x) & (b_bits & 1 == 0)
        b_outward = tl.where(tl.abs(b_back) < tl.abs(b_x), 1, -1)
        b_near = tl.where(m_cut, b_bits + b_outward, b_bits).to(tl.float32, bitcast=True)
    return b_near


@jit
def size_bits(b_x):
    """The bits of the magnitudes of float32 numbers, which rise with them; NaN is above all."""
    return b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def finite_bits(b_x):
    """The same, and 0 for what is not finite."""
    b_size = size_bits(b_x)
    return tl.where(b_size < 0x7F800000, b_size, 0)


@jit
def bfloat16_bits(b_x):
    """The bits of the nearest bfloat16 as int16: of two the even one."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    # Unsigned, so that the carry and the shift leave the sign alone.
    b_round = (b_bits.to(tl.uint32, bitcast=True) + 0x7FFF + (b_bits >> 16 & 1).to(tl.uint32)) >> 16
    return tl.where(b_x == b_x, b_round, 0x7FC0).to(tl.int16)


@jit
def e4m3_of(b_x):
    """The bits of the nearest e4m3 number as int32, at most 448; NaN has no sign."""
    return tl.where(b_x == b_x, e4m3_code(b_x), 0x7F)


@jit
def int8_of(b_x):
    """The bits of the nearest integer within 127 of zero, as int32 from 0 to 255: of two the even one; 0 for NaN."""
    # At 1.5 * 2^23 the steps of float32 are 1, so that the sum rounds and its last byte is the integer.
    b_near = tl.minimum(tl.maximum(tl.where(b_x == b_x, b_x, 0.0), -127.0), 127.0) + 12582912.0
    return b_near.to(tl.int32, bitcast=True) & 0xFF


@jit
def e2m1_of(b_x):
    """The code of the nearest e2m1 number as int32: of two the even one; zero has no sign, and NaN is zero."""
    b_size = tl.abs(b_x)
    b_code = (b_size > 0.25).to(tl.int32) + (b_size >= 0.75).to(tl.int32) + (b_size > 1.25).to(tl.int32)
    b_code += (b_size >= 1.75).to(tl.int32) + (b_size > 2.5).to(tl.int32) + (b_size >= 3.5).to(tl.int32)
    b_code += (b_size > 5.0).to(tl.int32)
    return tl.where((b_code > 0) & (b_x < 0), b_code + 8, b_code)


@jit
def e4m3_value(b_code):
    """The float32 numbers that e4m3 codes, as int32, stand for."""
    b_size = b_code & 0x7F
    b_normal = ((b_size << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    b_value = tl.where(b_size < 8, b_size.to(tl.float32) * 0.001953125, b_normal)
    b_value = tl.where(b_size == 0x7F, float("nan"), b_value)
    # By its bit: a minus would be a subtraction, which has no -0.
    return (b_value.to(tl.int32, bitcast=True) | (b_code & 0x80) << 24).to(tl.float32, bitcast=True)


@jit
def e8m0_bits(b_code):
    """The bits of the float32 powers of two, 2^(e - 127), whose exponents are bytes, as int32; NaN for 255."""
    b_exponent = b_code.to(tl.int32)
    b_bits = tl.where(b_exponent == 0, 0x400000, b_exponent << 23)  # 2^-127 is below the normal numbers
    return tl.where(b_exponent == 255, 0x7FC00000, b_bits)


@jit
def narrowed_bits(b_x, TARGET: constexpr):
    """The bits of loaded numbers in another type, rounded once: "float64", "float32", "float16" or "bfloat16".

    Bytes are exponents of two, for "float32" alone.
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

"""Pieces of kernels that work with e4m3: numbers to codes and back, by instruction or, in the interpreter, by hand."""

# ruff: noqa: ANN001, ANN201, SIM108 the arguments of kernels have no types

import torch

from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, tl

# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false


@jit
def e4m3_bits(b_x):
    """The bits of the nearest e4m3 number as int32: of two the even one, and no larger than 448; NaN is NaN."""
    b_size = tl.minimum(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x43E00000)
    b_normal = (b_size + 0x7FFFF + (b_size >> 20 & 1) >> 20) - 960
    # Below 2^-6 the steps are 2^-9: those of float32 at 2^14, where the sum rounds.
    b_small = (b_size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    b_bits = tl.where(b_size < 0x3C800000, b_small, b_normal)
    b_bits = tl.where(b_x != b_x, 0x7F, b_bits)
    return b_bits | b_x.to(tl.int32, bitcast=True) >> 24 & 0x80


@jit
def e4m3_numbers(b_bits):
    """e4m3 bits in int32 as half precision, which holds each of them."""
    b_exponent = b_bits >> 3 & 15
    b_mantissa = (b_bits & 7).to(tl.float32)
    b_normal = (8.0 + b_mantissa) * tl.exp2((b_exponent - 10).to(tl.float32))
    b_size = tl.where(b_exponent == 0, b_mantissa * 0.001953125, b_normal)
    b_size = tl.where((b_bits & 0x7F) == 0x7F, float("nan"), b_size)
    # A product, because a negated zero loses its sign.
    return (b_size * (1 - (b_bits >> 6 & 2)).to(tl.float32)).to(tl.float16)


@jit
def coded_numbers(b_x, PLAIN: constexpr):
    """float32 as the operand of a product of e4m3 numbers: e4m3, or, in the interpreter, the same numbers in half precision."""
    if PLAIN:
        b_coded = e4m3_numbers(e4m3_bits(b_x))
    else:
        # The instruction saturates, and rounds as the integers above do.
        b_coded = b_x.to(tl.float8e4nv)
    return b_coded


@jit
def loaded_numbers(b_codes, PLAIN: constexpr):
    """Codes that were loaded, as such an operand; the interpreter loads bytes (see `kernel_codes`)."""
    if PLAIN:
        b_coded = e4m3_numbers(b_codes.to(tl.int32))
    else:
        b_coded = b_codes
    return b_coded


def kernel_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes as a kernel takes them: e4m3 as bytes in the interpreter, which does not know it; all else as it is."""
    return codes.view(torch.uint8) if is_interpreted() and codes.dtype == torch.float8_e4m3fn else codes

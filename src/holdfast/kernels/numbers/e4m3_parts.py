"""Pieces of kernels that work with e4m3: numbers to codes and back, by instruction or, in the interpreter, by hand."""

# ruff: noqa: ANN001, ANN201, SIM108 the arguments of kernels have no types

import torch

from holdfast.kernels.numbers.coded_words import e4m3_code
from holdfast.kernels.numbers.number_bits import e4m3_value
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, tl

# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false


@jit
def coded_numbers(b_x, PLAIN: constexpr):
    """float32 as the operand of a product of e4m3 numbers: e4m3, or, in the interpreter, the same numbers in half precision."""
    if PLAIN:
        b_coded = e4m3_value(e4m3_code(b_x)).to(tl.float16)
    else:
        # The instruction saturates, and rounds as `e4m3_code` does.
        b_coded = b_x.to(tl.float8e4nv)
    return b_coded


@jit
def loaded_numbers(b_codes, PLAIN: constexpr):
    """Codes that were loaded, as such an operand; the interpreter loads bytes (see `kernel_codes`)."""
    if PLAIN:
        b_coded = e4m3_value(b_codes.to(tl.int32)).to(tl.float16)
    else:
        b_coded = b_codes
    return b_coded


def kernel_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes as a kernel takes them: e4m3 as bytes in the interpreter, which does not know it; all else as it is."""
    return codes.view(torch.uint8) if is_interpreted() and codes.dtype == torch.float8_e4m3fn else codes

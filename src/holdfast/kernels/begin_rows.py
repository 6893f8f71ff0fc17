"""The first rms norm of a step of few rows, left half done for the product that follows it.

M rows, K inputs
"""

from dataclasses import dataclass

import torch

from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, tl


@dataclass(frozen=True, slots=True)
class SkinnyScratch:
    """What products share: sums of squares, parts along K, and how many of them have arrived (zeros between launches)."""

    squares: torch.Tensor
    parts: torch.Tensor
    arrived: torch.Tensor


@dataclass(frozen=True, slots=True)
class NormedRows:
    """The input of a product whose rms norm is not finished: x * norm_weight, and the squares of x by block."""

    scaled_MK: torch.Tensor
    num_squares: int
    eps: float


def begin_rows(
    x_MK: torch.Tensor, norm_weight_K: torch.Tensor, eps: float, scaled_MK: torch.Tensor, scratch: SkinnyScratch
) -> NormedRows:
    """The first norm of a step, left half done as every producer leaves it."""
    num_rows, size_k = x_MK.shape
    _begin_kernel[(num_rows,)](
        x_MK, norm_weight_K, scaled_MK, scratch.squares, size_k, BLOCK=next_power_of_two(size_k), num_warps=8
    )
    return NormedRows(scaled_MK, 1, eps)


def begin_rows_reference(
    x_MK: torch.Tensor, norm_weight_K: torch.Tensor, eps: float, scaled_MK: torch.Tensor, scratch: SkinnyScratch
) -> NormedRows:
    """The same in plain torch."""
    scaled_MK.copy_((x_MK.float() * norm_weight_K.float()).to(x_MK.dtype))
    scratch.squares[: x_MK.shape[0]] = x_MK.float().square().sum(-1)
    return NormedRows(scaled_MK, 1, eps)


@jit
def _begin_kernel(p_x, p_norm_weight, p_scaled, p_squares, size, BLOCK: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    m_k = o_k < size
    b_x = tl.load(p_x + i_row * size + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_weight = tl.load(p_norm_weight + o_k, mask=m_k, other=0.0).to(tl.float32)
    tl.store(p_scaled + i_row * size + o_k, (b_x * b_weight).to(p_scaled.dtype.element_ty), mask=m_k)
    tl.store(p_squares + i_row, tl.sum(b_x * b_x, axis=0))

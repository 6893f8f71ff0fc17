"""The rest of an rms norm that was left half done: for those who want the rows themselves (begin_rows.py).

M rows, K inputs, J blocks of K
"""

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

import torch

from holdfast.kernels.products.begin_rows import NormedRows, SkinnyScratch
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, tl


def finish_rows(rows: NormedRows, scratch: SkinnyScratch, out_MK: torch.Tensor) -> torch.Tensor:
    """The norm of x, in its type."""
    num_rows, size_k = rows.scaled_MK.shape
    _finish_kernel[(num_rows,)](
        rows.scaled_MK,
        scratch.squares,
        out_MK,
        size_k,
        rows.num_squares,
        rows.eps,
        BLOCK=next_power_of_two(size_k),
        BLOCK_J=next_power_of_two(rows.num_squares),
        num_warps=8,
    )
    return out_MK


def finish_rows_reference(rows: NormedRows, scratch: SkinnyScratch, out_MK: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    num_rows, size_k = rows.scaled_MK.shape
    squares_MJ = scratch.squares[: num_rows * rows.num_squares].view(num_rows, rows.num_squares)
    scale_M1 = (squares_MJ.sum(-1, keepdim=True) / size_k + rows.eps).rsqrt()
    return out_MK.copy_((rows.scaled_MK.float() * scale_M1).to(out_MK.dtype))


@jit
def _finish_kernel(p_scaled, p_squares, p_out, size, num_squares, eps, BLOCK: constexpr, BLOCK_J: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    o_j = tl.arange(0, BLOCK_J)
    m_k = o_k < size
    b_squares = tl.load(p_squares + i_row * num_squares + o_j, mask=o_j < num_squares, other=0.0)
    b_x = tl.load(p_scaled + i_row * size + o_k, mask=m_k, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_squares, axis=0) / size + eps)
    tl.store(p_out + i_row * size + o_k, (b_x * scale).to(p_out.dtype.element_ty), mask=m_k)

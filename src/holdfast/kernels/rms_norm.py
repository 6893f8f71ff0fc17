"""RMS norm over the last dimension."""

import torch
import torch.nn.functional as F

from holdfast.kernels.native_library import native_for
from holdfast.kernels.triton_compat import can_run, constexpr, jit, next_power_of_two, tl


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, out_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, row by row, in x's dtype with float32 statistics.

    Into `out_TD` where it is given, which may be x itself. Rows may lie apart; the elements of a row may not.
    """
    if can_run(x_TD):
        return rms_norm_triton(x_TD, weight_D, eps, out_TD)
    library = native_for(x_TD[:0], weight_D, None if out_TD is None else out_TD[:0])
    if library is None:
        return rms_norm_reference(x_TD, weight_D, eps, out_TD)
    rows_TD = x_TD.contiguous()  # a single row always is: others must not be computed by other means than it
    y_TD = out_TD if out_TD is not None and out_TD.is_contiguous() else torch.empty_like(rows_TD)
    size = weight_D.shape[0]
    library.holdfast_rms_norm(
        rows_TD.data_ptr(), weight_D.data_ptr(), y_TD.data_ptr(), rows_TD.numel() // size, size, eps
    )
    return y_TD if out_TD is None or y_TD is out_TD else out_TD.copy_(y_TD)


def rms_norm_reference(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, out_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in plain torch."""
    y_TD = F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    return y_TD if out_TD is None else out_TD.copy_(y_TD)


def rms_norm_triton(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, out_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """The same as a Triton kernel, a program a row."""
    size = weight_D.shape[0]
    y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if out_TD is None else out_TD
    x_RD, y_RD = as_rows(x_TD, size), as_rows(y_TD, size)
    if x_RD.numel():
        block = next_power_of_two(size)
        strides = (x_RD.stride(0), y_RD.stride(0))
        _rms_norm_kernel[(x_RD.shape[0],)](
            x_RD, weight_D, y_RD, *strides, size, eps, BLOCK=block, num_warps=num_warps_for(block)
        )
    return y_TD


def as_rows(x_TD: torch.Tensor, size: int) -> torch.Tensor:
    """Whatever comes before the last dimension as one number of rows, without a copy."""
    assert x_TD.stride(-1) == 1 or size == 1, f"{x_TD.stride()=}: the elements of a row must lie side by side"
    return x_TD.view(-1, size)


def num_warps_for(block: int) -> int:
    """Warps for a row, so that each thread holds 16 elements: few enough to reduce quickly, enough to load at once."""
    return max(1, min(16, block // 512))


@jit
def _rms_norm_kernel(p_x, p_weight, p_y, x_stride, y_stride, size, eps, BLOCK: constexpr):  # noqa: ANN001, ANN202 pointers have no types
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < size
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + i_row * x_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / size + eps) * b_weight
    tl.store(p_y + i_row * y_stride + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)

"""RMS norm over the last dimension."""

import torch
import torch.nn.functional as F

from holdfast.kernels.native_library import native_for
from holdfast.kernels.triton_compat import can_run, constexpr, jit, next_power_of_two, tl


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, row by row, in x's dtype with float32 statistics."""
    if can_run(x_TD):
        return rms_norm_triton(x_TD, weight_D, eps)
    library = native_for(x_TD, weight_D)
    if library is None:
        return rms_norm_reference(x_TD, weight_D, eps)
    y_TD = torch.empty_like(x_TD)
    size = weight_D.shape[0]
    library.holdfast_rms_norm(x_TD.data_ptr(), weight_D.data_ptr(), y_TD.data_ptr(), x_TD.numel() // size, size, eps)
    return y_TD


def rms_norm_reference(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in plain torch."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def rms_norm_triton(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as a Triton kernel, a program a row."""
    size = weight_D.shape[0]
    rows_RD = x_TD.reshape(-1, size).contiguous()
    y_RD = torch.empty_like(rows_RD)
    if rows_RD.shape[0]:
        _rms_norm_kernel[(rows_RD.shape[0],)](rows_RD, weight_D, y_RD, size, eps, BLOCK=next_power_of_two(size))
    return y_RD.view(x_TD.shape)


@jit
def _rms_norm_kernel(p_x, p_weight, p_y, size, eps, BLOCK: constexpr):  # noqa: ANN001, ANN202 pointers have no types
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < size
    b_x = tl.load(p_x + i_row * size + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / size + eps) * b_weight
    tl.store(p_y + i_row * size + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)

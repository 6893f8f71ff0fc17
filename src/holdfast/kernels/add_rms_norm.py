"""The way from one part of a layer to the next: what it computed is added to the residual stream, which is normed."""

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

import torch

from holdfast.kernels.rms_norm import as_rows, num_warps_for, rms_norm, rms_norm_reference
from holdfast.kernels.triton_compat import can_run, constexpr, jit, next_power_of_two, tl


def add_rms_norm(
    x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, out_TD: torch.Tensor
) -> torch.Tensor:
    """x += delta, rounded to x's dtype; then out = rms_norm(x). `out_TD` may be delta itself; rows may lie apart."""
    if can_run(x_TD):
        return add_rms_norm_triton(x_TD, delta_TD, weight_D, eps, out_TD)
    return rms_norm(x_TD.add_(delta_TD), weight_D, eps, out_TD)


def add_rms_norm_reference(
    x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, out_TD: torch.Tensor
) -> torch.Tensor:
    """The same in plain torch."""
    return rms_norm_reference(x_TD.add_(delta_TD), weight_D, eps, out_TD)


def add_rms_norm_triton(
    x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, out_TD: torch.Tensor
) -> torch.Tensor:
    """The same as one Triton kernel, a program a row."""
    size = weight_D.shape[0]
    x_RD, delta_RD, y_RD = (as_rows(tensor, size) for tensor in (x_TD, delta_TD, out_TD))
    if x_RD.numel():
        block = next_power_of_two(size)
        strides = (x_RD.stride(0), delta_RD.stride(0), y_RD.stride(0))
        _add_rms_norm_kernel[(x_RD.shape[0],)](
            x_RD, delta_RD, weight_D, y_RD, *strides, size, eps, BLOCK=block, num_warps=num_warps_for(block)
        )
    return out_TD


@jit
def _add_rms_norm_kernel(
    p_x,
    p_delta,
    p_weight,
    p_y,
    x_stride,
    delta_stride,
    y_stride,
    size,
    eps,
    BLOCK: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < size
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + i_row * x_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_delta = tl.load(p_delta + i_row * delta_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_stored = (b_x + b_delta).to(p_x.dtype.element_ty)
    tl.store(p_x + i_row * x_stride + o_d, b_stored, mask=m_d)
    b_x = b_stored.to(tl.float32)  # what the next layer will read is what is normed
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / size + eps) * b_weight
    tl.store(p_y + i_row * y_stride + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)

"""Layer norm over the last dimension, with a bias."""

import torch
import torch.nn.functional as F

from holdfast.kernels.triton_compat import can_run, constexpr, jit, next_power_of_two, tl


def layer_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float, out_TD: torch.Tensor
) -> torch.Tensor:
    """(x - mean) / std * weight + bias, row by row, with float32 statistics; `out_TD` may be x itself."""
    if not can_run(x_TD):
        return layer_norm_reference(x_TD, weight_D, bias_D, eps, out_TD)
    num_rows, size = x_TD.shape
    if num_rows:
        block = next_power_of_two(size)
        _layer_norm_kernel[(num_rows,)](x_TD, weight_D, bias_D, out_TD, size, eps, BLOCK=block)
    return out_TD


def layer_norm_reference(
    x_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float, out_TD: torch.Tensor
) -> torch.Tensor:
    """The same in plain torch."""
    return out_TD.copy_(F.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps))


@jit
def _layer_norm_kernel(p_x, p_weight, p_bias, p_y, size, eps, BLOCK: constexpr):  # noqa: ANN001, ANN202 pointers have no types
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < size
    b_x = tl.load(p_x + i_row * size + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_centred = tl.where(m_d, b_x - tl.sum(b_x, axis=0) / size, 0.0)
    b_scale = tl.rsqrt(tl.sum(b_centred * b_centred, axis=0) / size + eps)
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = b_centred * b_scale * b_weight + b_bias
    tl.store(p_y + i_row * size + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)

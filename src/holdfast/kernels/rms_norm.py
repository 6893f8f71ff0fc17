"""RMS norm over the last dimension."""

import torch
import torch.nn.functional as F

from holdfast.kernels.native_library import native_for


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, row by row, in x's dtype with float32 statistics."""
    library = native_for(x_TD, weight_D)
    if library is None:
        return rms_norm_reference(x_TD, weight_D, eps)
    y_TD = torch.empty_like(x_TD)
    size = weight_D.shape[0]
    num_rows = x_TD.numel() // size
    library.holdfast_rms_norm(x_TD.data_ptr(), weight_D.data_ptr(), y_TD.data_ptr(), num_rows, size, eps)
    return y_TD


def rms_norm_reference(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in plain torch."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)

"""Matrix product of rows with a weight: y = x @ w.T + bias."""

import torch
import torch.nn.functional as F

from holdfast.kernels.native_library import native_for


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """[T, K] by [N, K] to [T, N]. On CPU in float32 a row's result does not depend, to the bit, on the other rows."""
    library = native_for(x_TK, weight_NK, bias_N)
    if library is None:
        return linear_reference(x_TK, weight_NK, bias_N)
    num_rows, k_size = x_TK.shape
    y_TN = x_TK.new_empty(num_rows, weight_NK.shape[0])
    bias = 0 if bias_N is None else bias_N.data_ptr()
    library.holdfast_linear(
        x_TK.data_ptr(), weight_NK.data_ptr(), bias, y_TN.data_ptr(), num_rows, weight_NK.shape[0], k_size
    )
    return y_TN


def linear_reference(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The same in plain torch."""
    return F.linear(x_TK, weight_NK, bias_N)

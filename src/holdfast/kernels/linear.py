"""Matrix product of rows with a weight: y = x @ w.T + bias."""

import torch
import torch.nn.functional as F

from holdfast.kernels.native_library import native_for

WIDENED_ELEMENTS = 2**20
"""Elements of a half-precision weight that a CPU widens at a time."""


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """[T, K] by [N, K] to [T, N]. On CPU a row's result does not depend, to the bit, on the other rows."""
    library = native_for(x_TK, weight_NK, bias_N)
    if library is not None:
        num_rows, k_size = x_TK.shape
        y_TN = x_TK.new_empty(num_rows, weight_NK.shape[0])
        bias = 0 if bias_N is None else bias_N.data_ptr()
        library.holdfast_linear(
            x_TK.data_ptr(), weight_NK.data_ptr(), bias, y_TN.data_ptr(), num_rows, weight_NK.shape[0], k_size
        )
        return y_TN
    if x_TK.is_cpu and x_TK.dtype in (torch.float16, torch.bfloat16):
        return _widened(x_TK, weight_NK, bias_N)
    return linear_reference(x_TK, weight_NK, bias_N)


def linear_reference(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The same in plain torch."""
    return F.linear(x_TK, weight_NK, bias_N)


def _widened(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """Half precision in float32, some rows of the weight at a time: a CPU without such instructions is 30 times slower in it."""
    x32_TK = x_TK.float()
    y_TN = x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])
    num_rows = max(1, WIDENED_ELEMENTS // weight_NK.shape[1])
    for start in range(0, weight_NK.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        bias32 = None if bias_N is None else bias_N[rows].float()
        y_TN[:, rows] = linear(x32_TK, weight_NK[rows].float(), bias32)
    return y_TN

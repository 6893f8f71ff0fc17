"""Matrix product of rows with a weight of plain numbers: y = x @ w.T + bias."""

import torch
import torch.nn.functional as F

from holdfast.kernels.native_library import native_for

WIDENED_ELEMENTS = 2**20
"""Elements of a half-precision weight that a CPU widens at a time."""


def plain_linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, out_TN: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, K] by [N, K] to [T, N], into `out_TN` where it is given. On CPU a row's result does not depend, to the bit, on the other rows."""
    y_TN = x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0]) if out_TN is None else out_TN
    library = native_for(x_TK, weight_NK, bias_N, y_TN)
    if library is not None:
        num_rows, k_size = x_TK.shape
        bias = 0 if bias_N is None else bias_N.data_ptr()
        library.holdfast_linear(
            x_TK.data_ptr(), weight_NK.data_ptr(), bias, y_TN.data_ptr(), num_rows, weight_NK.shape[0], k_size
        )
        return y_TN
    if x_TK.is_cpu and x_TK.dtype in (torch.float16, torch.bfloat16):
        return _widened(x_TK, weight_NK, bias_N, y_TN)
    return plain_linear_reference(x_TK, weight_NK, bias_N, y_TN)


def plain_linear_reference(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, out_TN: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in plain torch."""
    if out_TN is None:
        return F.linear(x_TK, weight_NK, bias_N)
    if bias_N is None:
        return torch.mm(x_TK, weight_NK.t(), out=out_TN)
    return torch.addmm(bias_N, x_TK, weight_NK.t(), out=out_TN)


def plain_linear_float32(x_TK: torch.Tensor, weight_NK: torch.Tensor, out_TN: torch.Tensor) -> torch.Tensor:
    """The same without a bias, in float32 whatever the inputs are: no conversion follows, and no digit is lost."""
    if x_TK.dtype == torch.float32:
        return plain_linear(x_TK, weight_NK, None, out_TN)
    if x_TK.is_cpu:
        return _widened(x_TK, weight_NK, None, out_TN)
    return torch.mm(x_TK, weight_NK.t(), out_dtype=torch.float32, out=out_TN)


def plain_linear_float32_reference(x_TK: torch.Tensor, weight_NK: torch.Tensor, out_TN: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    return torch.mm(x_TK.float(), weight_NK.float().t(), out=out_TN)


def _widened(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, y_TN: torch.Tensor
) -> torch.Tensor:
    """Half precision in float32, some rows of the weight at a time: a CPU without such instructions is 30 times slower in it."""
    x32_TK = x_TK.float()
    num_rows = max(1, WIDENED_ELEMENTS // weight_NK.shape[1])
    for start in range(0, weight_NK.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        bias32 = None if bias_N is None else bias_N[rows].float()
        y_TN[:, rows] = plain_linear(x32_TK, weight_NK[rows].float(), bias32)
    return y_TN

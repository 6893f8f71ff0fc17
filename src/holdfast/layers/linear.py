"""Linear: a weight and perhaps a bias, applied to rows."""

import torch

from holdfast.kernels.linear import linear


class Linear:
    """y = x @ weight.T + bias for rows [T, K]."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> None:
        self._weight_NK = weight_NK
        self._bias_N = bias_N

    def __call__(self, x_TK: torch.Tensor, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x_TK, self._weight_NK, self._bias_N, out_TN)

"""Linear: a weight and perhaps a bias, applied to rows."""

import torch

from holdfast.kernels.linear import linear


class Linear:
    """y = x @ weight.T + bias for rows [T, K]."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N

    def __call__(self, x_TK: torch.Tensor, out_TN: torch.Tensor) -> torch.Tensor:
        return linear(x_TK, self.weight_NK, self.bias_N, out_TN)

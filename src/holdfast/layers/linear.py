"""Linear: a weight, as numbers or as codes, and perhaps a bias, applied to rows."""

import torch

from holdfast.kernels.products.linear import linear
from holdfast.kernels.products.quantize_rows import CodedRows
from holdfast.quant.quantized_weight import QuantizedWeight


class Linear:
    """y = x @ weight.T + bias for rows [T, K]."""

    def __init__(self, weight_NK: torch.Tensor | QuantizedWeight, bias_N: torch.Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N

    def __call__(self, x_TK: torch.Tensor, out_TN: torch.Tensor, coded: CodedRows | None = None) -> torch.Tensor:
        """`coded` is room for the rows as codes, which some quantized weights take them as."""
        return linear(x_TK, self.weight_NK, self.bias_N, out_TN, coded)

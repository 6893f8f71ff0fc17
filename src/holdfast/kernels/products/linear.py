"""Matrix product of rows with a weight, whether it is stored as numbers or as codes: y = x @ w.T + bias."""

import torch

from holdfast.kernels.products.plain_linear import (
    plain_linear,
    plain_linear_float32,
    plain_linear_float32_reference,
    plain_linear_reference,
)
from holdfast.kernels.products.quantize_rows import CodedRows
from holdfast.kernels.products.quantized_linear import quantized_linear, quantized_linear_reference
from holdfast.quant.quantized_weight import QuantizedWeight


def linear(
    x_TK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor | None = None,
    coded: CodedRows | None = None,
) -> torch.Tensor:
    """[T, K] by [N, K] to [T, N], into `out_TN` where it is given; `coded` is room for rows as codes, for weights that want them so.

    On CPU a row's result does not depend, to the bit, on the other rows.
    """
    if not isinstance(weight, QuantizedWeight):
        return plain_linear(x_TK, weight, bias_N, out_TN)
    y_TN = x_TK.new_empty(x_TK.shape[0], weight.shape[0]) if out_TN is None else out_TN
    return quantized_linear(x_TK, weight, bias_N, y_TN, coded)


def linear_reference(
    x_TK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor | None = None,
    coded: CodedRows | None = None,
) -> torch.Tensor:
    """The same in plain torch."""
    if not isinstance(weight, QuantizedWeight):
        return plain_linear_reference(x_TK, weight, bias_N, out_TN)
    y_TN = x_TK.new_empty(x_TK.shape[0], weight.shape[0]) if out_TN is None else out_TN
    return quantized_linear_reference(x_TK, weight, bias_N, y_TN, coded)


def linear_float32(
    x_TK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    out_TN: torch.Tensor,
    coded: CodedRows | None = None,
) -> torch.Tensor:
    """The same without a bias, in float32 whatever the inputs are: no conversion follows, and no digit is lost."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x_TK, weight, None, out_TN, coded)
    return plain_linear_float32(x_TK, weight, out_TN)


def linear_float32_reference(
    x_TK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    out_TN: torch.Tensor,
    coded: CodedRows | None = None,
) -> torch.Tensor:
    """The same in plain torch."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear_reference(x_TK, weight, None, out_TN, coded)
    return plain_linear_float32_reference(x_TK, weight, out_TN)

"""Weights quantized as a whole, from the two steps of quant/weight_quantize.py: what tests hold everybody to."""

import torch

from holdfast.quant.weight_quantize import encode, find_scales
from holdfast.quant.weight_schemes import WeightScheme


def quantize(
    values_RK: torch.Tensor, scheme: WeightScheme, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of float32 rows, shaped as `scheme.planes` says; `amax` [1] is that of the whole tensor."""
    scales = find_scales(values_RK, scheme, amax)
    return encode(values_RK, scales, scheme), scales

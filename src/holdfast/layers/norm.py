"""Norms over the hidden dimension: RMS, or layer norm with a bias."""

import torch
import torch.nn.functional as F

from holdfast.kernels.rms_norm import rms_norm


class RMSNorm:
    """x / rms(x) * weight."""

    def __init__(self, weight_H: torch.Tensor, eps: float) -> None:
        self._weight_H = weight_H
        self._eps = eps

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TH, self._weight_H, self._eps)


class LayerNorm:
    """(x - mean) / std * weight + bias."""

    def __init__(self, weight_H: torch.Tensor, bias_H: torch.Tensor, eps: float) -> None:
        self._weight_H = weight_H
        self._bias_H = bias_H
        self._eps = eps

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x_TH, self._weight_H.shape, self._weight_H, self._bias_H, self._eps)

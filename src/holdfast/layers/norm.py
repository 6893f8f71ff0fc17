"""Norms over the hidden dimension: RMS, or layer norm with a bias; both can take in what is to be added first."""

import torch

from holdfast.kernels.add_rms_norm import add_rms_norm
from holdfast.kernels.layer_norm import layer_norm
from holdfast.kernels.rms_norm import rms_norm


class RMSNorm:
    """x / rms(x) * weight."""

    def __init__(self, weight_H: torch.Tensor, eps: float) -> None:
        self.weight_H = weight_H
        self.eps = eps

    def __call__(self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, out_TH: torch.Tensor) -> torch.Tensor:
        """x += delta where there is one, and then the norm of x into `out_TH`."""
        if delta_TH is None:
            return rms_norm(x_TH, self.weight_H, self.eps, out_TH)
        return add_rms_norm(x_TH, delta_TH, self.weight_H, self.eps, out_TH)


class LayerNorm:
    """(x - mean) / std * weight + bias."""

    def __init__(self, weight_H: torch.Tensor, bias_H: torch.Tensor, eps: float) -> None:
        self._weight_H = weight_H
        self._bias_H = bias_H
        self._eps = eps

    def __call__(self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, out_TH: torch.Tensor) -> torch.Tensor:
        """x += delta where there is one, and then the norm of x into `out_TH`."""
        if delta_TH is not None:
            x_TH.add_(delta_TH)
        return layer_norm(x_TH, self._weight_H, self._bias_H, self._eps, out_TH)

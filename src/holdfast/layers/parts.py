"""LayerParts: linear layers and norms of a model by weight name, whole or one rank's part."""

from collections.abc import Mapping

import torch

from holdfast.layers.mlp import Linear, RMSNorm
from holdfast.layers.shared_linear import OutputSharing
from holdfast.quant.packed_weight import AnyWeight

Weights = Mapping[str, AnyWeight]


class LayerParts:
    """Parts of one model over its final weights."""

    def __init__(self, weights: Weights, sharing: OutputSharing | None = None) -> None:
        """With `sharing`, the weights are one rank's."""
        self.weights = weights
        self.sharing = sharing

    def plain(self, name: str) -> torch.Tensor:
        """Return a weight that is never quantized."""
        weight = self.weights[name]
        assert isinstance(weight, torch.Tensor), f"{name} is quantized"
        return weight

    def bias(self, name: str) -> torch.Tensor | None:
        return self.plain(f"{name}.bias") if f"{name}.bias" in self.weights else None

    def rms_norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self.plain(f"{name}.weight"), eps)

    def linear(self, name: str) -> Linear:
        return Linear(self.weights[f"{name}.weight"], self.bias(name))

    def output(self, name: str, keeps_share: bool = False) -> Linear:
        """Return a projection whose outputs all ranks need; with `keeps_share` it computes a rank's part of them."""
        if self.sharing is None:
            return self.linear(name)
        return self.sharing.linear(self.weights[f"{name}.weight"], self.bias(name), keeps_share)

"""MLP: gated (gate and up fused in one product) or plain."""

import torch

from holdfast.kernels.activate import activate
from holdfast.kernels.silu_mul import silu_mul
from holdfast.layers.linear import Linear


class GatedMLP:
    """down(activation(gate) * up)."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._down(self._gated(self._gate_up(x_TH)))

    def _gated(self, gate_up_TX: torch.Tensor) -> torch.Tensor:
        if self._activation == "silu":
            return silu_mul(gate_up_TX)
        gate_TI, up_TI = gate_up_TX.chunk(2, dim=-1)
        return activate(gate_TI, self._activation).mul_(up_TI)


class PlainMLP:
    """down(activation(up))."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._down(activate(self._up(x_TH), self._activation))

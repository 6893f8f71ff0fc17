"""MLP: gated (gate and up fused in one product) or plain."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from holdfast.kernels.silu_mul import silu_mul
from holdfast.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class GatedMLP:
    """down(activation(gate) * up)."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self._gate_up = gate_up
        self._down = down
        self._gate = silu_mul if activation == "silu" else _gate_with(ACTIVATIONS[activation])

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._down(self._gate(self._gate_up(x_TH)))


class PlainMLP:
    """down(activation(up))."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self._up = up
        self._down = down
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._down(self._activation(self._up(x_TH)))


def _gate_with(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def gate(gate_up_TX: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = gate_up_TX.chunk(2, dim=-1)
        return activation(gate_TI) * up_TI

    return gate

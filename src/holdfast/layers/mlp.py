"""MLP: gated (gate and up fused in one product) or plain."""

from dataclasses import dataclass

import torch

from holdfast.kernels.activate import activate
from holdfast.kernels.silu_mul import silu_mul
from holdfast.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class GateBuffers:
    """The two widest tensors of a step, held once for all layers: they run one after the other."""

    gate_up_TX: torch.Tensor
    gated_TI: torch.Tensor


class GatedMLP:
    """down(activation(gate) * up)."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str, buffers: GateBuffers) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._buffers = buffers

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        num_rows = x_TH.shape[0]
        gate_up_TX = self._gate_up(x_TH, self._buffers.gate_up_TX[:num_rows])
        if self._activation == "silu":
            return self._down(silu_mul(gate_up_TX, self._buffers.gated_TI[:num_rows]))
        gate_TI, up_TI = gate_up_TX.chunk(2, dim=-1)
        return self._down(activate(gate_TI, self._activation).mul_(up_TI))


class PlainMLP:
    """down(activation(up))."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._down(activate(self._up(x_TH), self._activation))

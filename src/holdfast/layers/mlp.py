"""MLP: gated (gate and up fused in one product) or plain."""

from typing import NamedTuple

import torch

from holdfast.kernels.activate import activate
from holdfast.kernels.products.quantize_rows import CodedRows
from holdfast.kernels.silu_mul import silu_mul
from holdfast.layers.linear import Linear


class MLPBuffers(NamedTuple):
    """The widest tensors of a step, one set for all layers: they run one after the other."""

    wide_TX: torch.Tensor
    active_TI: torch.Tensor
    coded: CodedRows | None = None
    """Room for the rows of either product as codes; None where no weight takes them so."""


class GatedMLP:
    """down(activation(gate) * up)."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self._activation = activation

    def __call__(self, x_TH: torch.Tensor, buffers: MLPBuffers, out_TH: torch.Tensor) -> torch.Tensor:
        wide_TX = self.gate_up(x_TH, buffers.wide_TX, buffers.coded)
        if self._activation == "silu":
            return self.down(silu_mul(wide_TX, buffers.active_TI), out_TH, buffers.coded)
        gate_TI, up_TI = wide_TX.chunk(2, dim=-1)
        active_TI = activate(gate_TI, self._activation, buffers.active_TI).mul_(up_TI)
        return self.down(active_TI, out_TH, buffers.coded)


class PlainMLP:
    """down(activation(up))."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, x_TH: torch.Tensor, buffers: MLPBuffers, out_TH: torch.Tensor) -> torch.Tensor:
        wide_TI = self._up(x_TH, buffers.wide_TX, buffers.coded)
        return self._down(activate(wide_TI, self._activation, buffers.active_TI), out_TH, buffers.coded)

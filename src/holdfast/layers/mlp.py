"""Linear, norms and MLPs: what a decoder layer is made of beside attention."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from holdfast.kernels.activation import activate, gate_mul
from holdfast.kernels.gemm.deferred_rms_norm import ResidualStream, SmallBatchScratch
from holdfast.kernels.gemm.linear import fuses_gate, gated_linear, linear, room_for_codes
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, add_rms_norm_coded, quantize_rows
from holdfast.kernels.norm import add_rms_norm, layer_norm, rms_norm
from holdfast.quant.quantized_weight import QuantizedWeight


class Linear:
    """y = x @ weight.T + bias for rows [T, K]."""

    takes_codes = True
    """True if the producer of the rows may quantize them."""

    def __init__(self, weight_NK: torch.Tensor | QuantizedWeight, bias_N: torch.Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N

    def __call__(
        self, x_TK: torch.Tensor, out_TN: torch.Tensor, quantized: QuantizedRows | None = None, is_coded: bool = False
    ) -> torch.Tensor:
        """`quantized` is room for the rows as codes, which some quantized weights take them as; with `is_coded` they are there."""
        return linear(x_TK, self.weight_NK, self.bias_N, out_TN, quantized, is_coded)

    def room_for_codes(self, quantized: QuantizedRows | None, num_rows: int) -> QuantizedRows | None:
        """Where a norm leaves the codes of rows for this product; None where it takes them as they are."""
        return room_for_codes(quantized, self.weight_NK, num_rows)

    def room_for_inputs(self, like_TK: torch.Tensor) -> torch.Tensor:
        """Return the buffer in which to compute the next rows for this product: `like_TK`, or one that other ranks read."""
        return like_TK


class RMSNorm:
    """x / rms(x) * (weight + offset), with weights of any type."""

    def __init__(self, weight_H: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight_H = weight_H
        self.eps = eps
        self.offset = offset

    def defer(self, x_TH: torch.Tensor, scaled_TH: torch.Tensor, scratch: SmallBatchScratch) -> ResidualStream:
        """Return the stream as the fused decode path takes it, which defers this norm."""
        return ResidualStream(x_TH, self.weight_H, self.eps, scaled_TH, scratch)

    def __call__(
        self,
        x_TH: torch.Tensor,
        delta_TH: torch.Tensor | None,
        out_TH: torch.Tensor,
        codes: QuantizedRows | None = None,
    ) -> torch.Tensor:
        """x += delta where there is one, and then the norm of x into `out_TH`, and as codes into `codes` where that is given."""
        if delta_TH is not None and codes is not None:
            return add_rms_norm_coded(x_TH, delta_TH, self.weight_H, self.eps, out_TH, codes, self.offset)
        if delta_TH is not None:
            return add_rms_norm(x_TH, delta_TH, self.weight_H, self.eps, out_TH, self.offset)
        rms_norm(x_TH, self.weight_H, self.eps, out_TH, self.offset)
        if codes is not None:
            quantize_rows(out_TH, codes)
        return out_TH


class LayerNorm:
    """(x - mean) / std * weight + bias."""

    def __init__(self, weight_H: torch.Tensor, bias_H: torch.Tensor, eps: float) -> None:
        self._weight_H = weight_H
        self._bias_H = bias_H
        self._eps = eps

    def __call__(
        self,
        x_TH: torch.Tensor,
        delta_TH: torch.Tensor | None,
        out_TH: torch.Tensor,
        codes: QuantizedRows | None = None,
    ) -> torch.Tensor:
        """x += delta where there is one, and then the norm of x into `out_TH`, and as codes into `codes` where that is given."""
        if delta_TH is not None:
            x_TH.add_(delta_TH)
        layer_norm(x_TH, self._weight_H, self._bias_H, self._eps, out_TH)
        if codes is not None:
            quantize_rows(out_TH, codes)
        return out_TH


class MLPBuffers(NamedTuple):
    """The widest tensors of a step, one set for all layers: they run one after the other."""

    wide_TX: torch.Tensor
    active_TI: torch.Tensor
    quantized: QuantizedRows | None = None
    """Room for the rows of either product as codes; None where no weight takes them so."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor], quantized: QuantizedRows | None) -> "MLPBuffers":
        """From the tensors of `mlp_request`, by name."""
        return cls(held["wide"], held["active"], quantized)


class GatedMLP:
    """down(activation(gate) * up), with gate at most, and up within plus and minus, the limit, where there is one."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str, limit: float | None = None) -> None:
        self.gate_up = gate_up
        self.down = down
        self.limit = limit
        self._activation = activation

    @property
    def first(self) -> Linear:
        """The product that takes x."""
        return self.gate_up

    def __call__(
        self, x_TH: torch.Tensor, buffers: MLPBuffers, out_TH: torch.Tensor, is_coded: bool = False
    ) -> torch.Tensor:
        """With `is_coded` the codes of x lie in their room."""
        quantized, active_TI = buffers.quantized, buffers.active_TI
        gate_up, down = self.gate_up.weight_NK, self.down.weight_NK
        if self.limit is None and self.down.takes_codes and fuses_gate(x_TH, gate_up, down, quantized):
            gated_linear(x_TH, gate_up, self.gate_up.bias_N, self._activation, active_TI, down, quantized, is_coded)
            return self.down(active_TI, out_TH, quantized, is_coded=True)
        wide_TX = self.gate_up(x_TH, buffers.wide_TX, quantized, is_coded)
        active_TI = self.down.room_for_inputs(active_TI)
        return self.down(gate_mul(wide_TX, self._activation, active_TI, self.limit), out_TH, quantized)


class PlainMLP:
    """down(activation(up))."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self.first = up
        self._down = down
        self._activation = activation

    def __call__(
        self, x_TH: torch.Tensor, buffers: MLPBuffers, out_TH: torch.Tensor, is_coded: bool = False
    ) -> torch.Tensor:
        """With `is_coded` the codes of x lie in their room."""
        wide_TI = self.first(x_TH, buffers.wide_TX, buffers.quantized, is_coded)
        active_TI = self._down.room_for_inputs(buffers.active_TI)
        return self._down(activate(wide_TI, self._activation, active_TI), out_TH, buffers.quantized)

"""Linear, norms and MLPs: parts of a decoder layer beside attention."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from holdfast.kernels.activation import activate, gate_mul
from holdfast.kernels.gemm.deferred_rms_norm import ResidualStream, SmallBatchScratch
from holdfast.kernels.gemm.linear import fuses_gate, gated_linear, joint_linear, linear, room_for_codes
from holdfast.kernels.gemm.quantize_activations import (
    QuantizedRows,
    add_rms_norm_coded,
    gate_mul_coded,
    quantize_rows,
    rms_norm_codes,
)
from holdfast.kernels.norm import add_rms_norm, layer_norm, rms_norm
from holdfast.quant.packed_weight import AnyWeight, PackedWeight


class Linear:
    """y = x @ weight.T + bias for rows [T, K]."""

    takes_codes = True
    """True if the producer of the rows may quantize them."""

    def __init__(self, weight_NK: AnyWeight, bias_N: torch.Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N

    def __call__(
        self, x_TK: torch.Tensor, out_TN: torch.Tensor, quantized: QuantizedRows | None = None, is_coded: bool = False
    ) -> torch.Tensor:
        """`quantized` is a buffer for quantized rows, which some weights need; if `is_coded`, it holds them already."""
        return linear(x_TK, self.weight_NK, self.bias_N, out_TN, quantized, is_coded)

    def joint(
        self,
        x_TK: torch.Tensor,
        out_TN: torch.Tensor,
        plain_PK: torch.Tensor,
        out_TP: torch.Tensor,
        quantized: QuantizedRows | None = None,
        is_coded: bool = False,
    ) -> torch.Tensor:
        """Like `__call__`, and write x @ plain.T to `out_TP` in float32: one launch for one row, if possible."""
        assert type(self) is Linear, f"{type(self).__name__} does more than multiply"
        joint_linear(x_TK, self.weight_NK, self.bias_N, out_TN, plain_PK, out_TP, quantized, is_coded)
        return out_TN

    def room_for_codes(self, quantized: QuantizedRows | None, num_rows: int) -> QuantizedRows | None:
        """Return the buffer that the producer of x fills with codes; None if this product takes plain rows."""
        return room_for_codes(quantized, self.weight_NK, num_rows) if self.takes_codes else None

    def room_for_inputs(self, like_TK: torch.Tensor) -> torch.Tensor:
        """Return the buffer for this product's next input rows: `like_TK`, or one that peers read."""
        return like_TK


class RMSNorm:
    """x / rms(x) * (weight + offset), with weights of any type."""

    def __init__(self, weight_H: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight_H = weight_H
        self.eps = eps
        self.offset = offset

    def defer(self, x_TH: torch.Tensor, scaled_TH: torch.Tensor, scratch: SmallBatchScratch) -> ResidualStream:
        """Return the stream for the fused decode path, with this norm deferred."""
        return ResidualStream(x_TH, self.weight_H, self.eps, scaled_TH, scratch, self.offset)

    def __call__(
        self,
        x_TH: torch.Tensor,
        delta_TH: torch.Tensor | None,
        out_TH: torch.Tensor,
        codes: QuantizedRows | None = None,
    ) -> torch.Tensor:
        """Add `delta_TH`, if any, to x; write the norm of x to `out_TH`, and quantized to `codes`, if given."""
        if codes is not None:
            return add_rms_norm_coded(x_TH, delta_TH, self.weight_H, self.eps, out_TH, codes, self.offset)
        if delta_TH is not None:
            return add_rms_norm(x_TH, delta_TH, self.weight_H, self.eps, out_TH, self.offset)
        return rms_norm(x_TH, self.weight_H, self.eps, out_TH, self.offset)

    def encode(
        self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, scratch_TH: torch.Tensor, codes: QuantizedRows
    ) -> torch.Tensor:
        """Add `delta_TH`, if any, to x; write the norm of x to `codes` alone. `scratch_TH` has undefined values then."""
        return rms_norm_codes(x_TH, delta_TH, self.weight_H, self.eps, scratch_TH, codes, self.offset)


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
        """Add `delta_TH`, if any, to x; write the norm of x to `out_TH`, and quantized to `codes`, if given."""
        if delta_TH is not None:
            x_TH.add_(delta_TH)
        layer_norm(x_TH, self._weight_H, self._bias_H, self._eps, out_TH)
        if codes is not None:
            quantize_rows(out_TH, codes)
        return out_TH

    def encode(
        self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, scratch_TH: torch.Tensor, codes: QuantizedRows
    ) -> torch.Tensor:
        """Like `__call__`."""
        return self(x_TH, delta_TH, scratch_TH, codes)


class MLPBuffers(NamedTuple):
    """Widest tensors of a step, one set for all layers, which run in sequence."""

    wide_TX: torch.Tensor
    active_TI: torch.Tensor
    quantized: QuantizedRows | None = None
    """Buffer for quantized rows of either product; None if no weight needs them."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor], quantized: QuantizedRows | None) -> "MLPBuffers":
        """Take the tensors of `mlp_request` by name."""
        return cls(held["wide"], held["active"], quantized)


class GatedMLP:
    """down(activation(gate) * up); a limit, if any, clamps gate to at most it, `up` to plus or minus it."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str, limit: float | None = None) -> None:
        self.gate_up = gate_up
        self.down = down
        self.limit = limit
        self.activation = activation

    @property
    def first(self) -> Linear:
        """The product that takes x."""
        return self.gate_up

    def __call__(
        self, x_TH: torch.Tensor, buffers: MLPBuffers, out_TH: torch.Tensor, is_coded: bool = False
    ) -> torch.Tensor:
        """If `is_coded`, x is already quantized in `buffers.quantized`."""
        quantized, active_TI = buffers.quantized, buffers.active_TI
        if self.fuses_gate(x_TH, buffers):
            gate_up, down = self.gate_up.weight_NK, self.down.weight_NK
            gated_linear(x_TH, gate_up, self.gate_up.bias_N, self.activation, active_TI, down, quantized, is_coded)
            return self.down(active_TI, out_TH, quantized, is_coded=True)
        self.gate_up(x_TH, buffers.wide_TX, quantized, is_coded)
        return self.finish(buffers, out_TH)

    def fuses_gate(self, x_TH: torch.Tensor, buffers: MLPBuffers) -> bool:
        """Return True if gate and up of these rows are one product with the gate in its epilogue."""
        weights = self.gate_up.weight_NK, self.down.weight_NK
        if isinstance(weights[0], PackedWeight) and self.activation != "silu":
            return False
        return self.limit is None and self.down.takes_codes and fuses_gate(x_TH, *weights, buffers.quantized)

    def finish(self, buffers: MLPBuffers, out_TH: torch.Tensor) -> torch.Tensor:
        """Continue after `gate_up`, whose result is in the buffers."""
        quantized, wide_TX, active_TI = buffers.quantized, buffers.wide_TX, buffers.active_TI
        codes = self.down.room_for_codes(quantized, len(wide_TX))
        if codes is not None:
            gate_mul_coded(wide_TX, self.activation, active_TI, self.limit, codes)
            return self.down(active_TI, out_TH, quantized, is_coded=True)
        active_TI = self.down.room_for_inputs(active_TI)
        return self.down(gate_mul(wide_TX, self.activation, active_TI, self.limit), out_TH, quantized)


class PlainMLP:
    """down(activation(up))."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self.first = up
        self._down = down
        self._activation = activation

    def __call__(
        self, x_TH: torch.Tensor, buffers: MLPBuffers, out_TH: torch.Tensor, is_coded: bool = False
    ) -> torch.Tensor:
        """If `is_coded`, x is already quantized in `buffers.quantized`."""
        wide_TI = self.first(x_TH, buffers.wide_TX, buffers.quantized, is_coded)
        active_TI = self._down.room_for_inputs(buffers.active_TI)
        return self._down(activate(wide_TI, self._activation, active_TI), out_TH, buffers.quantized)

"""Attention layer: fused projection, backend, output projection."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from holdfast.attention.backend import Batch, GroupedAttention
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, SmallBatchScratch
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.gemm.small_batch import normed_linear
from holdfast.layers.mlp import Linear


class AttentionBuffers(NamedTuple):
    """One layer's tensors, one set for all layers."""

    qkv_TX: torch.Tensor
    q_THD: torch.Tensor
    attended_TX: torch.Tensor
    scratch: Mapping[str, torch.Tensor]
    """The backend's own, by name."""
    quantized: QuantizedRows | None = None
    """Room for the rows of either product as codes; None where no weight takes them so."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor], quantized: QuantizedRows | None) -> "AttentionBuffers":
        """From the tensors of `attention_request`, by name; those that it does not know are the backend's."""
        scratch = {name: tensor for name, tensor in held.items() if name not in ("qkv", "q", "attended")}
        return cls(held["qkv"], held["q"], held["attended"], scratch, quantized)


class AttentionLayer:
    """One layer's attention over whatever backend it is given."""

    def __init__(
        self,
        layer: int,
        qkv: Linear,
        o: Linear,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        backend: GroupedAttention[Any],
    ) -> None:
        self.qkv = qkv
        self.o = o
        self._layer = layer
        self._head_norm = head_norm
        self._rotary = rotary
        self._backend = backend

    def __call__(
        self,
        x_TH: torch.Tensor,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        buffers: AttentionBuffers,
        out_TH: torch.Tensor,
        wanted_only: bool = False,
        is_coded: bool = False,
    ) -> torch.Tensor:
        """All rows leave their keys and values; all, or those whose logits are wanted, attend: [T, H] or [R, H].

        With `is_coded` the codes of x lie in their room.
        """
        self.qkv(x_TH, buffers.qkv_TX, buffers.quantized, is_coded)
        attended_RX = self.attend(batch, plan, buffers, wanted_only)
        return self.o(attended_RX, out_TH[: attended_RX.shape[0]], buffers.quantized)

    @property
    def products(self) -> tuple[Linear, ...]:
        """All that it multiplies by."""
        return self.qkv, self.o

    def attend_normed(
        self,
        rows: NormedRows,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        buffers: AttentionBuffers,
        scratch: SmallBatchScratch,
    ) -> torch.Tensor:
        """On the fused decode path, up to the output projection: of rows whose RMSNorm is deferred."""
        normed_linear(rows, self.qkv.weight_NK, self.qkv.bias_N, False, buffers.qkv_TX, scratch)
        return self.attend(batch, plan, buffers)

    def room_for_codes(self, quantized: QuantizedRows | None, num_rows: int) -> QuantizedRows | None:
        """Where a norm leaves the codes of x; None where the projection takes it as it is."""
        return self.qkv.room_for_codes(quantized, num_rows)

    def attend(
        self,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        buffers: AttentionBuffers,
        wanted_only: bool = False,
    ) -> torch.Tensor:
        """What lies between the two products: `qkv_TX` to `attended_TX`."""
        self._backend.write(buffers.qkv_TX, batch, self._head_norm, self._rotary, self._layer, buffers.q_THD)
        attended_TX = self.o.room_for_inputs(buffers.attended_TX)
        return self._backend.attend(buffers.q_THD, self._layer, plan, buffers.scratch, attended_TX, wanted_only)

"""Grouped attention layer: fused QKV projection, backend, output projection."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from holdfast.attention.backend import Batch, LayerStep, StepPlan
from holdfast.families.grouped.pages import GroupedBackend
from holdfast.kernels.attention.output_gate import gate_outputs, gates_of
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, SmallBatchScratch
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.gemm.small_batch import normed_linear
from holdfast.layers.mlp import Linear
from holdfast.layers.parts import LayerParts

OWN = ("qkv", "q", "attended")


class GroupedBuffers(NamedTuple):
    """One layer's tensors, one set for all layers."""

    qkv_TX: torch.Tensor
    q_THD: torch.Tensor
    attended_TX: torch.Tensor
    scratch: Mapping[str, torch.Tensor]
    """The backend's own, by name."""
    quantized: QuantizedRows | None = None
    """Holds the quantized rows of either product; None if no weight takes them."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor], quantized: QuantizedRows | None) -> "GroupedBuffers":
        """Take the tensors that `GroupedSpec.tensors` declares; the others are the backend's scratch."""
        scratch = {name: tensor for name, tensor in held.items() if name not in OWN}
        return cls(*(held[name] for name in OWN), scratch=scratch, quantized=quantized)


class GroupedAttentionLayer:
    """One layer's attention over any backend of the family."""

    reads_codes_alone = True
    """True: nothing reads the norm of x if the projection takes its codes."""

    def __init__(
        self,
        layer: int,
        qkv: Linear,
        o: Linear,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        backend: GroupedBackend,
        has_output_gate: bool = False,
    ) -> None:
        self.qkv = qkv
        self.o = o
        self._layer = layer
        self.head_norm = head_norm
        self.rotary = rotary
        self.backend = backend
        self.has_output_gate = has_output_gate

    def __call__(
        self,
        x_TH: torch.Tensor,
        batch: Batch,
        plan: StepPlan,
        buffers: GroupedBuffers,
        out_TH: torch.Tensor,
        wanted_only: bool = False,
        is_coded: bool = False,
    ) -> torch.Tensor:
        """Write all rows' keys and values; attend with all rows, or with those whose logits are wanted: [T, H] or [R, H].

        If `is_coded`, x has already been quantized into `buffers.quantized`.
        """
        self.qkv(x_TH, buffers.qkv_TX, buffers.quantized, is_coded)
        attended_RX = self.attend(batch, plan, buffers, wanted_only)
        return self.o(attended_RX, out_TH[: attended_RX.shape[0]], buffers.quantized)

    @property
    def products(self) -> tuple[Linear, ...]:
        return self.qkv, self.o

    def attend_normed(
        self, rows: NormedRows, batch: Batch, plan: StepPlan, buffers: GroupedBuffers, scratch: SmallBatchScratch
    ) -> torch.Tensor:
        """Fused decode path, up to the output projection, with rows whose RMSNorm is deferred."""
        normed_linear(rows, self.qkv.weight_NK, self.qkv.bias_N, False, buffers.qkv_TX, scratch)
        return self.attend(batch, plan, buffers)

    def room_for_codes(self, quantized: QuantizedRows | None, num_rows: int) -> QuantizedRows | None:
        """Return the buffer in which a norm leaves quantized x; None if the projection takes it as it is."""
        return self.qkv.room_for_codes(quantized, num_rows)

    def attend(self, batch: Batch, plan: StepPlan, buffers: GroupedBuffers, wanted_only: bool = False) -> torch.Tensor:
        """Run what lies between the two products, gates included: `qkv_TX` to `attended_TX`."""
        self.backend.write(buffers.qkv_TX, batch, self.head_norm, self.rotary, self._layer, buffers.q_THD)
        attended_TX = self.o.room_for_inputs(buffers.attended_TX)
        step = LayerStep(self._layer, plan, buffers.scratch)
        attended_RX = self.backend.attend(buffers.q_THD, step, attended_TX, wanted_only)
        if self.has_output_gate:
            rows_R = batch.logits.rows_R if wanted_only and batch.logits is not None else None
            gate_outputs(attended_RX, gates_of(buffers.qkv_TX, *buffers.q_THD.shape[1:]), rows_R)
        return attended_RX


def build_layer(
    parts: LayerParts,
    layer: int,
    norm: tuple[float, float] | None,
    rotary: Rotary | None,
    backend: GroupedBackend,
    has_output_gate: bool = False,
    place: int | None = None,
) -> GroupedAttentionLayer:
    """Build a layer from its weights; `norm` is epsilon and offset of the norms of query and key heads, if it has them.

    `place`: its number among the layers of the backend, if not all layers are of this family.
    """
    prefix, head_norm = f"layers.{layer}", None
    if norm is not None:
        head_norm = HeadNorm(parts.plain(f"{prefix}.q_norm.weight"), parts.plain(f"{prefix}.k_norm.weight"), *norm)
    qkv, o = parts.linear(f"{prefix}.qkv"), parts.output(f"{prefix}.o")
    place = layer if place is None else place
    return GroupedAttentionLayer(place, qkv, o, head_norm, rotary, backend, has_output_gate)

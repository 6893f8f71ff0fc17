"""Compressed attention layer (DeepSeek-V4): projections, pooling of entries, backend, output projection in groups.

T rows, N query heads of D elements, I index heads of D elements, X any other width
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from holdfast.attention.backend import Batch, LayerStep, StepPlan
from holdfast.families.compressed.pages import CompressedBackend
from holdfast.families.compressed.spec import CompressedSpec, CompressorSpec
from holdfast.families.latent.spec import IndexSpec
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.gemm.linear import grouped_linear
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.latent.compress import Compressor
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.layers.mlp import Linear, RMSNorm
from holdfast.layers.parts import LayerParts

OWN = ("qkv_a", "q_normed", "q", "attended", "grouped")
OPTIONAL = ("pooled", "index_q", "index_weights")


class CompressedBuffers(NamedTuple):
    """One layer's tensors, one set for all layers."""

    qkv_a_TX: torch.Tensor
    """The queries' latent, then the token's stored vector before its norm."""
    q_normed_TX: torch.Tensor
    q_TX: torch.Tensor
    attended_TX: torch.Tensor
    grouped_TX: torch.Tensor
    """Output of the output projection's first half."""
    pooled_X: torch.Tensor | None
    """float32, a vector: each layer takes rows of its own width."""
    index_q_TX: torch.Tensor | None
    index_weights_TI: torch.Tensor | None
    scratch: Mapping[str, torch.Tensor]
    """The backend's own, by name."""
    quantized: QuantizedRows | None = None
    """Holds the quantized rows of any one product; None if no weight takes them."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor], quantized: QuantizedRows | None) -> "CompressedBuffers":
        """Take the tensors that `CompressedSpec.tensors` declares; the others are the backend's scratch."""
        scratch = {name: tensor for name, tensor in held.items() if name not in (*OWN, *OPTIONAL)}
        optional = {"pooled_X": "pooled", "index_q_TX": "index_q", "index_weights_TI": "index_weights"}
        named = {field: held.get(name) for field, name in optional.items()}
        return cls(*(held[name] for name in OWN), **named, scratch=scratch, quantized=quantized)


class EntryIndex(NamedTuple):
    """The weights of the index by which a layer's rows choose entries."""

    q: Linear
    """Input: the queries' latent after its norm."""
    compressor: Compressor
    num_heads: int


class Entries(NamedTuple):
    """The weights with which a layer makes entries."""

    pool_XH: torch.Tensor
    """Rows: vectors and their gates, both of the index too, then the weights of index heads."""
    compressor: Compressor
    rotary: Rotary
    """The rotation of the first token of each row's entry."""
    chooser: EntryIndex | None
    """None: rows attend to all entries."""


class OutputGroups(NamedTuple):
    """The output projection: groups of heads to latents, and those together to the residual stream."""

    a_GNK: torch.Tensor
    b: Linear


class CompressedWeights(NamedTuple):
    """The weights of a layer."""

    qkv_a: Linear
    q: Linear
    """Input: the queries' latent after `q_norm`."""
    out: OutputGroups
    q_norm: RMSNorm
    norm: LatentNorm
    """The norm of stored vectors."""
    sinks_N: torch.Tensor
    entries: Entries | None
    """None: the layer has its window only."""

    @classmethod
    def of(
        cls, parts: LayerParts, layer: int, compressed: CompressedSpec, eps: float, rotary: Rotary | None
    ) -> "CompressedWeights":
        """`rotary`: of the first token of each row's entry, if the layer has entries."""
        prefix, groups = f"layers.{layer}", (compressed.num_output_groups, compressed.output_rank, -1)
        out = OutputGroups(parts.plain(f"{prefix}.o_a.weight").view(groups), parts.output(f"{prefix}.o_b"))
        compressor = compressed.compressors[layer]
        return cls(
            parts.linear(f"{prefix}.qkv_a"),
            parts.linear(f"{prefix}.q_b"),
            out,
            parts.rms_norm(f"{prefix}.q_a_norm", eps),
            LatentNorm(parts.plain(f"{prefix}.kv_norm.weight"), eps),
            parts.plain(f"{prefix}.sinks"),
            None
            if compressor is None
            else _entries(parts, prefix, compressor, compressed.layer_index(layer), eps, rotary),
        )


def _entries(
    parts: LayerParts,
    prefix: str,
    compressor: CompressorSpec,
    index: IndexSpec | None,
    eps: float,
    rotary: Rotary | None,
) -> Entries:
    assert rotary is not None, f"entries of {prefix} are not rotated"

    def made(name: str) -> Compressor:
        positions_RX, weight_D = parts.plain(f"{name}.positions"), parts.plain(f"{name}.norm.weight")
        return Compressor(compressor.ratio, compressor.is_overlapped, positions_RX, weight_D, eps)

    pool_XH, own = parts.plain(f"{prefix}.pool.weight"), made(f"{prefix}.compressor")
    if index is None:
        return Entries(pool_XH, own, rotary, None)
    return Entries(
        pool_XH, own, rotary, EntryIndex(parts.linear(f"{prefix}.index_q"), made(f"{prefix}.index"), index.num_heads)
    )


class CompressedAttentionLayer:
    """One layer's attention to a window and to entries, over any backend of the family."""

    def __init__(self, layer: int, weights: CompressedWeights, rotary: Rotary, backend: CompressedBackend) -> None:
        self.qkv_a, self.q, self.out, self._q_norm, self._norm, self._sinks_N, self.entries = weights
        self._layer = layer
        self._rotary = rotary
        self._backend = backend

    def __call__(
        self,
        x_TH: torch.Tensor,
        batch: Batch,
        plan: StepPlan,
        buffers: CompressedBuffers,
        out_TH: torch.Tensor,
        wanted_only: bool = False,
        is_coded: bool = False,
    ) -> torch.Tensor:
        """Write all rows' vectors and entries; attend with all rows, or with those whose logits are wanted: [T, H] or [R, H].

        If `is_coded`, x is already quantized in `buffers.quantized`.
        """
        q_rank, quantized = len(self._q_norm.weight_H), buffers.quantized
        qkv_a_TX, pooled_TX = self._project(x_TH, buffers, is_coded)
        codes = self.q.room_for_codes(quantized, len(x_TH))
        self._q_norm(qkv_a_TX[:, :q_rank], None, buffers.q_normed_TX, codes)
        self.q(buffers.q_normed_TX, buffers.q_TX, quantized, is_coded=codes is not None)
        q_TND = buffers.q_TX.unflatten(1, (len(self._sinks_N), -1))
        self._backend.write(qkv_a_TX[:, q_rank:], q_TND, batch, self._norm, self._q_norm.eps, self._rotary, self._layer)
        if self.entries is not None and pooled_TX is not None:
            self._compress(pooled_TX, batch, plan, buffers, self.entries, is_coded=codes is not None)
        own = self._sinks_N, self._rotary, LayerStep(self._layer, plan, buffers.scratch)
        attended_RX = self._backend.attend(q_TND, *own, buffers.attended_TX, wanted_only)
        num_rows = attended_RX.shape[0]
        grouped_TX = self.out.b.room_for_inputs(buffers.grouped_TX)
        grouped_RX = grouped_linear(attended_RX, self.out.a_GNK, grouped_TX[:num_rows])
        return self.out.b(grouped_RX, out_TH[:num_rows], quantized)

    def _project(
        self, x_TH: torch.Tensor, buffers: CompressedBuffers, is_coded: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the latents of queries and vectors, and what entries are pooled from, if the layer has entries."""
        out_TX, quantized = buffers.qkv_a_TX, buffers.quantized
        if self.entries is None:
            return self.qkv_a(x_TH, out_TX, quantized, is_coded), None
        assert buffers.pooled_X is not None, "no buffer to pool entries from"
        num_rows, pool_XH = len(x_TH), self.entries.pool_XH
        pooled_TX = buffers.pooled_X[: num_rows * len(pool_XH)].view(num_rows, len(pool_XH))
        return self.qkv_a.joint(x_TH, out_TX, pool_XH, pooled_TX, quantized, is_coded), pooled_TX

    def _compress(
        self,
        pooled_TX: torch.Tensor,
        batch: Batch,
        plan: StepPlan,
        buffers: CompressedBuffers,
        entries: Entries,
        is_coded: bool,
    ) -> None:
        """Add the step's rows to the layer's states, write finished entries of the layer and its index, and choose among them."""
        num_rows, width = pooled_TX.shape
        own, rotary, layer = 2 * entries.compressor.positions_RX.shape[1], entries.rotary, self._layer
        self._backend.compress(pooled_TX[:, :own], batch, entries.compressor, rotary, layer)
        index = entries.chooser
        if index is None:
            return
        assert buffers.index_q_TX is not None, "no buffer for index queries"
        assert buffers.index_weights_TI is not None, "no buffer for the weights of index heads"
        same_codes = index.q.room_for_codes(buffers.quantized, num_rows) is not None
        index.q(buffers.q_normed_TX, buffers.index_q_TX, buffers.quantized, is_coded and same_codes)
        q_TID = buffers.index_q_TX.unflatten(1, (index.num_heads, -1))
        keys_TX, factor = pooled_TX[:, own : width - index.num_heads], (q_TID.shape[2] * index.num_heads) ** -0.5
        rotaries = rotary, self._rotary
        self._backend.compress_index(keys_TX, q_TID, batch, index.compressor, *rotaries, layer)
        weights_TI = torch.mul(pooled_TX[:, width - index.num_heads :], factor, out=buffers.index_weights_TI)
        self._backend.select(q_TID, weights_TI, LayerStep(layer, plan, buffers.scratch))

"""CompressedAttentionLayer (DeepSeek-V4): projections, what entries are pooled from, backend, output projection in groups.

T rows, N query heads of D elements, I index heads of D elements, X any other width
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from holdfast.attention.backend import Batch, CompressedAttention
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.gemm.grouped_linear import grouped_linear
from holdfast.kernels.gemm.linear import linear_float32
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.latent.compress import Compressor
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.layers.mlp import Linear, RMSNorm

OWN = ("qkv_a", "q_normed", "q", "attended", "grouped", "pooled", "index_q", "index_weights")


class CompressedBuffers(NamedTuple):
    """One layer's tensors, one set for all layers."""

    qkv_a_TX: torch.Tensor
    """The queries' latent, and then what is kept of a token, before its norm."""
    q_normed_TX: torch.Tensor
    q_TX: torch.Tensor
    attended_TX: torch.Tensor
    grouped_TX: torch.Tensor
    """Behind the first half of the output projection."""
    scratch: Mapping[str, torch.Tensor]
    """The backend's own, by name."""
    pooled_X: torch.Tensor | None = None
    """float32, a vector: rows are as wide as a layer pools."""
    index_q_TX: torch.Tensor | None = None
    index_weights_TI: torch.Tensor | None = None
    """float32"""
    quantized: QuantizedRows | None = None
    """Room for the rows of any one product as codes; None where no weight takes them so."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor], quantized: QuantizedRows | None) -> "CompressedBuffers":
        """From the tensors of `compressed_attention_request`, by name; those that it does not know are the backend's."""
        scratch = {name: tensor for name, tensor in held.items() if name not in OWN}
        qkv_a_TX, q_normed_TX, q_TX, attended_TX, grouped_TX = (held[name] for name in OWN[:5])
        pooled_X, index_q_TX, index_weights_TI = (held.get(name) for name in OWN[5:])
        products = qkv_a_TX, q_normed_TX, q_TX, attended_TX, grouped_TX
        return cls(*products, scratch, pooled_X, index_q_TX, index_weights_TI, quantized)


class EntryIndex(NamedTuple):
    """The weights of the index by which a layer's rows choose entries."""

    q: Linear
    """Of the queries' latent behind its norm."""
    compressor: Compressor
    num_heads: int


class Entries(NamedTuple):
    """What a layer makes entries with."""

    pool_XH: torch.Tensor
    """Rows: what is pooled, its gates; both of the index too, and then how much each of its heads counts."""
    compressor: Compressor
    rotary: Rotary
    """Of the first token of each row's entry."""
    chooser: EntryIndex | None
    """None: rows attend to all of them."""


class OutputGroups(NamedTuple):
    """The output projection: heads in groups to latents, and those together to the stream."""

    a_GNK: torch.Tensor
    b: Linear


class CompressedAttentionLayer:
    """One layer's attention to a window and to entries, over whatever backend it is given."""

    def __init__(
        self,
        layer: int,
        qkv_a: Linear,
        q: Linear,
        out: OutputGroups,
        q_norm: RMSNorm,
        norm: LatentNorm,
        sinks_N: torch.Tensor,
        entries: Entries | None,
        rotary: Rotary,
        backend: CompressedAttention[Any],
    ) -> None:
        """`q` takes the queries' latent behind `q_norm`; `norm` is that of what is kept of a token; no `entries`: a window only."""
        self.qkv_a = qkv_a
        self.q = q
        self.out = out
        self.entries = entries
        self._layer = layer
        self._q_norm = q_norm
        self._norm = norm
        self._sinks_N = sinks_N
        self._rotary = rotary
        self._backend = backend

    def __call__(
        self,
        x_TH: torch.Tensor,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        buffers: CompressedBuffers,
        out_TH: torch.Tensor,
        wanted_only: bool = False,
    ) -> torch.Tensor:
        """All rows leave their vectors and join entries; all, or those whose logits are wanted, attend: [T, H] or [R, H]."""
        q_rank, quantized = len(self._q_norm.weight_H), buffers.quantized
        qkv_a_TX = self.qkv_a(x_TH, buffers.qkv_a_TX, quantized)
        codes = self.q.room_for_codes(quantized, len(x_TH))
        self._q_norm(qkv_a_TX[:, :q_rank], None, buffers.q_normed_TX, codes)
        self.q(buffers.q_normed_TX, buffers.q_TX, quantized, is_coded=codes is not None)
        q_TND = buffers.q_TX.unflatten(1, (len(self._sinks_N), -1))
        self._backend.write(qkv_a_TX[:, q_rank:], q_TND, batch, self._norm, self._q_norm.eps, self._rotary, self._layer)
        if self.entries is not None:
            self._compress(x_TH, batch, plan, buffers, self.entries, is_coded=codes is not None)
        attended_RX = self._backend.attend(
            q_TND,
            self._sinks_N,
            batch,
            self._rotary,
            self._layer,
            plan,
            buffers.scratch,
            buffers.attended_TX,
            wanted_only,
        )
        num_rows = attended_RX.shape[0]
        grouped_RX = grouped_linear(attended_RX, self.out.a_GNK, buffers.grouped_TX[:num_rows])
        return self.out.b(grouped_RX, out_TH[:num_rows], quantized)

    def _compress(
        self,
        x_TH: torch.Tensor,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        buffers: CompressedBuffers,
        entries: Entries,
        is_coded: bool,
    ) -> None:
        """The step's rows into the states of the layer; its finished entries, and those of its index, to their slots; a choice among them."""
        num_rows, width = len(x_TH), len(entries.pool_XH)
        assert buffers.pooled_X is not None, "no place for what entries are pooled from"
        pooled_TX = buffers.pooled_X[: num_rows * width].view(num_rows, width)
        linear_float32(x_TH, entries.pool_XH, pooled_TX)
        own, rotary, layer = 2 * entries.compressor.positions_RX.shape[1], entries.rotary, self._layer
        self._backend.compress(pooled_TX[:, :own], batch, entries.compressor, rotary, layer, buffers.scratch)
        index = entries.chooser
        if index is None:
            return
        assert buffers.index_q_TX is not None, "no place for index queries"
        assert buffers.index_weights_TI is not None, "no place for what heads of an index count"
        same_codes = index.q.room_for_codes(buffers.quantized, num_rows) is not None
        index.q(buffers.q_normed_TX, buffers.index_q_TX, buffers.quantized, is_coded and same_codes)
        q_TID = buffers.index_q_TX.unflatten(1, (index.num_heads, -1))
        keys_TX, factor = pooled_TX[:, own : width - index.num_heads], (q_TID.shape[2] * index.num_heads) ** -0.5
        rotaries = rotary, self._rotary
        self._backend.compress_index(keys_TX, q_TID, batch, index.compressor, *rotaries, layer, buffers.scratch)
        weights_TI = torch.mul(pooled_TX[:, width - index.num_heads :], factor, out=buffers.index_weights_TI)
        self._backend.select(q_TID, weights_TI, layer, plan, buffers.scratch)

"""Latent attention layers (MLA): projections to latents and queries, backend, output projection; and with an index (DSA).

T rows, N query heads of D elements, I index heads of D elements, X any other width
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from holdfast.attention.backend import Batch, LatentAttention, SparseLatentAttention
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, SmallBatchScratch
from holdfast.kernels.gemm.linear import linear_float32
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.gemm.small_batch import normed_linear
from holdfast.kernels.latent.write_index import IndexNorm
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.layers.mlp import Linear, RMSNorm

INDEX = ("index_q", "index_k", "index_weights")
OWN = ("qkv_a", "q_normed", "q", "attended", *INDEX)


class IndexBuffers(NamedTuple):
    """What a layer's index makes of x."""

    q_TX: torch.Tensor
    k_TD: torch.Tensor
    weights_TI: torch.Tensor
    """float32"""


class LatentBuffers(NamedTuple):
    """One layer's tensors, one set for all layers."""

    qkv_a_TX: torch.Tensor
    """The queries' latent, where there is one, and then what is kept of a token, before its norm."""
    q_TX: torch.Tensor
    attended_TX: torch.Tensor
    scratch: Mapping[str, torch.Tensor]
    """The backend's own, by name."""
    q_normed_TX: torch.Tensor | None = None
    """The queries' latent behind its norm."""
    quantized: QuantizedRows | None = None
    """Room for the rows of any one product as codes; None where no weight takes them so."""
    indexed: IndexBuffers | None = None
    """None where all tokens are attended to."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor], quantized: QuantizedRows | None) -> "LatentBuffers":
        """From the tensors of `attention_request`, by name; those that it does not know are the backend's."""
        scratch = {name: tensor for name, tensor in held.items() if name not in OWN}
        index = IndexBuffers(*(held[name] for name in INDEX)) if INDEX[0] in held else None
        return cls(held["qkv_a"], held["q"], held["attended"], scratch, held.get("q_normed"), quantized, index)


class LatentAttentionLayer:
    """One layer's latent attention over whatever backend it is given."""

    def __init__(
        self,
        layer: int,
        qkv_a: Linear,
        q: Linear,
        o: Linear,
        q_norm: RMSNorm | None,
        norm: LatentNorm,
        kv_b_NXL: torch.Tensor,
        rotary: Rotary,
        backend: LatentAttention[Any],
    ) -> None:
        """`q` takes the queries' latent behind `q_norm`, or x where there is no norm; `norm` is that of what is kept."""
        self.qkv_a = qkv_a
        self.q = q
        self.o = o
        self.kv_b_NXL = kv_b_NXL
        self._layer = layer
        self._q_norm = q_norm
        self._norm = norm
        self._rotary = rotary
        self._backend = backend

    def room_for_codes(self, quantized: QuantizedRows | None, num_rows: int) -> QuantizedRows | None:
        """Where a norm leaves the codes of x for all products that take it; None where they do not agree on them."""
        rooms = [product.room_for_codes(quantized, num_rows) for product in self._first]
        return None if any(room is None for room in rooms) else rooms[0]

    def __call__(
        self,
        x_TH: torch.Tensor,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        buffers: LatentBuffers,
        out_TH: torch.Tensor,
        wanted_only: bool = False,
        is_coded: bool = False,
    ) -> torch.Tensor:
        """All rows leave their latents; all, or those whose logits are wanted, attend: [T, H] or [R, H].

        With `is_coded` the codes of x lie in their room.
        """
        latent_TX = self._project(x_TH, buffers, is_coded)
        attended_RX = self._attend(latent_TX, batch, plan, buffers, wanted_only)
        return self.o(attended_RX, out_TH[: attended_RX.shape[0]], buffers.quantized)

    @property
    def products(self) -> tuple[Linear, ...]:
        """All that it multiplies by, kv_b apart."""
        return self.qkv_a, self.q, self.o

    def attend_normed(
        self,
        rows: NormedRows,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        buffers: LatentBuffers,
        scratch: SmallBatchScratch,
    ) -> torch.Tensor:
        """On the fused decode path, up to the output projection: of rows whose RMSNorm is deferred."""
        normed_linear(rows, self.qkv_a.weight_NK, self.qkv_a.bias_N, False, buffers.qkv_a_TX, scratch)
        if self._q_norm is None:
            normed_linear(rows, self.q.weight_NK, self.q.bias_N, False, buffers.q_TX, scratch)
            return self._attend(buffers.qkv_a_TX, batch, plan, buffers)
        return self._attend(self._project_queries(buffers), batch, plan, buffers)

    def _attend(
        self,
        latent_TX: torch.Tensor,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        buffers: LatentBuffers,
        wanted_only: bool = False,
    ) -> torch.Tensor:
        """What lies between the products: latents and queries to `attended_TX`."""
        q_TND = buffers.q_TX.unflatten(1, (self.kv_b_NXL.shape[0], -1))
        self._backend.write(latent_TX, q_TND, batch, self._norm, self._rotary, self._layer)
        self._select(batch, plan, buffers)
        attended_TX = self.o.room_for_inputs(buffers.attended_TX)
        return self._backend.attend(q_TND, self.kv_b_NXL, self._layer, plan, buffers.scratch, attended_TX, wanted_only)

    def _select(
        self,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        buffers: LatentBuffers,
    ) -> None:
        """Nothing to choose: every row attends to all that is stored, or to what a layer before this one chose."""

    @property
    def _first(self) -> tuple[Linear, ...]:
        """The products that take x."""
        return (self.qkv_a, self.q) if self._q_norm is None else (self.qkv_a,)

    def _project(self, x_TH: torch.Tensor, buffers: LatentBuffers, is_coded: bool) -> torch.Tensor:
        """Queries into `q_TX`; what is kept of a token, before its norm and its rotation, is returned."""
        quantized = buffers.quantized
        qkv_a_TX = self.qkv_a(x_TH, buffers.qkv_a_TX, quantized, is_coded)
        if self._q_norm is None:
            self.q(x_TH, buffers.q_TX, quantized, is_coded)
            return qkv_a_TX
        return self._project_queries(buffers)

    def _project_queries(self, buffers: LatentBuffers) -> torch.Tensor:
        """The queries' latent in `qkv_a_TX` normed, and queries of it into `q_TX`; what is kept of a token is returned."""
        assert self._q_norm is not None, "queries have no latent"
        quantized, qkv_a_TX = buffers.quantized, buffers.qkv_a_TX
        normed_TX, q_rank = buffers.q_normed_TX, self._q_norm.weight_H.shape[0]
        assert normed_TX is not None, "no place for the norm of the queries' latent"
        codes = self.q.room_for_codes(quantized, len(qkv_a_TX))
        self._q_norm(qkv_a_TX[:, :q_rank], None, normed_TX, codes)
        self.q(normed_TX, buffers.q_TX, quantized, is_coded=codes is not None)
        return qkv_a_TX[:, q_rank:]


class LatentIndex(NamedTuple):
    """The weights of a layer's index."""

    q: Linear
    """Of the queries' latent behind its norm."""
    k: Linear
    weights_IH: torch.Tensor
    """How much each head counts."""
    norm: IndexNorm
    """Of keys, before they are kept."""


class SparseLatentAttentionLayer(LatentAttentionLayer):
    """One layer's latent attention to the tokens that its index chooses."""

    def __init__(
        self,
        layer: int,
        qkv_a: Linear,
        q: Linear,
        o: Linear,
        q_norm: RMSNorm,
        norm: LatentNorm,
        kv_b_NXL: torch.Tensor,
        rotary: Rotary,
        backend: SparseLatentAttention[Any],
        index: LatentIndex,
    ) -> None:
        super().__init__(layer, qkv_a, q, o, q_norm, norm, kv_b_NXL, rotary, backend)
        self.index = index
        self._sparse = backend
        num_heads, head_dim = index.weights_IH.shape[0], index.norm.weight_D.shape[0]
        self._factor = head_dim**-0.5 * num_heads**-0.5

    @property
    def _first(self) -> tuple[Linear, ...]:
        return (self.qkv_a, self.index.k)

    def _project(self, x_TH: torch.Tensor, buffers: LatentBuffers, is_coded: bool) -> torch.Tensor:
        """Those of the index too. Codes of x go when those of the queries' latent come, so that what takes x is first."""
        quantized, index = buffers.quantized, buffers.indexed
        assert index is not None, "no place for what an index makes of x"
        assert buffers.q_normed_TX is not None, "no place for the norm of the queries' latent"
        linear_float32(x_TH, self.index.weights_IH, index.weights_TI).mul_(self._factor)
        self.index.k(x_TH, index.k_TD, quantized, is_coded)
        latent_TX = super()._project(x_TH, buffers, is_coded)
        rooms = (product.room_for_codes(quantized, x_TH.shape[0]) for product in (self.q, self.index.q))
        self.index.q(buffers.q_normed_TX, index.q_TX, quantized, all(room is not None for room in rooms))
        return latent_TX

    def _select(
        self,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        buffers: LatentBuffers,
    ) -> None:
        """The step's index keys to their slots, and the tokens of every row from all that are there."""
        index = buffers.indexed
        assert index is not None, "no place for what an index makes of x"
        q_TID = index.q_TX.unflatten(1, (self.index.weights_IH.shape[0], -1))
        self._sparse.write_index(index.k_TD, q_TID, batch, self.index.norm, self._rotary, self._layer)
        self._sparse.select(q_TID, index.weights_TI, self._layer, plan, buffers.scratch)

"""Latent attention layer (MLA): projections to latents and queries, backend, output projection.

T rows, N query heads of D elements, X any other width
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from holdfast.attention.backend import Batch, LayerStep, StepPlan
from holdfast.families.latent.pages import LatentBackend
from holdfast.families.latent.spec import LatentSpec
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, SmallBatchScratch
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.gemm.small_batch import normed_linear
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.layers.mlp import Linear, RMSNorm
from holdfast.layers.parts import LayerParts

OWN = ("qkv_a", "q", "attended")
OPTIONAL = ("q_normed", "index_q", "index_k", "index_weights")


class LatentBuffers(NamedTuple):
    """One layer's tensors, one set for all layers."""

    qkv_a_TX: torch.Tensor
    """The queries' latent, if there is one, then the token's stored row before its norm."""
    q_TX: torch.Tensor
    attended_TX: torch.Tensor
    q_normed_TX: torch.Tensor | None
    """The queries' latent after its norm."""
    index_q_TX: torch.Tensor | None
    index_k_TD: torch.Tensor | None
    index_weights_TI: torch.Tensor | None
    scratch: Mapping[str, torch.Tensor]
    """The backend's own, by name."""
    quantized: QuantizedRows | None = None
    """Holds the quantized rows of any one product; None if no weight takes them."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor], quantized: QuantizedRows | None) -> "LatentBuffers":
        """Take the tensors that `LatentSpec.tensors` declares; the others are the backend's scratch."""
        scratch = {name: tensor for name, tensor in held.items() if name not in (*OWN, *OPTIONAL)}
        return cls(
            *(held[name] for name in OWN), *(held.get(name) for name in OPTIONAL), scratch=scratch, quantized=quantized
        )


class LatentWeights(NamedTuple):
    """The weights of a layer."""

    qkv_a: Linear
    q: Linear
    """Input: the queries' latent after `q_norm`, or x if there is no norm."""
    o: Linear
    q_norm: RMSNorm | None
    norm: LatentNorm
    """The norm of the token's stored row."""
    kv_b_NXL: torch.Tensor

    @classmethod
    def of(cls, parts: LayerParts, layer: int, latent: LatentSpec) -> "LatentWeights":
        prefix, q_norm = f"layers.{layer}", None
        if latent.q_rank is not None:
            q_norm = parts.rms_norm(f"{prefix}.q_a_norm", latent.norm_eps)
        qkv_a, q = (parts.linear(f"{prefix}.{name}") for name in ("qkv_a", "q" if q_norm is None else "q_b"))
        norm = LatentNorm(parts.plain(f"{prefix}.kv_a_norm.weight"), latent.norm_eps)
        kv_b_NXL = parts.plain(f"{prefix}.kv_b.weight").view(-1, latent.expanded_dim, latent.kv_rank)
        return cls(qkv_a, q, parts.output(f"{prefix}.o"), q_norm, norm, kv_b_NXL)


class LatentAttentionLayer:
    """One layer's latent attention over any backend of the family."""

    reads_codes_alone = False
    """False: an index reads the norm of x beside its codes."""

    def __init__(self, layer: int, weights: LatentWeights, rotary: Rotary, backend: LatentBackend) -> None:
        self.qkv_a, self.q, self.o, self._q_norm, self._norm, self.kv_b_NXL = weights
        self._layer = layer
        self._rotary = rotary
        self._backend = backend

    def room_for_codes(self, quantized: QuantizedRows | None, num_rows: int) -> QuantizedRows | None:
        """Return the buffer for quantized x that all products of x share; None if they do not agree on one."""
        rooms = [product.room_for_codes(quantized, num_rows) for product in self._first]
        return None if any(room is None for room in rooms) else rooms[0]

    def __call__(
        self,
        x_TH: torch.Tensor,
        batch: Batch,
        plan: StepPlan,
        buffers: LatentBuffers,
        out_TH: torch.Tensor,
        wanted_only: bool = False,
        is_coded: bool = False,
    ) -> torch.Tensor:
        """Write all rows' latents; attend with all rows, or with those whose logits are wanted: [T, H] or [R, H].

        If `is_coded`, x has already been quantized into `buffers.quantized`.
        """
        latent_TX = self._project(x_TH, buffers, is_coded)
        attended_RX = self._attend(latent_TX, batch, plan, buffers, wanted_only)
        return self.o(attended_RX, out_TH[: attended_RX.shape[0]], buffers.quantized)

    @property
    def products(self) -> tuple[Linear, ...]:
        """All projections but kv_b."""
        return self.qkv_a, self.q, self.o

    def attend_normed(
        self, rows: NormedRows, batch: Batch, plan: StepPlan, buffers: LatentBuffers, scratch: SmallBatchScratch
    ) -> torch.Tensor:
        """Fused decode path, up to the output projection, with rows whose RMSNorm is deferred."""
        normed_linear(rows, self.qkv_a.weight_NK, self.qkv_a.bias_N, False, buffers.qkv_a_TX, scratch)
        if self._q_norm is None:
            normed_linear(rows, self.q.weight_NK, self.q.bias_N, False, buffers.q_TX, scratch)
            return self._attend(buffers.qkv_a_TX, batch, plan, buffers)
        return self._attend(self._project_queries(buffers), batch, plan, buffers)

    def _attend(
        self, latent_TX: torch.Tensor, batch: Batch, plan: StepPlan, buffers: LatentBuffers, wanted_only: bool = False
    ) -> torch.Tensor:
        """Run what lies between the products: latents and queries to `attended_TX`."""
        q_TND = buffers.q_TX.unflatten(1, (self.kv_b_NXL.shape[0], -1))
        self._backend.write(latent_TX, q_TND, batch, self._norm, self._rotary, self._layer)
        self._select(batch, plan, buffers)
        attended_TX = self.o.room_for_inputs(buffers.attended_TX)
        step = LayerStep(self._layer, plan, buffers.scratch)
        return self._backend.attend(q_TND, self.kv_b_NXL, step, attended_TX, wanted_only)

    def _select(self, batch: Batch, plan: StepPlan, buffers: LatentBuffers) -> None:
        """Hook of layers with an index (families/sparse). Other layers attend to all tokens, or to an earlier choice."""

    @property
    def _first(self) -> tuple[Linear, ...]:
        """The products whose input is x."""
        return (self.qkv_a, self.q) if self._q_norm is None else (self.qkv_a,)

    def _project(self, x_TH: torch.Tensor, buffers: LatentBuffers, is_coded: bool) -> torch.Tensor:
        """Write queries into `q_TX`; return the row that is kept of each token, before its norm and rotation."""
        qkv_a_TX = self.qkv_a(x_TH, buffers.qkv_a_TX, buffers.quantized, is_coded)
        if self._q_norm is None:
            self.q(x_TH, buffers.q_TX, buffers.quantized, is_coded)
            return qkv_a_TX
        return self._project_queries(buffers)

    def _project_queries(self, buffers: LatentBuffers) -> torch.Tensor:
        """Norm the queries' latent in `qkv_a_TX` and project it into `q_TX`; return the row that is kept of each token."""
        assert self._q_norm is not None, "queries have no latent"
        quantized, qkv_a_TX = buffers.quantized, buffers.qkv_a_TX
        normed_TX, q_rank = buffers.q_normed_TX, self._q_norm.weight_H.shape[0]
        assert normed_TX is not None, "no buffer for the norm of the queries' latent"
        codes = self.q.room_for_codes(quantized, len(qkv_a_TX))
        self._q_norm(qkv_a_TX[:, :q_rank], None, normed_TX, codes)
        self.q(normed_TX, buffers.q_TX, quantized, is_coded=codes is not None)
        return qkv_a_TX[:, q_rank:]

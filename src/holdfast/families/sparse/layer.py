"""Sparse latent attention layer (DSA): a latent attention layer that chooses the tokens of every row by an index.

T rows, I index heads of D elements
"""

from typing import NamedTuple

import torch

from holdfast.attention.backend import Batch, LayerStep, StepPlan
from holdfast.families.latent.layer import LatentAttentionLayer, LatentBuffers, LatentWeights
from holdfast.families.latent.pages import LatentBackend
from holdfast.families.latent.spec import IndexSpec
from holdfast.families.sparse.pages import SparseBackend
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.gemm.linear import linear_float32
from holdfast.kernels.latent.write_index import IndexNorm
from holdfast.layers.mlp import Linear
from holdfast.layers.parts import LayerParts


class LatentIndex(NamedTuple):
    """The weights of a layer's index."""

    q: Linear
    """Input: the queries' latent after its norm."""
    k: Linear
    weights_IH: torch.Tensor
    """Projects x to the weight of each head."""
    norm: IndexNorm
    """The norm of keys."""

    @classmethod
    def of(cls, parts: LayerParts, layer: int, index: IndexSpec) -> "LatentIndex":
        prefix = f"layers.{layer}"
        weight_D, bias_D = (parts.plain(f"{prefix}.index_k_norm.{end}") for end in ("weight", "bias"))
        q, k = parts.linear(f"{prefix}.index_q"), parts.linear(f"{prefix}.index_k")
        weights_IH = parts.plain(f"{prefix}.index_weights.weight")
        return cls(q, k, weights_IH, IndexNorm(weight_D, bias_D, index.norm_eps))


class SparseLatentAttentionLayer(LatentAttentionLayer):
    """One layer's latent attention to the tokens that its index chooses."""

    def __init__(
        self, layer: int, weights: LatentWeights, index: LatentIndex, rotary: Rotary, backend: SparseBackend
    ) -> None:
        super().__init__(layer, weights, rotary, backend)
        self.index = index
        self._sparse = backend
        num_heads, head_dim = index.weights_IH.shape[0], index.norm.weight_D.shape[0]
        self._factor = head_dim**-0.5 * num_heads**-0.5

    @property
    def _first(self) -> tuple[Linear, ...]:
        return (self.qkv_a, self.index.k)

    def _project(self, x_TH: torch.Tensor, buffers: LatentBuffers, is_coded: bool) -> torch.Tensor:
        """Project the index too. Quantizing the queries' latent overwrites the codes of x, so x goes through all its products first."""
        assert buffers.index_k_TD is not None and buffers.index_q_TX is not None, "no buffers for an index"  # noqa: PT018
        assert buffers.index_weights_TI is not None, "no buffer for the weights of index heads"
        assert buffers.q_normed_TX is not None, "no buffer for the norm of the queries' latent"
        quantized = buffers.quantized
        linear_float32(x_TH, self.index.weights_IH, buffers.index_weights_TI).mul_(self._factor)
        self.index.k(x_TH, buffers.index_k_TD, quantized, is_coded)
        latent_TX = super()._project(x_TH, buffers, is_coded)
        rooms = (product.room_for_codes(quantized, x_TH.shape[0]) for product in (self.q, self.index.q))
        self.index.q(buffers.q_normed_TX, buffers.index_q_TX, quantized, all(room is not None for room in rooms))
        return latent_TX

    def _select(self, batch: Batch, plan: StepPlan, buffers: LatentBuffers) -> None:
        """Write the step's index keys into their slots, and choose the tokens of every row among all stored ones."""
        k_TD, weights_TI, q_TX = buffers.index_k_TD, buffers.index_weights_TI, buffers.index_q_TX
        assert k_TD is not None and weights_TI is not None and q_TX is not None, "no buffers for an index"  # noqa: PT018
        q_TID = q_TX.unflatten(1, (self.index.weights_IH.shape[0], -1))
        self._sparse.write_index(k_TD, q_TID, batch, self.index.norm, self._rotary, self._layer)
        self._sparse.select(q_TID, weights_TI, LayerStep(self._layer, plan, buffers.scratch))


def build_layer(
    parts: LayerParts,
    layer: int,
    weights: LatentWeights,
    index: IndexSpec | None,
    rotary: Rotary,
    backend: LatentBackend,
) -> LatentAttentionLayer:
    """Build a layer of a model with an index; a layer without its own takes the choice of an earlier one."""
    assert isinstance(backend, SparseBackend), f"{backend.name} attends to all tokens"
    if index is None:
        return LatentAttentionLayer(layer, weights, rotary, backend)
    assert weights.q_norm is not None, "an index takes its queries from the queries' latent"
    return SparseLatentAttentionLayer(layer, weights, LatentIndex.of(parts, layer, index), rotary, backend)

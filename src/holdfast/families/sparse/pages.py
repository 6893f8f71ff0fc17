"""SparseBackend: the index of every layer with sparse latent attention (DSA), and how a step is written into it."""

from collections.abc import Mapping, Sequence

import torch

from holdfast.attention.backend import Batch, LayerStep
from holdfast.attention.declarations import SELECTED
from holdfast.cache.storage import PageStorage
from holdfast.families.latent.pages import LatentBackend
from holdfast.families.sparse.spec import SparseAttentionSpec
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.latent_planes import IndexPlanes
from holdfast.kernels.latent.write_index import IndexNorm, write_index


class SparseBackend(LatentBackend):
    """What a backend of sparse latent attention adds: I index heads of D elements, short keys beside the latents.

    A layer writes its latents and its index, chooses the tokens of every row, and attends. The choice is made on the device
    that holds the index. It stays in `scratch` (SELECTED) until the next layer with an index: layers without one reuse it.
    """

    def __init__(self, specs: Sequence[SparseAttentionSpec], storage: PageStorage) -> None:
        super().__init__(specs, storage)
        self._index_specs = specs
        self.top_k = specs[0].index_top_k
        self.indexes = {
            layer: IndexPlanes.of(storage.planes(layer), storage.spec.page_tokens)
            for layer, spec in enumerate(specs)
            if spec.cache.index_dim
        }
        """By layer with an index. It uses the slots of the latents."""

    def write_index(
        self, k_TD: torch.Tensor, q_TID: torch.Tensor, batch: Batch, norm: IndexNorm, rotary: Rotary, layer: int
    ) -> None:
        """Norm and rotate the step's index keys and write them into their slots; rotate the index queries in place."""
        spec = self._index_specs[layer]
        slots_T, planes = batch.slots_GT[spec.group], self.indexes[layer]
        write_index(k_TD, q_TID, slots_T, norm, rotary, planes, spec.index_turns_neighbours)

    def select(self, q_TID: torch.Tensor, weights_TI: torch.Tensor, step: LayerStep) -> None:
        """Choose the tokens of every row that sees more than top_k: the largest sums over heads of weight * relu(q . k).

        `weights_TI`: float32, with head_dim ** -0.5 * heads ** -0.5 in them. Other rows attend to all tokens.
        """
        raise NotImplementedError

    def _selected(self, scratch: Mapping[str, torch.Tensor], num_rows: int) -> torch.Tensor:
        """View the choice of every row of the step, [T, K]."""
        return scratch[SELECTED][: num_rows * self.top_k].view(num_rows, self.top_k)

"""LatentPages and IndexPages: the pages of every layer that keeps latents (MLA), and an index (DSA), and how a step is written into them; what backends share."""

from collections.abc import Sequence

import torch

from holdfast.attention.backend import Batch, EagerStep
from holdfast.attention.declarations import AttentionSpec
from holdfast.cache.storage import PageStorage
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentPlanes
from holdfast.kernels.latent.write_index import IndexNorm, write_index
from holdfast.kernels.latent.write_latent import LatentNorm, write_latent


class LatentPages:
    """One `LatentPlanes` a layer."""

    def __init__(self, specs: Sequence[AttentionSpec], storage: PageStorage) -> None:
        self._specs = tuple(specs)
        self.planes = tuple(
            LatentPlanes.of(
                storage.planes(layer),
                spec.cache.format,
                spec.cache.latent_dim,
                spec.cache.rope_dim,
                storage.spec.page_tokens,
            )
            for layer, spec in enumerate(specs)
        )
        self._device = self.planes[0].rows_SX.device

    def eager_steps(self) -> tuple[EagerStep, ...]:
        """None: a captured plan launches everything."""
        return ()

    def write(
        self, latent_TX: torch.Tensor, q_TND: torch.Tensor, batch: Batch, norm: LatentNorm, rotary: Rotary, layer: int
    ) -> None:
        """Latents to their slots, queries rotated where they are, in one pass."""
        slots_T = batch.slots_GT[self._specs[layer].group]
        write_latent(latent_TX, q_TND, slots_T, norm, rotary, self.planes[layer])


class IndexPages:
    """One `IndexPlanes` for each layer that has an index, in the slots of its latents."""

    def __init__(self, specs: Sequence[AttentionSpec], storage: PageStorage) -> None:
        self._specs = tuple(specs)
        self.planes = {
            layer: IndexPlanes.of(storage.planes(layer), storage.spec.page_tokens)
            for layer, spec in enumerate(self._specs)
            if spec.cache.index_dim
        }

    def write(
        self, k_TD: torch.Tensor, q_TID: torch.Tensor, batch: Batch, norm: IndexNorm, rotary: Rotary, layer: int
    ) -> None:
        """Index keys to their slots, index queries rotated where they are, in one pass."""
        spec = self._specs[layer]
        slots_T, planes = batch.slots_GT[spec.group], self.planes[layer]
        write_index(k_TD, q_TID, slots_T, norm, rotary, planes, spec.index_turns_neighbours)

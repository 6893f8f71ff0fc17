"""CompressedPages: the pages and states of every layer with compressed attention (DeepSeek-V4), and how a step is written into them; what backends share.

T rows, N query heads, I index heads, D elements, X any other width
"""

from collections.abc import Mapping, Sequence

import torch

from holdfast.attention.backend import Batch, EagerStep
from holdfast.attention.declarations import AttentionSpec
from holdfast.cache.compressed import ENTRIES, INDEX
from holdfast.cache.storage import PageStorage, StateStorage
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.compress import Compressor, compress_entries, compress_index
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentPlanes
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.kernels.latent.write_window import write_window


class CompressedPages:
    """Of each layer the planes of its window, and by layer those of its entries and of its index."""

    def __init__(self, specs: Sequence[AttentionSpec], storage: PageStorage, states: StateStorage | None) -> None:
        """`states` are there where some layer has entries."""
        self._specs, self._states = tuple(specs), states
        self._page_rows = storage.spec.page_tokens
        self.windows = tuple(
            LatentPlanes.of(
                storage.planes(layer), spec.cache.format, spec.cache.latent_dim, spec.cache.rope_dim, self._page_rows
            )
            for layer, spec in enumerate(specs)
        )
        self.entries: dict[int, LatentPlanes] = {}
        self.indexes: dict[int, IndexPlanes] = {}
        for layer, spec in enumerate(specs):
            if (own := spec.entries) is None:
                continue
            planes = storage.planes(spec.entries_index)
            self.entries[layer] = LatentPlanes.of(planes, own.format, own.latent_dim, own.rope_dim, self._page_rows)
            if own.index_dim:
                self.indexes[layer] = IndexPlanes.of(planes, self._page_rows)
        self._device = self.windows[0].rows_SX.device

    def eager_steps(self) -> tuple[EagerStep, ...]:
        """None: a captured plan launches everything."""
        return ()

    def write(
        self,
        kv_TD: torch.Tensor,
        q_TND: torch.Tensor,
        batch: Batch,
        norm: LatentNorm,
        q_eps: float,
        rotary: Rotary,
        layer: int,
    ) -> None:
        """Vectors to their slots, query heads normed and rotated where they are, in one pass."""
        slots_T, planes = batch.slots_GT[self._specs[layer].group], self.windows[layer]
        # Without states nothing is computed twice: every row but padding has a slot.
        states_T = slots_T if batch.states_T is None else batch.states_T
        write_window(kv_TD, q_TND, slots_T, states_T, norm, q_eps, rotary, planes)

    def compress(
        self,
        pooled_TX: torch.Tensor,
        batch: Batch,
        compressor: Compressor,
        rotary: Rotary,
        layer: int,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        """Rows into the layer's states, finished entries to their slots, in one pass."""
        state_PK3D, slots_T = self._places(batch, layer, ENTRIES)
        compress_entries(
            pooled_TX,
            batch.positions_T,
            slots_T,
            _states_of(batch),
            state_PK3D,
            compressor,
            rotary,
            self.entries[layer],
        )

    def compress_index(
        self,
        pooled_TX: torch.Tensor,
        q_TID: torch.Tensor,
        batch: Batch,
        compressor: Compressor,
        rotary: Rotary,
        q_rotary: Rotary,
        layer: int,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        """The same of the index, and its queries rotated where they are."""
        state_PK3D, slots_T = self._places(batch, layer, INDEX)
        compress_index(
            pooled_TX,
            q_TID,
            batch.positions_T,
            slots_T,
            _states_of(batch),
            state_PK3D,
            compressor,
            rotary,
            q_rotary,
            self.indexes[layer],
        )

    def _places(self, batch: Batch, layer: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's states, and the slots of the entries that rows end."""
        assert self._states is not None, f"layer {layer} has no states"
        return self._states.state(layer, name), batch.slots_GT[self._specs[layer].entries_group]


def _states_of(batch: Batch) -> torch.Tensor:
    assert batch.states_T is not None, "a step without states"
    return batch.states_T

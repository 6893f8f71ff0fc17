"""CompressedBackend: pages and states of every layer with compressed attention (DeepSeek-V4), and how a step is written into them.

T rows, N query heads, I index heads, D elements, X any other width
"""

from collections.abc import Sequence

import torch

from holdfast.attention.backend import AttentionBackend, Batch, LayerStep
from holdfast.cache.compressed import ENTRIES, INDEX
from holdfast.cache.storage import PageStorage, StateStorage
from holdfast.families.compressed.spec import CompressedAttentionSpec
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.compress import Compressor, PooledRows, compress_entries, compress_index
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentPlanes
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.kernels.latent.write_window import write_window


class CompressedBackend(AttentionBackend):
    """Attention of every row to a window of tokens and to the entries of its layer, in one softmax with a sink.

    A layer writes its tokens, adds them to the state from which entries are made, chooses entries if it has an index, and
    attends. Tokens, entries and state have their own groups (cache/compressed.py). A row's slot in the group of entries is -1
    unless an entry ends with it. A row whose slots are all -1 is computed and not stored; `Batch.states_T` marks padding.
    """

    def __init__(
        self, specs: Sequence[CompressedAttentionSpec], storage: PageStorage, states: StateStorage | None
    ) -> None:
        """`states` is None if no layer has entries."""
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
        """Norm and rotate the step's vectors and write them into their slots, in one pass; rows of `kv_TD` may be strided.

        Norm every query head by itself, without a weight, and rotate it, in place.
        """
        slots_T, planes = batch.slots_GT[self._specs[layer].group], self.windows[layer]
        # Without states nothing is computed twice: every row but padding has a slot.
        states_T = slots_T if batch.states_T is None else batch.states_T
        write_window(kv_TD, q_TND, slots_T, states_T, norm, q_eps, rotary, planes)

    def compress(
        self, pooled_TX: torch.Tensor, batch: Batch, compressor: Compressor, rotary: Rotary, layer: int
    ) -> None:
        """Add the step's rows to the layer's state, and write the entries that end with one of them into their slots.

        `rotary`: of the first token of each row's entry. `pooled_TX`: float32 vectors, then their gates; rows may be strided.
        """
        states_T, slots_T, state_PK3D = self._places(batch, layer, ENTRIES)
        step = PooledRows(pooled_TX, batch.positions_T, slots_T, states_T, state_PK3D)
        compress_entries(step, compressor, rotary, self.entries[layer])

    def compress_index(
        self,
        pooled_TX: torch.Tensor,
        q_TID: torch.Tensor,
        batch: Batch,
        compressor: Compressor,
        rotary: Rotary,
        q_rotary: Rotary,
        layer: int,
    ) -> None:
        """Like `compress`, for the layer's index; rotate the last elements of index queries in place by `q_rotary`."""
        states_T, slots_T, state_PK3D = self._places(batch, layer, INDEX)
        step = PooledRows(pooled_TX, batch.positions_T, slots_T, states_T, state_PK3D)
        compress_index(step, q_TID, compressor, rotary, q_rotary, self.indexes[layer])

    def select(self, q_TID: torch.Tensor, weights_TI: torch.Tensor, step: LayerStep) -> None:
        """Choose the entries of every row that sees more than top_k of them, as `SparseBackend.select` does of tokens."""
        raise NotImplementedError

    def attend(
        self,
        q_TND: torch.Tensor,
        sinks_N: torch.Tensor,
        rotary: Rotary,
        step: LayerStep,
        out_TX: torch.Tensor,
        wanted_only: bool,
    ) -> torch.Tensor:
        """Attend to window and entries, and rotate the last elements of every head's output back by the row's position.

        [T, N * D], padding as zeros; or only with the rows whose logits are wanted.
        """
        raise NotImplementedError

    def _places(self, batch: Batch, layer: int, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each row's state, the slots of the entries that rows end, and the layer's states."""
        assert self._states is not None, f"layer {layer} has no states"
        assert batch.states_T is not None, "a step without states"
        return batch.states_T, batch.slots_GT[self._specs[layer].entries_group], self._states.state(layer, name)

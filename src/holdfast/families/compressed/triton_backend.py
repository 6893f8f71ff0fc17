"""Compressed attention (DeepSeek-V4) over windows and entries on a GPU: states, entries, choice and attention inside the graph.

T rows of the step, N query heads of D elements, I index heads, K entries that a row attends to at most, C entries of the longest context

The host writes three numbers per row into a buffer that stays in place: its sequence's row of the block tables, its position, and
among how many entries it chooses (0 if it does not). Kernels derive the rest on the device, so a graph serves rows of any length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from holdfast.attention.backend import Batch, LayerStep, wanted_rows
from holdfast.attention.declarations import SELECTED, StepBounds
from holdfast.cache.storage import PageStorage, StateStorage
from holdfast.families.compressed.declarations import choosing_spec
from holdfast.families.compressed.pages import CompressedBackend
from holdfast.families.compressed.spec import CompressedAttentionSpec
from holdfast.families.sparse.triton_backend import Keys
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.compressed_attention import compressed_attention
from holdfast.kernels.latent.compressed_scopes import CompressedCall, CompressedRows, Scopes
from holdfast.kernels.latent.latent_planes import SparseRows
from holdfast.memory.arena import MirroredTensor

PADDING = -1
"""The position of padded rows."""


@dataclass(frozen=True, slots=True)
class TritonCompressedPlan:
    """One step's work."""

    num_rows: int
    page_tables: tuple[torch.Tensor, ...]
    """By group."""
    has_chosen: bool
    """True if some rows may choose entries."""
    wanted_rows_R: torch.Tensor | None


class TritonCompressedAttention(CompressedBackend):
    """The backend."""

    name: ClassVar[str] = "triton_compressed"

    def __init__(
        self,
        specs: Sequence[CompressedAttentionSpec],
        storage: PageStorage,
        states: StateStorage | None,
        bounds: StepBounds,
        num_sms: int,
    ) -> None:
        super().__init__(specs, storage, states)
        self._num_sms = num_sms
        self._choosing, self._bounds = choosing_spec(specs), bounds
        choices = {(own.ratio, own.index_top_k) for own in specs if own.is_overlapped}
        assert self._choosing is None or len(choices) == 1, f"layers choose among entries of different kinds: {choices}"
        is_shared = self._device.type == "cpu"
        self.rows_3T = MirroredTensor((3, bounds.max_num_rows), torch.int32, self._device, is_shared)

    def held_bytes(self) -> dict[str, int]:
        return {"attention/rows": self.rows_3T.tensor.nbytes}

    def plan(self, batch: Batch, captured: bool = False) -> TritonCompressedPlan:
        assert batch.page_tables is not None, "the batch has no page tables on the device"
        has_chosen = self._write_rows(batch)
        wanted_rows_R = batch.logits.rows_R if batch.logits is not None else None
        return TritonCompressedPlan(batch.num_rows, batch.page_tables, captured or has_chosen, wanted_rows_R)

    def _write_rows(self, batch: Batch) -> bool:
        """Send every row's numbers to the device; return True if a row chooses."""
        self.rows_3T.wait()
        host_3T, num_rows, has_chosen, spec = self.rows_3T.host, batch.num_rows, False, self._choosing
        host_3T[:, :num_rows] = np.array([[0], [PADDING], [0]])
        for rows in batch.sequences:
            place = slice(rows.row_start, rows.row_start + rows.num_rows)
            host_3T[0, place] = rows.table_row
            host_3T[1, place] = np.arange(rows.start, rows.end)
            if spec is not None and rows.end // spec.ratio > spec.index_top_k:
                num_seen = np.arange(rows.start + 1, rows.end + 1) // spec.ratio
                host_3T[2, place] = np.where(num_seen > spec.index_top_k, num_seen, 0)
                has_chosen = True
        most = host_3T.shape[1]
        self.rows_3T.send((start, start + num_rows) for start in (0, most, 2 * most))
        return has_chosen

    def select(self, q_TID: torch.Tensor, weights_TI: torch.Tensor, step: LayerStep) -> None:
        layer, plan, scratch = step
        spec = self._choosing
        if spec is None or not plan.has_chosen:
            return
        page_table_NP = plan.page_tables[self._specs[layer].entries_group]
        keys = Keys(self.indexes[layer], page_table_NP, spec.most_entries, self._bounds)
        table_rows_T, _, num_seen_T = self.rows_3T.tensor[:, : len(q_TID)]
        selected_TK = self._selected(scratch, len(q_TID))
        keys.select(q_TID, weights_TI, SparseRows(table_rows_T, num_seen_T), scratch, selected_TK)

    def attend(
        self,
        q_TND: torch.Tensor,
        sinks_N: torch.Tensor,
        rotary: Rotary,
        step: LayerStep,
        out_TX: torch.Tensor,
        wanted_only: bool,
    ) -> torch.Tensor:
        layer, plan, scratch = step
        num_rows, num_heads, _ = q_TND.shape
        table_rows_T, positions_T, _ = self.rows_3T.tensor
        call = CompressedCall(
            q_TND,
            self._scopes(layer, plan, scratch, num_rows),
            CompressedRows(table_rows_T, positions_T),
            sinks_N,
            rotary,
            self._specs[layer].scale,
            scratch["partial_out"],
            scratch["partial_lse"],
            out_TX.view(num_rows, num_heads, -1),
            self._num_sms,
            self._specs[layer].form_heads,
        )
        compressed_attention(call)
        return wanted_rows(q_TND, out_TX, plan.wanted_rows_R if wanted_only else None)

    def _scopes(
        self, layer: int, plan: TritonCompressedPlan, scratch: Mapping[str, torch.Tensor], num_rows: int
    ) -> Scopes:
        spec = self._specs[layer]
        assert spec.window is not None, f"layer {layer} has no window"
        window = Scopes(spec.window, self.windows[layer], plan.page_tables[spec.group])
        if spec.entries is None:
            return window
        is_choosing = spec.is_overlapped and self._choosing is not None
        return window._replace(
            ratio=spec.ratio,
            entries=self.entries[layer],
            entries_table_NP=plan.page_tables[spec.entries_group],
            selected_TK=self._selected(scratch, num_rows) if is_choosing else None,
        )

    def _selected(self, scratch: Mapping[str, torch.Tensor], num_rows: int) -> torch.Tensor:
        """View the choice of every row of the step, [T, K]."""
        assert self._choosing is not None, "no row chooses"
        top_k = self._choosing.index_top_k
        return scratch[SELECTED][: num_rows * top_k].view(num_rows, top_k)

"""Sparse latent attention (DSA) on a GPU: scores, selection and attention inside the graph.

T rows of the step, N query heads, I index heads of D elements, K tokens that a row attends to at most, C tokens of the longest context

Rows that see up to K tokens are in the tiles of the dense kernels. The others have a number of tokens in a buffer that stays in
place. Every kernel is launched for any step of this many rows and reads the rest on the device. The host writes only which rows
choose and how many tokens they see, so no plan can be stale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from holdfast.attention.backend import Batch, LayerStep, SequenceRows
from holdfast.attention.declarations import StepBounds, score_columns, score_rows
from holdfast.cache.storage import PageStorage
from holdfast.families.latent.triton_backend import LatentPart, TritonLatentAttention, TritonLatentPlan
from holdfast.families.sparse.pages import SparseBackend
from holdfast.families.sparse.spec import SparseAttentionSpec
from holdfast.kernels.latent.index_scores import index_scores
from holdfast.kernels.latent.latent_attention import sparse_attention
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentCall, SparseRows
from holdfast.kernels.latent.top_k_tokens import top_k_tokens
from holdfast.kernels.latent.write_index import quantize_index_queries
from holdfast.memory.arena import MirroredTensor


class TritonSparseLatentAttention(TritonLatentAttention, SparseBackend):
    """The backend."""

    name: ClassVar[str] = "triton_sparse"

    def __init__(
        self, specs: Sequence[SparseAttentionSpec], storage: PageStorage, bounds: StepBounds, num_sms: int
    ) -> None:
        super().__init__(specs, storage, bounds, num_sms)
        self._can_choose = specs[0].can_choose
        self._num_keys, self._bounds = specs[0].max_model_len, bounds
        shared = self._device.type == "cpu"
        self.rows_2T = MirroredTensor((2, bounds.max_num_rows), torch.int32, self._device, is_shared=shared)

    def held_bytes(self) -> dict[str, int]:
        return {**super().held_bytes(), "attention/index_rows": self.rows_2T.tensor.nbytes}

    def plan(self, batch: Batch, captured: bool = False) -> TritonLatentPlan:
        """Make tiles of the rows that see up to K tokens, and send how many tokens the others see."""
        whole = tuple(rows for own in batch.sequences if (rows := whole_rows(own, self.top_k)) is not None)
        plan = super().plan(replace(batch, sequences=whole), captured)
        if not self._can_choose:
            return plan
        num_choosing = self._write_rows(batch)
        return replace(plan, parts=tuple(part._replace(has_chosen=captured or num_choosing > 0) for part in plan.parts))

    def select(self, q_TID: torch.Tensor, weights_TI: torch.Tensor, step: LayerStep) -> None:
        layer, plan, scratch = step
        if any(part.has_chosen for part in plan.parts):
            keys = Keys(self.indexes[layer], plan.page_table_NP, self._num_keys, self._bounds)
            rows = self.choosing_rows(0, len(q_TID))
            keys.select(q_TID, weights_TI, rows, scratch, self._selected(scratch, len(q_TID)))

    def _attend_chosen(
        self, absorbed_TNX: torch.Tensor, step: LayerStep, part: LatentPart, latent_TNL: torch.Tensor
    ) -> None:
        if not part.has_chosen:
            return
        layer, plan, scratch = step
        end_row = part.first_row + part.num_rows
        scale, partials = self._specs[layer].scale, (scratch["partial_out"], scratch["partial_lse"])
        pages = self.planes[layer], plan.page_table_NP
        call = LatentCall(absorbed_TNX, *pages, scale, *partials, latent_TNL, self._num_sms)
        selected_TK = self._selected(scratch, end_row)[part.first_row :]
        sparse_attention(call, self.choosing_rows(part.first_row, part.num_rows), selected_TK)

    def choosing_rows(self, first: int, count: int) -> SparseRows:
        return SparseRows(*self.rows_2T.tensor[:, first : first + count])

    def _write_rows(self, batch: Batch) -> int:
        """Send which rows choose, and how many tokens they see; return how many choose."""
        self.rows_2T.wait()
        host_2T, num_rows, num_choosing = self.rows_2T.host, batch.num_rows, 0
        host_2T[:, :num_rows] = 0
        for rows in batch.sequences:
            if rows.end <= self.top_k:
                continue
            place = slice(rows.row_start, rows.row_start + rows.num_rows)
            num_tokens = np.arange(rows.start + 1, rows.end + 1)
            host_2T[0, place] = rows.table_row
            host_2T[1, place] = np.where(num_tokens > self.top_k, num_tokens, 0)
            num_choosing += int((num_tokens > self.top_k).sum())
        most = host_2T.shape[1]
        self.rows_2T.send(((0, num_rows), (most, most + num_rows)))
        return num_choosing


class Keys:
    """The index keys of a layer, among which rows choose on a GPU, some rows at a time."""

    def __init__(self, planes: IndexPlanes, page_table_NP: torch.Tensor, num_keys: int, bounds: StepBounds) -> None:
        self._planes, self._page_table_NP = planes, page_table_NP
        self._score_rows, self._columns = score_rows(num_keys, bounds), score_columns(num_keys)

    def select(
        self,
        q_TID: torch.Tensor,
        weights_TI: torch.Tensor,
        rows: SparseRows,
        scratch: Mapping[str, torch.Tensor],
        selected_TK: torch.Tensor,
    ) -> None:
        """Write the choice of every row into `selected_TK`, in rising order."""
        for first in range(0, len(q_TID), self._score_rows):
            chunk = slice(first, min(first + self._score_rows, len(q_TID)))
            count, own = chunk.stop - first, SparseRows(*(one_T[chunk] for one_T in rows))
            q_nID, weights_nI = q_TID[chunk], weights_TI[chunk]
            if self._planes.is_quantized:
                codes_nID, factors_nI = scratch["index_codes"][:count], scratch["index_factors"][:count]
                quantize_index_queries(q_nID, weights_nI, codes_nID, factors_nI)
                q_nID, weights_nI = codes_nID, factors_nI
            scores_nC = scratch["index_scores"][: count * self._columns].view(count, self._columns)
            index_scores(q_nID, weights_nI, self._planes, self._page_table_NP, own, scores_nC)
            top_k_tokens(scores_nC, own, selected_TK[chunk], scratch)


def whole_rows(rows: SequenceRows, top_k: int) -> SequenceRows | None:
    """Return the rows of a sequence that see up to so many tokens, or None."""
    count = min(rows.num_rows, top_k - rows.start)
    return rows._replace(num_rows=count) if count > 0 else None

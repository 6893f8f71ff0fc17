"""Latent attention to the tokens that an index chooses (DSA) on a GPU: scores, selection and attention inside the graph.

T rows of the step, N query heads, I index heads of D elements, K tokens that a row attends to at the most, C tokens of the longest context

Rows that see up to K tokens are in the tiles of the dense kernels. The others have a number of tokens in a buffer that stays where
it is; every kernel is launched for whatever a step of this many rows may hold, and reads on the device what there is. Nothing is
planned by the host that could be stale: it writes which rows choose and how many tokens they see, and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from holdfast.attention.backend import Batch, SequenceRows
from holdfast.attention.declarations import SELECTED, AttentionSpec, StepBounds, index_score_rows, score_columns
from holdfast.attention.latent_pages import IndexPages
from holdfast.attention.triton_latent import LatentPart, TritonLatentAttention, TritonLatentPlan
from holdfast.cache.storage import PageStorage
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.index_scores import index_scores
from holdfast.kernels.latent.latent_planes import SparseRows
from holdfast.kernels.latent.sparse_attention import sparse_attention
from holdfast.kernels.latent.top_k_tokens import top_k_tokens
from holdfast.kernels.latent.write_index import IndexNorm, quantize_index_queries
from holdfast.memory.arena import MirroredTensor


class TritonSparseLatentAttention(TritonLatentAttention):
    """The backend."""

    name: ClassVar[str] = "triton_sparse"

    def __init__(self, specs: Sequence[AttentionSpec], storage: PageStorage, bounds: StepBounds, num_sms: int) -> None:
        super().__init__(specs, storage, bounds, num_sms)
        spec = specs[0]
        self._index = IndexPages(specs, storage)
        self._top_k = spec.index_top_k
        self._can_choose = spec.index_top_k < spec.max_model_len
        self._score_rows, self._columns = index_score_rows(spec, bounds), score_columns(spec.max_model_len)
        shared = self._device.type == "cpu"
        self._rows_2T = MirroredTensor((2, bounds.max_num_rows), torch.int32, self._device, is_shared=shared)

    def held_bytes(self) -> dict[str, int]:
        """The lists of tiles, and which rows choose."""
        return {**super().held_bytes(), "attention/index_rows": self._rows_2T.tensor.nbytes}

    def plan(self, batch: Batch, captured: bool = False) -> TritonLatentPlan:
        """Tiles for rows that see up to K tokens; of the others, how many tokens they see."""
        whole = tuple(rows for own in batch.sequences if (rows := whole_rows(own, self._top_k)) is not None)
        plan = super().plan(replace(batch, sequences=whole), captured)
        if not self._can_choose:
            return plan
        num_choosing = self._write_rows(batch)
        return replace(plan, parts=tuple(part._replace(has_chosen=captured or num_choosing > 0) for part in plan.parts))

    def write_index(
        self, k_TD: torch.Tensor, q_TID: torch.Tensor, batch: Batch, norm: IndexNorm, rotary: Rotary, layer: int
    ) -> None:
        """Index keys to their slots, index queries rotated where they are."""
        self._index.write(k_TD, q_TID, batch, norm, rotary, layer)

    def select(
        self,
        q_TID: torch.Tensor,
        weights_TI: torch.Tensor,
        layer: int,
        plan: TritonLatentPlan,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        """Positions, rising, into `selected`, some rows at a time."""
        if not any(part.has_chosen for part in plan.parts):
            return
        planes, selected_TK = self._index.planes[layer], self._selected(scratch, len(q_TID))
        for first in range(0, len(q_TID), self._score_rows):
            chunk = slice(first, min(first + self._score_rows, len(q_TID)))
            count = chunk.stop - first
            q_nID, weights_nI, rows = q_TID[chunk], weights_TI[chunk], self._rows(first, count)
            if planes.is_quantized:
                codes_nID, factors_nI = scratch["index_codes"][:count], scratch["index_factors"][:count]
                quantize_index_queries(q_nID, weights_nI, codes_nID, factors_nI)
                q_nID, weights_nI = codes_nID, factors_nI
            scores_nC = scratch["index_scores"][: count * self._columns].view(count, self._columns)
            index_scores(q_nID, weights_nI, planes, plan.page_table_NP, rows, scores_nC)
            top_k_tokens(scores_nC, rows, selected_TK[chunk], scratch)

    def _attend_chosen(
        self,
        absorbed_TNX: torch.Tensor,
        layer: int,
        page_table_NP: torch.Tensor,
        part: LatentPart,
        scratch: Mapping[str, torch.Tensor],
        latent_TNL: torch.Tensor,
    ) -> None:
        if not part.has_chosen:
            return
        end_row = part.first_row + part.num_rows
        sparse_attention(
            absorbed_TNX,
            self.planes[layer],
            page_table_NP,
            self._rows(part.first_row, part.num_rows),
            self._selected(scratch, end_row)[part.first_row :],
            self._specs[layer].scale,
            scratch["partial_out"],
            scratch["partial_lse"],
            latent_TNL,
            self._num_sms,
        )

    def _rows(self, first: int, count: int) -> SparseRows:
        return SparseRows(*self._rows_2T.tensor[:, first : first + count])

    def _selected(self, scratch: Mapping[str, torch.Tensor], num_rows: int) -> torch.Tensor:
        """[T, K] of the step's rows."""
        return scratch[SELECTED][: num_rows * self._top_k].view(num_rows, self._top_k)

    def _write_rows(self, batch: Batch) -> int:
        """Which rows choose, and how many tokens they see; how many there are."""
        self._rows_2T.wait()
        host_2T, num_rows, num_choosing = self._rows_2T.host, batch.num_rows, 0
        host_2T[:, :num_rows] = 0
        for rows in batch.sequences:
            if rows.end <= self._top_k:
                continue
            place = slice(rows.row_start, rows.row_start + rows.num_rows)
            num_tokens = np.arange(rows.start + 1, rows.end + 1)
            host_2T[0, place] = rows.table_row
            host_2T[1, place] = np.where(num_tokens > self._top_k, num_tokens, 0)
            num_choosing += int((num_tokens > self._top_k).sum())
        most = host_2T.shape[1]
        self._rows_2T.send(((0, num_rows), (most, most + num_rows)))
        return num_choosing


def whole_rows(rows: SequenceRows, top_k: int) -> SequenceRows | None:
    """The rows of a sequence that see up to so many tokens; None where there are none."""
    count = min(rows.num_rows, top_k - rows.start)
    return rows._replace(num_rows=count) if count > 0 else None

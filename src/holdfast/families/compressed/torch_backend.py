"""Compressed attention (DeepSeek-V4) over pages of tokens and entries in plain torch, on any device and in any format.

T rows of the step, N query heads of D elements, I index heads, K entries that a row attends to at most, C stored vectors at a
time, n rows of a block, M = n * N

A row at position p sees the tokens [p - W + 1, p] of its window and the first (p + 1) // ratio entries of its layer, all of them
or the K that the layer's index chooses. Both are vectors of one kind, so one online softmax runs over blocks of tokens and then
of entries; it begins with the head's sink. Memory grows neither with the context nor with the step.

With the C kernels a head's bits do not depend on the other heads. So ranks that share heads compute what one rank does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.attention.backend import Batch, LayerStep, RowsPlan, SequenceRows
from holdfast.attention.declarations import BLOCK_TOKENS, SELECTED, index_block_rows
from holdfast.families.compressed.declarations import BLOCK_ROWS
from holdfast.families.compressed.pages import CompressedBackend
from holdfast.families.compressed.spec import CompressedAttentionSpec
from holdfast.families.sparse.torch_backend import largest_tokens, score_keys
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.gemm.linear import plain_linear
from holdfast.kernels.latent.latent_planes import LatentPlanes, read_latents
from holdfast.kernels.latent.write_window import rotate_back


@dataclass(frozen=True, slots=True)
class SequenceScopes:
    """One sequence's rows of a step, and the slots of everything they see."""

    rows: SequenceRows
    first_token: int
    """Position of the first token that the window of any of them reaches to."""
    slots: Mapping[int, torch.Tensor]
    """By group: slots of tokens from `first_token` on, or of all entries."""


TorchCompressedPlan = RowsPlan[tuple[SequenceScopes, ...]]


class OnlineSoftmax:
    """An online softmax of rows times heads over blocks of vectors that are keys and values; it begins with the sinks."""

    def __init__(self, q_nND: torch.Tensor, sinks_N: torch.Tensor, scale: float) -> None:
        self._num_rows, self._num_heads, dim = q_nND.shape
        self._q_MD = q_nND.reshape(-1, dim).float() * scale
        self._m_M1 = sinks_N.float().repeat(self._num_rows).unsqueeze(1)
        self._l_M1 = torch.ones_like(self._m_M1)
        self._acc_MD = torch.zeros_like(self._q_MD)

    def add(self, planes: LatentPlanes, slots_L: torch.Tensor, first_n: torch.Tensor, end_n: torch.Tensor) -> None:
        """Add the vectors in these slots; each row sees those from `first` to before `end`."""
        for start in range(0, len(slots_L), BLOCK_TOKENS):
            rows_CD = read_latents(planes, slots_L[start : start + BLOCK_TOKENS], torch.float32)
            place_C = torch.arange(start, start + len(rows_CD), device=rows_CD.device)
            is_seen_nC = (place_C >= first_n.unsqueeze(1)) & (place_C < end_n.unsqueeze(1))
            scores_MC = plain_linear(self._q_MD, rows_CD, None)
            hidden_MC = is_seen_nC.logical_not_().repeat_interleave(self._num_heads, dim=0)
            scores_MC.masked_fill_(hidden_MC, -torch.inf)
            m_new_M1 = torch.maximum(self._m_M1, scores_MC.amax(dim=1, keepdim=True))
            p_MC = scores_MC.sub_(m_new_M1).exp_()
            alpha_M1 = (self._m_M1 - m_new_M1).exp_()
            self._l_M1 = self._l_M1 * alpha_M1 + p_MC.sum(dim=1, keepdim=True)
            self._acc_MD.mul_(alpha_M1).add_(plain_linear(p_MC, rows_CD.T.contiguous(), None))
            self._m_M1 = m_new_M1

    def result(self) -> torch.Tensor:
        """Return the output [n, N, D] in float32."""
        return (self._acc_MD / self._l_M1).view(self._num_rows, self._num_heads, -1)


class TorchCompressedAttention(CompressedBackend):
    """The backend."""

    name: ClassVar[str] = "torch_compressed"

    def plan(self, batch: Batch, captured: bool = False) -> TorchCompressedPlan:
        return TorchCompressedPlan.of(batch, lambda sequences: tuple(map(self._locate, sequences)))

    def select(self, q_TID: torch.Tensor, weights_TI: torch.Tensor, step: LayerStep) -> None:
        """Write entries in rising order into `selected`; rows that see up to K of them have none there."""
        layer, plan, scratch = step
        spec, planes, num_heads = self._specs[layer], self.indexes[layer], q_TID.shape[1]
        for sequence in plan.every:
            rows = sequence.rows
            first = max(0, spec.first_choosing - rows.start)
            while first < rows.num_rows:
                position = rows.start + first
                count = min(index_block_rows(num_heads, (position + 1) // spec.ratio), rows.num_rows - first)
                place = slice(rows.row_start + first, rows.row_start + first + count)
                num_seen_n = self._num_seen(spec, position, count)
                slots_C = sequence.slots[spec.entries_group][: (position + count) // spec.ratio]
                scores_nC = score_keys(q_TID[place], weights_TI[place], planes, slots_C, num_seen_n)
                _selected(scratch, spec, len(q_TID))[place] = largest_tokens(scores_nC, spec.index_top_k)
                first += count

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
        spec, q_RND = self._specs[layer], q_TND
        sequences, rows_R = plan.rows(wanted_only)
        if rows_R is not None:
            rotary, q_RND = rotary.at(rows_R), q_TND[rows_R]
        chosen_RK: torch.Tensor | None = None
        if any(sequence.rows.end > spec.first_choosing for sequence in sequences):
            chosen_RK = _selected(scratch, spec, len(q_TND))
            chosen_RK = chosen_RK if rows_R is None else chosen_RK[rows_R]
        num_rows, num_heads, _ = q_RND.shape
        out_RND, num_done = out_TX[:num_rows].unflatten(1, (num_heads, -1)), 0
        for sequence in sequences:
            rows = sequence.rows
            for first, count in self._blocks(rows, spec):
                place, position = slice(rows.row_start + first, rows.row_start + first + count), rows.start + first
                own_nK = chosen_RK[place] if chosen_RK is not None and position >= spec.first_choosing else None
                out_RND[place] = self._attend_block(q_RND[place], sinks_N, layer, sequence, position, own_nK)
                num_done = place.stop
        out_RND[num_done:].zero_()
        rotate_back(out_RND, rotary)
        return out_TX[:num_rows]

    def _blocks(self, rows: SequenceRows, spec: CompressedAttentionSpec) -> list[tuple[int, int]]:
        """List first rows and row counts: rows that see all entries in blocks, rows that choose one by one."""
        num_whole = min(max(0, spec.first_choosing - rows.start), rows.num_rows)
        whole = [(first, min(BLOCK_ROWS, num_whole - first)) for first in range(0, num_whole, BLOCK_ROWS)]
        return [*whole, *((first, 1) for first in range(num_whole, rows.num_rows))]

    def _attend_block(
        self,
        q_nND: torch.Tensor,
        sinks_N: torch.Tensor,
        layer: int,
        sequence: SequenceScopes,
        position: int,
        chosen_1K: torch.Tensor | None,
    ) -> torch.Tensor:
        spec, num_rows, device = self._specs[layer], len(q_nND), q_nND.device
        assert spec.window is not None, f"layer {layer} has no window"
        softmax = OnlineSoftmax(q_nND, sinks_N, spec.scale)
        own_n = position - sequence.first_token + torch.arange(num_rows, device=device)
        begin, end = max(0, position - spec.window + 1) - sequence.first_token, int(position + num_rows)
        slots_L = sequence.slots[spec.group][begin : end - sequence.first_token]
        softmax.add(self.windows[layer], slots_L, own_n - spec.window + 1 - begin, own_n + 1 - begin)
        if spec.entries is None:
            return softmax.result()
        slots_C = sequence.slots[spec.entries_group]
        if chosen_1K is None:
            num_seen_n = self._num_seen(spec, position, num_rows)
            slots_C = slots_C[: end // spec.ratio]
        else:
            slots_C = slots_C[chosen_1K[0].long()]
            num_seen_n = torch.full((1,), len(slots_C), device=device)
        softmax.add(self.entries[layer], slots_C, torch.zeros_like(num_seen_n), num_seen_n)
        return softmax.result()

    def _num_seen(self, spec: CompressedAttentionSpec, position: int, num_rows: int) -> torch.Tensor:
        """Count the entries that rows from `position` on see: those that end at or before the row."""
        return (position + 1 + torch.arange(num_rows, device=self._device)) // spec.ratio

    def _locate(self, rows: SequenceRows) -> SequenceScopes:
        window = max(spec.window or 0 for spec in self._specs)
        first_token = max(0, rows.start - window + 1)
        slots = {spec.group: self._slots(rows, spec.group, first_token, rows.end) for spec in self._specs[:1]}
        for spec in self._specs:
            if spec.entries is not None and spec.entries_group not in slots:
                slots[spec.entries_group] = self._slots(rows, spec.entries_group, 0, rows.end // spec.ratio)
        return SequenceScopes(rows, first_token, slots)

    def _slots(self, rows: SequenceRows, group: int, first: int, end: int) -> torch.Tensor:
        """Locate the rows [first, end) of a group."""
        size = self._page_rows
        first_chunk, end_chunk = first // size, -(-end // size)
        chunks_P = torch.tensor(list(rows.tables[group][first_chunk:end_chunk]), dtype=torch.int64)
        slots_PB = chunks_P.unsqueeze(1) * size + torch.arange(size)
        skipped = first_chunk * size
        return slots_PB.flatten()[first - skipped : end - skipped].to(self._device)


def _selected(scratch: Mapping[str, torch.Tensor], spec: CompressedAttentionSpec, num_rows: int) -> torch.Tensor:
    """View the choice of every row of the step, [T, K]."""
    return scratch[SELECTED][: num_rows * spec.index_top_k].view(num_rows, spec.index_top_k)

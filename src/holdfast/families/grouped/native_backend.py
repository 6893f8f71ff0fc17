"""Attention over float32 pages on the CPU with the C kernel: bits independent of batch and chunking, no mask, no copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from holdfast.attention.backend import Batch, LayerStep, RowsPlan, SequenceRows
from holdfast.cache.storage import PageStorage
from holdfast.families.grouped.native_layer import HeadPlaces
from holdfast.families.grouped.pages import GroupedBackend, PlainPages, Sinks
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.attention.paged_attention import SEQUENCE_FIELDS, Scoring, paged_attention
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary


@dataclass(frozen=True, slots=True)
class NativeRows:
    """Locations of each sequence's rows and its pages of one cache group, as the kernel reads them."""

    pages_P: torch.Tensor
    sequences_N4: torch.Tensor


NativePlan = RowsPlan[tuple[NativeRows, ...]]
"""By cache group."""


class NativePagedAttention(GroupedBackend):
    """The backend."""

    name: ClassVar[str] = "native_paged"

    def __init__(self, specs: Sequence[GroupedAttentionSpec], storage: PageStorage, sinks: Sinks | None = None) -> None:
        super().__init__(specs, storage, sinks=sinks)
        self._page_tokens = storage.spec.page_tokens
        self._planes = [pages.planes for pages in self.pages if isinstance(pages, PlainPages)]
        assert len(self._planes) == len(specs), "the C kernel reads plain pages"
        self._num_groups = 1 + max(spec.group for spec in specs)

    def plan(self, batch: Batch, captured: bool = False) -> NativePlan:
        return NativePlan.of(batch, self._rows)

    def attend(self, q_THD: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool) -> torch.Tensor:
        layer, plan, _ = step
        spec, (groups, rows_R) = self._specs[layer], plan.rows(wanted_only)
        rows, q_THD = groups[spec.group], q_THD if rows_R is None else q_THD.index_select(0, rows_R)
        return paged_attention(
            q_THD,
            *self._planes[layer],
            rows.pages_P,
            rows.sequences_N4,
            self._page_tokens,
            Scoring(spec.scale, spec.window, self._sinks[layer], spec.softcap),
            out_TX[: q_THD.shape[0]],
        )

    def places(self, layer: int, norm: HeadNorm | None, rotary: Rotary | None) -> HeadPlaces:
        """Return how a layer's heads are stored and scored, for the layer as one call."""
        spec = self._specs[layer]
        scoring = Scoring(spec.scale, spec.window, self._sinks[layer], spec.softcap)
        return HeadPlaces(norm, rotary, self._planes[layer], spec.group, spec.num_heads, self._page_tokens, scoring)

    def _rows(self, sequences: Sequence[SequenceRows]) -> tuple[NativeRows, ...]:
        return tuple(_group_rows(sequences, group) for group in range(self._num_groups))


def _group_rows(sequences: Sequence[SequenceRows], group: int) -> NativeRows:
    """The kernel skips entries outside a window, so freed pages may stay in the table."""
    rows, pages = [], []
    for sequence in sequences:
        rows.append((sequence.row_start, sequence.num_rows, sequence.start, len(pages)))
        pages.extend(sequence.tables[group])
    pages_P = torch.from_numpy(np.array(pages, dtype=np.int32))
    return NativeRows(pages_P, torch.tensor(rows, dtype=torch.int64).view(-1, len(SEQUENCE_FIELDS)))

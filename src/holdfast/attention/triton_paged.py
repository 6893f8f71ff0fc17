"""Attention over half-precision pages on a GPU: a step's work as a list of tiles on the device, in fixed buffers.

Every row of a decode step is split so that all programs of the machine have about the same to do, whatever the lengths.
`batch_invariant` splits a row by its own length alone, which costs long contexts in small batches some speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from holdfast.attention.batch import Batch, SequenceRows
from holdfast.attention.declarations import MIN_SPLIT_TOKENS, max_tiles, split_rows
from holdfast.attention.plain_pages import PlainPages
from holdfast.attention.spec import AttentionSpec, StepBounds
from holdfast.cache.storage import PageStorage
from holdfast.kernels.tiled_attention import (
    LARGE_PROGRAMS_PER_SM,
    TILE_FIELDS,
    TileWork,
    small_programs,
    tile_rows,
    tiled_attention,
)
from holdfast.memory.mirrored_tensor import MirroredTensor

BLOCK_TOKENS = 64
"""Splits are multiples of what a kernel takes at once."""
Tile = tuple[int, int, int, int, int, int, int, int]
"""As TILE_FIELDS names them."""
Pairs = tuple[int, int]
"""The first (row, split) pair of a row, and its splits."""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One step's work for each distinct window among the layers, and the page table it reads."""

    work: dict[int | None, TileWork]
    page_table_NP: torch.Tensor
    wanted_rows_R: torch.Tensor | None


class TritonPagedAttention(PlainPages):
    """The backend."""

    name: ClassVar[str] = "triton_paged"

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        storage: PageStorage,
        bounds: StepBounds,
        num_sms: int,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(specs, storage)
        self._num_sms = num_sms
        self._batch_invariant = batch_invariant
        self._max_pairs = split_rows(specs[0].max_model_len, bounds)
        self._max_num_seqs = bounds.max_num_seqs
        first = specs[0]
        self._num_kv_heads = first.cache.num_kv_heads
        self._small_rows = tile_rows(first.num_heads, self._num_kv_heads, large=False)
        self._large_rows = tile_rows(first.num_heads, self._num_kv_heads, large=True)
        self._windows = tuple(dict.fromkeys(spec.window for spec in specs))
        device = self._planes[0][0].device
        is_shared = device.type == "cpu"
        self._num_tile_numbers = (1 + max_tiles(specs, bounds)) * len(TILE_FIELDS)
        num_numbers = self._num_tile_numbers + 2 * bounds.max_num_rows
        self._lists = {
            window: MirroredTensor((num_numbers,), torch.int32, device, is_shared) for window in self._windows
        }

    def held_bytes(self) -> dict[str, int]:
        numbers = [lists.tensor for lists in self._lists.values()]
        tile_bytes = len(numbers) * self._num_tile_numbers * numbers[0].element_size()
        return {"attention/tiles": tile_bytes, "attention/rows": sum(x.nbytes for x in numbers) - tile_bytes}

    def plan(self, batch: Batch, captured: bool = False) -> TritonPlan:
        assert batch.page_table_NP is not None, "the batch has no page table on the device"
        is_decode = all(sequence.num_rows == 1 for sequence in batch.sequences)
        work = {window: self._work(batch, window, captured, is_decode) for window in self._windows}
        return TritonPlan(work, batch.page_table_NP, batch.logits.rows_R if batch.logits else None)

    def attend(
        self,
        q_THD: torch.Tensor,
        layer: int,
        plan: TritonPlan,
        scratch: tuple[torch.Tensor, ...],
        out_TX: torch.Tensor,
        wanted_only: bool,
    ) -> torch.Tensor:
        spec = self._specs[layer]
        partial_out_CX, partial_lse_CH = scratch or (out_TX, out_TX)
        tiled_attention(
            q_THD,
            *self._planes[layer],
            plan.page_table_NP,
            plan.work[spec.window],
            self._page_tokens,
            spec.scale,
            spec.window,
            partial_out_CX,
            partial_lse_CH,
            out_TX,
            self._num_sms,
        )
        if not wanted_only or plan.wanted_rows_R is None:
            return out_TX
        # Queries have been used, so their place takes the rows that are wanted.
        wanted_RX = q_THD.view_as(out_TX)[: len(plan.wanted_rows_R)]
        return torch.index_select(out_TX, 0, plan.wanted_rows_R, out=wanted_RX)

    def _work(self, batch: Batch, window: int | None, captured: bool, is_decode: bool) -> TileWork:
        lists, num_rows, first_row = self._lists[window], batch.num_rows, self._num_tile_numbers
        lists.wait()
        small, large, row_pairs = self._tile_lists(batch, window)
        tiles = [(len(small), len(large), 0, 0, 0, 0, 0, 0), *small, *large]
        num_numbers = len(tiles) * len(TILE_FIELDS)
        lists.host[:num_numbers] = np.array(tiles, dtype=np.int32).reshape(-1)
        lists.host[first_row : first_row + 2 * num_rows] = np.array(row_pairs, dtype=np.int32).reshape(-1)
        lists.send(((0, num_numbers), (first_row, first_row + 2 * num_rows)))
        return TileWork(
            lists.tensor[:first_row].view(-1, len(TILE_FIELDS)),
            lists.tensor[first_row:].view(-1, 2),
            has_small=captured or len(small) > 0,
            has_large=len(large) > 0 or (captured and not is_decode),
            has_merge=captured or any(num_splits != 1 for _, num_splits in row_pairs),
        )

    def _tile_lists(self, batch: Batch, window: int | None) -> tuple[list[Tile], list[Tile], list[Pairs]]:
        """Small tiles, large tiles, and of every row its first pair and its splits (none for padding)."""
        row_pairs: list[Pairs] = [(0, 0)] * batch.num_rows
        single = [sequence for sequence in batch.sequences if sequence.num_rows <= self._small_rows]
        several = [sequence for sequence in batch.sequences if sequence.num_rows > self._small_rows]
        small, num_pairs = self._small_tiles(single, window, batch.num_rows, row_pairs)
        large: list[Tile] = []
        num_large = sum(-(-sequence.num_rows // self._large_rows) for sequence in several)
        wanted_items = self._num_sms * LARGE_PROGRAMS_PER_SM
        wanted_splits = 1 if self._batch_invariant else -(-wanted_items // max(1, num_large * self._num_kv_heads))
        for sequence in several:
            num_pairs = self._large_tiles(sequence, window, wanted_splits, num_pairs, large, row_pairs)
        large.sort(key=lambda tile: tile[4] - tile[5])  # the longest first, so that none is begun last
        return small, large, row_pairs

    def _small_tiles(
        self, sequences: Sequence[SequenceRows], window: int | None, num_step_rows: int, row_pairs: list[Pairs]
    ) -> tuple[list[Tile], int]:
        """One tile a split; the pairs that their partial results take."""
        tiles: list[Tile] = []
        ranges = [(0 if window is None else max(0, rows.start - window + 1), rows.end) for rows in sequences]
        splits = self._split_tokens([high - low for low, high in ranges], sequences, num_step_rows)
        num_pairs = 0
        for rows, (low, high), split_tokens in zip(sequences, ranges, splits, strict=True):
            fields = (rows.table_row, rows.row_start, rows.num_rows, rows.start)
            num_splits = -(-(high - low) // split_tokens)
            for i in range(rows.num_rows):
                row_pairs[rows.row_start + i] = (num_pairs + i * num_splits, num_splits)
            if num_splits == 1:
                tiles.append((*fields, low, high, -1, 1))
                continue
            for split in range(num_splits):
                start = low + split * split_tokens
                tiles.append((*fields, start, min(high, start + split_tokens), num_pairs + split, num_splits))
            num_pairs += rows.num_rows * num_splits
        return tiles, num_pairs

    def _split_tokens(self, lengths: list[int], sequences: Sequence[SequenceRows], num_step_rows: int) -> list[int]:
        """Tokens of a split for each sequence: all programs busy, or by its own length alone."""
        if self._max_pairs == 0:
            return [_whole_blocks(length) for length in lengths]
        if self._batch_invariant:
            most = max(1, self._max_pairs // (self._max_num_seqs * self._small_rows))
            return [_whole_blocks(-(-length // min(most, -(-length // MIN_SPLIT_TOKENS)))) for length in lengths]
        programs = self._num_sms * small_programs(num_step_rows)[0]
        fair_share = max(BLOCK_TOKENS, -(-sum(lengths) * self._num_kv_heads // programs))
        while True:
            # Rounded to the nearest: a third, tiny split would cost every program a second turn.
            splits = [_whole_blocks(-(-length // max(1, round(length / fair_share)))) for length in lengths]
            if self._num_pairs(lengths, sequences, splits) <= self._max_pairs:
                return splits
            fair_share *= 2

    @staticmethod
    def _num_pairs(lengths: list[int], sequences: Sequence[SequenceRows], splits: list[int]) -> int:
        """(row, split) pairs that have to be merged."""
        return sum(
            rows.num_rows * -(-length // split_tokens)
            for length, rows, split_tokens in zip(lengths, sequences, splits, strict=True)
            if length > split_tokens
        )

    def _large_tiles(
        self,
        sequence: SequenceRows,
        window: int | None,
        wanted_splits: int,
        num_pairs: int,
        large: list[Tile],
        row_pairs: list[Pairs],
    ) -> int:
        for offset in range(0, sequence.num_rows, self._large_rows):
            count = min(self._large_rows, sequence.num_rows - offset)
            position = sequence.start + offset
            low = 0 if window is None else max(0, position - window + 1)
            high = position + count
            room = (self._max_pairs - num_pairs) // count
            num_splits = max(1, min(wanted_splits, (high - low) // (2 * MIN_SPLIT_TOKENS), room))
            split_tokens = -(-(high - low) // (num_splits * BLOCK_TOKENS)) * BLOCK_TOKENS
            num_splits = -(-(high - low) // split_tokens)
            row = sequence.row_start + offset
            for split in range(num_splits):
                start = low + split * split_tokens
                pair = num_pairs + split if num_splits > 1 else -1
                large.append(
                    (
                        sequence.table_row,
                        row,
                        count,
                        position,
                        start,
                        min(high, start + split_tokens),
                        pair,
                        num_splits,
                    )
                )
            row_pairs[row : row + count] = [(num_pairs + i * num_splits, num_splits) for i in range(count)]
            if num_splits > 1:
                num_pairs += count * num_splits
        return num_pairs


def _whole_blocks(num_tokens: int) -> int:
    return max(1, -(-num_tokens // BLOCK_TOKENS)) * BLOCK_TOKENS

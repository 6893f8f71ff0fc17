"""A step's list of tiles, checked: every row sees each of its tokens once, and partial results have places of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from attention.steps import CPU
from holdfast.attention.backend import Batch, SequenceRows
from holdfast.attention.declarations import StepBounds, max_partials
from holdfast.attention.tile_scheduler import ListRoom, Machine, StepRows, TileScheduler
from holdfast.families.grouped.declarations import TileKind, max_tiles
from holdfast.families.grouped.pages import PlainPages
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.geometry import TILE_FIELDS, TileGeometry

Ranges = dict[int, list[tuple[int, int]]]
"""Token ranges of every row."""
MILLION = 2**20
BOUNDS = StepBounds(max_num_seqs=64, max_num_rows=2048, page_tokens=16)


@dataclass(frozen=True)
class ListCase:
    """Lists to be made, and for whom."""

    num_heads: int = 64
    num_kv_heads: int = 8
    window: int | None = None
    max_model_len: int = MILLION
    bounds: StepBounds = BOUNDS
    num_sms: int = 132
    batch_invariant: bool = False
    quantized: bool = False
    given: TileGeometry | None = None
    """Instead of an ordinary one."""

    @property
    def geometry(self) -> TileGeometry:
        if self.given is not None:
            return self.given
        if not self.quantized:
            plane = torch.empty(0, self.num_kv_heads, 8)
            return PlainPages(plane, plane, 16).tile_geometry(self.num_heads)
        group = self.num_heads // self.num_kv_heads
        rows = max(1, 8 // group), max(1, 64 // group)
        return TileGeometry(
            *rows,
            5,
            2,
            64,
            small_batch_rows=3,
            small_batch_programs_per_sm=4,
            has_aligned_starts=True,
            takes_whole_turns=True,
        )

    @property
    def room(self) -> ListRoom:
        kind = TileKind(self.num_heads, self.num_kv_heads, 4 if self.quantized else None, 4 if self.quantized else None)
        return ListRoom(
            max_tiles(kind, self.max_model_len, self.bounds),
            self.bounds.max_num_rows,
            self.bounds.max_num_seqs,
            max_partials(self.max_model_len, self.bounds),
        )

    def lists(self) -> TileScheduler:
        machine = Machine(self.num_sms, self.batch_invariant, CPU)
        return TileScheduler(self.geometry, self.num_kv_heads, self.window, self.room, machine)

    def work(self, batch: Batch, captured: bool = False) -> TileWork:
        return self.lists().fill(StepRows.of(batch.sequences, batch.num_rows), captured)

    def ranges(self, rows: list[tuple[int, int]], num_padding: int = 0) -> Ranges:
        """For a step of (start, number of rows) of each sequence, everything checked."""
        batch = dummy_batch(rows, num_padding)
        return check_work(self, batch, self.work(batch))

    def splits(self, rows: list[tuple[int, int]]) -> list[int]:
        """Splits of the first row of each sequence."""
        ranges = self.ranges(rows)
        return [len(ranges[sequence.row_start]) for sequence in dummy_batch(rows).sequences]


def dummy_batch(rows: Sequence[tuple[int, int] | tuple[int, int, bool]], num_padding: int = 0) -> Batch:
    """(start, number of rows, is it of a prompt) of each sequence; pages are not looked at by a plan."""
    sequences, row = [], 0
    for index, (start, count, *is_prompt) in enumerate(rows):
        sequences.append(SequenceRows(row, count, start, ([],), len(rows) - 1 - index, *is_prompt))
        row += count
    nothing = torch.zeros(row + num_padding, dtype=torch.int64)
    return Batch(
        nothing,
        nothing,
        nothing.unsqueeze(0),
        tuple(sequences),
        None,
        (torch.zeros(max(1, len(rows)), 1, dtype=torch.int32),),
    )


def check_work(case: ListCase, batch: Batch, work: TileWork, captured: bool = False) -> Ranges:
    """Everything that a kernel relies on; the token ranges that each row was cut into."""
    tiles, rows, geometry = work.tiles_X8.cpu().numpy(), work.rows_T2.cpu().numpy(), case.geometry
    num_small, num_large = tiles[0, :2].tolist()
    assert num_small + num_large <= case.room.max_tiles, f"{num_small=} {num_large=} are too many"
    assert len(tiles) == 1 + case.room.max_tiles
    used = tiles[1 : 1 + num_small + num_large]
    for most, some in ((geometry.small_rows, used[:num_small]), (geometry.large_rows, used[num_small:])):
        assert ((some[:, 2] >= 1) & (some[:, 2] <= most)).all(), f"a tile takes at most {most} rows"
    if geometry.has_aligned_starts or case.batch_invariant:
        assert not (used[:, 4] % geometry.block_tokens).any(), "a range does not begin with a block"
    blocks: dict[int, list[dict[str, int]]] = {}
    for tile in used.tolist():
        blocks.setdefault(tile[1], []).append(dict(zip(TILE_FIELDS, tile, strict=True)))
    ranges: Ranges = {}
    partials: list[tuple[int, int]] = []
    for sequence in batch.sequences:
        row, end = sequence.row_start, sequence.row_start + sequence.num_rows
        while row < end:
            block = sorted(blocks.pop(row), key=lambda tile: tile["low"])
            row = _check_block(block, sequence, case, rows, ranges, partials)
        assert row == end, "a tile takes rows of two sequences"
    assert not blocks, f"tiles for rows that no one has: {blocks}"
    num_real = sum(sequence.num_rows for sequence in batch.sequences)
    assert not rows[num_real : batch.num_rows, 1].any(), "padding is to be written as zeros"
    partials.sort()
    assert all(first[1] <= second[0] for first, second in pairwise(partials)), "two rows share a place"
    assert not partials or partials[-1][1] <= case.room.max_partials, "a place outside of the scratch"
    splits = rows[: batch.num_rows, 1]
    assert work.has_small == (captured or num_small > 0)
    assert work.has_merge == (captured or bool((splits != 1).any()))
    assert work.has_large or num_large == 0
    return ranges


def _check_block(
    block: list[dict[str, int]],
    sequence: SequenceRows,
    case: ListCase,
    rows: np.ndarray,
    ranges: Ranges,
    partials: list[tuple[int, int]],
) -> int:
    """The tiles of some rows: ranges that follow each other from what the first row sees to what the last one sees."""
    row, count, splits = block[0]["row"], block[0]["num_rows"], len(block)
    position, block_tokens = sequence.start + row - sequence.row_start, case.geometry.block_tokens
    first_partial = -1 if splits == 1 else int(rows[row, 0])
    expected_low = 0 if case.window is None else max(0, position - case.window + 1)
    if case.geometry.has_aligned_starts or case.batch_invariant:
        expected_low -= expected_low % block_tokens
    for index, tile in enumerate(block):
        assert tile["low"] == expected_low < tile["high"], f"{tile=} does not begin at {expected_low}"
        assert index == splits - 1 or (tile["high"] - tile["low"]) % block_tokens == 0, f"{tile=} is no whole blocks"
        assert tile["table_row"] == sequence.table_row, f"{tile=} reads another sequence"
        assert (tile["row"], tile["num_rows"], tile["position"]) == (row, count, position), f"{tile=}"
        assert tile["num_splits"] == splits, f"{tile=} is one of {splits}"
        assert tile["first_partial"] == (first_partial + index if splits > 1 else -1), f"{tile=} {first_partial=}"
        expected_low = tile["high"]
    assert expected_low == position + count, f"the last row of {block=} does not see itself"
    assert (rows[row : row + count, 1] == splits).all(), f"{block=} {rows[row : row + count]}"
    if splits > 1:
        places = (first_partial + np.arange(count) * splits).tolist()
        assert rows[row : row + count, 0].tolist() == places, f"{block=}"
        partials.append((first_partial, first_partial + count * splits))
    for i in range(count):
        ranges[row + i] = [(tile["low"], tile["high"]) for tile in block]
    return row + count

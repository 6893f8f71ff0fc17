"""A step's list of tiles, checked: every row sees each of its tokens once, and partial results have places of their own."""

from itertools import pairwise

import numpy as np
import torch

from attention.steps import CPU, Geometry
from holdfast.attention.batch import Batch, SequenceRows
from holdfast.attention.declarations import max_tiles, split_rows
from holdfast.attention.spec import StepBounds
from holdfast.attention.triton_paged import BLOCK_TOKENS, TritonPagedAttention
from holdfast.kernels.tiled_attention import TILE_FIELDS, TileWork, tile_rows

Ranges = dict[int, list[tuple[int, int]]]
"""Token ranges of every row."""


def planner(
    geometry: Geometry, bounds: StepBounds, num_sms: int = 132, batch_invariant: bool = False
) -> TritonPagedAttention:
    """A backend that only plans: in host memory, over a single page."""
    assert geometry.device == CPU, f"{geometry.device=}"
    return TritonPagedAttention(geometry.specs, geometry.storage(1), bounds, num_sms, batch_invariant)


def made_up_batch(rows: list[tuple[int, int]], num_padding: int = 0) -> Batch:
    """(start, number of rows) of each sequence; pages are not looked at by a plan."""
    sequences, row = [], 0
    for index, (start, count) in enumerate(rows):
        sequences.append(SequenceRows(row, count, start, [], len(rows) - 1 - index))
        row += count
    nothing = torch.zeros(row + num_padding, dtype=torch.int64)
    return Batch(
        nothing, nothing, nothing, tuple(sequences), None, torch.zeros(max(1, len(rows)), 1, dtype=torch.int32)
    )


def check_work(
    geometry: Geometry, bounds: StepBounds, batch: Batch, work: TileWork, window: int | None, captured: bool = False
) -> Ranges:
    """Everything that a kernel relies on; the token ranges that each row was cut into."""
    tiles, rows = work.tiles_X8.cpu().numpy(), work.rows_T2.cpu().numpy()
    num_small, num_large = tiles[0, :2].tolist()
    assert num_small + num_large <= max_tiles(geometry.specs, bounds), f"{num_small=} {num_large=} are too many"
    assert len(tiles) == 1 + max_tiles(geometry.specs, bounds)
    used = tiles[1 : 1 + num_small + num_large]
    for large, some in ((False, used[:num_small]), (True, used[num_small:])):
        most = tile_rows(geometry.num_heads, geometry.num_kv_heads, large)
        assert ((some[:, 2] >= 1) & (some[:, 2] <= most)).all(), f"a tile takes at most {most} rows"
    blocks: dict[int, list[dict[str, int]]] = {}
    for tile in used.tolist():
        blocks.setdefault(tile[1], []).append(dict(zip(TILE_FIELDS, tile, strict=True)))
    ranges: Ranges = {}
    pairs: list[tuple[int, int]] = []
    for sequence in batch.sequences:
        row, end = sequence.row_start, sequence.row_start + sequence.num_rows
        while row < end:
            block = sorted(blocks.pop(row), key=lambda tile: tile["low"])
            row = _check_block(block, sequence, window, rows, ranges, pairs)
        assert row == end, "a tile takes rows of two sequences"
    assert not blocks, f"tiles for rows that nobody has: {blocks}"
    num_real = sum(sequence.num_rows for sequence in batch.sequences)
    assert not rows[num_real : batch.num_rows, 1].any(), "padding is to be written as zeros"
    pairs.sort()
    assert all(first[1] <= second[0] for first, second in pairwise(pairs)), "two rows share a place"
    assert not pairs or pairs[-1][1] <= split_rows(geometry.max_model_len, bounds), "a place outside of the scratch"
    splits = rows[: batch.num_rows, 1]
    assert work.has_small == (captured or num_small > 0)
    assert work.has_merge == (captured or bool((splits != 1).any()))
    assert work.has_large or num_large == 0
    return ranges


def _check_block(
    block: list[dict[str, int]],
    sequence: SequenceRows,
    window: int | None,
    rows: np.ndarray,
    ranges: Ranges,
    pairs: list[tuple[int, int]],
) -> int:
    """The tiles of some rows: ranges that follow each other from what the first row sees to what the last one sees."""
    row, count, splits = block[0]["row"], block[0]["num_rows"], len(block)
    position = sequence.start + row - sequence.row_start
    first_pair = -1 if splits == 1 else int(rows[row, 0])
    expected_low = 0 if window is None else max(0, position - window + 1)
    for index, tile in enumerate(block):
        assert tile["low"] == expected_low < tile["high"], f"{tile=} does not begin at {expected_low}"
        assert index == splits - 1 or (tile["high"] - tile["low"]) % BLOCK_TOKENS == 0, f"{tile=} is no whole blocks"
        assert tile["table_row"] == sequence.table_row, f"{tile=} reads another sequence"
        assert (tile["row"], tile["num_rows"], tile["position"]) == (row, count, position), f"{tile=}"
        assert tile["num_splits"] == splits, f"{tile=} is one of {splits}"
        assert tile["pair"] == (first_pair + index if splits > 1 else -1), f"{tile=} {first_pair=}"
        expected_low = tile["high"]
    assert expected_low == position + count, f"the last row of {block=} does not see itself"
    assert (rows[row : row + count, 1] == splits).all(), f"{block=} {rows[row : row + count]}"
    if splits > 1:
        places = (first_pair + np.arange(count) * splits).tolist()
        assert rows[row : row + count, 0].tolist() == places, f"{block=}"
        pairs.append((first_pair, first_pair + count * splits))
    for i in range(count):
        ranges[row + i] = [(tile["low"], tile["high"]) for tile in block]
    return row + count

"""TileScheduler: cuts a step into tiles and KV splits for layers that share a kernel and a window, in fixed buffers.

N sequences of a step, B blocks: rows of one sequence that are one tile, or several if their tokens are split, X tiles

Rows of a decode step are split so that all programs get about equal work, whatever the lengths. `batch_invariant`
splits a row by its own length alone, which costs long contexts in small batches some speed. It also sends prompt rows
through large tiles, however few they are, so that chunking a prompt changes nothing: there a row reads blocks of
tokens in order, and blocks that only other rows of its tile see add nothing to it.

With near pages (families/grouped/spec.py) tiles are over codes, and read the tokens that their rows see exact besides. Rows of
a tile share their own block, so blocks of rows end at multiples of it. A row that sees no codes has one tile over none. The
number of a split decides which near tokens are its part (kernels/attention/near_tokens.py). Splits of codes begin with
a block of tokens. If the first tokens end inside a block, the first split begins there.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from holdfast.attention.backend import SequenceRows
from holdfast.attention.declarations import MIN_SPLIT_TOKENS
from holdfast.attention.lane_scheduler import LaneGroup, LaneScheduler
from holdfast.kernels.attention.tile_work import LaneWork, TileWork
from holdfast.kernels.geometry import NEAR_SPLIT, TILE_FIELDS, LaneGeometry, TileGeometry
from holdfast.memory.arena import MirroredTensor

MAX_NEAR_SPLITS = 2**31 // NEAR_SPLIT
MORE_TURNS = 6
"""Most waves to try beyond those of unsplit tiles."""
WORTH_MORE_TURNS = 1.1
"""Least estimated speedup for which more waves are worth it."""


class StepRows(NamedTuple):
    """A step's sequences as columns, made once for all lists."""

    columns_4N: np.ndarray
    """int64: row of the page table, first row, rows, position of the first row."""
    num_rows: int
    """All rows, padding included."""
    is_prompt_N: np.ndarray
    """True for sequences whose rows are of the prompt."""

    @classmethod
    def of(cls, sequences: Sequence[SequenceRows], num_rows: int) -> "StepRows":
        """Make columns of these sequences."""
        columns = zip(*sequences, strict=True) if sequences else ((),) * len(SequenceRows._fields)
        row_start, count, start, _, table_row, is_prompt, *_ = columns
        columns_4N = np.array((table_row, row_start, count, start), dtype=np.int64)
        return cls(columns_4N, num_rows, np.array(is_prompt, dtype=np.bool_))

    @property
    def is_decode(self) -> bool:
        return bool((self.columns_4N[2] == 1).all())


class Blocks(NamedTuple):
    """Blocks of rows that attend together, and the tokens that they see."""

    columns_4B: np.ndarray
    """Columns of StepRows, by block."""
    low_B: np.ndarray
    high_B: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.high_B - self.low_B

    def at(self, chosen_B: np.ndarray) -> "Blocks":
        """Return some of the blocks."""
        return Blocks(self.columns_4B[:, chosen_B], self.low_B[chosen_B], self.high_B[chosen_B])


class Splits(NamedTuple):
    """KV splits of each block."""

    tokens_B: np.ndarray
    """Tokens per split; a multiple of the kernel's block."""
    count_B: np.ndarray

    @classmethod
    def into(cls, wanted_B: np.ndarray | int, length_B: np.ndarray, block_tokens: int) -> "Splits":
        """Make at most `wanted_B` splits, equal but for the last."""
        tokens_B = -(-length_B // (wanted_B * block_tokens)) * block_tokens
        return cls(tokens_B, -(-length_B // tokens_B))


class NearTokens(NamedTuple):
    """Tokens that rows see exact, on near pages."""

    block_tokens: int
    """Rows see their own block of this many tokens exact."""
    first_tokens: int
    """Rows see so many tokens at the start exact too; 0 with a window."""


class ListRoom(NamedTuple):
    """Capacity of the lists and of split-KV partials."""

    max_tiles: int
    max_num_rows: int
    max_num_seqs: int
    max_partials: int
    """Most row-split pairs of a step; 0: never split. Rows that are not split do not count."""


class Machine(NamedTuple):
    """Device that runs the tiles."""

    num_sms: int
    batch_invariant: bool
    device: torch.device


class TileScheduler:
    """Tile lists of one geometry and window. Nothing is allocated after construction."""

    def __init__(
        self,
        geometry: TileGeometry,
        num_kv_heads: int,
        window: int | None,
        room: ListRoom,
        machine: Machine,
        near: NearTokens | None = None,
        lane: LaneGeometry | None = None,
    ) -> None:
        """`lane`: prompts may read the lane, in steps without a graph."""
        if near is not None:
            assert near.block_tokens % geometry.block_tokens == 0, f"{near=} is not whole blocks of {geometry=}"
            assert window is None or not near.first_tokens, f"{near=}: a window of {window} hides the first tokens"
            assert 0 <= near.first_tokens <= near.block_tokens, f"{near=}: the first tokens are at most a block"
        self._geometry = geometry
        self._num_kv_heads = num_kv_heads
        self._window = window
        self._room = room
        self._machine = machine
        self._near = near
        self._lane: LaneScheduler | None = None
        if lane is not None:
            near_block = 0 if near is None else near.block_tokens
            self._lane = LaneScheduler(lane, window, room.max_num_seqs, machine.num_sms, near_block, machine.device)
        first_row = (1 + room.max_tiles) * len(TILE_FIELDS)
        num_numbers = first_row + 2 * room.max_num_rows
        device = machine.device
        self._lists = MirroredTensor((num_numbers,), torch.int32, device, is_shared=device.type == "cpu")
        self._first_row_number = first_row
        self._host_tiles_X8 = self._lists.host[:first_row].reshape(-1, len(TILE_FIELDS))
        self._host_rows_T2 = self._lists.host[first_row:].reshape(-1, 2)
        self._tiles_X8 = self._lists.tensor[:first_row].view(-1, len(TILE_FIELDS))
        self._rows_T2 = self._lists.tensor[first_row:].view(-1, 2)

    @property
    def tile_bytes(self) -> int:
        return self._tiles_X8.nbytes

    @property
    def row_bytes(self) -> int:
        return self._rows_T2.nbytes

    @property
    def least_lane_rows(self) -> int:
        """Fewest rows of one prompt that read the lane; 0: none do."""
        return 0 if self._lane is None or self._machine.batch_invariant else self._lane.least_rows

    @property
    def lane_bytes(self) -> int:
        """Bytes of the lists of the lane."""
        return 0 if self._lane is None else self._lane.num_bytes

    def fill(self, step: StepRows, captured: bool) -> TileWork:
        """Overwrite the lists with those of this step, and send them to the device.

        If `captured`, launch every kernel that any step of this many rows may need.
        """
        self._lists.wait()
        self._host_rows_T2[: step.num_rows] = 0
        groups = [] if captured else self._lane_groups(step)
        small, large = self._blocks(step, groups)
        num_small = num_large = num_partials = 0
        if small is not None:
            splits = self._split(small, lambda blocks: self._small_splits(blocks, step.num_rows))
            num_small, num_partials = self._write(small, splits, 1, 0)
        if large is not None:
            splits = self._split(
                large, lambda blocks: self._large_splits(blocks, self._room.max_partials - num_partials)
            )
            num_large, num_partials = self._write(large, splits, 1 + num_small, num_partials)
            tiles_X8 = self._host_tiles_X8[1 + num_small : 1 + num_small + num_large]
            _sort_by_length(tiles_X8)
        self._host_tiles_X8[0, :2] = num_small, num_large
        end_tile, lane = self._write_lane(step, groups, 1 + num_small + num_large)
        num_numbers, first = end_tile * len(TILE_FIELDS), self._first_row_number
        self._lists.send(((0, num_numbers), (first, first + 2 * step.num_rows)))
        return TileWork(
            self._tiles_X8,
            self._rows_T2,
            has_small=captured or num_small > 0,
            has_large=num_large > 0 or (captured and not step.is_decode),
            has_merge=captured or num_partials > 0 or int(step.columns_4N[2].sum()) < step.num_rows,
            lane=lane,
        )

    def _lane_groups(self, step: StepRows) -> list[LaneGroup]:
        """Choose the sequences whose tiles read the lane: prompts alone, since drafts have few rows."""
        if self._lane is None or self._machine.batch_invariant or step.is_decode:
            return []
        may_take_N = step.is_prompt_N & (step.columns_4N[2] > self._geometry.small_rows)
        return self._lane.groups(step.columns_4N, may_take_N)

    def _write_lane(self, step: StepRows, groups: list[LaneGroup], first_tile: int) -> tuple[int, LaneWork | None]:
        """Write the tiles of each group, unsplit, over all tokens that rows see; return the end of the tiles."""
        if self._lane is None or not groups:
            return first_tile, None
        tiles: list[tuple[int, int]] = []
        for group in groups:
            columns_4B = self._cut(step.columns_4N[:, group.sequences_S], self._lane.geometry.tile_rows)
            low_B, num_tiles = self._first_seen(columns_4B[3]), columns_4B.shape[1]
            tiles_8B = np.empty((len(TILE_FIELDS), num_tiles), dtype=np.int64)
            tiles_8B[:4], tiles_8B[4], tiles_8B[5] = columns_4B, low_B, columns_4B[3] + columns_4B[2]
            tiles_8B[6], tiles_8B[7] = -1, 1
            tiles_X8 = self._host_tiles_X8[first_tile : first_tile + num_tiles]
            tiles_X8[:] = tiles_8B.T
            _sort_by_length(tiles_X8)
            ones_B = np.ones(num_tiles, dtype=np.int64)
            self._write_rows(columns_4B[1], columns_4B[2], -ones_B, ones_B)
            tiles.append((first_tile, num_tiles))
            first_tile += num_tiles
        return first_tile, self._lane.fill(step.columns_4N, groups, tiles)

    def _blocks(self, step: StepRows, groups: list[LaneGroup]) -> tuple[Blocks | None, Blocks | None]:
        """Return sequences of few rows as small blocks, and the others cut into large tiles, except those in the lane."""
        is_small_N = step.columns_4N[2] <= self._geometry.small_rows
        if self._machine.batch_invariant:
            is_small_N &= ~step.is_prompt_N
        is_large_N = ~is_small_N
        for group in groups:
            is_large_N[group.sequences_S] = False
        small = self._seen(self._own_blocks(step.columns_4N[:, is_small_N])) if is_small_N.any() else None
        if not is_large_N.any():
            return small, None
        return small, self._seen(self._cut(step.columns_4N[:, is_large_N], self._geometry.large_rows))

    def _cut(self, columns_4N: np.ndarray, most: int) -> np.ndarray:
        """Cut sequences into tiles of at most so many rows."""
        columns_4N = self._own_blocks(columns_4N)
        index_B, nth_B = _spread(-(-columns_4N[2] // most))
        columns_4B, offset_B = columns_4N[:, index_B], nth_B * most
        columns_4B[1] += offset_B
        columns_4B[2] = np.minimum(most, columns_4B[2] - offset_B)
        columns_4B[3] += offset_B
        return columns_4B

    def _own_blocks(self, columns_4N: np.ndarray) -> np.ndarray:
        """Cut rows where their own block of near tokens ends."""
        if self._near is None:
            return columns_4N
        block, position_N, end_N = self._near.block_tokens, columns_4N[3], columns_4N[3] + columns_4N[2]
        first_N = position_N // block
        index_B, nth_B = _spread(-(-end_N // block) - first_N)
        own_B = (first_N[index_B] + nth_B) * block
        start_B = np.maximum(position_N[index_B], own_B)
        columns_4B = columns_4N[:, index_B]
        columns_4B[1] += start_B - position_N[index_B]
        columns_4B[2] = np.minimum(end_N[index_B], own_B + block) - start_B
        columns_4B[3] = start_B
        return columns_4B

    def _first_seen(self, position_B: np.ndarray) -> np.ndarray:
        """Return where the range of tiles begins whose first row is here."""
        if self._window is None:
            return np.zeros_like(position_B)
        low_B, block_tokens = np.maximum(position_B - self._window + 1, 0), self._geometry.block_tokens
        # Otherwise a large tile's blocks begin at its first row's window, which is not every row's.
        is_aligned = self._geometry.has_aligned_starts or self._machine.batch_invariant
        return low_B // block_tokens * block_tokens if is_aligned else low_B

    def _seen(self, columns_4B: np.ndarray) -> Blocks:
        position_B, block_tokens = columns_4B[3], self._geometry.block_tokens
        low_B = self._first_seen(position_B)
        if self._near is None:
            return Blocks(columns_4B, low_B, position_B + columns_4B[2])
        own_B = position_B // self._near.block_tokens * self._near.block_tokens
        # Here splits begin with a block of tokens; `_write` moves the first to the end of the first tokens.
        low_B = np.maximum(low_B, self._near.first_tokens // block_tokens * block_tokens)
        return Blocks(columns_4B, np.minimum(low_B, own_B), own_B)

    def _split(self, blocks: Blocks, find: Callable[[Blocks], Splits]) -> Splits:
        """Split the tokens of blocks; those that see no codes beside near pages have one split of none."""
        if self._near is None:
            return find(blocks)
        seen_B = blocks.lengths > 0
        tokens_B, count_B = np.ones_like(blocks.low_B), np.ones_like(blocks.low_B)
        if seen_B.any():
            tokens_B[seen_B], count_B[seen_B] = find(blocks.at(seen_B))
        return Splits(tokens_B, count_B)

    def _small_splits(self, blocks: Blocks, num_step_rows: int) -> Splits:
        length_B, room, geometry = blocks.lengths, self._room, self._geometry
        if room.max_partials == 0:
            return Splits.into(1, length_B, geometry.block_tokens)
        if self._machine.batch_invariant:
            most = max(1, room.max_partials // (room.max_num_seqs * geometry.small_rows))
            wanted_B = np.minimum(most, -(-length_B // MIN_SPLIT_TOKENS))
            return Splits.into(wanted_B, length_B, geometry.block_tokens)
        programs = self._machine.num_sms * geometry.small_programs(num_step_rows)
        if geometry.takes_whole_turns:
            return self._whole_turns(blocks, programs)
        # Each block of tokens gets a program of its own if all of them fit.
        blocks_B = -(-length_B // geometry.block_tokens)
        has_programs = int(blocks_B.sum()) * self._num_kv_heads <= programs
        if has_programs and _num_partials(blocks_B, blocks) <= room.max_partials:
            return Splits.into(blocks_B, length_B, geometry.block_tokens)
        fair_share = max(geometry.block_tokens, -(-int(length_B.sum()) * self._num_kv_heads // programs))
        while True:
            wanted_B = np.maximum(1, np.rint(length_B / fair_share).astype(np.int64))
            splits = Splits.into(wanted_B, length_B, geometry.block_tokens)
            if _num_partials(splits.count_B, blocks) <= room.max_partials:
                return splits
            fair_share *= 2

    def _whole_turns(self, blocks: Blocks, programs: int) -> Splits:
        """Split so that all tiles finish in as many waves of programs as unsplit tiles would take.

        If the cost of a tile is known, try a few more waves and take them if they end sooner: a batch slightly larger
        than one wave would leave most programs idle in the last.
        """
        geometry, length_B = self._geometry, blocks.lengths
        num_blocks_B = -(-length_B // geometry.block_tokens)
        fewest = -(-len(length_B) * self._num_kv_heads // programs)
        even = max(1, -(-int(length_B.sum()) * self._num_kv_heads // (programs * geometry.block_tokens)))
        share = min(self._share(blocks, num_blocks_B, even, fewest * programs), int(num_blocks_B.max()))
        cost = geometry.tile_cost_tokens / geometry.block_tokens
        least = fewest * (share + cost) / WORTH_MORE_TURNS
        for turns in range(fewest + 1, fewest + 1 + (MORE_TURNS if cost else 0)):
            if least <= WORTH_MORE_TURNS * (even + turns * cost):
                break  # near the lower bound of any more waves
            other = self._share(blocks, num_blocks_B, -(-even // turns), turns * programs)
            if turns * (other + cost) < least:
                share, least = other, turns * (other + cost)
        return Splits.into(-(-num_blocks_B // share), length_B, geometry.block_tokens)

    def _share(self, blocks: Blocks, num_blocks_B: np.ndarray, least: int, max_items: int) -> int:
        """Return the smallest split, in blocks, with at most `max_items` items; a tile has one per KV head."""
        max_tiles = max_items // self._num_kv_heads

        def fits(share: int) -> bool:
            count_B = -(-num_blocks_B // share)
            return int(count_B.sum()) <= max_tiles and _num_partials(count_B, blocks) <= self._room.max_partials

        return _least(least, max(least, int(num_blocks_B.max())), fits)

    def _large_splits(self, blocks: Blocks, room: int) -> Splits:
        length_B, geometry = blocks.lengths, self._geometry
        block_tokens = geometry.large_block_tokens or geometry.block_tokens
        num_items = len(length_B) * self._num_kv_heads
        # No more items than programs: one item more would take a second wave, and unsplit tiles take no longer.
        wanted = max(1, self._machine.num_sms * geometry.large_programs_per_sm // num_items)
        if self._machine.batch_invariant or wanted == 1:
            return Splits.into(1, length_B, block_tokens)

        def splits_of(fewer: int) -> Splits:
            wanted_B = np.clip(length_B // (2 * MIN_SPLIT_TOKENS), 1, wanted - fewer)
            return Splits.into(wanted_B, length_B, block_tokens)

        return splits_of(_least(0, wanted - 1, lambda fewer: _num_partials(splits_of(fewer).count_B, blocks) <= room))

    def _write(self, blocks: Blocks, splits: Splits, first_tile: int, first_partial: int) -> tuple[int, int]:
        """Write a tile per split and each row's partials; return the tile count and the next free partial."""
        count_B = splits.count_B
        is_split_B = count_B > 1
        num_partials_B = blocks.columns_4B[2] * count_B * is_split_B
        ends_B = first_partial + num_partials_B.cumsum()
        first_partial_B, next_partial = ends_B - num_partials_B, int(ends_B[-1])
        tiles_8B = np.empty((len(TILE_FIELDS), len(count_B)), dtype=np.int64)
        tiles_8B[:4], tiles_8B[4], tiles_8B[5] = blocks.columns_4B, blocks.low_B, blocks.high_B
        tiles_8B[6], tiles_8B[7] = np.where(is_split_B, first_partial_B, -1), count_B
        if next_partial > first_partial:
            index_X, split_X = _spread(count_B)
            tiles_8B, tokens_X = tiles_8B[:, index_X], splits.tokens_B[index_X]
            tiles_8B[4] += split_X * tokens_X
            tiles_8B[5] = np.minimum(tiles_8B[5], tiles_8B[4] + tokens_X)
            tiles_8B[6] += split_X
            if self._near is not None:
                assert int(count_B.max()) < MAX_NEAR_SPLITS, f"{count_B.max()} splits do not fit a tile's last field"
                tiles_8B[7] += split_X * NEAR_SPLIT
        if self._near is not None:
            has_codes_X = tiles_8B[4] < tiles_8B[5]
            tiles_8B[4] = np.where(has_codes_X, np.maximum(tiles_8B[4], self._near.first_tokens), tiles_8B[4])
        num_tiles = tiles_8B.shape[1]
        self._host_tiles_X8[first_tile : first_tile + num_tiles] = tiles_8B.T
        self._write_rows(blocks.columns_4B[1], blocks.columns_4B[2], first_partial_B, count_B)
        return num_tiles, next_partial

    def _write_rows(
        self, row_B: np.ndarray, num_rows_B: np.ndarray, first_partial_B: np.ndarray, count_B: np.ndarray
    ) -> None:
        """Write the first partial and split count of every row."""
        if int(num_rows_B.sum()) > len(num_rows_B):
            index_R, nth_R = _spread(num_rows_B)
            row_B, count_B = row_B[index_R] + nth_R, count_B[index_R]
            first_partial_B = first_partial_B[index_R] + nth_R * count_B
        self._host_rows_T2[row_B, 0] = first_partial_B
        self._host_rows_T2[row_B, 1] = count_B


def _sort_by_length(tiles_X8: np.ndarray) -> None:
    """Put the longest tiles first, so that none of them starts last."""
    tiles_X8[:] = tiles_X8[np.argsort(tiles_X8[:, 4] - tiles_X8[:, 5], kind="stable")]


def _num_partials(count_B: np.ndarray, blocks: Blocks) -> int:
    """Count the split-KV partials to merge: one per row and split."""
    return int((blocks.columns_4B[2] * count_B)[count_B > 1].sum())


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Repeat each index `counts` times; return indices and the rank of each repeat."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - (np.cumsum(counts) - counts)[index]


def _least(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the least number from low to high that fits. `fits` is monotone, and high fits.

    Search near low first.
    """
    step = 1
    while low < high:
        middle = min(low + step, high) - 1
        if fits(middle):
            high, step = middle, 1 + (middle - low) // 2
        else:
            low, step = middle + 1, 2 * step
    return low

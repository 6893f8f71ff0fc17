"""LaneScheduler: chooses sequences whose prompt rows read the lane, and gives their tokens places there, in fixed buffers.

N sequences of a step, S those that read the lane, R runs

Sequences whose tokens fit together share a round. A round needs a tile for every second multiprocessor, with the heads that fit:
tiles of the lane are never split. Fewer rows after a long context would leave the GPU idle, and stay with large tiles over codes.

The lane depends on the step's lengths, so a graph cannot hold it, and rows in other company may take another kernel. Captured
steps and `batch_invariant` do without it.
"""

from typing import NamedTuple

import numpy as np
import torch

from holdfast.kernels.attention.tile_work import LaneRound, LaneWork
from holdfast.kernels.geometry import BLOCK_TOKENS, LANE_RUNS, RUN_FIELDS, LaneGeometry, lane_list_numbers
from holdfast.memory.arena import MirroredTensor

LEAST_SHARE = 0.5
"""Share of the multiprocessors that a round must occupy. The kernel over codes has 0.36 of the lane's speed on an H200."""


class LaneTokens(NamedTuple):
    """Tokens of some sequences in the lane: as codes, and those that are exact in rows' own blocks."""

    lows_2S: np.ndarray
    highs_2S: np.ndarray
    """Not above the low end if a sequence has none."""

    @classmethod
    def of(cls, columns_4S: np.ndarray, window: int | None, near_block: int) -> "LaneTokens":
        """Return what rows at [start, start + rows) read. `near_block`: tokens of a block that its rows see exact, or 0."""
        start_S, end_S = columns_4S[3], columns_4S[3] + columns_4S[2]
        low_S = np.zeros_like(start_S) if window is None else np.maximum(start_S - window + 1, 0)
        if not near_block:
            return cls(np.stack((low_S, end_S)), np.stack((end_S, end_S)))
        own_S, last_own_S = start_S // near_block * near_block, (end_S - 1) // near_block * near_block
        return cls(np.stack((low_S, np.maximum(low_S, own_S))), np.stack((last_own_S, end_S)))

    @property
    def first_blocks(self) -> np.ndarray:
        return self.lows_2S // BLOCK_TOKENS

    @property
    def counts(self) -> np.ndarray:
        """Blocks of each run."""
        return np.where(self.highs_2S > self.lows_2S, -(-self.highs_2S // BLOCK_TOKENS) - self.first_blocks, 0)


class LaneGroup(NamedTuple):
    """Sequences that share a round."""

    sequences_S: np.ndarray
    num_blocks: int


class LaneScheduler:
    """Runs of one geometry and window. Nothing is allocated after construction."""

    def __init__(
        self,
        geometry: LaneGeometry,
        window: int | None,
        max_num_seqs: int,
        num_sms: int,
        near_block: int,
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        self._window = window
        self._num_sms = num_sms
        self._near_block = near_block
        num_runs = 2 * max_num_seqs * len(RUN_FIELDS)
        self._lists = MirroredTensor((lane_list_numbers(max_num_seqs),), torch.int32, device, device.type == "cpu")
        self._num_run_numbers = num_runs
        self._host_runs_R6 = self._lists.host[:num_runs].reshape(-1, len(RUN_FIELDS))
        self._host_starts_2N = self._lists.host[num_runs:].reshape(2, -1)
        self._runs_R6 = self._lists.tensor[:num_runs].view(-1, len(RUN_FIELDS))
        self._starts_2N = self._lists.tensor[num_runs:].view(2, -1)

    @property
    def num_bytes(self) -> int:
        return self._lists.tensor.nbytes

    @property
    def least_rows(self) -> int:
        """Fewest rows of one prompt that run without a graph, for the lane: they occupy all multiprocessors."""
        return self.geometry.tile_rows * -(-self._num_sms // self.geometry.num_kv_heads)

    def groups(self, columns_4N: np.ndarray, may_take_N: np.ndarray) -> list[LaneGroup]:
        """Choose among the sequences of a step that may take the lane: in order, as many at once as fit."""
        index_S = np.flatnonzero(may_take_N)
        count_S = LaneTokens.of(columns_4N[:, index_S], self._window, self._near_block).counts.sum(axis=0)
        groups: list[LaneGroup] = []
        first = num_blocks = 0
        for place, count in enumerate((*count_S.tolist(), self.geometry.num_blocks + 1)):
            if num_blocks + count > self.geometry.num_blocks or 2 * (place - first) >= LANE_RUNS:
                groups.append(LaneGroup(index_S[first:place], num_blocks))
                first, num_blocks = place, 0
            num_blocks += count
        return [group for group in groups if self._is_worthwhile(columns_4N[2, group.sequences_S], group.num_blocks)]

    def _is_worthwhile(self, num_rows_S: np.ndarray, num_blocks: int) -> bool:
        num_tiles = int((-(-num_rows_S // self.geometry.tile_rows)).sum())
        return num_tiles * self.geometry.heads(num_blocks) >= LEAST_SHARE * self._num_sms

    def fill(self, columns_4N: np.ndarray, groups: list[LaneGroup], tiles: list[tuple[int, int]]) -> LaneWork:
        """Overwrite the lists with the runs of these groups, and send them. `tiles`: first tile and number, by group."""
        self._lists.wait()
        rounds: list[LaneRound] = []
        first_run = 0
        for group, (first_tile, num_tiles) in zip(groups, tiles, strict=True):
            columns_4S = columns_4N[:, group.sequences_S]
            num_runs = self._write(columns_4S, first_run)
            rounds.append(LaneRound(first_tile, num_tiles, first_run, num_runs, group.num_blocks))
            first_run += num_runs
        ends = first_run * len(RUN_FIELDS), self._num_run_numbers
        self._lists.send(((0, ends[0]), (ends[1], ends[1] + self._host_starts_2N.size)))
        return LaneWork(self._runs_R6, self._starts_2N, tuple(rounds))

    def _write(self, columns_4S: np.ndarray, first_run: int) -> int:
        """Write the runs of one round, all of codes before those of near tokens; return how many have tokens."""
        tokens, table_row_S = LaneTokens.of(columns_4S, self._window, self._near_block), columns_4S[0]
        counts_2S = tokens.counts
        ends_R = counts_2S.reshape(-1).cumsum()
        starts_2S = ends_R.reshape(2, -1) - counts_2S
        self._host_starts_2N[:, table_row_S] = starts_2S - tokens.first_blocks
        is_near_2S = np.broadcast_to(np.array([[0], [1]]), counts_2S.shape)
        fields = (np.broadcast_to(table_row_S, counts_2S.shape), tokens.first_blocks, tokens.lows_2S, tokens.highs_2S)
        runs_R6 = np.stack([ends_R, *(field.reshape(-1) for field in (*fields, is_near_2S))], axis=1)
        runs_R6 = runs_R6[counts_2S.reshape(-1) > 0]
        self._host_runs_R6[first_run : first_run + len(runs_R6)] = runs_R6
        return len(runs_R6)

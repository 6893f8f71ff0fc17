"""Tile lists of a step on the device, and the operands of an attention launch over them.

T rows, H query heads, D head dim, N rows of the page table, P pages of a row, C split-KV partials

    tiles_X8[0]      number of small tiles, number of large tiles
    tiles_X8[1 + i]  page table row | first row | rows | position of the first row | token range [low, high)
                     | first partial of the first row, -1: write to the output | splits of a row
    rows_T2          first partial of a row | its splits: 0: padding, written as zeros; 1: written by its tile
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.attention.paged_attention import Scoring


class LaneRound(NamedTuple):
    """Tiles of some sequences, and the runs of their tokens in the lane; heads follow each other in launches."""

    first_tile: int
    """Row of `tiles_X8`."""
    num_tiles: int
    first_run: int
    num_runs: int
    num_blocks: int
    """Blocks of BLOCK_TOKENS tokens of one KV head."""


class LaneWork(NamedTuple):
    """What large tiles of a step read from the lane (lane_rows.py)."""

    runs_R6: Tensor
    """int32, fields RUN_FIELDS."""
    starts_2N: Tensor
    """int32 by row of the page table: place of token 0 in blocks of its round, maybe below 0; of codes, and of near tokens."""
    rounds: tuple[LaneRound, ...]


@dataclass(frozen=True, slots=True)
class TileWork:
    """Tile lists of one step on the device, and the kernels that it needs."""

    tiles_X8: Tensor
    rows_T2: Tensor
    has_small: bool
    has_large: bool
    has_merge: bool
    """True if some rows are split or padded."""
    lane: LaneWork | None = None
    """Tiles beside the small and the large ones; None if no sequence goes through the lane."""


class TileCall(NamedTuple):
    """Operands of one attention launch over tiles, besides the pages."""

    q_THD: Tensor
    page_table_NP: Tensor
    work: TileWork
    scoring: Scoring
    partial_out_CX: Tensor
    partial_lse_CH: Tensor
    out_TX: Tensor
    num_sms: int

    @property
    def partials(self) -> tuple[Tensor, Tensor]:
        return self.partial_out_CX, self.partial_lse_CH

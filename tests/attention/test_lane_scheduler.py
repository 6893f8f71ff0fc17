"""Rounds of the lane: every token that a tile reads has a place of its own, and sequences that gain nothing stay away."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from attention.steps import CPU
from attention.work_lists import dummy_batch
from for_each import for_each
from holdfast.attention.declarations import StepBounds, max_partials
from holdfast.attention.tile_scheduler import ListRoom, Machine, NearTokens, StepRows, TileScheduler
from holdfast.families.grouped.declarations import TileKind, max_tiles
from holdfast.kernels.attention.quantized_attention import quantized_geometry
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.geometry import BLOCK_TOKENS, LANE_RUNS, TILE_FIELDS, LaneGeometry, lane_geometry

BOUNDS = StepBounds(max_num_seqs=64, max_num_rows=2048, page_tokens=16)
Rows = list[tuple[int, int, bool]]
"""Start, rows and whether they are of a prompt, by sequence."""


@dataclass(frozen=True)
class LaneCase:
    """Lists of a layer that may read the lane."""

    num_heads: int = 64
    num_kv_heads: int = 8
    window: int | None = None
    near: int = 0
    num_blocks: int = 1024
    num_sms: int = 132
    batch_invariant: bool = False
    max_model_len: int = 65536

    @property
    def lane(self) -> LaneGeometry:
        return LaneGeometry(max(1, 128 * self.num_kv_heads // self.num_heads), self.num_blocks, self.num_kv_heads)

    def work(self, rows: Rows, captured: bool = False) -> TileWork:
        kind = TileKind(self.num_heads, self.num_kv_heads, 4, 4, 128)
        room = ListRoom(
            max_tiles(kind, self.max_model_len, BOUNDS, self.near),
            BOUNDS.max_num_rows,
            BOUNDS.max_num_seqs,
            max_partials(self.max_model_len, BOUNDS),
        )
        machine = Machine(self.num_sms, self.batch_invariant, CPU)
        near = NearTokens(self.near, 16 if self.window is None else 0) if self.near else None
        geometry = quantized_geometry(self.num_heads, self.num_kv_heads, 4, 4)
        lists = TileScheduler(geometry, self.num_kv_heads, self.window, room, machine, near, self.lane)
        batch = dummy_batch(rows)
        return lists.fill(StepRows.of(batch.sequences, batch.num_rows), captured)


def lane_tiles(work: TileWork) -> list[dict[str, int]]:
    """All tiles of the lane."""
    rounds = () if work.lane is None else work.lane.rounds
    return [
        dict(zip(TILE_FIELDS, tile, strict=True))
        for part in rounds
        for tile in work.tiles_X8[part.first_tile : part.first_tile + part.num_tiles].tolist()
    ]


def places_of(case: LaneCase, work: TileWork, index: int) -> dict[int, tuple[int, int, bool]]:
    """What a round puts in each place of one head: page table row, token, and whether it is near."""
    assert work.lane is not None
    part, begin, places = work.lane.rounds[index], 0, {}
    assert 0 < part.num_runs <= LANE_RUNS
    for end, table_row, first_block, low, high, is_near in work.lane.runs_R6[part.first_run :][
        : part.num_runs
    ].tolist():
        assert begin < end, "a run without blocks"
        for i_block in range(begin, end):
            for offset in range(BLOCK_TOKENS):
                token = (first_block + i_block - begin) * BLOCK_TOKENS + offset
                if low <= token < high:
                    places[i_block * BLOCK_TOKENS + offset] = table_row, token, bool(is_near)
        begin = end
    assert begin == part.num_blocks <= case.num_blocks
    return places


def check(case: LaneCase, rows: Rows, work: TileWork) -> set[int]:
    """Check the lane's part of a step; return the rows that read it."""
    batch, found = dummy_batch(rows), set[int]()
    of_row = {one.row_start + i: (one, one.start + i) for one in batch.sequences for i in range(one.num_rows)}
    starts = None if work.lane is None else work.lane.starts_2N.tolist()
    for index, part in enumerate(() if work.lane is None else work.lane.rounds):
        assert starts is not None
        places, lengths = places_of(case, work, index), []
        assert part.num_tiles * case.lane.heads(part.num_blocks) >= case.num_sms / 2, f"{part=} leaves programs idle"
        for tile in lane_tiles(work)[part.first_tile - work.lane.rounds[0].first_tile :][: part.num_tiles]:
            sequence, position = of_row[tile["row"]]
            assert sequence.is_prompt, "only prompts read the lane"
            assert tile["table_row"] == sequence.table_row
            assert tile["position"] == position
            assert 1 <= tile["num_rows"] <= case.lane.tile_rows
            last = position + tile["num_rows"] - 1
            assert tile["high"] == last + 1, "the last row does not see itself"
            assert (tile["first_partial"], tile["num_splits"]) == (-1, 1), "tiles of the lane are whole"
            first_seen = 0 if case.window is None else max(0, position - case.window + 1)
            assert tile["low"] == first_seen // BLOCK_TOKENS * BLOCK_TOKENS
            own = position // case.near * case.near if case.near else tile["high"]
            assert not case.near or last // case.near == position // case.near, "rows of a tile share their block"
            for token in {first_seen, *range(first_seen, last + 1, 7), own - 1, own, last}:
                if first_seen <= token <= last:
                    is_near = token >= own
                    place = starts[is_near][sequence.table_row] * BLOCK_TOKENS + token
                    assert places[place] == (sequence.table_row, token, is_near), f"{tile=} reads {token=}"
            new = set(range(tile["row"], tile["row"] + tile["num_rows"]))
            assert not new & found, "two tiles have a row"
            found |= new
            lengths.append(tile["high"] - tile["low"])
        assert lengths == sorted(lengths, reverse=True), "the longest tile is not first"
    row_list = work.rows_T2.numpy()
    assert all(row_list[row, 1] == 1 for row in found), "the merge leaves rows of the lane alone"
    small, large = work.tiles_X8[0, :2].tolist()
    others = work.tiles_X8[1 : 1 + small + large, 1:3].tolist()
    assert not found & {row + i for row, count in others for i in range(count)}, "a row has two kinds of tiles"
    assert found | {row + i for row, count in others for i in range(count)} == set(of_row), "a row has no tile"
    return found


@st.composite
def steps(draw):
    """A case and a step for it."""
    num_heads, num_kv_heads = draw(st.sampled_from([(64, 8), (8, 8), (14, 2), (128, 1)]))
    near = draw(st.sampled_from([0, 64, 128]))
    case = LaneCase(
        num_heads,
        num_kv_heads,
        draw(st.sampled_from([None, 1, 100, 4096])),
        near,
        draw(st.sampled_from([8, 40, 1024])),
        draw(st.sampled_from([1, 4, 132])),
    )
    rows: Rows = []
    left = BOUNDS.max_num_rows
    for count in draw(st.lists(st.integers(1, 900), max_size=12)):
        count = min(count, left)
        if count:
            start = draw(st.sampled_from([0, 1, 63, 64, 129, 1000, 5000]))
            rows.append((start, count, draw(st.booleans())))
            left -= count
    return case, rows


@hypothesis_settings(max_examples=150)
@given(made=steps())
def test_lane_scheduler_places_each_token_that_tiles_read(made):
    case, rows = made
    if rows:
        check(case, rows, case.work(rows))


def test_lane_scheduler_takes_a_whole_prompt():
    case = LaneCase()
    work = case.work([(0, 2048, True)])
    assert check(case, [(0, 2048, True)], work) == set(range(2048))
    assert not work.has_large
    assert work.lane is not None
    assert case.lane.heads(work.lane.rounds[0].num_blocks) == 8


@for_each("rows", [[(30720, 2048, True)], [(60000, 1100, True)], [(0, 136, True)]])
def test_lane_scheduler_takes_prompts_for_half_of_the_gpu(rows):
    """One head at a time has 128 and 69 tiles for 132 programs; a short prompt has 136 with all heads."""
    case = LaneCase(near=512)
    work = case.work(rows)
    assert check(case, rows, work) == set(range(rows[0][1]))
    assert not work.has_large


@for_each("rows", [[(0, 60, True)], [(60000, 1000, True)], [(0, 2048, False)], [(70000, 2048, True)]])
def test_lane_scheduler_leaves_other_rows_to_codes(rows):
    """Too few tiles; one head at a time; drafts; a context that does not fit."""
    work = LaneCase(max_model_len=2**17).work(rows)
    assert work.lane is None
    assert work.has_large


def test_lane_scheduler_without_graph_or_invariance():
    assert LaneCase().work([(0, 2048, True)], captured=True).lane is None
    assert LaneCase(batch_invariant=True).work([(0, 2048, True)]).lane is None


def test_lane_scheduler_cuts_long_steps_into_rounds():
    """Three prompts whose tokens fit only two at a time, beside a row that decodes."""
    rows = [(20000, 700, True), (5, 1, False), (20000, 600, True), (20000, 600, True)]
    case = LaneCase(num_sms=20, num_blocks=700)
    work = case.work(rows)
    assert len(check(case, rows, work)) == 1900
    assert work.lane is not None
    assert [part.num_runs for part in work.lane.rounds] == [2, 1]


def test_lane_scheduler_begins_a_round_if_one_block_does_not_fit():
    rows = [(21760, 640, True), (21824, 640, True)]  # 350 and 351 blocks
    case = LaneCase(num_sms=20, num_blocks=700)
    work = case.work(rows)
    assert len(check(case, rows, work)) == 1280
    assert work.lane is not None
    assert [part.num_blocks for part in work.lane.rounds] == [350, 351]


def test_lane_geometry_heads_are_even():
    lane = lane_geometry(64, 8, 128)
    assert [lane.heads(blocks) for blocks in (1, 128, 129, 300, 512, 1024, 1025)] == [8, 8, 4, 3, 2, 1, 0]
    assert np.all([lane.heads(blocks) * blocks <= lane.num_blocks for blocks in range(1, 1025)])


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_lane_is_at_most_32_mib(head_dim):
    assert lane_geometry(64, 8, head_dim).num_blocks * 64 * head_dim * 4 <= 32 * 2**20
    assert lane_geometry(64, 8, head_dim, 3).num_blocks == 24

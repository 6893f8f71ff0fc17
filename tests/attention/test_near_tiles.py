"""Lists of tiles with near tokens: a row sees each code that it is to see once, and its splits are numbered."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from attention.steps import CPU
from attention.work_lists import MILLION, ListCase, dummy_batch
from for_each import for_each
from holdfast.attention.backend import Batch
from holdfast.attention.declarations import StepBounds, max_partials
from holdfast.attention.tile_scheduler import ListRoom, Machine, NearTokens, StepRows, TileScheduler
from holdfast.families.grouped.declarations import TileKind, max_tiles
from holdfast.kernels.attention.quantized_attention import quantized_geometry
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.geometry import NEAR_SPLIT, TILE_FIELDS, TileGeometry

CASE = ListCase(quantized=True)
Ranges = dict[int, list[tuple[int, int]]]
"""Tokens that each row reads as codes, a range for each of its splits."""


def kind_of(case: ListCase) -> TileKind:
    return TileKind(case.num_heads, case.num_kv_heads, 4, 4)


def geometry_of(case: ListCase) -> TileGeometry:
    return quantized_geometry(case.num_heads, case.num_kv_heads, 4, 4)


def lists_of(case: ListCase, block: int, first: int = 16) -> TileScheduler:
    """With the geometry of the kernel of 4 bits."""
    bounds = case.bounds
    room = ListRoom(
        max_tiles(kind_of(case), case.max_model_len, bounds, block),
        bounds.max_num_rows,
        bounds.max_num_seqs,
        max_partials(case.max_model_len, bounds),
    )
    machine = Machine(case.num_sms, case.batch_invariant, CPU)
    near = NearTokens(block, first if case.window is None else 0)
    return TileScheduler(geometry_of(case), case.num_kv_heads, case.window, room, machine, near)


def ranges_of(case: ListCase, block: int, batch: Batch, captured: bool = False, first: int = 16) -> Ranges:
    """Fill the lists, and check everything that kernels and the merge rely on."""
    work = lists_of(case, block, first).fill(StepRows.of(batch.sequences, batch.num_rows), captured)
    position = {
        one.row_start + i: (one.start + i, one.table_row) for one in batch.sequences for i in range(one.num_rows)
    }
    room = max_partials(case.max_model_len, case.bounds)
    rows = work.rows_T2.numpy()
    places: dict[int, int] = {}
    found: dict[int, dict[int, tuple[int, int]]] = {row: {} for row in position}
    for tile, most in tiles_of(case, work):
        i_split, num_splits = divmod(tile["num_splits"], NEAR_SPLIT)
        assert 1 <= tile["num_rows"] <= most, f"{tile=} has more than {most} rows"
        has_codes = tile["low"] < tile["high"]
        begins_at_first = case.window is None and i_split == 0 and tile["low"] == first
        assert not has_codes or tile["low"] % 64 == 0 or begins_at_first, (
            f"{tile=} does not begin with a block of tokens"
        )
        assert not has_codes or tile["high"] % 64 == 0, f"{tile=} does not end with a block of tokens"
        assert i_split < num_splits, f"{tile=} is split {i_split} of {num_splits}"
        assert (tile["first_partial"] >= 0) == (num_splits > 1), f"{tile=}: a row of one split is written at once"
        for i in range(tile["num_rows"]):
            row = tile["row"] + i
            assert position[row] == (tile["position"] + i, tile["table_row"]), f"{tile=} is not of row {row}"
            assert position[row][0] // block == tile["position"] // block, f"{tile=} has rows of two own blocks"
            assert rows[row, 1] == num_splits, f"the merge of row {row} takes {rows[row, 1]} splits of {num_splits}"
            assert i_split not in found[row], f"two tiles are split {i_split} of row {row}"
            found[row][i_split] = tile["low"], tile["high"]
            if num_splits > 1:
                place = tile["first_partial"] + i * num_splits
                assert place == rows[row, 0] + i_split, f"{tile=} writes another partial of row {row}"
                assert places.setdefault(place, row) == row, f"rows {row} and {places[place]} share a partial"
    assert not places or max(places) < room, f"{max(places)} is outside of {room} partials"
    assert all(len(parts) == rows[row, 1] for row, parts in found.items()), "a split has no tile"
    assert work.has_merge or not places, "partials are not merged"
    assert not rows[len(position) : batch.num_rows, 1].any(), "padding is to be written as zeros"
    return {row: [part for _, part in sorted(parts.items())] for row, parts in found.items()}


def tiles_of(case: ListCase, work: TileWork) -> list[tuple[dict[str, int], int]]:
    """Tiles of the list, each with the most rows that its kernel takes."""
    numbers = work.tiles_X8.numpy()
    num_small, num_large = numbers[0, :2].tolist()
    assert num_small + num_large < len(numbers), "more tiles than there is room for"
    assert work.has_small or not num_small
    assert work.has_large or not num_large
    most = geometry_of(case).small_rows, geometry_of(case).large_rows
    used = numbers[1 : 1 + num_small + num_large].tolist()
    return [(dict(zip(TILE_FIELDS, tile, strict=True)), most[index >= num_small]) for index, tile in enumerate(used)]


def check_tokens(case: ListCase, block: int, batch: Batch, ranges: Ranges, first_tokens: int = 16) -> None:
    """Codes against the rule; windows hide what a range has before them."""
    for sequence in batch.sequences:
        for i in range(sequence.num_rows):
            position, codes = sequence.start + i, ranges[sequence.row_start + i]
            own, first = position // block * block, max(0, position - (case.window or MILLION) + 1)
            low = first_tokens if case.window is None else first
            if low < own:
                assert codes[-1][1] == own, f"{codes=} at {position=}"
                assert codes[0][0] == low if case.window is None else codes[0][0] <= low, f"{codes=} at {position=}"
                assert all(one[1] == two[0] for one, two in pairwise(codes)), f"{codes=} at {position=}"
                assert all(low < high for low, high in codes), f"{codes=} at {position=}"
            elif case.window is None:
                assert len(codes) == 1, f"{codes=} at {position=}"
                assert codes[0][0] >= codes[0][1], f"{codes=} at {position=}"


@st.composite
def cases(draw):
    group = draw(st.sampled_from([1, 3, 4, 8, 71, 128]))
    num_kv_heads = draw(st.sampled_from([1, 2, 8]))
    max_model_len = draw(st.sampled_from([16, 256, 257, 1000, MILLION]))
    bounds = StepBounds(draw(st.integers(1, 12)), draw(st.integers(1, 400)), 16)
    case = ListCase(
        group * num_kv_heads,
        num_kv_heads,
        draw(st.sampled_from([None, None, 1, 5, 64, 1024])),
        max_model_len,
        bounds,
        draw(st.sampled_from([1, 2, 40, 132])),
        draw(st.booleans()),
        True,
    )
    rows, left = [], bounds.max_num_rows
    counts = st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 400))
    for count in draw(st.lists(counts, max_size=bounds.max_num_seqs)):
        count = min(count, left, max_model_len)
        if count == 0:
            break
        longest = max_model_len - count
        start = draw(st.one_of(st.integers(0, longest), st.just(longest), st.integers(0, min(longest, 300))))
        rows.append((start, count, draw(st.booleans())))
        left -= count
    block = draw(st.sampled_from([64, 128]))
    first = draw(st.sampled_from([1, 16, 16, 63, 64, block - 28, block]))
    return case, (block, first), rows, draw(st.integers(0, min(left, 8)))


FULL = ListCase(3, 3, None, 1000, StepBounds(8, 16, 16), quantized=True)


@hypothesis_settings(max_examples=50)
@given(made=cases(), captured=st.booleans())
@example(made=(FULL, (64, 16), 8 * [(63, 2, True)], 0), captured=False)
@example(made=(replace(FULL, window=5), (64, 16), 8 * [(63, 2, False)], 0), captured=True)
def test_near_tiles_cover_each_visible_token_once(made, captured):
    case, (block, first), rows, num_padding = made
    batch = dummy_batch(rows, num_padding)
    check_tokens(case, block, batch, ranges_of(case, block, batch, captured, first), first)


@hypothesis_settings(max_examples=25)
@given(made=cases(), num_sms=st.sampled_from([1, 132]))
def test_near_tiles_batch_invariant_split_by_own_position(made, num_sms):
    case, (block, first), rows, num_padding = made
    case = replace(case, batch_invariant=True, num_sms=num_sms, window=None)
    together = ranges_of(case, block, dummy_batch(rows, num_padding), first=first)
    row = 0
    for start, count, is_prompt in rows:
        for i in sorted({0, count // 2, count - 1}):
            kinds = is_prompt or count > quantized_geometry(case.num_heads, case.num_kv_heads, 4, 4).small_rows
            alone = dummy_batch([(start + i, 1, kinds)])
            assert together[row + i] == ranges_of(replace(case, num_sms=40), block, alone, first=first)[0], (
                f"{start + i=}"
            )
        row += count


@for_each("captured", [False, True])
def test_near_tiles_of_rows_without_codes_are_launched(captured):
    """Rows that see no codes see near tokens, so each of them has a tile."""
    for rows in ([(0, 40)], [(500, 40)]):
        batch = dummy_batch(rows)
        work = lists_of(CASE, 64).fill(StepRows.of(batch.sequences, batch.num_rows), captured)
        assert (work.has_small, work.has_large) == (captured, True)
        assert int(work.tiles_X8[0, 1]) == 3
    work = lists_of(CASE, 64).fill(StepRows.of(dummy_batch([], 4).sequences, 4), captured)
    assert work.tiles_X8[0, :2].tolist() == [0, 0]
    assert (work.has_small, work.has_large, work.has_merge) == (captured, False, True)


def test_near_tiles_of_a_split_context_by_hand():
    """Only the first split begins inside a block of tokens."""
    case = replace(CASE, num_heads=4, num_kv_heads=1, num_sms=1)
    ranges = ranges_of(case, 64, dummy_batch([(650, 1), (70, 1), (9, 1)]))
    assert len(ranges[0]) > 2
    assert ranges[0][0][0] == 16
    assert all(low % 64 == 0 for low, _ in ranges[0][1:])
    assert ranges[1] == [(16, 64)]
    assert ranges[2] == [(0, 0)]


@for_each("window, first, block", [(5, 16, 64), (None, 16, 32), (None, 16, 96), (None, 65, 64), (None, -1, 64)])
def test_near_lists_refuse_rules_that_tiles_cannot_keep(window, first, block):
    room, machine = CASE.room, Machine(1, False, CPU)
    with pytest.raises(AssertionError, match="near="):
        TileScheduler(CASE.geometry, 8, window, room, machine, NearTokens(block, first))

"""Lists of tiles with near pages: every row sees each of its tokens once, as a code or exact, and its partials are its own."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
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
from holdfast.families.grouped.declarations import TileKind, max_near_tiles, max_tiles
from holdfast.kernels.attention.quantized_attention import quantized_geometry
from holdfast.kernels.attention.tiled_attention import TileWork, tile_rows
from holdfast.kernels.geometry import TILE_FIELDS

CASE = ListCase(quantized=True)
Ranges = dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]]
"""Each row's tokens: those it reads as codes and those it reads exact, in the order of its partials."""


def kind_of(case: ListCase) -> TileKind:
    return TileKind(case.num_heads, case.num_kv_heads, 4, 4)


def lists_of(case: ListCase, block: int, first: int = 16) -> TileScheduler:
    """With the geometry of the kernel of 4 bits."""
    kind, bounds = kind_of(case), case.bounds
    room = ListRoom(
        max_tiles(kind, case.max_model_len, bounds, block),
        bounds.max_num_rows,
        bounds.max_num_seqs,
        max_partials(case.max_model_len, bounds),
        max_near_tiles(kind, bounds, block),
    )
    geometry = quantized_geometry(case.num_heads, case.num_kv_heads, 4, 4)
    machine = Machine(case.num_sms, case.batch_invariant, CPU)
    near = NearTokens(block, first if case.window is None else 0)
    return TileScheduler(geometry, case.num_kv_heads, case.window, room, machine, near)


def ranges_of(case: ListCase, block: int, batch: Batch, captured: bool = False, first: int = 16) -> Ranges:
    """Fill the lists, and check everything that kernels and the merge rely on."""
    work = lists_of(case, block, first).fill(StepRows.of(batch.sequences, batch.num_rows), captured)
    assert work.near is not None
    assert work.near.rows_T2 is work.rows_T2
    assert not work.near.has_merge
    assert (work.near.has_small, work.near.has_large) == (work.has_small, work.has_large)
    assert work.has_merge == (captured or batch.num_rows > 0)
    position = {
        one.row_start + i: (one.start + i, one.table_row) for one in batch.sequences for i in range(one.num_rows)
    }
    room = max_partials(case.max_model_len, case.bounds) + (3 if case.window is None else 2) * case.bounds.max_num_rows
    rows = work.rows_T2.numpy()
    places: dict[int, int] = {}
    found: dict[int, dict[int, tuple[str, int, int]]] = {row: {} for row in position}
    for name, list_work in (("codes", work), ("near", work.near)):
        for tile, most in tiles_of(case, list_work, name):
            assert 1 <= tile["num_rows"] <= most, f"{tile=} has more than {most} rows"
            is_first = name == "codes" and case.window is None and tile["low"] == first
            assert tile["low"] % 64 == 0 or is_first, f"{tile=} does not begin with a block of tokens"
            assert name == "near" or tile["high"] % 64 == 0, f"{tile=} does not end with a block of tokens"
            assert tile["first_partial"] >= 0, f"{tile=} writes to the output"
            for i in range(tile["num_rows"]):
                row, place = tile["row"] + i, tile["first_partial"] + i * tile["num_splits"]
                assert position[row] == (tile["position"] + i, tile["table_row"]), f"{tile=} is not of row {row}"
                assert position[row][0] // block == tile["position"] // block, f"{tile=} has rows of two own blocks"
                assert places.setdefault(place, row) == row, f"rows {row} and {places[place]} share a partial"
                assert place not in found[row], f"two tiles of row {row} share a partial"
                found[row][place] = name, tile["low"], tile["high"]
    assert not places or max(places) < room, f"{max(places)} is outside of {room} partials"
    for row, parts in found.items():
        assert list(range(rows[row, 0], rows[row].sum())) == sorted(parts), f"row {row} merges other partials"
        assert rows[row, 1] >= 2, "a merge leaves out rows of one partial"
    assert not rows[len(position) : batch.num_rows, 1].any(), "padding is to be written as zeros"
    kinds = ("codes", "near")
    return {
        row: tuple([part[1:] for _, part in sorted(parts.items()) if part[0] == kind] for kind in kinds)  # type: ignore[misc]
        for row, parts in found.items()
    }


def tiles_of(case: ListCase, work: TileWork, name: str) -> list[tuple[dict[str, int], int]]:
    """Tiles of a list, each with the most rows that its kernel takes."""
    numbers = work.tiles_X8.numpy()
    num_small, num_large = numbers[0, :2].tolist()
    assert num_small + num_large < len(numbers), "more tiles than there is room for"
    assert work.has_small or not num_small
    assert work.has_large or not num_large
    geometry = quantized_geometry(case.num_heads, case.num_kv_heads, 4, 4)
    most = geometry.small_rows, geometry.large_rows
    if name == "near":
        most = tuple(tile_rows(case.num_heads, case.num_kv_heads, large) for large in (False, True))
    used = numbers[1 : 1 + num_small + num_large].tolist()
    return [(dict(zip(TILE_FIELDS, tile, strict=True)), most[index >= num_small]) for index, tile in enumerate(used)]


def check_tokens(case: ListCase, block: int, batch: Batch, ranges: Ranges, first_tokens: int = 16) -> None:
    """Tokens of both kinds against the rule; windows hide what a range has before them."""
    for sequence in batch.sequences:
        for i in range(sequence.num_rows):
            position, (codes, near) = sequence.start + i, ranges[sequence.row_start + i]
            own, first = position // block * block, max(0, position - (case.window or MILLION) + 1)
            assert near[0][0] == own, f"{near=} at {position=}"
            assert position < near[0][1] <= own + block, f"{near=} at {position=}"
            low = first_tokens if case.window is None else first
            if case.window is None:
                assert near[1:] == [(0, first_tokens if own else 0)], f"{near=} at {position=}"
            else:
                assert near[1:] == ([] if codes else [(0, 0)]), f"{near=} at {position=}"
            if low < own:
                assert codes, f"no codes at {position=}"
                assert codes[-1][1] == own, f"{codes=} at {position=}"
                assert codes[0][0] == low if case.window is None else codes[0][0] <= low, f"{codes=} at {position=}"
                assert all(one[1] == two[0] and one[0] < one[1] for one, two in pairwise(codes))
            elif case.window is None:
                assert not codes, f"{codes=} at {position=}"


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
            codes, near = ranges_of(replace(case, num_sms=40), block, alone, first=first)[0]
            assert together[row + i][0] == codes, f"codes at {start + i}"
            assert [low for low, _ in together[row + i][1]] == [low for low, _ in near], f"near at {start + i}"
        row += count


@for_each("captured", [False, True])
def test_near_tiles_kernels_follow_from_rows(captured):
    """A prompt that sees no codes launches their kernel all the same, as a warm-up step compiles it."""
    for rows in ([(0, 40)], [(500, 40)]):
        batch = dummy_batch(rows)
        work = lists_of(CASE, 64).fill(StepRows.of(batch.sequences, batch.num_rows), captured)
        assert work.has_large
        assert work.has_small == captured
        assert int(work.tiles_X8[0, 1]) == (0 if rows[0][0] == 0 else 3)
    empty = dummy_batch([], 4)
    work = lists_of(CASE, 64).fill(StepRows.of(empty.sequences, 4), captured)
    assert work.near is not None
    assert np.array_equal(work.near.tiles_X8[0, :2], [0, 0])
    assert (work.has_small, work.has_large, work.has_merge) == (captured, False, True)


def test_near_partials_leave_splits_of_prompts_their_room():
    """Rows that are not split have up to three partials each, for which the scratch has places of their own."""
    case = ListCase(8, 1, bounds=StepBounds(450, 450, 16), quantized=True)
    ranges = ranges_of(case, 64, dummy_batch([(40000, 16), *(420 * [(200, 1)])]))
    assert len(ranges[0][0]) > 8, "codes of a long prompt are not split"


def test_near_lists_lie_where_the_first_ones_lay():
    lists = lists_of(CASE, 64)
    works = [lists.fill(StepRows.of(dummy_batch([(start, 1)]).sequences, 1), True) for start in (40000, 3)]
    for one, other in zip(*([work.tiles_X8, work.near.tiles_X8, work.rows_T2] for work in works), strict=True):
        assert one.data_ptr() == other.data_ptr()
        assert one.data_ptr() % 16 == 0 or one.numel() == 0


def test_near_tiles_of_a_split_context_by_hand():
    """Only the first split begins inside a block of tokens."""
    case = replace(CASE, num_heads=4, num_kv_heads=1, num_sms=1)
    ranges = ranges_of(case, 64, dummy_batch([(650, 1), (70, 1), (9, 1)]))
    codes, near = ranges[0]
    assert len(codes) > 2
    assert codes[0][0] == 16
    assert all(low % 64 == 0 for low, _ in codes[1:])
    assert near == [(640, 651), (0, 16)]
    assert ranges[1] == ([(16, 64)], [(64, 71), (0, 16)])
    assert ranges[2] == ([], [(0, 10), (0, 0)])


@for_each("window, first, block", [(5, 16, 64), (None, 16, 32), (None, 16, 96), (None, 65, 64), (None, -1, 64)])
def test_near_lists_refuse_rules_that_tiles_cannot_keep(window, first, block):
    room, machine = CASE.room, Machine(1, False, CPU)
    with pytest.raises(AssertionError, match="near="):
        TileScheduler(CASE.geometry, 8, window, room, machine, NearTokens(block, first))

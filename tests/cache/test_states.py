"""StateRule and Snapshots: pieces of prompts, and which place a snapshot takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cache.states import NO_PLACE, Snapshots, StateRule, Written


@given(
    num_prompt=st.integers(1, 700),
    num_more=st.integers(0, 3),
    grid=st.sampled_from([2, 3, 64]),
    budgets=st.lists(st.integers(1, 300), min_size=1),
)
def test_pieces_cover_a_prompt_as_kernels_take_it(
    num_prompt: int, num_more: int, grid: int, budgets: list[int]
) -> None:
    rule, start, place = StateRule(grid), 0, 0
    while start < num_prompt + num_more:
        most = max(budgets[place % len(budgets)], grid if start % 2 else 1)
        place += 1
        rows = rule.piece(start, num_prompt, most)
        assert 0 <= rows <= most
        left = num_prompt - start
        if left <= 1:
            assert rows == 1
        elif rows:
            end = start + rows
            assert end % grid == 0 or end == num_prompt
            assert rows > 1, "one row goes to the recurrent kernel"
            assert end < num_prompt or num_prompt % grid != 1
        else:
            assert most < min(left, grid), "a piece fits"
            rows = rule.piece(start, num_prompt, grid)
            assert rows > 0
        start += rows


def take(snapshots: Snapshots, step: int, *, is_between: bool = False) -> int:
    place = snapshots.take(step, is_between=is_between)
    snapshots.check()
    return place


def test_free_places_come_first_then_the_least_recently_used() -> None:
    snapshots = Snapshots(3)
    assert [take(snapshots, step) for step in (1, 2, 3)] == [0, 1, 2]
    snapshots.settle(3)
    snapshots.read(0, 4)
    snapshots.settle(4)
    assert [take(snapshots, step) for step in (5, 6)] == [1, 2]
    snapshots.forget(2)
    snapshots.settle(6)
    assert [take(snapshots, step) for step in (7, 8)] == [2, 0]


def test_snapshot_between_others_goes_first() -> None:
    snapshots = Snapshots(2)
    take(snapshots, 1)
    take(snapshots, 2, is_between=True)
    snapshots.settle(2)
    assert take(snapshots, 3, is_between=True) == 1
    snapshots.settle(3)
    assert take(snapshots, 4) == 1
    snapshots.settle(4)
    assert take(snapshots, 5, is_between=True) == NO_PLACE, "it evicts only its like"
    snapshots.yield_place(1)
    assert take(snapshots, 5, is_between=True) == 1


def test_snapshot_that_was_read_is_no_longer_between() -> None:
    snapshots = Snapshots(1)
    take(snapshots, 1, is_between=True)
    snapshots.read(0, 2)
    snapshots.settle(2)
    assert take(snapshots, 3, is_between=True) == NO_PLACE
    assert take(snapshots, 3) == 0


@pytest.mark.parametrize("use", ["written", "read", "read before"])
def test_place_that_a_step_in_flight_uses_is_not_given(use: str) -> None:
    snapshots = Snapshots(1)
    take(snapshots, 1)
    snapshots.settle(1 if use != "written" else 0)
    if use != "written":
        snapshots.read(0, 2)
    if use == "read before":
        snapshots.read(0, 3)
    assert take(snapshots, 3) == NO_PLACE
    snapshots.settle(2)
    assert take(snapshots, 3) == 0, "a step reads places before it writes any"


@pytest.mark.parametrize(
    ("own", "reader", "found"), [(Written(0, 1), 0, 0), (Written(0, 1), 2, -1), (Written(0, 2), 0, -1)]
)
def test_sequence_may_overwrite_what_it_writes_in_flight(own: Written, reader: int, found: int) -> None:
    snapshots = Snapshots(1)
    take(snapshots, 1)
    if reader:
        snapshots.read(0, reader)
    assert snapshots.take(3, is_between=False, own=own) == found


def test_own_snapshot_in_flight_goes_before_those_of_others() -> None:
    snapshots = Snapshots(3)
    for step in (1, 2, 3):
        take(snapshots, step)
    snapshots.settle(2)
    assert snapshots.find(4, is_between=False, own=Written(2, 3)) == 2
    snapshots.yield_place(0)
    assert snapshots.find(4, is_between=False, own=Written(2, 3)) == 0, "what is between goes first"


def test_freed_place_waits_for_the_step_that_writes_it() -> None:
    snapshots = Snapshots(1)
    take(snapshots, 1)
    assert snapshots.pending() == [0]
    snapshots.forget(0)
    assert (take(snapshots, 2), snapshots.pending()) == (NO_PLACE, [])
    snapshots.settle(1)
    assert take(snapshots, 2) == 0


def test_pool_of_no_places_gives_none() -> None:
    assert take(Snapshots(0), 1) == NO_PLACE


@pytest.mark.parametrize("settings", [{"grid": 1}, {"num_snapshots": -1}, {"snapshot_tokens": 0}])
def test_rule_of_impossible_counts_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        StateRule(**settings)

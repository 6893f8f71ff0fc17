"""First tokens with sharing against those without: never later with room for all, and else only at the gain of another one.

A step takes a constant and its rows, so a step that admits more is longer. Sharing admits others earlier, keeps sequences
that would be preempted, and moves the ends of steps to before or after an arrival. Each may delay a first token a little.
"""

from dataclasses import replace

import pytest

from engine.first_token import at_once, random_traffic, run_traffic
from engine.scheduling import run, sequence, shape
from for_each import for_each
from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler

NUM_SLOW_WORLDS = 1500


def check_room_for_all(seeds: range, has_windows: bool) -> None:
    """Pages and slots for all, which come at once, and each step booked before the next: budget is all that is short."""
    for seed in seeds:
        traffic = at_once(random_traffic(seed, has_windows=has_windows))
        traffic = replace(traffic, limits=replace(traffic.limits, max_num_seqs=32))
        alone, shared = run_traffic(traffic, False), run_traffic(traffic, True)
        pairs = zip(alone.first_tokens, shared.first_tokens, strict=True)
        late = [number for number, (before, after) in enumerate(pairs) if after > before]
        assert not late, f"{seed=}: first tokens of {late} come later with sharing"
        assert shared.num_rows <= alone.num_rows


def check_scarce(seeds: range, has_windows: bool, run_ahead: int, is_tight: bool) -> None:
    """One is later only if another is earlier or is preempted less; in all worlds few are later, and many are earlier."""
    num_late = num_early = num_all = gain = 0
    for seed in seeds:
        traffic = random_traffic(seed, is_tight=is_tight, has_windows=has_windows, run_ahead=run_ahead)
        alone, shared = run_traffic(traffic, False), run_traffic(traffic, True)
        gains = [before - after for before, after in zip(alone.first_tokens, shared.first_tokens, strict=True)]
        late, early = sum(own < 0 for own in gains), sum(own > 0 for own in gains)
        is_cause = early > 0 or shared.num_preemptions < alone.num_preemptions
        assert is_cause or not late, f"{seed=}: {late} first tokens come later with sharing, and none earlier"
        num_late, num_early, num_all, gain = num_late + late, num_early + early, num_all + len(gains), gain + sum(gains)
    assert gain > 0
    assert num_late <= 0.04 * num_all
    assert num_early >= 0.5 * num_all


def test_hit_whose_window_pages_do_not_fit_is_not_used() -> None:
    limits, window = Limits(4, 8, 64, 2), CacheGroup("window", 2, window=4)
    scheduler = Scheduler(limits, 10, True, 9, groups=(window,), prefix_root=b"root")
    second = sequence(1, [*range(7), *range(50, 59)], max_tokens=4)
    for one in (sequence(0, [*range(8)], max_tokens=8), second):
        scheduler.add(one)
    assert shape(run(scheduler)) == [(0, 0, 8)]
    assert scheduler.hit(second).num_tokens == 6
    assert shape(run(scheduler)) == [(0, 8, 1), (1, 0, 7)], "shared pages would come back to neither of them"


@for_each("has_windows", [False, True])
def test_first_token_with_room_for_all_is_never_later(has_windows: bool) -> None:
    check_room_for_all(range(30), has_windows)


@pytest.mark.slow
@pytest.mark.parametrize("has_windows", [False, True], ids=["whole", "windows"])
def test_first_token_with_room_is_never_later_in_many(has_windows: bool) -> None:
    check_room_for_all(range(NUM_SLOW_WORLDS), has_windows)


@for_each("is_tight", [False, True])
@for_each("run_ahead", [0, 1])
@for_each("has_windows", [False, True])
def test_first_token_is_later_only_if_another_is_earlier(has_windows: bool, run_ahead: int, is_tight: bool) -> None:
    check_scarce(range(20), has_windows, run_ahead, is_tight)


@pytest.mark.slow
@pytest.mark.parametrize("is_tight", [False, True], ids=["ample", "tight"])
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("has_windows", [False, True], ids=["whole", "windows"])
def test_first_token_is_rarely_later_in_many(has_windows: bool, run_ahead: int, is_tight: bool) -> None:
    check_scarce(range(NUM_SLOW_WORLDS), has_windows, run_ahead, is_tight)

"""Steps in which how a row is computed does not depend on others: rows of a prompt, or one behind it; pages of prompts alone are cached."""

import pytest

from engine.scheduling import PARAMS, has_work, run, sequence, shape
from for_each import for_each
from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sequence import Sequence


def make(num_pages: int = 64, budget: int = 64, max_num_seqs: int = 8) -> Scheduler:
    limits = Limits(max_num_seqs, budget, 64, 4)
    return Scheduler(limits, num_pages, True, 100, prefix_root=b"root", is_invariant=True)


def test_invariant_prompt_is_cut_where_budget_ends():
    scheduler = make(budget=10)
    scheduler.add(sequence(1, 7))
    scheduler.add(sequence(2, 12))
    assert [shape(run(scheduler)) for _ in range(3)] == [
        [(1, 0, 7), (2, 0, 3)],
        [(1, 7, 1), (2, 3, 9)],
        [(1, 8, 1), (2, 12, 1)],
    ]


def test_preempted_output_is_recomputed_row_by_row():
    scheduler = make(num_pages=7)
    first, second = sequence(1, 8, max_tokens=20), sequence(2, 6, max_tokens=12)
    for one in (first, second):
        scheduler.add(one)
    while not scheduler.num_preemptions and has_work(scheduler):
        run(scheduler)
    num_known = second.num_tokens
    assert num_known > 6, "it had chosen nothing yet"
    steps: list[tuple[int, int]] = []
    while second.num_output_tokens < 12:
        steps += [(start, count) for number, start, count in shape(run(scheduler)) if number == 2]
    end = 6 + 12 - 1
    assert steps[0][0] + steps[0][1] <= 6, "the prompt, or what is left of it behind a hit"
    assert [step for step in steps if step[0] >= 6] == [(place, 1) for place in range(6, end)]


@for_each("num_prompt, num_hit", [(8, 8), (7, 4), (3, 0), (12, 12)])
def test_invariant_prefix_hits_cover_prompt_pages_alone(num_prompt, num_hit):
    """What was chosen behind them was computed in another way than a prompt with the same tokens is."""
    scheduler = make()
    first = sequence(1, num_prompt, max_tokens=12)
    scheduler.add(first)
    while has_work(scheduler):
        run(scheduler)
    again = Sequence(2, [*first.token_ids, 99], len(first.token_ids) + 1, PARAMS, 0, 4)
    scheduler.add(again)
    assert shape(run(scheduler)) == [(2, num_hit, again.num_prompt_tokens - num_hit)]
    assert again.num_cached_tokens == num_hit


def test_invariant_scheduler_refuses_drafts():
    scheduler = make()
    scheduler.add(sequence(1, 4))
    with pytest.raises(AssertionError, match="draft tokens"):
        scheduler.schedule(lambda one: (1, 2))


def test_invariant_preempted_sequence_hits_prompt_pages_alone():
    """A prompt that contains its output: those rows went through large tiles, its own one by one."""
    scheduler = make(num_pages=14)
    stem = [*range(200, 208)]
    talk, second = sequence(1, [*stem, *[7] * 12, 99], max_tokens=28), sequence(2, stem, max_tokens=28)
    for one in (talk, second):
        scheduler.add(one)
        run(scheduler)
    while not scheduler.num_preemptions and has_work(scheduler):
        run(scheduler)
    assert second.num_preemptions
    assert second.num_tokens > 12, "it had not chosen a page of tokens"
    starts: list[int] = []
    while not starts:
        starts = [start for number, start, _ in shape(run(scheduler)) if number == 2]
    assert starts[0] <= 8

"""Scheduler: sequences that finish at any moment, steps that fail, callers that make mistakes."""

import pytest

from engine.scheduling import make, run, sequence, shape
from holdfast.request.sequence import SequenceState


@pytest.mark.parametrize("when", ["waiting", "running", "in flight", "preempted", "finished", "stranger"])
def test_finish_in_any_state_any_number_of_times(when: str) -> None:
    scheduler = make(num_pages=6, page_tokens=2, max_model_len=12, max_tokens_a_step=16)
    keeper = sequence(0, 2, max_tokens=10)
    one = sequence(1, 2, max_tokens=10)
    scheduler.add(keeper)
    if when != "stranger":
        scheduler.add(one)
    step = None
    if when in ("running", "finished"):
        run(scheduler)
    if when == "finished":
        scheduler.finish(one)
    if when == "preempted":
        while not one.num_preemptions:
            run(scheduler)
    if when == "in flight":
        step = scheduler.schedule()
    length = one.num_tokens
    for _ in range(3):
        scheduler.finish(one)
        scheduler.check()
    if step is not None:
        scheduler.complete(step, [7, 7])
        scheduler.check()
        assert keeper.num_output_tokens == 1
    assert (one.state, one.pages, one.num_tokens) == (SequenceState.FINISHED, [], length)
    while scheduler.has_work:
        run(scheduler)
    assert scheduler.num_free_pages == 6


def test_one_that_was_blocked_is_tried_again_when_somebody_leaves_and_another_takes_the_page() -> None:
    """As many pages are available as when it was blocked, but the page that the other might have claimed is not needed."""
    scheduler = make(num_pages=8, page_tokens=4, caching=False)
    leaver, grower, blocked = sequence(0, 1), sequence(1, 4), sequence(2, 16, max_tokens=4)
    for one in (leaver, grower, blocked):
        scheduler.add(one)
    assert shape(run(scheduler)) == [(0, 0, 1), (1, 0, 4)]
    available = scheduler.num_free_pages
    scheduler.finish(leaver)
    step = run(scheduler)
    assert shape(step) == [(1, 4, 1), (2, 0, 16)]
    assert scheduler.num_free_pages == available - len(blocked.pages), "the case is not what it says"


def test_a_step_in_flight_keeps_seeing_whole_page_lists() -> None:
    scheduler = make()
    one = sequence(0, 9)
    scheduler.add(one)
    scheduler.schedule()
    pages = one.pages
    scheduler.finish(one)
    assert len(pages) == 3


def test_a_step_that_failed_is_scheduled_again() -> None:
    scheduler = make()
    scheduler.add(sequence(0, 9))
    failed = scheduler.schedule()
    step = scheduler.schedule()
    assert shape(step) == shape(failed)
    with pytest.raises(AssertionError, match="latest step"):
        scheduler.complete(failed, [7])
    scheduler.complete(step, [7])
    with pytest.raises(AssertionError, match="only once"):
        scheduler.complete(step, [7])


def test_complete_wants_one_entry_for_each_and_no_early_token() -> None:
    scheduler = make(max_tokens_a_step=4)
    scheduler.add(sequence(0, 9))
    step = scheduler.schedule()
    with pytest.raises(AssertionError, match="0 tokens for 1 sequences"):
        scheduler.complete(step, [])
    with pytest.raises(AssertionError, match="sampled before its last token"):
        scheduler.complete(step, [7])


def test_one_that_sampled_nothing_waits_for_its_caller() -> None:
    scheduler = make()
    one = sequence(0, 4)
    scheduler.add(one)
    scheduler.add(sequence(1, 4))
    scheduler.complete(scheduler.schedule(), [None, 7])
    assert shape(run(scheduler)) == [(1, 4, 1)]
    scheduler.finish(one)
    scheduler.check()


def test_one_that_goes_on_after_max_tokens_is_an_error_of_the_caller() -> None:
    scheduler = make(page_tokens=2)
    scheduler.add(sequence(0, 2, max_tokens=1))
    scheduler.complete(scheduler.schedule(), [7])
    with pytest.raises(AssertionError, match="goes on after max_tokens"):
        scheduler.schedule()

"""The scheduler starts sequences inside long pages: what it copies, holds and counts, and when a sequence waits."""

from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, Sequence
from holdfast.request.step import RowCopy

GROUPS = (CacheGroup("entries of 4", 4, tokens_per_row=4), CacheGroup("entries of 4, long", 16, tokens_per_row=4))
PROMPT = list(range(10, 30))


def make_scheduler(num_pages: int) -> Scheduler:
    return Scheduler(Limits(4, 64, 64, 4), num_pages, True, 10, groups=GROUPS)


def add(scheduler: Scheduler, number: int, prompt: list[int], max_tokens: int = 1) -> Sequence:
    sequence = Sequence(number, list(prompt), len(prompt), SamplingParams(), 0, max_tokens)
    scheduler.add(sequence)
    return sequence


def schedule(scheduler: Scheduler) -> LiveStep:
    step = scheduler.schedule()
    assert step is not None
    scheduler.check()
    return step


def book(scheduler: Scheduler, step: LiveStep) -> None:
    scheduler.complete(step, [(1,) if item.samples else () for item in step.scheduled])
    for item in step.scheduled:
        if item.sequence.num_output_tokens == item.sequence.max_tokens:
            scheduler.finish(item.sequence)
    scheduler.check()


def copies_of(step: LiveStep) -> list[tuple[RowCopy, ...]]:
    return [one.copies for one in step.step.admitted]


def test_copied_page_is_held_until_its_step_is_booked() -> None:
    scheduler = make_scheduler(8)
    add(scheduler, 0, PROMPT[:10])
    book(scheduler, schedule(scheduler))
    second = add(scheduler, 1, [*PROMPT[:9], 99])
    step = schedule(scheduler)
    ((copy,),) = copies_of(step)
    assert (copy.group, copy.target, copy.num_rows) == (1, second.tables[1][0], 2)
    assert (second.num_cached_tokens, scheduler.pool.num_owners(copy.source)) == (8, 1)
    book(scheduler, step)
    assert scheduler.pool.num_owners(copy.source) == 0
    assert scheduler.pool.is_kept(copy.source)


def test_hit_that_needs_a_page_too_many_is_not_taken() -> None:
    for num_pages, num_cached in ((4, 4), (3, 0)):
        scheduler = make_scheduler(num_pages)
        add(scheduler, 0, PROMPT[:6])
        book(scheduler, schedule(scheduler))
        second = add(scheduler, 1, [*PROMPT[:5], 99])
        step = schedule(scheduler)
        assert second.num_cached_tokens == num_cached
        assert [bool(copies) for copies in copies_of(step)] == [num_cached > 0]
        book(scheduler, step)


def test_sequence_waits_for_the_step_that_computes_its_open_rows() -> None:
    scheduler = make_scheduler(16)
    first, second = add(scheduler, 0, PROMPT[:10]), add(scheduler, 1, [*PROMPT[:9], 99])
    step = schedule(scheduler)
    assert [item.sequence for item in step.scheduled] == [first]
    later = schedule(scheduler)  # the first one is still in flight
    assert [item.sequence for item in later.scheduled] == [second]
    assert copies_of(later) == [(RowCopy(1, first.tables[1][0], second.tables[1][0], 2),)]
    book(scheduler, step)
    book(scheduler, later)


def test_whole_pages_are_shared_in_the_step_that_computes_them() -> None:
    scheduler = make_scheduler(16)
    add(scheduler, 0, PROMPT[:17])
    second = add(scheduler, 1, [*PROMPT[:16], 99])
    step = schedule(scheduler)
    assert second.num_cached_tokens == 16
    assert copies_of(step) == [(), ()]


def test_equal_prompts_fork_inside_a_long_page() -> None:
    scheduler = make_scheduler(16)
    first, second = add(scheduler, 0, PROMPT[:10]), add(scheduler, 1, PROMPT[:10])
    step = schedule(scheduler)
    assert [item.source for item in step.scheduled] == [None, first]
    assert copies_of(step) == [(), ()]
    assert second.tables[0][:2] == first.tables[0][:2]
    assert scheduler.pool.num_owners(first.tables[1][0]) == 2, "held until the fork's copy has run"
    book(scheduler, step)


def test_dropped_step_starts_a_copied_sequence_again() -> None:
    scheduler = make_scheduler(16)
    add(scheduler, 0, PROMPT[:10])
    book(scheduler, schedule(scheduler))
    second = add(scheduler, 1, [*PROMPT[:9], 99])
    schedule(scheduler)
    scheduler.forget_steps()
    scheduler.check()
    assert not any(second.tables)
    step = schedule(scheduler)
    assert (step.scheduled[0].start, copies_of(step)) == (0, [()])
    book(scheduler, step)

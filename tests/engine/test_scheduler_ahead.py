"""Scheduler with steps in flight: positions ahead of tokens, quarantine, slots and pages as steps tell them, proposals."""

from dataclasses import replace

import pytest

from engine.scheduling import make, num_cached, run, sequence, shape
from for_each import for_each
from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sequence import LiveStep, Sequence, SequenceState
from holdfast.request.step import NO_STEP, Step

WHOLE, WINDOW = CacheGroup("whole context", 4), CacheGroup("window of 8", 4, window=8)
STATE = CacheGroup("state", 0, state_pages=2)


def given(scheduler: Scheduler, propose=None) -> LiveStep:
    """The next step, which there is."""
    step = scheduler.schedule(propose)
    assert step is not None
    scheduler.check()
    return step


def book(scheduler: Scheduler, step: LiveStep, *tokens: tuple[int, ...]) -> None:
    """Complete with tokens, or 7 for each that samples."""
    scheduler.complete(step, tokens or [(7,) if item.samples else () for item in step.scheduled])
    scheduler.check()


def with_groups(*groups: CacheGroup, num_pages: int = 32, budget: int = 16) -> Scheduler:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=128, page_tokens=4)
    return Scheduler(limits, num_pages, True, 100, groups=groups, prefix_root=b"root")


def test_scheduler_ahead_continues_from_token_in_flight() -> None:
    scheduler = make()
    one = sequence(0, 6)
    scheduler.add(one)
    steps = [given(scheduler) for _ in range(3)]
    assert [shape(step) for step in steps] == [[(0, 0, 6)], [(0, 6, 1)], [(0, 7, 1)]]
    assert all(step.scheduled[0].samples for step in steps)
    assert (one.num_computed, one.num_scheduled, one.num_coming, one.num_tokens) == (0, 8, 3, 6)
    book(scheduler, steps[0], (5,))
    assert (one.num_computed, one.num_scheduled, one.num_coming, one.num_tokens) == (6, 8, 2, 7)
    book(scheduler, steps[1], (4,))
    book(scheduler, steps[2], (3,))
    assert (one.num_computed, one.num_scheduled, one.num_coming) == (8, 8, 0)
    assert one.token_ids[6:] == [5, 4, 3]


def test_chunked_prompt_samples_in_its_last_chunk() -> None:
    scheduler = make(max_tokens_a_step=4)
    scheduler.add(sequence(0, 9))
    steps = [given(scheduler) for _ in range(4)]
    assert [shape(step) for step in steps] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 1)], [(0, 9, 1)]]
    assert [step.scheduled[0].samples for step in steps] == [False, False, True, True]


def test_scheduler_ahead_end_by_length_has_no_surplus() -> None:
    scheduler = make()
    one = sequence(0, 4, max_tokens=3)
    scheduler.add(one)
    steps = [given(scheduler) for _ in range(3)]
    assert given(scheduler).scheduled == (), "what is in flight brings all that it may have"
    for step in steps:
        book(scheduler, step)
    assert one.num_output_tokens == 3
    scheduler.finish(one)
    assert scheduler.pool.num_available == 16, "nothing was left to wait for"


def test_positions_in_flight_stay_below_max_model_len() -> None:
    scheduler = make(max_model_len=8)
    scheduler.add(sequence(0, 7, max_tokens=20))
    assert [shape(given(scheduler)) for _ in range(3)] == [[(0, 0, 7)], [(0, 7, 1)], []]


def test_steps_are_booked_in_their_order() -> None:
    scheduler = make()
    scheduler.add(sequence(0, 6))
    first, second = given(scheduler), given(scheduler)
    with pytest.raises(AssertionError, match="only the oldest step in flight"):
        scheduler.complete(second, [(7,)])
    book(scheduler, first)
    book(scheduler, second)


def test_surplus_tokens_are_dropped_and_not_counted() -> None:
    scheduler = make()
    one = sequence(0, 6)
    scheduler.add(one)
    first, second = given(scheduler), given(scheduler)
    book(scheduler, first, (5,))
    scheduler.finish(one)
    book(scheduler, second, (4,))
    assert one.token_ids[6:] == [5]
    assert one.num_computed == 6


def test_pages_stay_in_quarantine_until_their_last_step() -> None:
    scheduler = make()
    one, other = sequence(0, 9), sequence(1, 2)
    scheduler.add(one)
    first, second = given(scheduler), given(scheduler)
    scheduler.add(other)
    third = given(scheduler)
    book(scheduler, first)
    scheduler.finish(one)
    scheduler.finish(one)
    scheduler.check()
    held = 16 - scheduler.pool.num_available
    assert held == 4, "three of the one, one of the other"
    assert (one.tables, one.slot, one.state) == ([[]], -1, SequenceState.FINISHED)
    assert scheduler.kv_usage == 4 / 16
    assert scheduler.pages_by_group() == {"whole context": 4}
    book(scheduler, second)
    assert 16 - scheduler.pool.num_available == held, "the third writes them too"
    book(scheduler, third)
    assert 16 - scheduler.pool.num_available == 1
    assert num_cached(scheduler) == 2, "full pages of what was known can be found again"


def test_finished_sequence_frees_pages_after_its_own_last_step() -> None:
    scheduler = make(max_tokens_a_step=8)
    one, long = sequence(0, 4, max_tokens=1), sequence(1, 20)
    scheduler.add(one)
    scheduler.add(long)
    first, second = given(scheduler), given(scheduler)
    assert [len(step.scheduled) for step in (first, second)] == [2, 1]
    scheduler.finish(one)
    available = scheduler.pool.num_available
    book(scheduler, first)
    assert scheduler.pool.num_available == available + 1
    book(scheduler, second)


def test_slot_is_reused_once_no_step_in_flight_writes_it() -> None:
    scheduler = make(max_num_seqs=1)
    one, two = sequence(0, 4), sequence(1, 4)
    scheduler.add(one)
    first, second = given(scheduler), given(scheduler)
    scheduler.add(two)
    book(scheduler, first)
    scheduler.finish(one)
    assert scheduler.schedule() is None, "there is a page, and no slot"
    book(scheduler, second)
    third = given(scheduler)
    assert shape(third) == [(1, 0, 4)]
    assert (third.step.number, third.step.released) == (3, (0,))
    assert [(admitted.slot, admitted.sequence_id) for admitted in third.step.admitted] == [(0, 1)]


def test_scheduler_no_preemption_while_steps_are_in_flight() -> None:
    scheduler = make(num_pages=4, page_tokens=2, max_model_len=8, caching=False)
    old, young = sequence(0, 2, max_tokens=6), sequence(1, 2, max_tokens=6)
    scheduler.add(old)
    scheduler.add(young)
    first = given(scheduler)
    second = given(scheduler)
    third = given(scheduler)
    assert shape(third) == [(0, 3, 1), (1, 3, 1)]
    assert scheduler.schedule() is None, "a sequence in flight would have to be preempted"
    scheduler.check()
    book(scheduler, first)
    assert scheduler.schedule() is None
    book(scheduler, second)
    book(scheduler, third)
    fourth = given(scheduler)
    assert shape(fourth) == [(0, 4, 1)]
    assert (young.num_preemptions, young.slot, young.num_scheduled, young.num_coming) == (1, -1, 0, 0)
    assert fourth.step.released == (1,)
    book(scheduler, fourth)
    scheduler.finish(old)
    again = given(scheduler)
    (admitted,) = again.step.admitted
    assert admitted.token_ids == tuple(young.token_ids), "with what it had put out"
    assert (admitted.num_prompt_tokens, len(admitted.token_ids), again.step.released) == (2, 5, (0,))


def test_sequence_waits_for_pages_in_quarantine() -> None:
    scheduler = make(num_pages=8, caching=False)
    leaver, stayer, late = sequence(0, 12), sequence(1, 2, max_tokens=12), sequence(2, 12, max_tokens=2)
    scheduler.add(leaver)
    scheduler.add(stayer)
    first, second = given(scheduler), given(scheduler)
    scheduler.finish(leaver)
    scheduler.add(late)
    third = given(scheduler)
    assert shape(third) == [(1, 3, 1)]
    for step in (first, second):
        book(scheduler, step)
    assert shape(given(scheduler)) == [(1, 4, 1), (2, 0, 12)]


def test_steps_are_numbered_without_gaps() -> None:
    scheduler = make()
    assert given(scheduler).step == NO_STEP
    one = sequence(0, 2, max_tokens=2)
    scheduler.add(one)
    first, second = given(scheduler), given(scheduler)
    empty = given(scheduler)
    assert ([step.step.number for step in (first, second)], empty.step) == ([1, 2], NO_STEP)
    book(scheduler, first)
    book(scheduler, second)
    scheduler.finish(one)
    assert given(scheduler).step == NO_STEP, "its release waits for a step that runs a sequence"
    scheduler.add(sequence(1, 2))
    third = given(scheduler).step
    assert (third.number, third.released, [admitted.slot for admitted in third.admitted]) == (3, (0,), [0])


def test_step_sends_admission_once_and_pages_as_they_grow() -> None:
    scheduler = make()
    one = replace(sequence(5, 7, bad_word_ids=((1, 2),)), seed=99)
    scheduler.add(one)
    steps: list[Step] = [given(scheduler).step for _ in range(3)]
    (admitted,) = steps[0].admitted
    assert (admitted.sequence_id, admitted.token_ids, admitted.num_prompt_tokens) == (5, tuple(one.token_ids), 7)
    assert (admitted.params, admitted.seed, admitted.bad_word_ids) == (one.params, 99, ((1, 2),))
    assert [step.admitted for step in steps[1:]] == [(), ()]
    (pages,) = one.tables
    reported = [step.items[0].pages for step in steps]
    assert reported == [((pages[0], pages[1]),), (), ((pages[2],),)]
    assert steps[1].items[0].samples is True


def test_first_step_sends_cached_pages_and_holes() -> None:
    scheduler = with_groups(WHOLE, WINDOW)
    prompt = list(range(24))
    scheduler.add(sequence(0, prompt, max_tokens=1))
    run(scheduler)
    run(scheduler)
    again = sequence(1, [*prompt, 1, 2], max_tokens=1)
    scheduler.add(again)
    (item,) = given(scheduler).step.items
    assert item.start == 24
    assert item.pages == (tuple(again.tables[0]), tuple(again.tables[1]))
    assert item.pages[1][:4] == (HOLE,) * 4


def test_window_keeps_pages_that_steps_in_flight_see() -> None:
    scheduler = with_groups(WINDOW, budget=8)
    one = sequence(0, 20, max_tokens=20)
    scheduler.add(one)
    first = given(scheduler)
    assert shape(first) == [(0, 0, 8)]
    assert given(scheduler).scheduled == (), "its pages are sized for a step"
    book(scheduler, first)
    second = given(scheduler)
    book(scheduler, second)
    steps = [given(scheduler) for _ in range(4)]
    assert [shape(step) for step in steps] == [[(0, 16, 4)], [(0, 20, 1)], [(0, 21, 1)], [(0, 22, 1)]]
    held = one.tables[0].count(HOLE)
    assert held == WINDOW.first_page(16)
    book(scheduler, steps[0])
    assert one.tables[0].count(HOLE) == WINDOW.first_page(20)
    for step in steps[1:]:
        book(scheduler, step)
    assert one.tables[0].count(HOLE) == WINDOW.first_page(23)


def test_prefix_hit_is_found_before_step_is_booked() -> None:
    scheduler = make()
    prompt = list(range(9))
    scheduler.add(sequence(0, prompt))
    first = given(scheduler)
    scheduler.add(sequence(1, prompt, max_tokens=1))
    assert (1, 8, 1) in shape(given(scheduler)), "the device runs steps in order"
    book(scheduler, first)
    scheduler.add(sequence(2, prompt, max_tokens=1))
    assert (2, 8, 1) in shape(given(scheduler))


def test_forgotten_steps_are_scheduled_again() -> None:
    scheduler = make(max_tokens_a_step=8)
    one, gone = sequence(0, 6), sequence(1, 6)
    scheduler.add(one)
    scheduler.add(gone)
    first, second, third = (given(scheduler) for _ in range(3))
    book(scheduler, first)
    scheduler.finish(gone)
    scheduler.forget_steps()
    scheduler.check()
    assert scheduler.num_in_flight == 0
    assert (one.num_scheduled, one.num_coming) == (6, 0)
    with pytest.raises(AssertionError, match="oldest step in flight"):
        scheduler.complete(second, [(7,)] * len(second.scheduled))
    again = given(scheduler)
    assert shape(again) == [(0, 6, 1)]
    assert again.step == Step(4, released=(1,), items=again.step.items)
    assert again.step.items[0].pages == (), "the second step sent them"
    assert third.step.number == 3


def test_state_restarts_after_forgotten_steps() -> None:
    scheduler = with_groups(WHOLE, STATE)
    one, idle = sequence(0, 30, max_tokens=3), sequence(1, 4, max_tokens=3)
    scheduler.add(one)
    book(scheduler, given(scheduler))
    given(scheduler)
    scheduler.add(idle)
    given(scheduler)
    scheduler.forget_steps()
    scheduler.check()
    assert (one.num_computed, one.num_scheduled, any(one.tables[0])) == (0, 0, False)
    step = given(scheduler)
    assert shape(step) == [(0, 0, 16)]
    assert step.step.released == (0, 1), "the state of either may have been moved on"
    assert [(admitted.slot, admitted.sequence_id) for admitted in step.step.admitted] == [(0, 0)]
    assert step.step.items[0].pages == tuple(tuple(table) for table in one.tables)
    scheduler.finish(idle)
    scheduler.add(sequence(2, 2))
    later = given(scheduler)
    assert later.step.released == (), "the slot was free already"
    assert [admitted.slot for admitted in later.step.admitted] == [1]


def test_forgetting_nothing_changes_nothing() -> None:
    scheduler = with_groups(WHOLE, STATE)
    one = sequence(0, 6)
    scheduler.add(one)
    book(scheduler, given(scheduler))
    tables = [list(table) for table in one.tables]
    scheduler.forget_steps()
    assert one.tables == tables
    assert given(scheduler).step.released == ()


@for_each(
    "chosen, words",
    [
        ([(7, 7)], "got 2 tokens and had no guesses"),
        ([(), ()], "2 results for 1 sequences"),
    ],
)
def test_results_that_cannot_be_are_an_error(chosen: list[tuple[int, ...]], words: str) -> None:
    scheduler = make()
    scheduler.add(sequence(0, 4))
    step = given(scheduler)
    with pytest.raises(AssertionError, match=words):
        scheduler.complete(step, chosen)


def test_complete_missing_token_of_running_sequence_raises() -> None:
    scheduler = make()
    scheduler.add(sequence(0, 4))
    first, second = given(scheduler), given(scheduler)
    scheduler.complete(first, [()])
    with pytest.raises(AssertionError, match="goes on at 4 without the token that it did not get"):
        scheduler.complete(second, [(7,)])


def guessing(**options) -> tuple[Scheduler, Sequence]:
    """A scheduler with rows for guesses, and a sequence that has its first token."""
    rows = options.pop("rows", 20)
    scheduler = make(**options)
    limits = replace(scheduler.limits, max_sampled_rows=rows)
    scheduler = Scheduler(limits, scheduler.pool.num_pages, True, 100, prefix_root=b"root")
    one = sequence(0, 6, max_tokens=20)
    one.may_speculate = True
    scheduler.add(one)
    book(scheduler, given(scheduler))
    return scheduler, one


def four(sequence: Sequence) -> list[int]:
    return [1, 2, 3, 4]


@for_each("chosen, num_computed", [((9,), 7), ((1, 9), 8), ((1, 2, 9), 9), ((1, 2, 3, 4, 9), 11), ((), 7)])
def test_rejected_drafts_are_not_computed(chosen, num_computed: int) -> None:
    scheduler, one = guessing()
    step = given(scheduler, four)
    (item,) = step.scheduled
    assert (item.start, item.num_new_tokens, item.num_tokens, item.samples) == (6, 5, 7, True)
    assert item.proposals == step.step.items[0].proposals == (1, 2, 3, 4)
    assert given(scheduler, four).scheduled == given(scheduler).scheduled == (), "what follows is not known"
    book(scheduler, step, chosen)
    assert (one.num_computed, one.num_scheduled, one.num_coming) == (num_computed, num_computed, 0)
    assert one.token_ids[7:] == list(chosen)
    if chosen:
        assert shape(given(scheduler)) == [(0, num_computed, 1)]


def test_complete_refuses_tokens_not_proposed() -> None:
    scheduler, _ = guessing()
    step = given(scheduler, four)
    with pytest.raises(AssertionError, match="accepts other guesses"):
        scheduler.complete(step, [(2, 9)])


def test_speculating_sequence_waits_for_its_token() -> None:
    scheduler, one = guessing()
    scheduler.add(sequence(1, 4))
    first = given(scheduler, lambda sequence: [])
    assert shape(first) == [(0, 6, 1), (1, 0, 4)]
    second = given(scheduler, four)
    assert shape(second) == [(1, 4, 1)]
    assert shape(given(scheduler)) == [(0, 7, 1), (1, 5, 1)], "without a proposer none waits"
    book(scheduler, first)
    assert one.num_coming == 1


@for_each(
    "options, num_guesses",
    [
        ({}, 4),
        ({"rows": 8}, 4),
        ({"rows": 3, "max_num_seqs": 1}, 2),
        ({"rows": 1, "max_num_seqs": 1}, 0),
        ({"max_tokens_a_step": 6}, 4),
        ({"max_model_len": 9}, 2),
        ({"max_model_len": 7}, 0),
    ],
)
def test_proposals_are_bounded_by_every_limit(options: dict, num_guesses: int) -> None:
    scheduler, _ = guessing(**options)
    step = given(scheduler, four)
    assert [len(item.proposals) for item in step.scheduled] == [num_guesses]
    assert step.num_tokens == 1 + num_guesses


def test_never_more_is_proposed_than_can_still_be_used() -> None:
    scheduler = make()
    scheduler = Scheduler(replace(scheduler.limits, max_sampled_rows=20), 16, True, 100)
    one = sequence(0, 6, max_tokens=4)
    one.may_speculate = True
    scheduler.add(one)
    book(scheduler, given(scheduler))
    step = given(scheduler, four)
    assert step.scheduled[0].proposals == (1, 2), "two and one more are all that it may have"
    book(scheduler, step, (1, 2, 9))
    assert given(scheduler, four).scheduled == ()


def test_drafts_leave_token_and_row_for_each_sequence() -> None:
    scheduler, _ = guessing(max_tokens_a_step=6, rows=9)
    for number in range(1, 4):
        scheduler.add(sequence(number, 1))
    book(scheduler, given(scheduler))
    step = given(scheduler, four)
    assert shape(step) == [(0, 7, 3), (1, 1, 1), (2, 1, 1), (3, 1, 1)]
    scheduler.add(sequence(4, 1))
    book(scheduler, step, (9,), (9,), (9,), (9,))
    assert sum(1 + len(item.proposals) for item in given(scheduler, four).scheduled) <= 6


def test_guesses_take_no_page_that_others_claim() -> None:
    scheduler, one = guessing(num_pages=8)
    other = sequence(1, 17, max_tokens=4)
    scheduler.add(other)
    book(scheduler, given(scheduler))
    assert scheduler.pool.num_available == 1
    assert len(one.tables[0]) == 2
    step = given(scheduler, four)
    assert step.scheduled[0].proposals == (), "its own last place is full, and the page is claimed"
    assert [item.start for item in step.scheduled] == [7, 17]


def test_states_exclude_drafts() -> None:
    scheduler = with_groups(WHOLE, STATE)
    one = sequence(0, 6)
    one.may_speculate = True
    scheduler.add(one)
    book(scheduler, given(scheduler))
    assert given(scheduler, four).scheduled[0].proposals == ()


def test_guesses_count_as_far_ahead_as_a_window_may_be_run() -> None:
    limits = Limits(8, max_num_batched_tokens=3, max_model_len=64, page_tokens=4, max_sampled_rows=20)
    scheduler = Scheduler(limits, 32, True, 100, groups=(WINDOW,))
    old, one = sequence(0, 1), sequence(1, 3)
    one.may_speculate = True
    scheduler.add(old)
    given(scheduler)
    scheduler.add(one)
    chunk = given(scheduler)
    assert shape(chunk) == [(0, 1, 1), (1, 0, 2)]
    rest = given(scheduler, four)
    assert shape(rest) == [(0, 2, 1), (1, 2, 1)], "two of its tokens are in flight, and a step has three"
    assert rest.scheduled[1].proposals == ()


def test_drafts_go_to_speculating_sequences_alone() -> None:
    scheduler, _ = guessing()
    scheduler.add(sequence(1, 4))
    book(scheduler, given(scheduler))
    wanted = []
    step = given(scheduler, lambda sequence: wanted.append(sequence.sequence_id) or [5])
    assert wanted == [0]
    assert [item.proposals for item in step.scheduled] == [(5,), ()]


@for_each(
    "damage, words",
    [
        (lambda scheduler, one: setattr(one, "slot", 3), "slots .* are free"),
        (lambda scheduler, one: setattr(one, "num_coming", 5), "num_coming=5, in flight are 2 tokens"),
        (lambda scheduler, one: setattr(one, "num_scheduled", 6), "num_scheduled=6"),
        (lambda scheduler, one: scheduler.in_flight.popleft(), "steps .* are in flight|from .* on, after"),
        (lambda scheduler, one: scheduler._quarantine.clear(), "slots .* are free"),
        (lambda scheduler, one: scheduler._tracks[0].num_sent.__setitem__(0, 9), "sent are"),
        (lambda scheduler, one: scheduler._slots.put(5), "slots .* are free"),
    ],
)
def test_check_notices_damage(damage, words: str) -> None:
    scheduler = make()
    one, gone = sequence(0, 4), sequence(1, 4)
    scheduler.add(one)
    scheduler.add(gone)
    given(scheduler)
    given(scheduler)
    scheduler.finish(gone)
    scheduler.check()
    damage(scheduler, one)
    with pytest.raises(AssertionError, match=words):
        scheduler.check()

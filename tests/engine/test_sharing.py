"""Sharing within and across steps: equal prompts fork, equal beginnings share, leaders are awaited, and what must not share does not."""

import pytest

from engine.scheduling import PARAMS, has_work, make, run, sequence, shape
from engine.sharing_mutants import SHARING_MUTANTS
from engine.simulated_world import World
from engine.simulation import Simulation
from for_each import for_each
from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.errors import MessageError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, Sequence, SequenceState
from holdfast.request.step import Admitted, Step, StepItem
from holdfast.runner.slots import Slots

WHOLE, WINDOW = CacheGroup("whole context", 4), CacheGroup("window of 5", 4, window=5)
STATE = CacheGroup("state", 0, state_pages=2, state_period=0)
ENTRIES = CacheGroup("entries of 4", 8, tokens_per_row=4, tokens_again=4)
PROMPT = [*range(10)]


def with_groups(*groups: CacheGroup, num_pages: int = 64, budget: int = 64, **options) -> Scheduler:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=128, page_tokens=4)
    return Scheduler(limits, num_pages, True, 100, groups=groups, prefix_root=b"root", **options)


def added(scheduler: Scheduler, *prompts: list[int], first: int = 0, **options) -> list[Sequence]:
    """One sequence for each prompt."""
    new = [sequence(first + number, prompt, **options) for number, prompt in enumerate(prompts)]
    for one in new:
        scheduler.add(one)
    return new


def given(scheduler: Scheduler) -> LiveStep:
    step = scheduler.schedule()
    scheduler.check()
    assert step is not None
    return step


def book(scheduler: Scheduler, step: LiveStep) -> None:
    scheduler.complete(step, [(7,) if item.samples else () for item in step.scheduled])
    scheduler.check()


def sources(step: LiveStep) -> dict[int, int]:
    """Each fork's number, and its source's."""
    return {item.sequence.sequence_id: item.source.sequence_id for item in step.scheduled if item.source is not None}


def finish_all(scheduler: Scheduler, limit: int = 300) -> None:
    for _ in range(limit):
        if not has_work(scheduler):
            break
        run(scheduler)
    assert not has_work(scheduler)
    assert scheduler.pool.num_available == scheduler.pool.num_pages


def test_equal_prompts_in_one_step_take_one_prompt() -> None:
    scheduler = make(num_pages=256, max_tokens_a_step=1024, max_model_len=1024, page_tokens=16)
    together = added(scheduler, *[[*range(1000)]] * 4)
    step = given(scheduler)
    assert step.num_tokens == step.step.num_tokens == 1000
    assert sources(step) == {1: 0, 2: 0, 3: 0}
    assert 256 - scheduler.pool.num_available <= 80
    assert [one.num_cached_tokens for one in together] == [0, 999, 999, 999]
    assert [one.fork_of for one in step.step.admitted] == [-1, 0, 0, 0]
    assert [one.num_stored for one in step.step.admitted] == [0, 992, 992, 992]
    assert len({one.tables[0][-1] for one in together}) == 4, "each writes its next token to a page of its own"
    book(scheduler, step)
    assert all(one.num_output_tokens == 1 for one in together)
    finish_all(scheduler)


def test_equal_beginnings_in_one_step_take_one_beginning() -> None:
    scheduler = make()
    first, second = added(scheduler, PROMPT, [*PROMPT[:9], 99, 98])
    step = given(scheduler)
    assert shape(step) == [(0, 0, 10), (1, 8, 3)]
    assert not sources(step)
    assert first.tables[0][:2] == second.tables[0][:2]
    book(scheduler, step)
    finish_all(scheduler)


def test_equal_prompts_longer_than_a_step_fork_at_the_end() -> None:
    scheduler = make(max_tokens_a_step=4)
    added(scheduler, PROMPT, PROMPT)
    steps = [run(scheduler) for _ in range(3)]
    assert [shape(step) for step in steps] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2), (1, 9, 1)]]
    assert sources(steps[2]) == {1: 0}
    finish_all(scheduler)


def test_equal_prompts_fork_when_no_row_is_left() -> None:
    scheduler = make(max_tokens_a_step=10)
    added(scheduler, PROMPT, PROMPT, [*PROMPT[:8], 50])
    step = given(scheduler)
    assert shape(step) == [(0, 0, 10), (1, 9, 1)], "the third needs a row"
    assert step.num_tokens == 10
    book(scheduler, step)
    finish_all(scheduler)


@for_each("max_tokens", [1, 5])
@for_each("length", [1, 3, 4, 5, 8, 9])
def test_forks_of_prompts_of_any_length_finish(length: int, max_tokens: int) -> None:
    scheduler = make()
    together = added(scheduler, *[[*range(length)]] * 3, max_tokens=max_tokens)
    step = run(scheduler)
    if (length - 1) % 4:
        assert sources(step) == {1: 0, 2: 0}
        assert [one.fork_of for one in step.step.admitted] == [-1, 0, 0]
        assert {one.num_stored for one in step.step.admitted[1:]} == {(length - 1) // 4 * 4}
    else:
        assert shape(step)[1:] == [(1, length - 1, 1), (2, length - 1, 1)], "one row is left: nothing to copy"
        assert not sources(step)
    finish_all(scheduler)
    assert all(one.num_output_tokens == max_tokens for one in together)


def test_forks_of_more_sequences_than_slots_come_later() -> None:
    scheduler = make(max_num_seqs=2)
    added(scheduler, *[PROMPT] * 5, max_tokens=2)
    steps = []
    while has_work(scheduler):
        steps.append(run(scheduler))
    assert sources(steps[0]) == {1: 0}
    assert sum(step.num_tokens for step in steps) == 10 + 2 + 2 + 5, "pairs fork; later ones start on a hit"
    assert shape(steps[2]) == [(2, 8, 2), (3, 9, 1)]


@for_each("change", ["salt", "opt-out", "no caching"])
def test_sequences_that_must_not_share_do_not(change: str) -> None:
    scheduler = make(caching=change != "no caching")
    options = {"salt": {"cache_salt": b"b"}, "opt-out": {"use_prefix_cache": False}, "no caching": {}}[change]
    first, *_ = added(scheduler, PROMPT)
    (second,) = added(scheduler, PROMPT, first=1, **options)
    step = given(scheduler)
    assert shape(step) == [(0, 0, 10), (1, 0, 10)]
    assert not sources(step)
    assert set(first.tables[0]).isdisjoint(second.tables[0])
    assert second.num_cached_tokens == 0


@for_each("change", [{"cache_salt": b"b"}, {"use_prefix_cache": False}])
def test_sequences_that_must_not_share_do_not_wait(change: dict) -> None:
    scheduler, (leader,) = held_up_leader()
    (other,) = added(scheduler, leader.token_ids[:20], first=1, **change)
    step = given(scheduler)
    assert [number for number, _, _ in shape(step)] == [1]
    assert other.num_computed == 0


def held_up_leader(**options) -> tuple[Scheduler, list[Sequence]]:
    """A leader amid its prompt of 40 tokens with all the steps in flight that its window allows; the budget is not the reason."""
    scheduler = with_groups(WINDOW, budget=24)
    leaders = added(scheduler, [*range(40)], **options)
    step = given(scheduler)
    assert shape(step) == [(0, 0, 24)]
    return scheduler, leaders


def test_equal_prompt_waits_for_a_leader_held_up_by_its_steps() -> None:
    scheduler, (_leader,) = held_up_leader()
    added(scheduler, [*range(40)], first=1)
    assert not given(scheduler).scheduled, "it would compute what the leader is about to"
    book(scheduler, scheduler.in_flight[0])
    step = given(scheduler)
    assert shape(step) == [(0, 24, 16), (1, 39, 1)]
    assert sources(step) == {1: 0}
    book(scheduler, step)
    finish_all(scheduler)


@for_each("how", ["priority", "reset", "abort"])
def test_equal_prompt_does_not_wait_for_a_leader(how: str) -> None:
    scheduler, (leader,) = held_up_leader()
    other = sequence(1, [*range(40)])
    if how == "priority":
        other.params = SamplingParams(priority=-1)
    elif how == "reset":
        scheduler.reset_prefix_cache()
    else:
        scheduler.finish(leader)
    scheduler.add(other)
    step = given(scheduler)
    # Without a reset it starts on what the leader computes, after the last whole block.
    assert shape(step) == [(1, 0, 24) if how == "reset" else (1, 24, 16)]
    while scheduler.num_in_flight:
        book(scheduler, scheduler.in_flight[0])
    finish_all(scheduler)


def test_abort_of_a_leader_before_its_step_leaves_no_trace() -> None:
    scheduler = make()
    first, second = added(scheduler, PROMPT, PROMPT)
    scheduler.finish(first)
    assert shape(run(scheduler)) == [(1, 0, 10)]
    assert second.num_cached_tokens == 0
    finish_all(scheduler)


@for_each("late", [False, True])
def test_abort_of_a_leader_leaves_its_forks_running(late: bool) -> None:
    scheduler = make()
    first, second = added(scheduler, PROMPT, PROMPT)
    step = given(scheduler)
    if late:
        book(scheduler, step)
    scheduler.finish(first)
    scheduler.check()
    if not late:
        book(scheduler, step)
    assert second.num_output_tokens == 1
    assert shape(run(scheduler)) == [(1, 10, 1)]
    finish_all(scheduler)


def test_abort_of_a_fork_in_flight_keeps_its_pages_until_booked() -> None:
    scheduler = make()
    _, fork = added(scheduler, PROMPT, PROMPT)
    step = given(scheduler)
    own = fork.tables[0][-1]
    scheduler.finish(fork)
    assert scheduler.pool.num_owners(own) == 1, "the step still copies to it"
    book(scheduler, step)
    assert scheduler.pool.num_owners(own) == 0
    finish_all(scheduler)


def test_chunked_leader_that_is_aborted_leaves_its_blocks() -> None:
    scheduler = make(max_tokens_a_step=8)
    first, second = added(scheduler, [*range(20)], [*range(20)])
    step = given(scheduler)
    assert shape(step) == [(0, 0, 8)]
    scheduler.finish(first)
    book(scheduler, step)
    assert shape(run(scheduler)) == [(1, 8, 8)], "on from the last whole block"
    assert second.num_cached_tokens == 8
    finish_all(scheduler)


def test_leader_without_a_token_leaves_its_forks_running() -> None:
    scheduler = make()
    first, _second = added(scheduler, PROMPT, PROMPT)
    step = given(scheduler)
    scheduler.complete(step, [(), (7,)])
    scheduler.finish(first)
    scheduler.check()
    assert shape(run(scheduler)) == [(1, 10, 1)]
    finish_all(scheduler)


def test_preempted_fork_is_admitted_with_its_outputs() -> None:
    scheduler = make(num_pages=6, page_tokens=2, max_model_len=12)
    together = added(scheduler, [1, 2, 3], [1, 2, 3], max_tokens=8)
    while scheduler.num_preemptions == 0:
        run(scheduler)
    assert together[1].state is SequenceState.WAITING
    finish_all(scheduler)
    assert [one.num_output_tokens for one in together] == [8, 8]


def test_reset_stops_forks_from_a_leader_that_ran_before() -> None:
    scheduler = make(max_tokens_a_step=6)
    added(scheduler, PROMPT, PROMPT)
    run(scheduler)
    scheduler.reset_prefix_cache()
    step = given(scheduler)
    assert shape(step) == [(0, 6, 4), (1, 0, 2)]
    assert not sources(step)


def test_dropped_step_restarts_forks_and_forgets_blocks() -> None:
    scheduler = make()
    leader, fork, late = added(scheduler, PROMPT, PROMPT, [*PROMPT[:8], 50])
    given(scheduler)
    assert scheduler.prefix.pending
    scheduler.forget_steps()
    scheduler.check()
    assert not scheduler.prefix.pending
    assert len(scheduler.prefix) == 0
    assert [one.num_computed for one in (leader, fork, late)] == [0, 0, 0]
    assert [one.tables[0] for one in (fork, late)] == [[], []]
    step = given(scheduler)
    assert set(step.step.released) == {1, 2}
    assert shape(step) == [(0, 0, 10), (1, 0, 10), (2, 0, 9)], "those that run are not admitted again"
    book(scheduler, step)
    finish_all(scheduler)


def test_dropped_step_keeps_what_earlier_steps_computed() -> None:
    scheduler = make()
    added(scheduler, PROMPT)
    first = given(scheduler)
    (late,) = added(scheduler, [*PROMPT[:8], 50], first=1)
    assert shape(given(scheduler)) == [(0, 10, 1), (1, 8, 1)]
    book(scheduler, first)
    scheduler.forget_steps()
    scheduler.check()
    assert late.num_computed == 8, "the step that computed its blocks is booked"
    assert shape(run(scheduler)) == [(0, 10, 1), (1, 8, 1)]
    finish_all(scheduler)


def test_pending_pages_settle_with_their_step() -> None:
    scheduler = make()
    added(scheduler, PROMPT)
    step = given(scheduler)
    assert set(scheduler.prefix.pending.values()) == {1}
    book(scheduler, step)
    assert not scheduler.prefix.pending


@for_each(
    "groups", [(WHOLE, WINDOW), (WINDOW,), (WHOLE, STATE), (WINDOW, ENTRIES), (CacheGroup("large pages", 16), WINDOW)]
)
@for_each("length", [3, 8, 18, 30])
def test_forks_hold_what_each_cache_group_sees(groups: tuple[CacheGroup, ...], length: int) -> None:
    scheduler = with_groups(*groups)
    leader, fork = added(scheduler, *[[*range(length)]] * 2, max_tokens=20)
    step = given(scheduler)
    assert sources(step) == {1: 0}
    for group, table, other in zip(groups, fork.tables, leader.tables, strict=True):
        first = group.first_page(length - 1)
        assert table[:first] == [HOLE] * first
        assert HOLE not in table[first:]
        assert group.is_state or len(table) == len(other)
        shared = set(table) & set(other)
        num_stored = fork.num_stored // group.page_tokens if group.page_tokens else 0
        assert shared <= set(other[:num_stored]), "what follows the shared blocks is the fork's own"
    book(scheduler, step)
    finish_all(scheduler)


def test_beginnings_of_states_that_never_restart_are_not_shared() -> None:
    scheduler = with_groups(WHOLE, STATE)
    added(scheduler, PROMPT, [*PROMPT[:8], 50])
    assert shape(given(scheduler)) == [(0, 0, 10), (1, 0, 9)]


def test_pipeline_forks_within_a_stage() -> None:
    scheduler = with_groups(WHOLE, num_stages=2)
    added(scheduler, *[PROMPT] * 4)
    steps = [given(scheduler) for _ in range(2)]
    assert [shape(step) for step in steps] == [[(0, 0, 10), (1, 9, 1)], [(2, 8, 2), (3, 9, 1)]]
    assert [sources(step) for step in steps] == [{1: 0}, {3: 2}]
    for step in steps:
        book(scheduler, step)
    finish_all(scheduler)


def test_invariant_scheduler_forks_prompts_but_not_outputs() -> None:
    scheduler = with_groups(WHOLE, is_invariant=True)
    added(scheduler, PROMPT, PROMPT, [*PROMPT, 7])
    step = given(scheduler)
    assert shape(step) == [(0, 0, 10), (1, 9, 1), (2, 8, 3)]
    book(scheduler, step)
    assert not sources(run(scheduler))
    finish_all(scheduler)


def test_decode_row_is_not_forked_from() -> None:
    scheduler = make()
    added(scheduler, PROMPT)
    run(scheduler)
    added(scheduler, [*PROMPT, 7], PROMPT, first=1)
    step = given(scheduler)
    assert shape(step) == [(0, 10, 1), (1, 8, 3), (2, 8, 2)]
    assert not sources(step), "a prompt ends in its last row, an output does not"


BUGGED_SEEDS = (0, 3, 4, 13, 14, 24)
SEEN_BY_TESTS = {
    "forks_ignore_a_reset": test_reset_stops_forks_from_a_leader_that_ran_before,
    "pending_pages_are_never_settled": test_pending_pages_settle_with_their_step,
    "sequences_on_a_dropped_step_are_not_restarted": test_dropped_step_restarts_forks_and_forgets_blocks,
    "pages_of_a_fork_in_flight_are_released": test_abort_of_a_fork_in_flight_keeps_its_pages_until_booked,
}
"""Planted bugs that few events of a simulation show, and the test above that sees each."""


def run_worlds(first: int | None = None) -> None:
    for seed in sorted(BUGGED_SEEDS, key=lambda seed: seed != first):
        Simulation(seed, World.together(seed)).run(200)


@pytest.mark.parametrize("name", SHARING_MUTANTS)
def test_planted_bug_of_sharing_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = SHARING_MUTANTS[name]
    planted.plant(monkeypatch)
    with pytest.raises(AssertionError, match=planted.says):
        SEEN_BY_TESTS[name]() if name in SEEN_BY_TESTS else run_worlds(planted.first_seed)


def test_worlds_of_planted_bugs_pass_without_one() -> None:
    run_worlds()


LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=20, max_model_len=40, page_tokens=4)
TOKENS = tuple(range(6))


def admission(slot: int, fork_of: int = -1, token_ids: tuple[int, ...] = TOKENS) -> Admitted:
    return Admitted(slot, 10 + slot, token_ids, len(token_ids), PARAMS, 0, num_stored=0, fork_of=fork_of)


LEADER, FORK = StepItem(0, 0, 6, True, ((0, 1),)), StepItem(1, 5, 1, True, ((2, 3),))
GOOD = Step(1, (), (admission(0), admission(1, 0)), (LEADER, FORK))
BAD_FORKS = {
    "free slot": (GOOD._replace(admitted=(admission(0), admission(1, 3))), "which does not run before it"),
    "own slot": (GOOD._replace(admitted=(admission(0), admission(1, 1))), "which does not run before it"),
    "leader after it": (GOOD._replace(items=(FORK, LEADER)), "which does not run before it"),
    "leader not in the step": (GOOD._replace(items=(FORK,)), "which does not run before it"),
    "fork not in the step": (GOOD._replace(items=(LEADER,)), "which does not run before it"),
    "other prompt": (GOOD._replace(admitted=(admission(0), admission(1, 0, (*range(5), 9)))), "has another prompt"),
    "prompt not ended": (
        GOOD._replace(items=(LEADER._replace(num_new_tokens=5, samples=False), FORK)),
        "which does not end its prompt here",
    ),
    "two positions": (
        GOOD._replace(items=(LEADER, FORK._replace(start=4, num_new_tokens=2))),
        "which does not end its prompt here",
    ),
    "fork of a fork": (
        GOOD._replace(
            admitted=(admission(0), admission(1, 0), admission(2, 1)),
            items=(LEADER, FORK, StepItem(2, 5, 1, True, ((4, 5),))),
        ),
        "which does not run before it",
    ),
}


def test_slots_accept_a_fork_without_a_row() -> None:
    live = Slots(LIMITS, (WHOLE,), 50, 100).accept(GOOD)
    assert live.num_tokens == 6
    assert live.scheduled[1].source is live.scheduled[0].sequence


@for_each("name", BAD_FORKS)
def test_slots_refuse_a_bad_fork_and_change_nothing(name: str) -> None:
    slots = Slots(LIMITS, (WHOLE,), 50, 100)
    step, words = BAD_FORKS[name]
    with pytest.raises(MessageError, match=words):
        slots.accept(step)
    assert slots.accept(GOOD).num_tokens == 6

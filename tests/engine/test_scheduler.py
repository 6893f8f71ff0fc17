"""Scheduler: page needs and queues; order, budget, preemption and finishing; which pages are shared and which never."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast.cache.groups
import holdfast.cache.pages
import holdfast.cache.prefix
import holdfast.engine.page_needs
import holdfast.engine.queues
import holdfast.engine.scheduler
from counted_work import num_lines
from engine.scheduling import has_work, make, num_cached, run, sequence, shape
from error_codes import raises_code
from for_each import for_each
from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.engine.page_needs import PageNeeds
from holdfast.engine.queues import Queues, named
from holdfast.errors import QueueFullError, RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence, SequenceState
from holdfast.request.step import NO_STEP

WHOLE = (CacheGroup("whole context", 4),)
NEEDS = PageNeeds(Limits(8, 64, max_model_len=40, page_tokens=4), num_pages=8, groups=WHOLE)


def grown(num_prompt: int, max_tokens: int, num_outputs: int = 0, num_pages: int = 0) -> Sequence:
    tokens = [0] * (num_prompt + num_outputs)
    return Sequence(0, tokens, num_prompt, SamplingParams(), 0, max_tokens, tables=[list(range(num_pages))])


def claim(needs: PageNeeds, one: Sequence, longest: int) -> int:
    return needs.claim(one, one.tables, one.num_computed, longest, lambda page: False)


def test_missing_pages_at_page_edges() -> None:
    missing = [NEEDS.missing([[7]], tokens) for tokens in (0, 1, 3, 4, 5, 8, 9)]
    assert missing == [[-1], [0], [0], [0], [1], [1], [2]]


@for_each(
    "num_prompt, max_tokens, pages",
    [(1, 1, 1), (4, 1, 1), (4, 2, 2), (5, 4, 2), (5, 5, 3), (32, 1, 8), (1, 32, 8), (31, 2, 8)],
)
def test_max_pages_exclude_last_token(num_prompt: int, max_tokens: int, pages: int) -> None:
    assert NEEDS.max_pages(grown(num_prompt, max_tokens)) == pages


@for_each(
    "num_prompt, max_tokens, code",
    [
        (0, 5, "request.sequence_length"),
        (41, 1, "request.sequence_length"),
        (33, 1, "request.never_fits"),
        (1, 33, "request.never_fits"),
    ],
)
def test_sequence_that_never_fits_is_refused(num_prompt: int, max_tokens: int, code: str) -> None:
    with raises_code(code, RequestError) as caught:
        NEEDS.max_pages(grown(num_prompt, max_tokens))
    assert "\n" not in str(caught.value)


def test_max_pages_are_bounded_by_max_model_len() -> None:
    needs = PageNeeds(Limits(8, 64, max_model_len=16, page_tokens=4), num_pages=4, groups=WHOLE)
    assert needs.max_pages(grown(10, 1000)) == 4


def test_claim_has_one_extra_page_within_its_need() -> None:
    assert claim(NEEDS, grown(5, 20), longest=24) == 3
    assert claim(NEEDS, grown(5, 20, num_pages=2), longest=24) == 1
    assert claim(NEEDS, grown(5, 4), longest=8) == 2
    assert claim(NEEDS, grown(5, 4, num_pages=2), longest=8) == 0
    assert claim(NEEDS, grown(5, 20, num_outputs=4, num_pages=3), longest=24) == 1


def newcomer(number: int, params: SamplingParams | None = None) -> Sequence:
    return Sequence(number, [1, 2, 3], 3, params or SamplingParams(), 0, 4)


def filled(num_sequences: int) -> tuple[Queues, list[Sequence]]:
    queues = Queues()
    sequences = [newcomer(number) for number in range(num_sequences)]
    for one in sequences:
        queues.append(one)
    return queues, sequences


def test_admission_and_preemption_are_each_others_reverse() -> None:
    queues, sequences = filled(4)
    assert [queues.admit() for _ in range(3)] == sequences[:3]
    assert queues.running[-1] is sequences[2]
    assert queues.first_waiting is sequences[3]
    assert [queues.preempt() for _ in range(2)] == [sequences[2], sequences[1]]
    assert queues.running == sequences[:1]
    assert queues.waiting == sequences[1:]
    queues.check()


def test_queues_admit_preempt_and_remove_set_states() -> None:
    queues, (one, two) = filled(2)
    queues.admit()
    assert (one.state, two.state) == (SequenceState.RUNNING, SequenceState.WAITING)
    queues.preempt()
    assert one.state is SequenceState.WAITING
    queues.remove(one)
    queues.remove(one)
    assert one.state is SequenceState.FINISHED
    assert one not in queues
    assert (queues.num_waiting, queues.num_running) == (1, 0)


def test_queues_remove_accepts_unknown_sequence() -> None:
    queues, _ = filled(2)
    stranger = newcomer(77)
    queues.remove(stranger)
    assert stranger.state is SequenceState.FINISHED
    assert queues.num_waiting + queues.num_running == 2


@given(st.lists(st.sampled_from(["append", "admit", "preempt", "remove"]), max_size=60), st.randoms())
def test_running_before_waiting_is_always_sorted_by_arrival(moves: list[str], random) -> None:
    queues = Queues()
    arrived: list[Sequence] = []
    for move in moves:
        if move == "append":
            # Ids need not grow; arrival is what counts.
            arrived.append(newcomer(1000 - len(arrived) * 7 % 97 - 100 * (len(arrived) // 97)))
            queues.append(arrived[-1])
        elif move == "admit" and queues.num_waiting:
            queues.admit()
        elif move == "preempt" and queues.num_running:
            queues.preempt()
        elif move == "remove" and queues.num_waiting + queues.num_running:
            queues.remove(random.choice([*queues.running, *queues.waiting]))
        queues.check()
        assert [*queues.running, *queues.waiting] == [one for one in arrived if one in queues]


@given(st.lists(st.sampled_from(["append", "append", "admit", "preempt", "remove"]), max_size=60), st.randoms())
def test_queues_are_sorted_by_priority_and_arrival(moves: list[str], random) -> None:
    queues = Queues()
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    num_arrived = 0

    def rank(one: Sequence) -> tuple[int, int]:
        return one.params.priority, one.sequence_id

    for move in moves:
        if move == "append":
            waiting.append(newcomer(num_arrived, SamplingParams(priority=random.choice((-1, 0, 0, 5)))))
            queues.append(waiting[-1])
            num_arrived += 1
        elif move == "admit" and waiting:
            first = min(waiting, key=rank)
            assert queues.first_waiting is first
            assert queues.admit() is first
            waiting.remove(first)
            running.append(first)
        elif move == "preempt" and running:
            last = max(running, key=rank)
            assert queues.preempt() is last
            running.remove(last)
            waiting.append(last)
        elif move == "remove" and waiting + running:
            one = random.choice(waiting + running)
            queues.remove(one)
            (waiting if one in waiting else running).remove(one)
        queues.check()
        assert queues.running == sorted(running, key=rank)
        assert queues.waiting == sorted(waiting, key=rank)
        assert queues.waiting_up_to(2) == queues.waiting[:2]


@for_each("state", [SequenceState.RUNNING, SequenceState.FINISHED])
def test_queues_append_refuses_used_sequences(state: SequenceState) -> None:
    queues, (one,) = filled(1)
    with pytest.raises(AssertionError, match="sequence 0 is not new"):
        queues.append(one)
    used = newcomer(5)
    used.state = state
    with pytest.raises(AssertionError, match="sequence 5 is not new"):
        queues.append(used)
    assert (queues.num_waiting, queues.num_running) == (1, 0)


@for_each(
    "damage",
    [
        lambda queues: queues.waiting_lanes.lanes[0].move_to_end(2, last=False),
        lambda queues: queues.running_lanes.add(queues.first_waiting),
        lambda queues: setattr(queues.first_waiting, "state", SequenceState.FINISHED),
        lambda queues: setattr(queues.first_waiting, "sequence_id", 9),
        lambda queues: queues.arrivals.pop(2),
        lambda queues: queues.waiting_lanes.priorities.append(3),
        lambda queues: queues.waiting_lanes.lanes.update({1: queues.waiting_lanes.lanes.pop(0)}),
        lambda queues: setattr(queues.waiting_lanes, "num_sequences", 2),
    ],
)
def test_queues_check_notices_damage(damage) -> None:
    queues, _ = filled(4)
    queues.admit()
    queues.check()
    damage(queues)
    with pytest.raises(AssertionError):
        queues.check()


def test_messages_never_show_tokens() -> None:
    assert named(newcomer(12)) == "sequence 12"


def test_scheduler_without_work_gives_empty_step() -> None:
    scheduler = make()
    step = scheduler.schedule()
    assert step is not None
    assert step.scheduled == ()
    assert step.num_tokens == 0
    assert (step.step, scheduler.num_in_flight) == (NO_STEP, 0), "such a step is never launched"
    assert not has_work(scheduler)


def test_scheduler_prefills_then_decodes() -> None:
    scheduler = make()
    one = sequence(0, 6, max_tokens=3)
    scheduler.add(one)
    assert [shape(run(scheduler)) for _ in range(3)] == [[(0, 0, 6)], [(0, 6, 1)], [(0, 7, 1)]]
    assert one.token_ids[one.num_prompt_tokens :] == [7, 7, 7]
    assert one.state is SequenceState.FINISHED
    assert not has_work(scheduler)
    assert scheduler.pool.num_available == 16


def test_pages_are_taken_as_tokens_come() -> None:
    scheduler = make(max_tokens_a_step=3)
    one = sequence(0, 8, max_tokens=4)
    scheduler.add(one)
    held = []
    for _ in range(6):
        run(scheduler)
        held.append(len(one.tables[0]))
    assert held == [1, 2, 2, 3, 3, 0]


@for_each("chunk", [1, 2, 3, 4, 5, 7, 8, 9, 100])
def test_scheduler_any_chunk_size_computes_each_position_once(chunk: int) -> None:
    scheduler = make(max_tokens_a_step=chunk)
    one = sequence(0, 17, max_tokens=2)
    scheduler.add(one)
    positions = []
    while has_work(scheduler):
        for item in run(scheduler).scheduled:
            assert item.num_new_tokens <= chunk
            positions += range(item.start, item.start + item.num_new_tokens)
    assert positions == list(range(18))


def test_scheduler_shares_budget_in_arrival_order() -> None:
    scheduler = make(max_tokens_a_step=10)
    for number, length in enumerate((6, 6, 6)):
        scheduler.add(sequence(number, length))
    assert shape(run(scheduler)) == [(0, 0, 6), (1, 0, 4)]
    assert shape(run(scheduler)) == [(0, 6, 1), (1, 4, 2), (2, 0, 6)]
    assert shape(run(scheduler)) == [(0, 7, 1), (1, 6, 1), (2, 6, 1)]


def test_fewer_tokens_than_sequences_serves_the_oldest() -> None:
    scheduler = make(max_tokens_a_step=2)
    for number in range(4):
        scheduler.add(sequence(number, 1, max_tokens=3))
    order = []
    while has_work(scheduler):
        order.append([number for number, _, _ in shape(run(scheduler))])
    assert order == [[0, 1], [0, 1], [0, 1], [2, 3], [2, 3], [2, 3]]


def test_scheduler_keeps_max_num_seqs() -> None:
    scheduler = make(max_num_seqs=2)
    for number in range(5):
        scheduler.add(sequence(number, 2))
    assert len(run(scheduler).scheduled) == 2
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)


def test_scheduler_admits_none_past_blocked_sequence() -> None:
    scheduler = make(num_pages=8)
    scheduler.add(sequence(0, 16, max_tokens=2))
    scheduler.add(sequence(1, 20, max_tokens=2))
    scheduler.add(sequence(2, 1, max_tokens=1))
    assert shape(run(scheduler)) == [(0, 0, 16)]
    assert shape(run(scheduler)) == [(0, 16, 1)]
    assert shape(run(scheduler)) == [(1, 0, 20), (2, 0, 1)]


def test_scheduler_full_queue_raises() -> None:
    scheduler = make(max_queue=2)
    scheduler.add(sequence(0, 2))
    scheduler.add(sequence(1, 2))
    late = sequence(2, 2)
    with raises_code("request.queue_full", QueueFullError, count=1, waiting=2, maximum=2):
        scheduler.add(late)
    scheduler.check()
    run(scheduler)
    scheduler.add(late)
    assert scheduler.num_waiting == 1


@for_each("prompt", [[], list(range(65)), list(range(64))])
def test_impossible_sequence_is_refused_before_a_full_queue(prompt: list[int]) -> None:
    scheduler = make(num_pages=8, max_queue=1)
    scheduler.add(sequence(0, 2))
    with pytest.raises(RequestError) as caught:
        scheduler.add(sequence(1, prompt))
    assert not isinstance(caught.value, QueueFullError)
    scheduler.check()
    assert scheduler.num_waiting == 1


def test_positions_stay_below_max_model_len() -> None:
    scheduler = make(max_model_len=8)
    one = sequence(0, 8, max_tokens=1)
    scheduler.add(one)
    step = scheduler.schedule()
    scheduler.complete(step, [(7,)])
    assert one.num_tokens == 9
    assert scheduler.schedule().scheduled == (), "a ninth position does not exist; the caller has to finish it"


def test_preemption_takes_the_youngest_and_it_resumes_first() -> None:
    scheduler = make(num_pages=6, page_tokens=2, max_model_len=12)
    sequences = [sequence(number, 2, max_tokens=10) for number in range(3)]
    for one in sequences:
        scheduler.add(one)
    while scheduler.num_preemptions == 0:
        step = run(scheduler)
    victim = sequences[scheduler.num_running]
    assert victim.state is SequenceState.WAITING
    assert (victim.tables, victim.num_computed, victim.num_preemptions) == ([[]], 0, 1)
    assert victim not in [item.sequence for item in step.scheduled]
    tokens = list(victim.token_ids)
    late = sequence(9, 1)
    scheduler.add(late)
    while victim.state is SequenceState.WAITING:
        assert late.state is SequenceState.WAITING
        run(scheduler)
    assert victim.token_ids[: len(tokens)] == tokens, "what it had generated is kept"
    while has_work(scheduler):
        run(scheduler)
    assert all(one.num_output_tokens == one.max_tokens for one in (*sequences, late))


def test_several_victims_of_one_step_keep_their_order() -> None:
    scheduler = make(num_pages=8, page_tokens=1, max_model_len=8, caching=False)
    sequences = [sequence(number, 1, max_tokens=7) for number in range(4)]
    for one in sequences:
        scheduler.add(one)
    for _ in range(2):
        assert len(run(scheduler).scheduled) == 4
    assert scheduler.pool.num_available == 0
    assert shape(run(scheduler)) == [(0, 2, 1), (1, 2, 1)], "the fourth yields to the first, the third to none"
    assert scheduler.num_preemptions == 2
    assert scheduler.waiting == sequences[2:]
    while has_work(scheduler):
        run(scheduler)
    assert [one.num_output_tokens for one in sequences] == [7] * 4


def test_scheduler_no_preemption_for_page_after_admission() -> None:
    page_tokens = 4
    scheduler = make(num_pages=24, page_tokens=page_tokens, max_model_len=96, max_num_seqs=16, caching=False)
    steps_since_admission = None
    for number in range(40):
        scheduler.add(sequence(number, 1 + number % 5, max_tokens=40))
    while has_work(scheduler):
        num_running, num_preemptions = scheduler.num_running, scheduler.num_preemptions
        step = run(scheduler)
        if scheduler.num_preemptions > num_preemptions:
            assert steps_since_admission is None or steps_since_admission >= page_tokens
        if any(item.start == 0 for item in step.scheduled):
            steps_since_admission = 0
        elif steps_since_admission is not None:
            steps_since_admission += 1
        assert num_running <= 16
    assert scheduler.num_preemptions > 0


def test_scheduler_no_admission_in_preempting_step() -> None:
    scheduler = make(num_pages=6, page_tokens=2, max_model_len=12)
    for number in range(6):
        scheduler.add(sequence(number, 2, max_tokens=10))
    while has_work(scheduler):
        num_preemptions = scheduler.num_preemptions
        waiting = {one.sequence_id for one in scheduler.waiting}
        step = run(scheduler)
        if scheduler.num_preemptions > num_preemptions:
            assert not waiting & {number for number, _, _ in shape(step)}


def test_oldest_sequence_always_advances() -> None:
    scheduler = make(num_pages=8, page_tokens=2, max_model_len=16)
    old = sequence(0, 1, max_tokens=15)
    scheduler.add(old)
    for number in range(1, 6):
        scheduler.add(sequence(number, 1, max_tokens=12))
    for expected in range(1, 16):
        step = run(scheduler)
        assert step.scheduled[0].sequence is old
        assert old.num_output_tokens == expected
    steps = 0
    while has_work(scheduler):
        run(scheduler)
        steps += 1
    assert steps <= 5 * 16


def test_scheduler_sequences_have_consecutive_pages() -> None:
    scheduler = make(num_pages=256, max_model_len=128)
    sequences = [sequence(number, 8, max_tokens=90) for number in range(8)]
    for one in sequences:
        scheduler.add(one)
    for _ in range(80):
        run(scheduler)
    for one in sequences:
        (pages,) = one.tables
        assert pages == list(range(pages[0], pages[0] + len(pages)))


@for_each("caching", [True, False])
def test_scheduler_step_of_256_sequences_is_cheap_at_any_length(caching: bool) -> None:
    def lines(num_prompt: int) -> int:
        scheduler = make(60_000, 256, 65_536, 4096, page_tokens=16, max_queue=256, caching=caching)
        for number in range(256):
            scheduler.add(sequence(number, num_prompt, max_tokens=100))
        while (step := scheduler.schedule()).scheduled[-1].start == 0 or scheduler.num_waiting:
            scheduler.complete(step, [(7,) if item.samples else () for item in step.scheduled])
        scheduler.complete(step, [(7,)] * len(step.scheduled))

        def step() -> None:
            step = scheduler.schedule()
            scheduler.complete(step, [(7,)] * len(step.scheduled))

        return sorted(num_lines(step) for _ in range(16))[8]

    short, long = lines(8), lines(2000)
    # Measured: 0.6 ms. The bounds leave none for work in proportion to context.
    assert short < 256 * 100
    assert long < 2 * short


CORE = (
    holdfast.cache.groups,
    holdfast.cache.pages,
    holdfast.cache.prefix,
    holdfast.engine.page_needs,
    holdfast.engine.queues,
    holdfast.engine.scheduler,
)


@for_each("module", CORE)
def test_scheduler_modules_depend_on_calls_alone(module) -> None:
    """No clock, no chance, no torch, and no set whose order could decide anything outside check()."""
    assert module.__file__
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {str(node.module).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {
        "array",
        "bisect",
        "collections",
        "dataclasses",
        "hashlib",
        "heapq",
        "holdfast",
        "itertools",
        "math",
        "typing",
    }
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if function.name.lstrip("_").startswith("check"):
            continue
        for node in ast.walk(function):
            is_set = isinstance(node, ast.Set | ast.SetComp)
            is_set |= isinstance(node, ast.Name) and node.id in ("set", "frozenset", "id", "hash")
            assert not is_set, f"{module.__name__}:{function.name} line {getattr(node, 'lineno', 0)}"


@for_each("when", ["waiting", "running", "in flight", "preempted", "finished", "stranger"])
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
        scheduler.complete(step, [(7,), (7,)])
        scheduler.check()
        assert keeper.num_output_tokens == 1
    assert (one.state, any(one.tables), one.num_tokens) == (SequenceState.FINISHED, False, length)
    while has_work(scheduler):
        run(scheduler)
    assert scheduler.pool.num_available == 6


def test_blocked_sequence_retries_after_its_page_was_retaken() -> None:
    """As many pages are available as when it was blocked, but the page that the other might have claimed is not needed."""
    scheduler = make(num_pages=8, page_tokens=4, caching=False)
    leaver, grower, blocked = sequence(0, 1), sequence(1, 4), sequence(2, 16, max_tokens=4)
    for one in (leaver, grower, blocked):
        scheduler.add(one)
    assert shape(run(scheduler)) == [(0, 0, 1), (1, 0, 4)]
    available = scheduler.pool.num_available
    scheduler.finish(leaver)
    step = run(scheduler)
    assert shape(step) == [(1, 4, 1), (2, 0, 16)]
    assert scheduler.pool.num_available == available - len(blocked.tables[0]), "the case is not what it says"


def test_scheduler_finish_keeps_page_list_of_step_in_flight() -> None:
    scheduler = make()
    one = sequence(0, 9)
    scheduler.add(one)
    scheduler.schedule()
    (pages,) = one.tables
    scheduler.finish(one)
    assert len(pages) == 3


def test_scheduler_failed_step_is_scheduled_again() -> None:
    scheduler = make()
    scheduler.add(sequence(0, 9))
    failed = scheduler.schedule()
    scheduler.forget_steps()
    scheduler.check()
    step = scheduler.schedule()
    assert shape(step) == shape(failed)
    with pytest.raises(AssertionError, match="oldest step in flight"):
        scheduler.complete(failed, [(7,)])
    scheduler.complete(step, [(7,)])
    with pytest.raises(AssertionError, match="only once"):
        scheduler.complete(step, [(7,)])


def test_complete_wants_one_entry_for_each_and_no_early_token() -> None:
    scheduler = make(max_tokens_a_step=4)
    scheduler.add(sequence(0, 9))
    step = scheduler.schedule()
    with pytest.raises(AssertionError, match="0 results for 1 sequences"):
        scheduler.complete(step, [])
    with pytest.raises(AssertionError, match="sampled before its last token"):
        scheduler.complete(step, [(7,)])


def test_scheduler_sequence_without_sample_waits_for_caller() -> None:
    scheduler = make()
    one = sequence(0, 4)
    scheduler.add(one)
    scheduler.add(sequence(1, 4))
    scheduler.complete(scheduler.schedule(), [(), (7,)])
    assert shape(run(scheduler)) == [(1, 4, 1)]
    scheduler.finish(one)
    scheduler.check()


def test_scheduler_runs_no_sequence_past_max_tokens() -> None:
    scheduler = make(page_tokens=2)
    one = sequence(0, 2, max_tokens=1)
    scheduler.add(one)
    scheduler.complete(scheduler.schedule(), [(7,)])
    assert scheduler.schedule().scheduled == ()
    scheduler.finish(one)
    assert scheduler.pool.num_available == 16


def test_prefix_hit_skips_computed_prompt_pages() -> None:
    scheduler = make()
    prompt = list(range(10))
    scheduler.add(sequence(0, prompt, max_tokens=1))
    run(scheduler)
    again = sequence(1, prompt, max_tokens=1)
    scheduler.add(again)
    assert shape(run(scheduler)) == [(1, 8, 2)]
    assert again.num_cached_tokens == 8
    assert (scheduler.num_prefix_query_tokens, scheduler.num_prefix_hit_tokens) == (20, 8)


@for_each("length, hit", [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_prefix_hit_leaves_last_token_to_compute(length: int, hit: int) -> None:
    scheduler = make()
    prompt = list(range(length))
    for number in range(2):
        scheduler.add(sequence(number, prompt, max_tokens=1))
        step = run(scheduler)
    assert shape(step) == [(1, hit, length - hit)]


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    scheduler = make()
    first = sequence(0, [1, 2, 3], max_tokens=6)
    scheduler.add(first)
    while has_work(scheduler):
        run(scheduler)
    scheduler.add(sequence(1, [*first.token_ids, 5, 6], max_tokens=1))
    assert shape(run(scheduler)) == [(1, 8, 3)]


def test_last_owner_leaves_shared_pages_cached() -> None:
    scheduler = make()
    prompt = list(range(9))
    first, second = sequence(0, prompt), sequence(1, prompt)
    scheduler.add(first)
    run(scheduler)
    scheduler.add(second)
    run(scheduler)
    assert first.tables[0][:2] == second.tables[0][:2]
    assert first.tables[0][2] != second.tables[0][2]
    assert scheduler.kv_usage == 4 / 16
    scheduler.finish(first)
    scheduler.check()
    scheduler.finish(second)
    scheduler.check()
    assert scheduler.kv_usage == 0
    assert num_cached(scheduler) == 2


def test_pages_of_the_same_step_are_shared() -> None:
    scheduler = make()
    for number in range(2):
        scheduler.add(sequence(number, [*range(8), 50 + number]))
    assert shape(run(scheduler)) == [(0, 0, 9), (1, 8, 1)]


@for_each("caching", [True, False])
def test_prefix_hit_needs_caching_salt_and_opt_in(caching: bool) -> None:
    scheduler = make(caching=caching)
    prompt = list(range(9))
    scheduler.add(sequence(0, prompt, max_tokens=1))
    run(scheduler)
    others = {"cache_salt": b"other"} if caching else {}
    scheduler.add(sequence(1, prompt, max_tokens=1, **others))
    assert shape(run(scheduler)) == [(1, 0, 9)]
    opted_out = sequence(2, prompt, max_tokens=1, use_prefix_cache=False)
    scheduler.add(opted_out)
    assert shape(run(scheduler)) == [(2, 0, 9)]
    assert opted_out.num_cached_tokens == 0
    assert num_cached(scheduler) == (4 if caching else 0)


def test_prefix_opt_out_still_leaves_its_pages() -> None:
    scheduler = make()
    prompt = list(range(9))
    scheduler.add(sequence(0, prompt, max_tokens=1, use_prefix_cache=False))
    run(scheduler)
    scheduler.add(sequence(1, prompt, max_tokens=1))
    assert shape(run(scheduler)) == [(1, 8, 1)]
    assert (scheduler.num_prefix_query_tokens, scheduler.num_prefix_hit_tokens) == (9, 8)


def test_preempted_sequence_hits_its_own_pages() -> None:
    scheduler = make(num_pages=10, page_tokens=2, max_model_len=20)
    old, young = sequence(0, 4, max_tokens=14), sequence(1, 5, max_tokens=12)
    for one in (old, young):
        scheduler.add(one)
    while not young.num_preemptions:
        run(scheduler)
    scheduler.finish(old)
    step = run(scheduler)
    assert step.scheduled[0].sequence is young
    assert step.scheduled[0].start > 0
    assert young.num_cached_tokens == 0, "that is about the first admission"


def test_reset_forgets_and_later_requests_compute_again() -> None:
    scheduler = make()
    prompt = list(range(9))
    scheduler.add(sequence(0, prompt, max_tokens=8))
    run(scheduler)
    scheduler.reset_prefix_cache()
    scheduler.check()
    scheduler.add(sequence(1, prompt, max_tokens=1))
    assert shape(run(scheduler)) == [(0, 9, 1), (1, 0, 9)]
    scheduler.add(sequence(2, prompt, max_tokens=1))
    assert (2, 8, 1) in shape(run(scheduler)), "pages computed after the reset are found"


@for_each("last, start", [(11, 11), (50, 10)])
def test_prompts_that_fit_only_when_shared_are_admitted(last: int, start: int) -> None:
    scheduler = make(num_pages=10, page_tokens=2, max_model_len=20)
    first, second = sequence(0, [*range(12)], max_tokens=6), sequence(1, [*range(11), last], max_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    assert shape(run(scheduler)) == [(0, 0, 12), (1, start, 12 - start)]
    assert second.tables[0][:5] == first.tables[0][:5]
    assert second.tables[0][5] != first.tables[0][5]


def test_blocked_prompt_is_not_matched_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(num_pages=16, page_tokens=2, max_model_len=32)
    scheduler.add(sequence(0, 20, max_tokens=10))
    scheduler.add(sequence(1, 20, max_tokens=10))
    calls = []
    match = scheduler.prefix.match
    monkeypatch.setattr(scheduler.prefix, "match", lambda *arguments: calls.append(1) or match(*arguments))
    while scheduler.num_running != 1 or scheduler.num_waiting:
        run(scheduler)
    assert len(calls) == 3, "one admission, one try, and one more after a sequence left"

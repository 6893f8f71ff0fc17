"""Priorities: who starts first, who gives way, who waits how long; in the scheduler, in an engine, and over the wire."""

import pytest

from engine.fakes import assert_at_rest, make_engine, run_all, solo, tokens_of
from engine.priority_mutants import PRIORITY_MUTANTS
from engine.scheduling import make, run, sequence
from engine.simulated_world import World
from engine.simulation import Simulation
from engine.test_simulation import EVENTS_PER_WORLD, NEEDED, WORLDS_PER_BATCH
from engine.test_simulation import run_all as run_worlds
from error_codes import raises_code
from holdfast.engine.messages import CoreRequest, Submit, decode_message, encode_message
from holdfast.engine.scheduler import Scheduler
from holdfast.errors import RequestError
from holdfast.request.sampling_params import MAX_PRIORITY, SamplingParams
from holdfast.request.sequence import Sequence, SequenceState

BUGGED_SEEDS = (0, 2, 4, 6, 8, 10, 12, 16, 18, 24)


def important(number: int, priority: int, prompt: int = 3, max_tokens: int = 4) -> Sequence:
    one = sequence(number, prompt, max_tokens=max_tokens)
    one.params = SamplingParams(priority=priority)
    return one


def filled(scheduler: Scheduler, *sequences: Sequence) -> None:
    for one in sequences:
        scheduler.add(one)


def test_lowest_priority_number_starts_first() -> None:
    scheduler = make(max_num_seqs=1)
    filled(scheduler, *(important(number, priority) for number, priority in enumerate((5, 0, -2, 0, 5, -2))))
    order = []
    while scheduler.num_waiting + scheduler.num_running:
        order += [item.sequence.sequence_id for item in run(scheduler).scheduled if item.start == 0]
    assert order == [2, 5, 1, 3, 0, 4]


def test_waiting_sequence_displaces_no_running_one() -> None:
    scheduler = make(max_num_seqs=1)
    filled(scheduler, important(0, 9, max_tokens=5))
    run(scheduler)
    filled(scheduler, important(1, -9))
    for _ in range(3):
        assert [item.sequence.sequence_id for item in run(scheduler).scheduled] == [0]
    assert scheduler.num_preemptions == 0


def test_scheduler_preempts_least_important_first() -> None:
    scheduler = make(num_pages=6, page_tokens=2, max_model_len=12)
    low, high = important(0, 1, prompt=2, max_tokens=10), important(1, 0, prompt=2, max_tokens=10)
    filled(scheduler, low, high)
    while scheduler.num_preemptions == 0:
        run(scheduler)
    assert (low.state, high.state) == (SequenceState.WAITING, SequenceState.RUNNING)
    late = important(2, 0, prompt=2)
    filled(scheduler, late)
    assert scheduler.waiting == [late, low]
    while scheduler.num_waiting + scheduler.num_running:
        run(scheduler)
    assert low.num_preemptions >= 1
    assert (high.num_preemptions, low.num_output_tokens, high.num_output_tokens) == (0, 10, 10)


def test_scheduler_more_important_sequence_passes_blocked_one() -> None:
    scheduler = make(num_pages=4, page_tokens=2, max_model_len=8)
    filled(scheduler, important(0, 0, prompt=2, max_tokens=4))
    run(scheduler)
    large, small = important(1, 3, prompt=6, max_tokens=2), important(2, 0, prompt=1, max_tokens=1)
    filled(scheduler, large)
    run(scheduler)
    assert large.state is SequenceState.WAITING
    filled(scheduler, small)
    run(scheduler)
    assert small.state is SequenceState.FINISHED, "it was admitted, though the other was in line before it"
    while scheduler.num_waiting + scheduler.num_running:
        run(scheduler)
    assert large.num_output_tokens == 2


def test_answers_are_the_same_in_any_order(run_ahead: int) -> None:
    engine = make_engine(max_num_seqs=2, num_pages=24)
    params = {
        str(number): SamplingParams(temperature=0.0, max_tokens=20, priority=number % 3 - 1) for number in range(9)
    }
    for name, own in params.items():
        engine.add_request(name, f"prompt {name}", own)
    found = run_all(engine)
    for name, own in params.items():
        assert tokens_of(found[name, 0]) == solo(f"prompt {name}", own)[0]
    assert_at_rest(engine)


def test_priority_is_bounded_and_round_trips() -> None:
    for far in (MAX_PRIORITY + 1, -MAX_PRIORITY - 1):
        with raises_code("value.out_of_range", RequestError, name="priority", value=far):
            SamplingParams(priority=far)
    for wrong in (0.5, "high", True, None):
        with raises_code("value.not_integer", RequestError, name="priority", value=wrong):
            SamplingParams(priority=wrong)  # type: ignore[arg-type]
    sent = Submit((CoreRequest(3, (1, 2), SamplingParams(priority=-7), seed=1, max_tokens=2),))
    number, came = decode_message(encode_message(sent, 1))
    assert (number, came) == (1, sent)


def test_sample_with_priorities_is_sound() -> None:
    assert run_worlds(range(16), 400, World.unequal) >= NEEDED


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_million_events_with_priorities_are_sound(batch: int) -> None:
    seeds = range(batch * WORLDS_PER_BATCH, (batch + 1) * WORLDS_PER_BATCH)
    assert run_worlds(seeds, EVENTS_PER_WORLD, World.unequal) >= NEEDED


def run_unequal_worlds() -> None:
    """A few thousand events: enough for every planted bug to show."""
    for seed in BUGGED_SEEDS:
        Simulation(seed, World.unequal(seed)).run(300)


@pytest.mark.parametrize("name", PRIORITY_MUTANTS)
def test_simulation_catches_planted_priority_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PRIORITY_MUTANTS[name].plant(monkeypatch)
    with pytest.raises(AssertionError, match=PRIORITY_MUTANTS[name].says):
        run_unequal_worlds()


def test_simulation_with_priorities_passes_without_bug() -> None:
    run_unequal_worlds()

"""Pipelines: a step in every stage, a sequence in one of them, fair shares; in random worlds, with planted bugs, by hand, and in the core."""

from collections import Counter, deque

import pytest

from engine.fakes import HashRunner, assert_at_rest, make_engine, run_all, solo, text_of, tokens_of
from engine.pipeline_mutants import PIPELINE_MUTANTS
from engine.simulated_world import World
from engine.simulation import Simulation
from for_each import for_each
from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.engine.core import EngineCore
from holdfast.engine.engine import Engine
from holdfast.engine.ngram import NgramProposer
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence, SequenceResult
from holdfast.request.step import Step

BUGGED_SEEDS = (48, 64, 12, 3, 7, 2, 70, 0, 6, 8, 10, 14)
NEEDED = {"arrive", "finish", "abort", "preempt", "share", "reset", "queue full", "refuse", "step", "failed step"}
SEEN = {"proposals", "accepted", "late stop", "drain", "quarantined sequences", "surplus tokens", "shared"}


def run_worlds(seeds: tuple[int, ...] | range, num_events: int) -> set[str]:
    """So many events in each; what happened in them."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed, World.piped(seed))
        simulation.run(num_events)
        happened += simulation.counts + simulation.seen
    return set(happened)


def test_simulation_with_stages_is_sound() -> None:
    assert run_worlds(BUGGED_SEEDS[:8], 300) >= NEEDED | SEEN


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_million_events_with_stages_are_sound(batch: int) -> None:
    assert run_worlds(range(batch * 10, batch * 10 + 10), 10_000) >= NEEDED - {"preempt"}


def test_worlds_have_all_numbers_of_stages() -> None:
    worlds = [World.piped(seed) for seed in BUGGED_SEEDS]
    assert {world.num_stages for world in worlds} == {2, 3, 4}
    assert all(world.run_ahead == world.num_stages - 1 for world in worlds)
    assert any(world.guess_share for world in worlds)
    assert {world.has_priorities for world in worlds} == {True, False}


@pytest.mark.parametrize("name", PIPELINE_MUTANTS)
def test_simulation_catches_planted_pipeline_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PIPELINE_MUTANTS[name].plant(monkeypatch)
    with pytest.raises(AssertionError, match=PIPELINE_MUTANTS[name].says):
        run_worlds(BUGGED_SEEDS, 300)


class Pipe:
    """A scheduler with its steps in flight; every token is 7."""

    def __init__(self, num_stages: int, num_pages: int = 1000, max_num_seqs: int = 64, budget: int = 256) -> None:
        limits = Limits(max_num_seqs, budget, 256, 4)
        groups = (CacheGroup("whole context", 4),)
        self.scheduler = Scheduler(limits, num_pages, True, 100, groups=groups, num_stages=num_stages)
        self.num_stages = num_stages
        self.flights: deque[LiveStep] = deque()
        self._next_id = 0

    def add(self, num_prompt: int = 3, max_tokens: int = 200, priority: int = 0) -> Sequence:
        prompt = [self._next_id + 1] * num_prompt
        params = SamplingParams(priority=priority)
        sequence = Sequence(self._next_id, prompt, num_prompt, params, seed=0, max_tokens=max_tokens)
        self._next_id += 1
        self.scheduler.add(sequence)
        return sequence

    def fill(self) -> list[list[int]]:
        """Steps until every stage has one or no other can be given: the ids in each."""
        given = []
        while len(self.flights) < self.num_stages:
            step = self.scheduler.schedule()
            if step is None or not step.scheduled:
                break
            self.flights.append(step)
            given.append([item.sequence.sequence_id for item in step.scheduled])
        self.scheduler.check()
        return given

    def book(self) -> None:
        step = self.flights.popleft()
        self.scheduler.complete(step, [(7,) if item.samples else () for item in step.scheduled])
        for item in step.scheduled:
            if item.sequence.num_output_tokens >= item.sequence.max_tokens:
                self.scheduler.finish(item.sequence)
        self.scheduler.check()


def test_steps_are_split_evenly_over_stages() -> None:
    pipe = Pipe(num_stages=3)
    for _ in range(7):
        pipe.add()
    assert pipe.fill() == [[0, 1, 2], [3, 4], [5, 6]]
    for _ in range(12):
        pipe.book()
        (step,) = pipe.fill()
        assert 1 <= len(step) <= 3
        in_flight = sorted(item.sequence.sequence_id for one in pipe.flights for item in one.scheduled)
        assert in_flight == list(range(7)), "a sequence waits though a stage is free"


def test_pipeline_single_sequence_is_in_one_step() -> None:
    pipe = Pipe(num_stages=4)
    pipe.add()
    assert pipe.fill() == [[0]]
    pipe.book()
    assert pipe.fill() == [[0]]


def test_uneven_steps_become_even_again() -> None:
    """All but one of a step leave; the rest is shared anew once it is booked."""
    pipe = Pipe(num_stages=2)
    sequences = [pipe.add() for _ in range(8)]
    assert pipe.fill() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for sequence in sequences[5:8]:
        pipe.scheduler.finish(sequence)
    pipe.book()
    assert pipe.fill() == [[0, 1, 2]]
    pipe.book()
    assert pipe.fill() == [[3, 4]]
    pipe.book()
    assert pipe.fill() == [[0, 1, 2]]


@for_each("num_stages, num_running", [(2, 5), (3, 4), (3, 10), (4, 9)])
def test_pipeline_skips_no_sequence_num_stages_times(num_stages: int, num_running: int) -> None:
    """Those that were idle too long come with the next step, though those before them are idle again."""
    pipe = Pipe(num_stages, max_num_seqs=16)
    for _ in range(num_running):
        pipe.add()
    last_seen: dict[int, int] = {}
    number = 0
    for _ in range(40):
        for ids in pipe.fill():
            number += 1
            last_seen |= dict.fromkeys(ids, number)
        assert number <= num_stages or min(last_seen.values()) > number - num_stages, last_seen
        assert len(pipe.flights) == min(num_stages, num_running), "a stage has nothing to do"
        pipe.book()


def test_pipeline_step_share_ignores_blocked_sequences() -> None:
    """Four run and many wait for pages: the four are in two steps, and not in one."""
    pipe = Pipe(num_stages=2, num_pages=16)
    for _ in range(12):
        pipe.add(num_prompt=7, max_tokens=6)
    given = pipe.fill()
    num_running = pipe.scheduler.num_running
    assert num_running < 8, "the pool is too large for this"
    pipe.book()
    if len(given) > 1:
        pipe.book()
    shares = [len(ids) for ids in pipe.fill()]
    assert len(shares) == 2
    assert max(shares) <= -(-num_running // 2) + 1


def test_sequence_without_pages_drains_the_pipe() -> None:
    """Sequence 4 is in none of the first steps of three stages, and must not wait until those before it end."""
    pipe = Pipe(num_stages=3, num_pages=18)
    for num_prompt in (5, 5, 5, 5, 8, 8):
        pipe.add(num_prompt, max_tokens=30)
    num_rounds = 0
    while not pipe.scheduler.num_preemptions:
        pipe.fill()
        assert pipe.flights, "the pipe is empty"
        pipe.book()
        num_rounds += 1
    assert num_rounds < 20, "another sequence had to run out of pages"
    running = pipe.scheduler.running
    assert [sequence.sequence_id for sequence in running] == [0, 1, 2, 3, 4]
    assert running[-1].num_tokens > max(sequence.num_tokens for sequence in running[:-1])
    while pipe.scheduler.num_running or pipe.scheduler.num_waiting:
        pipe.fill()
        pipe.book()
    assert pipe.scheduler.pool.num_available == 18


@for_each("num_stages", [2, 3])
def test_pipeline_more_important_sequence_runs_first(num_stages: int) -> None:
    pipe = Pipe(num_stages, max_num_seqs=4)
    for _ in range(4):
        pipe.add(priority=1)
    pipe.fill()
    pipe.book()
    urgent = pipe.add(priority=0, max_tokens=1)
    for _ in range(2 * num_stages):
        pipe.fill()
        pipe.book()
    # A waiting sequence displaces no running one.
    assert urgent.num_computed == 0
    pipe.scheduler.finish(pipe.scheduler.running[-1])
    for _ in range(2 * num_stages):
        pipe.fill()
        pipe.book()
    assert urgent.num_output_tokens == 1


class StageRunner(HashRunner):
    """Says when a step is launched with a token of a sequence that another step still has."""

    def launch(self, step: Step) -> None:
        flying = {item.sequence.slot for one in self._launched for item in one.scheduled}
        super().launch(step)
        for item in self._launched[-1].scheduled:
            item.sequence.slot = next(slot for slot, held in self._by_slot.items() if held is item.sequence)
        taken = {item.slot for item in step.items} & flying
        assert not taken, f"slots {taken} are in two stages"


def piped_engine(num_stages: int, num_proposals: int = 0, runner_type: type[HashRunner] = StageRunner) -> Engine:
    plain = make_engine()
    limits = Limits(8, 32, 128, 4, max_sampled_rows=8 * (1 + num_proposals))
    runner = runner_type(limits, 96, can_cancel=False)
    scheduler = Scheduler(limits, 96, True, 64, num_stages=num_stages)
    proposer = NgramProposer(num_proposals) if num_proposals else None
    core = EngineCore(runner, scheduler, run_ahead=num_stages - 1, proposer=proposer)
    engine = Engine(core, plain.tokenizer, plain.chat_template, 0)
    engine.runner = runner  # type: ignore[attr-defined]
    return engine


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=1.0, seed=3, max_tokens=17),
    SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=20, bad_words=("q",)),
    SamplingParams(temperature=0.0, max_tokens=30, stop=("e",)),
]


@for_each("num_stages", [2, 3])
def test_answers_are_those_of_one_step_at_a_time(num_stages: int) -> None:
    """Choices that count or follow tokens too: each token that a step begins with is known when it is launched."""
    engine = piped_engine(num_stages)
    prompts = [f"prompt {number}" * (1 + number % 3) for number in range(7)]
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, PARAMS[number % len(PARAMS)])
    found = run_all(engine)
    for number, prompt in enumerate(prompts):
        deltas = found[str(number), 0]
        assert (tokens_of(deltas), text_of(deltas)) == solo(prompt, PARAMS[number % len(PARAMS)])
    assert engine.runner.most_in_flight == num_stages  # type: ignore[attr-defined]
    assert_at_rest(engine)


@for_each("num_requests, num_in_flight", [(1, 1), (4, 2)])
def test_stages_compute_while_text_is_made(num_requests: int, num_in_flight: int) -> None:
    """When the tokens of a step are handed out, what follows them has been launched, also of a sequence that is alone."""
    engine = piped_engine(2)
    for number in range(num_requests):
        engine.add_request(str(number), f"prompt {number}", SamplingParams(max_tokens=9, ignore_eos=True))
    core = engine.core
    assert isinstance(core, EngineCore)
    for _ in range(4):
        assert core.step().outputs
        assert len(core.in_flight) == num_in_flight
    run_all(engine)
    assert_at_rest(engine)


class GuessStageRunner(StageRunner):
    """Accepts every proposal that it would have said itself."""

    def _run(self, item: ScheduledSequence) -> SequenceResult:
        if not item.proposals:
            return super()._run(item)
        sequence, known, said = item.sequence, list(item.sequence.token_ids), []
        for place in range(len(item.proposals) + 1):
            said += super()._run(ScheduledSequence.of(sequence, item.start + place, 1)).token_ids
            if place == len(item.proposals) or said[-1] != item.proposals[place]:
                break
            sequence.token_ids.append(said[-1])
        sequence.token_ids[:] = known
        return SequenceResult(tuple(said), ())


def test_proposals_keep_all_stages_busy() -> None:
    said = list(b"abcabcabcabcabcabcabcxyabcabcabcabcabcab")
    engine = piped_engine(2, 4, GuessStageRunner)
    plain = make_engine(run_ahead=0)
    for one in (engine, plain):
        one.runner.script |= {"P": said, "Q": said}  # type: ignore[attr-defined]
        for prompt in "PQ":
            one.add_request(prompt, prompt, SamplingParams(temperature=0.0, max_tokens=40))
    found, expected = run_all(engine), run_all(plain)
    assert {key: tokens_of(deltas) for key, deltas in found.items()} == {
        key: tokens_of(deltas) for key, deltas in expected.items()
    }
    assert engine.stats().num_accepted_tokens > 0
    assert engine.runner.most_in_flight == 2  # type: ignore[attr-defined]
    assert all(len(step) == 1 for step in engine.runner.steps), "two sequences, two stages"  # type: ignore[attr-defined]

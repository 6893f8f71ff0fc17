"""Limits on the rows of prompts: in the scheduler, in random worlds, and in a core that has a pacer and a clock."""

from collections.abc import Callable

import pytest

from engine.fakes import assert_at_rest, make_engine, run_all, solo, tokens_of
from engine.scheduling import make, run, sequence, shape
from engine.simulated_world import World
from engine.simulation import Simulation
from engine.test_simulation import NEEDED
from engine.test_simulation import run_all as run_worlds
from for_each import for_each
from holdfast.engine.pacing import StepPacer
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sampling_params import SamplingParams

BUGGED_SEEDS = range(14)


def running_beside_a_prompt(num_prompt: int = 20) -> Scheduler:
    """Sequence 0 decodes, and sequence 1 waits with a prompt."""
    scheduler = make(num_pages=32)
    scheduler.add(sequence(0, 4, max_tokens=30))
    run(scheduler)
    scheduler.add(sequence(1, num_prompt))
    return scheduler


def complete(scheduler: Scheduler, limit: int | None) -> list[tuple[int, int, int]]:
    step = scheduler.schedule(None, limit)
    assert step is not None
    scheduler.complete(step, [(7,) if item.samples else () for item in step.scheduled])
    scheduler.check()
    return shape(step)


def test_schedule_with_a_limit_cuts_prompts() -> None:
    scheduler = running_beside_a_prompt()
    assert scheduler.num_decoding == 1
    assert complete(scheduler, 3) == [(0, 4, 1), (1, 0, 3)]
    assert complete(scheduler, 5) == [(0, 5, 1), (1, 3, 5)]
    assert complete(scheduler, 0) == [(0, 6, 1)], "a look at a decode step"
    assert complete(scheduler, None) == [(0, 7, 1), (1, 8, 12)]
    assert scheduler.num_decoding == 2


def test_schedule_with_a_limit_shares_it_among_prompts() -> None:
    scheduler = running_beside_a_prompt(6)
    scheduler.add(sequence(2, 9))
    assert complete(scheduler, 8) == [(0, 4, 1), (1, 0, 6), (2, 0, 2)]
    assert complete(scheduler, 4) == [(0, 5, 1), (1, 6, 1), (2, 2, 4)]


def test_short_prompt_is_read_beside_a_long_one() -> None:
    scheduler = running_beside_a_prompt(60)
    assert complete(scheduler, 8) == [(0, 4, 1), (1, 0, 8)]
    scheduler.add(sequence(2, 3))
    assert complete(scheduler, 8) == [(0, 5, 1), (1, 8, 4), (2, 0, 3)]
    scheduler.add(sequence(3, 6))
    assert complete(scheduler, 8) == [(0, 6, 1), (1, 12, 4), (2, 3, 1), (3, 0, 4)]
    assert complete(scheduler, 8) == [(0, 7, 1), (1, 16, 4), (2, 4, 1), (3, 4, 2)]
    assert complete(scheduler, 8)[1] == (1, 18 + 2, 8), "all rows if no other prompt is read"


def test_long_prompt_gets_all_rows_if_the_next_does_not_fit() -> None:
    scheduler = make(num_pages=20)
    scheduler.add(sequence(0, 4, max_tokens=30))
    run(scheduler)
    scheduler.add(sequence(1, 40, max_tokens=2))
    assert complete(scheduler, 8)[1] == (1, 0, 8)
    scheduler.add(sequence(2, 40, max_tokens=30))
    assert complete(scheduler, 8)[1:] == [(1, 8, 4)], "a share is kept for it once"
    assert complete(scheduler, 8)[1:] == [(1, 12, 8)]
    assert complete(scheduler, 8)[1:] == [(1, 20, 8)]


def test_schedule_with_limit_0_lets_the_first_go_on() -> None:
    scheduler = make(num_pages=32)
    scheduler.add(sequence(0, 20))
    assert complete(scheduler, 0) == [(0, 0, 1)]
    scheduler.add(sequence(1, 3))
    assert complete(scheduler, 0) == [(0, 1, 1)]


def test_simulation_of_limits_has_no_leak_and_no_wrong_read() -> None:
    assert run_worlds(range(42), 120, World.paced) >= NEEDED - {"preempt", "queue full"} | {"limited"}


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_simulation_of_limits_runs_a_million_events(batch: int) -> None:
    assert run_worlds(range(batch * 14, (batch + 1) * 14), 10_000, World.paced) >= NEEDED - {"preempt"} | {"limited"}


def run_paced_worlds() -> None:
    for seed in BUGGED_SEEDS:
        Simulation(seed, World.paced(seed)).run(150)


def limits_are_ignored(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", lambda self, propose=None, limit=None: real(self, propose))


def admission_ignores_limits(patch: pytest.MonkeyPatch) -> None:
    def admit(self, scheduled, budget, ends_prompt):
        taken = sum(item.num_rows for item in scheduled)
        real(self, scheduled, self.limits.max_num_batched_tokens - taken, ends_prompt)

    real = Scheduler.admit_waiting
    patch.setattr(Scheduler, "admit_waiting", admit)


def a_limit_of_zero_stops_everything(patch: pytest.MonkeyPatch) -> None:
    def schedule(self, propose=None, limit=None):
        real_longest = {number: track.longest for number, track in self._tracks.items()}
        for one in self.running if limit == 0 else ():
            if one.num_scheduled < one.num_prompt_tokens - 1:
                self._tracks[one.sequence_id].longest = one.num_scheduled
        step = real(self, propose, limit)
        for number, longest in real_longest.items():
            if number in self._tracks:
                self._tracks[number].longest = longest
        return step

    real = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (limits_are_ignored, "rows of prompts in a step of at most"),
        (admission_ignores_limits, "rows of prompts in a step of at most"),
        (a_limit_of_zero_stops_everything, "does not run"),
    ],
)
def test_simulation_finds_a_planted_bug_of_limits(
    plant: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        run_paced_worlds()


class Clock:
    """Moves when a step runs: 30 ms and 3 ms a row."""

    def __init__(self, engine) -> None:
        self.now = 0.0
        self.steps: list[tuple[int, float]] = []
        engine.runner.on_step = self.run
        engine.core._clock = lambda: self.now

    def run(self, step) -> None:
        seconds = 0.03 + 0.003 * step.num_tokens
        self.now += seconds
        self.steps.append((step.num_tokens, seconds))


@for_each("run_ahead", [0, 1])
def test_core_with_a_pacer_keeps_streams_at_their_pace(run_ahead: int) -> None:
    engine = make_engine(
        max_num_batched_tokens=256, max_model_len=512, num_pages=400, run_ahead=run_ahead, enable_prefix_caching=False
    )
    clock, greedy = Clock(engine), SamplingParams(temperature=0.0, max_tokens=60)
    engine.core.pacer = StepPacer(3.0)  # type: ignore[attr-defined]
    engine.add_request("stream", "a", greedy)
    for _ in range(8):
        engine.step()
    engine.add_request("long", "b" * 300, SamplingParams(temperature=0.0, max_tokens=4))
    found = run_all(engine)
    rows, seconds = zip(*clock.steps, strict=True)
    assert max(rows) > 10, "the prompt was read by single rows"
    assert max(seconds) < 3.1 * 0.033
    assert tokens_of(found["stream", 0])[-40:] == solo("a", greedy, max_model_len=512, num_pages=400)[0][-40:]
    assert_at_rest(engine)
    engine.core.pacer = None  # type: ignore[attr-defined]
    engine.add_request("stream", "c", greedy)
    engine.step()
    engine.add_request("long", "d" * 300, SamplingParams(temperature=0.0, max_tokens=4))
    run_all(engine)
    assert clock.steps[-1][1] < max(seconds for _, seconds in clock.steps) == pytest.approx(0.03 + 0.003 * 256)


class Seen(StepPacer):
    """Records its calls, and limits nothing."""

    def __init__(self) -> None:
        super().__init__(3.0)
        self.wanted: list[int] = []
        self.steps: list[tuple[int, int, int, float]] = []

    def prompt_rows(self, num_decoding: int) -> int | None:
        self.wanted.append(num_decoding)
        return None

    def see(self, num_rows: int, num_prompt_rows: int, num_decoding: int, seconds: float) -> None:
        self.steps.append((num_rows, num_prompt_rows, num_decoding, round(seconds, 6)))


@for_each("is_interrupted", [False, True])
@for_each("run_ahead", [0, 1, 2])
def test_pacer_sees_each_step_with_its_own_rows_and_time(run_ahead: int, is_interrupted: bool) -> None:
    engine = make_engine(run_ahead=run_ahead, enable_prefix_caching=False, max_num_batched_tokens=64)
    clock, pacer, launches = Clock(engine), Seen(), []
    core, runner = engine.core, engine.runner  # type: ignore[attr-defined]
    core.pacer = pacer  # type: ignore[attr-defined]
    launch, collect = runner.launch, runner.collect

    def launched(step) -> None:
        clock.now += 0.001  # the host takes a while, too
        launches.append(step)
        launch(step)

    runner.launch = launched
    for name, num_tokens in (("a", 3), ("b", 9)):
        engine.add_request(name, name * num_tokens, SamplingParams(temperature=0.0, max_tokens=6))
    for _ in range(3):
        engine.step()
    if is_interrupted:

        def interrupted() -> None:
            runner.collect = collect
            raise KeyboardInterrupt

        runner.collect = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.add_request("c", "c" * 20, SamplingParams(temperature=0.0, max_tokens=3))
    run_all(engine)
    assert [seen[0] for seen in pacer.steps] == [rows for rows, _ in clock.steps]
    for (rows, prompt_rows, num_decoding, seconds), (_, computed) in zip(pacer.steps, clock.steps, strict=True):
        # A step takes its own time, and the time of launches between its begin and its end.
        assert computed - 1e-6 <= seconds <= computed + 0.001 * (2 + run_ahead)
        assert num_decoding >= rows or prompt_rows
    prompts = [seen[:3] for seen in pacer.steps if seen[1]]
    assert prompts == [(12, 12, 2), (22, 20, 2)]
    assert pacer.wanted == [0, 2, 2, 3], "it is not called while no prompt waits or is half computed"

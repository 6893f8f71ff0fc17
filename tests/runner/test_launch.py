"""Launch and collect: whatever is in flight, tokens and log-probabilities are those of one step at a time, to the bit."""

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from holdfast.config import Limits
from holdfast.errors import EngineDeadError, MessageError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, StepResult
from holdfast.request.step import Admitted, Step, StepItem
from holdfast.runner import runner as runner_module
from holdfast.runner import slots as slots_module
from holdfast.runner.sampling.device_sampler import DeviceChoosing
from kernels.exactness import require_native
from loading.tiny_models import VOCAB, save_tiny
from request.frames import decode_step, encode_step
from runner.drive import LoadedModel, Rig, load_model
from runner.fake_graphs import pretend_to_have_a_stream
from runner.stepping import Person, Ran, Stepper, Wish, drive, make_wishes, replay, with_guesses
from runner.tiny_runners import held_storages

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=60, page_tokens=4, max_sampled_rows=10)
NUM_PAGES = 60
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Callable[[str], LoadedModel]:
    loaded: dict[str, LoadedModel] = {}

    def load_family(family: str) -> LoadedModel:
        if family not in loaded:
            folder: Path = tmp_path_factory.mktemp(family)
            save_tiny(family, folder)
            loaded[family] = load_model(folder)
        return loaded[family]

    return load_family


def make_rig(model: LoadedModel, *, like_gpu: bool, backend: str = "native_paged") -> Rig:
    """`like_gpu`: steps begin when they are launched, and tokens that are coming stay where they are chosen."""
    if backend == "native_paged":
        require_native()
    return Rig(model, backend, LIMITS, NUM_PAGES, keeps_tokens=like_gpu)


def run(rig: Rig, wishes: list[Wish], seed: int, run_ahead: int, cancels: Callable[[], bool] = lambda: False) -> Ran:
    """All requests; whatever no one has a right to read is NaN before every launch."""
    stepper = Stepper(LIMITS, rig.groups, NUM_PAGES, wishes, seed)

    def poison() -> None:
        rig.poison()
        rig.poison_pages(stepper.free_pages)

    return drive(rig.runner, stepper, run_ahead, poison, cancels)


def outcome(person: Person) -> tuple[object, ...]:
    return person.output, person.logprobs, person.prompt_logprobs, person.has_failed, person.pooled


def assert_same(ran: Ran, expected: Ran) -> None:
    for own, other in zip(ran.people, expected.people, strict=True):
        assert outcome(own) == outcome(other), f"{own.wish} differs"


@pytest.fixture
def late(monkeypatch) -> Counter:
    """How many rows had to wait for a token."""
    counted: Counter = Counter()
    choose_late = DeviceChoosing.choose_late

    def count_and_choose(choosing: DeviceChoosing) -> None:
        if choosing.waits:
            counted["steps"] += 1
            counted["rows"] += len(choosing.table.late)
            counted["others"] += len(choosing.step.choices) - len(choosing.table.late)
        choose_late(choosing)

    monkeypatch.setattr(DeviceChoosing, "choose_late", count_and_choose)
    return counted


SEEDS = [
    pytest.param("llama", range(2), id="llama"),
    pytest.param("qwen2_window", range(5, 7), id="windows"),
    pytest.param("llama", (2, 3, 4, *range(100, 180)), id="llama, many", marks=pytest.mark.slow),
    pytest.param("qwen2_window", (7, *range(200, 240)), id="windows, many", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "seeds"), SEEDS)
def test_launch_any_schedule_has_bits_of_one_step_at_a_time(load, late, family, seeds):
    """One step at a time without proposals says what is right; then with proposals, waited for and not, on both kinds of
    runner; and every step that was ever made, from its bytes, on a fresh runner."""
    model, counted = load(family), Counter()
    for seed in seeds:
        wishes = make_wishes(seed, 12, VOCAB)
        expected = run(make_rig(model, like_gpu=False), wishes, seed, run_ahead=0)
        guessing = with_guesses(wishes, [person.output for person in expected.people], VOCAB, seed)
        for like_gpu in (False, True):
            for run_ahead in (0, 1):
                ran = run(make_rig(model, like_gpu=like_gpu), guessing, seed, run_ahead)
                assert_same(ran, expected)
                decoded = [decode_step(encode_step(step)) for step in ran.steps]
                assert replay(make_rig(model, like_gpu=not like_gpu).runner, decoded) == ran.results
                counted["accepted"] += sum(person.num_accepted for person in ran.people)
                counted["proposed"] += sum(len(item.proposals) for step in ran.steps for item in step.items)
                counted["surplus"] += run_ahead * sum(person.num_surplus for person in ran.people)
                counted["without a choice"] += sum(not any(item.samples for item in step.items) for step in ran.steps)
    assert 20 < counted["accepted"] < counted["proposed"] - 20, counted
    assert counted["surplus"] > 4, counted
    assert counted["without a choice"] > 10, counted
    assert late["rows"] > 10, late
    assert late["others"] > 20, "rows that do not wait beside some that do"


@pytest.mark.parametrize("seeds", [range(20, 22), pytest.param(range(22, 26), marks=pytest.mark.slow)], ids=str)
def test_launch_run_ahead_equals_one_step_at_a_time(load, seeds):
    model = load("llama")
    for seed in seeds:
        wishes = make_wishes(seed, 15, VOCAB)
        expected = run(make_rig(model, like_gpu=False), wishes, seed, run_ahead=0)
        for like_gpu in (False, True):
            assert_same(run(make_rig(model, like_gpu=like_gpu), wishes, seed + 1, run_ahead=1), expected)


def test_cancel_dropped_steps_leave_no_trace(load):
    model, num_cancelled = load("llama"), 0
    for seed in range(6):
        dice, wishes = Random(seed), make_wishes(seed, 12, VOCAB)
        expected = run(make_rig(model, like_gpu=False), wishes, seed, run_ahead=0)
        guessing = with_guesses(wishes, [person.output for person in expected.people], VOCAB, seed)
        ran = run(make_rig(model, like_gpu=False), guessing, seed, 1, cancels=lambda dice=dice: dice.random() < 0.3)
        assert_same(ran, expected)
        num_cancelled += len(ran.steps) - len(ran.results)
    assert num_cancelled > 50


class PatientCollect:
    """In place of a runner's collect: called again until it is not interrupted. Ctrl-C comes while it runs, and only then."""

    def __init__(self, runner: Any, dice: Random) -> None:
        self._collect = runner.collect
        self._dice = dice
        self._is_collecting = False
        self.num_interrupts = 0
        runner.collect = self

    def __call__(self) -> StepResult:
        self._is_collecting = True
        try:
            while True:
                try:
                    return self._collect()
                except KeyboardInterrupt:
                    self.num_interrupts += 1
        finally:
            self._is_collecting = False

    def interrupt(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Before or behind a call, now and then."""
        call = getattr(owner, name)

        def interrupted(*arguments: Any, **options: Any) -> Any:
            when = self._dice.choice(["before", "behind", None, None]) if self._is_collecting else None
            if when == "before":
                raise KeyboardInterrupt
            result = call(*arguments, **options)
            if when == "behind":
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("place", ["step_logits", "compute"])
def test_collect_interrupted_wait_resumes(load, monkeypatch, place):
    """On a CPU, where the step itself is what is waited for."""
    model = load("llama")
    wishes = make_wishes(5, 10, VOCAB)
    expected = run(make_rig(model, like_gpu=False), wishes, 5, run_ahead=0)
    rig = make_rig(model, like_gpu=False)
    patient = PatientCollect(rig.runner, Random(0))
    owner, name = {"step_logits": (rig.decoder, "step_logits"), "compute": (rig.runner, "_compute")}[place]
    patient.interrupt(monkeypatch, owner, name)
    assert_same(run(rig, wishes, 5, run_ahead=1), expected)
    assert patient.num_interrupts > 3


class Interrupting:
    """Ctrl-C at any line of the runner and its slots while a step is waited for, wherever the dice say.

    But not between the last assignment of collect and its return, where Python does not look for signals and a trace does.
    """

    def __init__(self, dice: Random) -> None:
        self._dice = dice
        self._left = 0
        self.lines: set[int] = set()

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._left = self._dice.randrange(2, 120)
        if self._dice.random() < 0.4:
            sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in (runner_module.__file__, slots_module.__file__):
            return None
        is_return = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == "return result"
        if event == "line" and not (frame.f_code.co_name == "collect" and is_return):
            self._left -= 1
            if self._left == 0:
                self.lines.add(frame.f_lineno)
                raise KeyboardInterrupt
        return self._trace


def test_cancel_after_interrupt_at_any_line_keeps_results(load):
    """As the core does it: what was not handed out never was, so both sides go on from the same place."""
    model, num_cancelled, interrupting = load("llama"), 0, Interrupting(Random(0))
    for seed in range(3):
        wishes = make_wishes(seed, 8, VOCAB)
        expected = run(make_rig(model, like_gpu=False), wishes, seed, run_ahead=0)
        guessing = with_guesses(wishes, [person.output for person in expected.people], VOCAB, seed)
        rig = make_rig(model, like_gpu=False)
        stepper = Stepper(LIMITS, rig.groups, NUM_PAGES, guessing, seed)
        while not stepper.is_done:
            while len(stepper.flights) <= 1:
                step = stepper.schedule()
                if step is None:
                    break
                rig.runner.launch(step)
            if stepper.flights:
                result = None
                try:
                    with interrupting.armed():
                        result = rig.runner.collect()
                except KeyboardInterrupt:
                    if result is None:
                        assert rig.runner.cancel()
                        stepper.forget()
                        num_cancelled += 1
                if result is not None:
                    stepper.book(result)
        assert_same(Ran([], [], stepper.people), expected)
    assert num_cancelled > 10
    assert len(interrupting.lines) > 10


@pytest.mark.parametrize("like_gpu", [False, True])
def test_launch_nan_sequence_fails_alone_and_drops_its_surplus(load, like_gpu):
    """Its next step is in flight when that is learned, with some token in place of the one that could not be chosen."""
    model = load("llama")
    embedding = model.weights["embed.weight"].clone()
    embedding[7] = float("nan")
    hurt = LoadedModel(model.spec, {**model.weights, "embed.weight": embedding})
    wishes = make_wishes(3, 12, VOCAB)
    poisoned = [2, 5, 6]
    for number in poisoned:
        wishes[number].prompt.insert(len(wishes[number].prompt) // 2, 7)
        wishes[number].max_tokens = 9
    expected = run(make_rig(hurt, like_gpu=False), wishes, 3, run_ahead=0)
    assert [person.number for person in expected.people if person.has_failed] == poisoned
    ran = run(make_rig(hurt, like_gpu=like_gpu), wishes, 3, run_ahead=1)
    for own, other in zip(ran.people, expected.people, strict=True):
        assert (own.output, own.logprobs, own.has_failed) == (other.output, other.logprobs, other.has_failed)
    assert sum(ran.people[number].num_surplus for number in poisoned) > 0


def prompt_step(number: int, slot: int, num_tokens: int, **changes: Any) -> Step:
    """A sequence that comes with its whole prompt."""
    own = Admitted(slot, number, tuple(range(9, 9 + num_tokens)), num_tokens, GREEDY, seed=0)
    pages = (tuple(range(10 * slot, 10 * slot + -(-num_tokens // 4))),)
    return Step(number, (), (own,), (StepItem(slot, 0, num_tokens, True, pages),), **changes)


@pytest.mark.parametrize("like_gpu", [False, True])
def test_launch_refused_step_leaves_steps_in_flight_intact(load, like_gpu):
    rigs = [make_rig(load("llama"), like_gpu=like_gpu) for _ in range(2)]
    sound = [prompt_step(1, 0, 5), Step(2, items=(StepItem(0, 5, 1, True, ((3,),)),))]
    expected = replay(rigs[0].runner, sound)
    runner = rigs[1].runner
    runner.launch(sound[0])
    for bad in (sound[0], Step(3), Step(2, items=(StepItem(1, 0, 1, True),)), Step(2, released=(2,))):
        with pytest.raises(MessageError):
            runner.launch(bad)
    runner.launch(sound[1])
    assert [runner.collect(), runner.collect()] == expected


@pytest.mark.parametrize("like_gpu", [False, True])
def test_launch_steps_without_choices_and_of_releases_only(load, like_gpu):
    runner = make_rig(load("llama"), like_gpu=like_gpu).runner
    own = Admitted(2, 5, tuple(range(9, 29)), 20, GREEDY, seed=0)
    pages = (tuple(range(5)),)
    runner.launch(Step(1, admitted=(own,), items=(StepItem(2, 0, 7, False, pages),)))
    runner.launch(Step(2, items=(StepItem(2, 7, 9, False),)))
    assert runner.collect().results[0].token_ids == ()
    runner.launch(Step(3, items=(StepItem(2, 16, 4, True),)))
    assert runner.collect().results[0].token_ids == ()
    runner.launch(Step(4, released=(2,)))
    chosen = runner.collect().results[0].token_ids
    assert len(chosen) == 1
    assert runner.collect().results == ()
    whole = replay(make_rig(load("llama"), like_gpu=False).runner, [prompt_step(1, 2, 20)])
    assert whole[0].results[0].token_ids == chosen


def test_runner_can_run_ahead_limits_steps_in_flight(load):
    on_cpu, like_gpu = (make_rig(load("llama"), like_gpu=kind).runner for kind in (False, True))
    assert not on_cpu.can_run_ahead
    assert like_gpu.can_run_ahead
    for runner in (on_cpu, like_gpu):
        assert runner.cancel(), "there is nothing to drop"
        with pytest.raises(AssertionError, match="no step is in flight"):
            runner.collect()
        runner.launch(prompt_step(1, 0, 5))
        for call in (runner.execute, runner.hidden_rows):
            with pytest.raises(AssertionError, match="1 steps are in flight"):
                call(LiveStep(()))
    assert on_cpu.cancel()
    assert not like_gpu.cancel(), "what was begun cannot be dropped"
    like_gpu.launch(prompt_step(2, 1, 5))
    with pytest.raises(AssertionError, match="2 steps are in flight"):
        like_gpu.launch(prompt_step(3, 2, 5))
    assert len(like_gpu.collect().results) == 1, "and both of them are still there"
    assert len(like_gpu.collect().results) == 1


def test_launch_run_ahead_keeps_all_storages(load):
    rig = make_rig(load("llama"), like_gpu=True)
    places = held_storages(rig.runner)
    run(rig, make_wishes(1, 8, VOCAB), 1, run_ahead=1)
    rig.sampler.sampled.clear()  # what the test itself has kept
    rig.sampler.prompt.clear()
    assert held_storages(rig.runner) == places
    assert len(places) > 8


def test_closing_waits_for_what_is_in_flight(load):
    rig = make_rig(load("llama"), like_gpu=True)
    stream = pretend_to_have_a_stream(rig)
    rig.runner.launch(prompt_step(1, 0, 5))
    rig.runner.close()
    assert stream.num_waits == 1
    rig.runner.close()
    assert stream.num_waits == 1


@pytest.mark.parametrize("kind", [RuntimeError, EngineDeadError], ids=["torch's", "an exchange's"])
@pytest.mark.parametrize("like_gpu", [False, True])
def test_runner_failed_device_keeps_its_buffers_with_process(load, monkeypatch, like_gpu, kind):
    """No one may close the engine before the process ends."""
    kept: list[object] = []
    monkeypatch.setattr(runner_module, "has_failed", lambda device: True)
    monkeypatch.setattr(runner_module, "keep_with_process", kept.append)
    runner = make_rig(load("llama"), like_gpu=like_gpu).runner

    def fail(*arguments: object) -> None:
        words = "an illegal memory access was encountered"
        raise RuntimeError(words) if kind is RuntimeError else EngineDeadError("value.empty", name=words)

    monkeypatch.setattr(runner.model, "hidden", fail)
    monkeypatch.setattr(runner.model, "step_logits", fail)
    with pytest.raises(kind, match="illegal memory access"):
        replay(runner, [prompt_step(1, 0, 5)])
    assert kept == [runner]
    runner.close()
    assert kept == [runner]
    assert "buffers" in vars(runner)

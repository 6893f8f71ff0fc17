"""Steps that run ahead on a GPU: the same tokens as one at a time, and a launch that waits for nothing and takes nothing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.step import Step
from holdfast.runner.build import BuiltRunner
from request.frames import decode_step, encode_step
from runner.gpu_traffic import build_dummy, num_compiled
from runner.stepping import Ran, Stepper, Wish, drive, make_wishes, replay, with_guesses
from runner.tiny_runners import held_storages

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 15, 16, 17, 63, 130, 400)
LONG_CYCLES = 40_000_000
"""Some 20 ms."""
MODES = [
    pytest.param("qwen3", {}, id="qwen3"),
    pytest.param("windows", {}, id="windows"),
    pytest.param("experts", {"quantization": "fp8"}, id="experts in fp8"),
    pytest.param("qwen3", {"enforce_eager": True}, id="eager"),
]


@pytest.fixture
def ready(tmp_path: Path) -> Callable[..., AbstractContextManager[BuiltRunner]]:
    """ready(name, **options): a runner of a tiny model, released behind the block: each one is as if it were the first."""

    @contextmanager
    def build_one(name: str = "qwen3", **options: Any) -> Iterator[BuiltRunner]:
        built = build_dummy(tmp_path, name, **options)
        try:
            yield built
        finally:
            built.release()

    return build_one


def make_stepper(built: BuiltRunner, wishes: list[Wish], seed: int) -> Stepper:
    runner = built.runner
    return Stepper(runner.limits, runner.groups, min(runner.num_pages, 600), wishes, seed)


def poison(built: BuiltRunner, stepper: Stepper) -> None:
    """NaN wherever nothing may be read once what is in flight has run: free pages and the workspace, without a wait."""
    runner: Any = built.runner
    spec, num_pages = built.storage.spec, built.storage.num_pages
    with torch.cuda.stream(runner.stream):
        for layer in range(len(spec.layers)):
            num_chunks = spec.groups[spec.group_of(layer)].chunks_per_page
            chunks = [j * num_pages + page for page in stepper.free_pages for j in range(num_chunks)]
            chunks_P = torch.tensor(chunks).pin_memory().to("cuda", non_blocking=True)
            slots = chunks_P.unsqueeze(1) * 16 + torch.arange(16, device="cuda")
            for plane in built.storage.planes(layer).values():
                plane[slots.flatten()] = float("nan")
        for lane, memory in runner.model.workspace.lanes.items():
            if lane != "fused_decode":  # small-batch GEMMs count in it, and leave it at zero
                memory.fill_(0xFF)


def run_ahead(built: BuiltRunner, wishes: list[Wish], seed: int, is_poisoned: bool = False) -> Ran:
    stepper = make_stepper(built, wishes, seed)
    before_launch = (lambda: poison(built, stepper)) if is_poisoned else (lambda: None)
    return drive(built.runner, stepper, 1, before_launch)


def guessing_wishes(built: BuiltRunner, seed: int) -> list[Wish]:
    """Requests of every kind whose proposals are often right: a first run says what follows."""
    vocab_size = built.runner.vocab_size
    wishes = make_wishes(seed, 40, vocab_size, LENGTHS)
    for wish in wishes[::3]:  # these end somewhere on their way, which the host learns when the next step is in flight
        wish.max_tokens, wish.stops = 15, frozenset(range(8, vocab_size, 4))
    ran = drive(built.runner, make_stepper(built, wishes, seed), 0)
    return with_guesses(wishes, [person.output for person in ran.people], vocab_size, seed)


@pytest.mark.parametrize(("name", "options"), MODES)
def test_run_ahead_and_one_step_at_a_time_give_the_same(ready, name, options):
    """The very same steps, from their bytes, each waited for; and again on poisoned memory."""
    with ready(name, **options) as built:
        wishes = guessing_wishes(built, 1)
    with ready(name, **options) as built:
        ran = run_ahead(built, wishes, 1)
    with ready(name, **options) as built:
        assert run_ahead(built, wishes, 1, is_poisoned=True).results == ran.results
    with ready(name, **options) as built:
        assert replay(built.runner, [decode_step(encode_step(step)) for step in ran.steps]) == ran.results
    assert sum(person.num_accepted for person in ran.people) > 5
    assert sum(person.num_surplus for person in ran.people) > 2
    assert len({token_id for person in ran.people for token_id in person.output}) > 50
    assert not any(person.has_failed for person in ran.people)


def counters() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    names = ("allocation.all.allocated", "allocation.all.freed", "segment.all.allocated", "segment.all.freed")
    return {name: stats[name] for name in names}


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("name", "options"), MODES)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_launch_after_ready_allocates_and_compiles_nothing(ready, name, options):
    with ready(name, **options) as built:
        wishes = guessing_wishes(built, 2)
    with ready(name, **options) as built:
        torch.cuda.synchronize()
        places, before, compiled = held_storages(built.runner), counters(), num_compiled()
        with refusing_to_wait():
            run_ahead(built, wishes, 2)
        torch.cuda.synchronize()
        assert counters() == before
        assert held_storages(built.runner) == places
        assert num_compiled() == compiled, "a kernel was compiled after ready"


@pytest.mark.parametrize(("name", "options"), MODES)
def test_preparing_a_step_never_waits_for_the_one_that_runs(ready, name, options):
    """Every step takes 20 ms; the next one is launched before that is over, whatever its rows ask for."""
    with ready(name, **options) as built:
        runner: Any = built.runner
        wishes = make_wishes(3, 60, runner.vocab_size, LENGTHS)
        wishes = [wish for wish in wishes if wish.params.prompt_logprobs is None][:16]
        stepper = make_stepper(built, wishes, 3)
        plan, launch = runner.backend.plan, runner.launch
        running: list[torch.cuda.Event] = []
        num_ahead = 0

        def plan_long(*arguments: Any, **options: Any) -> Any:
            made = plan(*arguments, **options)
            torch.cuda._sleep(LONG_CYCLES)
            running.append(torch.cuda.Event())
            running[-1].record()
            return made

        def launch_ahead(step: Step) -> None:
            nonlocal num_ahead
            is_ahead = len(stepper.flights) == 2 and bool(stepper.flights[0][0].items)
            last = running[-1] if running else None
            launch(step)
            if is_ahead and last is not None:
                num_ahead += 1
                assert not last.query(), f"step {step.number} waited for the one before"

        runner.backend.plan, runner.launch = plan_long, launch_ahead
        drive(runner, stepper, 1)
        assert num_ahead > 10


def test_runner_close_with_steps_in_flight_succeeds(ready):
    with ready() as built:
        stepper = make_stepper(built, [Wish([9, 10, 11], SamplingParams(temperature=0.0), 50)], 0)
        while len(stepper.flights) < 2:
            step = stepper.schedule()
            if step is not None:
                built.runner.launch(step)
        assert not built.runner.cancel()
    torch.cuda.synchronize()

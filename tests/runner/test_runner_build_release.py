"""Whatever was taken is given back: where a start stops, when an engine is released, and beside another engine."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.cache.chunks import ring_tables
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.memory import arena
from holdfast.memory.profiler import measure
from holdfast.planning.target import Target
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner import assembly, weight_load
from holdfast.runner import build as building
from holdfast.runner import runner as running
from holdfast.runner.build import BuiltRunner
from runner.tiny_runners import TinyBuilder, held_storages, watched_arenas

MIB = 1024**2
LOADING = "load_weights"
STAGES = (
    LOADING,
    "PageStorage",
    "Workspace",
    "build_backend",
    "make_step_rope",
    "LayerStack",
    "BatchBuffers",
    "HostSampler",
    "Runner",
)
NUM_ARENAS = 5
"""Weights, the staging that they come through, pages, and two lanes of the workspace."""
STAGING = 1
"""The place of the one that is given back when all weights are there."""


class Trouble(Exception):
    """What no part of the engine raises by itself."""


def fail_at(monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException, is_done: bool) -> None:
    """The stage raises, before or after it has done its work."""
    module = weight_load if stage == LOADING else assembly
    real = getattr(module, stage)

    def fail(*arguments, **options):
        made = real(*arguments, **options) if is_done else None
        assert made is not None or not is_done
        raise error

    monkeypatch.setattr(module, stage, fail)


def caught_from(build: Callable[..., object], *arguments, **options) -> BaseException:
    """The error, kept with all that it remembers, as someone does who tries again in his handler."""
    try:
        build(*arguments, **options)
    except BaseException as error:
        return error
    pytest.fail("it did not fail")


STOPS = [
    *((stage, True, Trouble) for stage in STAGES),
    *((stage, False, Trouble) for stage in STAGES[:4]),  # behind these nothing is entered among what is given back
    *(
        (stage, True, kind)
        for stage in (LOADING, "HostSampler")
        for kind in (KeyboardInterrupt, torch.OutOfMemoryError)
    ),
]


@pytest.mark.parametrize(
    ("stage", "is_done", "kind"),
    STOPS,
    ids=[f"{kind.__name__} {'after' if is_done else 'before'} {stage}" for stage, is_done, kind in STOPS],
)
def test_build_failing_at_any_stage_frees_every_arena(build, monkeypatch, stage, is_done, kind):
    with watched_arenas(monkeypatch) as taken:
        fail_at(monkeypatch, stage, kind("CUDA out of memory: stopped here"), is_done)
        error = caught_from(build, max_model_len=64)
    expected = MemoryPlanError if kind is torch.OutOfMemoryError else kind
    assert isinstance(error, expected)
    assert len(taken) == (0 if stage == LOADING and not is_done else len(taken))
    assert [storage() for storage in taken if storage() is not None] == [], f"{len(taken)} were taken"


@pytest.fixture
def planned_bytes(build) -> int:
    """For a start that goes well."""
    return build(max_model_len=64).plan.memory.total_bytes


CUDA, CPU = (
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: no"),
)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        *((number, CUDA) for number in (0, NUM_ARENAS // 2, NUM_ARENAS - 1)),
        *(pytest.param(number, CUDA, marks=pytest.mark.slow) for number in range(NUM_ARENAS)),
        *((0, CPU), (NUM_ARENAS - 1, CPU)),
    ],
    ids=lambda value: {CUDA: "cuda", CPU: "cpu"}.get(value, str(value)),
)
def test_memory_that_another_took_is_reported_with_the_plan(build, planned_bytes, monkeypatch, number, error):
    allocate, counted = arena.allocate_bytes, []

    def fail_later(num_bytes: int, device: torch.device) -> torch.Tensor:
        counted.append(num_bytes)
        if len(counted) == number + 1:
            raise error
        return allocate(num_bytes, device)

    monkeypatch.setattr(arena, "allocate_bytes", fail_later)
    with watched_arenas(monkeypatch) as taken:
        reported = caught_from(build, max_model_len=64)
    assert isinstance(reported, MemoryPlanError)
    assert len(counted) == number + 1
    assert len(taken) == number
    assert all(storage() is None for storage in taken)
    assert reported.table is not None, "the refusal is the table"
    assert {row.owner for row in reported.table.rows} >= {"weights", "inputs", "rope"}
    if number > STAGING:
        assert (reported.code, reported.values["pages"]) == ("runner.out_of_memory", "128.00 KiB")
        assert reported.table.needed_bytes == planned_bytes
        assert reported.__cause__ is error
    else:
        assert reported.code == "weights.no_memory"


def test_release_on_failed_device_keeps_buffers_with_process(build, monkeypatch):
    """Torch would end a process that let go of pinned memory there; on a CPU the failure is played."""
    kept: list[object] = []
    monkeypatch.setattr(running, "has_failed", lambda device: True)
    monkeypatch.setattr(running, "keep_with_process", kept.append)
    built = build(max_model_len=64)
    places = {name: weakref.ref(getattr(built.runner, name)) for name in ("buffers", "sampler")}
    built.release()
    built.release()
    del built
    gc.collect()
    assert all(place() is not None for place in places.values())
    assert len(kept) == 1
    kept.clear()
    gc.collect()
    assert all(place() is None for place in places.values()), "another held them"


def test_build_can_retry_in_handler_of_failed_start(build, monkeypatch):
    with monkeypatch.context() as patch:
        fail_at(patch, "HostSampler", torch.OutOfMemoryError("CUDA out of memory."), is_done=True)
        error = caught_from(build, max_model_len=64)
    assert isinstance(error, MemoryPlanError)
    assert run(build(max_model_len=64)) == run(build(max_model_len=64))


def run(built: BuiltRunner) -> int | None:
    sequence = Sequence(1, [5, 6, 7], 3, SamplingParams(temperature=0.0), seed=0, max_tokens=1)
    sequence.tables = ring_tables(built.runner.groups, 3, 3)
    return built.runner.execute(LiveStep((ScheduledSequence.of(sequence, 0, 3),))).results[0].token_id


def test_build_config_error_is_not_reported_as_out_of_memory(build, monkeypatch):
    fail_at(monkeypatch, "LayerStack", ConfigError("value.empty", name="it"), is_done=False)
    error = caught_from(build, max_model_len=64)
    assert type(error) is ConfigError


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "float16"}], ids=["native", "torch"])
def test_release_frees_everything_while_runner_is_held(build, monkeypatch, options):
    with watched_arenas(monkeypatch) as taken:
        built = build(max_model_len=64, **options)
    assert len(taken) == NUM_ARENAS
    assert run(built) is not None
    assert [place for place, storage in enumerate(taken) if storage() is None] == [STAGING]
    built.release()
    assert all(storage() is None for storage in taken)
    assert held_storages(built.runner) == {}
    assert built.ledger.total_bytes == 0
    assert list(built.ledger) == []
    assert built.ledger.peak_bytes > 0, "what it was at its largest stays known"
    built.release()


def test_build_dropped_engine_is_freed_without_gc(build, monkeypatch):
    with watched_arenas(monkeypatch) as taken:
        built = build(max_model_len=64)
    run(built)
    gc.collect()
    gc.disable()
    try:
        del built
        assert all(storage() is None for storage in taken)
    finally:
        gc.enable()


@pytest.mark.parametrize("families", [("llama", "llama"), ("opt", "qwen2_window")], ids="-".join)
def test_build_two_runners_run_independently(build, families):
    alone = []
    for family in families:
        built = build(family, max_model_len=64)
        alone.append(run(built))
        built.release()
    first, second = (build(family, max_model_len=64) for family in families)
    assert not held_storages(first.runner).keys() & held_storages(second.runner).keys()
    assert first.ledger is not second.ledger
    assert first.plan.workspace is not second.plan.workspace
    for _ in range(2):
        assert [run(first), run(second)] == alone
    second.release()
    assert run(first) == alone[0]


LARGE = {"kv_cache_memory": 96 * MIB, "max_model_len": 2**15, "max_position": 2**15, "max_num_seqs": 8}
OPEN = LARGE | {"kv_cache_memory": None, "memory_utilization": 1.0}


def test_build_second_engine_fits_remaining_memory_or_refuses(build: TinyBuilder, monkeypatch):
    """For a host with 160 MiB, of which arenas that live are taken."""
    with watched_arenas(monkeypatch) as taken:

        def left_bytes() -> int:
            return 160 * MIB - sum(storage.nbytes() for one in taken if (storage := one()) is not None)

        monkeypatch.setattr(
            building,
            "device_target",
            lambda device, vocab_size=0: Target("cpu", "cpu", 160 * MIB, left_bytes(), 0, "a dummy"),
        )
        first = build(memory_utilization=1.0, **LARGE)
        second = build(**OPEN)
        assert 0 < second.plan.kv_tokens < first.plan.kv_tokens
        assert left_bytes() >= 0
        error = caught_from(build, readable=False, **OPEN)
        assert isinstance(error, MemoryPlanError)
        assert error.table is not None
        assert run(first) == run(second)
        second.release()
        assert build(**OPEN).plan.kv_tokens == second.plan.kv_tokens


@pytest.mark.slow
def test_build_second_engine_budget_excludes_first_engine(build):
    """In a process of its own, whose allocator has nothing in store. Memory that was only promised would be planned twice."""
    code = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from holdfast.memory.profiler import measure
from holdfast.runner import build as building
from holdfast.planning.target import Target
from runner.tiny_runners import TinyBuilder

build = TinyBuilder(Path({str(build.folder)!r}))
build(max_model_len=64)
start = measure("cpu").allocated
building.device_target = lambda device, vocab_size=0: Target("cpu", "cpu", 2**29, 2**29 - (measure("cpu").allocated - start), 0, "")
first, second = (build(memory_utilization=1.0, **{LARGE!r}) for _ in range(2))
print(json.dumps([first.plan.memory.budget_bytes, second.plan.memory.budget_bytes, first.ledger.total_bytes]))
"""
    build(max_model_len=64).release()  # so that the model is there, and the process need not make one
    if measure("cpu") is None:
        pytest.skip("this system does not tell what a process has resident")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first_budget, second_budget, held = json.loads(done.stdout)
    assert held > 96 * MIB
    assert abs(first_budget - second_budget - held) < 8 * MIB

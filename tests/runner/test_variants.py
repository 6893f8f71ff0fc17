"""Variants: one set of weights under several runners; plans before weights; everything given back, wherever it stops."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from error_codes import raises_code
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, MemoryPlanError, UnsupportedModelError
from holdfast.families.backends import build_backend
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.planning.target import Target
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner import variants as module
from holdfast.runner.build import build_runner
from holdfast.runner.runner import Runner
from holdfast.runner.variants import Variant, build_variants, own_bytes
from loading.tiny_models import save_tiny
from runner.tiny_runners import UnreadableSource, held_storages, watched_arenas

CONFIG = EngineConfig(
    device="cpu", max_num_seqs=1, max_num_batched_tokens=32, max_model_len=64, page_tokens=16, enforce_eager=True
)
HALF = replace(CONFIG, kv_cache_dtype="float16")


def silent(done: int, total: int) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", path)
    return path


@contextmanager
def model_of(folder: Path) -> Iterator[OpenModel]:
    model = open_model(str(folder), "auto")
    try:
        yield model
    finally:
        model.source.close()


def step_of(num_tokens: int = 20) -> LiveStep:
    ids = [(7 * place) % 250 + 8 for place in range(num_tokens)]
    sequence = Sequence(1, ids, num_tokens, SamplingParams(), seed=0, max_tokens=1, tables=[[0, 1]])
    return LiveStep((ScheduledSequence.of(sequence, 0, num_tokens),))


def logits(runner: Runner) -> torch.Tensor:
    return runner.row_logits(runner.hidden_rows(step_of())).clone()


def test_weights_are_shared_and_all_else_is_not(folder: Path) -> None:
    with model_of(folder) as model:
        built = build_variants([Variant(CONFIG), Variant(HALF), Variant(CONFIG)], model, silent)
    held = [held_storages(runner) for runner in built.runners]
    shared = set(held[0]) & set(held[1]) & set(held[2])
    weights = held_storages([runner.model._embed_VE for runner in built.runners])
    assert shared == set(weights)
    assert len(shared) == 1
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert set(held[one]) & set(held[other]) == shared
    built.release()


def test_variant_matches_runner_built_alone(folder: Path) -> None:
    with model_of(folder) as model:
        built = build_variants([Variant(CONFIG), Variant(HALF)], model, silent)
    for config, runner in zip((CONFIG, HALF), built.runners, strict=True):
        with model_of(folder) as model:
            alone = build_runner(config, model, silent)
        assert torch.equal(logits(runner), logits(alone.runner))
        alone.release()
    first, second = map(logits, built.runners)
    assert not torch.equal(first, second)
    assert torch.allclose(first, second, atol=0.05)
    # One runner's steps leave the other's pages and workspace alone.
    again = logits(built.runners[0])
    assert torch.equal(again, first)
    assert [plan.resolved.kv_format.name for plan in built.plans] == ["float32", "float16"]
    built.release()


def test_another_attention_may_be_put_in_place(folder: Path) -> None:
    seen = []

    def make(*arguments):
        seen.append(len(arguments))
        backend = build_backend(*arguments)
        inner = backend.attend
        backend.attend = lambda *given: inner(*given).zero_()  # type: ignore[method-assign]
        return backend

    with model_of(folder) as model:
        built = build_variants([Variant(CONFIG), Variant(CONFIG, make)], model, silent)
    plain, silenced = map(logits, built.runners)
    assert seen == [4]
    assert not torch.allclose(plain, silenced, atol=1e-2)
    built.release()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kv_cache_dtype": "turboquant_4bit_nc", "kv_protected_layers": 99}, ConfigError),
        ({"memory_limit": 1000}, MemoryPlanError),
    ],
    ids=str,
)
def test_build_variants_invalid_plan_refused_before_reading(folder: Path, options, error) -> None:
    with model_of(folder) as model:
        unreadable = replace(model, source=UnreadableSource(model.source))
        with pytest.raises(error):
            build_variants([Variant(CONFIG), Variant(replace(CONFIG, **options))], unreadable, silent)


def test_build_variants_too_many_runners_refused(folder: Path, monkeypatch) -> None:
    with model_of(folder) as model:
        built = build_variants([Variant(CONFIG)], model, silent)
        peak, own = built.plans[0].memory.peak_bytes, own_bytes(built.plans[0])
        built.release()
    assert 0 < own < peak
    room = peak + 2 * own
    monkeypatch.setattr(module, "device_target", lambda device: Target("cpu", "cpu", room, room, 0, "a dummy"))
    config = replace(CONFIG, memory_utilization=1.0)
    with model_of(folder) as model:
        build_variants([Variant(config)] * 3, model, silent).release()
    with model_of(folder) as model, raises_code("runner.too_many_runners", MemoryPlanError, num_runners=4) as caught:
        build_variants([Variant(config)] * 4, replace(model, source=UnreadableSource(model.source)), silent)
    assert caught.value.table is not None


def test_weights_of_two_types_are_never_shared(folder: Path) -> None:
    with model_of(folder) as model, pytest.raises(AssertionError, match="2 kinds of weights"):
        build_variants([Variant(CONFIG), Variant(replace(CONFIG, dtype="bfloat16"))], model, silent)


class Stop(Exception):
    """A start that goes wrong."""


def test_everything_is_given_back_where_a_start_stops(folder: Path, monkeypatch) -> None:
    def stop(*arguments):
        raise Stop

    with watched_arenas(monkeypatch) as taken, model_of(folder) as model, pytest.raises(Stop):
        build_variants([Variant(CONFIG), Variant(HALF), Variant(CONFIG, stop)], model, silent)
    assert len(taken) >= 4
    assert all(reference() is None for reference in taken)


def test_everything_is_given_back_in_the_end(folder: Path, monkeypatch) -> None:
    with watched_arenas(monkeypatch) as taken, model_of(folder) as model:
        built = build_variants([Variant(CONFIG), Variant(HALF)], model, silent)
    built.release()
    assert all(reference() is None for reference in taken)
    built.release()


def test_out_of_memory_in_build_variants_raises_code(folder: Path) -> None:
    def stop(*arguments):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    with model_of(folder) as model, raises_code("runner.out_of_memory", MemoryPlanError):
        build_variants([Variant(CONFIG), Variant(CONFIG, stop)], model, silent)


def test_build_variants_unsupported_head_dim_refused(tmp_path: Path) -> None:
    save_tiny("llama_bias", tmp_path)
    with model_of(tmp_path) as model, pytest.raises((ConfigError, UnsupportedModelError), match="24"):
        build_variants([Variant(replace(CONFIG, kv_cache_dtype="fp8"))], model, silent)

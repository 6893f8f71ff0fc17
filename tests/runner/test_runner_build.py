import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.attention.native_paged import NativePagedAttention
from holdfast.attention.torch_paged import TorchPagedAttention
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.loading.model_files import open_model
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import ScheduledSequence, Sequence, Step
from holdfast.runner.build import BuiltRunner, build_runner
from kernels.exactness import require_native
from loading.tiny_models import FAMILIES, save_tiny

MIB = 1024**2
SMALL = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 32, "page_tokens": 4}


class UnreadableSource:
    """Headers only: reading a weight fails the test."""

    def __init__(self, source) -> None:
        self._source = source

    @property
    def entries(self):
        return self._source.entries

    @property
    def ignorable(self):
        return self._source.ignorable

    def read_rows(self, name, row_start, row_end):
        raise AssertionError(f"{name} was read")

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(family) -> where a tiny model of it lies."""

    @cache
    def save(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        save_tiny(family, path)
        return path

    return save


@pytest.fixture(scope="module")
def build(folder):
    """build(family, readable=..., on_progress=..., max_position=..., **options) -> a runner and its account."""

    def build_tiny(
        family: str = "llama",
        *,
        readable: bool = True,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        max_position: int | None = None,
        **options,
    ) -> BuiltRunner:
        model = open_model(str(folder(family)), "auto")
        if max_position is not None:
            model = replace(model, spec=replace(model.spec, max_position=max_position))
        source = model.source if readable else UnreadableSource(model.source)
        try:
            return build_runner(
                EngineConfig.from_options(**(SMALL | options)), replace(model, source=source), on_progress
            )
        finally:
            model.source.close()

    return build_tiny


def held_storages(root: object) -> dict[int, int]:
    """Address and bytes of every tensor's memory that an object reaches."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type | str | bytes | int | float):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        else:
            waiting += getattr(item, "__dict__", {}).values()
            waiting += [getattr(item, name, None) for name in getattr(type(item), "__slots__", ())]
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "float16"], ids=["native", "torch"])
def test_plan_ledger_and_memory_agree_to_the_byte(build, family, kv_cache_dtype):
    built = build(family, kv_cache_dtype=kv_cache_dtype, max_model_len=60)
    planned: dict[str, int] = {"kv pages": built.plan.kv_bytes}
    for term in built.plan.terms:
        group = term.owner.partition("/")[0]
        planned[group] = planned.get(group, 0) + term.num_bytes
    transient = {"activations", "logits", "sampling"}
    assert built.ledger.group_bytes() == {group: size for group, size in planned.items() if group not in transient}
    vocabulary_bytes = 4 * built.runner.vocab_size  # the sampler's own, part of its results
    assert sum(held_storages(built.runner).values()) == built.ledger.total_bytes + vocabulary_bytes


class PeakBytes(TorchDispatchMode):
    """The most bytes at one time in tensors that operations inside made."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known = known
        self._live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._live and storage.data_ptr() not in self._known:
                    self._live[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage.data_ptr(), None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def scheduled(number, num_tokens, pages, params):
    sequence = Sequence(number, [5 + number] * num_tokens, num_tokens, params, seed=0, max_tokens=1, pages=pages)
    return ScheduledSequence(sequence, 0, num_tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("params", [{}, {"prompt_logprobs": 0}], ids=["last rows", "every row"])
def test_the_largest_step_stays_within_the_terms(build, family, params):
    """In C: torch's own attention takes copies of the context on top, which no term knows."""
    require_native()
    built = build(family, max_model_len=60, max_num_batched_tokens=58, max_num_seqs=2)
    parameters = SamplingParams(temperature=0.0, **params)
    step = Step((scheduled(0, 50, list(range(13)), parameters), scheduled(1, 8, [20, 21], parameters)))
    built.runner.execute(step)
    gc.collect()
    with PeakBytes(set(held_storages(built.runner))) as live:
        built.runner.execute(step)
    allowed = sum(
        term.num_bytes for term in built.plan.terms if term.owner.startswith(("activations", "logits", "sampling"))
    )
    tables = 4 * 15 + 8 * 4 * 2  # the page table and sequences of a step, some bytes a sequence
    assert live.peak <= allowed + tables
    activations = next(term.num_bytes for term in built.plan.terms if term.owner == "activations")
    assert live.peak >= activations // 3, "the term is far too large"


def test_a_budget_that_is_too_small_is_refused_before_a_weight_is_read(build):
    with pytest.raises(MemoryPlanError) as caught:
        build(readable=False, memory_limit="200KiB", max_model_len=64)
    for owner in ("weights", "inputs/slots", "logits", "activations", "rope/table", "kv pages"):
        assert owner in str(caught.value)
    assert "the budget is 200.00 KiB (memory_limit)" in str(caught.value)
    assert "raise the memory limit to at least" in str(caught.value)


def test_what_the_refusal_asks_for_is_enough(build):
    with pytest.raises(MemoryPlanError) as caught:
        build(readable=False, memory_limit="200KiB", max_model_len=64)
    asked = caught.value.do.removeprefix("raise the memory limit to at least ").partition(",")[0]
    assert build(memory_limit=asked, max_model_len=64).plan.num_pages >= 16


def test_a_context_that_was_asked_for_is_never_shortened(build):
    fixed = sum(term.num_bytes for term in build(max_model_len=64).plan.terms)
    with pytest.raises(MemoryPlanError, match="lower max_model_len to"):
        build(readable=False, max_model_len=256, memory_limit=fixed + 40_000)


@pytest.mark.parametrize("room", [600, 10_000, 40_000, 100_000])
def test_a_context_left_open_shrinks_to_the_longest_that_fits(build, room):
    least = build(max_model_len=1)
    limit = sum(term.num_bytes for term in least.plan.terms) + least.plan.page_bytes + room
    built = build(memory_limit=limit)
    length = built.resolved.limits.max_model_len
    assert 1 <= length < 256
    assert built.plan.total_bytes <= limit
    assert built.runner.limits.max_model_len == length
    assert built.plan.num_pages * 4 >= length
    choice = next(choice for choice in built.resolved.choices if choice.name == "max_model_len")
    assert choice.reason == "the longest context that fits the memory"
    with pytest.raises(MemoryPlanError):
        build(readable=False, memory_limit=limit, max_model_len=length + 1)


def test_a_context_whose_tables_alone_exceed_the_memory_shrinks_too(build):
    """Tables by position grow with the context as pages do: a long default must not be a reason to refuse."""
    built = build(max_position=10**9, memory_limit="8MiB")
    assert 1000 < built.resolved.limits.max_model_len < 100_000
    assert built.plan.total_bytes <= 8 * MIB


def test_nothing_fits_with_an_open_context_and_the_table_is_about_what_was_meant(build):
    with pytest.raises(MemoryPlanError, match=r"the budget is 100\.00 KiB"):
        build(readable=False, memory_limit="100KiB")


def test_pages_for_every_sequence_at_its_longest_and_no_more(build):
    built = build(max_model_len=64)
    assert built.plan.num_pages == 4 * 16
    assert built.plan.pages_reason == "every sequence at its longest needs no more"


def test_a_bound_on_kv_pages_holds(build):
    built = build(max_model_len=64, kv_cache_memory=20 * 4 * 512 + 100)
    assert built.plan.page_bytes == 4 * 512
    assert built.plan.num_pages == 20
    assert built.plan.kv_bytes <= 20 * 4 * 512 + 100


def test_a_bound_on_kv_pages_shortens_a_context_that_is_left_open(build):
    built = build(kv_cache_memory=20 * 4 * 512)
    assert built.resolved.limits.max_model_len == 80
    assert built.plan.num_pages == 20


def test_a_bound_on_kv_pages_below_the_context_that_was_asked_is_refused(build):
    with pytest.raises(
        MemoryPlanError, match=r"kv_cache_memory of 40\.00 KiB was asked; one sequence of 81 tokens takes"
    ):
        build(readable=False, kv_cache_memory=20 * 4 * 512, max_model_len=81)


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "float16"}],
    ids=["float16", "bfloat16", "float16 pages"],
)
def test_batch_invariance_that_cannot_be_kept_is_refused(build, options):
    with pytest.raises(ConfigError, match=r"batch_invariant=True was asked; torch_paged in .* rounds differently"):
        build(readable=False, batch_invariant=True, max_model_len=64, **options)


def test_batch_invariance_without_a_compiler_is_refused(build, monkeypatch):
    monkeypatch.setattr("holdfast.kernels.paged_attention.native_library", lambda: None)
    with pytest.raises(ConfigError, match="a CPU with a C compiler"):
        build(readable=False, batch_invariant=True, max_model_len=64)


def test_batch_invariance_that_can_be_kept(build):
    require_native()
    assert build(batch_invariant=True, max_model_len=64).layout.backend is NativePagedAttention


def test_backends_follow_formats(build):
    require_native()
    assert build(max_model_len=64).layout.backend is NativePagedAttention
    assert build(max_model_len=64, kv_cache_dtype="bfloat16").layout.backend is TorchPagedAttention


def test_windows_reach_their_layers(build):
    layout = build("qwen2_window", max_model_len=64).layout
    assert [spec.window for spec in layout.specs] == [None, 8, 8]
    assert {spec.max_model_len for spec in layout.specs} == {64}


def test_the_log_says_what_was_chosen_and_why(build, caplog):
    with caplog.at_level(logging.INFO, logger="holdfast"):
        build(kv_cache_dtype="auto", max_model_len=64)
    for line in (
        "dtype=float32 because the fastest exact type on a CPU",
        "kv_cache_dtype=float32 because the same as dtype",
        "because it is the first that takes every layer",
        "Model loading took",
        "Available KV cache memory: 128.00 KiB",
        "KV cache size: 256 tokens, Maximum concurrency for 64 tokens per request: 4.00x",
    ):
        assert line in caplog.text


def test_progress_counts_to_the_end(build):
    seen: list[tuple[int, int]] = []
    build(on_progress=lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_the_runner_knows_what_the_engine_asks(build):
    built = build(max_model_len=64)
    assert built.runner.vocab_size == 259
    assert built.runner.eos_token_ids == frozenset({2})
    assert built.runner.num_pages == built.plan.num_pages
    assert built.load_seconds >= 0


def test_two_runners_do_not_see_each_other(build):
    first, second = build(max_model_len=64), build(max_model_len=64)
    assert not held_storages(first.runner).keys() & held_storages(second.runner).keys()
    assert first.ledger is not second.ledger

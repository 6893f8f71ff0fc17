"""A runner is built as it was planned: to the byte, within the terms, or not at all."""

import gc
import logging
import math
import re
import weakref
from collections import Counter
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from error_codes import raises_code
from holdfast.attention.declarations import AttentionSpec
from holdfast.cache.chunks import ring_tables
from holdfast.cache.spec import LayerCache
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.families.grouped.key_bias import key_bias_norms
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import aligned
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KV_FORMATS
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner.build import BuiltRunner
from kernels.exactness import require_native
from loading.tiny_models import FAMILIES, save_tiny
from runner.tiny_runners import TinyBuilder, held_storages

LAYERS = [
    GroupedAttentionSpec(LayerCache(layer, "attention", KV_FORMATS["fp8"], 2, 16), 6, 0.25, None, 64, "bfloat16", "cpu")
    for layer in range(3)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_key_bias_norms_read_only_key_rows(dtype: torch.dtype) -> None:
    weights = {}
    for layer, size in enumerate((0.0, 2.0, 300.0)):
        bias = torch.full((6 * 16 + 2 * 2 * 16,), 1e4, dtype=dtype)
        bias[96:128] = size
        weights[f"layers.{layer}.qkv.bias"] = bias
    assert key_bias_norms(weights, LAYERS) == pytest.approx([0.0, 2.0 * 32**0.5, 300.0 * 32**0.5])


def test_large_biases_do_not_overflow() -> None:
    weights = {f"layers.{layer}.qkv.bias": torch.full((160,), 6e4, dtype=torch.float16) for layer in range(3)}
    assert key_bias_norms(weights, LAYERS) == pytest.approx([float(torch.tensor(6e4).half()) * 32**0.5] * 3)


MIB = 1024**2
ODD_HEADS = ("llama_bias", "llama_tied")
"""Heads of 24 and of 8 elements."""
DISTINCT = ("llama", "llama_tied", "llama_bias", "qwen2_window", "qwen3", "gemma3", "opt")
"""One for each way of holding weights, pages and positions; the others hold what one of these holds, with other numbers."""
SETTINGS = {
    "native": {"kv_cache_dtype": "float32"},
    "torch": {"kv_cache_dtype": "float16"},
    "half": {"dtype": "bfloat16"},
    "one of everything": {"max_num_seqs": 1, "max_num_batched_tokens": 1, "page_tokens": 1, "max_model_len": 1},
    "fp8": {"kv_cache_dtype": "fp8", "page_tokens": None},
    "mixed": {"kv_cache_dtype": "turboquant_3bit_nc", "page_tokens": None},
    "mixed with plain": {"kv_cache_dtype": "turboquant_4bit_nc", "kv_protected_dtype": "auto", "page_tokens": 1},
    "keys of 5 bits": {"kv_cache_dtype": "turboquant_k5v4", "page_tokens": None},
    "near": {"kv_cache_dtype": "turboquant_3bit_nc", "kv_near_tokens": 64, "page_tokens": None},
    "near and many": {"kv_cache_dtype": "fp8", "kv_near_tokens": 128, "page_tokens": 32, "max_model_len": 250},
    "many": {"max_num_seqs": 70, "max_num_batched_tokens": 300, "page_tokens": 16, "max_model_len": 200},
}


@pytest.mark.parametrize(
    ("settings", "family"),
    [(name, family) for name in SETTINGS for family in (FAMILIES if name == "native" else DISTINCT)],
)
def test_plan_ledger_and_memory_agree_to_the_byte(build, family, settings):
    """Owner by owner; pages, whose planes may end between two aligned places, to what aligning them can cost."""
    options = {"max_model_len": 60} | SETTINGS[settings]
    if is_quantized(options) and family in ODD_HEADS:
        with raises_code("families.format", ConfigError, option="kv_cache_dtype", works="bfloat16") as caught:
            build(family, readable=False, **options)
        assert "head_dim" in caught.value.values["reason"]
        return
    built = build(family, **options)
    held = held_by_owner(built.ledger)
    terms = [term for term in built.plan.memory.terms if "serve" in term.phases and term.group != "sampling"]
    planned = {term.owner: term.num_bytes for term in terms}
    padding_bytes = planned.pop("kv pages/padding", 0)
    kv_bytes = held.pop("kv pages")
    assert held == planned
    assert built.plan.memory.kv_bytes <= kv_bytes <= built.plan.memory.kv_bytes + padding_bytes
    (mask_bytes,) = (term.num_bytes for term in built.plan.memory.terms if term.owner == "sampling/masks")
    own_bytes = 4 * built.runner.vocab_size + 8 * built.runner.limits.max_num_seqs + mask_bytes  # the sampler's results
    assert sum(held_storages(built.runner).values()) == built.ledger.total_bytes + own_bytes


def test_plan_chosen_by_kv_quality_is_what_is_held(build):
    built = build("qwen3", kv_quality="balanced", page_tokens=None, max_model_len=60)
    assert (built.plan.resolved.kv_format.name, built.plan.resolved.near_tokens) == ("turboquant_k5v4", 64)
    planes = {plane.name for plane in KV_FORMATS["turboquant_k5v4"].planes(1, 64)}
    held = [entry for entry in built.ledger if entry.owner.startswith("kv pages/")]
    assert {entry.owner.rpartition(".")[2] for entry in held} == planes
    assert sum(entry.num_bytes for entry in held) >= built.plan.memory.kv_bytes


def is_quantized(options: dict) -> bool:
    return KV_FORMATS[options.get("kv_cache_dtype", "float32")].is_quantized


def held_by_owner(ledger: Ledger) -> dict[str, int]:
    """The ledger in the owners of a plan, which counts weights by group, and pages as one."""
    held: Counter[str] = Counter()
    for entry in ledger:
        group, _, name = entry.owner.partition("/")
        owner = {"weights": f"weights/{name.partition('.')[0]}", "kv pages": "kv pages"}.get(group, entry.owner)
        held[owner] += entry.num_bytes
    return dict(held)


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


def spec_of(built: BuiltRunner) -> AttentionSpec:
    return built.plan.attention_specs[0]


def scheduled(built, number, num_tokens, params, first_page=0):
    sequence = Sequence(number, [5 + number] * num_tokens, num_tokens, params, seed=0, max_tokens=1)
    tables = ring_tables(built.runner.groups, num_tokens, num_tokens)
    sequence.tables = [[first_page + page for page in table] for table in tables]
    return ScheduledSequence.of(sequence, 0, num_tokens)


@pytest.mark.parametrize("family", DISTINCT)
def test_build_largest_step_stays_within_terms(build, family):
    """For last rows, then of every row. In C: torch's own attention takes copies of the context on top, which no term knows."""
    require_native()
    built = build(family, max_model_len=60, max_num_batched_tokens=58, max_num_seqs=2)
    allowed = sum(term.num_bytes for term in built.plan.memory.terms if term.group == "sampling")
    tables = len(built.runner.groups) * (
        4 * 15 + 8 * 4 * 2
    )  # the page table and sequences of a step, some bytes a sequence
    wanted_queries = 2 * 4 * spec_of(built).num_heads * spec_of(built).cache.head_dim  # of the last layer
    for params in ({}, {"prompt_logprobs": 0}):
        parameters = SamplingParams(temperature=0.0, **params)
        long = scheduled(built, 0, 50, parameters)
        num_pages = sum(map(len, long.sequence.tables))
        step = LiveStep((long, scheduled(built, 1, 8, parameters, num_pages)))
        built.runner.execute(step)
        gc.collect()
        with PeakBytes(set(held_storages(built.runner))) as live:
            built.runner.execute(step)
        assert live.peak <= allowed + tables + wanted_queries, f"{params=}"


def test_build_over_budget_refused_before_reading(build):
    with pytest.raises(MemoryPlanError) as caught:
        build(readable=False, memory_limit="1200KiB", max_model_len=4096, max_position=4096)
    for owner in ("weights", "inputs", "workspace", "rope", "sampling", "kv pages"):
        assert re.search(rf"\b{owner} \d+\.\d\d [KM]iB", str(caught.value))
    assert "The budget is 1.17 MiB (memory_limit)" in str(caught.value)
    assert caught.value.table is not None
    assert caught.value.table.short_bytes > 0
    assert {"kv pages", "weights"} <= {row.owner for row in caught.value.table.rows}


def test_build_memory_limit_named_in_refusal_suffices(build):
    with pytest.raises(MemoryPlanError) as caught:
        build(readable=False, memory_limit="200KiB", max_model_len=64)
    raised = re.search(r"memory_limit to (\d+MiB)", str(caught.value))
    assert raised is not None, str(caught.value)
    assert build(memory_limit=raised[1], max_model_len=64).plan.memory.num_pages >= 16


def test_given_context_is_never_shortened(build):
    limit = build(max_model_len=64).plan.memory.peak_bytes
    with pytest.raises(MemoryPlanError, match=r"kv pages 2\.00 MiB"):
        build(readable=False, max_position=4096, max_model_len=4096, memory_limit=limit)


@pytest.mark.parametrize("room", [0, 600, 10_000, 100_000, 500_000])
def test_build_open_context_shrinks_to_longest_fit(build, room):
    limit = build(max_model_len=1).plan.memory.peak_bytes + room
    built = build(max_position=4096, memory_limit=limit)
    length = built.plan.resolved.limits.max_model_len
    assert 1 <= length < 4096
    assert built.plan.memory.peak_bytes <= limit
    assert built.runner.limits.max_model_len == length
    assert built.plan.memory.num_pages * 4 >= length
    choice = next(choice for choice in built.plan.resolved.choices if choice.name == "max_model_len")
    assert choice.reason.startswith("shortened from the model's own 4,096: no more fits ")
    assert built.plan.context_note.startswith(f"context of {length:,} tokens, {choice.reason}")
    with pytest.raises(MemoryPlanError):
        build(readable=False, max_position=4096, memory_limit=limit, max_model_len=length + 1)


def test_build_open_context_far_beyond_memory_shrinks(build):
    """A long default must not be a reason to refuse."""
    built = build(max_position=10**9, memory_limit="8MiB")
    assert 1000 < built.plan.resolved.limits.max_model_len < 100_000
    assert built.plan.memory.peak_bytes <= 8 * MIB


def test_build_open_context_without_fit_refused_with_budget(build):
    with pytest.raises(MemoryPlanError, match=r"The budget is 100\.00 KiB"):
        build(readable=False, memory_limit="100KiB")


def test_pages_for_every_sequence_at_its_longest_and_no_more(build):
    built = build(max_model_len=64)
    assert built.plan.memory.num_pages == 4 * 16
    assert built.plan.memory.pages_reason == "every sequence at its longest needs no more"


def test_build_kv_cache_memory_bounds_pages(build):
    built = build(max_model_len=64, kv_cache_memory=20 * 4 * 512 + 100)
    assert built.plan.memory.page_bytes == 4 * 512
    assert built.plan.memory.num_pages == 20
    assert built.plan.memory.kv_bytes <= 20 * 4 * 512 + 100


def test_build_kv_cache_memory_shortens_open_context(build):
    built = build(kv_cache_memory=20 * 4 * 512)
    assert built.plan.resolved.limits.max_model_len == 80
    assert built.plan.memory.num_pages == 20


def test_kv_cache_memory_below_the_given_context_raises(build):
    with pytest.raises(MemoryPlanError, match=r"kv_cache_memory is 40\.00 KiB, and one sequence of 81 tokens needs"):
        build(readable=False, kv_cache_memory=20 * 4 * 512, max_model_len=81)


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "float16"}],
    ids=["float16", "bfloat16", "float16 pages"],
)
def test_batch_invariance_that_cannot_be_kept_is_refused(build, options):
    with pytest.raises(ConfigError, match="batch_invariant=True is not possible: torch_paged"):
        build(readable=False, batch_invariant=True, max_model_len=64, **options)


def test_batch_invariance_without_a_compiler_is_refused(build, monkeypatch):
    monkeypatch.setattr("holdfast.kernels.native_library.native_library", cache(lambda: None))
    with pytest.raises(ConfigError, match="a CPU with a C compiler"):
        build(readable=False, batch_invariant=True, max_model_len=64)


def test_batch_invariance_that_can_be_kept(build):
    require_native()
    assert build(batch_invariant=True, max_model_len=64).plan.declaration.name == "native_paged"


def test_backends_follow_formats(build):
    require_native()
    assert build(max_model_len=64).plan.declaration.name == "native_paged"
    assert build(max_model_len=64, kv_cache_dtype="bfloat16").plan.declaration.name == "torch_paged"


@pytest.mark.parametrize("kv_format", [name for name, value in KV_FORMATS.items() if value.is_quantized])
def test_pages_of_quantized_formats(build, kv_format):
    built = build("qwen3", kv_cache_dtype=kv_format, kv_near_tokens=0, page_tokens=None, max_model_len=100)
    assert built.runner.limits.page_tokens == 64
    names = [spec.cache.format.name for spec in built.plan.attention_specs]
    num_wide = min(DEFAULT_PROTECTED_LAYERS[kv_format], 1)
    assert names == ["fp8"] * num_wide + [kv_format] * (3 - num_wide)
    per_token = sum(KV_FORMATS[name].bytes_per_token(2, 32) for name in names)
    assert built.plan.memory.page_bytes == 64 * per_token


def test_weights_say_which_layers_are_protected(build, caplog):
    """The layers with the largest key biases of the checkpoint, as many as were planned for; the log tells why.

    No context outgrows the window, so that all layers are one group.
    """
    with caplog.at_level(logging.INFO, logger="holdfast"):
        options = {"kv_cache_dtype": "turboquant_4bit_nc", "kv_near_tokens": 0}
        built = build("qwen2_window", **options, max_model_len=8, page_tokens=None)
    weights = load_file(build.folder / "qwen2_window" / "model.safetensors")
    norms = [weights[f"model.layers.{layer}.self_attn.k_proj.bias"].norm().item() for layer in range(3)]
    largest = norms.index(max(norms))
    assert_protected(built, (largest,))
    planned = (
        "kv_protected_layers=1 because half of the layers, 4 would be more; kept in fp8: those with the largest key"
    )
    assert planned in caplog.text
    assert (
        f"kv_protected_layers={largest}, because their key biases are the largest, {max(norms):.3g} to" in caplog.text
    )


@pytest.mark.parametrize("norms", [[1.0, 1.0, 50.0], [0.0, 3.0, 2.0], [9.0, 3.0, math.nan]])
@pytest.mark.parametrize("count", [1, 2])
def test_pages_and_attention_follow_the_weights(build, monkeypatch, norms, count):
    monkeypatch.setattr("holdfast.runner.assembly.key_bias_norms", lambda *_: norms)
    options = {"kv_cache_dtype": "turboquant_k3v4_nc", "kv_protected_dtype": "auto", "kv_protected_layers": count}
    built = build("qwen2_window", **options, kv_near_tokens=0, max_model_len=8)
    sizes = [math.inf if math.isnan(norm) else norm for norm in norms]
    expected = sorted(sorted(range(3), key=lambda layer: -sizes[layer])[:count])
    if norms[:2] == [1.0, 1.0] and count == 2:
        expected = [0, 2]
    assert_protected(built, tuple(expected), "float32")


def test_build_listed_layers_are_protected(build):
    built = build("qwen2_window", kv_cache_dtype="turboquant_k8v4", kv_protected_layers="0,2", max_model_len=8)
    assert_protected(built, (0, 2))
    assert "kv_protected_layers" not in {choice.name for choice in built.plan.resolved.choices}


def test_build_cache_groups_protect_layers_by_position(build):
    """Weights come too late: which layers are wider decides how groups share a page."""
    options = {"kv_cache_dtype": "turboquant_4bit_nc", "kv_near_tokens": 0, "page_tokens": None, "max_model_len": 64}
    built = build("qwen2_window", **options)
    assert built.plan.resolved.protected.layers == ()
    (reason,) = (choice.reason for choice in built.plan.resolved.choices if choice.name == "kv_protected_layers")
    assert re.fullmatch(
        r"1 in fp8, half of the layers, 4 would be more, would leave \d+% of a cache group's pages unused", reason
    )
    requested = build("qwen2_window", **options, kv_protected_layers=1).plan
    assert requested.resolved.protected.layers == (0,)
    assert not requested.resolved.protected.is_open
    assert max(group.padding_share for group in requested.groups) > 0.05


def assert_protected(built: BuiltRunner, layers: tuple[int, ...], kv_format: str = "fp8") -> None:
    """In the plan, in what attention is reported, and in the pages that are there."""
    plan = built.plan
    assert plan.resolved.protected.layers == layers
    assert plan.cache is not None
    assert [spec.cache for spec in plan.attention_specs] == list(plan.cache.layers)
    wide = tuple(layer.layer for layer in plan.cache.layers if layer.format.name == kv_format)
    assert wide == layers
    held = [entry for entry in built.ledger if entry.owner.startswith("kv pages/")]
    names = [entry.owner.partition("/")[2] for entry in held]
    assert names == [f"{each.layer}.attention.{plane.name}" for each in plan.cache.layers for plane in each.planes]
    tokens = plan.kv_tokens
    sizes = [aligned(tokens * plane.bytes_per_token) for each in plan.cache.layers for plane in each.planes]
    assert [entry.num_bytes for entry in held] == sizes


def test_windows_reach_their_layers(build):
    specs = build("qwen2_window", max_model_len=64).plan.attention_specs
    assert [spec.window for spec in specs] == [None, 8, 8]
    assert [spec.group for spec in specs] == [0, 1, 1]
    assert {spec.max_model_len for spec in specs} == {64}


def test_build_logs_every_choice_and_its_reason(build, caplog):
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


def test_build_runner_has_vocabulary_eos_and_pages(build):
    built = build(max_model_len=64)
    assert built.runner.vocab_size == 259
    assert built.runner.eos_token_ids == frozenset({2})
    assert built.runner.num_pages == built.plan.memory.num_pages
    assert built.load_seconds >= 0


def test_build_runner_has_every_eos_token_id(tmp_path):
    """Models that follow instructions name two or three."""
    save_tiny("llama", tmp_path / "llama", eos_token_id=[2, 5])
    assert TinyBuilder(tmp_path)(max_model_len=64).runner.eos_token_ids == frozenset({2, 5})


def test_build_two_runners_share_no_storage(build):
    first, second = build(max_model_len=64), build(max_model_len=64)
    assert not held_storages(first.runner).keys() & held_storages(second.runner).keys()
    assert first.ledger is not second.ledger

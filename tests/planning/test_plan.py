"""The door to planning: a plan, or a refusal whose advice works; and no torch behind it."""

import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from error_codes import raises_code
from for_each import for_each
from holdfast.cache.spec import kv_padding_term
from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.memory.planner import PHASES
from holdfast.memory.workspace_plan import TensorSpec, arena_bytes
from holdfast.planning.fit import fit_runner, missing_here, try_fit, unfitting_runner
from holdfast.planning.plan import RunnerPlan, plan_runner
from holdfast.planning.resolve import PlanRequest, resolve
from holdfast.planning.target import memory_target
from holdfast.quant.formats import (
    COMPRESSED_FORMATS,
    COMPRESSED_NAMES,
    DEFAULT_PROTECTED_LAYERS,
    KV_FORMATS,
    MLA_FORMATS,
    MLA_NAMES,
)
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from models.model_sample import SOME_MODELS
from planning.plan_cases import A100, GIB, H200, HOST, RTX4090, declared, plan_request


def test_fit_runner_runnable_model_has_attention_specs() -> None:
    plan = fit_runner(plan_request("Qwen3-32B", H200, memory_utilization=0.98))
    assert plan.kv_bytes_per_token == 262144
    assert plan.kv_tokens == 16 * plan.memory.num_pages
    assert plan.max_concurrency == plan.kv_tokens / 40960
    assert plan.cache is not None
    assert plan.cache.bytes_per_page == plan.memory.page_bytes == 16 * 262144
    assert len(plan.attention_specs) == len(plan.cache.layers) == 64
    assert plan.attention_specs[5].cache is plan.cache.layers[5]
    assert plan.declaration is not None
    assert plan.not_in_this_version == ()
    assert plan.target is H200
    assert plan.memory.peak_bytes <= 0.98 * H200.total_bytes


def test_fit_runner_planned_only_model_has_no_attention_specs() -> None:
    plan = fit_runner(
        plan_request("gemma-2-9b", memory_target("400GiB"), kv_cache_dtype="bfloat16", max_model_len=100_000)
    )
    assert plan.cache is None
    assert plan.declaration is None
    assert plan.attention_specs == ()
    assert plan.kv_bytes_per_token == 172_032
    assert plan.memory.page_bytes == 16 * 172_032
    assert plan.kv_bytes_per_sequence == declared("gemma-2-9b").kv_bytes_per_sequence("bfloat16") > 0
    assert len(plan.not_in_this_version) == 1
    assert plan.resolved.limits.page_tokens == 16


@for_each("kv_format", KV_FORMATS)
@for_each("name", SOME_MODELS)
def test_fit_runner_every_model_in_every_kv_format(name: str, kv_format: str) -> None:
    wanted = plan_request(name, memory_target("2TiB"), kv_cache_dtype=kv_format, max_model_len=2048)
    model, found = declared(name), KV_FORMATS[kv_format]
    if model.keeps_latents and kv_format in MLA_NAMES:
        found = MLA_FORMATS[MLA_NAMES[kv_format]]
    if model.is_compressed and kv_format in COMPRESSED_NAMES:
        found = COMPRESSED_FORMATS[COMPRESSED_NAMES[kv_format]]
    if model.declaration.unsupported_format(found) is not None:
        with pytest.raises(ConfigError, match=r"this model .*. Try bfloat16 or fp8"):
            fit_runner(wanted)
        return
    plan = fit_runner(wanted)
    num_wide = len(plan.resolved.protected.layers)
    narrow, wide = (model.kv_bytes_per_token(each) / model.num_layers for each in (kv_format, "fp8"))
    assert plan.kv_bytes_per_token == (model.num_layers - num_wide) * narrow + num_wide * wide
    if plan.cache is not None:
        reasons = {choice.name: choice.reason for choice in plan.resolved.choices}
        is_dropped = len(plan.cache.groups) > 1 and "pages unused" in reasons.get("kv_protected_layers", "")
        has_none = is_dropped or plan.resolved.near_tokens > 0
        assert num_wide == (0 if has_none else DEFAULT_PROTECTED_LAYERS.get(found.name, 0))
        if not model.is_compressed:  # where windows are not counted, and rows stand for several tokens
            assert plan.cache.bytes_per_token == plan.kv_bytes_per_token
        assert plan.cache.bytes_per_page == plan.memory.page_bytes
        is_tiled = found.is_quantized and not model.is_compressed
        assert plan.cache.page_tokens == (64 if is_tiled or model.keeps_latents else 16)
    bare = fit_runner(replace(wanted, config=replace(wanted.config, kv_protected_layers=0)))
    assert bare.kv_bytes_per_token == model.kv_bytes_per_token(kv_format)


QWEN3_32B = {
    "bfloat16": (262_144, 262_144),
    "fp8": (64 * 8 * 260, 133_120),
    "turboquant_k8v4": (64 * 8 * 196, 100_352),
    "turboquant_k5v4": (64 * 8 * 148, 75_776),
    "turboquant_4bit_nc": (64 * 8 * 132, 67_584),
    "turboquant_k3v4_nc": (64 * 8 * 116, 59_392),
    "turboquant_3bit_nc": (64 * 8 * 100, 51_200),
}
"""Bytes of a token without protected layers, twice."""
MOST = {"turboquant_k8v4": 196, "turboquant_4bit_nc": 134, "turboquant_k3v4_nc": 118, "turboquant_3bit_nc": 102}
"""What vLLM takes for a token and head of 128."""


@pytest.mark.parametrize(("kv_format", "sizes"), QWEN3_32B.items())
def test_bytes_of_a_token_by_hand(kv_format: str, sizes: tuple[int, int]) -> None:
    def token_bytes(**options: object) -> Fraction:
        plan = fit_runner(plan_request("Qwen3-32B", H200, kv_cache_dtype=kv_format, **options))
        assert plan.cache is not None
        assert plan.cache.bytes_per_token == plan.kv_bytes_per_token
        return plan.kv_bytes_per_token

    assert token_bytes(kv_protected_layers=0) == sizes[0] == sizes[1]
    assert sizes[0] <= 64 * 8 * MOST.get(kv_format, 512)
    per_layer = sizes[0] // 64
    if KV_FORMATS[kv_format].is_quantized:
        in_bfloat16 = token_bytes(kv_protected_layers=4, kv_protected_dtype="auto")
        assert in_bfloat16 == 60 * per_layer + 4 * 8 * 512
    if kv_format.startswith("turboquant"):
        assert token_bytes(kv_protected_layers=4) == 60 * per_layer + 4 * 8 * 260
        assert token_bytes(kv_protected_layers="3,9,10") == 61 * per_layer + 3 * 8 * 260
        assert token_bytes(kv_protected_layers=64) == 64 * 8 * 260


def test_fit_runner_qwen3_32b_in_k8v4_holds_720k_tokens_on_h200() -> None:
    plan = fit_runner(plan_request("Qwen3-32B", H200, kv_cache_dtype="turboquant_k8v4", memory_utilization=0.98))
    assert plan.kv_tokens >= 720_000
    near_pages = plan.groups[-1].decode_pages
    assert plan.kv_tokens == plan.memory.num_pages * 40960 // (40960 // 64 + near_pages)
    assert plan.not_in_this_version == ()


def test_other_layers_in_the_wider_format_take_as_much() -> None:
    options = {"kv_cache_dtype": "turboquant_3bit_nc", "kv_near_tokens": 0}
    plan = fit_runner(plan_request("Qwen2.5-7B-Instruct", H200, **options))
    assert plan.cache is not None
    assert plan.resolved.protected.is_open
    moved = plan.with_protected((3, 7, 8, 20), "a dummy")
    assert moved.cache is not None
    names = [layer.format.name for layer in moved.cache.layers]
    assert [layer for layer, name in enumerate(names) if name == "fp8"] == [3, 7, 8, 20]
    assert names.count("turboquant_3bit_nc") == 24
    assert [spec.cache for spec in moved.attention_specs] == list(moved.cache.layers)
    assert [(spec.window, spec.num_heads) for spec in moved.attention_specs] == [
        (spec.window, spec.num_heads) for spec in plan.attention_specs
    ]
    assert moved.cache.bytes_per_page == plan.cache.bytes_per_page == moved.memory.page_bytes
    assert kv_padding_term(moved.cache) == kv_padding_term(plan.cache)
    assert moved.memory is plan.memory
    assert not moved.resolved.protected.is_open
    assert all(spec.has_key_bias for spec in moved.attention_specs), "fp8 is quantized too"
    with pytest.raises(AssertionError, match="were not planned for"):
        plan.with_protected((3, 7), "fewer")
    plain = plan_request(
        "Qwen2.5-7B-Instruct",
        H200,
        **options,
        kv_protected_layers=2,
        kv_protected_dtype="auto",
    )
    moved = fit_runner(plain).with_protected((5, 6), "a dummy")
    assert [layer for layer, spec in enumerate(moved.attention_specs) if not spec.has_key_bias] == [5, 6]


MIXED = st.builds(
    lambda name, kv_format, layers, page: plan_request(
        name,
        H200,
        kv_cache_dtype=kv_format,
        kv_protected_layers=layers,
        kv_protected_dtype="auto",
        page_tokens=page,
        kv_near_tokens=0,
    ),
    st.sampled_from(["SmolLM2-135M", "Qwen3-0.6B", "Qwen2.5-0.5B-Instruct"]),
    st.sampled_from([name for name, value in KV_FORMATS.items() if value.is_quantized]),
    st.none()
    | st.integers(0, 24)
    | st.lists(st.integers(0, 23), min_size=2, max_size=9, unique=True).map(lambda found: ",".join(map(str, found))),
    st.sampled_from([None, 1, 16, 64]),
)


@given(MIXED, st.integers(1, 3))
@settings(max_examples=60)
def test_pages_of_any_mix_take_what_was_planned(wanted: PlanRequest, num_pages: int) -> None:
    """What the arena of the pages takes is pages times the page, and padding no more than its term."""
    resolved = resolve(wanted)
    plan = fit_runner(wanted)
    assert plan.cache is not None
    padding = sum(term.num_bytes for term in plan.memory.terms if term.owner == "kv pages/padding")
    assert padding == kv_padding_term(plan.cache).num_bytes
    assert plan.cache.bytes_per_page == resolved.page_bytes() == plan.memory.page_bytes
    specs = [
        TensorSpec(plane.name, (num_pages * plan.cache.page_tokens, *plane.token_shape), plane.dtype)
        for layer in plan.cache.layers
        for plane in layer.planes
    ]
    unused = arena_bytes(specs) - num_pages * plan.memory.page_bytes
    assert 0 <= unused <= padding


MODELS = st.sampled_from(["SmolLM2-135M", "Qwen3-0.6B", "Qwen3-8B", "OPT-125m", "Qwen3-30B-A3B", "DeepSeek-V2-Lite"])
REQUESTS = st.builds(
    lambda name, gib, util, seqs, tokens, length, page, eager: PlanRequest(
        EngineConfig(
            memory_utilization=util,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=None if length is None else min(length, declared(name).max_position),
            page_tokens=page,
            enforce_eager=eager,
        ),
        declared(name),
        memory_target(f"{gib}GiB"),
    ),
    MODELS,
    st.integers(1, 200),
    st.floats(0.05, 1.0),
    st.integers(1, 600),
    st.integers(1, 20_000),
    st.none() | st.integers(1, 200_000),
    st.sampled_from([1, 16, 256]),
    st.booleans(),
)


@given(REQUESTS)
@settings(max_examples=150)
def test_fit_runner_plan_is_largest_that_fits(wanted: PlanRequest) -> None:
    fit = try_fit(resolve(wanted))
    resolved = resolve(wanted)
    if fit is None:
        smallest = unfitting_runner(resolve(wanted))
        assert smallest.memory.peak_bytes > resolved.budget_bytes
        with pytest.raises(MemoryPlanError):
            fit_runner(wanted)
        return
    memory, limits = fit.memory, fit.resolved.limits
    assert memory.peak_bytes <= resolved.budget_bytes
    assert memory.total_bytes == memory.kv_bytes + sum(
        term.num_bytes for term in memory.terms if "serve" in term.phases
    )
    per_sequence = -(-limits.max_model_len // limits.page_tokens)
    assert per_sequence <= memory.num_pages <= limits.max_num_seqs * per_sequence
    if memory.num_pages < limits.max_num_seqs * per_sequence:
        assert replace(memory, num_pages=memory.num_pages + 1).peak_bytes > resolved.budget_bytes
    if limits.max_model_len < resolved.limits.max_model_len:
        assert resolved.may_shorten
        longer = replace(wanted.config, max_model_len=limits.max_model_len + 1)
        assert try_fit(resolve(replace(wanted, config=longer))) is None
    assert fit_runner(wanted).kv_tokens == fit.kv_tokens


@given(REQUESTS, st.integers(1, 64))
@settings(max_examples=50)
def test_fit_runner_more_memory_never_gives_fewer_tokens(wanted: PlanRequest, more: int) -> None:
    fit = try_fit(resolve(wanted))
    larger = try_fit(resolve(replace(wanted, target=memory_target(wanted.target.total_bytes + more * GIB))))
    if fit is not None:
        assert larger is not None
        assert larger.kv_tokens >= fit.kv_tokens


def test_fit_runner_open_context_shrinks_with_reason() -> None:
    plan = fit_runner(plan_request("Llama-3.1-8B", RTX4090))
    assert plan.resolved.limits.max_model_len == plan.kv_tokens < 131072
    choice = next(choice for choice in plan.resolved.choices if choice.name == "max_model_len")
    assert choice.reason == (
        "shortened from the model's own 131,072: no more fits 21.17 GiB (90% of the device's 23.52 GiB)"
    )
    assert plan.context_note == "", "the door to planning adds what would lift it"
    noted = plan_runner(PlanRequest(EngineConfig(), declared("Llama-3.1-8B"), RTX4090)).context_note
    assert (
        f"context of {plan.kv_tokens:,} tokens, {choice.reason}; to lift it: set memory_utilization=0.98 and " in noted
    )


def test_given_context_does_not_shrink() -> None:
    with pytest.raises(MemoryPlanError, match="short"):
        fit_runner(plan_request("Llama-3.1-8B", RTX4090, max_model_len=131072))


def test_open_context_without_one_token_is_refused() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        fit_runner(plan_request("Llama-3.1-70B", A100))
    table = caught.value.table
    assert table is not None
    pages = next(row for row in table.rows if row.owner == "kv pages")
    assert pages.num_bytes == 16 * 327680, "one page"


def test_fit_runner_host_pages_bounded_by_default_or_sequence() -> None:
    plan = fit_runner(plan_request("Qwen3-0.6B", HOST, max_model_len=2048))
    assert GIB - plan.memory.page_bytes < plan.memory.kv_bytes <= GIB
    assert "on a CPU, unless an option sets more" in plan.memory.pages_reason
    long = fit_runner(plan_request("Qwen3-0.6B", HOST, max_model_len=40960))
    assert long.memory.kv_bytes == 40960 * 229376 > GIB


def test_memory_for_pages_alone() -> None:
    plan = fit_runner(plan_request("Qwen3-8B", H200, kv_cache_memory="7GiB", max_model_len=4096))
    assert plan.memory.kv_bytes == 7 * GIB // plan.memory.page_bytes * plan.memory.page_bytes
    assert plan.memory.pages_reason == "kv_cache_memory"
    with raises_code("plan.kv_cache_too_small", MemoryPlanError, value="1.00 MiB", max_model_len=4096):
        fit_runner(plan_request("Qwen3-8B", H200, kv_cache_memory="1MiB", max_model_len=4096))
    shrunk = fit_runner(plan_request("Qwen3-8B", H200, kv_cache_memory="1GiB"))
    assert shrunk.resolved.limits.max_model_len == GIB // 147456 // 16 * 16


def test_fit_runner_plans_no_more_pages_than_usable() -> None:
    plan = fit_runner(plan_request("Qwen3-0.6B", H200, max_num_seqs=2, max_model_len=1000))
    assert plan.kv_tokens == 2 * 1008
    assert plan.max_concurrency == 2.016


def test_unfitting_runner_table_equals_table_of_refusal() -> None:
    wanted = plan_request("Qwen3-32B", RTX4090, max_model_len=4096)
    plan = unfitting_runner(resolve(wanted))
    assert plan.kv_tokens == 4096
    with pytest.raises(MemoryPlanError) as caught:
        fit_runner(wanted)
    assert caught.value.table == plan.memory.table("serve")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ()),
        ({"quantization": "none", "kv_cache_dtype": "float16"}, ()),
        *(({"kv_cache_dtype": name}, ()) for name in KV_FORMATS),
        *(({"quantization": name}, ()) for name in WEIGHT_SCHEMES),
        ({"tensor_parallel_size": 2}, ()),
        ({"name": "DeepSeek-V4-Flash", "tensor_parallel_size": 4}, ()),
        ({"name": "Qwen3-30B-A3B"}, ()),
    ],
)
def test_missing_here_lists_unsupported_parts(options, words) -> None:
    wanted = plan_request(**options)
    assert missing_here(wanted) == words
    assert fit_runner(wanted).not_in_this_version == words


@pytest.mark.parametrize("target", [H200, HOST])
def test_quantized_weights_leave_more_room(target) -> None:
    plans = [fit_runner(plan_request("Qwen3-0.6B", target, quantization=name)) for name in (None, "fp8")]
    tokens = [plan.kv_tokens for plan in plans]
    assert tokens[0] < tokens[1] if target is H200 else tokens[0] == tokens[1], (
        "pages on a CPU have a bound of their own"
    )


def test_staging_costs_no_pages() -> None:
    plan = fit_runner(plan_request("Qwen3-8B", H200))
    assert plan.memory.phase_bytes["load"] < plan.memory.phase_bytes["serve"]
    assert {phase for term in plan.memory.terms for phase in term.phases} == set(PHASES)


def test_absurd_limits_are_refused_and_not_tried() -> None:
    with pytest.raises(MemoryPlanError):
        fit_runner(
            plan_request(
                "Qwen3-8B", H200, max_num_seqs=2**31 - 1, max_num_batched_tokens=2**31 - 1, max_model_len=2**31 - 1
            )
        )


def test_fit_runner_budget_below_weights_refused() -> None:
    with pytest.raises(MemoryPlanError, match=r"needs \d+\.\d\d GiB in its serve phase \(weights 15\.26 GiB"):
        fit_runner(plan_request("Qwen3-8B", memory_target("8GiB")))
    with pytest.raises(MemoryPlanError):
        fit_runner(plan_request("Qwen3-8B", memory_target(1)))


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 is not possible"):
        fit_runner(plan_request("Qwen3-8B", tensor_parallel_size=3))
    stages = Mesh(stage=3, num_stages=37, layers=(3, 4))
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 37, but Qwen3-8B has 36 layers"):
        fit_runner(plan_request("Qwen3-8B", mesh=stages))


def test_fit_runner_two_ranks_hold_half_each() -> None:
    one, two = (fit_runner(plan_request("Qwen3-32B", H200, tensor_parallel_size=ranks)) for ranks in (1, 2))
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token
    assert two.attention_specs[0].num_heads == 32
    weights = [sum(term.num_bytes for term in plan.memory.terms if term.group == "weights") for plan in (one, two)]
    assert 0.499 < weights[1] / weights[0] < 0.502


def test_plan_runner_gives_plan_with_expected_tokens() -> None:
    plan = plan_runner(PlanRequest(EngineConfig(), declared("Qwen3-8B"), H200))
    assert isinstance(plan, RunnerPlan)
    assert plan.kv_tokens > 700_000
    quantized = plan_runner(PlanRequest(EngineConfig(kv_cache_dtype="fp8"), declared("Qwen3-8B"), H200))
    assert quantized.kv_tokens > 1.9 * plan.kv_tokens
    assert quantized.not_in_this_version == ()


@pytest.mark.parametrize(
    ("name", "target", "options", "advice"),
    [
        (
            "Qwen3-32B",
            A100,
            {"max_model_len": 40960},
            r"Raise memory_utilization to 0\.\d\d, or .*: each of them fits\.$",
        ),
        (
            "Llama-3.1-8B",
            RTX4090,
            {"max_model_len": 131072},
            r"Lower max_model_len to \d+, or .* or set quantization=fp8, .* and max_num_seqs=4: each of them fits\.$",
        ),
        (
            "Qwen3-32B",
            RTX4090,
            {},
            r"Keep weights in mxfp4 \(quantization=mxfp4\), or share it among 4 GPUs, or take \S+: each of them fits\.$",
        ),
        (
            "Llama-3.1-70B",
            RTX4090,
            {},
            r"Set tensor_parallel_size=2 and quantization=mxfp4, or take b200: each of them fits\.$",
        ),
        (
            "Qwen3-0.6B",
            HOST,
            {"memory_limit": "2GiB", "max_model_len": 2048},
            r"Raise memory_limit to \d+MiB, or .*\(quantization=\w+\): each of them fits\.$",
        ),
        (
            "DeepSeek-R1",
            H200,
            {},
            r"Share it among 8 GPUs, which fits\.$",
        ),
    ],
)
def test_plan_runner_refusal_ends_with_smallest_changes(name, target, options, advice) -> None:
    with pytest.raises(MemoryPlanError, match=advice) as caught:
        plan_runner(PlanRequest(EngineConfig(**options), declared(name), target))
    error = caught.value
    assert error.code == "plan.over_budget"
    assert error.table is not None, "the table comes along"
    assert error.table.short_bytes > 0
    plan = unfitting_runner(resolve(PlanRequest(EngineConfig(**options), declared(name), target)))
    assert plan.memory.peak_bytes - plan.memory.budget_bytes == error.table.short_bytes


def test_pages_alone_that_are_too_few() -> None:
    with pytest.raises(MemoryPlanError, match="Leave out kv_cache_memory, which fits"):
        plan_runner(PlanRequest(EngineConfig(kv_cache_memory="1MiB", max_model_len=4096), declared("Qwen3-8B"), H200))


def test_planning_imports_no_torch() -> None:
    code = """
import json, sys
from holdfast.config import EngineConfig
from holdfast.errors import MemoryPlanError
from holdfast.loading.declared import open_declared
from holdfast.memory.devices import find_gpu
from holdfast.planning.alternatives import list_alternatives
from holdfast.planning.plan import plan_runner
from holdfast.planning.resolve import PlanRequest, resolve
from holdfast.planning.target import cpu_target, gpu_target
for name in ("Qwen3-32B", "DeepSeek-V4-Pro", "Qwen1.5-MoE-A2.7B"):
    for target in (gpu_target(find_gpu("h200")), cpu_target()):
        try:
            plan_runner(PlanRequest(EngineConfig(), open_declared(name), target))
        except MemoryPlanError:
            pass
        list_alternatives(resolve(PlanRequest(EngineConfig(), open_declared(name), target)))
print(json.dumps([name for name in ("torch", "triton", "numpy", "transformers") if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []

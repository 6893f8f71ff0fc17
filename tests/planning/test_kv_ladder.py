"""kv_quality: the rung of each size by hand, what is skipped, and refusals that say what to do."""

from dataclasses import replace

import pytest

from error_codes import raises_code
from holdfast.config import KV_QUALITIES, EngineConfig
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.memory.planner import Term
from holdfast.planning.fit import RunnerPlan, fit_runner
from holdfast.planning.kv_ladder import LADDERS, LATENT_LADDERS, choose_kv
from holdfast.planning.plan import plan_runner
from holdfast.planning.resolve import Resolved, resolve
from planning.plan_cases import GIB, H200, HOST, RTX4090, plan_request

SMALL = {"max_num_batched_tokens": 256, "memory_utilization": 0.9}


def chosen(plan: RunnerPlan) -> tuple[str, int]:
    return plan.resolved.kv_format.name, plan.resolved.near_tokens


def reasons(plan: RunnerPlan) -> dict[str, str]:
    return {choice.name: choice.reason for choice in plan.resolved.choices}


def test_ladders_exist_for_every_quality() -> None:
    assert set(KV_QUALITIES) == set(LADDERS) == set(LATENT_LADDERS)


RUNGS = [
    ("high", 16_384, "bfloat16", 0),
    ("high", 55_000, "turboquant_k8v4", 64),
    ("high", 110_000, "turboquant_k5v4", 64),
    ("balanced", 16_384, "turboquant_k5v4", 64),
    ("balanced", 135_000, "turboquant_4bit_nc", 64),
    ("balanced", 150_000, "turboquant_k3v4_nc", 64),
]


@pytest.mark.parametrize(("quality", "length", "name", "near"), RUNGS)
def test_kv_quality_chooses_the_first_format_that_holds_the_context(
    quality: str, length: int, name: str, near: int
) -> None:
    plan = plan_runner(plan_request("Qwen3-8B", RTX4090, kv_quality=quality, max_model_len=length, **SMALL))
    assert chosen(plan) == (name, near)
    assert plan.resolved.limits.max_model_len == length
    assert plan.max_concurrency >= 1
    assert reasons(plan)["kv_cache_dtype"].startswith(
        f"kv_quality={quality}: it holds one sequence of {length:,} tokens"
    )
    given = {"kv_cache_dtype": name, "kv_near_tokens": near, "max_model_len": length}
    assert plan.memory == fit_runner(plan_request("Qwen3-8B", RTX4090, **SMALL, **given)).memory


def test_kv_quality_counts_the_sequences_that_were_given() -> None:
    options = {"kv_quality": "high", "max_model_len": 16_384, **SMALL}
    names = {
        number: chosen(plan_runner(plan_request("Qwen3-8B", RTX4090, max_num_seqs=number, **options)))[0]
        for number in (1, 4, 7)
    }
    assert names == {1: "bfloat16", 4: "turboquant_k8v4", 7: "turboquant_k5v4"}


def test_kv_quality_takes_shorter_steps_for_more_sequences() -> None:
    """Near rows of 8,192 tokens a step would leave room for two; the engine's own plan would stop there."""
    plan = plan_runner(plan_request("Qwen3-8B", RTX4090, kv_quality="balanced", max_num_seqs=3))
    assert chosen(plan) == ("turboquant_k5v4", 64)
    assert plan.resolved.limits.max_num_batched_tokens < 8192
    assert plan.max_concurrency >= 3
    assert f"in steps of {plan.resolved.limits.max_num_batched_tokens}" in reasons(plan)["kv_cache_dtype"]


def test_kv_quality_says_what_the_formats_before_hold() -> None:
    options = {"kv_quality": "high", "max_model_len": 16_384, "max_num_seqs": 7, **SMALL}
    plan = plan_runner(plan_request("Qwen3-8B", RTX4090, **options))
    reason = reasons(plan)["kv_cache_dtype"]
    assert "; bfloat16 holds 2." in reason
    assert "; turboquant_k8v4 beside 64 near tokens holds 5." in reason
    assert reasons(plan)["kv_near_tokens"].startswith("the default of turboquant_k5v4: ")


def test_kv_quality_without_a_context_holds_the_models_own() -> None:
    plan = plan_runner(plan_request("Qwen3-8B", RTX4090, kv_quality="high", **SMALL))
    assert chosen(plan) == ("turboquant_k8v4", 64)
    assert plan.resolved.limits.max_model_len == 40_960


@pytest.mark.parametrize("near", [0, 128])
def test_kv_quality_keeps_given_near_tokens(near: int) -> None:
    plan = plan_runner(plan_request("Qwen3-8B", H200, kv_quality="balanced", kv_near_tokens=near))
    assert chosen(plan) == ("turboquant_k5v4", near)


def test_kv_quality_unset_changes_nothing() -> None:
    request = plan_request("Qwen3-8B", H200)
    assert choose_kv(request) is request
    plan = plan_runner(request)
    assert chosen(plan) == ("bfloat16", 0)
    assert reasons(plan)["kv_cache_dtype"] == "the same as dtype"


@pytest.mark.parametrize(
    ("name", "quality", "chosen_name"),
    [
        ("DeepSeek-V2-Lite", "high", "bfloat16"),
        ("DeepSeek-V2-Lite", "balanced", "fp8_ds_mla"),
        ("GLM-4.7-Flash", "balanced", "fp8_ds_mla"),
    ],
)
def test_kv_quality_of_latents_takes_formats_of_latents(name: str, quality: str, chosen_name: str) -> None:
    plan = plan_runner(plan_request(name, H200, kv_quality=quality, max_model_len=8192))
    assert chosen(plan) == (chosen_name, 0)


def test_kv_quality_skips_formats_that_another_option_excludes() -> None:
    """The codes of two tokens take fewer bytes than one near row."""
    sequences = {"max_model_len": 20_000, "max_num_seqs": 16}
    options = {"kv_quality": "high", "page_tokens": 2, "kv_near_tokens": 64, **sequences, **SMALL}
    with raises_code("plan.kv_quality_too_small", MemoryPlanError, name="kv_quality") as raised:
        plan_runner(plan_request("Qwen3-8B", RTX4090, **options))
    assert "bfloat16 holds 1." in str(raised.value)
    assert "turboquant_k5v4 is not possible: kv_near_tokens=64 is not possible with page_tokens=2" in str(raised.value)


def test_kv_quality_without_a_possible_format_is_refused() -> None:
    """The codes of one token take fewer bytes than its near row."""
    request = plan_request("Qwen3-8B", H200, kv_quality="balanced", page_tokens=1, kv_near_tokens=64)
    with raises_code("plan.kv_quality_impossible", ConfigError, name="kv_quality", value="balanced") as raised:
        plan_runner(request)
    assert str(raised.value).count("kv_near_tokens=64 is not possible with page_tokens=1") == 3


@pytest.mark.parametrize(
    ("quality", "num_seqs", "advice"),
    [("high", 64, ", or"), ("high", 4, ", take kv_quality=balanced, or"), ("balanced", 64, ", or")],
)
def test_kv_quality_refuses_what_no_format_holds(quality: str, num_seqs: int, advice: str) -> None:
    options = {"kv_quality": quality, "max_model_len": 38_000, "max_num_seqs": num_seqs, **SMALL}
    request = plan_request("Qwen3-8B", RTX4090, **options)
    with raises_code("plan.kv_quality_too_small", MemoryPlanError, name="kv_quality", value=quality) as raised:
        plan_runner(request)
    assert f"{num_seqs} sequences of 38,000 tokens" in str(raised.value)
    assert f"max_num_seqs{advice} set kv_cache_dtype." in str(raised.value)


@pytest.mark.parametrize("quality", ["high", "balanced"])
def test_kv_quality_without_a_fit_is_refused_with_the_table(quality: str) -> None:
    """The weights alone are too large, which no format changes."""
    with raises_code("plan.over_budget", MemoryPlanError) as raised:
        plan_runner(plan_request("Qwen3-32B", RTX4090, kv_quality=quality))
    assert raised.value.table is not None


def test_kv_quality_plans_the_load_once() -> None:
    """A loader keeps what it planned, so a second call would be a second load."""
    loads: list[str] = []

    def staging(resolved: Resolved) -> Term:
        loads.append(resolved.kv_format.name)
        return Term("staging", 5 * GIB, "a load", ("load",))

    request = plan_request("Qwen3-8B", RTX4090, kv_quality="high", max_model_len=110_000, staging=staging, **SMALL)
    plan = plan_runner(request)
    assert loads == ["bfloat16"]
    assert chosen(plan) == ("turboquant_k5v4", 64)
    assert {term.owner: term.num_bytes for term in plan.memory.terms}["staging"] == 5 * GIB


def test_kv_quality_of_several_ranks_is_refused() -> None:
    request = plan_request("Qwen3-8B", H200, kv_quality="high", tensor_parallel_size=2)
    assert choose_kv(request) is request
    with raises_code("plan.kv_quality_ranks", ConfigError, name="kv_quality", value="high"):
        resolve(request)


def test_kv_quality_beside_a_format_is_refused() -> None:
    with raises_code("config.quality_and_format", ConfigError, name="kv_quality", value="high", kv_cache_dtype="fp8"):
        EngineConfig(kv_quality="high", kv_cache_dtype="fp8")
    with raises_code("value.not_one_of", ConfigError, name="kv_quality"):
        EngineConfig(kv_quality="best")


def test_kv_quality_on_a_host_counts_its_own_bound() -> None:
    request = plan_request("Qwen3-0.6B", HOST, kv_quality="high", max_model_len=4096, max_num_batched_tokens=128)
    assert chosen(plan_runner(request)) == ("float32", 0)
    tight = replace(request, config=replace(request.config, kv_cache_memory="300MiB"))
    assert chosen(plan_runner(tight)) == ("turboquant_k8v4", 64)

"""Plans that fit: the most pages, the longest context, and the same numbers whoever asks."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.memory.planner import PHASES
from holdfast.models.catalogue import CATALOGUE
from holdfast.quant.formats import KV_FORMATS, PLANNED_KV_FORMATS
from holdfast.runner.plan_fit import Wish, find_fit, fit_runner, missing_here, settle, try_fit, unfitting_runner
from holdfast.runner.target import memory_target
from runner.planning import A100, GIB, H200, HOST, RTX4090, blueprint, wish


def test_a_plan_of_a_model_that_runs() -> None:
    plan = fit_runner(wish("Qwen3-32B", H200, memory_utilization=0.98))
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


def test_a_plan_of_a_model_that_does_not_run() -> None:
    plan = fit_runner(wish("DeepSeek-V4-Flash", memory_target("400GiB"), kv_format="fp8", max_model_len=100_000))
    assert plan.cache is None
    assert plan.declaration is None
    assert plan.attention_specs == ()
    assert plan.kv_bytes_per_token == Fraction(15401, 4)
    assert plan.memory.page_bytes == 61604
    assert plan.kv_bytes_per_sequence == blueprint("DeepSeek-V4-Flash").kv_bytes_per_sequence("fp8")
    assert len(plan.not_in_this_version) == 2


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("kv_format", [*KV_FORMATS, *PLANNED_KV_FORMATS])
def test_every_model_in_every_format(name: str, kv_format: str) -> None:
    wanted = wish(name, memory_target("2TiB"), kv_format=kv_format, max_model_len=2048)
    if blueprint(name).anatomy.unsupported_format(settle(wish(kv_format=kv_format))[1].kv_format) is not None:
        with pytest.raises(ConfigError, match="this model keeps"):
            fit_runner(wanted)
        return
    plan = fit_runner(wanted)
    assert plan.kv_bytes_per_token == blueprint(name).kv_bytes_per_token(kv_format)
    if plan.cache is not None:
        assert plan.cache.bytes_per_token == plan.kv_bytes_per_token
        assert plan.cache.bytes_per_page == plan.memory.page_bytes


MODELS = st.sampled_from(["SmolLM2-135M", "Qwen3-0.6B", "Qwen3-8B", "OPT-125m", "Qwen3-30B-A3B", "DeepSeek-V2-Lite"])
WISHES = st.builds(
    lambda name, gib, util, seqs, tokens, length, page, eager: Wish(
        EngineConfig(
            memory_utilization=util,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=None if length is None else min(length, blueprint(name).max_position),
            page_tokens=page,
            enforce_eager=eager,
        ),
        blueprint(name),
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


@given(WISHES)
@settings(max_examples=150)
def test_the_plan_is_the_largest_that_fits(wanted: Wish) -> None:
    fit = try_fit(wanted)
    resolved = settle(wanted)[1]
    if fit is None:
        smallest = unfitting_runner(wanted)
        assert smallest.memory.peak_bytes > resolved.budget_bytes
        with pytest.raises(MemoryPlanError):
            find_fit(wanted)
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
        assert try_fit(wanted._replace(config=longer)) is None
    assert fit_runner(wanted).kv_tokens == fit.kv_tokens


@given(WISHES, st.integers(1, 64))
@settings(max_examples=50)
def test_more_memory_never_gives_fewer_tokens(wanted: Wish, more: int) -> None:
    fit = try_fit(wanted)
    larger = try_fit(wanted._replace(target=memory_target(wanted.target.total_bytes + more * GIB)))
    if fit is not None:
        assert larger is not None
        assert larger.kv_tokens >= fit.kv_tokens


def test_an_open_context_shrinks_with_a_reason() -> None:
    plan = fit_runner(wish("Llama-3.1-8B", RTX4090))
    assert plan.resolved.limits.max_model_len == plan.kv_tokens < 131072
    choice = next(choice for choice in plan.resolved.choices if choice.name == "max_model_len")
    assert choice.reason == "the longest context that fits the memory"


def test_a_context_that_was_asked_does_not_shrink() -> None:
    with pytest.raises(MemoryPlanError, match="short"):
        fit_runner(wish("Llama-3.1-8B", RTX4090, max_model_len=131072))


def test_an_open_context_of_which_not_even_one_token_fits_is_refused_by_the_least_it_needs() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        fit_runner(wish("Llama-3.1-70B", A100))
    table = caught.value.table
    assert table is not None
    pages = next(row for row in table.rows if row.owner == "kv pages")
    assert pages.num_bytes == 16 * 327680, "one page"


def test_pages_on_a_host_are_bounded_unless_one_sequence_needs_more() -> None:
    plan = fit_runner(wish("Qwen3-0.6B", HOST, max_model_len=2048))
    assert GIB - plan.memory.page_bytes < plan.memory.kv_bytes <= GIB
    assert "on a CPU, unless an option asks for more" in plan.memory.pages_reason
    long = fit_runner(wish("Qwen3-0.6B", HOST, max_model_len=40960))
    assert long.memory.kv_bytes == 40960 * 229376 > GIB


def test_memory_for_pages_alone() -> None:
    plan = fit_runner(wish("Qwen3-8B", H200, kv_cache_memory="7GiB", max_model_len=4096))
    assert plan.memory.kv_bytes == 7 * GIB // plan.memory.page_bytes * plan.memory.page_bytes
    assert plan.memory.pages_reason == "kv_cache_memory"
    with pytest.raises(
        MemoryPlanError, match=r"kv_cache_memory of 1.00 MiB was asked; one sequence of 4096 tokens takes"
    ):
        fit_runner(wish("Qwen3-8B", H200, kv_cache_memory="1MiB", max_model_len=4096))
    shrunk = fit_runner(wish("Qwen3-8B", H200, kv_cache_memory="1GiB"))
    assert shrunk.resolved.limits.max_model_len == GIB // 147456 // 16 * 16


def test_no_more_pages_than_could_be_used() -> None:
    plan = fit_runner(wish("Qwen3-0.6B", H200, max_num_seqs=2, max_model_len=1000))
    assert plan.kv_tokens == 2 * 1008
    assert plan.max_concurrency == 2.016


def test_a_plan_that_does_not_fit_can_be_drawn() -> None:
    wanted = wish("Qwen3-32B", RTX4090, max_model_len=4096)
    plan = unfitting_runner(wanted)
    assert plan.kv_tokens == 4096
    with pytest.raises(MemoryPlanError) as caught:
        fit_runner(wanted)
    assert caught.value.table == plan.memory.table("serve")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ()),
        ({"quantization": "none", "kv_format": "float16"}, ()),
        ({"quantization": "fp8"}, ("weights in fp8 are not in this version",)),
        ({"kv_format": "fp8"}, ("KV pages in fp8 are not in this version",)),
        ({"tensor_parallel_size": 2}, ("tensor parallelism is not in this version",)),
        ({"name": "Qwen3-30B-A3B"}, ("mixtures of experts are not in this version",)),
    ],
)
def test_what_this_version_does_not_do(options, words) -> None:
    wanted = wish(**options)
    assert missing_here(wanted) == words
    assert fit_runner(wanted).not_in_this_version == words


@pytest.mark.parametrize("target", [H200, HOST])
def test_quantized_weights_leave_more_room(target) -> None:
    plans = [fit_runner(wish("Qwen3-0.6B", target, quantization=name)) for name in (None, "fp8")]
    tokens = [plan.kv_tokens for plan in plans]
    assert tokens[0] < tokens[1] if target is H200 else tokens[0] == tokens[1], (
        "pages on a CPU have a bound of their own"
    )


def test_staging_costs_no_pages() -> None:
    plan = fit_runner(wish("Qwen3-8B", H200))
    assert plan.memory.phase_bytes["load"] < plan.memory.phase_bytes["serve"]
    assert {phase for term in plan.memory.terms for phase in term.phases} == set(PHASES)


def test_absurd_limits_are_refused_and_not_tried() -> None:
    with pytest.raises(MemoryPlanError):
        fit_runner(
            wish("Qwen3-8B", H200, max_num_seqs=2**31 - 1, max_num_batched_tokens=2**31 - 1, max_model_len=2**31 - 1)
        )


def test_a_budget_smaller_than_the_weights() -> None:
    with pytest.raises(MemoryPlanError, match=r"needs \d+\.\d\d GiB in its serve phase \(weights 15\.26 GiB"):
        fit_runner(wish("Qwen3-8B", memory_target("8GiB")))
    with pytest.raises(MemoryPlanError):
        fit_runner(wish("Qwen3-8B", memory_target(1)))


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 was asked"):
        fit_runner(wish("Qwen3-8B", tensor_parallel_size=3))
    for ranks in (0, -2):
        with pytest.raises(ConfigError, match="a whole number from 1"):
            fit_runner(wish("Qwen3-8B", tensor_parallel_size=ranks))


def test_two_ranks_hold_half_each() -> None:
    one, two = (fit_runner(wish("Qwen3-32B", H200, tensor_parallel_size=ranks)) for ranks in (1, 2))
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token
    assert two.attention_specs[0].num_heads == 32
    weights = [sum(term.num_bytes for term in plan.memory.terms if term.group == "weights") for plan in (one, two)]
    assert 0.499 < weights[1] / weights[0] < 0.502

"""What would fit instead: every advice works, one is the smallest, and the order is the one that is promised."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.memory.devices import GPUS
from holdfast.models.blueprints.blueprint import spec_blueprint
from holdfast.planning.alternatives import list_alternatives, smallest_change
from holdfast.planning.fit import PlanRequest, find_fit, try_fit
from holdfast.planning.target import memory_target
from holdfast.quant.formats import KV_FORMATS
from planning.plan_cases import A100, GIB, H200, HOST, RTX4090, blueprint, changed, plan_request

QUANTIZED_FORMATS = [name for name, value in KV_FORMATS.items() if value.is_quantized]
REQUESTS = st.builds(
    lambda name, gib, length, seqs, tokens, util, limit: plan_request(
        name,
        memory_target(f"{gib}GiB"),
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        memory_utilization=util,
        memory_limit=None if limit is None else f"{limit}GiB",
    ),
    st.sampled_from(["SmolLM2-135M", "Qwen3-8B", "Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V2-Lite"]),
    st.integers(1, 160),
    st.none() | st.sampled_from([100, 8192, 40960]),
    st.none() | st.sampled_from([1, 7, 512]),
    st.none() | st.sampled_from([1, 100, 30_000]),
    st.none() | st.sampled_from([0.3, 0.98]),
    st.none() | st.sampled_from([10, 1000]),
)


@given(REQUESTS)
@settings(max_examples=20)
def test_every_advice_works(wanted: PlanRequest) -> None:
    listed = list_alternatives(wanted)
    fits = try_fit(wanted) is not None
    for item in listed:
        taken = changed(wanted, item)
        if item.fits:
            fit = find_fit(taken)
            assert (fit.kv_tokens, fit.max_concurrency) == (item.kv_tokens, item.max_concurrency), item
        else:
            assert (item.kv_tokens, item.max_concurrency) == (0, 0.0), item
    smallest = [item for item in listed if item.is_smallest]
    could = [item for item in listed if item.fits and item.not_in_this_version is None]
    assert smallest == ([] if fits else could[:1])


@pytest.mark.parametrize(
    ("wanted", "option"),
    [
        (plan_request("Qwen3-32B", A100, max_model_len=40960), "memory_utilization"),
        (
            plan_request("Qwen3-8B", RTX4090, max_model_len=16384, max_num_batched_tokens=65536),
            "max_num_batched_tokens",
        ),
        (
            plan_request("Qwen3-8B", RTX4090, max_model_len=8192, max_num_seqs=16384, max_num_batched_tokens=64),
            "max_num_seqs",
        ),
        (plan_request("Llama-3.1-8B", RTX4090, max_model_len=131072), "max_model_len"),
        (plan_request("Qwen3-8B", HOST, max_model_len=64, memory_utilization=0.98), "dtype"),
        (plan_request("Qwen3-32B", RTX4090), "quantization"),
        (plan_request("Llama-3.1-70B", RTX4090), "gpu"),
        (plan_request("Qwen3-8B", H200, kv_cache_memory="1MiB", max_model_len=4096), "kv_cache_memory"),
        (plan_request("Qwen3-0.6B", HOST, memory_limit="1GiB", max_model_len=64), "memory_limit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_smallest_change(wanted: PlanRequest, option: str) -> None:
    smallest = next(item for item in list_alternatives(wanted) if item.is_smallest)
    assert smallest.option == option
    assert find_fit(changed(wanted, smallest)).kv_tokens == smallest.kv_tokens > 0


ORDER = (
    *("kv_cache_memory", "memory_limit", "memory_utilization"),
    *("max_num_batched_tokens", "max_num_seqs", "enforce_eager", "max_model_len"),
)


@given(REQUESTS)
@settings(max_examples=12)
def test_the_order_of_what_a_person_would_rather_accept(wanted: PlanRequest) -> None:
    listed = list_alternatives(wanted)
    places = [ORDER.index(item.option) for item in listed if item.option in ORDER]
    assert places == sorted(places)
    missing = [item.not_in_this_version is not None for item in listed]
    assert missing == sorted(missing), "what this version does not have comes last"


def test_a_plan_that_fits_needs_no_change_and_hears_what_else_there_is() -> None:
    listed = list_alternatives(plan_request("Qwen3-8B", H200, max_model_len=8192))
    assert not any(item.is_smallest for item in listed)
    by_option: dict[str, list[str]] = {}
    for item in listed:
        by_option.setdefault(item.option, []).append(item.value)
    assert by_option["max_model_len"] == ["40960", "32768"]
    assert by_option["kv_cache_dtype"] == QUANTIZED_FORMATS
    assert not [item for item in listed if item.option == "kv_cache_dtype" and item.not_in_this_version]
    assert by_option["quantization"] == ["fp8", "mxfp4"], "one for each number of bits"
    assert not [item for item in listed if item.option == "quantization" and item.not_in_this_version]
    assert by_option["tensor_parallel_size"] == ["2", "4", "8"]
    assert len(by_option["gpu"]) == 3
    assert "h200" not in by_option["gpu"]
    assert set(by_option["gpu"]) <= GPUS.keys()


def test_what_is_already_so_is_no_change() -> None:
    listed = list_alternatives(
        plan_request("Qwen3-8B", H200, kv_cache_dtype="fp8", quantization="int8", tensor_parallel_size=4)
    )
    values = {(item.option, item.value) for item in listed}
    assert ("kv_cache_dtype", "fp8") not in values
    assert {value for option, value in values if option == "quantization"} == {"mxfp4"}
    assert {value for option, value in values if option == "tensor_parallel_size"} == {"8"}
    assert ("kv_cache_dtype", "bfloat16") in values


def test_fewer_bits_are_offered_one_after_the_other() -> None:
    """Requests of which none may be shorter: pages in fewer bits are the smallest change."""
    for length, name in ((70_000, "fp8"), (110_000, "turboquant_k8v4"), (150_000, "turboquant_4bit_nc")):
        wanted = plan_request(
            "Qwen3-8B", RTX4090, max_model_len=length, memory_utilization=0.98, max_num_batched_tokens=64
        )
        offered = [item for item in list_alternatives(wanted) if item.option == "kv_cache_dtype"]
        assert [item.value for item in offered] == QUANTIZED_FORMATS
        first = next(item for item in offered if item.fits)
        assert first.value == name, length
        assert first.kv_tokens == find_fit(changed(wanted, first)).kv_tokens


def test_what_contradicts_another_option_is_not_offered() -> None:
    """Protected layers in fp8 are no wider than pages in fp8, or in bfloat16."""
    wanted = plan_request("Qwen3-8B", H200, kv_cache_dtype="turboquant_3bit_nc", kv_protected_layers=6)
    values = [item.value for item in list_alternatives(wanted) if item.option == "kv_cache_dtype"]
    assert values == ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc"]


def test_heads_that_cannot_be_quantized_are_not_offered_codes() -> None:
    odd = blueprint("Qwen3-8B").spec
    assert odd is not None
    wanted = plan_request()._replace(blueprint=spec_blueprint(replace(odd, head_dim=120), "odd"))
    assert not [item for item in list_alternatives(wanted) if item.option == "kv_cache_dtype"]


def test_latents_are_not_offered_formats_by_head() -> None:
    values = {item.value for item in list_alternatives(plan_request("DeepSeek-V2-Lite", H200))}
    assert "fp8" in values
    assert not any(value.startswith("turboquant") for value in values)


def test_ranks_that_do_not_divide_are_not_offered() -> None:
    assert not [
        item for item in list_alternatives(plan_request("SmolLM2-135M", H200)) if item.option == "tensor_parallel_size"
    ]


def test_a_context_that_would_be_useless_does_not_count() -> None:
    for item in list_alternatives(plan_request("Llama-3.1-70B", H200)):
        if item.fits:
            assert find_fit(changed(plan_request("Llama-3.1-70B", H200), item)).resolved.limits.max_model_len >= 2048


def test_others_memory_is_not_offered() -> None:
    crowded = H200.__class__("cuda", "cuda:0", H200.total_bytes, 40 * GIB, H200.context_bytes, "")
    listed = list_alternatives(plan_request("Qwen3-32B", crowded, max_model_len=4096))
    assert not [item for item in listed if item.option == "memory_utilization"]


def test_where_nothing_fits() -> None:
    listed = list_alternatives(plan_request("DeepSeek-V4-Pro", RTX4090))
    gpus = [item for item in listed if item.option == "gpu"]
    assert [(item.value, item.fits) for item in gpus] == [("gb300", False)]
    assert not any(item.is_smallest for item in listed)
    assert smallest_change(listed) == "take a smaller model: no single change makes this one fit"


def test_absurd_limits_end_at_once() -> None:
    listed = list_alternatives(plan_request("Qwen3-8B", H200, max_num_seqs=2**31 - 1, max_num_batched_tokens=2**31 - 1))
    assert smallest_change(listed)

"""What would fit instead: every advice works, one is the smallest, and the order is the one that is promised."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.memory.devices import GPUS
from holdfast.models.declared_model import declare_decoder
from holdfast.planning.alternatives import (
    CONTEXT,
    GPU,
    KINDS,
    LEVER,
    RANKED,
    WEIGHTS,
    Alternative,
    advice,
    best_change,
    context_note,
    list_alternatives,
    plan_changes,
    smallest_changes,
)
from holdfast.planning.fit import fit_runner, missing_here, try_fit
from holdfast.planning.resolve import PlanRequest, resolve
from holdfast.planning.target import gpu_target, memory_target
from holdfast.quant.formats import KV_FORMATS, MLA_FORMATS
from planning.plan_cases import A100, GIB, H200, HOST, RTX4090, changed, declared, plan_request

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
@settings(max_examples=12)
def test_list_alternatives_every_change_works(wanted: PlanRequest) -> None:
    listed = list_alternatives(resolve(wanted))
    fits = try_fit(resolve(wanted)) is not None
    for item in listed:
        taken = changed(wanted, item)
        if item.fits:
            fit = fit_runner(taken)
            assert (fit.kv_tokens, fit.max_concurrency) == (item.kv_tokens, item.max_concurrency), item
        else:
            assert (item.kv_tokens, item.max_concurrency) == (0, 0.0), item
    smallest = [item for item in listed if item.is_smallest]
    could = [item for item in listed if item.fits]
    assert smallest == ([] if fits else could[:1])
    picked = smallest_changes(listed)
    assert len(picked) == min(3, len({tuple(name for name, _ in item.lasting[:1] or item.settings) for item in could}))
    assert all(item in could for item in picked)
    if any(item.kind == WEIGHTS for item in could):
        assert any(item.kind == WEIGHTS for item in picked), "weights in fewer bits are among them where they fit"


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
        (plan_request("DeepSeek-R1", H200), "tensor_parallel_size"),
        (plan_request("SmolLM2-135M", memory_target("900MiB"), max_model_len=8192), "gpu"),
        (plan_request("Qwen3-8B", H200, kv_cache_memory="1MiB", max_model_len=4096), "kv_cache_memory"),
        (plan_request("Qwen3-0.6B", HOST, memory_limit="1GiB", max_model_len=64), "memory_limit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_list_alternatives_marks_smallest_change(wanted: PlanRequest, option: str) -> None:
    smallest = next(item for item in list_alternatives(resolve(wanted)) if item.is_smallest)
    assert smallest.option == option
    assert fit_runner(changed(wanted, smallest)).kv_tokens == smallest.kv_tokens > 0


BORDERS = [
    plan_request("Qwen3-32B", A100, max_model_len=40960),
    plan_request("Qwen3-8B", RTX4090, max_model_len=16384, max_num_batched_tokens=65536),
    plan_request("Qwen3-8B", RTX4090, max_model_len=8192, max_num_seqs=16384, max_num_batched_tokens=64),
    plan_request("Llama-3.1-8B", RTX4090, max_model_len=131072),
    plan_request("Qwen3-0.6B", HOST, memory_limit="1GiB", max_model_len=64),
]


@pytest.mark.parametrize("wanted", BORDERS, ids=lambda wanted: wanted.declared.name)
def test_number_that_is_advised_is_the_least_change(wanted: PlanRequest) -> None:
    """The next one towards what was requested does not fit: a share, a size, a power of two, a token."""
    listed = [item for item in list_alternatives(resolve(wanted)) if item.fits and item.kind in (LEVER, CONTEXT)]
    alone = [item for item in listed if item.option is not None and item.option != "enforce_eager"]
    assert alone
    seen, longest = set[str](), 0
    for item in alone:
        option, value = item.option or "", item.value or ""
        if option in seen:
            assert option == "max_model_len", "a context is listed once more, as a power of two"
            assert int(value).bit_count() == 1
            assert int(value) <= longest < 2 * int(value)
            continue
        seen.add(option)
        if option == "memory_utilization":
            nearer: object = round(float(value) - 0.01, 2)
        elif option == "memory_limit":
            nearer = f"{int(value.removesuffix('mib')) - 1}MiB"
        elif option == "max_model_len":
            longest = int(value)
            nearer = longest + 1
        else:
            nearer = 2 * int(value)
            if nearer >= getattr(resolve(wanted).limits, option):
                continue
        config = replace(wanted.config, **{option: nearer})
        assert try_fit(resolve(replace(wanted, config=config))) is None, (option, value, nearer)


FREE = "memory_utilization=0.98 max_num_batched_tokens=2048 max_num_seqs=4"
TQ = "turboquant"
LISTED: dict[str, tuple[PlanRequest, str]] = {
    "a short context": (
        plan_request("Qwen3-32B", RTX4090, quantization="mxfp4"),
        f"""
        lever {FREE}
        lever memory_utilization=0.98
        lever max_num_batched_tokens=2048
        lever max_num_seqs=4
        lever enforce_eager=true
        format kv_cache_dtype=fp8
        format kv_cache_dtype={TQ}_k8v4
        format kv_cache_dtype={TQ}_k5v4
        format kv_cache_dtype={TQ}_4bit_nc
        format kv_cache_dtype={TQ}_k3v4_nc
        format kv_cache_dtype={TQ}_3bit_nc
        ranks tensor_parallel_size=2
        ranks tensor_parallel_size=4
        ranks tensor_parallel_size=8
        gpu gpu=a30
        gpu gpu=rtx5090
        gpu gpu=a100-40g
        """,
    ),
    "too many weights": (
        plan_request("Qwen3-32B", RTX4090),
        f"""
        no format kv_cache_dtype=fp8
        no format kv_cache_dtype={TQ}_k8v4
        no format kv_cache_dtype={TQ}_k5v4
        no format kv_cache_dtype={TQ}_4bit_nc
        no format kv_cache_dtype={TQ}_k3v4_nc
        no format kv_cache_dtype={TQ}_3bit_nc
        no weights quantization=fp8
        smallest weights quantization=mxfp4
        weights quantization=mxfp4 {FREE}
        weights quantization=mxfp4 kv_cache_dtype=fp8 {FREE}
        weights quantization=mxfp4 kv_cache_dtype={TQ}_k5v4 {FREE}
        no ranks tensor_parallel_size=2
        ranks tensor_parallel_size=4
        ranks tensor_parallel_size=8
        gpu gpu=h100
        gpu gpu=h100-nvl
        gpu gpu=h200
        """,
    ),
    "too many for any one": (
        plan_request("Llama-3.1-70B", RTX4090),
        f"""
        no format kv_cache_dtype=fp8
        no format kv_cache_dtype={TQ}_k8v4
        no format kv_cache_dtype={TQ}_k5v4
        no format kv_cache_dtype={TQ}_4bit_nc
        no format kv_cache_dtype={TQ}_k3v4_nc
        no format kv_cache_dtype={TQ}_3bit_nc
        no weights quantization=fp8
        no weights quantization=mxfp4
        smallest ranks tensor_parallel_size=2 quantization=mxfp4
        ranks tensor_parallel_size=2 quantization=mxfp4 {FREE}
        no ranks tensor_parallel_size=2
        no ranks tensor_parallel_size=4
        ranks tensor_parallel_size=8
        gpu gpu=b200
        gpu gpu=b300
        """,
    ),
    "a long context that was given": (
        plan_request("Llama-3.1-8B", RTX4090, max_model_len=131072),
        f"""
        smallest context max_model_len=36800
        context max_model_len=32768
        no format kv_cache_dtype=fp8
        no format kv_cache_dtype={TQ}_k8v4
        format kv_cache_dtype={TQ}_k5v4
        format kv_cache_dtype={TQ}_4bit_nc
        format kv_cache_dtype={TQ}_k3v4_nc
        format kv_cache_dtype={TQ}_3bit_nc
        no weights quantization=fp8
        no weights quantization=mxfp4
        weights quantization=fp8 kv_cache_dtype=fp8 {FREE}
        ranks tensor_parallel_size=2
        ranks tensor_parallel_size=4
        ranks tensor_parallel_size=8
        gpu gpu=a100-40g
        gpu gpu=a40
        gpu gpu=rtxa6000
        """,
    ),
    "a host": (
        plan_request("Qwen3-0.6B", HOST),
        f"""
        lever memory_utilization=0.9
        format kv_cache_dtype=bfloat16
        format dtype=bfloat16
        format kv_cache_dtype=fp8
        format kv_cache_dtype={TQ}_k8v4
        format kv_cache_dtype={TQ}_k5v4
        format kv_cache_dtype={TQ}_4bit_nc
        format kv_cache_dtype={TQ}_k3v4_nc
        format kv_cache_dtype={TQ}_3bit_nc
        weights quantization=fp8
        weights quantization=mxfp4
        gpu gpu=rtx4060ti-8g
        gpu gpu=rtx3080
        gpu gpu=rtx5070
        """,
    ),
}


@pytest.mark.parametrize("case", LISTED)
def test_changes_of_a_request_are_those_of_the_rules(case: str) -> None:
    """The rules of `list_alternatives` applied by hand: order, what stands together, what is left out."""
    wanted, expected = LISTED[case]
    found = [
        " ".join(
            (
                *(["no"] if not item.fits else ["smallest"] if item.is_smallest else []),
                *(item.kind, *(f"{name}={value}" for name, value in item.settings)),
            )
        )
        for item in list_alternatives(resolve(wanted))
    ]
    assert found == [line.strip() for line in expected.strip().splitlines()]


def alternative(kind: str, settings: tuple[tuple[str, str], ...], length: int = 1, tokens: int = 1) -> Alternative:
    return Alternative("", settings, kind, tokens, length, True)


def test_weights_take_the_place_of_the_last_of_three_changes() -> None:
    levers = [alternative(LEVER, ((name, "1"),)) for name in ("memory_utilization", "max_num_seqs")]
    context = alternative(CONTEXT, (("max_model_len", "5"),))
    weights = [alternative(WEIGHTS, (("quantization", name),)) for name in ("fp8", "mxfp4")]
    gpu = alternative(GPU, (("gpu", "b200"),))
    assert smallest_changes([*levers, context, *weights, gpu]) == (*levers, weights[0])
    assert smallest_changes([*levers, *weights, gpu]) == (*levers, weights[0])
    assert smallest_changes([*levers, context, gpu]) == (*levers, context)
    unfit = context._replace(fits=False)
    assert smallest_changes([unfit, gpu]) == (gpu,)


def test_best_change_has_the_longest_context_then_most_tokens() -> None:
    """Only changes with the same lasting settings are compared."""
    short = alternative(WEIGHTS, (("quantization", "fp8"),), 100, 900)
    long = alternative(WEIGHTS, (("quantization", "fp8"), ("memory_utilization", "0.98")), 200, 300)
    more = alternative(WEIGHTS, (("quantization", "fp8"), ("max_num_seqs", "4")), 200, 400)
    other = alternative(WEIGHTS, (("quantization", "mxfp4"),), 500, 5000)
    ranks = alternative(RANKED, (("tensor_parallel_size", "2"),), 900, 9000)
    for listed in ([short, long, more, other, ranks], [ranks, short, more, long, other]):
        assert best_change(listed) == more
    assert best_change([ranks, short]) == short


def test_best_change_is_the_smallest_with_free_settings() -> None:
    """The figure of the issue: mxfp4 alone gives 5,088 tokens, and three settings that change no answer 17,456."""
    listed = list_alternatives(resolve(plan_request("Qwen3-32B", RTX4090)))
    weights = [item for item in listed if item.kind == WEIGHTS and item.fits]
    assert [(item.kv_tokens, item.max_model_len) for item in weights] == [
        (5088, 5088),
        (17_456, 17_456),
        (34_368, 34_368),
        (59_884, 40_960),
    ], "alone, with free settings, with pages in fp8 too, and with those that give the whole context"
    assert weights[0].is_smallest
    assert best_change(listed) == weights[1]
    assert weights[1].lasting == weights[0].settings
    assert best_change(item for item in listed if not item.fits) is None


def test_best_change_leaves_graphs_on_unless_nothing_else_fits() -> None:
    lever = Alternative("", (("memory_utilization", "0.98"),), LEVER, 10, 10, True)
    eager = Alternative("", (("memory_utilization", "0.98"), ("enforce_eager", "true")), LEVER, 20, 20, True)
    assert best_change([lever, eager]) == lever
    assert best_change([eager]) == eager


def test_smallest_change_joins_ranks_and_weights() -> None:
    """Two GPUs with weights in four bits come before eight with all bits."""
    wanted = plan_request("Llama-3.1-70B", RTX4090)
    ranked = [item for item in list_alternatives(resolve(wanted)) if item.kind == RANKED and item.fits]
    assert ranked[0].settings == (("tensor_parallel_size", "2"), ("quantization", "mxfp4"))
    assert ranked[0].is_smallest
    assert ranked[-1].settings == (("tensor_parallel_size", "8"),)
    for item in ranked:
        assert fit_runner(changed(wanted, item)).kv_tokens == item.kv_tokens


@given(REQUESTS)
@settings(max_examples=8)
def test_list_alternatives_are_ordered_by_kind(wanted: PlanRequest) -> None:
    listed = list_alternatives(resolve(wanted))
    places = [KINDS.index(item.kind) for item in listed]
    assert places == sorted(places)


@pytest.mark.parametrize(("name", "fewest"), [("DeepSeek-V4-Flash", "2"), ("DeepSeek-V4-Pro", "8")])
def test_changes_of_compressed_attention_name_ranks(name: str, fewest: str) -> None:
    wanted = plan_request(name, H200)
    listed = list_alternatives(resolve(wanted))
    ranked = [item for item in listed if item.kind == RANKED and item.fits]
    assert ranked[0].value == fewest
    assert ranked[0].is_smallest
    assert ranked[0].max_model_len == 2**20
    assert advice(listed).startswith(f"Share it among {fewest} GPUs")


def test_levers_that_cost_no_quality_come_first_and_together() -> None:
    """The figure of the issue: 5,088 tokens, and 17,456 with three settings that change no answer."""
    wanted = plan_request("Qwen3-32B", RTX4090, quantization="mxfp4")
    assert fit_runner(wanted).kv_tokens == 5088
    together, *alone = [item for item in list_alternatives(resolve(wanted)) if item.kind == LEVER]
    assert together == list_alternatives(resolve(wanted))[0]
    assert dict(together.settings) == {
        "memory_utilization": "0.98",
        "max_num_batched_tokens": "2048",
        "max_num_seqs": "4",
    }
    assert (together.kv_tokens, together.max_model_len) == (17_456, 17_456)
    assert [item.option for item in alone] == [*dict(together.settings), "enforce_eager"]
    assert all(5088 < item.max_model_len < 17_456 for item in alone)


def test_list_alternatives_omits_levers_without_gain() -> None:
    """Four sequences of 40,960 tokens use less than there is, and a step's scratch is nothing beside an H200."""
    listed = list_alternatives(resolve(plan_request("Qwen3-8B", H200)))
    assert [item.option for item in listed if item.kind == LEVER] == ["memory_utilization"]
    tight = plan_request(
        *("Qwen3-8B", H200), memory_utilization=0.98, max_num_batched_tokens=64, max_num_seqs=1, enforce_eager=True
    )
    assert not [item for item in list_alternatives(resolve(tight)) if item.kind == LEVER]


def test_levers_that_suffice_together_are_the_smallest_change() -> None:
    wanted = plan_request("Qwen3-32B", RTX4090, quantization="mxfp4", max_model_len=16384)
    smallest = next(item for item in list_alternatives(resolve(wanted)) if item.is_smallest)
    assert (smallest.kind, len(smallest.settings)) == (LEVER, 2)
    assert fit_runner(changed(wanted, smallest)).kv_tokens == smallest.kv_tokens >= 16384


def test_list_alternatives_joins_weights_with_other_changes() -> None:
    wanted = plan_request("Qwen3-32B", RTX4090, max_model_len=32768)
    joint = [item for item in list_alternatives(resolve(wanted)) if item.kind == WEIGHTS and item.fits]
    assert joint
    assert joint[0].is_smallest
    assert {"quantization", "kv_cache_dtype", "memory_utilization"} <= dict(joint[0].settings).keys()
    for item in joint:
        assert fit_runner(changed(wanted, item)).kv_tokens == item.kv_tokens >= 32768


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen3-8B", "Qwen3-32B", "Llama-3.1-70B"])
@pytest.mark.parametrize("key", ["t4", "rtx3060", "v100-16g", "rtx4090", "h200"])
def test_list_alternatives_never_offers_too_old_gpu(name: str, key: str) -> None:
    wanted = plan_request(name, gpu_target(GPUS[key]), quantization="int8")
    listed = list_alternatives(resolve(wanted))
    offered = [GPUS[item.value or ""] for item in listed if item.kind == GPU]
    assert all(gpu.capability >= (8, 0) for gpu in offered)
    assert GPUS[key].capability >= (8, 0) or RANKED not in {item.kind for item in listed}
    words = [reason for reason in missing_here(wanted) if "does not run: needs compute capability 8.0" in reason]
    assert len(words) == (GPUS[key].capability < (8, 0))


@pytest.mark.parametrize(
    ("name", "options", "is_offered"),
    [
        ("Qwen3-0.6B", {"memory_limit": "1GiB", "max_model_len": 64}, False),
        ("Qwen3-0.6B", {"memory_limit": "3GiB", "max_model_len": 32768}, False),
        ("Qwen3-8B", {"max_model_len": 64, "memory_utilization": 0.98}, False),
        ("Llama-3.1-70B", {}, True),
        ("Llama-3.1-70B", {"memory_limit": "8GiB"}, True),
    ],
)
def test_gpu_is_advised_for_a_cpu_if_nothing_else_fits(name: str, options: dict[str, object], is_offered: bool) -> None:
    wanted = plan_request(name, HOST, **options)
    assert try_fit(resolve(wanted)) is None
    picked = smallest_changes(list_alternatives(resolve(wanted)))
    assert picked
    assert {item.kind == GPU for item in picked} == {is_offered}
    assert ("take " in advice(list_alternatives(resolve(wanted))).lower()) is is_offered


def test_shortened_context_names_the_limit_and_what_lifts_it() -> None:
    wanted = plan_request("Qwen3-32B", RTX4090, quantization="mxfp4")
    note = context_note(resolve(wanted), fit_runner(wanted))
    assert note == (
        "context of 5,088 tokens, shortened from the model's own 40,960: no more fits 21.17 GiB (90% of the device's "
        "23.52 GiB); to lift it: set memory_utilization=0.98, max_num_batched_tokens=2048 and max_num_seqs=4, for 17,456"
    )
    bounded = plan_request("Qwen3-8B", H200, kv_cache_memory="1GiB")
    assert "from the model's own 40,960: no more fits kv_cache_memory of 1.00 GiB" in context_note(
        resolve(bounded), fit_runner(bounded)
    )
    whole = plan_request("Qwen3-8B", H200)
    assert context_note(resolve(whole), fit_runner(whole)) == ""
    windowed = declared("Qwen3-8B").spec
    assert windowed is not None
    narrow = replace(
        whole, declared=declare_decoder(replace(windowed, sliding_windows=(4096,) * windowed.num_layers), "narrow")
    )
    assert context_note(resolve(narrow), fit_runner(narrow)) == (
        "every layer attends to the last 4,096 tokens only, the model's own window"
    )
    for other, note in ((1024, "the last 4,096 tokens only"), (50_000, "")):  # the widest bounds what is seen at all
        several = replace(windowed, sliding_windows=(4096, other) * (windowed.num_layers // 2))
        mixed = replace(whole, declared=declare_decoder(several, "mixed"))
        found = context_note(resolve(mixed), fit_runner(mixed))
        assert (note in found) if note else found == ""
    for name in ("Qwen3-8B", "gpt-oss-20b"):  # beyond what they were made for: layers without a window still see it all
        longer = plan_request(name, H200, max_model_len=262144)
        assert context_note(resolve(longer), fit_runner(longer)) == ""


def test_advice_has_three_changes_on_one_line() -> None:
    wanted = plan_request("Qwen3-0.6B", HOST, memory_limit="2GiB", max_model_len=2048)
    listed = list_alternatives(resolve(wanted))
    text = advice(listed)
    assert "\n" not in text
    assert text.startswith("Raise memory_limit to ")
    assert "(quantization=" in text
    assert text.endswith(": each of them fits.")
    changes = plan_changes(listed)
    assert len(changes) == 3
    assert changes[0].typed.startswith("--memory-limit ")
    assert any("--quantization " in change.typed for change in changes)


def test_gpu_that_holds_no_more_is_not_offered() -> None:
    """Smaller ones hold the model too, with a context that is shorter still."""
    wanted = plan_request("Llama-3.1-8B", gpu_target(GPUS["rtx3060"]), quantization="mxfp4")
    fit = fit_runner(wanted)
    assert fit.resolved.limits.max_model_len < 131072
    smaller = replace(wanted, target=gpu_target(GPUS["rtx4060"]))
    assert 0 < fit_runner(smaller).kv_tokens < fit.kv_tokens
    offered = [item for item in list_alternatives(resolve(wanted)) if item.kind == GPU]
    assert len(offered) == 3
    assert all(item.kv_tokens > fit.kv_tokens for item in offered)


def test_list_alternatives_fitting_plan_has_no_smallest_change() -> None:
    listed = list_alternatives(resolve(plan_request("Qwen3-8B", H200, max_model_len=8192)))
    assert not any(item.is_smallest for item in listed)
    by_option: dict[str, list[str]] = {}
    for item in listed:
        by_option.setdefault(item.option, []).append(item.value)
    assert by_option["max_model_len"] == ["40960", "32768"]
    assert by_option["kv_cache_dtype"] == QUANTIZED_FORMATS
    assert by_option["quantization"] == ["fp8", "mxfp4"], "one for each number of bits"
    assert by_option["tensor_parallel_size"] == ["2", "4", "8"]
    assert len(by_option["gpu"]) == 3
    assert "h200" not in by_option["gpu"]
    assert set(by_option["gpu"]) <= GPUS.keys()


def test_list_alternatives_omits_current_settings() -> None:
    listed = list_alternatives(
        resolve(plan_request("Qwen3-8B", H200, kv_cache_dtype="fp8", quantization="int8", tensor_parallel_size=4))
    )
    values = {(item.option, item.value) for item in listed}
    assert ("kv_cache_dtype", "fp8") not in values
    assert {value for option, value in values if option == "quantization"} == {"mxfp4"}
    assert {value for option, value in values if option == "tensor_parallel_size"} == {"8"}
    assert ("kv_cache_dtype", "bfloat16") in values


def test_fewer_bits_are_offered_one_after_the_other() -> None:
    """Requests of which none may be shorter: pages in fewer bits are the smallest change."""
    names = {70_000: "fp8", 110_000: "turboquant_k8v4", 150_000: "turboquant_k5v4", 175_000: "turboquant_4bit_nc"}
    for length, name in names.items():
        wanted = plan_request(
            "Qwen3-8B", RTX4090, max_model_len=length, memory_utilization=0.98, max_num_batched_tokens=64
        )
        offered = [item for item in list_alternatives(resolve(wanted)) if item.option == "kv_cache_dtype"]
        assert [item.value for item in offered] == QUANTIZED_FORMATS
        first = next(item for item in offered if item.fits)
        assert first.value == name, length
        assert first.kv_tokens == fit_runner(changed(wanted, first)).kv_tokens


def test_list_alternatives_omits_contradicting_options() -> None:
    """Protected layers in fp8 are no wider than pages in fp8, or in bfloat16."""
    wanted = plan_request("Qwen3-8B", H200, kv_cache_dtype="turboquant_3bit_nc", kv_protected_layers=6)
    values = [item.value for item in list_alternatives(resolve(wanted)) if item.option == "kv_cache_dtype"]
    assert values == ["turboquant_k8v4", "turboquant_k5v4", "turboquant_4bit_nc", "turboquant_k3v4_nc"]


def test_heads_that_cannot_be_quantized_are_not_offered_codes() -> None:
    odd = declared("Qwen3-8B").spec
    assert odd is not None
    wanted = replace(plan_request(), declared=declare_decoder(replace(odd, head_dim=120), "odd"))
    assert not [item for item in list_alternatives(resolve(wanted)) if item.option == "kv_cache_dtype"]


def test_latents_are_not_offered_formats_by_head() -> None:
    offered = list_alternatives(resolve(plan_request("DeepSeek-V2-Lite", H200)))
    assert {item.value for item in offered if item.option == "kv_cache_dtype"} == {*MLA_FORMATS}


def test_ranks_that_do_not_divide_are_not_offered() -> None:
    assert not [
        item
        for item in list_alternatives(resolve(plan_request("SmolLM2-135M", H200)))
        if item.option == "tensor_parallel_size"
    ]


def test_list_alternatives_context_is_at_least_2048_tokens() -> None:
    for item in list_alternatives(resolve(plan_request("Llama-3.1-70B", H200))):
        if item.fits:
            assert fit_runner(changed(plan_request("Llama-3.1-70B", H200), item)).resolved.limits.max_model_len >= 2048


def test_others_memory_is_not_offered() -> None:
    crowded = H200.__class__("cuda", "cuda:0", H200.total_bytes, 40 * GIB, H200.context_bytes, "")
    listed = list_alternatives(resolve(plan_request("Qwen3-32B", crowded, max_model_len=4096)))
    assert not [item for item in listed if item.option == "memory_utilization"]


def test_list_alternatives_without_fit_advises_smaller_model() -> None:
    listed = list_alternatives(resolve(plan_request("DeepSeek-V4-Pro", RTX4090)))
    gpus = [item for item in listed if item.option == "gpu"]
    assert [(item.value, item.fits) for item in gpus] == [("gb300", False)]
    assert not any(item.is_smallest for item in listed)
    assert advice(listed) == "Take a smaller model: no change of options makes this one fit."


def test_absurd_limits_end_at_once() -> None:
    listed = list_alternatives(
        resolve(plan_request("Qwen3-8B", H200, max_num_seqs=2**31 - 1, max_num_batched_tokens=2**31 - 1))
    )
    assert advice(listed)

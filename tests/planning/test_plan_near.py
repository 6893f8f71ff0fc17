"""Plans with near pages: bytes by hand, storage that takes what was planned, ranks and stages, refusals, and no effect."""

from dataclasses import replace

import pytest
import torch

from error_codes import raises_code
from holdfast.cache.storage import PageStorage
from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError
from holdfast.families.grouped.spec import GroupedAttentionSpec, NearSpec
from holdfast.memory.ledger import Ledger
from holdfast.planning.alternatives import list_alternatives
from holdfast.planning.fit import RunnerPlan, fit_runner
from holdfast.planning.resolve import resolve
from holdfast.planning.speed import decode_rate, find_device_speed
from planning.plan_cases import H200, RTX4090, plan_request

NARROW = {"kv_cache_dtype": "turboquant_4bit_nc", "kv_protected_layers": 0}
WITHOUT = NARROW | {"kv_near_tokens": 0}
SMALL = {"max_model_len": 300, "max_num_batched_tokens": 64, "max_num_seqs": 2}


def terms_of(plan: RunnerPlan) -> dict[str, int]:
    return {term.owner: term.num_bytes for term in plan.memory.terms}


def near_of(plan: RunnerPlan) -> list[NearSpec | None]:
    return [spec.near for spec in plan.attention_specs if isinstance(spec, GroupedAttentionSpec)]


def reason(plan: RunnerPlan) -> tuple[str, str]:
    (own,) = (choice for choice in plan.resolved.choices if choice.name == "kv_near_tokens")
    return own.value, own.reason


def test_near_pages_of_qwen3_8b_by_hand() -> None:
    """36 layers of 8 heads of 128: 64 tokens in 4 bits take 4,096 x 8 bytes a plane, which are 16 tokens in bfloat16."""
    options = {"max_model_len": 4096, "max_num_batched_tokens": 2048, "max_num_seqs": 8, **NARROW}
    plan = fit_runner(plan_request("Qwen3-8B", H200, kv_near_tokens=64, **options))
    without = fit_runner(plan_request("Qwen3-8B", H200, **options, kv_near_tokens=0))
    assert near_of(plan) == [NearSpec(64, 1, 16, 16)] * 36
    page_bytes = 36 * 2 * 8 * 64 * (64 + 2)
    assert plan.memory.page_bytes == without.memory.page_bytes == page_bytes
    # Own block and step, beside the first tokens; codes of the longest context.
    prompt_pages = -(-(63 + 2048) // 16) + 1
    assert [(one.name, one.prompt_pages, one.decode_pages) for one in plan.groups] == [
        ("whole context", 64, 64),
        ("near", prompt_pages, 5),
    ]
    assert plan.memory.num_pages == 8 * (64 + 5 + 1) + 2 * 2048 // 16
    assert plan.max_concurrency == 8, "more pages serve prompts alone"
    assert plan.groups[1].padding_bytes == page_bytes - 36 * 2 * 16 * 8 * 128 * 2
    more = {owner: num_bytes - terms_of(without).get(owner, 0) for owner, num_bytes in terms_of(plan).items()}
    inputs = {owner: num_bytes for owner, num_bytes in more.items() if owner.startswith("inputs/") and num_bytes}
    assert inputs == {
        "inputs/slots.1": 8 * 2048,
        "inputs/page_table.1": 4 * 8 * (4096 // 16),
        "inputs/page_updates.1": terms_of(without)["inputs/page_updates"],
    }
    num_bytes = 5 * page_bytes / 2**20
    which = "the first 16 tokens and the newest block of 64 tokens"
    assert reason(plan) == (
        "64",
        f"given: {which} stay in bfloat16 too, which takes up to {num_bytes:.2f} MiB a sequence",
    )
    assert f"{which} in bfloat16 too" in plan.kv_note()


CASES = [
    ("Qwen3-8B", {}, {"whole context", "near"}),
    ("Qwen3-8B", {"kv_cache_dtype": "turboquant_k8v4", "kv_near_tokens": 128}, {"whole context", "near"}),
    ("Qwen3-8B", {"kv_protected_layers": None, "kv_protected_dtype": "auto"}, {"whole context", "near"}),
    ("Qwen3-8B", {"kv_protected_layers": 4}, {"whole context", "near"}),
    ("gpt-oss-20b", {}, {"whole context", "window of 128", "near"}),
]


@pytest.mark.parametrize(("name", "options", "groups"), CASES)
def test_storage_takes_the_planned_bytes_of_near_pages(name, options, groups) -> None:
    plan = fit_runner(plan_request(name, H200, **{"kv_near_tokens": 64} | SMALL | NARROW | options))
    assert {group.name for group in plan.cache_groups} == groups
    assert plan.cache is not None
    ledger = Ledger()
    storage = PageStorage(plan.cache, plan.memory.num_pages, torch.device("cpu"), ledger)
    assert ledger.total_bytes == plan.memory.kv_bytes
    assert "kv pages/padding" not in terms_of(plan)
    for layer, (spec, near) in enumerate(zip(plan.attention_specs, near_of(plan), strict=True)):
        assert (near is not None) == spec.cache.format.is_quantized
        if near is not None:
            assert plan.cache_groups[near.group].page_tokens == near.page_tokens
            assert near.first_tokens == (16 if spec.window is None else 0)
            assert storage.plane(layer, "near_v").shape[1:] == (spec.cache.num_kv_heads, spec.cache.head_dim)


def test_near_tokens_of_windowed_layers_keep_no_first_tokens() -> None:
    plan = fit_runner(plan_request("gpt-oss-20b", H200, kv_near_tokens=128, **SMALL, **NARROW))
    assert [None if near is None else near.first_tokens for near in near_of(plan)] == [0, 16] * 12
    near = plan.cache_groups[-1]
    assert near.window == 128
    assert near.kept_pages == -(-16 // near.page_tokens) > 0, "the layers without windows keep theirs"


WIDE = {"kv_cache_dtype": "turboquant_4bit_nc"}


@pytest.mark.parametrize(
    ("options", "num_protected"),
    [
        ({}, 0),
        ({"kv_near_tokens": 0}, 4),
        ({"kv_protected_layers": 2}, 2),
        ({"kv_protected_layers": "0,35"}, 2),
        ({"kv_protected_layers": 0}, 0),
        ({"kv_protected_dtype": "bfloat16"}, 4),
        ({"kv_protected_dtype": "turboquant_k8v4", "kv_protected_layers": 1}, 1),
    ],
    ids=str,
)
def test_near_tokens_protect_only_given_layers(options, num_protected) -> None:
    plan = fit_runner(plan_request("Qwen3-8B", H200, **{"kv_near_tokens": 64} | SMALL | WIDE | options))
    assert len(plan.resolved.protected.layers) == num_protected
    reasons = {choice.name: (choice.value, choice.reason) for choice in plan.resolved.choices}
    is_left_out = not options
    assert ("kv_near_tokens lowers the error more" in reasons.get("kv_protected_layers", ("", ""))[1]) == is_left_out
    if is_left_out:
        assert reasons["kv_protected_layers"][0] == "0"
        near = plan.cache_groups[-1]
        mixed = fit_runner(plan_request("Qwen3-8B", H200, kv_near_tokens=64, kv_protected_layers=4, **SMALL, **WIDE))
        assert (near.page_tokens, mixed.cache_groups[-1].page_tokens) == (16, 8), "mixed pages hold half as many"
        assert "protected" not in plan.kv_note()


def test_near_tokens_beside_plain_pages_leave_protection_as_it_is() -> None:
    near, plain = (resolve(plan_request("Qwen3-8B", H200, kv_near_tokens=value)) for value in (64, 0))
    assert near.protected == plain.protected


@pytest.mark.parametrize(
    ("name", "kv_format", "near_tokens"),
    [
        ("Qwen3-8B", "turboquant_k8v4", 64),
        ("Qwen3-8B", "turboquant_4bit_nc", 64),
        ("Qwen3-8B", "turboquant_3bit_nc", 64),
        ("gpt-oss-20b", "turboquant_k3v4_nc", 64),
        ("Qwen3-8B", "fp8", 0),
        ("Qwen3-8B", "auto", 0),
        ("DeepSeek-V2-Lite", "turboquant_mla_4bit", 0),
        ("DeepSeek-V2-Lite", "fp8", 0),
    ],
)
def test_near_tokens_default_of_a_format(name: str, kv_format: str, near_tokens: int) -> None:
    plan = fit_runner(plan_request(name, H200, kv_cache_dtype=kv_format, **SMALL))
    assert plan.resolved.near_tokens == near_tokens
    if near_tokens:
        assert reason(plan)[1].startswith(f"the default of {kv_format}: the first 16 tokens and the newest block of 64")


def test_near_tokens_default_gives_way_to_small_pages() -> None:
    """Layers are protected then as they are without near tokens."""
    options = {"kv_cache_dtype": "turboquant_4bit_nc", "page_tokens": 2, **SMALL}
    plan, without = (
        fit_runner(plan_request("Qwen3-8B", H200, **options, **near)) for near in ({}, {"kv_near_tokens": 0})
    )
    assert (plan.resolved.near_tokens, len(plan.resolved.protected.layers)) == (0, 4)
    assert plan.memory == without.memory


def test_near_tokens_take_shorter_steps_instead_of_a_shorter_context() -> None:
    """A step's rows are on near pages, 16 bits each: 8,192 of them would leave a fifth of the context."""
    options = {"quantization": "mxfp4", "kv_cache_dtype": "turboquant_4bit_nc"}
    plan, given, without = (
        fit_runner(plan_request("Qwen3-32B", RTX4090, **options, **more))
        for more in ({}, {"max_num_batched_tokens": 8192}, {"kv_near_tokens": 0})
    )
    assert plan.resolved.limits.max_num_batched_tokens == 512
    reasons = {choice.name: choice.reason for choice in plan.resolved.choices}
    assert reasons["max_num_batched_tokens"].endswith("would leave less context")
    lengths = [one.resolved.limits.max_model_len for one in (given, without, plan)]
    assert 4 * lengths[0] < lengths[1] < lengths[2]
    ample = fit_runner(plan_request("Qwen3-8B", H200, kv_cache_dtype="turboquant_4bit_nc"))
    assert ample.resolved.limits.max_num_batched_tokens == 8192


@pytest.mark.parametrize("options", [{}, {**NARROW, "kv_protected_layers": 36, "kv_protected_dtype": "auto"}])
def test_near_tokens_beside_plain_pages_have_no_effect(options) -> None:
    plan = fit_runner(plan_request("Qwen3-8B", H200, kv_near_tokens=64, **SMALL, **options))
    assert near_of(plan) == [None] * 36
    assert len(plan.cache_groups) == 1
    value, why = reason(plan)
    assert value == "0"
    assert "64 has no effect" in why
    assert "newest" not in plan.kv_note()


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-V3.2", "DeepSeek-V4-Flash", "Nemotron-3-Nano-30B-A3B"])
@pytest.mark.parametrize("kv_format", ["auto", "fp8"])
def test_near_tokens_need_keys_and_values_by_head(name: str, kv_format: str) -> None:
    with raises_code("plan.near_needs_heads", ConfigError, name="kv_near_tokens", value=64, model=name):
        resolve(plan_request(name, H200, kv_near_tokens=64, kv_cache_dtype=kv_format))


@pytest.mark.parametrize("value", [1, 32, 65, 256, -64])
def test_near_tokens_accept_whole_tiles_alone(value: int) -> None:
    with raises_code("value.not_one_of", ConfigError, name="kv_near_tokens"):
        EngineConfig(kv_near_tokens=value)


@pytest.mark.parametrize("value", [True, "64", 64.0])
def test_near_tokens_of_another_type_are_refused(value: object) -> None:
    with raises_code("value.not_integer", ConfigError, name="kv_near_tokens"):
        EngineConfig(kv_near_tokens=value)  # type: ignore[arg-type]


def test_near_tokens_need_pages_that_hold_one() -> None:
    with raises_code("plan.near_page_too_small", ConfigError, value=64, page_tokens=2):
        fit_runner(plan_request("Qwen3-8B", H200, kv_near_tokens=64, page_tokens=2, **SMALL, **NARROW))
    assert fit_runner(plan_request("Qwen3-8B", H200, kv_near_tokens=64, page_tokens=4, **SMALL, **NARROW)).groups


def test_ranks_share_the_heads_of_near_pages() -> None:
    whole, half = (
        fit_runner(plan_request("Qwen3-8B", H200, mesh=Mesh(tensor_size=size), kv_near_tokens=64, **SMALL, **NARROW))
        for size in (1, 2)
    )
    assert whole.cache_groups == half.cache_groups
    assert whole.memory.page_bytes == 2 * half.memory.page_bytes
    assert whole.groups[1].padding_bytes == 2 * half.groups[1].padding_bytes


@pytest.mark.parametrize("cut", [1, 12, 23])
def test_stages_keep_the_near_pages_of_their_layers(cut: int) -> None:
    request = plan_request("gpt-oss-20b", H200, kv_near_tokens=64, **SMALL, **NARROW)
    whole, num_layers = fit_runner(request), 0
    for stage, layers in enumerate(((0, cut), (cut, 24))):
        plan = fit_runner(replace(request, mesh=Mesh(stage=stage, num_stages=2, layers=layers)))
        assert plan.cache_groups == whole.cache_groups
        assert plan.cache is not None
        ledger = Ledger()
        storage = PageStorage(plan.cache, 3, torch.device("cpu"), ledger)
        assert 0 <= ledger.total_bytes - 3 * plan.memory.page_bytes <= terms_of(plan).get("kv pages/padding", 0)
        num_own = layers[1] - layers[0]
        assert all("near_k" in storage.planes(layer) for layer in range(num_own))
        num_layers += plan.groups[-1].num_layers
    assert num_layers == 24


def test_near_tokens_slow_a_stream_by_what_is_read_more() -> None:
    near, plain = (
        resolve(plan_request("Qwen3-8B", H200, kv_near_tokens=value, max_model_len=4096, **NARROW)) for value in (64, 0)
    )
    speed = find_device_speed(H200, ())
    assert speed is not None
    for context in (32, 2048):
        assert 0.9 < decode_rate(near, speed.rates, 64, context) / decode_rate(plain, speed.rates, 64, context) < 1


def test_near_tokens_take_the_time_of_the_rows_they_add() -> None:
    """The first 16 tokens, and half of the own block on average: 48 and 80 rows."""
    resolved = [
        resolve(plan_request("Qwen3-8B", H200, kv_near_tokens=n, max_model_len=4096, **NARROW)) for n in (0, 64, 128)
    ]
    speed = find_device_speed(H200, ())
    assert speed is not None
    plain, short, long = (1 / decode_rate(one, speed.rates, 64, 2048) for one in resolved)
    assert (long - plain) / (short - plain) == pytest.approx(80 / 48, rel=0.02)


def test_alternatives_offer_pages_without_near_tokens() -> None:
    wanted = resolve(plan_request("Qwen3-8B", RTX4090, kv_near_tokens=64, **NARROW))
    found = [item for item in list_alternatives(wanted) if item.option == "kv_near_tokens"]
    assert [(item.value, item.fits) for item in found] == [("0", True)]
    off = resolve(plan_request("Qwen3-8B", RTX4090, **WITHOUT))
    assert not [item for item in list_alternatives(off) if item.option == "kv_near_tokens"]

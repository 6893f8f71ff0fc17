"""Plans of models whose layers have windows: pages by group, tokens that fit, the longest context, and nothing settled twice."""

from dataclasses import replace
from functools import cache

import pytest

from counted_work import num_lines
from error_codes import raises_code
from holdfast.cache.spec import CacheSpec, mixed_cache
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, MemoryPlanError, ModelFormatError
from holdfast.memory.planner import Term
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declared_model import DeclaredModel, declare_decoder
from holdfast.planning.fit import fit_runner, try_fit, unfitting_runner
from holdfast.planning.plan import PlanRequest, plan_runner
from holdfast.planning.resolve import Resolved, resolve
from holdfast.planning.target import memory_target
from holdfast.planning.terms import batch_terms
from holdfast.quant.formats import KV_FORMATS
from planning.plan_cases import GIB, H200, declared, plan_request

MISTRAL = "Mistral-7B-v0.1"


def windowed(*windows: int | None, max_position: int = 65536, **changes: object) -> DeclaredModel:
    """Qwen3-8B with so many layers and these windows."""
    spec = declared("Qwen3-8B").spec
    assert spec is not None
    changes = {"num_layers": len(windows), "sliding_windows": windows, "max_position": max_position} | changes
    return declare_decoder(replace(spec, **changes), "windowed")


ALTERNATING = windowed(*([1024] * 5 + [None]) * 4)


def request_of(model: DeclaredModel, gib: float = 40, **options: object) -> PlanRequest:
    return PlanRequest(EngineConfig.from_options(**options), model, memory_target(int(gib * GIB)))


def test_fit_runner_counts_window_group_by_its_bound() -> None:
    """Mistral-7B v0.1 with 32K: while a prompt is computed W - 1 tokens, a step and a page; then W - 1, one and a page."""
    plan = fit_runner(plan_request(MISTRAL, memory_target("24GiB")))
    assert [group.window for group in plan.cache_groups] == [4096]
    (account,) = plan.groups
    assert (account.num_layers, account.page_tokens, account.padding_bytes) == (32, 16, 0)
    assert account.prompt_pages == -(-(4095 + 8192) // 16) + 1 == 769
    assert account.decode_pages == 4096 // 16 + 1 == 257
    assert plan.max_concurrency == plan.memory.num_pages / 257
    assert plan.kv_tokens == int(plan.max_concurrency * 32768)
    assert plan.tokens_without_groups == 16 * plan.memory.num_pages
    assert {spec.group for spec in plan.attention_specs} == {0}
    assert plan.memory.page_bytes == 16 * plan.kv_bytes_per_token
    whole = fit_runner(plan_request(MISTRAL, memory_target("24GiB"), max_model_len=4096))
    assert whole.groups == ()
    assert whole.kv_tokens == 16 * whole.memory.num_pages


def test_pages_of_several_groups() -> None:
    plan = fit_runner(request_of(ALTERNATING, max_num_batched_tokens=2048))
    cache, limits = plan.cache, plan.resolved.limits
    assert cache is not None
    assert [group.name for group in plan.groups] == ["whole context", "window of 1024"]
    assert [(group.num_layers, group.page_tokens) for group in plan.groups] == [(4, 80), (20, 16)]
    assert [group.padding_bytes for group in plan.groups] == [0, 0]
    assert [spec.group for spec in plan.attention_specs] == ([1] * 5 + [0]) * 4
    assert [spec.window for spec in plan.attention_specs] == ([1024] * 5 + [None]) * 4
    assert plan.memory.page_bytes == cache.bytes_per_page == 16 * 20 * 4096
    per_sequence = -(-limits.max_model_len // 80) + 1024 // 16 + 1
    assert sum(group.decode_pages for group in plan.groups) == per_sequence
    assert plan.max_concurrency == plan.memory.num_pages / per_sequence
    assert plan.kv_tokens == plan.memory.num_pages * limits.max_model_len // per_sequence
    planned = {term.owner: term.num_bytes for term in plan.memory.terms}
    for term in batch_terms(limits, "cuda", (5, 1)):
        assert planned[term.owner] == term.num_bytes
    assert "inputs/slots.1" in planned


def test_tokens_without_groups_equal_model_without_windows() -> None:
    wanted = request_of(ALTERNATING, max_model_len=65536)
    found, plain = fit_runner(wanted), fit_runner(request_of(windowed(*[None] * 24), max_model_len=65536))
    assert abs(found.tokens_without_groups - plain.kv_tokens) < 0.002 * plain.kv_tokens, (
        "tables differ, and little else"
    )
    assert found.kv_tokens > 4 * found.tokens_without_groups


def test_tokens_without_groups_keep_to_the_bound_on_pages() -> None:
    """24 layers of 4,096 bytes a token: what so many bytes hold of them, and no more than sequences use."""
    bounded = fit_runner(request_of(ALTERNATING, max_model_len=65536, kv_cache_memory="8GiB"))
    assert bounded.tokens_without_groups == 8 * GIB // (16 * 24 * 4096) * 16
    few = fit_runner(request_of(ALTERNATING, max_model_len=1500, max_num_seqs=2))
    assert few.tokens_without_groups == 2 * 1504


def test_fit_runner_longest_sequence_must_fit_all_groups() -> None:
    wanted = request_of(ALTERNATING, gib=40, max_model_len=65536, max_num_seqs=1)
    plan = fit_runner(wanted)
    assert plan.memory.num_pages == sum(group.prompt_pages for group in plan.groups)
    page_bytes = plan.memory.page_bytes
    given = plan.memory.num_pages * page_bytes
    assert fit_runner(request_of(ALTERNATING, max_model_len=65536, kv_cache_memory=given)).memory.kv_bytes == given
    with raises_code("plan.kv_cache_too_small", MemoryPlanError, max_model_len=65536):
        fit_runner(request_of(ALTERNATING, max_model_len=65536, kv_cache_memory=given - 1))


SMALL_WINDOWS = windowed(None, 30, 90, 90, 30, 30, max_position=200)
SMALL_STEPS = {"max_num_batched_tokens": 16, "page_tokens": 4}


@cache
def sizes_of_lengths() -> dict[int, int]:
    """Bytes of the pages of one sequence, by its length."""
    sizes = {}
    for length in range(1, 201):
        plan = unfitting_runner(resolve(request_of(SMALL_WINDOWS, max_model_len=length, **SMALL_STEPS))).memory
        sizes[length] = plan.num_pages * plan.page_bytes
    return sizes


@pytest.mark.parametrize("most", [None, 29, 30, 31, 90, 91, 150])
def test_try_fit_open_context_is_longest_that_fits(most: int | None) -> None:
    """Layers are grouped otherwise beyond each window: every length is tried, with the bytes that one of them needs."""
    sizes = sizes_of_lengths()
    allowed = 40 * 1024 if most is None else sizes[most]
    lengths = [length for length, num_bytes in sizes.items() if num_bytes <= allowed]
    found = try_fit(resolve(request_of(SMALL_WINDOWS, kv_cache_memory=allowed, **SMALL_STEPS)))
    assert (None if found is None else found.resolved.limits.max_model_len) == (lengths[-1] if lengths else None)


def test_fit_runner_group_padding_is_reported_and_bounded() -> None:
    """A prime number of layers: pages are made so that what no layer uses costs less than long blocks would."""
    plan = fit_runner(request_of(windowed(*[512] * 11, *[None] * 2)))
    assert plan.cache is not None
    shares = [group.padding_share for group in plan.groups]
    assert shares == [plan.cache.padding_bytes(group) / plan.memory.page_bytes for group in range(2)]
    assert max(shares) < 0.1


@pytest.mark.parametrize(
    ("num_windows", "num_whole", "is_protected"),
    [(5, 6, True), (8, 7, True), (20, 4, False)],
)
def test_protected_layers_may_leave_what_others_leave(num_windows: int, num_whole: int, is_protected: bool) -> None:
    """More than a twentieth of a page, if pages without them leave as much; if not, none is protected unless requested."""
    model = windowed(*[512] * num_windows, *[None] * num_whole)
    options = {"kv_cache_dtype": "turboquant_4bit_nc", "kv_near_tokens": 0}
    plan = fit_runner(request_of(model, **options))
    assert bool(plan.resolved.protected.layers) is is_protected
    bare = fit_runner(request_of(model, **options, kv_protected_layers=0))
    requested = fit_runner(request_of(model, **options, kv_protected_layers=4))
    shares = [max(group.padding_share for group in each.groups) for each in (bare, requested)]
    assert shares[1] > 0.05
    assert (shares[1] <= shares[0]) is is_protected
    assert len(requested.resolved.protected.layers) == 4


def test_staging_is_computed_once_for_a_request() -> None:
    """Also if the plan does not fit: the changes that would help take the same staging."""
    seen: list[Resolved] = []

    def staging(resolved: Resolved) -> Term:
        seen.append(resolved)
        return Term("staging", 12345, "counted", ("load",))

    plan = plan_runner(replace(plan_request("Qwen3-8B", H200, max_model_len=4096), staging=staging))
    assert len(seen) == 1
    assert any(term.num_bytes == 12345 for term in plan.memory.terms)
    short = replace(plan_request("Qwen3-8B", memory_target("20GiB")), staging=staging)
    assert plan_runner(short).context_note
    assert len(seen) == 2
    refused = replace(plan_request("Llama-3.1-70B", memory_target("24GiB"), max_model_len=9000), staging=staging)
    with raises_code("plan.over_budget", MemoryPlanError) as caught:
        plan_runner(refused)
    assert caught.value.changes
    assert len(seen) == 3


@pytest.mark.parametrize("window", [0, -8, 8.5, "8", True])
def test_declare_config_invalid_window_refused_in_one_line(window: object) -> None:
    config = CATALOGUE[MISTRAL] | {"sliding_window": window}
    with pytest.raises(ModelFormatError) as caught:
        declare_config(config, "x")
    words = str(caught.value)
    assert "sliding_window" in words
    assert words.count("\n") == 0


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32767, 32768, 40000])
def test_fit_runner_plans_any_valid_window(window: int) -> None:
    plan = fit_runner(
        PlanRequest(EngineConfig(), declare_config(CATALOGUE[MISTRAL] | {"sliding_window": window}, "x"), H200)
    )
    assert [group.window for group in plan.cache_groups] == [window if window < 32768 else None]
    assert plan.max_concurrency >= 27


def test_mixed_cache_every_group_has_tokens_on_a_page() -> None:
    """A page is never empty: the smallest group takes at least as many chunks as the largest."""
    for few in range(1, 12):
        spec = mixed_cache([KV_FORMATS["bfloat16"]] * 12, 2, 64, 16, [None] * few + [64] * (12 - few))
        assert isinstance(spec, CacheSpec)
        assert min(group.page_tokens for group in spec.cache_groups()) >= 16


@pytest.mark.parametrize("page_tokens", [0, -16, 3, 48, 512])
def test_pages_of_tokens_that_do_not_suit_are_refused(page_tokens: int) -> None:
    with pytest.raises(ConfigError, match="page_tokens"):
        EngineConfig(page_tokens=page_tokens)


def test_groups_cost_a_search_little() -> None:
    """In lines of Python, against the same model without windows; how pages are laid out is worked out once."""
    config = EngineConfig(kv_cache_dtype="bfloat16")
    target = memory_target("19GiB")
    plain, grouped = (
        windowed(*[None] * 36, max_position=131072),
        windowed(*([512] * 5 + [None]) * 6, max_position=131072),
    )
    counts = []
    for model in (plain, grouped):
        fit_runner(PlanRequest(config, model, target))
        counts.append(num_lines(lambda model=model: fit_runner(PlanRequest(config, model, target))))
    assert counts[1] < 2.5 * counts[0], counts

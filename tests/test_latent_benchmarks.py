"""The benchmark of whole engines with latents, windows and entries, as far as it runs without a GPU: lent contexts, what a step reads, and that cases fit."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.config import EngineConfig, Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.planning.fit import RunnerPlan, fit_runner
from holdfast.planning.resolve import PlanRequest
from planning.plan_cases import H200

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
gpu_groups = import_module("gpu_groups")
gpu_latent = import_module("gpu_latent")
lent_contexts = import_module("lent_contexts")
GROUPS = (
    CacheGroup("window of 10", 2, window=14),
    CacheGroup("entries of 4", 8, tokens_per_row=4, tokens_again=4),
    CacheGroup("entries of 16", 32, tokens_per_row=16),
)


def scheduler_of(num_pages: int) -> Scheduler:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128, page_tokens=2)
    return Scheduler(limits, num_pages, True, 8, groups=GROUPS)


@pytest.mark.parametrize(("num_tokens", "found"), [(65, 64), (64, 48), (96, 80)])
def test_lend_pages_prefix_hit_reaches_last_block(num_tokens: int, found: int) -> None:
    scheduler = scheduler_of(100)
    prompts = [[number, *range(1, num_tokens)] for number in range(2)]
    lent_contexts.lend_pages(scheduler, prompts)
    scheduler.prefix.check()
    assert scheduler.pool.num_available == 100, "lent pages have no owner"
    for prompt in prompts:
        hit = scheduler.prefix.match(scheduler.prefix.chain(b""), prompt, num_tokens - 1)
        assert hit.num_tokens == found
        window, fours, many = hit.tables
        # The last 4 tokens are computed again, and see 9 before them.
        assert [page == HOLE for page in window] == [2 * place + 2 <= found - 13 for place in range(found // 2)]
        assert HOLE not in (*fours, *many)
    num_pages = 2 * (7 + -(-found // 8) + -(-found // 32))
    assert scheduler.pool.num_cached == num_pages
    with pytest.raises(AssertionError, match=f"2 contexts of {found} tokens do not fit {num_pages - 1} pages"):
        lent_contexts.lend_pages(scheduler_of(num_pages - 1), prompts)


def test_too_short_a_prompt_is_lent_nothing() -> None:
    with pytest.raises(AssertionError, match="a prompt of 16 tokens has no whole block of 16"):
        lent_contexts.lend_pages(scheduler_of(100), [[0] * 16])


def planned(name: str) -> RunnerPlan:
    case = gpu_latent.CASES[name]
    model = declare_config({**CATALOGUE[case.model], **case.shapes}, case.model)
    return fit_runner(PlanRequest(EngineConfig.from_options(**case.options), model, H200))


@pytest.mark.parametrize(
    ("name", "num_contexts", "ratios"), [("v4-flash", 64, (2, 15, 14)), ("v4-flash-1m", 4, (2, 16, 16))]
)
def test_gpu_latent_contexts_and_output_fit_plan(name: str, num_contexts: int, ratios: tuple[int, ...]) -> None:
    case, plan = gpu_latent.CASES[name], planned(name)
    lent = case.contexts[-1] - 1
    longest = lent + 1 + max(*case.lengths, case.steady_tokens)
    assert longest <= case.options["max_model_len"]
    assert plan.resolved.limits.max_num_seqs == num_contexts
    assert tuple(sum(spec.ratio == ratio for spec in plan.attention_specs) for ratio in (0, 4, 128)) == ratios
    num_pages = 0
    for group in plan.cache_groups:
        assert lent % group.page_tokens == 0, f"{group.name}: the end of a block"
        # What is lent stays where it was, whatever is written behind it.
        num_pages += group.pages_for(lent) - group.first_page(lent)
        num_pages += group.pages_for(longest) - group.pages_for(lent)
    assert num_contexts * num_pages <= plan.memory.num_pages


def test_seen_bytes_count_windows_entries_and_index() -> None:
    windows, fours, many = (gpu_groups.seen_bytes(planned("v4-flash").attention_specs[layer]) for layer in (1, 2, 3))
    assert windows == [(584, 128)]
    assert fours == [(584, 128), (584 / 4, 512 * 4), (132 / 4, None)]
    assert many == [(584, 128), (584 / 128, None)]


def test_gpu_latent_tiny_engine_is_timed_on_lent_contexts() -> None:
    case = gpu_latent.TINY_CASES["v4-flash"]._replace(batches=(2,), lengths=(2, 4), steady_tokens=3, contexts=(257,))
    found = json.loads(json.dumps(gpu_groups.run_case(case, True, "cpu")))
    assert found["groups"][0]["name"] == "window of 24"
    assert [group["page_tokens"] for group in found["groups"][1:]] == [8, 256]
    assert found["read"]["sequence_bytes"] == found["beside_pages"]["state of a sequence"]
    rows = {row["measure"].removeprefix("DeepSeek-V4-Flash, fp8, "): row for row in gpu_groups.rows_of(case, found)}
    timed = rows["decode, batch 2, context 257"]
    assert timed["values"]["holdfast"] > 0
    assert (timed["tokens_found"], timed["num_preemptions"]) == (256, 0)
    assert rows["beside the pages"]["values"]["scratch"] > 0
    # 2 layers with 2 entries of 80 and 2 of the index's 32 under way, one with 1 entry.
    assert rows["beside the pages"]["values"]["state of a sequence"] == 4 * 3 * (2 * 2 * (80 + 32) + 80)
    assert list(rows["tokens that fit"]["values"]) == ["groups"]
    assert rows["after ready"]["values"]["num_compilations"] == 0

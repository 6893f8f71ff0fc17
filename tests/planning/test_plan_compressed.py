"""Plans of DeepSeek-V4: bytes of a token and of a million, states, page tables, the prefix block, and what is declined."""

from dataclasses import replace
from fractions import Fraction

import pytest

from error_codes import raises_code
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.families.compressed.spec import CompressedAttentionSpec
from holdfast.memory.sizes import format_bytes
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.planning.alternatives import layers_note
from holdfast.planning.fit import fit_runner, try_fit
from holdfast.planning.plan import plan_runner
from holdfast.planning.ranks import rank_meshes
from holdfast.planning.resolve import PlanRequest, resolve
from holdfast.planning.target import memory_target
from holdfast.planning.terms import list_needs
from planning.plan_cases import H200, declared, plan_request

FLASH, PRO = "DeepSeek-V4-Flash", "DeepSeek-V4-Pro"
MILLION = 2**20


@pytest.mark.parametrize(
    ("model", "kv_dtype", "token_bytes", "page_bytes"),
    [
        (FLASH, "fp8", Fraction(15401, 4), 490_496),
        (FLASH, "bfloat16", 21 * Fraction(1024 + 256, 4) + 20 * 8, 876_544),
        (PRO, "fp8", 30 * Fraction(584 + 132, 4) + 31 * Fraction(584, 128), 696_704),
    ],
)
def test_bytes_of_a_token_and_of_a_page(model: str, kv_dtype: str, token_bytes: Fraction, page_bytes: int) -> None:
    ranks = 8 if model == PRO else 4
    plan = fit_runner(plan_request(model, H200, tensor_parallel_size=ranks, kv_cache_dtype=kv_dtype))
    assert plan.kv_bytes_per_token == token_bytes
    assert plan.memory.page_bytes == page_bytes
    window, fours, hundreds = plan.groups
    assert (window.decode_pages, fours.decode_pages, hundreds.decode_pages) == (10, 8192, 512)
    per_sequence = window.decode_pages + fours.decode_pages + hundreds.decode_pages
    assert plan.max_concurrency == plan.memory.num_pages / per_sequence
    assert plan.resolved.limits.page_tokens == 16
    (block,) = (choice for choice in plan.resolved.choices if choice.name == "prefix block")
    assert block.value == "128 tokens"
    assert "a prefix that ends inside a longer page gets a copy of it" in block.reason
    assert "the last 4 tokens of a prefix that is found are computed again" in block.reason


def test_fit_runner_v4_flash_million_tokens_take_expected_bytes() -> None:
    for kv_dtype, words in (("fp8", "3.98 GiB"), ("bfloat16", "7.11 GiB")):
        plan = fit_runner(plan_request(FLASH, H200, tensor_parallel_size=4, kv_cache_dtype=kv_dtype))
        _, fours, hundreds = plan.groups
        num_bytes = (fours.decode_pages + hundreds.decode_pages) * plan.memory.page_bytes
        assert format_bytes(num_bytes) == words


def test_fit_runner_v4_flash_attention_specs_by_layer() -> None:
    plan = fit_runner(plan_request(FLASH, H200, tensor_parallel_size=4))
    specs, cache = plan.attention_specs, plan.cache
    assert cache is not None
    assert len(specs) == 43
    assert [getattr(spec, "ratio", None) for spec in specs[:5]] == [0, 0, 4, 128, 4]
    assert {(spec.group, spec.window) for spec in specs} == {(0, 128)}
    for layer, spec in enumerate(specs):
        assert isinstance(spec, CompressedAttentionSpec)
        assert spec.cache == cache.layers[layer]
        assert spec.is_overlapped == (spec.ratio == 4)
        assert (spec.index_heads, spec.index_top_k) == ((64, 512) if spec.ratio == 4 else (0, 0))
        if spec.ratio:
            assert spec.entries is not None
            assert spec.entries == cache.layers[spec.entries_index]
            assert (spec.entries.layer, spec.entries.tokens_per_row) == (layer, spec.ratio)
            assert cache.groups[spec.entries_group].tokens_per_row == spec.ratio
        else:
            assert (spec.entries, spec.entries_group, spec.entries_index) == (None, -1, -1)


def test_states_and_tables_are_lines_of_the_plan() -> None:
    resolved = resolve(plan_request(FLASH, H200, tensor_parallel_size=4, max_num_seqs=8))
    terms = {term.owner: term.num_bytes for term in list_needs(resolved).terms}
    states = sum(num_bytes for owner, num_bytes in terms.items() if owner.startswith("kv state"))
    assert states == 8 * 445_440
    assert terms["inputs/states"] == 8192 * 8
    assert terms["inputs/page_table"] == 8 * MILLION // 16 * 4
    assert terms["inputs/page_table.1"] == 8 * MILLION // 64 * 4
    assert terms["inputs/page_table.2"] == 8 * MILLION // 2048 * 4
    assert "attention/sinks" not in terms, "they are read where they were loaded"


def test_stages_plan_streams_pages_and_states_of_own_layers() -> None:
    """Two layers with windows alone, then the others: every stage has all groups, and sends four streams of a row."""
    cuts = ((0, 2), (2, 22), (22, 43))
    config = EngineConfig(pipeline_parallel_size=3, max_num_seqs=8)
    plans = [fit_runner(PlanRequest(config, declared(FLASH), H200, mesh)) for mesh in rank_meshes(config, cuts)]
    assert len({plan.cache_groups for plan in plans}) == 1
    layers = [[len(group.layers) for group in plan.cache.groups] for plan in plans if plan.cache is not None]
    assert layers == [[2, 0, 0], [20, 10, 10], [21, 11, 10]]
    assert [len(plan.states) for plan in plans] == [0, 3, 3]
    assert sum(plan.kv_bytes_per_sequence for plan in plans) == 445_440
    assert [plan.memory.page_bytes for plan in plans] == [
        16 * 1024 * 2,
        16 * (1024 * 20 + 256 * 20),
        16 * (1024 * 22 + 256 * 22),
    ]
    for plan in plans:
        terms = {term.owner: term.num_bytes for term in plan.memory.terms}
        assert terms["pipeline/hidden"] == 3 * 8192 * 4 * 4096 * 2
        assert terms["inputs/states"] == 8192 * 8, "rows that are computed and not stored are known in every stage"


def test_plan_runner_v4_flash_on_one_h200_refused_with_owner() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan_runner(plan_request(FLASH, H200))
    assert "DeepSeek-V4-Flash" in str(caught.value) or "weights" in str(caught.value)


def test_pages_of_other_sizes() -> None:
    plan = fit_runner(plan_request(FLASH, H200, tensor_parallel_size=4, page_tokens=64))
    (block,) = (choice for choice in plan.resolved.choices if choice.name == "prefix block")
    assert block.value == "128 tokens"
    assert [group.page_tokens for group in plan.cache.cache_groups()] == [64, 512, 8192]


def test_compressed_attention_refuses_other_options() -> None:
    with raises_code("plan.no_draft_tokens", ConfigError):
        resolve(plan_request(FLASH, H200, tensor_parallel_size=4, speculative="ngram:4"))
    with raises_code("plan.one_kv_format", ConfigError):
        resolve(plan_request(FLASH, H200, tensor_parallel_size=4, kv_protected_layers=4))
    with raises_code("families.format", ConfigError, option="kv_cache_dtype", value="turboquant_3bit_nc"):
        resolve(plan_request(FLASH, H200, tensor_parallel_size=4, kv_cache_dtype="turboquant_3bit_nc"))
    assert declared(FLASH).kv_bytes_per_sequence("fp8") == 445_440


def test_layers_note_names_layers_that_one_gpu_holds() -> None:
    shared = plan_request(FLASH, H200, tensor_parallel_size=4, kv_cache_dtype="fp8")
    note = "one NVIDIA H200 holds the first {} of 43 layers, with a context of {:,} tokens"
    assert layers_note(shared) == note.format(34, MILLION)
    options = {"kv_cache_dtype": "fp8", "max_model_len": MILLION}
    for num_layers, fits in ((34, True), (35, False)):
        ratios = CATALOGUE[FLASH]["compress_ratios"]
        assert isinstance(ratios, list)
        changes = {"num_hidden_layers": num_layers, "compress_ratios": ratios[:num_layers]}
        cut = declare_config({**CATALOGUE[FLASH], **changes}, "cut")
        request = PlanRequest(EngineConfig.from_options(**options), cut, H200)
        assert (try_fit(resolve(request)) is not None) is fits
        ours = declared(FLASH).first_layers(num_layers)
        assert ours is not None
        assert ours.weight_bytes("bfloat16") == cut.weight_bytes("bfloat16")
        assert ours.kv_bytes_per_token("fp8") == cut.kv_bytes_per_token("fp8")
    assert layers_note(plan_request("Qwen3-8B", H200)) == ""


@pytest.mark.parametrize("gib", [40, 71, 99])
def test_layers_that_one_gpu_holds_are_the_most(gib: int) -> None:
    request = plan_request(FLASH, memory_target(f"{gib}GiB"), kv_cache_dtype="fp8", max_model_len=4096)
    held = int(layers_note(request).split("the first ")[1].split()[0])
    for num_layers, fits in ((held, True), (held + 1, False)):
        cut = declared(FLASH).first_layers(num_layers)
        assert cut is not None
        assert (try_fit(resolve(replace(request, declared=cut))) is not None) is fits

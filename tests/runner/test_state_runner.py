"""Runners of models with gated delta nets: plan and ledger to the byte, snapshots within their share, places that are copied."""

import gc
from pathlib import Path
from typing import Any

import pytest

from error_codes import raises_code
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError
from holdfast.loading.model_files import open_model
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep
from holdfast.runner.build import BuiltRunner, build_runner
from kernels.exactness import require_native
from models.tiny_states import STATE_MODELS, save_state_model
from runner.test_runner_build import PeakBytes, held_by_owner, scheduled
from runner.tiny_runners import held_storages

SMALL = {"device": "cpu", "max_num_seqs": 3, "max_num_batched_tokens": 96, "page_tokens": 16, "max_model_len": 200}
TEMPORARIES = ("states/rows",)
"""Terms of what torch takes while a step runs, which no owner holds."""


def build(folder: Path, name: str = "3.5", **options: Any) -> BuiltRunner:
    folder = folder / name
    if not folder.exists():
        folder.mkdir()
        save_state_model(name, folder)
    model = open_model(str(folder), "auto")
    try:
        return build_runner(EngineConfig.from_options(**(SMALL | options)), model, lambda done, total: None)
    finally:
        model.source.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "native": {},
    "half": {"dtype": "bfloat16"},
    "many snapshots": {"state_snapshots": 9, "kv_cache_dtype": "fp8", "page_tokens": None},
    "no snapshots": {"state_snapshots": 0},
    "codes": {"kv_cache_dtype": "turboquant_k8v4", "page_tokens": None},
    "near": {"kv_cache_dtype": "turboquant_3bit_nc", "kv_near_tokens": 64, "page_tokens": None},
    "weights": {"quantization": "int8"},
    "draft tokens": {"speculative": "ngram:3"},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_plan_ledger_and_memory_agree_to_the_byte(tmp_path: Path, settings: str) -> None:
    for name in STATE_MODELS if settings == "native" else ("3.5",):
        built = build(tmp_path, name, **SETTINGS[settings])
        held = held_by_owner(built.ledger)
        terms = [term for term in built.plan.memory.terms if "serve" in term.phases and term.group != "sampling"]
        planned = {term.owner: term.num_bytes for term in terms if term.owner not in TEMPORARIES}
        padding_bytes = planned.pop("kv pages/padding", 0)
        kv_bytes = held.pop("kv pages")
        planned["weights/layers"] += planned.pop("weights/experts", 0)
        assert held == planned
        assert {"kv state/conv", "kv state/recurrent", "inputs/states", "states/lists"} <= held.keys()
        assert built.plan.memory.kv_bytes <= kv_bytes <= built.plan.memory.kv_bytes + padding_bytes
        (mask_bytes,) = (term.num_bytes for term in built.plan.memory.terms if term.owner == "sampling/masks")
        own_bytes = 4 * built.runner.vocab_size + 8 * built.runner.limits.sampled_rows + mask_bytes
        assert sum(held_storages(built.runner).values()) == built.ledger.total_bytes + own_bytes
        built.release()


@pytest.mark.parametrize("name", ["3.5", "3.5 tied, one key head, five taps, a state last"])
def test_largest_step_stays_within_terms(tmp_path: Path, name: str) -> None:
    """One prompt of many rows, then single rows of several sequences."""
    require_native()
    built = build(tmp_path, name, max_num_batched_tokens=192)
    terms = {term.owner: term.num_bytes for term in built.plan.memory.terms}
    allowed = sum(term.num_bytes for term in built.plan.memory.terms if term.group == "sampling")
    others = 4 * 4 * 32 * 3 + 4 * 4 * 200
    """Queries of the last layer, and page lists."""
    for lengths in ((190,), (100, 80, 1), (1, 1, 1)):
        params, first, items = SamplingParams(temperature=0.0), 0, []
        for slot, length in enumerate(lengths):
            item = scheduled(built, slot, length, params, first)
            item.sequence.slot = slot
            first += sum(map(len, item.sequence.tables))
            items.append(item)
        step = LiveStep(tuple(items))
        built.runner.execute(step)
        gc.collect()
        with PeakBytes(set(held_storages(built.runner))) as live:
            built.runner.execute(step)
        assert live.peak <= allowed + others + terms["states/rows"], f"{lengths=}"


def test_step_with_draft_tokens_stays_within_terms(tmp_path: Path) -> None:
    """Every sequence has as many as there can be, and replays as many."""
    require_native()
    built = build(tmp_path, speculative="ngram:3")
    terms = {term.owner: term.num_bytes for term in built.plan.memory.terms}
    allowed = sum(term.num_bytes for term in built.plan.memory.terms if term.group == "sampling")
    others = 4 * 4 * 32 * 12 + 4 * 4 * 200
    params, first, items = SamplingParams(temperature=0.0), 0, []
    for slot in range(3):
        item = scheduled(built, slot, 40, params, first)
        item.sequence.slot = slot
        first += sum(map(len, item.sequence.tables))
        items.append(item._replace(start=36, num_new_tokens=4, proposals=(5, 6, 7), num_accepted=3))
    step = LiveStep(tuple(items))
    built.runner.execute(step)
    gc.collect()
    with PeakBytes(set(held_storages(built.runner))) as live:
        built.runner.execute(step)
    assert live.peak <= allowed + others + terms["states/rows"]


def test_pages_hold_layers_that_attend_alone(tmp_path: Path) -> None:
    built = build(tmp_path)
    cache = built.plan.cache
    assert cache is not None, "no cache"
    assert [layer.layer for layer in cache.layers] == [3]
    assert [group.name for group in cache.groups] == ["whole context"]
    assert cache.padding_bytes(0) == 0
    assert built.plan.kv_bytes_per_token == 2 * 2 * 32 * 4


@pytest.mark.parametrize(("given", "expected"), [(None, None), (0, 0), (5, 5)])
def test_snapshots_have_places_after_the_slots(tmp_path: Path, given: int | None, expected: int | None) -> None:
    built = build(tmp_path, state_snapshots=given)
    plan, count = built.plan, built.plan.resolved.num_snapshots
    if expected is None:
        place_bytes = plan.kv_bytes_per_sequence
        assert count >= 2
        assert count == 2 or count * place_bytes * 10 <= plan.memory.kv_bytes
    else:
        assert count == expected
    for term in plan.memory.terms:
        if term.owner.startswith("kv state/"):
            own = next(kind for kind in plan.states if term.owner.endswith(kind.name))
            assert term.num_bytes == own.tensor(3 + count).aligned_bytes
    rule = plan.state_rule
    assert rule is not None and rule.num_snapshots == count  # noqa: PT018


@pytest.mark.parametrize(
    ("options", "is_said"),
    [({"state_snapshots": 0}, True), ({"state_snapshots": 1}, False), ({"enable_prefix_caching": False}, False)],
    ids=str,
)
def test_build_without_snapshots_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], is_said: bool
) -> None:
    build(tmp_path, **options)
    assert caplog.text.count("no prompt of") == is_said


def test_short_steps_are_refused(tmp_path: Path) -> None:
    with raises_code("plan.short_state_steps", ConfigError, value=63, needed=64):
        build(tmp_path, max_num_batched_tokens=63)


def test_draft_tokens_have_their_own_lines(tmp_path: Path) -> None:
    """Snapshots keep none of them."""
    plain, drafted = build(tmp_path), build(tmp_path, speculative="ngram:3")
    before, after = ({term.owner: term for term in one.plan.memory.terms} for one in (plain, drafted))
    assert {"states/drafts", "inputs/drafts"} == after.keys() - before.keys()
    channels, seqs, layers = 2 * 2 * 16 + 4 * 24, 3, 3
    assert after["states/drafts"].num_bytes == layers * seqs * 4 * (3 * channels + 7 * 2 * 4)
    for owner in ("kv state/conv", "kv state/recurrent"):
        assert after[owner].num_bytes == before[owner].num_bytes
    assert drafted.plan.state_rule is not None
    assert drafted.plan.state_rule.num_drafts == 3


@pytest.mark.parametrize("given", [2, "0,", "1,3"])
def test_layers_without_pages_are_not_protected(tmp_path: Path, given: int | str) -> None:
    with raises_code("plan.not_paged_layers", ConfigError, num_layers=1, accepted=("3",)):
        build(tmp_path, kv_cache_dtype="turboquant_3bit_nc", kv_protected_layers=given, page_tokens=None)


def test_protected_layer_is_one_that_attends(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "turboquant_3bit_nc", "page_tokens": None}
    built = build(tmp_path, kv_protected_layers="3,", **options)
    assert [layer.format.name for layer in built.plan.cache.layers] == ["fp8"]  # type: ignore[union-attr]
    assert built.plan.resolved.protected.layers == (3,)


def test_protected_layers_by_count_are_those_that_attend(tmp_path: Path) -> None:
    built = build(tmp_path, kv_cache_dtype="turboquant_3bit_nc", kv_protected_layers=1, page_tokens=None)
    assert built.plan.resolved.protected.layers == (3,)

"""Compressed attention on a GPU, or in the interpreter, against plain torch: which rows choose, chunks of rows, padding, wanted rows; what it declares and holds."""

from dataclasses import replace

import pytest
import torch

from attention.compressed_steps import MAX_LEN, PAGE, Rows, Shape, Step
from attention.steps import QUIET
from holdfast.attention import declarations
from holdfast.attention.declarations import INDEX_SCORE_BYTES, AttentionSpec, StepBounds, score_rows
from holdfast.cache.compressed import compressed_cache
from holdfast.families.choose import choose_declaration
from holdfast.families.compressed.declarations import TritonCompressedDeclaration
from holdfast.families.compressed.triton_backend import PADDING, TritonCompressedAttention
from holdfast.memory.workspace_plan import arena_bytes
from holdfast.quant.formats import ALL_KV_FORMATS

SHAPE = Shape()
MIXED: Rows = [(0, 1), (9, 1), (10, 1), (26, 1), (27, 1), (28, 1), (61, 1), (20, 11)]
"""Around the window of 10, and around 6 chosen entries of 4 tokens: from position 27 on a row chooses."""
TRITON = TritonCompressedDeclaration()


def check(found: list[torch.Tensor], expected: list[torch.Tensor], num_rows: int, tolerance: float = 1e-4) -> None:
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own[:num_rows].float(), other[:num_rows].float(), rtol=tolerance, atol=tolerance)
        assert not own[num_rows:].any(), "padded rows are zeros"


@QUIET
@pytest.mark.parametrize(
    ("name", "captured", "num_sms"),
    [("float32", False, 2), ("fp8_ds_v4", True, 90), ("turboquant_mla_4bit", True, 3)],
    ids=str,
)
def test_attend_mixed_step_with_padding_matches_torch(name, captured, num_sms):
    step = Step(replace(SHAPE, name=name), MIXED, padding=3)
    tolerance = 1e-4 if name == "float32" else 2e-3
    check(step.triton(captured, num_sms), step.torch(), step.num_rows, tolerance)


@QUIET
def test_attend_returns_only_wanted_rows():
    wanted = [0, 6, 11]
    step, whole = Step(SHAPE, MIXED, wanted=wanted), Step(SHAPE, MIXED)
    for found, expected in zip(step.triton(), whole.torch(), strict=True):
        torch.testing.assert_close(found, expected[wanted], rtol=1e-4, atol=1e-4)


@QUIET
@pytest.mark.parametrize("name", ["float32", "fp8_ds_v4"])
def test_scores_of_a_few_rows_at_a_time(monkeypatch, name):
    monkeypatch.setattr(declarations, "INDEX_SCORE_BYTES", 3 * 64 * 4)
    step = Step(replace(SHAPE, name=name), MIXED[-3:], padding=2)
    assert score_rows(step.specs[2].most_entries, SHAPE.bounds) == 3
    check(step.triton(), step.torch(), step.num_rows, 1e-4 if name == "float32" else 2e-3)


@QUIET
@pytest.mark.parametrize(
    ("ratios", "top_k"), [((0, 0), 6), ((8,), 6), ((4,), MAX_LEN)], ids=["window", "all", "no choice"]
)
def test_layers_of_one_kind(ratios, top_k):
    step = Step(replace(SHAPE, ratios=ratios, top_k=top_k), MIXED, padding=1)
    check(step.triton(captured=True), step.torch(), step.num_rows)


def test_triton_compressed_plan_writes_rows_on_host():
    step = Step(SHAPE, [(3, 1), (26, 1), (27, 1), (26, 3)], padding=2)
    backend = TritonCompressedAttention(step.specs, step.storage, step.states, SHAPE.bounds, 2)
    backend.rows_3T.host[:] = 99
    plan = backend.plan(step.batch)
    assert plan.has_chosen
    assert backend.rows_3T.tensor[:, :8].tolist() == [
        [0, 1, 2, 3, 3, 3, 0, 0],
        [3, 26, 27, 26, 27, 28, PADDING, PADDING],
        [0, 0, 7, 0, 7, 7, 0, 0],
    ]
    short = Step(SHAPE, [(3, 1), (20, 7)])
    backend = TritonCompressedAttention(short.specs, short.storage, short.states, SHAPE.bounds, 2)
    assert not backend.plan(short.batch).has_chosen
    assert backend.plan(short.batch, captured=True).has_chosen


def test_backend_holds_bytes_of_its_declared_terms():
    step = Step(SHAPE, [(3, 1)])
    for bounds in (StepBounds(4, 64, PAGE), StepBounds(256, 8192, PAGE)):
        backend = TritonCompressedAttention(step.specs, step.storage, step.states, bounds, 132)
        assert backend.held_bytes() == {term.owner: term.num_bytes for term in TRITON.terms(step.specs, bounds)}


def layers(
    num_layers: int, max_model_len: int, top_k: int = 512, name: str = "fp8_ds_v4", **values
) -> list[AttentionSpec]:
    """For DeepSeek-V4-Flash."""
    ratios = tuple((0, 4, 128)[layer % 3] for layer in range(num_layers))
    overlapped = frozenset(layer for layer, ratio in enumerate(ratios) if ratio == 4)
    cache = compressed_cache((ALL_KV_FORMATS[name],) * num_layers, 512, 64, 128, ratios, overlapped, 128, 16)
    shape = Shape(64, 512, 64, 128, ratios, 64, top_k, name, torch.bfloat16, "cuda")
    return [replace(spec, **values) for spec in shape.specs(cache, max_model_len)]


@pytest.mark.parametrize("max_model_len", [8192, 2**20])
def test_scratch_does_not_grow_with_layers_or_the_context(max_model_len):
    bounds = StepBounds(256, 8192, 16)
    scratch = TRITON.scratch(layers(43, max_model_len), bounds)
    assert scratch == TRITON.scratch(layers(3, max_model_len), bounds)
    scores = next(spec for spec in scratch if spec.name == "index_scores")
    assert scores.num_bytes <= INDEX_SCORE_BYTES
    fixed = 528 * 64 * 514 * 2 + 8192 * 512 * 4
    assert arena_bytes(scratch) <= fixed + 2 * INDEX_SCORE_BYTES


def test_triton_compressed_few_entries_need_no_selection_scratch():
    names = {spec.name for spec in TRITON.scratch(layers(3, 2048), StepBounds(8, 512, 16))}
    assert names == {"partial_out", "partial_lse"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, None),
        ({"device_kind": "cpu"}, "it runs on GPUs, not on cpu"),
        ({"dtype": "float32"}, "it computes in half precision, not in float32"),
        ({"name": "float16"}, "pages must be bfloat16, the type of the queries"),
        ({"top_k": 5000, "max_model_len": 2**20}, "a row may choose up to 4096 tokens, not 5000"),
    ],
    ids=["V4-Flash", "CPU", "float32", "float16", "too many"],
)
def test_declaration_unsupported_gives_reason(values, words):
    own = {"max_model_len": 65536, **values}
    reasons = {TRITON.unsupported(spec) for spec in layers(3, **own)} - {None}
    assert reasons == ({words} if words else set())
    if words is None:
        assert choose_declaration(layers(3, **own)).name == "triton_compressed"

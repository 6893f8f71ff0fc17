"""Latent attention to chosen tokens, in the interpreter or on a GPU, against plain torch: which rows choose, chunks of rows, parts, padding, captured plans."""

from dataclasses import replace

import pytest
import torch

from attention.latent_steps import PAGE, Rows, Shape, Step
from attention.steps import QUIET
from holdfast.attention import declarations
from holdfast.attention.backend import SequenceRows
from holdfast.attention.declarations import INDEX_SCORE_BYTES, AttentionSpec, StepBounds, score_rows
from holdfast.cache.spec import LayerCache
from holdfast.families.latent import declarations as latent_declarations
from holdfast.families.latent import triton_backend as triton_latent
from holdfast.families.sparse.declarations import TritonSparseDeclaration
from holdfast.families.sparse.spec import SparseAttentionSpec
from holdfast.families.sparse.triton_backend import TritonSparseLatentAttention, whole_rows
from holdfast.kernels.up_projection import UP_PROJECTED_BYTES
from holdfast.memory.workspace_plan import arena_bytes
from holdfast.quant.formats import MLA_FORMATS

SPARSE = Shape(index_heads=5, top_k=12)
MIXED: Rows = [(0, 1), (15, 1), (61, 1), (8, 7), (30, 2)]
TRITON = TritonSparseDeclaration()


def check(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@QUIET
@pytest.mark.parametrize(("top_k", "captured"), [(1, True), (12, False), (61, True)], ids=str)
def test_attend_mixed_step_with_padding_matches_torch(top_k, captured):
    step = Step(Shape(index_heads=5, top_k=top_k), MIXED, padding=5)
    found = step.triton(captured)
    check(found[: step.num_rows], step.torch()[: step.num_rows])
    assert (found[step.num_rows :] == 0).all()


@QUIET
@pytest.mark.parametrize("name", MLA_FORMATS)
def test_quantized_latents_with_an_index_in_fp8(name):
    step = Step(Shape(name=name, latent_dim=64, index_heads=5, top_k=12), MIXED, padding=2)
    found = step.triton(captured=True)
    check(found[: step.num_rows], step.torch()[: step.num_rows], 2e-3)


@QUIET
def test_attend_returns_only_wanted_rows():
    wanted = [0, 2, 5, 11]
    check(Step(SPARSE, MIXED, wanted=wanted).triton(), Step(SPARSE, MIXED).torch()[wanted])


@QUIET
@pytest.mark.parametrize("name", ["float32", "fp8_ds_mla"])
def test_scores_of_a_few_rows_at_a_time_and_parts_of_a_step(monkeypatch, name):
    for module in (declarations, latent_declarations, triton_latent):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 8)
    monkeypatch.setattr(declarations, "INDEX_SCORE_BYTES", 3 * 512 * 4)
    step = Step(replace(SPARSE, name=name), MIXED, padding=3)
    assert score_rows(step.specs[0].max_model_len, step.shape.bounds) == 3
    found = step.triton()
    check(found[: step.num_rows], step.torch()[: step.num_rows], 1e-4 if name == "float32" else 2e-3)
    assert (found[step.num_rows :] == 0).all()


def test_which_rows_choose():
    step = Step(SPARSE, [(3, 1), (11, 1), (12, 1), (8, 7)])
    backend = TritonSparseLatentAttention(step.specs, step.storage, step.shape.bounds, 2)
    plan = backend.plan(step.batch)
    (part,) = plan.parts
    assert part.has_chosen
    assert part.work.tiles_X8[0, :2].sum() > 0
    assert backend.choosing_rows(0, 10).num_tokens_T.tolist() == [0, 0, 13, 0, 0, 0, 0, 13, 14, 15]
    assert backend.choosing_rows(2, 1).table_rows_T.tolist() == [2]
    short = Step(SPARSE, [(3, 1), (0, 12)])
    backend = TritonSparseLatentAttention(short.specs, short.storage, short.shape.bounds, 2)
    assert not any(one.has_chosen for one in backend.plan(short.batch).parts)
    assert all(one.has_chosen for one in backend.plan(short.batch, captured=True).parts)


def test_rows_that_see_all_of_their_tokens():
    rows = SequenceRows(4, 5, 10, ([],), 0)
    assert whole_rows(rows, 10) is None
    assert whole_rows(rows, 12) == rows._replace(num_rows=2)
    assert whole_rows(rows, 15) == whole_rows(rows, 99) == rows


def test_backend_holds_bytes_of_its_declared_terms():
    storage = SPARSE.storage(1)
    specs = SPARSE.specs(storage)
    for bounds in (StepBounds(4, 64, PAGE), StepBounds(256, 8192, PAGE)):
        backend = TritonSparseLatentAttention(specs, storage, bounds, 132)
        assert backend.held_bytes() == {term.owner: term.num_bytes for term in TRITON.terms(specs, bounds)}


def layer(max_model_len: int, num_heads: int = 128, top_k: int = 2048) -> AttentionSpec:
    """One of DeepSeek-V3.2."""
    cache = LayerCache(0, "latent", MLA_FORMATS["fp8_ds_mla"], 1, 576, 64, 128)
    sizes = {"nope_dim": 128, "value_dim": 128, "index_heads": 64, "index_top_k": top_k}
    return SparseAttentionSpec(cache, num_heads, 0.1, None, max_model_len, "bfloat16", "cuda", **sizes)


@pytest.mark.parametrize("max_model_len", [4096, 163840, 2**20])
def test_scratch_does_not_grow_with_layers_or_the_context(max_model_len):
    bounds = StepBounds(256, 8192, 64)
    one, all_layers = ([layer(max_model_len)] * count for count in (1, 61))
    scratch = TRITON.scratch(all_layers, bounds)
    assert scratch == TRITON.scratch(one, bounds)
    scores = next(spec for spec in scratch if spec.name == "index_scores")
    assert scores.num_bytes <= max(INDEX_SCORE_BYTES, 4 * max_model_len)
    # Queries and outputs in the latent space, partials, lists, prompts; scores and what the selection works in beside them.
    fixed = 65536 * (576 + 512) * 2 + 264 * 128 * 513 * 4 + 8192 * 2048 * 4 + UP_PROJECTED_BYTES
    assert arena_bytes(scratch) <= fixed + 2 * INDEX_SCORE_BYTES


def test_triton_sparse_short_context_needs_no_selection_scratch():
    names = {spec.name for spec in TRITON.scratch([layer(2048)], StepBounds(8, 512, 64))}
    assert not names & {"selected", "index_scores"}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (layer(4096), None),
        (layer(2**20, top_k=4096), None),
        (layer(5000, top_k=5000), None),
        (layer(8192, top_k=4097), "a row may choose up to 4096 tokens, not 4097"),
        (layer(2**22 + 1), "a row may choose among up to 4194304 tokens, not 4194305"),
        (Shape().specs(Shape().storage(1))[0], "it runs on GPUs, not on cpu"),
    ],
    ids=["V3.2", "most tokens", "no choice", "too many tokens", "too long a context", "on a CPU"],
)
def test_declaration_unsupported_gives_reason(spec, words):
    assert TRITON.unsupported(spec) == words

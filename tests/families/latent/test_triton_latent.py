"""Latent attention over tiles, in the interpreter or on a GPU, against plain torch: parts of a step, groups of heads, padding, captured plans."""

import pytest
import torch

from attention.latent_steps import MIXED, PAGE, Shape, Step
from attention.steps import QUIET
from holdfast.attention import declarations as shared
from holdfast.attention.backend import SequenceRows
from holdfast.attention.declarations import StepBounds
from holdfast.families.latent import declarations
from holdfast.families.latent import triton_backend as triton_latent
from holdfast.families.latent.declarations import TritonLatentDeclaration
from holdfast.families.latent.triton_backend import TritonLatentAttention, rows_between
from holdfast.kernels import up_projection
from holdfast.quant.formats import MLA_FORMATS


def check(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@QUIET
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_attend_mixed_step_with_padding_matches_torch(captured):
    step = Step(Shape(), MIXED, padding=5)
    found = step.triton(captured)
    check(found[: step.num_rows], step.torch()[: step.num_rows])
    assert (found[step.num_rows :] == 0).all()


@QUIET
@pytest.mark.parametrize("name", MLA_FORMATS)
def test_triton_latent_quantized_latents_match_torch(name):
    step = Step(Shape(name=name, latent_dim=64), MIXED, padding=5)
    found = step.triton(captured=True)
    check(found[: step.num_rows], step.torch()[: step.num_rows], 2e-3)
    assert (found[step.num_rows :] == 0).all()


@QUIET
@pytest.mark.parametrize("padding", [0, 3])
def test_long_prompts_are_up_projected_beside_absorbed_rows(monkeypatch, padding):
    monkeypatch.setattr(up_projection, "LEAST_ROWS", 20)
    monkeypatch.setattr(up_projection, "LAUNCHES_COST", 0)
    monkeypatch.setattr(declarations, "LEAST_ROWS", 20)
    step = Step(Shape(), MIXED, padding)
    backend = TritonLatentAttention(step.specs, step.storage, step.shape.bounds, 2)
    plan = backend.plan(step.batch)
    assert [rows.num_rows for rows in plan.up_projected] == [33, 30]
    ((_, _, work, _),) = plan.parts
    tiles_X8 = work.tiles_X8[1 : 1 + int(work.tiles_X8[0, :2].sum())]
    assert sorted(set(tiles_X8[:, 1].tolist())) == [0, 1, 2, 3, 4], "up-projected rows are in no tile"
    assert backend.plan(step.batch, captured=True).up_projected == ()
    found = step.run(backend)
    check(found[: step.num_rows], step.torch()[: step.num_rows])
    assert (found[step.num_rows :] == 0).all()


@QUIET
def test_parts_that_are_all_up_projected_are_left_out(monkeypatch):
    monkeypatch.setattr(up_projection, "LEAST_ROWS", 20)
    monkeypatch.setattr(up_projection, "LAUNCHES_COST", 0)
    for module in (shared, declarations, triton_latent):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 16)
    step = Step(Shape(), [(3, 1), (0, 60)])
    backend = TritonLatentAttention(step.specs, step.storage, step.shape.bounds, 2)
    assert [part.first_row for part in backend.plan(step.batch).parts] == [0]
    check(step.run(backend), step.torch())


@QUIET
def test_attend_returns_only_wanted_rows():
    wanted = [0, 3, 8, 71]
    found = Step(Shape(), MIXED, wanted=wanted).triton()
    check(found, Step(Shape(), MIXED).torch()[wanted])


@QUIET
def test_triton_latent_large_step_splits_rows_and_heads(monkeypatch):
    for module in (shared, declarations, triton_latent):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 32)
    monkeypatch.setattr(declarations, "HEAD_ROWS", 64)
    monkeypatch.setattr(declarations, "HEADS_AT_ONCE", 2)
    step = Step(Shape(num_heads=5), MIXED, padding=3)
    backend = TritonLatentAttention(step.specs, step.storage, step.shape.bounds, 2)
    assert [part.num_rows for part in backend.plan(step.batch).parts] == [32, 32, 11]
    found = step.run(backend)
    check(found[: step.num_rows], step.torch()[: step.num_rows])
    assert (found[step.num_rows :] == 0).all()


def test_rows_of_a_part():
    first, second = SequenceRows(0, 5, 10, ([],), 0), SequenceRows(5, 7, 0, ([],), 1)
    assert rows_between((first, second), 0, 4) == (first._replace(num_rows=4),)
    assert rows_between((first, second), 4, 8) == (
        first._replace(row_start=0, num_rows=1, start=14),
        second._replace(row_start=1, num_rows=3),
    )
    assert rows_between((first, second), 8, 12) == (second._replace(row_start=0, num_rows=4, start=3),)


def test_backend_holds_bytes_of_its_declared_terms():
    shape = Shape(num_heads=16)
    storage = shape.storage(1)
    specs = shape.specs(storage)
    for bounds in (StepBounds(4, 64, PAGE), StepBounds(256, 8192, PAGE)):
        backend = TritonLatentAttention(specs, storage, bounds, 132)
        terms = TritonLatentDeclaration().terms(specs, bounds)
        assert backend.held_bytes() == {term.owner: term.num_bytes for term in terms}


def test_plans_lie_where_the_first_one_lay():
    step = Step(Shape(), [(40, 1)])
    backend = TritonLatentAttention(step.specs, step.storage, step.shape.bounds, 2)
    pointers = {backend.plan(step.batch).parts[0].work.tiles_X8.data_ptr() for _ in range(3)}
    assert len(pointers) == 1

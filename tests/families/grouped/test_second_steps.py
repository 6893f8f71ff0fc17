"""A second step on a backend of a GPU: lists and scratch of the first one show nowhere, and none is rewritten before it was read."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from attention import compressed_steps, latent_steps
from attention.steps import QUIET
from holdfast.memory.arena import MirroredTensor
from kernels.exactness import same_bits

DENSE, SPARSE = latent_steps.Shape(), latent_steps.Shape(index_heads=5, top_k=12)
LONG = [(40, 9), (61, 1), (30, 2), (0, 20)]
"""Most rows choose their tokens; there are more rows and pages than in the steps that follow."""
NEXT = [([(3, 1), (20, 2)], 9), ([(12, 1), (11, 1), (0, 4)], 0)]


@QUIET
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("shape", [DENSE, SPARSE], ids=["all tokens", "selected tokens"])
@pytest.mark.each_value
def test_second_step_over_latents_equals_a_first(shape, captured):
    first = latent_steps.Step(shape, LONG)
    backend, scratch = first.backend(), first.scratch()
    first.run(backend, captured, scratch)
    for rows, padding in NEXT:
        step = latent_steps.Step(shape, rows, padding)
        found, expected = step.run(backend, captured, scratch), step.triton(captured)
        assert same_bits(found, expected)
        assert not found[step.num_rows :].any()


@QUIET
def test_second_step_over_entries_equals_a_first():
    shape = compressed_steps.Shape()
    for captured in (False, True):
        for rows, padding in NEXT:
            step, first = (compressed_steps.Step(shape, own, padding) for own in (rows, LONG))
            backend, scratch = step.backend(), step.scratch()
            backend.plan(first.batch)
            for found, expected in zip(step.run(backend, captured, scratch), step.triton(captured), strict=True):
                assert same_bits(found, expected)


class Watched:
    """A mirrored tensor whose device is late: the host may write only after it has waited."""

    def __init__(self, inner: MirroredTensor) -> None:
        self._inner, self._is_sent = inner, False
        self.tensor, self.num_sent = inner.tensor, 0

    @property
    def host(self) -> Any:
        assert not self._is_sent, "the host writes what the device may still read"
        return self._inner.host

    def wait(self) -> None:
        self._is_sent = False

    def send(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._inner.send(ranges)
        self._is_sent, self.num_sent = True, self.num_sent + 1


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (latent_steps.Step(SPARSE, LONG), "rows_2T"),
        (compressed_steps.Step(compressed_steps.Shape(), LONG), "rows_3T"),
    ],
    ids=["selected tokens", "entries"],
)
def test_lists_are_rewritten_after_they_were_read(step, name):
    backend = step.backend()
    watched = Watched(vars(backend)[name])
    vars(backend)[name] = watched
    for number in range(1, 4):
        backend.plan(step.batch)
        assert watched.num_sent == number


def test_plan_sends_all_row_numbers_and_no_more():
    """The device has memory of its own: what is not sent is what an earlier step left there."""
    for step, name in (
        (latent_steps.Step(SPARSE, LONG, padding=3), "rows_2T"),
        (compressed_steps.Step(compressed_steps.Shape(), LONG, padding=3), "rows_3T"),
    ):
        backend = step.backend()
        rows = vars(backend)[name]
        apart = MirroredTensor(tuple(rows.tensor.shape), torch.int32, torch.device("cpu"), is_shared=False)
        apart.tensor.fill_(99)
        vars(backend)[name] = apart
        backend.plan(step.batch)
        sent, num_rows = torch.from_numpy(apart.host), step.batch.num_rows
        assert torch.equal(apart.tensor[:, :num_rows], sent[:, :num_rows])
        assert bool((apart.tensor[:, num_rows:] == 99).all())

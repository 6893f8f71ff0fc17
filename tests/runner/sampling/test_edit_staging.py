"""Edits through a list of fixed length: in their order, in rounds where they are many, and none twice."""

import numpy as np
import pytest
import torch

from holdfast.kernels.geometry import EDITS_PER_PROGRAM
from holdfast.kernels.sampling.edit_logits import EditKind
from holdfast.runner.sampling.logit_edits import Edits, EditStaging


def make_staging(num_programs: int) -> EditStaging:
    shape = (num_programs * EDITS_PER_PROGRAM, 2)
    return EditStaging(torch.full(shape, -5, dtype=torch.int32), torch.full(shape, -5, dtype=torch.int32))


def run(staging: EditStaging, block: torch.Tensor, edits: dict[EditKind, list[tuple[int, Edits]]]) -> None:
    for kind in EditKind:
        for row, row_edits in edits.get(kind, ()):
            staging.add(row * block.shape[1], row_edits, kind, block)
        staging.end_kind(kind)
    staging.apply(block)


@pytest.mark.parametrize("num_programs", [1, 2, 5, 40])
def test_many_edits_in_any_number_of_rounds(num_programs):
    rng = np.random.default_rng(0)
    staging = make_staging(num_programs)
    block = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    expected = block.clone()
    for step in range(3):
        staging.reset()
        for _ in range(2):  # blocks of one step
            ids = [rng.permutation(700)[: rng.integers(0, 700)].astype(np.int32) for _ in range(3)]
            numbers = [rng.uniform(0.5, 2, len(row)) for row in ids]
            run(
                staging,
                block,
                {
                    EditKind.REPETITION: [(row, Edits(ids[row], 1.3)) for row in range(3)],
                    EditKind.ADD: [(row, Edits(ids[row], numbers[row])) for row in (0, 2)],
                    EditKind.REPLACE: [(1, Edits(ids[1][:2], -np.inf))],
                },
            )
            for row in range(3):
                places = torch.from_numpy(ids[row]).long()
                logits = expected[row, places]
                logits = torch.where(logits > 0, logits / 1.3, logits * 1.3)
                if row != 1:
                    logits = logits + torch.from_numpy(numbers[row].astype(np.float32))
                expected[row, places] = logits
            expected[1, ids[1][:2].tolist()] = -torch.inf
        assert torch.equal(block, expected), f"{step=}"


def test_nothing_to_edit():
    block = torch.ones(1, 5)
    staging = make_staging(1)
    run(staging, block, {EditKind.ADD: [(0, Edits(np.empty(0, np.int32), 1.0))]})
    assert block.tolist() == [[1.0] * 5]


def test_a_full_list_is_no_round_too_many(monkeypatch):
    waits = []
    monkeypatch.setattr(EditStaging, "_wait", lambda self: (waits.append(1), self.reset()))
    staging, block = make_staging(2), torch.zeros(1, 2 * EDITS_PER_PROGRAM)
    everything = np.arange(2 * EDITS_PER_PROGRAM, dtype=np.int32)
    run(staging, block, {EditKind.ADD: [(0, Edits(everything, 1.0))]})
    assert not waits
    run(staging, block, {EditKind.ADD: [(0, Edits(everything[:1], 1.0))]})
    assert len(waits) == 1
    assert block.sum() == 2 * EDITS_PER_PROGRAM + 1

"""Edits of single logits against torch, to the bit, and nowhere else."""

import numpy as np
import pytest
import torch

from holdfast.kernels.geometry import EDITS_PER_PROGRAM, LogitRow
from holdfast.kernels.sampling.edit_logits import (
    PADDING,
    EditKind,
    copy_rows,
    copy_rows_reference,
    copy_rows_triton,
    edit_logits,
    edit_logits_reference,
    edit_logits_triton,
    restore_logits,
    restore_logits_reference,
    restore_logits_triton,
)
from kernels.exactness import random, same_bits
from kernels.logit_cases import INF, NAN, make_table
from kernels.triton_cases import QUIET, amid_poison, assert_allocates_nothing

pytestmark = QUIET


def make_edits(places, numbers, device):
    count = -(-len(places) // EDITS_PER_PROGRAM) * EDITS_PER_PROGRAM
    edits = np.full((count, 2), PADDING, dtype=np.int32)
    edits[: len(places), 0] = places
    edits[: len(places), 1] = np.asarray(numbers, dtype=np.float32).view(np.int32)
    return torch.from_numpy(edits).to(device)


@pytest.mark.parametrize("kind", EditKind, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("num_edits", [1, 255, 256, 700])
def test_edit_logits_matches_torch_to_the_bit(device, guarded, kind, num_edits):
    rng = np.random.default_rng(num_edits)
    places = rng.permutation(3 * 301)[:num_edits]
    numbers = rng.uniform(0.3, 3, num_edits)
    raw = random(3, 301, scale=5)
    raw[0, :4] = torch.tensor([0.0, -0.0, INF, -INF])
    block, expected = guarded(3, 301).copy_(raw), raw.clone().to(device)
    edits = make_edits(places, numbers, device)
    edit_logits_triton(block, edits, kind)
    edit_logits_reference(expected, edits, kind)
    assert same_bits(block, expected)
    untouched = np.setdiff1d(np.arange(3 * 301), places)
    assert same_bits(block.cpu().view(-1)[untouched], raw.view(-1)[untouched])
    assert (block.cpu() != raw).sum() > num_edits / 2


def test_edit_logits_kinds_apply_in_sequence(device):
    block = torch.tensor([[2.0, -2.0, 1.0]], device=device)
    for kind, number in zip(EditKind, (4.0, 0.25, 1.0, -INF), strict=True):
        places = [2] if kind is EditKind.REPLACE else [0, 1]
        edit_logits_triton(block, make_edits(places, [number] * len(places), device), kind)
    assert block.tolist() == [[2.0 / 4 - 0.25 + 1, -2.0 * 4 - 0.25 + 1, -INF]]


def test_edit_logits_padding_changes_nothing(device, guarded):
    block = guarded(2, 50).copy_(random(2, 50))
    raw = block.clone()
    for kind in EditKind:
        edit_logits_triton(block, make_edits([], [], device), kind)
        edit_logits_triton(block, torch.tensor([PADDING] * EDITS_PER_PROGRAM, dtype=torch.int32, device=device), kind)
    assert same_bits(block, raw)


def test_edit_logits_refuses_partial_programs(device):
    with pytest.raises(AssertionError, match="num_edits=3 is not a multiple"):
        edit_logits_triton(torch.zeros(1, 9), torch.zeros(3, 2, dtype=torch.int32), EditKind.ADD)


@pytest.mark.parametrize("size", [1, 63, 4097, 9000], ids=lambda size: f"V{size}")
def test_copy_rows_copies_from_any_source(device, guarded, size):
    logits = random(6, size)
    logits[4, size // 2] = NAN
    table = make_table([LogitRow(i, target) for i, target in enumerate((4, 0, 5, 4))], device)
    block, expected = guarded(4, size), torch.empty(4, size)
    copy_rows_triton(amid_poison(logits, device), table, block)
    copy_rows_reference(logits, table.cpu(), expected)
    assert same_bits(block.cpu(), expected)
    assert same_bits(expected, logits[[4, 0, 5, 4]])


@pytest.mark.parametrize("num_kept", [0, 1, 256, 500])
def test_restore_logits_blank_row_gets_named_logits_back(device, guarded, num_kept):
    logits = random(6, 301)
    targets = (4, 0, 5)
    rows = [LogitRow(i, target, is_blank=float(i != 1)) for i, target in enumerate(targets)]
    table = make_table(rows, device)
    kept = np.random.default_rng(num_kept).permutation(3 * 301)[:num_kept]
    kept = kept[kept // 301 != 1]
    edits = make_edits(kept, np.zeros(len(kept)), device)
    block, expected = guarded(3, 301), torch.empty(3, 301)
    source = amid_poison(logits, device)
    copy_rows_triton(source, table, block)
    restore_logits_triton(source, table, block, edits)
    copy_rows_reference(logits, table.cpu(), expected)
    restore_logits_reference(logits, table.cpu(), expected, edits.cpu())
    assert same_bits(block.cpu(), expected)
    plain = torch.full((3, 301), -INF)
    plain[1] = logits[0]
    for place in kept:
        plain[place // 301, place % 301] = logits[targets[place // 301], place % 301]
    assert same_bits(expected, plain)


def test_copy_rows_accepts_no_rows(device):
    table = make_table([LogitRow()], device)[:0]
    copy_rows_triton(torch.zeros(2, 8, device=device), table, torch.zeros(0, 8, device=device))


@pytest.mark.gpu
def test_edit_logits_allocates_nothing(device):
    logits = random(3, 151936).to(device)
    block, table = torch.empty_like(logits), make_table([LogitRow(i, i) for i in range(3)], device)
    edits = make_edits([5, 151936], [1.5, 2.5], device)
    assert_allocates_nothing(lambda: (copy_rows(logits, table, block), edit_logits(block, edits, EditKind.REPETITION)))
    assert_allocates_nothing(lambda: restore_logits(logits, table, block, edits))

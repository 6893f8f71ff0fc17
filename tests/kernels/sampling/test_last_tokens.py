"""Newest tokens by slot: what is kept is what a later step finds, and nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.geometry import NO_TOKEN
from holdfast.kernels.sampling.last_tokens import (
    BLOCK,
    NO_SLOT,
    keep_tokens,
    keep_tokens_reference,
    keep_tokens_triton,
    resolve_tokens,
    resolve_tokens_reference,
    resolve_tokens_triton,
)
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

SIZES = (1, 2, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)


def numbers(guarded, values: list[int]) -> torch.Tensor:
    tensor = guarded(len(values), dtype=torch.int64)
    return tensor.copy_(torch.tensor(values, dtype=torch.int64))


def make_rows(num_rows: int, num_slots: int) -> tuple[list[int], list[int]]:
    """Tokens with some that could not be chosen, and slots in any order, some of them nowhere."""
    generator = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(0, 2**17, (num_rows,), generator=generator)
    tokens[::7] = NO_TOKEN
    slots = torch.randperm(num_slots, generator=generator)[:num_rows]
    slots[1::3] = NO_SLOT
    return tokens.tolist(), slots.tolist()


@pytest.mark.parametrize("num_rows", SIZES)
def test_keep_tokens_matches_reference(device, guarded, num_rows):
    tokens, slots = make_rows(num_rows, num_rows + 3)
    expected = list(range(-9, num_rows - 6))
    for token, slot in zip(tokens, slots, strict=True):
        if slot != NO_SLOT:
            expected[slot] = max(token, 0)
    for keep in (keep_tokens_triton, keep_tokens_reference):
        last = numbers(guarded, list(range(-9, num_rows - 6)))
        keep(numbers(guarded, tokens), numbers(guarded, slots), last)
        assert last.tolist() == expected


@pytest.mark.parametrize("num_rows", SIZES)
def test_resolve_tokens_replaces_slot_ids_by_tokens(device, guarded, num_rows):
    slots = torch.randint(0, 9, (num_rows,), generator=torch.Generator().manual_seed(num_rows)).tolist()
    ids = [-1 - slot if row % 3 else 1000 + row for row, slot in enumerate(slots)]
    expected = [70 + slot if row % 3 else 1000 + row for row, slot in enumerate(slots)]
    for resolve in (resolve_tokens_triton, resolve_tokens_reference):
        found = numbers(guarded, ids)
        for _ in range(2):
            resolve(found, numbers(guarded, list(range(70, 79))))
            assert found.tolist() == expected, "what is resolved stays"


@given(st.permutations(range(6)), st.lists(st.integers(NO_TOKEN, 5), min_size=6, max_size=6), st.integers(0, 6))
@settings(max_examples=30)
def test_resolve_tokens_finds_tokens_of_the_previous_step(device, slots, tokens, num_rows):
    zones = RedZones(device)
    last = numbers(zones.allocate, [9] * 6)
    keep_tokens_triton(numbers(zones.allocate, tokens[:num_rows]), numbers(zones.allocate, slots[:num_rows]), last)
    ids = numbers(zones.allocate, [-1 - slot for slot in slots])
    resolve_tokens_triton(ids, last)
    assert ids.tolist() == [max(token, 0) for token in tokens[:num_rows]] + [9] * (6 - num_rows)
    zones.check()


def test_last_tokens_refuse_misfit_tensors(device):
    tokens, last = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(5, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError, match="a slot a row of 3"):
        keep_tokens_triton(tokens, tokens[:2], last)
    with pytest.raises(AssertionError, match="int64"):
        keep_tokens_triton(tokens.int(), tokens, last)
    with pytest.raises(AssertionError, match="not dense"):
        keep_tokens_triton(tokens[::2], tokens[:2], last)
    with pytest.raises(AssertionError, match="int64"):
        resolve_tokens_triton(tokens.int(), last)
    with pytest.raises(AssertionError, match="not dense"):
        resolve_tokens_triton(tokens[::2], last)


@pytest.mark.gpu
def test_last_tokens_in_graph_allocate_nothing(device):
    """Sixty-four sequences decode from their own tokens: what one replay keeps, the next begins with."""
    last = torch.zeros(64, dtype=torch.int64, device=device)
    slots = torch.arange(63, -1, -1, device=device)
    ids = torch.empty(64, dtype=torch.int64, device=device)
    tokens = torch.empty_like(ids)

    def step() -> None:
        resolve_tokens(ids, last)
        torch.add(ids, 1, out=tokens)
        keep_tokens(tokens, slots, last)

    ids.copy_(-1 - slots)
    assert_allocates_nothing(step)
    last.copy_(torch.arange(64, device=device) * 100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        ids.copy_(-1 - slots)
        graph.replay()
    assert last.tolist() == [100 * slot + 5 for slot in range(64)]

import random

import pytest
import torch

from holdfast.config import Limits
from holdfast.memory.ledger import Ledger
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import ScheduledSequence, Sequence, Step
from holdfast.runner.batch_buffers import BatchBuffers, batch_terms

CPU = torch.device("cpu")


def limits(max_num_batched_tokens=64, page_tokens=4):
    return Limits(8, max_num_batched_tokens, 128, page_tokens)


def scheduled(start, num_new_tokens, pages, num_tokens=None, first_token=100):
    token_ids = list(range(first_token, first_token + (num_tokens or start + num_new_tokens)))
    sequence = Sequence(0, token_ids, len(token_ids), SamplingParams(), seed=0, max_tokens=8, pages=pages)
    return ScheduledSequence(sequence, start, num_new_tokens)


def test_rows_lie_one_sequence_behind_the_other():
    buffers = BatchBuffers(limits(), CPU, Ledger())
    step = Step((scheduled(0, 6, [9, 2]), scheduled(9, 1, [5, 1, 7], first_token=300), scheduled(3, 2, [0, 4])))
    batch = buffers.fill(step, [5, 6, 8])
    assert batch.token_ids_T.tolist() == [100, 101, 102, 103, 104, 105, 309, 103, 104]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 9, 3, 4]
    assert batch.slots_T.tolist() == [36, 37, 38, 39, 8, 9, 29, 3, 16]
    assert batch.logits is not None
    assert batch.logits.rows_R.tolist() == [5, 6, 8]
    assert [(rows.row_start, rows.num_rows, rows.start, rows.pages) for rows in batch.logits.sequences] == [
        (0, 1, 5, [9, 2]),
        (1, 1, 9, [5, 1, 7]),
        (2, 1, 4, [0, 4]),
    ]
    assert [(rows.row_start, rows.num_rows, rows.start, rows.end) for rows in batch.sequences] == [
        (0, 6, 0, 6),
        (6, 1, 9, 10),
        (7, 2, 3, 5),
    ]
    assert batch.sequences[1].pages is step.scheduled[1].sequence.pages
    assert batch.num_rows == 9


@pytest.mark.parametrize("page_tokens", [1, 4, 16, 256])
@pytest.mark.parametrize("seed", range(10))
def test_slots_of_any_part_of_any_sequence(page_tokens, seed):
    dice = random.Random(seed)
    buffers = BatchBuffers(limits(200, page_tokens), CPU, Ledger())
    items, expected = [], []
    for _ in range(3):
        start, count = dice.choice([0, 3, 4, 50]), dice.choice([1, 2, 4, 5, 50])
        pages = dice.sample(range(1000), -(-(start + count) // page_tokens) + 2)
        items.append(scheduled(start, count, pages))
        expected += [pages[i // page_tokens] * page_tokens + i % page_tokens for i in range(start, start + count)]
    batch = buffers.fill(Step(tuple(items)), [0])
    assert batch.slots_T.tolist() == expected


def test_every_row_wanted_needs_no_list():
    buffers = BatchBuffers(limits(), CPU, Ledger())
    assert buffers.fill(Step((scheduled(0, 3, [0]),)), [0, 1, 2]).logits is None
    assert buffers.fill(Step((scheduled(7, 1, [0, 1]), scheduled(0, 1, [2]))), [0, 1]).logits is None


def test_no_row_wanted():
    batch = BatchBuffers(limits(), CPU, Ledger()).fill(Step((scheduled(0, 3, [0], num_tokens=9),)), [])
    assert batch.logits is not None
    assert batch.logits.rows_R.tolist() == []


def test_addresses_never_change_and_nothing_of_the_last_step_remains():
    buffers = BatchBuffers(limits(), CPU, Ledger())
    addresses = set()
    dice = random.Random(0)
    for _ in range(50):
        count = dice.choice([1, 2, 17, 64])
        batch = buffers.fill(Step((scheduled(0, count, list(range(16)), num_tokens=70),)), [0] if count > 1 else [])
        tensors = (batch.token_ids_T, batch.positions_T, batch.slots_T)
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
        assert batch.positions_T.tolist() == list(range(count))
        assert batch.num_rows == count
    assert len(addresses) == 1


def test_a_step_as_large_as_allowed():
    buffers = BatchBuffers(limits(64), CPU, Ledger())
    batch = buffers.fill(Step((scheduled(0, 64, list(range(16))),)), list(range(63)))
    assert batch.num_rows == 64
    assert batch.logits is not None
    assert batch.logits.rows_R.tolist() == list(range(63))


@pytest.mark.parametrize("max_num_batched_tokens", [1, 64, 2048])
def test_what_is_held_is_what_was_planned(max_num_batched_tokens):
    ledger = Ledger()
    bounds = limits(max_num_batched_tokens)
    buffers = BatchBuffers(bounds, CPU, ledger)
    planned = {term.owner: term.num_bytes for term in batch_terms(bounds)}
    assert {entry.owner: entry.num_bytes for entry in ledger} == planned
    held = [tensor.untyped_storage().nbytes() for tensor in buffers._device.values()]
    assert sum(held) == sum(planned.values()) == 4 * 8 * max_num_batched_tokens
    assert all(
        torch.from_numpy(buffers._host[name]).data_ptr() == buffers._device[name].data_ptr() for name in buffers._host
    )

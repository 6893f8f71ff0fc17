"""What an exchange holds, as tensors: rooms in turn, shares of logits, and slots between stages."""

import pytest
import torch

from for_each import for_each
from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.held_memory import HeldMemory
from holdfast.distributed.mesh import meshes


@for_each("vocab_size, size", [(13, 2), (13, 4), (5, 4), (1, 3), (12, 3)])
def test_held_memory_vocabulary_shares_add_up(vocab_size, size):
    """Ranks at the end may have fewer columns than others, or none."""
    mesh = meshes(size)[0]
    held = HeldMemory({}, ExchangeNeeds(8, 1, vocab_size, 8), mesh)
    widths = [held.share_width(rank) for rank in range(size)]
    assert sum(widths) == vocab_size
    assert min(widths) >= 0
    assert widths[0] == max(widths) == -(-vocab_size // size)


def test_held_memory_rooms_alternate():
    rooms = torch.zeros(2, 32, dtype=torch.uint8)
    held = HeldMemory({"exchange/rows": rooms}, ExchangeNeeds(32, 1, 4, 8), meshes(2)[0])
    for turn in (0, 1, 0):
        part = held.room(2, 3, torch.float32)
        assert part.data_ptr() == rooms[turn].data_ptr() == held.room(1, 1, torch.float16).data_ptr()
        with pytest.raises(AssertionError, match="last room"):
            held.take(held.room_at(1 - turn, 2, 3, torch.float32))
        assert held.take(part) == turn
    with pytest.raises(AssertionError, match="in a room of 32 bytes"):
        held.room(3, 3, torch.float32)


def test_held_memory_stage_slots_are_disjoint_and_reused():
    slots = torch.zeros(3, 64, dtype=torch.uint8)
    held = HeldMemory({"pipeline/hidden": slots}, ExchangeNeeds(8, 1, 4, 64), meshes(1, [(0, 1), (1, 2), (2, 3)])[0])
    rows = torch.ones(2, 4)
    for slot in range(5):
        assert held.hidden_slot(slot, rows).data_ptr() == slots[slot % 3].data_ptr()
    with pytest.raises(AssertionError, match="in a slot of 64 bytes"):
        held.hidden_slot(0, torch.ones(5, 4))

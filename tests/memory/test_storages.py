"""What an object holds, and what was allocated for it since."""

from collections import deque
from dataclasses import dataclass

import pytest
import torch

from holdfast.memory.storages import AllocationCounter, held_storages

CPU = torch.device("cpu")


@dataclass(slots=True)
class Slotted:
    tensor: torch.Tensor


class Holder:
    def __init__(self) -> None:
        self.tensor = torch.zeros(4)
        self.parts: list[object] = []

    def method(self) -> None: ...


def test_held_storages_finds_tensors_in_every_container() -> None:
    tensors = [torch.zeros(size) for size in range(1, 8)]
    holder = Holder()
    holder.parts = [{"a": tensors[0]}, (tensors[1],), deque([tensors[2]]), Slotted(tensors[3])]
    root = {"method": holder.method, "more": [{"b": [tensors[4]]}]}
    expected = [holder.tensor, *tensors[:5]]
    assert held_storages(root) == {tensor.data_ptr(): tensor.nbytes for tensor in expected}


def test_held_storages_views_count_once() -> None:
    whole = torch.zeros(8)
    assert held_storages([whole[:2], whole[4:], whole.view(2, 4)]) == {whole.data_ptr(): 32}


def test_allocation_counter_counts_new_and_moved_tensors() -> None:
    holder = Holder()
    counter = AllocationCounter(holder, CPU)
    assert counter.take() == 0
    holder.parts += [torch.zeros(2), torch.zeros(3)]
    assert counter.take() == 2
    assert counter.take() == 0
    before, holder.tensor = holder.tensor, torch.zeros(4)
    assert before.data_ptr() != holder.tensor.data_ptr()
    assert counter.take() == 1


def test_allocation_counter_views_and_freed_tensors_are_none() -> None:
    holder = Holder()
    holder.parts = [torch.zeros(2)]
    counter = AllocationCounter(holder, CPU)
    holder.parts = [holder.tensor[1:]]
    assert counter.take() == 0


@pytest.mark.gpu
def test_allocation_counter_counts_temporaries_on_gpu() -> None:
    device = torch.device("cuda")
    holder = torch.zeros(1000, device=device)
    counter = AllocationCounter(None, device)
    holder.fill_(1.0)
    assert counter.take() == 0
    for _ in range(3):
        torch.empty(1000, device=device)
    assert counter.take() == 3
    assert counter.take() == 0

"""Storages of tensors that an object holds, and allocations since a moment; imports torch."""

from collections import deque
from types import FunctionType, MethodType, ModuleType

import torch

ALLOCATIONS = "allocation.all.allocated"
"""Counter of torch's allocator on a GPU; it only grows."""


def held_storages(root: object) -> dict[int, int]:
    """Return address and bytes of the memory of every tensor that an object reaches."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type | str | bytes | int | float | ModuleType | FunctionType):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            if storage.nbytes():  # empty ones are all at address 0
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset | deque):
            waiting += item
        elif isinstance(item, MethodType):
            waiting.append(item.__self__)
        else:
            waiting += getattr(item, "__dict__", {}).values()
            waiting += [getattr(item, name, None) for name in getattr(type(item), "__slots__", ())]
    return found


class AllocationCounter:
    """Counts allocations for an object that should take none.

    On a GPU the device's allocator counts, temporaries included. A CPU has no such counter: storages that the object
    holds and did not hold before count.
    """

    def __init__(self, root: object, device: torch.device) -> None:
        self._root, self._device = root, device
        self._num_before = self._num_allocated()
        self._held = self._storages()

    def take(self) -> int:
        """Return the allocations since the last call, or since construction."""
        num_now, held = self._num_allocated(), self._storages()
        num_taken = num_now - self._num_before + len(held.items() - self._held.items())
        self._num_before, self._held = num_now, held
        return num_taken

    def _num_allocated(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get(ALLOCATIONS, 0))

    def _storages(self) -> dict[int, int]:
        return {} if self._device.type == "cuda" else held_storages(self._root)

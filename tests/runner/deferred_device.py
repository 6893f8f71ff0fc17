"""A device that is as slow as can be: what is put to it happens in order, and only when somebody waits for it.

So whatever the host writes over before a copy has read it, or before a graph has, shows in what comes out.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from holdfast.attention import tile_scheduler
from holdfast.memory.arena import MirroredTensor
from holdfast.runner import step_inputs


class DeferredDevice:
    """One stream; `is_deferred` False: everything happens at once."""

    def __init__(self, is_deferred: bool) -> None:
        self.is_deferred = is_deferred
        self.most_queued = 0
        self._queue: deque[Callable[[], Any]] = deque()
        self._num_put = self._num_done = 0

    def put(self, work: Callable[[], Any]) -> int:
        """Behind all that was put before; its number."""
        self._queue.append(work)
        self._num_put += 1
        self.most_queued = max(self.most_queued, len(self._queue))
        if not self.is_deferred:
            self.run_until(self._num_put)
        return self._num_put

    def run_until(self, number: int | None = None) -> None:
        """Up to that piece of work, or all of it."""
        while self._num_done < (self._num_put if number is None else number):
            self._num_done += 1
            self._queue.popleft()()

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From here on pinned doubles, and the kernel that brings entries to page tables, are of this device."""
        device, scatter = self, step_inputs.scatter_pages

        class DeferredTensor(MirroredTensor):
            def __init__(
                self, shape: tuple[int, ...], dtype: torch.dtype, where: torch.device, is_shared: bool
            ) -> None:
                super().__init__(shape, dtype, where, is_shared=False)
                self._newest = 0

            def send(self, ranges: Iterable[tuple[int, int]]) -> None:
                for start, end in ranges:
                    to, source = self._flat_tensor[start:end], self._flat_host[start:end]
                    self._newest = device.put(lambda to=to, source=source: to.copy_(source))

            def wait(self) -> None:
                device.run_until(self._newest)

        monkeypatch.setattr(step_inputs, "MirroredTensor", DeferredTensor)
        monkeypatch.setattr(tile_scheduler, "MirroredTensor", DeferredTensor)
        monkeypatch.setattr(
            step_inputs, "scatter_pages", lambda updates, table: device.put(lambda: scatter(updates, table))
        )

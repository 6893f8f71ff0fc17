"""LateGroup: a process group of one process alone, whose calls end when their handle is waited for, and not before.

Sources must be as they were when a call began, until it has ended; every call looks at all that are under way. Outputs are NaN
until then. What peers send follows from the call: `given(verb, rank)`.
"""

from collections.abc import Callable
from typing import Any

import torch

Given = Callable[[str, int], float]


class Handle:
    """A call under way."""

    def __init__(self, group: "LateGroup", sources: list[torch.Tensor], ends: list[Callable[[], None]]) -> None:
        self._group = group
        self._sources = [(source, source.clone()) for source in sources]
        self.ends = ends

    def check(self) -> None:
        for source, sent in self._sources:
            assert torch.equal(source, sent), "memory was written while a call read it"

    def wait(self) -> None:
        self._group.look()
        assert self in self._group.under_way, "the call has ended"
        self._group.under_way.remove(self)
        self._group.num_waits += 1
        for end in self.ends:
            end()


class LateGroup:
    """In the place of ProcessGroupGloo and ProcessGroupNCCL."""

    def __init__(self, rank: int, given: Given) -> None:
        self._rank, self._given = rank, given
        self.under_way: list[Handle] = []
        self.num_waits = 0
        self.sent: list[tuple[int, torch.Tensor]] = []
        """Tensors that went out, with their receivers."""
        self._coalesced: list[Any] | None = None

    def look(self) -> None:
        """No source of a call under way was written."""
        for handle in self.under_way:
            handle.check()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Handle | None:
        self.sent += [(rank, tensor.clone()) for tensor in tensors]
        return self._begin(tensors, [])

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Handle | None:
        return self._begin([], [(tensor, "recv", rank) for tensor in tensors])

    def broadcast(self, tensor: torch.Tensor, root: int) -> Handle | None:
        return self._begin([tensor], []) if self._rank == root else self._begin([], [(tensor, "broadcast", root)])

    def _allgather_base(self, out: torch.Tensor, part: torch.Tensor) -> Handle | None:
        places, own = out.view(-1, part.numel()), part.clone()
        outputs = [(places[rank], "gather", rank) for rank in range(len(places)) if rank != self._rank]
        handle = self._begin([part], outputs)
        if handle is not None:
            handle.ends.append(lambda: places[self._rank].copy_(own))  # type: ignore[arg-type]
        return handle

    def _start_coalescing(self) -> None:
        self._coalesced = []

    def _end_coalescing(self) -> Handle:
        assert self._coalesced is not None, "nothing was begun"
        sources = [source for own, _ in self._coalesced for source in own]
        outputs = [output for _, own in self._coalesced for output in own]
        self._coalesced = None
        handle = self._begin(sources, outputs)
        assert handle is not None
        return handle

    def abort(self) -> None:
        self.look()

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def _begin(self, sources: list[torch.Tensor], outputs: list[tuple[torch.Tensor, str, int]]) -> Handle | None:
        self.look()
        if self._coalesced is not None:
            self._coalesced.append((sources, outputs))
            return None
        ends = []
        for out, verb, rank in outputs:
            out.fill_(float("nan") if out.is_floating_point() else -1)
            ends.append(lambda out=out, verb=verb, rank=rank: out.fill_(self._given(verb, rank)))
        self.under_way.append(Handle(self, sources, ends))
        return self.under_way[-1]

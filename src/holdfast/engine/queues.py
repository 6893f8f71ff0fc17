"""Queues: sequences that wait and that run, in order of arrival; SlotPool: the places of those that run; no torch."""

import heapq
from collections import OrderedDict

from holdfast.request.sequence import Sequence, SequenceState


def named(sequence: Sequence) -> str:
    """How messages call a sequence: never by its tokens, which are many and private."""
    return f"sequence {sequence.sequence_id}"


class SlotPool:
    """Slots 0 .. num_slots - 1, the lowest free one first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return heapq.heappop(self._free)

    def put(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def check(self, taken: list[int]) -> None:
        """Every slot is free or taken, once."""
        slots = sorted([*self._free, *taken])
        assert slots == list(range(self.num_slots)), f"slots {sorted(self._free)} are free, {sorted(taken)} are taken"


class Queues:
    """Holds each sequence in exactly one place and keeps its state in step. Every move is O(1)."""

    def __init__(self) -> None:
        self._running: dict[int, Sequence] = {}
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._arrivals: dict[int, int] = {}
        self._num_arrived = 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._arrivals

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """A copy, oldest first."""
        return list(self._running.values())

    @property
    def waiting(self) -> list[Sequence]:
        """A copy, oldest first."""
        return list(self._waiting.values())

    @property
    def oldest_waiting(self) -> Sequence:
        return next(iter(self._waiting.values()))

    def append(self, sequence: Sequence) -> None:
        """A new sequence waits, behind all others."""
        is_new = sequence not in self and sequence.state is SequenceState.WAITING and not any(sequence.tables)
        assert is_new, f"{named(sequence)} is not new: {sequence.state} {sequence.tables=}"
        self._arrivals[sequence.sequence_id] = self._num_arrived
        self._num_arrived += 1
        self._waiting[sequence.sequence_id] = sequence

    def admit(self) -> Sequence:
        """The oldest that waits becomes the youngest that runs."""
        sequence_id, sequence = self._waiting.popitem(last=False)
        self._running[sequence_id] = sequence
        sequence.state = SequenceState.RUNNING
        return sequence

    def preempt(self) -> Sequence:
        """The youngest that runs becomes the oldest that waits."""
        sequence_id, sequence = self._running.popitem()
        self._waiting[sequence_id] = sequence
        self._waiting.move_to_end(sequence_id, last=False)
        sequence.state = SequenceState.WAITING
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out for good, wherever it is; nothing happens when it is not here."""
        sequence.state = SequenceState.FINISHED
        self._arrivals.pop(sequence.sequence_id, None)
        self._waiting.pop(sequence.sequence_id, None)
        self._running.pop(sequence.sequence_id, None)

    def check(self) -> None:
        """Every sequence once, in its state, in order of arrival."""
        ids = [*self._running, *self._waiting]
        assert sorted(ids) == sorted(self._arrivals), f"queues hold {ids}, known are {sorted(self._arrivals)}"
        arrivals = [self._arrivals[sequence_id] for sequence_id in ids]
        assert arrivals == sorted(arrivals), f"running and waiting are out of order of arrival: {arrivals}"
        for queue, state in ((self._running, SequenceState.RUNNING), (self._waiting, SequenceState.WAITING)):
            for sequence_id, sequence in queue.items():
                assert sequence.sequence_id == sequence_id, f"{named(sequence)} is listed as {sequence_id}"
                assert sequence.state is state, f"{named(sequence)} is listed as {state.value}"

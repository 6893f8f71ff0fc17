"""Queues: waiting and running sequences, by priority and arrival; SlotPool: slots of running ones; PromptRows: rows that prompts share; no torch."""

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from holdfast.request.sequence import Sequence, SequenceState


def named(sequence: Sequence) -> str:
    """Name a sequence in messages, never by its private tokens."""
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
        """Assert that every slot is free or taken, once."""
        slots = sorted([*self._free, *taken])
        assert slots == list(range(self.num_slots)), f"slots {sorted(self._free)} are free, {sorted(taken)} are taken"


class Lanes:
    """Sequences by priority, the lowest number first, then by arrival. Moves at either end are O(1)."""

    def __init__(self) -> None:
        self.lanes: dict[int, OrderedDict[int, Sequence]] = {}
        """Without empty lanes."""
        self.priorities: list[int] = []
        """Sorted; one for each lane, nearly always one."""
        self.num_sequences = 0

    def __len__(self) -> int:
        return self.num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over sequences, the most important first."""
        return (sequence for priority in self.priorities for sequence in self.lanes[priority].values())

    @property
    def first(self) -> Sequence:
        return next(iter(self.lanes[self.priorities[0]].values()))

    def add(self, sequence: Sequence, *, is_oldest: bool = False) -> None:
        """Add after all others of its priority, or before them."""
        priority = sequence.params.priority
        lane = self.lanes.get(priority)
        if lane is None:
            lane = self.lanes[priority] = OrderedDict()
            insort(self.priorities, priority)
        lane[sequence.sequence_id] = sequence
        if is_oldest:
            lane.move_to_end(sequence.sequence_id, last=False)
        self.num_sequences += 1

    def pop_first(self) -> Sequence:
        """Remove the oldest of the most important."""
        sequence = self.first
        self.discard(sequence)
        return sequence

    def pop_last(self) -> Sequence:
        """Remove the youngest of the least important."""
        sequence = next(reversed(self.lanes[self.priorities[-1]].values()))
        self.discard(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence. Idempotent."""
        priority = sequence.params.priority
        lane = self.lanes.get(priority)
        if lane is None or lane.pop(sequence.sequence_id, None) is None:
            return
        self.num_sequences -= 1
        if not lane:
            del self.lanes[priority]
            self.priorities.remove(priority)

    def check(self) -> None:
        """Assert that no lane is empty, and every sequence is listed under its id."""
        assert self.priorities == sorted(self.lanes), f"{self.priorities} of {sorted(self.lanes)}"
        assert all(self.lanes.values()), f"a lane of {self.priorities} is empty"
        listed = [one for lane in self.lanes.values() for one in lane.items()]
        assert len(listed) == self.num_sequences, f"{len(listed)} are listed, {self.num_sequences} counted"
        for sequence_id, sequence in listed:
            assert sequence.sequence_id == sequence_id, f"{named(sequence)} is listed as {sequence_id}"


class Queues:
    """Holds each sequence in exactly one place and updates its state. Every move is O(1) among equals."""

    def __init__(self) -> None:
        self.running_lanes = Lanes()
        self.waiting_lanes = Lanes()
        self.arrivals: dict[int, int] = {}
        self._num_arrived = 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self.arrivals

    @property
    def num_waiting(self) -> int:
        return len(self.waiting_lanes)

    @property
    def num_running(self) -> int:
        return len(self.running_lanes)

    @property
    def running(self) -> list[Sequence]:
        """A copy, in order."""
        return list(self.running_lanes)

    @property
    def waiting(self) -> list[Sequence]:
        """A copy, in order."""
        return list(self.waiting_lanes)

    def waiting_up_to(self, most: int) -> list[Sequence]:
        """Return the first waiting sequences, at most `most`."""
        return list(islice(self.waiting_lanes, most))

    @property
    def first_waiting(self) -> Sequence:
        return self.waiting_lanes.first

    def append(self, sequence: Sequence) -> None:
        """Queue a new sequence after all others of its priority."""
        is_new = sequence not in self and sequence.state is SequenceState.WAITING and not any(sequence.tables)
        assert is_new, f"{named(sequence)} is not new: {sequence.state} {sequence.tables=}"
        self.arrivals[sequence.sequence_id] = self._num_arrived
        self._num_arrived += 1
        self.waiting_lanes.add(sequence)

    def admit(self) -> Sequence:
        """Move the first waiting sequence to the end of its priority's running ones."""
        sequence = self.waiting_lanes.pop_first()
        self.running_lanes.add(sequence)
        sequence.state = SequenceState.RUNNING
        return sequence

    def preempt(self) -> Sequence:
        """Move the last running sequence to the front of its priority's waiting ones."""
        sequence = self.running_lanes.pop_last()
        self.waiting_lanes.add(sequence, is_oldest=True)
        sequence.state = SequenceState.WAITING
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence for good. Idempotent."""
        sequence.state = SequenceState.FINISHED
        if self.arrivals.pop(sequence.sequence_id, None) is not None:
            self.waiting_lanes.discard(sequence)
            self.running_lanes.discard(sequence)

    def check(self) -> None:
        """Assert that every sequence is listed once, by state and in order; among equals running ones arrived first."""
        self.running_lanes.check()
        self.waiting_lanes.check()
        ids = [sequence.sequence_id for lanes in (self.running_lanes, self.waiting_lanes) for sequence in lanes]
        assert sorted(ids) == sorted(self.arrivals), f"queues hold {ids}, known are {sorted(self.arrivals)}"
        arrivals: dict[int, list[int]] = {}
        for lanes, state in ((self.running_lanes, SequenceState.RUNNING), (self.waiting_lanes, SequenceState.WAITING)):
            priorities = [sequence.params.priority for sequence in lanes]
            assert priorities == sorted(priorities), f"those {state.value} are out of order: {priorities}"
            for sequence in lanes:
                assert sequence.state is state, f"{named(sequence)} is listed as {state.value}"
                arrivals.setdefault(sequence.params.priority, []).append(self.arrivals[sequence.sequence_id])
        for priority, order in arrivals.items():
            assert order == sorted(order), f"running and waiting of {priority=} are out of order of arrival: {order}"


class PromptRows:
    """Prompt rows of one step, which `num_shares` prompts share evenly.

    Otherwise a long prompt would take all rows of every step, and a short one would wait for its end.
    """

    def __init__(self, num_rows: int, num_shares: int = 1, least: int = 1) -> None:
        """`least`: rows of the shortest piece of a prompt."""
        self.left = num_rows
        self._least = least
        self._most = max(-(-num_rows // max(num_shares, 1)), least)

    def share(self, num_wanted: int, *, is_first: bool) -> int:
        """Return the most rows for a sequence with `num_wanted` left: all if 1, else a share. The first may always go on."""
        if num_wanted <= 1:
            return num_wanted
        return min(num_wanted, max(min(self.left, self._most), self._least if is_first else 0))

    def use(self, num_wanted: int, num_taken: int) -> None:
        """Take rows for a sequence with `num_wanted` left; the only one of a sequence is free."""
        if num_wanted > 1:
            self.left = max(self.left - num_taken, 0)

"""Pulse: heartbeat, step and counts of a core, and hang-ups of its front, in shared memory; no torch.

The child writes two times of the machine's monotonic clock; the front reads them at any time, without a message. So a
front whose thread is blocked still knows the state of its core. The child also writes the counts that change when a
step begins, which its next message would report only at the end. The front writes the sequences of clients that hung
up, which the child reads inside a step.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Iterable
from typing import NamedTuple

NUM_PLACES = 1024
HANG_UP_BYTES = 8 * NUM_PLACES
_NUMBER_BYTES = 64
_NUM_BYTES = _NUMBER_BYTES + HANG_UP_BYTES
_BEAT, _STEP, _COUNTS = 0, 1, 2
_NO_STEP = 0.0


class HangUps:
    """Sequences whose clients hung up: any thread writes, a step reads.

    The id of a sequence gives its place. If a later one overwrites it, the mark is lost and the sequence is aborted
    between two steps. Each entry is written atomically.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        """Use HANG_UP_BYTES of zeroed memory, or allocate them."""
        self._marks = (memoryview(bytearray(HANG_UP_BYTES)) if memory is None else memory).cast("q")

    def add(self, sequence_ids: Iterable[int]) -> None:
        """Mark sequences."""
        for sequence_id in sequence_ids:
            self._marks[sequence_id % NUM_PLACES] = sequence_id + 1

    def has_all(self, sequence_ids: Iterable[int]) -> bool:
        """True if all of these are marked, or if there are none."""
        marks = self._marks
        return all(marks[sequence_id % NUM_PLACES] == sequence_id + 1 for sequence_id in sequence_ids)


class CorePulse(NamedTuple):
    """Signs of life of a core process."""

    silence_seconds: float
    """Time since its last heartbeat."""
    step_seconds: float
    """Age of its step; 0 if none runs."""


class CoreCounts(NamedTuple):
    """Counts of a core, including the step in progress."""

    num_running: int
    num_waiting: int
    num_submitted: int
    """Sequences received; fewer than in its last message if it wrote nothing here."""
    kv_usage: float


class Pulse:
    """Numbers that one process writes atomically. Any thread may read or write."""

    def __init__(self, number: int) -> None:
        """Map the file of this descriptor, which may be closed afterwards."""
        memory = memoryview(mmap.mmap(number, _NUM_BYTES))
        self._times = memory[:_NUMBER_BYTES].cast("d")
        self.hang_ups = HangUps(memory[_NUMBER_BYTES:])

    @classmethod
    def of_this_process(cls) -> "Pulse":
        """Make a pulse that no other process maps."""
        number = open_pulse_file()
        try:
            return cls(number)
        finally:
            os.close(number)

    def beat(self) -> None:
        """Write a heartbeat."""
        self._times[_BEAT] = time.monotonic()

    @property
    def beat_at(self) -> float:
        """Time of the last heartbeat, of time.monotonic."""
        return self._times[_BEAT]

    def begin_step(self) -> None:
        """Write the start of a step."""
        self._times[_STEP] = time.monotonic()

    def end_step(self) -> None:
        """Write the end of a step."""
        self._times[_STEP] = _NO_STEP

    def write_counts(self, counts: CoreCounts) -> None:
        """Write the counts at the start or end of a step."""
        for place, number in enumerate(counts, _COUNTS):
            self._times[place] = number

    def counts(self) -> CoreCounts:
        """Read the counts."""
        num_running, num_waiting, num_submitted, kv_usage = self._times[_COUNTS : _COUNTS + len(CoreCounts._fields)]
        return CoreCounts(int(num_running), int(num_waiting), int(num_submitted), kv_usage)

    def look(self) -> CorePulse:
        """Read the signs of life."""
        began, now = self._times[_STEP], time.monotonic()
        step_seconds = 0.0 if began == _NO_STEP else max(now - began, 0.0)
        return CorePulse(max(now - self._times[_BEAT], 0.0), step_seconds)


def open_pulse_file() -> int:
    """Open an anonymous file for a pulse; return its descriptor, which the caller closes."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("holdfast-pulse")
    else:
        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    os.ftruncate(number, _NUM_BYTES)
    return above_standard(number)


def above_standard(number: int) -> int:
    """Move a descriptor off the numbers of closed standard streams: a child opens its own streams there."""
    if number > 2:
        return number
    import fcntl  # Windows has none

    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(number)

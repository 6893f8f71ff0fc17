"""Pulse: a core's last sign of life, its step and its counts, and its front's hang-ups, in memory of both processes; no torch.

The child writes two times of the clock that all processes of a machine share; the front reads them whenever it is asked,
without a message and without waiting for anybody: a front whose thread is held up still knows how its core is. The child also
writes what changes when a step begins, which its next message would tell only when the step ends. The front writes the
sequences of clients that have hung up, which the child looks for in the middle of a step.
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
    """Sequences whose clients are gone: written by any thread, read in the middle of a step.

    A sequence has a place by its number, which is never used again. If another sequence has taken the place since, the mark is
    lost, and the sequence is aborted between two steps. Each word is written in one piece.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        """Use HANG_UP_BYTES of zeroed memory, or memory of its own."""
        self._words = (memoryview(bytearray(HANG_UP_BYTES)) if words is None else words).cast("q")

    def add(self, sequence_ids: Iterable[int]) -> None:
        """Mark sequences."""
        for sequence_id in sequence_ids:
            self._words[sequence_id % NUM_PLACES] = sequence_id + 1

    def has_all(self, sequence_ids: Iterable[int]) -> bool:
        """True if all of these are marked, or if there are none."""
        words = self._words
        return all(words[sequence_id % NUM_PLACES] == sequence_id + 1 for sequence_id in sequence_ids)


class CorePulse(NamedTuple):
    """A look at a core process from outside."""

    silence_seconds: float
    """Since its last sign of life."""
    step_seconds: float
    """That its step has run; 0 where there is none."""


class CoreCounts(NamedTuple):
    """What a core counts, as of the step in progress."""

    num_running: int
    num_waiting: int
    num_submitted: int
    """Sequences that it has seen; fewer than its last message says: it wrote nothing."""
    kv_usage: float


class Pulse:
    """Numbers that are each written by one process in one piece. Both sides may be asked from any thread."""

    def __init__(self, number: int) -> None:
        """Over an open file of this number, which may be closed afterwards."""
        memory = memoryview(mmap.mmap(number, _NUM_BYTES))
        self._times = memory[:_NUMBER_BYTES].cast("d")
        self.hang_ups = HangUps(memory[_NUMBER_BYTES:])

    def beat(self) -> None:
        """The process lives."""
        self._times[_BEAT] = time.monotonic()

    @property
    def beat_at(self) -> float:
        """When it last lived, by the clock that all processes share."""
        return self._times[_BEAT]

    def begin_step(self) -> None:
        """A step begins."""
        self._times[_STEP] = time.monotonic()

    def end_step(self) -> None:
        """No step runs."""
        self._times[_STEP] = _NO_STEP

    def write_counts(self, counts: CoreCounts) -> None:
        """A step begins or ends with these."""
        for place, number in enumerate(counts, _COUNTS):
            self._times[place] = number

    def counts(self) -> CoreCounts:
        """The last ones."""
        num_running, num_waiting, num_submitted, kv_usage = self._times[_COUNTS : _COUNTS + len(CoreCounts._fields)]
        return CoreCounts(int(num_running), int(num_waiting), int(num_submitted), kv_usage)

    def look(self) -> CorePulse:
        """How it is now."""
        began, now = self._times[_STEP], time.monotonic()
        step_seconds = 0.0 if began == _NO_STEP else max(now - began, 0.0)
        return CorePulse(max(now - self._times[_BEAT], 0.0), step_seconds)


def open_pulse_file() -> int:
    """The number of a file without a name, large enough for a pulse; whoever asked closes it."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("holdfast-pulse")
    else:
        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    os.ftruncate(number, _NUM_BYTES)
    return number if number > 2 else _above_standard(number)


def _above_standard(number: int) -> int:
    """Where standard streams are closed a file may have got one of their numbers, which a child puts its own streams at."""
    import fcntl  # a system without it has no such numbers

    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(number)

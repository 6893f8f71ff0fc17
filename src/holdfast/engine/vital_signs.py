"""VitalSigns: detects a dead process on this machine by its heartbeat and its state in /proc; no torch.

A thread of a process writes heartbeats (engine/pulse.py) a few times a second. It cannot while another thread holds the
GIL, as for loading a library or compiling a kernel. /proc shows that such a process computes or waits for a disk. So
silence means no heartbeat, no CPU time used, and neither runnable nor waiting for a disk. A stopped process is silent.

Silence is counted in looks, not in clock time: if this process got no CPU time or the machine slept, so did the other.
"""

import time
from pathlib import Path

from holdfast.engine.pulse import Pulse

LOOK_SECONDS = 0.25
SILENCE_SECONDS = 1.5
"""Silence after which a process counts as dead."""
LOCKED_SECONDS = 30.0
"""Like SILENCE_SECONDS, before it is ready and unless it is stopped: a library that loads may hold the GIL and wait."""
_MOST_COUNTED = 2 * LOOK_SECONDS
_STOPPED = frozenset("TtZX")
_BUSY = frozenset("RD")


class VitalSigns:
    """Watches one process. One thread."""

    def __init__(self, pid: int, pulse: Pulse) -> None:
        self._pid = pid
        self._pulse = pulse
        self._looked_at = time.monotonic()
        self._ticks = -1
        self._beat_at = 0.0
        self._state = "S"
        self.silent_seconds = 0.0

    def look(self) -> None:
        """Read heartbeat and state; call it every LOOK_SECONDS."""
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        self._state, ticks = process_state(self._pid)
        beat_at = self._pulse.beat_at
        has_lived = beat_at != self._beat_at or ticks != self._ticks or self._state in _BUSY
        self._beat_at, self._ticks = beat_at, ticks
        if has_lived:
            self.silent_seconds = 0.0
        else:
            self.silent_seconds += min(elapsed, _MOST_COUNTED)

    def is_dead(self, is_ready: bool) -> bool:
        """True if it has been silent for too long at the last look."""
        most = SILENCE_SECONDS if is_ready or self._state in _STOPPED else LOCKED_SECONDS
        return self.silent_seconds >= most - LOOK_SECONDS / 2


def process_state(pid: int) -> tuple[str, int]:
    """Return its state letter and processor time in ticks; ("S", 0) without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "S", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def is_stopped(pid: int) -> bool:
    """True if it is stopped (SIGSTOP, a debugger)."""
    return process_state(pid)[0] in "Tt"

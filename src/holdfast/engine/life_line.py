"""Life line: a second connection by which a launched rank watches rank 0, because the first is not read during a step; no torch.

    other rank  sends its Place
    rank 0      LifeLine   its own Place, then a byte per look from the thread that watches the ranks (engine/ranks.py)
    other rank  ZeroSigns  counts looks without a byte, like engine/vital_signs.py

On one machine /proc shows whether rank 0 is stopped or holds the GIL, as while it loads a library or compiles a kernel.
From another machine both look like silence. So there 1.5 s of silence are a death only during a step. Otherwise, while
rank 0 loads or its program does something else, 30 s are.
"""

import contextlib
import os
import socket
import struct
from hashlib import blake2b
from pathlib import Path

from holdfast.engine.pulse import Pulse
from holdfast.engine.vital_signs import VitalSigns

_MARK_BYTES = 16
_PLACE = struct.Struct(f"<Q{_MARK_BYTES}s")
PLACE_BYTES = _PLACE.size
_MOST_UNREAD = 4096


def own_place() -> bytes:
    """Encode the pid of this process and its machine."""
    return _PLACE.pack(os.getpid(), machine_mark())


def pid_at(place: bytes) -> int:
    """Return the pid of that process, or 0 if it is on another machine."""
    pid, mark = _PLACE.unpack(place)
    return pid if mark == machine_mark() else 0


class LifeLine:
    """Rank 0's end, used by the thread that watches the ranks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        connection.send(own_place())

    def beat(self) -> None:
        """Send a heartbeat. Errors are ignored: others detect a rank that is gone."""
        with contextlib.suppress(OSError):
            self._connection.send(b"\1")

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()


class ZeroSigns:
    """Another rank's end. One thread."""

    def __init__(self, connection: socket.socket) -> None:
        """Wait for the Place of rank 0; raise OSError if the connection ends."""
        self._connection = connection
        place = connection.recv(PLACE_BYTES, socket.MSG_WAITALL)
        if len(place) < PLACE_BYTES:
            raise ConnectionError("rank 0 has closed the connection")
        connection.setblocking(False)
        pid = pid_at(place)
        self.is_here = pid > 0
        """True if rank 0 is on this machine."""
        self._pulse = Pulse.of_this_process()
        self._signs = VitalSigns(pid, self._pulse)
        self._num_messages = 0

    @property
    def silent_seconds(self) -> float:
        return self._signs.silent_seconds

    def look(self, in_step: bool, num_messages: int) -> bool:
        """True if rank 0 is dead; call it every LOOK_SECONDS. Messages of another machine count as heartbeats.

        On this machine the system is queried, and a message may have waited here.
        """
        beats = b""
        with contextlib.suppress(OSError):
            beats = self._connection.recv(_MOST_UNREAD)
        if beats or (num_messages != self._num_messages and not self.is_here):
            self._pulse.beat()
        self._num_messages = num_messages
        self._signs.look()
        return self._signs.is_dead(is_ready=in_step and not self.is_here)


def machine_mark() -> bytes:
    """Identify the pid namespace: equal for processes that see each other in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        names = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not on Linux
        return os.urandom(_MARK_BYTES)
    return blake2b(f"{boot}{names}".encode(), digest_size=_MARK_BYTES).digest()

"""Life line: how a rank of a launcher sees that rank 0 lives: a connection of its own, since the other is not read during a step; no torch.

    other rank  a Place, when it comes
    rank 0      LifeLine   its own Place, then a byte a look from the thread that watches the ranks (engine/ranks.py)
    other rank  ZeroSigns  counts looks without one, as engine/vital_signs.py does

On one machine the system says whether rank 0 is stopped, or only keeps Python's lock: a library that it loads, a kernel that it
compiles. From another machine both are silence. So there 1.5 s of it are a death only during a step, when rank 0 is at nothing but
that step; else, while it loads or its program does something else, 30 s are.
"""

import contextlib
import os
import socket
import struct
from hashlib import blake2b
from pathlib import Path

from holdfast.engine.pulse import Pulse, open_pulse_file
from holdfast.engine.vital_signs import VitalSigns

_MARK_BYTES = 16
_PLACE = struct.Struct(f"<Q{_MARK_BYTES}s")
PLACE_BYTES = _PLACE.size
_MOST_UNREAD = 4096


def own_place() -> bytes:
    """Which process this is, and of which machine."""
    return _PLACE.pack(os.getpid(), machine_mark())


def pid_at(place: bytes) -> int:
    """The number of that process, where it is on this machine, so that the system can be asked about it; else 0."""
    pid, mark = _PLACE.unpack(place)
    return pid if mark == machine_mark() else 0


class LifeLine:
    """Rank 0's end. The thread that watches the ranks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        connection.send(own_place())

    def beat(self) -> None:
        """This process lives. One that does not read it, or is gone, is noticed by other means."""
        with contextlib.suppress(OSError):
            self._connection.send(b"\1")

    def close(self) -> None:
        """May be called twice."""
        self._connection.close()


class ZeroSigns:
    """Another rank's end. One thread."""

    def __init__(self, connection: socket.socket) -> None:
        """Wait until rank 0 has said where it is; OSError where it does not."""
        self._connection = connection
        place = connection.recv(PLACE_BYTES, socket.MSG_WAITALL)
        if len(place) < PLACE_BYTES:
            raise ConnectionError("rank 0 has closed the connection")
        connection.setblocking(False)
        pid = pid_at(place)
        self.is_here = pid > 0
        """On this machine."""
        number = open_pulse_file()
        self._pulse = Pulse(number)
        os.close(number)
        self._signs = VitalSigns(pid, self._pulse)
        self._num_messages = 0

    @property
    def silent_seconds(self) -> float:
        return self._signs.silent_seconds

    def look(self, in_step: bool, num_messages: int) -> bool:
        """Once every LOOK_SECONDS or so: whether rank 0 is dead. What another machine has sent by the other connection is a sign of life too.

        On this one the system says whether it is stopped, and messages may have waited here since before.
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
    """The same for processes that see each other's numbers in /proc, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        names = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # elsewhere than on Linux nobody is asked
        return os.urandom(_MARK_BYTES)
    return blake2b(f"{boot}{names}".encode(), digest_size=_MARK_BYTES).digest()

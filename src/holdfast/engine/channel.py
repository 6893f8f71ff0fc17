"""Channel: whole frames over a socket, in order; nobody waits who only looks, and no two wait for each other; no torch.

A frame is taken out only when all of it is there. Whoever sends and finds the socket full takes in meanwhile what the
other side sends, so that two that send at once do not wait for each other for ever; what is taken in that way is bounded.
With `silence_seconds` a sender gives up on one that neither takes nor says anything for so long.
"""

import select
import socket
import threading
from collections.abc import Callable

from holdfast.errors import MessageError
from holdfast.request.wire import HEADER_BYTES, body_length

READ_BYTES = 2**18
LOOK_SECONDS = 0.5
MAX_UNREAD_BYTES = 2**30
"""Taken in while sending, at the most: the other side would talk and not listen."""


class ChannelClosedError(Exception):
    """The other side is gone."""


class Channel:
    """One end of a connection. One thread reads; several may send."""

    def __init__(
        self,
        connection: socket.socket,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        silence_seconds: float | None = None,
    ) -> None:
        connection.setblocking(False)
        self._silence_seconds = silence_seconds
        self._socket = connection
        self._max_unread_bytes = max_unread_bytes
        self._unread = bytearray()
        self._room = memoryview(bytearray(READ_BYTES))  # taken once: most looks find nothing
        self._is_ended = False
        self._sending = threading.Lock()

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def fileno(self) -> int:
        """For whoever waits for several."""
        return self._socket.fileno()

    def wait(self, timeout: float | None = None) -> bool:
        """Until something has come or the other side is gone; False when time is up. Loses nothing when interrupted."""
        return self._is_ended or bool(self._poll(select.POLLIN, timeout))

    def take(self) -> bytes | None:
        """The next whole frame, None while there is none; ChannelClosedError behind the last one."""
        frame = self._cut()
        while frame is None and not self._is_ended and self._read():
            frame = self._cut()
        if frame is None and self._is_ended:
            if self._unread:
                raise MessageError("a message came", "it was cut short by the end of its sender", "start the core anew")
            raise ChannelClosedError("the other side has closed the channel")
        return frame

    def send(self, make: Callable[[], bytes], *, is_owner: bool = True) -> None:
        """Send a frame, which is made when its turn has come. `is_owner`: this is the thread that reads."""
        with self._sending:
            self._write(make(), is_owner)

    def send_frame(self, frame: bytes) -> None:
        """The same for a frame that is made already, by a thread that does not read; at once, as nearly always."""
        with self._sending:
            try:
                num_sent = self._socket.send(frame)
            except BlockingIOError:
                num_sent = 0
            except OSError as error:
                raise ChannelClosedError("the other side has closed the channel") from error
            if num_sent < len(frame):
                self._write(memoryview(frame)[num_sent:], is_owner=False)

    def try_send(self, make: Callable[[], bytes]) -> bool:
        """The same for a small frame of another thread, if nobody else sends and there is room."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if not self._poll(select.POLLOUT, 0.0) & select.POLLOUT:
                return False
            self._write(make(), is_owner=False)
            return True
        finally:
            self._sending.release()

    def is_other_side_gone(self) -> bool:
        """Any thread: whether the other side has hung up, which the reading thread may not know yet."""
        return bool(self._poll(0, 0.0) & (select.POLLHUP | select.POLLERR | select.POLLNVAL))

    def wait_for_end(self, timeout: float) -> None:
        """Any thread: until the other side hangs up, at the most so long."""
        self._poll(0, timeout)

    def close(self) -> None:
        """Hang up. May be called twice."""
        self._socket.close()

    def _poll(self, events: int, timeout: float | None) -> int:
        if self.is_closed:
            raise ChannelClosedError("the channel is closed")
        poll = select.poll()
        poll.register(self._socket, events)
        found = poll.poll(None if timeout is None else max(timeout, 0.0) * 1000)
        return found[0][1] if found else 0

    def _cut(self) -> bytes | None:
        if len(self._unread) < HEADER_BYTES:
            return None
        _, length = body_length(bytes(self._unread[:HEADER_BYTES]))
        end = HEADER_BYTES + length
        if len(self._unread) < end:
            return None
        frame = bytes(self._unread[:end])
        del self._unread[:end]
        return frame

    def _read(self) -> bool:
        """Take in what has come; False where nothing had."""
        try:
            count = self._socket.recv_into(self._room)
        except BlockingIOError:
            return False
        except OSError:  # reset by the other side's end, or closed here
            count = 0
        if count:
            self._unread += self._room[:count]
        else:
            self._is_ended = True
        return True

    def _write(self, frame: bytes | memoryview, is_owner: bool) -> None:
        left, most = memoryview(frame), self._silence_seconds
        look_seconds = None if most is None else min(LOOK_SECONDS, most)
        silent_seconds = 0.0
        while left:
            try:
                left = left[self._socket.send(left) :]
                silent_seconds = 0.0
            except BlockingIOError:
                if self._make_way(is_owner, look_seconds):
                    silent_seconds = 0.0
                    continue
                # Counted in waits and not by the clock: a machine that slept was silent as a whole.
                silent_seconds += look_seconds or 0.0
                if most is not None and silent_seconds >= most:
                    raise MessageError(
                        "a message was to be sent",
                        f"the other side has taken and said nothing for {silent_seconds:.1f} seconds",
                        "start the core anew",
                    ) from None
            except OSError as error:
                raise ChannelClosedError("the other side has closed the channel") from error

    def _make_way(self, is_owner: bool, timeout: float | None) -> bool:
        """Wait for room, and take in what comes meanwhile; False where neither came in time."""
        if not is_owner or self._is_ended:
            return bool(self._poll(select.POLLOUT, timeout))
        found = self._poll(select.POLLIN | select.POLLOUT, timeout)
        if not found or found & select.POLLOUT:
            return bool(found)
        if self._read() and len(self._unread) > self._max_unread_bytes:
            raise MessageError(
                "a message was to be sent",
                f"the other side sent {len(self._unread)} bytes meanwhile and takes none",
                "start the core anew",
            )
        return True


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, that only the processes they are passed to inherit."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return _above_standard(ours), _above_standard(theirs)


def _above_standard(connection: socket.socket) -> socket.socket:
    """Where standard streams are closed a socket may have got one of their numbers, which a child puts its own streams at."""
    if connection.fileno() > 2:
        return connection
    import fcntl  # a system without it has no such numbers

    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))

"""Channel: whole frames over a socket, in order, without a deadlock of two senders; no torch.

A frame is returned only when all of it has arrived. A sender that finds the socket full reads meanwhile what the other
side sends, so that two senders do not deadlock; the bytes read in that way are bounded. With `silence_seconds` a sender
gives up on a process that neither reads nor sends for so long.
"""

import select
import socket
import threading
from collections.abc import Callable

from holdfast.engine.pulse import above_standard
from holdfast.errors import MessageError
from holdfast.request.wire import HEADER_BYTES, body_length

READ_BYTES = 2**18
LOOK_SECONDS = 0.5
MAX_UNREAD_BYTES = 2**30
"""Most bytes to read while sending: more means that the other side sends and does not read."""


class ChannelClosedError(Exception):
    """The other side closed the connection."""


class Channel:
    """One end of a connection. One thread reads; several may send."""

    def __init__(
        self, connection: socket.socket, max_unread_bytes: int = MAX_UNREAD_BYTES, silence_seconds: float | None = None
    ) -> None:
        connection.setblocking(False)
        self._silence_seconds = silence_seconds
        self.connection = connection
        self._max_unread_bytes = max_unread_bytes
        self.unread = bytearray()
        self._buffer = memoryview(bytearray(READ_BYTES))  # allocated once: most reads find nothing
        self._is_ended = False
        self.sending = threading.Lock()

    @property
    def is_closed(self) -> bool:
        return self.connection.fileno() < 0

    def fileno(self) -> int:
        return self.connection.fileno()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until bytes arrive or the other side closes; False on timeout. An interrupt loses nothing."""
        return self._is_ended or bool(self.poll(select.POLLIN, timeout))

    def take(self) -> bytes | None:
        """Return the next whole frame, or None; raise ChannelClosedError after the last one."""
        frame = self._cut()
        while frame is None and not self._is_ended and self._read():
            frame = self._cut()
        if frame is None and self._is_ended:
            if self.unread:
                raise MessageError("wire.cut_short")
            raise ChannelClosedError("the other side has closed the channel")
        return frame

    def send(self, make: Callable[[], bytes], *, is_owner: bool = True) -> None:
        """Send a frame that `make` encodes once the channel is free. `is_owner`: this is the thread that reads."""
        with self.sending:
            self._write(make(), is_owner)

    def send_frame(self, frame: bytes) -> None:
        """Like `send` for an encoded frame, from a thread that does not read. Nearly always one call of the socket."""
        with self.sending:
            try:
                num_sent = self.connection.send(frame)
            except BlockingIOError:
                num_sent = 0
            except OSError as error:
                raise ChannelClosedError("the other side has closed the channel") from error
            if num_sent < len(frame):
                self._write(memoryview(frame)[num_sent:], is_owner=False)

    def try_send(self, make: Callable[[], bytes]) -> bool:
        """Like `send` for a small frame of another thread, if the channel is free and the socket is not full."""
        if not self.sending.acquire(blocking=False):
            return False
        try:
            if not self.poll(select.POLLOUT, 0.0) & select.POLLOUT:
                return False
            self._write(make(), is_owner=False)
            return True
        finally:
            self.sending.release()

    def is_other_side_gone(self) -> bool:
        """Return True if the other side closed, even before the reading thread knows. Any thread."""
        return bool(self.poll(0, 0.0) & (select.POLLHUP | select.POLLERR | select.POLLNVAL))

    def wait_for_end(self, timeout: float) -> None:
        """Wait until the other side closes, at most `timeout` seconds. Any thread."""
        self.poll(0, timeout)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.connection.close()

    def poll(self, events: int, timeout: float | None) -> int:
        if self.is_closed:
            raise ChannelClosedError("the channel is closed")
        poll = select.poll()
        poll.register(self.connection, events)
        found = poll.poll(None if timeout is None else max(timeout, 0.0) * 1000)
        return found[0][1] if found else 0

    def _cut(self) -> bytes | None:
        if len(self.unread) < HEADER_BYTES:
            return None
        _, length = body_length(bytes(self.unread[:HEADER_BYTES]))
        end = HEADER_BYTES + length
        if len(self.unread) < end:
            return None
        frame = bytes(self.unread[:end])
        del self.unread[:end]
        return frame

    def _read(self) -> bool:
        """Read what has arrived; False if nothing has."""
        try:
            count = self.connection.recv_into(self._buffer)
        except BlockingIOError:
            return False
        except OSError:  # reset by the other side's end, or closed here
            count = 0
        if count:
            self.unread += self._buffer[:count]
        else:
            self._is_ended = True
        return True

    def _write(self, frame: bytes | memoryview, is_owner: bool) -> None:
        left, most = memoryview(frame), self._silence_seconds
        look_seconds = None if most is None else min(LOOK_SECONDS, most)
        silent_seconds = 0.0
        while left:
            try:
                left = left[self.connection.send(left) :]
                silent_seconds = 0.0
            except BlockingIOError:
                if self.make_way(is_owner, look_seconds):
                    silent_seconds = 0.0
                    continue
                # Count waits, not the clock: a machine that slept was silent as a whole.
                silent_seconds += look_seconds or 0.0
                if most is not None and silent_seconds >= most:
                    raise MessageError("wire.other_side_hangs", seconds=f"{silent_seconds:.1f}") from None
            except OSError as error:
                raise ChannelClosedError("the other side has closed the channel") from error

    def make_way(self, is_owner: bool, timeout: float | None) -> bool:
        """Wait until the socket takes bytes, and read what arrives meanwhile; False if neither happened in time."""
        if not is_owner or self._is_ended:
            return bool(self.poll(select.POLLOUT, timeout))
        found = self.poll(select.POLLIN | select.POLLOUT, timeout)
        if not found or found & select.POLLOUT:
            return bool(found)
        if self._read() and len(self.unread) > self._max_unread_bytes:
            raise MessageError("wire.other_side_floods", num_bytes=len(self.unread))
        return True


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets; only processes that they are passed to inherit them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    first, second = (socket.socket(fileno=above_standard(end.detach())) for end in (ours, theirs))
    return first, second

"""The process of one rank: opens its share of a model as rank 0 says, then runs every step that comes; no torch until it runs.

    main thread    RankServer: RankStart -> RankReported -> ... -> RankReady, then frame after frame
    pulse thread   beats, watches rank 0, and ends this process where rank 0 is gone or silent

It lives no longer than rank 0: the channel ends, the system kills it with its parent (PR_SET_PDEATHSIG), and a rank 0 that is
stopped is silent, which is the same. An error here is told in its own words, and this process ends.
"""

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

from holdfast.engine.admission import describe
from holdfast.engine.channel import Channel, ChannelClosedError
from holdfast.engine.child_process import GRACE_SECONDS
from holdfast.engine.messages import Died, Numbering, Refused, Shutdown
from holdfast.engine.pulse import Pulse
from holdfast.engine.rank_messages import (
    RankFrame,
    RankLook,
    RankLookRequest,
    RankMessage,
    RankReady,
    RankStart,
    decode_rank_message,
    encode_rank_message,
)
from holdfast.engine.vital_signs import LOOK_SECONDS, VitalSigns
from holdfast.errors import HoldfastError
from holdfast.memory.report import RankMemory
from holdfast.observability.log import get_logger, log_to_stderr
from holdfast.request.step import Step
from holdfast.request.wire import refuse

_PR_SET_PDEATHSIG = 1
_log = get_logger(__name__)
MessageT = TypeVar("MessageT")


class Rank(Protocol):
    """One rank's share of a model, as its process drives it."""

    @property
    def memory(self) -> RankMemory: ...

    def book(self, tokens: tuple[tuple[int, ...], ...]) -> None:
        """What rank 0 has chosen in the oldest step, by item."""
        ...

    def run(self, step: Step) -> None:
        """Run a step together with all other ranks."""
        ...

    def look(self) -> dict[str, int]:
        """Counters of its memory, by name."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class RankServer:
    """This end of the channel to rank 0."""

    def __init__(self, channel: Channel, pulse: Pulse) -> None:
        self._channel = channel
        self._sent = Numbering()
        self._received = Numbering()
        self._frames = Numbering()
        self.pulse = pulse
        self.owns_parent = False

    @property
    def num_received(self) -> int:
        """Messages of rank 0 that were read, steps among them. Any thread."""
        return self._received.last + self._frames.last

    def run(self, open_rank: "OpenRank") -> None:
        """Until rank 0 says so, or is gone; or something fails here, which rank 0 is told."""
        rank: Rank | None = None
        try:
            start = self.expect(RankStart)
            self.owns_parent = start.owns_parent
            rank = open_rank(start, self)
            gc.freeze()  # what a start has made stays to the end
            self.send(RankReady(rank.memory))
            self._serve(rank)
        except ChannelClosedError:
            return
        except Exception as error:
            is_refusal = rank is None and isinstance(error, HoldfastError)
            with contextlib.suppress(ChannelClosedError):
                self.send(
                    Refused((), error) if isinstance(error, HoldfastError) and is_refusal else Died(describe(error))
                )
            sys.exit(1)
        finally:
            if rank is not None:
                rank.close()

    def send(self, message: RankMessage) -> None:
        """To rank 0."""
        self._channel.send(lambda: self.encoded(message))

    def encoded(self, message: RankMessage) -> bytes:
        """The next message as a frame, made when its turn has come."""
        return encode_rank_message(message, self._sent.next())

    def expect(self, kind: type[MessageT]) -> MessageT:
        """The next message, which must be of this kind."""
        message = self._next()
        if not isinstance(message, kind):
            if isinstance(message, Shutdown):
                raise ChannelClosedError("rank 0 has ended the start")
            refuse(f"it is {type(message).__name__}, and {kind.__name__} is due")
        return message

    def _serve(self, rank: Rank) -> None:
        while not isinstance(message := self._next(), Shutdown):
            if isinstance(message, RankLookRequest):
                self.send(RankLook(rank.look()))
                continue
            if not isinstance(message, RankFrame):
                refuse(f"it is {type(message).__name__}, and a frame is due")
            for tokens in message.results:
                rank.book(tokens)
            self.pulse.begin_step()
            rank.run(message.step)
            self.pulse.end_step()

    def _next(self) -> RankMessage:
        while (frame := self._channel.take()) is None:
            self._channel.wait()
        number, message = decode_rank_message(frame)
        (self._frames if isinstance(message, RankFrame) else self._received).accept(number)
        return message


OpenRank = Callable[[RankStart, RankServer], Rank]


def open_rank(start: RankStart, server: RankServer) -> Rank:
    """This rank's share of a model, step by step with rank 0."""
    from holdfast.engine.rank_build import build_rank  # torch comes with it

    return build_rank(start, server)


def watch_rank_zero(server: RankServer, channel: Channel, parent: int, pulse: Pulse) -> NoReturn:
    """A thread: tells again and again that this process lives, and ends it where rank 0 does not."""
    signs = VitalSigns(parent, pulse)
    with contextlib.suppress(ChannelClosedError):
        while os.getppid() == parent and not channel.is_other_side_gone():
            server.pulse.beat()
            signs.look()
            # Rank 0 may be anybody's program: one that waits with Python's lock kept is not dead yet.
            if signs.is_dead(is_ready=False):
                _log.error(
                    "rank 0 (process %d) is silent for %.1f seconds: this rank ends", parent, signs.silent_seconds
                )
                if server.owns_parent:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(parent, signal.SIGKILL)
                os._exit(1)
            channel.wait_for_end(LOOK_SECONDS)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when the one that started it ends, however that ends; elsewhere than on Linux nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def main(open_rank: OpenRank = open_rank) -> None:
    """The end of the channel, the process of rank 0, the file of this pulse and that of rank 0's are the arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    number, parent, own_number, zero_number = map(int, sys.argv[1:])
    die_with_parent(parent)
    log_to_stderr()
    own, zero = Pulse(own_number), Pulse(zero_number)
    own.beat()
    os.close(own_number)
    os.close(zero_number)
    with socket.socket(fileno=number) as connection:
        channel = Channel(connection)
        server = RankServer(channel, own)
        watch = threading.Thread(
            target=watch_rank_zero, args=(server, channel, parent, zero), name="holdfast-pulse", daemon=True
        )
        watch.start()
        server.run(open_rank)


if __name__ == "__main__":
    main()

"""RankServer: the other end of rank 0's channel: the handshake of a start, then one frame a step; no torch.

Its caller passes the function that opens this rank's share (engine/rank_process.py, engine/launched.py).
"""

import contextlib
import gc
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

from holdfast.engine.channel import Channel, ChannelClosedError
from holdfast.engine.messages import Numbering, Shutdown, last_message
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
from holdfast.errors import MessageError
from holdfast.memory.report import RankMemory
from holdfast.request.step import Step

MessageT = TypeVar("MessageT")


class Rank(Protocol):
    """One rank's share of a model."""

    @property
    def memory(self) -> RankMemory: ...

    def book(self, tokens: tuple[tuple[int, ...], ...]) -> None:
        """Apply the tokens that rank 0 sampled in the oldest step, by item."""
        ...

    def run(self, step: Step) -> None:
        """Run a step together with all other ranks."""
        ...

    def look(self) -> dict[str, int]:
        """Return counters of its memory by name."""
        ...

    def close(self) -> None:
        """Release everything."""
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
        self.got_shutdown = False
        """False if rank 0 is gone without a Shutdown."""

    @property
    def num_received(self) -> int:
        """Messages of rank 0 that were read, including steps. Any thread."""
        return self._received.last + self._frames.last

    def run(self, open_rank: "OpenRank") -> None:
        """Serve until Shutdown or rank 0 is gone; report an error to rank 0."""
        rank: Rank | None = None
        try:
            start = self.expect(RankStart)
            self.owns_parent = start.owns_parent
            rank = open_rank(start, self)
            gc.freeze()  # objects of the start stay
            self.send(RankReady(rank.memory))
            self._serve(rank)
        except ChannelClosedError:
            return
        except Exception as error:
            with contextlib.suppress(ChannelClosedError):
                self.send(last_message(error, is_started=rank is not None))
            sys.exit(1)
        finally:
            if rank is not None:
                rank.close()

    def send(self, message: RankMessage) -> None:
        """Send a message to rank 0."""
        self._channel.send(lambda: self.encoded(message))

    def encoded(self, message: RankMessage) -> bytes:
        """Encode the next message."""
        return encode_rank_message(message, self._sent.next())

    def expect(self, kind: type[MessageT]) -> MessageT:
        """Wait for the next message, which must be of this kind."""
        message = self._next()
        if not isinstance(message, kind):
            if isinstance(message, Shutdown):
                raise ChannelClosedError("rank 0 has ended the start")
            raise MessageError("wire.unexpected", found=type(message).__name__, expected=kind.__name__)
        return message

    def _serve(self, rank: Rank) -> None:
        while not isinstance(message := self._next(), Shutdown):
            if isinstance(message, RankLookRequest):
                self.send(RankLook(rank.look()))
                continue
            if not isinstance(message, RankFrame):
                raise MessageError("wire.unexpected", found=type(message).__name__, expected="RankFrame")
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
        self.got_shutdown |= isinstance(message, Shutdown)
        return message


OpenRank = Callable[[RankStart, RankServer], Rank]

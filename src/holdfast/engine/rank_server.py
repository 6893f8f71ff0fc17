"""RankServer: the other end of rank 0's channel: the stations of a start, then frame after frame until rank 0 ends; no torch.

Knows nothing of models: whoever makes one gives it what opens this rank's share (engine/rank_process.py, engine/launched.py).
"""

import contextlib
import gc
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

from holdfast.engine.admission import describe
from holdfast.engine.channel import Channel, ChannelClosedError
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
from holdfast.errors import HoldfastError, MessageError
from holdfast.memory.report import RankMemory
from holdfast.request.step import Step

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
        self.was_asked_to_end = False
        """By rank 0, which else is gone."""

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
        self.was_asked_to_end |= isinstance(message, Shutdown)
        return message


OpenRank = Callable[[RankStart, RankServer], Rank]

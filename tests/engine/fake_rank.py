"""A rank of fakes in a process of its own, without torch: what happens to it is the name of its model.

It keeps its slots as a runner does, and tells their hash in a file after every step, so that ranks can be compared. Where a
station of a start lasts ("slow load"), and before an idle rank waits, it leaves its process id in a file.
"""

import os
import sys
import time
from hashlib import blake2b
from pathlib import Path

from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.engine.rank_messages import (
    RankConnect,
    RankLoaded,
    RankPlanned,
    RankReported,
    RankStart,
    encode_rank_message,
)
from holdfast.engine.rank_process import main
from holdfast.engine.rank_server import RankServer
from holdfast.errors import UnsupportedModelError
from holdfast.memory.report import RankMemory
from holdfast.request.sequence import LiveStep, SequenceResult, StepResult
from holdfast.request.step import Step
from holdfast.runner.slots import Slots

LIMITS = Limits(8, 32, 128, 4)
NUM_PAGES = 96
VOCAB_SIZE = 264
BOTH_PLACES = "HOLDFAST_FAKE_RANKS"
"""Names a folder: a rank writes rank-N there."""


def nonsense() -> dict[str, tuple[bytes, ...]]:
    """What no rank says where RankLoaded is due."""
    loaded, oversized = encode_rank_message(RankLoaded(), 2), bytearray(encode_rank_message(RankLoaded(), 2))
    oversized[8:12] = (2**30 + 1).to_bytes(4, "little")
    return {
        "a stranger's": (b"GET / HTTP/1.1\r\nHost: me\r\n\r\n",),
        "cut short": (loaded[: len(loaded) // 2],),
        "oversized": (bytes(oversized),),
        "repeated": (loaded, loaded),
        "not due": (encode_rank_message(RankConnect("somewhere"), 2),),
        "altered": (loaded[:-1] + bytes([loaded[-1] ^ 0x41]),),
    }


NONSENSE = nonsense()


def arrive(rank: int, station: str) -> None:
    """Say that a rank has come so far."""
    if BOTH_PLACES in os.environ:
        file = Path(os.environ[BOTH_PLACES]) / f"{station}-{rank}.pid"
        file.with_suffix(".new").write_text(str(os.getpid()))
        file.with_suffix(".new").rename(file)


class SlotsRank:
    """Only what a rank keeps of its sequences."""

    def __init__(self, rank: int, name: str) -> None:
        self.memory = RankMemory(rank, "fake", 100 + rank, 90 + rank, 95 + rank)
        self._name = name
        self._rank = rank
        self._slots = Slots(LIMITS, [CacheGroup("all", LIMITS.page_tokens)], NUM_PAGES, VOCAB_SIZE)
        self._flights: list[LiveStep] = []
        self._trace = blake2b(digest_size=8)
        self._file = Path(os.environ[BOTH_PLACES]) / f"rank-{rank}" if BOTH_PLACES in os.environ else None
        self._num_steps = 0

    def book(self, tokens: tuple[tuple[int, ...], ...]) -> None:
        live = self._flights.pop(0)
        self._slots.book(live, StepResult(tuple(SequenceResult(own) for own in tokens)))

    def run(self, step: Step) -> None:
        live = self._slots.accept(step)
        self._flights.append(live)
        self._num_steps += 1
        if self._num_steps == 3:
            arrive(self._rank, "step")
        if self._name == "hangs" and self._num_steps == 3:
            time.sleep(600)
        if self._name == "slow":
            time.sleep(0.02)
        if self._name == "dies" and self._rank == 2 and self._num_steps == 3:
            raise OSError("device lost")
        self._trace.update(repr(seen(live)).encode())
        if self._file is not None:
            self._file.write_text(f"{step.number} {self._trace.hexdigest()}")

    def look(self) -> dict[str, int]:
        return {"steps": self._num_steps}

    def close(self) -> None: ...


def seen(live: LiveStep) -> list[object]:
    """All that a step says and that follows from steps before it."""
    return [
        (one.sequence.sequence_id, one.sequence.token_ids, one.sequence.tables, one.start, one.num_new_tokens)
        for one in live.scheduled
    ]


def open_rank(start: RankStart, server: RankServer) -> SlotsRank:
    """Through all stations of a start, or the failure that the config names."""
    name = start.config.model or ""
    is_second = start.rank == 2
    if name == "slow plan":
        arrive(start.rank, "plan")
        time.sleep(60)
    if name == "never comes" and is_second:
        time.sleep(600)
    server.send(RankReported({"rank": start.rank}))
    server.expect(RankPlanned)
    if name in NONSENSE and is_second:
        for data in NONSENSE[name]:
            server._channel.send(lambda own=data: own)
        if name != "cut short":
            time.sleep(600)
        os._exit(0)
    if name == "refuses" and is_second:
        raise UnsupportedModelError("value.empty", name="weights")
    if name == "fails" and is_second:
        raise OSError("no weights today")
    if name == "exits" and is_second:
        sys.stderr.write("what it said last\n")
        sys.stderr.flush()
        os._exit(3)
    if name == "slow load":
        arrive(start.rank, "load")
        time.sleep(60)
    server.send(RankLoaded())
    server.expect(RankConnect)
    if name == "slow warm":
        arrive(start.rank, "warm")
        time.sleep(60)
    if name == "locked":
        until = time.monotonic() + 3.0
        while time.monotonic() < until:  # Python's lock is kept by one long call after the other
            sum(range(20_000_000))
    arrive(start.rank, "idle")
    return SlotsRank(start.rank, name)


if __name__ == "__main__":
    main(open_rank)

"""The process of one rank as holdfast.engine.rank_process has it, which also counts: for gpu_ranks.py.

It leaves rank-N.json in the folder that $HOLDFAST_COUNTS names. Until there is a file `count` in it, each step's own argmax is
held against what rank 0 says was chosen; from then on nothing is read, and what the allocator took is counted instead. While
there is a file `plain` it does neither.
"""

import faulthandler
import gc
import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from holdfast.engine.rank_messages import RankStart
from holdfast.engine.rank_process import main, open_rank
from holdfast.engine.rank_server import OpenRank, Rank, RankServer
from holdfast.memory.report import RankMemory
from holdfast.request.step import Step

FOLDER = "HOLDFAST_COUNTS"
COUNT_FILE = "count"
PLAIN_FILE = "plain"
TELL_AT = "HOLDFAST_TELL_AT"
"""The time (of time.time) from which on a process says where it stands, in stack-N.txt of the same folder, once LATE_FILE is there."""
LATE_FILE = "late"
NUM_MISSES = 5
"""Texts that are kept."""


def device_counts() -> dict[str, int]:
    """What torch's allocator has done in this process so far; nothing on a CPU."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {"allocations": 0, "segments": 0, "reserved_bytes": 0}
    found = torch.cuda.memory_stats()
    return {
        "allocations": found["allocation.all.allocated"],
        "segments": found["segment.all.allocated"],
        "reserved_bytes": torch.cuda.memory_reserved(),
    }


def tell_later(rank: int) -> None:
    """All stacks, and where its exchange stands, when its parent says that it is late."""
    if TELL_AT not in os.environ:
        return
    folder = Path(os.environ[FOLDER])

    def tell() -> None:
        while not (folder / LATE_FILE).exists():
            time.sleep(0.25)
        with (folder / f"stack-{rank}.txt").open("w") as output:
            faulthandler.dump_traceback(output)
        from holdfast.distributed.symmetric import SymmetricExchange

        exchanges = [thing for thing in gc.get_objects() if type(thing) is SymmetricExchange]
        words = "; ".join(exchange.epochs() for exchange in exchanges) or "none"
        (folder / f"epochs-{rank}.txt").write_text(words)

    timer = threading.Timer(max(0.1, float(os.environ[TELL_AT]) - time.time()), tell)
    timer.daemon = True
    timer.start()


class CountedRank:
    """A rank that looks at itself."""

    def __init__(self, inner: Any, folder: Path) -> None:  # noqa: ANN401 a FollowingRank, of which a look inside is taken
        self._inner = inner
        self._path = folder / f"rank-{inner.memory.rank}.json"
        self._count_file, self._plain_file = folder / COUNT_FILE, folder / PLAIN_FILE
        self._own: deque[list[int]] = deque()
        self._facts: dict[str, Any] = {"steps": 0, "compared": 0, "different": 0, "misses": [], "counted_steps": 0}
        self._facts |= device_counts() | {"at_count": None}
        self._write()

    @property
    def memory(self) -> RankMemory:
        return self._inner.memory

    def book(self, tokens: tuple[tuple[int, ...], ...]) -> None:
        """What rank 0 chose, against what this rank found in the same step."""
        self._inner.book(tokens)
        chosen, own = [item[0] for item in tokens if item], self._own.popleft() if self._own else []
        if own and chosen:
            self._facts["compared"] += len(chosen)
            if chosen != own[: len(chosen)]:
                self._facts["different"] += 1
                if len(self._facts["misses"]) < NUM_MISSES:
                    self._facts["misses"].append(f"step {self._facts['steps']}: {chosen} != {own[: len(chosen)]}")

    def run(self, step: Step) -> None:
        """The step, and then a look."""
        if self._plain_file.exists():
            self._inner.run(step)
            self._own.append([])
            return
        is_counting = self._count_file.exists()
        self._inner.run(step)
        self._facts["steps"] += 1
        if is_counting:
            self._own.append([])
            counts = device_counts()
            self._facts["at_count"] = self._facts["at_count"] or counts
            self._facts["counted_steps"] += 1
            self._facts |= counts
        else:
            self._own.append(self._argmax(len(step.items)))
        if self._facts["steps"] % 20 == 0 or is_counting:
            self._write()

    def _argmax(self, num_rows: int) -> list[int]:
        """For the step that was just begun: it runs in a stream of the runner's own, which this thread's reads do not wait for."""
        argmax_S = self._inner._runner.sampler.argmax_S
        if argmax_S.is_cuda:
            import torch

            torch.cuda.synchronize(argmax_S.device)
        return argmax_S[:num_rows].tolist()

    def look(self) -> dict[str, int]:
        """As the rank itself tells it."""
        return self._inner.look()

    def close(self) -> None:
        """Everything back."""
        self._write()
        self._inner.close()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._facts))
        partial.rename(self._path)


def open_counted(start: RankStart, server: RankServer, open_plain: OpenRank = open_rank) -> Rank:
    """As a rank's process opens it."""
    tell_later(start.rank)
    return CountedRank(open_plain(start, server), Path(os.environ[FOLDER]))


if __name__ == "__main__":
    main(open_counted)

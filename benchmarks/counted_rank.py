"""One rank's process, like holdfast.engine.rank_process with counters: for gpu_ranks.py.

It writes rank-N.json into the folder $HOLDFAST_COUNTS. Until that folder has a file `count`, it compares each step's own
argmax with rank 0's token. After that it reads nothing and counts allocations instead. While a file `plain` exists it does
neither.
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
"""Environment variable with a time (time.time); if set, a rank dumps its stacks to stack-N.txt once LATE_FILE exists."""
LATE_FILE = "late"
NUM_MISSES = 5
"""Limit on kept texts."""


def device_counts() -> dict[str, int]:
    """Return the counts of torch's allocator in this process; empty on a CPU."""
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
    """Dump all stacks and the state of the exchange after the parent reports a delay."""
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
    """A rank that counts its own work."""

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
        """Compare rank 0's tokens with this rank's own argmax of that step."""
        self._inner.book(tokens)
        chosen, own = [item[0] for item in tokens if item], self._own.popleft() if self._own else []
        if own and chosen:
            self._facts["compared"] += len(chosen)
            if chosen != own[: len(chosen)]:
                self._facts["different"] += 1
                if len(self._facts["misses"]) < NUM_MISSES:
                    self._facts["misses"].append(f"step {self._facts['steps']}: {chosen} != {own[: len(chosen)]}")

    def run(self, step: Step) -> None:
        """Run the step, then count."""
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
        """Return the argmax of the step just begun. The runner uses its own stream, so reads here do not wait for it."""
        argmax_S = self._inner._runner.sampler.argmax_S
        if argmax_S.is_cuda:
            import torch

            torch.cuda.synchronize(argmax_S.device)
        return argmax_S[:num_rows].tolist()

    def look(self) -> dict[str, int]:
        """Return the rank's own memory report."""
        return self._inner.look()

    def close(self) -> None:
        """Free everything."""
        self._write()
        self._inner.close()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._facts))
        partial.rename(self._path)


def open_counted(start: RankStart, server: RankServer, open_plain: OpenRank = open_rank) -> Rank:
    """Open a counting rank like the rank process does."""
    tell_later(start.rank)
    return CountedRank(open_plain(start, server), Path(os.environ[FOLDER]))


if __name__ == "__main__":
    main(open_counted)

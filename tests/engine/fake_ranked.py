"""A program with an engine on ranks of fakes, to be killed: its core in this process ("script") or in one of its own ("front").

"launched" and "nodes" are the program as a launcher starts it, once for every rank; of "nodes" each takes the others to be on other
machines.

It prints one line when the engine fails: the time, by the clock that all processes share, and the error.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from engine.fake_rank import BOTH_PLACES, arrive
from engine.fake_rank import open_rank as open_fake
from engine.fakes import shared_template, shared_tokenizer
from engine.rank_groups import ranked_engine
from holdfast import SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine import launched, life_line
from holdfast.engine.core import EngineCore
from holdfast.engine.core_process import CoreProcess, main
from holdfast.engine.engine import Engine
from holdfast.errors import HoldfastError

CORE = (sys.executable, "-P", "-m", "engine.fake_ranked", "core")
NUM_RANKS = 3
LONG = SamplingParams(temperature=0.0, max_tokens=100)


def open_core(config, on_progress, on_prepare) -> EngineCore:
    """The core of a "front", over ranks of its own."""
    arrive(0, "core")
    core = ranked_engine(config.model or "", NUM_RANKS, owns_parent=True).core
    assert isinstance(core, EngineCore)
    return core


def run(engine: Engine, station: str) -> None:
    """Idle, or step after step, until it fails."""
    nth = 0
    while True:
        if station == "idle":
            engine.watch()
            engine.raise_if_dead()
            time.sleep(0.05)
            continue
        if not engine.has_unfinished():
            if station == "locked" and nth:
                sum(range(80_000_000))  # Python's lock is kept for seconds by one call
                arrive(0, "locked")
            nth += 1
            engine.add_request(f"{nth}", "some text", LONG)
        engine.step()
        engine.raise_if_dead()


class FolderStore:
    """In place of a launcher's."""

    def set(self, key: str, value: str) -> None:
        file = self._file(key)
        file.with_suffix(".new").write_text(value)
        file.with_suffix(".new").rename(file)

    def get(self, key: str) -> bytes:
        while not self._file(key).exists():
            time.sleep(0.01)
        return self._file(key).read_bytes()

    def _file(self, key: str) -> Path:
        return Path(os.environ[BOTH_PLACES]) / key.replace("/", "-")


def as_launched(kind: str) -> launched.Launched:
    """What a launcher has said; ranks but 0 serve, and do not come back."""
    found = launched.Launched(int(os.environ["RANK"]), NUM_RANKS, "127.0.0.1", 1, True)
    launched._store = lambda reported: FolderStore()
    if kind == "nodes":
        life_line.machine_mark = lambda: f"machine {found.rank:8}".encode()
    if found.rank:
        launched.serve_launched(found, open_fake)
    return found


def program(kind: str, station: str) -> None:
    """To its error."""
    name = {"idle": "", "step": "slow", "locked": "slow"}.get(station, f"slow {station}")
    if kind == "nodes" and station == "step":
        name = "hangs"  # in a step that does not end: between steps silence may be the program's own business
    engine = None
    try:
        if kind in ("launched", "nodes"):
            engine = ranked_engine(name, NUM_RANKS, rendezvous=partial(launched.accept_ranks, as_launched(kind)))
        elif kind == "script":
            engine = ranked_engine(name, NUM_RANKS)
        else:
            config = EngineConfig(model=name, core_process=True, tensor_parallel_size=NUM_RANKS)
            engine = Engine(
                CoreProcess(config, lambda *_: None, command=CORE), shared_tokenizer(), shared_template(), 0
            )
        run(engine, station)
    except HoldfastError as error:
        print(json.dumps([time.monotonic(), str(error)]), flush=True)
        if engine is not None:
            engine.close()


if __name__ == "__main__":
    if sys.argv[1] == "core":
        del sys.argv[1]
        main(open_core)
    else:
        program(*sys.argv[1:])
        os._exit(0)

"""A program with an engine on ranks of fakes, to be killed: its core in this process ("script") or in one of its own ("front").

It prints one line when the engine fails: the time, by the clock that all processes share, and the error.
"""

import json
import os
import sys
import time
from contextlib import suppress

from engine.fake_rank import arrive
from engine.fakes import shared_template, shared_tokenizer
from engine.rank_groups import ranked_engine
from holdfast import SamplingParams
from holdfast.config import EngineConfig
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
            nth += 1
            engine.add_request(f"{nth}", "some text", LONG)
        engine.step()
        engine.raise_if_dead()


def program(kind: str, station: str) -> None:
    """To its error."""
    name = {"idle": "", "step": "slow"}.get(station, f"slow {station}")
    try:
        if kind == "script":
            engine = ranked_engine(name, NUM_RANKS)
        else:
            config = EngineConfig(model=name, core_process=True, tensor_parallel_size=NUM_RANKS)
            engine = Engine(
                CoreProcess(config, lambda *_: None, command=CORE), shared_tokenizer(), shared_template(), 0
            )
        run(engine, station)
    except HoldfastError as error:
        print(json.dumps([time.monotonic(), str(error)]), flush=True)
        with suppress(NameError):
            engine.close()


if __name__ == "__main__":
    if sys.argv[1] == "core":
        del sys.argv[1]
        main(open_core)
    else:
        program(*sys.argv[1:])
        os._exit(0)

"""A program with an engine on real ranks, to be killed: python -m engine.dying_engine MODEL SETTINGS (JSON)

It prints a line of JSON for each event: `here` at the configured station, with the processes of
its ranks; then its error, how long it took to close, and whether its device still works. In the middle of a capture it kills
by itself: no other process could be in time.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from holdfast import LLM, SamplingParams
from holdfast.api.opened import open_engine
from holdfast.config import EngineConfig
from holdfast.errors import HoldfastError
from holdfast.observability.preparing import Preparing

WARM_CALLS = 3
LONG = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [1, 2, 3 + nth]} for nth in range(2)]


def tell(what: str, **facts: object) -> None:
    """A line, with the time by the clock that all processes share."""
    print(json.dumps({"what": what, "at": time.monotonic(), **facts}), flush=True)


def children_of(pid: int) -> list[int]:
    """In the order in which they were started."""
    found = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return sorted(found)


def processes(is_front: bool) -> dict[str, int]:
    """By name of every rank."""
    zero = (
        next(pid for pid in children_of(os.getpid()) if b"core_process" in command_of(pid)) if is_front else os.getpid()
    )
    others = [pid for pid in children_of(zero) if b"rank_process" in command_of(pid)]
    return {"rank 0": zero} | {f"rank {nth}": pid for nth, pid in enumerate(others, 1)}


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


class Captured:
    """Kills one of the ranks as soon as the first graph is captured."""

    def __init__(self, victim: str, how: str, is_front: bool) -> None:
        self._victim, self._how, self._is_front = victim, how, is_front
        self._is_done = False

    def __call__(self, preparing: Preparing) -> None:
        if self._is_done or not preparing.what.startswith("Capturing"):
            return
        self._is_done = True
        found = processes(self._is_front)
        tell("here", pids=found, done=preparing.num_done, total=preparing.num_total)
        os.kill(found[self._victim], getattr(signal, f"SIG{self._how}"))


def run(llm: LLM, station: str, is_front: bool) -> NoReturn:
    """Idle, or one step behind the other, until it fails."""
    for _ in range(WARM_CALLS):
        llm.generate(PROMPTS, LONG, progress=False)
    tell("here", pids=processes(is_front))
    while True:
        if station == "idle":
            llm.engine.watch()
            llm.engine.raise_if_dead()
            time.sleep(0.05)
        else:
            llm.generate(PROMPTS, LONG, progress=False)


def device_words() -> str:
    """Whether the device still does what this process asks of it."""
    import torch

    if not torch.cuda.is_available():
        return "works"
    try:
        found = int(torch.ones(1000, device="cuda").sum())
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "works" if found == 1000 else f"a sum of 1000 is {found}"


def main(model: str, settings: dict[str, Any]) -> None:
    """To its error, and behind it."""
    station, victim, how = (settings.pop(name) for name in ("station", "victim", "how"))
    is_front = settings["core_process"]
    config = EngineConfig.from_options(model=model, **settings)
    llm = None
    on_prepare = Captured(victim, how, is_front) if station == "capture" else lambda preparing: None
    try:
        llm = LLM.from_engine(open_engine(config, lambda done, total: None, on_prepare=on_prepare))
        run(llm, station, is_front)
    except HoldfastError as error:
        tell("error", kind=type(error).__name__, words=str(error))
    if llm is not None:
        llm.shutdown()
    tell("closed")
    if not is_front:  # else this process never had the device
        tell("device", words=device_words())


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

"""Readers that leave at every token: the cases, and a model that is held between steps so that each of them is exact."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from engine.fakes import Gate, solo
from holdfast.engine.engine import Engine
from holdfast.request.sampling_params import SamplingParams

NEIGHBOUR = SamplingParams(temperature=0.0, max_tokens=100)
MOST_STEPS_LATER = 2
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 256, "num_pages": 128, "page_tokens": 4}


@dataclass(frozen=True)
class Case:
    """One reader that goes."""

    kind: str
    streams: bool
    run_ahead: int
    num_steps: int
    """That run while its request is there."""

    def __str__(self) -> str:
        words = "stream" if self.streams else "whole"
        return f"{self.kind}-{words}-{'ahead' if self.run_ahead else 'in turn'}-{self.num_steps}"


MOST_STEPS = {"queued": 32, "prefill": 13, "decode": 65, "four": 41}
CASES = [
    Case(kind, streams, run_ahead, num_steps)
    for kind, most in MOST_STEPS.items()
    for streams in (True, False)
    for run_ahead in (0, 1)
    for num_steps in range(most)
]
SAMPLE = CASES[::15]


@cache
def neighbours_answer() -> tuple[list[int], str]:
    return solo("neighbour", NEIGHBOUR, **SIZES)


async def started(gate: Gate) -> None:
    """Wait until the next step has begun."""
    await until(lambda: gate.started.acquire(blocking=False), "no step begins")


async def advance(gate: Gate, num_steps: int) -> None:
    """Let so many steps end; afterwards the next one has begun."""
    for _ in range(num_steps):
        gate.allowed.release()
        await started(gate)


async def until(condition: Callable[[], bool], words: str = "it did not happen") -> None:
    """Wait for something, with patience: a loaded machine is no fault."""
    last = time.monotonic() + 15.0
    while not condition():
        assert time.monotonic() < last, words
        await asyncio.sleep(0.0005)


def num_held(engine: Engine, sequence_id: int = 0) -> int:
    """Pages of the neighbour, which came first."""
    found = next((one for one in engine.scheduler.running if one.sequence_id == sequence_id), None)
    return -1 if found is None else len(found.tables[0])

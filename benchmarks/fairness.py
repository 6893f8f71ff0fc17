"""Gaps between tokens of streams during a long prefill, with steps cut and uncut: python benchmarks/fairness.py [--device cpu]

One AsyncLLM with dummy weights. A round starts the streams, lets them run, and then sends the prompts. It ends when every
stream has all of its tokens, so both kinds of rounds do equal work. Both kinds alternate in one engine, with the pacer added
or removed between rounds. A gap is the time between two arrivals at a stream's reader.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from dummy_models import tiny_settings, write_dummy_model
from gpu_records import Budget, make_record, options, print_table, write_record

from holdfast import AsyncLLM, SamplingParams
from holdfast.engine.core import EngineCore
from holdfast.engine.pacing import StepPacer

CUT, UNCUT = "cut", "uncut"
NUM_BEFORE = 40
"""Tokens of each stream before the prompts are sent, after NUM_WARM."""
NUM_WARM = 6
STREAM_PROMPT_TOKENS = 32
MOST_RATIO = {"cpu": 4.0, "cuda": 2.0}
"""Goal: the largest gap relative to the median before."""
MOST_SLOWER = 1.1


@dataclass
class Round:
    """Arrival times in one round."""

    sent_at: float = 0.0
    first_at: list[float] = field(default_factory=list)
    """Time of each prompt's first token."""
    ended_at: float = 0.0
    arrivals: list[list[float]] = field(default_factory=list)
    """One list per stream."""

    def figures(self) -> dict[str, Any]:
        """Return gaps in milliseconds before and during prefill, and seconds since the prompts were sent."""
        read_at = max(self.first_at)
        before, during, ratios = [], [], []
        for arrivals in self.arrivals:
            own_before = [1e3 * gap for at, gap in _gaps(arrivals[NUM_WARM:]) if at <= self.sent_at]
            own = [1e3 * gap for at, gap in _gaps(arrivals) if at > self.sent_at and at - gap < read_at]
            ratios.append(max(own, default=0.0) / median(own_before))
            before += own_before
            during += own
        return {
            "median_before_ms": median(before),
            "largest_before_ms": max(before),
            "median_ms": median(during),
            "largest_ms": max(during),
            "ratio": max(ratios),
            "first_token_seconds": read_at - self.sent_at,
            "seconds": self.ended_at - self.sent_at,
            "outlasted": min(arrivals[-1] for arrivals in self.arrivals) >= read_at,
        }


def _gaps(arrivals: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Return the end of each gap, and its seconds."""
    return ((later, later - earlier) for earlier, later in pairwise(arrivals))


class Bench:
    """One engine, and the sizes of a round."""

    def __init__(self, llm: AsyncLLM, arguments: argparse.Namespace) -> None:
        self._llm = llm
        self._arguments = arguments
        self._dice = Random(0)

    async def round(self, num_prompts: int, prompt_tokens: int, stream_tokens: int) -> Round:
        """Run streams, then prompts beside them, until all have ended."""
        found = Round(arrivals=[[] for _ in range(self._arguments.streams)])
        running = asyncio.Event()

        async def stream(arrivals: list[float]) -> None:
            async for _ in self._stream(STREAM_PROMPT_TOKENS, stream_tokens):
                arrivals.append(time.perf_counter())
                if min(map(len, found.arrivals)) >= NUM_WARM + NUM_BEFORE:
                    running.set()

        async def prompt() -> None:
            await running.wait()
            found.sent_at = found.sent_at or time.perf_counter()
            async for _ in self._stream(prompt_tokens, 1):
                found.first_at.append(time.perf_counter())

        streams = [stream(arrivals) for arrivals in found.arrivals]
        await asyncio.gather(*streams, *(prompt() for _ in range(num_prompts)))
        found.ended_at = time.perf_counter()
        return found

    def _stream(self, prompt_tokens: int, num_tokens: int) -> Any:  # noqa: ANN401 an async generator
        ids = [self._dice.randrange(256) for _ in range(prompt_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return self._llm.stream({"prompt_token_ids": ids}, params)


def open_llm(folder: Path, arguments: argparse.Namespace) -> AsyncLLM:
    """Open an engine in this process that cuts its steps."""
    name = arguments.model
    path = write_dummy_model(folder, name, **(tiny_settings(name) if arguments.tiny else {}))
    return AsyncLLM(
        str(path),
        load_format="dummy",
        device=arguments.device,
        on_progress=lambda done, total: None,
        max_model_len=arguments.prompt_tokens + arguments.stream_tokens + STREAM_PROMPT_TOKENS,
        max_num_seqs=arguments.streams + arguments.prompts,
        enable_prefix_caching=False,
        max_step_stretch=arguments.stretch,
        memory_limit=arguments.memory_limit,
    )


def measure(llm: AsyncLLM, arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Alternate rounds while time allows; at least one of each kind."""
    thread = llm._thread
    assert thread is not None, "the engine has ended"
    core = thread.engine.core
    assert isinstance(core, EngineCore), "the core is in another process"
    pacer, budget = core.pacer, Budget(arguments.budget_seconds)
    assert pacer is not None, "steps are not cut"
    bench = Bench(llm, arguments)
    asyncio.run(bench.round(1, min(arguments.prompt_tokens, 64), NUM_WARM + NUM_BEFORE + 8))
    found: dict[str, list[dict[str, Any]]] = {CUT: [], UNCUT: []}
    for number in range(arguments.rounds):
        if number and budget.left_seconds < budget.spent_seconds / number:
            break
        for kind in (CUT, UNCUT):
            # A new pacer, so that no round uses measurements of the last.
            own = StepPacer(pacer.stretch, pacer.sizes, pacer.max_seconds, pacer.tile_rows)
            core.pacer = own if kind == CUT else None
            seen = asyncio.run(bench.round(arguments.prompts, arguments.prompt_tokens, arguments.stream_tokens))
            found[kind].append(seen.figures())
            print(kind, {name: round(value, 3) for name, value in found[kind][-1].items()}, flush=True)
    return found


def rows_of(found: Mapping[str, Sequence[Mapping[str, Any]]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each kind: medians of its rounds, and the largest gap of the worst round."""
    rows: list[dict[str, Any]] = []
    for kind, rounds in found.items():
        figures = {name: median(one[name] for one in rounds) for name in rounds[0] if name != "outlasted"}
        figures |= {
            "ratio": max(one["ratio"] for one in rounds),
            "largest_ms": max(one["largest_ms"] for one in rounds),
        }
        values = {name: round(value, 3) for name, value in figures.items()}
        rows.append({"measure": f"steps {kind}", "unit": "ms and s", "values": values, "rounds": list(rounds)})
    cut, uncut = rows
    slower = cut["values"]["seconds"] / uncut["values"]["seconds"]
    cut["slower"] = round(slower, 3)
    most = MOST_RATIO[arguments.device.partition(":")[0]]
    cut["verdicts"] = {
        f"largest gap at most {most:g} times the median": cut["values"]["ratio"] <= most,
        "within 10 % of the seconds of uncut steps": slower <= MOST_SLOWER,
        "streams outlast the prompt": all(one["outlasted"] for one in cut["rounds"]),
    }
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table at the end of a run."""
    columns = {
        "median before, ms": "median_before_ms",
        "median, ms": "median_ms",
        "largest, ms": "largest_ms",
        "largest / before": "ratio",
        "first token, s": "first_token_seconds",
        "all work, s": "seconds",
    }
    lines = [(row["measure"], *(row["values"][name] for name in columns.values())) for row in rows]
    print_table("Gaps between tokens of a stream while prompts are read", ("", *columns), lines)
    for words, holds in rows[0]["verdicts"].items():
        print(f"{'yes' if holds else 'NO '} {words}")


def main() -> None:
    """Run the requested parts while time allows."""
    parser = options("Gaps between tokens of streams while a long prompt is read")
    parser.add_argument("--model", default=None, help="of the catalogue; else Qwen3-32B, on a CPU SmolLM2-135M")
    parser.add_argument("--streams", type=int, default=None, help="else 64, on a CPU 4")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=None, help="else 32768, on a CPU 4000")
    parser.add_argument("--stream-tokens", type=int, default=None, help="else 800, on a CPU 480")
    parser.add_argument("--stretch", type=float, default=None, help="max_step_stretch of the cut rounds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory-limit", default=None)
    arguments = parser.parse_args()
    is_cpu = arguments.device == "cpu"
    arguments.model = arguments.model or ("SmolLM2-135M" if is_cpu else "Qwen3-32B")
    shape = {"streams": (64, 4, 2), "prompt_tokens": (32768, 4000, 96), "stream_tokens": (800, 480, 80)}
    for name, sizes in shape.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, sizes[2 if arguments.tiny else is_cpu])
    with tempfile.TemporaryDirectory() as folder:
        llm = open_llm(Path(folder), arguments)
    try:
        rows = rows_of(measure(llm, arguments), arguments)
    finally:
        llm.shutdown()
    settings = (
        f"{arguments.streams} streams, {arguments.prompts} prompt of {arguments.prompt_tokens} tokens, dummy weights"
    )
    write_record(make_record("fairness", rows, arguments.model, settings, arguments, {}), "fairness", arguments)
    show(rows)


if __name__ == "__main__":
    main()

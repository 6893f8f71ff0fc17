"""Does the GPU wait for the host? python benchmarks/gpu_overlap.py [--engines 32b-bf16,32b-fp8,30b-a3b-fp8]

One process for each engine, with dummy weights, through LLM.generate. Every batch is timed with steps that run ahead and with
steps that wait (run_ahead 1 and 0), by the method of benchmarks/gpu_decode.py; the roof is that of benchmarks/gpu_quantized.py.
Then a run of decode steps is traced. Busy intervals of the device less than MERGED_MICROSECONDS apart are merged; the gaps
between them give the share of time that it waited.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from distinct_experts import count_experts, shown_experts
from gpu_decode import READ_BYTES_PER_SECOND
from gpu_quantized import Shape, generate, rate_of, read_weights, time_batch
from gpu_records import Budget, keep, leave, make_record, options, print_table, run_child, write_record

if TYPE_CHECKING:
    from gpu_engines import OpenEngine

AHEAD, WAITING = "runs ahead", "waits"
"""Columns, with 1 and 0 steps launched before the last result is known."""
RATE, ROOF = "tokens/s", "% of the roof"
MIN_SECONDS = 25.0
"""Least remaining seconds to start a process."""
MERGED_MICROSECONDS = 5.0
TRACED_TOKENS = 14
KEPT_STEPS = 6
"""Busy intervals that a record keeps of a trace."""


class EngineCase(NamedTuple):
    """A model, its scheme, its batches, the traced batches, and the goal."""

    model: str
    quantization: str
    batches: tuple[int, ...]
    traced: tuple[int, ...]
    goals: Mapping[int, tuple[float, str]]
    """Goal by batch."""


ENGINES: Mapping[str, EngineCase] = {
    "32b-bf16": EngineCase(
        "Qwen3-32B",
        "none",
        (1, 32, 64, 128),
        (1, 64, 128),
        {1: (62, RATE), 32: (80, ROOF), 64: (80, ROOF), 128: (75, ROOF)},
    ),
    "32b-fp8": EngineCase("Qwen3-32B", "fp8", (1, 32, 64), (64,), {1: (105, RATE), 32: (55, ROOF), 64: (55, ROOF)}),
    "30b-a3b-fp8": EngineCase(
        "Qwen3-30B-A3B", "fp8", (1, 8, 64), (1, 64), {1: (450, RATE), 8: (1600, RATE), 64: (6500, RATE)}
    ),
}
FULL = Shape(512, (17, 81), 8192, 2, 20)
TINY = Shape(24, (3, 8), 128, 1, 2, (1, 3))


def busy_intervals(events: Iterable[tuple[float, float]], merged: float) -> list[tuple[float, float]]:
    """Return intervals (start, end) that cover all events; those less than `merged` apart are merged."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(events):
        if found and start - found[-1][1] < merged:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def waiting_of(intervals: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return microseconds that the device waited between the first and the last interval."""
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(intervals)]
    span = intervals[-1][1] - intervals[0][0] if intervals else 0.0
    first = intervals[0][0] if intervals else 0.0
    return {
        "span_us": round(span, 1),
        "waited_us": round(sum(gaps), 1),
        "waited_percent": round(100 * sum(gaps) / span, 2) if span else 0.0,
        "longest_wait_us": round(max(gaps, default=0.0), 1),
        "num_waits": len(gaps),
        "busy": [[round(start - first, 1), round(end - first, 1)] for start, end in intervals[:KEPT_STEPS]],
    }


# --- in the process of an engine


def run_engine(case: EngineCase, shape: Shape, tiny: bool, device: str, result: Path | None) -> dict[str, Any]:
    """Run every batch both ways, and the traces."""
    from gpu_engines import open_engine, prompts

    from holdfast.engine.core import EngineCore

    batches = shape.batches or case.batches
    settings: dict[str, Any] = {
        "quantization": case.quantization,
        "max_model_len": shape.prompt_tokens + shape.lengths[1] + 16,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": shape.max_num_batched_tokens,
    }
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        opened = open_engine(case.model, Path(folder), tiny, device, **settings)
        start_seconds = time.perf_counter() - start
        step = read_weights(Path(folder) / case.model, opened)
    found: dict[str, Any] = {
        "start_seconds": start_seconds,
        "kv_bytes_per_token": opened.llm.memory.kv_bytes_per_token,
        "step_bytes": step._asdict(),
        "decode": [],
    }
    core = opened.engine.core
    assert isinstance(core, EngineCore), "the core is in another process"
    made = prompts(Random(0), [shape.prompt_tokens] * max(batches), opened.runner.vocab_size)
    for batch in batches:
        entry: dict[str, Any] = {"batch": batch}
        for name, run_ahead in ((WAITING, 0), (AHEAD, 1)):
            core.run_ahead = run_ahead
            entry[name] = time_batch(opened, made[:batch], shape)
            if device.startswith("cuda") and batch in case.traced:
                entry[name]["trace"] = trace(opened, made[:batch])
        found["decode"].append(entry)
        keep(found, result)
    for entry in found["decode"] if step.num_experts else ():
        entry["distinct_experts"] = count_experts(opened, made[: entry["batch"]])
        keep(found, result)
    return found


def trace(opened: "OpenEngine", made: Sequence[Any]) -> dict[str, Any]:
    """Return busy intervals of the device in a run of decode steps, tracing overhead included."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generate(opened, made, TRACED_TOKENS)
        torch.cuda.synchronize()
    assert profile.profiler is not None, "nothing was profiled"
    results = profile.profiler.kineto_results
    assert results is not None, "nothing was profiled"
    events = [
        (event.start_ns() / 1000, (event.start_ns() + event.duration_ns()) / 1000)
        for event in results.events()
        if event.device_type().name == "CUDA"
    ]
    intervals = busy_intervals(events, MERGED_MICROSECONDS)
    # Drop the prompts' steps at the start, and the end, where no step is left to run ahead.
    return waiting_of(intervals[2:-1])


# --- in the parent process


def rows_of(found: Mapping[str, Mapping[str, Any]], shape: Shape, device: str) -> list[dict[str, Any]]:
    """Return a row for each engine and batch."""
    rows = []
    for name, engine in found.items():
        case = ENGINES[name]
        scheme = case.quantization if case.quantization != "none" else "bfloat16"
        for entry in engine.get("decode", ()):
            batch = entry["batch"]
            row: dict[str, Any] = {
                "measure": f"{case.model}, {scheme}, batch {batch}",
                "unit": "tokens/s",
                "values": {},
            }
            for way in (WAITING, AHEAD):
                counted = {"batch": batch, "distinct_experts": entry.get("distinct_experts")}
                figures = rate_of({**counted, **entry[way]}, engine, shape)
                if (distinct := figures.pop("distinct_experts", None)) is not None:
                    row["distinct_experts"] = distinct
                row["values"][way] = figures.pop("rate")
                for figure, value in figures.items():
                    row.setdefault(figure, {})[way] = value
                if "trace" in entry[way]:
                    row.setdefault("trace", {})[way] = entry[way]["trace"]
            row["ratio"] = round(row["values"][AHEAD] / row["values"][WAITING], 3)
            if batch in case.goals and device.startswith("cuda"):
                row["verdicts"] = verdict(case.goals[batch], row)
            rows.append(row)
    return rows


def verdict(goal: tuple[float, str], row: Mapping[str, Any]) -> dict[str, bool]:
    """Compare with the goals."""
    least, unit = goal
    found = row["values"] if unit == RATE else row["percent_of_roof"]
    return {f">= {least:g} {unit}": found[AHEAD] >= least}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table at the end of a run."""
    columns = (
        "",
        WAITING,
        AHEAD,
        "ratio",
        "% of roof",
        "graph alone",
        "experts",
        "waited %, ahead",
        "longest us",
        "reached",
    )
    lines = []
    for row in rows:
        traced = row.get("trace", {}).get(AHEAD, {})
        lines.append(
            (
                row["measure"],
                row["values"][WAITING],
                row["values"][AHEAD],
                row["ratio"],
                row["percent_of_roof"][AHEAD],
                row.get("graph_alone", {}).get(AHEAD),
                shown_experts(row.get("distinct_experts")),
                traced.get("waited_percent"),
                traced.get("longest_wait_us"),
                ", ".join(f"{'yes' if holds else 'NO'} {words}" for words, holds in row.get("verdicts", {}).items()),
            )
        )
    print_table("Decode, steps that wait and steps that run ahead", columns, lines)


def main() -> None:
    """Run the requested parts while time allows."""
    parser = options("Decode speed with and without steps that run ahead, and a trace of the device")
    parser.add_argument("--engines", default=",".join(ENGINES), help=", ".join(ENGINES))
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else FULL
    if arguments.child is not None:
        case = ENGINES[arguments.child]
        leave(run_engine(case, shape, arguments.tiny, arguments.device, arguments.result), arguments.result)
        return
    budget = Budget(arguments.budget_seconds)
    shared = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    found: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for name in arguments.engines.split(","):
        if budget.left_seconds < MIN_SECONDS:
            print(f"{name} is left out: no time")
            continue
        engine = found[name] = run_child([sys.argv[0], "--child", name, *shared], budget.left_seconds)
        print(json.dumps({"engine": name, **{key: engine.get(key) for key in ("start_seconds", "error")}}))
        sys.stdout.flush()
        rows = write(found, shape, arguments)
    if not rows:
        sys.exit("error: no engine ran; see above")
    show(rows)


def write(found: Mapping[str, Mapping[str, Any]], shape: Shape, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the record so far; return its rows."""
    rows = rows_of(found, shape, arguments.device)
    if rows:
        facts = {
            "context": f"{shape.prompt_tokens} tokens of prompt, then {shape.lengths[0]} to {shape.lengths[1]} of output",
            "read_bytes_per_second": READ_BYTES_PER_SECOND,
            "engines": {
                name: {key: value for key, value in engine.items() if key != "decode"} for name, engine in found.items()
            },
        }
        models = ", ".join(dict.fromkeys(ENGINES[name].model for name in found))
        write_record(make_record("gpu-overlap", rows, models, "dummy weights", arguments, facts), "overlap", arguments)
    return rows


if __name__ == "__main__":
    main()

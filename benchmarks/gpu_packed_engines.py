"""Tokens a second of engines with packed weights: python benchmarks/gpu_packed_engines.py [--cases Qwen3-32B:q4_k,...]

One process for each case writes a file of dummy weights (benchmarks/dummy_packed.py), opens it as stored, and times batches as
benchmarks/gpu_quantized.py does. The record has the plan beside what the engine holds, the weights' bytes against the file's
tensors, and what runs in graphs. A case needs room for its file: 20 GB in /dev/shm, or in `--folder`.

Before, processes open the same models with eight layers, all at once, which compiles the kernels of the whole ones. Every
batch is printed and recorded as soon as it is timed.

On a CPU, to see that it runs: python benchmarks/gpu_packed_engines.py --tiny --device cpu
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from gpu_quantized import FULL, TINY, Shape, rate_of, read_file_weights, time_batch
from gpu_records import (
    REHEARSAL_VARIABLE,
    Budget,
    keep,
    leave,
    make_record,
    options,
    print_table,
    run_child,
    write_record,
)

CASES = ("Qwen3-32B:q4_k", "Qwen3-32B:int4", "Qwen3-30B-A3B:q4_k")
BATCHES = {"Qwen3-32B": (1, 8, 64), "Qwen3-30B-A3B": (1, 8, 64)}
GOALS = {("Qwen3-32B", 1): 155.0, ("Qwen3-32B", 64): 4800.0, ("Qwen3-30B-A3B", 1): 600.0}
"""Tokens a second, by model and batch."""
MIN_SECONDS = 40.0
SHARED_MEMORY = Path("/dev/shm")
REHEARSED: Mapping[str, Any] = {"num_hidden_layers": 8}
"""Enough layers for every type of a mix (docs/quantization.md)."""
REHEARSAL_LIMIT, REHEARSAL_SECONDS = "16GiB", 150.0
FIT = 1.03
"""Bytes of weights held over those of the file's tensors, at most."""


def run_engine(case: str, shape: Shape, tiny: bool, device: str, folder: Path, result: Path | None) -> dict[str, Any]:
    """Write the file, open it, and run every batch."""
    from dummy_models import tiny_settings
    from dummy_packed import write_packed_model
    from gpu_engines import open_at, prompts

    model, target = case.split(":")
    batches, is_rehearsed = shape.batches or BATCHES[model], REHEARSAL_VARIABLE in os.environ
    sizes = {**(tiny_settings(model) if tiny else {}), **(REHEARSED if is_rehearsed else {})}
    settings: dict[str, Any] = {
        "packed_weights": "as_stored",
        "max_model_len": shape.prompt_tokens + shape.lengths[1] + 16,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": shape.max_num_batched_tokens,
    }
    start = time.perf_counter()
    path = write_packed_model(folder, model, target, **sizes)
    written = time.perf_counter()
    if is_rehearsed:
        open_at(path, device, tokenizer="none", **settings, memory_limit=REHEARSAL_LIMIT)
        return {}
    opened = open_at(path, device, tokenizer="none", **settings)
    opened_at = time.perf_counter()
    step, tensor_bytes = read_file_weights(path, opened)
    memory = opened.llm.memory
    found: dict[str, Any] = {
        "options": settings,
        "write_seconds": written - start,
        "start_seconds": opened_at - written,
        "tensor_bytes": tensor_bytes,
        "weight_bytes": sum(row.planned_bytes for row in memory.rows if row.owner.partition("/")[0] == "weights"),
        "memory": [
            {"owner": row.owner, "planned_bytes": row.planned_bytes, "held_bytes": row.held_bytes}
            for row in memory.rows
        ],
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "step_bytes": step._asdict(),
        "is_eager": opened.built.plan.resolved.enforce_eager,
        "packed": opened.built.plan.resolved.packed_account.summary,
        "decode": [],
    }
    made = prompts(Random(0), [shape.prompt_tokens] * max(batches), opened.runner.vocab_size)
    for batch in batches:
        found["decode"].append({"batch": batch, **time_batch(opened, made[:batch], shape)})
        keep(found, result)
    return found


def rehearse(cases: Sequence[str], arguments: argparse.Namespace) -> dict[str, subprocess.Popen[bytes]]:
    """Start a process for each case that compiles its kernels; none on a CPU."""
    if not arguments.device.startswith("cuda"):
        return {}
    environment = {**os.environ, REHEARSAL_VARIABLE: "1"}
    return {
        case: subprocess.Popen(
            [sys.executable, *command_of(case, arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for case in cases
    }


def command_of(case: str, arguments: argparse.Namespace) -> list[str]:
    """Return the arguments of a case's process."""
    command = [__file__, "--child", case, "--device", arguments.device]
    command += ["--tiny"] if arguments.tiny else []
    return command + (["--folder", str(arguments.folder)] if arguments.folder is not None else [])


def rows_of(found: Mapping[str, Mapping[str, Any]], shape: Shape, is_gpu: bool) -> list[dict[str, Any]]:
    """Return a row for each case and batch."""
    rows = []
    for case, engine in found.items():
        model, target = case.split(":")
        for entry in engine.get("decode", ()):
            figures = rate_of(entry, engine, shape)
            row = {"measure": f"{model} in {target}, batch {entry['batch']}", "unit": "tokens/s", **figures}
            row |= {"values": {target: row.pop("rate")}, "model": model, "batch": entry["batch"], "verdicts": {}}
            goal = GOALS.get((model, entry["batch"]))
            if goal is not None and is_gpu:
                row["verdicts"][f">= {goal:g} tokens/s"] = row["values"][target] >= goal
            if entry["batch"] == engine["decode"][0]["batch"]:
                row["verdicts"] |= {
                    "in graphs": not engine["is_eager"] or not is_gpu,
                    f"weights at most {FIT} of the file's tensors": engine["weight_bytes"]
                    <= FIT * engine["tensor_bytes"],
                }
            rows.append(row)
    return rows


def write(found: Mapping[str, Mapping[str, Any]], shape: Shape, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the record so far; return its rows."""
    rows = rows_of(found, shape, arguments.device.startswith("cuda"))
    engines = {case: {name: value for name, value in one.items() if name != "decode"} for case, one in found.items()}
    settings = {case: {"model": case, "options": one["options"]} for case, one in found.items() if "options" in one}
    facts = {"engines": engines, "engine_settings": settings}
    if rows:
        names = ", ".join(dict.fromkeys(row["model"] for row in rows))
        write_record(
            make_record("gpu-packed-engines", rows, names, "packed dummy weights", arguments, facts),
            "packed-engines",
            arguments,
        )
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [
        (row["measure"], *row["values"].values(), row["milliseconds"], row["percent_of_roof"], row.get("graph_alone"))
        for row in rows
    ]
    print_table("Decode with packed weights", ("", "tokens/s", "ms", "% of roof", "graph alone"), lines)
    for row in rows:
        for words, holds in row["verdicts"].items():
            print(f"{'yes' if holds else 'NO '}  {row['measure']}: {words}")


def main() -> None:
    """Run every case in a process of its own."""
    parser = options("Engines with packed dummy weights")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--folder", type=Path, default=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else FULL
    if arguments.child is not None:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            case, device = arguments.child, arguments.device
            engine = run_engine(case, shape, arguments.tiny, device, Path(folder), arguments.result)
            if arguments.result is not None:
                leave(engine, arguments.result)
        return
    budget, found = Budget(arguments.budget_seconds), {}
    cases = arguments.cases.split(",")
    rehearsals = rehearse(cases, arguments)
    rows: list[dict[str, Any]] = []
    try:
        for child in rehearsals.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(1.0, min(REHEARSAL_SECONDS, budget.left_seconds / 2) - budget.spent_seconds))
    finally:
        for child in rehearsals.values():
            child.kill()
    if rehearsals:
        print(f"[{budget.spent_seconds:.0f} s] kernels are compiled", flush=True)
    for case in cases:
        if budget.left_seconds < MIN_SECONDS:
            print(f"left out for want of time: {case}", flush=True)
            continue

        def tell(engine: Mapping[str, Any], case: str = case) -> None:
            for row in rows_of({case: engine}, shape, arguments.device.startswith("cuda"))[-1:]:
                (rate,) = row["values"].values()
                words = f"{rate:.0f} tokens/s, {row['percent_of_roof']:.0f} % of the roof"
                print(f"[{budget.spent_seconds:.0f} s] {row['measure']}: {words}", flush=True)

        found[case] = run_child(command_of(case, arguments), budget.left_seconds, on_keep=tell)
        print(
            f"[{budget.spent_seconds:.0f} s] {case}: {found[case].get('error') or found[case].get('packed')}",
            flush=True,
        )
        rows = write(found, shape, arguments)
    show(rows)


if __name__ == "__main__":
    main()

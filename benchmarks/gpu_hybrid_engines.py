"""Tokens a second of hybrids, against the memory roof: python benchmarks/gpu_hybrid_engines.py [--cases Qwen3.5-27B:none,...]

One process for each case, a model of the catalogue and a weight scheme, with dummy weights. Decode rates are the difference
of two lengths (benchmarks/gpu_decode.py); every prompt keeps a snapshot of its states, so that both lengths compute one row
of it. The roof is the time to read the weights without the embedding, the KV of the batch, and to read and write its states.
Of experts it counts the distinct ones that a step uses. `--kernels` lists the kernels of one replay of each decode graph, by
time. The record has planned bytes beside measured ones, and allocations after the engine was ready.

On a CPU, to see that it runs: python benchmarks/gpu_hybrid_engines.py --tiny --device cpu
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from distinct_experts import count_experts, distinct_of, shown_experts
from gpu_decode import READ_BYTES_PER_SECOND, decode_rate, mean_context
from gpu_quantized import Shape, StepBytes, generate, read_weights, time_batch
from gpu_records import Budget, keep, leave, make_record, options, print_table, run_child, write_record

if TYPE_CHECKING:
    from gpu_engines import OpenEngine

CASES = ("Qwen3.5-27B:none", "Qwen3.5-35B-A3B:none", "Qwen3.5-27B:fp8")
"""Models and weight schemes; none leaves weights as they are."""
SHARES = {("Qwen3.5-27B:none", 1): 86.0, ("Qwen3.5-27B:none", 64): 70.0}
"""Least percent of the roof, by case and batch."""
GOALS = {("Qwen3.5-35B-A3B:none", 1): 380.0}
"""Least tokens a second, by case and batch."""
PLAN_SHARE = 0.001
"""Most difference of measured and planned bytes."""
MIN_SECONDS = 40.0
FULL = Shape(513, (17, 81), 8192, 2, 20, (1, 16, 64))
"""A snapshot lies at the last multiple of 64 of a prompt, one row before its end."""
TINY = Shape(65, (3, 8), 128, 1, 2, (1, 3))
PREFILL_TOKENS, TINY_PREFILL_TOKENS = 8192, 128
SHOWN_KERNELS = 24
"""Kernels of a replay that are printed."""


def run_engine(
    case: str, shape: Shape, prefill_tokens: int, arguments: argparse.Namespace, result: Path | None
) -> dict[str, Any]:
    """Open the engine and run every batch, then long prompts."""
    from gpu_engines import open_engine, prompts

    model, quantization = case.split(":")
    settings: dict[str, Any] = {
        "quantization": quantization,
        "max_model_len": prefill_tokens + shape.lengths[1] + 16,
        "max_num_seqs": max(shape.batches),
        "max_num_batched_tokens": shape.max_num_batched_tokens,
        "state_snapshots": max(shape.batches) + 2,
    }
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        opened = open_engine(model, Path(folder), arguments.tiny, arguments.device, **settings)
        start_seconds = time.perf_counter() - start
        step = read_weights(Path(folder) / model, opened)
    vocab_size, dice, before = opened.runner.vocab_size, Random(0), _allocations(arguments.device)
    memory = opened.llm.memory
    found: dict[str, Any] = {
        "options": settings,
        "start_seconds": start_seconds,
        "step_bytes": step._asdict(),
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "state_bytes": _state_bytes(opened),
        "planned_bytes": memory.planned_bytes,
        "memory": {row.owner: [row.planned_bytes, row.held_bytes] for row in memory.rows},
        "decode": [],
    }
    made = prompts(dice, [shape.prompt_tokens] * max(shape.batches), vocab_size)
    for batch in shape.batches:
        found["decode"].append({"batch": batch, **time_batch(opened, made[:batch], shape)})
        keep(found, result)
    seconds = [generate(opened, prompts(dice, [prefill_tokens], vocab_size), 1) for _ in range(shape.num_repeats + 1)]
    found["prefill"] = {"tokens": prefill_tokens, "seconds": seconds}
    found["allocations"] = _allocations(arguments.device) - before
    found["measured_bytes"] = _measured_bytes(arguments.device)
    keep(found, result)
    for entry in found["decode"] if arguments.kernels else ():  # after the others: a profiler takes memory
        generate(opened, made[: entry["batch"]], shape.lengths[0])
        entry["kernels"] = _kernels(opened, entry["batch"])
        keep(found, result)
    for entry in found["decode"] if step.num_experts else ():
        entry["distinct_experts"] = count_experts(opened, made[: entry["batch"]])
        keep(found, result)
    return found


def _state_bytes(opened: "OpenEngine") -> int:
    """Return the bytes of one sequence's states in all layers."""
    from holdfast.families.state.layer import StateLayer

    states = [layer.attention._states for layer in opened.decoder.layers if isinstance(layer.attention, StateLayer)]
    return sum(tensor[0].nbytes for state in states for tensor in state)


def _allocations(device: str) -> int:
    """Return how many allocations torch has made on the GPU."""
    import torch

    return torch.cuda.memory_stats()["allocation.all.allocated"] if device.startswith("cuda") else 0


def _measured_bytes(device: str) -> int | None:
    """Return the GPU's used bytes; None without one."""
    import torch

    if not device.startswith("cuda"):
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def _kernels(opened: "OpenEngine", batch: int) -> list[tuple[str, int, float]]:
    """Return the kernels of one replay of the decode graph: name, launches, and microseconds in all; the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    runner = opened.runner
    size = runner.graphs.size_for(batch, batch, True) if runner.graphs is not None else None
    if runner.graphs is None or runner.stream is None or size is None:
        return []
    with torch.cuda.stream(runner.stream), profile(activities=[ProfilerActivity.CUDA]) as found:
        runner.graphs.replay(size, True)
        runner.stream.synchronize()
    rows = [(event.key, event.count, event.self_device_time_total) for event in found.key_averages()]
    return sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])


# --- in the parent process


def rows_of(found: Mapping[str, Mapping[str, Any]], shape: Shape, is_gpu: bool) -> list[dict[str, Any]]:
    """Return a row for each case and batch, and one for its long prompts."""
    rows = []
    for case, engine in found.items():
        model, quantization = case.split(":")
        step = StepBytes(**engine["step_bytes"]) if "step_bytes" in engine else None
        for entry in engine.get("decode", ()) if step is not None else ():
            assert step is not None, "an engine with figures has bytes"
            batch, context = entry["batch"], mean_context(shape.prompt_tokens, shape.lengths)
            seconds = {int(length): runs for length, runs in entry["seconds"].items()}
            rate = decode_rate(batch, shape.lengths, seconds)
            distinct = distinct_of(entry, step.num_experts, step.top_k)
            moved = batch * (context * engine["kv_bytes_per_token"] + 2 * engine["state_bytes"])
            roof = batch * READ_BYTES_PER_SECOND / (step.of(distinct["measured"]) + moved)
            row: dict[str, Any] = {
                "measure": f"{case}, batch {batch}",
                "unit": "tokens/s",
                "values": {quantization: round(rate, 2)},
                "model": model,
                "batch": batch,
                "milliseconds": round(1000 * batch / rate, 3),
                "roof": round(roof, 2),
                "percent_of_roof": round(100 * rate / roof, 1),
                "verdicts": {},
            }
            if "graph_seconds" in entry:
                row["graph_alone"] = round(batch / entry["graph_seconds"], 2)
            if step.num_experts:
                row["distinct_experts"] = distinct
            if is_gpu and (case, batch) in SHARES:
                least = SHARES[case, batch]
                row["verdicts"][f">= {least:g} % of the roof"] = row["percent_of_roof"] >= least
            if is_gpu and (case, batch) in GOALS:
                row["verdicts"][f">= {GOALS[case, batch]:g} tokens/s"] = rate >= GOALS[case, batch]
            rows.append(row)
        if "prefill" in engine:
            rows.append(_prefill_row(case, engine, is_gpu))
    return rows


def _prefill_row(case: str, engine: Mapping[str, Any], is_gpu: bool) -> dict[str, Any]:
    """Return the rate of long prompts, and what holds at the end of the run."""
    prefill, (model, quantization) = engine["prefill"], case.split(":")
    row: dict[str, Any] = {
        "measure": f"{case}, prefill of {prefill['tokens']}",
        "unit": "tokens/s",
        "values": {quantization: round(prefill["tokens"] / min(prefill["seconds"][1:]), 1)},
        "model": model,
        "verdicts": {"no allocation after ready": engine["allocations"] == 0},
    }
    if is_gpu:
        share = engine["measured_bytes"] / engine["planned_bytes"] - 1
        row["verdicts"][f"measured within {PLAN_SHARE:.1%} of the plan ({share:+.3%})"] = abs(share) <= PLAN_SHARE
    return row


def show(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> None:
    names = ("milliseconds", "percent_of_roof", "roof", "graph_alone")
    lines = [
        (
            row["measure"],
            *row["values"].values(),
            *(row.get(name) for name in names),
            shown_experts(row.get("distinct_experts")),
        )
        for row in rows
    ]
    print_table("Hybrids", ("", "tokens/s", "ms", "% of roof", "roof", "graph alone", "experts"), lines)
    for row in rows:
        for words, holds in row["verdicts"].items():
            print(f"{'yes' if holds else 'NO '}  {row['measure']}: {words}")
    for case, engine in found.items():
        for entry in engine.get("decode", ()):
            if entry.get("kernels"):
                title = f"Kernels of a step, {case}, batch {entry['batch']}"
                shown = [(name[:90], count, micros / count, micros) for name, count, micros in entry["kernels"]]
                print_table(title, ("", "launches", "us", "us in all"), shown[:SHOWN_KERNELS])


def write(found: Mapping[str, Mapping[str, Any]], shape: Shape, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the record so far; return its rows."""
    rows = rows_of(found, shape, arguments.device.startswith("cuda"))
    facts = {
        "context": f"{shape.prompt_tokens} tokens of prompt, then {shape.lengths[0]} to {shape.lengths[1]} of output",
        "read_bytes_per_second": READ_BYTES_PER_SECOND,
        "engines": {case: {key: one[key] for key in one if key != "decode"} for case, one in found.items()},
        "engine_settings": {
            case: {"model": case.split(":")[0], "options": one["options"]}
            for case, one in found.items()
            if "options" in one
        },
    }
    if rows:
        names = ", ".join(dict.fromkeys(row["model"] for row in rows))
        record = make_record("gpu-hybrid-engines", rows, names, "dummy weights", arguments, facts)
        write_record(record, "hybrid-engines", arguments)
    return rows


def main() -> None:
    """Run every case in a process of its own."""
    parser = options("Engines of hybrids with dummy weights")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--batches", default="", help="such as 1,64")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a decode step")
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else FULL
    if arguments.batches:
        shape = shape._replace(batches=tuple(int(batch) for batch in arguments.batches.split(",")))
    prefill_tokens = TINY_PREFILL_TOKENS if arguments.tiny else PREFILL_TOKENS
    if arguments.child is not None:
        engine = run_engine(arguments.child, shape, prefill_tokens, arguments, arguments.result)
        leave(engine, arguments.result)
        return
    budget, found = Budget(arguments.budget_seconds), {}
    rows: list[dict[str, Any]] = []
    for case in arguments.cases.split(","):
        if budget.left_seconds < MIN_SECONDS:
            print(f"left out for want of time: {case}", flush=True)
            continue
        command = [__file__, "--child", case, "--device", arguments.device, "--batches", arguments.batches]
        command += [flag for flag in ("--tiny", "--kernels") if getattr(arguments, flag[2:])]
        found[case] = run_child(command, budget.left_seconds)
        words = found[case].get("error") or f"started in {found[case].get('start_seconds', 0):.1f} s"
        print(f"[{budget.spent_seconds:.0f} s] {case}: {words}", flush=True)
        rows = write(found, shape, arguments)
    show(rows, found)


if __name__ == "__main__":
    main()

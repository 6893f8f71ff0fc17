"""Engines on 1, 2 and 4 ranks, all on one GPU under MPS: python benchmarks/gpu_ranks.py

Qwen3-32B's shapes with fewer layers, dummy weights, bfloat16, sums in graphs. Each part is a process with a limit of its own:

    exact   batch_invariant: tokens of 2 and 4 ranks equal those of one, greedy and sampled
    reduce  every rank's own argmax equals what rank 0 chose; then 1,000 steps in which no rank's allocator does anything,
            and what was planned against what was taken

What a rank takes of a GPU that it shares: what torch's allocator has reserved in it, its symmetric memory, and an equal part of what the
device has lost besides (contexts, code, graphs), so that all ranks together are what the device says. All ranks are on one GPU: tokens a
second say what exchanges and processes cost, and nothing about the speed of several GPUs.

On a CPU, to see that it runs: python benchmarks/gpu_ranks.py --tiny --device cpu
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from counted_rank import COUNT_FILE, FOLDER, device_counts
from dummy_models import tiny_settings, write_dummy_model
from gpu_records import Budget, keep, leave, make_record, options, print_table, run_child, used_bytes, write_record
from mps import OVERLAP, mps

MODEL = "Qwen3-32B"
MODES = ("exact", "reduce")
RANKS = (1, 2, 4)
PARTS = (("exact", 1), ("exact", 2), ("exact", 4), ("reduce", 2), ("reduce", 4), ("reduce", 1))
PART_SECONDS = 60.0
MIN_SECONDS = 12.0
MAX_PERCENT = 1.0
PROGRAM = Path(__file__).parent / "counted_rank.py"


class Shape(NamedTuple):
    """How much is run."""

    num_layers: int = 4
    num_prompts: int = 8
    num_tokens: int = 64
    num_steps: int = 1000
    max_model_len: int = 1024
    max_num_batched_tokens: int = 1024
    kv_cache_memory: str = "512MiB"


FULL, TINY = Shape(), Shape(2, 3, 6, 20, 64, 64, "4MiB")


# --- in the process of a part


def run_part(mode: str, num_ranks: int, tiny: bool, device: str, result: Path) -> dict[str, Any]:
    """One engine: its tokens, its speed, and with several ranks what each of them counted."""
    import holdfast.engine.build as engine_build
    from holdfast.api.llm import LLM

    shape, before = TINY if tiny else FULL, used_bytes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[FOLDER] = name
        settings = tiny_settings(MODEL) if tiny else {}
        path = write_dummy_model(folder, MODEL, **settings, **({} if tiny else {"num_hidden_layers": shape.num_layers}))
        kept, build_ranks, command = [], engine_build.build_ranks, (sys.executable, "-P", str(PROGRAM))

        def build_counted(*told: Any, **named: Any) -> Any:  # noqa: ANN401 handed on as it is
            kept.append(build_ranks(*told, command=command, **named))
            return kept[0]

        engine_build.build_ranks = build_counted
        begin = time.perf_counter()
        llm = LLM(
            *(str(path),),
            load_format="dummy",
            device=device,
            tensor_parallel_size=num_ranks,
            tensor_parallel_sums=mode,
            batch_invariant=mode == "exact",
            max_model_len=shape.max_model_len,
            max_num_seqs=max(8, shape.num_prompts),
            max_num_batched_tokens=shape.max_num_batched_tokens,
            kv_cache_memory=shape.kv_cache_memory,
            on_progress=lambda done, total: None,
        )
        found: dict[str, Any] = {"start_seconds": round(time.perf_counter() - begin, 1)}
        keep(found, result)
        with llm:
            found |= look_at(llm, folder, num_ranks, before, symmetric_bytes(kept[0].built.plan) if kept else 0)
            keep(found, result)
            found |= {"tokens": answers(llm, shape, 0, shape.num_tokens, has_sampled=mode == "exact")}
            keep(found, result)
            found |= speed(llm, shape)
            keep(found, result)
            if mode == "reduce":
                found |= steady(llm, folder, shape, num_ranks)
    return found


def answers(
    llm: Any,  # noqa: ANN401 imported late, with torch
    shape: Shape,
    seed: int,
    num_tokens: int,
    *,
    has_sampled: bool = False,
) -> list[list[int]]:
    """Of prompts that follow from the seed; greedy, or every third of them sampled."""
    from holdfast.request.sampling_params import SamplingParams

    dice = Random(seed)
    most = max(2, shape.max_model_len // 4)
    prompts = [
        {"prompt_token_ids": [dice.randrange(250) for _ in range(dice.randint(1, most))]}
        for _ in range(shape.num_prompts)
    ]
    params = [
        SamplingParams(
            temperature=0.8 if has_sampled and nth % 3 == 2 else 0.0, seed=nth, max_tokens=num_tokens, ignore_eos=True
        )
        for nth in range(shape.num_prompts)
    ]
    outputs = llm.generate(prompts, params, progress=False)
    errors = [str(output.error) for output in outputs if output.error is not None]
    assert not errors, errors[0]
    return [list(output.outputs[0].token_ids) for output in outputs]


def speed(llm: Any, shape: Shape) -> dict[str, Any]:  # noqa: ANN401
    """Tokens a second of all prompts together, prompts included; and of one alone."""
    begin = time.perf_counter()
    answers(llm, shape, seed=1, num_tokens=shape.num_tokens)
    together = time.perf_counter() - begin
    begin = time.perf_counter()
    answers(llm, shape._replace(num_prompts=1), seed=2, num_tokens=shape.num_tokens)
    alone = time.perf_counter() - begin
    return {
        "tokens_per_second": round(shape.num_prompts * shape.num_tokens / together, 1),
        "tokens_per_second_of_one": round(shape.num_tokens / alone, 1),
    }


def steady(llm: Any, folder: Path, shape: Shape, num_ranks: int) -> dict[str, Any]:  # noqa: ANN401
    """Many steps, and what every rank's allocator did in them."""
    (folder / COUNT_FILE).touch()
    answers(llm, shape, seed=3, num_tokens=2)  # whatever a rank still does once is behind it
    before, at_first = device_counts(), rank_files(folder, num_ranks)
    most = shape.max_model_len // 2
    left, seed = shape.num_steps, 4
    while left > 0:
        answers(llm, shape, seed, num_tokens=min(most, left))
        left, seed = left - most, seed + 1
    after, at_last = device_counts(), rank_files(folder, num_ranks)
    grown = {0: {key: after[key] - before[key] for key in after}}
    for rank in range(1, num_ranks):
        grown[rank] = {key: at_last[rank][key] - at_first[rank][key] for key in after}
        grown[rank]["steps"] = at_last[rank]["counted_steps"] - at_first[rank]["counted_steps"]
    kept = ("compared", "different", "misses")
    return {"grown": grown, "own": {rank: {key: told[key] for key in kept} for rank, told in at_first.items()}}


def rank_files(folder: Path, num_ranks: int) -> dict[int, dict[str, Any]]:
    """What other ranks have left, once they have had the time to."""
    time.sleep(0.3)
    return {rank: json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(1, num_ranks)}


def look_at(
    llm: Any,  # noqa: ANN401
    folder: Path,
    num_ranks: int,
    before: int | None,
    symmetric: int,
) -> dict[str, Any]:
    """What was planned for each rank, and what each of them took."""
    memory = llm.memory
    planned = {0: memory.phase_bytes["serve"]} | {rank.rank: rank.planned_bytes for rank in memory.ranks}
    rows = {row.owner: row for row in memory.rows}
    found: dict[str, Any] = {"planned_bytes": planned, "owners": sorted(rows)}
    used = used_bytes()
    if used is None or before is None:
        return found
    reserved = {0: device_counts()["reserved_bytes"]}
    reserved |= {rank: told["reserved_bytes"] for rank, told in rank_files(folder, num_ranks).items()}
    others = (used - before - sum(reserved.values()) - num_ranks * symmetric) / num_ranks
    measured = {rank: int(reserved[rank] + symmetric + others) for rank in reserved}
    return found | {
        "measured_bytes": measured,
        "reserved_bytes": reserved,
        "symmetric_bytes": symmetric,
        "context_bytes": int(others),
    }


def symmetric_bytes(plan: Any) -> int:  # noqa: ANN401 a RunnerPlan, imported late
    """Of a rank: the same on each."""
    from holdfast.distributed.exchange_plan import rounding_bytes, shared_specs
    from holdfast.memory.workspace_plan import arena_bytes

    needs, mesh = plan.exchange_needs, plan.mesh
    return arena_bytes(shared_specs(needs, mesh).values()) + rounding_bytes(needs, mesh)


# --- in the process that starts the others


def rows_of(found: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each thing that was to be shown."""
    rows: list[dict[str, Any]] = []
    wanted = found.get(("exact", 1), {}).get("tokens")
    for (mode, size), entry in found.items():
        label = f"{size} ranks, {mode}"
        if "error" in entry:
            rows.append({"measure": label, "unit": "count", "values": {}, "holds": False, "error": entry["error"]})
        if mode == "exact" and size > 1 and "tokens" in entry and wanted is not None:
            both = [
                (a, b)
                for one, other in zip(wanted, entry["tokens"], strict=True)
                for a, b in zip(one, other, strict=True)
            ]
            values = {"compared": len(both), "different": sum(a != b for a, b in both)}
            holds = not values["different"]
            rows.append({"measure": f"{label}: tokens against one", "unit": "count", "values": values, "holds": holds})
        if "own" in entry and size > 1:
            values = {
                f"rank {rank} {key}": told[key]
                for rank, told in entry["own"].items()
                for key in ("compared", "different")
            }
            holds = all(told["compared"] and not told["different"] for told in entry["own"].values())
            words = {rank: told["misses"] for rank, told in entry["own"].items()}
            rows.append(
                {
                    "measure": f"{label}: argmax of each rank",
                    "unit": "count",
                    "values": values,
                    "holds": holds,
                    "misses": words,
                }
            )
        if "grown" in entry:
            values = {
                f"rank {rank} {key}": count for rank, told in entry["grown"].items() for key, count in told.items()
            }
            still = ("allocations", "segments", "reserved_bytes")
            holds = not any(told[key] for told in entry["grown"].values() for key in still)
            rows.append({"measure": f"{label}: after ready", "unit": "count", "values": values, "holds": holds})
        if "measured_bytes" in entry:
            rows.append(memory_row(label, entry))
        if "tokens_per_second" in entry:
            values = {"together": entry["tokens_per_second"], "one alone": entry["tokens_per_second_of_one"]}
            rows.append({"measure": f"{label}: speed on one GPU", "unit": "tokens/s", "values": values})
    return rows


def memory_row(label: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Planned and taken, rank by rank."""
    planned, measured = entry["planned_bytes"], entry["measured_bytes"]
    percents = {rank: round(100 * (measured[rank] - planned[rank]) / planned[rank], 3) for rank in planned}
    values = {
        f"rank {rank} {kind}": told[rank]
        for rank in planned
        for kind, told in (("planned", planned), ("taken", measured))
    }
    facts = {key: entry[key] for key in ("reserved_bytes", "symmetric_bytes", "context_bytes")}
    holds = all(abs(percent) <= MAX_PERCENT for percent in percents.values())
    return {
        "measure": f"{label}: memory",
        "unit": "bytes",
        "values": values,
        "percent": percents,
        "holds": holds,
        **facts,
    }


def chosen_parts(text: str) -> Sequence[tuple[str, int]]:
    """All, or those named as exact-2,reduce-4."""
    if not text:
        return PARTS
    return [(mode, int(size)) for mode, _, size in (part.partition("-") for part in text.split(","))]


def main() -> None:
    """Run what was asked, as far as the time goes."""
    parser = options("Engines on several ranks, all on one GPU")
    parser.add_argument("--parts", default="", help="such as exact-1,exact-2; else all")
    arguments = parser.parse_args()
    if arguments.child is not None:
        mode, _, size = arguments.child.partition("-")
        leave(run_part(mode, int(size), arguments.tiny, arguments.device, arguments.result), arguments.result)
        return
    results, facts, is_shared = measure_all(arguments)
    lines = [
        (row["measure"], json.dumps(row["values"]), str(row.get("percent", "")), row.get("holds", ""))
        for row in results
    ]
    print_table(f"{MODEL}, dummy weights", ("", "", "%", "holds"), lines)
    for row in results:
        for key in ("error", "misses"):
            if row.get(key):
                print(f"{row['measure']}: {row[key]}", file=sys.stderr)
    settings = (
        f"dummy weights, {FULL.num_layers} layers; all ranks on one GPU, {'under MPS' if is_shared else 'taking turns'}"
    )
    write_record(make_record("gpu-ranks", results, MODEL, settings, arguments, facts), "ranks", arguments)


def measure_all(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    """A process for each part, with its limit."""
    budget, found = Budget(min(arguments.budget_seconds, 195.0)), {}
    with mps() if arguments.device.startswith("cuda") else contextlib.nullcontext(OVERLAP) as environment:
        for mode, size in chosen_parts(arguments.parts):
            if budget.left_seconds < MIN_SECONDS:
                print(f"{mode}-{size} is left out: no time")
                continue
            start = budget.spent_seconds
            shared = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
            command = [__file__, "--child", f"{mode}-{size}", *shared]
            limit = min(PART_SECONDS, budget.left_seconds)
            found[mode, size] = numbered(run_child(command, limit, environment=environment or OVERLAP))
            seconds = round(budget.spent_seconds - start, 1)
            told = {"part": f"{mode}-{size}", "seconds": seconds, "error": found[mode, size].get("error")}
            print(json.dumps(told), flush=True)
    facts = {
        "start_seconds": {f"{mode}-{size}": entry.get("start_seconds") for (mode, size), entry in found.items()},
        "measured": "per rank: torch reserved + symmetric memory + an equal part of what else the device lost",
    }
    return rows_of(found), facts, environment is not None


def numbered(entry: dict[str, Any]) -> dict[str, Any]:
    """JSON has made names of the numbers of ranks."""
    kinds = ("planned_bytes", "measured_bytes", "reserved_bytes", "grown", "own")
    return entry | {kind: {int(rank): told for rank, told in entry[kind].items()} for kind in kinds if kind in entry}


if __name__ == "__main__":
    main()

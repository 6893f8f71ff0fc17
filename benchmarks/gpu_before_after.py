"""Decode and prefill speed of two trees side by side: python benchmarks/gpu_before_after.py --tree OLD --tree NEW [--engines NAME,...]

A tree is a folder with a src/ in it: the checkouts of two commits, the old one first. Each engine is built in a fresh process
of either tree in turn, with dummy weights, and runs all of its batches (benchmarks/before_after_case.py, which uses the public
API alone). A rate is the difference of two lengths of output, by the medians of their repeats, after a prompt in the prefix
cache. The record has both rates, and the ratio of new to old.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distinct_experts import shown_experts
from dummy_models import tiny_settings, write_dummy_model
from gpu_records import Budget, make_record, options, print_table, run_child, write_record

CASE_SCRIPT = Path(__file__).parent / "before_after_case.py"
OLD, NEW = "old", "new"
MIN_SECONDS = 20.0
"""Least remaining seconds to start a process."""
MOST_APART = 0.02
"""Tolerance of a rate: closer trees count as equally fast."""


class EngineCase(NamedTuple):
    """A model, its engine settings, and its batches."""

    model: str
    words: str
    options: Mapping[str, Any]
    batches: tuple[int, ...]


ENGINES: Mapping[str, EngineCase] = {
    "0.6b-bf16": EngineCase("Qwen3-0.6B", "bfloat16", {}, (1, 64)),
    "gemma3-1b": EngineCase("gemma-3-1b-it", "bfloat16, two ropes", {}, (1,)),
    "v2-lite": EngineCase("DeepSeek-V2-Lite", "bfloat16", {}, (1,)),
    "32b-bf16": EngineCase("Qwen3-32B", "bfloat16", {}, (1, 64)),
    "32b-k8v4": EngineCase("Qwen3-32B", "k8v4 pages", {"kv_cache_dtype": "turboquant_k8v4"}, (1,)),
    "32b-fp8": EngineCase("Qwen3-32B", "fp8", {"quantization": "fp8"}, (1,)),
    "30b-a3b": EngineCase("Qwen3-30B-A3B", "bfloat16", {}, (1, 64)),
    "30b-a3b-fp8": EngineCase("Qwen3-30B-A3B", "fp8", {"quantization": "fp8"}, (1, 64)),
    "gpt-oss-20b": EngineCase("gpt-oss-20b", "mxfp4", {}, (1, 64)),
}


class Shape(NamedTuple):
    """Size of the run."""

    prompt_tokens: int = 512
    lengths: tuple[int, int] = (17, 217)
    max_num_batched_tokens: int = 8192
    num_repeats: int = 3
    max_batch: int = 64
    prefill_tokens: int = 7992
    """Length of the prompt for the time to the first token."""


FULL = Shape()
TINY = Shape(24, (2, 6), 128, 1, 3, 40)


def task_of(case: EngineCase, folder: Path, shape: Shape, tiny: bool, device: str) -> dict[str, Any]:
    """Return the task of an engine's process."""
    settings = tiny_settings(case.model) if tiny else {}
    path = write_dummy_model(folder, case.model, **settings)
    batches = sorted({min(batch, shape.max_batch) for batch in case.batches})
    return {
        "folder": str(path),
        "options": {
            "device": device,
            "max_model_len": max(shape.prompt_tokens + shape.lengths[1], shape.prefill_tokens) + 1,
            "max_num_seqs": max(batches),
            "max_num_batched_tokens": shape.max_num_batched_tokens,
            **({"kv_cache_memory": "16MiB"} if tiny else {}),
            **case.options,
        },
        "vocab_size": json.loads((path / "config.json").read_text())["vocab_size"],
        "prompt_tokens": shape.prompt_tokens,
        "lengths": list(shape.lengths),
        "batches": batches,
        "num_repeats": shape.num_repeats,
        "prefill_tokens": shape.prefill_tokens,
    }


def run_case(task: Mapping[str, Any], tree: Path, timeout_seconds: float) -> dict[str, Any]:
    """Run a task in a process that imports only this tree's package."""
    source = tree.resolve() / "src"
    command = [str(CASE_SCRIPT), json.dumps(task)]
    found = run_child(command, timeout_seconds, environment={"PYTHONPATH": str(source)})
    package = found.pop("package", None)
    assert package is None or Path(package).is_relative_to(source), f"{package} was run in place of {source}"
    return found


def rate_of(batch: int, seconds: Mapping[str, Sequence[float]]) -> float:
    """Return tokens a second from the difference of the longer and the shorter run."""
    (short, short_runs), (long, long_runs) = sorted((int(length), runs) for length, runs in seconds.items())
    return batch * (long - short) / (statistics.median(long_runs) - statistics.median(short_runs))


def rows_of(case: EngineCase, found: Mapping[str, Mapping[str, Any]], num_prefill_tokens: int) -> list[dict[str, Any]]:
    """Return a row for each batch that both trees ran, and one for the prefill."""
    runs = {
        name: {entry["batch"]: entry["seconds"] for entry in engine.get("decode", ())} for name, engine in found.items()
    }
    counted = {
        (name, entry["batch"]): entry["distinct_experts"]
        for name, engine in found.items()
        for entry in engine.get("decode", ())
        if "distinct_experts" in entry
    }
    rows: list[dict[str, Any]] = []
    for batch, seconds in runs.get(NEW, {}).items():
        if batch in runs.get(OLD, {}):
            both = {NEW: seconds, OLD: runs[OLD][batch]}
            values = {name: round(rate_of(batch, own), 2) for name, own in both.items()}
            rows.append(
                {
                    "measure": f"{case.model}, {case.words}, batch {batch}",
                    "unit": "tokens/s",
                    "values": values,
                    "ratio": round(values[NEW] / values[OLD], 4),
                    "seconds": both,
                }
            )
            if experts := {name: counted[name, batch] for name in both if (name, batch) in counted}:
                rows[-1]["distinct_experts"] = experts
    if all(engine.get("prefill_seconds") for engine in found.values()) and len(found) == 2:
        seconds = {name: engine["prefill_seconds"] for name, engine in found.items()}
        values = {name: round(num_prefill_tokens / statistics.median(own), 1) for name, own in seconds.items()}
        ratio = round(values[NEW] / values[OLD], 4)
        measure = f"{case.model}, {case.words}, prefill of {num_prefill_tokens} tokens"
        rows.append({"measure": measure, "unit": "tokens/s", "values": values, "ratio": ratio, "seconds": seconds})
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table at the end of a run."""
    lines = [
        (
            row["measure"],
            row["values"][OLD],
            row["values"][NEW],
            row["ratio"],
            shown_experts(row.get("distinct_experts", {}).get(NEW)),
        )
        for row in rows
    ]
    print_table("Decode and prefill, tokens/s", ("", OLD, NEW, "new/old", "experts"), lines)
    for row in rows:
        if abs(row["ratio"] - 1) > MOST_APART:
            print(f"more than {MOST_APART:.0%} apart: {row['measure']}")


def measure_all(
    trees: Mapping[str, Path], shape: Shape, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure all engines while time allows; return their rows and other findings."""
    budget = Budget(arguments.budget_seconds)
    rows: list[dict[str, Any]] = []
    engines: dict[str, Any] = {}
    for key in arguments.engines.split(","):
        case, found = ENGINES[key], {}
        for name, tree in trees.items():
            if budget.left_seconds < MIN_SECONDS:
                print(f"{key} of the {name} tree is left out: no time")
                continue
            with tempfile.TemporaryDirectory() as folder:
                task = task_of(case, Path(folder), shape, arguments.tiny, arguments.device)
                found[name] = run_case(task, tree, budget.left_seconds)
            facts = {fact: value for fact, value in found[name].items() if fact != "decode"}
            engines.setdefault(key, {})[name] = facts
            print(json.dumps({"engine": key, "tree": name, **facts}))
            sys.stdout.flush()
        rows += rows_of(case, found, shape.prefill_tokens)
    return rows, engines


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = options("Decode and prefill speed of two trees side by side")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="twice: the old one, then the new one")
    parser.add_argument("--old-commit", default=None, help="what the old tree is of; --commit names the new one's")
    parser.add_argument("--engines", default=",".join(ENGINES), help="some of these")
    arguments = parser.parse_args(argv)
    if len(arguments.tree) != 2:
        parser.error(f"--tree was given {len(arguments.tree)} times; an old and a new tree are needed; name both")
    for tree in arguments.tree:
        if not (tree / "src" / "holdfast").is_dir():
            parser.error(f"--tree {tree} has no src/holdfast; name the root of a checkout")
    if unknown := set(arguments.engines.split(",")) - ENGINES.keys():
        parser.error(f"unknown --engines {', '.join(sorted(unknown))}; choose from {', '.join(ENGINES)}")
    return arguments


def main() -> None:
    """Run the requested parts while time allows."""
    arguments = parse()
    shape = TINY if arguments.tiny else FULL
    rows, engines = measure_all(dict(zip((OLD, NEW), arguments.tree, strict=True)), shape, arguments)
    if not rows:
        sys.exit("error: no engine ran on both trees; see above")
    facts = {
        "context": f"{shape.prompt_tokens} tokens of prompt, then {shape.lengths[0]} to {shape.lengths[1]} of output",
        "old_commit": arguments.old_commit,
        "engines": engines,
    }
    models = ", ".join(dict.fromkeys(ENGINES[key].model for key in arguments.engines.split(",")))
    record = make_record("gpu-before-after", rows, models, "dummy weights, public API", arguments, facts)
    show(rows)
    write_record(record, "before-after", arguments)


if __name__ == "__main__":
    main()

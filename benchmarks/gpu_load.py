"""Loading of weights: peaks against the plan, and GB/s: python benchmarks/gpu_load.py [--models A,B] [--schemes fp8,bfloat16]

A bfloat16 checkpoint with a model's shapes, experts separate, is written to --folder in shuffled order over several files
and read once into the page cache. Each scheme then loads it in its own process, like the engine. If a model does not fit on
the disk, or would take too long to write, it is loaded with dummy weights instead, and its row says so. Its plan is compared
with that of the same checkpoint as headers alone. The smallest model is also started from its quantized cache. The cheapest
comes first, and the record is rewritten after every case.

    allocated     peak of live tensors, counted by torch
    reserved      peak of torch's allocator
    used          peak of the device by the driver, sampled every 2 ms
    host          peak of resident anonymous memory (with the pinned chunks) above that before the load
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints import Checkpoint, model_bytes, read_seconds, write_checkpoint
from dummy_models import tiny_settings
from gpu_records import Budget, leave, make_record, options, print_table, run_child, write_record

MIB = 2**20
MODELS = ("Qwen3-8B", "Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B")
DUMMY_MODEL = "Qwen3-32B"
"""Models always loaded with dummy weights."""
SCHEMES = ("fp8", "bfloat16")
MAX_OVER_BYTES = 64 * MIB
"""Limit on device memory beyond the final weights."""
MAX_ERROR_BYTES = MIB
"""Tolerance between the predicted and the measured peak of live tensors."""
MIN_BYTES_PER_SECOND = 25e9
MAX_HOST_BYTES = 256 * MIB
MAX_CACHE_SHARE = 0.6
"""Goal of a start from the cache, by bytes of the source."""
SPARE_DISK_BYTES = 2 * 2**30
"""Left free on the disk."""
MIN_SECONDS = 15.0
"""Least remaining seconds to start a process."""
SECONDS_AFTER_WRITING = 60.0
"""Seconds kept for loading the written checkpoints."""
RunCase = Callable[[Mapping[str, Any], float], dict[str, Any]]
"""Runs a case, given the remaining seconds."""


class Stage(NamedTuple):
    """A model on the disk: whole, or only its headers, with the reason."""

    checkpoint: Checkpoint
    facts: dict[str, Any]
    is_whole: bool


# --- checkpoints


def prepare(folder: Path, model: str, arguments: argparse.Namespace, budget: Budget) -> Stage:
    """Write a model, and read it until it is in the page cache."""
    settings = tiny_settings(model) if arguments.tiny else {}
    num_bytes, made = model_bytes(folder, model, **settings), {"num_files": arguments.files, **settings}
    facts: dict[str, Any] = {"bytes": num_bytes}
    reason = no_room(folder, num_bytes, arguments.max_bytes)
    if reason is None:
        stop_at = time.monotonic() + budget.left_seconds - min(SECONDS_AFTER_WRITING, budget.left_seconds / 2)
        try:
            checkpoint = write_checkpoint(folder, model, stop_at=stop_at, **made)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            facts |= {"num_tensors": checkpoint.num_tensors, "num_files": checkpoint.num_files}
            facts |= {"write_seconds": round(checkpoint.seconds, 2), **warm(checkpoint)}
            return Stage(checkpoint, facts, True)
    shutil.rmtree(folder / model)
    headers = write_checkpoint(folder, model, headers_only=True, **made)
    return Stage(headers, {**facts, "not_written": reason}, False)


def no_room(folder: Path, num_bytes: int, max_bytes: float) -> str | None:
    """Return why a checkpoint of this size is not written, or None."""
    if num_bytes > max_bytes:
        return f"it has {num_bytes / 1e9:.1f} GB, and {max_bytes / 1e9:.1f} were allowed"
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes + SPARE_DISK_BYTES > free_bytes:
        return f"it has {num_bytes / 1e9:.1f} GB, and the disk has {free_bytes / 1e9:.1f} left"
    return None


def warm(checkpoint: Checkpoint) -> dict[str, float]:
    """Return GB/s of plain reads; the first may come from the disk."""
    first, again = (read_seconds(checkpoint.path) for _ in range(2))
    rates = {"first_read_gb_per_second": first, "warm_read_gb_per_second": again}
    return {name: round(checkpoint.num_bytes / seconds / 1e9, 2) for name, seconds in rates.items()}


# --- findings


def finding(case: Mapping[str, Any], words: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return one row of the record."""
    row: dict[str, Any] = {"measure": words, "unit": "GB/s", "values": {"holdfast": 0.0}}
    row |= {name: case[name] for name in ("model", "scheme", "load_format")}
    loads = found.get("loads", [])
    if not loads:
        return {**row, "error": found.get("error", "it found nothing")}
    best = min(loads, key=lambda load: load["seconds"])
    last = next((load for load in reversed(loads) if "host" in load), loads[-1])
    rate = best["read_bytes"] / best["seconds"] / 1e9
    row["values"] = {"holdfast": round(rate, 2)}
    row |= {name: best[name] for name in ("read_bytes", "source_bytes", "num_weights", "num_quantized", "num_moves")}
    row["seconds"] = [round(load["seconds"], 3) for load in loads]
    row["plan_seconds"] = round(min(load["plan_seconds"] for load in loads), 3)
    row["gb_per_second_of_each"] = {
        part: round(best["read_bytes"] / best[f"{part}_seconds"] / 1e9, 1)
        for part in ("read", "copy", "place")
        if best[f"{part}_seconds"]
    }
    row["num_readers"] = best["num_readers"]
    row |= {name: best[name] for name in ("predicted_final", "predicted_peak", "predicted_host", "pinned_bytes")}
    row |= device_bytes(loads)
    row["host"] = {"first load": loads[0].get("host"), "second load": last.get("host")}
    row["host_with_plan"] = last.get("host_with_plan")
    row["host_left"] = last["host_left"]
    row |= {name: found[name] for name in ("same_plan", "error") if name in found}
    return row


def device_bytes(loads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the highest peaks of all loads, and the most above a load's own final bytes; empty on a CPU."""
    seen = [load for load in loads if "peak" in load]
    if not seen:
        return {}
    names = [name for name in ("allocated", "reserved", "used") if any(name in load["peak"] for load in seen)]
    return {
        "peak": {name: max(load["peak"][name] for load in seen if name in load["peak"]) for name in names},
        "final": {name: max(load["final"][name] for load in seen) for name in names},
        "over_final": {
            name: max(load["peak"][name] - load["final"][name] for load in seen if name in load["peak"])
            for name in names
        },
        "left": {name: max(load["left"][name] for load in seen) for name in names},
    }


def verdicts(row: Mapping[str, Any]) -> dict[str, bool]:
    """Return the goals and whether they are met, without unmeasured ones."""
    found: dict[str, bool] = {}
    for name, over in row.get("over_final", {}).items():
        found[f"peak - final <= 64 MiB, {name}"] = over <= MAX_OVER_BYTES
    if "peak" in row:
        error = abs(row["peak"]["allocated"] - row["predicted_peak"])
        found["|predicted - measured allocated| <= 1 MiB"] = error <= MAX_ERROR_BYTES
        host = row["host"]["second load"] or row["host"]["first load"]
        if host is not None:
            found["host <= 256 MiB"] = host["RssAnon"] <= MAX_HOST_BYTES
        if row["load_format"] != "dummy" and "read_share" not in row:
            found[">= 25 GB/s"] = row["values"]["holdfast"] * 1e9 >= MIN_BYTES_PER_SECOND
    if "same_plan" in row:
        found["the plan is that of the checkpoint"] = all(row["same_plan"].values())
    if "read_share" in row:
        found["cache bytes <= 0.6 x"] = row["read_share"] <= MAX_CACHE_SHARE
        found["the same weights from the cache"] = row["same_weights"]
    return found


def cache_row(row: dict[str, Any], saved: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a start from the cache, with the cost of the start that filled it."""
    first, second = (found.get("loads", []) for found in (saved, again))
    if not first or not second:
        return {**row, "error": str(saved.get("error") or again.get("error") or "it found nothing")}
    if not all(load["is_from_cache"] for load in second):
        return {**row, "error": "the second start did not find what the first one kept"}
    return {
        **row,
        "source_gb_per_second": round(second[0]["source_bytes"] / min(row["seconds"]) / 1e9, 2),
        "read_share": round(second[0]["read_bytes"] / second[0]["source_bytes"], 4),
        "same_weights": {load["fingerprint"] for load in (*first, *second)} == {first[0]["fingerprint"]},
        "seconds_without_cache": round(first[0]["seconds"], 3),
        "save_seconds": round(first[0]["seconds_with_cache"] - first[0]["seconds"], 3),
        "plan_seconds_first": round(first[0]["plan_seconds"], 3),
    }


# --- in the parent process


class Run:
    """Runs cases in turn and keeps the record so far."""

    def __init__(self, arguments: argparse.Namespace, budget: Budget, run_case: RunCase) -> None:
        self._arguments = arguments
        self._budget = budget
        self._run_case = run_case
        self.results: list[dict[str, Any]] = []
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.left_out: list[str] = []

    def all(self, folder: Path) -> None:
        """Run everything requested."""
        arguments = self._arguments
        if arguments.dummy:
            made = tiny_settings(arguments.dummy) if arguments.tiny else {}
            headers = write_checkpoint(folder, arguments.dummy, arguments.files, headers_only=True, **made)
            self.checkpoints[arguments.dummy] = {"bytes": headers.num_bytes, "not_written": "headers only"}
            self._load_made_up(arguments.dummy, arguments.schemes[:1], headers.path)
            shutil.rmtree(headers.path)
        sizes = {model: self._size(folder, model) for model in arguments.models}
        for model in sorted(sizes, key=lambda model: sizes[model]):
            if not self._has_time(model):
                continue
            stage = prepare(folder, model, arguments, self._budget)
            self.checkpoints[model] = stage.facts
            path = stage.checkpoint.path
            if stage.is_whole:
                for scheme in arguments.schemes:
                    self._load({"model": model, "scheme": scheme, "path": str(path), "load_format": "auto"})
                if model == arguments.cache_model:
                    self._start_again(model, path, folder / "cache")
            else:
                self._load_made_up(model, arguments.schemes, path)
            shutil.rmtree(path)

    def _size(self, folder: Path, model: str) -> int:
        return model_bytes(folder, model, **(tiny_settings(model) if self._arguments.tiny else {}))

    def _has_time(self, words: str) -> bool:
        if self._budget.left_seconds >= MIN_SECONDS:
            return True
        self.left_out.append(words)
        print(f"{words} is left out: no time")
        return False

    def _load_made_up(self, model: str, schemes: Sequence[str], headers: Path) -> None:
        for scheme in schemes:
            case = {"model": model, "scheme": scheme, "path": str(headers), "load_format": "dummy"}
            self._load({**case, "headers": str(headers)}, ", dummy weights")

    def _load(self, case: dict[str, Any], more: str = "") -> None:
        words = f"{case['model']}, {case['scheme']}{more}"
        if self._has_time(words):
            self._add(finding(case, words, self._run_case(case, self._budget.left_seconds)))

    def _start_again(self, model: str, path: Path, cache: Path) -> None:
        """Fill the cache in one process, and start from it in the next."""
        scheme = next((scheme for scheme in self._arguments.schemes if scheme != "bfloat16"), None)
        words = f"{model}, {scheme}, from the cache"
        if scheme is None or not self._has_time(words):
            return
        cache.mkdir(mode=0o700)
        case = {"model": model, "scheme": scheme, "path": str(path), "load_format": "auto", "cache": str(cache)}
        saved = self._run_case({**case, "num_loads": 1}, self._budget.left_seconds)
        again = self._run_case(case, self._budget.left_seconds) if "error" not in saved else {}
        self._add(cache_row(finding(case, words, again), saved, again))
        shutil.rmtree(cache)

    def _add(self, row: dict[str, Any]) -> None:
        self.results.append({**row, "verdicts": verdicts(row)})
        facts = {name: row.get(name) for name in ("measure", "values", "seconds", "over_final", "error")}
        print(json.dumps({**facts, "verdicts": self.results[-1]["verdicts"]}))
        sys.stdout.flush()
        self.write()

    def write(self) -> None:
        """Rewrite the record after every case."""
        arguments = self._arguments
        facts = {
            "checkpoints": self.checkpoints,
            "left_out": self.left_out,
            "limits": {"over_final": MAX_OVER_BYTES, "host": MAX_HOST_BYTES, "cache_share": MAX_CACHE_SHARE},
        }
        words = f"bfloat16 checkpoints in shuffled order over {arguments.files} files, page cache warm"
        names = ", ".join(dict.fromkeys(row["model"] for row in self.results))
        write_record(make_record("gpu-load", self.results, names, words, arguments, facts), "load", arguments)


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables at the end of a run."""
    columns = ("", "GB/s", "seconds", "first", "read", "copy", "place", "final GiB", "over: allocated", "reserved")
    columns = (*columns, "used, MiB", "plan error", "host MiB")
    lines = []
    for row in results:
        if "seconds" not in row:
            lines.append((f"{row['measure']}: {row.get('error', '')}"[:90], *[None] * (len(columns) - 1)))
            continue
        over, of_each = row.get("over_final", {}), row["gb_per_second_of_each"]
        host = row["host"]["second load"] or row["host"]["first load"] or {}
        lines.append(
            (
                row["measure"],
                row["values"]["holdfast"],
                min(row["seconds"]),
                row["seconds"][0],
                *(of_each.get(part) for part in ("read", "copy", "place")),
                row["predicted_final"] / 2**30,
                *(over[name] / MIB if name in over else None for name in ("allocated", "reserved", "used")),
                (row["peak"]["allocated"] - row["predicted_peak"]) / MIB if "peak" in row else None,
                host["RssAnon"] / MIB if host else None,
            )
        )
    print_table("Loads", columns, lines)
    for row in results:
        for words, holds in row["verdicts"].items():
            print(f"{'yes' if holds else 'NO '}  {row['measure']}: {words}")


def run_in_child(arguments: argparse.Namespace) -> RunCase:
    """Run cases in their own processes."""

    def run(case: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        return run_child([sys.argv[0], "--device", arguments.device, "--child", json.dumps(case)], seconds)

    return run


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = options("How weights arrive: peaks against the plan, and GB/s")
    parser.add_argument("--models", default=",".join(MODELS), help="models of the catalogue")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="bfloat16 leaves weights as they are")
    parser.add_argument(
        "--dummy", default=DUMMY_MODEL, help="a model to load with dummy weights; none with an empty one"
    )
    parser.add_argument("--cache-model", default=MODELS[0], help="the model that also starts from the quantized cache")
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints are written; else a temporary one")
    parser.add_argument("--files", type=int, default=4, help="of a checkpoint")
    parser.add_argument("--max-bytes", type=float, default=float("inf"), help="larger checkpoints are not written")
    arguments = parser.parse_args(argv)
    arguments.models = tuple(arguments.models.split(",")) if arguments.models else ()
    arguments.schemes = tuple(arguments.schemes.split(","))
    return arguments


def main() -> None:
    """Run the requested parts while time allows."""
    arguments = parse()
    if arguments.child is not None:
        from load_case import Case, run_case

        found = run_case(Case(**json.loads(arguments.child)), arguments.device, arguments.result)
        leave(found, arguments.result)
        return
    run = Run(arguments, Budget(arguments.budget_seconds), run_in_child(arguments))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run.all(Path(folder))
    if not run.results:
        sys.exit("error: no load ran; see above")
    show(run.results)


if __name__ == "__main__":
    main()

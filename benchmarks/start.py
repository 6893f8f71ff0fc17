"""Time of a start by phase, from the shell to the first token of the default model: python benchmarks/start.py

Each start is a fresh process that runs `holdfast run -p Hi --max-tokens 1 --json`; one more before them compiles kernels and
fills the page cache. The best start is printed phase by phase, in wall time and CPU time; CPU time is more
reliable on a shared machine. `--out FOLDER` writes the record there.
"""

import argparse
import contextlib
import datetime
import functools
import gc
import importlib
import io
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from holdfast import __version__
from holdfast.cli.bench_record import cpu_name

ROOT = Path(__file__).parent.parent
COMMAND = ("run", "-p", "Hi", "--max-tokens", "1", "--json")
IMPORTS = (
    ("import the command line", "holdfast.cli.run"),
    ("import torch", "torch"),
    ("import the engine", "holdfast.engine.build"),
)
CALLS = (
    ("read headers", "holdfast.loading.model_files", "open_gguf"),
    ("tokenizer", "holdfast.engine.open_text", "open_tokenizer"),
    ("plan", "holdfast.runner.build", "plan_model"),
    ("load weights", "holdfast.runner.build", "RunnerBuild.load"),
    ("take memory", "holdfast.runner.build", "RunnerBuild.assemble"),
    ("prefill and first token", "holdfast.runner.runner", "Runner.collect"),
)
"""Phases after the imports, by function."""
Phases = dict[str, dict[str, float]]


def main() -> None:
    """Start several times, print the best start, and record it if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--child", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        sys.stdout.write(json.dumps(run_phases(options.child)))
        return
    starts = [start_once() for _ in range(options.repeats + 1)][1:]
    record = make_record(starts, options.commit)
    for result in record["results"]:
        print(
            f"{result['measure']:<26} {result['values']['seconds']:7.3f} s {result['values']['processor seconds']:7.3f} s"
        )
    if options.out is not None:
        path = options.out / f"cpu-{record['date']}-start.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path)


def start_once() -> Phases:
    """Run one fresh process; its clock starts here, before Python does."""
    command = [sys.executable, str(Path(__file__)), "--child", repr(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])


def run_phases(started: float) -> Phases:
    """Run in the started process: return wall and CPU seconds of every phase."""
    phases: Phases = {"start Python": {"seconds": time.monotonic() - started, "processor seconds": time.process_time()}}
    for name, module in IMPORTS:
        with timed(phases, name):
            importlib.import_module(module)
        gc.disable()  # like a command that opens a model
    gc.enable()
    for name, module, path in CALLS:
        owner: Any = importlib.import_module(module)
        *holders, attribute = path.split(".")
        for holder in holders:
            owner = getattr(owner, holder)
        setattr(owner, attribute, wrapped(phases, name, getattr(owner, attribute)))
    from holdfast.cli.app import run

    with contextlib.redirect_stdout(io.StringIO()):
        code = run(list(COMMAND))
    assert code == 0, f"holdfast {' '.join(COMMAND)} ended with {code}"
    whole = {"seconds": time.monotonic() - started, "processor seconds": time.process_time()}
    rest = {unit: whole[unit] - sum(phase[unit] for phase in phases.values()) for unit in whole}
    return {**phases, "the rest": rest, "all of it": whole}


@contextlib.contextmanager
def timed(phases: Phases, name: str) -> Iterator[None]:
    """Add the time of the block to a phase."""
    seconds, processor = time.monotonic(), time.process_time()
    try:
        yield
    finally:
        found = phases.setdefault(name, {"seconds": 0.0, "processor seconds": 0.0})
        found["seconds"] += time.monotonic() - seconds
        found["processor seconds"] += time.process_time() - processor


def wrapped(phases: Phases, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its time counts for a phase."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 whatever the function takes and gives
        with timed(phases, name):
            return function(*arguments, **options)

    return run


def make_record(starts: list[Phases], commit: str | None) -> dict[str, Any]:
    """Return the best start by wall time, and all starts, for doc_tables."""
    best = min(starts, key=lambda start: start["all of it"]["seconds"])
    return {
        "section": "start",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores of {cpu_name()} ({platform.machine()})",
        "model": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "settings": f"float32, best of {len(starts)} starts, load average {os.getloadavg()[0]:.1f}",
        "command": f"python benchmarks/start.py --repeats {len(starts)}",
        "commit": commit or _commit(),
        "versions": {"holdfast": __version__, "torch": version("torch"), "python": platform.python_version()},
        "results": [{"measure": name, "unit": "s", "values": _rounded(values)} for name, values in best.items()],
        "runs": [_rounded(start["all of it"]) for start in starts],
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {unit: round(seconds, 3) for unit, seconds in values.items()}


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()

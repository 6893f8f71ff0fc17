"""Shared parts of the GPU benchmarks: options, fresh processes, the final table and the record; no torch.

`scripts/doc_tables.py` reads a record; its `section` names the table of the documents.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from child_report import keep as keep
from child_report import leave as leave
from child_report import smi as smi
from child_report import used_bytes as used_bytes

from holdfast import __version__
from holdfast.cli import bench_record

ROOT = Path(__file__).parent.parent
RECORDS = Path("benchmarks") / "records"
COMMIT_VARIABLE = "HOLDFAST_COMMIT"
REHEARSAL_VARIABLE = "HOLDFAST_REHEARSAL"
"""If set, an engine opens with few layers, which compiles its kernels, and its process ends."""
PRIVATE_OPTIONS = ("--out", "--commit", "--folder", "--tree", "--old-commit", "--peer")
"""Options about output, labels and paths, left out of the recorded command."""
POLL_SECONDS = 0.05
NUM_SHOWN_LINES = 25
"""Limit on the kept output of a failed process."""


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes: shows that the script runs, measures nothing"
    )
    parser.add_argument("--out", type=Path, default=ROOT / RECORDS, help="folder of the record")
    parser.add_argument("--commit", default=None, help=f"else ${COMMIT_VARIABLE}, else what git says")
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="no part begins that could end later")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    return parser


class Budget:
    """The remaining seconds of a run."""

    def __init__(self, num_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._num_seconds = num_seconds

    @property
    def spent_seconds(self) -> float:
        return self._clock() - self._start

    @property
    def left_seconds(self) -> float:
        return self._num_seconds - self.spent_seconds


def run_child(
    arguments: Sequence[str],
    timeout_seconds: float,
    while_it_waits: Callable[[], Mapping[str, object]] = dict,
    environment: Mapping[str, str] | None = None,
    on_keep: Callable[[Mapping[str, Any]], None] = lambda found: None,
    num_shown_lines: int = NUM_SHOWN_LINES,
) -> dict[str, Any]:
    """Run a script in its own process; return its findings, or those that it kept and {"error": ...} with its last line.

    `environment` is added to this process's. `on_keep` gets the findings each time the script keeps some. The script passes its findings to `leave` and waits there with its memory held, while `while_it_waits` runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder) / "result.json", Path(folder) / "output.txt"
        command = [sys.executable, *arguments, "--result", str(result)]
        with output.open("w") as out:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        end = time.monotonic() + timeout_seconds
        kept, seen_ns = result.with_suffix(".kept"), 0
        try:
            while not result.exists() and child.poll() is None and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
                if kept.exists() and (changed_ns := kept.stat().st_mtime_ns) != seen_ns:
                    seen_ns = changed_ns
                    on_keep(json.loads(kept.read_text()))
            if result.exists():
                found = json.loads(result.read_text())
                return {**found, **while_it_waits()}
            words = output.read_text(errors="replace").splitlines()
            print("\n".join(words[-num_shown_lines:]), file=sys.stderr)
            found = json.loads(kept.read_text()) if kept.exists() else {}
            if child.poll() is None:
                return {**found, "error": f"it took more than {timeout_seconds:.0f} s"}
            last = next((line for line in reversed(words) if line.strip()), f"exit {child.returncode}")
            return {**found, "error": last}
        finally:
            end_child(child)


def end_child(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None, "the child was started without a pipe"
    with contextlib.suppress(OSError):  # it may have ended already
        child.stdin.close()
    try:
        child.wait(timeout=20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def device_name(device: str) -> str:
    """Return the name of the GPU, or of the processor if no GPU is measured."""
    return smi("name") or "unknown GPU" if device.startswith("cuda") else bench_record.cpu_name()


def make_record(
    section: str,
    results: Sequence[Mapping[str, object]],
    model: str,
    settings: str,
    arguments: argparse.Namespace,
    facts: Mapping[str, object],
) -> dict[str, object]:
    """Build the record of a run on this machine. Each result has `measure`, `unit` and `values`; other keys are kept."""
    name = device_name(arguments.device)
    return {
        "section": section,
        "date": today(),
        "machine": f"one {name}" if arguments.device.startswith("cuda") else bench_record.machine(),
        "model": model,
        "settings": settings,
        "results": list(results),
        "command": command(sys.argv),
        "commit": arguments.commit or os.environ.get(COMMIT_VARIABLE) or bench_record.commit(),
        "versions": versions(),
        "gpu": name if arguments.device.startswith("cuda") else None,
        "driver": smi("driver_version"),
        "cpu": bench_record.cpu_name(),
        "num_cores": bench_record.num_cores(),
        **facts,
    }


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def versions() -> dict[str, str]:
    """Return the versions of `holdfast bench`, Triton's, and our own if the package is not installed."""
    found = {**bench_record.versions(), "holdfast": __version__}
    with contextlib.suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    return found


def command(argv: Sequence[str]) -> str:
    """Return the command as typed in the root of the repository, without local paths."""
    script, *rest = argv
    kept: list[str] = []
    words = iter(rest)
    for word in words:
        if word in PRIVATE_OPTIONS:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in PRIVATE_OPTIONS)):
            kept.append(word)
    return shlex.join(["python", (Path("benchmarks") / Path(script).name).as_posix(), *kept])


def record_name(device: str, name: str, date: str) -> str:
    """<gpu>-<date>-<name>.json, without the maker's name."""
    plain = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-").removeprefix("nvidia-")
    return f"{plain}-{date}-{name}.json"


def write_record(record: Mapping[str, object], name: str, arguments: argparse.Namespace) -> Path:
    """Write the record into the requested folder."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / record_name(device_name(arguments.device), name, str(record["date"]))
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {path.name}")
    return path


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    is_number = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(columns))]
    print(f"\n{title}")
    for line in (list(columns), *cells):
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ]
        print("  ".join(padded).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)

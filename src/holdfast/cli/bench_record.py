"""The record of a benchmark: figures, and all that is needed to run it again; no torch.

`scripts/doc_tables.py` makes tables of the documents out of date, machine, model, settings and results.
"""

import datetime
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from holdfast.cli.bench_cases import UNIT, Result

PACKAGES = ("holdfast", "torch", "transformers", "numpy")


def record(
    results: Sequence[Result], model: str, settings: str, command: Sequence[str], facts: Mapping[str, object]
) -> dict[str, object]:
    """One run on this machine, now. The first engine of each result is ours."""
    return {
        "date": today(),
        "machine": machine(),
        "model": model,
        "settings": settings,
        "results": [_figures(result) for result in results],
        "command": shlex.join(command),
        "commit": commit(),
        "versions": versions(),
        "cpu": cpu_name(),
        "num_cores": num_cores(),
        **facts,
    }


def today() -> str:
    """The date, as records have it."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def ratios(result: Result) -> dict[str, float]:
    """How many times as fast as each other engine ours is, by medians."""
    ours, *others = result.rates
    return {other: result.median(ours) / result.median(other) for other in others}


def machine() -> str:
    """The machine in words."""
    return f"{num_cores()} cores of {cpu_name()} ({platform.machine()})"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor, as its system calls it."""
    for line in (_output("lscpu") or "").splitlines() or _lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        if key.strip().lower() == "model name" and value.strip() not in ("", "-"):
            return value.strip()
    return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python, and those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the working tree that this file belongs to, with a + where it has changes; None outside of one."""
    here = Path(__file__)
    git = ("git", "-C", str(here.parent))
    # A virtual environment may lie inside somebody else's repository.
    if _output(*git, "ls-files", "--error-unmatch", here.name) is None:
        return None
    head, changes = _output(*git, "rev-parse", "HEAD"), _output(*git, "status", "--porcelain", "--", "..")
    return f"{head}+" if head and changes else head


def _figures(result: Result) -> dict[str, object]:
    return {
        "measure": result.case.measure,
        "unit": UNIT,
        "values": {name: round(result.median(name), 2) for name in result.rates},
        "best": {name: round(result.best(name), 2) for name in result.rates},
        "runs": {name: [round(rate, 2) for rate in rates] for name, rates in result.rates.items()},
        "ratios": {name: round(ratio, 3) for name, ratio in ratios(result).items()},
        **({} if result.experts is None else {"distinct_experts": result.experts}),
    }


def _output(*command: str) -> str | None:
    """What a program prints, None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

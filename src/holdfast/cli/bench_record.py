"""Benchmark records: figures, and everything needed to repeat the run; no torch.

`scripts/doc_tables.py` makes tables of the documents from date, machine, model, settings and results.
"""

import datetime
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from holdfast.cli.terminal import STDOUT, dumps, write_answer, write_line
from holdfast.errors import ConfigError
from holdfast.memory.device_rates import num_cores

PACKAGES = ("holdfast", "torch", "transformers", "numpy")


def make_record(
    model: str, settings: str, results: Sequence[Mapping[str, object]], command: Sequence[str], **facts: object
) -> dict[str, object]:
    """Describe a run on this machine, now."""
    return {
        "date": today(),
        "machine": machine(),
        "model": model,
        "settings": settings,
        "results": results,
        "command": shlex.join(command),
        "commit": commit(),
        "versions": versions(),
        "cpu": cpu_name(),
        "num_cores": num_cores(),
        **facts,
    }


def record_file(option: str | None) -> str | None:
    """Check the path of --json before the benchmark runs."""
    if option not in (None, STDOUT) and not Path(str(option)).absolute().parent.is_dir():
        raise ConfigError("bench.record_folder", file=option)
    return option


def write_record(record: Mapping[str, object], file: str) -> None:
    """Write a record to a file, or to stdout for `-`."""
    if file == STDOUT:
        write_answer(_text(record))
        return
    save_record(record, file)
    write_line(f"record written to {file}")


def save_record(record: Mapping[str, object], file: str | None) -> None:
    """Write a record of what is done so far, silently; not to stdout."""
    if file not in (None, STDOUT):
        Path(str(file)).write_text(_text(record), encoding="utf-8")


def _text(record: Mapping[str, object]) -> str:
    return f"{dumps(record, indent=1)}\n"


def today() -> str:
    """Return the date in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def machine() -> str:
    """Describe the machine."""
    return f"{num_cores()} cores of {cpu_name()} ({platform.machine()})"


def cpu_name() -> str:
    """Return the processor's name."""
    for line in (_output("lscpu") or "").splitlines() or _lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        if key.strip().lower() == "model name" and value.strip() not in ("", "-"):
            return value.strip()
    return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of this source tree, with + if it is modified; None outside a tree."""
    here = Path(__file__)
    git = ("git", "-C", str(here.parent))
    # A virtual environment may lie inside another repository.
    if _output(*git, "ls-files", "--error-unmatch", here.name) is None:
        return None
    head, changes = _output(*git, "rev-parse", "HEAD"), _output(*git, "status", "--porcelain", "--", "..")
    return f"{head}+" if head and changes else head


def _output(*command: str) -> str | None:
    """Return what a program prints; None if it is missing or fails."""
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

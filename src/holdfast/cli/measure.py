"""`holdfast doctor --measure`: this machine's devices timed in a process of its own, kept for plans, and told beside data sheets; no torch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from holdfast.cli.terminal import write_line
from holdfast.memory.device_rates import Measured, num_cores, write_measured
from holdfast.memory.devices import GPUS

PROBE = """import runpy, sys
sys.path.insert(0, sys.argv[1])
runpy.run_module("holdfast.cli.rate_probe", run_name="__main__")"""


BUSY = "other processes keep this machine's cores busy: measure again when it is quiet"


class Measurement(NamedTuple):
    """What a run found, or why it found nothing."""

    devices: tuple[Measured, ...]
    problems: tuple[str, ...] = ()
    """Devices that were not measured, and what makes the rates doubtful."""
    path: str = ""
    """Where it is kept."""


def measure(arguments: Sequence[str] = ()) -> Measurement:
    """Time every device, a line on stderr for each, and keep the rates; a device that fails is a line."""
    command = [sys.executable, "-c", PROBE, str(Path(__file__).parents[2]), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None, "the child has a pipe"
        found = read_facts(child.stdout)
        _, errors = child.communicate()
    if child.returncode != 0:
        last = errors.strip().splitlines()[-1:] or [f"its process ended with {child.returncode}"]
        found = found._replace(problems=(*found.problems, last[0][:300]))
    if not found.devices:
        return found
    if _is_busy():
        found = found._replace(problems=(*found.problems, BUSY))
    try:
        return found._replace(path=str(write_measured(found.devices)))
    except OSError as error:
        return found._replace(problems=(*found.problems, f"rates are not kept: {error}"))


def _is_busy() -> bool:
    """Whether more wanted to run in the last minute than there are cores, this measurement included."""
    cores = num_cores()
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > 1.5 * cores + 1


def read_facts(lines: Iterable[str]) -> Measurement:
    """Lines of the probe as they come; libraries print lines too, which are passed over."""
    date, found, problems = datetime.now(UTC).date().isoformat(), [], []
    for line in lines:
        try:
            fact = json.loads(line)
            if "next" in fact:
                write_line(f"measuring {fact['next']} ...")
            elif "problem" in fact:
                problems.append(str(fact["problem"]))
            else:
                found.append(Measured(**fact, date=date))
        except (ValueError, TypeError):
            continue
    return Measurement(tuple(found), tuple(problems))


def rate_rows(found: Measurement) -> list[tuple[str, str]]:
    """Lines of the report: what was measured beside what the data sheet says."""
    rows = [(one.device, _words(one)) for one in found.devices]
    rows += [("note", problem) for problem in found.problems]
    return [*rows, ("kept in", f"{found.path}; holdfast plan uses it for these devices")] if found.path else rows


def _words(measured: Measured) -> str:
    read = f"reads {measured.read_bytes_per_second / 1e9:,.1f} GB/s"
    if measured.is_cpu:
        return f"{read}, multiplies {measured.flops_per_second / 1e9:,.1f} GFLOP/s in float32"
    products = f"multiplies {measured.flops_per_second / 1e12:,.1f} TFLOP/s in bfloat16"
    gpu = next((gpu for gpu in GPUS.values() if gpu.name == measured.device), None)
    if gpu is None:
        return f"{read}, {products}; no GPU of this name is known to holdfast plan"
    sheet = gpu.sheet
    return f"{read} (data sheet {sheet.gigabytes:,.0f}), {products} (data sheet {sheet.bfloat16:,.0f})"

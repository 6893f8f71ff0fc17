"""`holdfast doctor --measure`: measure device rates in another process and store them for plans; no torch."""

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
runpy.run_module(f"holdfast.cli.{sys.argv[2]}", run_name="__main__")"""
"""Program that runs a module of this folder in another process, from the same tree."""


BUSY = "other processes use this machine's cores: measure again when it is idle"


class Measurement(NamedTuple):
    """Measured rates, and problems."""

    devices: tuple[Measured, ...]
    problems: tuple[str, ...] = ()
    """Devices without a measurement, and warnings about the rates."""
    path: str = ""
    """File with the stored rates."""


def probe_command(module: str) -> list[str]:
    """Return the command that runs a probe in another process, which a broken library may abort."""
    return [sys.executable, "-c", PROBE, str(Path(__file__).parents[2]), module]


def measure(arguments: Sequence[str] = ()) -> Measurement:
    """Measure every device and store the rates; a device that fails becomes a problem."""
    with subprocess.Popen(
        [*probe_command("rate_probe"), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
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
        return found._replace(problems=(*found.problems, f"the rates are not stored: {error}"))


def _is_busy() -> bool:
    """Return True if the load of the last minute exceeds the cores."""
    cores = num_cores()
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > 1.5 * cores + 1


def read_facts(lines: Iterable[str]) -> Measurement:
    """Read the lines of the probe; skip lines that libraries print."""
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
    """List the measured rates beside those of the data sheet."""
    rows = [(one.device, _rates(one)) for one in found.devices]
    rows += [("note", problem) for problem in found.problems]
    return [*rows, ("stored in", f"{found.path}; holdfast plan uses it for these devices")] if found.path else rows


def _rates(measured: Measured) -> str:
    read = f"reads {measured.read_bytes_per_second / 1e9:,.1f} GB/s"
    if measured.is_cpu:
        return f"{read}, multiplies {measured.flops_per_second / 1e9:,.1f} GFLOP/s in float32"
    products = f"multiplies {measured.flops_per_second / 1e12:,.1f} TFLOP/s in bfloat16"
    gpu = next((gpu for gpu in GPUS.values() if gpu.name == measured.device), None)
    if gpu is None:
        return f"{read}, {products}; no GPU of this name is known to holdfast plan"
    sheet = gpu.sheet
    return f"{read} (data sheet {sheet.gigabytes:,.0f}), {products} (data sheet {sheet.bfloat16:,.0f})"

"""Rates of devices: bandwidth and FLOP/s from data sheets, what doctor measured, and what kernels reach; no torch."""

import json
import os
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from holdfast.memory.cache_folder import cache_path, private_folder
from holdfast.memory.devices import H200, PLANNED_GPUS

Link = Literal["nvlink", "pcie", "host"]


H200_READ_BYTES_PER_SECOND = 4.37e12
"""Measured on an H200: a float32 sum of 2 GiB."""
H200_FLOPS_PER_SECOND = 790e12
"""Measured on an H200: one large product in bfloat16."""
H200_MULTIPROCESSORS = 132
READ_SHARE = H200_READ_BYTES_PER_SECOND / (H200.sheet.gigabytes * 1e9)
FLOPS_SHARE = H200_FLOPS_PER_SECOND / (H200.sheet.bfloat16 * 1e12)
"""Shares of the data sheet's rates, measured on an H200 and taken for every GPU that is not measured."""


class Rates(NamedTuple):
    """Rates that the best kernels of a device reach."""

    kind: Literal["cpu", "cuda"]
    read_bytes_per_second: float
    flops_per_second: float
    """Large products, in bfloat16 on a GPU and float32 on a CPU."""
    fp8_flops_per_second: float = 0.0
    link: Link = "pcie"
    """Link between several of them."""
    num_multiprocessors: int = 0
    """0: unknown, so waves of tiles are not counted."""


def sheet_rates(key: str) -> Rates:
    """Return the rates of a GPU of `PLANNED_GPUS`, at the shares of its data sheet that an H200 reaches."""
    sheet = PLANNED_GPUS[key].sheet
    return Rates(
        "cuda",
        READ_SHARE * sheet.gigabytes * 1e9,
        FLOPS_SHARE * sheet.bfloat16 * 1e12,
        FLOPS_SHARE * sheet.fp8 * 1e12,
        "nvlink" if sheet.has_nvlink else "pcie",
        H200_MULTIPROCESSORS if key == H200.key else 0,
    )


CORE_READ_BYTES_PER_SECOND, MOST_READ_BYTES_PER_SECOND = 8e9, 60e9
CORE_FLOPS_PER_SECOND = 30e9
"""Assumed for an unmeasured CPU: one core, and two memory channels for all. Two Neoverse-N1 cores reach 24e9 and 70e9."""


def assumed_cpu_rates(num_cores: int) -> Rates:
    """Return the rates of a CPU of which only the number of cores is known."""
    read = min(num_cores * CORE_READ_BYTES_PER_SECOND, MOST_READ_BYTES_PER_SECOND)
    return Rates("cpu", read, num_cores * CORE_FLOPS_PER_SECOND, link="host")


# --- what doctor measured


class Measured(NamedTuple):
    """Result of `holdfast doctor --measure` for one device of this machine."""

    device: str
    """The driver's name of a GPU, or `cpu_identity`."""
    total_bytes: int
    """Memory of a GPU; 0 for a CPU."""
    read_bytes_per_second: float
    flops_per_second: float
    """Products in bfloat16 on a GPU, in float32 on a CPU."""
    date: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.total_bytes == 0


MEASURED_FILE = "device_rates.json"
MEASURED_VERSION = 1
SAME_MEMORY = 0.05
"""Share by which a GPU's memory may differ from that of the measured one, since drivers differ."""


def read_measured() -> tuple[Measured, ...]:
    """Read the kept measurements; empty if there is no readable file."""
    try:
        path = cache_path() / MEASURED_FILE
        return _read_kept(path, path.stat().st_mtime_ns)
    except OSError:
        return ()


@cache
def _read_kept(path: Path, changed: int) -> tuple[Measured, ...]:
    """Read the file once for each time that it `changed`: a plan needs it many times."""
    try:
        kept = json.loads(path.read_bytes())
        found = tuple(Measured(**one) for one in kept["devices"]) if kept["version"] == MEASURED_VERSION else ()
    except (OSError, ValueError, TypeError, KeyError):
        return ()
    return tuple(one for one in found if _is_sound(one))


def _is_sound(measured: Measured) -> bool:
    rates = measured.read_bytes_per_second, measured.flops_per_second
    is_named = isinstance(measured.device, str) and isinstance(measured.total_bytes, int)
    return is_named and all(isinstance(rate, int | float) and 0 < rate < MOST_RATE for rate in rates)


MOST_RATE = 1e18
"""A larger rate in the file is a mistake."""


def write_measured(found: Sequence[Measured]) -> Path:
    """Add new measurements to the kept ones of other devices, and return the file."""
    new = {(one.device, one.total_bytes) for one in found}
    kept = [one for one in read_measured() if (one.device, one.total_bytes) not in new]
    path = private_folder() / MEASURED_FILE
    content = {"version": MEASURED_VERSION, "devices": [one._asdict() for one in (*kept, *found)]}
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1))
    os.replace(partial, path)
    return path


def measured_cpu(measured: Sequence[Measured]) -> Measured | None:
    """Find this machine's CPU."""
    own = cpu_identity()
    return next((one for one in measured if one.is_cpu and one.device == own), None)


def measured_gpu(measured: Sequence[Measured], name: str, total_bytes: int) -> Measured | None:
    """Find a GPU of that name and memory."""
    for one in measured:
        if one.device == name and abs(one.total_bytes - total_bytes) <= SAME_MEMORY * total_bytes:
            return one
    return None


def with_measured(rates: Rates, measured: Measured) -> Rates:
    """Replace rates by measured ones; fp8 scales with bfloat16."""
    factor = measured.flops_per_second / rates.flops_per_second
    return rates._replace(
        read_bytes_per_second=measured.read_bytes_per_second,
        flops_per_second=measured.flops_per_second,
        fp8_flops_per_second=factor * rates.fp8_flops_per_second,
    )


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name this machine's CPU: architecture, model, cores that this process may use."""
    model = platform.processor() or "unknown"
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "CPU part"):
                model = value.strip()
                break
    except OSError:
        pass  # not Linux
    return f"{platform.machine()} {model}, {num_cores()} cores"

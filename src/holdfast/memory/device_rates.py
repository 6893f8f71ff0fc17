"""How fast devices are: bandwidth and FLOP/s of GPUs from data sheets, what doctor has measured, and the rates that kernels reach; no torch."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from holdfast.memory.cache_folder import cache_path, private_folder
from holdfast.memory.devices import H200

Link = Literal["nvlink", "pcie", "host"]


class SheetRates(NamedTuple):
    """One GPU as its maker's data sheet or white paper has it: dense products, sums in float32."""

    gigabytes: float
    """Memory bandwidth, GB/s."""
    bus_bits: int
    pin_gigabits: float
    """Data rate of a pin of the bus, Gb/s."""
    bfloat16: float
    """TFLOP/s in tensor cores; in float16 on GPUs before Ampere, without tensor cores on Pascal."""
    fp8: float = 0.0
    """TFLOP/s of e4m3; 0: none."""
    has_nvlink: bool = False
    """Several of them are usually linked so that each reads the memory of all."""


SHEETS: Mapping[str, SheetRates] = {
    # GeForce: white papers of GA102, Ada and RTX Blackwell; products with float32 sums have half the rate of those in float16.
    "rtx3060": SheetRates(360, 192, 15, 25.5),
    "rtx3070": SheetRates(448, 256, 14, 40.6),
    "rtx3080": SheetRates(760, 320, 19, 59.5),
    "rtx3080-12g": SheetRates(912, 384, 19, 61.3),
    "rtx3080ti": SheetRates(912, 384, 19, 68.2),
    "rtx3090": SheetRates(936, 384, 19.5, 71.2),
    "rtx3090ti": SheetRates(1008, 384, 21, 80.0),
    "rtx4060": SheetRates(272, 128, 17, 30.2, 60.5),
    "rtx4060ti-8g": SheetRates(288, 128, 18, 44.1, 88.2),
    "rtx4060ti-16g": SheetRates(288, 128, 18, 44.1, 88.2),
    "rtx4070": SheetRates(504, 192, 21, 58.3, 116.6),
    "rtx4070-super": SheetRates(504, 192, 21, 71.0, 141.9),
    "rtx4070ti": SheetRates(504, 192, 21, 80.2, 160.4),
    "rtx4070ti-super": SheetRates(672, 256, 21, 88.2, 176.4),
    "rtx4080": SheetRates(717, 256, 22.4, 97.5, 194.9),
    "rtx4080-super": SheetRates(736, 256, 23, 104.4, 208.9),
    "rtx4090": SheetRates(1008, 384, 21, 165.2, 330.3),
    "rtx5060ti-16g": SheetRates(448, 128, 28, 47.4, 94.8),
    "rtx5070": SheetRates(672, 192, 28, 61.7, 123.5),
    "rtx5070ti": SheetRates(896, 256, 28, 87.9, 175.8),
    "rtx5080": SheetRates(960, 256, 30, 112.6, 225.1),
    "rtx5090": SheetRates(1792, 512, 28, 209.5, 419.0),
    # Workstations and servers: data sheets, half of what they give with sparsity.
    "rtxa4000": SheetRates(448, 256, 14, 76.7),
    "rtxa5000": SheetRates(768, 384, 16, 111.1),
    "rtxa6000": SheetRates(768, 384, 16, 154.8),
    "rtx6000-ada": SheetRates(960, 384, 20, 364.2, 728.5),
    "rtxpro6000": SheetRates(1597, 512, 25, 480.0, 960.0),
    "l4": SheetRates(300, 192, 12.5, 121.0, 242.5),
    "l40": SheetRates(864, 384, 18, 181.0, 362.0),
    "l40s": SheetRates(864, 384, 18, 362.0, 733.0),
    "a10": SheetRates(600, 384, 12.5, 125.0),
    "a10g": SheetRates(600, 384, 12.5, 70.0),
    "a40": SheetRates(696, 384, 14.5, 149.7),
    "a30": SheetRates(933, 3072, 2.43, 165.0),
    "a100-40g": SheetRates(1555, 5120, 2.43, 312.0, has_nvlink=True),
    "a100-pcie-40g": SheetRates(1555, 5120, 2.43, 312.0),
    "a100-80g": SheetRates(2039, 5120, 3.19, 312.0, has_nvlink=True),
    "a100-pcie-80g": SheetRates(1935, 5120, 3.02, 312.0),
    "a800-80g": SheetRates(2039, 5120, 3.19, 312.0, has_nvlink=True),
    "h100": SheetRates(3350, 5120, 5.23, 989.4, 1978.9, has_nvlink=True),
    "h100-pcie": SheetRates(2039, 5120, 3.19, 756.5, 1513.0),
    "h100-nvl": SheetRates(3938, 6144, 5.13, 835.5, 1670.5, has_nvlink=True),
    "h800": SheetRates(3350, 5120, 5.23, 989.4, 1978.9, has_nvlink=True),
    "h20": SheetRates(4000, 6144, 5.21, 148.0, 296.0, has_nvlink=True),
    "gh200": SheetRates(4000, 6144, 5.21, 989.4, 1978.9, has_nvlink=True),
    "h200": SheetRates(4800, 6144, 6.25, 989.4, 1978.9, has_nvlink=True),
    "h200-nvl": SheetRates(4800, 6144, 6.25, 835.5, 1670.5, has_nvlink=True),
    "b200": SheetRates(8000, 8192, 7.81, 2250.0, 4500.0, has_nvlink=True),
    "gb200": SheetRates(8000, 8192, 7.81, 2500.0, 5000.0, has_nvlink=True),
    "b300": SheetRates(8000, 8192, 7.81, 2250.0, 4500.0, has_nvlink=True),
    "gb300": SheetRates(8000, 8192, 7.81, 2500.0, 5000.0, has_nvlink=True),
    # Laptops at their boost clock: a low power limit multiplies slower and reads as fast.
    "rtx3060-laptop": SheetRates(336, 192, 14, 26.2),
    "rtx3070-laptop": SheetRates(448, 256, 14, 33.2),
    "rtx3070ti-laptop": SheetRates(448, 256, 14, 35.0),
    "rtx3080-laptop-8g": SheetRates(448, 256, 14, 42.0),
    "rtx3080-laptop-16g": SheetRates(448, 256, 14, 42.0),
    "rtx3080ti-laptop": SheetRates(512, 256, 16, 47.2),
    "rtx4050-laptop": SheetRates(192, 96, 16, 24.3, 48.5),
    "rtx4060-laptop": SheetRates(256, 128, 16, 29.1, 58.2),
    "rtx4070-laptop": SheetRates(256, 128, 16, 40.1, 80.2),
    "rtx4080-laptop": SheetRates(432, 192, 18, 67.7, 135.4),
    "rtx4090-laptop": SheetRates(576, 256, 18, 79.4, 158.8),
    "rtx5050-laptop": SheetRates(384, 128, 24, 27.2, 54.5),
    "rtx5060-laptop": SheetRates(384, 128, 24, 33.4, 66.9),
    "rtx5070-laptop": SheetRates(384, 128, 24, 43.3, 86.5),
    "rtx5070ti-laptop": SheetRates(672, 192, 28, 52.3, 104.6),
    "rtx5080-laptop": SheetRates(896, 256, 28, 70.3, 140.5),
    "rtx5090-laptop": SheetRates(896, 256, 28, 90.7, 181.4),
    # DGX Spark: LPDDR5X that CPU and GPU share; a quarter of what it gives in fp4, dense.
    "gb10": SheetRates(273, 256, 8.53, 125.0, 250.0),
    # Before Ampere: float16.
    "t4": SheetRates(320, 256, 10, 65.0),
    "rtx2080ti": SheetRates(616, 352, 14, 53.8),
    "rtx8000": SheetRates(672, 384, 14, 130.5),
    "v100-16g": SheetRates(900, 4096, 1.76, 125.0, has_nvlink=True),
    "v100-32g": SheetRates(900, 4096, 1.76, 125.0, has_nvlink=True),
    "p100": SheetRates(732, 4096, 1.43, 18.7),
    "p40": SheetRates(346, 384, 7.2, 11.8),
}
"""Every GPU of `PLANNED_GPUS`, by its key."""
H200_READ_BYTES_PER_SECOND = 4.37e12
"""Measured on an H200: a float32 sum of 2 GiB."""
H200_FLOPS_PER_SECOND = 790e12
"""Measured on an H200: one large product in bfloat16."""
H200_MULTIPROCESSORS = 132
READ_SHARE = H200_READ_BYTES_PER_SECOND / (SHEETS[H200.key].gigabytes * 1e9)
FLOPS_SHARE = H200_FLOPS_PER_SECOND / (SHEETS[H200.key].bfloat16 * 1e12)
"""Of what the data sheet says; those of an H200 are taken for every GPU that is not measured."""


class Rates(NamedTuple):
    """What the best kernels of a device reach."""

    kind: Literal["cpu", "cuda"]
    read_bytes_per_second: float
    flops_per_second: float
    """Of large products, bfloat16 on a GPU and float32 on a CPU."""
    fp8_flops_per_second: float = 0.0
    link: Link = "pcie"
    """How several of them exchange."""
    num_multiprocessors: int = 0
    """0: unknown, and waves of tiles are not counted."""


def sheet_rates(key: str) -> Rates:
    """A GPU by its key in `GPUS`, at the shares that an H200 reaches."""
    sheet = SHEETS[key]
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
"""Of a CPU that was not measured: a core alone, and what two channels of memory give all of them. Two Neoverse-N1 cores: 24e9, 70e9."""


def assumed_cpu_rates(num_cores: int) -> Rates:
    """A CPU of which only the number of cores is known."""
    read = min(num_cores * CORE_READ_BYTES_PER_SECOND, MOST_READ_BYTES_PER_SECOND)
    return Rates("cpu", read, num_cores * CORE_FLOPS_PER_SECOND, link="host")


# --- what doctor measured


class Measured(NamedTuple):
    """What `holdfast doctor --measure` found on one device of this machine."""

    device: str
    """As the driver names a GPU; of a CPU `cpu_identity`."""
    total_bytes: int
    """Of a GPU's memory; 0 of a CPU."""
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
"""Share by which a GPU's memory may differ from that of the one that was measured: drivers keep more or less of it."""


def read_measured() -> tuple[Measured, ...]:
    """What was kept; nothing if no file is there or it cannot be read."""
    try:
        path = cache_path() / MEASURED_FILE
        return _read_kept(path, path.stat().st_mtime_ns)
    except OSError:
        return ()


@cache
def _read_kept(path: Path, changed: int) -> tuple[Measured, ...]:
    """The file as it was when it was `changed`: a plan asks for it many times."""
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
"""No device of today reaches it; a larger number in the file is a mistake."""


def write_measured(found: Sequence[Measured]) -> Path:
    """Keep what was measured now, and of other devices what was kept before; the file."""
    new = {(one.device, one.total_bytes) for one in found}
    kept = [one for one in read_measured() if (one.device, one.total_bytes) not in new]
    path = private_folder() / MEASURED_FILE
    content = {"version": MEASURED_VERSION, "devices": [one._asdict() for one in (*kept, *found)]}
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1))
    os.replace(partial, path)
    return path


def measured_cpu(measured: Sequence[Measured]) -> Measured | None:
    """This machine's CPU among them."""
    own = cpu_identity()
    return next((one for one in measured if one.is_cpu and one.device == own), None)


def measured_gpu(measured: Sequence[Measured], name: str, total_bytes: int) -> Measured | None:
    """A GPU of that name and memory among them."""
    for one in measured:
        if one.device == name and abs(one.total_bytes - total_bytes) <= SAME_MEMORY * total_bytes:
            return one
    return None


def with_measured(rates: Rates, measured: Measured) -> Rates:
    """The rates of a device with those that were measured; fp8 in proportion to bfloat16."""
    factor = measured.flops_per_second / rates.flops_per_second
    return rates._replace(
        read_bytes_per_second=measured.read_bytes_per_second,
        flops_per_second=measured.flops_per_second,
        fp8_flops_per_second=factor * rates.fp8_flops_per_second,
    )


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """This machine's CPU as what is kept names it: architecture, model, cores that this process may use."""
    model = platform.processor() or "unknown"
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "CPU part"):
                model = value.strip()
                break
    except OSError:
        pass  # Not Linux: what Python says of the processor must do.
    return f"{platform.machine()} {model}, {num_cores()} cores"

"""What devices have: GPUs by name with the memory that CUDA reports, and what this host can still give; no torch."""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError, shown

MIB = 1024**2
GIB = 1024**3
CONTEXT_BYTES = 757 * MIB
"""CUDA's context, the handles of its libraries and the code of all kernels, once an engine serves: 793.6 MB on an H200."""
SAME_AS_H200 = "taken to be that of an H200"
SEEN = "total as torch on Linux names it in public out-of-memory messages (drivers differ by 0.2 GiB or so)"
ASSUMED = "total assumed: the nominal size less what drivers usually keep, not checked"


class Gpu(NamedTuple):
    """One kind of GPU."""

    key: str
    """What a person types."""
    name: str
    total_bytes: int
    """As the driver reports it: less than on the box, since the driver keeps some."""
    context_bytes: int
    source: str
    """Where the two numbers come from."""
    capability: tuple[int, int]
    """CUDA's compute capability, which says what its instructions can do."""


def _gpu(key: str, name: str, total_gib: float, source: str, capability: tuple[int, int]) -> Gpu:
    return Gpu(key, name, int(total_gib * GIB), CONTEXT_BYTES, f"{source}; context {SAME_AS_H200}", capability)


H200 = Gpu(
    "h200",
    "NVIDIA H200",
    150_109_880_320,
    CONTEXT_BYTES,
    "total and context measured on one (driver for CUDA 13.0, torch 2.11)",
    (9, 0),
)
GPUS: Mapping[str, Gpu] = {
    gpu.key: gpu
    for gpu in (
        _gpu("rtx3060", "NVIDIA GeForce RTX 3060", 11.75, SEEN, (8, 6)),
        _gpu("t4", "Tesla T4", 14.75, SEEN, (7, 5)),
        _gpu("rtx4080", "NVIDIA GeForce RTX 4080", 15.58, ASSUMED, (8, 9)),
        _gpu("v100-16g", "Tesla V100-SXM2-16GB", 15.77, ASSUMED, (7, 0)),
        _gpu("l4", "NVIDIA L4", 22.03, ASSUMED, (8, 9)),
        _gpu("a10", "NVIDIA A10", 22.06, ASSUMED, (8, 6)),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 23.52, SEEN, (8, 9)),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 23.68, SEEN, (8, 6)),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", 31.36, SEEN, (12, 0)),
        _gpu("v100-32g", "Tesla V100-SXM2-32GB", 31.73, ASSUMED, (7, 0)),
        _gpu("a100-40g", "NVIDIA A100-SXM4-40GB", 39.45, SEEN, (8, 0)),
        _gpu("l40s", "NVIDIA L40S", 44.39, ASSUMED, (8, 9)),
        _gpu("rtxa6000", "NVIDIA RTX A6000", 47.40, ASSUMED, (8, 6)),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 79.11, SEEN, (9, 0)),
        _gpu("a100-80g", "NVIDIA A100-SXM4-80GB", 79.14, ASSUMED, (8, 0)),
        _gpu("h100-nvl", "NVIDIA H100 NVL", 93.00, SEEN, (9, 0)),
        _gpu("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.97, ASSUMED, (12, 0)),
        H200,
        _gpu("b200", "NVIDIA B200", 178.35, ASSUMED, (10, 0)),
    )
}
"""Every GPU that can be planned for by name, the smallest first."""
ALIASES: Mapping[str, str] = {
    "a100": "a100-80g",
    "v100": "v100-32g",
    "a6000": "rtxa6000",
    "a10g": "a10",
    "h100-80g": "h100",
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, in any spelling of case, spaces and dashes."""
    keys = {_plain(key): gpu for key, gpu in GPUS.items()}
    keys |= {_plain(alias): GPUS[key] for alias, key in ALIASES.items()}
    keys |= {_plain(gpu.name): gpu for gpu in GPUS.values()}
    wanted = _plain(name)
    if wanted in keys:
        return keys[wanted]
    near = difflib.get_close_matches(wanted, keys, n=3)
    # One that starts alike, as h100 does, is nearer than one that ends alike, as in 80g.
    near.sort(key=lambda key: key[:4] != wanted[:4])
    nearest = list(dict.fromkeys(keys[match].key for match in near))
    raise ConfigError(
        f"gpu={shown(name)} was asked",
        f"the GPUs known by name are {', '.join(GPUS)}",
        f"did you mean {' or '.join(nearest)}?" if nearest else "pass a memory size such as 24GiB instead",
    )


def _plain(name: str) -> str:
    name = name.strip().lower().removeprefix("nvidia")
    plain = "".join(letter for letter in name if letter.isalnum()).removeprefix("geforce")
    return re.sub(r"(?<=[0-9]g)i?b$", "", plain)


MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that can be taken without pushing anybody out."""
    available = _meminfo_available(meminfo)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        reclaimable = _cgroup_file_cache(cgroup / "memory.stat")
        available = min(available, max(0, limit - used + reclaimable))
    return available


def _meminfo_available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # Not Linux, or an old kernel: ask the C library instead.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cgroup_file_cache(stat: Path) -> int:
    try:
        rows = dict(line.split() for line in stat.read_text().splitlines())
        return int(rows.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0

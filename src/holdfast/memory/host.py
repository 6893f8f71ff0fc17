"""How much memory this host can still give: the kernel's word, bounded by the control group's; no torch."""

import os
from pathlib import Path

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

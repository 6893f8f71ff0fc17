"""Profiler: memory that the device reports in each phase, compared with the plan; imports torch late."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.memory.planner import PHASES, MemoryPlan

STATM = Path("/proc/self/statm")
STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """One measurement of a device. On a CPU all but the total is resident memory of this process."""

    allocated: int
    """Bytes in live tensors of this process."""
    reserved: int
    """Bytes that this process's allocator holds, live or not."""
    used: int
    """Bytes used on the device by all processes, with contexts and libraries."""
    total: int


@dataclass(frozen=True, slots=True)
class PhaseBytes:
    """Bytes at the end of a phase, and its peak, both above the start."""

    at_end: DeviceBytes
    taken_bytes: int
    """Bytes used beyond those before the first phase."""
    peak_allocated_bytes: int


@dataclass(frozen=True, slots=True)
class PhaseComparison:
    """One phase as planned and as measured."""

    phase: str
    planned_bytes: int
    measured_bytes: int
    peak_allocated_bytes: int


def measure(device: object, statm: Path = STATM) -> DeviceBytes | None:
    """Measure a device; None if it cannot be queried."""
    if not str(device).startswith("cuda"):
        return _measure_host(statm) if str(device) == "cpu" else None
    import torch

    place = torch.device(str(device))
    free_bytes, total_bytes = torch.cuda.mem_get_info(place)
    return DeviceBytes(
        torch.cuda.memory_allocated(place),
        torch.cuda.memory_reserved(place),
        total_bytes - free_bytes,
        total_bytes,
    )


def take_peak_bytes(device: object) -> int | None:
    """Return and reset the peak bytes in live tensors; None if the device does not count them."""
    if not str(device).startswith("cuda"):
        return None
    import torch

    place = torch.device(str(device))
    peak_bytes = torch.cuda.max_memory_allocated(place)
    torch.cuda.reset_peak_memory_stats(place)
    return peak_bytes


def anonymous_bytes(status: Path = STATUS) -> int | None:
    """Return the anonymous resident memory of this process; None if unknown."""
    return named_bytes("RssAnon", status)


def file_bytes() -> int | None:
    """Return the file-backed resident memory of this process; None if unknown."""
    return named_bytes("RssFile", STATUS)


def named_bytes(name: str, status: Path = STATUS) -> int | None:
    """Return a line of /proc in bytes, such as VmHWM of a process or MemAvailable of the host; None if it has none."""
    try:
        for line in status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None  # not Linux


def _measure_host(statm: Path) -> DeviceBytes | None:
    try:
        resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None  # not Linux
    return DeviceBytes(resident, resident, resident, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class PhaseProfile:
    """Measures a device at the end of each phase, above the bytes in use at construction."""

    def __init__(
        self,
        device: object,
        measure: Callable[[object], DeviceBytes | None] = measure,
        take_peak_bytes: Callable[[object], int | None] = take_peak_bytes,
    ) -> None:
        self._device = device
        self._measure = measure
        self._take_peak_bytes = take_peak_bytes
        self.before = measure(device)
        take_peak_bytes(device)
        self.phases: dict[str, PhaseBytes] = {}

    def end(self, phase: str) -> PhaseBytes | None:
        """Measure at the end of a phase; may be repeated. None if the device cannot be queried."""
        assert phase in PHASES, f"{phase=} must be one of {PHASES}"
        later = PHASES[PHASES.index(phase) + 1 :]
        assert self.phases.keys().isdisjoint(later), f"{phase=} cannot end after {list(self.phases)}"
        at_end, peak = self._measure(self._device), self._take_peak_bytes(self._device)
        if at_end is None or self.before is None:
            return None
        # Without a counter, the end of the phase is the only known moment.
        peak_bytes = max(at_end.allocated, peak or 0) - self.before.allocated
        if phase in self.phases:
            peak_bytes = max(peak_bytes, self.phases[phase].peak_allocated_bytes)
        self.phases[phase] = PhaseBytes(at_end, at_end.used - self.before.used, peak_bytes)
        return self.phases[phase]

    @property
    def taken_bytes(self) -> int | None:
        """Bytes after the last phase; None if not measured, or if other processes freed more than we took."""
        taken_bytes = list(self.phases.values())[-1].taken_bytes if self.phases else None
        return None if taken_bytes is None or taken_bytes < 0 else taken_bytes

    def compare(self, plan: MemoryPlan, before_bytes: int = 0) -> tuple[PhaseComparison, ...]:
        """Compare every measured phase with the plan.

        `before_bytes` were planned too, but taken before the first measurement: a GPU needs its context to be queried.
        """
        return tuple(
            PhaseComparison(
                phase, plan.phase_bytes[phase], found.taken_bytes + before_bytes, found.peak_allocated_bytes
            )
            for phase, found in self.phases.items()
        )

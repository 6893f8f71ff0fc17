"""MemoryWatch: peak memory of this process and its device during a block, sampled every few milliseconds."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

STATUS = Path("/proc/self/status")
HOST_FIELDS = ("RssAnon", "RssShmem", "VmLck", "VmPin")
"""Resident anonymous and shared memory; locked memory, and pinned memory as the kernel counts it."""
DEVICE = "device"


class MemoryWatch:
    """A context manager; `before` and `peak` have bytes by name. Device bytes are the driver's, for all processes."""

    def __init__(self, device: str, seconds_between: float = 0.002) -> None:
        self._device = device
        self._seconds_between = seconds_between
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="memory watch", daemon=True)
        self.before: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.num_looks = 0

    def __enter__(self) -> Self:
        self.before = look(self._device)
        self.peak = dict(self.before)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._take()

    @property
    def taken(self) -> dict[str, int]:
        """Return the peak minus the bytes before, by name."""
        return {name: peak - self.before[name] for name, peak in self.peak.items()}

    def _poll(self) -> None:
        while not self._is_over.wait(self._seconds_between):
            self._take()

    def _take(self) -> None:
        self.num_looks += 1
        for name, num_bytes in look(self._device).items():
            self.peak[name] = max(num_bytes, self.peak[name])


def look(device: str) -> dict[str, int]:
    """Return current bytes by name."""
    found: dict[str, int] = dict.fromkeys(HOST_FIELDS, 0)
    for line in STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) * 1024
    if device.startswith("cuda"):
        import torch

        free_bytes, total_bytes = torch.cuda.mem_get_info()
        found[DEVICE] = total_bytes - free_bytes
    return found

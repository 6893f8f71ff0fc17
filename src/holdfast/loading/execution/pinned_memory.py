"""PinnedMemory: host memory that a GPU copies from by itself: exactly as much as asked, and given back for good.

torch's own pinned memory is rounded up to a power of two and kept for the life of the process.
"""

import mmap
from contextlib import suppress

import torch

HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class PinnedMemory:
    """One mapping, pinned while it lasts. Whoever has copies under way must wait for them before `release`."""

    def __init__(self, num_bytes: int) -> None:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if HUGE_PAGES is not None:
            with suppress(OSError):  # few large pages are pinned, and filled, faster; not every system has them
                mapping.madvise(HUGE_PAGES)
        self.view = memoryview(mapping)
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self._address: int | None = None
        runtime = torch.cuda.cudart()
        assert runtime is not None, "torch was built without CUDA"
        self._runtime = runtime
        code = int(runtime.cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0))
        if code != 0:
            raise RuntimeError(f"{num_bytes} bytes of host memory could not be allocated as pinned: CUDA error {code}")
        self._address = self.tensor.data_ptr()

    def release(self) -> None:
        """Pinned no more; the memory is free as soon as nobody has a view. Again is nothing."""
        if self._address is not None:
            self._runtime.cudaHostUnregister(self._address)
            self._address = None

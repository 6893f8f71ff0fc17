"""OpenFile: a file that any number of threads read, each at places of its own, closed with its last reader; no torch."""

import os
from pathlib import Path

MAX_GAP_BYTES = 32 * 2**10
"""Bytes between two wanted runs that are read and dropped: copying them costs less than another call does."""
MAX_RUNS = 512
"""Runs that one call fills, with the gaps between them; systems take 1,024 buffers at a time."""


class OpenFile:
    """Whoever reads holds a reference, so that letting go of the file never closes it under a reader.

    A number that is closed under a reader may be the number of another file by the next call.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    @property
    def status(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def read(self, offset: int, out: memoryview) -> int:
        """Fill `out` from a place of the file on, as far as the file goes; the number of bytes."""
        return self.scatter(offset, [out])

    def read_runs(self, offset: int, stride: int, run_bytes: int, out: memoryview) -> int:
        """Fill `out` with runs of bytes that begin `stride` bytes apart; the number of bytes in `out`."""
        assert 0 < run_bytes <= stride, f"runs of {run_bytes} bytes, {stride} apart"
        if run_bytes == stride:
            return self.read(offset, out)
        gap_bytes = stride - run_bytes
        gap = memoryview(bytearray(gap_bytes)) if gap_bytes <= MAX_GAP_BYTES else None
        runs_at_once = 1 if gap is None else MAX_RUNS
        for start in range(0, len(out), runs_at_once * run_bytes):
            end = min(start + runs_at_once * run_bytes, len(out))
            buffers = [out[place : place + run_bytes] for place in range(start, end, run_bytes)]
            if gap is not None:
                buffers = [buffer for run in buffers for buffer in (run, gap)][:-1]
            wanted = sum(map(len, buffers))
            num_read = self.scatter(offset + start // run_bytes * stride, buffers)
            if num_read < wanted:
                return start + num_read // stride * run_bytes + min(num_read % stride, run_bytes)
        return len(out)

    def scatter(self, offset: int, buffers: list[memoryview]) -> int:
        """Fill buffers, at most as many as a system takes, one after the other from a place of the file on.

        One call of the system may return less than it was asked. The list is not as it was afterwards.
        """
        num_read = 0
        first = 0
        while first < len(buffers):
            count = os.preadv(self._descriptor, buffers[first:] if first else buffers, offset + num_read)
            if count == 0 and any(map(len, buffers[first:])):
                break
            num_read += count
            while first < len(buffers) and count >= len(buffers[first]):
                count -= len(buffers[first])
                first += 1
            if count:
                buffers[first] = buffers[first][count:]
        return num_read

"""Files of a model: bytes at positions, by any number of threads (OpenFile), and JSON read as hostile input; no torch."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from holdfast.errors import ModelFormatError, shown
from holdfast.models.settings import plain

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


MAX_JSON_BYTES = 32 * 2**20
"""Of one file; the largest indexes there are have about 15 MiB."""
AGAIN = "download the model again"
CONFIG_FILE = "config.json"
EXPERT_DTYPE_KEY = "expert_dtype"
"""How experts are stored, beside quantization_config or in it."""
QUANTIZATION_KEY = "quantization_config"
"""In it: how the checkpoint is quantized already."""
MANIFEST_FILE = "holdfast-weights.json"
"""A folder that has it holds weights that were saved quantized (loading/quantized/manifest.py)."""
MODULES_FILE = "modules.json"
"""What sentence-transformers does with hidden states (loading/pooling.py)."""
POOLING_FILES = (MODULES_FILE, "1_Pooling/config.json")


def read_json_object(path: Path) -> dict[str, object]:
    """The object that a JSON file holds: bounded in size and depth, without duplicate keys or NaN."""
    value = parse_json(read_small_file(path, MAX_JSON_BYTES), path.name)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name} holds a JSON {type(value).__name__}", "an object is needed", AGAIN)
    return value


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """All bytes of a regular file that has at most `max_bytes`."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFormatError(f"{path.name} is not a regular file", "a file is needed", AGAIN)
        if status.st_size > max_bytes:
            raise ModelFormatError(
                f"{path.name} has {status.st_size} bytes", f"at most {max_bytes} are read of such a file", AGAIN
            )
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelFormatError(f"{path.name} cannot be read", str(error.strerror or error), "check the file") from error
    if len(data) > max_bytes:
        raise ModelFormatError(f"{path.name} grew while it was read", f"at most {max_bytes} bytes are read", AGAIN)
    return data


def parse_json(data: bytes, file: str, parse_int: Callable[[str], int] = int) -> object:
    """The value in a JSON text; what is wrong with it is told with the name of the file."""
    try:
        return json.loads(
            data.decode("utf-8"),
            parse_int=parse_int,
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique_keys,
        )
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{file} is not UTF-8 at byte {error.start}", "JSON is UTF-8", AGAIN) from error
    except RecursionError as error:
        raise ModelFormatError(f"{file} is nested too deeply", "no model needs that", AGAIN) from error
    except ValueError as error:
        reason = plain(str(error))
        raise ModelFormatError(f"{file} is not sound JSON", reason, AGAIN) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} appears twice")
            seen.add(key)
    return values

"""Files of a model: positional reads from any number of threads (OpenFile), and JSON read as hostile input; no torch."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from holdfast.errors import ModelFormatError, shown
from holdfast.models.settings import plain

MAX_GAP_BYTES = 32 * 2**10
"""Largest gap between two runs to read and drop: copying it costs less than another system call."""
MAX_RUNS = 512
"""Most runs per system call, each with a gap; systems accept 1,024 buffers per call."""
MAX_JSON_BYTES = 32 * 2**20
"""Most bytes of one file; the largest known indexes have about 15 MiB."""
CONFIG_FILE = "config.json"
EXPERT_DTYPE_KEY = "expert_dtype"
"""How experts are stored, beside quantization_config or in it."""
QUANTIZATION_KEY = "quantization_config"
"""Key of config.json: how the checkpoint is already quantized."""
MANIFEST_FILE = "holdfast-weights.json"
"""File that marks a folder of weights saved quantized (loading/quantized/manifest.py)."""
MODULES_FILE = "modules.json"
"""How sentence-transformers pools hidden states (loading/pooling.py)."""
POOLING_FILES = (MODULES_FILE, "1_Pooling/config.json")
QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files with the quantization of older checkpoints, whose config.json has none, and the method of those that name none."""
TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Small files beside the weights."""


class OpenFile:
    """A descriptor that closes with its last reference, so a read never uses a reused descriptor number."""

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
        """Fill `out` from byte `offset`, up to the end of the file; return the number of bytes."""
        return self.scatter(offset, [out])

    def read_runs(self, offset: int, stride: int, run_bytes: int, out: memoryview) -> int:
        """Fill `out` with runs of bytes that begin `stride` bytes apart; return the number of bytes in `out`."""
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
        """Fill the buffers in order from byte `offset`, like `preadv` without short reads. Changes the list."""
        num_read = 0
        first = 0
        while first < len(buffers):
            count = os.preadv(self._descriptor, buffers[first:] if first else buffers, offset + num_read)
            if count == 0 and any(map(len, buffers[first:])):
                break
            num_read += count
            if not first and count == sum(map(len, buffers)):
                break  # the usual case, without a step for each buffer
            while first < len(buffers) and count >= len(buffers[first]):
                count -= len(buffers[first])
                first += 1
            if count:
                buffers[first] = buffers[first][count:]
        return num_read


def unreadable(file: object, error: OSError) -> ModelFormatError:
    """Wrap an OSError about a file."""
    return ModelFormatError("file.unreadable", file=file, reason=error.strerror or error)


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON file that holds an object: bounded in size and depth, without duplicate keys or NaN."""
    value = parse_json(read_small_file(path, MAX_JSON_BYTES), path.name)
    if not isinstance(value, dict):
        raise ModelFormatError("file.wrong_content", file=path.name, expected="an object", found=type(value).__name__)
    return value


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """Read all bytes of a regular file of at most `max_bytes`."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFormatError("file.not_regular", file=path.name)
        if status.st_size > max_bytes:
            raise ModelFormatError("file.too_large", file=path.name, num_bytes=status.st_size, maximum=max_bytes)
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise unreadable(path.name, error) from error
    if len(data) > max_bytes:
        raise ModelFormatError("file.changed", file=path.name)
    return data


def parse_json(data: bytes, file: str, parse_int: Callable[[str], int] = int) -> object:
    """Parse JSON strictly; errors name the file."""
    try:
        return json.loads(
            data.decode("utf-8"), parse_int=parse_int, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys
        )
    except RecursionError as error:
        raise ModelFormatError("file.not_json", file=file, reason="it is nested too deeply") from error
    except ValueError as error:
        is_binary = isinstance(error, UnicodeDecodeError)
        reason = f"byte {error.start} is not UTF-8" if is_binary else plain(str(error))
        raise ModelFormatError("file.not_json", file=file, reason=reason) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {shown(key)} appears twice")
        values[key] = value
    return values

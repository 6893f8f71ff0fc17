"""One safetensors file: its header read as hostile input, its tensors as byte ranges; no torch.

[ header bytes: u64 | header: JSON name -> dtype, shape, data_offsets | tensor data ........ ]
0                   8                                                data_start     file_bytes

Offsets in the header count from data_start. The tensors must cover the data exactly: no hole, no overlap, no byte after
the last. Sizes are Python integers, so no product can wrap. Every file that is accepted here is accepted by the
safetensors package too; a test compares them.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import TypeGuard

from holdfast.errors import ModelFormatError, shown
from holdfast.loading.sources.json_file import AGAIN, parse_json
from holdfast.loading.sources.open_file import OpenFile

MAX_HEADER_BYTES = 16 * 2**20
"""The safetensors package reads up to 100 MB; 16 MiB describe more than 100,000 tensors, far more than any file has."""
MAX_DIMENSIONS = 8
LFS_MARK = b"version https://git-lfs"

DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("U8", "I8", "BOOL"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of an element of every type that the format knows."""
TORCH_DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "uint8",
}
"""torch's names of those that are read as they are; another type keeps its own name, for messages.

Numbers of F8_E8M0 are exponents alone. They are read as bytes, which is how checkpoints have them also where they say U8.
"""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in the file."""

    name: str
    dtype: str
    """As the file names it, such as BF16."""
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file."""
    num_bytes: int

    @property
    def torch_dtype(self) -> str:
        return TORCH_DTYPES.get(self.dtype, self.dtype)


class SafetensorsFile:
    """A file whose header has been checked; tensors are in the order of their data.

    It is open between a read and `close`. Any number of threads may read, and close, at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._opened: OpenFile | None = None
        try:
            # Checked before opening: opening a pipe would wait for its other end.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ModelFormatError(f"{path.name} is not a regular file", "a safetensors file is needed", AGAIN)
            opened = OpenFile(path)
            self._identity = _identity(opened)
            self.tensors: Mapping[str, StoredTensor] = _read_header(opened, path.name)
        except OSError as error:
            raise ModelFormatError(
                f"{path.name} cannot be read", str(error.strerror or error), "check the file"
            ) from error

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes of a tensor from byte `start` of it on."""
        self.read_runs_into(name, start, len(buffer) or 1, len(buffer) or 1, buffer)

    def read_runs_into(self, name: str, start: int, stride: int, run_bytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs of a tensor's bytes: the first at byte `start` of it, each `stride` behind the last."""
        tensor = self.tensors[name]
        num_runs, rest = divmod(len(buffer), run_bytes)
        end = start + max(num_runs - 1, 0) * stride + min(len(buffer), run_bytes)
        assert rest == 0, f"{name}: {len(buffer)=} is not so many runs of {run_bytes=}"
        assert 0 <= start <= end <= tensor.num_bytes, f"{name}: {start=} {end=} {len(buffer)=} {tensor=}"
        try:
            opened = self._open()
            is_same = _identity(opened) == self._identity
            num_read = opened.read_runs(tensor.offset + start, stride, run_bytes, buffer) if is_same else 0
        except OSError as error:
            raise ModelFormatError(
                f"{self.path.name}: {shown(name)} cannot be read", str(error.strerror or error), "check the disk"
            ) from error
        if num_read < len(buffer) or not is_same:
            self.close()
            raise ModelFormatError(
                f"{self.path.name} was changed before {shown(name)} was read",
                "its header was checked as it was",
                "leave the file alone and start again",
            )

    def scatter(self, offset: int, buffers: list[memoryview]) -> bool:
        """Fill buffers one after the other with what the file has from byte `offset` of it on; whether all were filled.

        Why not, `read_into` tells.
        """
        num_wanted = sum(map(len, buffers))
        try:
            opened = self._open()
            return _identity(opened) == self._identity and opened.scatter(offset, buffers) == num_wanted
        except OSError:
            return False

    def close(self) -> None:
        """Let go of the file; may be called twice, and a later read opens it again. A read that goes on ends well."""
        with self._lock:
            self._opened = None

    def _open(self) -> OpenFile:
        with self._lock:
            if self._opened is None:
                self._opened = OpenFile(self.path)
            return self._opened


def _identity(opened: OpenFile) -> tuple[int, int, int]:
    status = opened.status
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_header(opened: OpenFile, file: str) -> dict[str, StoredTensor]:
    file_bytes = opened.status.st_size
    start = _read_bytes(opened, 0, max(8, len(LFS_MARK)))
    if start.startswith(LFS_MARK):
        raise ModelFormatError(
            f"{file} is a Git LFS pointer", "the weights themselves were not downloaded", "run git lfs pull"
        )
    if len(start) < 8:
        raise ModelFormatError(f"{file} has {len(start)} bytes", "a safetensors header begins with 8", AGAIN)
    header_bytes = int.from_bytes(start[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise ModelFormatError(
            f"{file} says its header has {header_bytes} bytes",
            f"at most {MAX_HEADER_BYTES} are read",
            "check that it is a safetensors file",
        )
    if header_bytes > file_bytes - 8:
        raise ModelFormatError(
            f"{file} says its header has {header_bytes} bytes", f"the file has {file_bytes}: it is cut off", AGAIN
        )
    header = _read_bytes(opened, 8, header_bytes)
    if not header.startswith(b"{"):
        raise ModelFormatError(
            f"{file} does not begin as safetensors do", "its header is no JSON object", "check that it is one"
        )
    values = parse_json(header, file, parse_int=_natural)
    assert isinstance(values, dict), f"{file}: a text that begins with a brace parsed to {type(values)}"
    return _check_tensors(values, file, 8 + header_bytes, file_bytes)


def _read_bytes(opened: OpenFile, offset: int, num_bytes: int) -> bytes:
    """Up to `num_bytes`, fewer where the file ends."""
    data = bytearray(num_bytes)
    return bytes(data[: opened.read(offset, memoryview(data))])


def _check_tensors(header: dict[str, object], file: str, data_start: int, file_bytes: int) -> dict[str, StoredTensor]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) and _is_text(key) and _is_text(value) for key, value in metadata.items()
    ):
        raise ModelFormatError(f"{file}: __metadata__ is not a map of strings", "the header is broken", AGAIN)
    tensors = [_check_tensor(name, info, file, data_start) for name, info in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a hole before it"
            raise ModelFormatError(
                f"{file}: {shown(tensor.name)} {what}",
                f"it begins at byte {tensor.offset - data_start} of the data, {end - data_start} is expected",
                AGAIN,
            )
        end += tensor.num_bytes
        if end > file_bytes:
            raise ModelFormatError(
                f"{file} is cut off in {shown(tensor.name)}",
                f"it needs {end} bytes and has {file_bytes}",
                AGAIN,
            )
    if end != file_bytes:
        raise ModelFormatError(
            f"{file} has {file_bytes - end} bytes after its last tensor", "nothing belongs there", AGAIN
        )
    return {tensor.name: tensor for tensor in tensors}


def _check_tensor(name: str, info: object, file: str, data_start: int) -> StoredTensor:
    def broken(what: str, has: str) -> ModelFormatError:
        return ModelFormatError(f"{file}: {shown(name)} {what}", has, AGAIN)

    if not _is_text(name):
        raise broken("is no sound name", "half of a character pair stands alone")
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise broken("is not described by dtype, shape and data_offsets", f"the header says {shown(info)}")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise broken(f"has the unknown type {shown(dtype)}", f"the types are {', '.join(DTYPE_BITS)}")
    if not _is_naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise broken(f"has the shape {shown(shape)}", f"up to {MAX_DIMENSIONS} whole numbers are needed")
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken(f"has data_offsets {shown(offsets)}", "a start and an end are needed")
    num_bits = prod(shape) * DTYPE_BITS[dtype]
    if prod(max(size, 1) for size in shape) * DTYPE_BITS[dtype] >= 2**64:
        raise broken(f"has the shape {shown(shape)}", "no file is that large")
    if num_bits != 8 * (offsets[1] - offsets[0]):
        raise broken(
            f"has {offsets[1] - offsets[0]} bytes", f"{dtype} of shape {shown(shape)} needs {num_bits / 8:.15g}"
        )
    return StoredTensor(name, dtype, tuple(shape), data_start + offsets[0], offsets[1] - offsets[0])


def _natural(digits: str) -> int:
    """A number of a header: the format knows unsigned 64-bit ones only, and a longer text is never converted."""
    if len(digits) > 20 or digits[0] == "-":
        raise ValueError(f"{digits[:20]} is out of range")
    return int(digits)


def _is_naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item < 2**63 for item in value)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

"""GGUF files: the header read as hostile input, and tensor data by positional reads; no mapping, no torch.

[ magic, version, counts | key = value ... | name, shape, type, offset ... | padding | tensor data ............ ]
0                                                                                    data_start       file_bytes

Every count, length and offset is a Python integer that is compared with the size of the file before anything of that
size is allocated or read. The result is consistent: no tensor leaves the file or touches another.
"""

import json
import os
import stat
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from math import prod
from pathlib import Path
from threading import Lock

from holdfast.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError, shown
from holdfast.loading.sources.files import OpenFile, unreadable
from holdfast.models.settings import MAX_SHOWN

MAX_HEADER_BYTES = 128 * 2**20
"""A vocabulary of half a million tokens with its merges takes about 40 MiB."""
FIRST_READ_BYTES = 2**20
MAX_NAME_BYTES = 2**16 - 1
BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in zip((*range(BOOL + 1), 10, 11, 12), "BbHhIifBQqd", strict=True)
}
"""Scalar types by number in the file. `array` has the same sizes for them on every platform of torch."""
MAGIC = b"GGUF"
LFS_POINTER = b"vers"
"""First bytes of "version https://git-lfs..."."""
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ENTRIES = 100_000
"""Most keys and most tensors; the largest models have a few thousand."""
MAX_ALIGNMENT = 2**20
DEFAULT_ALIGNMENT = 32
MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length of the key, the key, type, value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length of the name, the name, how many dimensions, one, type, offset


class HeaderBytes:
    """The beginning of a file, read as far as parsing needs, and the position in it."""

    def __init__(self, path: Path, descriptor: int, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.position = 0
        self.data = b""
        self._descriptor = descriptor

    def malformed(self, problem: str) -> ModelFormatError:
        """Return the error that names this file."""
        return ModelFormatError("gguf.malformed", file=self.path.name, problem=problem)

    def truncated(self, what: str, end: int, limit: str) -> ModelFormatError:
        return ModelFormatError("gguf.truncated", file=self.path.name, what=what, end=end, limit=limit)

    def cover(self, end: int, what: str) -> None:
        """Read until `data` holds bytes [0, end)."""
        if end <= len(self.data):
            return
        if end > self.file_bytes:
            raise self.truncated(what, end, f"the file ends at {self.file_bytes}")
        if end > MAX_HEADER_BYTES:
            raise self.truncated(what, end, f"headers have at most {MAX_HEADER_BYTES} bytes")
        wanted = min(max(end, 2 * len(self.data), FIRST_READ_BYTES), self.file_bytes, MAX_HEADER_BYTES)
        pieces = [self.data]
        have = len(self.data)
        while have < wanted:
            piece = os.pread(self._descriptor, wanted - have, have)
            if not piece:
                raise self.truncated(what, end, f"the file shrank to {have} bytes while it was read")
            pieces.append(piece)
            have += len(piece)
        self.data = b"".join(pieces)

    def take(self, num_bytes: int, what: str) -> bytes:
        """Return the next bytes."""
        start = self.position
        self.cover(start + num_bytes, what)
        self.position = start + num_bytes
        return self.data[start : self.position]

    def u32(self, what: str) -> int:
        return SCALARS[4].unpack(self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return SCALARS[10].unpack(self.take(8, what))[0]

    def name(self, what: str) -> str:
        """Read the name of a key or a tensor: a short string in UTF-8."""
        what = f"the name of {what}"
        num_bytes = self.u64(what)
        if not 1 <= num_bytes <= MAX_NAME_BYTES:
            raise self.malformed(f"{what} has {num_bytes} bytes, not 1 to {MAX_NAME_BYTES}")
        return self._text(self.take(num_bytes, what), what)

    def string(self, what: str) -> str:
        return self._text(self.take(self.u64(what), what), what)

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.malformed(f"{what} is {shown(raw[:MAX_SHOWN])}, which is not UTF-8") from None

    def check_count(self, count: int, min_item_bytes: int, max_count: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything of that size is made."""
        left = self.file_bytes - self.position
        if count > max_count or count * min_item_bytes > left:
            raise self.malformed(f"it announces {count} {what}, has {left} bytes left and may hold {max_count}")


def read_value(header: HeaderBytes, key: str) -> object:
    """Read the value of a key: int, float, bool, str, list[str] or array."""
    what = f"key {shown(key)}"
    value_type = header.u32(what)
    if value_type == STRING:
        return header.string(what)
    if value_type == ARRAY:
        return _read_array(header, what)
    scalar = _scalar(header, value_type, what)
    value = scalar.unpack(header.take(scalar.size, what))[0]
    if value_type != BOOL:
        return value
    if value > 1:
        raise header.malformed(f"{what} is the bool {value}, not 0 or 1")
    return bool(value)


def _scalar(header: HeaderBytes, value_type: int, what: str) -> struct.Struct:
    scalar = SCALARS.get(value_type)
    if scalar is None:
        raise header.malformed(f"{what} has values of the unknown type number {value_type}")
    return scalar


def _read_array(header: HeaderBytes, what: str) -> object:
    item_type = header.u32(what)
    count = header.u64(what)
    if item_type == ARRAY:
        raise header.malformed(f"{what} is an array of arrays, not of numbers or strings")
    if item_type == STRING:
        header.check_count(count, 8, header.file_bytes, f"strings in {what}")
        return _read_strings(header, count, what)
    scalar = _scalar(header, item_type, what)
    header.check_count(count, scalar.size, header.file_bytes, f"values in {what}")
    raw = header.take(count * scalar.size, what)
    if item_type == BOOL and raw.translate(None, b"\0\1"):
        raise header.malformed(f"{what} holds bools other than 0 and 1")
    values = array(scalar.format[1:])
    assert values.itemsize == scalar.size, f"{values.typecode=} has {values.itemsize=}, the file has {scalar.size}"
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _read_strings(header: HeaderBytes, count: int, what: str) -> list[str]:
    """Read strings. The loop uses only local names: vocabularies have hundreds of thousands of strings."""
    data, have, position = header.data, len(header.data), header.position
    unpack_length = SCALARS[10].unpack_from
    strings: list[str] = []
    append = strings.append
    for _ in range(count):
        start = position + 8
        if start > have:
            header.cover(start, what)
            data, have = header.data, len(header.data)
        (num_bytes,) = unpack_length(data, position)
        position = start + num_bytes
        if position > have:
            header.cover(position, what)
            data, have = header.data, len(header.data)
        append(data[start:position].decode("utf-8", "surrogateescape"))
    header.position = position
    return strings


@dataclass(frozen=True, slots=True)
class GGMLType:
    """Storage type: fixed-size blocks of elements along the last dimension."""

    name: str
    block_elements: int
    block_bytes: int


_TABLES = json.loads(resources.files("holdfast").joinpath("data", "ggml_types.json").read_text(encoding="utf-8"))
TYPES: dict[int, GGMLType] = {int(number): GGMLType(*known) for number, known in _TABLES["readable"].items()}
"""Readable types by their number in the file."""
OTHER_TYPES: dict[int, str] = {int(number): name for number, name in _TABLES["other"].items()}
"""Names, for the message, of types that cannot be read."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Location of one tensor. `shape` has the rows first; the file writes dimensions in reverse."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file."""
    num_bytes: int
    part: int = 0
    """Index of its file, for a model in several."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A checked header. Numeric arrays are `array.array` (bools as 0 and 1), string arrays are lists.

    Strings in arrays are tokens and merges and need not be UTF-8: stray bytes become surrogate escapes. A model in several
    files is its first one, with the tensors of all.
    """

    path: Path
    version: int
    alignment: int
    data_start: int
    file_bytes: int
    modified_ns: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, GGUFTensor]
    parts: "tuple[GGUFFile, ...]" = ()
    """The other files of a model in several."""

    @property
    def files(self) -> "tuple[GGUFFile, ...]":
        """Every file, this one first."""
        return (self, *self.parts)

    @property
    def disk_bytes(self) -> int:
        return sum(file.file_bytes for file in self.files)


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the header, and close the file; no tensor data is read."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFoundError("gguf.not_found", path=path, reason=reason) from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelFormatError("file.not_regular", file=path.name)
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            return _read_header(HeaderBytes(path, file.fileno(), status.st_size), status.st_mtime_ns)
    except OSError as error:
        raise unreadable(path.name, error) from error


def _read_header(header: HeaderBytes, modified_ns: int) -> GGUFFile:
    version = _read_version(header)
    num_tensors = header.u64("the number of tensors")
    num_keys = header.u64("the number of keys")
    header.check_count(num_keys, MIN_KEY_BYTES, MAX_ENTRIES, "keys")
    header.check_count(num_tensors, MIN_TENSOR_BYTES, MAX_ENTRIES, "tensors")
    metadata: dict[str, object] = {}
    for index in range(num_keys):
        key = header.name(f"key {index}")
        if key in metadata:
            raise header.malformed(f"key {shown(key)} occurs twice")
        metadata[key] = read_value(header, key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        isinstance(alignment, bool)
        or not isinstance(alignment, int)
        or not 0 < alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise header.malformed(f"general.alignment is {shown(alignment)}, not a power of two up to {MAX_ALIGNMENT}")
    declared = [_read_tensor(header, index) for index in range(num_tensors)]
    data_start = -(-header.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in declared:
        if tensor.name in tensors:
            raise header.malformed(f"tensor {shown(tensor.name)} occurs twice")
        tensors[tensor.name] = _place(header, tensor, data_start, alignment)
    _check_overlap(header, tensors)
    return GGUFFile(header.path, version, alignment, data_start, header.file_bytes, modified_ns, metadata, tensors)


def _read_version(header: HeaderBytes) -> int:
    file, magic = header.path.name, header.take(4, "the magic number")
    if magic == LFS_POINTER:
        raise ModelFormatError("file.lfs_pointer", file=file)
    if magic != MAGIC:
        raise ModelFormatError("gguf.not_gguf", file=file, magic=magic)
    version = header.u32("the version")
    if version not in VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        named = "big-endian numbers" if is_swapped else f"version {version}"
        raise ModelFormatError("gguf.unsupported_version", file=file, version=named)
    return version


def _read_tensor(header: HeaderBytes, index: int) -> GGUFTensor:
    """Read one tensor as declared: its offset is still relative to the data."""
    name = header.name(f"tensor {index}")
    what = f"tensor {shown(name)}"
    num_dimensions = header.u32(what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise header.malformed(f"{what} has {num_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(reversed([header.u64(what) for _ in range(num_dimensions)]))
    number = header.u32(what)
    offset = header.u64(what)
    if min(shape) == 0:
        raise header.malformed(f"{what} has shape {shape}, with an empty dimension")
    kind = TYPES.get(number)
    if kind is None:
        accepted = sorted((known.name for known in TYPES.values()), key=lambda name: name.lstrip("I"))
        stored = OTHER_TYPES.get(number, f"type number {number}")
        raise UnsupportedModelError(
            "gguf.unsupported_type", file=header.path.name, tensor=name, type=stored, accepted=accepted
        )
    if shape[-1] % kind.block_elements:
        raise header.malformed(f"{what} has rows of {shape[-1]} elements, not blocks of {kind.block_elements}")
    return GGUFTensor(name, kind, shape, offset, prod(shape) // kind.block_elements * kind.block_bytes)


def _place(header: HeaderBytes, tensor: GGUFTensor, data_start: int, alignment: int) -> GGUFTensor:
    """Return the tensor with its offset from the beginning of the file, inside the file."""
    what = f"tensor {shown(tensor.name)}"
    if tensor.offset % alignment:
        raise header.malformed(f"{what} starts at offset {tensor.offset}, not at a multiple of {alignment}")
    start = data_start + tensor.offset
    if start + tensor.num_bytes > header.file_bytes:
        raise header.truncated(what, start + tensor.num_bytes, f"the file ends at {header.file_bytes}")
    return replace(tensor, offset=start)


def _check_overlap(header: HeaderBytes, tensors: Mapping[str, GGUFTensor]) -> None:
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, tensor in pairwise(ordered):
        file, end = header.path.name, before.offset + before.num_bytes
        if tensor.offset < end:
            start, other = tensor.offset, before.name
            raise ModelFormatError("gguf.overlap", file=file, tensor=tensor.name, start=start, other=other, end=end)


class GGUFData:
    """Tensor data of a model's files; opens each at the first read, if unchanged since. Thread-safe."""

    def __init__(self, file: GGUFFile) -> None:
        self._files = file.files
        self._lock = Lock()
        self._opened: dict[int, OpenFile] = {}

    def read_into(self, tensor: GGUFTensor, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes of a tensor, from its byte `start`."""
        assert 0 <= start <= start + len(buffer) <= tensor.num_bytes, f"{tensor.name}: {start=} {len(buffer)=}"
        name = self._files[tensor.part].path.name
        try:
            num_read = self._open(tensor.part).read(tensor.offset + start, buffer)
        except OSError as error:
            raise unreadable(f"{name}: tensor {shown(tensor.name)}", error) from error
        if num_read < len(buffer):
            raise ModelFormatError("file.changed", file=name)

    def close(self) -> None:
        """Drop the files. Idempotent; running reads finish, and a later read opens its file again."""
        with self._lock:
            self._opened = {}

    def _open(self, part: int) -> OpenFile:
        with self._lock:
            if part not in self._opened:
                file = self._files[part]
                opened = OpenFile(file.path)
                if (opened.status.st_size, opened.status.st_mtime_ns) != (file.file_bytes, file.modified_ns):
                    raise ModelFormatError("file.changed", file=file.path.name)
                self._opened[part] = opened
            return self._opened[part]


def read_floats(file: GGUFFile, tensor: GGUFTensor) -> list[float]:
    """Read all values of a small F32 tensor."""
    assert tensor.type.name == "F32", f"{tensor.name} is {tensor.type.name}"
    values = array("f", bytes(tensor.num_bytes))
    GGUFData(file).read_into(tensor, 0, memoryview(values).cast("B"))
    return values.tolist()

"""GGUF files: the header read as hostile input, and tensor data by positional reads; no mapping, no torch.

[ magic, version, counts | key = value ... | name, shape, type, offset ... | padding | tensor data ............ ]
0                                                                                    data_start       file_bytes

Every count, length and offset is a Python integer that is compared with the size of the file before anything of that
size is allocated or read. What comes out is consistent: no tensor leaves the file or touches another.
"""

import os
import stat
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock

from holdfast.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError, shown
from holdfast.loading.sources.files import OpenFile
from holdfast.models.settings import MAX_SHOWN

MAX_HEADER_BYTES = 128 * 2**20
"""A vocabulary of half a million tokens with its merges takes about 40 MiB."""
FIRST_READ_BYTES = 2**20
MAX_NAME_BYTES = 2**16 - 1

BOOL, STRING, ARRAY = 7, 8, 9
SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
"""Scalar types by their number in the file. The codes mean the same sizes to `array` on every platform torch runs on."""
_U32 = SCALARS[4]
_U64 = SCALARS[10]


class HeaderBytes:
    """The beginning of a file, read as far as parsing has come, and the position in it."""

    def __init__(self, path: Path, descriptor: int, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.position = 0
        self.data = b""
        self._descriptor = descriptor

    def broken(self, asked: str, has: str, do: str = "download or convert the model again") -> ModelFormatError:
        """The error that names this file."""
        return ModelFormatError(f"{self.path.name}: {asked}", has, do)

    def cover(self, end: int, what: str) -> None:
        """Have bytes [0, end) in `data`."""
        if end <= len(self.data):
            return
        if end > self.file_bytes:
            raise self.broken(f"{what} would reach to byte {end}", f"the file ends at {self.file_bytes}")
        if end > MAX_HEADER_BYTES:
            raise self.broken(f"{what} would reach to byte {end}", f"headers end within {MAX_HEADER_BYTES} bytes")
        wanted = min(max(end, 2 * len(self.data), FIRST_READ_BYTES), self.file_bytes, MAX_HEADER_BYTES)
        pieces = [self.data]
        have = len(self.data)
        while have < wanted:
            piece = os.pread(self._descriptor, wanted - have, have)
            if not piece:
                raise self.broken(f"{what} would reach to byte {end}", f"the file shrank to {have} while it was read")
            pieces.append(piece)
            have += len(piece)
        self.data = b"".join(pieces)

    def take(self, num_bytes: int, what: str) -> bytes:
        """The next bytes."""
        start = self.position
        self.cover(start + num_bytes, what)
        self.position = start + num_bytes
        return self.data[start : self.position]

    def u32(self, what: str) -> int:
        return _U32.unpack(self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack(self.take(8, what))[0]

    def name(self, what: str) -> str:
        """The name of a key or a tensor: a short string in UTF-8."""
        num_bytes = self.u64(f"the name of {what}")
        if not 1 <= num_bytes <= MAX_NAME_BYTES:
            raise self.broken(f"the name of {what} has {num_bytes} bytes", f"names have 1 to {MAX_NAME_BYTES}")
        return self._text(self.take(num_bytes, f"the name of {what}"), f"the name of {what}")

    def string(self, what: str) -> str:
        return self._text(self.take(self.u64(what), what), what)

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.broken(f"{what} is {shown(raw[:MAX_SHOWN])}", "strings are UTF-8") from None

    def check_count(self, count: int, min_item_bytes: int, max_count: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything of that size is made."""
        left = self.file_bytes - self.position
        if count > max_count or count * min_item_bytes > left:
            raise self.broken(
                f"{count} {what} are announced", f"the file has {left} bytes left and may hold {max_count} at most"
            )


def read_value(header: HeaderBytes, key: str) -> object:
    """The value of a key: int, float, bool, str, list[str] or array."""
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
        raise header.broken(f"{what} is the bool {value}", "bools are 0 or 1")
    return bool(value)


def _scalar(header: HeaderBytes, value_type: int, what: str) -> struct.Struct:
    scalar = SCALARS.get(value_type)
    if scalar is None:
        raise header.broken(f"{what} has values of type number {value_type}", "types 0 to 12 are known")
    return scalar


def _read_array(header: HeaderBytes, what: str) -> object:
    item_type = header.u32(what)
    count = header.u64(what)
    if item_type == ARRAY:
        raise header.broken(f"{what} is an array of arrays", "arrays of numbers and strings are read")
    if item_type == STRING:
        header.check_count(count, 8, header.file_bytes, f"strings in {what}")
        return _read_strings(header, count, what)
    scalar = _scalar(header, item_type, what)
    header.check_count(count, scalar.size, header.file_bytes, f"values in {what}")
    raw = header.take(count * scalar.size, what)
    if item_type == BOOL and raw.translate(None, b"\0\1"):
        raise header.broken(f"{what} holds bools other than 0 and 1", "bools are 0 or 1")
    values = array(scalar.format[1:])
    assert values.itemsize == scalar.size, f"{values.typecode=} has {values.itemsize=}, the file has {scalar.size}"
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _read_strings(header: HeaderBytes, count: int, what: str) -> list[str]:
    """Vocabularies have hundreds of thousands of these, so the loop keeps to local names."""
    data, have, position = header.data, len(header.data), header.position
    unpack_length = _U64.unpack_from
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


MAGIC = b"GGUF"
LFS_POINTER = b"vers"
"""How "version https://git-lfs..." begins."""
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ENTRIES = 100_000
"""Most keys and most tensors; the largest models have a few thousand."""
MAX_ALIGNMENT = 2**20
DEFAULT_ALIGNMENT = 32
MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length of the key, the key, type, value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length of the name, the name, how many dimensions, one, type, offset


@dataclass(frozen=True, slots=True)
class GGMLType:
    """How elements are stored: blocks of so many elements in so many bytes, along the last dimension."""

    name: str
    block_elements: int
    block_bytes: int


TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    20: GGMLType("IQ4_NL", 32, 18),
    23: GGMLType("IQ4_XS", 256, 136),
    30: GGMLType("BF16", 1, 2),
    39: GGMLType("MXFP4", 32, 17),
}
"""The types that can be read, by their number in the file."""
OTHER_TYPES: dict[int, str] = {
    number: name
    for start, names in {
        9: "Q8_1",
        15: "Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S",
        21: "IQ3_S IQ2_S",
        24: "I8 I16 I32 I64 F64 IQ1_M",
        34: "TQ1_0 TQ2_0",
        40: "NVFP4 Q1_0",
    }.items()
    for number, name in enumerate(names.split(), start)
}
"""Names, for the message, of types that cannot."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` has the rows first; the file writes dimensions the other way round."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file."""
    num_bytes: int
    part: int = 0
    """Which file of a model in several it lies in."""

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one run along the last dimension, always a whole number of blocks."""
        return self.shape[-1] // self.type.block_elements * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A checked header. Numeric arrays are `array.array` (bools as 0 and 1), string arrays are lists.

    Strings in arrays are tokens and merges and need not be UTF-8: stray bytes are kept as surrogate escapes.
    """

    path: Path
    version: int
    alignment: int
    data_start: int
    file_bytes: int
    modified_ns: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, GGUFTensor]
    """Those of all files of a model in several."""
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
    """Read and check the header. The file is closed again; no tensor data is read."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{path} was asked", f"it cannot be found: {_why(error)}", "check the path") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelFormatError(f"{path.name} is not a regular file", "a GGUF file is needed", "give the path of one")
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            return _read_header(HeaderBytes(path, file.fileno(), status.st_size), status.st_mtime_ns)
    except OSError as error:
        raise ModelFormatError(
            f"{path.name} cannot be read", _why(error), "check its permissions and the disk"
        ) from error


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


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
            raise header.broken(f"key {shown(key)} occurs twice", "keys are unique")
        metadata[key] = read_value(header, key)
    alignment = _read_alignment(header, metadata)
    declared = [_read_tensor(header, index) for index in range(num_tensors)]
    data_start = -(-header.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in declared:
        if tensor.name in tensors:
            raise header.broken(f"tensor {shown(tensor.name)} occurs twice", "names are unique")
        tensors[tensor.name] = _place(header, tensor, data_start, alignment)
    _check_overlap(header, tensors)
    return GGUFFile(
        path=header.path,
        version=version,
        alignment=alignment,
        data_start=data_start,
        file_bytes=header.file_bytes,
        modified_ns=modified_ns,
        metadata=metadata,
        tensors=tensors,
    )


def _read_version(header: HeaderBytes) -> int:
    magic = header.take(4, "the magic number")
    if magic == LFS_POINTER:
        raise header.broken("the file is a Git LFS pointer", "the weights were not downloaded", "run git lfs pull")
    if magic != MAGIC:
        raise header.broken(f"the file begins with {magic!r}", f"GGUF files begin with {MAGIC!r}", "give a .gguf file")
    version = header.u32("the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise header.broken("the file is big-endian", "little-endian files are read", "convert the model again")
        raise header.broken(f"the version is {version}", "versions 2 and 3 are read", "convert the model again")
    return version


def _read_alignment(header: HeaderBytes, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int):
        raise header.broken("key 'general.alignment' is not a whole number", "the data cannot be found without it")
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise header.broken(f"key 'general.alignment' is {alignment}", f"powers of two up to {MAX_ALIGNMENT} are read")
    return alignment


def _read_tensor(header: HeaderBytes, index: int) -> GGUFTensor:
    """One tensor as declared: its offset is still relative to the data."""
    name = header.name(f"tensor {index}")
    what = f"tensor {shown(name)}"
    num_dimensions = header.u32(what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise header.broken(f"{what} has {num_dimensions} dimensions", f"tensors have 1 to {MAX_DIMENSIONS}")
    shape = tuple(reversed([header.u64(what) for _ in range(num_dimensions)]))
    type_number = header.u32(what)
    offset = header.u64(what)
    if min(shape) == 0:
        raise header.broken(f"{what} has shape {shape}", "every dimension is at least 1")
    ggml_type = TYPES.get(type_number)
    if ggml_type is None:
        known = ", ".join(sorted((known.name for known in TYPES.values()), key=lambda name: name.lstrip("I")))
        raise UnsupportedModelError(
            f"{header.path.name}: {what} is stored as {OTHER_TYPES.get(type_number, f'type number {type_number}')}",
            f"the types that can be read are {known}",
            "take the model in another quantization, such as Q4_K_M, IQ4_XS or Q8_0",
        )
    if shape[-1] % ggml_type.block_elements:
        raise header.broken(
            f"{what} has rows of {shape[-1]} elements", f"{ggml_type.name} stores blocks of {ggml_type.block_elements}"
        )
    num_bytes = prod(shape) // ggml_type.block_elements * ggml_type.block_bytes
    return GGUFTensor(name, ggml_type, shape, offset, num_bytes)


def _place(header: HeaderBytes, tensor: GGUFTensor, data_start: int, alignment: int) -> GGUFTensor:
    """The tensor with its offset from the beginning of the file, inside the file."""
    if tensor.offset % alignment:
        raise header.broken(
            f"tensor {shown(tensor.name)} starts at offset {tensor.offset}",
            f"the file aligns tensors to {alignment} bytes",
        )
    start = data_start + tensor.offset
    if start + tensor.num_bytes > header.file_bytes:
        raise header.broken(
            f"tensor {shown(tensor.name)} reaches from byte {start} to {start + tensor.num_bytes}",
            f"the file ends at {header.file_bytes}",
        )
    return GGUFTensor(tensor.name, tensor.type, tensor.shape, start, tensor.num_bytes)


def _check_overlap(header: HeaderBytes, tensors: Mapping[str, GGUFTensor]) -> None:
    previous: GGUFTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if previous is not None and tensor.offset < previous.offset + previous.num_bytes:
            raise header.broken(
                f"tensor {shown(tensor.name)} starts at byte {tensor.offset}",
                f"tensor {shown(previous.name)} reaches to {previous.offset + previous.num_bytes}",
            )
        previous = tensor


class GGUFData:
    """Files are opened at their first read, and only if they are those whose headers were checked; any thread may read."""

    def __init__(self, file: GGUFFile) -> None:
        self._files = file.files
        self._lock = Lock()
        self._opened: dict[int, OpenFile] = {}

    def read_into(self, tensor: GGUFTensor, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes of a tensor from its byte `start` on."""
        assert 0 <= start <= start + len(buffer) <= tensor.num_bytes, f"{tensor.name}: {start=} {len(buffer)=}"
        try:
            num_read = self._open(tensor.part).read(tensor.offset + start, buffer)
        except OSError as error:
            raise ModelFormatError(
                f"{self._files[tensor.part].path.name}: tensor {shown(tensor.name)} cannot be read",
                error.strerror or str(error),
                "check the file and the disk",
            ) from error
        if num_read < len(buffer):
            raise _changed(self._files[tensor.part])

    def close(self) -> None:
        """Let go of the files; may be called twice. A later read opens one again, and one that goes on ends well."""
        with self._lock:
            self._opened = {}

    def _open(self, part: int) -> OpenFile:
        with self._lock:
            if part not in self._opened:
                file = self._files[part]
                opened = OpenFile(file.path)
                if (opened.status.st_size, opened.status.st_mtime_ns) != (file.file_bytes, file.modified_ns):
                    raise _changed(file)
                self._opened[part] = opened
            return self._opened[part]


def _changed(file: GGUFFile) -> ModelFormatError:
    return ModelFormatError(
        f"{file.path.name} changed after its header was read",
        "weights would be read from the wrong places",
        "leave the file alone and start again",
    )


def read_floats(file: GGUFFile, tensor: GGUFTensor) -> list[float]:
    """All values of a small F32 tensor."""
    assert tensor.type.name == "F32", f"{tensor.name} is {tensor.type.name}"
    data = GGUFData(file)
    values = array("f", bytes(tensor.num_bytes))
    try:
        data.read_into(tensor, 0, memoryview(values).cast("B"))
    finally:
        data.close()
    return values.tolist()

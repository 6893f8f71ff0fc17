"""The header of a GGUF file (versions 2 and 3, little endian), read as hostile input; no torch.

[ magic, version, counts | key = value ... | name, shape, type, offset ... | padding | tensor data ............ ]
0                                                                                    data_start       file_bytes

Every count, length and offset is a Python integer that is compared with the size of the file before anything of that
size is allocated or read. What comes out is consistent: no tensor leaves the file or touches another.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from holdfast.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError, shown
from holdfast.loading.gguf.gguf_values import HeaderBytes, read_value

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
MIN_TENSOR_BYTES = (
    8 + 1 + 4 + 8 + 4 + 8
)  # length of the name, the name, number of dimensions, one of them, type, offset


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
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    30: GGMLType("BF16", 1, 2),
}
"""The types that can be read, by their number in the file."""
OTHER_TYPES: dict[int, str] = {
    number: name
    for start, names in {
        9: "Q8_1 Q2_K Q3_K",
        15: "Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M",
        34: "TQ1_0 TQ2_0",
        39: "MXFP4 NVFP4 Q1_0",
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
        known = ", ".join(sorted(known.name for known in TYPES.values()))
        raise UnsupportedModelError(
            f"{header.path.name}: {what} is stored as {OTHER_TYPES.get(type_number, f'type number {type_number}')}",
            f"the types that can be read are {known}",
            "convert the model to one of them",
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

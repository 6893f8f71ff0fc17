"""Bytes of a GGUF header: values by key, names, shapes and places of tensors; metadata of another file unchanged; no torch.

[ magic, version, counts | key = value ... | name, shape, type, offset ... | padding | tensor data ............ ]
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.loading.gguf.file import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    MAGIC,
    SCALARS,
    STRING,
    HeaderBytes,
    read_value,
)
from holdfast.loading.sources.files import unreadable

VERSION = 3
U32, I32, F32 = 4, 5, 6
ALIGNMENT = DEFAULT_ALIGNMENT
ARRAY_TYPES: Mapping[str, int] = {"i": I32, "f": F32}
"""Types of the items of an `array.array`, by its typecode."""
DROPPED_PREFIXES = ("split.", "quantize.")
DROPPED_KEYS = ("general.alignment", "general.file_type", "general.quantization_version")
"""Keys of the file that a quantized one is made from, which say how that file is cut and stored."""
GGUFValue = str | bool | int | float | list[str] | list[bool] | array


class PlacedTensor(NamedTuple):
    """One tensor of the header; `offset` counts from the beginning of the data."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


def encode_value(value: GGUFValue) -> bytes:
    """Return the type and the bytes of a value: strings, bools, u32, f32, and arrays of these, i32 and f32.

    An empty list holds strings: a tokenizer without merges has one.
    """
    if isinstance(value, str):
        return _number(U32, STRING) + encode_string(value)
    if isinstance(value, bool):
        return _number(U32, BOOL) + _number(BOOL, value)
    if isinstance(value, int):
        return _number(U32, U32) + _number(U32, value)
    if isinstance(value, float):
        return _number(U32, F32) + _number(F32, value)
    start = _number(U32, ARRAY)
    if isinstance(value, array):
        item = ARRAY_TYPES[value.typecode]
        return start + _number(U32, item) + _count(len(value)) + struct.pack(f"<{len(value)}{value.typecode}", *value)
    if value and all(isinstance(item, bool) for item in value):
        return start + _number(U32, BOOL) + _count(len(value)) + bytes(map(bool, value))
    strings = b"".join(encode_string(item) for item in value if isinstance(item, str))
    return start + _number(U32, STRING) + _count(len(value)) + strings


def encode_string(text: str) -> bytes:
    """Return the length and the bytes of a text; bytes that were no UTF-8 stay as they were."""
    raw = text.encode("utf-8", "surrogateescape")
    return _count(len(raw)) + raw


def stored_metadata(path: Path) -> dict[str, bytes]:
    """Read the values of a file as bytes by key, without those about its own storage."""
    try:
        with open(path, "rb", buffering=0) as file:
            header = HeaderBytes(path, file.fileno(), path.stat().st_size)
            header.take(len(MAGIC) + 4 + 8, "the beginning")
            num_keys = header.u64("the number of keys")
            found: dict[str, bytes] = {}
            for index in range(num_keys):
                key = header.name(f"key {index}")
                start = header.position
                read_value(header, key)
                if key not in DROPPED_KEYS and not key.startswith(DROPPED_PREFIXES):
                    found[key] = header.data[start : header.position]
    except OSError as error:
        raise unreadable(path.name, error) from error
    return found


def header_bytes(metadata: Mapping[str, bytes], tensors: Sequence[PlacedTensor]) -> bytes:
    """Return everything before the data, padded so that data begins at a multiple of the alignment."""
    pieces = [MAGIC, _number(U32, VERSION), _count(len(tensors)), _count(len(metadata))]
    for key, value in metadata.items():
        pieces += (encode_string(key), value)
    for tensor in tensors:
        pieces += (encode_string(tensor.name), _number(U32, len(tensor.shape)))
        pieces += map(_count, reversed(tensor.shape))
        pieces += (_number(U32, tensor.type_number), _count(tensor.offset))
    header = b"".join(pieces)
    return header + bytes(-len(header) % ALIGNMENT)


def _number(kind: int, value: float) -> bytes:
    return SCALARS[kind].pack(value)


def _count(value: int) -> bytes:
    return struct.pack("<Q", value)

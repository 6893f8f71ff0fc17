"""The values in a GGUF header: bounded reads of integers, strings and arrays; no torch."""

import os
import struct
import sys
from array import array
from pathlib import Path

from holdfast.errors import ModelFormatError, shown
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

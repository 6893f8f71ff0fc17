"""Wire: values as bytes and back, with the standard library alone; what arrives is checked before it is believed; no torch.

frame    magic (4) | version (2) | kind (2) | length of the body (4) | checksum of the body (4) | body
body     int    8 bytes, signed, little-endian
         ints   an int, how many, then 4 bytes each where all of them fit (a flag says so), else 8
         text   an int, how many bytes, then UTF-8

Nothing in here runs code out of data: a reader gives integers, floats, bytes and text, and whoever asks for them makes
values of those through constructors that check.
"""

import builtins
import struct
import zlib
from collections.abc import Iterable
from typing import NoReturn

from holdfast.errors import MessageError

MAGIC = b"HFST"
VERSION = 1
MAX_BODY_BYTES = 2**30
MAX_INT32 = 2**31 - 1
_HEADER = struct.Struct("<4sHHII")
HEADER_BYTES = _HEADER.size
_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")


class Writer:
    """Collects a body."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def int(self, number: int) -> None:
        self._parts.append(_INT.pack(number))

    def float(self, number: float) -> None:
        self._parts.append(_FLOAT.pack(number))

    def ints(self, numbers: Iterable[builtins.int]) -> None:
        """A list of integers below 2**63 either way."""
        if not isinstance(numbers, (list, tuple)):
            numbers = list(numbers)
        count = len(numbers)
        try:
            packed = struct.pack(f"<q{count}i", 2 * count, *numbers)
        except struct.error:
            packed = struct.pack(f"<q{count}q", 2 * count + 1, *numbers)
        self._parts.append(packed)

    def bytes(self, data: bytes) -> None:
        self._parts.append(_INT.pack(len(data)))
        self._parts.append(data)

    def text(self, text: str) -> None:
        self.bytes(text.encode())

    def body(self) -> builtins.bytes:
        """Everything so far."""
        return b"".join(self._parts)

    def frame(self, kind: builtins.int) -> builtins.bytes:
        """Everything so far as a whole message."""
        return seal(kind, self.body())


def seal(kind: int, body: bytes) -> bytes:
    """A body as a whole message."""
    return _HEADER.pack(MAGIC, VERSION, kind, len(body), zlib.crc32(body)) + body


def pack_lists(first: int, numbers: list[int], second: int, others: list[int]) -> bytes:
    """An int and a list, twice, as a Writer writes them, in one call: for what others wait for."""
    sizes = len(numbers), len(others)
    try:
        form = f"<qq{sizes[0]}iqq{sizes[1]}i"
        return struct.pack(form, first, 2 * sizes[0], *numbers, second, 2 * sizes[1], *others)
    except struct.error:  # a number that does not fit into four bytes
        writer = Writer()
        writer.int(first)
        writer.ints(numbers)
        writer.int(second)
        writer.ints(others)
        return writer.body()


class Reader:
    """Takes a body apart, in the order in which it was written; never past its end."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._place = 0

    def int(self, low: int = -(2**63), high: int = 2**63 - 1) -> int:
        (number,) = _INT.unpack(self._take(_INT.size))
        if not low <= number <= high:
            refuse(f"it holds {number} where {low} to {high} are possible")
        return number

    def float(self) -> float:
        return _FLOAT.unpack(self._take(_FLOAT.size))[0]

    def ints(self, low: builtins.int = -(2**63), high: builtins.int = 2**63 - 1) -> tuple[builtins.int, ...]:
        """A list of integers, each within the bounds."""
        count, is_wide = divmod(self.int(0, 2 * MAX_BODY_BYTES), 2)
        data = self._take(count * (8 if is_wide else 4))
        numbers = struct.unpack(f"<{count}{'q' if is_wide else 'i'}", data)
        # Nearly every list is of counts or ids: then its bytes show at once that none is below 0, and none can be too large.
        if not is_wide and low <= 0 and high >= MAX_INT32 and data[3::4].isascii():
            return numbers
        if numbers and not (low <= min(numbers) and max(numbers) <= high):
            refuse(f"it lists {min(numbers)} to {max(numbers)} where {low} to {high} are possible")
        return numbers

    def bytes(self) -> bytes:
        return self._take(self.int(0, MAX_BODY_BYTES))

    def text(self) -> str:
        try:
            return self.bytes().decode()
        except UnicodeDecodeError as error:
            raise MessageError("a message came", "its text is not UTF-8", "send it again") from error

    def end(self) -> None:
        """Everything was read."""
        if self._place != len(self._body):
            refuse(f"{len(self._body) - self._place} bytes follow its end")

    def _take(self, count: builtins.int) -> builtins.bytes:
        end = self._place + count
        if end > len(self._body):
            refuse("it ends before what it announces")
        taken = self._body[self._place : end]
        self._place = end
        return taken


def body_length(header: bytes) -> tuple[int, int]:
    """The kind of a message and the bytes that follow its first HEADER_BYTES, once these are found sound."""
    if len(header) < HEADER_BYTES:
        refuse(f"it has {len(header)} bytes, and a header alone has {HEADER_BYTES}")
    magic, version, kind, length, _ = _HEADER.unpack_from(header)
    if magic != MAGIC:
        refuse("it does not begin as one of Holdfast's")
    if version != VERSION:
        raise MessageError(
            f"a message of version {version} came",
            f"version {VERSION} is spoken here",
            "run the same release on both sides",
        )
    if length > MAX_BODY_BYTES:
        refuse(f"it announces {length} bytes, and at most {MAX_BODY_BYTES} are taken")
    return kind, length


def open_frame(frame: bytes) -> tuple[int, Reader]:
    """The kind and the body of a whole message."""
    kind, length = body_length(frame)
    body = frame[HEADER_BYTES:]
    if len(body) != length:
        refuse(f"it has {len(body)} bytes where it announces {length}")
    if zlib.crc32(body) != _HEADER.unpack_from(frame)[4]:
        refuse("its checksum is another one")
    return kind, Reader(body)


def refuse(has: str) -> NoReturn:
    """No: the sentence says what is wrong with a message."""
    raise MessageError("a message came", has, "send it again, whole and as it was made")

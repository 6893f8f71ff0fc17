"""Wire: typed messages as checked frames between processes; msgspec is imported with the first one; no torch.

frame    magic (4) | version (2) | kind (2) | length of the body (4) | CRC-32 of the body (4) | body
body     msgpack of (number, message)

A message is a dataclass or a NamedTuple. Its annotations are its schema: a `Codec` decodes by them, so a value of
another type or out of bounds raises MessageError. Decoding runs no code from the data.
"""

import struct
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from holdfast.errors import HoldfastError, MemoryPlanError, MessageError, PlanChange, PlanTable

MAGIC = b"HFST"
VERSION = 2
MAX_BODY_BYTES = 2**30
MAX_TOKEN_ID = 2**31 - 1
MAX_POOLED_BYTES = 4 * 2**20
"""Most bytes of one hidden state: far more than any model has."""
_HEADER = struct.Struct("<4sHHII")
HEADER_BYTES = _HEADER.size


class LateType:
    """A type hint that resolves when a decoder is built, by the protocol of `typing.NewType`."""

    def __init__(self, resolve: Callable[[], Any]) -> None:
        self._resolve = resolve

    @property
    def __supertype__(self) -> Any:  # noqa: ANN401 a type expression
        return self._resolve()

    def __call__(self, value: object) -> object:
        return value


def _bounded(kind: type, **bounds: int) -> LateType:
    return LateType(lambda: Annotated[kind, _msgspec().Meta(**bounds)])


def length_bound(maximum: int) -> object:
    """Annotate a collection with at most `maximum` items."""
    return _msgspec().Meta(max_length=maximum)


class _Made(type):
    """Class of the types below: msgspec accepts any instance that `from_plain` returns."""

    def __instancecheck__(cls, instance: object) -> bool:
        return True


def made_by(make: Callable[[Any], object]) -> LateType:
    """Return the type of a value whose plain form `make` checks and converts."""
    return LateType(lambda: _Made("Made", (), {"from_plain": staticmethod(make)}))


if TYPE_CHECKING:
    Count: TypeAlias = int
    Positive: TypeAlias = int
    TokenId: TypeAlias = int
    TokenIdOrNone: TypeAlias = int
    TokenIds: TypeAlias = tuple[int, ...]
    Pooled: TypeAlias = bytes
    AnyError: TypeAlias = HoldfastError
else:
    Count = _bounded(int, ge=0)
    Positive = _bounded(int, ge=1)
    TokenId = _bounded(int, ge=0, le=MAX_TOKEN_ID)
    TokenIdOrNone = _bounded(int, ge=-1, le=MAX_TOKEN_ID)
    TokenIds = LateType(lambda: Annotated[tuple[TokenId, ...], _msgspec().Meta(min_length=1)])
    Pooled = _bounded(bytes, max_length=MAX_POOLED_BYTES)
    AnyError = made_by(lambda plain: _error(plain))


class Codec:
    """Encodes messages of the given types as frames, and decodes them."""

    def __init__(self, types: Mapping[int, Any], check: Callable[[Any], None] | None = None) -> None:
        """`types` by frame kind; `check` raises for a message whose fields contradict each other."""
        self._types = types
        self._kinds = {kind_type: kind for kind, kind_type in types.items()}
        self._check = check
        self._decoders: dict[int, Any] = {}

    def encode(self, message: object, number: int) -> bytes:
        """Return a message as one frame."""
        return seal(self._kinds[type(message)], _encoder().encode((number, message)))

    def decode(self, frame: bytes) -> tuple[int, Any]:
        """Return the number of a message and the message, or raise MessageError."""
        kind, body = open_frame(frame)
        decoder = self._decoders.get(kind)
        if decoder is None:
            if kind not in self._types:
                raise MessageError("wire.unknown_kind", found=kind)
            decoder = _msgspec().msgpack.Decoder(tuple[Positive, self._types[kind]], dec_hook=_from_plain)
            self._decoders[kind] = decoder
        try:
            number, message = decoder.decode(body)
            if self._check is not None:
                self._check(message)
        except MessageError:
            raise
        except (
            *(HoldfastError, _msgspec().MsgspecError),
            *(ValueError, TypeError, KeyError, AttributeError, RecursionError),
        ) as error:
            raise MessageError("wire.malformed", reason=str(error)) from error
        return number, message


class Numbering:
    """Sequence numbers of one direction: each message arrives once, in order."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Number one more message to send."""
        self.last += 1
        return self.last

    def accept(self, number: int) -> None:
        """Raise MessageError unless this is the next number."""
        if number != self.last + 1:
            raise MessageError("wire.out_of_order", number=number, expected=self.last + 1)
        self.last = number


def seal(kind: int, body: bytes) -> bytes:
    """Put a header before a body."""
    return _HEADER.pack(MAGIC, VERSION, kind, len(body), zlib.crc32(body)) + body


def body_length(header: bytes) -> tuple[int, int]:
    """Check a header; return the kind of the message and the bytes that follow."""
    if len(header) < HEADER_BYTES:
        raise MessageError("wire.truncated", found=len(header), expected=HEADER_BYTES)
    magic, version, kind, length, _ = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise MessageError("wire.wrong_magic")
    if version != VERSION:
        raise MessageError("wire.wrong_version", version=version, own=VERSION)
    if length > MAX_BODY_BYTES:
        raise MessageError("wire.too_long", length=length, maximum=MAX_BODY_BYTES)
    return kind, length


def open_frame(frame: bytes) -> tuple[int, bytes]:
    """Check a whole frame; return its kind and its body."""
    kind, length = body_length(frame)
    body = frame[HEADER_BYTES:]
    if len(body) != length:
        raise MessageError("wire.truncated", found=len(body), expected=length)
    if zlib.crc32(body) != _HEADER.unpack_from(frame)[4]:
        raise MessageError("wire.checksum")
    return kind, body


@cache
def _msgspec() -> Any:  # noqa: ANN401 a module
    import msgspec

    return msgspec


@cache
def _encoder() -> Any:  # noqa: ANN401 msgspec's
    return _msgspec().msgpack.Encoder(enc_hook=_to_plain)


def _from_plain(kind: Any, plain: object) -> object:  # noqa: ANN401 a type with `from_plain`
    return kind.from_plain(plain)


def _to_plain(value: object) -> object:
    assert isinstance(value, HoldfastError), f"a {type(value).__name__} does not travel"
    plain = {name: _sendable(part) for name, part in value.to_plain().items()}
    if isinstance(value, MemoryPlanError):
        plain |= {"table": value.table, "changes": value.changes}
    return plain


def _sendable(value: Any) -> Any:  # noqa: ANN401 part of a plain error
    """Replace what msgpack cannot hold: lone surrogates and integers of more than 64 bits."""
    match value:
        case dict():
            return {name: _sendable(part) for name, part in value.items()}
        case list():
            return [_sendable(part) for part in value]
        case int() if value.bit_length() > 63:
            return str(value)
        case str():
            return value.encode(errors="replace").decode()
    return value


def _error(plain: dict[str, Any]) -> HoldfastError:
    error = HoldfastError.from_plain(plain)
    if isinstance(error, MemoryPlanError):
        error.table = _msgspec().convert(plain["table"], PlanTable | None)
        error.changes = _msgspec().convert(plain["changes"], tuple[PlanChange, ...])
    return error

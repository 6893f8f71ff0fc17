"""Frames: a message comes back as it was, and nothing truncated, corrupt, foreign or out of bounds decodes or costs memory."""

import struct
import tracemalloc
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import HoldfastError, MessageError, QueueFullError
from holdfast.request.wire import (
    HEADER_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_TOKEN_ID,
    VERSION,
    AnyError,
    Codec,
    Count,
    Numbering,
    TokenId,
    TokenIds,
    body_length,
    open_frame,
)
from request.frames import sealed


class Note(NamedTuple):
    """A message with one field of each kind of bound."""

    count: Count = 0
    token: TokenId = 0
    tokens: TokenIds = (1,)
    text: str = ""
    data: bytes = b""
    share: float = 0.0


class Failure(NamedTuple):
    """A message with an error."""

    error: AnyError


CODEC = Codec({7: Note, 9: Failure})
TOKENS = st.integers(0, MAX_TOKEN_ID)
NOTES = st.builds(
    Note,
    count=st.integers(0, 2**64 - 1),
    token=TOKENS,
    tokens=st.lists(TOKENS, min_size=1, max_size=9).map(tuple),
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    data=st.binary(max_size=20),
    share=st.floats(allow_nan=False),
)
NUMBERS = st.integers(1, 2**62)


@given(NOTES, NUMBERS)
def test_codec_round_trip(note: Note, number: int) -> None:
    assert CODEC.decode(CODEC.encode(note, number)) == (number, note)


@given(NOTES)
def test_frame_cut_anywhere_is_refused(note: Note) -> None:
    frame = CODEC.encode(note, 1)
    for length in range(len(frame)):
        with raises_code("wire.truncated", MessageError):
            CODEC.decode(frame[:length])
    with raises_code("wire.truncated", MessageError):
        CODEC.decode(frame + frame)


@given(NOTES, st.data())
def test_flipped_bit_is_refused(note: Note, data: st.DataObject) -> None:
    frame = bytearray(CODEC.encode(note, 1))
    place = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[place // 8] ^= 1 << place % 8
    with pytest.raises(MessageError):
        CODEC.decode(bytes(frame))


def test_foreign_version_and_magic_are_refused() -> None:
    with raises_code("wire.wrong_version", MessageError, version=VERSION + 1, own=VERSION):
        open_frame(sealed(b"", version=VERSION + 1))
    with raises_code("wire.wrong_magic", MessageError):
        open_frame(sealed(b"", magic=b"GET "))
    with raises_code("wire.unknown_kind", MessageError, found=8):
        CODEC.decode(sealed(b"", kind=8))
    with raises_code("wire.checksum", MessageError):
        open_frame(struct.pack("<4sHHII", MAGIC, VERSION, 7, 1, 0) + b"x")


def test_header_announces_a_bounded_length() -> None:
    frame = CODEC.encode(Note(), 1)
    assert body_length(frame[:HEADER_BYTES]) == (7, len(frame) - HEADER_BYTES)
    huge = struct.pack("<4sHHII", MAGIC, VERSION, 7, MAX_BODY_BYTES + 1, 0)
    with raises_code("wire.too_long", MessageError, length=MAX_BODY_BYTES + 1):
        body_length(huge)


@for_each("header", [b"\xdd", b"\xc6", b"\xdb", b"\xdf"])
def test_announced_item_count_allocates_nothing(header: bytes) -> None:
    body = b"\x92\x01" + header + struct.pack(">I", 2**31 - 1) + b"\0" * 16
    CODEC.encode(Note(), 1)
    tracemalloc.start()
    with raises_code("wire.malformed", MessageError):
        CODEC.decode(sealed(body, kind=7))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


@given(st.binary(max_size=60))
def test_codec_decode_any_body_is_message_or_refused(body: bytes) -> None:
    for kind in (7, 9):
        try:
            number, message = CODEC.decode(sealed(body, kind=kind))
        except MessageError:
            continue
        assert CODEC.decode(CODEC.encode(message, number)) == (number, message)


def test_values_out_of_bounds_are_refused() -> None:
    fields = list(Note())
    for place, values in enumerate(
        (
            (-1, 1.5, True, "1", None),
            (-1, MAX_TOKEN_ID + 1),
            ((), (-1,), (1.0,), 3),
            (b"x", 5, b"\xff"),
            ("", 1),
            ("", None),
        )
    ):
        for value in values:
            body = msgspec.msgpack.encode((1, [*fields[:place], value, *fields[place + 1 :]]))
            with raises_code("wire.malformed", MessageError):
                CODEC.decode(sealed(body, kind=7))
    for number in (0, -1, "1"):
        with raises_code("wire.malformed", MessageError):
            CODEC.decode(sealed(msgspec.msgpack.encode((number, fields)), kind=7))
    for more in (b"\0", b"\xc0\xc0"):
        with raises_code("wire.malformed", MessageError):
            CODEC.decode(sealed(msgspec.msgpack.encode((1, fields)) + more, kind=7))


def test_deeply_nested_body_is_refused() -> None:
    with raises_code("wire.malformed", MessageError):
        CODEC.decode(sealed(b"\x92\x01\x91" + b"\x91" * 10**5, kind=9))


def test_error_keeps_class_code_values_and_text() -> None:
    error = QueueFullError("value.not_bool", name="a\ud800", value=10**30).within("prompt 3").hinting("Retry.")
    _, (found,) = CODEC.decode(CODEC.encode(Failure(error), 1))
    assert (type(found), found.code, found.values) == (
        QueueFullError,
        "value.not_bool",
        {"name": "a?", "value": str(10**30)},
    )
    assert str(found) == str(error).replace("\ud800", "?")
    plain = {"kind": "dataclass", "code": "a.b", "text": "Text.", "values": {}, "contexts": [], "hints": []}
    _, (found,) = CODEC.decode(sealed(msgspec.msgpack.encode((1, [plain])), kind=9))
    assert (type(found), str(found)) == (HoldfastError, "Text.")
    for broken in ({}, {**plain, "values": 3}, [plain], None):
        with raises_code("wire.malformed", MessageError):
            CODEC.decode(sealed(msgspec.msgpack.encode((1, [broken])), kind=9))


def test_numbering_accepts_only_the_next_number() -> None:
    sender, receiver = Numbering(), Numbering()
    receiver.accept(sender.next())
    for wrong in (1, 0, 3, -1):
        with raises_code("wire.out_of_order", MessageError, number=wrong, expected=2):
            receiver.accept(wrong)
    receiver.accept(sender.next())
    assert receiver.last == 2

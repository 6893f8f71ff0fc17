"""Wire: what is written is read back, and nothing that is cut, changed, foreign or made up is believed or costs memory."""

import struct
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import MessageError
from holdfast.request.wire import (
    HEADER_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    VERSION,
    Reader,
    Writer,
    body_length,
    open_frame,
    pack_lists,
)
from request.frames import sealed

WORDS = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(-(2**31), 2**31 - 1)
VALUES = st.one_of(
    st.tuples(st.just("int"), WORDS),
    st.tuples(st.just("float"), st.floats(allow_nan=False)),
    st.tuples(st.just("ints"), st.lists(SMALL, max_size=9).map(tuple)),
    st.tuples(st.just("ints"), st.lists(WORDS, max_size=9).map(tuple)),
    st.tuples(st.just("bytes"), st.binary(max_size=20)),
    st.tuples(st.just("text"), st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
)


def written(values: list[tuple[str, object]], kind: int = 7) -> bytes:
    writer = Writer()
    for name, value in values:
        getattr(writer, name)(value)
    return writer.frame(kind)


@given(st.lists(VALUES, max_size=8), st.integers(0, 2**16 - 1))
def test_what_is_written_is_read_back(values: list[tuple[str, object]], kind: int) -> None:
    found_kind, reader = open_frame(written(values, kind))
    assert found_kind == kind
    assert [(name, getattr(reader, name)()) for name, _ in values] == values
    reader.end()


def test_a_list_takes_four_bytes_each_where_it_can_and_any_iterable_is_taken() -> None:
    assert len(written([("ints", [1] * 100)])) == HEADER_BYTES + 8 + 400
    assert len(written([("ints", [2**31] * 100)])) == HEADER_BYTES + 8 + 800
    writer = Writer()
    writer.ints(number for number in (1, 2**40))
    writer.ints(range(3))
    _, reader = open_frame(writer.frame(1))
    assert (reader.ints(), reader.ints()) == ((1, 2**40), (0, 1, 2))


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_a_frame_cut_short_at_every_byte_is_refused(values: list[tuple[str, object]]) -> None:
    frame = written(values)
    for length in range(len(frame)):
        with pytest.raises(MessageError):
            open_frame(frame[:length])
    with pytest.raises(MessageError):
        open_frame(frame + frame)


@given(st.lists(VALUES, min_size=1, max_size=4), st.data())
def test_a_flipped_bit_is_seen_or_changes_the_kind_alone(values: list[tuple[str, object]], data: st.DataObject) -> None:
    frame = bytearray(written(values))
    place = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[place // 8] ^= 1 << place % 8
    if 6 <= place // 8 < 8:
        assert open_frame(bytes(frame))[0] != 7
        return
    with pytest.raises(MessageError):
        open_frame(bytes(frame))


def test_another_version_and_another_sender_are_named() -> None:
    with pytest.raises(MessageError, match="version 2 came; version 1 is spoken here; run the same release"):
        open_frame(sealed(b"", version=2))
    with pytest.raises(MessageError, match="does not begin as one of Holdfast's"):
        open_frame(sealed(b"", magic=b"GET "))


def test_a_header_tells_what_follows_and_not_too_much() -> None:
    frame = written([("int", 5)])
    assert body_length(frame[:HEADER_BYTES]) == (7, 8)
    huge = struct.pack("<4sHHII", MAGIC, VERSION, 7, MAX_BODY_BYTES + 1, 0)
    with pytest.raises(MessageError, match="at most"):
        body_length(huge)


@pytest.mark.parametrize("verb", ["ints", "bytes", "text"])
@pytest.mark.parametrize("count", [2**40, 2 * MAX_BODY_BYTES, MAX_BODY_BYTES, 1000, -1, -(2**63)])
def test_an_announced_length_costs_nothing_before_it_is_there(verb: str, count: int) -> None:
    reader = Reader(struct.pack("<q", count) + b"\0" * 16)
    tracemalloc.start()
    with pytest.raises(MessageError):
        getattr(reader, verb)()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


@given(st.binary(max_size=60), st.lists(st.sampled_from(["int", "float", "ints", "bytes", "text"]), max_size=5))
def test_any_bytes_are_read_or_refused(body: bytes, verbs: list[str]) -> None:
    _, reader = open_frame(sealed(body))
    with suppress(MessageError):
        for verb in verbs:
            getattr(reader, verb)()
        reader.end()


@pytest.mark.parametrize(
    ("values", "read", "words"),
    [
        ([("int", 5)], lambda reader: reader.int(0, 4), "it holds 5 where 0 to 4 are possible"),
        ([("ints", (3, 9))], lambda reader: reader.ints(0, 8), "it lists 3 to 9 where 0 to 8 are possible"),
        ([("ints", (-1, 3))], lambda reader: reader.ints(0, 8), "it lists -1 to 3 where 0 to 8 are possible"),
        ([("int", 5), ("int", 6)], lambda reader: (reader.int(), reader.end()), "8 bytes follow its end"),
        ([("bytes", b"\xff\xfe")], lambda reader: reader.text(), "its text is not UTF-8"),
        ([("int", 5)], lambda reader: (reader.int(), reader.int()), "it ends before what it announces"),
    ],
)
def test_what_is_out_of_bounds_is_refused_in_words(values, read, words: str) -> None:
    _, reader = open_frame(written(values))
    with pytest.raises(MessageError) as caught:
        read(reader)
    assert caught.value.has == words


@pytest.mark.parametrize("numbers", [[], [1, -2], [2**40], [0, 2**31]])
@pytest.mark.parametrize("others", [[], [5], [7, -(2**40), 9]])
def test_pack_lists_writes_what_a_writer_writes(numbers: list[int], others: list[int]) -> None:
    reader = Reader(pack_lists(3, numbers, -4, others))
    assert (reader.int(), list(reader.ints()), reader.int(), list(reader.ints())) == (3, numbers, -4, others)
    reader.end()

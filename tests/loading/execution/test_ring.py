import threading
import time
from itertools import count

import pytest

from holdfast.loading.execution.ring import Chunk, ChunkRing


def chunks(number, after=None):
    return iter([Chunk(index, (), 0, (after or {}).get(index, 0)) for index in range(number)])


def take_all(ring, place=lambda chunk, buffer: None):
    taken = []
    try:
        while (full := ring.take()) is not None:
            chunk, buffer = full
            taken.append(chunk.number)
            place(chunk, buffer)
            ring.give_back(buffer)
    finally:
        ring.stop()
    return taken


@pytest.mark.parametrize("num_readers", [1, 2, 5])
@pytest.mark.parametrize("num_buffers", [1, 2, 3, 12])
def test_every_chunk_is_filled_once_in_a_buffer_that_nobody_else_has(num_readers, num_buffers):
    buffers = [-1] * num_buffers

    def fill(chunk, buffer):
        assert buffers[buffer] == -1, "filled while somebody uses it"
        time.sleep(0.0002 * (chunk.number % 3))
        buffers[buffer] = chunk.number

    def place(chunk, buffer):
        assert buffers[buffer] == chunk.number
        buffers[buffer] = -1

    ring = ChunkRing(chunks(100), num_buffers, num_readers, fill)
    assert sorted(take_all(ring, place)) == list(range(100))
    assert ring.read_seconds > 0


def test_no_chunks_are_none():
    assert take_all(ChunkRing(chunks(0), 2, 3, lambda chunk, buffer: None)) == []


def test_chunks_come_as_they_are_filled():
    """A slow one holds up nobody but itself."""
    slow = threading.Event()

    def fill(chunk, buffer):
        if chunk.number == 0:
            assert slow.wait(10)

    ring = ChunkRing(chunks(20), 4, 2, fill)

    def place(chunk, buffer):
        if chunk.number == 19:
            slow.set()

    assert take_all(ring, place)[-1] == 0


@pytest.mark.parametrize("num_buffers", [1, 2, 4])
@pytest.mark.parametrize("num_readers", [1, 3])
def test_a_chunk_that_waits_for_others_comes_after_them(num_buffers, num_readers):
    after = {5: 5, 6: 3, 7: 7, 12: 12, 19: 18}
    ring = ChunkRing(
        chunks(20, after), num_buffers, num_readers, lambda chunk, buffer: time.sleep(0.002 * (chunk.number % 4 == 0))
    )
    taken = take_all(ring)
    for number, first in after.items():
        assert set(range(first)) <= set(taken[: taken.index(number)])


def test_a_buffer_is_written_when_its_wait_is_over_and_the_reader_waits():
    events = []

    def fill(chunk, buffer):
        events.append(("fill", chunk.number))

    ring = ChunkRing(chunks(3), 1, 2, fill)
    waiters = []
    number = count()
    try:
        while (full := ring.take()) is not None:
            index = next(number)

            def wait(index=index):
                waiters.append(threading.current_thread())
                events.append(("wait", index))

            ring.give_back(full[1], wait)
    finally:
        ring.stop()
    assert events == [("fill", 0), ("wait", 0), ("fill", 1), ("wait", 1), ("fill", 2)]
    assert threading.main_thread() not in waiters


@pytest.mark.parametrize("num_readers", [1, 4])
@pytest.mark.parametrize("where", ["fill", "chunks", "wait"])
def test_the_first_error_is_raised_where_chunks_are_taken_and_threads_end(num_readers, where):
    before = threading.active_count()

    def fill(chunk, buffer):
        if where == "fill" and chunk.number == 7:
            raise OSError("the disk is gone")

    def broken_chunks():
        yield from chunks(7)
        raise OSError("the disk is gone")

    def wait():
        raise OSError("the disk is gone")

    ring = ChunkRing(broken_chunks() if where == "chunks" else chunks(50), 3, num_readers, fill)
    taken = []

    def take():
        while (full := ring.take()) is not None:
            taken.append(full[0].number)
            ring.give_back(full[1], wait if where == "wait" and len(taken) > 6 else None)

    with pytest.raises(OSError, match="the disk is gone"):
        take()
    ring.stop()
    assert len(taken) < 20
    assert threading.active_count() == before


@pytest.mark.parametrize("num_readers", [1, 4])
def test_threads_end_when_nobody_takes_any_more(num_readers):
    before = threading.active_count()
    ring = ChunkRing(chunks(50), 2, num_readers, lambda chunk, buffer: None)
    ring.take()
    ring.stop()
    ring.stop()
    assert threading.active_count() == before


def test_a_ring_that_was_never_used_has_no_threads():
    before = threading.active_count()
    ring = ChunkRing(chunks(50), 2, 2, lambda chunk, buffer: None)
    assert threading.active_count() == before
    ring.stop()

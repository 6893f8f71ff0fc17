"""Chunks hold every row once and wait for what they need; the ring hands them over whatever its readers do; pinned memory."""

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counted_work import num_lines
from for_each import for_each
from holdfast.loading.execution.ring import Chunk, ChunkRing, PinnedMemory, cut_chunks
from holdfast.loading.planning.moves import Move
from holdfast.models.parameters import Part
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, MXFP4

NUM_BYTES = 3 * 2**20 + 4096


class FakeRuntime:
    def __init__(self, code):
        self.code, self.pinned = code, {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if self.code == 0:
            self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address):
        del self.pinned[address]


def test_pinned_memory_pins_exactly_its_bytes(monkeypatch):
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = PinnedMemory(NUM_BYTES)
    assert runtime.pinned == {memory.tensor.data_ptr(): NUM_BYTES}
    memory.view[5:8] = b"abc"
    assert bytes(memory.tensor[4:9].tolist()) == b"\0abc\0"
    assert memory.tensor.numel() == len(memory.view) == NUM_BYTES
    memory.release()
    memory.release()
    assert runtime.pinned == {}


def test_pinned_memory_failure_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(2))
    with pytest.raises(RuntimeError, match="could not be allocated as pinned: CUDA error 2"):
        PinnedMemory(NUM_BYTES)


@pytest.mark.gpu
def test_pinned_memory_copies_to_a_gpu_without_blocking():
    memory = PinnedMemory(NUM_BYTES)
    memory.tensor.copy_(torch.arange(NUM_BYTES) % 251)
    there = torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda")
    there.copy_(memory.tensor, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), memory.tensor)
    memory.release()


def move(shape, scheme=None, dtype="bfloat16", **part):
    return Move("t", dtype, "w", Part("t", 0, shape, **part), scheme, 1000 + len(shape))


def pieces_of(chunks):
    return [piece for chunk in chunks for piece in chunk.pieces]


SHAPES = st.one_of(
    st.builds(lambda n, k: move((n, k)), st.integers(1, 300), st.integers(1, 40)),
    st.builds(lambda n: move((n,), dtype="float32"), st.integers(1, 300)),
    st.builds(
        lambda e, k, n, columns: move((e, k, n), is_transposed=True, columns=(0, max(1, k // 2)) if columns else None),
        st.integers(1, 4),
        st.integers(1, 40),
        st.integers(1, 60),
        st.booleans(),
    ),
    st.builds(
        lambda e, n, k: move((e, 128 * n, k), FP8_BLOCK), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40)
    ),
    st.builds(lambda n, k: move((n, k), FP8_BLOCK), st.integers(1, 300), st.integers(1, 40)),
    st.builds(lambda n, k: move((n, 32 * k), MXFP4, columns=(0, 32)), st.integers(1, 300), st.integers(2, 4)),
    st.builds(
        lambda n, k, share: move((n, k), FP8_TENSOR, rows=(0, max(1, n // 2)) if share else None, whole_rows=(0, n)),
        st.integers(1, 300),
        st.integers(1, 40),
        st.booleans(),
    ),
)


@settings(max_examples=100)
@given(st.lists(SHAPES, max_size=6), st.lists(SHAPES, max_size=2), st.sampled_from([1, 256, 1000, 5000, 2**20]))
def test_cut_chunks_places_each_row_once_within_bounds(moves, tied, chunk_bytes):
    chunks = list(cut_chunks(moves, tied, chunk_bytes))
    jobs = [*moves, *tied]
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    least = max((job.least_bytes for job in jobs), default=0)
    for chunk in chunks:
        assert chunk.num_bytes < max(chunk_bytes, least) + 256
        end = 0
        for piece in chunk.pieces:
            assert piece.offset % 256 == 0
            assert piece.offset >= end, "pieces overlap"
            end = piece.offset + piece.num_bytes
            job = jobs[piece.move]
            assert piece.num_bytes == piece.num_rows * job.row_bytes
            assert piece.read == job.read(piece.row, piece.row + piece.num_rows)
        assert end <= chunk.num_bytes
        assert chunk.after <= chunk.number
    assert sum(chunk.done_bytes for chunk in chunks) == pytest.approx(sum(job.num_bytes for job in jobs))
    for index, job in enumerate(jobs):
        own = [piece for piece in pieces_of(chunks) if piece.move == index]
        rows = [row for piece in own if piece.places for row in range(piece.row, piece.row + piece.num_rows)]
        assert rows == list(range(*job.part.row_range))
        starts = [piece.row - job.part.row_range[0] for piece in own if piece.places]
        assert all(start % job.block_rows == 0 for start in starts)
        looked_at = [row for piece in own if piece.finds_amax for row in range(piece.row, piece.row + piece.num_rows)]
        assert looked_at == (list(range(*job.amax_rows)) if job.amax_rows else [])


@settings(max_examples=100)
@given(st.lists(SHAPES, max_size=6), st.lists(SHAPES, max_size=2), st.sampled_from([256, 1000, 5000, 2**20]))
def test_cut_chunks_orders_amax_rows_and_tied_weights(moves, tied, chunk_bytes):
    chunks = list(cut_chunks(moves, tied, chunk_bytes))
    for index in range(len(moves) + len(tied)):
        own = [
            (chunk, place, piece) for chunk in chunks for place, piece in enumerate(chunk.pieces) if piece.move == index
        ]
        found = [(chunk.number, place) for chunk, place, piece in own if piece.finds_amax]
        for chunk, place, piece in own:
            if piece.places and found:
                last_chunk, last_place = found[-1]
                is_same = last_chunk == chunk.number and last_place <= place
                assert is_same or (last_chunk < chunk.number and chunk.after > last_chunk)
    first_tied = next((chunk.number for chunk in chunks if chunk.pieces[-1].move >= len(moves)), len(chunks))
    looked_at = {piece.move: chunk.number for chunk in chunks for piece in chunk.pieces if piece.finds_amax}
    for chunk in chunks:
        is_tied = chunk.number >= first_tied
        assert all((piece.move >= len(moves)) == is_tied for piece in chunk.pieces)
        # No chunk waits for more than it needs.
        placed = [piece.move for piece in chunk.pieces if piece.places and not piece.finds_amax]
        waits = [min(looked_at[index] + 1, chunk.number) for index in placed if index in looked_at]
        assert chunk.after == max([first_tied if is_tied else 0, *waits])


def test_cut_chunks_small_moves_share_a_chunk_uncut():
    moves = [move((n, 64)) for n in (2, 3, 5, 30, 4, 200)]  # rows of 128 bytes, 32 to a chunk
    chunks = list(cut_chunks(moves, [], 4096))
    assert [[piece.move for piece in chunk.pieces] for chunk in chunks][:3] == [[0, 1, 2], [3], [4]]
    assert [piece.num_rows for piece in pieces_of(chunks) if piece.move == 5] == [32] * 6 + [8]
    assert all(chunk.after == 0 for chunk in chunks)


def test_cut_chunks_transposed_matrix_is_whole_or_by_columns():
    whole = pieces_of(cut_chunks([move((2, 10, 6), is_transposed=True)], [], 200))
    assert [(piece.row, piece.num_rows, piece.read) for piece in whole] == [
        (0, 6, (0, 10, None)),
        (6, 6, (10, 20, None)),
    ]
    cut = pieces_of(cut_chunks([move((2, 10, 6), is_transposed=True, columns=(2, 7))], [], 45))
    assert [piece.read for piece in cut] == [(2, 7, (0, 4)), (2, 7, (4, 6)), (12, 17, (0, 4)), (12, 17, (4, 6))]


def test_cut_chunks_one_scale_reads_once_if_it_fits_else_twice():
    (piece,) = pieces_of(cut_chunks([move((10, 10), FP8_TENSOR)], [], 256))
    assert (piece.finds_amax, piece.places) == (True, True)
    pieces = pieces_of(cut_chunks([move((10, 10), FP8_TENSOR)], [], 100))
    assert [(piece.finds_amax, piece.places, piece.row) for piece in pieces] == [
        (True, False, 0),
        (True, False, 5),
        (False, True, 0),
        (False, True, 5),
    ]
    shared = pieces_of(cut_chunks([move((10, 10), FP8_TENSOR, rows=(5, 10), whole_rows=(0, 10))], [], 512))
    assert [(piece.finds_amax, piece.places, piece.row, piece.num_rows) for piece in shared] == [
        (True, False, 0, 10),
        (False, True, 5, 5),
    ]


def test_cut_chunks_rows_of_one_scale_stay_together():
    moves = [move((3,)), move((300, 100), FP8_BLOCK), move((3, 100), FP8)]
    sizes = [chunk.num_bytes for chunk in cut_chunks(moves, [], 1000)]
    assert sizes == [256, 128 * 200, 128 * 200, 44 * 200 + 160, 768]
    assert moves[1].least_bytes == 128 * 200


def test_cut_chunks_is_lazy():
    """Twenty thousand tensors cost nothing before the first chunk, and little each."""
    moves = [move((64, 2048), FP8)] * 20_000
    chunks: list[Iterator[Chunk]] = []
    numbers: list[int] = []

    def begin() -> None:
        chunks.append(cut_chunks(moves, [], 16 * 2**20))
        numbers.append(len(next(chunks[0]).pieces))

    assert num_lines(begin) < 10_000
    assert numbers == [64]
    rest = num_lines(lambda: numbers.extend(len(chunk.pieces) for chunk in chunks[0]))
    assert sum(numbers) == 20_000
    assert rest < 150 * 20_000


def test_cut_chunks_zero_chunk_bytes_is_an_assertion():
    with pytest.raises(AssertionError, match="chunk_bytes=0"):
        list(cut_chunks([], [], 0))


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


@for_each("num_readers", [1, 2, 5])
@for_each("num_buffers", [1, 2, 3, 12])
def test_ring_fills_every_chunk_once_in_an_exclusive_buffer(num_readers, num_buffers):
    buffers = [-1] * num_buffers

    def fill(chunk, buffer):
        assert buffers[buffer] == -1, "filled while in use"
        time.sleep(0.0002 * (chunk.number % 3))
        buffers[buffer] = chunk.number

    def place(chunk, buffer):
        assert buffers[buffer] == chunk.number
        buffers[buffer] = -1

    ring = ChunkRing(chunks(100), num_buffers, num_readers, fill)
    assert sorted(take_all(ring, place)) == list(range(100))
    assert ring.read_seconds > 0


def test_ring_without_chunks_yields_nothing():
    assert take_all(ChunkRing(chunks(0), 2, 3, lambda chunk, buffer: None)) == []


def test_ring_yields_chunks_in_the_order_they_are_filled():
    """A slow one delays only itself."""
    slow = threading.Event()

    def fill(chunk, buffer):
        if chunk.number == 0:
            assert slow.wait(10)

    ring = ChunkRing(chunks(20), 4, 2, fill)

    def place(chunk, buffer):
        if chunk.number == 19:
            slow.set()

    assert take_all(ring, place)[-1] == 0


@for_each("num_buffers", [1, 2, 4])
@for_each("num_readers", [1, 3])
def test_ring_yields_a_chunk_after_those_it_depends_on(num_buffers, num_readers):
    after = {5: 5, 6: 3, 7: 7, 12: 12, 19: 18}
    ring = ChunkRing(
        chunks(20, after), num_buffers, num_readers, lambda chunk, buffer: time.sleep(0.002 * (chunk.number % 4 == 0))
    )
    taken = take_all(ring)
    for number, first in after.items():
        assert set(range(first)) <= set(taken[: taken.index(number)])


def test_ring_reader_waits_before_it_writes_a_buffer():
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


@for_each("num_readers", [1, 4])
@for_each("where", ["fill", "chunks", "wait"])
def test_ring_take_raises_the_first_error_and_threads_end(num_readers, where):
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
def test_ring_stop_ends_threads(num_readers):
    before = threading.active_count()
    ring = ChunkRing(chunks(50), 2, num_readers, lambda chunk, buffer: None)
    ring.take()
    ring.stop()
    ring.stop()
    assert threading.active_count() == before


def test_ring_starts_no_threads_before_the_first_take():
    before = threading.active_count()
    ring = ChunkRing(chunks(50), 2, 2, lambda chunk, buffer: None)
    assert threading.active_count() == before
    ring.stop()

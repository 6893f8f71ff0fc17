"""Feeds over sources in memory; the way to a GPU with streams that record calls and run them at once."""

import threading

import pytest
import torch

from for_each import for_each
from holdfast.errors import ModelFormatError
from holdfast.loading.execution import feeds
from holdfast.loading.execution.feeds import HostFeed, PinnedFeed, WriterFeed
from holdfast.loading.execution.ring import cut_chunks
from holdfast.loading.planning.moves import Move
from holdfast.models.parameters import Part
from loading.tensor_source import TensorSource
from runner.deferred_device import DeferredDevice

CHUNK_BYTES = 1024


def some_moves(number):
    tensors = {f"t{index}": torch.randn(40, 8 + index) for index in range(number)}
    return tensors, [Move(name, "float32", name, Part(name, 0, tuple(t.shape)), None, 0) for name, t in tensors.items()]


def places(number):
    return [torch.zeros(CHUNK_BYTES, dtype=torch.uint8) for _ in range(number)]


def collect(feed, moves, after_chunk=lambda: None):
    """What the feed yields, put together again."""
    rows = {move.tensor: torch.full(move.part.shape, float("nan")) for move in moves}
    for chunk, views in feed:
        for piece in chunk.pieces:
            move = moves[piece.move]
            start = piece.offset // 4
            values = views["float32"][start : start + piece.num_bytes // 4].view(piece.num_rows, -1)
            rows[move.tensor][piece.row : piece.row + piece.num_rows] = values
        after_chunk()
    return rows


class FakeStream:
    def __init__(self, log):
        self.log = log

    def synchronize(self):
        self.log.append("synchronize")


class FakeEvent:
    """A tick of the clock for every record."""

    clock = 0

    def __init__(self, enable_timing=False, blocking=False):
        assert blocking, "a reader that waits must sleep"
        self.is_timed, self.time = enable_timing, None

    def record(self, stream):
        FakeEvent.clock += 1
        self.time = FakeEvent.clock
        stream.log.append("timed" if self.is_timed else "copied")

    def synchronize(self):
        assert self.time is not None, "waited for an unrecorded event"

    def elapsed_time(self, later):
        assert self.is_timed
        assert later.is_timed
        assert later.time > self.time
        return 1000.0 * (later.time - self.time)


class FakePinned:
    live = 0

    def __init__(self, num_bytes):
        FakePinned.live += 1
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        self.view = self.tensor.numpy().data

    def release(self):
        FakePinned.live -= 1


@pytest.fixture
def fake_gpu(monkeypatch):
    log = []
    stream = FakeStream(log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(feeds, "PinnedMemory", FakePinned)
    FakePinned.live = 0
    return log


@for_each("num_places", [1, 3])
@for_each("num_readers", [1, 2])
def test_host_feed_places_chunks_where_they_were_read(num_places, num_readers):
    tensors, moves = some_moves(6)
    feed = HostFeed(
        TensorSource(tensors=tensors), moves, cut_chunks(moves, [], CHUNK_BYTES), places(num_places), num_readers
    )
    rows = collect(feed, moves)
    feed.close()
    assert all(torch.equal(rows[name], tensor) for name, tensor in tensors.items())
    assert feed.read_seconds > 0
    assert feed.place_seconds > 0
    assert feed.copy_seconds == 0


@pytest.mark.parametrize("num_places", [1, 3])
@pytest.mark.parametrize("num_pinned", [1, 2, 12])
@pytest.mark.parametrize("num_readers", [1, 4])
def test_pinned_feed_passes_chunks_through_pinned_memory(num_places, num_pinned, num_readers, fake_gpu):
    tensors, moves = some_moves(9)
    chunks = cut_chunks(moves, [], CHUNK_BYTES)
    feed = PinnedFeed(TensorSource(tensors=tensors), moves, chunks, places(num_places), num_readers, num_pinned)
    rows = collect(feed, moves)
    feed.close()
    feed.close()
    assert all(torch.equal(rows[name], tensor) for name, tensor in tensors.items())
    assert FakePinned.live == 0
    num_chunks = len(list(cut_chunks(moves, [], CHUNK_BYTES)))
    assert fake_gpu.count("copied") == num_chunks
    assert fake_gpu[-1] == "synchronize"


@for_each("num_places", [1, 3])
@for_each("num_pinned, num_readers", [(1, 1), (2, 4), (12, 4)])
def test_pinned_feed_refills_a_chunk_after_the_gpu_has_read_it(monkeypatch, num_places, num_pinned, num_readers):
    """Copies and kernels run when a reader waits for its buffer; a chunk on the device is placed before the next comes."""
    device = DeferredDevice(is_deferred=True)
    tensors, moves = some_moves(9)
    rows = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    released = []

    class Pinned(FakePinned):
        def __init__(self, num_bytes):
            super().__init__(num_bytes)
            device.pin(self.tensor)

        def release(self):
            released.append(device.current.num_put - device.current.num_done)

    with monkeypatch.context() as patch:
        device.take_over(patch)
        patch.setattr(feeds, "PinnedMemory", Pinned)
        device.begin()
        chunks = cut_chunks(moves, [], CHUNK_BYTES)
        feed = PinnedFeed(TensorSource(tensors=tensors), moves, chunks, places(num_places), num_readers, num_pinned)
        for chunk, views in feed:
            for piece in chunk.pieces:
                start, own = piece.offset // 4, rows[moves[piece.move].tensor]
                values = views["float32"][start : start + piece.num_bytes // 4].view(piece.num_rows, -1)
                to = own[piece.row : piece.row + piece.num_rows]
                device.put(lambda to=to, values=values: to.copy_(values))
        feed.close()
    assert all(torch.equal(rows[name], tensor) for name, tensor in tensors.items())
    assert released == [0], "copies end before their memory is let go"


@pytest.mark.parametrize("num_chunks", [1, 2, 7, 33, 100])
def test_pinned_feed_scales_sampled_times_by_bytes(num_chunks, fake_gpu):
    rows = torch.randn(8 * num_chunks, 32)  # 8 rows to a chunk
    move = Move("t", "float32", "t", Part("t", 0, tuple(rows.shape)), None, 0)
    chunks = cut_chunks([move], [], CHUNK_BYTES)
    feed = PinnedFeed(TensorSource(tensors={"t": rows}), [move], chunks, places(3), 2, 4)
    assert torch.equal(collect(feed, [move])["t"], rows)
    feed.close()
    sampled = {n for n in range(num_chunks) if n % 16 == 0 or n in (1, 2, 4, 8, 32, 64)}
    assert fake_gpu.count("timed") == 3 * len(sampled)
    # From the begin of a sampled copy to its end are two ticks, to the end of placing one more.
    assert feed.copy_seconds == pytest.approx(2 * num_chunks)
    assert feed.place_seconds == pytest.approx(num_chunks)


def test_pinned_feed_sample_skips_the_first_chunk_of_several(fake_gpu):
    tensors, moves = some_moves(9)
    feed = PinnedFeed(TensorSource(tensors=tensors), moves, cut_chunks(moves, [], CHUNK_BYTES), places(3), 1, 3)
    num_placed = 0

    def compile_first():
        nonlocal num_placed
        num_placed += 1
        FakeEvent.clock += 10_000 if num_placed == 1 else 0

    collect(feed, moves, compile_first)
    feed.close()
    assert num_placed > 5
    assert feed.place_seconds < 1000


def test_pinned_feed_failed_read_frees_buffers_and_threads(fake_gpu):
    threads = threading.active_count()
    tensors, moves = some_moves(9)

    def fail(name, start, end):
        if name == "t5":
            raise ModelFormatError("value.empty", name="t5")

    source = TensorSource(tensors=tensors, on_read=fail)
    feed = PinnedFeed(source, moves, cut_chunks(moves, [], CHUNK_BYTES), places(2), 4, 3)
    with pytest.raises(ModelFormatError):
        collect(feed, moves)
    feed.close()
    assert FakePinned.live == 0
    assert threading.active_count() == threads
    assert fake_gpu[-1] == "synchronize", "copies that are under way must end before their memory goes"


def test_pinned_feed_of_a_together_source_reads_together(fake_gpu):
    tensors, moves = some_moves(9)
    requested = []

    class Together(TensorSource):
        def read_together(self, reads):
            requested.append([read.name for read in reads])
            for read in reads:
                self.read_into(*read)

    feed = PinnedFeed(Together(tensors=tensors), moves, cut_chunks(moves, [], CHUNK_BYTES), places(3), 1, 3)
    rows = collect(feed, moves)
    feed.close()
    assert all(torch.equal(rows[name], tensor) for name, tensor in tensors.items())
    wanted = [[moves[piece.move].tensor for piece in chunk.pieces] for chunk in cut_chunks(moves, [], CHUNK_BYTES)]
    assert requested == wanted


def test_writer_feed_writes_chunks_in_order():
    tensors, moves = some_moves(4)
    calls = []

    def write(name, row_start, row_end, out, columns):
        calls.append((name, row_start))
        out.copy_(tensors[name][row_start:row_end].contiguous().view(-1).view(torch.uint8))

    feed = WriterFeed(write, moves, cut_chunks(moves, [], CHUNK_BYTES), places(2))
    rows = collect(feed, moves)
    feed.close()
    assert all(torch.equal(rows[name], tensor) for name, tensor in tensors.items())
    assert calls == sorted(calls)
    assert feed.place_seconds > 0

"""Feeds bring chunks to the device: read there, read and copied to a GPU, or written there by the source.

A feed is an iterator of chunks and their views. A chunk counts as placed when the next one is requested: on a GPU, its
kernels have been launched by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

import torch

from holdfast.loading.execution.place import ChunkViews, TilePlacer, chunk_views
from holdfast.loading.execution.ring import Chunk, ChunkRing, PinnedMemory
from holdfast.loading.planning.moves import Move
from holdfast.loading.sources.source import (
    PackableSource,
    PackedWriter,
    RowRead,
    RowWriter,
    TogetherSource,
    WeightSource,
)

SAMPLED_CHUNKS = 16
"""Interval between chunks timed on a GPU; shorter for the first ones, so short loads have samples."""


class Feed(Protocol):
    """An iterator of chunks; its seconds are complete after `close` (see LoadReport)."""

    read_seconds: float
    copy_seconds: float
    place_seconds: float

    def __iter__(self) -> Iterator[tuple[Chunk, ChunkViews]]: ...

    def close(self) -> None:
        """Stop every use of the chunks. Idempotent."""
        ...


class HostFeed:
    """Chunks in host memory, placed from their read buffers. Pieces of tiles are placed while they are read."""

    def __init__(
        self,
        source: WeightSource,
        moves: Sequence[Move],
        chunks: Iterator[Chunk],
        places: list[torch.Tensor],
        num_readers: int,
        tiles: TilePlacer | None = None,
    ) -> None:
        """`tiles` places pieces of tiles in the threads that read them; without it there are none."""
        self._views = [chunk_views(place, moves) for place in places]
        buffers = [place.numpy().data for place in places]
        self._ring = ChunkRing(chunks, len(places), num_readers, _Reading(source, moves, buffers, tiles).fill)
        self.read_seconds = self.copy_seconds = self.place_seconds = 0.0

    def __iter__(self) -> Iterator[tuple[Chunk, ChunkViews]]:
        while (taken := self._ring.take()) is not None:
            chunk, buffer = taken
            start = time.perf_counter()
            yield chunk, self._views[buffer]
            self.place_seconds += time.perf_counter() - start
            self._ring.give_back(buffer)

    def close(self) -> None:
        self._ring.stop()
        self.read_seconds = self._ring.read_seconds


class PinnedFeed:
    """Chunks are read into pinned memory, copied to a GPU and placed there, all on its current stream.

    A copy takes several times as long as placing, so overlapping the two would gain little. One chunk on the GPU is enough
    for that. This thread never waits: a reader waits for the copy of its pinned chunk before it writes there.
    """

    def __init__(
        self,
        source: WeightSource,
        moves: Sequence[Move],
        chunks: Iterator[Chunk],
        places: list[torch.Tensor],
        num_readers: int,
        num_pinned: int,
    ) -> None:
        chunk_bytes = places[0].numel()
        self._device = places[0].device
        self._pinned = PinnedMemory(num_pinned * chunk_bytes)
        self._pinned_fronts = [_Front(pinned) for pinned in self._pinned.tensor.split(chunk_bytes)]
        buffers = [self._pinned.view[n * chunk_bytes : (n + 1) * chunk_bytes] for n in range(num_pinned)]
        self._fronts = [(_Front(place), chunk_views(place, moves)) for place in places]
        self._ring = ChunkRing(chunks, num_pinned, num_readers, _Reading(source, moves, buffers).fill)
        # A blocking event sleeps instead of spinning.
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(num_pinned)]
        self._waits = [event.synchronize for event in self._copied]
        self._sample = _Sample()
        self._is_closed = False
        self.read_seconds = self.copy_seconds = self.place_seconds = 0.0

    def __iter__(self) -> Iterator[tuple[Chunk, ChunkViews]]:
        stream = torch.cuda.current_stream(self._device)
        fronts, sample = self._fronts, self._sample
        for number in count():
            taken = self._ring.take()
            if taken is None:
                return
            chunk, buffer = taken
            num_bytes = chunk.num_bytes
            front, views = fronts[number % len(fronts)]
            place, pinned = front.of(num_bytes), self._pinned_fronts[buffer].of(num_bytes)
            sample.num_bytes += num_bytes
            is_sampled = not (number % SAMPLED_CHUNKS and number & (number - 1))
            if is_sampled:
                sample.begin(num_bytes, stream)
            place.copy_(pinned, non_blocking=True)
            self._copied[buffer].record(stream)
            self._ring.give_back(buffer, self._waits[buffer])
            if is_sampled:
                sample.copied.record(stream)
            yield chunk, views
            if is_sampled:
                sample.end(stream)

    def close(self) -> None:
        """Wait for running copies before their memory is released. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ring.stop()
        try:
            torch.cuda.current_stream(self._device).synchronize()
            self.copy_seconds, self.place_seconds = self._sample.seconds()
        finally:
            self._pinned.release()
        self.read_seconds = self._ring.read_seconds


class WriterFeed:
    """Chunks that the source writes on the device, in order, on one stream."""

    def __init__(
        self,
        write: RowWriter,
        moves: Sequence[Move],
        chunks: Iterator[Chunk],
        places: list[torch.Tensor],
        write_packed: PackedWriter | None = None,
        tiles: TilePlacer | None = None,
    ) -> None:
        self._write, self._write_packed, self._tiles = write, write_packed, tiles
        self._moves = moves
        self._chunks = chunks
        self._places = places
        self._views = [chunk_views(place, moves) for place in places]
        self.read_seconds = self.copy_seconds = self.place_seconds = 0.0

    def __iter__(self) -> Iterator[tuple[Chunk, ChunkViews]]:
        start = time.perf_counter()
        for chunk in self._chunks:
            slot = chunk.number % len(self._places)
            place = self._places[slot]
            for piece in chunk.pieces:
                out, read = place.narrow(0, piece.offset, piece.num_bytes), piece.read
                move = self._moves[piece.move]
                if move.packed is None:
                    self._write(move.tensor, read.row_start, read.row_end, out, read.columns)
                    continue
                if move.packed.row_group > 1:
                    assert self._tiles is not None, f"{move.target} has no place for tiles"
                    self._tiles.place(piece)
                    continue
                assert self._write_packed is not None, f"{move.tensor} cannot be written packed"
                rows = read.row_start, read.row_end
                self._write_packed(move.part.source_columns, move.packed, rows, out, read.columns)
            yield chunk, self._views[slot]
        if self._places[0].device.type == "cuda":
            torch.cuda.current_stream(self._places[0].device).synchronize()
        self.place_seconds = time.perf_counter() - start

    def close(self) -> None:
        if self._places[0].device.type == "cuda":
            torch.cuda.current_stream(self._places[0].device).synchronize()


class _Front:
    """View of a chunk's first bytes; cached, because most chunks are equally long."""

    __slots__ = ("_chunk", "_front", "_num_bytes")

    def __init__(self, chunk: torch.Tensor) -> None:
        self._chunk = self._front = chunk
        self._num_bytes = chunk.numel()

    def of(self, num_bytes: int) -> torch.Tensor:
        if num_bytes != self._num_bytes:
            self._front, self._num_bytes = self._chunk.narrow(0, 0, num_bytes), num_bytes
        return self._front


class _Sample:
    """GPU time of copying and placing, measured in some chunks and extrapolated by bytes.

    Placing lasts from the end of the copy to the end of the last kernel, gaps included. The first chunk, in which kernels
    may be compiled, counts only if it is the only one.
    """

    def __init__(self) -> None:
        self._begun, self.copied, self._placed = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(3))
        self._is_set = False
        self._num_samples = 0
        self._copy_seconds = self._place_seconds = 0.0
        self._sampled_bytes = 0
        self._bytes_under_way = 0
        self.num_bytes = 0

    def begin(self, num_bytes: int, stream: torch.cuda.Stream) -> None:
        self._add_up()
        self._bytes_under_way = num_bytes
        self._begun.record(stream)

    def end(self, stream: torch.cuda.Stream) -> None:
        self._placed.record(stream)
        self._is_set = True

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of copying and of placing all chunks."""
        self._add_up()
        share = self.num_bytes / max(1, self._sampled_bytes)
        return self._copy_seconds * share, self._place_seconds * share

    def _add_up(self) -> None:
        if self._is_set:
            self._placed.synchronize()  # already over, except for the first: later copies have been waited for
            self._num_samples += 1
            if self._num_samples == 2:
                self._copy_seconds, self._place_seconds, self._sampled_bytes = 0.0, 0.0, 0
            self._copy_seconds += self._begun.elapsed_time(self.copied) / 1000
            self._place_seconds += self.copied.elapsed_time(self._placed) / 1000
            self._sampled_bytes += self._bytes_under_way
            self._is_set = False


class _Reading:
    """Fills buffers in a reader thread. A method, not a closure: an error's traceback would keep the buffers of a closure."""

    def __init__(
        self,
        source: WeightSource,
        moves: Sequence[Move],
        buffers: list[memoryview],
        tiles: TilePlacer | None = None,
    ) -> None:
        self._source = source
        self._tiles = tiles
        self._together = source if isinstance(source, TogetherSource) else None
        self._moves = moves
        self._buffers = buffers

    def fill(self, chunk: Chunk, buffer: int) -> None:
        """Read all pieces of a chunk to their offsets in a buffer."""
        memory, moves, reads = self._buffers[buffer], self._moves, []
        for piece in chunk.pieces:
            index, _, _, (start, end, columns), offset, num_bytes, _, _ = piece
            move, out = moves[index], memory[offset : offset + num_bytes]
            if move.packed is None:
                reads.append(RowRead(move.tensor, start, end, out, columns))
            elif move.packed.row_group > 1:
                assert self._tiles is not None, f"{move.target} has no place for tiles"
                self._tiles.place(piece)
            else:
                assert isinstance(self._source, PackableSource), f"{move.tensor} cannot be read packed"
                self._source.read_packed(move.tensor, move.packed, (start, end), out, columns)
        if self._together is not None:
            self._together.read_together(reads)
            return
        for read in reads:
            self._source.read_into(*read)

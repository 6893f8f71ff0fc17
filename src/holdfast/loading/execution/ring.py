"""Cuts moves into chunks; reader threads fill a ring of buffers (ChunkRing) with them for one consumer.

A chunk is the unit of a copy: pieces of one or several moves, each at an aligned offset. A move that fits into a chunk is
never cut. Rows of a transposed tensor are cut inside each of its matrices, which are read as they are stored: as rows of
some columns, or of all.

readers    a free buffer, then the next chunk    ->  wait until the buffer may be written  ->  fill it
consumer   any chunk that is full and may go     ->  place it                              ->  give the buffer back

Buffers are handed out in the order of the chunks, so a chunk that waits for earlier ones never holds the buffer that they
need.
"""

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

import torch

from holdfast.loading.planning.moves import Move, Read
from holdfast.memory.workspace_plan import aligned


class Piece(NamedTuple):
    """Consecutive rows of one move, read at once."""

    move: int
    """Index of the move; moves of tied weights come last."""
    row: int
    """The first row of the tensor, after transposing and joining."""
    num_rows: int
    read: Read
    offset: int
    num_bytes: int
    finds_amax: bool
    """True if its rows' amax is needed before any row of the move is placed."""
    places: bool


class Chunk(NamedTuple):
    """Pieces that are read, copied and placed together, in this order."""

    number: int
    pieces: tuple[Piece, ...]
    num_bytes: int
    after: int
    """All chunks with a lower number must be placed before this one."""
    done_bytes: float = 0.0
    """Bytes of the checkpoint that are done when this chunk is placed."""


def cut_chunks(moves: Sequence[Move], tied: Sequence[Move], chunk_bytes: int) -> Iterator[Chunk]:
    """Cut all moves in order, lazily, then those of tied weights, which wait for the others.

    Only rows that share a scale (`Move.least_bytes`) make a chunk larger than `chunk_bytes`.
    """
    cutter = _Cutter(chunk_bytes)
    for index, move in enumerate(moves):
        yield from cutter.cut(index, move)
    yield from cutter.flush()
    cutter.wait_for_all()
    for index, move in enumerate(tied, len(moves)):
        yield from cutter.cut(index, move)
    yield from cutter.flush()


class _Cutter:
    """Cuts moves into chunks; holds the chunk that is being filled."""

    def __init__(self, chunk_bytes: int) -> None:
        assert chunk_bytes > 0, f"{chunk_bytes=}"
        self._chunk_bytes = chunk_bytes
        self._pieces: list[Piece] = []
        self._used = 0
        self._after = 0
        self._done_bytes = 0.0
        self._number = 0
        self._barrier = 0

    def wait_for_all(self) -> None:
        """Make later chunks wait for every chunk cut so far."""
        assert not self._pieces, f"chunk {self._number} is not complete"
        self._barrier = self._number

    def cut(self, index: int, move: Move) -> Iterator[Chunk]:
        """Yield the chunks that this move fills; its last rows may share a chunk with the next move."""
        rows, amax_rows = move.part.row_range, move.amax_rows
        if amax_rows is None:
            yield from self._add(index, move, rows, finds_amax=False, places=True)
            return
        if rows == amax_rows and self._is_one_piece(move):
            yield from self._add(index, move, rows, finds_amax=True, places=True)
            return
        # The amax of the whole tensor comes before the first row is placed.
        yield from self._add(index, move, amax_rows, finds_amax=True, places=False)
        before, self._barrier = self._barrier, self._number + 1
        yield from self._add(index, move, rows, finds_amax=False, places=True)
        self._barrier = before

    def flush(self) -> Iterator[Chunk]:
        if self._pieces:
            yield Chunk(self._number, tuple(self._pieces), self._used, self._after, self._done_bytes)
            self._pieces, self._used, self._after, self._done_bytes = [], 0, 0, 0.0
            self._number += 1

    def _is_one_piece(self, move: Move) -> bool:
        return next(self._row_ranges(move, move.part.row_range, move.row_bytes)) == move.part.row_range

    def _row_ranges(self, move: Move, rows: tuple[int, int], row_bytes: int) -> Iterator[tuple[int, int]]:
        """Like `Move.row_ranges`, with a fast path: most of the thousands of moves are not cut."""
        if not move.part.is_transposed and (rows[1] - rows[0]) * row_bytes <= self._chunk_bytes:
            return iter((rows,))
        return move.row_ranges(self._chunk_bytes, rows)

    def _add(self, index: int, move: Move, rows: tuple[int, int], finds_amax: bool, places: bool) -> Iterator[Chunk]:
        row_bytes = move.row_bytes
        done_bytes = move.num_bytes / max(1, move.num_source_rows) if places else 0.0
        for start, end in self._row_ranges(move, rows, row_bytes):
            num_bytes = (end - start) * row_bytes
            if self._used and self._used + num_bytes > self._chunk_bytes:
                yield from self.flush()
            read = move.read(start, end)
            self._pieces.append(Piece(index, start, end - start, read, self._used, num_bytes, finds_amax, places))
            self._used += aligned(num_bytes)
            self._done_bytes += (end - start) * done_bytes
            # Pieces of one chunk are placed in order, so a chunk need not wait for itself.
            self._after = max(self._after, min(self._barrier, self._number))


Fill = Callable[[Chunk, int], None]
"""fill(chunk, buffer): read the chunk into the buffer of this index; runs in a reader thread."""
Wait = Callable[[], None]
"""Blocks until a buffer that was given back may be written."""


class _FreeBuffer(NamedTuple):
    buffer: int
    wait: Wait | None


class _End(NamedTuple):
    """Message that a reader ended, with its error if any."""

    error: BaseException | None


class ChunkRing:
    """Reader threads run from the first `take` until `stop`, which the consumer must always call."""

    def __init__(self, chunks: Iterator[Chunk], num_buffers: int, num_readers: int, fill: Fill) -> None:
        assert num_buffers > 0, f"{num_buffers=}"
        assert num_readers > 0, f"{num_readers=}"
        self._chunks = chunks
        self._fill = fill
        self._free: SimpleQueue[_FreeBuffer | None] = SimpleQueue()
        self._full: SimpleQueue[tuple[Chunk, int] | _End] = SimpleQueue()
        self._turn = Lock()
        self._is_stopped = False
        self._threads = [Thread(target=self._read, name=f"reader-{n}", daemon=True) for n in range(num_readers)]
        self._is_started = False
        self._num_ended = 0
        self._waiting: list[tuple[Chunk, int]] = []
        """Full chunks that must not be placed yet."""
        self._taken: set[int] = set()
        """Chunks taken ahead of a lower number."""
        self._num_in_order = 0
        """Number of the first chunk that was not taken yet."""
        self._read_seconds: list[float] = []
        for index in range(num_buffers):
            self._free.put(_FreeBuffer(index, None))

    @property
    def read_seconds(self) -> float:
        """Seconds spent filling buffers, summed over all readers."""
        return sum(self._read_seconds)

    def take(self) -> tuple[Chunk, int] | None:
        """Return a chunk and its buffer; None after the last. Raises the error of a reader.

        The chunk of the previous call counts as placed.
        """
        if not self._is_started:
            self._is_started = True
            for thread in self._threads:
                thread.start()
        for place, (chunk, buffer) in enumerate(self._waiting):
            if chunk.after <= self._num_in_order:
                del self._waiting[place]
                self._count(chunk.number)
                return chunk, buffer
        while self._num_ended < len(self._threads):
            full = self._full.get()
            if isinstance(full, _End):
                self._num_ended += 1
                if full.error is not None:
                    raise full.error
            elif full[0].after <= self._num_in_order:
                self._count(full[0].number)
                return full
            else:
                self._waiting.append(full)
        assert not self._waiting, f"{len(self._waiting)} chunks wait for what never came"
        return None

    def give_back(self, buffer: int, wait: Wait | None = None) -> None:
        """Return a buffer to the readers; one calls `wait` before it writes there."""
        self._free.put(_FreeBuffer(buffer, wait))

    def stop(self) -> None:
        """Stop the readers and wait for them. Idempotent."""
        self._is_stopped = True
        for _ in self._threads:
            self._free.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _count(self, number: int) -> None:
        if number != self._num_in_order:
            self._taken.add(number)
            return
        number += 1
        while number in self._taken:
            self._taken.remove(number)
            number += 1
        self._num_in_order = number

    def _read(self) -> None:
        try:
            while (work := self._next()) is not None:
                chunk, free = work
                if free.wait is not None:
                    free.wait()
                start = time.perf_counter()
                self._fill(chunk, free.buffer)
                self._read_seconds.append(time.perf_counter() - start)
                self._full.put((chunk, free.buffer))
        except BaseException as error:
            # `take` raises it. Keep no reference here: the error's frames hold buffers.
            self._is_stopped = True
            self._full.put(_End(error))
        else:
            self._full.put(_End(None))

    def _next(self) -> tuple[Chunk, _FreeBuffer] | None:
        """Take a buffer, then a chunk: one reader at a time, so that buffers go to chunks in order."""
        with self._turn:
            free = self._free.get()
            if free is None or self._is_stopped:
                return None
            chunk = next(self._chunks, None)
            if chunk is None:
                self._free.put(free)
                return None
            return chunk, free


HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class PinnedMemory:
    """One pinned mapping. Wait for running copies before `release`.

    torch's own pinned memory is rounded up to a power of two and kept until the process ends.
    """

    def __init__(self, num_bytes: int) -> None:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if HUGE_PAGES is not None:
            with suppress(OSError):  # huge pages are pinned and filled faster; not every system has them
                mapping.madvise(HUGE_PAGES)
        self.view = memoryview(mapping)
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self._address: int | None = None
        runtime = torch.cuda.cudart()
        assert runtime is not None, "torch was built without CUDA"
        self._runtime = runtime
        code = int(runtime.cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0))
        if code != 0:
            raise RuntimeError(f"{num_bytes} bytes of host memory could not be allocated as pinned: CUDA error {code}")
        self._address = self.tensor.data_ptr()

    def release(self) -> None:
        """Unpin; the memory is freed with its last view. Idempotent."""
        if self._address is not None:
            self._runtime.cudaHostUnregister(self._address)
            self._address = None

"""ChunkRing: reader threads that fill a fixed number of buffers, chunk after chunk, for one taker; no torch.

readers   a free buffer, then the next chunk    ->  wait until the buffer may be written  ->  fill it
taker     whichever chunk is full and may go    ->  place it                              ->  give the buffer back

Buffers are handed out in the order of the chunks, so that a chunk that waits for earlier ones never waits for a buffer that
it holds itself.
"""

import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

from holdfast.loading.execution.chunks import Chunk

Fill = Callable[[Chunk, int], None]
"""fill(chunk, buffer): read the chunk into the buffer of this index; runs in a reader thread."""
Wait = Callable[[], None]
"""Returns when a buffer that was given back may be written."""


class _FreeBuffer(NamedTuple):
    buffer: int
    wait: Wait | None


class _End(NamedTuple):
    """A reader is done: with everything, or with an error."""

    error: BaseException | None


class ChunkRing:
    """Threads run from the first `take` until `stop`, which whoever takes must call, whatever happens."""

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
        """Chunks that were taken out of turn."""
        self._num_in_turn = 0
        """All chunks with a lower number were taken."""
        self._read_seconds: list[float] = []
        for index in range(num_buffers):
            self._free.put(_FreeBuffer(index, None))

    @property
    def read_seconds(self) -> float:
        """Time that readers spent filling buffers, summed over all."""
        return sum(self._read_seconds)

    def take(self) -> tuple[Chunk, int] | None:
        """A chunk and the buffer that holds it; None when all were taken. What stops a reader is raised here.

        The chunk that was taken before counts as placed.
        """
        if not self._is_started:
            self._is_started = True
            for thread in self._threads:
                thread.start()
        for place, (chunk, buffer) in enumerate(self._waiting):
            if chunk.after <= self._num_in_turn:
                del self._waiting[place]
                self._count(chunk.number)
                return chunk, buffer
        while self._num_ended < len(self._threads):
            full = self._full.get()
            if isinstance(full, _End):
                self._num_ended += 1
                if full.error is not None:
                    raise full.error
            elif full[0].after <= self._num_in_turn:
                self._count(full[0].number)
                return full
            else:
                self._waiting.append(full)
        assert not self._waiting, f"{len(self._waiting)} chunks wait for what never came"
        return None

    def give_back(self, buffer: int, wait: Wait | None = None) -> None:
        """A reader may have the buffer; it calls `wait` before it writes there."""
        self._free.put(_FreeBuffer(buffer, wait))

    def stop(self) -> None:
        """No more chunks; returns when no thread touches a buffer any more. May be called twice."""
        self._is_stopped = True
        for _ in self._threads:
            self._free.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _count(self, number: int) -> None:
        if number != self._num_in_turn:
            self._taken.add(number)
            return
        number += 1
        while number in self._taken:
            self._taken.remove(number)
            number += 1
        self._num_in_turn = number

    def _read(self) -> None:
        """What a reader thread does."""
        try:
            while (work := self._next()) is not None:
                chunk, free = work
                if free.wait is not None:
                    free.wait()
                start = time.perf_counter()
                self._fill(chunk, free.buffer)
                self._read_seconds.append(time.perf_counter() - start)
                self._full.put((chunk, free.buffer))
        except (
            BaseException
        ) as error:  # raised where chunks are taken; no name here may keep it, its frames keep buffers
            self._is_stopped = True
            self._full.put(_End(error))
        else:
            self._full.put(_End(None))

    def _next(self) -> tuple[Chunk, _FreeBuffer] | None:
        """A buffer, then a chunk: one reader at a time, so that buffers go to chunks in order."""
        with self._turn:
            free = self._free.get()
            if free is None or self._is_stopped:
                return None
            chunk = next(self._chunks, None)
            if chunk is None:
                self._free.put(free)
                return None
            return chunk, free

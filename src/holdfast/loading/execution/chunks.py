"""Moves cut into chunks: which rows are read together, where they lie in a chunk, and what has to come before; no torch.

A chunk is what travels at once: pieces of one or several moves, each at an aligned place. A move that fits into a chunk is
never cut. Rows of a transposed tensor are cut inside each of its matrices, which are read as they are stored: as rows of
some columns, or of all where that is what the piece takes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.loading.planning.move import Move, Read
from holdfast.memory.tensor_spec import aligned


class Piece(NamedTuple):
    """Some rows of one move, read at once."""

    move: int
    """Index of the move; twins count on behind the moves."""
    row: int
    """The first row, as the move counts them: of the tensor, after transposing and joining."""
    num_rows: int
    read: Read
    offset: int
    """Where its bytes begin in the chunk."""
    num_bytes: int
    finds_peak: bool
    """Whether the largest magnitude of its rows is wanted, before any of the move's rows is placed."""
    places: bool


class Chunk(NamedTuple):
    """Pieces that are read, copied and placed together, in this order."""

    number: int
    pieces: tuple[Piece, ...]
    num_bytes: int
    after: int
    """Every chunk with a lower number than this must have been placed before this one is."""
    done_bytes: float = 0.0
    """Of the checkpoint, that are done with when this chunk is placed."""


def cut_chunks(moves: Sequence[Move], twins: Sequence[Move], chunk_bytes: int) -> Iterator[Chunk]:
    """All moves in order, then the twins, which wait for the moves; cut while they are asked for.

    Only rows that cannot be apart and have more bytes (`Move.least_bytes`) make a chunk larger than `chunk_bytes`.
    """
    cutter = _Cutter(chunk_bytes)
    for index, move in enumerate(moves):
        yield from cutter.cut(index, move)
    yield from cutter.flush()
    cutter.wait_for_all()
    for index, twin in enumerate(twins, len(moves)):
        yield from cutter.cut(index, twin)
    yield from cutter.flush()


class _Cutter:
    """The chunk in the making."""

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
        """What is cut from now on waits for all that has been."""
        assert not self._pieces, f"chunk {self._number} is not complete"
        self._barrier = self._number

    def cut(self, index: int, move: Move) -> Iterator[Chunk]:
        """The chunks that this move fills; its last rows may wait for the next move's."""
        rows, peak_rows = move.part.row_range, move.peak_rows
        if peak_rows is None:
            yield from self._add(index, move, rows, finds_peak=False, places=True)
            return
        if rows == peak_rows and self._is_one_piece(move):
            yield from self._add(index, move, rows, finds_peak=True, places=True)
            return
        # All of it is looked at before the first row is placed, whatever the move takes of it.
        yield from self._add(index, move, peak_rows, finds_peak=True, places=False)
        before, self._barrier = self._barrier, self._number + 1
        yield from self._add(index, move, rows, finds_peak=False, places=True)
        self._barrier = before

    def flush(self) -> Iterator[Chunk]:
        if self._pieces:
            yield Chunk(self._number, tuple(self._pieces), self._used, self._after, self._done_bytes)
            self._pieces, self._used, self._after, self._done_bytes = [], 0, 0, 0.0
            self._number += 1

    def _is_one_piece(self, move: Move) -> bool:
        return next(self._row_ranges(move, move.part.row_range, move.row_bytes)) == move.part.row_range

    def _row_ranges(self, move: Move, rows: tuple[int, int], row_bytes: int) -> Iterator[tuple[int, int]]:
        """As the move cuts them; most are not cut, and found out here because there are many thousands."""
        if not move.part.is_transposed and (rows[1] - rows[0]) * row_bytes <= self._chunk_bytes:
            return iter((rows,))
        return move.row_ranges(self._chunk_bytes, rows)

    def _add(self, index: int, move: Move, rows: tuple[int, int], finds_peak: bool, places: bool) -> Iterator[Chunk]:
        row_bytes = move.row_bytes
        done_bytes = move.num_bytes / max(1, move.num_source_rows) if places else 0.0
        for start, end in self._row_ranges(move, rows, row_bytes):
            num_bytes = (end - start) * row_bytes
            if self._used and self._used + num_bytes > self._chunk_bytes:
                yield from self.flush()
            read = move.read(start, end)
            self._pieces.append(Piece(index, start, end - start, read, self._used, num_bytes, finds_peak, places))
            self._used += aligned(num_bytes)
            self._done_bytes += (end - start) * done_bytes
            # Pieces of one chunk are placed in order, so that a chunk need not wait for itself.
            self._after = max(self._after, min(self._barrier, self._number))

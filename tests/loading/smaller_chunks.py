"""Loads in smaller chunks than a plan has room for, so that small tensors are cut too."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from holdfast.loading.execution import execute
from holdfast.loading.execution.ring import Chunk, cut_chunks
from holdfast.loading.planning.moves import Move


@contextmanager
def chunks_of(chunk_bytes: int | None) -> Iterator[None]:
    """Inside, loads cut their rows into chunks of at most so many bytes; None: as they are planned."""

    def cut(moves: Sequence[Move], tied: Sequence[Move], most_bytes: int) -> Iterator[Chunk]:
        return cut_chunks(moves, tied, min(most_bytes, chunk_bytes or most_bytes))

    with patch.object(execute, "cut_chunks", cut):
        yield

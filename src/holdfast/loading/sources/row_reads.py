"""RowRead: what a source is asked for; and sources that several are asked of at once, for less than one by one; no torch."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class RowRead(NamedTuple):
    """The arguments of `WeightSource.read_into`."""

    name: str
    row_start: int
    row_end: int
    out: memoryview
    columns: tuple[int, int] | None


@runtime_checkable
class TogetherSource(Protocol):
    """What a source has besides, if several reads cost it less than one after the other."""

    def read_together(self, reads: Sequence[RowRead]) -> None:
        """`read_into` for each of them; any number of threads may call it at once."""
        ...

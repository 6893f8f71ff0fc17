"""WeightSource: a checkpoint of tensors as headers have them, whose rows are read by position; no torch until a read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

from holdfast.memory.workspace_plan import TensorSpec

if TYPE_CHECKING:
    import torch

RowWriter: TypeAlias = "Callable[[str, int, int, torch.Tensor, tuple[int, int] | None], None]"
"""write(name, row_start, row_end, out, columns): the bytes that `read_into` gives, into bytes on the device."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One checkpoint tensor, as its header describes it."""

    name: str
    """The Hugging Face name, whatever the file calls it."""
    dtype: str
    """torch's name of the type in which rows are read."""
    shape: tuple[int, ...]
    file: str
    """Name of the file that holds it, for messages."""
    num_bytes: int
    """Bytes on disk."""


class WeightSource(Protocol):
    """A checkpoint whose headers have been read and checked; no weight is read before `read_into`."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor by its Hugging Face name, in the order in which reading is fastest: file by file, front to back."""
        ...

    @property
    def ignorable(self) -> frozenset[str]:
        """Names among the entries that may stay unused, such as rotary tables; any other unused tensor is an error."""
        ...

    @property
    def scratch_bytes_per_reader(self) -> int:
        """Host memory that one call of `read_into` holds beside `out`, at most; 0 where bytes go straight into it."""
        ...

    def read_into(
        self, name: str, row_start: int, row_end: int, out: memoryview, columns: tuple[int, int] | None = None
    ) -> None:
        """Rows [row_start, row_end) as they are stored, in the entry's type, into exactly so many bytes.

        Rows count all leading dimensions; of a vector they are elements. With `columns`, only those of each row. Any
        number of threads may call it at once.
        """
        ...

    def close(self) -> None:
        """Let go of files and buffers; may be called twice."""
        ...


@runtime_checkable
class WritingSource(Protocol):
    """What a source has besides, if it can make rows where they are wanted and so needs no way through the host."""

    @property
    def writer_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors that a writer works with; together less than one chunk of staging, whose place they take."""
        ...

    def writer(self, tensors: Mapping[str, torch.Tensor]) -> RowWriter:
        """Writes, on the device of these tensors, what `read_into` would give; allocates nothing there."""
        ...


@runtime_checkable
class CheckedSource(Protocol):
    """What a source has besides, if it knows what its bytes must be; they are checked where they arrive."""

    @property
    def checksums(self) -> Mapping[str, int]:
        """Of every tensor (kernels/load/checksum.py)."""
        ...

    def damaged(self, name: str) -> Exception:
        """What to raise for a tensor that came with another checksum."""
        ...


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


def read_rows(
    source: WeightSource, name: str, row_start: int, row_end: int, columns: tuple[int, int] | None = None
) -> torch.Tensor:
    """Rows [row_start, row_end) as a tensor of their own; of a vector, elements. Leading dimensions are rows."""
    import torch

    entry = source.entries[name]
    is_vector = len(entry.shape) < 2
    width = 1 if is_vector else entry.shape[-1]
    first, last = columns or (0, width)
    num_rows = prod(entry.shape[:-1]) if not is_vector else prod(entry.shape)
    assert 0 <= row_start <= row_end <= num_rows, f"{name}: rows {row_start} to {row_end} of {num_rows}"
    rows = torch.empty((row_end - row_start, last - first), dtype=getattr(torch, entry.dtype))
    if rows.numel():
        source.read_into(name, row_start, row_end, rows.view(-1).view(torch.uint8).numpy().data, columns)
    return rows.view(-1) if is_vector else rows

"""WeightSource: a checkpoint's tensors by header, with rows read by index; no torch until a read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.packed_schemes import PackedScheme

if TYPE_CHECKING:
    import torch

Columns: TypeAlias = "tuple[int, int] | None"
"""The columns [first, last) of every row; None: all."""
RowWriter: TypeAlias = "Callable[[str, int, int, torch.Tensor, tuple[int, int] | None], None]"
"""write(name, row_start, row_end, out, columns): like `read_into`, into bytes on the device."""
PackedWriter: TypeAlias = "Callable[[int, PackedScheme, tuple[int, int], torch.Tensor, tuple[int, int] | None], None]"
"""write(num_columns, scheme, rows, out, columns): like `PackableSource.read_packed`, of any matrix with so many columns."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One checkpoint tensor by its Hugging Face name, as its header describes it."""

    name: str
    dtype: str
    """torch dtype name of the rows as read."""
    shape: tuple[int, ...]
    file: str
    """Name of the file that holds it, for messages."""
    num_bytes: int
    """On disk."""
    packed: PackedScheme | None = None
    """The scheme in which `PackableSource.read_packed` reads its rows; None: `read_into` alone reads them."""
    order: str = ""
    """Name of the tensor with the group of each column, if the scheme has a plane for it."""


class WeightSource(Protocol):
    """A checkpoint whose headers have been read and checked; no weight is read before `read_into`."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor by Hugging Face name, in the fastest order to read: file by file, front to back."""
        ...

    @property
    def ignorable(self) -> frozenset[str]:
        """Entries that may stay unused, such as rotary tables; any other unused tensor is an error."""
        ...

    @property
    def scratch_bytes_per_reader(self) -> int:
        """Most host memory that one call of `read_into` holds beside `out`; 0 if bytes go straight into it."""
        ...

    def read_into(self, name: str, row_start: int, row_end: int, out: memoryview, columns: Columns = None) -> None:
        """Read rows [row_start, row_end) as stored, in the entry's dtype; `out` has exactly their size.

        Rows flatten all leading dimensions; rows of a vector are elements. `columns` selects columns of each row.
        Thread-safe.
        """
        ...

    def close(self) -> None:
        """Release files and buffers. Idempotent."""
        ...


@runtime_checkable
class WritingSource(Protocol):
    """Extra methods of a source that makes rows on the device, without staging through the host."""

    @property
    def writer_specs(self) -> tuple[TensorSpec, ...]:
        """Tensors of the writer; together smaller than the staging chunk that they replace."""
        ...

    def writer(self, tensors: Mapping[str, torch.Tensor]) -> RowWriter:
        """Return a writer on the device of these tensors; it allocates no device memory."""
        ...


@runtime_checkable
class PackedWritingSource(Protocol):
    """Extra method of a `WritingSource` that makes packed rows, too."""

    def packed_writer(self, tensors: Mapping[str, torch.Tensor]) -> PackedWriter:
        """Return a writer on the device of these tensors, those of `writer_specs`."""
        ...


@runtime_checkable
class CheckedSource(Protocol):
    """Extra methods of a source with checksums of its tensors; the device checks them."""

    @property
    def checksums(self) -> Mapping[str, int]:
        """Checksum of every tensor (kernels/load/checksum.py)."""
        ...

    def damaged(self, name: str) -> Exception:
        """Return the error for a tensor with a wrong checksum."""
        ...


@runtime_checkable
class PackableSource(Protocol):
    """Extra method of a source whose tensors are blocks of codes, which may stay as they are stored."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read_packed(
        self, name: str, scheme: PackedScheme, rows: tuple[int, int], out: memoryview, columns: Columns = None
    ) -> None:
        """Read rows [start, end) of every plane of the entry's scheme, one plane after another. Thread-safe."""
        ...


@runtime_checkable
class TileSource(Protocol):
    """Extra method of a source of GGUF blocks, whose rows may go straight to tiles in host memory."""

    def read_tiles(
        self, name: str, scheme: PackedScheme, rows: tuple[int, int], tiles_GX: torch.Tensor, columns: Columns = None
    ) -> int | None:
        """Fill whole groups of rows in the scheme of tiles; return the first row with a scale that is not finite.

        Thread-safe.
        """
        ...


@runtime_checkable
class SharingSource(Protocol):
    """Extra property of a source whose readers share buffers."""

    @property
    def shared_bytes(self) -> int:
        """Most host memory of these buffers, beside `scratch_bytes_per_reader`."""
        ...


@runtime_checkable
class ValueCheckedSource(Protocol):
    """Extra method of a source with small tensors of numbers that say how others are read."""

    def check_values(self, kept: Mapping[str, PackedScheme | None]) -> None:
        """Refuse wrong numbers beside these tensors, before memory is taken; a scheme says that a tensor stays packed."""
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
    """Extra method of a source that can batch several reads."""

    def read_together(self, reads: Sequence[RowRead]) -> None:
        """Call `read_into` for each, batched. Thread-safe."""
        ...


def table_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor: leading dimensions are rows, as are elements of a vector."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)


def check_read(entry: TensorEntry, row_start: int, row_end: int, out: memoryview, columns: Columns) -> tuple[int, int]:
    """Check the arguments of `read_into` against the tensor; return the columns."""
    num_rows, num_columns = table_shape(entry.shape)
    first, last = columns or (0, num_columns)
    assert 0 <= row_start <= row_end <= num_rows, f"{entry.name}: rows {row_start} to {row_end} of {num_rows}"
    assert 0 <= first < last <= num_columns, f"{entry.name}: columns {first} to {last} of {num_columns}"
    num_bytes = (row_end - row_start) * (last - first) * DTYPE_BYTES[entry.dtype]
    assert len(out) == num_bytes, f"{entry.name}: {len(out)=} for {num_bytes} bytes of rows {row_start} to {row_end}"
    return first, last


def read_rows(source: WeightSource, name: str, row_start: int, row_end: int, columns: Columns = None) -> torch.Tensor:
    """Read rows [row_start, row_end) as a new tensor; elements of a vector."""
    import torch

    entry = source.entries[name]
    first, last = columns or (0, table_shape(entry.shape)[1])
    rows = torch.empty((row_end - row_start, last - first), dtype=getattr(torch, entry.dtype))
    if rows.numel():
        source.read_into(name, row_start, row_end, rows.view(-1).view(torch.uint8).numpy().data, columns)
    return rows.view(-1) if len(entry.shape) < 2 else rows

"""Bands: words of tensors that are stored by inputs, read once for the many reads of a few outputs each; no torch until a read.

A chunk has a few rows of a matrix, and its words lie in every row of such a tensor: as many short runs as there are
inputs. So a band of neighbouring outputs is read at once, and serves all chunks inside it.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

from holdfast.loading.packed.matrices import PackedMatrix
from holdfast.loading.packed.tiles import Span, words_around
from holdfast.loading.sources.source import WeightSource, table_shape
from holdfast.quant.formats import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

    from holdfast.errors import ModelFormatError
    from holdfast.loading.packed.dequantize import Reader

BAND_BYTES = 6 * 2**20
"""Most bytes of a band, unless one column has more."""
KEPT_BYTES = 16 * 2**20
"""Most bytes of bands that are kept: two bands of codes, their scales and zero points."""
Key = tuple[str, Span, int]
"""A tensor, its rows, and the number of the band."""
Held: TypeAlias = "dict[str, dict[int, torch.Tensor]]"
"""Bands by tensor and number."""


class Bands:
    """Bands of one source, shared by its readers. Thread-safe."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._lock = Lock()
        self._kept: OrderedDict[Key, torch.Tensor] = OrderedDict()

    def width(self, name: str, of_rows: Span) -> int:
        """Return the columns of a band with these rows."""
        column_bytes = (of_rows[1] - of_rows[0]) * DTYPE_BYTES[self._source.entries[name].dtype]
        return max(1, BAND_BYTES // column_bytes)

    def read(self, name: str, rows: Span, columns: Span, of_rows: Span, held: Held) -> torch.Tensor:
        """Return stored rows and columns of a tensor: a view of a band with the rows `of_rows`, or of several joined.

        `held` are the bands of one caller's last read, which it finds there again if others have dropped them.
        """
        import torch

        width = self.width(name, of_rows)
        before, held[name] = held.get(name, {}), {}
        found: list[torch.Tensor] = []
        for number in range(columns[0] // width, -(-columns[1] // width)):
            band = before.get(number)
            band = held[name][number] = self._band((name, of_rows, number), width) if band is None else band
            start = number * width
            own = slice(max(columns[0] - start, 0), columns[1] - start)
            found.append(band[rows[0] - of_rows[0] : rows[1] - of_rows[0], own])
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    @property
    def most_bytes(self) -> int:
        """Most bytes at once: kept bands, and one that a slower reader still uses."""
        return KEPT_BYTES + BAND_BYTES

    @property
    def held_bytes(self) -> int:
        """Bytes of the kept bands."""
        return sum(band.nbytes for band in self._kept.values())

    def clear(self) -> None:
        """Drop all bands. Idempotent."""
        with self._lock:
            self._kept.clear()

    def _band(self, key: Key, width: int) -> torch.Tensor:
        """Return a band. It is read under the lock: a thread that waits most often waits for the same one."""
        name, of_rows, number = key
        entry = self._source.entries[name]
        num_columns = table_shape(entry.shape)[1]
        columns = number * width, min((number + 1) * width, num_columns)
        num_bytes = (of_rows[1] - of_rows[0]) * (columns[1] - columns[0]) * DTYPE_BYTES[entry.dtype]
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                while self._kept and num_bytes + self.held_bytes > KEPT_BYTES:
                    self._kept.popitem(last=False)
                found = _read(self._source, name, of_rows, columns, num_bytes)
            self._kept[key] = found
        return found


def _read(source: WeightSource, name: str, rows: Span, columns: Span, num_bytes: int) -> torch.Tensor:
    """Read a band into pages of its own, which go back to the system with it: an allocator would keep them for a while."""
    import torch

    entry = source.entries[name]
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    is_whole = columns == (0, table_shape(entry.shape)[1])
    source.read_into(name, *rows, memoryview(pages), None if is_whole else columns)
    return torch.frombuffer(pages, dtype=getattr(torch, entry.dtype)).view(rows[1] - rows[0], columns[1] - columns[0])


class BandReader:
    """Reads a matrix for one call: words, scales and zero points through bands, whose rows are those of its columns."""

    def __init__(self, bands: Bands, reader: Reader, matrix: PackedMatrix, columns: Span) -> None:
        self._bands, self._reader = bands, reader
        each = matrix.layout.codes_per_word if matrix.layout.format.packs_inputs else 1
        groups = 0, matrix.num_groups
        self._rows = {matrix.codes: words_around(columns, each)[0], matrix.scales: groups, matrix.zeros: groups}
        self._held: Held = {}

    def read(self, name: str, rows: Span, columns: Span | None = None) -> torch.Tensor:
        """Read rows and columns of a stored tensor; of a vector, elements."""
        of_rows = self._rows.get(name)
        if of_rows is None or columns is None or columns[1] - columns[0] > self._bands.width(name, of_rows):
            return self._reader.read(name, rows, columns)
        return self._bands.read(name, rows, columns, of_rows, self._held)

    def wrong(self, name: str, problem: str) -> ModelFormatError:
        """Return the error about the values of a tensor."""
        return self._reader.wrong(name, problem)

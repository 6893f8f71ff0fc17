"""Move: rows of one checkpoint tensor on their way to the rows of a weight, and how they are read; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.models.parameters import Part
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.weight_schemes import SCALE_SUFFIX, WeightScheme


class Read(NamedTuple):
    """What `WeightSource.read_into` is asked for, beside the name and the place."""

    row_start: int
    row_end: int
    columns: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of one checkpoint tensor, and the rows of a weight that they fill.

    Rows are counted as the part counts them: after transposing and joining. In a chunk they lie one after the other, row by
    row; those of a transposed tensor lie column by column, as they are stored.
    """

    tensor: str
    tensor_dtype: str
    """As it is read."""
    target: str
    """The final tensor; seen as rows of `part.num_columns` elements (or of their codes), `part.row_start` counts in it."""
    part: Part
    scheme: WeightScheme | None
    """Quantize into the target and its scales; None: convert to the target's type."""
    num_bytes: int
    """That are read from disk for it."""

    @property
    def read_columns(self) -> tuple[int, int] | None:
        """The columns that are read; None: whole rows, because a scale by row follows from all of it, or all are kept."""
        has_row_scale = self.scheme is not None and self.scheme.block_columns == 0
        return None if has_row_scale or self.part.joined_rows > 1 else self.part.columns

    @property
    def num_read_columns(self) -> int:
        columns = self.read_columns
        return self.part.source_columns if columns is None else columns[1] - columns[0]

    @property
    def kept_columns(self) -> tuple[int, int]:
        """The columns that are kept, counted among those that are read."""
        return self.part.column_range if self.read_columns is None else (0, self.part.num_columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it is read."""
        return self.num_read_columns * DTYPE_BYTES[self.tensor_dtype]

    @property
    def keeps_exponents(self) -> bool:
        """Whether these are scales that are stored as exponents of two, and stay so where their target has the same type."""
        return self.scheme is None and self.tensor_dtype == "uint8" and self.target.endswith(SCALE_SUFFIX)

    @property
    def num_source_rows(self) -> int:
        start, end = self.part.row_range
        return end - start

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all of its rows in chunks."""
        return self.num_source_rows * self.row_bytes

    @property
    def block_rows(self) -> int:
        """Rows that one scale needs at once."""
        return 1 if self.scheme is None else self.scheme.block_rows

    @property
    def least_bytes(self) -> int:
        """The fewest bytes that a chunk must hold."""
        return min(self.block_rows, self.num_source_rows) * self.row_bytes

    @property
    def peak_rows(self) -> tuple[int, int] | None:
        """The rows of the tensor whose largest magnitude decides about the scale; None: each row or block has its own."""
        return self.part.whole_range if self.scheme is not None and self.scheme.is_whole_tensor else None

    def row_ranges(self, max_bytes: int, rows: tuple[int, int] | None = None) -> Iterator[tuple[int, int]]:
        """Its rows (or other rows of its tensor), as many at a time as the bytes allow: whole blocks, at least one."""
        start, last = rows or self.part.row_range
        step = max(1, max_bytes // (self.row_bytes * self.block_rows)) * self.block_rows
        while start < last:
            end = min(start + step, last)
            if self.part.is_transposed:  # a read gives some columns of one matrix
                end = min(end, (start // self.part.matrix_rows + 1) * self.part.matrix_rows)
            yield start, end
            start = end

    def read(self, row_start: int, row_end: int) -> Read:
        """How these rows are read from the source."""
        part = self.part
        if not part.is_transposed:
            return Read(row_start * part.joined_rows, row_end * part.joined_rows, self.read_columns)
        matrix, start = divmod(row_start, part.matrix_rows)
        end = start + row_end - row_start
        assert end <= part.matrix_rows, f"{self.tensor}: rows {row_start} to {row_end} are of two matrices"
        first, last = self.read_columns or (0, part.source_columns)
        columns = None if (start, end) == (0, part.matrix_rows) else (start, end)
        return Read(matrix * part.source_columns + first, matrix * part.source_columns + last, columns)

    def target_rows(self, row_start: int, row_end: int) -> tuple[int, int]:
        """The rows of the target that these rows fill."""
        first = self.part.row_range[0]
        start, end = ((row - first) * self.part.repeats + self.part.row_start for row in (row_start, row_end))
        return start, end

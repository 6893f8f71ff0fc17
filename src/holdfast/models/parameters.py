"""The parameters of a decoder and which checkpoint tensors make up each of them; no torch.

A parameter is one final tensor, such as the fused layers.3.qkv.weight. A part is a checkpoint tensor, or some rows and
columns of one, that fills some of its rows. Rows count all leading dimensions: the experts [E, N, K] of a layer are E * N
rows of K columns, and expert e begins at row e * N; a vector has one column. Checkpoint tensors are named as Hugging Face
names them; a source with other names (GGUF) translates.
"""

from dataclasses import dataclass
from math import gcd, prod
from typing import Literal

Kind = Literal["linear", "expert", "embedding", "head", "norm", "bias", "router"]
"""What a parameter is for; linear, expert and head are what quantization is for."""
Split = Literal["none", "rows", "columns"]
"""How ranks share a parameter: all of it each, some rows of every part each, or some columns of all rows each."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a parameter, from `row_start` on, and where in a checkpoint tensor they come from."""

    tensor: str
    row_start: int
    shape: tuple[int, ...]
    """Of the whole checkpoint tensor."""
    rows: tuple[int, int] | None = None
    """The rows [start, end) of the checkpoint tensor that are taken, leading dimensions counted as rows; None: all.
    Of a transposed one they are rows after transposing."""
    columns: tuple[int, int] | None = None
    """The columns that are taken of them; None: all. A scale that is shared by a row still follows from all of it."""
    is_transposed: bool = False
    """The last two dimensions are stored the other way round: [E, K, N] instead of [E, N, K]."""
    repeats: int = 1
    """Rows of the parameter that each row fills: a stored scale that stands for several of ours."""
    whole_rows: tuple[int, int] | None = None
    """The rows of the checkpoint tensor of which `rows` are one rank's share; None: `rows` are all there are."""
    joined_rows: int = 1
    """Stored rows that are one row here: [E, N, K / 32, 16] stands for rows of K / 2, each of K / 32 stored ones."""

    @property
    def source_rows(self) -> int:
        """Rows of the whole checkpoint tensor, after transposing and joining."""
        return prod(self.shape) // self.source_columns

    @property
    def source_columns(self) -> int:
        """Columns of the whole checkpoint tensor, after transposing and joining; 1 of a vector or a single number."""
        return self.shape[-2 if self.is_transposed else -1] * self.joined_rows if len(self.shape) > 1 else 1

    @property
    def matrix_rows(self) -> int:
        """Rows of one of the matrices that the checkpoint tensor is a stack of."""
        if len(self.shape) < 2:
            return self.source_rows
        return self.shape[-1 if self.is_transposed else -2 if self.joined_rows == 1 else -3]

    @property
    def row_range(self) -> tuple[int, int]:
        return self.rows or (0, self.source_rows)

    @property
    def column_range(self) -> tuple[int, int]:
        return self.columns or (0, self.source_columns)

    @property
    def whole_range(self) -> tuple[int, int]:
        """The rows that a scale for the whole of them follows from, whichever of them are taken."""
        return self.whole_rows or self.row_range

    @property
    def num_rows(self) -> int:
        """Rows of the parameter that it fills."""
        start, end = self.row_range
        return (end - start) * self.repeats

    @property
    def num_columns(self) -> int:
        start, end = self.column_range
        return end - start

    def check(self) -> None:
        """What it takes lies inside the checkpoint tensor, and inside what it is a share of."""
        start, end = self.row_range
        assert 0 <= start < end <= self.source_rows, f"{self.tensor}: rows {start} to {end} of {self.source_rows}"
        first, last = self.whole_range
        assert first <= start < end <= last, f"{self.tensor}: rows {start} to {end} as a share of {first} to {last}"
        start, end = self.column_range
        assert 0 <= start < end <= self.source_columns, f"{self.tensor}: columns {start} to {end} of {self.shape}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One final tensor; its parts cover every row exactly once."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    kind: Kind = "linear"
    split: Split = "none"
    layouts: tuple[tuple[Part, ...], ...] = ()
    """Other ways in which checkpoints store the same: the first whose tensors are there with these shapes is taken."""
    dtype: str | None = None
    """Its own type, whatever the dtype of the engine; None: that one."""
    whole: "Parameter | None" = None
    """The parameter of the whole model of which this one is a rank's share; None: this one is."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_rows(self) -> int:
        """All leading dimensions; of a vector, its elements."""
        return prod(self.shape[:-1] if len(self.shape) > 1 else self.shape)

    @property
    def num_columns(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def seam_rows(self) -> int:
        """What divides every row at which two parts or two stacked matrices of the whole parameter meet; 0: none do."""
        if self.whole is not None:
            return self.whole.seam_rows
        stacked = self.shape[-2] if len(self.shape) > 2 else 0
        return gcd(stacked, *(part.row_start for part in self.parts))

    def check(self) -> None:
        """In every layout each row is filled once, in order, by parts of the right width."""
        for parts in (self.parts, *self.layouts):
            row = 0
            for part in parts:
                part.check()
                assert part.row_start == row, f"{self.name}: {part.tensor} starts at row {part.row_start}, not {row}"
                assert part.num_columns == self.num_columns, f"{self.name}: {part} beside {self.shape=}"
                row += part.num_rows
            assert row == self.num_rows, f"{self.name}: parts fill {row} rows of {self.num_rows}"

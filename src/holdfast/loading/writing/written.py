"""WritePlan: every tensor of a quantized file, what fills it, its bytes before and after, and why it stays plain; no torch."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from holdfast.models.parameters import Part


class Plane(NamedTuple):
    """One tensor of the output file: codes, scales, or the numbers themselves."""

    name: str
    dtype: str
    """A type of GGUF files, or torch's name."""
    shape: tuple[int, ...]
    num_bytes: int
    """The whole tensor's bytes. A plane with a run of bytes for each row is written row by row."""


@dataclass(frozen=True, slots=True)
class Written:
    """One weight of the output: checkpoint rows that fill it, in order, and how they are stored."""

    name: str
    """Its name in the output, without suffixes of planes."""
    encoding: str
    """How rows become bytes: a type of GGUF files, "int4", "nvfp4", "plain" or "copy"."""
    parts: tuple[Part, ...]
    planes: tuple[Plane, ...]
    before_type: str
    before_bytes: int
    reason: str = ""
    """Why its type is not the one that was chosen; empty if it is."""
    head_dim: int | None = None
    """Rows i and i + half of each head of this size become rows 2i and 2i + 1; None: rows stay in order."""
    added: float = 0.0
    """Added to every value."""
    amax_parts: tuple[Part, ...] = ()
    """Rows whose amax sets the one scale of all scales: those of all tensors that are multiplied as one."""
    constant: bytes = b""
    """The bytes themselves, of a tensor that no row fills."""

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def num_columns(self) -> int:
        return self.parts[0].num_columns if self.parts else 1

    @property
    def num_elements(self) -> int:
        return prod(self.planes[0].shape) if not self.parts else self.num_rows * self.num_columns

    @property
    def num_bytes(self) -> int:
        return sum(plane.num_bytes for plane in self.planes)

    @property
    def stored_as(self) -> str:
        """Its type in tables."""
        return self.encoding if self.encoding in ("int4", "nvfp4") else self.planes[0].dtype

    def check(self) -> None:
        """Check that parts have the same columns, and that planes with rows have whole bytes a row."""
        assert self.planes, f"{self.name}: nothing is stored"
        assert all(part.num_columns == self.num_columns for part in self.parts), f"{self.name}: {self.parts}"
        if self.head_dim is not None:
            assert self.num_rows % self.head_dim == 0, f"{self.name}: {self.num_rows=} of heads of {self.head_dim}"


class SummaryRow(NamedTuple):
    """Weights that were stored alike before and are stored alike after, for one reason."""

    before_type: str
    stored_as: str
    num_tensors: int
    before_bytes: int
    num_bytes: int
    reason: str


@dataclass(frozen=True)
class WritePlan:
    """What a quantized file or folder holds."""

    target: str
    tensors: tuple[Written, ...]
    notes: tuple[str, ...] = ()
    """Sentences about choices that the table does not show."""

    def check(self) -> None:
        """Check every tensor, and that names differ."""
        for tensor in self.tensors:
            tensor.check()
        names = [plane.name for tensor in self.tensors for plane in tensor.planes]
        assert len(set(names)) == len(names), f"{len(names) - len(set(names))} names occur twice"

    @property
    def before_bytes(self) -> int:
        return sum(tensor.before_bytes for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_elements(self) -> int:
        """Elements that are read, those of a first pass for an amax included."""
        return sum(tensor.num_elements * (1 + bool(tensor.amax_parts)) for tensor in self.tensors)

    @property
    def rows(self) -> tuple[SummaryRow, ...]:
        """The summary: weights with codes first, then the rest, the most bytes first."""
        groups: dict[tuple[str, str, str], list[Written]] = {}
        for tensor in self.tensors:
            groups.setdefault((tensor.before_type, tensor.stored_as, tensor.reason), []).append(tensor)
        rows = [
            SummaryRow(
                before_type,
                stored_as,
                len(tensors),
                sum(tensor.before_bytes for tensor in tensors),
                sum(tensor.num_bytes for tensor in tensors),
                reason,
            )
            for (before_type, stored_as, reason), tensors in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: (bool(row.reason), -row.num_bytes)))

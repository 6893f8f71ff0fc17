"""Move maps rows of a checkpoint tensor to rows of a weight; `choose_all` finds a checkpoint's layouts; no torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from holdfast.loading.sources.source import TensorEntry
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.packed_schemes import PackedRows, PackedScheme
from holdfast.quant.weight_schemes import SCALE_SUFFIX, WeightScheme

BYTES, SIGNED_BYTES = "uint8", "int8"
"""Types of bytes that hold two four-bit codes; some files declare them signed."""


class Read(NamedTuple):
    """Arguments of `WeightSource.read_into` except the name and the buffer."""

    row_start: int
    row_end: int
    columns: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of one checkpoint tensor, and the rows of a weight that they fill.

    Rows count as in the part: after transposing and joining. A chunk stores them row by row; rows of a transposed
    tensor column by column, as stored.
    """

    tensor: str
    tensor_dtype: str
    target: str
    """The final tensor; `part.row_start` counts in rows of `part.num_columns` elements, or of their codes."""
    part: Part
    scheme: WeightScheme | None
    """Quantize into the target and its scales; None: convert to the target's type."""
    num_bytes: int
    packed: PackedScheme | None = None
    """Keep rows as planes of this scheme, which are named after `target`; None: `target` is one tensor of elements."""

    @property
    def read_columns(self) -> tuple[int, int] | None:
        """The columns to read. None: whole rows, because a scale by row needs them or all are kept."""
        has_row_scale = self.scheme is not None and self.scheme.block_columns == 0
        return None if has_row_scale or self.part.joined_rows > 1 else self.part.columns

    @property
    def num_read_columns(self) -> int:
        columns = self.read_columns
        return self.part.source_columns if columns is None else columns[1] - columns[0]

    @property
    def kept_columns(self) -> tuple[int, int]:
        """The columns to keep, as indices into the columns read."""
        return self.part.column_range if self.read_columns is None else (0, self.part.num_columns)

    @property
    def row_bytes(self) -> int:
        """Bytes read per row."""
        if self.packed is not None:
            return self.packed.row_bytes(self.part.num_columns) // self.packed.row_group
        return self.num_read_columns * DTYPE_BYTES[self.tensor_dtype]

    @property
    def keeps_exponents(self) -> bool:
        """True for scales stored as exponents of two; they stay unchanged if the target has that type."""
        return self.scheme is None and self.tensor_dtype == "uint8" and self.target.endswith(SCALE_SUFFIX)

    @property
    def planes(self) -> list[tuple[str, int]]:
        """The planes that a packed move fills: their names, and elements of a row, or of rows that interleave."""
        assert self.packed is not None, f"{self.target} is not packed"
        return [
            (f"{self.target}.{plane.name}", plane.row_elements(self.part.num_columns))
            for plane in self.packed.planes
            if not plane.is_shared
        ]

    @property
    def num_source_rows(self) -> int:
        start, end = self.part.row_range
        return end - start

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all its rows in chunks."""
        return self.num_source_rows * self.row_bytes

    @property
    def block_rows(self) -> int:
        """Rows that share a scale, or that lie interleaved."""
        if self.packed is not None:
            return self.packed.row_group
        return 1 if self.scheme is None else self.scheme.block_rows

    @property
    def least_bytes(self) -> int:
        """The fewest bytes that a chunk must hold."""
        return min(self.block_rows, self.num_source_rows) * self.row_bytes

    @property
    def amax_rows(self) -> tuple[int, int] | None:
        """The rows of the tensor whose amax sets one scale; None: each row or block has its own scale."""
        return self.part.whole_range if self.scheme is not None and self.scheme.is_whole_tensor else None

    def row_ranges(self, max_bytes: int, rows: tuple[int, int] | None = None) -> Iterator[tuple[int, int]]:
        """Split its rows (or others of its tensor) into ranges of whole blocks: at most `max_bytes`, at least one."""
        start, last = rows or self.part.row_range
        step = max(1, max_bytes // (self.row_bytes * self.block_rows)) * self.block_rows
        while start < last:
            end = min(start + step, last)
            if self.part.is_transposed:  # one read covers some columns of one matrix
                end = min(end, (start // self.part.matrix_rows + 1) * self.part.matrix_rows)
            yield start, end
            start = end

    def read(self, row_start: int, row_end: int) -> Read:
        """Return the arguments that read these rows from the source."""
        part = self.part
        if not part.is_transposed:
            return Read(row_start * part.joined_rows, row_end * part.joined_rows, self.read_columns)
        matrix, start = divmod(row_start, part.matrix_rows)
        end = start + row_end - row_start
        assert end <= part.matrix_rows, f"{self.tensor}: rows {row_start} to {row_end} are of two matrices"
        first, last = self.read_columns or (0, part.source_columns)
        columns = None if (start, end) == (0, part.matrix_rows) else (start, end)
        return Read(matrix * part.source_columns + first, matrix * part.source_columns + last, columns)


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """A weight after the load; `shape` is the shape of the matrix, even if stored as codes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Type of its elements or, for codes, of the computation."""
    scheme: WeightScheme | None = None
    """Its blocks of rows fit the weight's parts."""
    limit: int = 0
    """Upper bound of integer elements, exclusive, checked after the load; 0: no bound."""
    packed: tuple[PackedRows, ...] = ()
    """Its rows as they stay packed; empty: it is plain or quantized."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Its tensors: itself, or its codes and then its scales, or the planes of its packed parts."""
        if self.packed:
            return tuple(
                TensorSpec(part_name(self, index) + plane.suffix, plane.shape, plane.dtype)
                for index, rows in enumerate(self.packed)
                for plane in rows.scheme.shaped((*self.shape[:-2], rows.num_rows, self.shape[-1]))
            )
        if self.scheme is None:
            return (TensorSpec(self.name, self.shape, self.dtype),)
        planes = self.scheme.planes(self.shape)
        return tuple(TensorSpec(self.name + plane.suffix, plane.shape, plane.dtype) for plane in planes)

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def stored_as(self) -> str:
        """The name of its scheme, or of its type."""
        if self.packed:
            return " and ".join(dict.fromkeys(rows.scheme.title for rows in self.packed))
        return self.dtype if self.scheme is None else self.scheme.name


def part_name(weight: PlannedWeight, index: int) -> str:
    """Return the prefix of the planes of a packed part: the weight's name, with a number if it has several parts."""
    return weight.name if len(weight.packed) == 1 else f"{weight.name}.{index}"


EMBEDDING = "embed.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Choice:
    """A parameter and the parts that fill it."""

    parameter: Parameter
    parts: tuple[Part, ...]
    whole_parts: tuple[Part, ...]
    """Parts of the whole parameter. Every rank checks all of them, so every rank finds the same errors."""

    def renamed(self, tensor: str) -> "Choice":
        """Return the choice with another tensor."""
        parts, whole_parts = (
            tuple(part._replace(tensor=tensor) for part in parts) for parts in (self.parts, self.whole_parts)
        )
        return Choice(self.parameter, parts, whole_parts)


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices for all parameters, and for tied weights: stored tensors that must equal a filled one."""

    fills: tuple[Choice, ...]
    tied: tuple[Choice, ...]


def choose_all(
    parameters: Sequence[Parameter], entries: Mapping[str, TensorEntry], whole: Iterable[Parameter] = ()
) -> Choices:
    """Choose layouts. Tied embeddings are stored as embedding, as head, or as both; then the head is compared.

    For a pipeline stage, `whole` are the whole model's parameters: another stage may have the head.
    """
    fills = [choose(parameter, entries) for parameter in turn_squares(parameters, entries)]
    tied: list[Choice] = []
    used = [*(part for choice in fills for part in choice.whole_parts), *(part for one in whole for part in one.parts)]
    uses_head = any(part.tensor == HEAD for part in used)
    for place, choice in enumerate(fills):
        if choice.parameter.name == EMBEDDING and HEAD in entries and not uses_head:
            if all(part.tensor in entries for part in choice.whole_parts):
                tied.append(choice.renamed(HEAD))
            else:
                fills[place] = choice.renamed(HEAD)
    return Choices(tuple(fills), tuple(tied))


def turn_squares(parameters: Iterable[Parameter], entries: Mapping[str, TensorEntry]) -> tuple[Parameter, ...]:
    """Resolve stacked square matrices, which fit both plain and transposed, to one layout.

    The layout of the same experts' other tensor decides: both cannot be square.
    """
    parameters = tuple(parameters)
    fits = {parameter.name: _fitting(parameter, entries) for parameter in parameters if parameter.layouts}
    is_turned = {_module(name): found[0][1] for name, found in fits.items() if len({way for _, way in found}) == 1}
    turned: list[Parameter] = []
    for parameter in parameters:
        found = fits.get(parameter.name, [])
        wanted = is_turned.get(_module(parameter.name))
        if len({way for _, way in found}) > 1 and wanted is not None:
            place = next(place for place, way in found if way == wanted)
            whole = parameter.whole and _only(parameter.whole, place)
            parameter = replace(_only(parameter, place), whole=whole)
        turned.append(parameter)
    return tuple(turned)


def _fitting(parameter: Parameter, entries: Mapping[str, TensorEntry]) -> list[tuple[int, bool]]:
    """Return (index, is_transposed) of every layout that fits."""
    whole = parameter.whole or parameter
    layouts = (whole.parts, *whole.layouts)
    return [(place, parts[0].is_transposed) for place, parts in enumerate(layouts) if _fits(parts, entries)]


def _only(parameter: Parameter, place: int) -> Parameter:
    return replace(parameter, parts=(parameter.parts, *parameter.layouts)[place], layouts=())


def _module(name: str) -> str:
    """Return layers.0.experts for layers.0.experts.down.weight."""
    return name.removesuffix(".weight").rpartition(".")[0]


def choose(parameter: Parameter, entries: Mapping[str, TensorEntry]) -> Choice:
    """Choose the first layout that fits, else the most complete one, for the error."""
    whole = parameter.whole or parameter
    layouts = (whole.parts, *whole.layouts)
    chosen = next((place for place, parts in enumerate(layouts) if _fits(parts, entries)), None)
    if chosen is None:
        present = [sum(part.tensor in entries for part in parts) / max(1, len(parts)) for parts in layouts]
        chosen = max(range(len(layouts)), key=lambda place: present[place])
    return Choice(parameter, (parameter.parts, *parameter.layouts)[chosen], layouts[chosen])


def _fits(parts: Sequence[Part], entries: Mapping[str, TensorEntry]) -> bool:
    return all(part.tensor in entries and entries[part.tensor].shape == part.shape for part in parts)

"""PackedSource: presents packed matrices as X.weight in float32 [N, K], dequantized by the reading thread; no torch until a read.

A read goes tile by tile: scales and zero points of some rows once, then their codes in steps of columns. Tensors with
inputs as rows (AWQ, GPTQ) are read in bands (`Bands`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.packed.bands import BandReader, Bands
from holdfast.loading.packed.matrices import PackedMatrix, find_matrices, is_ordered, packed_bytes, scheme_of
from holdfast.loading.packed.settings import TABLES, PackedSettings
from holdfast.loading.packed.tiles import STEP_ELEMENTS, WHOLE_BYTES, Span, scratch_bytes, tiles
from holdfast.loading.sources.source import (
    Columns,
    RowRead,
    TensorEntry,
    TogetherSource,
    WeightSource,
    check_read,
    read_rows,
    table_shape,
)
from holdfast.memory.on_disk import OnDisk, StoredType
from holdfast.models.parameters import Parameter
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.packed_schemes import LARGEST_SCALE, PackedScheme

if TYPE_CHECKING:
    import torch

    from holdfast.loading.packed.dequantize import Reader

READ_DTYPE = "float32"
WHOLE_SHARE = 32
"""Rows of words are read whole if they have at most so many times the needed bytes, and WHOLE_BYTES.

That is one system call; columns of rows are one run for each row.
"""


def expand_packed(source: WeightSource, settings: PackedSettings, parameters: Iterable[Parameter]) -> PackedSource:
    """Return a source that dequantizes packed matrices; refuse tensors that the settings do not declare."""
    unread = source.ignorable
    return PackedSource(source, settings, find_matrices(source.entries, unread, settings, parameters))


class PackedSource:
    """Implements WeightSource over another source. Reads hold their scratch only while they run."""

    def __init__(self, source: WeightSource, settings: PackedSettings, found: dict[str, PackedMatrix]) -> None:
        self._source = source
        self._matrices = {matrix.tensor: matrix for matrix in found.values()}
        self._settled_matrices: dict[str, PackedMatrix] = {}
        self._ordered: set[str] = set()
        """Matrices whose groups are no runs of inputs."""
        self._bands = Bands(source)
        self.settings = settings
        self.entries: dict[str, TensorEntry] = {}
        """Every tensor, scales included, so that the list of files is complete; codes as the matrix that they hold."""
        for name, entry in source.entries.items():
            matrix = found.get(name)
            if matrix is not None:
                entry = replace(
                    entry,
                    name=matrix.tensor,
                    dtype=READ_DTYPE,
                    shape=(matrix.num_rows, matrix.num_columns),
                    num_bytes=packed_bytes(matrix, source.entries),
                    packed=scheme_of(matrix, source.entries),
                    order=matrix.groups if is_ordered(matrix) else "",
                )
            if entry.name in self.entries:
                raise ModelFormatError(
                    "weights.duplicate_tensor",
                    file=entry.file,
                    tensor=entry.name,
                    other=self.entries[entry.name].file,
                )
            self.entries[entry.name] = entry

    @property
    def ignorable(self) -> frozenset[str]:
        """What is beside codes, and calibrated scales of activations and of KV pages."""
        used = frozenset[str]().union(*(matrix.used for matrix in self._matrices.values()))
        endings = tuple(TABLES["unneeded_endings"])
        return self._source.ignorable | used | {name for name in self.entries if name.endswith(endings)}

    @property
    def num_cache_scales(self) -> int:
        """Number of tensors with scales of KV pages, which are unused."""
        return sum(name.endswith(tuple(TABLES["cache_endings"])) for name in self.entries)

    @property
    def notes(self) -> tuple[str, ...]:
        """A plan's sentences on the storage; scales of KV pages count if the files or the settings have any."""
        return replace(
            self.settings, has_cache_scales=self.settings.has_cache_scales or self.num_cache_scales > 0
        ).notes

    @property
    def scratch_bytes_per_reader(self) -> int:
        """Most bytes of any read's tile: its scales and zero points, one step of codes, and groups by column."""
        own_bytes = max(scratch_bytes(matrix) for matrix in self._matrices.values())
        return self._source.scratch_bytes_per_reader + own_bytes

    @property
    def shared_bytes(self) -> int:
        """Most bytes of bands, which all readers share."""
        return self._bands.most_bytes if any(one.layout.format.is_input_major for one in self._matrices.values()) else 0

    @property
    def on_disk(self) -> OnDisk:
        """Sum bytes by stored type; tensors beside codes count with these."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        ignorable = self.ignorable
        for name, entry in self.entries.items():
            matrix = self._matrices.get(name)
            if matrix is None and name in ignorable:
                continue
            stored_as = entry.dtype if matrix is None else matrix.layout.title
            counts[stored_as] += 1
            sizes[stored_as] += entry.num_bytes
        return OnDisk(
            num_files=len({entry.file for entry in self.entries.values()}),
            num_bytes=sum(entry.num_bytes for entry in self._source.entries.values()),
            types=tuple(StoredType(name, count, sizes[name]) for name, count in counts.most_common()),
            has_blocks=True,
            embedding_type=None,
        )

    @property
    def plain_entries(self) -> dict[str, TensorEntry]:
        """Return the tensors that are stored plain."""
        ignorable = self.ignorable
        return {
            name: entry for name, entry in self.entries.items() if name not in self._matrices and name not in ignorable
        }

    def read_into(self, name: str, row_start: int, row_end: int, out: memoryview, columns: Columns = None) -> None:
        """Dequantize rows of a packed matrix; read other tensors unchanged."""
        matrix = self._matrices.get(name)
        if matrix is None:
            self._source.read_into(name, row_start, row_end, out, columns)
            return
        import torch

        from holdfast.loading.packed.dequantize import FUNCTIONS, expand, group_index

        first, last = check_read(self.entries[name], row_start, row_end, out, columns)
        matrix = self._settled(matrix)
        if row_start == row_end:
            return
        values_RC = torch.frombuffer(out, dtype=torch.float32).view(row_end - row_start, last - first)
        index_K = group_index(matrix, self) if matrix.tensor in self._ordered else None
        functions = FUNCTIONS[matrix.layout.format.name]
        reader = self._reader(matrix, (first, last))
        groups = _groups_of(matrix, index_K, (first, last))
        for rows, steps in tiles(matrix, (row_start, row_end), (first, last), groups[1] - groups[0]):
            scales = functions.scales(matrix, reader, rows, groups)
            for step in steps:
                codes_RC = functions.codes(matrix, reader, rows, step)
                own = slice(rows[0] - row_start, rows[1] - row_start), slice(step[0] - first, step[1] - first)
                size = _whole_groups(matrix, step)
                if index_K is None and size:
                    groups_before = step[0] // matrix.scale_columns - groups[0]
                    some = slice(groups_before, groups_before + (step[1] - step[0]) // size)
                    zeros_RJ = None if scales.zeros_RJ is None else scales.zeros_RJ[:, some]
                    narrow = scales._replace(scales_RJ=scales.scales_RJ[:, some], zeros_RJ=zeros_RJ)
                    expand(matrix, codes_RC, narrow, size, values_RC[own])
                    continue
                if index_K is None:
                    places_C = torch.arange(*step) // matrix.scale_columns - groups[0]
                else:
                    places_C = index_K[slice(*step)] - groups[0]
                expand(matrix, codes_RC, scales, places_C, values_RC[own])

    def read_packed(
        self, name: str, scheme: PackedScheme, rows: tuple[int, int], out: memoryview, columns: Columns = None
    ) -> None:
        """Repack rows of a matrix into planes: a row is an output, and its codes lie in the order of inputs."""
        from holdfast.loading.packed.repack import repack

        matrix = self._kept(self._matrices[name], scheme)
        if rows[0] < rows[1]:
            columns = columns or (0, matrix.num_columns)
            repack(matrix, self._reader(matrix, columns), scheme, rows, columns, out)

    def read_together(self, reads: Sequence[RowRead]) -> None:
        """Read packed matrices one by one, and the rest together if the inner source supports it."""
        others = [read for read in reads if read.name not in self._matrices]
        if isinstance(self._source, TogetherSource):
            self._source.read_together(others)
        else:
            for read in others:
                self._source.read_into(*read)
        for read in reads:
            if read.name in self._matrices:
                self.read_into(*read)

    def close(self) -> None:
        self._bands.clear()
        self._source.close()

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
        """Read rows and columns of a stored tensor; of a vector, elements."""
        entry = self._source.entries[name]
        num_columns = table_shape(entry.shape)[1]
        if columns is None or columns == (0, num_columns) or len(entry.shape) < 2:
            return read_rows(self._source, name, *rows)
        whole_bytes = (rows[1] - rows[0]) * num_columns * DTYPE_BYTES[entry.dtype]
        if num_columns <= WHOLE_SHARE * (columns[1] - columns[0]) and whole_bytes <= WHOLE_BYTES:
            return read_rows(self._source, name, *rows)[:, slice(*columns)]
        return read_rows(self._source, name, *rows, columns)

    def check_values(self, kept: Mapping[str, PackedScheme | None]) -> None:
        """Refuse wrong values of small tensors: groups of inputs, shapes, scales of all scales, and needless biases."""
        for name, scheme in kept.items():
            matrix = self._matrices.get(name)
            if matrix is not None:
                _ = self._settled(matrix) if scheme is None else self._kept(matrix, scheme)

    def wrong(self, name: str, problem: str) -> ModelFormatError:
        """Return the error about the values of a stored tensor."""
        file = self._source.entries[name].file
        return ModelFormatError("weights.packed_values", file=file, tensor=name, problem=problem)

    def _reader(self, matrix: PackedMatrix, columns: Span) -> Reader:
        """Return what reads a matrix for one call."""
        return BandReader(self._bands, self, matrix, columns) if matrix.layout.format.is_input_major else self

    def _kept(self, matrix: PackedMatrix, scheme: PackedScheme) -> PackedMatrix:
        """Like `_settled`, for a matrix that stays packed."""
        settled = self._settled(matrix)
        if matrix.tensor in self._ordered and not scheme.order_groups:
            file = self._source.entries[matrix.groups].file
            reason = "it orders groups by input, and the settings declare no act-order; take packed_weights=expanded"
            raise UnsupportedModelError("weights.packed_format", file=file, tensor=matrix.groups, reason=reason)
        return settled

    def _settled(self, matrix: PackedMatrix) -> PackedMatrix:
        """Check the small tensors of a module before its first read; return it with the zero points that it has."""
        if matrix.tensor in self._settled_matrices:
            return self._settled_matrices[matrix.tensor]
        from holdfast.loading.packed.dequantize import group_index, is_symmetric

        if matrix.shape:
            stated = self._whole(matrix.shape).tolist()
            if stated != [matrix.num_rows, matrix.num_columns]:
                problem = f"says {stated}, and the matrix is [{matrix.num_rows}, {matrix.num_columns}]"
                raise self.wrong(matrix.shape, problem)
        if matrix.zero_bias and bool(self._whole(matrix.zero_bias).any()):
            raise self.wrong(matrix.zero_bias, "is not zero, and the model has no such bias")
        if matrix.second:
            self._check_second(matrix)
        if matrix.zero_points:
            self._check_zero_points(matrix)
        if group_index(matrix, self) is not None:
            self._ordered.add(matrix.tensor)
        if matrix.layout.may_be_middle and matrix.zeros and is_symmetric(matrix, self):
            matrix = matrix._replace(layout=replace(matrix.layout, zeros="middle"))
        self._settled_matrices[matrix.tensor] = matrix
        return matrix

    def _check_second(self, matrix: PackedMatrix) -> None:
        """Check that the scale of all scales leaves values in float32's range."""
        value = abs(float(self._whole(matrix.second).view(())))
        least = 1 / LARGEST_SCALE if matrix.layout.format.divides else 0.0
        if not least <= value <= LARGEST_SCALE:
            problem = f"is {value:g}, and only {least:.2g} to {LARGEST_SCALE:.2g} keep weights in float32's range"
            raise self.wrong(matrix.second, problem)

    def _check_zero_points(self, matrix: PackedMatrix) -> None:
        num_rows, num_groups = self._source.entries[matrix.zero_points].shape
        step_rows = max(1, STEP_ELEMENTS // num_groups)
        for start in range(0, num_rows, step_rows):
            points = read_rows(self._source, matrix.zero_points, start, min(start + step_rows, num_rows))
            if bool(points.any()):
                raise self.wrong(matrix.zero_points, "is not zero, and the settings say symmetric")

    def _whole(self, name: str) -> torch.Tensor:
        return read_rows(self._source, name, 0, prod(self._source.entries[name].shape))


def _groups_of(matrix: PackedMatrix, index_K: torch.Tensor | None, columns: tuple[int, int]) -> tuple[int, int]:
    """Return the range of groups that these columns have."""
    if index_K is None:
        return columns[0] // matrix.scale_columns, -(-columns[1] // matrix.scale_columns)
    own = index_K[slice(*columns)]
    return int(own.min()), int(own.max()) + 1


def _whole_groups(matrix: PackedMatrix, step: tuple[int, int]) -> int:
    """Return the columns of each group in a step; 0 if a group is cut."""
    size = matrix.scale_columns
    if step[0] // size == (step[1] - 1) // size:
        return step[1] - step[0]
    return 0 if step[0] % size or step[1] % size else size

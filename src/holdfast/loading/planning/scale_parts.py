"""From the parts of stored codes to the parts of their scales: which stored scale stands for which rows of ours; no torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod

from holdfast.loading.sources.source import TensorEntry
from holdfast.models.parameters import Part
from holdfast.quant.weight_schemes import WeightScheme

MX_CODES, MX_SCALES = "_blocks", "_scales"
"""What follows a module's name in the names of its mxfp4 tensors."""


def mx_codes_name(tensor: str) -> str:
    """The tensor that holds the codes of a matrix which would be this one, were it plain."""
    return tensor.removesuffix(".weight") + MX_CODES


def mx_codes(part: Part, scheme: WeightScheme) -> Part:
    """A part of a matrix as bytes of codes: [..., N, K] is stored as [..., N, K / 32, 16], never transposed."""
    num_blocks, block_bytes = part.source_columns // scheme.block_columns, scheme.block_columns // scheme.codes_per_byte
    leading = (*part.shape[:-2], part.shape[-1]) if part.is_transposed else part.shape[:-1]
    return replace(
        part,
        tensor=mx_codes_name(part.tensor),
        shape=(*leading, num_blocks, block_bytes),
        columns=_divided(part.columns, scheme.codes_per_byte),
        is_transposed=False,
        joined_rows=num_blocks,
    )


def scale_parts(
    codes: Iterable[Part],
    stored: WeightScheme,
    settled: WeightScheme,
    endings: tuple[str, ...],
    entries: Mapping[str, TensorEntry],
) -> tuple[Part, ...]:
    """The scales of these codes, row after row; `settled` has the blocks of rows that they are to be kept for."""
    found: list[Part] = []
    row = 0
    for part in codes:
        for scales in _scales_of(part, stored, settled, endings, entries):
            found.append(replace(scales, row_start=row))
            row += scales.num_rows
    return tuple(found)


def _scales_of(
    part: Part,
    stored: WeightScheme,
    settled: WeightScheme,
    endings: tuple[str, ...],
    entries: Mapping[str, TensorEntry],
) -> Iterator[Part]:
    if stored.codes_per_byte > 1:
        name = part.tensor.removesuffix(MX_CODES) + MX_SCALES
        columns = _divided(part.columns, part.shape[-1])
        yield replace(part, tensor=name, shape=part.shape[:-1], columns=columns, joined_rows=1)
        return
    names = [part.tensor + ending for ending in endings]
    name = next((name for name in names if name in entries), names[0])
    if stored.block_columns:
        num_rows, num_columns = (
            -(-part.matrix_rows // stored.block_rows),
            -(-part.source_columns // stored.block_columns),
        )
        tail = (num_columns, num_rows) if part.is_transposed else (num_rows, num_columns)
        columns = _divided(part.columns, stored.block_columns)
        scales = Part(name, 0, (*part.shape[:-2], *tail), None, columns, part.is_transposed)
        yield from _runs(scales, part, stored.block_rows, settled.block_rows)
        return
    entry = entries.get(name)
    shapes = _row_scale_shapes(part)
    shape = entry.shape if entry is not None and entry.shape in shapes else next(iter(shapes))
    rows_each = shapes[shape]
    if len(shape) == 2 and shape == (*part.shape[:-2], part.matrix_rows):
        yield from _rows_of_matrices(Part(name, 0, shape, is_transposed=True), part)
        return
    scales = Part(name, 0, shape, is_transposed=part.is_transposed and rows_each == 1 and len(shape) > 1)
    if rows_each == 1:
        yield replace(scales, rows=part.rows, whole_rows=part.whole_rows)
    else:
        yield from _runs(scales, part, rows_each, 1)


def _row_scale_shapes(part: Part) -> dict[tuple[int, ...], int]:
    """Shapes in which scales by row or by matrix are stored, and how many rows each of them is for."""
    leading, num_rows = part.shape[:-2], part.matrix_rows
    by_row = {(*leading, 1, num_rows) if part.is_transposed else (*leading, num_rows, 1): 1}
    if not leading:
        return {**by_row, (num_rows,): 1, (1,): num_rows, (): num_rows}
    count = prod(leading)
    return {**by_row, (*leading, num_rows): 1, (*leading, 1, 1): num_rows, (count, 1): num_rows, (count,): num_rows}


def _rows_of_matrices(scales: Part, codes: Part) -> Iterator[Part]:
    """Scales [E, N] of E matrices: those of one lie in a row, which becomes a column."""
    row, end = codes.row_range
    while row < end:
        matrix, place = divmod(row, codes.matrix_rows)
        next_row = min(end, row - place + codes.matrix_rows)
        yield replace(scales, rows=(place, place + next_row - row), columns=(matrix, matrix + 1))
        row = next_row


def _runs(scales: Part, codes: Part, rows_each: int, our_rows: int) -> Iterator[Part]:
    """Parts of consecutive scales that each stand for the same number of ours: of `our_rows` rows, out of `rows_each`.

    Matrices begin with a scale of their own, so the last scale of one may stand for fewer rows.
    """
    in_matrix = -(-codes.matrix_rows // rows_each)
    row, end = codes.row_range
    runs: list[tuple[int, int]] = []
    while row < end:
        matrix, place = divmod(row, codes.matrix_rows)
        next_row = min(end, row - place + min(codes.matrix_rows, (place // rows_each + 1) * rows_each))
        runs.append((matrix * in_matrix + place // rows_each, -(-(next_row - row) // our_rows)))
        row = next_row
    breaks = [index for index, (one, two) in enumerate(pairwise(runs), 1) if two != (one[0] + 1, one[1])]
    for start, stop in pairwise((0, *breaks, len(runs))):
        first, repeats = runs[start]
        yield replace(scales, rows=(first, first + stop - start), repeats=repeats)


def _divided(columns: tuple[int, int] | None, width: int) -> tuple[int, int] | None:
    return None if columns is None else (columns[0] // width, -(-columns[1] // width))

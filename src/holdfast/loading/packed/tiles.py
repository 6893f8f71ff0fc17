"""Tiles of a read of packed weights: some rows with all their scales, and their codes in steps of columns; no torch."""

from collections.abc import Iterator

from holdfast.loading.packed.matrices import PackedMatrix

STEP_ELEMENTS = 2**17
"""Elements per step: few enough that each pass finds the previous pass's results in cache."""
SCALES_PER_TILE = 2**15
"""Scales of a tile, for all its groups."""
WHOLE_BYTES = 2**20
"""Most bytes of a read of whole rows of words for some of their columns."""
ELEMENT_SCRATCH, SCALE_SCRATCH = 12, 16
"""Bytes of scratch for an element of a step, and for a scale of a tile: as stored, unpacked, as float32, expanded."""
Span = tuple[int, int]
"""The first, and one after the last."""
Tile = tuple[Span, list[Span]]


def tiles(matrix: PackedMatrix, rows: Span, columns: Span, num_groups: int) -> Iterator[Tile]:
    """Cut a read into tiles of rows, and each tile into steps of columns; words and groups stay whole if possible."""
    width, each = columns[1] - columns[0], matrix.layout.codes_per_word
    is_input_major = matrix.layout.format.is_input_major
    most_rows = STEP_ELEMENTS if is_input_major else max(1, STEP_ELEMENTS // width)
    for start, end in row_tiles(matrix, rows, num_groups, most_rows):
        step_columns = STEP_ELEMENTS
        if is_input_major:
            step_columns = max(each, STEP_ELEMENTS // (end - start) // each * each)
            if matrix.scale_columns <= step_columns:
                step_columns = step_columns // matrix.scale_columns * matrix.scale_columns
        edges = [columns[0], *range((columns[0] // step_columns + 1) * step_columns, columns[1], step_columns)]
        yield (start, end), list(zip(edges, [*edges[1:], columns[1]], strict=True))


def row_tiles(matrix: PackedMatrix, rows: Span, num_groups: int, most_rows: int = STEP_ELEMENTS) -> Iterator[Span]:
    """Cut rows into tiles that have few scales, and at most so many rows."""
    each = matrix.layout.codes_per_word if matrix.layout.format.is_input_major else 1
    step = max(each, min(most_rows, SCALES_PER_TILE // num_groups) // each * each)
    return ((start, min(start + step, rows[1])) for start in range(*rows, step))


def words_around(span: Span, each: int) -> tuple[Span, Span]:
    """Return the words that hold these codes, and the place of the codes in them."""
    first, last = span[0] // each, -(-span[1] // each)
    return (first, last), (span[0] - first * each, span[1] - first * each)


def scratch_bytes(matrix: PackedMatrix) -> int:
    """Return the most bytes that a read of this matrix holds beside its result."""
    each, groups = matrix.layout.codes_per_word, matrix.num_groups
    num_scales = min(matrix.num_rows * groups, max(SCALES_PER_TILE, each * groups))
    num_elements = min(matrix.num_rows * matrix.num_columns, max(STEP_ELEMENTS, matrix.num_columns))
    index_bytes = 3 * 8 * matrix.num_columns if matrix.groups else 0
    return ELEMENT_SCRATCH * num_elements + SCALE_SCRATCH * num_scales + index_bytes + WHOLE_BYTES

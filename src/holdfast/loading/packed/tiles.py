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
Tile = tuple[tuple[int, int], list[tuple[int, int]]]


def tiles(matrix: PackedMatrix, rows: tuple[int, int], columns: tuple[int, int], num_groups: int) -> Iterator[Tile]:
    """Cut a read into tiles of rows, and each tile into steps of columns; words and groups stay whole if possible."""
    width, each = columns[1] - columns[0], matrix.layout.codes_per_word
    most_rows = max(1, SCALES_PER_TILE // num_groups)
    if not matrix.layout.format.is_input_major:
        step_rows, step_columns = min(most_rows, max(1, STEP_ELEMENTS // width)), STEP_ELEMENTS
    else:
        step_rows = max(each, most_rows // each * each)
        step_columns = max(each, STEP_ELEMENTS // min(step_rows, rows[1] - rows[0]) // each * each)
        if matrix.scale_columns <= step_columns:
            step_columns = step_columns // matrix.scale_columns * matrix.scale_columns
    for start in range(rows[0], rows[1], step_rows):
        end = min(start + step_rows, rows[1])
        edges = [columns[0], *range((columns[0] // step_columns + 1) * step_columns, columns[1], step_columns)]
        yield (start, end), list(zip(edges, [*edges[1:], columns[1]], strict=True))


def scratch_bytes(matrix: PackedMatrix) -> int:
    """Return the most bytes that a read of this matrix holds beside its result."""
    each, groups = matrix.layout.codes_per_word, matrix.num_groups
    num_scales = min(matrix.num_rows * groups, max(SCALES_PER_TILE, each * groups))
    num_elements = min(matrix.num_rows * matrix.num_columns, max(STEP_ELEMENTS, matrix.num_columns))
    index_bytes = 3 * 8 * matrix.num_columns if matrix.groups else 0
    return ELEMENT_SCRATCH * num_elements + SCALE_SCRATCH * num_scales + index_bytes + WHOLE_BYTES

"""Parameters: parts cover every row exactly once, in every layout; what a part takes lies inside its tensor."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.models.parameters import Parameter, Part


def stacked(heights: list[int], width: int = 4) -> Parameter:
    parts, row = [], 0
    for index, height in enumerate(heights):
        parts.append(Part(f"part{index}", row, (height, width)))
        row += height
    return Parameter("layers.0.qkv.weight", (row, width), tuple(parts))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_stacked_parts_are_sound(heights: list[int]) -> None:
    parameter = stacked(heights)
    parameter.check()
    assert parameter.num_elements == sum(heights) * 4


def broken(row_shift: int = 0, extra_rows: int = 0, width: int = 4) -> Parameter:
    first = Part("q", 0, (8, 4))
    second = Part("k", 8 + row_shift, (2, width))
    return Parameter("qkv", (10 + extra_rows, 4), (first, second))


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (broken(row_shift=1), "k starts at row 9, not 8"),
        (broken(row_shift=-1), "k starts at row 7, not 8"),
        (broken(extra_rows=1), "parts fill 10 rows of 11"),
        (broken(extra_rows=-1), "parts fill 10 rows of 9"),
        (broken(width=3), r"shape=\(2, 3\).* beside self.shape=\(10, 4\)"),
        (Parameter("qkv", (4, 4), ()), "parts fill 0 rows of 4"),
    ],
    ids=["gap", "overlap", "too few", "too many", "wrong width", "none"],
)
def test_what_does_not_cover_the_rows_is_named(parameter: Parameter, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        parameter.check()


def test_vectors_are_parameters_too() -> None:
    bias = Parameter("qkv.bias", (6,), (Part("q.bias", 0, (4,)), Part("k.bias", 4, (2,))))
    bias.check()
    assert bias.num_elements == 6


def test_other_layouts_are_checked_too() -> None:
    sound = Parameter("w", (6, 4), (Part("a", 0, (6, 4)),))
    replace(sound, layouts=((Part("b", 0, (2, 4)), Part("c", 2, (4, 4))),)).check()
    with pytest.raises(AssertionError, match="parts fill 4 rows of 6"):
        replace(sound, layouts=((Part("c", 0, (4, 4)),),)).check()


@pytest.mark.parametrize(
    ("part", "rows", "columns", "matrix_rows"),
    [
        (Part("a", 0, (6, 4)), 6, 4, 6),
        (Part("a", 0, (6,)), 6, 1, 6),
        (Part("a", 0, ()), 1, 1, 1),
        (Part("a", 0, (3, 6, 4)), 18, 4, 6),
        (Part("a", 0, (3, 6, 4), is_transposed=True), 12, 6, 4),
        (Part("a", 0, (6, 4), is_transposed=True), 4, 6, 4),
        (Part("a", 0, (3, 6, 4, 16), joined_rows=4), 18, 64, 6),
        (Part("a", 0, (6, 4, 16), joined_rows=4), 6, 64, 6),
    ],
    ids=["matrix", "vector", "number", "stack", "transposed stack", "transposed", "joined stack", "joined"],
)
def test_rows_and_columns_of_a_tensor(part: Part, rows: int, columns: int, matrix_rows: int) -> None:
    assert (part.source_rows, part.source_columns, part.matrix_rows) == (rows, columns, matrix_rows)
    assert (part.row_range, part.column_range, part.whole_range) == ((0, rows), (0, columns), (0, rows))
    assert (part.num_rows, part.num_columns) == (rows, columns)
    part.check()


def test_a_part_takes_rows_and_columns_and_may_repeat_rows() -> None:
    part = Part("a", 0, (6, 4), rows=(2, 5), columns=(1, 3), repeats=2, whole_rows=(0, 6))
    assert (part.num_rows, part.num_columns, part.whole_range) == (6, 2, (0, 6))
    part.check()


@pytest.mark.parametrize(
    "part",
    [
        Part("a", 0, (6, 4), rows=(2, 7)),
        Part("a", 0, (6, 4), rows=(3, 3)),
        Part("a", 0, (6, 4), rows=(-1, 3)),
        Part("a", 0, (6, 4), columns=(1, 5)),
        Part("a", 0, (6, 4), columns=(2, 2)),
        Part("a", 0, (6, 4), rows=(1, 5), whole_rows=(2, 6)),
        Part("a", 0, (4, 6), rows=(0, 7), is_transposed=True),
    ],
)
def test_what_lies_outside_a_tensor_is_found(part: Part) -> None:
    with pytest.raises(AssertionError, match="a: "):
        part.check()


@pytest.mark.parametrize(
    ("parameter", "seam_rows"),
    [
        (stacked([8]), 0),
        (stacked([8, 4, 4]), 4),
        (stacked([576, 192, 192]), 192),
        (stacked([96, 32, 7]), 32),
        (Parameter("w", (3, 10, 4), (Part("a", 0, (3, 10, 4)),)), 10),
        (Parameter("w", (2, 12, 4), tuple(Part(f"p{i}", 6 * i, (6, 4)) for i in range(4))), 6),
        (Parameter("w", (7,), (Part("a", 0, (4,)), Part("b", 4, (3,)))), 4),
    ],
    ids=["one part", "qkv", "nine heads", "an odd end is no seam", "a stack", "a stack of halves", "a bias"],
)
def test_seams_are_where_parts_and_matrices_meet(parameter: Parameter, seam_rows: int) -> None:
    parameter.check()
    assert parameter.seam_rows == seam_rows
    share = Parameter("w", (2, 4), (Part("a", 0, (6, 4), rows=(2, 4)),), whole=parameter)
    assert share.seam_rows == seam_rows, "a share has the blocks of the whole"

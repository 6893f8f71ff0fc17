"""Parameters: parts cover every row exactly once, and any gap, overlap or wrong width is named."""

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
        (broken(width=3), r"k has part.shape=\(2, 3\)"),
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

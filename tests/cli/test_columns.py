"""Columns and bars."""

from holdfast.cli.columns import aligned, cells_of


def test_cells_are_padded_and_numbers_are_to_the_right() -> None:
    assert aligned([("a", "1", "x"), ("bbb", "22", "")], right=(1,)) == ["a     1  x", "bbb  22"]
    assert aligned([], right=()) == []


def test_parts_of_a_bar() -> None:
    assert [cells_of(value, 100, 20) for value in (0, 2, 50, 100)] == [0, 0, 10, 20]
    assert cells_of(0, 0, 20) == 0

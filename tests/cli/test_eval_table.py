"""The table: every figure of every format in its column, and words where there is no number."""

import pytest

from cli.eval_qualities import BROKEN, FEW, FP8, quality, view
from holdfast.cli.eval_table import FIGURES, change_words, kl_words, quality_cells, quality_lines


def test_a_row_has_what_was_measured() -> None:
    reference, fp8, few = quality_cells(view(FP8, FEW))
    assert reference == ("float32", "4,096", "0.50x", "12.5000", "", "", "", "", "512.0")
    assert fp8 == ("fp8", "1,040", "1.97x", "12.6250", "+1.000%", "0.000512", "0.0123", "99.12%", "256.0")
    assert few[2] == "5.12x"


def test_lines_are_as_wide_as_their_columns() -> None:
    lines = [line.text for line in quality_lines(view(FP8, FEW))]
    assert lines[0] == "Tiny, float32 on cpu: 2 windows of 1,024 tokens of book.txt, 2,046 predictions"
    heading, *rows = lines[2:6]
    assert all(name in heading for name in ("format", "bytes/token", *FIGURES))
    assert {len(row) for row in (heading, *rows)} == {len(heading)}
    assert [row.split()[0] for row in rows] == ["float32", "fp8", "turboquant_3bit_nc"]
    assert "over float32 pages, in nats" in lines[-1]


def test_a_format_that_computed_no_numbers_is_told() -> None:
    made = view(FP8, BROKEN)
    assert quality_cells(made)[2][3:8] == ("not finite", "not finite", "not finite", "not finite", "50.00%")
    assert quality_lines(made)[-1].text == "half: 1,023 of 2,046 predictions are no numbers"
    assert quality_lines(made)[-1].style == "bold red"


def test_what_is_to_be_known_of_pages_is_told_once() -> None:
    noted = [quality(name, 10.0, note="layers 0,1 in fp8") for name in ("a", "b")]
    lines = [line.text for line in quality_lines(view(*noted, quality("c", 10.0, note="layers 0, in float32"), FP8))]
    assert lines[-2:] == ["layers 0,1 in fp8: a, b", "layers 0, in float32: c"]


def test_one_window_is_one() -> None:
    assert "one window of 1,024 tokens" in view(FP8)._replace(num_windows=1).asked


@pytest.mark.parametrize(
    ("number", "words"), [(0.0, "0"), (1.2345e-7, "1.23e-07"), (0.012345, "0.0123"), (12345.0, "1.23e+04")]
)
def test_divergences_of_any_size_are_short(number: float, words: str) -> None:
    assert kl_words(number) == words


def test_changes_have_a_sign() -> None:
    assert change_words(9.0, 10.0) == "-10.000%"
    assert change_words(10.0, 10.0) == "+0.000%"
    assert change_words(float("nan"), 10.0) == "not finite"


def test_bytes_that_are_no_whole_number_are_shown() -> None:
    assert quality_cells(view(quality("odd", 1040.5)))[1][1] == "1,040.5"

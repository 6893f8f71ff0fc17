"""The page: dots and lines at the places of their numbers, nothing for what has none, and harmless whatever the names."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.eval_qualities import BROKEN, FEW, FP8, quality, view
from cli.page_reader import Element, read_page
from holdfast.cli.eval_html import (
    HEIGHT,
    WIDTH,
    Scale,
    eval_page,
    label_heights,
    log_scale,
    place_chart,
    size_chart,
    ticks,
    write_eval_page,
)
from holdfast.cli.web_page import page

HOSTILE = "</svg><script>alert(1)</script>"


def charts(*qualities) -> tuple[Element, Element, Element]:
    document = read_page(eval_page(view(*qualities)))
    return document, *document.all("svg")


def named(chart: Element) -> dict[str, Element]:
    return {group.attributes["data-name"]: group for group in chart.all("g") if "data-name" in group.attributes}


def test_dots_lie_where_their_numbers_are() -> None:
    middle = quality("middle", math.sqrt(1040 * 400), mean_kl=math.sqrt(0.08 * 0.000512), p99_kl=0.1)
    _, chart, _ = charts(FP8, FEW, middle)
    dots = {name: group.all("circle")[0].attributes for name, group in named(chart).items()}
    x, y = ({name: float(dot[key]) for name, dot in dots.items()} for key in ("cx", "cy"))
    assert x["turboquant_3bit_nc"] < x["middle"] < x["fp8"]
    assert y["turboquant_3bit_nc"] < y["middle"] < y["fp8"], "more divergence is higher up"
    assert x["middle"] == pytest.approx((x["fp8"] + x["turboquant_3bit_nc"]) / 2, abs=0.2)
    assert y["middle"] == pytest.approx((y["fp8"] + y["turboquant_3bit_nc"]) / 2, abs=0.2)
    whisker = named(chart)["fp8"].all("line")[0].attributes
    assert float(whisker["y2"]) < float(whisker["y1"]) == y["fp8"]


def test_what_a_dot_says() -> None:
    _, chart, _ = charts(FP8)
    said = named(chart)["fp8"].all("title")[0].text
    assert said == "fp8: 1,040 bytes, mean KL 0.000512, p99 0.0123, same top-1 99.12%, perplexity 12.6250"


def test_names_do_not_lie_on_each_other() -> None:
    alike = [quality(f"format {place}", 1000.0 + place, mean_kl=0.01, p99_kl=0.02) for place in range(6)]
    alike = [replace(one, kl_by_place=(0.01, 0.01)) for one in alike]
    for chart in charts(*alike)[1:]:
        heights = sorted(float(group.all("text")[0].attributes["y"]) for group in named(chart).values())
        assert len(heights) == 6
        assert all(high - low >= 13 for low, high in pairwise(heights))


def test_names_stay_beside_what_they_name_where_there_is_room() -> None:
    assert label_heights([100.0, 300.0, 200.0]) == [104, 304, 204]
    assert label_heights([100.0, 100.0, 99.0, 10.0]) == [104, 90, 76, 14]
    assert label_heights([]) == []


def test_the_reference_and_what_is_no_number_have_no_place_but_a_row() -> None:
    document, chart, lines = charts(FP8, BROKEN, quality("same", 2048.0))
    assert named(chart).keys() == {"fp8"}
    assert named(lines).keys() == {"fp8", "half"}
    assert len(named(lines)["half"].all("polyline")[0].attributes["points"].split()) == 1
    assert [row.all("td")[0].text for row in document.all("tbody")[0].all("tr")] == ["float32", "fp8", "half", "same"]
    assert "half: 1,023 of 2,046 predictions are no numbers" in document.text


def test_lines_go_from_the_beginning_of_a_window_to_its_end() -> None:
    _, _, chart = charts(FP8, FEW)
    points = [
        tuple(map(float, point.split(",")))
        for point in named(chart)["turboquant_3bit_nc"].all("polyline")[0].attributes["points"].split()
    ]
    assert points[0][0] < points[1][0]
    assert points[0][1] > points[1][1], "the end of the window is worse"
    told = [text.text for text in chart.all("text")]
    assert {"0", "1,024", "position in the window"} <= set(told)


def test_all_is_inside_the_picture() -> None:
    _, *both = charts(FP8, FEW, BROKEN)
    for chart in both:
        for name, most in (("cx", WIDTH), ("x1", WIDTH), ("x2", WIDTH), ("cy", HEIGHT), ("y1", HEIGHT), ("y2", HEIGHT)):
            found = [
                float(item.attributes[name])
                for kind in ("circle", "line")
                for item in chart.all(kind)
                if name in item.attributes
            ]
            assert all(0 <= number <= most for number in found)


@pytest.mark.parametrize("qualities", [(), (BROKEN,), (quality("zero", 10.0),), (FP8,), (FP8, FP8)], ids=len)
def test_few_or_no_formats_are_sound(qualities: tuple) -> None:
    read_page(page("t", size_chart(qualities, "bytes"), place_chart(qualities, 2)))
    read_page(eval_page(view(*qualities)))


def test_names_are_escaped() -> None:
    made = view(quality(HOSTILE, 10.0, mean_kl=0.1, p99_kl=0.2, kl_by_place=(0.1,)))._replace(
        model=HOSTILE, text=HOSTILE
    )
    document = read_page(eval_page(made))
    assert len(document.all("script")) == 1
    assert HOSTILE in document.all("h1")[0].text


@given(st.lists(st.floats(1e-12, 1e9), min_size=1, max_size=5))
def test_a_scale_holds_its_numbers_and_has_round_marks(numbers: list[float]) -> None:
    scale = log_scale(numbers, 100.0, 900.0)
    assert all(100 < scale(number) < 900 for number in numbers)
    marks = ticks(scale)
    assert all(scale.low <= mark <= scale.high for mark in marks)
    assert all(float(f"{mark:.1g}") == pytest.approx(mark) for mark in marks)


def test_an_even_scale_is_even() -> None:
    scale = Scale(0.0, 8.0, 10.0, 90.0, is_log=False)
    assert [scale(number) for number in (0, 4, 8)] == [10, 50, 90]


def test_a_page_is_written(tmp_path: Path) -> None:
    write_eval_page(tmp_path / "quality.html", view(FP8))
    read_page((tmp_path / "quality.html").read_text(encoding="utf-8"))

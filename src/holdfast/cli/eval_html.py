"""The quality of KV formats, or of weight schemes, as a page: divergence against bytes, divergence along a window, and the table; no torch."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli.eval_table import EvalView, broken_words, headings, kl_words, meaning, note_words, quality_cells
from holdfast.cli.web_page import PALETTE, Html, page, table, tag

if TYPE_CHECKING:
    from holdfast.engine.kv_quality import Quality

POINT = "Point at a dot or a line to read what it is."
WIDTH, HEIGHT = 1000, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 16, 44
NAME_WIDTH = 230
"""Beside lines, for what they are called."""
LABEL_HEIGHT = 14
DOT = 6
MANTISSAS = (1, 2, 5)


def write_eval_page(file: Path, view: EvalView) -> None:
    """Write the page; a file of that name is replaced."""
    file.write_text(eval_page(view), encoding="utf-8")


def eval_page(view: EvalView) -> str:
    """The whole file."""
    rows = [("", cells) for cells in quality_cells(view)]
    words = view.subject
    return page(
        view.title,
        tag("h1", view.title),
        tag("p", view.asked),
        tag("h2", f"Mean KL divergence against {words.size_words}; the thin line reaches to the 99th percentile"),
        size_chart(view.qualities[1:], words.size_words),
        tag("h2", "Mean KL divergence along a window"),
        place_chart(view.qualities[1:], view.window),
        tag("p", POINT, id="readout", class_="quiet"),
        tag("h2", f"By {words.row}"),
        table(headings(view), rows, len(headings(view)) - 1),
        *(tag("p", words, class_="quiet") for words in (meaning(view), *note_words(view))),
        *(tag("p", tag("b", words)) for words in broken_words(view)),
    )


class Scale(NamedTuple):
    """From a number to a place, in decades or in equal steps."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def __call__(self, number: float) -> float:
        turn: Callable[[float], float] = math.log10 if self.is_log else float
        low, high = turn(self.low), turn(self.high)
        return self.start + (self.end - self.start) * (turn(number) - low) / (high - low)


def log_scale(numbers: Sequence[float], start: float, end: float) -> Scale:
    """One that holds all of these positive numbers, with a little room at both ends."""
    low, high = (min(numbers), max(numbers)) if numbers else (1.0, 10.0)
    room = max((high / low) ** 0.08, 1.2)
    return Scale(low / room, high * room, start, end, is_log=True)


def ticks(scale: Scale) -> list[float]:
    """Round numbers on a logarithmic scale: decades, and between them where there are few."""
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    decades = [10.0**power for power in range(first, last + 1)]
    finer = [decade * mantissa for decade in decades for mantissa in MANTISSAS]
    inside = [[number for number in numbers if scale.low <= number <= scale.high] for numbers in (decades, finer)]
    return inside[0] if len(inside[0]) >= 3 else inside[1]


def size_chart(qualities: "Sequence[Quality]", size_words: str) -> Html:
    """A dot for each format or scheme: its bytes and its mean divergence, both in decades. What is 0 or no number has no place."""
    drawn = [(place, quality) for place, quality in enumerate(qualities) if _has_place(quality.mean_kl)]
    x_scale = log_scale([quality.size_bytes for _, quality in drawn], LEFT, WIDTH - RIGHT)
    levels = [kl for _, quality in drawn for kl in (quality.mean_kl, quality.p99_kl) if _has_place(kl)]
    y_scale = log_scale(levels, HEIGHT - BOTTOM, TOP)
    heights = label_heights([y_scale(quality.mean_kl) for _, quality in drawn])
    marks = [
        _mark(place, quality, x_scale(quality.size_bytes), y_scale, height)
        for (place, quality), height in zip(drawn, heights, strict=True)
    ]
    axes = (*_x_axis(x_scale, ticks(x_scale), size_words), *_y_axis(y_scale, x_scale))
    return _picture("Divergence against bytes", *axes, tag("g", *marks))


def place_chart(qualities: "Sequence[Quality]", window: int) -> Html:
    """A line for each format: its mean divergence in equal parts of a window."""
    drawn = [(place, quality) for place, quality in enumerate(qualities) if any(map(_has_place, quality.kl_by_place))]
    x_scale = Scale(0.0, float(window), LEFT, WIDTH - NAME_WIDTH, is_log=False)
    levels = [kl for _, quality in drawn for kl in quality.kl_by_place if _has_place(kl)]
    y_scale = log_scale(levels, HEIGHT - BOTTOM, TOP)
    all_points = [_points(quality, window, x_scale, y_scale) for _, quality in drawn]
    heights = label_heights([points[-1][1] for points in all_points])
    lines = []
    for (place, quality), points, height in zip(drawn, all_points, heights, strict=True):
        style = {"fill": "none", "stroke": PALETTE[place % len(PALETTE)], "stroke_width": 2.5}
        along = " ".join(map(kl_words, quality.kl_by_place))
        title = tag("title", f"{quality.name}, from the beginning of a window to its end: {along}")
        line = tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), **style)
        name = tag("text", quality.name, x=WIDTH - NAME_WIDTH + 8, y=f"{height:.1f}", class_="value")
        lines.append(tag("g", title, line, name, data_name=quality.name))
    steps = [window * part / 8 for part in range(9)]
    axes = (*_x_axis(x_scale, steps, "position in the window"), *_y_axis(y_scale, x_scale))
    return _picture("Divergence along a window", *axes, tag("g", *lines))


def label_heights(heights: Sequence[float]) -> list[float]:
    """Where names go that belong to these heights: from the lowest up, each clear of the one below it."""
    found, below = [0.0] * len(heights), math.inf
    for place in sorted(range(len(heights)), key=lambda place: -heights[place]):
        below = found[place] = min(heights[place] + 4, below - LABEL_HEIGHT)
    return found


def _points(quality: "Quality", window: int, x_scale: Scale, y_scale: Scale) -> list[tuple[float, float]]:
    """The middle of each part of a window that has a place."""
    width = window / len(quality.kl_by_place)
    parts = enumerate(quality.kl_by_place)
    return [(x_scale((part + 0.5) * width), y_scale(kl)) for part, kl in parts if _has_place(kl)]


def _mark(place: int, quality: "Quality", x: float, y_scale: Scale, label_y: float) -> Html:
    y, look = y_scale(quality.mean_kl), f"c{place % len(PALETTE)}"
    told = (
        f"{quality.name}: {quality.size_bytes:,.10g} bytes, mean KL {kl_words(quality.mean_kl)}, "
        f"p99 {kl_words(quality.p99_kl)}, same top-1 {quality.agreement:.2%}, perplexity {quality.perplexity:.4f}"
    )
    top = y_scale(quality.p99_kl) if _has_place(quality.p99_kl) else y
    is_right = x > WIDTH * 0.7
    label = tag(
        "text",
        quality.name,
        x=f"{x + (-10 if is_right else 10):.1f}",
        y=f"{label_y:.1f}",
        class_="value",
        text_anchor="end" if is_right else "start",
    )
    whisker = tag(
        "line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=f"{y:.1f}", y2=f"{top:.1f}", stroke=PALETTE[place % len(PALETTE)]
    )
    dot = tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=DOT, class_=look)
    return tag("g", tag("title", told), whisker, dot, label, data_name=quality.name)


def _x_axis(scale: Scale, numbers: Sequence[float], name: str) -> list[Html]:
    base = HEIGHT - BOTTOM
    marks = [_line(scale.start, scale.end, base, base, 0.5)]
    for number in numbers:
        x = scale(number)
        marks.append(_line(x, x, base, TOP, 0.1))
        marks.append(tag("text", f"{number:,.6g}", x=f"{x:.1f}", y=base + 16, class_="axis", text_anchor="middle"))
    marks.append(tag("text", name, x=f"{scale.end:.1f}", y=HEIGHT - 8, class_="axis", text_anchor="end"))
    return marks


def _y_axis(scale: Scale, across: Scale) -> list[Html]:
    marks = [_line(LEFT, LEFT, HEIGHT - BOTTOM, TOP, 0.5)]
    for number in ticks(scale):
        y = scale(number)
        marks.append(_line(LEFT, across.end, y, y, 0.1))
        marks.append(tag("text", f"{number:.3g}", x=LEFT - 8, y=f"{y + 4:.1f}", class_="axis", text_anchor="end"))
    return marks


def _line(x1: float, x2: float, y1: float, y2: float, strength: float) -> Html:
    places = {"x1": f"{x1:.1f}", "x2": f"{x2:.1f}", "y1": f"{y1:.1f}", "y2": f"{y2:.1f}"}
    return tag("line", **places, stroke="currentColor", stroke_opacity=strength)


def _picture(name: str, *parts: Html) -> Html:
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=name)


def _has_place(number: float) -> bool:
    return math.isfinite(number) and number > 0

"""Pages in one file each: table, strips to scale, bars and charts, and the pages of memory, plan and quality; no torch.

Style and script lie inside, light and dark; nothing is loaded from anywhere, and every text is escaped.
"""

import colorsys
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli.plan_view import Cell, PlanView
from holdfast.cli.tables import (
    COSTS,
    GROUP_HEADING,
    LATER,
    SERVE,
    UNACCOUNTED,
    EvalView,
    broken_words,
    concurrency_words,
    group_rows,
    headings,
    held_words,
    kl_words,
    meaning,
    note_words,
    quality_cells,
    rate_words,
    speed_rows,
    start_words,
    worthwhile,
)
from holdfast.errors import ConfigError, shown
from holdfast.memory.ledger import Entry
from holdfast.memory.on_disk import DiskAccount
from holdfast.memory.planner import PHASES
from holdfast.memory.report import MemoryReport
from holdfast.memory.sizes import format_bytes

if TYPE_CHECKING:
    from holdfast.eval.kv_quality import Quality
    from holdfast.planning.alternatives import Alternative

VOID = ("meta",)
DOCTYPE = b"<!doctype html>"
ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#1b1f24;--quiet:#5b6570;--line:#d7dce1;--empty:#eceff2;--mark:#0a7d45}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--text:#e6e9ec;--quiet:#98a2ad;--line:#343a41;--empty:#22272c;--mark:#5fd39a}}
body{margin:2rem auto;max-width:68rem;padding:0 1rem;background:var(--page);color:var(--text);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}p{margin:.4rem 0}.quiet{color:var(--quiet)}
table{border-collapse:collapse;width:100%}th,td{padding:.25rem .6rem .25rem 0;text-align:left;vertical-align:top}
th{color:var(--quiet);font-weight:500;border-bottom:1px solid var(--line)}td{border-bottom:1px solid var(--line)}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.total td{font-weight:600}
.smallest td:first-child{font-weight:600;color:var(--mark)}
svg{display:block;width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#14171a;pointer-events:none}
svg .axis{fill:var(--quiet);font-size:12px}svg .value{fill:var(--text);font-size:12px}
svg rect{stroke:var(--page);stroke-width:.6}svg g g:hover rect{stroke:var(--text);stroke-width:1.5}
svg .planned rect{fill-opacity:.35}svg .planned text,svg .free text{fill:var(--text)}.free{fill:var(--empty)}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.5em;border-radius:2px}
.verdict{font-size:1.25rem;font-weight:600;margin:1rem 0 .4rem;padding:.5rem .8rem;border-left:4px solid var(--quiet);background:var(--empty)}
.verdict.fits{border-color:var(--mark)}.group td{padding-top:.9rem;color:var(--quiet);font-weight:600}
.command{background:var(--empty);padding:.5rem .8rem;overflow-x:auto}details{margin:.8rem 0}summary{color:var(--quiet);cursor:pointer}
#readout{min-height:1.5em;font-variant-numeric:tabular-nums}code{font:13px ui-monospace,monospace}
"""
SCRIPT = """
const out = document.getElementById("readout");
const tell = event => { const part = event.target.closest("g"); const title = part && part.querySelector("title");
  if (out && title) out.textContent = title.textContent; };
for (const picture of document.querySelectorAll("svg")) {
  picture.addEventListener("pointerover", tell); }
"""
PALETTE = (
    *("#74aee8", "#74c69d", "#f4b860", "#d9a0cf", "#86d2dd", "#e3d36b"),
    *("#e8998d", "#b7a9e6", "#a2cc4f", "#b89c86", "#f07fae", "#4fa8a0"),
)
"""The first colours: light enough for black letters in both themes, and told apart by the colour-blind."""
NUM_HUES = 48
"""Of a circle, among which further colours are looked for."""
LEAST_LUMINANCE = 0.2
"""Black letters have a contrast of 5 on it; 4.5 is what they need."""
UNKNOWN_COLOUR = "#9aa3ac"
ALWAYS = ("weights", "kv pages", "workspace")
"""Owners that every model has, and that have the same colour in every picture."""
WIDTH = 1000
ROW_HEIGHT, ROW_GAP = 20, 3
MAP_ROWS = 24
MAX_BOXES = 400
"""Most boxes of their own; the smaller ones of a group share one."""
MIN_SHARE = 1e-5
"""Of the whole: what is smaller could not be seen."""
LETTER_WIDTH = 6.4
BAR_NAME_WIDTH, BAR_VALUE_WIDTH = 170, 210
BAR_HEIGHT, BAR_GAP, GROUP_GAP = 16, 2, 10
HEIGHT = 420
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 16, 44
"""Margins of a chart."""
NAME_WIDTH = 230
"""Beside lines, for what they are called."""
LABEL_HEIGHT = 14
DOT = 6
MANTISSAS = (1, 2, 5)
NOBODYS = "measured, and held by no owner"


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """An element. What is no markup yet is escaped; `class_` writes class, and underscores are hyphens."""
    told = "".join(f' {key.rstrip("_").replace("_", "-")}="{_safe(str(value))}"' for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{told}>")
    return Html(f"<{name}{told}>{''.join(map(_markup, children))}</{name}>")


def page(title: str, *body: Html) -> str:
    """The whole file, under a heading."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=ALLOWED),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    inside = tag("body", tag("h1", title), *body, tag("script", Html(SCRIPT)))
    return f"<!DOCTYPE html>\n{tag('html', head, inside, lang='en')}\n"


def readout(where: str) -> Html:
    """The line in which the title of whatever the pointer is at is repeated."""
    return tag("p", f"Point at {where} to read what it is.", id="readout", class_="quiet")


def table(heading: tuple[str, ...], rows: Iterable[tuple[str, tuple[str, ...]]], num_numbers: int) -> Html:
    """Rows, each with its class; the columns after the first are numbers, as many as are said."""

    def cells(kind: str, row: tuple[str, ...]) -> tuple[Html, ...]:
        return tuple(
            tag(kind, cell, class_="number") if 1 <= column <= num_numbers else tag(kind, cell)
            for column, cell in enumerate(row)
        )

    body = (tag("tr", *cells("td", row), **({"class_": name} if name else {})) for name, row in rows)
    return tag("table", tag("thead", tag("tr", *cells("th", heading))), tag("tbody", *body))


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, the first ones from the palette; no two names share one, nor have two that look alike."""
    return dict(zip(dict.fromkeys(names), _colours(), strict=False))


def _colours() -> Iterator[str]:
    """The palette, then of some hundred colours the one that is farthest from all before it, again and again."""
    yield from PALETTE
    candidates = [
        tuple(round(255 * part) for part in colorsys.hls_to_rgb(hue / NUM_HUES, lightness, strength))
        for hue in range(NUM_HUES)
        for lightness in (0.58, 0.66, 0.74, 0.82, 0.88)
        for strength in (0.25, 0.4, 0.55)
    ]
    candidates = [colour for colour in candidates if _luminance(colour) >= LEAST_LUMINANCE]
    taken = [tuple(bytes.fromhex(colour[1:])) for colour in PALETTE]
    nearest = [min(_distance(colour, other) for other in taken) for colour in candidates]
    while True:
        farthest = candidates[nearest.index(max(nearest))]
        yield f"#{bytes(farthest).hex()}"
        nearest = [min(known, _distance(colour, farthest)) for colour, known in zip(candidates, nearest, strict=True)]


def _luminance(colour: tuple[int, ...]) -> float:
    """From 0 for black to 1 for white, as WCAG has it."""
    red, green, blue = ((part / 255 + 0.055) ** 2.4 / 1.055**2.4 for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """How far apart two colours look, squared: red counts more in warm colours, blue in cold ones, green in all."""
    red, green, blue = (left - right for left, right in zip(one, other, strict=True))
    warmth = (one[0] + other[0]) / 512
    return (2 + warmth) * red**2 + 4 * green**2 + (3 - warmth) * blue**2


def swatch(name: str, colour: str) -> Html:
    """A name behind a spot of its colour."""
    return tag("span", tag("span", class_="swatch", style=f"background:{colour}"), name)


@dataclass(frozen=True, slots=True)
class Part:
    """One owner's bytes."""

    group: str
    """What gives it its colour: the first part of the owner's path."""
    name: str
    num_bytes: int
    reason: str
    look: str = ""
    """planned, free or unknown; nothing for what is held."""


def says(part: Part, total_bytes: int) -> str:
    """What a pointer over a box reads."""
    share = part.num_bytes / max(total_bytes, 1)
    owner = part.group if part.name in ("", part.group) else f"{part.group}/{part.name}"
    exact = f"{format_bytes(part.num_bytes)} ({part.num_bytes:,} bytes)"
    return f"{owner}: {exact}, {share:.2%}{f'; {part.reason}' if part.reason else ''}"


def with_small_ones_gathered(parts: Sequence[Part], max_boxes: int = MAX_BOXES) -> list[Part]:
    """The same bytes in the same order, but for parts too small or too many to show: one box a group, at its end."""
    least = MIN_SHARE * sum(part.num_bytes for part in parts)
    largest = sorted(range(len(parts)), key=lambda place: -parts[place].num_bytes)[:max_boxes]
    visible = {place for place in largest if parts[place].num_bytes > least}
    gathered: list[Part] = []
    for group in dict.fromkeys(part.group for part in parts):
        places = [place for place, part in enumerate(parts) if part.group == group and part.num_bytes > 0]
        small = [parts[place] for place in places if place not in visible]
        gathered += [parts[place] for place in places if place in visible]
        if len(small) == 1:
            gathered += small
        elif small:
            reason = f"the largest is {max(small, key=lambda part: part.num_bytes).name}"
            num_bytes = sum(part.num_bytes for part in small)
            gathered.append(Part(group, f"{len(small)} small ones", num_bytes, reason, small[0].look))
    return gathered


def strips(parts: Sequence[Part], colour: dict[str, str], num_rows: int, name: str) -> Html:
    """Bytes to scale, like the lines of a text: the width of all `num_rows` strips together is the whole."""
    total_bytes = sum(part.num_bytes for part in parts)
    starts = [0, *accumulate(part.num_bytes for part in parts)]
    groups = [
        tag("g", *(_box(part, start, total_bytes, num_rows) for part, start in members), **dict(look))
        for look, members in groupby(zip(parts, starts, strict=False), key=lambda member: _look(member[0], colour))
    ]
    height = num_rows * (ROW_HEIGHT + ROW_GAP) - ROW_GAP
    return _picture(name, height, *groups)


def _look(part: Part, colour: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Attributes of a box."""
    if part.look == "free":
        return (("class_", "free"),)
    if part.look == "unknown":
        return (("fill", UNKNOWN_COLOUR),)
    return (("fill", colour[part.group]), *((("class_", part.look),) if part.look else ()))


def _box(part: Part, start: int, total_bytes: int, num_rows: int) -> Html:
    pieces = tuple(_pieces(start, part.num_bytes, total_bytes, num_rows))
    rectangles = (
        tag("rect", x=f"{x:.2f}", y=row * (ROW_HEIGHT + ROW_GAP), width=f"{width:.2f}", height=ROW_HEIGHT)
        for row, x, width in pieces
    )
    title = tag("title", says(part, total_bytes))
    return tag("g", title, *rectangles, *_label(part, pieces), data_bytes=part.num_bytes)


def _pieces(start: int, num_bytes: int, total_bytes: int, num_rows: int) -> Iterator[tuple[int, float, float]]:
    """(row, x, width) of a range of bytes, which may go on in the next rows; in whole numbers, so that nothing is lost."""
    place, end = start * num_rows, (start + num_bytes) * num_rows
    while place < end:
        row = place // total_bytes
        row_end = min(end, (row + 1) * total_bytes)
        yield row, WIDTH * (place - row * total_bytes) / total_bytes, WIDTH * (row_end - place) / total_bytes
        place = row_end


def _label(part: Part, pieces: Sequence[tuple[int, float, float]]) -> tuple[Html, ...]:
    """The name on the widest piece, where it fits."""
    text = part.name or part.group
    row, x, width = max(pieces, key=lambda piece: piece[2], default=(0, 0.0, 0.0))
    if width < LETTER_WIDTH * (len(text) + 1):
        return ()
    return (tag("text", text, x=f"{x + 4:.1f}", y=row * (ROW_HEIGHT + ROW_GAP) + 14),)


class Bar(NamedTuple):
    """A number to scale."""

    group: str
    value: int
    words: str
    """What stands behind it."""
    title: str
    colour: str
    is_pale: bool


def bars(rows: Sequence[Bar], name: str) -> Html:
    """Bars to one scale, neighbours of one group under its name."""
    most = max((row.value for row in rows), default=0)
    room = WIDTH - BAR_NAME_WIDTH - BAR_VALUE_WIDTH
    drawn: list[Html] = []
    y = 0
    for group, members in groupby(rows, key=lambda row: row.group):
        drawn.append(tag("text", group, x=0, y=y + BAR_HEIGHT - 4, class_="axis"))
        inside = []
        for row in members:
            width = room * row.value / max(most, 1)
            rect = tag("rect", x=BAR_NAME_WIDTH, y=y, width=f"{width:.2f}", height=BAR_HEIGHT)
            text = tag("text", row.words, x=f"{BAR_NAME_WIDTH + width + 6:.2f}", y=y + BAR_HEIGHT - 4, class_="value")
            look = {"class_": "planned"} if row.is_pale else {}
            inside.append(tag("g", tag("title", row.title), rect, text, fill=row.colour, data_value=row.value, **look))
            y += BAR_HEIGHT + BAR_GAP
        drawn.append(tag("g", *inside))
        y += GROUP_GAP
    return _picture(name, max(y, 1), *drawn)


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


def label_heights(heights: Sequence[float]) -> list[float]:
    """Where names go that belong to these heights: from the lowest up, each clear of the one below it."""
    found, below = [0.0] * len(heights), math.inf
    for place in sorted(range(len(heights)), key=lambda place: -heights[place]):
        below = found[place] = min(heights[place] + 4, below - LABEL_HEIGHT)
    return found


def _chart(name: str, x: Scale, x_marks: Sequence[float], x_words: str, y: Scale, *drawn: Html) -> Html:
    """Axes with their marks, and what is drawn between them."""
    base = HEIGHT - BOTTOM
    marks = [_line(x.start, x.end, base, base, 0.5), _line(LEFT, LEFT, base, TOP, 0.5)]
    for number in x_marks:
        marks.append(_line(x(number), x(number), base, TOP, 0.1))
        words = f"{number:,.6g}"
        marks.append(tag("text", words, x=f"{x(number):.1f}", y=base + 16, class_="axis", text_anchor="middle"))
    for number in ticks(y):
        marks.append(_line(LEFT, x.end, y(number), y(number), 0.1))
        words = f"{number:.3g}"
        marks.append(tag("text", words, x=LEFT - 8, y=f"{y(number) + 4:.1f}", class_="axis", text_anchor="end"))
    marks.append(tag("text", x_words, x=f"{x.end:.1f}", y=HEIGHT - 8, class_="axis", text_anchor="end"))
    return _picture(name, HEIGHT, *marks, tag("g", *drawn))


def _line(x1: float, x2: float, y1: float, y2: float, strength: float) -> Html:
    places = {"x1": f"{x1:.1f}", "x2": f"{x2:.1f}", "y1": f"{y1:.1f}", "y2": f"{y2:.1f}"}
    return tag("line", **places, stroke="currentColor", stroke_opacity=strength)


def _picture(name: str, height: int, *parts: Html) -> Html:
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=name)


def memory_page(model: str, report: MemoryReport, entries: Sequence[Entry]) -> str:
    """A budget's strip, the map of what is held in the order in which it was taken, and the table both add up to."""
    parts = memory_parts(report, entries)
    colour = colours([*ALWAYS, *(row.owner for row in report.rows), *(part.group for part in parts)])
    left = report.budget_bytes - sum(part.num_bytes for part in parts)
    free = [Part("free", "", left, "left of the budget", "free")] if left > 0 else []
    return page(
        f"Memory of {model}",
        tag(
            "p",
            f"{format_bytes(report.held_bytes)} held, {format_bytes(report.planned_bytes)} planned, "
            f"of {format_bytes(report.budget_bytes)}: {report.budget_reason}",
        ),
        tag(
            "p",
            f"KV cache of {report.kv_tokens:,} tokens, {format_bytes(report.kv_bytes_per_token)} each: "
            f"{report.kv_tokens / report.max_model_len:.2f} requests of {report.max_model_len:,} tokens at once",
            class_="quiet",
        ),
        *_disk_parts(report.disk),
        tag("h2", "The budget"),
        strips([*_by_group(parts), *free], colour, 1, "The budget by owner"),
        tag("h2", "What is held, in the order in which it was taken"),
        strips(with_small_ones_gathered(parts), colour, MAP_ROWS, "Memory by owner"),
        readout("a box"),
        tag("h2", "By owner"),
        table(("owner", "planned", "held", "of what is held", "why"), _memory_rows(report, colour), 3),
    )


def memory_parts(report: MemoryReport, entries: Sequence[Entry]) -> list[Part]:
    """What is held, entry by entry; then what is only planned, and what nobody explains."""
    parts = []
    for entry in entries:
        group, _, name = entry.owner.partition("/")
        parts.append(Part(group, name, entry.num_bytes, entry.reason))
    if not parts:
        parts = [Part(row.owner, "", row.held_bytes, row.reason) for row in report.rows if row.held_bytes is not None]
    parts += [
        Part(row.owner, held_words(row), row.planned_bytes, row.reason, "planned")
        for row in report.rows
        if row.held_bytes is None and SERVE in row.phases
    ]
    if report.unaccounted_bytes:
        # The device may also say less than the ledger does, which no box can show.
        parts.append(Part(UNACCOUNTED, "", max(0, report.unaccounted_bytes), NOBODYS, "unknown"))
    return [part for part in parts if part.num_bytes > 0]


def _by_group(parts: Sequence[Part]) -> list[Part]:
    groups: dict[tuple[str, str], int] = {}
    for part in parts:
        groups[part.group, part.look] = groups.get((part.group, part.look), 0) + part.num_bytes
    reasons = {part.group: part.reason for part in reversed(parts)}
    return [Part(group, "", num_bytes, reasons[group], look) for (group, look), num_bytes in groups.items()]


def _memory_rows(report: MemoryReport, colour: dict[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for row in report.rows:
        share = f"{(row.held_bytes or 0) / max(report.held_bytes, 1):.2%}"
        owner = swatch(row.owner, colour[row.owner])
        yield "", (owner, format_bytes(row.planned_bytes), held_words(row), share, row.reason)
    yield "total", ("total", format_bytes(report.planned_bytes), format_bytes(report.held_bytes), "100.00%", "")
    if report.measured_bytes is not None and report.unaccounted_bytes is not None:
        nobody = swatch(UNACCOUNTED, UNKNOWN_COLOUR)
        yield "", (nobody, "", format_bytes(report.unaccounted_bytes), "", NOBODYS)
        yield "", ("measured", "", format_bytes(report.measured_bytes), "", "what the device says")


def _disk_parts(account: DiskAccount | None) -> list[Html]:
    """What a GGUF file takes on disk, and its weights in memory."""
    return [] if account is None else [tag("p", " ".join(line.split()), class_="quiet") for line in account.lines]


def plan_page(view: PlanView, cells: Sequence[Cell]) -> str:
    """The answer, what starts it and what else would fit; phases as strips to scale, owners by phase, the sweep as bars."""
    schemes = dict.fromkeys(cell.quantization for cell in cells)
    colour = colours([*ALWAYS, *(row.owner for row in view.rows), *(_scheme_name(scheme) for scheme in schemes)])
    phases = [
        part
        for phase in PHASES
        for part in (tag("h2", _phase_words(view, phase)), strips(_phase_parts(view, phase), colour, 1, phase))
    ]
    return page(
        f"Plan of {view.model}",
        tag("p", view.verdict, class_=f"verdict {view.status}"),
        tag("p", view.asked),
        *(tag("p", reason) for reason in view.not_in_this_version),
        *_start_parts(view),
        *_speed_parts(view),
        tag("h2", "What else would fit" if view.fits else "What would fit"),
        *_alternative_parts(view),
        *phases,
        readout("a box"),
        tag("p", f"Budget {format_bytes(view.budget_bytes)}: {view.budget_reason}"),
        *_disk_parts(view.disk),
        tag("p", view.kv_words),
        *([tag("p", view.context_note)] if view.context_note else []),
        tag("h2", "By owner and phase"),
        table(("owner", *PHASES, "why"), _owner_rows(view, colour), len(PHASES)),
        *_group_parts(view),
        tag("h2", "Tokens by KV format and weights"),
        bars(_sweep_bars(cells, colour), "Tokens by format"),
        *([] if all(cell.runs for cell in cells) else [tag("p", f"* {LATER}: planned, to compare", class_="quiet")]),
        *_choice_parts(view),
    )


def _start_parts(view: PlanView) -> list[Html]:
    """Each command below what it gives."""
    return [
        part
        for start in view.starts
        for part in (tag("h2", start_words(start)), tag("p", tag("code", start.command), class_="command"))
    ]


def _speed_parts(view: PlanView) -> list[Html]:
    if view.speed is None:
        return []
    rows = (("", row) for row in speed_rows(view.speed))
    return [
        tag("h2", "Speed, estimated"),
        table(("", "between"), rows, 0),
        tag("p", view.speed.assumption, class_="quiet"),
    ]


def _choice_parts(view: PlanView) -> list[Html]:
    rows = [("", (choice.name, choice.value, choice.reason)) for choice in view.choices]
    return [tag("h2", "Chosen"), table(("setting", "value", "why"), rows, 0)] if rows else []


def _group_parts(view: PlanView) -> list[Html]:
    """Pages by cache group; nothing where all layers keep all tokens."""
    if not view.groups:
        return []
    rows = [("", row) for row in group_rows(view.groups)]
    return [
        tag("h2", "Pages of one longest sequence, by cache group"),
        table(GROUP_HEADING, rows, len(GROUP_HEADING) - 1),
    ]


def _phase_words(view: PlanView, phase: str) -> str:
    needed, left = view.phase_bytes[phase], view.budget_bytes - view.phase_bytes[phase]
    words = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} short"
    return f"{phase}: {format_bytes(needed)}, {words}"


def _phase_parts(view: PlanView, phase: str) -> list[Part]:
    """The owners of a phase, and what is left of the budget."""
    parts = [Part(row.owner, "", row.phase_bytes[phase], row.reason) for row in view.rows if row.phase_bytes.get(phase)]
    left = view.budget_bytes - view.phase_bytes[phase]
    return [*parts, *([Part("left", "", left, "of the budget", "free")] if left > 0 else [])]


def _owner_rows(view: PlanView, colour: dict[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for row in view.rows:
        sizes = (format_bytes(row.phase_bytes[phase]) if phase in row.phase_bytes else "-" for phase in PHASES)
        yield "", (swatch(row.owner, colour[row.owner]), *sizes, row.reason)
    yield "total", ("total", *(format_bytes(view.phase_bytes[phase]) for phase in PHASES), "")


def _scheme_name(scheme: str) -> str:
    """Beside owners, which may be called alike."""
    return f"weights in {scheme}"


def _sweep_bars(cells: Sequence[Cell], colour: dict[str, str]) -> list[Bar]:
    """Coloured by weight scheme, in colours that no owner has; pale where this version cannot run it."""
    rows = []
    for cell in cells:
        tokens = f"{cell.kv_tokens:,}" if cell.kv_tokens else "does not fit"
        words = f"{tokens} · {cell.quantization}{' · asked' if cell.is_asked else ''}{'' if cell.runs else ' *'}"
        wider = f", {cell.kv_protected_layers} layers wider" if cell.kv_protected_layers else ""
        title = f"KV pages in {cell.kv_cache_dtype}{wider}, weights {cell.quantization}: {words}"
        own = colour[_scheme_name(cell.quantization)]
        rows.append(Bar(cell.kv_cache_dtype, cell.kv_tokens, words, title, own, not cell.runs))
    return rows


def _alternative_parts(view: PlanView) -> list[Html]:
    """Changes in the groups in which a terminal shows them; those that are not worth a line there are folded."""
    has_speed = any(item.speed for item in view.alternatives)
    heading = ("change", "tokens", *(("tokens/s",) if has_speed else ()), "concurrency", "")
    rows: list[tuple[str, tuple[str, ...]]] = []
    listed = worthwhile(view)
    for title, group in groupby(listed, key=lambda item: COSTS[item.kind]):
        rows.append(("group", (title, *("" for _ in heading[1:]))))
        rows += (_alternative_row(item, view, has_speed) for item in group)
    parts = [table(heading, rows, len(heading) - 2)]
    others = [_alternative_row(item, view, has_speed) for item in view.alternatives if item not in listed]
    if others:
        words = f"{len(others)} that {'is' if len(others) == 1 else 'are'} not enough alone, or no better"
        parts.append(tag("details", tag("summary", words), table(heading, others, len(heading) - 2)))
    return parts


def _alternative_row(item: "Alternative", view: PlanView, has_speed: bool) -> tuple[str, tuple[str, ...]]:
    tokens = f"{item.kv_tokens:,}" if item.fits else "does not fit"
    speed = "" if item.speed is None else rate_words(item.speed.one_stream.middle)
    words = concurrency_words(item, view.max_model_len) if item.fits else ""
    note = "the smallest change" if item.is_smallest else ""
    return "smallest" if item.is_smallest else "", (
        *(item.change, tokens),
        *((speed,) if has_speed else ()),
        *(words, note),
    )


def eval_page(view: EvalView) -> str:
    """Divergence against bytes, divergence along a window, and the table."""
    words, others = view.subject, view.qualities[1:]
    rows = [("", cells) for cells in quality_cells(view)]
    return page(
        view.title,
        tag("p", view.asked),
        tag("h2", f"Mean KL divergence against {words.size_words}; the thin line reaches to the 99th percentile"),
        size_chart(others, words.size_words),
        tag("h2", "Mean KL divergence along a window"),
        place_chart(others, view.window),
        readout("a dot or a line"),
        tag("h2", f"By {words.row}"),
        table(headings(view), rows, len(headings(view)) - 1),
        *(tag("p", words, class_="quiet") for words in (meaning(view), *note_words(view))),
        *(tag("p", tag("b", words)) for words in broken_words(view)),
    )


def size_chart(qualities: "Sequence[Quality]", size_words: str) -> Html:
    """A dot for each format or scheme: its bytes and its mean divergence, both in decades. What is 0 or no number has no place."""
    colour = colours(quality.name for quality in qualities)
    drawn = [quality for quality in qualities if _has_place(quality.mean_kl)]
    x = log_scale([quality.size_bytes for quality in drawn], LEFT, WIDTH - RIGHT)
    levels = [kl for quality in drawn for kl in (quality.mean_kl, quality.p99_kl) if _has_place(kl)]
    y = log_scale(levels, HEIGHT - BOTTOM, TOP)
    heights = label_heights([y(quality.mean_kl) for quality in drawn])
    marks = [
        _dot(quality, x(quality.size_bytes), y, height, colour[quality.name])
        for quality, height in zip(drawn, heights, strict=True)
    ]
    return _chart("Divergence against bytes", x, ticks(x), size_words, y, *marks)


def place_chart(qualities: "Sequence[Quality]", window: int) -> Html:
    """A line for each format: its mean divergence in equal parts of a window."""
    colour = colours(quality.name for quality in qualities)
    drawn = [quality for quality in qualities if any(map(_has_place, quality.kl_by_place))]
    x = Scale(0.0, float(window), LEFT, WIDTH - NAME_WIDTH, is_log=False)
    levels = [kl for quality in drawn for kl in quality.kl_by_place if _has_place(kl)]
    y = log_scale(levels, HEIGHT - BOTTOM, TOP)
    all_points = [_points(quality, window, x, y) for quality in drawn]
    heights = label_heights([points[-1][1] for points in all_points])
    lines = []
    for quality, points, height in zip(drawn, all_points, heights, strict=True):
        style = {"fill": "none", "stroke": colour[quality.name], "stroke_width": 2.5}
        along = " ".join(map(kl_words, quality.kl_by_place))
        title = tag("title", f"{quality.name}, from the beginning of a window to its end: {along}")
        line = tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), **style)
        name = tag("text", quality.name, x=WIDTH - NAME_WIDTH + 8, y=f"{height:.1f}", class_="value")
        lines.append(tag("g", title, line, name, data_name=quality.name))
    steps = [window * part / 8 for part in range(9)]
    return _chart("Divergence along a window", x, steps, "position in the window", y, *lines)


def _points(quality: "Quality", window: int, x: Scale, y: Scale) -> list[tuple[float, float]]:
    """The middle of each part of a window that has a place."""
    width = window / len(quality.kl_by_place)
    parts = enumerate(quality.kl_by_place)
    return [(x((part + 0.5) * width), y(kl)) for part, kl in parts if _has_place(kl)]


def _dot(quality: "Quality", x: float, y_scale: Scale, label_y: float, colour: str) -> Html:
    y = y_scale(quality.mean_kl)
    told = (
        f"{quality.name}: {quality.size_bytes:,.10g} bytes, mean KL {kl_words(quality.mean_kl)}, "
        f"p99 {kl_words(quality.p99_kl)}, same top-1 {quality.agreement:.2%}, perplexity {quality.perplexity:.4f}"
    )
    top = y_scale(quality.p99_kl) if _has_place(quality.p99_kl) else y
    side, anchor = (-10, "end") if x > WIDTH * 0.7 else (10, "start")
    place = {"x": f"{x + side:.1f}", "y": f"{label_y:.1f}", "text_anchor": anchor}
    label = tag("text", quality.name, class_="value", **place)
    whisker = tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=f"{y:.1f}", y2=f"{top:.1f}", stroke=colour)
    dot = tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=DOT, fill=colour)
    return tag("g", tag("title", told), whisker, dot, label, data_name=quality.name)


def _has_place(number: float) -> bool:
    return math.isfinite(number) and number > 0


def write_page(file: Path, text: str) -> None:
    """Write a page; a page of that name is replaced."""
    file.write_text(text, encoding="utf-8")


def page_file(file: str, option: str) -> Path:
    """The path of a page that is to be written, refused before any work is done for it."""
    path = Path(file)
    try:
        path = path.expanduser()
        wrong = "it is no name" if not file.strip() or "\0" in file else "it is a folder" if path.is_dir() else ""
        if not wrong and not path.absolute().parent.is_dir():
            wrong = "its folder does not exist"
        elif not wrong and path.exists() and not _is_page(path):
            wrong = "a file that is no page lies there"
        elif not wrong and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            wrong = "it may not be written"
    except (OSError, RuntimeError) as error:
        wrong = getattr(error, "strerror", None) or str(error)
    if wrong:
        raise ConfigError(f"{option} {shown(file)} was asked", wrong, f"write {option} page.html")
    return path


def _is_page(path: Path) -> bool:
    """Whether a file may be replaced by a page: it is one, or empty, or no plain file."""
    if not path.is_file():
        return True
    with path.open("rb") as file:
        start = file.read(len(DOCTYPE))
    return not start or start.lower() == DOCTYPE


def _markup(child: str) -> str:
    return child if isinstance(child, Html) else _safe(child)


def _safe(text: str) -> str:
    return escape("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))

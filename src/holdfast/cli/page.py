"""HTML pages of memory, plan and quality, for the templates in data: tables, strips to scale, bars, charts; no torch."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, cycle, groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli.layout import rate_text
from holdfast.cli.options import read_data
from holdfast.cli.plan_view import Cell, PlanView, printable
from holdfast.cli.tables import (
    COSTS,
    GROUP_HEADING,
    LATER,
    SERVE,
    UNACCOUNTED,
    EvalView,
    behaviour_notes,
    broken_notes,
    concurrency_text,
    group_rows,
    headings,
    held_text,
    kl_text,
    meaning,
    notes_of,
    quality_cells,
    speed_rows,
    start_text,
    worthwhile,
)
from holdfast.errors import ConfigError
from holdfast.memory.ledger import Entry
from holdfast.memory.planner import PHASES
from holdfast.memory.report import MemoryReport
from holdfast.memory.sizes import format_bytes

if TYPE_CHECKING:
    from jinja2 import Environment, Template

    from holdfast.eval.kv_quality import Behaviour
    from holdfast.eval.quality import Quality
    from holdfast.planning.alternatives import Alternative

DOCTYPE = b"<!doctype html>"
UNKNOWN_COLOUR = "#9aa3ac"
ALWAYS = ("weights", "kv pages", "workspace")
"""Owners of every model, whose colours never change."""
WIDTH = 1000
ROW_HEIGHT, ROW_GAP = 20, 3
MAP_ROWS = 24
MAX_BOXES = 400
"""Maximum individual boxes; smaller parts of a group share one."""
MIN_SHARE = 1e-5
"""Smallest visible share of the whole."""
LETTER_WIDTH = 6.4
BAR_NAME_WIDTH, BAR_VALUE_WIDTH = 170, 210
BAR_HEIGHT, BAR_GAP, GROUP_GAP = 16, 2, 10
HEIGHT = 420
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 16, 44
"""Margins of a chart."""
NAME_WIDTH = 230
"""Width of the labels beside lines."""
LABEL_HEIGHT = 14
DOT = 6
MANTISSAS = (1, 2, 5)
NO_OWNER = "measured, and held by no owner"
Shape = tuple[str, Mapping[str, object], str]
"""An SVG element: its name, attributes and text."""


class Swatch(NamedTuple):
    """A table cell with a colour before its name."""

    name: str
    colour: str


HtmlRow = tuple[str, tuple[str | Swatch, ...]]
"""The class of a table row, and its cells."""


class HtmlTable(NamedTuple):
    """Rows of a table; columns 1 to `num_numbers` hold numbers."""

    heading: tuple[str, ...]
    rows: Sequence[HtmlRow]
    num_numbers: int = 0


def plain_table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]], num_numbers: int = 0) -> HtmlTable:
    """Make a table of texts."""
    return HtmlTable(heading, [("", tuple(row)) for row in rows], num_numbers)


class Group(NamedTuple):
    """A group of SVG shapes with a tooltip."""

    attributes: Mapping[str, object]
    title: str = ""
    shapes: Sequence[Shape] = ()
    members: "Sequence[Group]" = ()


class Picture(NamedTuple):
    """An SVG picture."""

    name: str
    height: int
    members: Sequence[Group]
    shapes: Sequence[Shape] = ()
    width: int = WIDTH


@cache
def environment() -> "Environment":
    """Load the page templates, with text escaped and unprintable characters replaced."""
    from jinja2 import Environment, PackageLoader

    clean: Callable[[object], object] = lambda value: printable(value) if type(value) is str else value  # noqa: E731
    found = Environment(autoescape=True, finalize=clean, loader=PackageLoader("holdfast", "data"))
    found.filters.update(bytes=format_bytes, what_starts=start_text)
    return found


def page(template: "str | Template", title: str, **values: object) -> str:
    """Render a whole page."""
    text = environment().get_template(template).render(title=title, **values)
    return "\n".join(map(printable, text.split("\n"))) + "\n"


def colours(names: Iterable[str]) -> dict[str, str]:
    """Give each name its own colour.

    Colours suit black letters in both themes. Each is as far as possible from those before it.
    """
    return dict(zip(dict.fromkeys(names), cycle(read_data("colours.json")), strict=False))


@dataclass(frozen=True, slots=True)
class Part:
    """One owner's bytes."""

    group: str
    """The first part of the owner's path; it decides the colour."""
    name: str
    num_bytes: int
    reason: str
    look: str = ""
    """planned, free or unknown; empty if held."""


def tooltip(part: Part, total_bytes: int) -> str:
    """Describe a box."""
    share = part.num_bytes / max(total_bytes, 1)
    owner = part.group if part.name in ("", part.group) else f"{part.group}/{part.name}"
    exact = f"{format_bytes(part.num_bytes)} ({part.num_bytes:,} bytes)"
    return f"{owner}: {exact}, {share:.2%}{f'; {part.reason}' if part.reason else ''}"


def with_small_ones_gathered(parts: Sequence[Part], max_boxes: int = MAX_BOXES) -> list[Part]:
    """Merge small or excess parts into one box at the end of each group; keep the order."""
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


def strips(parts: Sequence[Part], colour: Mapping[str, str], num_rows: int, name: str) -> Picture:
    """Draw bytes to scale as `num_rows` strips that wrap like lines of text."""
    total_bytes = sum(part.num_bytes for part in parts)
    starts = accumulate((part.num_bytes for part in parts), initial=0)
    groups = [
        Group(dict(look), members=[_box(part, start, total_bytes, num_rows) for part, start in members])
        for look, members in groupby(zip(parts, starts, strict=False), key=lambda member: _look(member[0], colour))
    ]
    return Picture(name, num_rows * (ROW_HEIGHT + ROW_GAP) - ROW_GAP, groups)


def _look(part: Part, colour: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if part.look == "free":
        return (("class", "free"),)
    if part.look == "unknown":
        return (("fill", UNKNOWN_COLOUR),)
    return (("fill", colour[part.group]), *((("class", part.look),) if part.look else ()))


def _box(part: Part, start: int, total_bytes: int, num_rows: int) -> Group:
    """Draw a part as rectangles, with its name on the widest one if it fits."""
    pieces = tuple(_pieces(start, part.num_bytes, total_bytes, num_rows))
    shapes: list[Shape] = [
        ("rect", {"x": f"{x:.2f}", "y": _top(row), "width": f"{width:.2f}", "height": ROW_HEIGHT}, "")
        for row, x, width in pieces
    ]
    row, x, width = max(pieces, key=lambda piece: piece[2], default=(0, 0.0, 0.0))
    text = part.name or part.group
    if width >= LETTER_WIDTH * (len(text) + 1):
        shapes.append(("text", {"x": f"{x + 4:.1f}", "y": _top(row) + 14}, text))
    return Group({"data-bytes": part.num_bytes}, tooltip(part, total_bytes), shapes)


def _top(row: int) -> int:
    return row * (ROW_HEIGHT + ROW_GAP)


def _pieces(start: int, num_bytes: int, total_bytes: int, num_rows: int) -> Iterator[tuple[int, float, float]]:
    """Split a byte range into (row, x, width) with integer arithmetic, so no byte is lost."""
    place, end = start * num_rows, (start + num_bytes) * num_rows
    while place < end:
        row = place // total_bytes
        row_end = min(end, (row + 1) * total_bytes)
        yield row, WIDTH * (place - row * total_bytes) / total_bytes, WIDTH * (row_end - place) / total_bytes
        place = row_end


class Bar(NamedTuple):
    """One bar of a bar chart."""

    group: str
    value: int
    label: str
    title: str
    colour: str
    is_pale: bool


def bars(rows: Sequence[Bar], name: str) -> Picture:
    """Draw bars to one scale; neighbours of one group share its name."""
    most = max((row.value for row in rows), default=0)
    groups, names, y = [], [], 0
    for group, members in groupby(rows, key=lambda row: row.group):
        names.append(("text", {"x": 0, "y": y + BAR_HEIGHT - 4, "class": "axis"}, group))
        drawn = []
        for row in members:
            width = (WIDTH - BAR_NAME_WIDTH - BAR_VALUE_WIDTH) * row.value / max(most, 1)
            size = {"x": BAR_NAME_WIDTH, "y": y, "width": f"{width:.2f}", "height": BAR_HEIGHT}
            place = {"x": f"{BAR_NAME_WIDTH + width + 6:.2f}", "y": y + BAR_HEIGHT - 4, "class": "value"}
            look = {"fill": row.colour, "data-value": row.value, "class": "planned" if row.is_pale else None}
            drawn.append(Group(look, row.title, (("rect", size, ""), ("text", place, row.label))))
            y += BAR_HEIGHT + BAR_GAP
        groups.append(Group({}, members=drawn))
        y += GROUP_GAP
    return Picture(name, max(y, 1), groups, names)


class Scale(NamedTuple):
    """Maps a number to a coordinate, logarithmically or linearly."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def __call__(self, number: float) -> float:
        convert: Callable[[float], float] = math.log10 if self.is_log else float
        low, high = convert(self.low), convert(self.high)
        return self.start + (self.end - self.start) * (convert(number) - low) / (high - low)


def log_scale(numbers: Sequence[float], start: float, end: float) -> Scale:
    """Make a logarithmic scale of positive numbers, with a margin at both ends."""
    low, high = (min(numbers), max(numbers)) if numbers else (1.0, 10.0)
    margin = max((high / low) ** 0.08, 1.2)
    return Scale(low / margin, high * margin, start, end, is_log=True)


def ticks(scale: Scale) -> list[float]:
    """Choose round numbers on a logarithmic scale: decades, and 2 and 5 times them if there are few."""
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    decades = [10.0**power for power in range(first, last + 1)]
    finer = [decade * mantissa for decade in decades for mantissa in MANTISSAS]
    inside = [[number for number in numbers if scale.low <= number <= scale.high] for numbers in (decades, finer)]
    return inside[0] if len(inside[0]) >= 3 else inside[1]


def label_heights(heights: Sequence[float]) -> list[float]:
    """Place a label at each height, from the lowest up, without overlaps."""
    found, below = [0.0] * len(heights), math.inf
    for place in sorted(range(len(heights)), key=lambda place: -heights[place]):
        below = found[place] = min(heights[place] + 4, below - LABEL_HEIGHT)
    return found


def _chart(name: str, x: Scale, x_marks: Sequence[float], x_label: str, y: Scale, members: Sequence[Group]) -> Picture:
    """Draw axes with their marks around the members."""
    base = HEIGHT - BOTTOM
    marks = [_line(x.start, x.end, base, base, 0.5), _line(LEFT, LEFT, base, TOP, 0.5)]
    for number in x_marks:
        marks.append(_line(x(number), x(number), base, TOP, 0.1))
        marks.append(_axis_text(f"{number:,.6g}", f"{x(number):.1f}", base + 16, "middle"))
    for number in ticks(y):
        marks.append(_line(LEFT, x.end, y(number), y(number), 0.1))
        marks.append(_axis_text(f"{number:.3g}", LEFT - 8, f"{y(number) + 4:.1f}", "end"))
    marks.append(_axis_text(x_label, f"{x.end:.1f}", HEIGHT - 8, "end"))
    return Picture(name, HEIGHT, [Group({}, members=members)], marks)


def _axis_text(text: str, x: object, y: object, anchor: str) -> Shape:
    return "text", {"x": x, "y": y, "class": "axis", "text-anchor": anchor}, text


def _line(x1: float, x2: float, y1: float, y2: float, opacity: float) -> Shape:
    places = {"x1": f"{x1:.1f}", "x2": f"{x2:.1f}", "y1": f"{y1:.1f}", "y2": f"{y2:.1f}"}
    return "line", {**places, "stroke": "currentColor", "stroke-opacity": opacity}, ""


def memory_page(model: str, report: MemoryReport, entries: Sequence[Entry]) -> str:
    """Render the budget, the map of held bytes in allocation order, and the table of both."""
    parts = memory_parts(report, entries)
    colour = colours([*ALWAYS, *(row.owner for row in report.rows), *(part.group for part in parts)])
    left = report.budget_bytes - sum(part.num_bytes for part in parts)
    free = [Part("free", "", left, "left of the budget", "free")] if left > 0 else []
    heading = ("owner", "planned", "held", "of what is held", "why")
    return page(
        "memory.html.jinja",
        f"Memory of {model}",
        report=report,
        budget=strips([*_by_group(parts), *free], colour, 1, "The budget by owner"),
        held=strips(with_small_ones_gathered(parts), colour, MAP_ROWS, "Memory by owner"),
        owners=HtmlTable(heading, list(_memory_rows(report, colour)), 3),
    )


def memory_parts(report: MemoryReport, entries: Sequence[Entry]) -> list[Part]:
    """List held entries, then bytes that are only planned, then bytes without an owner."""
    parts = []
    for entry in entries:
        group, _, name = entry.owner.partition("/")
        parts.append(Part(group, name, entry.num_bytes, entry.reason))
    if not parts:
        parts = [Part(row.owner, "", row.held_bytes, row.reason) for row in report.rows if row.held_bytes is not None]
    parts += [
        Part(row.owner, held_text(row), row.planned_bytes, row.reason, "planned")
        for row in report.rows
        if row.held_bytes is None and SERVE in row.phases
    ]
    if report.unaccounted_bytes:
        # A device may report less than the ledger holds; no box can show that.
        parts.append(Part(UNACCOUNTED, "", max(0, report.unaccounted_bytes), NO_OWNER, "unknown"))
    return [part for part in parts if part.num_bytes > 0]


def _by_group(parts: Sequence[Part]) -> list[Part]:
    groups: dict[tuple[str, str], int] = {}
    for part in parts:
        groups[part.group, part.look] = groups.get((part.group, part.look), 0) + part.num_bytes
    reasons = {part.group: part.reason for part in reversed(parts)}
    return [Part(group, "", num_bytes, reasons[group], look) for (group, look), num_bytes in groups.items()]


def _memory_rows(report: MemoryReport, colour: Mapping[str, str]) -> Iterator[HtmlRow]:
    for row in report.rows:
        share = f"{(row.held_bytes or 0) / max(report.held_bytes, 1):.2%}"
        owner = Swatch(row.owner, colour[row.owner])
        yield "", (owner, format_bytes(row.planned_bytes), held_text(row), share, row.reason)
    yield "total", ("total", format_bytes(report.planned_bytes), format_bytes(report.held_bytes), "100.00%", "")
    if report.measured_bytes is not None and report.unaccounted_bytes is not None:
        unknown = Swatch(UNACCOUNTED, UNKNOWN_COLOUR)
        yield "", (unknown, "", format_bytes(report.unaccounted_bytes), "", NO_OWNER)
        yield "", ("measured", "", format_bytes(report.measured_bytes), "", "as the device reports")


def plan_page(view: PlanView, cells: Sequence[Cell]) -> str:
    """Render verdict, commands, alternatives, phases as strips, owners by phase, and the sweep as bars."""
    schemes = dict.fromkeys(cell.quantization for cell in cells)
    colour = colours([*ALWAYS, *(row.owner for row in view.rows), *(_scheme_name(scheme) for scheme in schemes)])
    listed = worthwhile(view)
    changes: list[HtmlRow] = []
    for title, group in groupby(listed, key=lambda item: COSTS[item.kind]):
        changes += [("group", (title, "", "", "", "")), *(_alternative_row(item, view) for item in group)]
    others = [_alternative_row(item, view) for item in view.alternatives if item not in listed]
    heading = ("change", "tokens", "tokens/s", "concurrency", "")
    return page(
        "plan.html.jinja",
        f"Plan of {view.model}",
        view=view,
        speed=plain_table(("", "between"), () if view.speed is None else speed_rows(view.speed)),
        changes=_without_speeds(HtmlTable(heading, changes, 3), view),
        others=_without_speeds(HtmlTable(heading, others, 3), view),
        phases=[(_phase_title(view, phase), strips(_phase_parts(view, phase), colour, 1, phase)) for phase in PHASES],
        owners=HtmlTable(("owner", *PHASES, "why"), list(_owner_rows(view, colour)), len(PHASES)),
        groups=plain_table(GROUP_HEADING, group_rows(view.groups), len(GROUP_HEADING) - 1),
        tokens=bars(_sweep_bars(cells, colour), "Tokens by format"),
        later="" if all(cell.runs for cell in cells) else LATER,
        choices=plain_table(("setting", "value", "why"), view.choices),
    )


def _phase_title(view: PlanView, phase: str) -> str:
    needed, left = view.phase_bytes[phase], view.budget_bytes - view.phase_bytes[phase]
    rest = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} short"
    return f"{phase}: {format_bytes(needed)}, {rest}"


def _phase_parts(view: PlanView, phase: str) -> list[Part]:
    """List the owners of a phase, then the free budget."""
    parts = [Part(row.owner, "", row.phase_bytes[phase], row.reason) for row in view.rows if row.phase_bytes.get(phase)]
    left = view.budget_bytes - view.phase_bytes[phase]
    return [*parts, *([Part("left", "", left, "of the budget", "free")] if left > 0 else [])]


def _owner_rows(view: PlanView, colour: Mapping[str, str]) -> Iterator[HtmlRow]:
    for row in view.rows:
        sizes = (format_bytes(row.phase_bytes[phase]) if phase in row.phase_bytes else "-" for phase in PHASES)
        yield "", (Swatch(row.owner, colour[row.owner]), *sizes, row.reason)
    yield "total", ("total", *(format_bytes(view.phase_bytes[phase]) for phase in PHASES), "")


def _scheme_name(scheme: str) -> str:
    """Return a scheme name that no owner has."""
    return f"weights in {scheme}"


def _sweep_bars(cells: Sequence[Cell], colour: Mapping[str, str]) -> list[Bar]:
    """Make bars coloured by weight scheme; pale if this version cannot run the model."""
    rows = []
    for cell in cells:
        tokens = f"{cell.kv_tokens:,}" if cell.kv_tokens else "does not fit"
        label = f"{tokens} · {cell.quantization}{' · this plan' if cell.is_planned else ''}{'' if cell.runs else ' *'}"
        wider = f", {cell.kv_protected_layers} layers wider" if cell.kv_protected_layers else ""
        title = f"KV pages in {cell.kv_cache_dtype}{wider}, weights {cell.quantization}: {label}"
        own = colour[_scheme_name(cell.quantization)]
        rows.append(Bar(cell.kv_cache_dtype, cell.kv_tokens, label, title, own, not cell.runs))
    return rows


def _alternative_row(item: "Alternative", view: PlanView) -> HtmlRow:
    tokens = f"{item.kv_tokens:,}" if item.fits else "does not fit"
    speed = "" if item.speed is None else rate_text(item.speed.one_stream.middle)
    concurrency = concurrency_text(item, view.max_model_len) if item.fits else ""
    note = "the smallest change" if item.is_smallest else ""
    return "smallest" if item.is_smallest else "", (item.change, tokens, speed, concurrency, note)


def _without_speeds(table: HtmlTable, view: PlanView) -> HtmlTable:
    """Drop the column of speeds if no change has one."""
    if any(item.speed for item in view.alternatives):
        return table
    rows = [(kind, (*cells[:2], *cells[3:])) for kind, cells in table.rows]
    return HtmlTable((*table.heading[:2], *table.heading[3:]), rows, table.num_numbers - 1)


def eval_page(view: EvalView) -> str:
    """Render divergence against bytes, divergence along a window, and the table."""
    names = headings(view)
    return page(
        "quality.html.jinja",
        view.title,
        view=view,
        sizes=size_chart(view.qualities[1:], view.subject.size_text),
        places=place_chart(view.qualities[1:], view.window),
        figures=plain_table(names, quality_cells(view), len(names) - 1),
        recall=recall_chart(view.qualities, view.behaviours),
        has_recall=any(own.recall for own in view.behaviours),
        missing=view.missing,
        notes=(meaning(view), *behaviour_notes(view), *notes_of(view)),
        broken=broken_notes(view),
    )


def size_chart(qualities: "Sequence[Quality]", size_text: str) -> Picture:
    """Plot bytes against mean divergence, one dot per contender, on log axes without zeros and infinities."""
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
    return _chart("Divergence against bytes", x, ticks(x), size_text, y, marks)


def place_chart(qualities: "Sequence[Quality]", window: int) -> Picture:
    """Plot mean divergence along a window, one line per contender."""
    colour = colours(quality.name for quality in qualities)
    drawn = [quality for quality in qualities if any(map(_has_place, quality.kl_by_place))]
    x = Scale(0.0, float(window), LEFT, WIDTH - NAME_WIDTH, is_log=False)
    levels = [kl for quality in drawn for kl in quality.kl_by_place if _has_place(kl)]
    y = log_scale(levels, HEIGHT - BOTTOM, TOP)
    all_points = [_points(quality, window, x, y) for quality in drawn]
    heights = label_heights([points[-1][1] for points in all_points])
    lines = []
    for quality, points, height in zip(drawn, all_points, heights, strict=True):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = {"points": path, "fill": "none", "stroke": colour[quality.name], "stroke-width": 2.5}
        place = {"x": WIDTH - NAME_WIDTH + 8, "y": f"{height:.1f}", "class": "value"}
        title = (
            f"{quality.name}, from the beginning of a window to its end: {' '.join(map(kl_text, quality.kl_by_place))}"
        )
        shapes = (("polyline", style, ""), ("text", place, quality.name))
        lines.append(Group({"data-name": quality.name}, title, shapes))
    steps = [window * part / 8 for part in range(9)]
    return _chart("Divergence along a window", x, steps, "position in the window", y, lines)


def recall_chart(qualities: "Sequence[Quality]", behaviours: "Sequence[Behaviour]") -> Picture:
    """Plot the mean probability of the right word by distance, one line per contender, the reference too."""
    colour = colours(quality.name for quality in qualities[1:])
    drawn = [
        (quality.name, [(each.distance, each.probability) for each in own.recall if _has_place(each.probability)])
        for quality, own in zip(qualities, behaviours, strict=bool(behaviours))
    ]
    drawn = [(name, points) for name, points in drawn if points]
    distances = sorted({distance for _, points in drawn for distance, _ in points})
    x = log_scale(distances, LEFT, WIDTH - NAME_WIDTH)
    y = log_scale([number for _, points in drawn for _, number in points], HEIGHT - BOTTOM, TOP)
    heights = label_heights([y(points[-1][1]) for _, points in drawn])
    lines = [
        _recall_line(name, points, (x, y), height, colour.get(name, UNKNOWN_COLOUR))
        for (name, points), height in zip(drawn, heights, strict=True)
    ]
    return _chart("Recall by distance", x, distances, "tokens between a fact and the question", y, lines)


def _recall_line(
    name: str, points: Sequence[tuple[int, float]], scales: tuple[Scale, Scale], height: float, colour: str
) -> Group:
    x, y = scales
    path = " ".join(f"{x(distance):.1f},{y(number):.1f}" for distance, number in points)
    place = {"x": WIDTH - NAME_WIDTH + 8, "y": f"{height:.1f}", "class": "value"}
    title = f"{name}: {', '.join(f'{number:.1%} at {distance:,}' for distance, number in points)}"
    dots: list[Shape] = [
        ("circle", {"cx": f"{x(distance):.1f}", "cy": f"{y(number):.1f}", "r": DOT // 2, "fill": colour}, "")
        for distance, number in points
    ]
    line = ("polyline", {"points": path, "fill": "none", "stroke": colour, "stroke-width": 2.5}, "")
    return Group({"data-name": name}, title, (line, *dots, ("text", place, name)))


def _points(quality: "Quality", window: int, x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Return the midpoint of each part of a window that can be plotted."""
    width = window / len(quality.kl_by_place)
    parts = enumerate(quality.kl_by_place)
    return [(x((part + 0.5) * width), y(kl)) for part, kl in parts if _has_place(kl)]


def _dot(quality: "Quality", x: float, y_scale: Scale, label_y: float, colour: str) -> Group:
    y = y_scale(quality.mean_kl)
    title = (
        f"{quality.name}: {quality.size_bytes:,.10g} bytes, mean KL {kl_text(quality.mean_kl)}, "
        f"p99 {kl_text(quality.p99_kl)}, same top-1 {quality.agreement:.2%}, perplexity {quality.perplexity:.4f}"
    )
    top = y_scale(quality.p99_kl) if _has_place(quality.p99_kl) else y
    side, anchor = (-10, "end") if x > WIDTH * 0.7 else (10, "start")
    whisker = {"x1": f"{x:.1f}", "x2": f"{x:.1f}", "y1": f"{y:.1f}", "y2": f"{top:.1f}", "stroke": colour}
    dot = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": DOT, "fill": colour}
    label = {"class": "value", "x": f"{x + side:.1f}", "y": f"{label_y:.1f}", "text-anchor": anchor}
    shapes = (("line", whisker, ""), ("circle", dot, ""), ("text", label, quality.name))
    return Group({"data-name": quality.name}, title, shapes)


def _has_place(number: float) -> bool:
    return math.isfinite(number) and number > 0


def write_page(file: Path, text: str) -> None:
    """Write a page, replacing an older one."""
    file.write_text(text, encoding="utf-8")


def page_file(file: str, option: str) -> Path:
    """Check the path of a page before any work is done for it."""
    path = Path(file)
    try:
        path = path.expanduser()
        if not file.strip() or "\0" in file:
            reason = "it is not a file name"
        elif path.is_dir():
            reason = "it is a folder"
        elif not path.absolute().parent.is_dir():
            reason = "its folder does not exist"
        elif path.exists() and not _is_page(path):
            reason = "a file that is not an HTML page has that name"
        elif not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            reason = "it is not writable"
        else:
            return path
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError("cli.bad_page_file", option=option, file=file, reason=reason)


def _is_page(path: Path) -> bool:
    """Return True if a page may replace the file: it is a page, empty, or not a regular file."""
    if not path.is_file():
        return True
    with path.open("rb") as file:
        start = file.read(len(DOCTYPE))
    return not start or start.lower() == DOCTYPE

"""A plan as a page: phases as strips to scale, the table, what would fit, and the sweep as a chart; no torch."""

from itertools import groupby

from holdfast.cli.plan_sweep import Cell
from holdfast.cli.plan_table import LATER, concurrency_words
from holdfast.cli.plan_view import OwnerRow, PlanView
from holdfast.cli.side_lines import MAX_PATH, write_line
from holdfast.cli.strip_map import Part, colours, strip_map
from holdfast.cli.web_page import PALETTE, Html, page, page_file, table, tag
from holdfast.errors import shown
from holdfast.memory.planner import PHASES
from holdfast.memory.sizes import format_bytes

POINT = "Point at a box to read what it is."
CHART_WIDTH, NAME_WIDTH, VALUE_WIDTH = 1000, 170, 210
BAR_HEIGHT, BAR_GAP, GROUP_GAP = 16, 2, 10


def plan_page(view: PlanView, cells: tuple[Cell, ...]) -> str:
    """The whole file."""
    colour = colours([row.owner for row in view.rows])
    phases = [
        part
        for phase in PHASES
        for part in (tag("h2", _phase_words(view, phase)), strip_map(_parts(view, phase), colour, 1, f"Phase {phase}"))
    ]
    start = [] if view.command is None else [tag("h2", "To start it"), tag("p", tag("code", view.command))]
    return page(
        f"Plan of {view.model}",
        tag("h1", f"Plan of {view.model}"),
        tag("p", view.asked),
        tag("p", f"Budget {format_bytes(view.budget_bytes)}: {view.budget_reason}"),
        tag("p", tag("b", view.kv_words if view.fits else f"It does not fit: {format_bytes(view.short_bytes)} short")),
        *phases,
        tag("p", POINT, id="readout", class_="quiet"),
        tag("h2", "By owner and phase"),
        _owners(view, colour),
        tag("h2", "Tokens by KV format and weights"),
        sweep_chart(cells),
        tag("h2", "What else would fit" if view.fits else "What would fit"),
        _alternatives(view),
        *start,
        *(tag("p", f"It cannot be started yet: {reason}", class_="quiet") for reason in view.not_in_this_version),
    )


def write_plan_page(file: str, view: PlanView, cells: tuple[Cell, ...], is_told: bool) -> None:
    """Write the page; a file of that name is replaced."""
    page_file(file, "--html").write_text(plan_page(view, cells), encoding="utf-8")
    if is_told:
        write_line(f"page written to {shown(file, MAX_PATH)[1:-1]}")


def sweep_chart(cells: tuple[Cell, ...]) -> Html:
    """Bars to one scale, grouped by KV format, coloured by quantization; pale where this version cannot run it."""
    most = max((cell.kv_tokens for cell in cells), default=0)
    schemes = list(dict.fromkeys(cell.quantization for cell in cells))
    room = CHART_WIDTH - NAME_WIDTH - VALUE_WIDTH
    drawn: list[Html] = []
    y = 0
    for kv_format, members in groupby(cells, key=lambda cell: cell.kv_cache_dtype):
        drawn.append(tag("text", kv_format, x=0, y=y + BAR_HEIGHT - 4, class_="axis"))
        bars = []
        for cell in members:
            words = _cell_words(cell)
            width = room * cell.kv_tokens / max(most, 1)
            rect = tag("rect", x=NAME_WIDTH, y=y, width=f"{width:.2f}", height=BAR_HEIGHT)
            text = tag("text", words, x=f"{NAME_WIDTH + width + 6:.2f}", y=y + BAR_HEIGHT - 4, class_="value")
            wider = f", {cell.kv_protected_layers} layers wider" if cell.kv_protected_layers else ""
            title = tag("title", f"KV pages in {kv_format}{wider}, weights {cell.quantization}: {words}")
            look = f"c{schemes.index(cell.quantization) % len(PALETTE)}{'' if cell.runs else ' planned'}"
            bars.append(tag("g", title, rect, text, class_=look, data_tokens=cell.kv_tokens))
            y += BAR_HEIGHT + BAR_GAP
        drawn.append(tag("g", *bars))
        y += GROUP_GAP
    return tag("svg", *drawn, viewBox=f"0 0 {CHART_WIDTH} {max(y, 1)}", role="img", aria_label="Tokens by format")


def _cell_words(cell: Cell) -> str:
    tokens = f"{cell.kv_tokens:,}" if cell.kv_tokens else "does not fit"
    return f"{tokens} · {cell.quantization}{' · asked' if cell.is_asked else ''}{'' if cell.runs else ' *'}"


def _phase_words(view: PlanView, phase: str) -> str:
    needed, left = view.phase_bytes[phase], view.budget_bytes - view.phase_bytes[phase]
    words = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} short"
    return f"{phase}: {format_bytes(needed)}, {words}"


def _parts(view: PlanView, phase: str) -> list[Part]:
    """The owners of a phase, and what is left of the budget."""
    parts = [Part(row.owner, "", row.phase_bytes[phase], row.reason) for row in view.rows if row.phase_bytes.get(phase)]
    left = view.budget_bytes - view.phase_bytes[phase]
    return [*parts, *([Part("left", "", left, "of the budget", "free")] if left > 0 else [])]


def _owners(view: PlanView, colour: dict[str, str]) -> Html:
    rows: list[tuple[str, tuple[str, ...]]] = [("", _owner_cells(row, colour)) for row in view.rows]
    sums = tuple(format_bytes(view.phase_bytes[phase]) for phase in PHASES)
    return table(("owner", *PHASES, "why"), [*rows, ("total", ("total", *sums, ""))], len(PHASES))


def _owner_cells(row: OwnerRow, colour: dict[str, str]) -> tuple[str, ...]:
    owner = tag("span", tag("span", class_=f"swatch {colour[row.owner]}"), row.owner)
    sizes = (format_bytes(row.phase_bytes[phase]) if phase in row.phase_bytes else "-" for phase in PHASES)
    return (owner, *sizes, row.reason)


def _alternatives(view: PlanView) -> Html:
    rows: list[tuple[str, tuple[str, ...]]] = []
    for item in view.alternatives:
        words = concurrency_words(item, view.max_model_len) if item.fits else ""
        name = "smallest" if item.is_smallest else "" if item.not_in_this_version is None else "not-yet"
        note = "the smallest change" if item.is_smallest else LATER if item.not_in_this_version else ""
        tokens = f"{item.kv_tokens:,}" if item.fits else "does not fit"
        rows.append((name, (item.change, tokens, words, note)))
    return tag(
        "div",
        table(("change", "tokens", "concurrency", ""), rows, 2),
        tag("p", f"* {LATER}: planned, so that it can be compared", class_="quiet"),
    )

"""A plan for a terminal: owners by phase with bars, tokens, choices, what else would fit, and how to start it; no torch."""

from typing import NamedTuple

from holdfast.cli.columns import FULL, LIGHT, aligned, cells_of
from holdfast.cli.plan_view import OwnerRow, PlanView
from holdfast.memory.planner import PHASES
from holdfast.memory.sizes import format_bytes
from holdfast.runner.planning.alternatives import Alternative

BAR_CELLS = 20
NOTHING = "-"
SMALLEST, OTHER = "→", " "
LATER = "not in this version"


class Line(NamedTuple):
    """One line, and how a terminal that has colours shows it."""

    text: str
    style: str = ""
    is_cut: bool = False
    """A row of a table ends where the terminal does; sentences and commands go on in the next line."""


def plan_lines(view: PlanView) -> list[Line]:
    """Everything that a person is told."""
    return [
        Line(view.asked, "bold"),
        Line(f"budget {format_bytes(view.budget_bytes)}: {view.budget_reason}"),
        Line(""),
        *owner_lines(view),
        Line(""),
        *_outcome(view),
        *_section("chosen", [Line(line, is_cut=True) for line in _choices(view)]),
        *_section("what else would fit" if view.fits else "what would fit", alternative_lines(view)),
        *_start(view),
    ]


def owner_lines(view: PlanView) -> list[Line]:
    """Bytes of each owner in each phase; the bar is its share of the budget, light where it is gone while serving."""
    whole = max(view.budget_bytes, *view.phase_bytes.values(), 1)
    rows = [
        (row.owner, *(_cell(row.phase_bytes.get(phase)) for phase in PHASES), _bar(row, whole), row.reason)
        for row in view.rows
    ]
    left = {phase: view.budget_bytes - num_bytes for phase, num_bytes in view.phase_bytes.items()}
    sums = [
        ("total", *(_cell(view.phase_bytes[phase]) for phase in PHASES), "", ""),
        ("left" if view.fits else "left or short", *(_cell(left[phase]) for phase in PHASES), "", "of the budget"),
    ]
    heading, *lines = aligned([("owner", *PHASES, "", "why"), *rows, *sums], right=(1, 2, 3))
    return [
        Line(heading, "bold", is_cut=True),
        *(Line(line, is_cut=True) for line in lines[:-1]),
        Line(lines[-1], "" if view.fits else "bold red", is_cut=True),
    ]


def alternative_lines(view: PlanView) -> list[Line]:
    """Changes of one option each; the smallest that fits is marked, those of later versions are dim."""
    fitting = [item for item in view.alternatives if item.fits]
    rows = [
        (
            SMALLEST if item.is_smallest else OTHER,
            item.change,
            f"{item.kv_tokens:,} tokens",
            concurrency_words(item, view.max_model_len),
            _note(item),
        )
        for item in fitting
    ]
    styles = ["green" if item.is_smallest else "dim" if item.not_in_this_version else "" for item in fitting]
    lines = [Line(text, style, is_cut=True) for text, style in zip(aligned(rows, right=(2,)), styles, strict=True)]
    num_others = len(view.alternatives) - len(fitting)
    if num_others:
        are = "change is" if num_others == 1 else "changes are"
        lines.append(Line(f"{num_others} other {are} not enough alone; --json lists them", "dim"))
    return lines


def concurrency_words(item: Alternative, max_model_len: int) -> str:
    """Requests at once, and of which length where a change brings another one with it."""
    length = round(item.kv_tokens / item.max_concurrency)
    return f"{item.max_concurrency:.2f}x" if length == max_model_len else f"{item.max_concurrency:.2f}x of {length:,}"


def _note(item: Alternative) -> str:
    if item.is_smallest:
        return "the smallest change"
    return "" if item.not_in_this_version is None else LATER


def _cell(num_bytes: int | None) -> str:
    return NOTHING if num_bytes is None else format_bytes(num_bytes)


def _bar(row: OwnerRow, whole: int) -> str:
    serving = cells_of(row.phase_bytes.get("serve", 0), whole, BAR_CELLS)
    return FULL * serving + LIGHT * (cells_of(row.peak_bytes, whole, BAR_CELLS) - serving)


def _outcome(view: PlanView) -> list[Line]:
    if view.fits:
        return [Line(view.kv_words, "bold")]
    smallest = next((item for item in view.alternatives if item.is_smallest), None)
    do = "no single change that this version can make is enough; take a smaller model"
    if smallest is not None:
        do = f"the smallest change that fits: {smallest.change}"
    return [Line(f"it does not fit: {format_bytes(view.short_bytes)} short; {do}", "bold red"), Line(view.kv_words)]


def _choices(view: PlanView) -> list[str]:
    if not view.choices:
        return []
    return aligned([(choice.name, choice.value, choice.reason) for choice in view.choices], right=())


def _section(title: str, lines: list[Line]) -> list[Line]:
    if not lines:
        return []
    return [Line(""), Line(title, "bold"), *(line._replace(text=f"  {line.text}".rstrip()) for line in lines)]


def _start(view: PlanView) -> list[Line]:
    if view.not_in_this_version:
        return _section("it cannot be started yet", [Line(reason) for reason in view.not_in_this_version])
    if view.command is None:
        return []
    return _section("to start it" if view.fits else "to start it with that change", [Line(view.command)])

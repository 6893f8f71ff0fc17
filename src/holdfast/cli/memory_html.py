"""The memory report as a page: all that is held, drawn to scale and in the order in which it was taken, by owner; no torch."""

from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.memory_table import SERVE, UNACCOUNTED, held_words
from holdfast.cli.strip_map import Part, colours, strip_map, with_small_ones_gathered
from holdfast.cli.web_page import Html, page, table, tag
from holdfast.memory.ledger import Entry
from holdfast.memory.report import MemoryReport
from holdfast.memory.sizes import format_bytes

MAP_ROWS = 24
NOBODYS = "measured, and held by no owner"
POINT = "Point at a box to read who holds it, how much, and why."


def write_memory_page(file: Path, model: str, report: MemoryReport, entries: Sequence[Entry]) -> None:
    """Write the page; a file of that name is replaced."""
    file.write_text(memory_page(model, report, entries), encoding="utf-8")


def memory_page(model: str, report: MemoryReport, entries: Sequence[Entry]) -> str:
    """A budget's strip, the map of what is held, and the table that both add up to."""
    parts = memory_parts(report, entries)
    colour = colours([row.owner for row in report.rows] + [part.group for part in parts])
    whole = sum(part.num_bytes for part in parts)
    overview = [*_by_group(parts), *_free(report, whole)]
    return page(
        f"Memory of {model}",
        tag("h1", f"Memory of {model}"),
        tag(
            "p",
            f"{format_bytes(report.held_bytes)} held, {format_bytes(report.planned_bytes)} planned, "
            f"of {format_bytes(report.budget_bytes)}: {report.budget_reason}",
        ),
        tag("p", kv_words(report), class_="quiet"),
        tag("h2", "The budget"),
        strip_map(overview, colour, 1, "The budget by owner"),
        tag("h2", "What is held, in the order in which it was taken"),
        strip_map(with_small_ones_gathered(parts), colour, MAP_ROWS, "Memory by owner"),
        tag("p", POINT, id="readout", class_="quiet"),
        tag("h2", "By owner"),
        _table(report, colour),
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


def kv_words(report: MemoryReport) -> str:
    """The table's meaning in tokens."""
    return (
        f"KV cache of {report.kv_tokens:,} tokens, {format_bytes(report.kv_bytes_per_token)} each: "
        f"{report.kv_tokens / report.max_model_len:.2f} requests of {report.max_model_len:,} tokens at once"
    )


def _by_group(parts: Sequence[Part]) -> list[Part]:
    groups: dict[tuple[str, str], int] = {}
    for part in parts:
        groups[part.group, part.look] = groups.get((part.group, part.look), 0) + part.num_bytes
    reasons = {part.group: part.reason for part in reversed(parts)}
    return [Part(group, "", num_bytes, reasons[group], look) for (group, look), num_bytes in groups.items()]


def _free(report: MemoryReport, whole: int) -> list[Part]:
    left = report.budget_bytes - whole
    return [Part("free", "", left, "left of the budget", "free")] if left > 0 else []


def _table(report: MemoryReport, colour: dict[str, str]) -> Html:
    rows: list[tuple[str, tuple[str, ...]]] = []
    for row in report.rows:
        owner = tag("span", tag("span", class_=f"swatch {colour[row.owner]}"), row.owner)
        share = f"{(row.held_bytes or 0) / max(report.held_bytes, 1):.2%}"
        rows.append(("", (owner, format_bytes(row.planned_bytes), held_words(row), share, row.reason)))
    total = ("total", format_bytes(report.planned_bytes), format_bytes(report.held_bytes), "100.00%", "")
    rows.append(("total", total))
    if report.measured_bytes is not None and report.unaccounted_bytes is not None:
        swatch = tag("span", tag("span", class_="swatch unknown"), UNACCOUNTED)
        rows.append(("", (swatch, "", format_bytes(report.unaccounted_bytes), "", NOBODYS)))
        rows.append(("", ("measured", "", format_bytes(report.measured_bytes), "", "what the device says")))
    return table(("owner", "planned", "held", "of what is held", "why"), rows, 3)

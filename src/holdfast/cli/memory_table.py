"""Memory for people, as lines: the report (owner, planned, held, a bar, why) and a plan that was refused; no torch."""

from holdfast.cli.columns import FULL, LIGHT, aligned, cells_of
from holdfast.cli.side_lines import write_line
from holdfast.errors import PlanTable
from holdfast.memory.report import MemoryReport, MemoryRow
from holdfast.memory.sizes import format_bytes

BAR_CELLS = 20
HEADINGS = ("owner", "planned", "held", "", "why")
SERVE = "serve"
UNACCOUNTED = "unaccounted"
UNKNOWN_COLUMNS = 80
"""Where a terminal says that it has none, rich would print nothing."""


def memory_lines(report: MemoryReport, is_compact: bool = False) -> list[str]:
    """The table, its sum, and what it means in tokens; a compact one leaves out why."""
    rows = [_cells(row, report.planned_bytes) for row in report.rows]
    rows.append(
        (
            "total",
            format_bytes(report.planned_bytes),
            format_bytes(report.held_bytes),
            "",
            f"of {format_bytes(report.budget_bytes)}: {report.budget_reason}",
        )
    )
    rows += _measured(report)
    concurrency = report.kv_tokens / report.max_model_len
    num_columns = len(HEADINGS) - 1 if is_compact else len(HEADINGS)
    return [
        *aligned([row[:num_columns] for row in (HEADINGS, *rows)], right=(1, 2)),
        f"KV cache size: {report.kv_tokens:,} tokens ({format_bytes(report.kv_bytes_per_token)} each), "
        f"Maximum concurrency for {report.max_model_len:,} tokens per request: {concurrency:.2f}x",
    ]


def refusal_lines(table: PlanTable) -> list[str]:
    """What each owner would need in the phase that does not fit, and how much is short."""
    rows = [
        (
            row.owner,
            format_bytes(row.num_bytes),
            cells_of(row.num_bytes, table.needed_bytes, BAR_CELLS) * FULL,
            row.reason,
        )
        for row in table.rows
    ]
    sums = [
        ("total", format_bytes(table.needed_bytes), "", f"to {table.phase}"),
        ("budget", format_bytes(table.budget_bytes), "", table.budget_reason),
        ("short", format_bytes(table.short_bytes), "", ""),
    ]
    return aligned([("owner", "needed", "", "why"), *rows, *sums], right=(1,))


def held_words(row: MemoryRow) -> str:
    """What an owner holds; where it has no tensors of its own, why not."""
    if row.held_bytes is not None:
        return format_bytes(row.held_bytes)
    return "as needed" if SERVE in row.phases else f"only to {' and '.join(row.phases)}"


def write_memory(report: MemoryReport, is_compact: bool = False) -> None:
    """The report on stderr."""
    *table, meaning = memory_lines(report, is_compact)
    write_table(table, meaning)


def write_table(lines: list[str], *sentences: str) -> None:
    """A table on stderr, its heading first, cut to the width of a terminal and with colour there; and what it means."""
    from holdfast.engine.progress import is_watched

    if not is_watched():
        write_line("\n".join((*lines, *sentences)))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.width = console.width or UNKNOWN_COLUMNS
    for number, line in enumerate(lines):
        text = Text(line, style="bold" if number == 0 else "")
        text.highlight_regex(f"{FULL}+", "cyan")
        text.highlight_regex(f"{LIGHT}+", "blue")
        console.print(text, no_wrap=True, overflow="ellipsis")
    for sentence in sentences:
        console.print(Text(sentence), soft_wrap=True)


def _cells(row: MemoryRow, total_bytes: int) -> tuple[str, ...]:
    bar = _bar(row, total_bytes) if SERVE in row.phases else ""
    return row.owner, format_bytes(row.planned_bytes), held_words(row), bar, row.reason


def _measured(report: MemoryReport) -> list[tuple[str, ...]]:
    """What the device says, where it was asked, and what no owner explains of it."""
    if report.measured_bytes is None or report.unaccounted_bytes is None:
        return []
    return [
        (UNACCOUNTED, "", format_bytes(report.unaccounted_bytes), "", "measured, and held by no owner"),
        ("measured", "", format_bytes(report.measured_bytes), "", "what the device says"),
    ]


def _bar(row: MemoryRow, total_bytes: int) -> str:
    """As long as the share of the plan; filled as far as it is held."""
    num_cells = cells_of(row.planned_bytes, total_bytes, BAR_CELLS)
    num_held = min(num_cells, cells_of(row.held_bytes or 0, total_bytes, BAR_CELLS))
    return FULL * num_held + LIGHT * (num_cells - num_held)

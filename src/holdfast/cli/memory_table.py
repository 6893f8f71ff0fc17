"""The memory report for people: owner, planned, held, a bar, and why; no torch."""

from holdfast.cli.failures import write_line
from holdfast.engine.progress import is_watched
from holdfast.memory.report import MemoryReport, MemoryRow
from holdfast.memory.sizes import format_bytes

BAR_CELLS = 20
HELD, PLANNED = "█", "░"
HEADINGS = ("owner", "planned", "held", "", "why")
RIGHT_ALIGNED = (1, 2)


def memory_lines(report: MemoryReport) -> list[str]:
    """The table, its sum, and what it means in tokens."""
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
    widths = [max(len(row[column]) for row in (HEADINGS, *rows)) for column in range(len(HEADINGS))]
    concurrency = report.kv_tokens / report.max_model_len
    return [
        *(_line(row, widths) for row in (HEADINGS, *rows)),
        f"KV cache size: {report.kv_tokens:,} tokens ({format_bytes(report.kv_bytes_per_token)} each), "
        f"Maximum concurrency for {report.max_model_len:,} tokens per request: {concurrency:.2f}x",
    ]


def _cells(row: MemoryRow, total_bytes: int) -> tuple[str, ...]:
    held = "while a step runs" if row.held_bytes is None else format_bytes(row.held_bytes)
    return row.owner, format_bytes(row.planned_bytes), held, _bar(row, total_bytes), row.reason


def _bar(row: MemoryRow, total_bytes: int) -> str:
    """As long as the share of the plan; filled as far as it is held."""
    num_cells = round(BAR_CELLS * row.planned_bytes / max(total_bytes, 1))
    num_held = min(num_cells, round(BAR_CELLS * (row.held_bytes or 0) / max(total_bytes, 1)))
    return HELD * num_held + PLANNED * (num_cells - num_held)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.rjust(width) if column in RIGHT_ALIGNED else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def write_memory(report: MemoryReport) -> None:
    """The table on stderr: cut to the width of a terminal and with colour there, as plain lines elsewhere."""
    lines = memory_lines(report)
    if not is_watched():
        write_line("\n".join(lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    for number, line in enumerate(lines):
        text = Text(line, style="bold" if number == 0 else "")
        text.highlight_regex(f"{HELD}+", "cyan")
        text.highlight_regex(f"{PLANNED}+", "blue")
        console.print(text, no_wrap=True, overflow="ellipsis")

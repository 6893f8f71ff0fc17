"""Text in columns, and bars of blocks; no torch."""

from collections.abc import Sequence

FULL, LIGHT = "█", "░"


def aligned(rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    """Cells in columns, the numbered ones to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def cells_of(value: int, whole: int, num_cells: int) -> int:
    """Cells of a bar for a part of the whole."""
    return round(num_cells * value / max(whole, 1))

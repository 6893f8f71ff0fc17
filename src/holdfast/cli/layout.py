"""Fit tables to a terminal: shrink bars, then wrap text, then move columns below; words stay whole; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import TextWrapper
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from holdfast.planning.speed import SpeedEstimate

FULL, LIGHT = "█", "░"
EIGHTHS = " ▏▎▍▌▋▊▉█"
GAP = "  "
COMFORTABLE = 28
"""Minimum width of wrapped text before bars shrink."""
LEAST_WRAPPED = 14
"""Minimum width of a text column; never below its longest word."""
BAR_SCALES = (1.0, 0.5, 0.25, 0.0)
SMALLEST, OTHER = "→", " "
MARKS = f"{SMALLEST}{OTHER}"
"""Possible first characters of a name."""
CONTINUED = " \\"
"""Suffix of a command line that continues."""


class Table(NamedTuple):
    """Rows of cells, an optional heading first; the first column names a row."""

    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    """Right-aligned columns of numbers."""
    bar: int | None = None
    """The column of bars."""
    wraps: tuple[int, ...] = ()
    """Text columns that may wrap, in this order."""
    comfortable: int = COMFORTABLE
    """Preferred width of the first wrapping column."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line and its style on a terminal."""

    text: str
    style: str = ""
    table: Table | None = None
    """Table that has this line as row `row`, for layout on a narrow terminal."""
    row: int = 0
    indent: int = 0
    is_command: bool = False
    """True for a command, which breaks after a backslash."""


def table_lines(table: Table, styles: Sequence[str] = ()) -> list[Line]:
    """Make a line for each row at its natural width."""
    texts = aligned(table.rows, table.right)
    return [Line(text, styles[row] if row < len(styles) else "", table, row) for row, text in enumerate(texts)]


def aligned(rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    """Align cells in columns; `right` ones to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_joined(row, widths, right) for row in rows]


def _joined(cells: Sequence[str], widths: Sequence[int], right: tuple[int, ...]) -> str:
    return GAP.join(
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def fitted(lines: Sequence[Line], num_columns: int) -> list[Line]:
    """Fit lines to a width; only a longer word exceeds it."""
    found: list[Line] = []
    for table, group in groupby(lines, key=lambda line: None if line.table is None else id(line.table)):
        run = list(group)
        if table is None:
            for line in run:
                found += _wrapped_line(line, num_columns)
        else:
            found += _fitted_rows(run, num_columns)
    return found


def _wrapped_line(line: Line, num_columns: int) -> list[Line]:
    """Wrap a sentence or a command; continuation lines are indented."""
    if len(line.text) <= num_columns:
        return [line]
    body = line.text.lstrip(" ")
    first = line.text[: len(line.text) - len(body)]
    end = CONTINUED if line.is_command else ""
    *pieces, last = wrapped(body, num_columns - len(end), first, first + (4 * " " if line.is_command else ""))
    return [*(Line(f"{piece}{end}", line.style) for piece in pieces), Line(last, line.style)]


def wrapped(text: str, num_columns: int, first: str = "", indent: str = "") -> list[str]:
    """Wrap text at spaces, after `first` on the first line and `indent` on the others; words stay whole."""
    wrapper = TextWrapper(
        max(num_columns, 1),
        initial_indent=first,
        subsequent_indent=indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(text) or [first]


def _fitted_rows(run: Sequence[Line], num_columns: int) -> list[Line]:
    """Fit consecutive rows of one table."""
    table, indent = run[0].table, run[0].indent
    assert table is not None, "a row belongs to a table"
    if max(len(line.text) for line in run) <= num_columns and _width(_natural(table)) + indent <= num_columns:
        return list(run)
    blocks = _blocks(table, num_columns - indent)
    found: list[Line] = []
    for place, block in enumerate(blocks):
        if place:
            found.append(Line(""))
        for line in run:
            texts = block.lines(table, line.row)
            found += (Line(f"{' ' * indent}{text}".rstrip(), line.style) for text in texts)
    return found


@dataclass(frozen=True, slots=True)
class _Block:
    """Some columns of a table, side by side."""

    columns: tuple[int, ...]
    widths: tuple[int, ...]
    scale: float
    """Scale of the bar."""

    def lines(self, table: Table, row: int) -> Iterator[str]:
        pieces = []
        for column, width in zip(self.columns, self.widths, strict=True):
            cell = table.rows[row][column]
            if column == table.bar:
                pieces.append([shrunk(cell, self.scale)])
            elif column in table.wraps:
                pieces.append(_wrapped_cell(cell, width))
            else:
                pieces.append([cell])
        right = tuple(place for place, column in enumerate(self.columns) if column in table.right)
        for number in range(max(map(len, pieces))):
            cells = [own[number] if number < len(own) else "" for own in pieces]
            yield _joined(cells, self.widths, right)


def _wrapped_cell(cell: str, num_columns: int) -> list[str]:
    """Wrap a cell, indented after its mark."""
    body = cell.lstrip(MARKS)
    mark = cell[: len(cell) - len(body)]
    return wrapped(body, num_columns, mark, " " * len(mark))


def shrunk(bar: str, scale: float) -> str:
    """Shorten a bar; a bar in eighths stays visible."""
    full, light = bar.count(FULL), bar.count(LIGHT)
    part = next((place for place, sign in enumerate(EIGHTHS[:8]) if place and sign in bar), 0)
    if scale == 0 or not bar.strip():
        return ""
    if part or not light:
        eighths = max(1, round(scale * (8 * full + part)))
        if not part:
            return FULL * max(1, round(scale * full))
        return (FULL * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()
    return FULL * round(scale * full) + LIGHT * round(scale * light)


def _natural(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(*table.rows, strict=True)]


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _blocks(table: Table, num_columns: int) -> list[_Block]:
    """Lay out all columns side by side with shorter bars and wrapped text, or else in several blocks."""
    natural = _natural(table)
    columns = tuple(range(len(natural)))
    scales = BAR_SCALES if table.bar is not None else (0.0,)
    for scale in scales:
        kept = tuple(column for column in columns if column != table.bar or scale)
        widths = _narrowed(table, natural, kept, num_columns, scale)
        if widths is None:
            continue
        main = table.wraps[0] if table.wraps else None
        is_fine = main is None or widths[kept.index(main)] >= min(table.comfortable, natural[main])
        if is_fine or scale == 0.0:
            return [_Block(kept, widths, scale)]
    return _stacked(table, natural, tuple(column for column in columns if column != table.bar), num_columns)


def _narrowed(
    table: Table, natural: Sequence[int], kept: tuple[int, ...], num_columns: int, scale: float
) -> tuple[int, ...] | None:
    """Return widths that fit these columns; None if impossible."""
    widths = [_bar_width(table, scale) if column == table.bar else natural[column] for column in kept]
    for column in table.wraps:
        over = _width(widths) - num_columns
        if over <= 0:
            break
        if column in kept:
            place = kept.index(column)
            widths[place] = max(widths[place] - over, _least(table, column))
    return tuple(widths) if _width(widths) <= num_columns else None


def _bar_width(table: Table, scale: float) -> int:
    assert table.bar is not None, "a table without a bar"
    return max((len(shrunk(row[table.bar].rstrip(), scale)) for row in table.rows), default=0)


def _least(table: Table, column: int) -> int:
    """Return the least width of a text column."""
    cells = [row[column] for row in table.rows]
    longest = max(
        (len(cell) - len(cell.lstrip(MARKS)) + len(word) for cell in cells for word in cell.split()), default=0
    )
    return min(max(map(len, cells)), max(LEAST_WRAPPED, longest))


def _stacked(table: Table, natural: Sequence[int], kept: tuple[int, ...], num_columns: int) -> list[_Block]:
    """Put as many columns as fit beside the first, and the rest below."""
    blocks: list[_Block] = []
    first, rest = kept[0], list(kept[1:])
    while rest:
        taken: tuple[int, ...] = (first, rest[0])
        widths = _narrowed(table, natural, taken, num_columns, 0.0)
        while len(taken) <= len(rest):
            more = (*taken, rest[len(taken) - 1])
            wider = _narrowed(table, natural, more, num_columns, 0.0)
            if wider is None:
                break
            taken, widths = more, wider
        if widths is None:
            widths = tuple(_least(table, column) if column in table.wraps else natural[column] for column in taken)
        blocks.append(_Block(taken, widths, 0.0))
        rest = rest[len(taken) - 1 :]
    return blocks or [_Block((first,), (natural[first],), 0.0)]


def rate_text(rate: float) -> str:
    """Format a rate or a duration with two digits."""
    rounded = float(f"{rate:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"


def speed_text(speed: "SpeedEstimate | None") -> str:
    """Format the speed of one stream; empty if unknown."""
    return "" if speed is None else f"about {rate_text(speed.one_stream.middle)} tokens/s"

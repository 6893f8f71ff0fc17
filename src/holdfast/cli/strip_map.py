"""Memory drawn to scale: strips like the lines of a page, read from left to right, one box for each owner; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from holdfast.cli.web_page import PALETTE, Html, tag
from holdfast.memory.sizes import format_bytes

WIDTH = 1000
ROW_HEIGHT, ROW_GAP = 20, 3
MAX_BOXES = 400
"""Most boxes of their own; the smaller ones of a group share one."""
MIN_SHARE = 1e-5
"""Of the whole: what is smaller could not be seen."""
LETTER_WIDTH = 6.4
ALWAYS = ("weights", "kv pages", "workspace")


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
    shown = {place for place in largest if parts[place].num_bytes > least}
    gathered: list[Part] = []
    for group in dict.fromkeys(part.group for part in parts):
        places = [place for place, part in enumerate(parts) if part.group == group and part.num_bytes > 0]
        small = [parts[place] for place in places if place not in shown]
        gathered += [parts[place] for place in places if place in shown]
        if len(small) == 1:
            gathered += small
        elif small:
            reason = f"the largest is {max(small, key=lambda part: part.num_bytes).name}"
            num_bytes = sum(part.num_bytes for part in small)
            gathered.append(Part(group, f"{len(small)} small ones", num_bytes, reason, small[0].look))
    return gathered


def colours(groups: Sequence[str]) -> dict[str, str]:
    """A class for each group: the same in every picture for those that every model has, the others as they come."""
    names = dict.fromkeys((*ALWAYS, *groups))
    return {group: f"c{place % len(PALETTE)}" for place, group in enumerate(names)}


def strip_map(parts: Sequence[Part], colour: dict[str, str], num_rows: int, name: str) -> Html:
    """A picture of `num_rows` strips; the width of all of them together is the whole."""
    total_bytes = sum(part.num_bytes for part in parts)
    starts = [0, *accumulate(part.num_bytes for part in parts)]
    groups = [
        tag("g", *(_box(part, start, total_bytes, num_rows) for part, start in members), class_=look)
        for look, members in groupby(zip(parts, starts, strict=False), key=lambda member: _look(member[0], colour))
    ]
    height = num_rows * (ROW_HEIGHT + ROW_GAP) - ROW_GAP
    return tag("svg", *groups, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=name)


def _look(part: Part, colour: dict[str, str]) -> str:
    return part.look if part.look in ("free", "unknown") else f"{colour[part.group]} {part.look}".strip()


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

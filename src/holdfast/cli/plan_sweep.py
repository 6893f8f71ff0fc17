"""A sweep of plans: tokens against KV format and quantization, as numbers and as a chart of blocks; no torch."""

from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from holdfast.cli.columns import aligned
from holdfast.cli.plan_table import LATER, Line
from holdfast.errors import ConfigError, MemoryPlanError, UnsupportedModelError
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.weight_schemes import UNQUANTIZED
from holdfast.runner.planning.alternatives import in_scheme, narrower_schemes
from holdfast.runner.planning.plan_fit import Wish, find_fit, settle
from holdfast.runner.planning.plan_terms import list_needs

BAR_CELLS = 40
EIGHTHS = " ▏▎▍▌▋▊▉█"


class Cell(NamedTuple):
    """One plan of a sweep."""

    kv_cache_dtype: str
    quantization: str
    """"none" leaves weights as they are."""
    kv_tokens: int
    """0 where it does not fit."""
    is_asked: bool
    runs: bool
    """An engine of this version takes it."""
    kv_protected_layers: int = 0
    """Layers whose pages are in a wider format."""


class _Pages(NamedTuple):
    """A KV format that can be planned."""

    name: str
    wish: Wish
    bytes_per_token: Fraction
    num_protected: int


def sweep(wish: Wish) -> tuple[Cell, ...]:
    """Every KV format that takes no more than the asked one, with weights as they are and in fewer bits."""
    asked, quantization = settle(wish)[1].kv_format.name, wish.config.quantization or UNQUANTIZED
    schemes = _schemes(wish, quantization)
    return tuple(
        Cell(
            pages.name,
            scheme,
            _tokens(in_scheme(pages.wish, scheme)),
            is_asked=(pages.name, scheme) == (asked, quantization),
            runs=wish.blueprint.not_runnable is None and wish.tensor_parallel_size == 1,
            kv_protected_layers=pages.num_protected,
        )
        for pages in _formats(wish, asked)
        for scheme in schemes
    )


def sweep_lines(cells: tuple[Cell, ...], target: str) -> list[Line]:
    """A bar for each plan, to one scale, by KV format."""
    most = max((cell.kv_tokens for cell in cells), default=0)
    rows, styles = [], []
    for number, cell in enumerate(cells):
        is_first = number == 0 or cells[number - 1].kv_cache_dtype != cell.kv_cache_dtype
        notes = {
            f"{cell.kv_protected_layers} layers wider": cell.kv_protected_layers and is_first,
            "asked": cell.is_asked,
            LATER: not cell.runs,
        }
        note = ", ".join(words for words, is_so in notes.items() if is_so)
        tokens = f"{cell.kv_tokens:,}" if cell.kv_tokens else "does not fit"
        name = cell.kv_cache_dtype if is_first else ""
        rows.append((name, cell.quantization, bar(cell.kv_tokens, most), tokens, note))
        styles.append("bold" if cell.is_asked else "" if cell.runs else "dim")
    heading, *lines = aligned([("KV pages", "weights", "", "tokens", ""), *rows], right=(3,))
    return [
        Line(f"KV tokens on {target}, by format of pages and weights", "bold"),
        Line(heading, is_cut=True),
        *(Line(line, style, is_cut=True) for line, style in zip(lines, styles, strict=True)),
    ]


def bar(value: int, most: int) -> str:
    """Eighths of a cell count, so that small differences show; whatever is not nothing is visible."""
    eighths = max(round(8 * BAR_CELLS * value / most), 1) if value else 0
    return (EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(BAR_CELLS)


def _formats(wish: Wish, asked: str) -> list[_Pages]:
    """The asked one first, then fewer and fewer bytes; of plain ones one for each number of bytes."""
    first = _pages(wish, asked)
    found = {} if first is None else {(first.bytes_per_token, KV_FORMATS[asked].is_coded and asked): first}
    for kv_format in KV_FORMATS.values():
        pages = _pages(wish, kv_format.name)
        if pages is not None and first is not None and pages.bytes_per_token <= first.bytes_per_token:
            found.setdefault((pages.bytes_per_token, kv_format.is_coded and kv_format.name), pages)
    return sorted(found.values(), key=lambda pages: -pages.bytes_per_token)


def _pages(wish: Wish, name: str) -> _Pages | None:
    """The same wish with pages in that format; None where it contradicts another option, or where no attention reads it."""
    moved = wish._replace(config=replace(wish.config, kv_cache_dtype=name))
    try:
        layout, resolved = settle(moved)
        list_needs(layout, resolved)
    except (ConfigError, UnsupportedModelError):
        return None
    return _Pages(name, moved, layout.bytes_per_token(resolved), len(resolved.protected.layers))


def _schemes(wish: Wish, asked: str) -> list[str]:
    """Weights as they are, and the first scheme of each number of bits that can be had; the asked one in any case."""
    return list(dict.fromkeys((UNQUANTIZED, *narrower_schemes(in_scheme(wish, UNQUANTIZED)), asked)))


def _tokens(wish: Wish) -> int:
    try:
        return find_fit(wish).kv_tokens
    except (ConfigError, MemoryPlanError):
        return 0

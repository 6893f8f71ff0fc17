"""A sweep of plans: tokens against KV format and quantization, as numbers and as a chart of blocks; no torch."""

from fractions import Fraction
from typing import NamedTuple

from holdfast.cli.columns import aligned
from holdfast.cli.plan_table import LATER, Line
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.models.blueprint_weights import QUANTIZATIONS, UNQUANTIZED
from holdfast.quant.formats import KV_FORMATS, PLANNED_KV_FORMATS, KVFormat
from holdfast.runner.plan_fit import Wish, find_fit, settle

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
    """An engine of this version takes both formats."""


def sweep(wish: Wish) -> tuple[Cell, ...]:
    """Every KV format that takes no more than the asked one, with weights as they are and in fewer bits."""
    asked = settle(wish)[1].kv_format
    quantization = wish.quantization or UNQUANTIZED
    return tuple(
        Cell(
            kv_format.name,
            scheme,
            _tokens(wish._replace(kv_format=kv_format, quantization=scheme)),
            is_asked=(kv_format.name, scheme) == (asked.name, quantization),
            runs=kv_format.name in KV_FORMATS and scheme == UNQUANTIZED and wish.blueprint.not_runnable is None,
        )
        for kv_format in _formats(wish, asked)
        for scheme in _schemes(quantization)
    )


def sweep_lines(cells: tuple[Cell, ...], target: str) -> list[Line]:
    """A bar for each plan, to one scale, by KV format."""
    most = max((cell.kv_tokens for cell in cells), default=0)
    rows, styles = [], []
    for number, cell in enumerate(cells):
        is_first = number == 0 or cells[number - 1].kv_cache_dtype != cell.kv_cache_dtype
        note = ", ".join((*(("asked",) if cell.is_asked else ()), *(() if cell.runs else (LATER,))))
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


def _formats(wish: Wish, asked: KVFormat) -> list[KVFormat]:
    """One for each number of bytes that a token takes, the asked one first, then fewer and fewer."""
    most = _token_bytes(wish, asked)
    found = {most: asked}
    for kv_format in (*KV_FORMATS.values(), *PLANNED_KV_FORMATS.values()):
        if wish.blueprint.anatomy.unsupported_format(kv_format) is None:
            found.setdefault(_token_bytes(wish, kv_format), kv_format)
    return [found[size] for size in sorted(found, reverse=True) if size <= most]


def _token_bytes(wish: Wish, kv_format: KVFormat) -> Fraction:
    return wish.blueprint.kv_bytes_per_token(kv_format, wish.tensor_parallel_size)


def _schemes(asked: str) -> list[str]:
    """Weights as they are, and the first scheme of each number of bits; the asked one in any case."""
    by_bits = {scheme.bits: name for name, scheme in reversed(tuple(QUANTIZATIONS.items()))}
    return list(dict.fromkeys((UNQUANTIZED, *(by_bits[bits] for bits in sorted(by_bits, reverse=True)), asked)))


def _tokens(wish: Wish) -> int:
    try:
        return find_fit(wish).kv_tokens
    except (ConfigError, MemoryPlanError):
        return 0

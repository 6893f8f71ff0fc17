"""Text for a terminal: columns, bars, lines, and the tables of memory, a plan, its sweep, an evaluation; no torch."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import gt
from typing import TYPE_CHECKING, NamedTuple, TextIO

from holdfast.cli.layout import EIGHTHS, FULL, LIGHT, OTHER, SMALLEST, Line, Table, fitted, table_lines
from holdfast.errors import PlanChange, PlanTable
from holdfast.memory.on_disk import DiskAccount
from holdfast.memory.planner import PHASES
from holdfast.memory.report import GroupAccount, MemoryReport, MemoryRow, RankMemory
from holdfast.memory.sizes import format_bytes

if TYPE_CHECKING:
    from holdfast.cli.plan_view import Cell, OwnerRow, PlanView, RankRow, Start
    from holdfast.eval.kv_quality import Quality
    from holdfast.planning.alternatives import Alternative
    from holdfast.planning.speed import Range, SpeedEstimate

NOTHING = "-"
LATER = "not in this version"
COSTS = {
    "lever": "costs no quality",
    "context": "another context",
    "format": "changes answers a little",
    "weights": "changes answers a little",
    "ranks": "more of this GPU",
    "gpu": "another GPU",
}
"""What stands over changes of a kind."""
VERDICT_STYLES = {"fits": "bold green", "does_not_fit": "bold", "cannot_start": "bold"}
WORTH = 1.01
"""Tokens: a change that gives less than one part in a hundred more is not worth a line."""
WORTH_SPEED = 1.1
"""Speed, which is an estimate: likewise."""
LEAST_NOTE = 12
UNKNOWN_COLUMNS = 80
"""Where a terminal says that it has none, rich would print nothing."""
LEAST_COLUMNS = 40
"""A terminal that is narrower gets lines that it breaks itself."""
ASCII = str.maketrans({"█": "#", "░": ".", "→": ">", "·": "-", "…": "~"} | dict.fromkeys("▏▎▍▌▋▊▉", "#"))
BAR_CELLS = 20
MEMORY_HEADINGS = ("owner", "planned", "held", "", "why")
SERVE = "serve"
UNACCOUNTED = "unaccounted"
SWEEP_CELLS = 40
FIGURES = (
    "against 16 bit",
    "perplexity",
    "change",
    "mean KL",
    "p99 KL",
    "same top-1",
    "tokens/s",
)
NOT_FINITE = "not finite"


def cells_of(value: int, whole: int, num_cells: int) -> int:
    """Cells of a bar for a part of the whole."""
    return round(num_cells * value / max(whole, 1))


def _table(
    rows: Sequence[tuple[str, ...]], right: tuple[int, ...], bar: int | None = None, wraps: tuple[int, ...] = ()
) -> list[Line]:
    """Cells in columns, the heading first."""
    return table_lines(Table(tuple(rows), right, bar, wraps), styles=("bold",))


def show(lines: Sequence[Line]) -> None:
    """Lines on stdout: made to fit a terminal and with colour there, all as they are elsewhere."""
    _show(lines, sys.stdout)


def show_beside(lines: Sequence[Line]) -> None:
    """The same on stderr, beside an answer."""
    _show(lines, sys.stderr)


def _show(lines: Sequence[Line], stream: TextIO | None) -> None:
    if stream is None:
        return
    if not stream.isatty():
        stream.write(_encodable("".join(f"{line.text}\n" for line in lines), stream))
        stream.flush()
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    console.width = console.width or UNKNOWN_COLUMNS
    for line in fitted(lines, max(console.width, LEAST_COLUMNS)):
        text = Text(_encodable(line.text, stream), style=line.style)
        text.highlight_regex("[█▏▎▍▌▋▊▉]+", "cyan")
        text.highlight_regex("░+", "blue")
        console.print(text, soft_wrap=True)


def _encodable(text: str, stream: TextIO) -> str:
    """Blocks as plain signs where a stream has no better ones."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def memory_lines(report: MemoryReport, is_compact: bool = False) -> list[Line]:
    """The table, its sum, and what it means in tokens; a compact one leaves out why."""
    rows = [_memory_cells(row, report.planned_bytes) for row in report.rows]
    rows.append(
        (
            "total",
            format_bytes(report.planned_bytes),
            format_bytes(report.held_bytes),
            "",
            f"of {format_bytes(report.budget_bytes)}: {report.budget_reason}",
        )
    )
    rows += _measured_rows(report)
    concurrency = report.kv_tokens / report.max_model_len
    num_columns = len(MEMORY_HEADINGS) - 1 if is_compact else len(MEMORY_HEADINGS)
    meaning = (
        f"KV cache size: {report.kv_tokens:,} tokens ({format_bytes(report.kv_bytes_per_token)} each), "
        f"Maximum concurrency for {report.max_model_len:,} tokens per request: {concurrency:.2f}x"
    )
    cells = [row[:num_columns] for row in (MEMORY_HEADINGS, *rows)]
    lines = [*_table(cells, right=(1, 2), bar=3, wraps=() if is_compact else (4,)), Line(meaning)]
    lines += [] if is_compact else group_lines(report.kv_groups)
    lines += [Line(_rank_words(rank)) for rank in report.ranks]
    return [*lines, *([Line(report.context_note)] if report.context_note else []), *disk_lines(report.disk)]


def _rank_words(rank: RankMemory) -> str:
    """Another rank than the one of the table, on one line."""
    words = f"rank {rank.rank} ({rank.device}): planned {format_bytes(rank.planned_bytes)}, holds {format_bytes(rank.held_bytes)}"
    return words if rank.measured_bytes is None else f"{words}, {format_bytes(rank.measured_bytes)} as its device says"


def refusal_lines(table: PlanTable, changes: Sequence[PlanChange] = ()) -> list[Line]:
    """What each owner would need in the phase that does not fit, how much is short, and what would fit."""
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
    lines = _table([("owner", "needed", "", "why"), *rows, *sums], right=(1,), bar=2, wraps=(3,))
    if not changes:
        return lines
    offered = [
        (
            change.change,
            change.typed,
            f"{change.kv_tokens:,} tokens",
            _request_words(change.kv_tokens, change.max_model_len),
        )
        for change in changes
    ]
    title = "what would fit, what costs least first" if len(changes) > 1 else "what would fit"
    return [*lines, Line(""), *_section(title, table_lines(Table(tuple(offered), right=(2,), wraps=(1, 0))))[1:]]


def _request_words(kv_tokens: int, max_model_len: int) -> str:
    return f"{kv_tokens / max(max_model_len, 1):.2f}x of {max_model_len:,}"


def held_words(row: MemoryRow) -> str:
    """What an owner holds; where it has no tensors of its own, why not."""
    if row.held_bytes is not None:
        return format_bytes(row.held_bytes)
    return "as needed" if SERVE in row.phases else f"only to {' and '.join(row.phases)}"


def _memory_cells(row: MemoryRow, total_bytes: int) -> tuple[str, ...]:
    bar = _memory_bar(row, total_bytes) if SERVE in row.phases else ""
    return row.owner, format_bytes(row.planned_bytes), held_words(row), bar, row.reason


def _measured_rows(report: MemoryReport) -> list[tuple[str, ...]]:
    """What the device says, where it was asked, and what no owner explains of it."""
    if report.measured_bytes is None or report.unaccounted_bytes is None:
        return []
    return [
        (UNACCOUNTED, "", format_bytes(report.unaccounted_bytes), "", "measured, and held by no owner"),
        ("measured", "", format_bytes(report.measured_bytes), "", "what the device says"),
    ]


def _memory_bar(row: MemoryRow, total_bytes: int) -> str:
    """As long as the share of the plan; filled as far as it is held."""
    num_cells = cells_of(row.planned_bytes, total_bytes, BAR_CELLS)
    num_held = min(num_cells, cells_of(row.held_bytes or 0, total_bytes, BAR_CELLS))
    return FULL * num_held + LIGHT * (num_cells - num_held)


def plan_lines(view: "PlanView", has_all_owners: bool = False) -> list[Line]:
    """Everything that a person is told: the answer, how to start it, what else would fit, then who takes what and why."""
    return [
        Line(view.verdict, VERDICT_STYLES[view.status]),
        Line(view.asked),
        *(Line(reason) for reason in view.not_in_this_version),
        *_start_lines(view),
        *_section("speed, estimated", speed_lines(view.speed)),
        *_section("what else would fit" if view.fits else "what would fit", alternative_lines(view)),
        Line(""),
        *owner_lines(view, has_all_owners),
        Line(f"budget {format_bytes(view.budget_bytes)}: {view.budget_reason}"),
        *disk_lines(view.disk),
        Line(""),
        Line(view.kv_words),
        *([Line(view.context_note)] if view.context_note else []),
        *_section("ranks: the plan above is of the one with the fewest pages", rank_lines(view.ranks)),
        *_section("pages of one longest sequence, by cache group", group_lines(view.groups)),
        *_section("chosen", _choices(view)),
    ]


def rate_words(rate: float) -> str:
    """A number of tokens a second, or of seconds, in two digits."""
    rounded = float(f"{rate:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"


def speed_words(speed: "SpeedEstimate | None") -> str:
    """The speed of one stream, in words; empty if it is unknown."""
    return "" if speed is None else f"about {rate_words(speed.one_stream.middle)} tokens/s"


def start_words(start: "Start") -> str:
    """What a command is for, and what it gives."""
    words = f"{start.title}: {start.kv_tokens:,} tokens"
    return words if start.speed is None else f"{words}, {speed_words(start.speed)}"


def _start_lines(view: "PlanView") -> list[Line]:
    """Each command alone on its line, below what it gives."""
    if not view.starts:
        words = "nothing that can be changed makes it fit: take a smaller model"
        return [] if view.fits or view.blocked else [Line(""), Line(words)]
    lines = [Line("")]
    for start in view.starts:
        lines += [Line(start_words(start), "bold"), Line(f"  {start.command}", indent=2, is_command=True)]
    return lines


def speed_rows(speed: "SpeedEstimate") -> tuple[tuple[str, str], ...]:
    """What is estimated, and between which bounds."""
    streams = f"{speed.batch_size:,} streams"
    return (
        ("one stream", f"{range_words(speed.one_stream)} tokens/s"),
        *(((streams, f"{range_words(speed.batch)} tokens/s together"),) if speed.batch_size > 1 else ()),
        ("first token", _seconds_words(speed.first_token_seconds)),
    )


def _seconds_words(bounds: "Range") -> str:
    """Milliseconds below a second."""
    if bounds.high >= 1:
        return f"{range_words(bounds)} s"
    return f"{range_words(bounds._replace(low=1e3 * bounds.low, high=1e3 * bounds.high))} ms"


def range_words(bounds: "Range") -> str:
    """Two bounds in two digits each; one number if they are the same then."""
    low, high = rate_words(bounds.low), rate_words(bounds.high)
    return low if low == high else f"{low} to {high}"


def speed_lines(speed: "SpeedEstimate | None") -> list[Line]:
    """The estimate with its assumption; nothing if nothing is known of the device's speed."""
    return [] if speed is None else [*table_lines(Table(speed_rows(speed))), Line(speed.assumption, "dim")]


def disk_lines(account: DiskAccount | None) -> list[Line]:
    """What a GGUF file takes on disk, what its weights take in memory, and why."""
    return [] if account is None else [Line(line) for line in account.lines]


def owner_lines(view: "PlanView", has_all: bool = True) -> list[Line]:
    """Bytes of each owner in each phase; the bar is its share of the budget, light where it is gone while serving.

    All owners have a reason each; without them small owners are one row, and no row has a reason.
    """
    whole = max(view.budget_bytes, *view.phase_bytes.values(), 1)
    shown = view.rows if has_all else view.folded_rows
    rows = [
        (row.owner, *(_size_cell(row.phase_bytes.get(phase)) for phase in PHASES), _phase_bar(row, whole), row.reason)
        for row in shown
    ]
    left = {phase: view.budget_bytes - num_bytes for phase, num_bytes in view.phase_bytes.items()}
    sums = [
        ("total", *(_size_cell(view.phase_bytes[phase]) for phase in PHASES), "", ""),
        ("left" if view.fits else "left or short", *(_size_cell(left[phase]) for phase in PHASES), "", "of the budget"),
    ]
    cells = [("owner", *PHASES, "", "why"), *rows, *sums]
    if has_all:
        *lines, last = _table(cells, right=(1, 2, 3), bar=4, wraps=(5,))
    else:
        *lines, last = _table([row[:-1] for row in cells], right=(1, 2, 3), bar=4)
    return [*lines, last if view.fits else replace(last, style="bold")]


GROUP_HEADING = ("cache group", "layers", "tokens a page", "in prefill", "in decode", "padding of a page")


def group_rows(groups: Sequence[GroupAccount]) -> list[tuple[str, ...]]:
    """Layers that share a page table, and what a page is to them."""
    return [
        (
            group.name,
            str(group.num_layers),
            str(group.page_tokens),
            f"{group.prompt_pages:,}",
            f"{group.decode_pages:,}",
            f"{format_bytes(group.padding_bytes)}, {100 * group.padding_share:.1f}%",
        )
        for group in groups
    ]


def group_lines(groups: Sequence[GroupAccount]) -> list[Line]:
    """The same as lines; nothing where all layers keep all tokens."""
    return _table([GROUP_HEADING, *group_rows(groups)], right=(1, 2, 3, 4, 5)) if groups else []


NUM_DIFFERENCES = 4
"""Owners that are named where ranks differ; the largest differences first."""


def rank_lines(rows: "Sequence[RankRow]") -> list[Line]:
    """Every rank, neighbours that are alike on one line; nothing where there is one."""
    if not rows:
        return []
    groups: list[list[RankRow]] = []
    for row in rows:
        if groups and groups[-1][0]._replace(rank=0) == row._replace(rank=0):
            groups[-1].append(row)
        else:
            groups.append([row])
    cells = [
        (
            str(own[0].rank) if len(own) == 1 else f"{own[0].rank} to {own[-1].rank}",
            "all" if own[0].layers is None else f"{own[0].layers[0]} to {own[0].layers[1] - 1}",
            format_bytes(own[0].total_bytes),
            f"{own[0].own_pages:,}",
            "this is the one" if own[0].is_worst else _differences(own[0].differs),
        )
        for own in groups
    ]
    heading = ("rank", "layers", "serving", "pages by itself", "differs by")
    return _table([heading, *cells], right=(2, 3), wraps=(4,))


def _differences(differs: "Mapping[str, int]") -> str:
    """The largest first."""
    ordered = sorted(differs.items(), key=lambda item: -abs(item[1]))
    words = [f"{owner} {'-' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}" for owner, num_bytes in ordered]
    more = f", and {len(words) - NUM_DIFFERENCES} more" if len(words) > NUM_DIFFERENCES else ""
    return (", ".join(words[:NUM_DIFFERENCES]) + more) or "nothing"


def alternative_lines(view: "PlanView") -> list[Line]:
    """Changes by what they cost, the least first; the smallest that fits is marked."""
    listed = worthwhile(view)
    rows = [
        (
            f"{SMALLEST if item.is_smallest else OTHER} {item.change}",
            f"{item.kv_tokens:,} tokens",
            "" if item.speed is None else f"{rate_words(item.speed.one_stream.middle)} tokens/s",
            concurrency_words(item, view.max_model_len),
        )
        for item in listed
    ]
    styles = ["green" if item.is_smallest else "" for item in listed]
    table = Table(tuple(rows), right=(1, 2), wraps=(0, 3))
    if not any(item.speed for item in listed):
        table = Table(tuple((*row[:2], row[3]) for row in rows), right=(1,), wraps=(0, 2))
    drawn = table_lines(table, styles)
    lines: list[Line] = []
    for title, group in groupby(zip(listed, drawn, strict=True), key=lambda pair: COSTS[pair[0].kind]):
        lines += [Line(title, "italic"), *(line for _, line in group)]
    num_others = len(view.alternatives) - len(listed)
    if num_others:
        are = ("change", "is", "gives") if num_others == 1 else ("changes", "are", "give")
        words = f"{num_others} other {are[0]} {are[1]} not enough alone, or {are[2]} no more; --json lists them"
        lines.append(Line(words, "dim"))
    return lines


def worthwhile(view: "PlanView") -> "list[Alternative]":
    """Changes that fit, and that give more than the plan, or than a change of the same option before them.

    Another GPU may give less: it may be cheaper.
    """
    before: dict[str | None, list[tuple[float, ...]]] = {}
    found = []
    for item in view.alternatives:
        known = before.setdefault(item.option, [])
        if item.option is None or item.kind in ("gpu", "context"):
            known.clear()
        bounds = [_worth(view.kv_tokens, view.max_model_len, view.speed)] * view.fits if item.kind != "gpu" else []
        gives = (item.kv_tokens, item.max_model_len, _rate(item.speed))
        if item.fits and all(any(map(gt, gives, bound)) for bound in (*bounds, *known)):
            found.append(item)
            known.append(_worth(item.kv_tokens, item.max_model_len, item.speed))
    return found


def _worth(kv_tokens: int, max_model_len: int, speed: "SpeedEstimate | None") -> tuple[float, ...]:
    """Tokens, context and tokens/s, each as many as another change must exceed."""
    return WORTH * kv_tokens, max_model_len, WORTH_SPEED * _rate(speed)


def _rate(speed: "SpeedEstimate | None") -> float:
    return 0.0 if speed is None else speed.one_stream.middle


def concurrency_words(item: "Alternative", max_model_len: int) -> str:
    """Requests at once, and of which length where a change brings another one with it."""
    words = f"{item.max_concurrency:.2f}x"
    return words if item.max_model_len == max_model_len else f"{words} of {item.max_model_len:,}"


def _size_cell(num_bytes: int | None) -> str:
    return NOTHING if num_bytes is None else format_bytes(num_bytes)


def _phase_bar(row: "OwnerRow", whole: int) -> str:
    serving = cells_of(row.phase_bytes.get("serve", 0), whole, BAR_CELLS)
    return FULL * serving + LIGHT * (cells_of(row.peak_bytes, whole, BAR_CELLS) - serving)


def _choices(view: "PlanView") -> list[Line]:
    if not view.choices:
        return []
    # The note on the context says it already, with what lifts it; if even one token does not fit, nothing was chosen.
    told = "max_model_len" if view.context_note or (not view.fits and view.max_model_len == 1) else ""
    rows = tuple((choice.name, choice.value, choice.reason) for choice in view.choices if choice.name != told)
    return table_lines(Table(rows, wraps=(2,)))


def _section(title: str, lines: list[Line]) -> list[Line]:
    if not lines:
        return []
    indented = (replace(line, text=f"  {line.text}".rstrip(), indent=line.indent + 2) for line in lines)
    return [Line(""), Line(title, "bold"), *indented]


def sweep_lines(cells: "Sequence[Cell]", target: str) -> list[Line]:
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
        rows.append((name, cell.quantization, sweep_bar(cell.kv_tokens, most), tokens, note))
        styles.append("bold" if cell.is_asked else "" if cell.runs else "dim")
    table = Table((("KV pages", "weights", "", "tokens", ""), *rows), (3,), bar=2, wraps=(4,), comfortable=LEAST_NOTE)
    return [
        Line(f"KV tokens on {target}, by format of pages and weights", "bold"),
        *table_lines(table, ("", *styles)),
    ]


def sweep_bar(value: int, most: int) -> str:
    """Eighths of a cell count, so that small differences show; whatever is not nothing is visible."""
    eighths = max(round(8 * SWEEP_CELLS * value / most), 1) if value else 0
    return (EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(SWEEP_CELLS)


class Subject(NamedTuple):
    """What is compared, in the words of a table, a record and a page."""

    title: str
    row: str
    """What one row is."""
    size: str
    """The heading over its bytes."""
    size_words: str
    """What these bytes are of."""
    against: str
    """What a distribution is compared with; {} is the reference."""
    section: str
    """Where the documents show such records."""
    size_key: str
    """What the bytes are called in a record."""


KV_PAGES = Subject(
    "KV formats",
    "format",
    "bytes/token",
    "bytes of a token, all layers",
    "that over {} pages",
    "kv-quality",
    "bytes_per_token",
)
WEIGHTS = Subject(
    "Weight schemes",
    "scheme",
    "bytes",
    "bytes of all weights",
    "that of weights in {}",
    "weight-quality",
    "weight_bytes",
)


class EvalView(NamedTuple):
    """What was measured, where, and on what."""

    model: str
    settings: str
    """Type and device."""
    text: str
    """The name of the text."""
    window: int
    num_windows: int
    plain_bytes: float
    """What a token, or what all weights take in half precision."""
    qualities: "Sequence[Quality]"
    """The reference first."""
    subject: Subject = KV_PAGES

    @property
    def title(self) -> str:
        return f"{self.subject.title} of {self.model}"

    @property
    def asked(self) -> str:
        """What was run, in one line."""
        windows = f"{self.num_windows} windows" if self.num_windows > 1 else "one window"
        return (
            f"{self.model}, {self.settings}: {windows} of {self.window:,} tokens of {self.text}, "
            f"{self.qualities[0].num_predictions:,} predictions"
        )


def quality_lines(view: EvalView) -> list[Line]:
    """The table, and what its columns mean."""
    names = headings(view)
    return [
        Line(view.asked, "bold"),
        Line(""),
        *_table([names, *quality_cells(view)], right=tuple(range(1, len(names)))),
        Line(""),
        Line(meaning(view), "dim"),
        *(Line(words, "dim") for words in note_words(view)),
        *(Line(words, "bold red") for words in broken_words(view)),
    ]


def headings(view: EvalView) -> tuple[str, ...]:
    """Over every column."""
    return (view.subject.row, view.subject.size, *FIGURES)


def quality_cells(view: EvalView) -> list[tuple[str, ...]]:
    """A row for each format or scheme; of the reference only what does not compare it with itself."""
    reference = view.qualities[0]
    rows = []
    for place, quality in enumerate(view.qualities):
        compared = (
            change_words(quality.perplexity, reference.perplexity),
            kl_words(quality.mean_kl),
            kl_words(quality.p99_kl),
            f"{quality.agreement:.2%}",
        )
        rows.append(
            (
                quality.name,
                f"{quality.size_bytes:,.10g}",
                f"{view.plain_bytes / quality.size_bytes:.2f}x",
                number_words(quality.perplexity, ".4f"),
                *(compared if place else ("", "", "", "")),
                f"{(quality.num_predictions + view.num_windows) / max(quality.seconds, 1e-9):.1f}",
            )
        )
    return rows


def meaning(view: EvalView) -> str:
    """How to read the table."""
    return (
        f"KL: divergence of the next token's distribution from {view.subject.against.format(view.qualities[0].name)}, "
        "in nats; "
        "same top-1: how often the most likely token is the same"
    )


def note_words(view: EvalView) -> list[str]:
    """What there is to know of some, and of whom."""
    names: dict[str, list[str]] = {}
    for quality in view.qualities:
        if quality.note:
            names.setdefault(quality.note, []).append(quality.name)
    return [f"{note}: {', '.join(own)}" for note, own in names.items()]


def broken_words(view: EvalView) -> list[str]:
    """A sentence for each that computed something else than numbers."""
    return [
        f"{quality.name}: {quality.num_broken:,} of {quality.num_predictions:,} predictions are no numbers"
        for quality in view.qualities
        if quality.num_broken
    ]


def kl_words(number: float) -> str:
    """A divergence, which may be anything from rounding to nonsense."""
    return "0" if number == 0 else number_words(number, ".3g")


def number_words(number: float, form: str) -> str:
    """A number, unless it is none."""
    return format(number, form) if math.isfinite(number) else NOT_FINITE


def change_words(number: float, base: float) -> str:
    """How much more a number is than another, in percent."""
    return f"{100 * (number / base - 1):+.3f}%" if math.isfinite(number) else NOT_FINITE

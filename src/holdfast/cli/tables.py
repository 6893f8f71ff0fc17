"""Lines for a terminal: the tables of memory, a refusal, a plan, its sweep and an evaluation; no torch."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import gt
from typing import TYPE_CHECKING, NamedTuple, TextIO

from holdfast.cli.layout import (
    EIGHTHS,
    FULL,
    LIGHT,
    OTHER,
    SMALLEST,
    Line,
    Table,
    fitted,
    rate_text,
    speed_text,
    table_lines,
)
from holdfast.cli.options import read_data
from holdfast.errors import PlanChange, PlanTable
from holdfast.memory.on_disk import DiskAccount
from holdfast.memory.planner import PHASES
from holdfast.memory.report import GroupAccount, MemoryReport, MemoryRow, RankMemory
from holdfast.memory.sizes import format_bytes

if TYPE_CHECKING:
    from holdfast.cli.plan_view import Cell, PlanView, RankRow, Start
    from holdfast.eval.answers import Answers
    from holdfast.eval.kv_quality import Behaviour, Result
    from holdfast.eval.quality import Quality
    from holdfast.planning.alternatives import Alternative
    from holdfast.planning.speed import Range, SpeedEstimate

LATER = "not in this version"
COSTS = {
    "lever": "costs no quality",
    "context": "another context",
    "format": "changes answers a little",
    "weights": "changes answers a little",
    "ranks": "more of this GPU",
    "gpu": "another GPU",
}
"""Headings over changes of a kind."""
VERDICT_STYLES = {"fits": "bold green", "does_not_fit": "bold", "cannot_start": "bold"}
WORTH = 1.01
"""A listed change gives at least 1 % more tokens ..."""
WORTH_SPEED = 1.1
"""... or 10 % more speed, which is an estimate."""
LEAST_NOTE = 12
UNKNOWN_COLUMNS = 80
"""Width to use if a terminal reports 0, at which rich prints nothing."""
LEAST_COLUMNS = 40
"""Minimum layout width; a narrower terminal breaks lines itself."""
ASCII = str.maketrans({"█": "#", "░": ".", "→": ">", "·": "-", "…": "~", "±": "+-"} | dict.fromkeys("▏▎▍▌▋▊▉", "#"))
BAR_CELLS = 20
MEMORY_HEADINGS = ("owner", "planned", "held", "", "why")
GROUP_HEADING = ("cache group", "layers", "tokens a page", "in prefill", "in decode", "padding of a page")
SERVE = "serve"
UNACCOUNTED = "unaccounted"
SWEEP_CELLS = 40
NUM_DIFFERENCES = 4
"""Maximum owners per rank line, largest differences first."""
FIGURES = (
    "against 16 bit",
    "perplexity",
    "change",
    "mean KL",
    "p99 KL",
    "p99.9 KL",
    "max KL",
    "same top-1",
    "tokens/s",
)
ANSWER_FIGURES = ("same tokens", "JSON", "tool calls")
NOT_FINITE = "not finite"


def cells_of(value: int, whole: int, num_cells: int) -> int:
    """Return a bar's length in cells, proportional to value / whole."""
    return round(num_cells * value / max(whole, 1))


def _table(
    rows: Sequence[tuple[str, ...]], right: tuple[int, ...], bar: int | None = None, wraps: tuple[int, ...] = ()
) -> list[Line]:
    """Make a table with a bold heading."""
    return table_lines(Table(tuple(rows), right, bar, wraps), styles=("bold",))


def show(lines: Sequence[Line], stream: TextIO | None = None) -> None:
    """Print lines to stdout: fitted and coloured on a terminal, unchanged elsewhere."""
    stream = sys.stdout if stream is None else stream
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


def show_beside(lines: Sequence[Line]) -> None:
    """Print lines to stderr, because stdout has an answer."""
    if sys.stderr is not None:
        show(lines, sys.stderr)


def _encodable(text: str, stream: TextIO) -> str:
    """Replace blocks by ASCII if the stream cannot encode them."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def memory_lines(report: MemoryReport, is_compact: bool = False) -> list[Line]:
    """Print memory by owner, the total, and the tokens it holds; a compact table omits reasons."""
    budget = f"of {format_bytes(report.budget_bytes)}: {report.budget_reason}"
    rows = [
        MEMORY_HEADINGS,
        *(_memory_cells(row, report.planned_bytes) for row in report.rows),
        ("total", format_bytes(report.planned_bytes), format_bytes(report.held_bytes), "", budget),
    ]
    if report.measured_bytes is not None and report.unaccounted_bytes is not None:
        unknown = format_bytes(report.unaccounted_bytes)
        rows.append((UNACCOUNTED, "", unknown, "", "measured, and held by no owner"))
        rows.append(("measured", "", format_bytes(report.measured_bytes), "", "as the device reports"))
    meaning = (
        f"KV cache size: {report.kv_tokens:,} tokens ({format_bytes(report.kv_bytes_per_token)} each), "
        f"Maximum concurrency for {report.max_model_len:,} tokens per request: "
        f"{report.kv_tokens / report.max_model_len:.2f}x"
    )
    cells = [row[:-1] for row in rows] if is_compact else rows
    lines = [*_table(cells, right=(1, 2), bar=3, wraps=() if is_compact else (4,)), Line(meaning)]
    lines += [] if is_compact else group_lines(report.kv_groups)
    lines += [Line(_rank_line(rank)) for rank in report.ranks]
    return [*lines, *([Line(report.context_note)] if report.context_note else []), *disk_lines(report.disk)]


def _rank_line(rank: RankMemory) -> str:
    line = f"rank {rank.rank} ({rank.device}): planned {format_bytes(rank.planned_bytes)}, holds {format_bytes(rank.held_bytes)}"
    return line if rank.measured_bytes is None else f"{line}, {format_bytes(rank.measured_bytes)} measured"


def refusal_lines(table: PlanTable, changes: Sequence[PlanChange] = ()) -> list[Line]:
    """Print each owner's bytes in the phase that does not fit, the shortfall, and changes that fit."""
    rows = [
        (row.owner, format_bytes(row.num_bytes), _bar(row.num_bytes, row.num_bytes, table.needed_bytes), row.reason)
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
    offered = tuple(
        (
            change.change,
            change.typed,
            f"{change.kv_tokens:,} tokens",
            f"{change.kv_tokens / max(change.max_model_len, 1):.2f}x of {change.max_model_len:,}",
        )
        for change in changes
    )
    title = "what would fit, what costs least first" if len(changes) > 1 else "what would fit"
    return [*lines, *_section(title, table_lines(Table(offered, right=(2,), wraps=(1, 0))))]


def held_text(row: MemoryRow) -> str:
    """Return an owner's held bytes, or why it has no tensors now."""
    if row.held_bytes is not None:
        return format_bytes(row.held_bytes)
    return "as needed" if SERVE in row.phases else f"only to {' and '.join(row.phases)}"


def _memory_cells(row: MemoryRow, total_bytes: int) -> tuple[str, ...]:
    bar = ""
    if SERVE in row.phases:
        bar = _bar(min(row.planned_bytes, row.held_bytes or 0), row.planned_bytes, total_bytes)
    return row.owner, format_bytes(row.planned_bytes), held_text(row), bar, row.reason


def _bar(filled: int, value: int, whole: int) -> str:
    """Draw a bar to scale; cells after `filled` are light."""
    num_filled = cells_of(filled, whole, BAR_CELLS)
    return FULL * num_filled + LIGHT * (cells_of(value, whole, BAR_CELLS) - num_filled)


def plan_lines(view: "PlanView", has_all_owners: bool = False) -> list[Line]:
    """Print a plan: verdict, start commands, alternatives that fit, then memory by owner with reasons."""
    return [
        Line(view.verdict, VERDICT_STYLES[view.status]),
        Line(view.summary),
        *(Line(reason) for reason in view.not_in_this_version),
        *_start_lines(view),
        *_section("speed, estimated", speed_lines(view.speed)),
        *_section("what else would fit" if view.fits else "what would fit", alternative_lines(view)),
        Line(""),
        *owner_lines(view, has_all_owners),
        Line(f"budget {format_bytes(view.budget_bytes)}: {view.budget_reason}"),
        *disk_lines(view.disk),
        Line(""),
        Line(view.kv_text),
        *([Line(view.context_note)] if view.context_note else []),
        *_section("ranks: the plan above is of the one with the fewest pages", rank_lines(view.ranks)),
        *_section("pages of one longest sequence, by cache group", group_lines(view.groups)),
        *_section("chosen", _choices(view)),
    ]


def start_text(start: "Start") -> str:
    """Describe a command's purpose and what it gives."""
    text = f"{start.title}: {start.kv_tokens:,} tokens"
    return text if start.speed is None else f"{text}, {speed_text(start.speed)}"


def _start_lines(view: "PlanView") -> list[Line]:
    if not view.starts:
        text = "no change makes it fit: use a smaller model"
        return [] if view.fits or view.blocked else [Line(""), Line(text)]
    lines = [Line("")]
    for start in view.starts:
        lines += [Line(start_text(start), "bold"), Line(f"  {start.command}", indent=2, is_command=True)]
    return lines


def speed_rows(speed: "SpeedEstimate") -> tuple[tuple[str, str], ...]:
    """List the estimates with their bounds."""
    streams = f"{speed.batch_size:,} streams"
    first, unit = speed.first_token_seconds, "s"
    if first.high < 1:
        first, unit = first._replace(low=1e3 * first.low, high=1e3 * first.high), "ms"
    return (
        ("one stream", f"{range_text(speed.one_stream)} tokens/s"),
        *(((streams, f"{range_text(speed.batch)} tokens/s together"),) if speed.batch_size > 1 else ()),
        ("first token", f"{range_text(first)} {unit}"),
    )


def range_text(bounds: "Range") -> str:
    """Format two bounds; one number if both round to it."""
    low, high = rate_text(bounds.low), rate_text(bounds.high)
    return low if low == high else f"{low} to {high}"


def speed_lines(speed: "SpeedEstimate | None") -> list[Line]:
    """Print the estimate with its assumption; nothing if the device's speed is unknown."""
    return [] if speed is None else [*table_lines(Table(speed_rows(speed))), Line(speed.assumption, "dim")]


def disk_lines(account: DiskAccount | None) -> list[Line]:
    """Print a GGUF file's bytes on disk and in memory, with the reason."""
    return [] if account is None else [Line(line) for line in account.lines]


def owner_lines(view: "PlanView", has_all: bool = True) -> list[Line]:
    """Print bytes by owner and phase; the bar is the share of the budget, light if freed before serving.

    With `has_all` every owner has a row and a reason. Without it small owners share a row, and there are no reasons.
    """
    whole = max(view.budget_bytes, *view.phase_bytes.values(), 1)
    rows = [
        (
            row.owner,
            *(_size_cell(row.phase_bytes.get(phase)) for phase in PHASES),
            _bar(row.phase_bytes.get(SERVE, 0), row.peak_bytes, whole),
            row.reason,
        )
        for row in (view.rows if has_all else view.folded_rows)
    ]
    left = {phase: view.budget_bytes - num_bytes for phase, num_bytes in view.phase_bytes.items()}
    cells = [
        ("owner", *PHASES, "", "why"),
        *rows,
        ("total", *(_size_cell(view.phase_bytes[phase]) for phase in PHASES), "", ""),
        ("left" if view.fits else "left or short", *(_size_cell(left[phase]) for phase in PHASES), "", "of the budget"),
    ]
    if has_all:
        *lines, last = _table(cells, right=(1, 2, 3), bar=4, wraps=(5,))
    else:
        *lines, last = _table([row[:-1] for row in cells], right=(1, 2, 3), bar=4)
    return [*lines, last if view.fits else replace(last, style="bold")]


def group_rows(groups: Sequence[GroupAccount]) -> list[tuple[str, ...]]:
    """List the cache groups: layers that share a block table."""
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
    """Print the cache groups; nothing if all layers keep all tokens."""
    return _table([GROUP_HEADING, *group_rows(groups)], right=(1, 2, 3, 4, 5)) if groups else []


def rank_lines(rows: "Sequence[RankRow]") -> list[Line]:
    """Print every rank, with equal neighbours on one line; nothing for a single rank."""
    if not rows:
        return []
    groups = [list(own) for _, own in groupby(rows, key=lambda row: row._replace(rank=0))]
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
    """List the largest differences by owner."""
    ordered = sorted(differs.items(), key=lambda item: -abs(item[1]))
    listed = [f"{owner} {'-' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}" for owner, num_bytes in ordered]
    more = f", and {len(listed) - NUM_DIFFERENCES} more" if len(listed) > NUM_DIFFERENCES else ""
    return (", ".join(listed[:NUM_DIFFERENCES]) + more) or "nothing"


def alternative_lines(view: "PlanView") -> list[Line]:
    """Print changes by increasing cost; mark the smallest that fits."""
    listed = worthwhile(view)
    rows = [
        (
            f"{SMALLEST if item.is_smallest else OTHER} {item.change}",
            f"{item.kv_tokens:,} tokens",
            "" if item.speed is None else f"{rate_text(item.speed.one_stream.middle)} tokens/s",
            concurrency_text(item, view.max_model_len),
        )
        for item in listed
    ]
    table = Table(tuple(rows), right=(1, 2), wraps=(0, 3))
    if not any(item.speed for item in listed):
        table = Table(tuple((*row[:2], row[3]) for row in rows), right=(1,), wraps=(0, 2))
    drawn = table_lines(table, ["green" if item.is_smallest else "" for item in listed])
    lines: list[Line] = []
    for title, group in groupby(zip(listed, drawn, strict=True), key=lambda pair: COSTS[pair[0].kind]):
        lines += [Line(title, "italic"), *(line for _, line in group)]
    num_others = len(view.alternatives) - len(listed)
    if num_others:
        noun, be, give = ("change", "is", "gives") if num_others == 1 else ("changes", "are", "give")
        lines.append(
            Line(f"{num_others} other {noun} {be} not enough alone, or {give} no more; --json lists them", "dim")
        )
    return lines


def worthwhile(view: "PlanView") -> "list[Alternative]":
    """List changes that fit and beat the plan and every earlier change of the same option.

    A change of GPU need not beat the plan, because it may be cheaper.
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
    """Return tokens, context and tokens/s; another change must exceed at least one."""
    return WORTH * kv_tokens, max_model_len, WORTH_SPEED * _rate(speed)


def _rate(speed: "SpeedEstimate | None") -> float:
    return 0.0 if speed is None else speed.one_stream.middle


def concurrency_text(item: "Alternative", max_model_len: int) -> str:
    """Format the concurrent requests of a change, with their length if it differs from the plan's."""
    text = f"{item.max_concurrency:.2f}x"
    return text if item.max_model_len == max_model_len else f"{text} of {item.max_model_len:,}"


def _size_cell(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


def _choices(view: "PlanView") -> list[Line]:
    if not view.choices:
        return []
    # Covered by the note on the context; if no token fits, no context was chosen.
    hidden = "max_model_len" if view.context_note or (not view.fits and view.max_model_len == 1) else ""
    rows = tuple((choice.name, choice.value, choice.reason) for choice in view.choices if choice.name != hidden)
    return table_lines(Table(rows, wraps=(2,)))


def _section(title: str, lines: list[Line]) -> list[Line]:
    if not lines:
        return []
    indented = (replace(line, text=f"  {line.text}".rstrip(), indent=line.indent + 2) for line in lines)
    return [Line(""), Line(title, "bold"), *indented]


def sweep_lines(cells: "Sequence[Cell]", target: str) -> list[Line]:
    """Print a bar for each plan of a sweep, to one scale, by KV format."""
    most = max((cell.kv_tokens for cell in cells), default=0)
    rows, styles = [], []
    for number, cell in enumerate(cells):
        is_first = number == 0 or cells[number - 1].kv_cache_dtype != cell.kv_cache_dtype
        notes = {
            f"{cell.kv_protected_layers} layers wider": cell.kv_protected_layers and is_first,
            "this plan": cell.is_planned,
            LATER: not cell.runs,
        }
        note = ", ".join(text for text, is_so in notes.items() if is_so)
        tokens = f"{cell.kv_tokens:,}" if cell.kv_tokens else "does not fit"
        name = cell.kv_cache_dtype if is_first else ""
        rows.append((name, cell.quantization, sweep_bar(cell.kv_tokens, most), tokens, note))
        styles.append("bold" if cell.is_planned else "" if cell.runs else "dim")
    table = Table((("KV pages", "weights", "", "tokens", ""), *rows), (3,), bar=2, wraps=(4,), comfortable=LEAST_NOTE)
    title = Line(f"KV tokens on {target}, by format of pages and weights", "bold")
    return [title, *table_lines(table, ("", *styles))]


def sweep_bar(value: int, most: int) -> str:
    """Draw a bar in eighths of a cell; anything above 0 is visible."""
    eighths = max(round(8 * SWEEP_CELLS * value / most), 1) if value else 0
    return (EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(SWEEP_CELLS)


class Subject(NamedTuple):
    """Labels of a comparison, for its table, record and page."""

    title: str
    row: str
    """Name of one row."""
    size: str
    """Heading over bytes."""
    size_text: str
    against: str
    """Baseline of a distribution; {} is the reference."""
    section: str
    """Section of the documents with such records."""
    size_key: str
    """Name of the bytes in a record."""


KV_PAGES, WEIGHTS = (Subject(**row) for row in read_data("quality_subjects.json").values())


class EvalView(NamedTuple):
    """Results of an evaluation, with model and settings."""

    model: str
    settings: str
    """dtype and device."""
    text: str
    """Name of the text."""
    window: int
    num_windows: int
    plain_bytes: float
    """Half-precision bytes of a token, or of all weights."""
    qualities: "Sequence[Quality]"
    """Results, the reference first."""
    subject: Subject = KV_PAGES
    behaviours: "Sequence[Behaviour]" = ()
    """Answers and recall by contender; empty if they were not measured."""
    missing: tuple[str, ...] = ()
    """Contenders that Ctrl-C left out."""

    def with_result(self, result: "Result") -> "EvalView":
        """Add a contender."""
        qualities, behaviours = [*self.qualities, result.quality], [*self.behaviours, result.behaviour]
        return self._replace(qualities=qualities, behaviours=behaviours)

    @property
    def title(self) -> str:
        return f"{self.subject.title} of {self.model}"

    @property
    def summary(self) -> str:
        """Describe the run on one line."""
        windows = f"{self.num_windows} windows" if self.num_windows > 1 else "one window"
        return (
            f"{self.model}, {self.settings}: {windows} of {self.window:,} tokens of {self.text}, "
            f"{self.qualities[0].num_predictions:,} predictions"
        )


def quality_lines(view: EvalView) -> list[Line]:
    """Print the table of an evaluation, and what its columns mean."""
    names = headings(view)
    return [
        Line(view.summary, "bold"),
        Line(""),
        *_table([names, *quality_cells(view)], right=tuple(range(1, len(names)))),
        Line(""),
        *(Line(text, "dim") for text in (meaning(view), *behaviour_notes(view), *notes_of(view))),
        *(Line(text, "bold red") for text in broken_notes(view)),
    ]


def headings(view: EvalView) -> tuple[str, ...]:
    """Return the column headings."""
    return (view.subject.row, view.subject.size, *FIGURES, *behaviour_headings(view))


def behaviour_headings(view: EvalView) -> tuple[str, ...]:
    """Return the headings over answers and recall, as far as the reference has them."""
    if not view.behaviours:
        return ()
    answers, recall = view.behaviours[0].answers, view.behaviours[0].recall
    named = () if answers is None else ANSWER_FIGURES[: 1 if answers.json is None else None]
    return (*named, *(f"recall {distance_text(each.distance)}" for each in recall))


def quality_cells(view: EvalView) -> list[tuple[str, ...]]:
    """Make a row for each contender; the reference is not compared with itself."""
    reference = view.qualities[0]
    rows = []
    for place, quality in enumerate(view.qualities):
        compared = (
            change_text(quality.perplexity, reference.perplexity, quality.change_error),
            *map(kl_text, (quality.mean_kl, quality.p99_kl, quality.p999_kl, quality.max_kl)),
            f"{quality.agreement:.2%}",
        )
        rows.append(
            (
                quality.name,
                f"{quality.size_bytes:,.10g}",
                f"{view.plain_bytes / quality.size_bytes:.2f}x",
                perplexity_text(quality),
                *(compared if place else [""] * len(compared)),
                f"{(quality.num_predictions + view.num_windows) / max(quality.seconds, 1e-9):.1f}",
                *(behaviour_cells(view.behaviours[place], bool(place)) if view.behaviours else ()),
            )
        )
    return rows


def behaviour_cells(behaviour: "Behaviour", is_compared: bool) -> tuple[str, ...]:
    """Format answers and recall; the reference's answers are not compared with themselves."""
    answers, cells = behaviour.answers, []
    if answers is not None:
        cells.append(f"{answers.median_same:g} of {answers.num_tokens}" if is_compared else "")
        cells += [f"{own.num_valid} of {own.num_tasks}" for own in (answers.json, answers.tools) if own is not None]
    return (*cells, *(f"{each.num_right} of {each.num_facts}, {each.probability:.0%}" for each in behaviour.recall))


def progress_line(view: EvalView) -> str:
    """Describe the newest contender on one line."""
    quality = view.qualities[-1]
    parts = [f"perplexity {perplexity_text(quality)}"]
    if len(view.qualities) > 1:
        change = change_text(quality.perplexity, view.qualities[0].perplexity, quality.change_error)
        parts[0] += f" ({change})"
        parts.append(f"mean KL {kl_text(quality.mean_kl)}, p99.9 {kl_text(quality.p999_kl)}")
        parts.append(f"same top-1 {quality.agreement:.2%}")
    if view.behaviours:
        cells = behaviour_cells(view.behaviours[-1], len(view.qualities) > 1)
        parts += [f"{name} {cell}" for name, cell in zip(behaviour_headings(view), cells, strict=True) if cell]
    return f"{quality.name}: {'; '.join(parts)}"


def distance_text(distance: int) -> str:
    """Format a number of tokens, such as 4K."""
    return f"{distance // 1024}K" if distance % 1024 == 0 else f"{distance:,}"


def perplexity_text(quality: "Quality") -> str:
    """Format a perplexity with its standard error."""
    text = number_text(quality.perplexity, ".4f")
    return f"{text} ±{quality.perplexity_error:.2g}" if math.isfinite(quality.perplexity_error) else text


def meaning(view: EvalView) -> str:
    """Explain the table."""
    against = view.subject.against.format(view.qualities[0].name)
    return (
        f"KL: divergence of the next token's distribution from {against}, in nats; "
        "same top-1: how often the most likely token is the same; ±: standard error"
    )


def behaviour_notes(view: EvalView) -> list[str]:
    """Explain the columns of answers and recall, and name lost answers."""
    names, notes = behaviour_headings(view), []
    if ANSWER_FIGURES[0] in names:
        equal = [f"{quality.name} {own.answers.num_equal}" for quality, own in _compared(view) if own.answers]
        notes.append(
            "same tokens: greedy tokens before the first that differs, in the median of "
            f"{len(_answers_of(view).same_tokens)} continuations of code and prose; "
            f"never different: {', '.join(equal) or 'not compared'}"
        )
    if ANSWER_FIGURES[1] in names:
        lost = [
            f"{quality.name} {own.answers.json.num_lost} JSON and {own.answers.tools.num_lost} tool calls"
            for quality, own in _compared(view)
            if own.answers and own.answers.json and own.answers.tools
            if own.answers.json.num_lost or own.answers.tools.num_lost
        ]
        before = f"valid over {view.qualities[0].name} pages and not any more"
        notes.append(
            f"JSON, tool calls: answers with an object of the requested keys; {before}: {', '.join(lost) or 'none'}"
        )
    if view.behaviours and (recall := view.behaviours[0].recall):
        notes.append(
            "recall: facts so many tokens back whose word is the most likely one, and the mean probability of the right "
            f"word among {recall[0].num_words}"
        )
    return notes


def _compared(view: EvalView) -> "list[tuple[Quality, Behaviour]]":
    """List the contenders after the reference."""
    return list(zip(view.qualities, view.behaviours, strict=True))[1:]


def _answers_of(view: EvalView) -> "Answers":
    answers = view.behaviours[0].answers
    assert answers is not None, "no answers were measured"
    return answers


def notes_of(view: EvalView) -> list[str]:
    """List each note with the contenders that have it."""
    names: dict[str, list[str]] = {}
    for quality in view.qualities:
        if quality.note:
            names.setdefault(quality.note, []).append(quality.name)
    return [f"{note}: {', '.join(own)}" for note, own in names.items()]


def broken_notes(view: EvalView) -> list[str]:
    """List the contenders with logits that are not finite."""
    return [
        f"{quality.name}: {quality.num_broken:,} of {quality.num_predictions:,} predictions are not finite"
        for quality in view.qualities
        if quality.num_broken
    ]


def kl_text(number: float) -> str:
    """Format a divergence."""
    return "0" if number == 0 else number_text(number, ".3g")


def number_text(number: float, format_spec: str) -> str:
    """Format a number that may not be finite."""
    return format(number, format_spec) if math.isfinite(number) else NOT_FINITE


def change_text(number: float, base: float, error: float | None = None) -> str:
    """Format a relative change in percent, with its standard error."""
    if not math.isfinite(number):
        return NOT_FINITE
    text = f"{100 * (number / base - 1):+.3f}%"
    return text if error is None else f"{text} ±{100 * error:.2g}"

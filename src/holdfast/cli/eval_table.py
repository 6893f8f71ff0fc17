"""The quality of KV formats, or of weight schemes, as lines of a terminal; no torch."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli.columns import aligned
from holdfast.cli.plan_table import Line

if TYPE_CHECKING:
    from holdfast.engine.kv_quality import Quality

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
    """Where the README shows such records."""
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
    heading, *rows = aligned([names, *quality_cells(view)], right=tuple(range(1, len(names))))
    return [
        Line(view.asked, "bold"),
        Line(""),
        Line(heading, "bold", is_cut=True),
        *(Line(row, is_cut=True) for row in rows),
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

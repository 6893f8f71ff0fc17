"""The quality of KV formats as lines of a terminal; no torch."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli.columns import aligned
from holdfast.cli.plan_table import Line

if TYPE_CHECKING:
    from holdfast.engine.kv_quality import Quality

HEADINGS = (
    "format",
    "bytes/token",
    "against 16 bit",
    "perplexity",
    "change",
    "mean KL",
    "p99 KL",
    "same top-1",
    "tokens/s",
)
NOT_FINITE = "not finite"


class EvalView(NamedTuple):
    """What was measured, where, and on what."""

    model: str
    settings: str
    """Type and device."""
    text: str
    """The name of the text."""
    window: int
    num_windows: int
    plain_bytes_per_token: float
    """What a token takes in half precision."""
    qualities: "Sequence[Quality]"
    """The reference first."""

    @property
    def title(self) -> str:
        return f"KV formats of {self.model}"

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
    heading, *rows = aligned([HEADINGS, *quality_cells(view)], right=tuple(range(1, len(HEADINGS))))
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


def quality_cells(view: EvalView) -> list[tuple[str, ...]]:
    """A row for each format; of the reference only what does not compare it with itself."""
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
                f"{quality.bytes_per_token:,.10g}",
                f"{view.plain_bytes_per_token / quality.bytes_per_token:.2f}x",
                number_words(quality.perplexity, ".4f"),
                *(compared if place else ("", "", "", "")),
                f"{(quality.num_predictions + view.num_windows) / max(quality.seconds, 1e-9):.1f}",
            )
        )
    return rows


def meaning(view: EvalView) -> str:
    """How to read the table."""
    return (
        f"KL: divergence of the next token's distribution from that over {view.qualities[0].name} pages, in nats; "
        "same top-1: how often the likeliest token is the same"
    )


def note_words(view: EvalView) -> list[str]:
    """What there is to know of pages, and of whose."""
    names: dict[str, list[str]] = {}
    for quality in view.qualities:
        if quality.note:
            names.setdefault(quality.note, []).append(quality.name)
    return [f"{note}: {', '.join(own)}" for note, own in names.items()]


def broken_words(view: EvalView) -> list[str]:
    """A sentence for each format that computed something else than numbers."""
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

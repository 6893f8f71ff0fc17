"""Quality of weight schemes: one model with its weights as stored, then in one scheme after the other.

R rows of a piece, T rows of a step, H hidden, V vocabulary

Schemes load one after the other beside the reference. It reads the text once and keeps its hidden states, a few kilobytes
per token, which become logits again for each comparison.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import torch

from holdfast.config import EngineConfig
from holdfast.eval.kv_quality import (
    Contender,
    Possible,
    Quality,
    ReferencePiece,
    Tally,
    pieces_of,
    refuse_broken,
    settle_config,
    steps_of,
)
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.quantized.source import QuantizedSource
from holdfast.models.declared_model import declare_decoder
from holdfast.planning.target import device_target
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from holdfast.request.sequence import LiveStep
from holdfast.runner.build import plan_model
from holdfast.runner.variants import Variant, build_variants

OnTokens = Callable[[int], None]
"""Called with the tokens read and compared since the last call."""


class ReferenceReading:
    """Hidden states of the reference for a whole text, on the host."""

    def __init__(self, reference: Contender, windows: Sequence[Sequence[int]]) -> None:
        self.reference = reference
        self.windows = windows
        self._hidden: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def num_predictions(self) -> int:
        """Predictions of a window."""
        return len(self.windows[0]) - 1

    def steps(self) -> Iterator[tuple[int, LiveStep]]:
        """Yield every chunk of every window."""
        for index, token_ids in enumerate(self.windows):
            for step in steps_of(index, token_ids, self.reference.runner):
                yield index, step

    @torch.inference_mode()
    def read(self, on_tokens: OnTokens) -> Quality:
        """Read the text once and return the reference's figures."""
        tally = Tally(len(self.windows), self.num_predictions)
        device = self.reference.runner.device
        for index, step in self.steps():
            with tally.timed(device):
                hidden_TH = self.reference.runner.hidden_rows(step)
            self._hidden[index, step.scheduled[0].start] = hidden_TH.to("cpu", copy=True)
            for first, _, piece, logits_RV in self.pieces(index, step):
                refuse_broken(self.reference, hidden_TH.dtype, logits_RV)
                tally.add(index, first, piece, logits_RV)
            on_tokens(step.num_tokens)
        return tally.quality(self.reference)

    def pieces(self, index: int, step: LiveStep) -> Iterator[tuple[int, slice, ReferencePiece, torch.Tensor]]:
        """Yield a few rows of a step at a time: first position, row slice, reference predictions, logits."""
        runner = self.reference.runner
        hidden_TH = self._hidden[index, step.scheduled[0].start].to(runner.device)
        for first, rows, targets in pieces_of(step, runner.vocab_size):
            logits_RV = runner.row_logits(hidden_TH[rows])
            yield first, rows, ReferencePiece.of(logits_RV, torch.tensor(targets, device=logits_RV.device)), logits_RV


@torch.inference_mode()
def measure_scheme(contender: Contender, reading: ReferenceReading, on_tokens: OnTokens) -> Quality:
    """Measure one scheme against the reference. Both have the same limits, so their steps are equal."""
    limits, wanted = contender.runner.limits, reading.reference.runner.limits
    assert limits == wanted, f"{contender.name} has {limits}, the reference {wanted}"
    tally = Tally(len(reading.windows), reading.num_predictions)
    device = contender.runner.device
    for index, step in reading.steps():
        with tally.timed(device):
            hidden_TH = contender.runner.hidden_rows(step)
        for first, rows, piece, _ in reading.pieces(index, step):
            with tally.timed(device):
                logits_RV = contender.runner.row_logits(hidden_TH[rows])
            tally.add(index, first, piece, logits_RV)
        on_tokens(step.num_tokens)
    return tally.quality(contender)


REFERENCE_DTYPE = "float32"
HALF = "bfloat16"
OnProgress = Callable[[int, int], None]


class SchemeEntry(NamedTuple):
    """A scheme to measure."""

    name: str
    config: EngineConfig


class Listener(NamedTuple):
    """Callbacks for progress."""

    opening: Callable[[str], None]
    """Gets the name of the next load."""
    reading: OnProgress


def settle_entries(config: EngineConfig, model: OpenModel, window: int) -> tuple[EngineConfig, EngineConfig]:
    """Return the reference's config, float32 as stored, and the base config of the schemes."""
    settled = settle_config(config.with_quantization(None), model, window)
    # quantized_embeddings is for the schemes.
    return replace(settled, dtype=REFERENCE_DTYPE), replace(settled, quantized_embeddings=config.quantized_embeddings)


def stored_scheme(reference: EngineConfig, model: OpenModel) -> str | None:
    """Return the scheme in which the checkpoint stores its weights; None if they are plain."""
    if model.stored is None and not isinstance(model.source, QuantizedSource):
        return None
    _, plan = plan_model(reference, model, device_target(reference.device))
    scheme = plan.resolved.recipe.scheme
    return None if scheme is None else scheme.name


def as_stored_entry(config: EngineConfig, stored: str | None) -> SchemeEntry:
    """Make the entry with weights as stored; a quantized checkpoint keeps its scheme in any compute type."""
    plain = config.with_quantization(None)
    return SchemeEntry(config.dtype if stored is None else f"{stored} as stored ({config.dtype})", plain)


def scheme_entry(settled: EngineConfig, name: str, ignore: tuple[str, ...] | str) -> SchemeEntry:
    """Make the entry of a scheme."""
    config = settled.with_quantization(name)
    return SchemeEntry(name, replace(config, quantization_ignore=ignore, weight_cache="off"))


def possible_schemes(
    settled: EngineConfig, model: OpenModel, ignore: tuple[str, ...] | str, stored: str | None = None
) -> Possible:
    """List every scheme that can run; for a quantized checkpoint only its own."""
    own = [name for name in WEIGHT_SCHEMES if stored in (None, name)]
    found = Possible.of(own, lambda name: scheme_entry(settled, name, ignore).config, model)
    reason = f"the checkpoint stores its weights in {stored}"
    return Possible(found.names, {**{name: reason for name in WEIGHT_SCHEMES if name not in own}, **found.left_out})


def plain_bytes(model: OpenModel) -> int:
    """Return the bytes of the weights in half precision."""
    return declare_decoder(model.spec, model.path.name).weight_bytes(HALF)


def compare_schemes(
    reference: SchemeEntry, entries: Sequence[SchemeEntry], windows: Sequence[Sequence[int]], listener: Listener
) -> list[Quality]:
    """Measure the reference, then each scheme, loaded and freed in turn."""
    num_tokens = sum(map(len, windows))
    num_done, num_total = 0, (1 + len(entries)) * num_tokens

    def count(num_more: int) -> None:
        nonlocal num_done
        num_done += num_more
        listener.reading(num_done, num_total)

    with opened_scheme(reference, listener) as contender:
        reading = ReferenceReading(contender, windows)
        qualities = [reading.read(count)]
        for entry in entries:
            with opened_scheme(entry, listener) as other:
                qualities.append(measure_scheme(other, reading, count))
    return qualities


@contextmanager
def opened_scheme(entry: SchemeEntry, listener: Listener) -> Iterator[Contender]:
    """Open a runner with weights in a scheme for the context."""
    listener.opening(entry.name)
    model = open_model(entry.config.model, entry.config.load_format, entry.config.revision)
    try:
        built = build_variants([Variant(entry.config)], model, lambda num_done, num_total: None)
    finally:
        model.source.close()
    try:
        plan = built.plans[0]
        size = sum(term.num_bytes for term in plan.memory.terms if term.group == "weights")
        yield Contender(entry.name, built.runners[0], Fraction(size))
    finally:
        built.release()

"""What weight schemes cost in quality: one model with its weights as stored, then in one scheme after the other.

R rows of a piece, T rows of a step, H hidden, V vocabulary

Schemes are loaded one after the other beside the reference, which reads the text once: its hidden states are kept, a few
kilobytes a token, and become logits again when there is something to compare them with.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import torch

from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, UnsupportedModelError
from holdfast.eval.kv_quality import (
    Contender,
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
"""Called with the number of tokens that have been read and compared since the last call."""


class ReferenceReading:
    """The reference's hidden states of a whole text, on the host, and its own figures."""

    def __init__(self, reference: Contender, windows: Sequence[Sequence[int]]) -> None:
        self.reference = reference
        self.windows = windows
        self._hidden: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def num_predictions(self) -> int:
        """Of each window."""
        return len(self.windows[0]) - 1

    def steps(self) -> Iterator[tuple[int, LiveStep]]:
        """Every chunk of every window."""
        for index, token_ids in enumerate(self.windows):
            for step in steps_of(index, token_ids, self.reference.runner):
                yield index, step

    @torch.inference_mode()
    def read(self, on_tokens: OnTokens) -> Quality:
        """Go through the text once; the figures of the reference."""
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
        """A few rows of a step at a time: their first place, which rows they are, what the reference says, its logits."""
        runner = self.reference.runner
        hidden_TH = self._hidden[index, step.scheduled[0].start].to(runner.device)
        for first, rows, targets in pieces_of(step, runner.vocab_size):
            logits_RV = runner.row_logits(hidden_TH[rows])
            yield first, rows, ReferencePiece.of(logits_RV, torch.tensor(targets, device=logits_RV.device)), logits_RV


@torch.inference_mode()
def measure_scheme(contender: Contender, reading: ReferenceReading, on_tokens: OnTokens) -> Quality:
    """One scheme's figures against the reference's. Both have the same limits, so that steps are the same."""
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
    """Somebody who is to be measured."""

    name: str
    config: EngineConfig


class SchemeChoice(NamedTuple):
    """Schemes that a model can have here, and why it cannot have the others."""

    names: tuple[str, ...]
    left_out: dict[str, str]


class Listener(NamedTuple):
    """Who is told how far it is."""

    opening: Callable[[str], None]
    """Gets the name of what is loaded next."""
    loading: OnProgress
    reading: OnProgress


def settle_entries(config: EngineConfig, model: OpenModel, window: int) -> tuple[EngineConfig, EngineConfig]:
    """The reference's config, in float32 and as stored, and the one that schemes are variations of."""
    settled = settle_config(config.with_quantization(None), model, window)
    # What is asked of head and embedding is for the schemes.
    return replace(settled, dtype=REFERENCE_DTYPE), replace(settled, quantized_embeddings=config.quantized_embeddings)


def stored_scheme(reference: EngineConfig, model: OpenModel) -> str | None:
    """The scheme in which the checkpoint has its weights already, the reference's too; None where they are plain."""
    if model.stored is None and not isinstance(model.source, QuantizedSource):
        return None
    _, plan = plan_model(reference, model, device_target(reference.device))
    scheme = plan.resolved.recipe.scheme
    return None if scheme is None else scheme.name


def as_stored_entry(config: EngineConfig, stored: str | None) -> SchemeEntry:
    """The model with its weights as they are, which a quantized checkpoint has in its scheme whatever is computed in."""
    plain = config.with_quantization(None)
    return SchemeEntry(config.dtype if stored is None else f"{stored} as stored ({config.dtype})", plain)


def scheme_entry(settled: EngineConfig, name: str, ignore: tuple[str, ...] | str) -> SchemeEntry:
    """The model with its weights in a scheme."""
    config = settled.with_quantization(name)
    return SchemeEntry(name, replace(config, quantization_ignore=ignore, weight_cache="off"))


def possible_schemes(
    settled: EngineConfig, model: OpenModel, ignore: tuple[str, ...] | str, stored: str | None = None
) -> SchemeChoice:
    """Every scheme that can be planned here; of a checkpoint that is quantized already only its own."""
    target = device_target(settled.device)
    names, left_out = [], {}
    for name in WEIGHT_SCHEMES:
        if stored is not None and name != stored:
            left_out[name] = f"the checkpoint has its weights in {stored} already"
            continue
        try:
            plan_model(scheme_entry(settled, name, ignore).config, model, target)
        except (ConfigError, UnsupportedModelError) as error:
            left_out[name] = str(error)
        else:
            names.append(name)
    return SchemeChoice(tuple(names), left_out)


def plain_bytes(model: OpenModel) -> int:
    """What the weights take in half precision."""
    return declare_decoder(model.spec, model.path.name).weight_bytes(HALF)


def compare_schemes(
    reference: SchemeEntry, entries: Sequence[SchemeEntry], windows: Sequence[Sequence[int]], listener: Listener
) -> list[Quality]:
    """The reference's figures, then everybody's, each loaded when its turn comes and let go after it."""
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
    """A runner of the model with its weights in a scheme, as long as the context lasts."""
    listener.opening(entry.name)
    model = open_model(entry.config.model, entry.config.load_format, entry.config.revision)
    try:
        built = build_variants([Variant(entry.config)], model, listener.loading)
    finally:
        model.source.close()
    try:
        plan = built.plans[0]
        size = sum(term.num_bytes for term in plan.memory.terms if term.group == "weights")
        yield Contender(entry.name, built.runners[0], Fraction(size))
    finally:
        built.release()

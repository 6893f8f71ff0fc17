"""Quality of weights: one model as stored, then in one scheme or file after the other.

Schemes load one after the other beside the reference, whose hidden states are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from holdfast.config import EngineConfig
from holdfast.errors import ConfigError
from holdfast.eval.kv_quality import Possible, settle_config
from holdfast.eval.quality import Contender, HalfTokens, Quality, ReferenceReading, measure_against
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.quantized.source import QuantizedSource
from holdfast.models.declared_model import declare_decoder
from holdfast.planning.target import device_target
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from holdfast.runner.build import plan_model
from holdfast.runner.variants import Variant, build_variants

REFERENCE_DTYPE = "float32"
HALF = "bfloat16"
OnProgress = Callable[[int, int], None]


class SchemeEntry(NamedTuple):
    """A scheme to measure."""

    name: str
    config: EngineConfig
    disk_bytes: int | None = None
    """Bytes of the tensors of another file; None: the bytes that the weights take in memory."""


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


def file_entry(reference: EngineConfig, model: OpenModel, file: str) -> SchemeEntry:
    """Make the entry of another file of the model, checked by its headers: as stored, in the type of the reference."""
    config = replace(reference, model=file, load_format="auto", revision=None)
    other = open_model(file, config.load_format, config.revision)
    try:
        for name in ("vocab_size", "num_layers", "hidden_size"):
            found, expected = getattr(other.spec, name), getattr(model.spec, name)
            if found != expected:
                values = {"file": file, "model": model.name, "name": name, "found": found, "expected": expected}
                raise ConfigError("eval.other_model", **values)
        used = other.source.entries.keys() - other.source.ignorable  # scales beside codes count with their codes
        return SchemeEntry(other.name, config, sum(other.source.entries[name].num_bytes for name in used))
    finally:
        other.source.close()


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
    halves = HalfTokens((1 + len(entries)) * sum(map(len, windows)), listener.reading)
    with opened_scheme(reference, listener) as contender:
        reading = ReferenceReading(contender, windows)
        qualities = [reading.read(halves.add)]
        for entry in entries:
            with opened_scheme(entry, listener) as other:
                qualities.append(measure_against(reading, other, halves.add))
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
        size = entry.disk_bytes
        if size is None:
            size = sum(term.num_bytes for term in plan.memory.terms if term.group == "weights")
        yield Contender(entry.name, built.runners[0], Fraction(size))
    finally:
        built.release()

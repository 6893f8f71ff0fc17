"""Quality of KV formats: runners of several formats over one set of weights, each measured against full precision."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, UnsupportedModelError
from holdfast.eval.answers import Answers, Generated, Questions
from holdfast.eval.quality import Contender, HalfTokens, Quality, ReferenceReading, measure_against
from holdfast.eval.recall import Recall, RecallTest, measure_recall
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.sizes import format_bytes
from holdfast.models.declared_model import declare_decoder
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.protected_layers import numbers
from holdfast.planning.resolve import PlanRequest, resolve
from holdfast.planning.target import choose_device, device_target
from holdfast.quant.formats import DTYPE_BYTES, formats_of
from holdfast.runner.build import plan_model
from holdfast.runner.key_scale import num_scaled_heads
from holdfast.runner.runner import Runner
from holdfast.runner.variants import Variant, build_variants
from holdfast.text.key_text import key_text_ids
from holdfast.text.tokenizer import Tokenizer

OnProgress = Callable[[int, int], None]
"""Gets tokens done, and all."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Figures of one contender besides those of the text."""

    answers: Answers | None = None
    recall: tuple[Recall, ...] = ()


class Result(NamedTuple):
    """All figures of one contender."""

    quality: Quality
    behaviour: Behaviour


class Work(NamedTuple):
    """What every contender does."""

    windows: Sequence[Sequence[int]]
    questions: Questions | None = None
    recall: RecallTest | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of one contender, for progress."""
        num_recall = 0 if self.recall is None else self.recall.num_rows
        return sum(map(len, self.windows)) + num_recall + (0 if self.questions is None else self.questions.num_rows)


class Pair(NamedTuple):
    """Two runners of one format.

    Key means are averaged over a runner's whole context (runner/key_means.py). So the text has a runner whose context is a
    window, and its figures do not depend on the other tasks.
    """

    text: Contender
    tasks: Contender
    """For answers and recall, with a longer context and several sequences; may be that of the text."""


def evaluate(pairs: Sequence[Pair], work: Work, watching: Callable[[Contender], OnProgress]) -> Iterator[Result]:
    """Yield the figures of the reference, then those of each other format when it is done.

    `watching(contender)` returns the progress callback of each.
    """
    reading = ReferenceReading(pairs[0].text, work.windows)
    reference: Generated | None = None
    for place, (contender, longer) in enumerate(pairs):
        halves = HalfTokens(work.num_tokens, watching(contender))
        quality = measure_against(reading, contender, halves.add) if place else reading.read(halves.add)
        answers = None
        if work.questions is not None:
            own = work.questions.generate(longer, halves.add)
            reference = reference or own
            answers = work.questions.compare(reference, own)
        recall = () if work.recall is None else measure_recall(longer, work.recall, halves.add)
        halves.finish()
        yield Result(quality, Behaviour(answers, recall))


def measure(
    reference: Contender,
    others: Sequence[Contender],
    windows: Sequence[Sequence[int]],
    on_progress: Callable[[int, int], None],
) -> list[Quality]:
    """Measure the reference, then each other against it. `on_progress(done, total)` counts tokens of all."""
    halves = HalfTokens((1 + len(others)) * sum(map(len, windows)), on_progress)
    reading = ReferenceReading(reference, windows)
    return [reading.read(halves.add), *(measure_against(reading, other, halves.add) for other in others)]


CHUNK_TOKENS = 512
"""Default tokens of a step: every contender has a workspace for them."""
FEW_BITS = 4
SEQUENCES = 8
"""Answers that are generated at once."""
PLAIN_BYTES = 2
"""Bytes of an element in half precision."""


class Entry(NamedTuple):
    """A contender to open."""

    name: str
    variant: Variant
    bytes_per_token: Fraction | None = None
    """None: what the plan says."""
    note: str | None = None
    """None: which layers the plan protects."""


class OpenedContenders(NamedTuple):
    """The contenders, the reference first."""

    contenders: list[Contender]
    plain_bytes_per_token: Fraction
    """KV bytes of a token in half precision."""
    most_near_tokens: int
    """Tokens of the newest block that are exact, in the contender with most."""
    release: Callable[[], None]


class Possible(NamedTuple):
    """Formats or schemes that can run, and why the others cannot."""

    names: tuple[str, ...]
    left_out: dict[str, str]

    @classmethod
    def of(cls, names: Collection[str], config_of: Callable[[str], EngineConfig], model: OpenModel) -> "Possible":
        """Plan the model with the configuration of each name."""
        left_out = {}
        for name in names:
            try:
                config = config_of(name)
                plan_model(config, model, device_target(config.device))
            except (ConfigError, UnsupportedModelError) as error:
                left_out[name] = str(error)
        return cls(tuple(name for name in names if name not in left_out), left_out)


def settle_config(
    config: EngineConfig, model: OpenModel, window: int, most_tokens: int = 0, num_seqs: int = 1
) -> EngineConfig:
    """Settle type and device for sequences of a window, or of `most_tokens` if they are more, in small steps."""
    chunk = min(window, config.max_num_batched_tokens or CHUNK_TOKENS)
    config = replace(
        config,
        max_model_len=max(window, min(most_tokens, model.spec.max_position)),
        max_num_seqs=min(num_seqs, chunk),
        max_num_batched_tokens=chunk,
        enforce_eager=True,
    )
    # Protected layers depend on the format.
    plain = replace(config, kv_protected_layers=None)
    declared = declare_decoder(model.spec, model.spec.architecture)
    resolved = resolve(PlanRequest(plain, declared, device_target(choose_device(config)[0])))
    return replace(config, dtype=resolved.dtype, device=resolved.device)


def reference_entry(config: EngineConfig) -> Entry:
    """Make the reference: pages and index in the compute type."""
    plain = replace(config, kv_cache_dtype=config.dtype, index_cache_dtype="auto", kv_protected_layers=None)
    return Entry(config.dtype, Variant(plain))


def quick_formats(names: Sequence[str], model: OpenModel) -> tuple[str, ...]:
    """Choose two: the widest quantized format, and the widest of at most 4 bits a key; else the last."""
    formats = formats_of(model.spec.latent is not None, model.spec.compressed is not None)
    quantized = [name for name in names if formats[name].is_quantized]
    if not quantized:
        return tuple(names[-2:])
    few = [name for name in quantized if (formats[name].key_bits or FEW_BITS) <= FEW_BITS]
    return tuple(dict.fromkeys((quantized[0], few[0] if few else quantized[-1])))


def format_entry(config: EngineConfig, model: OpenModel, name: str) -> Entry:
    """Make the entry of a format; protect layers only if the format is narrower than the protecting one."""
    spec, layers = model.spec, None
    declared, rope_dim = declare_decoder(spec, model.name), 0 if spec.latent is None else spec.latent.rope_dim
    if declared.check_format(name).is_quantized:
        own, wide = (
            declared.check_format(config.dtype if each == "auto" else each).bytes_per_token(1, spec.head_dim, rope_dim)
            for each in (name, config.kv_protected_dtype)
        )
        layers = config.kv_protected_layers if own < wide else None
    return Entry(name, Variant(replace(config, kv_cache_dtype=name, kv_protected_layers=layers)))


def entry_of(config: EngineConfig, model: OpenModel, name: str) -> Entry:
    """Make the entry of a format, or of the reference if it is the compute type."""
    return reference_entry(config) if name == config.dtype else format_entry(config, model, name)


def narrower_formats(config: EngineConfig, model: OpenModel) -> Possible:
    """List every format that is narrower than the reference and can run."""
    least = DTYPE_BYTES[config.dtype]
    formats = formats_of(model.spec.latent is not None, model.spec.compressed is not None)
    narrower = [name for name, own in formats.items() if own.is_quantized or DTYPE_BYTES[own.key_dtype] < least]
    return Possible.of(narrower, lambda name: format_entry(config, model, name).variant.config, model)


def format_note(plan: RunnerPlan, runner: Runner) -> str:
    """Name the layers with a wider format, and the tokens that are exact beside codes."""
    protected, notes = plan.resolved.protected, []
    if protected.layers:
        notes.append(f"layers {numbers(protected.layers)} in {protected.format.name}")
    if num_scaled_heads(runner.backend.paged):
        notes.append("keys scaled by pair")
    if plan.resolved.near_tokens:
        size = format_bytes(plan.resolved.near_bytes())
        notes.append(f"{plan.resolved.near_which()} in {plan.resolved.dtype}, up to {size} a sequence")
    return "; ".join(notes)


def open_contenders(
    entries: Sequence[Entry],
    model: OpenModel,
    on_progress: Callable[[int, int], None],
    tokenizer: Tokenizer | None = None,
) -> OpenedContenders:
    """Load the weights once and open a runner for each entry; the first is the reference.

    The tokenizer reads the text for key scales.
    """
    text_ids = () if tokenizer is None else key_text_ids(tokenizer, model.spec.vocab_size)
    built = build_variants([entry.variant for entry in entries], model, on_progress, text_ids)
    contenders = []
    for entry, runner, plan in zip(entries, built.runners, built.plans, strict=True):
        num_bytes = plan.kv_bytes_per_token if entry.bytes_per_token is None else entry.bytes_per_token
        note = format_note(plan, runner) if entry.note is None else entry.note
        contenders.append(Contender(entry.name, runner, num_bytes, note))
    reference = built.plans[0]
    plain = reference.kv_bytes_per_token * PLAIN_BYTES / DTYPE_BYTES[reference.resolved.dtype]
    near_tokens = max(plan.resolved.near_tokens for plan in built.plans)
    return OpenedContenders(contenders, plain, near_tokens, built.release)

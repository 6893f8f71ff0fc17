"""Quality of KV formats: runners of several formats over one set of weights, compared prediction by prediction.

T rows of a step, R rows of a piece, H hidden, V vocabulary, N windows, P predictions of a window

All runners read the text together, a chunk of a window at a time. Logits come in pieces of a few rows, so memory grows
neither with the window nor with the text; two numbers are kept per prediction.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from holdfast.cache.chunks import ring_tables
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, HoldfastError, UnsupportedModelError
from holdfast.loading.planning.open_model import OpenModel
from holdfast.models.declared_model import declare_decoder
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.resolve import PlanRequest, numbers, resolve
from holdfast.planning.target import choose_device, device_target
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.quant.formats import DTYPE_BYTES, formats_of
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence
from holdfast.request.sequence import Sequence as TokenSequence
from holdfast.runner.build import plan_model
from holdfast.runner.runner import Runner
from holdfast.runner.variants import Variant, build_variants

PIECE_ELEMENTS = 2**21
"""Maximum logits of a piece: several float64 tensors of them live at once."""
NUM_BINS = 8
"""Parts of a window with their own mean divergence."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A runner with a KV format or a weight scheme."""

    name: str
    runner: Runner
    size_bytes: Fraction
    """KV bytes of a token, or bytes of all weights."""
    note: str = ""
    """Such as layers in another format."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of one contender. Predictions with logits that are not finite have infinite divergence."""

    name: str
    size_bytes: float
    """KV bytes of a token, or bytes of all weights."""
    num_predictions: int
    perplexity: float
    mean_kl: float
    """KL(reference || contender), in nats."""
    kl_error: float
    """Standard error of the mean."""
    p99_kl: float
    max_kl: float
    agreement: float
    """Share of predictions with the reference's argmax."""
    kl_by_place: tuple[float, ...]
    """Mean divergence in equal parts of a window."""
    num_broken: int
    """Predictions with logits that are not finite."""
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReferencePiece:
    """Predictions of the reference for some rows."""

    logprob_RV: torch.Tensor
    prob_RV: torch.Tensor
    argmax_R1: torch.Tensor
    target_ids_R1: torch.Tensor

    @classmethod
    def of(cls, logits_RV: torch.Tensor, target_ids_R: torch.Tensor) -> "ReferencePiece":
        logprob_RV = torch.log_softmax(logits_RV, dim=-1, dtype=torch.float64)
        return cls(logprob_RV, logprob_RV.exp(), logits_RV.argmax(dim=-1, keepdim=True), target_ids_R.unsqueeze(1))


class Tally:
    """Divergence and loss of every prediction of one contender."""

    def __init__(self, num_windows: int, num_predictions: int) -> None:
        self.kl_NP = np.full((num_windows, num_predictions), np.nan, dtype=np.float32)
        self.loss_NP = np.full((num_windows, num_predictions), np.nan, dtype=np.float32)
        self.num_agreeing = 0
        self.seconds = 0.0

    def add(self, window: int, first: int, reference: ReferencePiece, logits_RV: torch.Tensor) -> None:
        """Add the predictions of a window from `first` on."""
        logprob_RV = torch.log_softmax(logits_RV, dim=-1, dtype=torch.float64)
        loss_R = -logprob_RV.gather(1, reference.target_ids_R1).squeeze(1)
        is_sound_R = logprob_RV.sum(dim=-1).isfinite()
        # Half the time of an argmax; of equally likely tokens either counts.
        is_same_R = logits_RV.gather(1, reference.argmax_R1).squeeze(1) == logits_RV.amax(dim=-1)
        self.num_agreeing += int((is_sound_R & is_same_R).sum())
        # In place: the tensor is twice as large as the logits.
        kl_R = logprob_RV.sub_(reference.logprob_RV).mul_(reference.prob_RV).sum(dim=-1).neg_().clamp_(min=0)
        place = slice(first, first + len(kl_R))
        self.kl_NP[window, place] = torch.where(is_sound_R, kl_R, math.inf).cpu().numpy()
        self.loss_NP[window, place] = torch.where(is_sound_R, loss_R, math.inf).cpu().numpy()

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Add the time of the context."""
        start = time.monotonic()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += time.monotonic() - start

    def quality(self, contender: Contender) -> Quality:
        """Compute the figures of all windows."""
        assert not np.isnan(self.loss_NP).any(), f"{contender.name} has missing predictions"
        kl_NP, count = self.kl_NP.astype(np.float64), self.kl_NP.size
        is_broken = bool(np.isinf(kl_NP).any())
        bins = np.array_split(kl_NP, min(NUM_BINS, kl_NP.shape[1]), axis=1)
        return Quality(
            name=contender.name,
            size_bytes=float(contender.size_bytes),
            num_predictions=count,
            perplexity=_exp(self.loss_NP.mean(dtype=np.float64)),
            mean_kl=float(kl_NP.mean()),
            kl_error=math.inf if is_broken else float(kl_NP.std()) / math.sqrt(count),
            p99_kl=float(np.quantile(kl_NP, 0.99, method="higher")),
            max_kl=float(kl_NP.max()),
            agreement=self.num_agreeing / count,
            kl_by_place=tuple(float(part.mean()) for part in bins),
            num_broken=int(np.isinf(kl_NP).sum()),
            seconds=self.seconds,
            note=contender.note,
        )


class HalfTokens:
    """Progress in whole tokens."""

    def __init__(self, num_tokens: int, on_progress: Callable[[int, int], None]) -> None:
        self._num_tokens, self._num_halves, self._num_reported = num_tokens, 0, 0
        self._on_progress = on_progress
        on_progress(0, num_tokens)

    def add(self, num_halves: int) -> None:
        """Add half tokens, and report whole ones."""
        self._num_halves += num_halves
        if self._num_halves // 2 > self._num_reported:
            self._num_reported = self._num_halves // 2
            self._on_progress(self._num_reported, self._num_tokens)


@torch.inference_mode()
def measure(
    reference: Contender,
    others: Sequence[Contender],
    windows: Sequence[Sequence[int]],
    on_progress: Callable[[int, int], None],
) -> list[Quality]:
    """Measure the reference, then all others against it. `on_progress(done, total)` counts tokens of all.

    A token counts half after reading and half after comparing: either may take most of the time.
    """
    contenders = [reference, *others]
    num_predictions = len(windows[0]) - 1
    tallies = [Tally(len(windows), num_predictions) for _ in contenders]
    halves = HalfTokens(len(contenders) * sum(map(len, windows)), on_progress)
    for index, token_ids in enumerate(windows):
        assert len(token_ids) == num_predictions + 1, f"window {index} has {len(token_ids)} tokens"
        all_steps = [steps_of(index, token_ids, contender.runner) for contender in contenders]
        for steps in zip(*all_steps, strict=True):
            hidden = []
            for contender, tally, step in zip(contenders, tallies, steps, strict=True):
                with tally.timed(contender.runner.device):
                    hidden.append(contender.runner.hidden_rows(step))
                halves.add(step.num_tokens)
            _compare(index, steps[0], contenders, tallies, hidden, halves)
    return [tally.quality(contender) for contender, tally in zip(contenders, tallies, strict=True)]


def steps_of(window: int, token_ids: Sequence[int], runner: Runner) -> list[LiveStep]:
    """Return the steps of one sequence on the first pages, in chunks."""
    limits, num_tokens = runner.limits, len(token_ids)
    chunk = limits.max_num_batched_tokens
    assert num_tokens <= limits.max_model_len, f"{num_tokens=} is more than {limits}"
    tables = ring_tables(runner.groups, num_tokens, chunk)
    sequence = TokenSequence(window, list(token_ids), num_tokens, SamplingParams(), seed=0, max_tokens=1, tables=tables)
    sequence.slot = 0  # states beside pages use the first slot
    starts = range(0, num_tokens, chunk)
    return [LiveStep((ScheduledSequence.of(sequence, start, min(chunk, num_tokens - start)),)) for start in starts]


def pieces_of(step: LiveStep, vocab_size: int) -> Iterator[tuple[int, slice, list[int]]]:
    """Yield a few predicting rows of a step at a time: position of the first, row slice, target tokens."""
    (item,) = step.scheduled
    num_rows = min(item.num_new_tokens, item.sequence.num_tokens - 1 - item.start)
    piece_rows = max(1, min(PROMPT_ROWS, PIECE_ELEMENTS // vocab_size))
    for offset in range(0, num_rows, piece_rows):
        rows = slice(offset, min(offset + piece_rows, num_rows))
        first = item.start + offset
        yield first, rows, item.sequence.token_ids[first + 1 : first + 1 + rows.stop - rows.start]


def _compare(
    window: int,
    step: LiveStep,
    contenders: Sequence[Contender],
    tallies: Sequence[Tally],
    hidden: Sequence[torch.Tensor],
    halves: HalfTokens,
) -> None:
    """Compare the logits of a chunk with the reference's, piece by piece."""
    runner, num_left = contenders[0].runner, len(contenders) * step.num_tokens
    for first, rows, targets in pieces_of(step, runner.vocab_size):
        piece = None
        for contender, tally, hidden_TH in zip(contenders, tallies, hidden, strict=True):
            with tally.timed(runner.device):
                logits_RV = contender.runner.row_logits(hidden_TH[rows])
            if piece is None:
                refuse_broken(contender, hidden_TH.dtype, logits_RV)
                piece = ReferencePiece.of(logits_RV, torch.tensor(targets, device=logits_RV.device))
            tally.add(window, first, piece, logits_RV)
            num_left -= len(targets)
            halves.add(len(targets))
    halves.add(num_left)  # the last token of a window has no prediction


def refuse_broken(reference: Contender, dtype: torch.dtype, logits_RV: torch.Tensor) -> None:
    """Refuse a reference with logits that are not finite; `dtype` is its compute type."""
    if not bool(logits_RV.isfinite().all()):
        widest = "Check the weights and scales for NaN or infinity."
        advice = widest if dtype == torch.float32 else "Run it in another dtype, such as float32."
        raise HoldfastError("eval.reference_not_finite", name=reference.name, advice=advice)


def _exp(number: float) -> float:
    try:
        return math.exp(number)
    except OverflowError:
        return math.inf


CHUNK_TOKENS = 512
"""Default tokens of a step: every contender has a workspace for them."""
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


def settle_config(config: EngineConfig, model: OpenModel, window: int) -> EngineConfig:
    """Settle type and device for one sequence of a window, in small steps."""
    config = replace(
        config,
        max_model_len=window,
        max_num_seqs=1,
        max_num_batched_tokens=min(window, config.max_num_batched_tokens or CHUNK_TOKENS),
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


def narrower_formats(config: EngineConfig, model: OpenModel) -> Possible:
    """List every format that is narrower than the reference and can run."""
    least = DTYPE_BYTES[config.dtype]
    formats = formats_of(model.spec.latent is not None, model.spec.compressed is not None)
    narrower = [name for name, own in formats.items() if own.is_quantized or DTYPE_BYTES[own.key_dtype] < least]
    return Possible.of(narrower, lambda name: format_entry(config, model, name).variant.config, model)


def protection_note(plan: RunnerPlan) -> str:
    """Name the layers with a wider format."""
    protected = plan.resolved.protected
    return f"layers {numbers(protected.layers)} in {protected.format.name}" if protected.layers else ""


def open_contenders(
    entries: Sequence[Entry], model: OpenModel, on_progress: Callable[[int, int], None]
) -> OpenedContenders:
    """Load the weights once and open a runner for each entry; the first is the reference."""
    built = build_variants([entry.variant for entry in entries], model, on_progress)
    contenders = []
    for entry, runner, plan in zip(entries, built.runners, built.plans, strict=True):
        num_bytes = plan.kv_bytes_per_token if entry.bytes_per_token is None else entry.bytes_per_token
        note = protection_note(plan) if entry.note is None else entry.note
        contenders.append(Contender(entry.name, runner, num_bytes, note))
    reference = built.plans[0]
    plain = reference.kv_bytes_per_token * PLAIN_BYTES / DTYPE_BYTES[reference.resolved.dtype]
    return OpenedContenders(contenders, plain, built.release)

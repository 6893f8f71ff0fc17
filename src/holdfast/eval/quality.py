"""Quality of one runner against another: divergence and loss of every prediction of a text.

T rows of a step, R rows of a piece, H hidden, V vocabulary, N windows, P predictions of a window

The reference reads the text once and keeps its final hidden states on the host, a few kilobytes per token. They become
logits again, a few rows at a time, for each contender. So contenders can be measured one after the other, and memory grows
with the tokens of the text alone.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from holdfast.cache.chunks import ring_tables
from holdfast.errors import HoldfastError
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence
from holdfast.request.sequence import Sequence as TokenSequence
from holdfast.runner.runner import Runner

PIECE_ELEMENTS = 2**22
"""Maximum logits of a piece; three float64 tensors of them live at once. Smaller pieces wait for threads more often."""
NUM_BINS = 8
"""Parts of a window with their own mean divergence."""
MAX_HIDDEN_BYTES = 2**30
"""Maximum bytes of kept hidden states."""


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
    perplexity_error: float
    """Standard error of the perplexity, if predictions are independent."""
    change_error: float
    """Standard error of perplexity / the reference's - 1. Both read the same tokens, so it is the smaller one."""
    mean_kl: float
    """KL(reference || contender), in nats."""
    kl_error: float
    """Standard error of the mean."""
    p99_kl: float
    p999_kl: float
    max_kl: float
    agreement: float
    """Share of predictions with the reference's argmax."""
    kl_by_place: tuple[float, ...]
    """Mean divergence in equal parts of a window."""
    num_broken: int
    """Predictions with logits that are not finite."""
    seconds: float
    """Time to read the text, without comparing."""
    note: str = ""


class Compared(NamedTuple):
    """A contender's predictions for some rows, against the reference's."""

    kl_R: torch.Tensor
    """float64; infinite if logits are not finite."""
    loss_R: torch.Tensor
    is_same_R: torch.Tensor
    """True if the reference's argmax is among the most likely tokens."""


def compare(reference_RV: torch.Tensor, logits_RV: torch.Tensor, target_ids_R: torch.Tensor) -> Compared:
    """Compare float32 logits in float64.

    KL(p || q) = log Z_q - log Z_p + sum of p (a - b), for logits a of p and b of q less their maxima.
    """
    top_R1, argmax_R1 = reference_RV.max(dim=-1, keepdim=True)
    own_top_R1 = logits_RV.amax(dim=-1, keepdim=True)
    is_same_R1 = logits_RV.gather(1, argmax_R1) == own_top_R1
    p_RV = reference_RV.double().sub_(top_R1)
    q_RV = logits_RV.double().sub_(own_top_R1)
    target_R = q_RV.gather(1, target_ids_R.unsqueeze(1)).squeeze(1)
    difference_RV = p_RV - q_RV
    p_RV.exp_()
    p_sum_R, q_sum_R = p_RV.sum(dim=-1), q_RV.exp_().sum(dim=-1)
    kl_R = torch.linalg.vecdot(p_RV, difference_RV).div_(p_sum_R).add_(q_sum_R.log()).sub_(p_sum_R.log())
    is_sound_R = kl_R.isfinite()
    # The sum turns -0.0 into 0.0.
    kl_R = torch.where(is_sound_R, kl_R.clamp_(min=0) + 0.0, math.inf)
    loss_R = torch.where(is_sound_R, q_sum_R.log() - target_R, math.inf)
    return Compared(kl_R, loss_R, is_sound_R & is_same_R1.squeeze(1))


class Tally:
    """Divergence and loss of every prediction of one contender."""

    def __init__(self, num_windows: int, num_predictions: int) -> None:
        self.kl_NP = np.full((num_windows, num_predictions), np.nan, dtype=np.float32)
        self.loss_NP = np.full((num_windows, num_predictions), np.nan, dtype=np.float32)
        self.is_same_NP = np.zeros((num_windows, num_predictions), dtype=bool)
        self.seconds = 0.0

    def add(self, window: int, first: int, compared: Compared) -> None:
        """Add the predictions of a window from `first` on."""
        place = slice(first, first + len(compared.kl_R))
        self.is_same_NP[window, place] = compared.is_same_R.cpu().numpy()
        self.kl_NP[window, place] = compared.kl_R.cpu().numpy()
        self.loss_NP[window, place] = compared.loss_R.cpu().numpy()

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Add the time of the context."""
        start = time.monotonic()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += time.monotonic() - start

    def quality(self, contender: Contender, reference_loss_NP: np.ndarray, first: int = 0) -> Quality:
        """Compute the figures of all windows, from their prediction `first` on."""
        assert not np.isnan(self.loss_NP).any(), f"{contender.name} has missing predictions"
        kl_NP, loss_NP = self.kl_NP[:, first:].astype(np.float64), self.loss_NP[:, first:].astype(np.float64)
        is_broken = bool(np.isinf(kl_NP).any())
        perplexity, error = _perplexity(loss_NP, is_broken)
        _, change_error = _perplexity(loss_NP - reference_loss_NP[:, first:], is_broken)
        bins = np.array_split(kl_NP, min(NUM_BINS, kl_NP.shape[1]), axis=1)
        return Quality(
            name=contender.name,
            size_bytes=float(contender.size_bytes),
            num_predictions=kl_NP.size,
            perplexity=perplexity,
            perplexity_error=error,
            change_error=change_error,
            mean_kl=float(kl_NP.mean()),
            kl_error=math.inf if is_broken else standard_error(kl_NP),
            p99_kl=float(np.quantile(kl_NP, 0.99, method="higher")),
            p999_kl=float(np.quantile(kl_NP, 0.999, method="higher")),
            max_kl=float(kl_NP.max()),
            agreement=int(self.is_same_NP[:, first:].sum()) / kl_NP.size,
            kl_by_place=tuple(float(part.mean()) for part in bins),
            num_broken=int(np.isinf(kl_NP).sum()),
            seconds=self.seconds,
            note=contender.note,
        )


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean of independent values."""
    return float(values.std()) / math.sqrt(values.size)


def _perplexity(loss_NP: np.ndarray, is_broken: bool) -> tuple[float, float]:
    """Return exp(mean loss) with its standard error, to first order."""
    if is_broken:
        return math.inf, math.inf
    perplexity = _exp(float(loss_NP.mean()))
    return perplexity, perplexity * standard_error(loss_NP)


def _exp(number: float) -> float:
    try:
        return math.exp(number)
    except OverflowError:
        return math.inf


class HalfTokens:
    """Progress in whole tokens. A token counts half after reading and half after comparing: either may take longer."""

    def __init__(self, num_tokens: int, on_progress: Callable[[int, int], None]) -> None:
        self._num_tokens, self._num_halves, self._num_reported = num_tokens, 0, 0
        self._on_progress = on_progress
        on_progress(0, num_tokens)

    def add(self, num_halves: int) -> None:
        """Add half tokens, and report whole ones."""
        self._num_halves += num_halves
        num_done = min(self._num_halves // 2, self._num_tokens)
        if num_done > self._num_reported:
            self._num_reported = num_done
            self._on_progress(num_done, self._num_tokens)

    def finish(self) -> None:
        """Report all tokens: an answer may have ended before its limit."""
        self.add(2 * self._num_tokens - self._num_halves)


class ReferenceReading:
    """Hidden states of the reference for a whole text, on the host."""

    def __init__(self, reference: Contender, windows: Sequence[Sequence[int]]) -> None:
        self.reference = reference
        self.windows = windows
        self.tally = Tally(len(windows), len(windows[0]) - 1)
        self._hidden: dict[tuple[int, int], torch.Tensor] = {}

    def steps(self) -> Iterator[tuple[int, LiveStep]]:
        """Yield every chunk of every window."""
        for index, token_ids in enumerate(self.windows):
            assert len(token_ids) == len(self.windows[0]), f"window {index} has {len(token_ids)} tokens"
            for step in steps_of(index, token_ids, self.reference.runner):
                yield index, step

    @torch.inference_mode()
    def read(self, on_halves: Callable[[int], None]) -> Quality:
        """Read the text once and return the reference's figures. `on_halves` gets half tokens, as they are done."""
        runner = self.reference.runner
        for index, step in self.steps():
            with self.tally.timed(runner.device):
                hidden_TH = runner.hidden_rows(step)
            self._hidden[index, step.scheduled[0].start] = hidden_TH.to("cpu", copy=True)
            on_halves(step.num_tokens)
            for first, _, logits_RV, target_ids_R in self.pieces(index, step):
                refuse_broken(self.reference, hidden_TH.dtype, logits_RV)
                self.tally.add(index, first, compare(logits_RV, logits_RV, target_ids_R))
            on_halves(step.num_tokens)
        return self.tally.quality(self.reference, self.tally.loss_NP)

    def pieces(self, index: int, step: LiveStep) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor]]:
        """Yield a few rows of a step at a time: first position, row slice, logits, target ids."""
        runner = self.reference.runner
        hidden_TH = self._hidden[index, step.scheduled[0].start].to(runner.device)
        for first, rows, targets in pieces_of(step, runner.vocab_size):
            logits_RV = runner.row_logits(hidden_TH[rows])
            yield first, rows, logits_RV, torch.tensor(targets, device=logits_RV.device)


def measure_against(reading: ReferenceReading, contender: Contender, on_halves: Callable[[int], None]) -> Quality:
    """Measure one contender against the reference. Their steps are equally long."""
    return tally_against(reading, contender, on_halves).quality(contender, reading.tally.loss_NP)


@torch.inference_mode()
def tally_against(reading: ReferenceReading, contender: Contender, on_halves: Callable[[int], None]) -> Tally:
    """Compare every prediction of one contender with the reference's."""
    runner, reference = contender.runner, reading.reference.runner
    chunk, wanted = runner.limits.max_num_batched_tokens, reference.limits.max_num_batched_tokens
    assert chunk == wanted, f"{contender.name} has steps of {chunk} tokens, the reference of {wanted}"
    tally, device = Tally(*reading.tally.kl_NP.shape), runner.device
    own_steps = (step for index, token_ids in enumerate(reading.windows) for step in steps_of(index, token_ids, runner))
    for (index, step), own_step in zip(reading.steps(), own_steps, strict=True):
        with tally.timed(device):
            hidden_TH = runner.hidden_rows(own_step)
        on_halves(step.num_tokens)
        for first, rows, reference_RV, target_ids_R in reading.pieces(index, step):
            with tally.timed(device):
                logits_RV = runner.row_logits(hidden_TH[rows])
            tally.add(index, first, compare(reference_RV, logits_RV, target_ids_R))
        on_halves(step.num_tokens)
    return tally


def most_windows(window: int, hidden_size: int, dtype: str) -> int:
    """Return how many windows the reference's hidden states may have, at least one."""
    return max(1, MAX_HIDDEN_BYTES // (window * hidden_size * DTYPE_BYTES[dtype]))


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


def refuse_broken(reference: Contender, dtype: torch.dtype, logits_RV: torch.Tensor) -> None:
    """Refuse a reference with logits that are not finite; `dtype` is its compute type."""
    if not bool(logits_RV.isfinite().all()):
        widest = "Check the weights and scales for NaN or infinity."
        advice = widest if dtype == torch.float32 else "Run it in another dtype, such as float32."
        raise HoldfastError("eval.reference_not_finite", name=reference.name, advice=advice)

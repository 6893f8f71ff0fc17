"""Runner: one step on one device: rows, model, logits, chosen tokens; on a GPU from captured graphs where one fits.

T rows of a step, R rows whose logits are wanted, S sequences that sample, H hidden, V vocabulary
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from holdfast.attention.backend import Batch, GroupedAttention
from holdfast.cache.chunks import ring_tables
from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.models.model import Model
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence, SequenceResult, StepResult, TokenLogprobs
from holdfast.runner.graphs import StepGraphs
from holdfast.runner.sampling.batch import SequenceSample
from holdfast.runner.sampling.sampler import Sampler
from holdfast.runner.step_inputs import BatchBuffers


@dataclass(frozen=True, slots=True)
class _WantedRows:
    """Which of the wanted logits rows belong to one scheduled sequence."""

    prompt_start: int
    num_prompt: int
    sample: int | None


class Runner:
    """Runs steps. Everything it needs was built and allocated before: what a step goes through stands here by name."""

    def __init__(
        self,
        model: Model,
        backend: GroupedAttention[Any],
        buffers: BatchBuffers,
        sampler: Sampler,
        limits: Limits,
        groups: SequenceABC[CacheGroup],
        num_pages: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        min_rows: int = 1,
    ) -> None:
        """`groups` are those of the cache; `min_rows`: smaller steps are padded to it, where products of fewer rows round
        differently."""
        self.limits = limits
        self.groups = tuple(groups)
        self.num_pages = num_pages
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.model = model
        self.backend = backend
        self.buffers = buffers
        self.sampler = sampler
        self.device = device
        self._min_rows = min_rows
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graphs: StepGraphs | None = None
        self._dummy_ids = count(-1, -1)

    @torch.inference_mode()
    def execute(self, step: LiveStep) -> StepResult:
        """Run one step."""
        with self._on_stream():
            logit_rows, wanted = _wanted_rows(step)
            if any(rows.num_prompt for rows in wanted):
                return self._with_prompt_logprobs(step, logit_rows, wanted)
            samples = iter(self._samples(step, logit_rows))
        results = []
        for rows in wanted:
            token_id, logprobs = next(samples) if rows.sample is not None else (None, None)
            results.append(SequenceResult.of(token_id, logprobs, ()))
        return StepResult(tuple(results))

    @torch.inference_mode()
    def hidden_rows(self, step: LiveStep) -> torch.Tensor:
        """Run a step and choose nothing: the final hidden states of every row, [T, H], valid until the next step."""
        with self._handing_over():
            batch = self._fill(step, list(range(step.num_tokens)))
            return self.model.hidden(batch, self.backend.plan(batch))[: step.num_tokens]

    @torch.inference_mode()
    def row_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """float32 logits of up to PROMPT_ROWS of these rows: [R, V], valid until the next call or step."""
        with self._handing_over():
            return self.model.logits(hidden_RH)

    @torch.inference_mode()
    def warm(
        self,
        rows: SequenceABC[int],
        graphs: StepGraphs | None,
        on_progress: Callable[[int, int], None],
        on_warm: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run every kernel in every form, so that nothing is compiled afterwards; and capture the graphs.

        `rows` are numbers of rows whose steps take every form together (runner/graphs.py). `on_progress(done, total)`
        counts graphs, `on_warm` the steps before them.
        """
        with self._on_stream():
            step, logit_rows = self._dummy_step(self.limits.max_num_batched_tokens)
            batch = self._fill(step, logit_rows)
            self.model.step_logits(batch, self.backend.plan(batch, captured=True))  # every size of tiles
            for number, num_rows in enumerate(rows, 1):
                if on_warm is not None:
                    on_warm(number, len(rows) + 1)
                self._warm_rows(num_rows)
        if graphs is not None and self._stream is not None:
            with self._on_stream():
                batches = {}

                def run(size: int, is_decode: bool) -> torch.Tensor:
                    if (size, is_decode) not in batches:
                        batches.clear()
                        batch = self._capture_batch(size, is_decode, graphs)
                        batches[size, is_decode] = batch, self.backend.plan(batch, captured=True)
                    logits_RV = self.model.step_logits(*batches[size, is_decode])
                    self.sampler.find_argmax(logits_RV)
                    return logits_RV

                graphs.capture(run, self._stream, on_progress)
                self._stream.synchronize()
            self.graphs = graphs

    def _warm_rows(self, num_rows: int) -> None:
        """Both ways that so many rows can go: a small batch takes the fused decode path where all of its logits are wanted."""
        batch = self.buffers.fill(LiveStep(()), [], num_rows)
        plan = self.backend.plan(batch, captured=True)
        hidden_TH = self.model.hidden(batch, plan)
        if num_rows <= max(self.limits.sampled_rows, PROMPT_ROWS):
            self.model.logits(hidden_TH)
            self.sampler.warm(self.model.step_logits(batch, plan))

    def close(self) -> None:
        """Let go of the graphs and of everything that holds memory; nothing can run afterwards. Again is nothing."""
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = None
        for name in ("model", "backend", "buffers", "sampler"):
            vars(self).pop(name, None)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def _handing_over(self) -> Iterator[None]:
        """On the runner's stream, after what the caller's stream has begun and before what it begins next."""
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)

    def _fill(self, step: LiveStep, logit_rows: list[int]) -> Batch:
        """As it is, or padded to the least number of rows; those whose logits are wanted too, if there are any."""
        num_rows, num_logits = max(step.num_tokens, self._min_rows), max(len(logit_rows), self._min_rows)
        return self.buffers.fill(step, logit_rows, num_rows, num_logits if logit_rows else 0)

    def _samples(self, step: LiveStep, logit_rows: list[int]) -> SequenceABC[SequenceSample]:
        """Run the model for a step that wants one row of each sequence that samples, and choose."""
        num_rows, num_logits = step.num_tokens, len(logit_rows)
        is_decode = num_logits == num_rows == len(step.scheduled)
        size = self.graphs.size_for(num_rows, num_logits, is_decode) if self.graphs is not None else None
        sequences = [item.sequence for item in step.sampling()]
        if self.graphs is None or size is None:
            batch = self._fill(step, logit_rows)
            plan = self.backend.plan(batch)
            if not logit_rows:
                self.model.hidden(batch, plan)
                return []
            logits_SV = self.model.step_logits(batch, plan)[:num_logits]
            return self.sampler.sample(logits_SV, sequences, self.eos_token_ids)
        batch = self.buffers.fill(step, logit_rows, size, self.graphs.logit_rows(size, is_decode))
        self.backend.plan(batch, captured=True)
        logits_RV = self.graphs.replay(size, is_decode)
        if not logit_rows:
            return []
        argmax_S = self.sampler.argmax_S[:num_logits]
        return self.sampler.sample(logits_RV[:num_logits], sequences, self.eos_token_ids, argmax_S)

    def _with_prompt_logprobs(self, step: LiveStep, logit_rows: list[int], wanted: list[_WantedRows]) -> StepResult:
        batch = self._fill(step, logit_rows)
        hidden_RH = self.model.hidden(batch, self.backend.plan(batch))
        prompts = [
            self._prompt_logprobs(item, rows, hidden_RH) if rows.num_prompt else ()
            for item, rows in zip(step.scheduled, wanted, strict=True)
        ]
        results = []
        for item, rows, prompt in zip(step.scheduled, wanted, prompts, strict=True):
            token_id, logprobs = None, None
            if rows.sample is not None:
                logits_1V = self.model.logits(hidden_RH[rows.sample : rows.sample + 1])
                ((token_id, logprobs),) = self.sampler.sample(logits_1V, [item.sequence], self.eos_token_ids)
            results.append(SequenceResult.of(token_id, logprobs, prompt))
        return StepResult(tuple(results))

    def _prompt_logprobs(
        self, item: ScheduledSequence, rows: _WantedRows, hidden_RH: torch.Tensor
    ) -> tuple[TokenLogprobs, ...]:
        num_top = item.sequence.params.prompt_logprobs
        assert num_top is not None, f"{item.sequence.sequence_id=} asked for no prompt logprobs"
        logprobs: list[TokenLogprobs] = []
        for offset in range(0, rows.num_prompt, PROMPT_ROWS):
            count = min(PROMPT_ROWS, rows.num_prompt - offset)
            first = rows.prompt_start + offset
            logits_TV = self.model.logits(hidden_RH[first : first + count])
            target_start = item.start + offset + 1
            targets = item.sequence.token_ids[target_start : target_start + count]
            logprobs.extend(self.sampler.prompt_logprobs(logits_TV, targets, num_top))
        return tuple(logprobs)

    def _capture_batch(self, size: int, is_decode: bool, graphs: StepGraphs) -> Batch:
        """A step of this shape: padding alone, or a dummy prompt whose last rows are wanted."""
        if is_decode:
            return self.buffers.fill(LiveStep(()), [], size)
        step, logit_rows = self._dummy_step(size)
        return self.buffers.fill(step, logit_rows, size, graphs.logit_rows(size, is_decode))

    def _dummy_step(self, num_rows: int) -> tuple[LiveStep, list[int]]:
        """Prompts of so many rows together, on the first pages, which hold nothing yet; only their last rows are wanted."""
        longest = self.limits.max_model_len
        items, logit_rows, row = [], [], 0
        while row < num_rows and len(items) < self.limits.max_num_seqs:
            length = min(longest, num_rows - row)
            sequence = Sequence(next(self._dummy_ids), [0] * length, length, SamplingParams(), seed=0, max_tokens=1)
            sequence.tables = ring_tables(self.groups, length, length)
            items.append(ScheduledSequence.of(sequence, 0, length))
            row += length
            if len(logit_rows) < num_rows - 1:
                logit_rows.append(row - 1)
        return LiveStep(tuple(items)), logit_rows


def _wanted_rows(step: LiveStep) -> tuple[list[int], list[_WantedRows]]:
    """Rows of the step whose logits are wanted, and whose they are."""
    logit_rows: list[int] = []
    wanted: list[_WantedRows] = []
    row = 0
    for item in step.scheduled:
        end = row + item.num_new_tokens
        prompt_start = len(logit_rows)
        num_prompt = 0
        if item.sequence.params.prompt_logprobs is not None:
            num_prompt = max(0, min(item.num_new_tokens, item.sequence.num_prompt_tokens - 1 - item.start))
            logit_rows.extend(range(row, row + num_prompt))
        sample = None
        if item.samples:
            sample = len(logit_rows)
            logit_rows.append(end - 1)
        wanted.append(_WantedRows(prompt_start, num_prompt, sample))
        row = end
    return logit_rows, wanted

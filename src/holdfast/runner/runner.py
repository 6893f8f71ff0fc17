"""Runner: one step on one device: rows, model, logits, chosen tokens."""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.config import Limits
from holdfast.models.decoder import Decoder
from holdfast.request.sequence import ScheduledSequence, Step
from holdfast.runner.batch_buffers import BatchBuffers
from holdfast.runner.result import SequenceResult, StepResult, TokenLogprobs
from holdfast.runner.sampler import Sampler
from holdfast.runner.sampling_batch import to_device

LOGIT_ROWS_AT_ONCE = 64
"""Prompt log-probabilities take logits of every prompt row; they are computed this many rows at a time."""


@dataclass(frozen=True, slots=True)
class _WantedRows:
    """Which of the wanted logits rows belong to one scheduled sequence."""

    prompt_start: int
    num_prompt: int
    sample: int | None


class Runner:
    """Runs steps. Everything it needs was built and allocated before."""

    def __init__(
        self,
        decoder: Decoder,
        buffers: BatchBuffers,
        sampler: Sampler,
        limits: Limits,
        num_pages: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.limits = limits
        self.num_pages = num_pages
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._decoder = decoder
        self._buffers = buffers
        self._sampler = sampler

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Run one step."""
        logit_rows, wanted = _wanted_rows(step)
        hidden_RH = self._decoder.hidden(self._buffers.fill(step, logit_rows))
        prompt_logprobs = [
            self._prompt_logprobs(item, rows, hidden_RH) if rows.num_prompt else ()
            for item, rows in zip(step.scheduled, wanted, strict=True)
        ]
        samples = iter(self._samples(step, wanted, hidden_RH))
        results = []
        for rows, prompt in zip(wanted, prompt_logprobs, strict=True):
            token_id, logprobs = next(samples) if rows.sample is not None else (None, None)
            results.append(SequenceResult(token_id, logprobs, prompt))
        return StepResult(tuple(results))

    def _samples(
        self, step: Step, wanted: list[_WantedRows], hidden_RH: torch.Tensor
    ) -> SequenceABC[tuple[int, TokenLogprobs | None]]:
        sample_rows = [rows.sample for rows in wanted if rows.sample is not None]
        if not sample_rows:
            return []
        if len(sample_rows) != hidden_RH.shape[0]:
            hidden_RH = hidden_RH.index_select(0, to_device(np.array(sample_rows), hidden_RH.device))
        sequences = [item.sequence for item in step.sampling()]
        return self._sampler.sample(self._decoder.logits(hidden_RH), sequences, self.eos_token_ids)

    def _prompt_logprobs(
        self, item: ScheduledSequence, rows: _WantedRows, hidden_RH: torch.Tensor
    ) -> tuple[TokenLogprobs, ...]:
        num_top = item.sequence.params.prompt_logprobs
        assert num_top is not None, f"{item.sequence.sequence_id=} asked for no prompt logprobs"
        logprobs: list[TokenLogprobs] = []
        for offset in range(0, rows.num_prompt, LOGIT_ROWS_AT_ONCE):
            count = min(LOGIT_ROWS_AT_ONCE, rows.num_prompt - offset)
            first = rows.prompt_start + offset
            logits_TV = self._decoder.logits(hidden_RH[first : first + count])
            target_start = item.start + offset + 1
            targets = item.sequence.token_ids[target_start : target_start + count]
            logprobs.extend(self._sampler.prompt_logprobs(logits_TV, targets, num_top))
        return tuple(logprobs)


def _wanted_rows(step: Step) -> tuple[list[int], list[_WantedRows]]:
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

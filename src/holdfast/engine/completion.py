"""Completion: one answer in the making: its text so far, when it ends, and the deltas that tell; no torch."""

from dataclasses import dataclass

from holdfast.engine.logprobs import PromptLogprobs, position_logprobs
from holdfast.request.outputs import CompletionDelta, FinishReason, RequestMetrics
from holdfast.request.sequence import Sequence
from holdfast.runner.sampling.result import SequenceResult
from holdfast.text.detokenizer import IncrementalDetokenizer
from holdfast.text.stop_strings import StopStrings
from holdfast.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a completion is over."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


class Completion:
    """One sequence of a request, and the text that its tokens have become.

    Everything here that touches text runs code that the request controls, and may raise; the engine then ends the
    request, and only it.
    """

    def __init__(
        self, request_id: str, index: int, sequence: Sequence, tokenizer: Tokenizer | None, arrived_at: float
    ) -> None:
        params = sequence.params
        self.request_id = request_id
        self.index = index
        self.sequence = sequence
        self.arrived_at = arrived_at
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, sequence.token_ids, params.skip_special_tokens)
        self._stop_strings = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._prompt_logprobs: PromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(sequence.num_prompt_tokens, params.prompt_logprobs)

    def collect_prompt_logprobs(self, start: int, result: SequenceResult) -> None:
        """Take in what a step says about the prompt, wherever in the prompt it was."""
        if self._prompt_logprobs is not None and result.prompt_logprobs:
            self._prompt_logprobs.collect(start, result.prompt_logprobs, self._tokenizer)

    def advance(
        self, token_id: int, result: SequenceResult, eos_token_ids: frozenset[int], now: float
    ) -> tuple[CompletionDelta, Ending | None]:
        """The sequence has got this token: what it adds, and whether it was the last."""
        is_first = self.first_token_at is None
        if is_first:
            self.first_token_at = now
        text, ending = self._text_and_ending(token_id, eos_token_ids)
        logprobs = None
        num_top = self.sequence.params.logprobs
        if num_top is not None:
            assert result.logprobs is not None, f"sequence {self.sequence.sequence_id} has no logprobs for {token_id=}"
            logprobs = (position_logprobs(result.logprobs, num_top, self._tokenizer),)
        delta = CompletionDelta(
            request_id=self.request_id,
            index=self.index,
            text=text,
            token_ids=(token_id,),
            logprobs=logprobs,
            finish_reason=None if ending is None else ending.finish_reason,
            stop_reason=None if ending is None else ending.stop_reason,
            num_cached_tokens=self.sequence.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs.whole() if is_first and self._prompt_logprobs is not None else None,
            metrics=None if ending is None else self._metrics(now),
        )
        return delta, ending

    def end(self, ending: Ending, now: float) -> CompletionDelta:
        """The last delta of a completion that ends without a token of its own. Runs nothing that could fail."""
        return CompletionDelta(
            request_id=self.request_id,
            index=self.index,
            text="",
            token_ids=(),
            logprobs=None,
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
            num_cached_tokens=self.sequence.num_cached_tokens,
            metrics=self._metrics(now),
            error=ending.error,
        )

    def _text_and_ending(self, token_id: int, eos_token_ids: frozenset[int]) -> tuple[str, Ending | None]:
        params = self.sequence.params
        num_output_tokens = self.sequence.num_output_tokens
        may_stop = num_output_tokens >= params.min_tokens
        ending: Ending | None = None
        if may_stop and token_id in eos_token_ids and not params.ignore_eos:
            ending = Ending("stop")
        elif may_stop and token_id in params.stop_token_ids:
            ending = Ending("stop", token_id)
        text = "" if ending is not None or self._detokenizer is None else self._detokenizer.append([token_id])
        if ending is None and num_output_tokens >= self.sequence.max_tokens:
            ending = Ending("length")
        if ending is not None and self._detokenizer is not None:
            text += self._detokenizer.flush()
        if self._stop_strings is None:
            return text, ending
        if not may_stop:
            return self._stop_strings.feed_unstoppable(text), ending
        shown, matched = self._stop_strings.feed(text)
        if matched is not None:
            return shown, Ending("stop", matched)
        return shown if ending is None else shown + self._stop_strings.flush(), ending

    def _metrics(self, now: float) -> RequestMetrics | None:
        if self.first_token_at is None or self.scheduled_at is None:
            return None
        return RequestMetrics(
            queue_seconds=self.scheduled_at - self.arrived_at,
            first_token_seconds=self.first_token_at - self.arrived_at,
            total_seconds=now - self.arrived_at,
            num_cached_tokens=self.sequence.num_cached_tokens,
            num_preemptions=self.sequence.num_preemptions,
        )

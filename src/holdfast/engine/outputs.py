"""Outputs from tokens: text and ending of a completion, and its deltas, merged or summed up; no torch.

SequenceOutput -> Completion -> CompletionDelta -> OutputAssembler -> RequestOutput
                                                -> DeltaBuffer, until a reader takes them
"""

from dataclasses import dataclass, field, replace

from holdfast.engine.messages import CoreRequest, Ending, SequenceOutput
from holdfast.request.outputs import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from holdfast.request.sampling_params import RequestOutputKind
from holdfast.request.sequence import TokenLogprobs
from holdfast.text.detokenizer import TextStream
from holdfast.text.stop_strings import StopStrings
from holdfast.text.tokenizer import Tokenizer


def position_logprobs(measured: TokenLogprobs, num_top: int, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """Map the token at a position, then the `num_top` most likely ones, each once."""
    found = {measured.token_id: (measured.logprob, measured.rank)}
    for place, (token_id, logprob) in enumerate(measured.top[:num_top]):
        found.setdefault(token_id, (logprob, place + 1))
    return {
        token_id: Logprob(logprob, rank, "" if tokenizer is None else tokenizer.token_text(token_id))
        for token_id, (logprob, rank) in found.items()
    }


class PromptLogprobs:
    """Prompt logprobs, collected from steps. A preempted sequence recomputes its prompt; known ones are kept."""

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self._num_top = num_top
        self._by_position: list[PositionLogprobs | None] = [None]
        self._num_prompt_tokens = num_prompt_tokens

    def collect(self, start: int, measured: tuple[TokenLogprobs, ...], tokenizer: Tokenizer | None) -> None:
        """Add prompt positions start + 1, start + 2, ..."""
        num_known = len(self._by_position)
        assert start + 1 <= num_known, f"prompt positions {num_known} to {start} were computed without logprobs"
        for entry in measured[num_known - start - 1 :]:
            self._by_position.append(position_logprobs(entry, self._num_top, tokenizer))

    def whole(self) -> tuple[PositionLogprobs | None, ...]:
        """Return one entry per prompt token; the first is None."""
        assert len(self._by_position) == self._num_prompt_tokens, (
            f"{len(self._by_position)} of {self._num_prompt_tokens} prompt positions have logprobs"
        )
        return tuple(self._by_position)


class Completion:
    """One sequence of a request and its text.

    Code that the request controls may raise here; the front then ends that request alone.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        request: CoreRequest,
        tokenizer: Tokenizer | None,
        arrived_at: float,
        kept_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        params = request.params
        self.request_id = request_id
        self.index = index
        self.request = request
        self._arrived_at = arrived_at
        self._first_token_at: float | None = None
        self._queue_seconds = 0.0
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._num_output_tokens = 0
        self._tokenizer = tokenizer
        self._text_stream: TextStream | None = None
        if tokenizer is not None and params.detokenize:
            self._text_stream = tokenizer.text_stream(params.skip_special_tokens, kept_token_ids)
            self._text_stream.follow(request.token_ids)
        self._stop_strings = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._prompt_logprobs: PromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(len(request.token_ids), params.prompt_logprobs)

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    def tokens_per_second(self, now: float) -> float:
        """Output tokens a second since the first; 0 before the second."""
        if self._first_token_at is None or now <= self._first_token_at:
            return 0.0
        return max(self._num_output_tokens - 1, 0) / (now - self._first_token_at)

    def advance(self, output: SequenceOutput, now: float) -> CompletionDelta | None:
        """Return the delta of a step: tokens up to a stop string, and the ending; None without either."""
        self._queue_seconds = output.queue_seconds
        self._num_cached_tokens = output.num_cached_tokens
        self._num_preemptions = output.num_preemptions
        if self._prompt_logprobs is not None and output.prompt_logprobs:
            self._prompt_logprobs.collect(output.prompt_start, output.prompt_logprobs, self._tokenizer)
        if not output.token_ids:
            return None if output.ending is None else self.end(output.ending, now, output.pooled)
        is_first = self._first_token_at is None
        if is_first:
            self._first_token_at = now
        text, num_tokens, ending = self._text_and_ending(output)
        logprobs = None
        num_top = self.request.params.logprobs
        if num_top is not None:
            measured = output.logprobs[:num_tokens]
            assert len(measured) == num_tokens, f"sequence {self.sequence_id} has no logprobs for {num_tokens=}"
            logprobs = tuple(position_logprobs(entry, num_top, self._tokenizer) for entry in measured)
        prompt_logprobs = self._prompt_logprobs.whole() if is_first and self._prompt_logprobs is not None else None
        delta = CompletionDelta(
            *(self.request_id, self.index, text, output.token_ids[:num_tokens], logprobs, None, None),
            *(self._num_cached_tokens, prompt_logprobs),
        )
        return delta if ending is None else self._ended(delta, ending, now)

    def end(self, ending: Ending, now: float, pooled: bytes = b"") -> CompletionDelta:
        """Return the last delta of a completion that ends without a token. Never fails."""
        delta = CompletionDelta(
            self.request_id, self.index, "", (), None, None, None, self._num_cached_tokens, pooled=pooled
        )
        return self._ended(delta, ending, now)

    def _ended(self, delta: CompletionDelta, ending: Ending, now: float) -> CompletionDelta:
        finish_reason, stop_reason, error = ending
        metrics = self._metrics(now)
        return replace(delta, finish_reason=finish_reason, stop_reason=stop_reason, error=error, metrics=metrics)

    def _text_and_ending(self, output: SequenceOutput) -> tuple[str, int, Ending | None]:
        """Return the new text, how many tokens count, and the ending: by a stop string, or the core's."""
        texts, last = [], len(output.token_ids) - 1
        for place, token_id in enumerate(output.token_ids):
            ending = output.ending if place == last else None
            self._num_output_tokens += 1
            text, matched = self._text_of(token_id, ending)
            texts.append(text)
            if matched is not None:
                return "".join(texts), place + 1, Ending("stop", matched)
        return "".join(texts), last + 1, output.ending

    def _text_of(self, token_id: int, ending: Ending | None) -> tuple[str, str | None]:
        """Return the text of one more token, and the stop string that it completes."""
        # A token that stops the sequence is not text.
        is_text = ending is None or ending.finish_reason != "stop"
        text = self._text_stream.push([token_id]) if self._text_stream is not None and is_text else ""
        if ending is not None and self._text_stream is not None:
            text += self._text_stream.finish()
        if self._stop_strings is None:
            return text, None
        if self._num_output_tokens < self.request.params.min_tokens:
            return self._stop_strings.feed_unstoppable(text), None
        shown, matched = self._stop_strings.feed(text)
        return (shown if matched is not None or ending is None else shown + self._stop_strings.flush()), matched

    def _metrics(self, now: float) -> RequestMetrics | None:
        if self._first_token_at is None:
            return None
        return RequestMetrics(
            queue_seconds=self._queue_seconds,
            first_token_seconds=self._first_token_at - self._arrived_at,
            total_seconds=now - self._arrived_at,
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=self._num_preemptions,
        )


@dataclass(slots=True)
class _Parts:
    """The deltas of one completion."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    last: CompletionDelta | None = None

    def add(self, delta: CompletionDelta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        self.last = delta

    def text(self) -> str:
        # Keep the joined text, so that a call after every token stays cheap.
        self.texts = ["".join(self.texts)]
        return self.texts[0]

    def merged(self) -> CompletionDelta:
        """Return all deltas as one, without the prompt's logprobs."""
        assert self.last is not None, "a completion waits without a delta"
        return replace(
            self.last,
            text=self.text(),
            token_ids=tuple(self.token_ids),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None,
        )


class OutputAssembler:
    """Sums up the deltas of one request; `output()` returns a snapshot."""

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], n: int) -> None:
        self._request_id = ""
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._parts = [_Parts() for _ in range(n)]
        self._cumulative: list[float | None] = [None] * n
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._num_cached_tokens = 0
        self._metrics: list[RequestMetrics] = []
        self._error: str | None = None
        self._num_unfinished = n

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def add(self, delta: CompletionDelta) -> None:
        """Add a delta."""
        self._request_id = delta.request_id
        self._parts[delta.index].add(delta)
        if delta.logprobs is not None:
            total = self._cumulative[delta.index] or 0.0
            for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=True):
                total += logprobs[token_id].logprob  # one by one: the sum must not depend on the batching
            self._cumulative[delta.index] = total
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = list(delta.prompt_logprobs)
        if delta.index == 0:
            self._num_cached_tokens = delta.num_cached_tokens
        if delta.metrics is not None:
            self._metrics.append(delta.metrics)
        if self._error is None:
            self._error = delta.error
        self._num_unfinished -= delta.finish_reason is not None

    def output(self) -> RequestOutput:
        """Return the request so far."""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[
                self._completion(index, None if parts.last is None else parts.merged())
                for index, parts in enumerate(self._parts)
            ],
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            metrics=_merged(self._metrics) if self.finished else None,
            error=self._error,
        )

    def added(self, deltas: list[CompletionDelta]) -> RequestOutput:
        """Like `output`, with these deltas, added before, instead of whole completions."""
        output = self.output()
        output.outputs = [self._completion(delta.index, delta) for delta in deltas]
        return output

    def reading(self, deltas: list[CompletionDelta], kind: RequestOutputKind | str) -> RequestOutput | None:
        """Return what a reader gets after these deltas, by output_kind; None: nothing yet."""
        if kind == RequestOutputKind.DELTA:
            return self.added(deltas)
        return self.output() if kind == RequestOutputKind.CUMULATIVE or self.finished else None

    def _completion(self, index: int, delta: CompletionDelta | None) -> CompletionOutput:
        if delta is None:
            return CompletionOutput(index)
        return CompletionOutput(
            *(index, delta.text, list(delta.token_ids), self._cumulative[index]),
            *(None if delta.logprobs is None else list(delta.logprobs), delta.finish_reason, delta.stop_reason),
            pooled=delta.pooled,
        )


class DeltaBuffer:
    """Unread deltas of one request, merged by completion: never more than the answer."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, delta: CompletionDelta) -> None:
        """Merge a delta."""
        self._parts.setdefault(delta.index, _Parts()).add(delta)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs

    def take(self) -> list[CompletionDelta]:
        """Return and forget unread deltas, one per completion."""
        taken = [parts.merged() for _, parts in sorted(self._parts.items())]
        if taken and taken[0].index == 0:
            taken[0] = replace(taken[0], prompt_logprobs=self._prompt_logprobs)
        self._parts = {}
        self._prompt_logprobs = None
        return taken


def _merged(metrics: list[RequestMetrics]) -> RequestMetrics | None:
    """Merge the metrics of several completions."""
    if not metrics:
        return None
    return RequestMetrics(
        queue_seconds=min(part.queue_seconds for part in metrics),
        first_token_seconds=min(part.first_token_seconds for part in metrics),
        total_seconds=max(part.total_seconds for part in metrics),
        num_cached_tokens=min(part.num_cached_tokens for part in metrics),
        num_preemptions=sum(part.num_preemptions for part in metrics),
    )

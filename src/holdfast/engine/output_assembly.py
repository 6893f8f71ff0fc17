"""From deltas to outputs: the answer so far of one request, and deltas that wait for a slow reader; no torch."""

from dataclasses import dataclass, field

from holdfast.request.outputs import (
    CompletionDelta,
    CompletionOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)


@dataclass(slots=True)
class _Parts:
    """What was added to one completion, piece by piece."""

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
        # Joined once and kept, so that asking after every token does not join everything every time.
        self.texts = ["".join(self.texts)]
        return self.texts[0]


class OutputAssembler:
    """Adds up the deltas of one request; `output()` may be asked at any time and is not changed afterwards."""

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
        """Take in what one step added."""
        self._request_id = delta.request_id
        self._parts[delta.index].add(delta)
        if delta.logprobs is not None:
            chosen = zip(delta.token_ids, delta.logprobs, strict=True)
            added = sum(logprobs[token_id].logprob for token_id, logprobs in chosen)
            self._cumulative[delta.index] = (self._cumulative[delta.index] or 0.0) + added
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
        """The request as far as it has come."""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[self._completion(index) for index in range(len(self._parts))],
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            metrics=_merged(self._metrics) if self.finished else None,
            error=self._error,
        )

    def _completion(self, index: int) -> CompletionOutput:
        parts = self._parts[index]
        return CompletionOutput(
            index=index,
            text=parts.text(),
            token_ids=list(parts.token_ids),
            cumulative_logprob=self._cumulative[index],
            logprobs=None if parts.logprobs is None else list(parts.logprobs),
            finish_reason=None if parts.last is None else parts.last.finish_reason,
            stop_reason=None if parts.last is None else parts.last.stop_reason,
        )


class DeltaBuffer:
    """Deltas of one request that nobody has read yet, merged by completion: never more than the answer itself."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, delta: CompletionDelta) -> None:
        """Merge a delta into what waits."""
        self._parts.setdefault(delta.index, _Parts()).add(delta)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs

    def take(self) -> list[CompletionDelta]:
        """What waits, one delta a completion, and forget it."""
        taken = [self._merged(index, parts) for index, parts in sorted(self._parts.items())]
        self._parts = {}
        self._prompt_logprobs = None
        return taken

    def _merged(self, index: int, parts: _Parts) -> CompletionDelta:
        last = parts.last
        assert last is not None, f"completion {index} waits without a delta"
        return CompletionDelta(
            request_id=last.request_id,
            index=index,
            text=parts.text(),
            token_ids=tuple(parts.token_ids),
            logprobs=None if parts.logprobs is None else tuple(parts.logprobs),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_cached_tokens=last.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs if index == 0 else None,
            metrics=last.metrics,
            error=last.error,
        )


def _merged(metrics: list[RequestMetrics]) -> RequestMetrics | None:
    """One line for a request of several completions: its first token, its last, and all its preemptions."""
    if not metrics:
        return None
    return RequestMetrics(
        queue_seconds=min(part.queue_seconds for part in metrics),
        first_token_seconds=min(part.first_token_seconds for part in metrics),
        total_seconds=max(part.total_seconds for part in metrics),
        num_cached_tokens=min(part.num_cached_tokens for part in metrics),
        num_preemptions=sum(part.num_preemptions for part in metrics),
    )

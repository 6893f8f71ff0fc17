"""Outputs: the completions of a request, whole or so far; no torch."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at one position, its rank (1 is the argmax), and its text."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""Logprobs by token id: the token at this position, and the most likely ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or token that ended it; None for the model's own end token and for length."""
    pooled: bytes = b""
    """Final hidden state of a pooled request's last token, as little-endian float32."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request in seconds, and what the prefix cache saved."""

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float
    num_cached_tokens: int
    num_preemptions: int


@dataclass(slots=True)
class RequestOutput:
    """A request and its completions, in order of index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry per prompt token; the first is None, since nothing precedes it."""
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    """Why the request failed, when a finish_reason is "error"."""


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """The output of one step for one completion."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """Logprobs of the whole prompt, in the first delta of completion 0, if requested."""
    metrics: RequestMetrics | None = None
    """Set in the last delta of a completion with at least one token."""
    error: str | None = None
    """Why it failed, if finish_reason is "error"."""
    pooled: bytes = b""
    """Like CompletionOutput.pooled, in the last delta."""

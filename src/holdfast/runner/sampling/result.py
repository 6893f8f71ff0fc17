"""What one step gives back for each sequence: plain numbers, one host copy behind the model; no torch."""

from dataclasses import dataclass

NO_TOKEN = -1
"""In place of a token id: the logits of this sequence held NaN, so nothing can be chosen and the sequence fails."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability and rank among all tokens (1 is the likeliest), and the likeliest tokens there."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), likeliest first."""


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """One sequence's part of a step."""

    token_id: int | None
    """The chosen token, NO_TOKEN, or None where the step did not reach the sequence's last token."""
    logprobs: TokenLogprobs | None = None
    """Of the chosen token, where the request asked."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of prompt positions start + 1 ... start + num_new_tokens (as far as the prompt goes), where the request asked."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of Step.scheduled."""

    results: tuple[SequenceResult, ...]

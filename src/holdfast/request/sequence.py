"""Sequence: a completion as scheduler and runner each see it; LiveStep: a step over sequences; StepResult; no torch.

token_ids   [ prompt ......................... | output ........ ] coming ...
            [0, num_computed)  have keys and values on the pages of `tables`
            [num_computed, num_scheduled)  are computed by steps in flight
            [num_scheduled, num_tokens + num_coming)  still have to be computed; a step takes some or all from the left
            [0, num_stored)  are on pages already: nothing is written for them, even if they are recomputed

A step in flight samples a token that is *coming*: the device has it before the host. Scheduler and runner exchange the
`Step` of request/step.py, which names slots; a `LiveStep` is that step with their own sequences instead of slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.step import NO_STEP, Step
from holdfast.request.wire import Count, TokenId


class SequenceState(Enum):
    """State of a sequence. Preempted ones are WAITING again, with their output so far."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion of one request. The scheduler owns the fields below `state`."""

    sequence_id: int
    """Unique in the engine and never reused."""
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """Random choices are a function of (seed, position) alone."""
    max_tokens: int
    """Most output tokens, bounded by max_model_len."""
    cache_salt: bytes = b""
    """Sequences share prefix pages only with the same salt."""
    use_prefix_cache: bool = True
    """False if every prompt position must be computed (prompt logprobs)."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not contain: the last token is banned after the others."""
    is_pooled: bool = False
    """True to return the final hidden state of the last prompt row with the first token, which is the last."""
    may_speculate: bool = False
    """True if draft tokens may follow its last token: sampling needs no earlier tokens on the host."""
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    """The runner's slot while it runs."""
    num_computed: int = 0
    num_stored: int = 0
    """Prefix tokens found on pages, if a state requires recomputing the last of them; else 0."""
    num_scheduled: int = 0
    """Positions given to steps, including those in flight."""
    num_coming: int = 0
    """Tokens that steps in flight will bring."""
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    """Page table of each cache group; HOLE for a released page (cache/groups.py)."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held at the first admission."""
    num_preemptions: int = 0
    has_penalties: bool = field(init=False)
    """Copy from `params`, since every choice reads it."""

    def __post_init__(self) -> None:
        self.has_penalties = self.params.has_penalties

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_kept(self) -> int:
        """Tokens on its pages, computed or found there."""
        return max(self.num_computed, self.num_stored)

    @property
    def num_tokens_coming(self) -> int:
        """Its tokens after every step in flight."""
        return len(self.token_ids) + self.num_coming


class ScheduledSequence(NamedTuple):
    """Positions [start, start + num_new_tokens) of a sequence run in this step, on the sequence's pages.

    A NamedTuple: every step makes one per sequence, and a dataclass costs more.
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    samples: bool
    """True if the step reaches the last token, known or coming, so it samples the next."""
    proposals: tuple[int, ...] = ()
    """Draft tokens, which end the new tokens; each that sampling confirms is accepted."""
    source: Sequence | None = None
    """The sequence that it forks from: it has no row and samples from the source's last row."""
    num_accepted: int = 0
    """Draft tokens that its last step accepted: states outside the pages lack them. The runner sets it."""

    @classmethod
    def of(cls, sequence: Sequence, start: int, num_new_tokens: int) -> "ScheduledSequence":
        """Schedule positions of a sequence without steps in flight or proposals."""
        return cls(sequence, start, num_new_tokens, start + num_new_tokens == sequence.num_tokens)

    @property
    def num_rows(self) -> int:
        """Rows of the step: one for each new token, and none for a fork."""
        return self.num_new_tokens if self.source is None else 0

    @property
    def num_prompt_logits(self) -> int:
        """Prompt rows with logits for prompt logprobs."""
        if self.sequence.params.prompt_logprobs is None:
            return 0
        return max(0, min(self.num_rows, self.sequence.num_prompt_tokens - 1 - self.start))

    @property
    def num_logits(self) -> int:
        """Rows with logits: those of its prompt, and one per sampled token."""
        return self.num_prompt_logits + self.samples + len(self.proposals)

    @property
    def num_tokens(self) -> int:
        """Tokens before this step samples, without draft tokens; the position of the first sampled one."""
        return self.start + self.num_new_tokens - len(self.proposals)


@dataclass(frozen=True, slots=True)
class LiveStep:
    """One run of the model over live sequences."""

    scheduled: tuple[ScheduledSequence, ...]
    step: Step = NO_STEP
    """The Step that the runner gets."""

    @property
    def num_tokens(self) -> int:
        """Rows of the step; forks have none."""
        return sum(item.num_new_tokens for item in self.scheduled if item.source is None)

    @property
    def has_forks(self) -> bool:
        """True if a sequence forks in this step."""
        return any(item.source is not None for item in self.scheduled)

    def sampling(self) -> Iterator[ScheduledSequence]:
        """Sequences that sample in this step, in order."""
        return (item for item in self.scheduled if item.samples)


NO_TOKEN = -1
"""Stands for a token id: the logits were NaN, so the sequence fails."""


class TokenLogprobs(NamedTuple):
    """One token's log-probability and rank among all tokens (1 is the argmax), and the most likely tokens there."""

    token_id: TokenId
    logprob: float
    rank: Count
    top: tuple[tuple[TokenId, float], ...]
    """(token id, log-probability), most likely first."""


class SequenceResult(NamedTuple):
    """One sequence's result of a step. A tuple, because every token of a step makes one on every rank."""

    token_ids: tuple[int, ...] = ()
    """Accepted draft tokens and one more, which may be NO_TOKEN; empty if the step did not reach the last token."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token but NO_TOKEN, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of prompt positions start + 1 ... start + num_new_tokens, if requested."""
    pooled: bytes = b""
    """Final hidden state of a pooled sequence's last prompt row, as little-endian float32."""

    @classmethod
    def of(
        cls,
        token_id: int | None = None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> "SequenceResult":
        """Make the result of a step without draft tokens."""
        token_ids = () if token_id is None else (token_id,)
        return cls(token_ids, () if logprobs is None else (logprobs,), prompt_logprobs)

    @property
    def token_id(self) -> int | None:
        """The last of the tokens, if there are any."""
        return self.token_ids[-1] if self.token_ids else None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of LiveStep.scheduled."""

    results: tuple[SequenceResult, ...]

"""Sequence: a completion as the scheduler sees it; Step: what runs next; StepResult: what came of it; no torch.

token_ids   [ prompt ......................... | output ........ ]
            [0, num_computed)  have their keys and values on the pages of `tables`
            [num_computed, num_tokens)  still have to be computed; a step takes some or all of them from the left
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from holdfast.request.sampling_params import SamplingParams


class SequenceState(Enum):
    """Where a sequence is. Preempted sequences are WAITING again, with what they have generated so far."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion of one request. The scheduler owns the fields below `state`."""

    sequence_id: int
    """Unique in the engine and never reused; client-given names are labels only."""
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """The counter-based random choices of this sequence: a function of (seed, position) and nothing else."""
    max_tokens: int
    """Most output tokens, already bounded by max_model_len."""
    cache_salt: bytes = b""
    """Sequences share prefix pages only with the same salt."""
    use_prefix_cache: bool = True
    """False where every prompt position must be computed (prompt logprobs)."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Tokens in a row that the output must not hold: the last of them is ruled out behind the others."""
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    """The pages of each cache group by place; HOLE where a page was given back (cache/groups.py)."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held at the first admission."""
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Positions [start, start + num_new_tokens) of a sequence run in this step, on the sequence's pages."""

    sequence: Sequence
    start: int
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """True when the step reaches the last token, so that the next one can be chosen."""
        return self.start + self.num_new_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One run of the model: who, and which of their tokens."""

    scheduled: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)

    def sampling(self) -> Iterator[ScheduledSequence]:
        """Those that choose a token in this step, in order."""
        return (item for item in self.scheduled if item.samples)


NO_TOKEN = -1
"""In place of a token id: the logits of this sequence held NaN, so nothing can be chosen and the sequence fails."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability and rank among all tokens (1 is the argmax), and the most likely tokens there."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first."""


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

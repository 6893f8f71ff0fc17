"""Sequence: a completion as scheduler and runner see it, each its own; LiveStep: a step over them; StepResult; no torch.

token_ids   [ prompt ......................... | output ........ ] coming ...
            [0, num_computed)  have their keys and values on the pages of `tables`
            [num_computed, num_scheduled)  are computed by steps in flight
            [num_scheduled, num_tokens + num_coming)  still have to be computed; a step takes some or all from the left
            [0, num_stored)  are on pages whether they are computed again or not: nothing is written for them

A token that is *coming* is chosen by a step in flight: the device has it before the host does. What travels between
scheduler and runner is the `Step` of request/step.py, which names slots; a `LiveStep` is that step with one's own
sequences in place of slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.step import NO_STEP, Step
from holdfast.request.wire import Count, TokenId


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
    is_pooled: bool = False
    """The final hidden state of its prompt's last row comes back with its first token, which is its last."""
    may_speculate: bool = False
    """Proposals may follow its last token: nothing in its choices needs the tokens before them on the host."""
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    """The runner's place for it while it runs."""
    num_computed: int = 0
    num_stored: int = 0
    """Where it began behind a prefix whose last tokens are computed again, because a state is made of them, so many tokens of it
    were on pages already; else 0."""
    num_scheduled: int = 0
    """Positions that were given to steps, those in flight included."""
    num_coming: int = 0
    """Tokens that steps in flight will bring."""
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

    @property
    def num_kept(self) -> int:
        """Tokens that are on its pages: those that were computed, or found there."""
        return max(self.num_computed, self.num_stored)

    @property
    def num_tokens_coming(self) -> int:
        """Its tokens once every step in flight has ended."""
        return len(self.token_ids) + self.num_coming


class ScheduledSequence(NamedTuple):
    """Positions [start, start + num_new_tokens) of a sequence run in this step, on the sequence's pages.

    A NamedTuple: every step makes one per sequence, and a dataclass costs more.
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    samples: bool
    """True when the step reaches the last token, known or coming, so that the next one can be chosen."""
    proposals: tuple[int, ...] = ()
    """What is guessed to follow that token. They are the last of the new tokens; each that is chosen too is accepted."""
    source: Sequence | None = None
    """The sequence that it forks from. Its one position has no row then: it samples from the source's last row."""

    @classmethod
    def of(cls, sequence: Sequence, start: int, num_new_tokens: int) -> "ScheduledSequence":
        """Positions of a sequence with no step in flight, without proposals."""
        return cls(sequence, start, num_new_tokens, start + num_new_tokens == sequence.num_tokens)

    @property
    def num_rows(self) -> int:
        """Rows of the step: one for each new token, and none for a fork."""
        return self.num_new_tokens if self.source is None else 0

    @property
    def num_prompt_logits(self) -> int:
        """Rows of its prompt whose logits it wants, for prompt logprobs."""
        if self.sequence.params.prompt_logprobs is None:
            return 0
        return max(0, min(self.num_rows, self.sequence.num_prompt_tokens - 1 - self.start))

    @property
    def num_logits(self) -> int:
        """Rows of logits that it wants: those of its prompt, and one for each choice."""
        return self.num_prompt_logits + self.samples + len(self.proposals)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence before this step chooses, proposals left out; the position of the first chosen one."""
        return self.start + self.num_new_tokens - len(self.proposals)


@dataclass(frozen=True, slots=True)
class LiveStep:
    """One run of the model: who, and which of their tokens."""

    scheduled: tuple[ScheduledSequence, ...]
    step: Step = NO_STEP
    """The same as a value."""

    @property
    def num_tokens(self) -> int:
        """Rows of the step; forks have none."""
        return sum(item.num_new_tokens for item in self.scheduled) - self.step.num_forks

    @property
    def has_forks(self) -> bool:
        """Known without a look at every item: nearly no step has one."""
        return self.step.num_forks > 0

    def sampling(self) -> Iterator[ScheduledSequence]:
        """Those that choose a token in this step, in order."""
        return (item for item in self.scheduled if item.samples)


NO_TOKEN = -1
"""In place of a token id: the logits of this sequence held NaN, so nothing can be chosen and the sequence fails."""


class TokenLogprobs(NamedTuple):
    """One token's log-probability and rank among all tokens (1 is the argmax), and the most likely tokens there."""

    token_id: TokenId
    logprob: float
    rank: Count
    top: tuple[tuple[TokenId, float], ...]
    """(token id, log-probability), most likely first."""


class SequenceResult(NamedTuple):
    """One sequence's part of a step. One for every token of a step, on every rank: therefore a tuple."""

    token_ids: tuple[int, ...] = ()
    """The accepted proposals and one token more, or that one alone, which may be NO_TOKEN; none where the step did not
    reach the sequence's last token."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of these but NO_TOKEN, where the request asked."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of prompt positions start + 1 ... start + num_new_tokens (as far as the prompt goes), where the request asked."""
    pooled: bytes = b""
    """The final hidden state of the prompt's last row as float32, little-endian, when a pooled sequence samples."""

    @classmethod
    def of(
        cls,
        token_id: int | None = None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> "SequenceResult":
        """That of a step without proposals."""
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

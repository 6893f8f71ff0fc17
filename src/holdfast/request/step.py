"""Step: what the scheduler sends to the runner, as a value that can travel; no torch.

    Step    released   slots whose sequence ended or was preempted; they are free before anything below
            admitted   sequences that take a slot, once, with everything about them but their pages
            items      slot, positions, and new pages since its last step of each sequence that runs

The runner keeps the rest: tokens (it chooses them), page tables, sampling. So a step of 256 decoding sequences is a few
KiB. A preempted sequence is released, and admitted again with the tokens it has by then.

Steps are numbered from 1 without a gap. The runner refuses one that is repeated, late, or names an unknown slot
(runner/slots.py) before anything changes.
"""

from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

from holdfast.errors import MessageError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.wire import (
    MAX_TOKEN_ID,
    Count,
    LateType,
    Positive,
    TokenId,
    TokenIdOrNone,
    TokenIds,
    length_bound,
    made_by,
)

__all__ = ["MAX_TOKEN_ID", "NO_STEP", "Admitted", "Params", "RowCopy", "Step", "StepItem"]
MAX_GROUPS = 64
if TYPE_CHECKING:
    Params: TypeAlias = SamplingParams
    Pages: TypeAlias = tuple[tuple[int, ...], ...]
else:
    Params = made_by(lambda plain: SamplingParams(**plain))
    Pages = LateType(lambda: Annotated[tuple[tuple[TokenIdOrNone, ...], ...], length_bound(MAX_GROUPS)])


class RowCopy(NamedTuple):
    """The first rows of a cached page, which a sequence gets on its own page before the step computes anything."""

    group: Count
    """Index of the cache group."""
    source: TokenId
    """The page on which a cached prefix ends."""
    target: TokenId
    """The sequence's own page at the same place."""
    num_rows: Positive


class Admitted(NamedTuple):
    """A sequence that takes a slot."""

    slot: TokenId
    sequence_id: int
    token_ids: TokenIds
    """Prompt, and output before a preemption."""
    num_prompt_tokens: Positive
    params: Params
    seed: Count
    bad_word_ids: tuple[TokenIds, ...] = ()
    num_stored: Count = 0
    """First tokens that are on pages already although steps recompute the last of them: nothing is written for these.
    0 if its first step begins after all stored tokens. For a fork, the tokens that it shares."""
    fork_of: TokenIdOrNone = -1
    """The slot of the sequence that it forks from, or -1. That sequence ends the same prompt in this step. The fork has no row:
    it samples from the other's last row, and gets copies of its pages after `num_stored`, and of its states."""
    is_pooled: bool = False
    """True to return the final hidden state of the last prompt row with the first token."""
    copies: tuple[RowCopy, ...] = ()
    """Rows that it starts with and cannot share, because it continues on their pages: at most one copy for each group."""
    state_from: TokenIdOrNone = -1
    """The snapshot whose state its slot gets before the step computes anything, or -1: it starts without a state."""


class StepItem(NamedTuple):
    """Positions [start, start + num_new_tokens) of the sequence in a slot. A tuple, because every token of a step has one."""

    slot: TokenId
    start: TokenId
    num_new_tokens: TokenId
    samples: bool
    """True if the step reaches its last token, known or coming, so it samples the next one."""
    pages: Pages = ()
    """New pages at the end of each cache group's page table; () if none. HOLE stands for a page that a window no longer
    needs."""
    proposals: tuple[TokenId, ...] = ()
    """Draft tokens, which end the new tokens."""
    state_to: TokenIdOrNone = -1
    """The snapshot that gets the slot's state after the step, or -1. The step ends the sequence's new tokens there."""


class Step(NamedTuple):
    """One run of the model."""

    number: Positive
    released: tuple[TokenId, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    items: tuple[StepItem, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the step; forks have none."""
        return sum(item.num_new_tokens for item in self.items) - self.num_forks

    @property
    def num_forks(self) -> int:
        return sum(one.fork_of >= 0 for one in self.admitted) if self.admitted else 0


NO_STEP = Step(0)
"""Placeholder for a live step that is built by hand."""


def check_step(step: Step) -> None:
    """Raise MessageError for an admitted sequence whose counts exceed its tokens, or that gets two states."""
    for one in step.admitted:
        if one.num_prompt_tokens > len(one.token_ids) or one.num_stored >= len(one.token_ids):
            raise MessageError("wire.malformed", reason=f"slot {one.slot} has more counted tokens than tokens")
        if one.fork_of >= 0 and one.state_from >= 0:
            raise MessageError("wire.malformed", reason=f"slot {one.slot} gets the states of two places")

"""Sharing: what a waiting sequence starts on (cached blocks, blocks that this step computes, or a fork of a twin); no torch.

Attention writes the keys and values of all rows of a step before any row reads them. So a sequence may start on blocks
that another sequence computes in the same step, or in an earlier step in flight: the device runs steps in order. Open
rows are copied before a step computes anything. So a sequence starts on those of earlier steps alone.

A *twin* has the same prompt and reaches its end in this step. A sequence forks from its twin without a row of its own:
it samples from the twin's last row, shares its whole blocks, and the runner copies the open rest after the step's
forward pass. The copy includes the states of the slot.

    blocks   [ shared ........................ | open: copied after the step ]
    tokens   0                                 B                            N - 1: the row that both sample from

If a running sequence is about to compute the next block of a waiting one, the waiting one does not compute it too. It
waits only as long as that sequence runs, comes first in order, and has more of the common prompt to compute. With
states outside the pages that sequence takes a snapshot where the prompts differ (Scheduler.cut), and the waiting one
starts there.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.cache.prefix import PrefixCache, PrefixChain, PrefixHit
from holdfast.request.sequence import ScheduledSequence
from holdfast.request.sequence import Sequence as Completion
from holdfast.request.step import RowCopy

Tables = tuple[tuple[int, ...], ...]
Key = tuple[bytes, int, tuple[int, ...]]
"""Key of a prompt, to find twins: salt, length and last tokens."""
KEY_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Start:
    """The position and the pages on which a sequence starts."""

    hit: PrefixHit
    tables: Tables
    """Shared pages by cache group and place."""
    num_computed: int
    num_stored: int = 0
    """Tokens on shared pages, if it recomputes some of them or forks; else 0."""
    source: Completion | None = None
    """The twin that it forks from."""

    @property
    def num_kept(self) -> int:
        """Tokens already on pages, which are not stored again."""
        return max(self.num_computed, self.num_stored)


NO_START = Start(PrefixHit((), (), 0), (), 0)
"""Start at the first token, without shared pages."""


def hit_start(hit: PrefixHit, tokens_again: int) -> Start:
    """Start after a hit; its last `tokens_again` are recomputed without storing them."""
    num_stored = hit.num_tokens if tokens_again else 0
    return Start(hit, hit.tables, max(hit.num_tokens - tokens_again, 0), num_stored)


def fork_start(hit: PrefixHit, twin: Completion, groups: Sequence[CacheGroup]) -> Start:
    """Start at the last token of a twin's prompt, on the blocks of a hit; the runner copies what follows them."""
    num_computed = twin.num_prompt_tokens - 1
    tables = []
    for group, table in zip(groups, hit.tables, strict=True):
        # A block may be longer than a window: then holes follow the hit too. Kept pages are shared, or come first.
        passed = group.passed(num_computed)
        has_kept = len(table) >= passed.start
        tables.append((*table[: passed.start], *[HOLE] * (len(passed) * has_kept), *table[passed.stop :]))
    return Start(hit, tuple(tables), num_computed, hit.num_tokens, twin)


def row_copies(start: Start, groups: Sequence[CacheGroup], tables: Sequence[Sequence[int]]) -> tuple[RowCopy, ...]:
    """Return the copies of a start's open rows to the pages that the sequence now has; a fork copies whole pages later."""
    num_tokens = start.hit.num_tokens
    return tuple(
        RowCopy(rows.group, rows.page, tables[rows.group][num_tokens // groups[rows.group].page_tokens], rows.num_rows)
        for rows in (start.hit.open_rows if start.source is None else ())
    )


class Leaders:
    """Sequences of one step to share with: those whose prompt ends here, and those with more prompt to compute."""

    def __init__(
        self,
        prefix: PrefixCache,
        scheduled: Iterable[ScheduledSequence],
        running: Iterable[Completion],
        chain_of: Callable[[int], PrefixChain],
    ) -> None:
        self._prefix = prefix
        self._chain_of = chain_of
        self._twins: dict[Key, Completion] = {}
        self._computing: list[tuple[Completion, int]] = []
        """Sequences with more of their prompt to compute, and how far they are scheduled."""
        ends = {item.sequence.sequence_id: item for item in scheduled}
        for sequence in running:
            item = ends.get(sequence.sequence_id)
            if item is not None:
                self.add(item)
            elif sequence.num_scheduled < sequence.num_prompt_tokens and prefix.is_current(
                chain_of(sequence.sequence_id)
            ):
                self._computing.append((sequence, sequence.num_scheduled))

    def add(self, item: ScheduledSequence) -> None:
        """Add a sequence of this step."""
        sequence, end = item.sequence, item.num_tokens
        if not self._prefix.is_current(self._chain_of(sequence.sequence_id)):
            return
        if end < sequence.num_prompt_tokens:
            self._computing.append((sequence, end))
        elif end == sequence.num_prompt_tokens and item.source is None:
            self._twins.setdefault(prompt_key(sequence), sequence)

    def twin(self, sequence: Completion) -> Completion | None:
        """Find a sequence of this step with the same prompt, whose last row this one can sample from."""
        if len(sequence.token_ids) != sequence.num_prompt_tokens:
            return None
        twin = self._twins.get(prompt_key(sequence))
        if twin is None or twin.token_ids[: twin.num_prompt_tokens] != sequence.token_ids:
            return None
        return twin

    def awaits(self, sequence: Completion, chain: PrefixChain) -> bool:
        """True if a sequence that comes first is about to compute the next block of this one, or all of its prompt."""
        for leader, end in self._computing:
            if leader.params.priority > sequence.params.priority or leader.cache_salt != sequence.cache_salt:
                continue
            index = end // self._prefix.block_tokens
            own, other = (chain, sequence.token_ids), (self._chain_of(leader.sequence_id), leader.token_ids)
            if self._prefix.is_same_block(own, other, index) or leader.token_ids == sequence.token_ids:
                return True
        return False


def prompt_key(sequence: Completion) -> Key:
    num_tokens = sequence.num_prompt_tokens
    return sequence.cache_salt, num_tokens, tuple(sequence.token_ids[max(num_tokens - KEY_TOKENS, 0) : num_tokens])

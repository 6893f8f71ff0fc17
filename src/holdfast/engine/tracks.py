"""Track, Blocked, Quarantined, Guesses: what the scheduler records about sequences; no torch."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.cache.prefix import PrefixChain, PrefixHit
from holdfast.cache.states import NO_PLACE, NOT_WRITTEN, Written
from holdfast.engine.queues import named
from holdfast.request.sequence import Sequence
from holdfast.request.step import Admitted, RowCopy

Propose = Callable[[Sequence], SequenceABC[int]]
"""Returns any number of draft tokens after a sequence's last one."""


@dataclass(eq=False, slots=True)
class Track:
    """The scheduler's record of a sequence."""

    longest: int
    """Most tokens computed for it."""
    max_pages: int
    """Most pages that it holds."""
    chain: PrefixChain
    capacity: int = 0
    """Tokens that its tables have places for."""
    end: int = 0
    """End of the farthest step that it has pages for."""
    last_step: int = 0
    """Number of its latest step."""
    is_sent: bool = False
    """True if a step has sent it to the runner."""
    ready_step: int = 0
    """The step that computes what it started on. If that is dropped, it restarts."""
    is_grown: bool = False
    """True if its tables have pages that no step has sent."""
    copies: tuple[RowCopy, ...] = ()
    """Rows that its first step copies."""
    state_from: int = NO_PLACE
    """The snapshot that its first step starts with."""
    state_to: int = NO_PLACE
    """The snapshot that gets its state after the next step."""
    snapshot_at: int = 0
    """Where its next piece was cut for a snapshot; 0: nowhere."""
    written: Written = NOT_WRITTEN
    """The last snapshot that it wrote."""
    is_between: bool = False
    """That snapshot is between others (cache/states.py)."""
    branch_at: int = 0
    """Tokens of its prompt that were on cached pages when it started: another prompt branches off there, or ends."""
    num_sent: list[int] = field(default_factory=list)
    """Places of each table that steps have sent."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """State when the front of the queue did not fit: while it does not change, another attempt would fail."""

    sequence_id: int
    num_available: int
    num_running: int
    num_claimed: int
    """Pages claimed by running sequences."""
    hit: PrefixHit
    num_owners: tuple[int, ...]
    """Owners of the pages of the hit that windows see: they decide how many pages it takes."""
    num_filled: int
    """Holes of the prefix cache that were filled."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Pages that steps in flight still use: those of a finished sequence with its slot, or one to copy rows from."""

    last_step: int
    """The last step that writes or copies these pages."""
    slot: int
    """-1 if only pages are held."""
    tables: list[list[int]]


@dataclass(eq=False, slots=True)
class Guesses:
    """Rows and pages that one step has left for draft tokens."""

    propose: Propose
    num_rows: int
    """Sampled rows left besides one per sequence."""
    num_claimed: int | None = None
    """Pages claimed by running sequences; None until a draft token needs a page."""


def admitted(sequence: Sequence, fork_of: int, track: Track) -> Admitted:
    """Describe a sequence that takes a slot; `fork_of`: the slot that it forks from, or -1."""
    return Admitted(
        *(sequence.slot, sequence.sequence_id, tuple(sequence.token_ids), sequence.num_prompt_tokens),
        *(sequence.params, sequence.seed, sequence.bad_word_ids, sequence.num_stored, fork_of, sequence.is_pooled),
        *(track.copies, track.state_from),
    )


def new_pages(sequence: Sequence, track: Track) -> tuple[tuple[int, ...], ...]:
    """Return pages that no step has sent yet, and mark them as sent."""
    tables, num_sent = sequence.tables, track.num_sent
    pages = tuple(tuple(table[sent:]) for table, sent in zip(tables, num_sent, strict=True))
    track.num_sent = [len(table) for table in tables]
    track.is_grown = False
    return pages if any(pages) else ()


def check_table(sequence: Sequence, group: CacheGroup, table: list[int], end: int, max_step_tokens: int) -> None:
    """Assert a whole state, a page in each place up to `end`, holes only before the window, and the bound."""
    num_kept, num_places = sequence.num_kept, group.pages_for(end)
    assert len(table) == num_places, f"{named(sequence)} has not {num_places} places in {group.name}: {table}"
    passed = group.passed(num_kept)
    is_held = [page != HOLE for page in table]
    assert not any(is_held[passed.start : passed.stop]), (
        f"{named(sequence)} holds what is before its {group.name}: {table}"
    )
    is_seen = all(is_held[: passed.start]) and all(is_held[passed.stop :])
    assert is_seen, f"{named(sequence)} has not what its {group.name} sees from {passed.stop} on: {table}"
    if group.window is not None:
        # With one token a step this is the window and one page.
        num_step_tokens = max(end - num_kept, 1)
        most, num_held = group.most_held(num_step_tokens), sum(is_held)
        assert num_step_tokens <= max_step_tokens, f"{named(sequence)}: {num_step_tokens=}"
        assert num_held <= most, f"{named(sequence)} holds {num_held} pages of its {group.name}, at most {most}"

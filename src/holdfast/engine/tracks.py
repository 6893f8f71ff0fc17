"""Track, Blocked, Quarantined, Guesses: what the scheduler remembers of sequences beside the sequences; no torch."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

from holdfast.cache.prefix import PrefixChain, PrefixHit
from holdfast.request.sequence import Sequence
from holdfast.request.step import Admitted

Propose = Callable[[Sequence], SequenceABC[int]]
"""Tokens that may follow a sequence's last one, the nearest first; as many as one likes."""


@dataclass(eq=False, slots=True)
class Track:
    """What the scheduler knows of a sequence beyond the sequence itself."""

    longest: int
    """Tokens that are computed of it at the most."""
    max_pages: int
    """Pages that it holds at the most."""
    chain: PrefixChain
    capacity: int = 0
    """Tokens that its tables have places for."""
    end: int = 0
    """Where the farthest step ended that it was given pages for."""
    last_step: int = 0
    """The number of the latest step that it is in."""
    is_told: bool = False
    """The runner has it in its slot."""
    ready_step: int = 0
    """The step that computes what it started on. If that step is dropped, it starts anew."""
    is_grown: bool = False
    """Its tables have pages that no step has told of."""
    num_told: list[int] = field(default_factory=list)
    """Places of each table that steps have told of."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The front of the queue did not fit; while none of this changes it need not be tried again."""

    sequence_id: int
    num_available: int
    num_running: int
    num_claimed: int
    """By those that ran."""
    hit: PrefixHit
    num_owners: tuple[int, ...]
    """Of the pages of the hit that windows see: they decide how many pages it takes."""
    num_filled: int
    """Holes of the prefix cache that had been filled."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What a finished sequence leaves to steps in flight."""

    last_step: int
    """After this step is booked, no step writes these pages."""
    slot: int
    tables: list[list[int]]


@dataclass(eq=False, slots=True)
class Guesses:
    """What one step still has for proposals."""

    propose: Propose
    num_rows: int
    """Positions that may choose a token beside one of each sequence."""
    num_claimed: int | None = None
    """Pages reserved for running sequences; None until a proposal needs a page."""


def admitted(sequence: Sequence, fork_of: int) -> Admitted:
    """What a step says of a sequence that takes a slot; `fork_of` is the slot that it forks from, or -1."""
    return Admitted(
        sequence.slot,
        sequence.sequence_id,
        tuple(sequence.token_ids),
        sequence.num_prompt_tokens,
        sequence.params,
        sequence.seed,
        sequence.bad_word_ids,
        sequence.num_stored,
        fork_of,
        sequence.is_pooled,
    )


def new_pages(sequence: Sequence, track: Track) -> tuple[tuple[int, ...], ...]:
    """Return pages that no step has sent yet, and mark them as sent."""
    tables, num_told = sequence.tables, track.num_told
    pages = tuple(tuple(table[told:]) for table, told in zip(tables, num_told, strict=True))
    track.num_told = [len(table) for table in tables]
    track.is_grown = False
    return pages if any(pages) else ()

"""StateRule: how prompts are cut and when states are kept; Snapshots: places that keep states of prefixes; no torch.

A state is what a layer has gathered of all tokens so far, one per sequence. It lies outside the pages, by place:

    places   [ 0 .. max_num_seqs - 1: slots of the runner ][ .. + num_snapshots - 1: snapshots ]

A snapshot is a copy of a slot's state at the end of a block of the prefix cache. A prefix can be a hit only there.
A step copies snapshots to slots before it computes anything, and slots to snapshots after it. Steps run in order. So a
later step may read what a step in flight writes. A place that a step in flight reads or writes is not written again,
except by the sequence that writes it there: its steps never pass each other.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

GRID = 64
"""Tokens of a chunk of the state kernels. Cutting a prompt at multiples of it changes no bit."""
SNAPSHOT_TOKENS = 8192
NO_PLACE = -1


@dataclass(frozen=True, slots=True)
class StateRule:
    """How the prompts of a model with states are cut, and how many snapshots of states there are."""

    grid: int = GRID
    num_snapshots: int = 0
    """Places of snapshots; 0: no prefix can hit."""
    snapshot_tokens: int = SNAPSHOT_TOKENS
    """Tokens between two snapshots of a long prompt."""
    num_drafts: int = 0
    """Most draft tokens of a sequence in a step: slots keep what follows from as many."""

    def __post_init__(self) -> None:
        assert self.grid >= 2, f"{self.grid=} leaves no piece to the chunk kernel"
        assert self.num_snapshots >= 0, f"{self.num_snapshots=}"
        assert self.snapshot_tokens >= 1, f"{self.snapshot_tokens=}"
        assert self.num_drafts >= 0, f"{self.num_drafts=}"

    def piece(self, start: int, num_prompt_tokens: int, most: int) -> int:
        """Return the rows of the next piece of a sequence: at most `most`, or 0 if these are too few for a piece.

        Rows of a prompt begin and end at multiples of the grid, or end with the prompt. A piece of one row belongs to
        the recurrent kernel and a longer one to the chunk kernel. So a last row alone on its chunk is a piece of its
        own, and a row after the prompt too.
        """
        left = num_prompt_tokens - start
        if left <= 1:
            return min(most, 1)
        assert start % self.grid == 0, f"a prompt of {num_prompt_tokens} tokens goes on at {start}, {self.grid=}"
        whole = left - 1 if left % self.grid == 1 else left
        return whole if most >= whole else most // self.grid * self.grid


class Written(NamedTuple):
    """A place, and the step that writes it."""

    place: int
    step: int


NOT_WRITTEN = Written(NO_PLACE, 0)


class Snapshots:
    """Places 0 .. num_places - 1 of snapshots, free or held; the least recently used one that may go is evicted first.

    Snapshots *between* others are evicted first: they divide a long prompt, or a longer prefix of the same sequence
    has a snapshot too and no other sequence has branched off. A new one between evicts only such snapshots.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.held: OrderedDict[int, bool] = OrderedDict()
        """Whether each held place is between others; least recently used first."""
        self._written = [0] * num_places
        """The last step that writes each place, held or not ..."""
        self._read = [0] * num_places
        """... the last one that reads it ..."""
        self._read_before = [0] * num_places
        """... and the last one before that."""
        self._settled = 0
        self.on_evict: Callable[[int], None] = self.forget
        """Called with a held place to evict; must call forget(place)."""

    @property
    def num_held(self) -> int:
        return len(self.held)

    def find(self, step: int, *, is_between: bool, own: Written = NOT_WRITTEN) -> int:
        """Return the place that a snapshot of `step` would take: a free one, or the next to evict; or NO_PLACE.

        `own`: the last snapshot that the same sequence wrote. It can be evicted while its step is in flight.
        """
        free = (place for place in range(self.num_places) if place not in self.held)
        between = (place for place, own in self.held.items() if own)
        others = (place for place, own in self.held.items() if not own and not is_between)
        for places in (free, between):
            for place in places:
                if self._is_idle(place, step):
                    return place
        if own.place in self.held and self._written[own.place] == own.step and not self._is_read(own.place, step):
            return own.place
        return next((place for place in others if self._is_idle(place, step)), NO_PLACE)

    def take(self, step: int, *, is_between: bool, own: Written = NOT_WRITTEN) -> int:
        """Hold a place that `step` writes, the most recently used one; NO_PLACE if none may be written."""
        place = self.find(step, is_between=is_between, own=own)
        if place == NO_PLACE:
            return NO_PLACE
        if place in self.held:
            self.on_evict(place)
            assert place not in self.held, f"snapshot {place} was to be evicted and is still held"
        self.held[place] = is_between
        self._written[place] = step
        return place

    def read(self, place: int, step: int) -> None:
        """Record that `step` reads a place: it becomes the most recently used one."""
        self.held[place] = False
        self.held.move_to_end(place)
        if self._read[place] != step:
            self._read_before[place], self._read[place] = self._read[place], step

    def yield_place(self, place: int) -> None:
        """Evict a snapshot before those that are not between others."""
        self.held[place] = True

    def forget(self, place: int) -> None:
        """Free a place."""
        del self.held[place]

    def written_by(self, place: int) -> int:
        """Return the step that writes a held place."""
        return self._written[place]

    def settle(self, step: int) -> None:
        """Record that the steps up to this one have run, or were dropped."""
        self._settled = step

    def pending(self) -> list[int]:
        """Return the held places that steps in flight write."""
        return [place for place in self.held if self._written[place] > self._settled]

    def _is_idle(self, place: int, step: int) -> bool:
        """True if no step in flight uses a place, nor `step` itself writes it. It reads places before it writes any."""
        return self._written[place] <= self._settled and not self._is_read(place, step)

    def _is_read(self, place: int, step: int) -> bool:
        """True if a step in flight reads a place; `step` itself does not count."""
        return self._read_before[place] > self._settled or self._settled < self._read[place] != step

    def check(self) -> None:
        """Assert that every held place exists."""
        strange = [place for place in self.held if not 0 <= place < self.num_places]
        assert not strange, f"snapshots {strange} are held, of {self.num_places}"

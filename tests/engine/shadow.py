"""The shadow of the KV cache: for each page what a cache group would have stored there, and what attention would read of it.

The fake model gives each position a value that depends on all tokens so far. A group keeps a row for every `ratio` tokens,
finished when the last of them is computed: that token's value, mixed with the group's number, so that a page of another
group is seen too. The part of a row that is not finished is in the group that keeps a state: the value of the last token,
at every position but those where the state begins anew.

States outside the pages are in ShadowStates, by place: slots, then snapshots. A state takes the rows of a prompt by chunks of
the grid, and single rows one by one, in two ways that never give the same. So a prompt that is cut elsewhere has another state.
There a row after the prompt leaves something else on the pages too: what was computed in another way is no hit.

Where a group says itself that its rows stand for several tokens, the unfinished row is beside the pages, by slot: it is added
up token by token and begins anew with every row, as compressed attention does it. Rows that overlap go on from what the row
before gathered. A wrong state makes a wrong row, and rows are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.cache.states import StateRule
from holdfast.request.step import RowCopy

MASK = 2**64 - 1
ODD = 0x9E3779B97F4A7C15
LATER = 0x5DEECE66D5DEECE6


@dataclass(frozen=True)
class ShadowGroup:
    """A cache group, and how many tokens make a row of it."""

    group: CacheGroup
    ratio: int = 1
    reach: int | None = None
    """How many of the newest tokens attention sees, where the group keeps more."""

    @property
    def window(self) -> int | None:
        """What attention sees."""
        return self.group.window if self.reach is None else self.reach

    @property
    def is_pooled(self) -> bool:
        """Rows are added up beside the pages."""
        return self.group.tokens_per_row > 1

    def places_seen(self, start: int, end: int | None = None) -> list[int]:
        """Places of the pages that attention touches in a step from `start` to `end`, or of one row."""
        page_tokens, end = self.group.page_tokens, start + 1 if end is None else end
        first = 0 if self.window is None else max(0, start - self.window + 1)
        if self.group.is_blocked:
            assert self.window is not None, f"{self.group} has blocks of no size"
            first = start - start % self.window
        own = range(first // page_tokens, -(-end // page_tokens))
        return sorted({*own, *range(min(self.group.kept_pages, -(-end // page_tokens)))})

    @property
    def rows(self) -> int:
        """Contents of a page."""
        return self.group.page_tokens // self.ratio

    def most_pages(self, num_tokens: int, budget: int) -> int:
        """What a sequence of so many tokens may hold, counted by laying every step that there can be over the pages."""
        own, most = self.group, 0
        if own.is_state:
            return own.state_pages
        every = -(-num_tokens // own.page_tokens)
        if own.window is None:
            return every
        span = own.window - 1 + min(budget, num_tokens)
        if own.is_blocked:  # from the first page of a block on, beside the kept pages
            return min(every, -(-span // own.page_tokens) + own.kept_pages)
        for first in range(own.page_tokens):  # wherever on a page the window begins
            most = max(most, (first + span - 1) // own.page_tokens + 1)
        # The promise is a page for each started page_tokens and one more, which no position exceeds.
        promised = -(-span // own.page_tokens) + 1
        assert most <= promised, f"{own} needs {most} pages and promises {promised}"
        return min(every, promised)


@dataclass
class Pooled:
    """An unfinished row, and what it leaves to the next one."""

    row: int = 0xBAD
    rest: int = 0xBAD

    def add(self, position: int, value: int, group: CacheGroup) -> int:
        """One token more; the row so far."""
        if position % group.tokens_per_row == 0:
            if position == 0 or not group.tokens_again:
                self.row = 1
            self.rest = 1
        self.row = (self.row * ODD + value) & MASK
        self.rest = (self.rest * ODD + 3 * value) & MASK
        found = self.row
        if (position + 1) % group.tokens_per_row == 0:
            self.row = self.rest
        return found


def chunk_state(state: int, values: Sequence[int]) -> int:
    """A state after a chunk of a prompt."""
    for value in values:
        state = (state * ODD + value) & MASK
    return (state * ODD + len(values)) & MASK


def row_state(state: int, value: int) -> int:
    """A state after a single row."""
    return ((state ^ value) * ODD + 1) & MASK


class Truth:
    """What each group should hold of one sequence: rows by page, the value of every token, the state where it may be cut."""

    def __init__(
        self, groups: Sequence[ShadowGroup], rule: StateRule | None = None, num_prompt_tokens: int = 0
    ) -> None:
        self.states = {0: 0}
        """By number of tokens."""
        self._rule, self._num_prompt_tokens = rule, num_prompt_tokens
        self._state, self._chunk = 0, list[int]()
        self.values: list[int] = []
        self._pooled = [Pooled() for _ in groups]
        self.pages: list[list[list[int]]] = [[] for _ in groups]
        self._groups = groups

    def append(self, value: int) -> None:
        """One token more."""
        self.values.append(value)
        value = self.kept(len(self.values) - 1, value)
        if self._rule is not None:
            self._add_to_state(value, self._rule.grid)
        for index, own in enumerate(self._groups):
            kept = value
            if own.is_pooled:
                kept = self._pooled[index].add(len(self.values) - 1, value, own.group)
            if own.group.is_state or len(self.values) % own.ratio:
                continue
            if (len(self.values) - 1) // own.group.page_tokens == len(self.pages[index]):
                self.pages[index].append([])
            self.pages[index][-1].append(row_of(index, kept))

    def kept(self, position: int, value: int) -> int:
        """What pages and states take of a token's value: it shows how the row is computed."""
        is_later = self._rule is not None and position >= self._num_prompt_tokens
        return value ^ LATER if is_later else value

    def _add_to_state(self, value: int, grid: int) -> None:
        num_tokens = len(self.values)
        self._chunk.append(value)
        if num_tokens < self._num_prompt_tokens and num_tokens % grid:
            return
        is_row = num_tokens > self._num_prompt_tokens or (
            num_tokens == self._num_prompt_tokens and len(self._chunk) == 1
        )
        self._state = row_state(self._state, value) if is_row else chunk_state(self._state, self._chunk)
        self.states[num_tokens] = self._state
        self._chunk.clear()


class ShadowStates:
    """States outside the pages: of slots, and of snapshots after them."""

    def __init__(self, grid: int, num_slots: int, num_snapshots: int) -> None:
        self._grid, self._num_slots = grid, num_slots
        self.by_place: list[int | None] = [None] * (num_slots + num_snapshots)
        self._drafts: list[list[int]] = [[] for _ in range(num_slots)]
        """What slots keep of the draft tokens of their last step."""
        self.num_reads = self.num_restored = self.num_kept = 0

    def restore(self, number: int, slot: int) -> None:
        """Copy a snapshot to a slot."""
        self.by_place[slot] = self.by_place[self._num_slots + number]
        self.num_restored += 1

    def keep(self, slot: int, number: int) -> None:
        """Copy the state of a slot to a snapshot."""
        self.by_place[self._num_slots + number] = self.by_place[slot]
        self.num_kept += 1

    def fork(self, source: int, target: int) -> None:
        """Copy the state of a slot to another."""
        self.by_place[target] = self.by_place[source]

    def advance(
        self,
        slot: int,
        start: int,
        values: Sequence[int],
        truth: Truth,
        name: object,
        num_drafts: int = 0,
        num_accepted: int = 0,
    ) -> None:
        """Compute a piece of a sequence: a single row in one way, several by chunks of the grid in another.

        Draft tokens follow a single row and are only kept; those accepted of the last step come before it.
        """
        state = 0 if start == 0 else self.by_place[slot]
        for value in self._drafts[slot][:num_accepted]:
            state = row_state(state or 0, value)
        is_own = start in truth.states and state == truth.states[start]
        assert is_own, f"{name} has another state than its own at {start}"
        kept = [truth.kept(start + nth, value) for nth, value in enumerate(values)]
        self.num_reads += 1
        kept, self._drafts[slot] = kept[: len(kept) - num_drafts], kept[len(kept) - num_drafts :]
        if len(kept) == 1:
            self.by_place[slot] = row_state(state or 0, kept[0])
            return
        for first in range(0, len(kept), self._grid):
            state = chunk_state(state or 0, kept[first : first + self._grid])
        self.by_place[slot] = state


def row_of(index: int, value: int) -> int:
    """What group `index` stores for a value."""
    return (value * ODD + index) & MASK


class Shadow:
    """Contents by page. None: nothing that anybody may read."""

    def __init__(self, groups: Sequence[ShadowGroup], num_pages: int) -> None:
        self.groups = tuple(groups)
        self.pages: list[list[int] | None] = [None] * num_pages
        self.num_reads = 0
        rows = [index for index, own in enumerate(groups) if not own.group.is_state]
        self._states = [index for index, own in enumerate(groups) if own.group.is_state]
        self.pooled: dict[tuple[int, int], Pooled] = {}
        """By slot and group; a slot keeps the state of its last sequence."""
        seen = [i for i in rows if groups[i].ratio == 1 and groups[i].window != 1 and not groups[i].group.is_blocked]
        self._carrier = seen[0] if seen else None
        self._rows = rows

    def poison(self, num_owners: Sequence[int], kept: Sequence[int]) -> None:
        """Poison pages that no sequence holds or may find."""
        for page in set(range(len(self.pages))) - set(kept):
            if num_owners[page] == 0:
                self.pages[page] = None

    def value_before(self, tables: Sequence[Sequence[int]], start: int, truth: Truth, name: object) -> int | None:
        """The value of position start - 1, as read back; None where no group keeps it in a way that gives it back."""
        for index in self._states:
            own = self.groups[index].group
            if start == 0 or (own.state_period and start % own.state_period == 0):
                continue
            expected = row_of(index, truth.values[start - 1])
            found = [self.pages[page] for page in tables[index]]
            right = [[expected + part] for part in range(own.state_pages)]
            assert found == right, f"{name} has another state than its own at {start}"
            self.num_reads += own.state_pages
        if self._carrier is None:
            return None
        own = self.groups[self._carrier].group
        place, offset = divmod(start - 1, own.page_tokens)
        page = tables[self._carrier][place]
        held = None if page == HOLE else self.pages[page]
        assert held is not None, f"{name} reads what is not its own before {start}"
        assert offset < len(held), f"{name} reads what is not its own before {start}"
        stored, right = held[offset], truth.values[start - 1]
        # A wrong row is seen where the rows are compared; here it only has to make a difference.
        return right if stored == row_of(self._carrier, truth.kept(start - 1, right)) else stored

    def write(
        self,
        tables: Sequence[Sequence[int]],
        start: int,
        values: Sequence[int],
        slot: int = 0,
        num_stored: int = 0,
        truth: Truth | None = None,
    ) -> list[int]:
        """The rows that become finished, and the state at the end; which pages were written: none of those before `num_stored`."""
        end, written, first = start + len(values), [], max(start, num_stored)
        if truth is not None:
            values = [truth.kept(start + nth, value) for nth, value in enumerate(values)]
        for index in self._rows:
            own, table = self.groups[index], tables[index]
            page_tokens, rows, kept = own.group.page_tokens, own.rows, values
            if own.is_pooled:
                pooled = self.pooled.setdefault((slot, index), Pooled())
                kept = [pooled.add(start + nth, value, own.group) for nth, value in enumerate(values)]
            for page in table[-(-first // page_tokens) :]:
                self.pages[page] = [0] * rows
            written += table[first // page_tokens :]
            for row in range(first // own.ratio, end // own.ratio):
                held = self.pages[table[row // rows]]
                if held is None:
                    held = self.pages[table[row // rows]] = [0] * rows
                held[row % rows] = row_of(index, kept[(row + 1) * own.ratio - 1 - start])
        for index in self._states:
            for part, page in enumerate(tables[index]):
                self.pages[page] = [row_of(index, values[-1]) + part]
            written += tables[index]
        return written

    def copy_rows(self, copy: RowCopy) -> None:
        """Copy the first rows of a page, and no other."""
        held = self.pages[copy.source]
        assert held is not None, f"{copy} reads what is not its own"
        num_rows = self.groups[copy.group].rows
        assert copy.num_rows < num_rows, f"{copy} has a whole page of {num_rows} rows"
        self.pages[copy.target] = held[: copy.num_rows] + [0] * (num_rows - copy.num_rows)

    def copy(
        self,
        source: Sequence[Sequence[int]],
        target: Sequence[Sequence[int]],
        slots: tuple[int, int],
        num_shared: int,
        num_tokens: int,
    ) -> list[int]:
        """Pages after the shared ones, states and unfinished rows, from one sequence to another; which were written."""
        written = []
        for index, own in enumerate(self.groups):
            places = {*range(own.group.state_pages)}
            if not own.group.is_state:
                end = -(-num_tokens // own.group.page_tokens)
                places = {place for place in own.places_seen(num_tokens - 1) if place < end}
                places -= {*range(num_shared // own.group.page_tokens)}
            for place in sorted(places):
                page, copied = source[index][place], target[index][place]
                held = self.pages[page]
                self.pages[copied] = None if held is None else list(held)
                written.append(copied)
            if own.is_pooled:
                self.pooled[slots[1], index] = replace(self.pooled[slots[0], index])
        return written

    def read(self, tables: Sequence[Sequence[int]], start: int, end: int, truth: Truth, name: object) -> None:
        """Everything that attention would touch in a step over [start, end), against the truth."""
        for index in self._rows:
            own, table, right = self.groups[index], tables[index], truth.pages[index]
            num_full, rest = divmod(end // own.ratio, own.rows)
            seen = [place for place in own.places_seen(start, end) if place < num_full]
            found = [None if table[place] == HOLE else self.pages[table[place]] for place in seen]
            is_right = found == [right[place] for place in seen]
            if rest and num_full in own.places_seen(start, end):
                held = self.pages[table[num_full]] if table[num_full] != HOLE else None
                is_right = is_right and held is not None and held[:rest] == right[num_full][:rest]
            self.num_reads += len(seen) * own.rows + rest
            assert is_right, f"{name} reads what is not its own in {own.group.name}: [{start}, {end})"

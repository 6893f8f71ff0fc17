"""PrefixCache: finds pages that already hold a prefix, by a chained strong hash and a comparison; no torch.

A block is a number of tokens that fills whole pages of every cache group, or a part of a long page. Its name is the digest of (its parent
block's digest, the salt, its token ids), so equal names mean equal prefixes back to the first token. A digest only
finds a candidate: salt, token ids and the parent itself are compared before a page is reused. So a hash collision
never returns another prefix's page.

The cache is a forest whose nodes are full blocks. An entry has a slot for each page that a group keeps of its block:

    slots of a block of 8 tokens     whole context, 4 a page | window, 2 a page
                                        [ p3 ]     [ p7 ]    | HOLE  HOLE  [ p1 ] [ p9 ]

A slot is a HOLE if the window had passed its page when the block was completed, or if the page was evicted since. A
prefix of h tokens is a hit if every group can serve it. A whole context needs all pages, and a window those of the last
W - 1 tokens. A blocked group needs the pages that it keeps, which all lie in the first block; none of its others is ever
registered, because h begins a new block. A state on pages is not kept, so h must be where it restarts. With states
outside the pages (cache/states.py) the block that ends at h must have a snapshot.

A long page (rows of several tokens, cache/groups.py) is in the slot of every block that ends on it: it holds the rows of
that block and of those before it on the page. A prefix that ends inside such a page has *open rows*. Its pages are
shared, and the sequence starts with a copy of the open rows on a page of its own, because it goes on there:

    entries of 128, 2,048 tokens a page    [ page a .............. ][ page b: blocks 16 to 20, then others ]
    a hit of 21 blocks of 128 tokens         shared                   5 rows are copied

Rows that are registered never change: their writer only adds rows, and leaves the page before another writes it. So
blocks of several pages may have the same rows. If a long page is evicted, a child's page takes its place.

A snapshot belongs to the entry of the block that it follows, and goes with it. Evicting a snapshot leaves the entry.

A block is registered when the scheduler issues the step that completes it. A sequence that recomputes it keeps a
private copy and fills holes. An evicted page of a window leaves a hole. One of a whole context removes its entry and
all below it, which are unreachable without it. An entry without pages and children is removed; with children it stays
as their link. So every parent of an entry is an entry, and each entry leads to a page. Links are small compared with
pages, so a small multiple of the pages bounds their number.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import lcm
from typing import NamedTuple

from holdfast.cache.groups import HOLE, CacheGroup, block_tokens
from holdfast.cache.pages import PagePool
from holdfast.cache.states import NO_PLACE, NOT_WRITTEN, Snapshots, Written

DIGEST_BYTES = 16
ENTRIES_PER_PAGE = 4
"""Most entries per page of the pool; a chain that would exceed this registers nothing further."""


def strong_hash(data: bytes) -> bytes:
    """Hash that names blocks; tests replace it to make collisions."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def can_hit(groups: Sequence[CacheGroup]) -> bool:
    """Return False if no prefix can ever hit: a state never restarts, or no group keeps rows of tokens."""
    never_anew = any(group.is_state and group.state_period == 0 for group in groups)
    return not never_anew and not all(group.is_state for group in groups)


class BlockKey(NamedTuple):
    """Name of a full block, and its token ids, eight bytes each."""

    digest: bytes
    tokens: bytes


class OpenRows(NamedTuple):
    """First rows of a cached page, which a sequence that continues after them needs on its own page."""

    group: int
    page: int
    num_rows: int


@dataclass(eq=False, slots=True)
class PrefixEntry:
    """A registered block, compared by identity: two entries are never the same prefix."""

    slots: list[int]
    """Pages of each group in turn; HOLE if there is none."""
    num_pages: int
    """Slots that are not holes."""
    parent: "PrefixEntry | None"
    salt: bytes
    key: BlockKey
    children: "dict[bytes, PrefixEntry]" = field(default_factory=dict)
    """Children by digest."""
    is_registered: bool = True
    index: int = 0
    """Number of blocks before it."""
    step: int = 0
    """The step that computes it on its long pages; 0 if it was computed before it was registered."""
    snapshot: int = NO_PLACE
    """The place of the state after it."""


@dataclass(eq=False, slots=True)
class PrefixChain:
    """One sequence's place in the cache. Tokens are only ever appended, so keys survive a preemption."""

    salt: bytes
    salt_digest: bytes
    keys: list[BlockKey] = field(default_factory=list)
    """Hashes of its first full blocks, each computed once."""
    num_blocks: int = 0
    """Number of its first blocks that are entries; `tip` is the last of them."""
    tip: PrefixEntry | None = None
    num_prompt_tokens: int = 0
    """Tokens before its output."""
    epoch: int = -1
    """Number of cache resets before its pages were computed."""
    is_closed: bool = False
    """True once a block could not be registered: later ones would be unreachable."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix that a sequence can start on: what it shares, what it gets copies of (docs/adr/0021-restored-prefixes.md)."""

    entries: tuple[PrefixEntry, ...]
    tables: tuple[tuple[int, ...], ...]
    """Shared pages of each group by place; HOLE before the window."""
    num_tokens: int
    open_rows: tuple[OpenRows, ...] = ()
    """At most one for each group, of the page after its shared ones."""
    known: tuple[PrefixEntry, ...] = ()
    """Entries of the sequence's blocks, also those that some group cannot serve, or that no snapshot follows."""
    snapshot: int = NO_PLACE
    """The place of the state that the sequence starts with."""

    @property
    def num_known(self) -> int:
        return len(self.known)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Position of one group's pages in the slots of a block."""

    group: CacheGroup
    first: int
    count: int
    span: int = 1
    """Blocks of a page; several if it is long."""

    @classmethod
    def of(cls, group: CacheGroup, first: int, block: int) -> "BlockPart":
        if group.is_state:
            return cls(group, first, 0)
        return cls(group, first, max(block // group.page_tokens, 1), max(group.page_tokens // block, 1))

    @property
    def end(self) -> int:
        return self.first + self.count

    def pages(self, table: Sequence[int], index: int) -> Sequence[int]:
        """Return a sequence's pages of block `index`; of a blocked group only those that it keeps."""
        first = index * self.count // self.span
        if self.group.is_blocked:
            kept = table[first : min(first + self.count, self.group.kept_pages)]
            return (*kept, *[HOLE] * (self.count - len(kept)))
        return table[first : first + self.count]

    def keeps(self, first: PrefixEntry) -> bool:
        """Return True if the first block of a prefix has every page that the group keeps."""
        return HOLE not in first.slots[self.first : self.first + self.group.kept_pages]

    def run(self, slots: Sequence[int], run_before: int) -> int:
        """Count consecutive tokens with pages up to the block's end; `run_before` is the count at its start."""
        for present, page in enumerate(reversed(slots[self.first : self.end])):
            if page == HOLE:
                return present * self.group.page_tokens
        return run_before + self.count * self.group.page_tokens

    def serves(self, run: int, num_tokens: int) -> bool:
        """Return True if a run of `run` tokens covers what the window sees after `num_tokens`."""
        assert self.group.window is not None, f"{self.group.name} sees everything"
        return run >= min(self.group.window - 1, num_tokens)


class PrefixCache:
    """Finds, shares and registers the pages of prefixes, and forgets those that the pool evicts."""

    def __init__(
        self,
        pool: PagePool,
        groups: Sequence[CacheGroup],
        root: bytes,
        hash_bytes: Callable[[bytes], bytes] = strong_hash,
        *,
        snapshots: Snapshots | None = None,
        grid: int = 1,
    ) -> None:
        """`snapshots`: of states outside the pages, which a hit needs; blocks are then multiples of `grid`."""
        self._pool = pool
        self._groups = tuple(groups)
        self.snapshots = snapshots
        self.block_tokens = block_tokens(groups, grid)
        self._whole_tokens = lcm(*(group.page_tokens for group in groups if not group.is_state))
        parts: list[BlockPart] = []
        for group in groups:
            parts.append(BlockPart.of(group, parts[-1].end if parts else 0, self.block_tokens))
        self._parts = tuple(parts)
        self._windows = tuple(part for part in parts if part.group.window is not None and not part.group.is_blocked)
        self._kept = tuple(part for part in parts if part.group.kept_pages)
        self.is_whole = tuple(part.group.window is None for part in parts for _ in range(part.count))
        """True for each slot whose group keeps the whole context."""
        self.spans = tuple(part.span for part in parts for _ in range(part.count))
        """Blocks of a page, for each slot."""
        self._periods = tuple(group.state_period for group in groups if group.is_state)
        self._can_hit = can_hit(groups) and (snapshots is None or snapshots.num_places > 0)
        self._hash = hash_bytes
        self._root = hash_bytes(root)
        self._entries: dict[bytes, PrefixEntry] = {}
        self.by_page: dict[int, PrefixEntry] = {}
        """The entry of each page; of a long one, the entry with most of its rows."""
        self._epoch = 0
        self._settled = 0
        self.pending: dict[int, int] = {}
        """Step number of each registered page that a step in flight computes."""
        self.max_entries = ENTRIES_PER_PAGE * pool.num_pages
        self.num_filled = 0
        """Holes filled and snapshots taken since the start."""
        self.by_snapshot: dict[int, PrefixEntry] = {}
        """The entry of each snapshot."""
        pool.on_evict = self.evict
        if snapshots is not None:
            snapshots.on_evict = self._forget_snapshot

    def __len__(self) -> int:
        return len(self._entries)

    def chain(self, salt: bytes) -> PrefixChain:
        """Return the chain of a new sequence, which shares only with the same salt."""
        return PrefixChain(salt, self._hash(salt))

    def match(self, chain: PrefixChain, token_ids: Sequence[int], num_tokens: int) -> PrefixHit:
        """Return the longest prefix of the first `num_tokens` that a sequence can start on.

        Every group can serve it, and a snapshot follows it if there are states outside the pages.
        """
        return self._match(chain, token_ids, num_tokens, self.snapshots is not None)

    def match_pages(self, chain: PrefixChain, token_ids: Sequence[int], num_tokens: int) -> PrefixHit:
        """Like `match`, for a sequence that gets its state from another one."""
        return self._match(chain, token_ids, num_tokens, False)

    def _match(self, chain: PrefixChain, token_ids: Sequence[int], num_tokens: int, needs_state: bool) -> PrefixHit:
        """Find a hit in one walk over blocks."""
        found: list[PrefixEntry] = []
        runs = [0] * len(self._windows)
        num_served = 0
        for index in range(num_tokens // self.block_tokens if self._can_hit else 0):
            key = self._key(chain, token_ids, index)
            entry = self._entries.get(key.digest)
            if entry is None or not self.is_same(entry, found[-1] if found else None, chain.salt, key):
                break
            found.append(entry)
            runs = [part.run(entry.slots, run) for part, run in zip(self._windows, runs, strict=True)]
            has_state = not needs_state or entry.snapshot != NO_PLACE
            if has_state and self._serves(found[0], runs, len(found) * self.block_tokens):
                num_served = len(found)
        entries = tuple(found[:num_served])
        num_tokens = num_served * self.block_tokens
        snapshot = entries[-1].snapshot if entries and needs_state else NO_PLACE
        return PrefixHit(
            entries, self.tables_of(entries), num_tokens, self.open_rows_of(entries), tuple(found), snapshot
        )

    def miss(self) -> PrefixHit:
        """Return the match of a sequence without a cached prefix."""
        return PrefixHit((), self.tables_of(()), 0)

    def is_computed_by(self, hit: PrefixHit, step: int) -> bool:
        """Return True if `step` computes open rows or the state of a hit: only a later step can begin with a copy."""
        if hit.snapshot != NO_PLACE and self.snapshots is not None and self.snapshots.written_by(hit.snapshot) >= step:
            return True
        return bool(hit.open_rows) and hit.entries[-1].step >= step

    def may_hold_more(self, chain: PrefixChain, hit: PrefixHit) -> bool:
        """Return True if `match` may find a block beyond those of `hit` that are still registered."""
        index = hit.num_known
        while index and not hit.known[index - 1].is_registered:
            index -= 1
        return index < len(chain.keys) and chain.keys[index].digest in self._entries

    def owners_seen(self, hit: PrefixHit) -> tuple[int, ...]:
        """Count owners of each page of a hit that windows see or blocked groups keep: 0, 1, or 2 for several; -1 if it was
        evicted since."""
        if hit.entries and not hit.entries[-1].is_registered:
            return (-1,)
        num_owners: list[int] = []
        for part in (*self._windows, *self._kept):
            num_places = len(hit.entries) * part.count
            passed = part.group.passed(hit.num_tokens)
            for place in (*range(min(passed.start, num_places)), *range(passed.stop, num_places)):
                block, slot = divmod(place, part.count)
                page = hit.entries[block].slots[part.first + slot]
                num_owners.append(-1 if page == HOLE else min(self._pool.num_owners(page), 2))
        return tuple(num_owners)

    def is_current(self, chain: PrefixChain) -> bool:
        """Return False if the cache was reset since the sequence started: others must not share what it computed."""
        return chain.epoch == self._epoch

    def is_same_block(
        self, own: tuple[PrefixChain, Sequence[int]], other: tuple[PrefixChain, Sequence[int]], index: int
    ) -> bool:
        """Return True if both sequences have block `index` in full, and equal salt and tokens up to its end."""
        if not self._can_hit or (index + 1) * self.block_tokens > min(len(own[1]), len(other[1])):
            return False
        keys = [self._key(*one, index) for one in (own, other)]
        return own[0].salt == other[0].salt and keys[0] == keys[1]

    def share(
        self, chain: PrefixChain, hit: PrefixHit, tables: Sequence[Sequence[int]] | None = None
    ) -> list[list[int]]:
        """Start a sequence on a hit, or on `tables` of its pages: add an owner to each page, and return its tables."""
        entries, tables = hit.entries, hit.tables if tables is None else tables
        for table in tables:
            for page in table:
                if page != HOLE:
                    self._pool.share(page)
        chain.num_blocks = len(entries)
        chain.tip = entries[-1] if entries else None
        chain.epoch = self._epoch
        chain.is_closed = False
        return [list(table) for table in tables]

    def register(
        self,
        chain: PrefixChain,
        token_ids: Sequence[int],
        tables: Sequence[Sequence[int]],
        num_tokens: int,
        step: int = 0,
    ) -> None:
        """Register a sequence's full blocks: computed ones, or ones that `step` computes.

        A sequence that starts on a block of a step in flight reads it in the same step or later. Steps run in order,
        and each writes all rows of a layer before it reads any. The pages stay pending until `settle`.
        """
        if chain.epoch != self._epoch or not self._can_hit:
            return
        while not chain.is_closed and chain.num_blocks < num_tokens // self.block_tokens:
            key = self._key(chain, token_ids, chain.num_blocks)
            entry = self.enter(chain, key, self._slots(tables, chain.num_blocks), step)
            if entry is None:
                chain.is_closed = True
            else:
                chain.tip = entry
                chain.num_blocks += 1
                if entry.index * self.block_tokens > chain.num_prompt_tokens:
                    self._yield_windows(entry)

    def _yield_windows(self, entry: PrefixEntry) -> None:
        """Evict next the pages that windows see at the start of an output's block and not at its end.

        Prefixes rarely end inside an output, except at its end. So short blocks do not take more of the cache than long
        ones. Prefixes of whole pages keep their windows.
        """
        end = entry.index * self.block_tokens
        if end % self._whole_tokens == 0:
            return
        for part in self._windows:
            above: PrefixEntry | None = entry
            for place in reversed(range(part.group.first_page(end), part.group.first_page(end + self.block_tokens))):
                block, slot = divmod(place, part.count)
                while above is not None and above.index > block:
                    above = above.parent
                if above is not None:
                    self._pool.evict_next(above.slots[part.first + slot])

    def num_common(
        self, own: tuple[PrefixChain, Sequence[int]], other: tuple[PrefixChain, Sequence[int]], first: int
    ) -> int:
        """Return how many first blocks of both sequences are equal, if the first `first` are."""
        while self.is_same_block(own, other, first):
            first += 1
        return first

    def lacks_snapshot(self, chain: PrefixChain, token_ids: Sequence[int], num_tokens: int) -> bool:
        """Return True if no snapshot follows the blocks of a sequence's first `num_tokens`."""
        entry = self._entries.get(self._key(chain, token_ids, num_tokens // self.block_tokens - 1).digest)
        return entry is None or entry.snapshot == NO_PLACE

    def take_snapshot(
        self, chain: PrefixChain, num_tokens: int, step: int, *, is_between: bool, own: Written = NOT_WRITTEN
    ) -> int:
        """Give a place to the state of a sequence after its first `num_tokens`, which `step` computes.

        `own`: the last snapshot that the sequence wrote. It may go if it leads to this one alone.
        NO_PLACE if its blocks up to there are not registered, have a snapshot, or no place may be written.
        """
        tip = chain.tip
        is_last = tip is not None and tip.is_registered and chain.num_blocks * self.block_tokens == num_tokens
        if self.snapshots is None or tip is None or not is_last or chain.epoch != self._epoch:
            return NO_PLACE
        if tip.snapshot != NO_PLACE:
            return NO_PLACE
        above = tip.parent
        while above is not None and above.snapshot == NO_PLACE and len(above.children) == 1:
            above = above.parent
        is_passed = above is not None and above.snapshot != NO_PLACE and len(above.children) == 1
        if above is not None and is_passed:
            self.snapshots.yield_place(above.snapshot)
            own = own if above.snapshot == own.place else NOT_WRITTEN
        place = self.snapshots.take(step, is_between=is_between, own=own if is_passed else NOT_WRITTEN)
        if place != NO_PLACE:
            tip.snapshot = place
            self.by_snapshot[place] = tip
            self.num_filled += 1
        return place

    def _forget_snapshot(self, place: int) -> None:
        assert self.snapshots is not None, f"snapshot {place} of no pool"
        self.by_snapshot.pop(place).snapshot = NO_PLACE
        self.snapshots.forget(place)

    def settle(self, step: int) -> None:
        """Record that the steps up to this one have run: their pages and snapshots are no longer pending."""
        self._settled = step
        if self.snapshots is not None:
            self.snapshots.settle(step)
        self.pending = {page: own for page, own in self.pending.items() if own > step}

    def pending_step(self, tables: Sequence[Sequence[int]]) -> int:
        """Return the latest step in flight that computes one of these pages, or 0."""
        if not self.pending:
            return 0
        return max((self.pending.get(page, 0) for table in tables for page in table), default=0)

    def rewind(self, chain: PrefixChain, num_tokens: int) -> None:
        """Move a chain back to the last block of its first `num_tokens`, before later blocks are forgotten."""
        num_blocks = num_tokens // self.block_tokens
        while chain.num_blocks > num_blocks:
            chain.num_blocks -= 1
            if chain.tip is None or not chain.tip.is_registered:
                chain.is_closed = True
            else:
                chain.tip = chain.tip.parent

    def forget_pending(self) -> None:
        """Forget the pages and snapshots that dropped steps were to write, and all blocks after such pages."""
        for place in () if self.snapshots is None else self.snapshots.pending():
            self._forget_snapshot(place)
        for page in list(self.pending):
            while page in self.pending:
                entry = self.by_page[page]
                if self.spans[entry.slots.index(page)] > 1:
                    self._drop(entry)  # earlier blocks of a long page stay
                else:
                    self.evict(page)
        assert not self.pending, f"pages {list(self.pending)} are pending and no entry has them"

    def reset(self) -> None:
        """Forget everything, and never register what running sequences have computed so far."""
        for place in list(self.by_snapshot):
            self._forget_snapshot(place)
        for entry in self._entries.values():
            entry.is_registered = False
            entry.parent = None
            entry.children.clear()
        for page in self.by_page:
            self._pool.forget(page)
        self._entries.clear()
        self.by_page.clear()
        self.pending.clear()
        self._epoch += 1

    def _serves(self, first: PrefixEntry, runs: Sequence[int], num_tokens: int) -> bool:
        """Return True if windows have what they see, the kept pages of the first block are there, and states restart.

        Every entry has its whole-context pages.
        """
        is_seen = all(part.serves(run, num_tokens) for part, run in zip(self._windows, runs, strict=True))
        is_seen = is_seen and all(part.keeps(first) for part in self._kept)
        return is_seen and all(num_tokens % period == 0 for period in self._periods)

    def tables_of(self, entries: Sequence[PrefixEntry]) -> tuple[tuple[int, ...], ...]:
        num_tokens = len(entries) * self.block_tokens
        tables: list[tuple[int, ...]] = []
        for part in self._parts:
            passed = part.group.passed(num_tokens)
            pages = [
                page for entry in entries[part.span - 1 :: part.span] for page in entry.slots[part.first : part.end]
            ]
            tables.append((*pages[: passed.start], *[HOLE] * len(passed), *pages[passed.stop :]))
        return tuple(tables)

    def open_rows_of(self, entries: Sequence[PrefixEntry]) -> tuple[OpenRows, ...]:
        """Return the rows of each long page that a prefix ends inside."""
        num_tokens = len(entries) * self.block_tokens
        counts = [part.group.open_rows(num_tokens) for part in self._parts]
        return tuple(
            OpenRows(number, entries[-1].slots[part.first], num_rows)
            for number, (part, num_rows) in enumerate(zip(self._parts, counts, strict=True))
            if num_rows
        )

    def _slots(self, tables: Sequence[Sequence[int]], index: int) -> list[int]:
        """Return a sequence's pages of a block."""
        slots: list[int] = []
        for part, table in zip(self._parts, tables, strict=True):
            slots += part.pages(table, index)
        return slots

    def _key(self, chain: PrefixChain, token_ids: Sequence[int], index: int) -> BlockKey:
        keys = chain.keys
        for number in range(len(keys), index + 1):
            start = number * self.block_tokens
            tokens = array("q", token_ids[start : start + self.block_tokens]).tobytes()
            parent = keys[-1].digest if keys else self._root
            # Digests have a fixed length, so different inputs never concatenate to the same bytes.
            keys.append(BlockKey(self._hash(parent + chain.salt_digest + tokens), tokens))
        return keys[index]

    @staticmethod
    def is_same(entry: PrefixEntry, parent: PrefixEntry | None, salt: bytes, key: BlockKey) -> bool:
        return entry.parent is parent and entry.key.tokens == key.tokens and entry.salt == salt

    def enter(self, chain: PrefixChain, key: BlockKey, slots: list[int], step: int) -> PrefixEntry | None:
        """Return the entry of this block, new or another sequence's; None if there can be none."""
        parent = chain.tip
        if parent is not None and not parent.is_registered:
            return None
        entry = self._entries.get(key.digest)
        if entry is not None and not self.is_same(entry, parent, chain.salt, key):
            return None
        if entry is None:
            # A fork has no page of a block that its windows have passed: its entry would lead to no page.
            if len(self._entries) >= self.max_entries or all(page == HOLE for page in slots):
                return None
            entry = PrefixEntry([HOLE] * len(slots), 0, parent, chain.salt, key, index=chain.num_blocks, step=step)
            self._entries[key.digest] = entry
            if parent is not None:
                parent.children[key.digest] = entry
            self.fill_holes(entry, slots, step)
        elif entry.num_pages < len(slots):
            self.num_filled += self.fill_holes(entry, slots, step)
        return entry

    def fill_holes(self, entry: PrefixEntry, slots: Sequence[int], step: int) -> int:
        """Put pages into an entry's holes; return how many."""
        before = entry.num_pages
        for slot, page in enumerate(slots):
            if page == HOLE or entry.slots[slot] != HOLE:
                continue
            assert page not in self.by_page or self.spans[slot] > 1, f"page {page} is registered twice"
            self._pool.keep(page)
            self.by_page[page] = entry
            if step:
                self.pending[page] = step
            entry.slots[slot] = page
            entry.num_pages += 1
        return entry.num_pages - before

    def evict(self, page: int) -> None:
        entry = self.by_page[page]
        slot = entry.slots.index(page)
        if self.spans[slot] > 1:
            self._replace(page, slot)
            return
        if self.is_whole[slot]:
            self._drop(entry)
            return
        entry.slots[slot] = HOLE
        entry.num_pages -= 1
        self._leave(page, slot, entry)
        above: PrefixEntry | None = entry
        while above is not None and above.num_pages == 0 and not above.children:
            above, empty = above.parent, above
            self._drop(empty)

    def _replace(self, page: int, slot: int) -> None:
        """Evict a long page: its entries get the page of a child, which has their rows too, or are dropped."""
        for entry in list(self._holders(page, slot)):
            heir = next((child for child in entry.children.values() if child.index % self.spans[slot]), None)
            if heir is None:
                self._drop(entry)
            else:
                entry.slots[slot] = heir.slots[slot]
                entry.step = max(entry.step, heir.step)  # the step that writes the child may write these rows too
                self._leave(page, slot, entry)

    def _holders(self, page: int, slot: int) -> Iterator[PrefixEntry]:
        """Yield the entries of a long page, the last block first: all are above it, and end on this page."""
        entry: PrefixEntry | None = self.by_page[page]
        while entry is not None:
            above = entry.parent if entry.index % self.spans[slot] else None
            if entry.slots[slot] == page:
                yield entry
            entry = above

    def _leave(self, page: int, slot: int, entry: PrefixEntry) -> None:
        """Record that an entry no longer has a page; forget the page if no other entry has it."""
        if self.by_page[page] is not entry:
            return
        above = next((one for one in self._holders(page, slot) if one is not entry), None)
        if above is None:
            del self.by_page[page]
            self.pending.pop(page, None)
            self._pool.forget(page)
            return
        self.by_page[page] = above
        if self.pending.pop(page, 0) and above.step > self._settled:
            self.pending[page] = above.step

    def _drop(self, top: PrefixEntry) -> None:
        """Forget an entry and everything below it."""
        below = [top]
        for entry in below:
            below += entry.children.values()
        for entry in reversed(below):
            entry.is_registered = False
            if entry.snapshot != NO_PLACE:
                self._forget_snapshot(entry.snapshot)
            del self._entries[entry.key.digest]
            for slot, page in enumerate(entry.slots):
                if page != HOLE:
                    self._leave(page, slot, entry)
        if top.parent is not None:
            del top.parent.children[top.key.digest]
        for entry in below:
            # Chains may still point here; these links would keep other entries alive.
            entry.parent = None
            entry.children.clear()

    def check(self) -> None:
        """Assert that each kept page is in one slot of one entry, and entries are named, linked, useful and bounded."""
        kept = self._pool.kept_pages()
        assert kept == sorted(self.by_page), f"the pool keeps {kept}, registered are {sorted(self.by_page)}"
        strays = [page for page in self.pending if page not in self.by_page]
        assert not strays, f"pages {strays} are pending, and no entry has them"
        num_entries = len(self._entries)
        assert num_entries <= self.max_entries, f"{num_entries} entries, at most {self.max_entries}"
        num_children = num_below = 0
        placed: list[int] = []
        for digest, entry in self._entries.items():
            pages = [page for page in entry.slots if page != HOLE]
            placed += [page for page in pages if self.by_page.get(page) is entry]
            self._check_entry(digest, entry, pages)
            num_below += entry.parent is not None
            num_children += len(entry.children)
        assert num_children == num_below, f"{num_children} children for {num_below} entries that have a parent"
        assert sorted(placed) == kept, f"entries have {sorted(placed)} in their slots, the pool keeps {kept}"
        self._check_snapshots()

    def _check_snapshots(self) -> None:
        held = () if self.snapshots is None else self.snapshots.held
        if self.snapshots is not None:
            self.snapshots.check()
        placed = sorted(entry.snapshot for entry in self._entries.values() if entry.snapshot != NO_PLACE)
        assert placed == sorted(held), f"entries have the snapshots {placed}, held are {sorted(held)}"
        assert placed == sorted(self.by_snapshot), (
            f"entries have the snapshots {placed}, not {sorted(self.by_snapshot)}"
        )
        for place, entry in self.by_snapshot.items():
            is_own = entry.is_registered and entry.snapshot == place
            assert is_own, f"snapshot {place} is listed with an entry that has snapshot {entry.snapshot}"

    def _check_entry(self, digest: bytes, entry: PrefixEntry, pages: Sequence[int]) -> None:
        slots = entry.slots
        assert entry.is_registered, f"the entry of pages {slots} is listed and was dropped"
        assert entry.key.digest == digest, f"the entry of pages {slots} is not found under its name"
        for slot, page in enumerate(slots):
            is_listed = page == HOLE or (page in self.by_page and entry in self._holders(page, slot))
            assert is_listed, f"page {page} is listed with another entry than its own"
        assert entry.num_pages == len(pages), f"the entry of pages {slots} counts {entry.num_pages} of them"
        assert pages or entry.children, f"the entry of pages {slots} leads to no page"
        holes = [slot for slot, page in enumerate(slots) if page == HOLE] if len(pages) < len(slots) else ()
        is_short = any(self.is_whole[slot] for slot in holes)
        assert not is_short, f"the entry of pages {slots} has a hole where the whole context is kept"
        for part in self._parts:
            num_kept = 0 if entry.index else part.group.kept_pages
            extra = slots[part.first + num_kept : part.end] if part.group.is_blocked else ()
            assert all(page == HOLE for page in extra), f"the entry of {slots} has {extra} of {part.group.name}, unused"
        if entry.parent is not None:
            is_linked = entry.parent.is_registered and entry.parent.children.get(digest) is entry
            is_linked = is_linked and entry.index == entry.parent.index + 1
            assert is_linked, f"the entry of pages {slots} is below {entry.parent.slots}, which does not know it"

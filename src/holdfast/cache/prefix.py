"""PrefixCache: finds pages that already hold a prefix, by a chained strong hash and a comparison; no torch.

A block is a number of tokens that fills whole pages of every cache group. Its name is the digest of (its parent
block's digest, the salt, its token ids), so equal names mean equal prefixes back to the first token. A digest only
finds a candidate: salt, token ids and the parent itself are compared before a page is reused. So a hash collision
never returns another prefix's page.

The cache is a forest whose nodes are full blocks. An entry has a slot for each page that a group keeps of its block:

    slots of a block of 8 tokens     whole context, 4 a page | window, 2 a page
                                        [ p3 ]     [ p7 ]    | HOLE  HOLE  [ p1 ] [ p9 ]

A slot is a HOLE if the window had passed its page when the block was completed, or if the page was evicted since. A
prefix of h tokens is a hit if every group can serve it. A whole context needs all pages, and a window those of the last
W - 1 tokens. No state is kept, so h must be where a state restarts.

A block is registered when the scheduler issues the step that completes it. A sequence that recomputes it keeps a
private copy and fills holes. An evicted page of a window leaves a hole. One of a whole context removes its entry and
all below it, which are unreachable without it. An entry without pages and children is removed; with children it stays
as their link. So every parent of an entry is an entry, and each entry leads to a page. Links are small compared with
pages, so a small multiple of the pages bounds their number.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from holdfast.cache.groups import HOLE, CacheGroup, block_tokens
from holdfast.cache.pages import PagePool

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
    epoch: int = -1
    """Number of cache resets before its pages were computed."""
    is_closed: bool = False
    """True once a block could not be registered: later ones would be unreachable."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that a sequence can start on."""

    entries: tuple[PrefixEntry, ...]
    tables: tuple[tuple[int, ...], ...]
    """Pages of each group by place; HOLE before the window."""
    num_tokens: int
    known: tuple[PrefixEntry, ...] = ()
    """Entries of the sequence's blocks, also those that some group cannot serve."""

    @property
    def num_known(self) -> int:
        return len(self.known)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Position of one group's pages in the slots of a block."""

    group: CacheGroup
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

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
    ) -> None:
        self._pool = pool
        self._groups = tuple(groups)
        self.block_tokens = block_tokens(groups)
        parts: list[BlockPart] = []
        for group in groups:
            count = 0 if group.is_state else self.block_tokens // group.page_tokens
            parts.append(BlockPart(group, parts[-1].end if parts else 0, count))
        self._parts = tuple(parts)
        self._windows = tuple(part for part in parts if part.group.window is not None)
        self.is_whole = tuple(part.group.window is None for part in parts for _ in range(part.count))
        """True for each slot whose group keeps the whole context."""
        self._periods = tuple(group.state_period for group in groups if group.is_state)
        self._can_hit = can_hit(groups)
        self._hash = hash_bytes
        self._root = hash_bytes(root)
        self._entries: dict[bytes, PrefixEntry] = {}
        self.by_page: dict[int, PrefixEntry] = {}
        self._epoch = 0
        self.pending: dict[int, int] = {}
        """Step number of each registered page that a step in flight computes."""
        self.max_entries = ENTRIES_PER_PAGE * pool.num_pages
        self.num_filled = 0
        """Holes filled since the start."""
        pool.on_evict = self.evict

    def __len__(self) -> int:
        return len(self._entries)

    def chain(self, salt: bytes) -> PrefixChain:
        """Return the chain of a new sequence, which shares only with the same salt."""
        return PrefixChain(salt, self._hash(salt))

    def match(self, chain: PrefixChain, token_ids: Sequence[int], num_tokens: int) -> PrefixHit:
        """Return the longest prefix of the first `num_tokens` that every group can serve, in one walk over blocks."""
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
            if self._serves(runs, len(found) * self.block_tokens):
                num_served = len(found)
        entries = tuple(found[:num_served])
        return PrefixHit(entries, self.tables_of(entries), num_served * self.block_tokens, tuple(found))

    def miss(self) -> PrefixHit:
        """Return the match of a sequence without a cached prefix."""
        return PrefixHit((), self.tables_of(()), 0)

    def may_hold_more(self, chain: PrefixChain, hit: PrefixHit) -> bool:
        """Return True if `match` may find a block beyond those of `hit` that are still registered."""
        index = hit.num_known
        while index and not hit.known[index - 1].is_registered:
            index -= 1
        return index < len(chain.keys) and chain.keys[index].digest in self._entries

    def owners_seen(self, hit: PrefixHit) -> tuple[int, ...]:
        """Count owners of each page of a hit that windows see: 0, 1, or 2 for several; -1 if it was evicted since."""
        if hit.entries and not hit.entries[-1].is_registered:
            return (-1,)
        num_owners: list[int] = []
        for part in self._windows:
            num_places = len(hit.entries) * part.count
            for place in range(part.group.first_page(hit.num_tokens), num_places):
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

    def settle(self, step: int) -> None:
        """Record that the steps up to this one have run: their pages are no longer pending."""
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
        """Forget the pages that dropped steps were to compute, and all blocks after them."""
        for page in list(self.pending):
            if page in self.pending:
                self.evict(page)
        assert not self.pending, f"pages {list(self.pending)} are pending and no entry has them"

    def reset(self) -> None:
        """Forget everything, and never register what running sequences have computed so far."""
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

    def _serves(self, runs: Sequence[int], num_tokens: int) -> bool:
        """Return True if windows have what they see, and states restart; every entry has its whole-context pages."""
        is_seen = all(part.serves(run, num_tokens) for part, run in zip(self._windows, runs, strict=True))
        return is_seen and all(num_tokens % period == 0 for period in self._periods)

    def tables_of(self, entries: Sequence[PrefixEntry]) -> tuple[tuple[int, ...], ...]:
        num_tokens = len(entries) * self.block_tokens
        tables: list[tuple[int, ...]] = []
        for part in self._parts:
            num_hidden = part.group.first_page(num_tokens)
            pages = [page for entry in entries for page in entry.slots[part.first : part.end]]
            tables.append((*[HOLE] * num_hidden, *pages[num_hidden:]))
        return tuple(tables)

    def _slots(self, tables: Sequence[Sequence[int]], index: int) -> list[int]:
        """Return a sequence's pages of a block."""
        slots: list[int] = []
        for part, table in zip(self._parts, tables, strict=True):
            slots += table[index * part.count : (index + 1) * part.count]
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
            entry = PrefixEntry([HOLE] * len(slots), 0, parent, chain.salt, key)
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
            assert page not in self.by_page, f"page {page} is registered twice"
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
        if self.is_whole[slot]:
            self._drop(entry)
            return
        del self.by_page[page]
        self.pending.pop(page, None)
        entry.slots[slot] = HOLE
        entry.num_pages -= 1
        self._pool.forget(page)
        above: PrefixEntry | None = entry
        while above is not None and above.num_pages == 0 and not above.children:
            above, empty = above.parent, above
            self._drop(empty)

    def _drop(self, top: PrefixEntry) -> None:
        """Forget an entry and everything below it."""
        if top.parent is not None:
            del top.parent.children[top.key.digest]
        pending = [top]
        while pending:
            entry = pending.pop()
            pending += entry.children.values()
            entry.is_registered = False
            # Chains may still point here; these links would keep other entries alive.
            entry.parent = None
            entry.children.clear()
            del self._entries[entry.key.digest]
            for page in entry.slots:
                if page != HOLE:
                    del self.by_page[page]
                    self.pending.pop(page, None)
                    self._pool.forget(page)

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
            placed += pages
            self._check_entry(digest, entry, pages)
            num_below += entry.parent is not None
            num_children += len(entry.children)
        assert num_children == num_below, f"{num_children} children for {num_below} entries that have a parent"
        assert sorted(placed) == kept, f"entries have {sorted(placed)} in their slots, the pool keeps {kept}"

    def _check_entry(self, digest: bytes, entry: PrefixEntry, pages: Sequence[int]) -> None:
        slots = entry.slots
        assert entry.is_registered, f"the entry of pages {slots} is listed and was dropped"
        assert entry.key.digest == digest, f"the entry of pages {slots} is not found under its name"
        for page in pages:
            assert self.by_page.get(page) is entry, f"page {page} is listed with another entry than its own"
        assert entry.num_pages == len(pages), f"the entry of pages {slots} counts {entry.num_pages} of them"
        assert pages or entry.children, f"the entry of pages {slots} leads to no page"
        holes = [slot for slot, page in enumerate(slots) if page == HOLE] if len(pages) < len(slots) else ()
        is_short = any(self.is_whole[slot] for slot in holes)
        assert not is_short, f"the entry of pages {slots} has a hole where the whole context is kept"
        if entry.parent is not None:
            is_linked = entry.parent.is_registered and entry.parent.children.get(digest) is entry
            assert is_linked, f"the entry of pages {slots} is below {entry.parent.slots}, which does not know it"

"""PrefixCache: which pages already hold this prefix; found by a chained strong hash, believed only when equal; no torch.

A page is named by the digest of (its parent page's digest, the salt, its token ids), so equal names mean equal
prefixes all the way back to the first token. A digest only finds a candidate: salt, token ids and the parent itself
are compared before a page is reused, so that even a colliding hash cannot hand out someone else's page.

The cache is a forest whose nodes are full pages. A page enters when all its tokens are computed; whoever computes the
same page later keeps a private copy. When a page is evicted everything below it goes too, because without it nobody
could reach them. Hence: never more entries than pages, and every parent of an entry is an entry.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from holdfast.cache.pages import PagePool

DIGEST_BYTES = 16


def strong_hash(data: bytes) -> bytes:
    """What names are made with, unless a test wants collisions."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


class PageKey(NamedTuple):
    """The name of a full page and the token ids behind it, eight bytes each."""

    digest: bytes
    tokens: bytes


@dataclass(eq=False, slots=True)
class PrefixEntry:
    """One registered page. Compared by identity: two entries are never the same prefix."""

    page: int
    parent: "PrefixEntry | None"
    salt: bytes
    key: PageKey
    children: "dict[int, PrefixEntry]" = field(default_factory=dict)
    """By page."""
    is_registered: bool = True


@dataclass(eq=False, slots=True)
class PrefixChain:
    """One sequence's place in the cache. Tokens are only ever appended, so keys survive a preemption."""

    salt: bytes
    salt_digest: bytes
    keys: list[PageKey] = field(default_factory=list)
    """Of its first full pages, each hashed once."""
    num_pages: int = 0
    """How many of its pages, from the first on, are entries: `tip` is the last of them."""
    tip: PrefixEntry | None = None
    epoch: int = -1
    """Which life of the cache its pages were computed in."""
    is_closed: bool = False
    """True once a page could not be registered: nothing after it could be reached."""


class PrefixCache:
    """Finds, shares and registers the pages of prefixes, and forgets those that the pool evicts."""

    def __init__(
        self, pool: PagePool, page_tokens: int, root: bytes, hash_bytes: Callable[[bytes], bytes] = strong_hash
    ) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._hash = hash_bytes
        self._root = hash_bytes(root)
        self._entries: dict[bytes, PrefixEntry] = {}
        self._by_page: dict[int, PrefixEntry] = {}
        self._epoch = 0
        pool.on_evict = self._evict

    def __len__(self) -> int:
        return len(self._entries)

    def chain(self, salt: bytes) -> PrefixChain:
        """The place of a new sequence, which shares only with the same salt."""
        return PrefixChain(salt, self._hash(salt))

    def match(self, chain: PrefixChain, token_ids: Sequence[int], num_tokens: int) -> list[PrefixEntry]:
        """The longest run of entries, from the first page on, that holds tokens among the first `num_tokens`."""
        found: list[PrefixEntry] = []
        parent = None
        for index in range(num_tokens // self._page_tokens):
            key = self._key(chain, token_ids, index)
            entry = self._entries.get(key.digest)
            if entry is None or not self._is_same(entry, parent, chain.salt, key):
                break
            found.append(entry)
            parent = entry
        return found

    def holds(self, chain: PrefixChain, index: int) -> bool:
        """True when page `index` of a sequence that was matched before may be found now."""
        return index < len(chain.keys) and chain.keys[index].digest in self._entries

    def share(self, chain: PrefixChain, matched: list[PrefixEntry]) -> list[int]:
        """Starts a sequence on the pages that `match` found, with one more owner each, and returns them."""
        pages = [entry.page for entry in matched]
        for page in pages:
            self._pool.share(page)
        chain.num_pages = len(matched)
        chain.tip = matched[-1] if matched else None
        chain.epoch = self._epoch
        chain.is_closed = False
        return pages

    def register(self, chain: PrefixChain, token_ids: Sequence[int], pages: Sequence[int], num_computed: int) -> None:
        """Enters those of a sequence's pages that have become full of computed tokens."""
        if chain.epoch != self._epoch:
            return
        while not chain.is_closed and chain.num_pages < num_computed // self._page_tokens:
            key = self._key(chain, token_ids, chain.num_pages)
            entry = self._enter(chain, key, pages[chain.num_pages])
            if entry is None:
                chain.is_closed = True
            else:
                chain.tip = entry
                chain.num_pages += 1

    def reset(self) -> None:
        """Forgets everything; what running sequences have computed so far is not registered later either."""
        for entry in self._by_page.values():
            entry.is_registered = False
            entry.parent = None
            entry.children.clear()
            self._pool.forget(entry.page)
        self._entries.clear()
        self._by_page.clear()
        self._epoch += 1

    def _key(self, chain: PrefixChain, token_ids: Sequence[int], index: int) -> PageKey:
        keys = chain.keys
        for number in range(len(keys), index + 1):
            start = number * self._page_tokens
            tokens = array("q", token_ids[start : start + self._page_tokens]).tobytes()
            parent = keys[-1].digest if keys else self._root
            # Digests have a fixed length, so that no two different inputs run together into one.
            keys.append(PageKey(self._hash(parent + chain.salt_digest + tokens), tokens))
        return keys[index]

    @staticmethod
    def _is_same(entry: PrefixEntry, parent: PrefixEntry | None, salt: bytes, key: PageKey) -> bool:
        return entry.parent is parent and entry.key.tokens == key.tokens and entry.salt == salt

    def _enter(self, chain: PrefixChain, key: PageKey, page: int) -> PrefixEntry | None:
        """The entry of this page, new or another sequence's; None when there can be none."""
        parent = chain.tip
        if parent is not None and not parent.is_registered:
            return None
        entry = self._entries.get(key.digest)
        if entry is not None:
            return entry if self._is_same(entry, parent, chain.salt, key) else None
        entry = PrefixEntry(page, parent, chain.salt, key)
        self._pool.keep(page)
        self._entries[key.digest] = entry
        assert page not in self._by_page, f"page {page} is registered twice"
        self._by_page[page] = entry
        if parent is not None:
            parent.children[page] = entry
        return entry

    def _evict(self, page: int) -> None:
        top = self._by_page[page]
        if top.parent is not None:
            del top.parent.children[page]
        pending = [top]
        while pending:
            entry = pending.pop()
            pending += entry.children.values()
            entry.is_registered = False
            # Chains may still point here; without these links nothing else is kept alive by them.
            entry.parent = None
            entry.children.clear()
            del self._entries[entry.key.digest]
            del self._by_page[entry.page]
            self._pool.forget(entry.page)

    def check(self) -> None:
        """Entries and kept pages are the same, each entry under its name, its parent an entry too."""
        kept = self._pool.kept_pages()
        assert kept == sorted(self._by_page), f"the pool keeps {kept}, registered are {sorted(self._by_page)}"
        assert len(self._entries) == len(kept), f"{len(self._entries)} names for {len(kept)} registered pages"
        num_children = num_below = 0
        for page, entry in self._by_page.items():
            assert entry.page == page, f"page {page} is listed with {entry.page=}"
            assert entry.is_registered, f"page {page} is listed and was dropped"
            assert self._entries.get(entry.key.digest) is entry, f"page {page} is not found under its name"
            if entry.parent is not None:
                num_below += 1
                is_linked = entry.parent.is_registered and entry.parent.children.get(page) is entry
                assert is_linked, f"page {page} is registered below page {entry.parent.page}, which does not know it"
            num_children += len(entry.children)
        assert num_children == num_below, f"{num_children} children for {num_below} entries that have a parent"

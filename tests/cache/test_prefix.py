"""PrefixCache: what is found, what must never be found, and what is forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cache.groups import CacheGroup
from holdfast.cache.pages import PagePool
from holdfast.cache.prefix import PrefixCache, PrefixChain, strong_hash

PAGE = 4
WHOLE = (CacheGroup("whole context", PAGE),)


def same_name(data: bytes) -> bytes:
    """One name for everything."""
    return b"0123456789abcdef"


class Bench:
    """A pool, a cache, and sequences that compute all their full pages at once."""

    def __init__(self, num_pages: int = 16, root: bytes = b"root", hash_bytes=strong_hash) -> None:
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, WHOLE, root, hash_bytes)

    def compute(self, tokens: list[int], salt: bytes = b"") -> tuple[PrefixChain, list[int]]:
        chain = self.cache.chain(salt)
        (pages,) = self.cache.share(chain, self.cache.match(chain, tokens, len(tokens)))
        pages += self.pool.allocate_many(-(-len(tokens) // PAGE) - len(pages), pages[-1] if pages else None)
        self.cache.register(chain, tokens, [pages], len(tokens))
        self.check()
        return chain, pages

    def start(self, chain: PrefixChain, num_pages: int, after: int | None = None) -> list[int]:
        """A sequence that starts on nothing, and its first pages."""
        self.cache.share(chain, self.cache.miss())
        return self.pool.allocate_many(num_pages, after)

    def find(self, tokens: list[int], salt: bytes = b"") -> list[int]:
        return list(self.cache.match(self.cache.chain(salt), tokens, len(tokens)).tables[0])

    def check(self) -> None:
        self.pool.check()
        self.cache.check()


def test_prefix_cache_finds_only_full_pages() -> None:
    bench = Bench()
    tokens = list(range(10))
    _, pages = bench.compute(tokens)
    assert bench.find(tokens) == pages[:2]
    assert bench.find([*tokens[:8], 99, 98, 97, 96]) == pages[:2]
    assert bench.find(tokens[:7]) == pages[:1]
    assert bench.find(tokens[:3]) == []


def test_num_tokens_bounds_what_is_found() -> None:
    bench = Bench()
    tokens = list(range(8))
    _, pages = bench.compute(tokens)
    found = [len(bench.cache.match(bench.cache.chain(b""), tokens, limit).tables[0]) for limit in range(9)]
    assert found == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert pages


def test_prefix_cache_equal_page_after_other_prefix_is_missed() -> None:
    bench = Bench()
    bench.compute([1, 2, 3, 4, 5, 6, 7, 8])
    assert bench.find([5, 6, 7, 8]) == []
    assert bench.find([9, 9, 9, 9, 5, 6, 7, 8]) == []


def test_salts_do_not_share() -> None:
    bench = Bench()
    tokens = list(range(8))
    _, mine = bench.compute(tokens, b"mine")
    _, yours = bench.compute(tokens, b"yours")
    assert not set(mine) & set(yours)
    assert bench.find(tokens, b"mine") == mine
    assert bench.find(tokens) == []


@pytest.mark.parametrize(
    ("tokens", "salt"),
    [
        ([9, 2, 3, 4, 5, 6, 7, 8], b""),
        ([1, 2, 3, 4, 5, 6, 7, 9], b""),
        ([1, 2, 3, 4, 5, 6, 7, 8], b"x"),
        ([5, 6, 7, 8, 1, 2, 3, 4], b""),
    ],
    ids=["first page", "second page", "salt", "swapped"],
)
def test_prefix_cache_colliding_hash_never_gives_wrong_page(tokens: list[int], salt: bytes) -> None:
    bench = Bench(hash_bytes=same_name)
    _, pages = bench.compute([1, 2, 3, 4, 5, 6, 7, 8])
    assert bench.find([1, 2, 3, 4, 5, 6, 7, 8]) == pages[:1], "the second page collides with the first and stays out"
    found = bench.find(tokens, salt)
    assert found == (pages[:1] if tokens[:4] == [1, 2, 3, 4] and not salt else [])
    bench.compute(tokens, salt)


def test_prefix_cache_hash_without_parent_never_gives_wrong_page() -> None:
    bench = Bench(hash_bytes=lambda data: strong_hash(data[-8 * PAGE :]))
    _, pages = bench.compute([1, 2, 3, 4, 5, 6, 7, 8])
    _, others = bench.compute([9, 9, 9, 9])
    assert bench.find([9, 9, 9, 9, 5, 6, 7, 8]) == others
    assert bench.find([5, 6, 7, 8]) == []
    assert bench.find([1, 2, 3, 4, 5, 6, 7, 8]) == pages


def test_names_depend_on_the_root() -> None:
    names = []
    for root in (b"a", b"b", b"a"):
        bench = Bench(root=root)
        chain, _ = bench.compute([1, 2, 3, 4])
        names.append(chain.keys[0].digest)
    assert names[0] == names[2] != names[1]
    assert len(names[0]) >= 16


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=2, max_size=6),
    st.lists(st.sampled_from([b"", b"a", b"ab"]), min_size=6, max_size=6),
)
def test_names_are_equal_exactly_for_equal_prefixes(prompts: list[list[int]], salts: list[bytes]) -> None:
    cache = PrefixCache(PagePool(1), WHOLE, b"root")
    prefix_of: dict[bytes, tuple] = {}
    for prompt, salt in zip(prompts, salts, strict=False):
        chain = cache.chain(salt)
        cache.match(chain, prompt, len(prompt))
        for index in range(len(prompt) // PAGE):
            prefix = (salt, *prompt[: (index + 1) * PAGE])
            digest = cache._key(chain, prompt, index).digest
            assert prefix_of.setdefault(digest, prefix) == prefix
    assert len(set(prefix_of.values())) == len(prefix_of)


def test_prefix_cache_duplicate_computation_keeps_first_pages() -> None:
    bench = Bench()
    tokens = list(range(8))
    chains = [bench.cache.chain(b"") for _ in range(2)]
    pages = [bench.start(chain, 2) for chain in chains]
    for chain, own in zip(chains, pages, strict=True):
        bench.cache.register(chain, tokens, [own], 8)
    bench.check()
    assert bench.find(tokens) == pages[0]
    assert bench.pool.kept_pages() == sorted(pages[0])
    bench.pool.release_many(pages[1])
    assert bench.pool.num_cached == 0, "a private copy becomes free"


def test_prefix_cache_eviction_forgets_page_and_descendants() -> None:
    bench = Bench(num_pages=6)
    tokens = list(range(8))
    first, second = bench.cache.chain(b""), bench.cache.chain(b"")
    own = bench.start(first, 1)
    copy = bench.start(second, 2, own[0])
    bench.cache.register(first, tokens, [own], 4)
    bench.cache.register(second, tokens, [copy], 8)
    assert bench.find(tokens) == [own[0], copy[1]]
    bench.pool.release_many(own)
    taken = bench.pool.allocate_many(4)
    assert own[0] in taken
    assert bench.find(tokens) == []
    assert len(bench.cache) == 0
    bench.check()
    bench.cache.register(second, [*tokens, 8, 9, 10, 11], [[*copy, taken[0]]], 12)
    assert len(bench.cache) == 0, "an unreachable page is not registered"
    bench.pool.release_many(copy)
    bench.check()
    assert bench.pool.num_cached == 0


def test_cached_descendants_of_an_evicted_page_become_free() -> None:
    bench = Bench(num_pages=4)
    tokens = list(range(12))
    _, pages = bench.compute(tokens)
    bench.pool.release_many(pages)
    assert bench.pool.num_cached == 3
    bench.pool.share(pages[1])
    bench.pool.share(pages[2])
    bench.pool.release(pages[2])
    bench.pool.release(pages[1])
    # Used in this order the first page is now the oldest, though the others hang below it.
    bench.pool.allocate_many(2)
    assert (bench.pool.num_cached, bench.pool.num_free) == (0, 2)
    bench.check()


def test_never_more_entries_than_pages() -> None:
    bench = Bench(num_pages=5)
    for start in range(0, 400, 7):
        _, pages = bench.compute(list(range(start, start + 9)))
        bench.pool.release_many(pages)
        assert len(bench.cache) <= 5


def test_prefix_cache_reset_stops_running_sequences_registering() -> None:
    bench = Bench()
    tokens = list(range(8))
    chain, pages = bench.compute(tokens)
    empty = bench.cache.chain(b"")
    own = bench.start(empty, 1)
    bench.cache.reset()
    bench.check()
    assert bench.find(tokens) == []
    bench.cache.register(chain, [*tokens, 8, 9, 10, 11], [[*pages, bench.pool.allocate(pages[-1])]], 12)
    bench.cache.register(empty, [7, 7, 7, 7], [own], 4)
    assert len(bench.cache) == 0
    bench.pool.release_many(pages)
    assert bench.pool.num_cached == 0
    _, again = bench.compute(tokens)
    assert bench.find(tokens) == again


def test_prefix_cache_hashes_each_page_once() -> None:
    hashed: list[bytes] = []

    def counting(data: bytes) -> bytes:
        hashed.append(data)
        return strong_hash(data)

    bench = Bench(hash_bytes=counting)
    chain = bench.cache.chain(b"")
    tokens = list(range(12))
    hashed.clear()
    for _ in range(3):
        bench.cache.match(chain, tokens, 11)
    pages = bench.start(chain, 3)
    for num_computed in (5, 8, 11, 12, 12):
        bench.cache.register(chain, tokens, [pages], num_computed)
    bench.start(chain, 0)
    bench.cache.match(chain, tokens, 11)
    # The name of the first page, though it was missed, is enough to know that the second cannot be there.
    assert len(hashed) == 3


def test_huge_and_negative_token_ids_do_not_run_together() -> None:
    bench = Bench()
    bench.compute([2**40, 0, 0, 0])
    assert bench.find([0, 2**40, 0, 0]) == []
    assert bench.find([-1, 0, 0, 0]) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache._entries.clear(),
        lambda cache: cache.by_page.clear(),
        lambda cache: cache.by_page[1].slots.__setitem__(0, 0),
        lambda cache: setattr(cache.by_page[0], "is_registered", False),
        lambda cache: setattr(cache.by_page[1], "parent", None),
        lambda cache: cache.by_page[0].children.clear(),
        lambda cache: cache._pool.forget(1),
    ],
    ids=["no names", "no pages", "wrong page", "dropped", "no parent", "no children", "pool forgot"],
)
def test_check_notices_damage(damage) -> None:
    bench = Bench()
    _, pages = bench.compute(list(range(8)))
    assert pages == [0, 1]
    damage(bench.cache)
    with pytest.raises(AssertionError):
        bench.cache.check()


def test_pending_step_is_the_latest_that_computes_a_page() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, [CacheGroup("whole context", 2)], b"root")
    chain = cache.chain(b"")
    tables = cache.share(chain, cache.miss())
    tables[0] += pool.allocate_many(3)
    cache.register(chain, [*range(6)], tables, 2, step=4)
    cache.register(chain, [*range(6)], tables, 6, step=5)
    assert cache.pending_step(tables) == 5
    assert cache.pending_step([tables[0][:1]]) == 4
    cache.settle(4)
    assert (cache.pending_step([tables[0][:1]]), cache.pending_step(tables)) == (0, 5)
    cache.check()
    cache.rewind(chain, 2)
    cache.forget_pending()
    cache.check()
    assert (cache.pending_step(tables), len(cache), chain.num_blocks) == (0, 1, 1)
    cache.register(chain, [*range(6)], tables, 6)
    assert len(cache) == 3


def test_block_registered_anew_after_eviction_may_be_found() -> None:
    bench = Bench()
    tokens = list(range(12))
    _, pages = bench.compute(tokens)
    chain = bench.cache.chain(b"")
    hit = bench.cache.match(chain, tokens, 12)
    bench.pool.release_many(pages)
    assert not bench.cache.may_hold_more(chain, hit)
    bench.cache.evict(pages[1])
    assert not bench.cache.may_hold_more(chain, hit), "less is left, and nothing else"
    bench.compute(tokens[:8])
    assert bench.cache.may_hold_more(chain, hit)
    again = bench.cache.match(chain, tokens, 12)
    assert again.num_tokens == 8
    bench.compute(tokens)
    assert bench.cache.may_hold_more(chain, again)

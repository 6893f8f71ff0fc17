"""PrefixCache with several groups: what every group can serve, holes and how they are filled, eviction, links and their bound."""

from dataclasses import replace

import pytest

from holdfast.cache.groups import HOLE, CacheGroup, by_position
from holdfast.cache.pages import PagePool
from holdfast.cache.prefix import ENTRIES_PER_PAGE, PrefixCache, PrefixChain, PrefixHit, can_hit

NEAR = CacheGroup("near", 2, window=4, is_blocked=True, kept_pages=2)
WHOLE, WINDOW = CacheGroup("whole context", 4), CacheGroup("window of 5", 2, window=5)
STATE = CacheGroup("state", 0, state_pages=1, state_period=8)


class Bench:
    """A pool, a cache, and sequences that compute all their tokens in one step, or in steps of a block."""

    def __init__(self, *groups: CacheGroup, num_pages: int = 64) -> None:
        self.groups = groups
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, groups, b"root")

    def match(self, tokens: list[int]) -> PrefixHit:
        return self.cache.match(self.cache.chain(b""), tokens, len(tokens))

    def compute(self, tokens: list[int], step: int = 1000) -> tuple[PrefixChain, list[list[int]]]:
        """Takes hits, computes the rest and gives back what is behind its windows, as the scheduler does."""
        chain = self.cache.chain(b"")
        hit = self.cache.match(chain, tokens, len(tokens) - 1)
        tables, computed = self.cache.share(chain, hit), hit.num_tokens
        while computed < len(tokens):
            computed = min(computed + step, len(tokens))
            for group, table in zip(self.groups, tables, strict=True):
                table += self.pool.allocate_many(group.pages_for(computed) - len(table))
            self.cache.register(chain, tokens, tables, computed)
            for group, table in zip(self.groups, tables, strict=True):
                for place in group.passed(computed):
                    if table[place] != HOLE:
                        self.pool.release(table[place])
                        table[place] = HOLE
            self.check()
        return chain, tables

    def release(self, tables: list[list[int]]) -> None:
        self.pool.release_many(by_position(self.groups, tables))
        self.check()

    def check(self) -> None:
        self.pool.check()
        self.cache.check()


def test_prefix_hit_has_full_context_and_window_pages() -> None:
    bench = Bench(WHOLE, WINDOW)
    tokens = list(range(14))
    _, tables = bench.compute(tokens)
    hit = bench.match(tokens)
    assert (hit.num_tokens, hit.num_known) == (12, 3)
    assert hit.tables[0] == tuple(tables[0][:3])
    assert hit.tables[1][:4] == (HOLE,) * 4
    assert hit.tables[1][5] == tables[1][5]
    assert all(page != HOLE for page in hit.tables[1][4:])


def test_prefix_hit_ends_before_missing_window_page() -> None:
    bench = Bench(WHOLE, WINDOW)
    tokens = list(range(16))
    _, tables = bench.compute(tokens, step=4)
    bench.release(tables)
    newest = bench.match(tokens).tables[1][-1]
    bench.cache.evict(newest)
    bench.check()
    hit = bench.match(tokens)
    assert (hit.num_tokens, hit.num_known) == (12, 4), "the entry is still there, and its last page is not"


def test_prefix_cache_hole_is_filled_by_next_computation() -> None:
    bench = Bench(WHOLE, WINDOW)
    tokens = list(range(16))
    _, tables = bench.compute(tokens, step=4)
    bench.release(tables)
    newest = bench.match(tokens).tables[1][-1]
    bench.cache.evict(newest)
    before = bench.cache.num_filled
    _, again = bench.compute([*tokens, 99])
    assert bench.cache.num_filled == before + 1
    assert bench.match(tokens).num_tokens == 16
    assert bench.match(tokens).tables[1][-1] in again[1]


def test_prefix_cache_evicted_full_page_drops_descendants() -> None:
    bench = Bench(WHOLE, WINDOW)
    tokens = list(range(16))
    _, tables = bench.compute(tokens)
    bench.release(tables)
    bench.cache.evict(tables[0][1])
    bench.check()
    assert len(bench.cache) == 1
    assert bench.match(tokens).num_known == 1


def test_prefix_cache_window_links_last_as_long_as_descendants() -> None:
    bench = Bench(WINDOW)
    tokens = list(range(12))
    _, tables = bench.compute(tokens, step=2)
    bench.release(tables)
    assert len(bench.cache) == 6
    pages = list(bench.match(tokens).tables[0])
    for page in [page for entry in bench.match(tokens).entries[:4] for page in entry.slots]:
        bench.cache.evict(page)
    bench.check()
    assert len(bench.cache) == 6, "links to what is left"
    assert bench.match(tokens).num_tokens == 12
    for page in reversed(pages[4:]):
        bench.cache.evict(page)
    bench.check()
    assert len(bench.cache) == 0


def test_prefix_cache_links_are_bounded_and_chain_closes() -> None:
    bench = Bench(CacheGroup("window of 1", 1, window=1), num_pages=2)
    most = ENTRIES_PER_PAGE * 2
    chain, tables = bench.compute(list(range(3 * most)), step=1)
    assert len(bench.cache) <= most
    assert chain.is_closed
    bench.release(tables)
    bench.compute(list(range(1000, 1004)), step=1)


def test_prefix_hit_with_state_ends_at_state_period() -> None:
    bench = Bench(WHOLE, STATE)
    tokens = list(range(30))
    bench.compute(tokens)
    assert [bench.match(tokens[:length]).num_tokens for length in (4, 7, 8, 12, 15, 16, 29)] == [0, 0, 8, 8, 8, 16, 24]
    assert bench.match(tokens).tables[1] == ()


def test_can_hit_is_false_for_state_without_period() -> None:
    forever = CacheGroup("state", 0, state_pages=1)
    assert not can_hit((WHOLE, forever))
    assert not can_hit((STATE,))
    assert can_hit((WHOLE, STATE))
    bench = Bench(WHOLE, forever)
    bench.compute(list(range(20)))
    assert len(bench.cache) == 0


def test_prefix_hit_window_wider_than_context_has_all_pages() -> None:
    bench = Bench(CacheGroup("wide", 4, window=1000))
    tokens = list(range(17))
    _, tables = bench.compute(tokens)
    assert bench.match(tokens).tables[0] == tuple(tables[0][:4])


def test_prefix_hit_window_of_one_needs_no_pages() -> None:
    bench = Bench(WHOLE, CacheGroup("window of 1", 4, window=1))
    tokens = list(range(17))
    bench.compute(tokens, step=3)
    hit = bench.match(tokens)
    assert hit.num_tokens == 16
    assert hit.tables[1] == (HOLE,) * 4


def test_register_of_a_block_without_pages_enters_nothing() -> None:
    bench = Bench(WINDOW)
    chain = bench.cache.chain(b"")
    tables = bench.cache.share(chain, bench.cache.miss())
    tables[0] += [HOLE, HOLE, *bench.pool.allocate_many(2)]
    bench.cache.register(chain, [*range(8)], tables, 8)
    bench.check()
    assert len(bench.cache) == 0
    assert chain.is_closed, "nothing after it could be reached"


def test_owners_of_a_hit_change_with_sharing_and_eviction() -> None:
    bench = Bench(WHOLE, WINDOW)
    tokens = list(range(14))
    _, tables = bench.compute(tokens)
    hit = bench.match(tokens)
    # The window sees two pages of the hit's end. It gave the older one back before the last two tokens.
    assert bench.cache.owners_seen(hit) == (0, 1)
    bench.pool.share(tables[1][5])
    assert bench.cache.owners_seen(hit) == (0, 2)
    bench.pool.release(tables[1][5])
    bench.release(tables)
    assert bench.cache.owners_seen(hit) == (0, 0)
    bench.cache.evict(hit.tables[1][4])
    assert bench.cache.owners_seen(hit) == (-1, 0)
    bench.cache.evict(hit.tables[0][2])
    assert bench.cache.owners_seen(hit) == (-1,)


@pytest.mark.parametrize("window", range(1, 11))
@pytest.mark.parametrize("page_tokens", [1, 2, 4])
def test_hit_needs_every_page_that_its_window_sees(page_tokens: int, window: int) -> None:
    tokens, num_places = list(range(16)), 16 // page_tokens
    for gone in range(num_places):
        bench = Bench(WHOLE, CacheGroup("window", page_tokens, window=window))
        _, tables = bench.compute(tokens, step=4)
        bench.release(tables)
        pages = [page for entry in bench.match(tokens).known for page in entry.slots[1:]]
        assert len(pages) == num_places
        bench.cache.evict(pages[gone])
        # Of the first h tokens the next one sees those from h - window + 1 on.
        lost = range(gone * page_tokens, (gone + 1) * page_tokens)
        served = [h for h in (0, 4, 8, 12, 16) if not set(lost) & set(range(max(h - window + 1, 0), h))]
        assert bench.match(tokens).num_tokens == max(served)


@pytest.mark.parametrize("kept", [1, 2])
def test_prefix_hit_restores_kept_pages_and_no_other_near_page(kept: int) -> None:
    bench = Bench(WHOLE, replace(NEAR, kept_pages=kept))
    tokens = list(range(18))
    _, tables = bench.compute(tokens, step=5)
    for num_tokens in (5, 9, 17, 18):
        hit = bench.match(tokens[:num_tokens])
        num_pages = hit.num_tokens // 2
        assert hit.num_tokens == num_tokens // 4 * 4
        assert hit.tables[1] == (*tables[1][:kept], *[HOLE] * (num_pages - min(kept, num_pages)))
    registered = {page for entry in bench.match(tokens).entries for page in entry.slots if page != HOLE}
    assert registered == {*tables[0][:4], *tables[1][:kept]}, "other pages are not kept for anyone"


@pytest.mark.parametrize("place", [0, 1])
def test_prefix_hit_without_a_kept_page_is_none(place: int) -> None:
    bench = Bench(WHOLE, NEAR)
    tokens = list(range(16))
    _, tables = bench.compute(tokens)
    bench.release(tables)
    hit = bench.match(tokens)
    assert bench.cache.owners_seen(hit) == (0, 0)
    bench.cache.evict(tables[1][place])
    bench.check()
    assert -1 in bench.cache.owners_seen(hit)
    assert (bench.match(tokens).num_tokens, bench.match(tokens).num_known) == (0, 4), "all its codes are still there"
    # The next sequence that computes the first block fills the hole, and serves every prefix behind it.
    _, again = bench.compute(tokens[:6])
    found = bench.match(tokens)
    assert found.num_tokens == 16
    assert found.tables[1][place] == again[1][place]
    assert found.tables[1][1 - place] == tables[1][1 - place]


def test_prefix_cache_kept_pages_are_evicted_after_the_codes_of_their_block() -> None:
    bench = Bench(WHOLE, NEAR)
    _, tables = bench.compute(list(range(8)))
    bench.release(tables)
    order = list(bench.pool.cached)
    assert order == [tables[0][1], tables[0][0], tables[1][1], tables[1][0]]


def test_prefix_hit_behind_windows_needs_no_near_page() -> None:
    own = CacheGroup("near", 2, window=4, is_blocked=True)
    bench = Bench(WINDOW, own)
    tokens = list(range(16))
    bench.compute(tokens)
    hit = bench.match(tokens)
    assert hit.num_tokens == 16
    assert hit.tables[1] == (HOLE,) * 8

"""PagePool and its free runs: against a plain model under random calls, and the order in which pages are handed out."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.cache.pages import FreeRuns, PagePool


class PoolMachine(RuleBasedStateMachine):
    """Random calls; beside the pool runs a model of owners, kept pages and the order of eviction."""

    @initialize(num_pages=st.integers(8, 24))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.owners: Counter[int] = Counter()
        self.kept: set[int] = set()
        self.lru: list[int] = []
        self.last: int | None = None

    def owned(self) -> list[int]:
        return sorted(self.owners.elements())

    @rule(data=st.data(), follow=st.booleans(), num_expected=st.integers(0, 30))
    def allocate(self, data: st.DataObject, follow: bool, num_expected: int) -> None:
        num_pages = data.draw(st.integers(0, self.pool.num_available))
        num_free = self.pool.num_free
        pages = self.pool.allocate_many(num_pages, self.last if follow else None, num_expected)
        assert len(pages) == num_pages == len(set(pages))
        num_evicted = max(num_pages - num_free, 0)
        evicted, self.lru = self.lru[:num_evicted], self.lru[num_evicted:]
        assert set(evicted) <= set(pages), "free pages come first, then the least recently used ones"
        self.kept.difference_update(evicted)
        assert not self.kept.intersection(pages)
        for page in pages:
            assert self.owners[page] == 0
            self.owners[page] = 1
        self.last = pages[-1] if pages else self.last

    @precondition(lambda self: self.owners.total() or self.lru)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({*self.owned(), *self.lru})))
        self.pool.share(page)
        self.owners[page] += 1
        if page in self.lru:
            self.lru.remove(page)

    @precondition(lambda self: self.owners.total())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(self.owned())))

    @precondition(lambda self: self.owners.total())
    @rule()
    def release_everything(self) -> None:
        pages = self.owned()
        self.pool.release_many(pages)
        for page in reversed(pages):
            self.forget_owner(page)

    def drop(self, page: int) -> None:
        self.pool.release(page)
        self.forget_owner(page)

    def forget_owner(self, page: int) -> None:
        self.owners[page] -= 1
        if self.owners[page] == 0 and page in self.kept:
            self.lru.append(page)

    @precondition(lambda self: self.owners.total())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.owned()))
        self.pool.keep(page)
        self.kept.add(page)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.forget(page)
        self.kept.discard(page)
        if page in self.lru:
            self.lru.remove(page)

    @invariant()
    def agrees_with_the_model(self) -> None:
        pool = self.pool
        pool.check()
        assert pool.owner_counts() == [self.owners[page] for page in range(pool.num_pages)]
        assert pool.kept_pages() == sorted(self.kept)
        assert pool.num_cached == len(self.lru)
        num_owned = sum(count > 0 for count in self.owners.values())
        assert pool.num_free + pool.num_cached + num_owned == pool.num_pages
        assert pool.num_available == pool.num_pages - num_owned


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=max(80, settings().max_examples), stateful_step_count=40)


def is_consecutive(pages: list[int]) -> bool:
    return pages == list(range(pages[0], pages[0] + len(pages)))


def test_page_pool_new_pool_allocates_ascending_pages() -> None:
    pool = PagePool(10)
    assert pool.allocate_many(4) == [0, 1, 2, 3]
    assert pool.allocate_many(0) == []
    assert pool.allocate(after=3) == 4


def test_page_pool_sequence_grows_into_next_page() -> None:
    pool = PagePool(64)
    sequences = [pool.allocate_many(2) for _ in range(4)]
    for _ in range(6):
        for pages in sequences:
            pages.append(pool.allocate(after=pages[-1]))
    assert all(is_consecutive(pages) for pages in sequences)


def test_page_pool_growing_sequences_stay_consecutive() -> None:
    pool = PagePool(4096)
    sequences = [pool.allocate_many(8) for _ in range(64)]
    for _ in range(20):
        for pages in sequences:
            pages += pool.allocate_many(1, pages[-1])
    assert all(is_consecutive(pages) for pages in sequences)


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 8])
def test_page_pool_chunked_prompt_stays_consecutive(num_chunks: int) -> None:
    pool = PagePool(1000)
    neighbour = pool.allocate_many(4)
    pages: list[int] = []
    for _ in range(num_chunks):
        pages += pool.allocate_many(800 // num_chunks, pages[-1] if pages else None, 800 - len(pages))
    assert is_consecutive(pages)
    for _ in range(90):
        neighbour.append(pool.allocate(neighbour[-1]))
    assert is_consecutive(neighbour)


def test_page_pool_scattered_pages_can_all_be_allocated() -> None:
    pool = PagePool(12)
    pages = pool.allocate_many(12)
    pool.release_many(pages[::2])
    assert sorted(pool.allocate_many(6, after=3)) == pages[::2]
    assert pool.num_available == 0


def test_released_pages_join_into_one_run_in_any_order() -> None:
    pool = PagePool(9)
    pages = pool.allocate_many(9)
    for page in (4, 2, 8, 0, 6, 3, 1, 7, 5):
        pool.release(pages[page])
    assert pool.allocate_many(9) == list(range(9))


def test_page_pool_evicts_cached_sequence_from_its_end() -> None:
    pool = PagePool(4)
    pages = pool.allocate_many(4)
    for page in pages:
        pool.keep(page)
    pool.release_many(pages)
    assert (pool.num_free, pool.num_cached) == (0, 4)
    assert pool.allocate_many(2) == [2, 3], "the last two, in ascending order"
    pool.share(0)
    pool.share(1)
    pool.check()


def test_sharing_and_releasing_refreshes_a_cached_page() -> None:
    pool = PagePool(3)
    pages = pool.allocate_many(3)
    for page in pages:
        pool.keep(page)
        pool.release(page)
    pool.share(0)
    pool.release(0)
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [1, 2, 0]


def test_eviction_is_announced_before_the_page_is_reused() -> None:
    pool = PagePool(2)
    evicted: list[int] = []

    def on_evict(page: int) -> None:
        assert pool.num_owners(page) == 0
        evicted.append(page)
        pool.forget(page)

    pool.on_evict = on_evict
    pages = pool.allocate_many(2)
    pool.keep(pages[0])
    pool.release_many(pages)
    pool.allocate_many(1)
    assert evicted == [], "a free page was left"
    pool.allocate_many(1)
    assert evicted == [0]


def test_page_pool_on_evict_that_keeps_page_raises() -> None:
    pool = PagePool(1)
    pool.on_evict = lambda page: None
    page = pool.allocate()
    pool.keep(page)
    pool.release(page)
    with pytest.raises(AssertionError, match="still cached"):
        pool.allocate()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.allocate_many(4), "4 pages requested, 2 are left"),
        (lambda pool: pool.release(3), "no owner"),
        (lambda pool: pool.share(3), "free and cannot be shared"),
        (lambda pool: pool.keep(3), "no owner"),
        (lambda pool: pool.forget(0), "holds no prefix"),
        (lambda pool: PagePool(0), "0 pages"),
    ],
    ids=["too many", "release free", "share free", "keep free", "forget unkept", "empty pool"],
)
def test_misuse_is_refused_and_changes_nothing(misuse, message: str) -> None:
    pool = PagePool(4)
    assert pool.allocate_many(2) == [0, 1]
    with pytest.raises(AssertionError, match=message):
        misuse(pool)
    pool.check()
    assert (pool.num_free, pool.num_cached, pool.owner_counts()) == (2, 0, [1, 1, 0, 0])


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool.free_runs.put(0),
        lambda pool: pool.cached.update({0: None}),
        lambda pool: pool.owners_by_page.__setitem__(0, 0),
        lambda pool: pool.owners_by_page.__setitem__(3, -1),
        lambda pool: pool.kept_by_page.__setitem__(3, 1),
        lambda pool: pool.free_runs.ends.clear(),
        lambda pool: pool.free_runs.starts.clear(),
        lambda pool: pool.free_runs.heap.clear(),
        lambda pool: setattr(pool.free_runs, "num_pages", 1),
    ],
    ids=["freed", "cached", "lost", "negative", "kept", "no ends", "no starts", "no heap", "miscounted"],
)
def test_check_notices_damage(damage) -> None:
    pool = PagePool(4)
    pool.allocate_many(2)
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_free_runs_heap_stays_small() -> None:
    runs = FreeRuns(1000)
    for _ in range(20):
        for page in range(500):
            runs.cut(page, 0, 1)
        for page in reversed(range(500)):
            runs.put(page)
    assert len(runs.heap) <= 2 * 1 + 64
    assert runs.largest() == (0, 1000)
    runs.check()


def test_free_runs_cut_outside_run_is_refused() -> None:
    with pytest.raises(AssertionError, match="not inside the run"):
        FreeRuns(4).cut(0, 2, 3)

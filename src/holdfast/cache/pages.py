"""PagePool: page ids with reference counts; free, cached or owned, and consecutive if that is cheap; no torch.

Every page is in exactly one of three places:

    free     no owner, and its content is not needed
    cached   no owner, but it holds a registered prefix; the least recently used one is evicted when free pages run out
    owned    its reference count is the number of sequences that hold it
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise


class FreeRuns:
    """Free pages as maximal runs of consecutive ids: merged on return, the largest found in O(log n).

    `ends` maps the start of each run to its end (one past the last page), `starts` maps back. `heap` holds
    (-length, start) of every run and of some that are gone; those are dropped when they surface.
    """

    def __init__(self, num_pages: int) -> None:
        self.ends: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.heap: list[tuple[int, int]] = []
        self.num_pages = num_pages
        self._insert(0, num_pages)

    def starting_at(self, page: int) -> int:
        """Return the length of the run that starts exactly here, or 0."""
        return self.ends.get(page, page) - page

    def largest(self) -> tuple[int, int]:
        """Return start and length of the longest run, the lowest among equals."""
        while self.heap:
            negative_length, start = self.heap[0]
            if self.starting_at(start) == -negative_length:
                return start, -negative_length
            heapq.heappop(self.heap)
        raise AssertionError(f"no run is left, though {self.num_pages} pages are counted as free")

    def cut(self, start: int, skip: int, num_pages: int) -> range:
        """Take pages [start + skip, start + skip + num_pages) out of the run that starts at `start`."""
        end = self.ends.pop(start)
        first, last = start + skip, start + skip + num_pages
        assert start <= first < last <= end, f"pages [{first}, {last}) are not inside the run [{start}, {end})"
        del self.starts[end]
        self._insert(start, first)
        self._insert(last, end)
        self.num_pages -= num_pages
        return range(first, last)

    def put(self, page: int) -> None:
        """Take a page back and merge it with the runs on either side."""
        start = self.starts.pop(page, page)
        if start != page:
            del self.ends[start]
        end = self.ends.pop(page + 1, page + 1)
        if end != page + 1:
            del self.starts[end]
        self._insert(start, end)
        self.num_pages += 1

    def __iter__(self) -> Iterator[int]:
        return (page for start, end in sorted(self.ends.items()) for page in range(start, end))

    def _insert(self, start: int, end: int) -> None:
        if start == end:
            return
        self.ends[start] = end
        self.starts[end] = start
        heapq.heappush(self.heap, (start - end, start))
        if len(self.heap) > 2 * len(self.ends) + 64:
            self.heap = [(start - end, start) for start, end in self.ends.items()]
            heapq.heapify(self.heap)

    def check(self) -> None:
        """Assert that runs are apart, in both maps and the heap, and add up."""
        runs = sorted(self.ends.items())
        for start, end in runs:
            assert start < end, f"run [{start}, {end}) is empty"
            assert (start - end, start) in self.heap, f"run [{start}, {end}) cannot be found by its length"
        for (_, end), (start, _) in pairwise(runs):
            assert end < start, f"the runs that end and start at {end} and {start} are not apart"
        mirrored = sorted((start, end) for end, start in self.starts.items())
        assert mirrored == runs, f"starts say {mirrored}, ends say {runs}"
        total = sum(end - start for start, end in runs)
        assert total == self.num_pages, f"{self.num_pages} free pages are counted, the runs hold {total}"


class PagePool:
    """Page ids 0 .. num_pages - 1. All calls are O(1) a page, or O(log n) if a run has to be found.

    A sequence grows into the page after its last one if that is free. Its pages are then consecutive, and are read
    without a copy. A new sequence starts in the longest free run: in its middle if a neighbour may still grow into it.
    Free pages are always used before a cached one is evicted.
    """

    def __init__(self, num_pages: int, num_groups: int = 1) -> None:
        assert num_pages >= 1, f"a pool of {num_pages} pages is empty"
        self.num_pages = num_pages
        self.num_owned_by_group = [0] * num_groups
        """Pages that sequences hold, by the cache group that they were allocated for ..."""
        self.num_cached_by_group = [0] * num_groups
        """Free pages, and those without an owner that hold a registered prefix."""
        self._group_of = [0] * num_pages
        """The group that each page was last allocated for."""
        self.owners_by_page = [0] * num_pages
        self.kept_by_page = bytearray(num_pages)
        self.free_runs = FreeRuns(num_pages)
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self.on_evict: Callable[[int], None] = self.forget
        """Called with a cached page to evict; must call forget(page)."""

    @property
    def num_free(self) -> int:
        return self.free_runs.num_pages

    @property
    def num_cached(self) -> int:
        return len(self.cached)

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free ones, and cached ones that would be evicted."""
        return self.free_runs.num_pages + len(self.cached)

    def num_owners(self, page: int) -> int:
        """Return how many sequences hold this page."""
        return self.owners_by_page[page]

    def is_kept(self, page: int) -> bool:
        """Return True if the page holds a registered prefix."""
        return bool(self.kept_by_page[page])

    def owner_counts(self) -> list[int]:
        """Return how many sequences hold each page."""
        return list(self.owners_by_page)

    def kept_pages(self) -> list[int]:
        """Return the pages that hold a registered prefix."""
        return [page for page, is_kept in enumerate(self.kept_by_page) if is_kept]

    def allocate(self, after: int | None = None) -> int:
        """Allocate a page with one owner; the one that follows `after` if that is free."""
        return self.allocate_many(1, after)[0]

    def allocate_many(
        self, num_pages: int, after: int | None = None, num_expected: int = 0, group: int = 0
    ) -> list[int]:
        """Allocate pages with one owner each, in few consecutive runs, the first right after `after` if that is free.

        All pages or an error: the caller checks num_available first. `num_expected`: pages that the caller will need in
        all, if known, so that a run is chosen that fits them. `group`: the cache group that they are counted for.
        """
        assert 0 <= num_pages <= self.num_available, f"{num_pages} pages requested, {self.num_available} are left"
        while self.free_runs.num_pages < num_pages:
            self.evict()
        pages: list[int] = []
        if num_pages and after is not None:
            length = self.free_runs.starting_at(after + 1)
            if length:
                pages += self.free_runs.cut(after + 1, 0, min(length, num_pages))
        while len(pages) < num_pages:
            start, length = self.free_runs.largest()
            missing = num_pages - len(pages)
            spare = length - max(missing, num_expected - len(pages))
            has_neighbour = start > 0 and self.owners_by_page[start - 1] > 0
            skip = (spare + 1) // 2 if has_neighbour and spare > 0 else 0
            pages += self.free_runs.cut(start, skip, min(length, missing))
        for page in pages:
            self.owners_by_page[page] = 1
            self._group_of[page] = group
        self.num_owned_by_group[group] += num_pages
        return pages

    def share(self, page: int) -> None:
        """Add an owner to a page that is owned or cached."""
        if self.owners_by_page[page] == 0:
            assert page in self.cached, f"page {page} is free and cannot be shared"
            del self.cached[page]
            self.num_cached_by_group[self._group_of[page]] -= 1
            self.num_owned_by_group[self._group_of[page]] += 1
        self.owners_by_page[page] += 1

    def release(self, page: int) -> None:
        """Remove an owner. Without owners a page is cached if it holds a registered prefix, else free."""
        num_owners = self.owners_by_page[page]
        assert num_owners > 0, f"page {page} is released and has no owner"
        self.owners_by_page[page] = num_owners - 1
        if num_owners > 1:
            return
        group = self._group_of[page]
        self.num_owned_by_group[group] -= 1
        if self.kept_by_page[page]:
            self.cached[page] = None
            self.num_cached_by_group[group] += 1
        else:
            self.free_runs.put(page)

    def release_many(self, pages: Sequence[int]) -> None:
        """Release a sequence's pages from last to first, so that eviction shortens prefixes from their ends."""
        for page in reversed(pages):
            self.release(page)

    def keep(self, page: int) -> None:
        """Mark a page as holding a registered prefix: without owners it is cached instead of free."""
        assert self.owners_by_page[page] > 0, f"page {page} has no owner and cannot hold a prefix"
        self.kept_by_page[page] = 1

    def evict_next(self, page: int) -> None:
        """Evict a page before all that are cached now, unless a sequence holds it."""
        if page in self.cached:
            self.cached.move_to_end(page, last=False)

    def forget(self, page: int) -> None:
        """Unmark a page that held a registered prefix: without owners it becomes free."""
        assert self.kept_by_page[page], f"page {page} holds no prefix that could be forgotten"
        self.kept_by_page[page] = 0
        if self.owners_by_page[page] == 0:
            del self.cached[page]
            self.num_cached_by_group[self._group_of[page]] -= 1
            self.free_runs.put(page)

    def evict(self) -> None:
        page = next(iter(self.cached))
        self.on_evict(page)
        assert page not in self.cached, f"page {page} was to be evicted and is still cached"

    def check(self) -> None:
        """Assert that every page is exactly one of free, cached or owned, and counted there."""
        self.free_runs.check()
        free, cached = list(self.free_runs), list(self.cached)
        owned = [page for page, num_owners in enumerate(self.owners_by_page) if num_owners]
        assert min(self.owners_by_page) >= 0, f"negative owner counts in {self.owners_by_page}"
        places = sorted(free + cached + owned)
        assert places == list(range(self.num_pages)), f"{free=} {cached=} {owned=} are not {self.num_pages} pages once"
        kept = self.kept_pages()
        idle_kept = [page for page in kept if not self.owners_by_page[page]]
        assert idle_kept == sorted(cached), f"{cached=} pages, but {idle_kept=} hold a prefix without an owner"
        for pages, counted in ((owned, self.num_owned_by_group), (cached, self.num_cached_by_group)):
            found = [0] * len(counted)
            for page in pages:
                found[self._group_of[page]] += 1
            assert found == counted, f"groups have {found} of {pages=}, counted are {counted}"

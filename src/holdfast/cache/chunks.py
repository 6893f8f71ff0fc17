"""Map pool pages to the chunks that kernels read; block tables, and page lists without a scheduler; no torch.

Chunk j of a sequence lies on the page at place j // chunks_per_page of its list (cache/spec.py has the picture).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.cache.spec import CacheSpec


class ChunkShape(NamedTuple):
    """Maps the pages of one group to chunks."""

    chunks_per_page: int = 1
    num_pages: int = 0
    """Pages of the pool; 0 if a page is one chunk, with the page's number."""
    tokens_per_row: int = 1
    """Tokens that a row of a chunk stands for."""
    near_tokens: int = 0
    """Tokens of a chunk of near pages (cache/near.py); 0: those of every other chunk."""
    stride: int = 1
    """Chunks of near pages that fit where a page has one: the page p has number p * stride."""

    @property
    def is_page(self) -> bool:
        """True if a page is one chunk, with the page's number."""
        return self.chunks_per_page == self.stride == 1

    def numbers(self, pages: Sequence[int]) -> np.ndarray:
        """Return the numbers of all chunks on these pages, in order; HOLE for those of a hole."""
        pages_P = np.asarray(pages, dtype=np.int64)
        if self.is_page:
            return pages_P
        number_PC = (pages_P[:, None] + np.arange(self.chunks_per_page) * self.num_pages) * self.stride
        number_PC[pages_P == HOLE] = HOLE
        return number_PC.reshape(-1)

    def number(self, pages: Sequence[int], chunk: int) -> int:
        """Return the number of one chunk, on a page that is not a hole."""
        place, nth = divmod(chunk, self.chunks_per_page)
        return (nth * self.num_pages + pages[place]) * self.stride

    def table(self, pages: list[int]) -> Sequence[int]:
        """Return all chunk numbers by position: the list itself if a page is one chunk, else a lazy table."""
        return pages if self.is_page else ChunkTable(self, pages)


def chunk_shapes(spec: CacheSpec, num_pages: int) -> tuple[ChunkShape, ...]:
    """Return the chunk shape of each group for a pool of `num_pages`."""
    shapes = (ChunkShape(group.chunks_per_page, num_pages, group.tokens_per_row) for group in spec.groups)
    near = spec.near
    return tuple(
        shape
        if group.near is None or near is None
        else shape._replace(near_tokens=near.page_tokens, stride=near.stride)
        for shape, group in zip(shapes, spec.groups, strict=True)
    )


class ChunkTable(Sequence[int]):
    """A page list read as chunks. It is lazy: most readers need the newest few of a long context."""

    def __init__(self, shape: ChunkShape, pages: list[int]) -> None:
        self._shape = shape
        self._pages = pages

    def __len__(self) -> int:
        return self._shape.chunks_per_page * len(self._pages)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        size = self._shape.chunks_per_page
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, f"every {step}. chunk is not supported"
            first = start // size
            numbers = self._shape.numbers(self._pages[first : -(-stop // size)])
            return numbers[start - first * size : max(start, stop) - first * size].tolist()
        place, nth = divmod(range(len(self))[index], size)
        page = self._pages[place]
        return HOLE if page == HOLE else (nth * self._shape.num_pages + page) * self._shape.stride

    def __iter__(self) -> Iterator[int]:
        return iter(self._shape.numbers(self._pages).tolist())


def ring_tables(groups: Sequence[CacheGroup], num_tokens: int, max_step_tokens: int) -> list[list[int]]:
    """Return page lists for a single sequence, on the first pages: groups follow each other without overlap.

    A window cycles through the pages that steps of at most `max_step_tokens` see at once. So any length is correct, and
    takes no more pages than under a scheduler.
    """
    tables, first = [], 0
    for group in groups:
        num_pages, kept = group.most_pages(num_tokens, max_step_tokens), group.kept_pages
        places = range(group.pages_for(num_tokens))
        tables.append([first + (p if p < kept else kept + (p - kept) % (num_pages - kept)) for p in places])
        first += num_pages
    return tables

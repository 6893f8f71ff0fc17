"""Chunk numbers of page lists against the picture in cache/spec.py, one by one; rings that no step overruns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cache.chunks import ChunkShape, ring_tables
from holdfast.cache.groups import HOLE, CacheGroup

PAGES = [7, HOLE, 3, 0, 11]
shapes = st.builds(ChunkShape, st.integers(1, 5), st.just(12), st.just(1), st.just(0), st.integers(1, 3))


def plain(shape: ChunkShape, pages: list[int]) -> list[int]:
    return [
        HOLE if page == HOLE else (nth * shape.num_pages + page) * shape.stride
        for page in pages
        for nth in range(shape.chunks_per_page)
    ]


@given(shapes, st.lists(st.sampled_from([HOLE, *range(12)]), max_size=6))
def test_numbers_of_all_chunks(shape: ChunkShape, pages: list[int]) -> None:
    assert shape.numbers(pages).tolist() == plain(shape, pages)
    assert list(shape.table(pages)) == plain(shape, pages)
    assert len(shape.table(pages)) == shape.chunks_per_page * len(pages)
    for chunk, number in enumerate(plain(shape, pages)):
        assert shape.table(pages)[chunk] == number
        if number != HOLE:
            assert shape.number(pages, chunk) == number


@given(shapes, st.integers(0, 30), st.integers(0, 30))
def test_chunk_shape_table_slices_match_plain_list(shape: ChunkShape, start: int, stop: int) -> None:
    assert list(shape.table(PAGES)[start:stop]) == plain(shape, PAGES)[start:stop]


def test_chunk_shape_one_chunk_page_returns_same_table() -> None:
    assert ChunkShape().table(PAGES) is PAGES


@pytest.mark.parametrize("max_step_tokens", [1, 3, 16, 100])
@pytest.mark.parametrize("num_tokens", [1, 7, 40, 100])
def test_rings_hold_all_that_a_step_sees(num_tokens: int, max_step_tokens: int) -> None:
    near = (CacheGroup("near", 4, 16, is_blocked=True, kept_pages=kept) for kept in (0, 1, 4))
    groups = (CacheGroup("whole", 8), CacheGroup("wide", 4, 20), CacheGroup("narrow", 4, 1), *near)
    tables = ring_tables(groups, num_tokens, max_step_tokens)
    owners = [set(table) for table in tables]
    assert sum(map(len, owners)) == len(set().union(*owners)), "groups overlap"
    most = sum(group.most_pages(num_tokens, max_step_tokens) for group in groups)
    assert set().union(*owners) <= set(range(most))
    for group, table in zip(groups, tables, strict=True):
        assert len(table) == group.pages_for(num_tokens)
        held: dict[int, int] = {}
        for start in range(0, num_tokens, max_step_tokens):
            end = min(start + max_step_tokens, num_tokens)
            for position in range(start, end):
                held[table[position // group.page_tokens]] = position // group.page_tokens
            seen = range(0 if group.window is None else max(0, start - group.window + 1), end)
            if group.is_blocked:
                seen = (*range(min(group.kept_pages * group.page_tokens, end)), *range(start // 16 * 16, end))
            for place in {position // group.page_tokens for position in seen}:
                assert held[table[place]] == place, f"{group.name}: the page of place {place} was written over"


def test_ring_tables_full_context_takes_first_pages() -> None:
    assert ring_tables((CacheGroup("whole", 4),), 11, 4) == [[0, 1, 2]]

"""CacheGroup: pages of a sequence by position, bounds against brute force, and the order in which pages are released."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cache.groups import HOLE, CacheGroup, block_tokens, by_position, longest_sequence, tokens_again


@given(st.integers(1, 20), st.integers(1, 50), st.integers(0, 200), st.integers(1, 30))
def test_cache_group_window_bound_holds_at_any_step_start(page_tokens: int, window: int, start: int, n: int) -> None:
    group = CacheGroup("window", page_tokens, window)
    seen = {position for row in range(start, start + n) for position in range(max(0, row - window + 1), row + 1)}
    pages = {position // page_tokens for position in seen}
    assert min(pages) == group.first_page(start)
    assert len(pages) <= group.most_held(n)
    assert len(pages) <= group.most_pages(start + n, n)
    assert max(pages) + 1 == group.pages_for(start + n)


@given(st.integers(1, 8), st.integers(1, 6), st.data(), st.integers(0, 200), st.integers(1, 30), st.integers(0, 12))
def test_cache_group_of_blocks_holds_what_its_tokens_see(
    page_tokens: int, num_pages: int, data: st.DataObject, start: int, n: int, num_more: int
) -> None:
    """A token sees its own block up to itself, and the first pages that are kept; all else is passed for good."""
    window, kept_pages = page_tokens * num_pages, data.draw(st.integers(0, num_pages))
    group = CacheGroup("near", page_tokens, window, is_blocked=True, kept_pages=kept_pages)
    first = range(page_tokens * kept_pages)
    seen = {p for row in range(start, start + n) for p in (*range(row // window * window, row + 1), *first) if p <= row}
    pages = {position // page_tokens for position in seen}
    assert {place for place in range(group.pages_for(start + n)) if place not in group.passed(start)} == pages
    assert len(pages) == group.num_held(group.pages_for(start + n), start)
    assert len(pages) <= group.most_held(n)
    assert len(pages) <= group.most_pages(start + n, n)
    assert set(group.passed(start)) <= set(group.passed(start + num_more)), "what is passed stays so"
    if start % window == 0:
        assert group.first_page(start) == start // page_tokens, "a prefix that ends with a block shares no open page"


def test_cache_group_of_blocks_bound_is_reached() -> None:
    group = CacheGroup("near", 4, 16, is_blocked=True, kept_pages=4)
    assert (group.most_held(1), group.most_held(2), group.most_pages(1000, 17)) == (8, 9, 12)
    assert (group.num_held(8, 31), group.num_held(13, 31)) == (8, 13)
    assert [list(group.passed(start)) for start in (0, 15, 16, 31, 32)] == [[], [], [], [], [4, 5, 6, 7]]
    part = CacheGroup("near", 4, 16, is_blocked=True, kept_pages=1)
    assert (part.most_held(1), part.most_held(2), part.most_pages(1000, 17)) == (5, 6, 9)
    assert [list(part.passed(start)) for start in (0, 15, 16, 31, 32)] == [[], [], [1, 2, 3], [1, 2, 3], [*range(1, 8)]]


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from(["whole", "window", "near", "kept"]), st.data())
def test_cache_group_fork_copies_what_it_sees_and_does_not_share(page_tokens, num_pages, kind, data) -> None:
    window, block = page_tokens * num_pages, page_tokens * num_pages * 2
    blocks = {
        "is_blocked": kind in ("near", "kept"),
        "kept_pages": data.draw(st.integers(0, num_pages)) if kind == "kept" else 0,
    }
    group = CacheGroup(kind, page_tokens, None if kind == "whole" else window, **blocks)
    num_tokens = data.draw(st.integers(1, 4 * block))
    num_shared = data.draw(st.integers(0, (num_tokens - 1) // block)) * block
    seen = [place for place in range(group.pages_for(num_tokens)) if place not in group.passed(num_tokens - 1)]
    copied = [place for places in group.copied(num_shared, num_tokens) for place in places]
    assert copied == [place for place in seen if place * page_tokens >= num_shared]


@pytest.mark.parametrize(
    "own",
    [
        {"window": None, "is_blocked": True},
        {"window": 10, "is_blocked": True},
        {"window": 16, "is_blocked": True, "kept_pages": 5},
        {"window": 16, "is_blocked": True, "kept_pages": -1},
        {"window": 16, "kept_pages": 4},
    ],
)
def test_cache_group_of_impossible_blocks_is_an_error(own: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="near"):
        CacheGroup("near", 4, **own)


def test_block_tokens_are_whole_blocks() -> None:
    near = CacheGroup("near", 4, 64, is_blocked=True, kept_pages=16)
    assert block_tokens((CacheGroup("whole", 16), near)) == 64
    assert block_tokens((CacheGroup("whole", 128), near)) == 128


def test_cache_group_pages_of_full_context_and_state_by_hand() -> None:
    whole, state = CacheGroup("whole", 4), CacheGroup("state", 0, state_pages=3, state_period=128)
    assert [whole.pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert (whole.first_page(100), whole.most_pages(100, 8)) == (0, 25)
    assert [state.pages_for(tokens) for tokens in (0, 1, 1000)] == [0, 3, 3]
    assert (state.first_page(1000), state.most_pages(1000, 8)) == (0, 3)


def test_block_tokens_are_whole_pages_of_every_group() -> None:
    groups = CacheGroup("a", 16), CacheGroup("b", 96, window=100), CacheGroup("s", 0, state_pages=1)
    assert block_tokens(groups) == 96
    assert block_tokens(groups[:1]) == 16


def entries(page_tokens: int, tokens_per_row: int) -> CacheGroup:
    return CacheGroup(f"entries of {tokens_per_row}", page_tokens, tokens_per_row=tokens_per_row)


def test_block_of_long_pages_has_whole_rows_of_each_group() -> None:
    window = CacheGroup("window of 8", 4, window=8)
    assert block_tokens([window, entries(16, 4), entries(64, 16)]) == 16
    assert block_tokens([window, entries(24, 4), entries(64, 16)]) == 48 * 4, "no page straddles a block's end"
    assert block_tokens([CacheGroup("whole context", 32), entries(64, 16)]) == 32
    rows_of_a_window = CacheGroup("window of 64", 64, window=64, tokens_per_row=16)
    assert block_tokens([window, rows_of_a_window]) == 64


def test_open_rows_are_those_before_the_end_of_a_page() -> None:
    group = entries(64, 16)
    assert [group.open_rows(end) for end in (0, 16, 48, 64, 80, 128)] == [0, 1, 3, 0, 1, 0]
    assert CacheGroup("whole context", 64).open_rows(16) == 0
    assert CacheGroup("state", 0, state_pages=1).open_rows(16) == 0


def test_pages_by_position_order_by_last_token_windows_first() -> None:
    groups = CacheGroup("whole", 4), CacheGroup("window", 8, window=9), CacheGroup("state", 0, state_pages=2)
    tables = [[10, 11, 12, 13], [HOLE, 21], [30, 31]]
    assert by_position(groups, tables) == [30, 31, 10, 11, 12, 21, 13]
    assert by_position(groups[:1], [[5, 4, 3]]) == [5, 4, 3]
    assert by_position(groups[1:2], [[HOLE, 4, 3]]) == [4, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"page_tokens": 0},
        {"page_tokens": 4, "window": 0},
        {"page_tokens": 4, "state_pages": 1},
        {"page_tokens": 0, "state_pages": 1, "window": 4},
        {"page_tokens": 4, "state_period": 4},
    ],
    ids=["empty page", "window of 0", "rows and a state", "a state with a window", "rows with a period"],
)
def test_cache_group_invalid_options_raise(options: dict) -> None:
    with pytest.raises(AssertionError):
        CacheGroup("odd", **options)


def test_tokens_again_and_longest_sequence_count_every_group() -> None:
    window, entries = CacheGroup("window", 2, window=4), CacheGroup("entries", 8, tokens_per_row=4, tokens_again=4)
    whole = CacheGroup("whole", 4)
    for groups in ([window, entries], [entries, window], [whole, window, entries]):
        assert tokens_again(groups) == 4
    assert tokens_again([window, whole]) == 0
    for groups in ([whole, entries, window], [window, whole, entries], [entries, window, whole]):
        longest = longest_sequence(groups, 12, 100, 2)
        needed = [sum(group.most_pages(num_tokens, 2) for group in groups) for num_tokens in (longest, longest + 1)]
        assert needed[0] <= 12 < needed[1]
        assert longest_sequence(groups, 1000, 100, 2) == 100

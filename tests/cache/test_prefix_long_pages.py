"""PrefixCache over long pages: prefixes end inside them, rows are copied, and an evicted page is replaced by a child's."""

import pytest

from cache.test_prefix_groups import Bench
from holdfast.cache.groups import CacheGroup
from holdfast.cache.prefix import OpenRows, PrefixEntry

FOURS = CacheGroup("entries of 4", 4, tokens_per_row=4)
LONG = CacheGroup("entries of 4, long", 16, tokens_per_row=4)
TOKENS = list(range(100, 140))


def bench() -> Bench:
    return Bench(FOURS, LONG)


def slots_of(bench: Bench, tokens: list[int]) -> list[int]:
    """The long page of each block of a prefix."""
    return [entry.slots[1] for entry in bench.match(tokens).entries]


@pytest.mark.parametrize("num_blocks", range(1, 10))
def test_hit_at_each_block_has_whole_pages_and_open_rows(num_blocks: int) -> None:
    own = bench()
    _, tables = own.compute(TOKENS)
    hit = own.match(TOKENS[: 4 * num_blocks])
    assert hit.num_tokens == 4 * num_blocks
    num_whole, num_open = divmod(num_blocks, 4)
    assert hit.tables == (tuple(tables[0][:num_blocks]), tuple(tables[1][:num_whole]))
    assert hit.open_rows == ((OpenRows(1, tables[1][num_whole], num_open),) if num_open else ())


def test_long_page_is_registered_while_it_fills() -> None:
    own = bench()
    chain, tables = own.compute(TOKENS[:6])
    assert own.match(TOKENS).num_tokens == 4
    tables[0] += own.pool.allocate_many(1)
    own.cache.register(chain, TOKENS, tables, 12)
    own.check()
    assert own.match(TOKENS).open_rows == (OpenRows(1, tables[1][0], 3),)
    assert own.cache.by_page[tables[1][0]].index == 2


def test_two_branches_of_one_page_have_their_own_pages() -> None:
    own = bench()
    _, first = own.compute(TOKENS[:17])
    other = [*TOKENS[:8], *range(8)]
    _, second = own.compute([*other, 0])
    assert slots_of(own, TOKENS[:16]) == [first[1][0]] * 4
    assert slots_of(own, other) == [first[1][0]] * 2 + [second[1][0]] * 2
    assert first[0][:2] == second[0][:2]


def test_evicted_long_page_is_replaced_by_that_of_a_child() -> None:
    own = bench()
    _, first = own.compute(TOKENS[:17])
    other = [*TOKENS[:8], *range(8)]
    _, second = own.compute([*other, 0])
    own.cache.evict(first[1][0])
    own.check()
    assert slots_of(own, other) == [second[1][0]] * 4
    assert own.match(TOKENS[:16]).num_tokens == 8, "blocks 2 and 3 were on the evicted page alone"
    own.cache.evict(second[1][0])
    own.check()
    assert len(own.cache) == 0


def test_replaced_long_page_waits_for_the_step_of_its_child() -> None:
    """A sequence that found the block and recomputed it, for want of a window, has all its rows on a page of its own."""
    own = bench()
    _, first = own.compute(TOKENS[:5])
    chain = own.cache.chain(b"")
    tables = own.cache.share(chain, own.cache.miss())
    for group, table in zip(own.groups, tables, strict=True):
        table += own.pool.allocate_many(group.pages_for(12))
    own.cache.register(chain, TOKENS, tables, 12, step=5)
    assert not own.cache.is_computed_by(own.match(TOKENS[:4]), 5)
    own.cache.evict(first[1][0])
    own.check()
    hit = own.match(TOKENS[:4])
    assert hit.open_rows == (OpenRows(1, tables[1][0], 1),)
    assert own.cache.is_computed_by(hit, 5)
    assert not own.cache.is_computed_by(hit, 6)
    own.cache.rewind(chain, 0)
    own.cache.forget_pending()
    own.check()
    assert own.match(TOKENS).num_tokens == 0, "no step has written these rows"


def test_evicted_long_page_gets_none_of_the_next_interval() -> None:
    own = bench()
    _, tables = own.compute(TOKENS)
    own.cache.evict(tables[1][1])
    own.check()
    assert own.match(TOKENS).num_tokens == 16
    own.cache.evict(tables[1][0])
    own.check()
    assert len(own.cache) == 0


def test_evicted_short_page_shortens_a_long_one() -> None:
    own = bench()
    _, tables = own.compute(TOKENS[:17])
    own.cache.evict(tables[0][2])
    own.check()
    hit = own.match(TOKENS)
    assert hit.open_rows == (OpenRows(1, tables[1][0], 2),)


@pytest.mark.parametrize("long", [0, 1])
def test_dropped_step_leaves_settled_rows_of_a_long_page(long: int) -> None:
    own = Bench(LONG, FOURS) if long == 0 else Bench(FOURS, LONG)
    chain, tables = own.compute(TOKENS[:8])
    tables[1 - long] += own.pool.allocate_many(2)
    own.cache.register(chain, TOKENS, tables, 12, step=1)
    own.cache.settle(1)
    own.cache.register(chain, TOKENS, tables, 16, step=2)
    assert own.cache.pending_step(tables) == 2
    own.cache.rewind(chain, 12)
    own.cache.forget_pending()
    own.check()
    assert own.match(TOKENS).open_rows == (OpenRows(long, tables[long][0], 3),)
    own.cache.register(chain, TOKENS, tables, 16, step=3)
    own.check()
    assert own.match(TOKENS).num_tokens == 16


def test_step_computes_open_rows_until_it_is_over() -> None:
    own = bench()
    chain, tables = own.compute(TOKENS[:4])
    tables[0] += own.pool.allocate_many(3)
    own.cache.register(chain, TOKENS, tables, 12, step=5)
    hit = own.match(TOKENS)
    assert own.cache.is_computed_by(hit, 5)
    assert not own.cache.is_computed_by(hit, 6)
    assert not own.cache.is_computed_by(own.match(TOKENS[:4]), 5)
    own.cache.register(chain, TOKENS, tables, 16, step=6)
    assert not own.cache.is_computed_by(own.match(TOKENS), 6), "whole pages are shared in the step itself"


def test_windows_inside_an_output_are_evicted_before_others() -> None:
    """Those that a prefix of whole pages needs stay, and those at the end of what is computed."""
    window = CacheGroup("window of 3", 2, window=3)
    own = Bench(window, FOURS, LONG)
    chain = own.cache.chain(b"")
    chain.num_prompt_tokens = 4
    tables: list[list[int]] = own.cache.share(chain, own.cache.miss())
    for computed in range(1, 41):
        for group, table in zip(own.groups, tables, strict=True):
            table += own.pool.allocate_many(group.pages_for(computed) - len(table))
        own.cache.register(chain, TOKENS, tables, computed)
        for place in range(window.first_page(computed)):
            if tables[0][place] >= 0:
                own.pool.release(tables[0][place])
                tables[0][place] = -1
    by_page = {
        page: entry.index * 2 + entry.slots[:2].index(page)
        for page, entry in own.cache.by_page.items()
        if page in entry.slots[:2]
    }
    order = [by_page[page] for page in own.pool.cached]
    assert order[:6] == [17, 13, 11, 9, 5, 3], "each is the last page before a block's end"
    assert order[6:] == sorted(set(range(19)) - {17, 13, 11, 9, 5, 3})
    assert {1, 7, 15} <= set(order[6:]), "before the prompt's end, and the ends of long pages"


def test_reset_forgets_long_pages_once() -> None:
    own = bench()
    _, tables = own.compute(TOKENS)
    own.release(tables)
    own.cache.reset()
    own.check()
    assert own.pool.num_free == own.pool.num_pages


def test_long_page_in_the_wrong_entry_is_found_by_check() -> None:
    own = bench()
    _, tables = own.compute(TOKENS)
    stray: PrefixEntry = own.match(TOKENS).entries[6]
    stray.slots[1] = tables[1][0]
    with pytest.raises(AssertionError, match="is listed with another entry"):
        own.cache.check()

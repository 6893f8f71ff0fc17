"""The planner: the plan is the largest that fits, and a refusal is the table with the shortfall."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.errors import MemoryPlanError
from holdfast.memory.planner import MemoryPlan, Term, plan_memory
from holdfast.memory.sizes import format_bytes, parse_bytes

MIB = 1024**2
term_bytes = st.lists(st.integers(0, 2**40), max_size=5)
page_bytes = st.integers(1, 2**24)
page_counts = st.tuples(st.integers(1, 5000), st.integers(0, 5000))


def make_plan(budget: int, sizes: list[int], page: int, low: int, high: int) -> MemoryPlan:
    terms = tuple(Term(f"owner{index}", size, "a reason") for index, size in enumerate(sizes))
    return plan_memory(budget, "memory_limit", terms, page, low, high)


@given(st.integers(0, 2**42), term_bytes, page_bytes, page_counts)
def test_the_plan_is_the_largest_that_fits(budget: int, sizes: list[int], page: int, counts: tuple[int, int]) -> None:
    low, high = counts[0], counts[0] + counts[1]
    try:
        plan = make_plan(budget, sizes, page, low, high)
    except MemoryPlanError:
        assert sum(sizes) + low * page > budget, "refused what fits"
        return
    assert plan.total_bytes <= budget
    assert plan.total_bytes == sum(sizes) + plan.num_pages * page
    assert low <= plan.num_pages <= high
    assert plan.num_pages == high or plan.total_bytes + page > budget, "one more page would have fitted"


@given(term_bytes, page_bytes, page_counts, st.integers(-2, 2))
def test_the_edge_is_exact_to_the_byte(sizes: list[int], page: int, counts: tuple[int, int], offset: int) -> None:
    low, high = counts[0], counts[0] + counts[1]
    budget = sum(sizes) + low * page + offset
    assume(budget >= 0)
    if offset < 0:
        with pytest.raises(MemoryPlanError):
            make_plan(budget, sizes, page, low, high)
    else:
        assert make_plan(budget, sizes, page, low, high).num_pages >= low


@given(st.integers(0, 2**42), st.integers(0, 2**32), term_bytes, page_bytes, page_counts)
def test_more_memory_never_gives_fewer_pages(
    budget: int, more: int, sizes: list[int], page: int, counts: tuple[int, int]
) -> None:
    low, high = counts[0], counts[0] + counts[1]
    try:
        small = make_plan(budget, sizes, page, low, high)
    except MemoryPlanError:
        return
    assert make_plan(budget + more, sizes, page, low, high).num_pages >= small.num_pages


def test_a_refusal_is_the_table_with_the_shortfall() -> None:
    terms = (Term("weights", 600 * MIB, "float32"), Term("logits", 10 * MIB, "[S, V] float32"))
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(512 * MIB, "memory_limit", terms, MIB, 360, 10_000)
    words = str(caught.value)
    for owner, num_bytes in (("weights", 600 * MIB), ("logits", 10 * MIB), ("kv pages", 360 * MIB)):
        assert f"{owner} {format_bytes(num_bytes)}" in words
    assert f"{format_bytes((600 + 10 + 360 - 512) * MIB)} short" in words
    assert "at least 970MiB" in caught.value.do
    assert "\n" not in words


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_change_that_a_refusal_offers_would_fit(has_pages: int, min_pages: int) -> None:
    """It says to lower max_model_len to some share, or to raise the limit to some size: either does fit."""
    assume(has_pages < min_pages)
    terms = (Term("weights", 100 * MIB, "float32"),)
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory((100 + has_pages) * MIB, "memory_limit", terms, MIB, min_pages, 10_000)
    if "max_model_len" in caught.value.do:
        percent = int(caught.value.do.partition("%")[0].split()[-1])
        assert 0 < percent < 100
        fewer_pages = max(min_pages * percent // 100, 1)
        assert plan_memory((100 + has_pages) * MIB, "", terms, MIB, fewer_pages, 10_000).num_pages >= fewer_pages
    else:
        size = caught.value.do.partition("at least ")[2].partition(",")[0]
        assert plan_memory(parse_bytes(size, "x"), "", terms, MIB, min_pages, 10_000).num_pages == min_pages


def test_the_plan_says_why_it_stopped() -> None:
    assert "longest" in make_plan(100 * MIB, [], MIB, 1, 10).pages_reason
    assert "budget" in make_plan(5 * MIB, [], MIB, 1, 10).pages_reason


@pytest.mark.parametrize(("page", "low", "high"), [(0, 1, 1), (1, 0, 1), (1, 5, 4)], ids=["page", "minimum", "order"])
def test_numbers_that_make_no_sense_are_our_own_mistake(page: int, low: int, high: int) -> None:
    with pytest.raises(AssertionError, match="must be positive"):
        make_plan(100, [], page, low, high)

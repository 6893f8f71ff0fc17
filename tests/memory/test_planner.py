"""The planner: the plan is the largest that fits, and a refusal is the table with the shortfall."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from error_codes import raises_code
from holdfast.errors import MemoryPlanError
from holdfast.memory.planner import PAGE_PHASES, PHASES, MemoryPlan, Term, plan_memory

MIB = 1024**2
term_bytes = st.lists(st.integers(0, 2**40), max_size=5)
page_bytes = st.integers(1, 2**24)
page_counts = st.tuples(st.integers(1, 5000), st.integers(0, 5000))
phase_sets = st.sets(st.sampled_from(PHASES), min_size=1).map(lambda phases: tuple(sorted(phases)))
phased_terms = st.lists(
    st.builds(Term, st.sampled_from(["a", "b/x", "b/y"]), st.integers(0, 2**40), st.just("why"), phase_sets), max_size=6
)


def make_plan(budget: int, sizes: list[int], page: int, low: int, high: int) -> MemoryPlan:
    terms = tuple(Term(f"owner{index}", size, "a reason") for index, size in enumerate(sizes))
    return plan_memory(budget, "memory_limit", terms, page, low, high)


@given(st.integers(0, 2**42), term_bytes, page_bytes, page_counts)
def test_plan_memory_is_largest_that_fits(budget: int, sizes: list[int], page: int, counts: tuple[int, int]) -> None:
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


def bytes_in(terms: list[Term], phase: str, num_pages: int, page: int) -> int:
    """The rule in one line: the terms of a phase, and pages unless weights are still being loaded."""
    return sum(term.num_bytes for term in terms if phase in term.phases) + (phase != "load") * num_pages * page


@given(phased_terms, page_bytes, page_counts, st.sampled_from(PHASES), st.integers(0, 5000), st.integers(-2, 2))
def test_plan_memory_is_largest_that_fits_every_phase(
    terms: list[Term], page: int, counts: tuple[int, int], edge: str, more_pages: int, offset: int
) -> None:
    """Budgets lie at the edge of some phase, where a byte decides."""
    low, high = counts[0], counts[0] + counts[1]
    budget = max(0, bytes_in(terms, edge, low + more_pages, page) + offset)

    def fits(num_pages: int) -> bool:
        return all(bytes_in(terms, phase, num_pages, page) <= budget for phase in PHASES)

    if not fits(low):
        with pytest.raises(MemoryPlanError) as caught:
            plan_memory(budget, "memory_limit", tuple(terms), page, low, high)
        table = caught.value.table
        assert table is not None
        needed = {phase: bytes_in(terms, phase, low, page) for phase in PHASES}
        assert needed[table.phase] == table.needed_bytes == max(needed.values())
        assert table.short_bytes == max(needed.values()) - budget
        assert sum(row.num_bytes for row in table.rows) == table.needed_bytes
        return
    plan = plan_memory(budget, "memory_limit", tuple(terms), page, low, high)
    assert low <= plan.num_pages <= high
    assert fits(plan.num_pages)
    assert plan.num_pages == high or not fits(plan.num_pages + 1), "one more page would have fitted"
    assert plan.phase_bytes == {phase: bytes_in(terms, phase, plan.num_pages, page) for phase in PHASES}
    assert plan.peak_bytes == max(plan.phase_bytes.values()) <= budget
    assert plan.total_bytes == plan.phase_bytes["serve"]
    for phase in PHASES:
        table = plan.table(phase)
        sizes = [row.num_bytes for row in table.rows]
        assert sum(sizes) == table.needed_bytes == plan.phase_bytes[phase]
        assert sizes == sorted(sizes, reverse=True)
        assert len({row.owner for row in table.rows}) == len(sizes)


@given(st.integers(0, 2**42), phased_terms, st.integers(0, 2**42), page_bytes, page_counts)
def test_phases_never_cost_each_other(
    budget: int, terms: list[Term], staging: int, page: int, counts: tuple[int, int]
) -> None:
    """Whatever loading takes for itself, as long as it fits, changes neither pages nor what the later phases take."""
    low, high = counts[0], counts[0] + counts[1]
    try:
        without = plan_memory(budget, "", tuple(terms), page, low, high)
    except MemoryPlanError:
        return
    assume(without.phase_bytes["load"] + staging <= budget)
    term = Term("staging", staging, "rows on their way", ("load",))
    plan = plan_memory(budget, "", (*terms, term), page, low, high)
    assert plan.num_pages == without.num_pages
    assert [plan.phase_bytes[phase] for phase in PAGE_PHASES] == [without.phase_bytes[phase] for phase in PAGE_PHASES]
    assert plan.phase_bytes["load"] == without.phase_bytes["load"] + staging


def test_plan_memory_load_over_budget_names_load_phase() -> None:
    """Pages are few, so a smaller context would not help, and the message does not suggest it."""
    terms = (Term("weights", 90 * MIB, "bfloat16"), Term("staging", 64 * MIB, "rows on their way", ("load",)))
    with raises_code("plan.over_budget", MemoryPlanError, phase="load", needed="154.00 MiB") as caught:
        plan_memory(100 * MIB, "memory_limit", terms, MIB, 5, 10)
    table = caught.value.table
    assert table is not None
    assert (table.phase, table.short_bytes, table.budget_reason) == ("load", 54 * MIB, "memory_limit")
    assert table.rows == (("weights", 90 * MIB, "bfloat16"), ("staging", 64 * MIB, "rows on their way"))
    assert "kv pages" not in str(caught.value)
    assert "max_model_len" not in caught.value.values
    assert plan_memory(154 * MIB, "", terms, MIB, 5, 10).num_pages == 10


def test_refusal_is_of_the_phase_that_needs_most() -> None:
    terms = (Term("weights", 50 * MIB, "bfloat16"), Term("staging", 60 * MIB, "rows", ("load",)))
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(100 * MIB, "memory_limit", terms, MIB, 80, 80)
    assert caught.value.table is not None
    assert caught.value.table.phase == "serve"
    assert plan_memory(130 * MIB, "", terms, MIB, 80, 80).num_pages == 80


@pytest.mark.parametrize("phase", PAGE_PHASES)
def test_plan_memory_phase_terms_reduce_pages(phase: str) -> None:
    """Pages are there while graphs are recorded and while steps run."""
    term = Term(phase, 4 * MIB, "what it takes beside the rest", (phase,))
    plan = plan_memory(10 * MIB, "", (term,), MIB, 1, 100)
    assert plan.num_pages == 6
    assert plan.phase_bytes == {"load": 0, "capture": 6 * MIB, "serve": 6 * MIB} | {phase: 10 * MIB}
    assert plan.peak_bytes == 10 * MIB
    with pytest.raises(MemoryPlanError, match=f"in its {phase} phase"):
        plan_memory(4 * MIB, "", (term,), MIB, 1, 100)


@pytest.mark.parametrize("phases", [(), ("serving",), ("load", "rest")], ids=["none", "unknown", "one unknown"])
def test_phases_that_do_not_exist_are_our_own_mistake(phases: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="must be some of"):
        Term("weights", 1, "", phases)
    with pytest.raises(AssertionError, match="cannot take -1 bytes"):
        Term("weights", -1, "")


@given(term_bytes, page_bytes, page_counts, st.integers(-2, 2))
def test_plan_memory_edge_is_exact_to_the_byte(
    sizes: list[int], page: int, counts: tuple[int, int], offset: int
) -> None:
    low, high = counts[0], counts[0] + counts[1]
    budget = sum(sizes) + low * page + offset
    assume(budget >= 0)
    if offset < 0:
        with pytest.raises(MemoryPlanError):
            make_plan(budget, sizes, page, low, high)
    else:
        assert make_plan(budget, sizes, page, low, high).num_pages >= low


@given(st.integers(0, 2**42), st.integers(0, 2**32), term_bytes, page_bytes, page_counts)
def test_plan_memory_more_memory_never_gives_fewer_pages(
    budget: int, more: int, sizes: list[int], page: int, counts: tuple[int, int]
) -> None:
    low, high = counts[0], counts[0] + counts[1]
    try:
        small = make_plan(budget, sizes, page, low, high)
    except MemoryPlanError:
        return
    assert make_plan(budget + more, sizes, page, low, high).num_pages >= small.num_pages


def test_refusal_has_the_table_and_the_shortfall() -> None:
    terms = (Term("weights", 600 * MIB, "float32"), Term("logits", 10 * MIB, "[S, V] float32"))
    with raises_code("plan.over_budget", MemoryPlanError, phase="serve", needed="970.00 MiB") as caught:
        plan_memory(512 * MIB, "memory_limit", terms, MIB, 360, 10_000)
    assert str(caught.value) == (
        "The plan needs 970.00 MiB in its serve phase (weights 600.00 MiB, kv pages 360.00 MiB, logits 10.00 MiB). "
        "The budget is 512.00 MiB (memory_limit), 458.00 MiB short."
    )
    assert caught.value.table is not None
    assert [row.owner for row in caught.value.table.rows] == ["weights", "kv pages", "logits"]
    assert caught.value.table.rows[1].reason == "360 pages: for one longest sequence"


def test_plan_memory_pages_reason_names_its_bound() -> None:
    assert "longest" in make_plan(100 * MIB, [], MIB, 1, 10).pages_reason
    assert "budget" in make_plan(5 * MIB, [], MIB, 1, 10).pages_reason


@pytest.mark.parametrize(("page", "low", "high"), [(0, 1, 1), (1, 0, 1), (1, 5, 4)], ids=["page", "minimum", "order"])
def test_numbers_that_make_no_sense_are_our_own_mistake(page: int, low: int, high: int) -> None:
    with pytest.raises(AssertionError, match="must be positive"):
        make_plan(100, [], page, low, high)


@pytest.mark.parametrize("sizes", [(3, 5, 4), (5, 3, 4), (3, 4, 5)])
def test_reason_of_a_group_is_that_of_its_largest_term(sizes: tuple[int, ...]) -> None:
    terms = tuple(Term(f"group/{place}", size * MIB, f"of {size}") for place, size in enumerate(sizes))
    table = plan_memory(20 * MIB, "", (*terms, Term("other", 1, "small")), MIB, 1, 2).table("load")
    assert [(row.owner, row.num_bytes, row.reason) for row in table.rows] == [
        ("group", 12 * MIB, "of 5"),
        ("other", 1, "small"),
    ]

"""From a budget and named terms to a number of KV pages, or a refusal that is the table; no torch."""

from dataclasses import dataclass

from holdfast.errors import MemoryPlanError
from holdfast.memory.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes that are needed whatever the number of pages."""

    owner: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What was decided, and from what."""

    budget_bytes: int
    budget_reason: str
    terms: tuple[Term, ...]
    page_bytes: int
    num_pages: int
    pages_reason: str

    @property
    def kv_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    @property
    def total_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms) + self.kv_bytes


def plan_memory(
    budget_bytes: int,
    budget_reason: str,
    terms: tuple[Term, ...],
    page_bytes: int,
    min_pages: int,
    max_pages: int,
    max_pages_reason: str = "every sequence at its longest needs no more",
) -> MemoryPlan:
    """The most pages that fit the budget, at least `min_pages` and no more than could ever be used.

    `min_pages` is one sequence of the longest allowed context: an engine that could not finish the longest request it
    accepts must not start.
    """
    assert page_bytes > 0, f"{page_bytes=} must be positive"
    assert 0 < min_pages <= max_pages, f"{min_pages=} must be positive and at most {max_pages=}"
    fixed_bytes = sum(term.num_bytes for term in terms)
    fitting_pages = (budget_bytes - fixed_bytes) // page_bytes
    if fitting_pages < min_pages:
        raise MemoryPlanError(*_refusal(budget_bytes, budget_reason, terms, page_bytes, min_pages, fitting_pages))
    if fitting_pages >= max_pages:
        return MemoryPlan(budget_bytes, budget_reason, terms, page_bytes, max_pages, max_pages_reason)
    return MemoryPlan(
        budget_bytes, budget_reason, terms, page_bytes, fitting_pages, "as many as the budget leaves beside the rest"
    )


def _refusal(
    budget_bytes: int,
    budget_reason: str,
    terms: tuple[Term, ...],
    page_bytes: int,
    min_pages: int,
    fitting_pages: int,
) -> tuple[str, str, str]:
    needed_bytes = sum(term.num_bytes for term in terms) + min_pages * page_bytes
    rows = [f"{term.owner} {format_bytes(term.num_bytes)}" for term in terms]
    rows.append(f"kv pages {format_bytes(min_pages * page_bytes)} for one longest sequence")
    fitting_percent = 100 * fitting_pages // min_pages
    if fitting_percent > 0:
        do = f"lower max_model_len to {fitting_percent}% of what was asked, or raise the memory limit"
    else:
        needed_mib = -(-needed_bytes // 1024**2)  # rounded up, so that what is offered does fit
        do = f"raise the memory limit to at least {needed_mib}MiB, or take a smaller model or dtype"
    return (
        f"the plan needs {format_bytes(needed_bytes)} ({', '.join(rows)})",
        f"the budget is {format_bytes(budget_bytes)} ({budget_reason}), {format_bytes(needed_bytes - budget_bytes)} short",
        do,
    )

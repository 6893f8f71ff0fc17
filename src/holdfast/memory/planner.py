"""plan_memory: the number of KV pages from a budget and named terms, or a refusal with the table; no torch.

    load       weights arrive          weights, inputs, ..., staging
    capture    graphs are recorded     no staging, but pages, workspace, what capture takes
    serve      steps run               what is left

The budget bounds each phase by itself, so memory that is freed before the next phase costs no pages.
"""

from dataclasses import dataclass

from holdfast.errors import MemoryPlanError, PlanRow, PlanTable
from holdfast.memory.sizes import format_bytes

PHASES = ("load", "capture", "serve")
PAGE_PHASES = ("capture", "serve")
"""Pages are allocated after the weights are loaded."""
KV_OWNER = "kv pages"


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes that do not depend on the number of pages, in some phases or all."""

    owner: str
    num_bytes: int
    reason: str
    phases: tuple[str, ...] = PHASES

    def __post_init__(self) -> None:
        assert self.num_bytes >= 0, f"{self.owner} cannot take {self.num_bytes} bytes"
        assert set() < set(self.phases) <= set(PHASES), f"{self.owner}: {self.phases=} must be some of {PHASES}"

    @property
    def group(self) -> str:
        """The first part of the owner's path."""
        return self.owner.partition("/")[0]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The number of pages, and the numbers that determine it."""

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
    def phase_bytes(self) -> dict[str, int]:
        return {phase: _fixed_bytes(self.terms, phase) + self._kv_bytes_in(phase) for phase in PHASES}

    @property
    def total_bytes(self) -> int:
        """Bytes while serving."""
        return self.phase_bytes["serve"]

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest phase."""
        return max(self.phase_bytes.values())

    def table(self, phase: str) -> PlanTable:
        """List the groups of owners of a phase, the largest first, with the reason of each group's largest term."""
        groups: dict[str, list[Term]] = {}
        if phase in PAGE_PHASES:
            reason = f"{self.num_pages} pages: {self.pages_reason}"
            groups[KV_OWNER] = [Term(KV_OWNER, self.kv_bytes, reason, PAGE_PHASES)]
        for term in self.terms:
            if phase in term.phases:
                groups.setdefault(term.group, []).append(term)
        rows = [
            PlanRow(group, sum(term.num_bytes for term in terms), max(terms, key=lambda term: term.num_bytes).reason)
            for group, terms in groups.items()
        ]
        rows = tuple(sorted(rows, key=lambda row: -row.num_bytes))
        return PlanTable(phase, rows, self.phase_bytes[phase], self.budget_bytes, self.budget_reason)

    def _kv_bytes_in(self, phase: str) -> int:
        return self.kv_bytes if phase in PAGE_PHASES else 0


def plan_memory(
    budget_bytes: int,
    budget_reason: str,
    terms: tuple[Term, ...],
    page_bytes: int,
    min_pages: int,
    max_pages: int,
    max_pages_reason: str = "every sequence at its longest needs no more",
) -> MemoryPlan:
    """Return the most pages that fit the budget in every phase, from `min_pages` to `max_pages`.

    `min_pages` is one sequence of the longest context: an engine must be able to finish the longest request it accepts.
    """
    assert page_bytes > 0, f"{page_bytes=} must be positive"
    assert 0 < min_pages <= max_pages, f"{min_pages=} must be positive and at most {max_pages=}"
    fixed_bytes = {phase: _fixed_bytes(terms, phase) for phase in PHASES}
    fitting_pages = min((budget_bytes - fixed_bytes[phase]) // page_bytes for phase in PAGE_PHASES)
    if fitting_pages < min_pages or max(fixed_bytes.values()) > budget_bytes:
        smallest = MemoryPlan(budget_bytes, budget_reason, terms, page_bytes, min_pages, "for one longest sequence")
        raise _refusal(smallest)
    if fitting_pages >= max_pages:
        return MemoryPlan(budget_bytes, budget_reason, terms, page_bytes, max_pages, max_pages_reason)
    reason = "as many as the budget leaves beside the rest"
    return MemoryPlan(budget_bytes, budget_reason, terms, page_bytes, fitting_pages, reason)


def _fixed_bytes(terms: tuple[Term, ...], phase: str) -> int:
    return sum(term.num_bytes for term in terms if phase in term.phases)


def _refusal(smallest: MemoryPlan) -> MemoryPlanError:
    """Explain why not even one longest sequence fits, by the phase that needs most (serve among equals)."""
    needed = smallest.phase_bytes
    phase = max(reversed(PHASES), key=needed.__getitem__)
    table = smallest.table(phase)
    sizes = {"needed": table.needed_bytes, "budget": table.budget_bytes, "short": table.short_bytes}
    values = {name: format_bytes(num_bytes) for name, num_bytes in sizes.items()}
    parts = tuple(f"{row.owner} {format_bytes(row.num_bytes)}" for row in table.rows)
    return MemoryPlanError(
        "plan.over_budget", table=table, phase=phase, parts=parts, reason=table.budget_reason, **values
    )

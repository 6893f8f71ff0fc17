"""From a budget and named terms to a number of KV pages, or a refusal that is the table; no torch.

    load       weights arrive          weights, inputs, ..., staging
    capture    graphs are recorded     the same without staging, and pages, workspace, what capture takes
    serve      steps run               what is left

The budget bounds each phase by itself, so what is given back before the next one begins costs no pages.
"""

from dataclasses import dataclass

from holdfast.errors import MemoryPlanError, PlanRow, PlanTable
from holdfast.memory.sizes import format_bytes

PHASES = ("load", "capture", "serve")
PAGE_PHASES = ("capture", "serve")
"""Pages are taken once the weights are in."""
KV_OWNER = "kv pages"


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes that are needed whatever the number of pages, in some phases or all."""

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
    def phase_bytes(self) -> dict[str, int]:
        """Bytes that each phase takes."""
        return {phase: _fixed_bytes(self.terms, phase) + self._kv_bytes_in(phase) for phase in PHASES}

    @property
    def total_bytes(self) -> int:
        """Bytes while serving."""
        return self.phase_bytes["serve"]

    @property
    def peak_bytes(self) -> int:
        """Bytes of the phase that takes most."""
        return max(self.phase_bytes.values())

    def table(self, phase: str) -> PlanTable:
        """Who takes what in a phase, by group, the largest first; the reason is that of a group's largest term."""
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
    """The most pages that fit the budget in every phase, at least `min_pages` and no more than could ever be used.

    `min_pages` is one sequence of the longest allowed context: an engine that could not finish the longest request it
    accepts must not start.
    """
    assert page_bytes > 0, f"{page_bytes=} must be positive"
    assert 0 < min_pages <= max_pages, f"{min_pages=} must be positive and at most {max_pages=}"
    fixed_bytes = {phase: _fixed_bytes(terms, phase) for phase in PHASES}
    fitting_pages = min((budget_bytes - fixed_bytes[phase]) // page_bytes for phase in PAGE_PHASES)
    if fitting_pages < min_pages or max(fixed_bytes.values()) > budget_bytes:
        smallest = MemoryPlan(budget_bytes, budget_reason, terms, page_bytes, min_pages, "for one longest sequence")
        raise _refusal(smallest, fitting_pages)
    if fitting_pages >= max_pages:
        return MemoryPlan(budget_bytes, budget_reason, terms, page_bytes, max_pages, max_pages_reason)
    return MemoryPlan(
        budget_bytes, budget_reason, terms, page_bytes, fitting_pages, "as many as the budget leaves beside the rest"
    )


def _fixed_bytes(terms: tuple[Term, ...], phase: str) -> int:
    return sum(term.num_bytes for term in terms if phase in term.phases)


def _refusal(smallest: MemoryPlan, fitting_pages: int) -> MemoryPlanError:
    """Why not even one longest sequence fits: the phase that needs most, and the serve phase among equals."""
    needed = smallest.phase_bytes
    phase = max(reversed(PHASES), key=needed.__getitem__)
    table = smallest.table(phase)
    parts = [f"{row.owner} {format_bytes(row.num_bytes)}" for row in table.rows]
    fitting_percent = 100 * fitting_pages // smallest.num_pages
    if fitting_percent > 0 and needed["load"] <= smallest.budget_bytes:
        do = f"lower max_model_len to {fitting_percent}% of what was asked, or raise the memory limit"
    else:
        needed_mib = -(-table.needed_bytes // 1024**2)  # rounded up, so that what is offered does fit
        do = f"raise the memory limit to at least {needed_mib}MiB, or take a smaller model or dtype"
    return MemoryPlanError(
        f"the plan needs {format_bytes(table.needed_bytes)} in its {phase} phase ({', '.join(parts)})",
        f"the budget is {format_bytes(table.budget_bytes)} ({table.budget_reason}), {format_bytes(table.short_bytes)} short",
        do,
        table=table,
    )

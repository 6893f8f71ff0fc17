"""The memory table: what each owner was planned to take and what it holds; no torch."""

from dataclasses import asdict, dataclass

from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import MemoryPlan

KV_OWNER = "kv pages"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One owner. What it holds is None where it takes memory only while a step runs: the plan then is a bound."""

    owner: str
    planned_bytes: int
    held_bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The table, and what it means in tokens."""

    rows: tuple[MemoryRow, ...]
    budget_bytes: int
    budget_reason: str
    kv_bytes_per_token: int
    kv_tokens: int
    max_model_len: int

    @property
    def planned_bytes(self) -> int:
        return sum(row.planned_bytes for row in self.rows)

    @property
    def held_bytes(self) -> int:
        return sum(row.held_bytes or 0 for row in self.rows)

    def as_dict(self) -> dict[str, object]:
        """The same for a program."""
        totals: dict[str, object] = {"planned_bytes": self.planned_bytes, "held_bytes": self.held_bytes}
        return asdict(self) | totals


def memory_report(plan: MemoryPlan, ledger: Ledger, page_tokens: int, max_model_len: int) -> MemoryReport:
    """Hold the plan against the ledger, owner by owner (the first part of each path)."""
    planned: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for term in plan.terms:
        owner = term.owner.partition("/")[0]
        planned[owner] = planned.get(owner, 0) + term.num_bytes
        reasons.setdefault(owner, term.reason)
    planned[KV_OWNER] = plan.kv_bytes
    reasons[KV_OWNER] = f"{plan.num_pages} pages of {page_tokens} tokens: {plan.pages_reason}"
    held = ledger.group_bytes()
    unplanned = held.keys() - planned.keys()
    assert not unplanned, f"the ledger holds owners that no plan knows: {sorted(unplanned)}"
    rows = [MemoryRow(owner, num_bytes, held.get(owner), reasons[owner]) for owner, num_bytes in planned.items()]
    rows.sort(key=lambda row: -row.planned_bytes)
    return MemoryReport(
        tuple(rows),
        plan.budget_bytes,
        plan.budget_reason,
        plan.page_bytes // page_tokens,
        plan.num_pages * page_tokens,
        max_model_len,
    )

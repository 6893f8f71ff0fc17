"""plan_runner: plan before anything is opened or allocated, or refuse with the smallest changes that would fit; no torch."""

from dataclasses import replace

from holdfast.errors import MemoryPlanError
from holdfast.planning.alternatives import advice, context_note, list_alternatives, plan_changes
from holdfast.planning.disk_account import disk_account
from holdfast.planning.fit import RunnerPlan, plan_resolved
from holdfast.planning.resolve import PlanRequest, Resolved, resolve

__all__ = ["PlanRequest", "RunnerPlan", "plan_runner"]


def plan_runner(request: PlanRequest) -> RunnerPlan:
    """Plan one rank. An open context shrinks to what fits; anything else that does not fit raises."""
    resolved = resolve(request)
    found = plan_resolved(resolved)
    if isinstance(found, MemoryPlanError):
        raise with_advice(resolved, found)
    return replace(found, context_note=context_note(resolved, found))


def with_advice(resolved: Resolved, refusal: MemoryPlanError) -> MemoryPlanError:
    """Add the files' size on disk, and the smallest changes that would fit."""
    account, listed = disk_account(resolved), list_alternatives(resolved)
    refusal.changes = plan_changes(listed)
    return refusal.hinting("" if account is None else account.sentence, advice(listed))

"""Plan a runner before anything is opened or allocated: what fits, or a refusal with the smallest changes that would; no torch."""

from holdfast.errors import MemoryPlanError
from holdfast.planning.alternatives import advice, context_note, list_alternatives, plan_changes
from holdfast.planning.disk_account import disk_account
from holdfast.planning.fit import PlanRequest, RunnerPlan, fit_runner, settle

__all__ = ["PlanRequest", "RunnerPlan", "plan_runner"]


def plan_runner(request: PlanRequest) -> RunnerPlan:
    """The plan of one rank. A context that was left open shrinks to what fits; whatever else does not fit raises.

    More ranks than one are for plans: no engine of this version takes them. Everything is settled once, whatever comes of it.
    """
    try:
        plan = fit_runner(request)
    except MemoryPlanError as error:
        account = disk_account(request.declared, settle(request)[1], request.mesh)
        if account is not None:
            error.has = f"{error.has}; {account.clause}"
        listed = list_alternatives(request)
        error.changes = plan_changes(listed)
        error.do = advice(listed)
        error.args = (error.asked, error.has, error.do)
        raise
    return plan._replace(context_note=context_note(request, plan))

"""plan_runner: plan before anything is opened or allocated, or refuse with the smallest changes that would fit; no torch."""

from dataclasses import replace

from holdfast.distributed.mesh import Mesh
from holdfast.errors import MemoryPlanError
from holdfast.memory.on_disk import DiskAccount, HeldGroup
from holdfast.planning.alternatives import advice, context_note, list_alternatives, plan_changes
from holdfast.planning.fit import RunnerPlan, plan_resolved
from holdfast.planning.kv_ladder import choose_kv
from holdfast.planning.resolve import PlanRequest, Resolved, resolve, with_stored_embedding
from holdfast.quant.weight_schemes import INT8

__all__ = ["PlanRequest", "RunnerPlan", "plan_runner"]


def plan_runner(request: PlanRequest) -> RunnerPlan:
    """Plan one rank. An open context shrinks to what fits; anything else that does not fit raises."""
    resolved = resolve(choose_kv(request))
    found = plan_resolved(resolved)
    if isinstance(found, MemoryPlanError):
        raise with_advice(resolved, found)
    return replace(found, context_note=context_note(resolved, found))


def with_advice(resolved: Resolved, refusal: MemoryPlanError) -> MemoryPlanError:
    """Add the files' size on disk, and the smallest changes that would fit."""
    account, listed = disk_account(resolved), list_alternatives(resolved)
    refusal.changes = plan_changes(listed)
    return refusal.hinting("" if account is None else account.sentence, advice(listed))


def disk_account(resolved: Resolved, mesh: Mesh | None = None) -> DiskAccount | None:
    """Return the account of a rank's share; None if the files were not read, or store the types that memory holds.

    `mesh` is another share than the rank's own, such as the whole model.
    """
    declared, recipe, mesh = resolved.declared, resolved.recipe, mesh or resolved.mesh
    if declared.on_disk is None:
        return None
    memory_bytes = declared.weight_bytes(resolved.dtype, recipe, mesh)
    if recipe.scheme is not None:
        return DiskAccount(declared.on_disk, memory_bytes, resolved.dtype, recipe.scheme.name)
    account = resolved.packed_account
    if account.num_kept:
        groups = declared.group_bytes(resolved.dtype, recipe, mesh).items()
        held = tuple(HeldGroup(name, group.stored_as, group.num_bytes) for name, group in groups)
        kept = DiskAccount(declared.on_disk, memory_bytes, resolved.dtype, None, kept=account.summary)
        return kept._replace(groups=held)
    other = with_stored_embedding(replace(recipe, scheme=INT8), declared)
    other_bytes = declared.weight_bytes(resolved.dtype, other, mesh)
    return DiskAccount(declared.on_disk, memory_bytes, resolved.dtype, None, INT8.name, other_bytes)

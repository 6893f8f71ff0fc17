"""Variants: runners of one model that differ in their settings, side by side over one set of weights."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.config import EngineConfig
from holdfast.errors import MemoryPlanError
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.ledger import Ledger
from holdfast.memory.sizes import format_bytes
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.target import choose_device, device_target
from holdfast.runner.assembly import HELD_OUTSIDE, MakeBackend
from holdfast.runner.build import RunnerBuild, plan_model, refuse_out_of_memory
from holdfast.runner.runner import Runner


class Variant(NamedTuple):
    """Settings of one runner."""

    config: EngineConfig
    make_backend: MakeBackend | None = None
    """Replaces the plan's attention, over the same pages."""


@dataclass(frozen=True, slots=True)
class BuiltVariants:
    """Runners that are ready, in the order of the variants."""

    runners: tuple[Runner, ...]
    plans: tuple[RunnerPlan, ...]
    release: Callable[[], None]
    """Frees everything; no runner can be used afterwards."""


def build_variants(
    variants: Sequence[Variant],
    model: OpenModel,
    on_progress: Callable[[int, int], None],
    text_ids: Sequence[int] = (),
) -> BuiltVariants:
    """Plan all variants, load once, assemble each. Nothing is warmed or captured: they serve to compare results."""
    device, _ = choose_device(variants[0].config)
    target = device_target(device)
    planned = [plan_model(variant.config, model, target) for variant in variants]
    plans = [plan for _, plan in planned]
    kinds = {(plan.resolved.device, plan.resolved.dtype, plan.resolved.recipe) for plan in plans}
    assert len(kinds) == 1, f"{len(kinds)} kinds of weights, and variants share one"
    _refuse_crowd(plans)
    builds = [
        RunnerBuild(variant.config, model, plan, Ledger(), torch.device(device), text_ids)
        for variant, plan in zip(variants, plans, strict=True)
    ]

    def release() -> None:
        for build in reversed(builds):
            build.release()

    try:
        first, *others = builds
        first.load(planned[0][0], on_progress)
        for build in others:
            build.share(first)
        runners = [build.assemble(variant.make_backend) for build, variant in zip(builds, variants, strict=True)]
    except BaseException as error:
        # The frames of the error still name tensors, and the caller may keep the error.
        traceback.clear_frames(error.__traceback__)
        release()
        refuse_out_of_memory(error, plans[0])
        raise
    return BuiltVariants(tuple(runners), tuple(build.plan for build in builds), release)


def own_bytes(plan: RunnerPlan) -> int:
    """Return the bytes of another runner over loaded weights: pages, workspace, buffers."""
    terms = (term for term in plan.memory.terms if "serve" in term.phases and term.group != "weights")
    return plan.memory.kv_bytes + sum(term.num_bytes for term in terms if term.owner not in HELD_OUTSIDE)


def _refuse_crowd(plans: Sequence[RunnerPlan]) -> None:
    """Raise if the plans do not fit together; each fits alone."""
    first, *others = plans
    memory, own = first.memory, [own_bytes(plan) for plan in others]
    if memory.peak_bytes + sum(own) <= memory.budget_bytes or not own:
        return
    raise MemoryPlanError(
        "runner.too_many_runners",
        num_runners=len(plans),
        needed=format_bytes(memory.peak_bytes + sum(own)),
        largest=format_bytes(max(own)),
        budget=format_bytes(memory.budget_bytes),
        reason=memory.budget_reason,
        table=memory.table("serve"),
    )

"""choose_kv: the KV format that `kv_quality` stands for, which is the first of a list whose plan holds enough; no torch."""

import math
from collections.abc import Callable
from dataclasses import replace

from holdfast.errors import ConfigError, HoldfastError, MemoryPlanError, UnsupportedModelError
from holdfast.memory.planner import Term
from holdfast.planning.fit import RunnerPlan, try_fit
from holdfast.planning.resolve import PlanRequest, Resolved, resolve

LADDERS = {
    "high": ("auto", "turboquant_k8v4", "turboquant_k5v4"),
    "balanced": ("turboquant_k5v4", "turboquant_4bit_nc", "turboquant_k3v4_nc"),
}
"""Formats of keys and values by head, keyed by `kv_quality`, the best first."""
LATENT_LADDERS = {"high": ("auto", "fp8"), "balanced": ("fp8", "turboquant_4bit_nc")}
"""Formats of latents and of compressed attention."""


def choose_kv(request: PlanRequest) -> PlanRequest:
    """Return the request with the format that `kv_quality` stands for; without the option, the same.

    The plan has to hold as many sequences of the longest context as the user set: one, of the model's own length, by
    default. A format that the model, the device or another option excludes is skipped. If none fits at all, the narrowest
    is returned, and its plan is refused with its table. Ranks plan in processes of their own, so `resolve` refuses the
    option there.
    """
    config, declared = request.config, request.declared
    if config.kv_quality is None or request.mesh.num_ranks > 1 or config.num_ranks > 1:
        return request
    length, num_seqs = config.max_model_len or declared.max_position, config.max_num_seqs or 1
    ladders = LATENT_LADDERS if declared.keeps_latents or declared.is_compressed else LADDERS
    sequences = "one sequence" if num_seqs == 1 else f"{num_seqs} sequences"
    wanted, passed, narrowest, fits = f"{sequences} of {length:,} tokens", [], None, False
    if callable(request.staging):
        request = replace(request, staging=_remembered(request.staging))
    for name in ladders[config.kv_quality]:
        own = replace(request, config=replace(config, kv_quality=None, kv_cache_dtype=name))
        try:
            found = _plan(own, length, num_seqs)
        except (ConfigError, UnsupportedModelError) as error:
            passed.append(f"{name} is not possible: {_reason(error, name)}")
            continue
        narrowest = own
        if isinstance(found, str):
            passed.append(found)
            continue
        fits = True
        if found.max_concurrency >= num_seqs:
            reason = f"kv_quality={config.kv_quality}: it holds {wanted}"
            limits = found.resolved.limits
            if limits.max_num_batched_tokens != resolve(own).limits.max_num_batched_tokens:
                # The plan of the engine takes shorter steps for its context alone, not for the number of sequences.
                reason += f" in steps of {limits.max_num_batched_tokens}"
                own = replace(own, config=replace(own.config, max_num_batched_tokens=limits.max_num_batched_tokens))
            return replace(own, kv_reason="; ".join((reason, *passed)))
        passed.append(f"{_label(found)} holds {math.floor(100 * found.max_concurrency) / 100:.2f}")
    if narrowest is None:
        raise ConfigError("plan.kv_quality_impossible", name="kv_quality", value=config.kv_quality, found=tuple(passed))
    if not fits:
        return replace(narrowest, kv_reason="; ".join((f"kv_quality={config.kv_quality}: no format fits", *passed)))
    other = ", take kv_quality=balanced" if config.kv_quality == "high" and _is_enough(request, "balanced") else ""
    values = {"value": config.kv_quality, "wanted": wanted, "found": tuple(passed), "other": other}
    raise MemoryPlanError("plan.kv_quality_too_small", name="kv_quality", **values)


def _is_enough(request: PlanRequest, quality: str) -> bool:
    """Return True if another `kv_quality` holds what the user wants."""
    try:
        choose_kv(replace(request, config=replace(request.config, kv_quality=quality)))
    except HoldfastError:
        return False
    return True


def _plan(request: PlanRequest, length: int, num_seqs: int) -> RunnerPlan | str:
    """Return the plan of a format with this context, or that none fits. Raises if the format is not possible.

    Steps are as long as that leaves room for so many sequences.
    """
    resolved = resolve(replace(request, config=replace(request.config, max_model_len=length)))
    found = None
    for steps in (resolved, *resolved.with_shorter_steps()):
        if found is not None and found.max_concurrency >= num_seqs:
            break
        found = try_fit(steps) or found
    return f"{resolved.kv_format.name} holds none" if found is None else found


def _reason(error: Exception, name: str) -> str:
    return str(error).removeprefix(f"kv_cache_dtype={name} is not possible: ").rstrip(".")


def _remembered(staging: Callable[[Resolved], Term | None]) -> Callable[[Resolved], Term | None]:
    """Return a function that calls `staging` once: formats of pages do not change how weights load."""
    known: list[Term | None] = []

    def once(resolved: Resolved) -> Term | None:
        if not known:
            known.append(staging(resolved))
        return known[0]

    return once


def _label(plan: RunnerPlan) -> str:
    near_tokens = plan.resolved.near_tokens
    return plan.resolved.kv_format.name + (f" beside {near_tokens} near tokens" if near_tokens else "")

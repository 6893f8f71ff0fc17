"""All ranks planned by one of them before a weight is read: reports in, stages cut, pages and context that every rank has; no torch.

    RankReport      what a rank has: memory, versions, a digest of the model's headers
    plan_ranks      a plan of every rank, or a refusal in one sentence: which rank, which term, both numbers
    Agreement       what all of them are told; each plans for itself with it, and compares (Agreement.check)

A page id means the same everywhere, so ranks have as many pages and as long a context as the one that has least.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from json import dumps
from typing import Any, NamedTuple

from holdfast.config import EngineConfig
from holdfast.distributed.exchange_plan import ExchangeKind, find_exchange, planned_nodes
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.errors import ConfigError, HoldfastError, MemoryPlanError, UnsupportedModelError, shown
from holdfast.memory.sizes import format_bytes
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.fit import NO_RANKS, Agreed, PlanRequest, RunnerPlan, fit_runner, try_fit
from holdfast.planning.plan import plan_runner
from holdfast.planning.resolve import resolve
from holdfast.planning.stages import Cuts, StageCosts, best_cuts
from holdfast.planning.target import Target

PACKAGES = ("holdfast", "torch", "triton")
OWN_CHOICES = ("memory", "device", "max_model_len")
"""Choices that may differ among ranks, or that are compared as numbers."""
LIKE_RANK_0 = "give every rank the same files, the same installation and the same kind of device"


class RankReport(NamedTuple):
    """What a rank has to tell before all are planned."""

    rank: int
    target: Target
    device: str
    """Which device it is on: ranks with the same one share its memory."""
    versions: Mapping[str, str]
    model: str
    """A digest of what the model's headers say."""
    node: str = ""
    """Which node it is on: ranks with another one are reached over a network."""

    def as_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        return self._asdict() | {"target": self.target._asdict(), "versions": dict(self.versions)}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "RankReport":
        """What `as_dict` gave; another release may tell other things."""
        try:
            target = dict(told["target"])
            capability = target.pop("capability")
            own = Target(**target, capability=None if capability is None else (capability[0], capability[1]))
            return cls(told["rank"], own, told["device"], told["versions"], told["model"], told["node"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"rank {told.get('rank')} was to run with the others",
                f"what it tells of itself is not what this release tells ({error!r:.80})",
                LIKE_RANK_0,
            ) from error


def report_rank(rank: int, target: Target, model: str, device: str = "", node: str = "") -> RankReport:
    """The report of this process; `device` is left out where ranks of one name are on one device."""
    return RankReport(rank, target, device or target.name, installed_versions(), model, node)


def installed_versions() -> dict[str, str]:
    """Of what results depend on, as the installation says."""
    from importlib.metadata import PackageNotFoundError, version  # here, since a plan of one rank does without

    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def sums_exactly(config: EngineConfig) -> bool:
    """Whether ranks gather where they could add up: answers then do not depend on their number."""
    asked = config.tensor_parallel_sums
    return asked == "exact" or (asked == "auto" and config.batch_invariant)


def rank_meshes(config: EngineConfig, cuts: Cuts | None = None) -> tuple[Mesh, ...]:
    """Where every rank of a config stands; `cuts` are the layers of each stage."""
    has_experts, is_exact = config.enable_expert_parallel, sums_exactly(config)
    size = config.tensor_parallel_size
    return meshes(size, cuts, has_expert_parallelism=has_experts, is_exact=is_exact)


class Agreement(NamedTuple):
    """What all ranks are told, before any of them reads a weight."""

    max_model_len: int
    num_pages: int
    cuts: Cuts | None
    """The layers of each stage; None where there is one."""
    num_sharing: tuple[int, ...]
    """Of each rank: how many ranks share its device."""
    summaries: tuple[Mapping[str, Any], ...]
    """Of each rank: what its plan must be."""
    exchange: ExchangeKind
    """How they exchange, which follows from the nodes that they are on."""

    @property
    def agreed(self) -> Agreed:
        """For a rank's own `PlanRequest`."""
        return Agreed(self.max_model_len, self.num_pages, self.exchange)

    def target(self, rank: int, target: Target) -> Target:
        """What a rank may count on of the device that it reported."""
        return shared_target(target, self.num_sharing[rank])

    def check(self, rank: int, plan: RunnerPlan) -> None:
        """Raise where a rank's own plan is not the one that rank 0 made for it."""
        refuse_difference(rank, plan_summary(plan), self.summaries[rank])

    def as_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        return self._asdict() | {"summaries": [dict(one) for one in self.summaries]}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Agreement":
        """What `as_dict` gave."""
        cuts = told["cuts"]
        return cls(
            told["max_model_len"],
            told["num_pages"],
            None if cuts is None else tuple((first, last) for first, last in cuts),
            tuple(told["num_sharing"]),
            tuple(told["summaries"]),
            told["exchange"],
        )


class RankPlans(NamedTuple):
    """The plans of all ranks, in order."""

    plans: tuple[RunnerPlan, ...]
    agreement: Agreement
    least: tuple[int, ...]
    """Pages that each would have by itself, with the context that all have."""

    @property
    def worst(self) -> int:
        """The rank that has the fewest pages, and so decides for all; the first of several."""
        return min(range(len(self.plans)), key=self.least.__getitem__)


def plan_ranks(config: EngineConfig, declared: DeclaredModel, reports: Sequence[RankReport]) -> RankPlans:
    """Every rank's plan, with the pages and the context of the one that has least; whatever does not fit or match raises."""
    _refuse_unlike_reports(config, reports)
    check_ranks(config, declared)
    check_nodes(config, reports)
    nodes = [report.node for report in reports]
    kind = find_exchange(reports[0].target.kind, nodes, config.tensor_parallel_size)
    counts = Counter(report.device for report in reports)
    num_sharing = tuple(counts[report.device] for report in reports)
    targets = [shared_target(report.target, count) for report, count in zip(reports, num_sharing, strict=True)]
    cuts = cut_stages(config, declared, targets, kind)
    requests = [
        PlanRequest(config, declared, target, mesh, exchange=kind)
        for target, mesh in zip(targets, rank_meshes(config, cuts), strict=True)
    ]
    longest = [plan.resolved.limits.max_model_len for plan in _each(requests)]
    requests = [replace(request, agreed=Agreed(min(longest))) for request in requests]
    least = tuple(plan.memory.num_pages for plan in _each(requests))
    requests = [replace(request, agreed=Agreed(min(longest), min(least))) for request in requests]
    plans = _each(requests)
    summaries = tuple(plan_summary(plan) for plan in plans)
    _refuse_unlike_plans(summaries)
    agreement = Agreement(min(longest), min(least), cuts, num_sharing, summaries, kind)
    return RankPlans(plans, agreement, least)


def check_nodes(config: EngineConfig, reports: Sequence[RankReport]) -> None:
    """Raise where ranks are not on as many nodes as were asked for."""
    num_nodes = len({report.node for report in reports})
    if config.nnodes not in (None, num_nodes):
        raise ConfigError(
            f"nnodes={config.nnodes} was asked",
            f"the {len(reports)} ranks are on {num_nodes}: a launcher decides where they are, and without one they are all here",
            f"start {config.nnodes} nodes with torchrun, or leave nnodes out",
        )


def worst_request(
    config: EngineConfig, declared: DeclaredModel, target: Target
) -> tuple[PlanRequest, RankPlans | None]:
    """Of ranks that all have such a device: the request of the one that decides for all, and all plans where every rank fits.

    Processes on a CPU share its memory.
    """
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    check_ranks(config, declared)
    first = report_rank(0, target, declared.name)
    is_shared, nodes = target.kind == "cpu", planned_nodes(num_ranks, config.nnodes)
    reports = [
        first._replace(
            rank=rank,
            device="cpu" if is_shared else f"{target.name} {rank}",
            node=str(nodes[rank]),
        )
        for rank in range(num_ranks)
    ]
    own = shared_target(target, num_ranks if is_shared else 1)
    cuts = cut_stages(config, declared, [own] * num_ranks)
    requests = [PlanRequest(config, declared, own, mesh) for mesh in rank_meshes(config, cuts)]
    first_of_stages = requests[:: config.tensor_parallel_size]
    unfitting = next((request for request in first_of_stages if try_fit(request) is None), None)
    if unfitting is not None:
        return unfitting, None
    plans = plan_ranks(config, declared, reports)
    return requests[plans.worst], plans


def refuse_unshared(config: EngineConfig, declared: DeclaredModel) -> None:
    """Refuse to start a model on ranks that is only planned for them."""
    if config.num_ranks > 1 and declared.is_compressed:
        raise UnsupportedModelError(
            f"{declared.name} on {config.num_ranks} ranks was asked",
            NO_RANKS,
            "leave out tensor_parallel_size and pipeline_parallel_size; holdfast plan says which GPU holds it, if one does",
        )


def check_ranks(config: EngineConfig, declared: DeclaredModel) -> None:
    """What cannot be shared by so many ranks raises, whatever memory they have."""
    num_ranks = config.num_ranks
    if config.nnodes is not None and config.nnodes > num_ranks:
        raise ConfigError(
            f"nnodes={config.nnodes} was asked",
            f"there {'is one rank' if num_ranks == 1 else f'are {num_ranks} ranks'}, and every node has one at least",
            f"take {num_ranks} or fewer, or leave it out",
        )
    declared.check_ranks(rank_meshes(config)[0])
    if config.enable_expert_parallel and (declared.spec is None or declared.spec.experts is None):
        raise ConfigError(
            "enable_expert_parallel=True was asked",
            f"{declared.name} has no experts that ranks could hold",
            "leave it out",
        )
    num_stages = config.pipeline_parallel_size
    if num_stages > 1:
        declared.check_ranks(Mesh(num_stages=num_stages))


def cut_stages(
    config: EngineConfig, declared: DeclaredModel, targets: Sequence[Target], exchange: ExchangeKind | None = None
) -> Cuts | None:
    """The layers of each stage, for ranks with this memory; None where there is one stage."""
    num_stages, size = config.pipeline_parallel_size, config.tensor_parallel_size
    if num_stages == 1:
        return None
    costs = stage_costs(config, declared, targets, exchange)
    heads = declared.declaration.heads(rank_meshes(config)[0])
    shared = frozenset() if heads is None else heads.shared_layers
    cuts = best_cuts(declared.num_layers, num_stages, costs.count_pages, costs.weigh, shared)
    if cuts is None:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} was asked",
            f"{declared.name} has {declared.num_layers - len(shared)} layers that do not attend to what one before them chose, "
            "and a stage begins with such a layer",
            f"take {declared.num_layers - len(shared)} or fewer",
        )
    assert len(cuts) * size == len(targets), f"{cuts} for {len(targets)} ranks"
    return cuts


def stage_costs(
    config: EngineConfig, declared: DeclaredModel, targets: Sequence[Target], exchange: ExchangeKind | None = None
) -> StageCosts:
    """What layers cost in each stage, by the rank of it that may take least."""
    size = config.tensor_parallel_size
    by_rank = [(resolve(config, declared, target), target) for target in targets]
    smallest = [
        min(by_rank[start : start + size], key=lambda one: one[0].budget_bytes)
        for start in range(0, len(targets), size)
    ]
    resolved, own = [one for one, _ in smallest], [target for _, target in smallest]
    return StageCosts(
        *(declared, rank_meshes(config)[0], own, resolved, config.enforce_eager, config.batch_invariant),
        exchange or find_exchange(targets[0].kind, planned_nodes(len(targets), config.nnodes), size),
    )


def shared_target(target: Target, num_sharing: int) -> Target:
    """One device's memory as one of several ranks on it may count on it."""
    if num_sharing == 1:
        return target
    return target._replace(
        total_bytes=target.total_bytes // num_sharing,
        available_bytes=target.available_bytes // num_sharing,
        reason=f"{target.reason}; shared by {num_sharing} ranks",
    )


def _each(requests: Sequence[PlanRequest]) -> tuple[RunnerPlan, ...]:
    """The plan of each rank; those that are alike are made once. A refusal says which rank, and what else would fit."""
    known: dict[object, RunnerPlan] = {}
    plans = []
    for request in requests:
        mesh = request.mesh
        is_edge = mesh.tensor_rank in (0, mesh.tensor_size - 1)
        key = mesh.stage, mesh.tensor_rank if is_edge else -1, request.target
        if key not in known:
            try:
                known[key] = fit_runner(request)
            except HoldfastError as error:
                raise _of_rank(request, error) from error
        plans.append(known[key]._replace(mesh=mesh))
    return tuple(plans)


def _of_rank(request: PlanRequest, error: HoldfastError) -> HoldfastError:
    """The refusal with the rank in front, and of a plan that does not fit with what would."""
    if isinstance(error, MemoryPlanError):
        try:
            plan_runner(request)
        except MemoryPlanError as worded:
            error = worded
    mesh = request.mesh
    layers = "" if mesh.layers is None else f", layers {mesh.layers[0]} to {mesh.layers[1] - 1}"
    error.asked = f"rank {mesh.rank} of {mesh.num_ranks} ({request.target.name}{layers}): {error.asked}"
    error.args = (error.asked, *error.args[1:])
    return error


def plan_summary(plan: RunnerPlan) -> dict[str, Any]:
    """Everything of a plan that two who make it must agree on; not what loading holds for a while."""
    resolved, limits = plan.resolved, plan.resolved.limits
    terms = {term.owner: term.num_bytes for term in plan.memory.terms if term.phases != ("load",)}
    choices = {one.name: one.value for one in resolved.choices if one.name not in OWN_CHOICES}
    settled = {
        "dtype": resolved.dtype,
        "exchange": plan.exchange_kind,
        "kv_cache_dtype": resolved.kv_format.name,
        "attention": "none" if plan.declaration is None else plan.declaration.name,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "page_tokens": limits.page_tokens,
        "quantization": "none" if resolved.recipe.scheme is None else resolved.recipe.scheme.name,
    }
    numbers = {"num_pages": plan.memory.num_pages, "page_bytes": plan.memory.page_bytes}
    return {
        "settings": settled | choices | settled,  # a type comes before what follows from it
        "numbers": numbers | {"max_model_len": limits.max_model_len},
        "terms": terms,
    }


def plan_digest(plan: RunnerPlan) -> str:
    """Of all of that, the same wherever the plan is made."""
    text = dumps(plan_summary(plan), sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def refuse_difference(rank: int, own: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Raise where a rank's own plan is not what rank 0 planned for it; the first difference is named, with both numbers."""
    for part in ("settings", "numbers", "terms"):
        for name in dict.fromkeys((*told[part], *own[part])):
            ours, theirs = own[part].get(name), told[part].get(name)
            if ours != theirs:
                as_words = _bytes_words if part == "terms" else _words
                raise ConfigError(
                    f"rank {rank} was to be planned as rank 0 planned it",
                    f"{name} is {as_words(ours)} in its own plan, and {as_words(theirs)} in rank 0's",
                    LIKE_RANK_0,
                )


def _words(value: object) -> str:
    return "missing" if value is None else shown(value)


def _bytes_words(value: int | None) -> str:
    return "missing" if value is None else f"{value:,} B ({format_bytes(value)})"


def _refuse_unlike_reports(config: EngineConfig, reports: Sequence[RankReport]) -> None:
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if [report.rank for report in reports] != list(range(num_ranks)):
        raise ConfigError(
            f"{num_ranks} ranks were asked ({config.tensor_parallel_size} to a stage, {config.pipeline_parallel_size} stages)",
            f"{len(reports)} have told what they have: {', '.join(str(report.rank) for report in reports) or 'none'}",
            "start as many as are asked, each with a number of its own",
        )
    first = reports[0]
    for report in reports[1:]:
        pairs = {name: (report.versions.get(name), number) for name, number in first.versions.items()}
        pairs["device"] = report.target.kind, first.target.kind
        pairs["model"] = report.model, first.model
        for name, (own, theirs) in pairs.items():
            if own != theirs:
                what = "model (a digest of its headers)" if name == "model" else name
                raise ConfigError(
                    f"rank {report.rank} was to run with the others",
                    f"its {what} is {_words(own)}, and rank 0's is {_words(theirs)}",
                    LIKE_RANK_0,
                )


def _refuse_unlike_plans(summaries: Sequence[Mapping[str, Any]]) -> None:
    """What was settled for a rank by its device must be what was settled for all."""
    first = summaries[0]["settings"]
    for rank, summary in enumerate(summaries[1:], 1):
        for name, value in summary["settings"].items():
            if value != first.get(name):
                raise ConfigError(
                    f"rank {rank} would take {name}={value}",
                    f"rank 0 takes {name}={first.get(name)}, and all must be alike",
                    f"ask for {name}, or take devices of one kind",
                )

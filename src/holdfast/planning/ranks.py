"""Plans of all ranks, made by rank 0 before a weight is read: reports in, stages cut, common pages and context out; no torch.

    RankReport      what a rank has: memory, versions, a digest of the model's headers
    plan_ranks      a plan of every rank, or a refusal that names the rank, the term and both numbers
    Agreement       what rank 0 sends to all; each plans for itself with it, and compares (Agreement.check)

A page id means the same everywhere, so all ranks have the pages and the context of the rank with the least memory.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from json import dumps
from typing import Any, NamedTuple

from holdfast.config import EngineConfig
from holdfast.distributed.exchange_plan import ExchangeKind, find_exchange, planned_nodes
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.errors import ConfigError, HoldfastError, MemoryPlanError, shown
from holdfast.memory.sizes import format_bytes
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.fit import RunnerPlan, plan_resolved, spare_bytes, try_fit
from holdfast.planning.plan import with_advice
from holdfast.planning.resolve import Agreed, PlanRequest, resolve
from holdfast.planning.stages import Cuts, StageCosts, best_cuts, most_stages
from holdfast.planning.target import Target

PACKAGES = ("holdfast", "torch", "triton")
OWN_CHOICES = ("memory", "device", "max_model_len")
"""Choices that may differ among ranks, or are compared as numbers."""


class RankReport(NamedTuple):
    """What a rank sends to rank 0 before all are planned."""

    rank: int
    target: Target
    device: str
    """Ranks with the same device share its memory."""
    versions: Mapping[str, str]
    model: str
    """A digest of what the model's headers say."""
    node: str = ""
    """Ranks on another node are reached over a network."""

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return self._asdict() | {"target": self.target._asdict(), "versions": dict(self.versions)}

    @classmethod
    def of(cls, sent: Mapping[str, Any]) -> "RankReport":
        """Restore what `as_dict` returned; another release may send something else."""
        try:
            target = dict(sent["target"])
            capability = target.pop("capability")
            own = Target(**target, capability=None if capability is None else (capability[0], capability[1]))
            return cls(sent["rank"], own, sent["device"], sent["versions"], sent["model"], sent["node"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError("plan.rank_report", rank=sent.get("rank"), reason=f"{error!r:.80}") from error


def report_rank(rank: int, target: Target, model: str, device: str = "", node: str = "") -> RankReport:
    """Report this process. Without `device`, ranks with a target of the same name share it."""
    return RankReport(rank, target, device or target.name, installed_versions(), model, node)


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    from importlib.metadata import PackageNotFoundError, version  # a plan of one rank does not need it

    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def sums_exactly(config: EngineConfig) -> bool:
    """Return True if ranks all-gather instead of all-reduce, so that answers do not depend on their number."""
    sums = config.tensor_parallel_sums
    return sums == "exact" or (sums == "auto" and config.batch_invariant)


def rank_meshes(config: EngineConfig, cuts: Cuts | None = None) -> tuple[Mesh, ...]:
    """Return the mesh of every rank of a config; `cuts` are the layers of each stage."""
    has_experts, is_exact = config.enable_expert_parallel, sums_exactly(config)
    size = config.tensor_parallel_size
    return meshes(size, cuts, has_expert_parallelism=has_experts, is_exact=is_exact)


class Agreement(NamedTuple):
    """What rank 0 sends to all ranks before any of them reads a weight."""

    max_model_len: int
    num_pages: int
    cuts: Cuts | None
    """The layers of each stage; None if there is one."""
    num_sharing: tuple[int, ...]
    """For each rank, the number of ranks on its device."""
    summaries: tuple[Mapping[str, Any], ...]
    """For each rank, the summary that its plan must equal."""
    exchange: ExchangeKind
    """The kind of exchange, which follows from the ranks' nodes."""

    @property
    def agreed(self) -> Agreed:
        """The part for a rank's own `PlanRequest`."""
        return Agreed(self.max_model_len, self.num_pages, self.exchange)

    def target(self, rank: int, target: Target) -> Target:
        """Return a rank's share of the device that it reported."""
        return shared_target(target, self.num_sharing[rank])

    def check(self, rank: int, plan: RunnerPlan) -> None:
        """Raise if a rank's own plan is not the one that rank 0 made for it."""
        refuse_difference(rank, plan_summary(plan), self.summaries[rank])

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return self._asdict() | {"summaries": [dict(one) for one in self.summaries]}

    @classmethod
    def of(cls, sent: Mapping[str, Any]) -> "Agreement":
        """Restore what `as_dict` returned."""
        cuts = None if sent["cuts"] is None else tuple((first, last) for first, last in sent["cuts"])
        listed = cuts, tuple(sent["num_sharing"]), tuple(sent["summaries"])
        return cls(sent["max_model_len"], sent["num_pages"], *listed, sent["exchange"])


class RankPlans(NamedTuple):
    """The plans of all ranks, in order."""

    plans: tuple[RunnerPlan, ...]
    agreement: Agreement
    least: tuple[int, ...]
    """Pages that each rank could have alone, with the common context."""

    @property
    def worst(self) -> int:
        """The first rank with the fewest pages, which sets the number for all."""
        return min(range(len(self.plans)), key=self.least.__getitem__)


def plan_ranks(config: EngineConfig, declared: DeclaredModel, reports: Sequence[RankReport]) -> RankPlans:
    """Plan every rank with common pages and a common context. Raises if something does not fit or match."""
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
    longest = min(found.resolved.limits.max_model_len for found in _each(requests))
    requests = [replace(request, agreed=Agreed(longest)) for request in requests]
    least = tuple(found.memory.num_pages for found in _each(requests))
    plans = _each([replace(request, agreed=Agreed(longest, min(least))) for request in requests])
    summaries = tuple(plan_summary(found) for found in plans)
    refuse_unlike_plans(summaries)
    return RankPlans(plans, Agreement(longest, min(least), cuts, num_sharing, summaries, kind), least)


def check_nodes(config: EngineConfig, reports: Sequence[RankReport]) -> None:
    """Raise if ranks are not on the given number of nodes."""
    num_nodes = len({report.node for report in reports})
    if config.nnodes not in (None, num_nodes):
        values = {"value": config.nnodes, "num_ranks": len(reports), "num_nodes": num_nodes}
        raise ConfigError("plan.wrong_nodes", name="nnodes", **values)


def worst_request(
    config: EngineConfig, declared: DeclaredModel, target: Target
) -> tuple[PlanRequest, RankPlans | None]:
    """Return the request of the rank that limits all, and all plans if every rank fits.

    All ranks have such a device; processes on a CPU share its memory.
    """
    num_ranks = config.num_ranks
    check_ranks(config, declared)
    first = report_rank(0, target, declared.name)
    is_shared, nodes = target.kind == "cpu", planned_nodes(num_ranks, config.nnodes)
    reports = [
        first._replace(rank=rank, device="cpu" if is_shared else f"{target.name} {rank}", node=str(nodes[rank]))
        for rank in range(num_ranks)
    ]
    own = shared_target(target, num_ranks if is_shared else 1)
    cuts = cut_stages(config, declared, [own] * num_ranks)
    requests = [PlanRequest(config, declared, own, mesh) for mesh in rank_meshes(config, cuts)]
    first_of_stages = requests[:: config.tensor_parallel_size]
    unfitting = [request for request in first_of_stages if try_fit(resolve(request)) is None]
    if unfitting:
        return min(unfitting, key=lambda request: spare_bytes(resolve(request))[0]), None
    plans = plan_ranks(config, declared, reports)
    return requests[plans.worst], plans


def check_ranks(config: EngineConfig, declared: DeclaredModel) -> None:
    """Raise if so many ranks cannot share the model, whatever memory they have."""
    if config.nnodes is not None and config.nnodes > config.num_ranks:
        raise ConfigError("plan.more_nodes_than_ranks", name="nnodes", value=config.nnodes, num_ranks=config.num_ranks)
    declared.check_ranks(rank_meshes(config)[0])
    declared.check_blocks(rank_meshes(config)[0], config.recipe)
    if config.enable_expert_parallel and not declared.has_experts:
        raise ConfigError("plan.no_experts", name="enable_expert_parallel", model=declared.name)
    num_stages = config.pipeline_parallel_size
    if num_stages > 1:
        declared.check_ranks(Mesh(num_stages=num_stages))


def cut_stages(
    config: EngineConfig, declared: DeclaredModel, targets: Sequence[Target], exchange: ExchangeKind | None = None
) -> Cuts | None:
    """Return the layers of each stage, for ranks with this memory; None if there is one stage."""
    num_stages, size = config.pipeline_parallel_size, config.tensor_parallel_size
    if num_stages == 1:
        return None
    costs = stage_costs(config, declared, targets, exchange)
    heads = declared.declaration.heads(rank_meshes(config)[0])
    shared = frozenset() if heads is None else heads.shared_layers
    state = frozenset() if heads is None or heads.state is None else heads.state.layers
    # All ranks have one kind of backend, and one rule of how prompts are cut.
    needed = (state, frozenset(range(declared.num_layers)) - state) if state else ()
    cuts = best_cuts(declared.num_layers, num_stages, costs.count_pages, costs.weigh, shared, needed)
    if cuts is None:
        maximum = most_stages(declared.num_layers, needed) - len(shared)
        values = {"value": num_stages, "model": declared.name, "maximum": maximum}
        raise ConfigError("plan.too_many_stages", name="pipeline_parallel_size", **values)
    assert len(cuts) * size == len(targets), f"{cuts} for {len(targets)} ranks"
    return cuts


def stage_costs(
    config: EngineConfig, declared: DeclaredModel, targets: Sequence[Target], exchange: ExchangeKind | None = None
) -> StageCosts:
    """Return what layers cost in each stage, by its rank with the smallest budget."""
    size, mesh = config.tensor_parallel_size, rank_meshes(config)[0]
    exchange = exchange or find_exchange(targets[0].kind, planned_nodes(len(targets), config.nnodes), size)
    ranks = [resolve(PlanRequest(config, declared, target, mesh, exchange=exchange)) for target in targets]
    starts = range(0, len(targets), size)
    return StageCosts([min(ranks[start : start + size], key=lambda one: one.budget_bytes) for start in starts])


def shared_target(target: Target, num_sharing: int) -> Target:
    """Return the share of a device's memory of one of several ranks on it."""
    if num_sharing == 1:
        return target
    return target._replace(
        total_bytes=target.total_bytes // num_sharing,
        available_bytes=target.available_bytes // num_sharing,
        reason=f"{target.reason}; shared by {num_sharing} ranks",
    )


def _each(requests: Sequence[PlanRequest]) -> tuple[RunnerPlan, ...]:
    """Plan each rank, and like ranks once. A refusal names the rank that lacks most, and what would fit there."""
    known: dict[object, RunnerPlan | MemoryPlanError] = {}
    keys, refused = [], []
    for request in requests:
        mesh = request.mesh
        is_edge = mesh.tensor_rank in (0, mesh.tensor_size - 1)
        keys.append((mesh.stage, mesh.tensor_rank if is_edge else -1, request.target))
        if keys[-1] not in known:
            with _naming_rank(request):
                found = known[keys[-1]] = plan_resolved(resolve(request))
            if isinstance(found, MemoryPlanError):
                refused.append((found, request))
    if refused:
        worst, request = min(refused, key=lambda pair: spare_bytes(resolve(pair[1]))[0])
        with _naming_rank(request):
            raise with_advice(resolve(request), worst)
    plans = ((known[key], request.mesh) for key, request in zip(keys, requests, strict=True))
    return tuple(
        replace(plan, resolved=plan.resolved.with_mesh(mesh)) for plan, mesh in plans if isinstance(plan, RunnerPlan)
    )


@contextmanager
def _naming_rank(request: PlanRequest) -> Iterator[None]:
    """Add the rank, its device and its layers to an error."""
    mesh = request.mesh
    layers = "" if mesh.layers is None else f", layers {mesh.layers[0]} to {mesh.layers[1] - 1}"
    try:
        yield
    except HoldfastError as error:
        error.within(f"rank {mesh.rank} of {mesh.num_ranks} ({request.target.name}{layers})")
        raise


def plan_summary(plan: RunnerPlan) -> dict[str, Any]:
    """Return all that a rank and rank 0 must plan alike; temporary memory of loading is excluded."""
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
    """Return a digest of `plan_summary`, which is the same in every process."""
    text = dumps(plan_summary(plan), sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def refuse_difference(rank: int, own: Mapping[str, Any], sent: Mapping[str, Any]) -> None:
    """Raise if a rank's own plan is not what rank 0 planned for it. The error names the first difference."""
    for part in ("settings", "numbers", "terms"):
        for name in dict.fromkeys((*sent[part], *own[part])):
            ours, theirs = own[part].get(name), sent[part].get(name)
            if ours != theirs:
                printed = _printed_bytes if part == "terms" else _printed
                values = {"name": name, "value": printed(ours), "expected": printed(theirs)}
                raise ConfigError("plan.rank_differs", rank=rank, **values)


def _printed(value: object) -> str:
    return "missing" if value is None else shown(value)


def _printed_bytes(value: int | None) -> str:
    return "missing" if value is None else f"{value:,} B ({format_bytes(value)})"


def _refuse_unlike_reports(config: EngineConfig, reports: Sequence[RankReport]) -> None:
    ranks = [report.rank for report in reports]
    if ranks != list(range(config.num_ranks)):
        values = {"size": config.tensor_parallel_size, "num_stages": config.pipeline_parallel_size}
        raise ConfigError("plan.missing_ranks", num_ranks=config.num_ranks, **values, reported=ranks)
    for report in reports[1:]:
        for name, own, first in _differences(report, reports[0]):
            raise ConfigError("plan.rank_differs", rank=report.rank, name=name, value=own, expected=first)


def _differences(report: RankReport, first: RankReport) -> Iterator[tuple[str, str, str]]:
    """List the differences of a rank from rank 0: name and both values."""
    pairs = {name: (report.versions.get(name), number) for name, number in first.versions.items()}
    pairs["device"] = report.target.kind, first.target.kind
    pairs["model (a digest of its headers)"] = report.model, first.model
    for name, (own, theirs) in pairs.items():
        if own != theirs:
            yield name, _printed(own), _printed(theirs)


def refuse_unlike_plans(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Raise if the device of a rank led to other settings than rank 0's."""
    first = summaries[0]["settings"]
    for rank, summary in enumerate(summaries[1:], 1):
        for name, value in summary["settings"].items():
            if value != first.get(name):
                values = {"name": name, "value": value, "expected": first.get(name)}
                raise ConfigError("plan.rank_setting_differs", rank=rank, **values)

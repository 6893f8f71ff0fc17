"""Ranks built: rank 0 here, every other one in its process, station by station; both sides of each station stand together.

    rank 0                                      every other rank
    RankStart            ->                     opens the model's headers
                         <-  RankReported       free memory, versions, a digest of the headers
    plans all ranks, or refuses
    RankPlanned          ->                     plans for itself, and compares
    loads                                       loads
                         <-  RankLoaded         no collective before every rank is here
    RankConnect          ->                     meets the others
    assembles, captures: the same exchanges in the same order on all
                         <-  RankReady

Rank 0 does all of this in its step thread: whoever waits for it learns at once where another rank is gone.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import torch

from holdfast import __version__
from holdfast.config import EngineConfig
from holdfast.distributed.collectives import open_collectives
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.mesh import ALONE, Mesh, meshes
from holdfast.distributed.rendezvous import Place, listen_for_ranks
from holdfast.engine.rank_messages import (
    RankConnect,
    RankLoaded,
    RankPlanned,
    RankReady,
    RankReported,
    RankStart,
)
from holdfast.engine.rank_process import RankServer
from holdfast.engine.ranked_runner import RankedRunner
from holdfast.engine.ranks import COMMAND, LOADING_SECONDS, PEER_SECONDS, RankGroup, StepThread, check_world
from holdfast.errors import ConfigError
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.ledger import Ledger
from holdfast.memory.report import RankMemory
from holdfast.observability.preparing import OnPrepare, Preparing, prepare_silently
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.target import choose_device, device_target
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.request.sequence import SequenceResult, StepResult
from holdfast.request.step import Step
from holdfast.runner.build import BuiltRunner, build_runner, plan_model
from holdfast.runner.runner import Runner

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Set where several ranks may share a GPU, which only measurements want."""


@dataclass(frozen=True, slots=True)
class BuiltRanks:
    """All ranks, ready: rank 0 and what drives the others."""

    built: BuiltRunner
    runner: RankedRunner
    ranks: tuple[RankMemory, ...]
    release: Callable[[], None]
    watch: Callable[[], None]
    """Raises where one is gone."""


def build_ranks(
    config: EngineConfig,
    model: OpenModel,
    on_progress: Callable[[int, int], None],
    on_prepare: OnPrepare,
    *,
    is_remote: bool = False,
    command: tuple[str, ...] = COMMAND,
) -> BuiltRanks:
    """Start every rank and build rank 0 here; nothing is left behind where one fails. `is_remote`: this process is ours."""
    check_world(config, os.environ)
    check_devices(config)
    own = report(config, model, 0)  # what cannot be planned here is refused before a process is started
    group = RankGroup(config, config.num_ranks, command, owns_parent=is_remote)
    thread = StepThread()
    try:
        zero = RankZero(config, model, group, own, on_progress, on_prepare)
        built, ranks = group.wait(thread.submit(zero.build))
    except BaseException:
        group.end()  # whatever rank 0 is at ends with its next word to the others
        thread.close(PEER_SECONDS)
        raise
    runner = RankedRunner(built.runner, group, thread, is_eager=_is_eager(config, built.runner))
    return BuiltRanks(built, runner, ranks, partial(runner.close, built.release), group.raise_if_dead)


def _is_eager(config: EngineConfig, runner: Runner) -> bool:
    return config.pipeline_parallel_size == 1 and not runner.can_run_ahead


class RankZero:
    """The stations of rank 0."""

    def __init__(
        self,
        config: EngineConfig,
        model: OpenModel,
        group: RankGroup,
        own: dict[str, Any],
        on_progress: Callable[[int, int], None],
        on_prepare: OnPrepare,
    ) -> None:
        self._config = config
        self._own = own
        self._model = model
        self._group = group
        self._on_progress = on_progress
        self._on_prepare = on_prepare

    def build(self) -> tuple[BuiltRunner, tuple[RankMemory, ...]]:
        """From the reports of all ranks to all of them ready."""
        group, config, own = self._group, self._config, self._own
        reports = [own, *(message.told for message in group.expect(RankReported, PEER_SECONDS))]
        agreed = agree(reports)
        group.send_all(RankPlanned(agreed))
        built = build_runner(
            *(settled(config, agreed, own, 0), self._model, self._tell_progress, self._tell_preparing),
            mesh=mesh_of(config, self._model, 0),
            agree=partial(compare, agreed, 0),
            connect=self._connect,
        )
        try:
            ready = group.expect(RankReady, LOADING_SECONDS)
        except BaseException:
            built.release()
            raise
        group.serve()
        return built, tuple(message.memory for message in ready)

    def _connect(self, plan: RunnerPlan, ledger: Ledger) -> Exchange:
        """All have loaded: tell where to meet."""
        self._group.expect(RankLoaded, LOADING_SECONDS)
        place = listen_for_ranks()
        host, port = place.getsockname()[:2]
        self._group.send_all(RankConnect(f"{host}:{port}"))
        return open_exchange(plan, place, ledger)

    def _tell_progress(self, num_done: int, num_total: int) -> None:
        self._group.raise_if_dead()
        self._on_progress(num_done, num_total)

    def _tell_preparing(self, preparing: Preparing) -> None:
        self._group.raise_if_dead()
        self._on_prepare(preparing)


class FollowingRank:
    """The same stations in the process of another rank, and the steps behind them."""

    def __init__(self, built: BuiltRunner, rank: int) -> None:
        self._built: BuiltRunner | None = built
        self._runner: Runner | None = built.runner
        self.memory = rank_memory(built, rank)

    def book(self, tokens: tuple[tuple[int, ...], ...]) -> None:
        """What rank 0 has chosen in the oldest step."""
        assert self._runner is not None, "this rank is closed"
        self._runner.take_result(StepResult(tuple(SequenceResult(own) for own in tokens)))

    def run(self, step: Step) -> None:
        """Run a step together with all other ranks."""
        assert self._runner is not None, "this rank is closed"
        self._runner.run(step)

    def close(self) -> None:
        """Give everything back."""
        built, self._built, self._runner = self._built, None, None
        if built is not None:
            built.release()


def build_rank(start: RankStart, server: RankServer) -> FollowingRank:
    """This process's share of the model, step by step with rank 0."""
    config, rank = start.config, start.rank
    model = open_model(config.model, config.load_format, config.revision)
    try:
        own = report(config, model, rank)
        server.send(RankReported(own))
        agreed = server.expect(RankPlanned).told

        def connect(plan: RunnerPlan, ledger: Ledger) -> Exchange:
            server.send(RankLoaded())
            host, _, port = server.expect(RankConnect).address.rpartition(":")
            return open_exchange(plan, (host, int(port)), ledger)

        built = build_runner(
            *(settled(config, agreed, own, rank), model, lambda done, total: None, prepare_silently),
            mesh=mesh_of(config, model, rank),
            agree=partial(compare, agreed, rank),
            connect=connect,
        )
    finally:
        model.source.close()
    return FollowingRank(built, rank)


# What both sides do


def mesh_of(config: EngineConfig, model: OpenModel, rank: int) -> Mesh:
    """Where a rank stands."""
    sums, num_stages = config.tensor_parallel_sums, config.pipeline_parallel_size
    return meshes(
        config.tensor_parallel_size,
        equal_cuts(model.spec.num_layers, num_stages) if num_stages > 1 else None,
        has_expert_parallelism=config.enable_expert_parallel,
        is_exact=sums == "exact" or (sums == "auto" and config.batch_invariant),
    )[rank]


def equal_cuts(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """As many layers a stage, or one more in the first ones."""
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} was asked",
            f"the model has {num_layers} layers, and each of the stages takes one at the least",
            f"ask for {num_layers} stages at the most",
        )
    ends = [0, *accumulate(num_layers // num_stages + (nth < num_layers % num_stages) for nth in range(num_stages))]
    return list(pairwise(ends))


def rank_config(config: EngineConfig, rank: int) -> EngineConfig:
    """The same on the device of a rank: of GPUs, one each."""
    device, _ = choose_device(config)
    if device == "cpu":
        return replace(config, device="cpu")
    first = int(device.partition(":")[2])
    count = torch.cuda.device_count()
    return replace(config, device=f"cuda:{(first + rank) % count}")


def check_devices(config: EngineConfig) -> None:
    """More ranks than devices are refused before anything is started."""
    device, _ = choose_device(config)
    if device == "cpu" or os.environ.get(OVERLAPPING) == "1":
        return
    first, count, asked = int(device.partition(":")[2]), torch.cuda.device_count(), config.num_ranks
    if first + asked > count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        masked = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise ConfigError(
            f"{asked} ranks from {device} on were asked",
            f"torch sees {count} CUDA devices here{masked}, and each rank takes one",
            f"ask for {max(count - first, 1)} at the most, or let this process see more",
        )


def report(config: EngineConfig, model: OpenModel, rank: int) -> dict[str, Any]:
    """What a rank has to tell before all are planned."""
    own = rank_config(config, rank)
    target = device_target(own.device)
    _, plan = plan_model(own, model, target, uses_cache=False, mesh=mesh_of(config, model, rank))
    return {
        "rank": rank,
        "holdfast": __version__,
        "torch": torch.__version__,
        "model": headers_digest(model),
        "dtype": plan.resolved.dtype,
        "num_pages": plan.memory.num_pages,
        "page_bytes": plan.memory.page_bytes,
        "max_model_len": plan.resolved.limits.max_model_len,
    }


def headers_digest(model: OpenModel) -> str:
    """Of everything that a model's headers say."""
    digest = blake2b(digest_size=16)
    digest.update(repr((model.spec, model.parameters, model.generation)).encode())
    return digest.hexdigest()


def agree(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks are to have: the least of all; a rank that is not like rank 0 is refused."""
    first = reports[0]
    for other in reports[1:]:
        for name in ("holdfast", "torch", "model", "dtype"):
            if other[name] != first[name]:
                raise ConfigError(
                    f"rank {other['rank']} was to run with the others",
                    f"its {name} is {other[name]}, and rank 0's is {first[name]}",
                    "give every rank the same files and the same installation",
                )
    return {name: min(one[name] for one in reports) for name in ("num_pages", "max_model_len")}


def settled(config: EngineConfig, agreed: dict[str, Any], own: dict[str, Any], rank: int) -> EngineConfig:
    """The settings of a rank, with what all have agreed on."""
    return replace(
        rank_config(config, rank),
        max_model_len=agreed["max_model_len"],
        kv_cache_memory=agreed["num_pages"] * own["page_bytes"],
    )


def compare(agreed: dict[str, Any], rank: int, plan: RunnerPlan) -> None:
    """A rank's own plan must be what was agreed on, before a weight is read."""
    found = {"num_pages": plan.memory.num_pages, "max_model_len": plan.resolved.limits.max_model_len}
    for name, number in found.items():
        if number != agreed[name]:
            raise ConfigError(
                f"rank {rank} was to have {name}={agreed[name]}, as all ranks",
                f"its own plan has {number}",
                "see who else uses its device, and start again",
            )


def open_exchange(plan: RunnerPlan, place: Place, ledger: Ledger) -> Exchange:
    """The way to the other ranks, once all are on their way there."""
    device = torch.device(plan.target.name)
    return open_collectives(plan.mesh, exchange_needs(plan), place, device, Ledger(), timeout_s=PEER_SECONDS)


def exchange_needs(plan: RunnerPlan) -> ExchangeNeeds:
    """What steps exchange at their largest."""
    spec, limits = plan.declared.declaration.rank(ALONE), plan.resolved.limits
    pairs = 1 if spec.experts is None else spec.experts.top_k
    widest = max(spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim)
    room = limits.max_num_batched_tokens * pairs * widest * 4
    return ExchangeNeeds(room, max(limits.sampled_rows, PROMPT_ROWS), spec.vocab_size, room)


def rank_memory(built: BuiltRunner, rank: int) -> RankMemory:
    """What a rank was planned to take, holds, and took as its device says."""
    plan, profile = built.plan, built.profile
    measured_bytes = None
    if plan.target.kind == "cuda" and profile.taken_bytes is not None:
        measured_bytes = profile.taken_bytes + plan.target.present_bytes
    planned_bytes = plan.memory.phase_bytes["serve"]
    return RankMemory(rank, plan.target.name, planned_bytes, built.ledger.total_bytes, measured_bytes)

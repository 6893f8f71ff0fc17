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
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

import torch

from holdfast.config import EngineConfig
from holdfast.distributed.collectives import open_collectives
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.linked import open_linked
from holdfast.distributed.rendezvous import LOOPBACK, Place, listen_for_ranks
from holdfast.engine.launched import Launched, find_launcher, meet_ranks, node_name, refuse_second, serve_launched
from holdfast.engine.rank_messages import (
    RankConnect,
    RankLoaded,
    RankPlanned,
    RankReady,
    RankReported,
    RankStart,
)
from holdfast.engine.rank_server import RankServer
from holdfast.engine.ranked_runner import CLOSE_SECONDS, RankedRunner
from holdfast.engine.ranks import (
    COMMAND,
    LOADING_SECONDS,
    OPENING_SECONDS,
    PEER_SECONDS,
    RankGroup,
    StepThread,
    check_world,
)
from holdfast.errors import ConfigError
from holdfast.loading.declared import declare_opened
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.ledger import Ledger
from holdfast.memory.report import RankMemory
from holdfast.observability.log import get_logger
from holdfast.observability.preparing import OnPrepare, Preparing, prepare_silently
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.ranks import (
    Agreement,
    RankReport,
    check_nodes,
    check_ranks,
    plan_ranks,
    rank_meshes,
    refuse_unshared,
    report_rank,
)
from holdfast.planning.target import choose_device, device_target
from holdfast.request.sequence import SequenceResult, StepResult
from holdfast.request.step import Step
from holdfast.runner.build import BuiltRunner, Connect, build_runner
from holdfast.runner.invariance import common_sizes
from holdfast.runner.runner import Runner

log = get_logger(__name__)
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
    launched = find_launcher(config)
    if launched is not None and launched.rank > 0:
        serve_launched(launched, build_rank)
    if launched is not None:
        refuse_second(launched)
    check_devices(config, launched)
    declared = declare_opened(model, model.name)
    refuse_unshared(config, declared)  # before a process is started
    check_ranks(config, declared)
    own = report(config, model, 0, launched)
    if launched is None:
        check_nodes(config, (own,) * config.num_ranks)
    meet = None if launched is None else partial(meet_ranks, launched)
    group = RankGroup(config, config.num_ranks, command, owns_parent=is_remote, meet=meet)
    thread = StepThread()
    host = LOOPBACK if launched is None else launched.host
    zero = RankZero(config, model, group, own, on_progress, on_prepare, host)
    building = thread.submit(zero.build)
    try:
        built, ranks = group.wait(building)
    except BaseException:
        group.end()  # whatever rank 0 is at ends with its next word to the others
        thread.submit(partial(_release_built, building))
        thread.close(CLOSE_SECONDS)
        raise
    runner = RankedRunner(built.runner, group, thread, is_eager=_is_eager(config, built.runner))
    return BuiltRanks(built, runner, ranks, partial(runner.close, built.release), group.raise_if_dead)


def _release_built(building: "Future[tuple[BuiltRunner, tuple[RankMemory, ...]]]") -> None:
    """Behind a build that nobody waits for any more: another rank was lost when this one was ready, or before."""
    if building.exception() is None:
        building.result()[0].release()


def _is_eager(config: EngineConfig, runner: Runner) -> bool:
    return config.pipeline_parallel_size == 1 and not runner.can_run_ahead


class RankZero:
    """The stations of rank 0."""

    def __init__(
        self,
        config: EngineConfig,
        model: OpenModel,
        group: RankGroup,
        own: RankReport,
        on_progress: Callable[[int, int], None],
        on_prepare: OnPrepare,
        host: str = LOOPBACK,
    ) -> None:
        """`host` is where others reach this rank."""
        self._config = config
        self._own = own
        self._host = host
        self._model = model
        self._group = group
        self._on_progress = on_progress
        self._on_prepare = on_prepare

    def build(self) -> tuple[BuiltRunner, tuple[RankMemory, ...]]:
        """From the reports of all ranks to all of them ready."""
        group, model = self._group, self._model
        others = (RankReport.of(message.report) for message in group.expect(RankReported, OPENING_SECONDS))
        reports = self._own, *others
        check_places(self._config, reports)
        agreement = plan_ranks(self._config, declare_opened(model, model.name), reports).agreement
        group.send_all(RankPlanned(agreement.as_dict()))
        telling = self._tell_progress, self._tell_preparing
        built = build_share(self._config, model, self._own, agreement, *telling, self._connect)
        try:
            ready = group.expect(RankReady, LOADING_SECONDS)
        except BaseException:
            built.release()
            raise
        group.serve()
        return built, tuple(message.memory for message in ready)

    def _connect(
        self, plan: RunnerPlan, ledger: Ledger, row_sizes: tuple[int, ...]
    ) -> tuple[Exchange, tuple[int, ...]]:
        """All have loaded: tell where to meet, and how many rows steps may have."""
        others = self._group.expect(RankLoaded, LOADING_SECONDS)
        row_sizes = common_sizes((row_sizes, *(message.row_sizes for message in others)))
        place = listen_for_ranks(self._host)
        host, port = place.getsockname()[:2]
        secret = secrets.token_hex(16)
        self._group.send_all(RankConnect(f"{host}:{port}", secret, row_sizes))
        exchange = open_exchange(plan, place, secret, ledger, self._group.raise_if_dead)
        self._group.on_death = exchange.abandon
        return exchange, row_sizes

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

    def look(self) -> dict[str, int]:
        """Counters of torch's allocator on a GPU; nothing on a CPU."""
        return {} if self._runner is None else allocator_counters(self._runner.device)

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
        launched = find_launcher(config)
        if launched is not None:
            check_devices(config, launched)
        own = report(config, model, rank, launched)
        server.send(RankReported(own.as_dict()))
        agreement = Agreement.of(server.expect(RankPlanned).agreement)

        def connect(plan: RunnerPlan, ledger: Ledger, row_sizes: tuple[int, ...]) -> tuple[Exchange, tuple[int, ...]]:
            server.send(RankLoaded(row_sizes))
            told = server.expect(RankConnect)
            host, _, port = told.address.rpartition(":")
            return open_exchange(plan, (host, int(port)), told.secret, ledger), told.row_sizes

        built = build_share(config, model, own, agreement, lambda done, total: None, prepare_silently, connect)
    finally:
        model.source.close()
    return FollowingRank(built, rank)


# What both sides do


def build_share(
    config: EngineConfig,
    model: OpenModel,
    own: RankReport,
    agreement: Agreement,
    on_progress: Callable[[int, int], None],
    on_prepare: OnPrepare,
    connect: Connect,
) -> BuiltRunner:
    """A rank's runner, once all have agreed."""
    rank = own.rank
    own_config = replace(config, device=own.target.name)
    return build_runner(
        *(own_config, model, on_progress, on_prepare),
        mesh=rank_meshes(config, agreement.cuts)[rank],
        target=agreement.target(rank, own.target),
        agreed=agreement.agreed,
        agree=partial(agreement.check, rank),
        connect=connect,
    )


def rank_device(config: EngineConfig, rank: int, launched: Launched | None) -> str:
    """The device of a rank: of GPUs, one each, counted in its node."""
    device, _ = choose_device(config)
    if device == "cpu":
        return device
    first, place = int(device.partition(":")[2]), rank if launched is None else launched.local_rank
    return f"cuda:{(first + place) % torch.cuda.device_count()}"


def check_devices(config: EngineConfig, launched: Launched | None = None) -> None:
    """More ranks of this node than devices are refused before anything is started."""
    device, _ = choose_device(config)
    if device == "cpu" or os.environ.get(OVERLAPPING) == "1":
        return
    first, count = int(device.partition(":")[2]), torch.cuda.device_count()
    asked = config.num_ranks if launched is None else launched.num_local
    if launched is not None and count == 1:
        return  # a launcher may show each process one of its own; what they report says whether it did
    if first + asked > count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        masked = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise ConfigError(
            f"{asked} ranks from {device} on were asked",
            f"torch sees {count} CUDA devices here{masked}, and each rank takes one",
            f"ask for {max(count - first, 1)} at the most, or let this process see more",
        )


def check_places(config: EngineConfig, reports: Sequence[RankReport]) -> None:
    """Two ranks on one GPU are refused; ranks of a stage on several nodes are told what that costs."""
    on_device: dict[str, int] = {}
    for report in reports:
        first = on_device.setdefault(report.device, report.rank)
        if first != report.rank and report.target.kind == "cuda" and os.environ.get(OVERLAPPING) != "1":
            raise ConfigError(
                f"ranks {first} and {report.rank} were to have a GPU each",
                f"both are on {report.device}",
                "have the launcher set LOCAL_RANK, or show every process a GPU of its own (CUDA_VISIBLE_DEVICES)",
            )
    size = config.tensor_parallel_size
    stages = [reports[start : start + size] for start in range(0, len(reports), size)]
    if any(len({report.node for report in stage}) > 1 for stage in stages):
        log.warning(
            "Ranks that share layers are on several nodes: two exchanges a layer go over the network. "
            "Fewer ranks to a stage (tensor_parallel_size) and more stages (pipeline_parallel_size) send less."
        )


def report(config: EngineConfig, model: OpenModel, rank: int, launched: Launched | None = None) -> RankReport:
    """What a rank has to tell before all are planned."""
    device = rank_device(config, rank, launched)
    # Ranks of two nodes may both have cuda:0, and those that are told of as two nodes may be on one.
    is_cpu = device == "cpu"
    place = f"cpu of {node_name({})}" if is_cpu else f"GPU {torch.cuda.get_device_properties(device).uuid}"
    target = device_target(device, model.spec.vocab_size)
    return report_rank(rank, target, headers_digest(model), place, node_name())


def headers_digest(model: OpenModel) -> str:
    """Of everything that a model's headers say."""
    digest = blake2b(digest_size=16)
    digest.update(repr((model.spec, model.parameters, model.generation)).encode())
    return digest.hexdigest()


def open_exchange(
    plan: RunnerPlan, place: Place, secret: str, ledger: Ledger, check: Callable[[], None] | None = None
) -> Exchange:
    """The way to the other ranks, once all are on their way there; `check` raises where one is gone meanwhile."""
    device = torch.device(plan.target.name)
    assert plan.exchange_needs is not None, f"{plan.mesh} exchanges nothing"
    opening = plan.mesh, plan.exchange_needs, place, device, ledger
    if plan.exchange_kind in ("gloo", "nccl"):
        return open_collectives(*opening, timeout_s=PEER_SECONDS, secret=secret, check=check)
    if plan.exchange_kind == "linked":
        return open_linked(*opening, timeout_s=PEER_SECONDS, secret=secret, check=check)
    from holdfast.distributed.symmetric import open_symmetric  # its kernels are for GPUs

    return open_symmetric(*opening, timeout_s=PEER_SECONDS, secret=secret, check=check)


def allocator_counters(device: torch.device) -> dict[str, int]:
    """What torch's allocator has done so far."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    names = ("allocation.all.allocated", "segment.all.allocated", "reserved_bytes.all.current")
    return {name: int(stats.get(name, 0)) for name in names}


def rank_memory(built: BuiltRunner, rank: int) -> RankMemory:
    """What a rank was planned to take, holds, and took as its device says."""
    plan, profile = built.plan, built.profile
    measured_bytes = None
    if plan.target.kind == "cuda" and profile.taken_bytes is not None:
        measured_bytes = profile.taken_bytes + plan.target.present_bytes
    planned_bytes = plan.memory.phase_bytes["serve"]
    return RankMemory(rank, plan.target.name, planned_bytes, built.ledger.total_bytes, measured_bytes)

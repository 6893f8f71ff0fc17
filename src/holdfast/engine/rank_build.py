"""Build all ranks: rank 0 here, every other one in its process, in step by a handshake.

    rank 0                                      every other rank
    RankStart            ->                     opens the model's headers
                         <-  RankReported       free memory, versions, a digest of the headers
    plans all ranks, or raises
    RankPlanned          ->                     plans for itself, and compares
    loads                                       loads
                         <-  RankLoaded         no collective before every rank is here
    RankConnect          ->                     connects to the others
    assembles, captures: the same collectives in the same order on all
                         <-  RankReady

Rank 0 does all of this in its step thread, so a waiting caller sees the death of another rank at once.
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
from holdfast.engine.launched import Launched, accept_ranks, find_launcher, node_name, refuse_second, serve_launched
from holdfast.engine.open_text import open_tokenizer
from holdfast.engine.rank_messages import RankConnect, RankLoaded, RankPlanned, RankReady, RankReported, RankStart
from holdfast.engine.rank_server import RankServer
from holdfast.engine.ranked_runner import CLOSE_SECONDS, RankedRunner
from holdfast.engine.ranks import (
    COMMAND,
    LOADING_SECONDS,
    OPENING_SECONDS,
    PEER_SECONDS,
    RankGroup,
    StepThread,
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
    report_rank,
)
from holdfast.planning.target import choose_device, device_target
from holdfast.request.sequence import SequenceResult, StepResult
from holdfast.request.step import Step
from holdfast.runner.build import BuiltRunner, Connect, build_runner
from holdfast.runner.invariance import common_sizes
from holdfast.runner.runner import Runner
from holdfast.text.key_text import key_text_ids

log = get_logger(__name__)
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Set to let several ranks share a GPU, for measurements only."""


@dataclass(frozen=True, slots=True)
class BuiltRanks:
    """All ranks, ready."""

    built: BuiltRunner
    runner: RankedRunner
    ranks: tuple[RankMemory, ...]
    release: Callable[[], None]
    watch: Callable[[], None]
    """Raises if a rank is gone."""


def build_ranks(
    config: EngineConfig,
    model: OpenModel,
    on_progress: Callable[[int, int], None],
    on_prepare: OnPrepare,
    *,
    is_remote: bool = False,
    command: tuple[str, ...] = COMMAND,
) -> BuiltRanks:
    """Start every rank and build rank 0 here, or release everything. `is_remote`: this is a core process."""
    launched = find_launcher(config)
    if launched is not None and launched.rank > 0:
        serve_launched(launched, build_rank)
    if launched is not None:
        refuse_second(launched)
    check_devices(config, launched)
    declared = declare_opened(model, model.name)
    check_ranks(config, declared)
    own = report(config, model, 0, launched)
    if launched is None:
        check_nodes(config, (own,) * config.num_ranks)
    rendezvous = None if launched is None else partial(accept_ranks, launched)
    group = RankGroup(config, config.num_ranks, command, owns_parent=is_remote, rendezvous=rendezvous)
    thread = StepThread()
    host = LOOPBACK if launched is None else launched.host
    zero = RankZero(config, model, group, own, on_progress, on_prepare, host)
    building = thread.submit(zero.build)
    try:
        built, ranks = group.wait(building)
    except BaseException:
        group.end()  # rank 0 stops at its next message to the others
        thread.submit(partial(_release_built, building))
        thread.close(CLOSE_SECONDS)
        raise
    runner = RankedRunner(
        built.runner, group, thread, is_eager=config.pipeline_parallel_size == 1 and not built.runner.can_run_ahead
    )
    return BuiltRanks(built, runner, ranks, partial(runner.close, built.release), group.raise_if_dead)


def _release_built(building: "Future[tuple[BuiltRunner, tuple[RankMemory, ...]]]") -> None:
    """Release a finished build after another rank was lost."""
    if building.exception() is None:
        building.result()[0].release()


@dataclass(frozen=True, slots=True)
class RankZero:
    """Rank 0's side of the handshake."""

    config: EngineConfig
    model: OpenModel
    group: RankGroup
    own: RankReport
    on_progress: Callable[[int, int], None]
    on_prepare: OnPrepare
    host: str = LOOPBACK
    """Address of this rank for others."""

    def build(self) -> tuple[BuiltRunner, tuple[RankMemory, ...]]:
        """Run the handshake from the reports of all ranks to their readiness."""
        group, model = self.group, self.model
        others = (RankReport.of(message.report) for message in group.expect(RankReported, OPENING_SECONDS))
        reports = self.own, *others
        check_places(self.config, reports)
        agreement = plan_ranks(self.config, declare_opened(model, model.name), reports).agreement
        group.send_all(RankPlanned(agreement.as_dict()))
        reporting = self._report_progress, self._report_preparing
        built = build_share(self.config, model, self.own, agreement, *reporting, self._connect)
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
        """Send the rendezvous address and the allowed row counts, after all ranks have loaded."""
        others = self.group.expect(RankLoaded, LOADING_SECONDS)
        row_sizes = common_sizes((row_sizes, *(message.row_sizes for message in others)))
        place = listen_for_ranks(self.host)
        host, port = place.getsockname()[:2]
        secret = secrets.token_hex(16)
        self.group.send_all(RankConnect(f"{host}:{port}", secret, row_sizes))
        exchange = open_exchange(plan, place, secret, ledger, self.group.raise_if_dead)
        self.group.on_death = exchange.abandon
        return exchange, row_sizes

    def _report_progress(self, num_done: int, num_total: int) -> None:
        self.group.raise_if_dead()
        self.on_progress(num_done, num_total)

    def _report_preparing(self, preparing: Preparing) -> None:
        self.group.raise_if_dead()
        self.on_prepare(preparing)


class FollowingRank:
    """Another rank's share: runs steps after the handshake."""

    def __init__(self, built: BuiltRunner, rank: int) -> None:
        self._built: BuiltRunner | None = built
        self._runner: Runner | None = built.runner
        plan, profile = built.plan, built.profile
        measured_bytes = None
        if plan.target.kind == "cuda" and profile.taken_bytes is not None:
            measured_bytes = profile.taken_bytes + plan.target.present_bytes
        planned_bytes = plan.memory.phase_bytes["serve"]
        self.memory = RankMemory(rank, plan.target.name, planned_bytes, built.ledger.total_bytes, measured_bytes)

    def book(self, tokens: tuple[tuple[int, ...], ...]) -> None:
        """Apply the tokens that rank 0 sampled in the oldest step."""
        assert self._runner is not None, "this rank is closed"
        self._runner.take_result(StepResult(tuple(SequenceResult(own) for own in tokens)))

    def run(self, step: Step) -> None:
        """Run a step together with all other ranks."""
        assert self._runner is not None, "this rank is closed"
        self._runner.run(step)

    def look(self) -> dict[str, int]:
        """Return counters of torch's allocator; none on a CPU."""
        return {} if self._runner is None else allocator_counters(self._runner.device)

    def close(self) -> None:
        """Release everything."""
        built, self._built, self._runner = self._built, None, None
        if built is not None:
            built.release()


def build_rank(start: RankStart, server: RankServer) -> FollowingRank:
    """Build this process's share of the model, in step with rank 0."""
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
            place = server.expect(RankConnect)
            host, _, port = place.address.rpartition(":")
            return open_exchange(plan, (host, int(port)), place.secret, ledger), place.row_sizes

        built = build_share(config, model, own, agreement, lambda done, total: None, prepare_silently, connect)
    finally:
        model.source.close()
    return FollowingRank(built, rank)


# Shared by both sides


def build_share(
    config: EngineConfig,
    model: OpenModel,
    own: RankReport,
    agreement: Agreement,
    on_progress: Callable[[int, int], None],
    on_prepare: OnPrepare,
    connect: Connect,
) -> BuiltRunner:
    """Build a rank's runner after the agreement."""
    rank = own.rank
    own_config, text_ids = replace(config, device=own.target.name), ()
    if config.may_scale_keys:
        text_ids = key_text_ids(open_tokenizer(config, model), model.spec.vocab_size)
    return build_runner(
        *(own_config, model, on_progress, on_prepare),
        mesh=rank_meshes(config, agreement.cuts)[rank],
        target=agreement.target(rank, own.target),
        agreed=agreement.agreed,
        agree=partial(agreement.check, rank),
        connect=connect,
        text_ids=text_ids,
    )


def rank_device(config: EngineConfig, rank: int, launched: Launched | None) -> str:
    """Return the device of a rank: one GPU each, counted in its node."""
    device, _ = choose_device(config)
    if device == "cpu":
        return device
    first, place = int(device.partition(":")[2]), rank if launched is None else launched.local_rank
    return f"cuda:{(first + place) % torch.cuda.device_count()}"


def check_devices(config: EngineConfig, launched: Launched | None = None) -> None:
    """Raise ConfigError for more ranks on this node than devices."""
    device, _ = choose_device(config)
    if device == "cpu" or os.environ.get(OVERLAPPING) == "1":
        return
    first, count = int(device.partition(":")[2]), torch.cuda.device_count()
    num_local = config.num_ranks if launched is None else launched.num_local
    if launched is not None and count == 1:
        return  # a launcher may give each process its own GPU; check_places compares them
    if first + num_local > count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        masked = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise ConfigError(
            "rank.too_many_for_devices",
            count=num_local,
            device=device,
            visible=count,
            masked=masked,
            maximum=max(count - first, 1),
        )


def check_places(config: EngineConfig, reports: Sequence[RankReport]) -> None:
    """Raise ConfigError for two ranks on one GPU; warn about a stage on several nodes."""
    on_device: dict[str, int] = {}
    for report in reports:
        first = on_device.setdefault(report.device, report.rank)
        if first != report.rank and report.target.kind == "cuda" and os.environ.get(OVERLAPPING) != "1":
            raise ConfigError("rank.same_device", first=first, second=report.rank, device=report.device)
    size = config.tensor_parallel_size
    stages = [reports[start : start + size] for start in range(0, len(reports), size)]
    if any(len({report.node for report in stage}) > 1 for stage in stages):
        log.warning(
            "Ranks that share layers are on several nodes: two all-reduces a layer go over the network. "
            "Fewer ranks a stage (tensor_parallel_size) and more stages (pipeline_parallel_size) send less."
        )


def report(config: EngineConfig, model: OpenModel, rank: int, launched: Launched | None = None) -> RankReport:
    """Report what a rank has, for the plan of all ranks."""
    device = rank_device(config, rank, launched)
    # Ranks of two nodes may both have cuda:0, and a launcher may call one machine two nodes.
    is_cpu = device == "cpu"
    place = f"cpu of {node_name({})}" if is_cpu else f"GPU {torch.cuda.get_device_properties(device).uuid}"
    target = device_target(device, model.spec.vocab_size)
    return report_rank(rank, target, headers_digest(model), place, node_name())


def headers_digest(model: OpenModel) -> str:
    """Digest of a model's headers."""
    digest = blake2b(digest_size=16)
    digest.update(repr((model.spec, model.parameters, model.generation)).encode())
    return digest.hexdigest()


def open_exchange(
    plan: RunnerPlan, place: Place, secret: str, ledger: Ledger, check: Callable[[], None] | None = None
) -> Exchange:
    """Connect to the other ranks; `check` raises if one is gone meanwhile."""
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
    """Counters of torch's allocator."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    names = ("allocation.all.allocated", "segment.all.allocated", "reserved_bytes.all.current")
    return {name: int(stats.get(name, 0)) for name in names}

"""Build a runner: settle, plan, load, allocate, lock, warm; the plan is made before the first weight is read."""

import gc
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.cache.storage import PageStorage
from holdfast.config import EngineConfig
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.kernels.native_library import compile_native, native_library
from holdfast.loading.declared import declare_opened
from holdfast.loading.execution.execute import LoadReport
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.arena import is_out_of_memory
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import Term
from holdfast.memory.profiler import PhaseProfile
from holdfast.memory.sizes import format_bytes
from holdfast.observability.log import get_logger
from holdfast.observability.preparing import OnPrepare, Preparing, prepare_silently
from holdfast.planning.plan import PlanRequest, RunnerPlan, plan_runner
from holdfast.planning.resolve import Agreed, Resolved
from holdfast.planning.target import SMALL_WORKSPACE, Target, choose_device, device_target
from holdfast.runner.assembly import Assembly, MakeBackend
from holdfast.runner.invariance import compared_sizes, multiply_like_whole, refuse_unequal_shares
from holdfast.runner.runner import Runner
from holdfast.runner.warm_up import WarmUp, warm_up
from holdfast.runner.weight_load import WeightLoad, plan_weights, rank_spec

log = get_logger(__name__)

COMPILING_CPU = "Compiling CPU kernels"
PLANNING, ALLOCATING = "Planning memory", "Taking KV pages and workspace"
COMPARING = "Comparing products to the bit"
Connect = Callable[[RunnerPlan, Ledger, tuple[int, ...]], tuple[Exchange, tuple[int, ...]]]
"""Connects a rank after its weights are loaded: returns the exchange and the step sizes common to all ranks."""


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A ready runner with its plan, ledger and load report."""

    runner: Runner
    storage: PageStorage
    """The pages that the runner's steps write and read."""
    plan: RunnerPlan
    ledger: Ledger
    profile: PhaseProfile
    load_seconds: float
    load_report: LoadReport
    release: Callable[[], None]
    """Gives everything back; the runner cannot be used afterwards."""


def build_runner(
    config: EngineConfig,
    model: OpenModel,
    on_progress: Callable[[int, int], None],
    on_prepare: OnPrepare = prepare_silently,
    *,
    mesh: Mesh = ALONE,
    target: Target | None = None,
    agreed: Agreed | None = None,
    agree: Callable[[RunnerPlan], None] | None = None,
    connect: Connect | None = None,
    text_ids: Sequence[int] = (),
) -> BuiltRunner:
    """Build a runner, or one rank's runner, from a model's headers.

    `on_progress(done, total)` counts bytes read; `on_prepare` gets compiled kernels and captured graphs. Each of
    several ranks plans with the values in `agreed`. It calls `agree` with its plan before a weight is read, which
    raises if plans differ, and `connect` after its weights are loaded. `target` is the device that the rank reported.
    Key scales are measured on `text_ids`.
    """
    assert mesh.is_alone or connect is not None, f"{mesh} has no exchange"
    device, device_reason = choose_device(config)
    if device == "cpu":
        # Choosing an attention backend would compile them too, but silently.
        compile_native(_telling(on_prepare))
    if config.batch_invariant and device != "cpu":
        os.environ.update(SMALL_WORKSPACE)  # read by torch when it makes its first handle
    target = target or device_target(device, model.spec.vocab_size)
    profile = PhaseProfile(torch.device(device))
    on_prepare(Preparing(PLANNING, 0, 0))
    load, plan = plan_model(config, model, target, uses_cache=True, mesh=mesh, agreed=agreed)
    if agree is not None:
        agree(plan)
    _log_choices(plan, config)
    log.info("device=%s because %s", device, device_reason)
    if config.is_quantized and load.plan.num_quantized == 0:
        log.warning("quantization=%s changes nothing: every weight is left as it is", config.quantization)
    ledger = Ledger()
    build = RunnerBuild(config, model, plan, ledger, torch.device(device), text_ids)
    try:
        start = time.monotonic()
        report = build.load(load, on_progress, on_prepare)
        load_seconds = time.monotonic() - start
        log.info("Model loading took %s memory and %.2f seconds", format_bytes(ledger.total_bytes), load_seconds)
        log.info("Weights: %s", load_words(report))
        profile.end("load")
        if connect is not None:
            build.connect(*connect(plan, ledger, build.row_sizes))
        on_prepare(Preparing(ALLOCATING, 0, 0))
        runner = build.assemble()
        build.capture(runner, plan.resolved.enforce_eager, on_prepare)
        profile.end("capture")
    except BaseException as error:
        # The frames of the error still name tensors, and the caller may keep the error.
        traceback.clear_frames(error.__traceback__)
        build.release()
        refuse_out_of_memory(error, plan)
        raise
    _log_pages(build.plan)
    return BuiltRunner(runner, build.storage, build.plan, ledger, profile, load_seconds, report, build.release)


def _log_choices(plan: RunnerPlan, config: EngineConfig) -> None:
    """Log the choices of the plan and their reasons."""
    for choice in plan.resolved.choices:
        log.info("%s=%s because %s", choice.name, choice.value, choice.reason)
    if plan.context_note:
        log.warning("%s", plan.context_note)
    if plan.state_rule is not None and plan.state_rule.num_snapshots == 0 and config.enable_prefix_caching:
        log.warning("state_snapshots=0: no prompt of %s starts after a cached prefix", plan.declared.name)
    assert plan.declaration is not None, f"{plan.declared.name} has no attention to run"
    log.info("attention=%s because it is the first that takes every layer", plan.declaration.name)


def _log_pages(plan: RunnerPlan) -> None:
    if plan.kv_note():
        log.info("%s", plan.kv_note())
    num_tokens, max_len = plan.kv_tokens, plan.resolved.limits.max_model_len
    log.info("Available KV cache memory: %s", format_bytes(plan.memory.kv_bytes))
    log.info(
        "%s KV cache size: %d tokens, Maximum concurrency for %d tokens per request: %.2fx",
        "CPU" if plan.target.kind == "cpu" else "GPU",
        num_tokens,
        max_len,
        num_tokens / max_len,
    )


def plan_model(
    config: EngineConfig,
    model: OpenModel,
    target: Target,
    uses_cache: bool = False,
    mesh: Mesh = ALONE,
    agreed: Agreed | None = None,
) -> tuple[WeightLoad, RunnerPlan]:
    """Plan the load and the memory of a runner, or of one rank, from headers alone; raise if it cannot run.

    `uses_cache` looks for weights that an earlier start quantized; `agreed` holds the values common to all ranks.
    """
    loads: list[WeightLoad] = []

    def staging(resolved: Resolved) -> Term | None:
        """Plan the resolved weights, and return the memory term of their loading."""
        loads.append(plan_weights(config, model, resolved.dtype, resolved.recipe, uses_cache, mesh))
        return loads[-1].staging(target.kind)

    declared = declare_opened(model, model.name)
    plan = plan_runner(PlanRequest(config, declared, target, mesh, staging=staging, agreed=agreed))
    _refuse_ranks(plan)
    (load,) = loads
    return load, plan


def load_words(report: LoadReport) -> str:
    """Return a load's memory and speed as one line."""
    peak_bytes = report.final_bytes + report.staging_bytes
    words = f"final {format_bytes(report.final_bytes)}, peak {format_bytes(peak_bytes)} as planned"
    if report.peak_allocated_bytes is not None:
        words += f", {format_bytes(report.peak_allocated_bytes)} as the allocator counts"
    return f"{words}; {report.summary}"


class RunnerBuild(Assembly):
    """An Assembly that frees everything taken so far, wherever a start stops."""

    def __init__(
        self,
        config: EngineConfig,
        model: OpenModel,
        plan: RunnerPlan,
        ledger: Ledger,
        device: torch.device,
        text_ids: Sequence[int] = (),
    ) -> None:
        spec = model.spec if plan.mesh.is_alone else rank_spec(plan.declared, plan.mesh)
        super().__init__(
            plan, model.spec, spec, {}, ledger, device, batch_invariant=config.batch_invariant, text_ids=text_ids
        )
        self._model = model

    def load(
        self, load: WeightLoad, on_progress: Callable[[int, int], None], on_prepare: OnPrepare = prepare_silently
    ) -> LoadReport:
        """Bring the weights to the device; the source is closed afterwards."""
        # Before the first weight: its temporary memory is less than weights, workspace and pages will take.
        plain = {weight.name for weight in load.plan.weights if weight.scheme is None}
        self._compare_products({weight.name: weight.shape for weight in load.plan.weights}, plain, on_prepare)
        loaded = load.run(str(self.device), self.ledger, on_progress)
        self.weights = loaded.weights
        if self.plan.mesh.is_exact:
            multiply_like_whole(loaded.weights, self._whole_shapes)
        self.releases.append(loaded.weights.clear)
        return loaded.report

    def _compare_products(
        self, shares: Mapping[str, tuple[int, ...]], plain: Collection[str], on_prepare: OnPrepare
    ) -> None:
        """On a GPU, find row counts that multiply alike if batch invariant; refuse exact ranks whose shares do not."""
        if self.device.type != "cuda":
            return

        def report(num_done: int, num_products: int) -> None:
            on_prepare(Preparing(COMPARING, num_done, num_products))

        if self.batch_invariant:
            self.row_sizes = compared_sizes(self.plan, shares, self._whole_shapes, self.device, report)
        elif self.plan.mesh.is_exact:
            own = {name: shape for name, shape in shares.items() if name in plain}
            refuse_unequal_shares(self.plan, own, self._whole_shapes, self.device, report)

    @property
    def _whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole model's weights, of which a rank may have shares."""
        return {parameter.name: parameter.shape for parameter in self._model.parameters}

    def connect(self, exchange: Exchange, row_sizes: tuple[int, ...] | None = None) -> None:
        """Use this exchange, and close it on release; `row_sizes`, if given, are the step sizes common to all ranks."""
        self.exchange = exchange
        self.row_sizes = self.row_sizes if row_sizes is None else row_sizes
        self.releases.append(exchange.close)

    def share(self, loaded: "RunnerBuild") -> None:
        """Use the weights of another build, which owns and frees them."""
        self.weights = loaded.weights
        self.is_sharing = True
        plain = {name for name, weight in self.weights.items() if isinstance(weight, torch.Tensor)}
        shares = {name: tuple(weight.shape) for name, weight in self.weights.items()}
        self._compare_products(shares, plain, prepare_silently)

    def assemble(self, make_backend: MakeBackend | None = None) -> Runner:
        """Build pages, workspace, attention, model and runner; `make_backend` replaces the attention's own."""
        return self.runner(frozenset(self._model.generation.eos_token_ids), make_backend)

    def capture(self, runner: Runner, enforce_eager: bool, on_prepare: OnPrepare = prepare_silently) -> None:
        """Warm up: run every kernel specialization once, then capture graphs unless `enforce_eager`. A CPU has none."""
        if self.device.type == "cuda":
            warm_up(runner, WarmUp(self.plan, self.spec, self.row_sizes, self.device), enforce_eager, on_prepare)

    def release(self) -> None:
        for give_back in reversed(self.releases):
            give_back()
        self.releases.clear()
        for entry in tuple(self.ledger):
            self.ledger.release(entry.owner)
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a device that has failed cannot even do this
                torch.cuda.empty_cache()


def _telling(on_prepare: OnPrepare) -> Callable[[Path, int, int], None]:
    """Report each C file that is compiled."""
    return lambda file, done, total: on_prepare(Preparing(COMPILING_CPU, done, total, f"kept in {file.parent}"))


def _refuse_ranks(plan: RunnerPlan) -> None:
    """Refuse exact ranks on a CPU without C kernels."""
    mesh = plan.mesh
    if mesh.is_exact and plan.target.kind == "cpu" and native_library() is None:
        raise ConfigError("runner.no_c_kernels")


def refuse_out_of_memory(error: BaseException, plan: RunnerPlan) -> None:
    """Raise with the plan if another process took the memory that was free when it was made."""
    if isinstance(error, MemoryPlanError):
        error.table = error.table or plan.memory.table("load")  # loading has said it in its own words
    if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
        return
    terms = ", ".join(
        f"{term.owner} {format_bytes(term.num_bytes)}" for term in plan.memory.terms if term.num_bytes >= 2**20
    )
    memory = plan.memory
    raise MemoryPlanError(
        "runner.out_of_memory",
        device=plan.target.name,
        planned=format_bytes(memory.peak_bytes),
        terms=terms,
        pages=format_bytes(memory.kv_bytes),
        free=format_bytes(plan.target.available_bytes),
        table=memory.table("serve"),
    ) from error

"""Build a runner: settle, plan, load, allocate, lock, warm; the plan is made before the first weight is read."""

import gc
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.attention.backend import AttentionFamily, GroupedAttention
from holdfast.attention.declarations import AttentionSpec, StepBounds
from holdfast.attention.select import build_backend, build_compressed_backend, build_latent_backend
from holdfast.cache.chunks import chunk_shapes
from holdfast.cache.storage import PageStorage, StateStorage
from holdfast.config import EngineConfig, Limits
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.exchange_plan import can_be_captured
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.kernels.latent.latent_geometry import compressed_splits
from holdfast.kernels.native_library import compile_native, native_library
from holdfast.kernels.triton_compat import compiled_folder, counting_compiles
from holdfast.loading.declared import declare_opened
from holdfast.loading.execution.execute import LoadReport
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.arena import is_out_of_memory
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import Term
from holdfast.memory.profiler import PhaseProfile
from holdfast.memory.sizes import format_bytes
from holdfast.memory.workspace import Workspace
from holdfast.models.activations import takes_fused_decode
from holdfast.models.compressed_decoder import CompressedDecoder
from holdfast.models.decoder import Decoder
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.latent_decoder import LatentDecoder
from holdfast.models.model import Model
from holdfast.models.rope import StepRope, key_turns, make_step_rope
from holdfast.models.spec import ModelSpec
from holdfast.observability.log import get_logger
from holdfast.observability.preparing import OnPrepare, Preparing, prepare_silently
from holdfast.planning.exactness import row_sizes
from holdfast.planning.plan import PlanRequest, RunnerPlan, plan_runner
from holdfast.planning.resolve import Agreed, Resolved, by_key_bias, listed
from holdfast.planning.target import SMALL_WORKSPACE, Target, choose_device, device_target
from holdfast.planning.terms import PROCESS_OWNER, PROMPT_ROWS, TOKENIZER_OWNER, graph_sizes, mixed_sizes
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.runner.graphs import StepGraphs, warm_rows
from holdfast.runner.invariance import invariant_sizes, padded_rows, products
from holdfast.runner.key_bias import SplitBiases, key_bias_norms, split_biases
from holdfast.runner.key_means import KeyRooms, centre_keys, make_means
from holdfast.runner.latent_rotation import fold_rotation
from holdfast.runner.pooled_rows import PooledRows
from holdfast.runner.runner import Runner
from holdfast.runner.sampling.sampler import Sampler
from holdfast.runner.sampling.shared_sampler import SharedSampler
from holdfast.runner.sinks import copy_sinks
from holdfast.runner.step_inputs import BatchBuffers
from holdfast.runner.weight_load import WeightLoad, plan_weights

log = get_logger(__name__)

HELD_OUTSIDE = ("cuda context", "libraries", "allocator", "cuda graphs", PROCESS_OWNER, TOKENIZER_OWNER)
"""Owners without a tensor of ours: they are taken to hold what the plan says, and the device's word on all is beside it."""
COMPILING_CPU, COMPILING_GPU = "Compiling CPU kernels", "Compiling GPU kernels"
CAPTURING = "Capturing CUDA graphs"
PLANNING, ALLOCATING, WARMING = "Planning memory", "Taking KV pages and workspace", "Warming kernels"
COMPARING = "Comparing products to the bit"
Connect = Callable[[RunnerPlan, Ledger, tuple[int, ...]], tuple[Exchange, tuple[int, ...]]]
"""Gives a rank whose weights are loaded the way to the others, and sizes of steps that all of them have left of their own."""
MakeBackend = Callable[..., GroupedAttention[Any]]
"""What takes the place of build_backend, and its arguments."""


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner that is ready, and the account of how it came to be."""

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
) -> BuiltRunner:
    """Everything from a model's headers to a runner, or to that of one rank.

    `on_progress(done, total)` counts bytes read; `on_prepare` is told of kernels that are compiled and graphs captured.
    Of several ranks each plans for what they have `agreed` on, calls `agree` with its plan before a weight is read, which
    raises where they differ, and `connect` when its weights are there, for the exchange with the others. `target` is what a rank
    has told of its device, and may count on.
    """
    assert mesh.is_alone or connect is not None, f"{mesh} has nobody to exchange with"
    device, device_reason = choose_device(config)
    if device == "cpu":
        # The choice of an attention backend would compile them too, without a word.
        compile_native(_telling(on_prepare))
    if config.batch_invariant and device != "cpu":
        os.environ.update(SMALL_WORKSPACE)  # read by torch when it makes its first handle
    target = target or device_target(device, model.spec.vocab_size)
    profile = PhaseProfile(torch.device(device))
    on_prepare(Preparing(PLANNING, 0, 0))
    load, plan = plan_model(config, model, target, uses_cache=True, mesh=mesh, agreed=agreed)
    if agree is not None:
        agree(plan)
    _log_choices(plan)
    log.info("device=%s because %s", device, device_reason)
    if config.is_quantized and load.plan.num_quantized == 0:
        log.warning("quantization=%s changes nothing: every weight is left as it is", config.quantization)
    ledger = Ledger()
    build = RunnerBuild(config, model, plan, ledger, torch.device(device))
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
        build.capture(runner, config.enforce_eager, on_prepare)
        profile.end("capture")
    except BaseException as error:
        # Frames that the error has left behind still name tensors, and somebody may keep the error.
        traceback.clear_frames(error.__traceback__)
        build.release()
        refuse_out_of_memory(error, plan)
        raise
    _log_pages(build.plan)
    return BuiltRunner(runner, build.storage, build.plan, ledger, profile, load_seconds, report, build.release)


def _copy_cache(
    storage: PageStorage, states: StateStorage | None, pairs: Sequence[tuple[int, int]], source: int, target: int
) -> None:
    """Copy pages, and the states of a slot, for a sequence that forks."""
    storage.copy_pages(pairs)
    if states is not None:
        states.copy_place(source, target)


def _log_choices(plan: RunnerPlan) -> None:
    """What was settled before a weight is read, and why."""
    for choice in plan.resolved.choices:
        log.info("%s=%s because %s", choice.name, choice.value, choice.reason)
    if plan.context_note:
        log.warning("%s", plan.context_note)
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
    """How the weights will arrive and what the runner, or that of one rank, will hold, from headers alone; what cannot run raises.

    With `uses_cache`, weights that an earlier start has quantized are looked for; `agreed` is what all ranks have in common.
    """
    loads: list[WeightLoad] = []

    def staging(resolved: Resolved) -> Term | None:
        """Of the weights as they are settled, which are looked for on the way."""
        loads.append(plan_weights(config, model, resolved.dtype, resolved.recipe, uses_cache, mesh))
        return loads[-1].staging(target.kind)

    declared = declare_opened(model, model.name)
    plan = plan_runner(PlanRequest(config, declared, target, mesh, staging=staging, agreed=agreed))
    _refuse_ranks(plan)
    (load,) = loads
    return load, plan


def load_words(report: LoadReport) -> str:
    """What a load held and how fast it was, on one line."""
    peak_bytes = report.final_bytes + report.staging_bytes
    words = f"final {format_bytes(report.final_bytes)}, peak {format_bytes(peak_bytes)} as planned"
    if report.peak_allocated_bytes is not None:
        words += f", {format_bytes(report.peak_allocated_bytes)} as the allocator counts"
    return f"{words}; {report.summary}"


class RunnerBuild:
    """What has been taken so far, so that all of it can be given back wherever a start stops."""

    def __init__(
        self, config: EngineConfig, model: OpenModel, plan: RunnerPlan, ledger: Ledger, device: torch.device
    ) -> None:
        self._config = config
        self._model = model
        self._plan = plan
        self._ledger = ledger
        self._device = device
        self._weights: dict[str, torch.Tensor | QuantizedWeight] = {}
        self._spec = model.spec if plan.mesh.is_alone else rank_spec(plan)
        """What this rank computes."""
        self._exchange: Exchange | None = None
        self.row_sizes: tuple[int, ...] = ()
        """Rows that a step is padded to, where products are to round alike; none where any number will do."""
        self._is_sharing = False
        self._storage: PageStorage | None = None
        self._states: StateStorage | None = None
        self._releases: list[Callable[[], None]] = []

    def load(
        self, load: WeightLoad, on_progress: Callable[[int, int], None], on_prepare: OnPrepare = prepare_silently
    ) -> LoadReport:
        """Bring the weights to the device; the source is closed afterwards."""
        # Before the first weight: what it takes for a moment is less than weights, workspace and pages will.
        self._compare_products({weight.name: weight.shape for weight in load.plan.weights}, on_prepare)
        loaded = load.run(str(self._device), self._ledger, on_progress)
        self._weights = loaded.weights
        self._releases.append(self._weights.clear)
        return loaded.report

    def _compare_products(self, shares: Mapping[str, tuple[int, ...]], on_prepare: OnPrepare) -> None:
        """Which numbers of rows this device multiplies alike by weights of these shapes, where a batch is to change nothing."""
        if not self._config.batch_invariant or self._device.type != "cuda":
            return
        plan, limits = self._plan, self._plan.resolved.limits
        most_rows, most_logits = limits.max_num_batched_tokens, max(limits.sampled_rows, PROMPT_ROWS)
        whole = {parameter.name: parameter.shape for parameter in self._model.parameters}
        self.row_sizes = invariant_sizes(
            products(shares, whole, is_exact=plan.mesh.is_exact),
            row_sizes(most_rows, most_logits),
            min(most_rows, most_logits),
            plan.resolved.dtype,
            self._device,
            lambda *counts: on_prepare(Preparing(COMPARING, *counts)),
        )
        torch.cuda.empty_cache()

    def connect(self, exchange: Exchange, row_sizes: tuple[int, ...] | None = None) -> None:
        """Take the way to the other ranks, and close it in the end; and the sizes of steps that all have left, if they are others."""
        self._exchange = exchange
        self.row_sizes = self.row_sizes if row_sizes is None else row_sizes
        self._releases.append(exchange.close)

    def share(self, loaded: "RunnerBuild") -> None:
        """Take the weights that another build has loaded, and will give back."""
        self._weights = loaded._weights
        self._is_sharing = True
        self._compare_products({name: tuple(weight.shape) for name, weight in self._weights.items()}, prepare_silently)

    @property
    def plan(self) -> RunnerPlan:
        """What is held; which layers are protected is settled by the weights when the runner is assembled."""
        return self._plan

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def storage(self) -> PageStorage:
        """The pages, once the runner is assembled."""
        assert self._storage is not None, "the runner is not assembled yet"
        return self._storage

    def _settle_layers(self) -> None:
        """Protect the layers whose weights ask for it: as many as were planned, so that no byte changes."""
        protected = self._plan.resolved.protected
        if not protected.is_open:
            return
        norms = key_bias_norms(self._weights, self._spec, self._exchange, self._model.spec.num_kv_heads)
        layers, reason = by_key_bias(len(protected.layers), norms)
        self._plan = self._plan.with_protected(layers, reason)
        log.info("kv_protected_layers=%s because %s", listed(layers), reason)

    def assemble(self, make_backend: MakeBackend | None = None) -> Runner:
        """Pages, workspace, attention, model and everything around them; `make_backend` is for who measures another one."""
        self._settle_layers()
        plan, spec, device, ledger = self._plan, self._spec, self._device, self._ledger
        vocab_size = self._model.spec.vocab_size
        limits, cache = plan.resolved.limits, plan.cache
        assert cache is not None, f"{plan.declared.name} cannot run"
        storage = self._storage = PageStorage(cache, plan.memory.num_pages, device, ledger)
        self._releases.append(storage.release)
        workspace = Workspace(plan.workspace, device, ledger)
        self._releases.append(workspace.release)
        rope = self._step_rope()
        by_head = plan.attention_specs if spec.latent is None and spec.compressed is None else ()
        biases, means = self._split_biases(by_head), make_means(by_head, device)
        if spec.compressed is not None:
            model, backend = self._compressed(storage, workspace, rope)
        elif spec.latent is not None:
            model, backend = self._latent(storage, workspace, rope)
        else:
            make = make_backend or build_backend
            model, backend = self._grouped(storage, workspace, rope, biases, means, make)
        for owner, num_bytes in backend.held_bytes().items():
            ledger.record(owner, num_bytes, f"{backend.name}'s own")
        for term in plan.memory.terms:
            if term.owner in HELD_OUTSIDE:
                ledger.record(term.owner, term.num_bytes, term.reason)
        shapes = chunk_shapes(cache, storage.num_pages)
        runner = Runner(
            model,
            backend,
            BatchBuffers(
                limits, device, ledger, is_shared=device.type == "cpu", shapes=shapes, has_states=cache.has_states
            ),
            self._sampler(),
            limits,
            cache.cache_groups(),
            plan.memory.num_pages,
            vocab_size,
            frozenset(self._model.generation.eos_token_ids),
            device,
            self.row_sizes,
            partial(_copy_cache, storage, self._states),
            PooledRows(spec.hidden_size, plan.resolved.dtype, device, ledger),
        )
        self._releases.append(runner.close)
        self._centre_keys(runner, biases, means)
        return runner

    def _sampler(self) -> Sampler | SharedSampler:
        """From whole logits, or on ranks from a share of them."""
        limits, mesh, vocab_size = self._plan.resolved.limits, self._plan.mesh, self._model.spec.vocab_size
        sampler = Sampler(vocab_size, self._device, limits.sampled_rows, self._ledger)
        if self._exchange is None:
            return sampler
        needs = self._plan.exchange_needs
        assert needs is not None, f"{mesh} exchanges nothing"
        return SharedSampler(sampler, self._exchange, mesh, needs, self._device, self._ledger)

    @property
    def _bounds(self) -> StepBounds:
        limits = self._plan.resolved.limits
        return StepBounds(limits.max_num_seqs, limits.max_num_batched_tokens, limits.page_tokens)

    @property
    def _num_sms(self) -> int:
        device = self._device
        return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    def _grouped(
        self,
        storage: PageStorage,
        workspace: Workspace,
        rope: StepRope,
        biases: SplitBiases,
        means: Sequence[torch.Tensor | None],
        make_backend: MakeBackend,
    ) -> tuple[Model, AttentionFamily[Any]]:
        """A decoder with keys and values by head."""
        plan, spec, invariant = self._plan, self._spec, self._config.batch_invariant
        declaration, specs, bounds = plan.declaration, plan.attention_specs, self._bounds
        assert declaration is not None, f"{plan.declared.name} cannot run"
        tables = self._layer_tables(biases, means)
        backend = make_backend(declaration, specs, storage, bounds, self._num_sms, invariant, **tables)
        dtype, recipe = plan.resolved.dtype, plan.resolved.recipe
        scratch, weights = declaration.scratch(specs, bounds), self._weights | biases.qkv
        is_fused = self._is_fused
        ranks = self._exchange, plan.mesh.is_exact
        return Decoder(spec, weights, backend, rope, workspace, scratch, is_fused, dtype, recipe, *ranks), backend

    @property
    def _is_fused(self) -> bool:
        """Whether small batches take the fused decode path, as far as is known before weights are looked at."""
        resolved = self._plan.resolved
        takes = takes_fused_decode(self._spec, resolved.dtype, self._device.type, resolved.recipe)
        return takes and not self._config.batch_invariant

    def _latent(self, storage: PageStorage, workspace: Workspace, rope: StepRope) -> tuple[Model, AttentionFamily[Any]]:
        """A decoder that keeps latents (MLA)."""
        plan, spec = self._plan, self._spec
        declaration, specs, bounds = plan.declaration, plan.attention_specs, self._bounds
        assert declaration is not None, f"{plan.declared.name} cannot run"
        backend = build_latent_backend(declaration, specs, storage, bounds, self._num_sms)
        weights, recipe = self._rotated_weights("attention/kv_b"), plan.resolved.recipe
        scratch, dtype = declaration.scratch(specs, bounds), plan.resolved.dtype
        is_fused = self._is_fused
        ranks = self._exchange, plan.mesh.is_exact
        decoder = LatentDecoder(spec, weights, backend, rope, workspace, scratch, is_fused, dtype, recipe, *ranks)
        return decoder, backend

    def _compressed(
        self, storage: PageStorage, workspace: Workspace, rope: StepRope
    ) -> tuple[Model, AttentionFamily[Any]]:
        """A decoder that keeps windows, entries and states (DeepSeek-V4)."""
        plan, spec, device = self._plan, self._spec, self._device
        declaration, specs, bounds = plan.declaration, plan.attention_specs, self._bounds
        assert declaration is not None, f"{plan.declared.name} cannot run"
        states = self._states = StateStorage(plan.states, plan.resolved.limits.max_num_seqs, device, self._ledger)
        self._releases.append(states.release)
        backend = build_compressed_backend(declaration, specs, storage, states, bounds, self._num_sms)
        scratch, dtype, recipe = declaration.scratch(specs, bounds), plan.resolved.dtype, plan.resolved.recipe
        weights = self._rotated_weights("attention/o_a")
        return CompressedDecoder(spec, weights, backend, rope, workspace, scratch, dtype, recipe), backend

    def _rotated_weights(self, owner: str) -> dict[str, torch.Tensor | QuantizedWeight]:
        """All weights, those around rotated latents folded; who owns the copies where others read them too."""
        folded = fold_rotation(self._weights, self._plan.attention_specs, self._is_sharing)
        if self._is_sharing and folded:
            num_bytes = sum(weight.nbytes for weight in folded.values())
            self._ledger.record(owner, num_bytes, "rotated copies, because others read the weights too")
        return self._weights | folded

    def _layer_tables(self, biases: SplitBiases, means: Sequence[torch.Tensor | None]) -> dict[str, Any]:
        """What layers have beside their pages, as a backend names it.

        One that somebody else makes need not know of what no layer has.
        """
        sinks = copy_sinks(self._weights, self._plan.attention_specs)
        named: dict[str, Sequence[Any]] = {"key_biases": biases.keys, "k_means": means, "sinks": sinks}
        return {name: tables for name, tables in named.items() if any(table is not None for table in tables)}

    def _centre_keys(self, runner: Runner, biases: SplitBiases, means: Sequence[torch.Tensor | None]) -> None:
        """Before the first page of a request is written; what they are is settled for as long as the runner lives."""
        mean_bytes = sum(mean_KD.nbytes for mean_KD in means if mean_KD is not None)
        if mean_bytes:
            self._ledger.record("attention/key_means", mean_bytes, "what the keys of a head have in common")
        # The prompt goes through all stages, those too that have nothing to measure.
        is_staged = self._plan.mesh.num_stages > 1 and self._plan.resolved.kv_format.is_quantized
        if mean_bytes or any(biases.keys) or is_staged:
            rooms = KeyRooms(biases.keys, biases.by_layer, means)
            num_tokens = centre_keys(runner, self._spec, rooms)
            log.info("Keys are centred by their mean over %d warm-up tokens", num_tokens)

    def _step_rope(self) -> StepRope:
        """Rows for the largest step, which stay where they are."""
        limits, dtype = self._plan.resolved.limits, getattr(torch, self._plan.resolved.dtype)
        rope = make_step_rope(self._spec, limits.max_model_len, limits.max_num_batched_tokens, dtype, self._device)
        if rope.rows is not None:
            table_bytes = rope.rows.cos_STP.nbytes + rope.rows.sin_STP.nbytes
            self._ledger.record("rope/table", table_bytes, "cos and sin of a step's tokens")
            self._ledger.record("rope/frequencies", rope.rows.frequency_SP.nbytes, "of the pairs that rope turns")
        return rope

    def _split_biases(self, specs: Sequence[AttentionSpec]) -> SplitBiases:
        """Biases for keys that are stored without theirs; nothing where no layer stores such."""
        spec, plan, turns = self._spec, self._plan, None
        if spec.rope is not None and any(own.has_key_bias for own in specs):
            dtype, longest = getattr(torch, plan.resolved.dtype), plan.resolved.limits.max_model_len
            turns = key_turns(spec.rope, spec.head_dim, spec.max_position, longest, dtype, self._device)
        biases = split_biases(self._weights, spec, specs, turns)
        if biases.qkv:
            self._ledger.record("attention/qkv_bias", biases.qkv_bytes, "biases with zeros for the keys")
        return biases

    def capture(self, runner: Runner, enforce_eager: bool, on_prepare: OnPrepare = prepare_silently) -> None:
        """Run every kernel once, and capture graphs unless nobody wants them; a CPU has nothing to warm."""
        if self._device.type != "cuda":
            return
        on_prepare(Preparing(WARMING, 0, 0))
        limits, start = runner.limits, time.monotonic()
        graphs, declaration, kind = None, self._plan.declaration, self._plan.exchange_kind
        is_exchange_captured = can_be_captured(kind, self._plan.mesh)
        if not is_exchange_captured and not enforce_eager:
            log.info("steps launch kernel by kernel because no graph holds what stages send each other by %s", kind)
        if not enforce_eager and is_exchange_captured and declaration is not None and declaration.can_be_captured:
            graphs = self._graphs(limits)
        spec = self._spec
        is_split = None if spec.compressed is None else partial(_is_split, spec.num_heads, self._num_sms)
        numbers = self.row_sizes or range(1, limits.max_num_batched_tokens + 1)
        rows = warm_rows(numbers, spec.experts, is_split)
        _warm(runner, rows, graphs, on_prepare)
        log.info("Graph capturing finished in %.0f secs", time.monotonic() - start)

    def _graphs(self, limits: Limits) -> StepGraphs:
        """Of which sizes, and of how many logits; where steps are padded to some, of these alone."""
        decode = graph_sizes(min(limits.max_num_seqs, limits.max_num_batched_tokens))
        mixed = mixed_sizes(limits.max_num_batched_tokens, self._plan.resolved.num_proposals > 0)
        sizes = self.row_sizes
        most_logits = min(limits.sampled_rows, sizes[-1]) if sizes else limits.sampled_rows
        return StepGraphs(
            tuple(dict.fromkeys(padded_rows(size, sizes) for size in decode)),
            tuple(size for size in mixed if size in sizes or not sizes),
            padded_rows(most_logits, sizes),
        )

    def release(self) -> None:
        for give_back in reversed(self._releases):
            give_back()
        self._releases.clear()
        for entry in tuple(self._ledger):
            self._ledger.release(entry.owner)
        gc.collect()
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # a device that has failed cannot even do this
                torch.cuda.empty_cache()


def rank_spec(plan: RunnerPlan) -> ModelSpec:
    """The decoder as the rank of a plan has it."""
    declaration = plan.declared.declaration
    assert isinstance(declaration, DecoderDeclaration), f"{plan.declared.name} cannot run"
    return declaration.rank(plan.mesh)


def _is_split(num_heads: int, num_sms: int, num_rows: int) -> bool:
    """Whether compressed attention merges splits of so many rows. Without splits it launches no merge, and such a step could
    be the first of the form that a merge of more rows has."""
    return compressed_splits(num_rows, num_heads, num_sms) > 1


def _telling(on_prepare: OnPrepare) -> Callable[[Path, int, int], None]:
    """What is told of each C file that is compiled."""
    return lambda file, done, total: on_prepare(Preparing(COMPILING_CPU, done, total, f"kept in {file.parent}"))


def _warm(runner: Runner, rows: Sequence[int], graphs: StepGraphs | None, on_prepare: OnPrepare) -> None:
    """Warm a runner, and tell what is compiled: nothing where an earlier start has left every kernel compiled."""
    steps, folder = (0, len(rows) + 1), compiled_folder()

    def compiled() -> None:
        if counted.num_compiled == 1:
            log.info("Compiling GPU kernels, which can take minutes, once; they are kept in %s", folder)
        on_prepare(Preparing(COMPILING_GPU, *steps, f"{counted.num_compiled} compiled, kept in {folder}"))

    def warmed(num_done: int, num_total: int) -> None:
        nonlocal steps
        steps = num_done, num_total

    with counting_compiles(compiled) as counted:
        runner.warm(rows, graphs, lambda *counts: on_prepare(Preparing(CAPTURING, *counts)), warmed)
    log.info("Triton compiled %d kernels and found %d compiled", counted.num_compiled, counted.num_found)


def _refuse_ranks(plan: RunnerPlan) -> None:
    """What ranks cannot do to the bit."""
    mesh = plan.mesh
    if mesh.is_exact and plan.target.kind == "cpu" and native_library() is None:
        raise ConfigError(
            "tensor_parallel_sums=exact was asked",
            "without our kernels in C, products of plain torch add up in an order that follows from the size of a weight",
            "install a C compiler, or take tensor_parallel_sums=reduce",
        )


def refuse_out_of_memory(error: BaseException, plan: RunnerPlan) -> None:
    """Somebody else took the memory that the plan had found free: say so, with the plan."""
    if isinstance(error, MemoryPlanError):
        error.table = error.table or plan.memory.table("load")  # loading has said it in its own words
    if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
        return
    terms = ", ".join(
        f"{term.owner} {format_bytes(term.num_bytes)}" for term in plan.memory.terms if term.num_bytes >= 2**20
    )
    raise MemoryPlanError(
        f"the plan takes {format_bytes(plan.memory.peak_bytes)} of {plan.target.name} "
        f"({terms}, kv pages {format_bytes(plan.memory.kv_bytes)})",
        f"{format_bytes(plan.target.available_bytes)} were free when it was made, and the device ran out on the way",
        "see who else uses the device, and start again or lower memory_utilization",
        table=plan.memory.table("serve"),
    ) from error

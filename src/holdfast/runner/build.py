"""Build a runner: settle, plan, load, allocate; the plan is made before the first weight is read."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.attention.backend import AttentionSpec
from holdfast.attention.native_paged import NativePagedAttention
from holdfast.attention.select import CANDIDATES, BackendType, select_backend
from holdfast.cache.spec import CacheSpec, uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.layers.mlp import GateBuffers
from holdfast.loading.execute import load_weights
from holdfast.loading.plan import LoadPlan, plan_load
from holdfast.loading.source import OpenModel
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import MemoryPlan, Term, plan_memory
from holdfast.memory.sizes import format_bytes
from holdfast.models.decoder import Decoder
from holdfast.models.rope import rope_table
from holdfast.models.spec import ModelSpec
from holdfast.observability.log import get_logger
from holdfast.quant.formats import DTYPE_BYTES, bytes_for
from holdfast.runner.batch_buffers import BatchBuffers, batch_terms
from holdfast.runner.resolve import KV_IS_ASKED, Resolved, resolve
from holdfast.runner.runner import LOGIT_ROWS_AT_ONCE, Runner
from holdfast.runner.sampler import Sampler
from holdfast.runner.sampling_terms import sampling_terms

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    """How keys and values are kept, and who attends to them."""

    cache: CacheSpec
    specs: tuple[AttentionSpec, ...]
    backend: BackendType


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner that is ready, and the account of how it came to be."""

    runner: Runner
    resolved: Resolved
    layout: Layout
    plan: MemoryPlan
    ledger: Ledger
    load_seconds: float


def build_runner(config: EngineConfig, model: OpenModel, on_progress: Callable[[int, int], None]) -> BuiltRunner:
    """Everything from a model's headers to a runner; `on_progress(done, total)` counts bytes read."""
    resolved = resolve(config, model.spec)
    load_plan = plan_load(model.parameters, model.source, resolved.dtype)
    resolved, layout, plan = _plan(resolved, model.spec, load_plan)
    if config.batch_invariant and layout.backend is not NativePagedAttention:
        raise ConfigError(
            "batch_invariant=True was asked",
            f"{layout.backend.name} in {resolved.dtype} on {resolved.device} rounds differently in other company",
            "run in float32 on a CPU with a C compiler, or leave it out",
        )
    for choice in resolved.choices:
        log.info("%s=%s because %s", choice.name, choice.value, choice.reason)
    log.info("attention=%s because it is the first that takes every layer", layout.backend.name)
    ledger = Ledger()
    start = time.monotonic()
    weights = load_weights(load_plan, model.source, resolved.device, ledger, on_progress)
    load_seconds = time.monotonic() - start
    log.info("Model loading took %s memory and %.2f seconds", format_bytes(ledger.total_bytes), load_seconds)
    runner = _assemble(model, resolved, layout, plan, ledger, weights)
    num_tokens, max_len = plan.num_pages * layout.cache.page_tokens, resolved.limits.max_model_len
    log.info("Available KV cache memory: %s", format_bytes(plan.kv_bytes))
    log.info(
        "KV cache size: %d tokens, Maximum concurrency for %d tokens per request: %.2fx",
        num_tokens,
        max_len,
        num_tokens / max_len,
    )
    return BuiltRunner(runner, resolved, layout, plan, ledger, load_seconds)


def _plan(resolved: Resolved, spec: ModelSpec, load_plan: LoadPlan) -> tuple[Resolved, Layout, MemoryPlan]:
    """Pages for the longest context that fits; a context that was asked for fits or is refused."""
    try:
        return _plan_as_is(resolved, spec, load_plan)
    except MemoryPlanError:
        fitting = _longest_that_fits(resolved, spec, load_plan) if resolved.may_shorten else None
        if fitting is None:
            raise
        return fitting


def _longest_that_fits(
    resolved: Resolved, spec: ModelSpec, load_plan: LoadPlan
) -> tuple[Resolved, Layout, MemoryPlan] | None:
    """By bisection: the pages of a sequence grow with the context, and so do tables by position."""
    fitting = None
    low, high = 1, resolved.limits.max_model_len - 1
    while low <= high:
        middle = (low + high) // 2
        shorter = resolved.with_max_model_len(middle, "the longest context that fits the memory")
        try:
            fitting = _plan_as_is(shorter, spec, load_plan)
        except MemoryPlanError:
            high = middle - 1
        else:
            low = middle + 1
    return fitting


def _plan_as_is(resolved: Resolved, spec: ModelSpec, load_plan: LoadPlan) -> tuple[Resolved, Layout, MemoryPlan]:
    limits = resolved.limits
    layout = _layout(resolved, spec)
    cache = layout.cache
    pages_per_seq = cache.pages_for(limits.max_model_len)
    max_pages = limits.max_num_seqs * pages_per_seq
    reasons = []
    if resolved.max_kv_bytes is not None and resolved.max_kv_bytes // cache.bytes_per_page < max_pages:
        max_pages = resolved.max_kv_bytes // cache.bytes_per_page
        reasons = [resolved.max_kv_reason]
        if max_pages < pages_per_seq:
            if resolved.max_kv_reason == KV_IS_ASKED:
                raise MemoryPlanError(
                    f"kv_cache_memory of {format_bytes(resolved.max_kv_bytes)} was asked",
                    f"one sequence of {limits.max_model_len} tokens takes "
                    f"{format_bytes(pages_per_seq * cache.bytes_per_page)}",
                    "raise kv_cache_memory or lower max_model_len",
                )
            max_pages = pages_per_seq
    terms = _terms(resolved, spec, load_plan, layout)
    plan = plan_memory(
        resolved.budget_bytes,
        resolved.budget_reason,
        terms,
        cache.bytes_per_page,
        pages_per_seq,
        max_pages,
        *reasons,
    )
    return resolved, layout, plan


def _layout(resolved: Resolved, spec: ModelSpec) -> Layout:
    limits, dtype, device = resolved.limits, getattr(torch, resolved.dtype), torch.device(resolved.device)
    cache = uniform_cache(spec.num_layers, resolved.kv_format, spec.num_kv_heads, spec.head_dim, limits.page_tokens)
    scale = spec.head_dim**-0.5
    specs = tuple(
        AttentionSpec(layer, spec.num_heads, scale, spec.window(layer.layer), limits.max_model_len, dtype, device)
        for layer in cache.layers
    )
    return Layout(cache, specs, select_backend(CANDIDATES, specs))


def _terms(resolved: Resolved, spec: ModelSpec, load_plan: LoadPlan, layout: Layout) -> tuple[Term, ...]:
    limits, width = resolved.limits, DTYPE_BYTES[resolved.dtype]
    num_rows = limits.max_num_batched_tokens
    attend_width = 2 * spec.qkv_size + 2 * spec.query_size
    feed_width = 0 if spec.gated_mlp else 2 * spec.intermediate_size
    terms = [
        Term("weights", load_plan.final_bytes, f"{len(load_plan.parameter_bytes)} tensors in {resolved.dtype}"),
        *batch_terms(limits),
        *sampling_terms(max(limits.max_num_seqs, LOGIT_ROWS_AT_ONCE), spec.vocab_size),
        Term(
            "activations",
            width * num_rows * (3 * spec.hidden_size + max(attend_width, feed_width)),
            f"one layer's temporaries for {num_rows} rows",
        ),
        *(
            Term(owner, bytes_for(resolved.dtype, shape), reason)
            for owner, shape, reason in _gate_shapes(spec, num_rows)
        ),
        *layout.backend.terms(layout.specs),
    ]
    if spec.rope is not None:
        rope_bytes = 2 * width * limits.max_model_len * spec.head_dim
        terms.append(Term("rope/table", rope_bytes, "cos and sin by position"))
    return tuple(terms)


def _assemble(
    model: OpenModel,
    resolved: Resolved,
    layout: Layout,
    plan: MemoryPlan,
    ledger: Ledger,
    weights: dict[str, torch.Tensor],
) -> Runner:
    spec, limits = model.spec, resolved.limits
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    storage = PageStorage(layout.cache, plan.num_pages, device, ledger)
    backend = layout.backend(layout.specs, storage)
    rotary = None
    if spec.rope is not None:
        rotary = rope_table(spec.rope, spec.head_dim, spec.max_position, limits.max_model_len, dtype, device)
    for term in plan.terms:
        if term.owner.startswith(("attention/", "rope/")):
            ledger.record(term.owner, term.num_bytes, term.reason)
    return Runner(
        Decoder(spec, weights, backend, rotary, _gate_buffers(resolved, spec, ledger)),
        BatchBuffers(limits, device, ledger),
        Sampler(spec.vocab_size, device),
        limits,
        plan.num_pages,
        spec.vocab_size,
        frozenset(model.generation.eos_token_ids),
    )


def _gate_shapes(spec: ModelSpec, num_rows: int) -> tuple[tuple[str, tuple[int, int], str], ...]:
    if not spec.gated_mlp:
        return ()
    reason = f"{num_rows} rows, one set for all layers"
    return (
        ("mlp/gate_up", (num_rows, 2 * spec.intermediate_size), reason),
        ("mlp/gated", (num_rows, spec.intermediate_size), reason),
    )


def _gate_buffers(resolved: Resolved, spec: ModelSpec, ledger: Ledger) -> GateBuffers | None:
    buffers = []
    for owner, shape, reason in _gate_shapes(spec, resolved.limits.max_num_batched_tokens):
        buffer = torch.empty(shape, dtype=getattr(torch, resolved.dtype), device=resolved.device)
        ledger.record(owner, buffer.nbytes, reason)
        buffers.append(buffer)
    return GateBuffers(*buffers) if buffers else None

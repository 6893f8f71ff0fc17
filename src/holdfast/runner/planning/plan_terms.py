"""Everything a runner holds beside its pages, as terms of a plan: from shapes, by owner and phase; no torch."""

from collections import Counter
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from holdfast.attention.declarations import choose_declaration
from holdfast.attention.spec import AttentionSpec, BackendDeclaration, StepBounds
from holdfast.cache.padding import kv_padding_term
from holdfast.cache.spec import CacheSpec, LayerCache, mixed_cache, uniform_cache
from holdfast.memory.planner import PAGE_PHASES, Term
from holdfast.memory.workspace_plan import WorkspacePlan
from holdfast.models.activations import Request
from holdfast.models.blueprints.blueprint import Blueprint
from holdfast.models.blueprints.blueprint_anatomy import HeadGeometry, StepShape
from holdfast.models.blueprints.blueprint_weights import WeightGroup
from holdfast.quant.formats import DTYPE_BYTES, KVFormat
from holdfast.runner.planning.batch_terms import batch_terms
from holdfast.runner.planning.graph_terms import graph_term
from holdfast.runner.planning.resolve import Resolved
from holdfast.runner.planning.sampling_terms import PROMPT_ROWS, sampling_terms
from holdfast.runner.planning.target import Target

LIBRARY_BYTES = 32 * 2**20
"""The workspace that torch gives to cuBLAS on the one stream that an engine uses."""
ROUNDING_BYTES = 26 * 2**20
"""What torch's allocator holds beyond what it was asked for: arenas in whole 2 MiB, small ones in 20 MiB; measured.

No other term has a share of it: owners are planned at the bytes that they ask for."""
COLLECTIVE_BYTES = 512 * 2**20
"""Buffers of NCCL between ranks; assumed, not measured."""
STAGING_BYTES = 64 * 2**20
"""Most that loading may hold on a GPU beside the final weights."""


class Layout(NamedTuple):
    """How one rank keeps a model, and who attends: what a plan's terms follow from."""

    blueprint: Blueprint
    target: Target
    num_ranks: int
    enforce_eager: bool
    staging: Term | None
    """What loading holds beside the weights; None takes the most that it may."""

    def heads(self) -> HeadGeometry | None:
        return self.blueprint.anatomy.heads(self.num_ranks)

    def formats(self, resolved: Resolved) -> tuple[KVFormat, ...]:
        """One entry a layer."""
        return resolved.protected.formats(resolved.kv_format, self.blueprint.num_layers)

    def bytes_per_token(self, resolved: Resolved) -> Fraction:
        """Of all layers; where formats are mixed they have the same heads, so that only the numbers of layers count."""
        protected, num_layers = resolved.protected, self.blueprint.num_layers
        token_bytes = self.blueprint.kv_bytes_per_token(resolved.kv_format, self.num_ranks)
        if not protected.layers:
            return token_bytes
        wider_bytes = self.blueprint.kv_bytes_per_token(protected.format, self.num_ranks)
        return token_bytes + (wider_bytes - token_bytes) * len(protected.layers) / num_layers

    def page_bytes(self, resolved: Resolved) -> int:
        """Of one page of all layers; rows that stand for several tokens are rounded up to whole bytes."""
        return ceil(resolved.limits.page_tokens * self.bytes_per_token(resolved))

    def cache(self, resolved: Resolved) -> CacheSpec | None:
        """Keys and values by head, or None where the model keeps something else."""
        heads = self.heads()
        if heads is None:
            return None
        return mixed_cache(self.formats(resolved), heads.num_kv_heads, heads.head_dim, resolved.limits.page_tokens)

    def attention_spec(self, resolved: Resolved, layer: LayerCache, heads: HeadGeometry) -> AttentionSpec:
        return AttentionSpec(
            cache=layer,
            num_heads=heads.num_heads,
            scale=heads.head_dim**-0.5,
            window=heads.windows[layer.layer],
            max_model_len=resolved.limits.max_model_len,
            dtype=resolved.dtype,
            device_kind=self.target.kind,
        )


class Needs(NamedTuple):
    """What a plan must find room for beside pages."""

    declaration: BackendDeclaration | None
    requests: tuple[Request, ...]
    workspace: WorkspacePlan
    terms: tuple[Term, ...]


def list_needs(layout: Layout, resolved: Resolved) -> Needs:
    """Every term, from shapes."""
    blueprint, target, limits = layout.blueprint, layout.target, resolved.limits
    bounds = StepBounds(limits.max_num_seqs, limits.max_num_batched_tokens, limits.page_tokens)
    specs = _distinct_specs(layout, resolved)
    declaration = choose_declaration(specs) if specs else None
    scratch = () if declaration is None else declaration.scratch(specs, bounds)
    logit_rows = max(limits.max_num_seqs, PROMPT_ROWS)
    step = StepShape(
        limits.max_num_batched_tokens, logit_rows, limits.max_model_len, resolved.dtype, target.kind, resolved.recipe
    )
    requests = blueprint.anatomy.requests(step, layout.num_ranks, scratch)
    workspace = WorkspacePlan()
    for request in requests:
        workspace.reserve(request.owner, request.specs, request.lane)
    terms = [
        *_weight_terms(layout, resolved),
        *_cache_terms(layout, resolved),
        *workspace.terms(),
        *batch_terms(limits, target.kind),
        *sampling_terms(limits.max_num_seqs, blueprint.vocab_size, target.kind),
        *_rope_terms(layout, resolved),
        *(() if declaration is None else declaration.terms(specs, bounds)),
        *_device_terms(layout, resolved, declaration is None or declaration.can_be_captured),
    ]
    return Needs(declaration, requests, workspace, tuple(terms))


def _distinct_specs(layout: Layout, resolved: Resolved) -> tuple[AttentionSpec, ...]:
    """One layer for each that differs, by its window or its format."""
    heads = layout.heads()
    if heads is None:
        return ()
    by_layer = layout.formats(resolved)
    everywhere = tuple(dict.fromkeys(by_layer)) if resolved.protected.is_open else ()
    first_of: dict[tuple[KVFormat, int | None], int] = {}
    for layer, (own, window) in enumerate(zip(by_layer, heads.windows, strict=True)):
        # Where weights will say which layers are protected, any layer may have any of the formats.
        for kv_format in everywhere or (own,):
            first_of.setdefault((kv_format, window), layer)
    caches = (
        LayerCache(layer, "attention", kv_format, heads.num_kv_heads, heads.head_dim)
        for (kv_format, _), layer in first_of.items()
    )
    return tuple(layout.attention_spec(resolved, cache, heads) for cache in caches)


def _weight_terms(layout: Layout, resolved: Resolved) -> list[Term]:
    groups = layout.blueprint.group_bytes(resolved.dtype, resolved.recipe, layout.num_ranks)
    return [Term(f"weights/{name}", group.num_bytes, _counted(group)) for name, group in groups.items()]


def _counted(group: WeightGroup) -> str:
    noun = "tensor" if group.num_tensors == 1 else "tensors"
    return f"{group.num_tensors} {noun} in {_enumerated(group.stored_as)}"


def _enumerated(names: tuple[str, ...]) -> str:
    """All of them: a, b and c."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _cache_terms(layout: Layout, resolved: Resolved) -> list[Term]:
    """What pages cost beyond their number: alignment, and what a sequence keeps whatever its length."""
    terms, heads = [], layout.heads()
    if heads is not None:
        shape = (heads.num_kv_heads, heads.head_dim, resolved.limits.page_tokens)
        counts = Counter(layout.formats(resolved)).items()
        paddings = [(count, kv_padding_term(uniform_cache(1, kv_format, *shape))) for kv_format, count in counts]
        if any(padding.num_bytes for _, padding in paddings):
            num_bytes = sum(count * padding.num_bytes for count, padding in paddings)
            reason = "; ".join(f"{count} layers, each with {padding.reason}" for count, padding in paddings)
            terms.append(Term(paddings[0][1].owner, num_bytes, reason, PAGE_PHASES))
    sequence_bytes = layout.blueprint.kv_bytes_per_sequence(resolved.kv_format, layout.num_ranks)
    if sequence_bytes:
        num_seqs = resolved.limits.max_num_seqs
        reason = f"windows and unfinished entries of {num_seqs} sequences, whatever their length"
        terms.append(Term("kv state", num_seqs * sequence_bytes, reason, PAGE_PHASES))
    return terms


def _rope_terms(layout: Layout, resolved: Resolved) -> list[Term]:
    width = layout.blueprint.anatomy.rope_width
    if not width:
        return []
    table_bytes = 2 * DTYPE_BYTES[resolved.dtype] * resolved.limits.max_model_len * width
    return [Term("rope/table", table_bytes, "cos and sin by position")]


def _device_terms(layout: Layout, resolved: Resolved, has_graphs: bool) -> list[Term]:
    """What a GPU costs whatever the model, and what loading takes for a while."""
    target, limits = layout.target, resolved.limits
    terms = [] if layout.staging is None else [layout.staging]
    if target.kind != "cuda":
        return terms
    terms.append(Term("cuda context", target.context_bytes, "CUDA, its libraries' handles and the code of kernels"))
    terms.append(Term("libraries", LIBRARY_BYTES, "workspace of cuBLAS", PAGE_PHASES))
    terms.append(Term("allocator", ROUNDING_BYTES, "what torch rounds up", PAGE_PHASES))
    if layout.num_ranks > 1:
        terms.append(Term("collectives", COLLECTIVE_BYTES, "buffers between ranks; assumed"))
    if has_graphs and not layout.enforce_eager:
        terms.append(graph_term(layout.blueprint.num_layers, limits.max_num_seqs, limits.max_num_batched_tokens))
    if layout.staging is None:
        terms.append(Term("staging", STAGING_BYTES, "rows on their way to their place", ("load",)))
    return terms

"""RunnerPlan: everything settled and counted before a weight is read; the most pages, and the longest context, that fit; no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from holdfast.attention.declarations import AttentionSpec, BackendDeclaration
from holdfast.cache.compressed import StateKind
from holdfast.cache.groups import CacheGroup, unrewindable
from holdfast.cache.spec import CacheSpec
from holdfast.config import NGRAM, EngineConfig, Limits
from holdfast.distributed.exchange_plan import ExchangeKind, ExchangeNeeds, find_exchange, planned_nodes
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.memory.planner import PAGE_PHASES, MemoryPlan, Term, plan_memory
from holdfast.memory.report import GroupAccount
from holdfast.memory.sizes import format_bytes
from holdfast.memory.workspace_plan import WorkspacePlan
from holdfast.models.activations import Request
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.exactness import refuse_inequality, refuse_variant_attention, refuse_variant_weights
from holdfast.planning.resolve import KV_IS_ASKED, Resolved, numbers, resolve
from holdfast.planning.target import Target, too_old_words
from holdfast.planning.terms import Layout, Needs, list_needs

NO_RANKS = "ranks do not share compressed attention in this version; it runs on one GPU, or on a CPU"
SHORTENED = "shortened from the model's own"
AGREED_CONTEXT = "what fits on every rank"
AGREED_PAGES = "as many as the rank with the fewest has"


class Agreed(NamedTuple):
    """What ranks of one engine have in common, before any of them reads a weight."""

    max_model_len: int
    num_pages: int | None = None
    """None: not settled yet."""
    exchange: ExchangeKind | None = None
    """None: as ranks would that are spread evenly over the nodes of the config."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan of one rank is made from."""

    config: EngineConfig
    declared: DeclaredModel
    target: Target
    mesh: Mesh = ALONE
    """Where the rank stands; the config's own sizes are for who plans all of them."""
    staging: Callable[[Resolved], Term | None] | Term | None = None
    """What loading holds beside the weights, or who knows it once dtype and recipe are settled; None: the most that it may."""
    agreed: Agreed | None = None
    """What all ranks have settled together; None: this one is asked what it would have by itself."""
    exchange: ExchangeKind | None = None
    """How ranks exchange, where that is known before all else."""
    _settled: list[tuple[Layout, Resolved]] = field(default_factory=list, init=False, compare=False, repr=False)
    """What the request became: everything that is asked of it later goes on from there."""

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share every layer."""
        return self.mesh.tensor_size

    def with_config(self, config: EngineConfig) -> "PlanRequest":
        """The same with other settings. What loading holds is not asked again."""
        return replace(self, config=config, staging=self.known_staging)

    @property
    def known_staging(self) -> Term | None:
        """What loading holds, settled."""
        return settle(self)[0].staging if callable(self.staging) else self.staging


class Fit(NamedTuple):
    """A plan that fits, as numbers."""

    layout: Layout
    resolved: Resolved
    needs: Needs
    memory: MemoryPlan

    @property
    def kv_tokens(self) -> int:
        pages = self.layout.pages(self.resolved)
        return count_tokens(() if pages is None else pages.groups, self.resolved.limits, self.memory.num_pages)[0]

    @property
    def max_concurrency(self) -> float:
        return self.kv_tokens / self.resolved.limits.max_model_len


def count_tokens(groups: tuple[CacheGroup, ...], limits: Limits, num_pages: int) -> tuple[int, float]:
    """Tokens that so many pages hold, and the sequences of the longest context that decode together on them.

    Where some layers give pages back, a token is its share of a longest sequence.
    """
    if not any(group.window is not None for group in groups):
        num_tokens = num_pages * limits.page_tokens
        return num_tokens, num_tokens / limits.max_model_len
    per_sequence = sum(group.most_pages(limits.max_model_len, 1) for group in groups)
    return num_pages * limits.max_model_len // per_sequence, num_pages / per_sequence


class RunnerPlan(NamedTuple):
    """What a runner is built from, or what a person reads instead."""

    declared: DeclaredModel
    resolved: Resolved
    cache: CacheSpec | None
    """None where the model keeps something else than keys and values by head."""
    attention_specs: tuple[AttentionSpec, ...]
    declaration: BackendDeclaration | None
    workspace: WorkspacePlan
    memory: MemoryPlan
    requests: tuple[Request, ...]
    target: Target
    mesh: Mesh
    kv_bytes_per_token: Fraction
    kv_bytes_per_sequence: int
    not_in_this_version: tuple[str, ...]
    """Why an engine of this version cannot run it, in words; empty where it can."""

    states: tuple[StateKind, ...] = ()
    """What sequences keep beside their pages: of rows that are not finished."""
    exchange_needs: ExchangeNeeds | None = None
    """What its steps exchange with other ranks; None where there are none."""
    exchange_kind: ExchangeKind = "gloo"
    context_note: str = ""
    """Which limit shortened the context, from what to what, and what would lift it; empty where none did."""

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share every layer."""
        return self.mesh.tensor_size

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Empty where the model keeps something else than keys and values by head."""
        return () if self.cache is None else self.cache.cache_groups()

    @property
    def kv_tokens(self) -> int:
        return count_tokens(self.cache_groups, self.resolved.limits, self.memory.num_pages)[0]

    @property
    def max_concurrency(self) -> float:
        """Sequences of the longest context that fit together, once their prompts are computed."""
        return count_tokens(self.cache_groups, self.resolved.limits, self.memory.num_pages)[1]

    @property
    def tokens_without_groups(self) -> int:
        """Tokens that the same budget holds where every layer keeps every token."""
        limits, memory = self.resolved.limits, self.memory
        page_bytes = self.kv_bytes_per_token * limits.page_tokens
        taken = max(memory.phase_bytes[phase] for phase in PAGE_PHASES) - memory.kv_bytes
        num_bytes = memory.budget_bytes - taken
        if self.resolved.max_kv_bytes is not None:
            num_bytes = min(num_bytes, self.resolved.max_kv_bytes)
        most = limits.max_num_seqs * -(-limits.max_model_len // limits.page_tokens)
        return limits.page_tokens * min(most, int(num_bytes / page_bytes))

    @property
    def groups(self) -> tuple[GroupAccount, ...]:
        """Every group of the cache, in numbers; nothing where all layers keep all tokens."""
        groups, limits = self.cache_groups, self.resolved.limits
        if self.cache is None or not any(group.window is not None for group in groups):
            return ()
        accounts, length = [], limits.max_model_len
        for index, (group, own) in enumerate(zip(groups, self.cache.groups, strict=True)):
            padding_bytes = self.cache.padding_bytes(index)
            accounts.append(
                GroupAccount(
                    group.name,
                    len(own.layers),
                    group.page_tokens,
                    group.most_pages(length, limits.max_num_batched_tokens),
                    group.most_pages(length, 1),
                    padding_bytes,
                    padding_bytes / self.memory.page_bytes,
                )
            )
        return tuple(accounts)

    def kv_note(self) -> str:
        """What quantized pages, or an index alone, mean for answers, on one line; empty where none of them is."""
        resolved = self.resolved
        if not resolved.kv_format.is_quantized:
            if resolved.kv_format.index_dtype != "fp8":
                return ""
            return f"index in fp8; it can choose other tokens than one in {resolved.dtype}, and answers can differ"
        words, protected = [f"KV cache in {resolved.kv_format.name}"], resolved.protected
        if protected.layers:
            why = protected.reason.rpartition(": ")[2] or "asked"
            words.append(f"layers {numbers(protected.layers)} protected in {protected.format.name} ({why})")
        if any(spec.has_key_bias for spec in self.attention_specs):
            words.append("keys stored without their bias")
        words.append(f"answers can differ from {resolved.dtype} pages: holdfast eval kv measures how much")
        return "; ".join(words)

    def with_protected(self, layers: tuple[int, ...], reason: str) -> "RunnerPlan":
        """The same bytes with as many other layers in the wider format."""
        protected = self.resolved.protected
        assert self.cache is not None, f"{self.declared.name} has no layers to protect"
        assert len(layers) == len(protected.layers), f"{layers} were not planned for, {protected.layers} were"
        assert len(self.cache.groups) == 1, f"{self.cache.groups} share columns, which layers cannot change"
        protected = protected._replace(layers=layers, is_open=False, reason=reason)
        formats = protected.formats(self.resolved.kv_format, len(self.cache.layers))
        caches = tuple(
            replace(layer, format=kv_format) for layer, kv_format in zip(self.cache.layers, formats, strict=True)
        )
        has_biases = any(spec.has_key_bias for spec in self.attention_specs)
        specs = (
            replace(spec, cache=cache, has_key_bias=has_biases and cache.format.is_quantized)
            for spec, cache in zip(self.attention_specs, caches, strict=True)
        )
        return self._replace(
            resolved=self.resolved.with_protected(protected),
            cache=replace(self.cache, layers=caches),
            attention_specs=tuple(specs),
        )


def fit_runner(request: PlanRequest) -> RunnerPlan:
    """The plan, or the planner's refusal."""
    return _runner_plan(request, find_fit(request))


def unfitting_runner(request: PlanRequest) -> RunnerPlan:
    """The plan with pages for one longest sequence, however little memory there is: what a refusal is drawn from."""
    layout, resolved = settle(request)
    if resolved.may_shorten:
        resolved = _shortest(resolved)
    needs = list_needs(layout, resolved)
    num_pages = layout.sequence_pages(resolved, resolved.limits.max_num_batched_tokens)
    reason = "for one longest sequence"
    page_bytes = layout.page_bytes(resolved)
    memory = MemoryPlan(resolved.budget_bytes, resolved.budget_reason, needs.terms, page_bytes, num_pages, reason)
    return _runner_plan(request, Fit(layout, resolved, needs, memory))


def _runner_plan(request: PlanRequest, fit: Fit) -> RunnerPlan:
    layout, resolved = fit.layout, fit.resolved
    refuse_variant_attention(request.config, request.declared, resolved, fit.needs.declaration)
    return RunnerPlan(
        declared=request.declared,
        resolved=resolved,
        cache=layout.cache(resolved),
        attention_specs=layout.attention_specs(resolved),
        declaration=fit.needs.declaration,
        workspace=fit.needs.workspace,
        memory=fit.memory,
        requests=fit.needs.requests,
        target=request.target,
        mesh=request.mesh,
        kv_bytes_per_token=layout.bytes_per_token(resolved),
        kv_bytes_per_sequence=request.declared.kv_bytes_per_sequence(resolved.kv_format, layout.mesh),
        not_in_this_version=missing_here(request),
        states=layout.states(resolved),
        exchange_needs=fit.needs.exchange,
        exchange_kind=layout.exchange_kind,
    )


def find_fit(request: PlanRequest) -> Fit:
    """Pages for the longest context that fits; a context that was asked for fits or is refused."""
    fit = try_fit(request)
    if fit is not None:
        return fit
    layout, resolved = settle(request)
    return _fit_or_refuse(layout, _shortest(resolved) if resolved.may_shorten else resolved)


def try_fit(request: PlanRequest) -> Fit | None:
    """The same without the words of a refusal."""
    layout, resolved = settle(request)
    # Weights alone tell of most GPUs that are too small, and cost nothing to look at again.
    if request.declared.weight_bytes(resolved.dtype, resolved.recipe, layout.mesh) > resolved.budget_bytes:
        return None
    room_bytes, needs = _room(layout, resolved)
    if room_bytes >= 0:
        return _fit_or_refuse(layout, resolved, needs)
    if not resolved.may_shorten:
        return None
    return longest_that_fits(layout, resolved, 1, resolved.limits.max_model_len - 1)


def longest_that_fits(layout: Layout, resolved: Resolved, low: int, high: int) -> Fit | None:
    """The longest context from low to high with which a plan fits.

    Beyond each window layers are grouped otherwise, and pages have another size: between two windows one search finds it.
    """
    reason = _shortened_reason(layout, resolved)
    for first, last in _ranges(layout, low, high):
        found = _longest_between(layout, resolved, first, last, reason)
        if found is not None:
            return found
    return None


def _ranges(layout: Layout, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Lengths from low to high in parts in which layers are grouped alike, the longest first."""
    heads = layout.heads()
    windows = set() if heads is None else {window for window in heads.windows if window is not None}
    for window in sorted(windows, reverse=True):
        if low <= window < high:
            yield window + 1, high
            high = window
    if low <= high:
        yield low, high


def _longest_between(layout: Layout, resolved: Resolved, low: int, high: int, reason: str) -> Fit | None:
    """The pages of a sequence grow with the context, and so do block tables: all but in proportion, so that a guess
    from the bytes that are left comes near at once; halving the range in between bounds the number of guesses."""

    def room(length: int) -> int:
        return _room(layout, resolved.with_max_model_len(length, reason))[0]

    left, short = room(low), -room(high)
    if left < 0:
        return None
    if short <= 0:
        low = high
    halves = False
    while high - low > 1:
        guess = (low + high) // 2 if halves else low + (high - low) * left // (left + short)
        middle = min(max(guess, low + 1), high - 1)
        found = room(middle)
        if found >= 0:
            low, left = middle, found
        else:
            high, short = middle, -found
        halves = not halves
    return _fit_or_refuse(layout, resolved.with_max_model_len(low, reason))


def _shortened_reason(layout: Layout, resolved: Resolved) -> str:
    """Which limit a context that was left open gives way to, and from what."""
    min_pages, max_pages, _ = _page_bounds(layout, resolved)
    limit = f"{format_bytes(resolved.budget_bytes)} ({resolved.budget_reason})"
    if max_pages < min_pages:
        limit = f"{KV_IS_ASKED} of {format_bytes(resolved.max_kv_bytes or 0)}"
    return f"{SHORTENED} {resolved.limits.max_model_len:,}: no more fits {limit}"


def _shortest(resolved: Resolved) -> Resolved:
    return resolved.with_max_model_len(1, "even the shortest context does not fit")


def settle(request: PlanRequest) -> tuple[Layout, Resolved]:
    """Everything that does not depend on what fits, settled once; what cannot be planned at all raises."""
    if not request._settled:
        request.declared.check_ranks(request.mesh)
        resolved = resolve(request.config, request.declared, request.target)
        refuse_variant_weights(request.config, resolved, request.target)
        refuse_inequality(request.config, request.declared, resolved, request.target, request.mesh)
        staging = request.staging(resolved) if callable(request.staging) else request.staging
        agreed, eager = request.agreed, request.config.enforce_eager
        num_pages = None if agreed is None else agreed.num_pages
        invariant, kind = request.config.batch_invariant, _exchange_kind(request)
        layout = Layout(request.declared, request.target, request.mesh, eager, staging, num_pages, invariant, kind)
        if agreed is not None:
            if agreed.max_model_len != resolved.limits.max_model_len:
                resolved = resolved.with_max_model_len(agreed.max_model_len, AGREED_CONTEXT)
            resolved = replace(resolved, may_shorten=False)
        _check_rewinding(layout, resolved)
        request._settled.append((layout, resolved))
    return request._settled[0]


def _exchange_kind(request: PlanRequest) -> ExchangeKind:
    """As ranks have agreed on by where they are; of devices that are not here, as the config says."""
    agreed, mesh = request.agreed, request.mesh
    nodes = planned_nodes(mesh.num_ranks, request.config.nnodes)
    known = request.exchange or (None if agreed is None else agreed.exchange)
    return known or find_exchange(request.target.kind, nodes, mesh.tensor_size)


def _check_rewinding(layout: Layout, resolved: Resolved) -> None:
    """Proposals are rejected by going back, which every cache group must be able to do."""
    pages = layout.pages(resolved) if resolved.num_proposals else None
    reason = None if pages is None else unrewindable(pages.groups)
    if reason is not None:
        raise ConfigError(f"speculative={NGRAM}:{resolved.num_proposals} was asked", reason, "leave speculative out")


def missing_here(request: PlanRequest) -> tuple[str, ...]:
    """What of a request an engine of this version cannot do, in words."""
    reasons = [] if request.declared.not_runnable is None else [request.declared.not_runnable]
    if not request.mesh.is_alone and request.declared.is_compressed:
        reasons.append(NO_RANKS)
    too_old = too_old_words(request.target)
    if too_old is not None:
        reasons.append(too_old)
    return tuple(reasons)


def _room(layout: Layout, resolved: Resolved) -> tuple[int, Needs | None]:
    """Bytes that are left beside one longest sequence and everything else, below 0 what is short; and what was found to be needed."""
    min_pages, max_pages, _ = _page_bounds(layout, resolved)
    page_bytes = layout.page_bytes(resolved)
    if max_pages < min_pages:
        return (max_pages - min_pages) * page_bytes, None
    needs = list_needs(layout, resolved)
    smallest = MemoryPlan(resolved.budget_bytes, "", needs.terms, page_bytes, min_pages, "")
    return resolved.budget_bytes - smallest.peak_bytes, needs


def _fit_or_refuse(layout: Layout, resolved: Resolved, needs: Needs | None = None) -> Fit:
    page_bytes = layout.page_bytes(resolved)
    min_pages, max_pages, reasons = _page_bounds(layout, resolved)
    if max_pages < min_pages:
        raise MemoryPlanError(
            f"kv_cache_memory of {format_bytes(resolved.max_kv_bytes or 0)} was asked",
            f"one sequence of {resolved.limits.max_model_len} tokens takes {format_bytes(min_pages * page_bytes)}",
            "raise kv_cache_memory or lower max_model_len",
        )
    needs = list_needs(layout, resolved) if needs is None else needs
    memory = plan_memory(
        resolved.budget_bytes, resolved.budget_reason, needs.terms, page_bytes, min_pages, max_pages, *reasons
    )
    return Fit(layout, resolved, needs, memory)


def _page_bounds(layout: Layout, resolved: Resolved) -> tuple[int, int, tuple[str, ...]]:
    """Pages of one longest sequence, the most that are wanted, and why no more where that is not plain.

    A bound that was asked for holds even if no sequence fits; our own gives way.
    """
    limits = resolved.limits
    min_pages = layout.sequence_pages(resolved, limits.max_num_batched_tokens)
    max_pages = limits.max_num_seqs * min_pages
    if layout.agreed_pages is not None:
        return min_pages, layout.agreed_pages, (AGREED_PAGES,)
    if resolved.max_kv_bytes is None:
        return min_pages, max_pages, ()
    bound = resolved.max_kv_bytes // layout.page_bytes(resolved)
    if bound >= max_pages:
        return min_pages, max_pages, ()
    if resolved.max_kv_reason != KV_IS_ASKED:
        bound = max(bound, min_pages)
    return min_pages, bound, (resolved.max_kv_reason,)

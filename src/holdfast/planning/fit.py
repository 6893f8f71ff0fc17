"""RunnerPlan: the most pages, and the longest context, that fit the memory, counted before a weight is read; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from holdfast.attention.declarations import AttentionSpec, BackendDeclaration
from holdfast.cache.groups import CacheGroup
from holdfast.cache.places import PlaceKind, place_bytes
from holdfast.cache.spec import CacheSpec
from holdfast.cache.states import StateRule
from holdfast.config import Limits
from holdfast.distributed.exchange_plan import ExchangeKind, ExchangeNeeds
from holdfast.distributed.mesh import Mesh
from holdfast.errors import MemoryPlanError
from holdfast.memory.planner import PAGE_PHASES, MemoryPlan, plan_memory
from holdfast.memory.report import GroupAccount
from holdfast.memory.sizes import format_bytes
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES, WorkspacePlan
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.exactness import refuse_variant_attention
from holdfast.planning.protected_layers import numbers
from holdfast.planning.resolve import KV_IS_GIVEN, PlanRequest, Resolved, resolve
from holdfast.planning.snapshots import POOL_SHARE, most_snapshots
from holdfast.planning.target import Target, too_old_reason
from holdfast.planning.terms import Needs, list_needs

SHORTENED = "shortened from the model's own"
AGREED_PAGES = "as many as the rank with the fewest has"


def count_tokens(groups: tuple[CacheGroup, ...], limits: Limits, num_pages: int) -> tuple[int, float]:
    """Return the tokens that so many pages hold, and how many sequences of the longest context decode on them.

    If some layers free pages, a token counts as its share of a longest sequence.
    """
    if not any(group.window is not None for group in groups):
        num_tokens = num_pages * limits.page_tokens
        return num_tokens, num_tokens / limits.max_model_len
    per_sequence = sum(group.most_pages(limits.max_model_len, 1) for group in groups)
    # Beyond what all sequences decode on, pages serve prompts alone.
    num_pages = min(num_pages, limits.max_num_seqs * per_sequence)
    return num_pages * limits.max_model_len // per_sequence, num_pages / per_sequence


@dataclass(frozen=True)
class RunnerPlan:
    """Settings, needs and pages of one rank. A runner is built from it, and `holdfast plan` prints it."""

    resolved: Resolved
    needs: Needs
    memory: MemoryPlan
    context_note: str = ""
    """Which limit shortened the context, by how much, and what would lift it; empty if none did."""

    @property
    def declared(self) -> DeclaredModel:
        return self.resolved.declared

    @property
    def target(self) -> Target:
        return self.resolved.target

    @property
    def mesh(self) -> Mesh:
        return self.resolved.mesh

    @property
    def cache(self) -> CacheSpec | None:
        """None if the model stores something else than keys and values by head."""
        pages = self.resolved.pages()
        return None if pages is None else pages.cache

    @property
    def states(self) -> tuple[PlaceKind, ...]:
        """What sequences keep beside their pages."""
        pages = self.resolved.pages()
        return () if pages is None else pages.states

    @property
    def state_rule(self) -> StateRule | None:
        """How prompts are cut and snapshots taken; None if no layer keeps a state that pages cannot replace."""
        if self.resolved.state_layers() is None:
            return None
        config = self.resolved.request.config
        own = {"num_snapshots": self.resolved.num_snapshots, "num_drafts": self.resolved.num_proposals}
        return StateRule(snapshot_tokens=config.snapshot_tokens, **own)

    @cached_property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        pages = self.resolved.pages()
        return () if pages is None else pages.groups

    @cached_property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return self.resolved.attention_specs()

    @property
    def declaration(self) -> BackendDeclaration | None:
        return self.needs.declaration

    @property
    def workspace(self) -> WorkspacePlan:
        return self.needs.workspace

    @property
    def exchange_needs(self) -> ExchangeNeeds | None:
        """What its steps exchange with other ranks; None if there are none."""
        return self.needs.exchange

    @property
    def exchange_kind(self) -> ExchangeKind:
        return self.resolved.exchange_kind

    @property
    def kv_bytes_per_token(self) -> Fraction:
        return self.resolved.bytes_per_token()

    @property
    def kv_bytes_per_sequence(self) -> int:
        if self.states:
            return place_bytes(self.states)
        return self.declared.kv_bytes_per_sequence(self.resolved.kv_format, self.mesh)

    @property
    def not_in_this_version(self) -> tuple[str, ...]:
        """Reasons why an engine of this version cannot run it; empty if it can."""
        return missing_here(self.resolved.request)

    @property
    def kv_tokens(self) -> int:
        return count_tokens(self.cache_groups, self.resolved.limits, self.memory.num_pages)[0]

    @property
    def max_concurrency(self) -> float:
        """Sequences of the longest context that fit together, once their prompts are computed."""
        return count_tokens(self.cache_groups, self.resolved.limits, self.memory.num_pages)[1]

    @property
    def tokens_without_groups(self) -> int:
        """Tokens that the same budget would hold if every layer kept every token."""
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
        """Every group of the cache, in numbers; empty if all layers keep all tokens."""
        groups, limits, cache = self.cache_groups, self.resolved.limits, self.cache
        if cache is None or not any(group.window is not None for group in groups):
            return ()
        accounts, length = [], limits.max_model_len
        for index, (group, own) in enumerate(zip(groups, cache.groups, strict=True)):
            padding = cache.padding_bytes(index)
            most = group.most_pages(length, limits.max_num_batched_tokens), group.most_pages(length, 1)
            share = padding / self.memory.page_bytes
            accounts.append(GroupAccount(group.name, len(own.layers), group.page_tokens, *most, padding, share))
        return tuple(accounts)

    def kv_note(self) -> str:
        """Say on one line what quantized pages, or a quantized index, mean for answers; empty if there are none."""
        kv_format, dtype, protected = self.resolved.kv_format, self.resolved.dtype, self.resolved.protected
        if not kv_format.is_quantized:
            if kv_format.index_dtype != "fp8":
                return ""
            return f"index in fp8; it can choose other tokens than one in {dtype}, and answers can differ"
        parts = [f"KV cache in {kv_format.name}"]
        if protected.layers:
            why = protected.reason.rpartition(": ")[2] or "given"
            parts.append(f"layers {numbers(protected.layers)} protected in {protected.format.name} ({why})")
        if self.resolved.near_tokens:
            parts.append(f"{self.resolved.near_which()} in {dtype} too")
        if any(spec.has_key_bias for spec in self.attention_specs):
            parts.append("keys stored without their bias")
        parts.append(f"answers can differ from {dtype} pages: holdfast eval kv measures how much")
        return "; ".join(parts)

    def with_protected(self, layers: tuple[int, ...], reason: str) -> "RunnerPlan":
        """Return a plan of the same bytes with as many other layers in the wider format."""
        protected, cache = self.resolved.protected, self.cache
        assert cache is not None, f"{self.declared.name} has no layers to protect"
        assert len(layers) == len(protected.layers), f"{layers} were not planned for, {protected.layers} were"
        assert len(cache.row_groups) == 1, f"{cache.groups} share columns, which layers cannot change"
        protected = protected._replace(layers=layers, is_open=False, reason=reason)
        return replace(self, resolved=self.resolved.with_protected(protected))


def plan_resolved(resolved: Resolved) -> RunnerPlan | MemoryPlanError:
    """Plan pages for the longest context that fits. Returns a refusal if none fits, or not the given one."""
    found = try_fit(resolved)
    if found is None:
        least = _least(resolved)
        found = _fit(_shortest(least) if least.may_shorten else least)
    if isinstance(found, RunnerPlan):
        _refuse_variance(found)
    return found


def try_fit(resolved: Resolved) -> RunnerPlan | None:
    """Like `plan_resolved`, but returns None instead of a refusal."""
    found = _try_steps(resolved)
    for shorter in resolved.with_shorter_steps():
        if found is not None and found.resolved.limits.max_model_len == resolved.limits.max_model_len:
            break
        other = _try_steps(shorter)
        if other is not None and (found is None or other.kv_tokens > found.kv_tokens):
            found = other
    return found


def _least(resolved: Resolved) -> Resolved:
    """Return this with the fewest tokens a step that are open."""
    return [resolved, *resolved.with_shorter_steps()][-1]


def _try_steps(resolved: Resolved) -> RunnerPlan | None:
    """Fit a plan with steps of as many tokens as it has."""
    # Weights alone rule out most GPUs that are too small, and their bytes are cached.
    if resolved.declared.weight_bytes(resolved.dtype, resolved.recipe, resolved.mesh) > resolved.budget_bytes:
        return None
    num_spare, needs = spare_bytes(resolved)
    if num_spare >= 0:
        found = _fit(resolved, needs)
        assert isinstance(found, RunnerPlan), found
        return found
    return longest_that_fits(resolved, 1, resolved.limits.max_model_len - 1) if resolved.may_shorten else None


def fit_runner(request: PlanRequest) -> RunnerPlan:
    """Plan a request; a refusal is raised."""
    found = plan_resolved(resolve(request))
    if isinstance(found, MemoryPlanError):
        raise found
    return found


def unfitting_runner(resolved: Resolved) -> RunnerPlan:
    """Return the plan with pages for one longest sequence, whatever the memory: for printing a refusal."""
    resolved = _least(resolved)
    resolved = _shortest(resolved) if resolved.may_shorten else resolved
    needs = list_needs(resolved)
    num_pages = resolved.sequence_pages(resolved.limits.max_num_batched_tokens)
    budget = resolved.budget_bytes, resolved.budget_reason
    memory = MemoryPlan(*budget, needs.terms, resolved.page_bytes(), num_pages, "for one longest sequence")
    found = RunnerPlan(resolved, needs, memory)
    _refuse_variance(found)
    return found


def _refuse_variance(found: RunnerPlan) -> None:
    request = found.resolved.request
    refuse_variant_attention(request.config, found.declared, found.resolved.dtype, request.target, found.declaration)


def longest_that_fits(resolved: Resolved, low: int, high: int) -> RunnerPlan | None:
    """Return the plan with the longest context from low to high that fits.

    Beyond each window layers are grouped differently, and pages have another size: each range between two windows has its
    own search.
    """
    min_pages, max_pages, _ = _page_bounds(resolved)
    limit = f"{format_bytes(resolved.budget_bytes)} ({resolved.budget_reason})"
    if max_pages < min_pages:
        limit = f"{KV_IS_GIVEN} of {format_bytes(resolved.max_kv_bytes or 0)}"
    reason = f"{SHORTENED} {resolved.limits.max_model_len:,}: no more fits {limit}"
    for first, last in _ranges(resolved, low, high):
        found = _longest_between(resolved, first, last, reason)
        if found is not None:
            return found
    return None


def _ranges(resolved: Resolved, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Split low to high into ranges in which layers are grouped alike, the longest contexts first."""
    heads = resolved.heads()
    windows = set() if heads is None else {window for window in heads.windows if window is not None}
    for window in sorted(windows, reverse=True):
        if low <= window < high:
            yield window + 1, high
            high = window
    if low <= high:
        yield low, high


def _longest_between(resolved: Resolved, low: int, high: int, reason: str) -> RunnerPlan | None:
    """Search by regula falsi and bisection in turn.

    Pages and block tables grow almost in proportion to the context, so a guess from the bytes left is near at once;
    bisection in between bounds the number of guesses.
    """

    def spare(length: int) -> int:
        return spare_bytes(resolved.with_max_model_len(length, reason))[0]

    left, short = spare(low), -spare(high)
    if left < 0:
        return None
    if short <= 0:
        low = high
    halves = False
    while high - low > 1:
        guess = (low + high) // 2 if halves else low + (high - low) * left // (left + short)
        middle = min(max(guess, low + 1), high - 1)
        found = spare(middle)
        if found >= 0:
            low, left = middle, found
        else:
            high, short = middle, -found
        halves = not halves
    found = _fit(resolved.with_max_model_len(low, reason))
    assert isinstance(found, RunnerPlan), found
    return found


def _shortest(resolved: Resolved) -> Resolved:
    return resolved.with_max_model_len(1, "even the shortest context does not fit")


def missing_here(request: PlanRequest) -> tuple[str, ...]:
    """List what of a request an engine of this version cannot run."""
    reasons = request.declared.not_runnable, too_old_reason(request.target)
    return tuple(reason for reason in reasons if reason is not None)


def spare_bytes(resolved: Resolved) -> tuple[int, Needs | None]:
    """Return the bytes left beside one longest sequence, negative if they are short, and the needs if they were counted."""
    min_pages, max_pages, _ = _page_bounds(resolved)
    page_bytes = resolved.page_bytes()
    if max_pages < min_pages:
        return (max_pages - min_pages) * page_bytes, None
    needs = list_needs(resolved)
    smallest = MemoryPlan(resolved.budget_bytes, "", needs.terms, page_bytes, min_pages, "")
    return resolved.budget_bytes - smallest.peak_bytes, needs


def _fit(resolved: Resolved, needs: Needs | None = None) -> RunnerPlan | MemoryPlanError:
    page_bytes, (min_pages, max_pages, reasons) = resolved.page_bytes(), _page_bounds(resolved)
    if max_pages < min_pages:
        sizes = resolved.max_kv_bytes or 0, min_pages * page_bytes
        given, needed = map(format_bytes, sizes)
        if given == needed:
            given, needed = (f"{num_bytes:,} bytes" for num_bytes in sizes)
        length = resolved.limits.max_model_len
        return MemoryPlanError(
            "plan.kv_cache_too_small", name=KV_IS_GIVEN, value=given, needed=needed, max_model_len=length
        )
    needs = list_needs(resolved) if needs is None else needs
    budget = resolved.budget_bytes, resolved.budget_reason
    try:
        memory = plan_memory(*budget, needs.terms, page_bytes, min_pages, max_pages, *reasons)
    except MemoryPlanError as refusal:
        return refusal
    return _with_more_snapshots(RunnerPlan(resolved, needs, memory), min_pages, max_pages, reasons)


def _with_more_snapshots(plan: RunnerPlan, min_pages: int, max_pages: int, reasons: tuple[str, ...]) -> RunnerPlan:
    """Return a plan with as many snapshots of states as a share of its pages allows, if their number is open."""
    resolved, memory = plan.resolved, plan.memory
    if not resolved.may_add_snapshots:
        return plan
    spare = memory.budget_bytes - memory.peak_bytes + (memory.num_pages - min_pages) * memory.page_bytes
    rounding = len(plan.states) * ALIGNMENT_BYTES
    count = most_snapshots(place_bytes(plan.states), memory.kv_bytes, spare - rounding)
    if count == resolved.num_snapshots:
        return plan
    more = resolved.with_snapshots(
        count, f"at most 1/{POOL_SHARE} of the bytes of KV pages, unless the option says more"
    )
    needs = list_needs(more)
    budget = memory.budget_bytes, memory.budget_reason
    memory = plan_memory(*budget, needs.terms, memory.page_bytes, min_pages, max_pages, *reasons)
    return RunnerPlan(more, needs, memory)


def _page_bounds(resolved: Resolved) -> tuple[int, int, tuple[str, ...]]:
    """Return the pages of one longest sequence, the most pages that are wanted, and the reason if it is not obvious.

    A bound that the user gave holds even if no sequence fits; our own gives way.
    """
    limits, agreed = resolved.limits, resolved.request.agreed
    min_pages = resolved.sequence_pages(limits.max_num_batched_tokens)
    max_pages = resolved.most_pages()
    if agreed is not None and agreed.num_pages is not None:
        return min_pages, agreed.num_pages, (AGREED_PAGES,)
    if resolved.max_kv_bytes is None:
        return min_pages, max_pages, ()
    bound = resolved.max_kv_bytes // resolved.page_bytes()
    if bound >= max_pages:
        return min_pages, max_pages, ()
    if resolved.max_kv_reason != KV_IS_GIVEN:
        bound = max(bound, min_pages)
    return min_pages, bound, (resolved.max_kv_reason,)

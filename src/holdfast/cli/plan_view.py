"""PlanView: one value behind table, JSON and page of a plan, whether it fits or not; its words; the sweep; no torch."""

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import NamedTuple

from holdfast.config import EngineConfig
from holdfast.distributed.exchange_plan import planned_nodes
from holdfast.errors import ConfigError, MemoryPlanError, UnsupportedModelError
from holdfast.loading.hub.names import parse_hub_name
from holdfast.memory.devices import PLANNED_GPUS
from holdfast.memory.on_disk import DiskAccount
from holdfast.memory.planner import KV_OWNER, PAGE_PHASES, PHASES, MemoryPlan, Term
from holdfast.memory.report import GroupAccount, page_words
from holdfast.memory.sizes import UNITS, format_bytes
from holdfast.models.catalogue import SOURCES
from holdfast.planning.alternatives import (
    LEFT_OUT,
    Alternative,
    context_note,
    in_scheme,
    list_alternatives,
    narrower_schemes,
)
from holdfast.planning.disk_account import disk_account
from holdfast.planning.fit import PlanRequest, RunnerPlan, find_fit, fit_runner, missing_here, settle, unfitting_runner
from holdfast.planning.ranks import RankPlans
from holdfast.planning.resolve import KV_IS_ASKED, Choice, Resolved
from holdfast.planning.terms import list_needs
from holdfast.quant.formats import ALL_KV_FORMATS, formats_of
from holdfast.quant.weight_schemes import UNQUANTIZED

STARTING = (
    *("revision", "dtype", "quantization", "quantized_embeddings", "quantization_ignore"),
    *("kv_cache_memory", "kv_cache_dtype", "kv_protected_layers", "kv_protected_dtype", "index_cache_dtype"),
    *("max_model_len", "max_num_batched_tokens", "page_tokens", "memory_utilization", "speculative"),
    *("pipeline_parallel_size", "nnodes", "tensor_parallel_sums"),
)
"""Options that a plan and a command share, in the order in which they are written; switches and sequences are apart."""


def asked_words(request: PlanRequest, resolved: Resolved) -> str:
    """What the plan is of, on one line."""
    limits, ranks, recipe = resolved.limits, request.mesh.num_ranks, resolved.recipe
    weights = resolved.dtype if recipe.scheme is None else recipe.scheme.name
    if recipe.expert_scheme is not None:
        weights += f" and {recipe.expert_scheme.name}"
    device = "the CPU of this machine" if request.target.kind == "cpu" else request.target.name
    return (
        f"{printable(request.declared.name)} on {f'each of {ranks} x ' if ranks > 1 else ''}{device}: "
        f"weights in {weights}, KV pages in {format_words(request, resolved)}, "
        f"context {_context_words(resolved)}, {_sequence_words(limits.max_num_seqs)}, "
        f"{_token_count_words(limits.max_num_batched_tokens)} a step"
    )


def format_words(request: PlanRequest, resolved: Resolved) -> str:
    """The format of KV pages, and how many layers have another."""
    protected = resolved.protected
    if not protected.layers:
        return resolved.kv_format.name
    count = f"{len(protected.layers)} of {request.declared.num_layers} layers"
    return f"{resolved.kv_format.name}, {count} in {protected.format.name}"


def _sequence_words(max_num_seqs: int) -> str:
    return "one sequence" if max_num_seqs == 1 else f"up to {max_num_seqs:,} sequences"


def _token_count_words(num_tokens: int) -> str:
    return "1 token" if num_tokens == 1 else f"{num_tokens:,} tokens"


def printable(name: str) -> str:
    """A folder may be called anything; what would move a cursor or end a line is shown as a mark."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def _context_words(resolved: Resolved) -> str:
    """One that was left open shrinks to what fits; where nothing does, none was settled."""
    length = resolved.limits.max_model_len
    return "of any length" if resolved.may_shorten and length == 1 else f"{length:,}"


def token_words(bytes_per_token: Fraction) -> str:
    """Bytes of a token; those of a cache that keeps one row for several tokens are a mean."""
    if bytes_per_token.denominator == 1:
        return format_bytes(int(bytes_per_token))
    return f"{float(bytes_per_token):,.2f} B on average"


def start_command(request: PlanRequest, model: str | None, change: Alternative | None = None) -> str | None:
    """A command that starts what is planned, with one change if need be; None where the change is another device."""
    asked = _asked(request, change)
    if asked is None or "gpu" in asked:
        return None
    asked = _rank_options(request) | asked
    # A chat is planned for one sequence unless it is told otherwise.
    asked.setdefault("max_num_seqs", settle(request)[1].limits.max_num_seqs)
    device = ["--device", "cpu"] if request.target.kind == "cpu" else []
    words = [*_model_words(request, model), *device, *_option_words(asked)]
    launcher = _launcher_words(request, asked)
    if not launcher:
        return shlex.join(["holdfast", "chat", *words])
    return shlex.join([*launcher, "-m", "holdfast", "serve", *words, "--no-core-process"])


def _launcher_words(request: PlanRequest, asked: Mapping[str, object]) -> list[str]:
    """What starts ranks on several nodes, on each of which it is typed; nothing where there is one."""
    sizes = (int(str(asked.get(name, 1))) for name in ("tensor_parallel_size", "pipeline_parallel_size"))
    num_ranks, nnodes = prod(sizes), request.config.nnodes
    if nnodes is None and request.target.kind == "cpu":
        return []
    counts = Counter(planned_nodes(num_ranks, nnodes))
    if len(counts) == 1:
        return []
    num_local = str(counts[0]) if len(set(counts.values())) == 1 else "ITS_RANKS"
    nodes = ["torchrun", "--nnodes", str(len(counts)), "--node-rank", "NODE", "--nproc-per-node", num_local]
    return [*nodes, "--master-addr", "FIRST_NODE", "--master-port", "29500"]


def plan_command(request: PlanRequest, model: str | None, change: Alternative | None = None) -> str | None:
    """A command that makes the same plan again, or the one that a change promises; None where plans have no such option."""
    asked = _asked(request, change)
    if asked is None:
        return None
    device: dict[str, object] = {}
    if request.target.kind == "cuda":
        key = next((gpu.key for gpu in PLANNED_GPUS.values() if gpu.name == request.target.name), None)
        device = {"memory": _size_words(request.target.total_bytes)} if key is None else {"gpu": key}
    if "gpu" in asked:
        device = {"gpu": asked.pop("gpu")}
    ranks = _rank_options(request)
    words = ["holdfast", "plan", *(request.declared.typed or ([] if model is None else [model]))]
    return shlex.join([*words, *_option_words(device | ranks | asked)])


def _rank_options(request: PlanRequest) -> dict[str, object]:
    return {} if request.tensor_parallel_size == 1 else {"tensor_parallel_size": request.tensor_parallel_size}


def _asked(request: PlanRequest, change: Alternative | None) -> dict[str, object] | None:
    """Options that are not at their default, with those of a change; None where a plan has no option for one of them."""
    names = (*STARTING, "enable_expert_parallel", "batch_invariant", "enforce_eager", "max_num_seqs")
    asked: dict[str, object] = {name: getattr(request.config, name) for name in names}
    asked = {name: value for name, value in asked.items() if value != _default(name)}
    if change is not None:
        if not {name for name, _ in change.settings} <= {*names, "gpu", "tensor_parallel_size"}:
            return None
        asked |= dict(change.settings)
    return {name: value for name, value in asked.items() if value != LEFT_OUT}


def _option_words(asked: Mapping[str, object]) -> list[str]:
    """Options as they are typed."""
    words: list[str] = []
    for name, value in asked.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True and value != "true":
            words.append(_typed(value))
    return words


def _size_words(num_bytes: int) -> str:
    """A size that reads back to the byte."""
    for unit in ("GiB", "MiB"):
        if num_bytes % UNITS[unit.lower()] == 0:
            return f"{num_bytes // UNITS[unit.lower()]}{unit}"
    return f"{num_bytes}B"


def _model_words(request: PlanRequest, model: str | None) -> list[str]:
    """The path or the name on the Hub as it was typed; of a model that is known by name alone, its name there."""
    if request.declared.typed:  # a config.json says nothing of where the weights are
        return ["MODEL"]
    if model is None:
        return []
    if Path(model).expanduser().exists() or parse_hub_name(model) is not None:
        return [model]
    return [SOURCES.get(request.declared.name, f"path/to/{request.declared.name}")]


def _typed(value: object) -> str:
    """A value as a person types it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(name: str) -> object:
    return EngineConfig.__dataclass_fields__[name].default


class OwnerRow(NamedTuple):
    """One group of owners: bytes by phase, none where it has nothing."""

    owner: str
    phase_bytes: dict[str, int]
    reason: str

    @property
    def peak_bytes(self) -> int:
        return max(self.phase_bytes.values())


class PlanView(NamedTuple):
    """What was asked, and what the answer is."""

    model: str
    target: str
    asked: str
    """The settings in words, those included that were chosen."""
    budget_bytes: int
    budget_reason: str
    terms: tuple[Term, ...]
    """KV pages are one of them; in a plan that does not fit, those of one longest sequence."""
    kv_bytes_per_token: Fraction
    kv_tokens: int
    """0 where nothing fits."""
    max_model_len: int
    max_concurrency: float
    choices: tuple[Choice, ...]
    alternatives: tuple[Alternative, ...]
    command: str | None
    """What starts it, with the smallest change where it does not fit; None where nothing does."""
    not_in_this_version: tuple[str, ...]
    """What of it cannot be run yet, in words."""
    context_note: str
    """Which limit shortened the context, and what would lift it; empty where none did."""
    commands: tuple[str | None, ...]
    """What makes the plan of each alternative; None where no option of a plan does."""
    disk: DiskAccount | None = None
    """Of a GGUF file: bytes on disk, stored types, bytes in memory and why."""
    groups: tuple[GroupAccount, ...] = ()
    """Who shares the pages, where some layers give pages back."""
    tokens_without_groups: int = 0
    """Tokens that would fit if every layer kept every token, where that is not so."""
    max_kv_bytes: int | None = None
    """The bound that kv_cache_memory sets on pages; None if it is left out."""
    ranks: "tuple[RankRow, ...]" = ()
    """All of them, where there are several and each fits; everything else is of the one that decides for all."""

    @property
    def phase_bytes(self) -> dict[str, int]:
        return {phase: sum(term.num_bytes for term in self.terms if phase in term.phases) for phase in PHASES}

    @property
    def short_bytes(self) -> int:
        """What the phase that needs most lacks, or the pages lack of kv_cache_memory if that is more; 0 if all fits."""
        return max(self._short_kv_bytes, max(self.phase_bytes.values()) - self.budget_bytes, 0)

    @property
    def short_words(self) -> str:
        """How much is short, and of what if that is not the budget."""
        limit = " of kv_cache_memory" if self.short_bytes == self._short_kv_bytes else ""
        return f"{format_bytes(self.short_bytes)} short{limit}"

    @property
    def _short_kv_bytes(self) -> int:
        kv_bytes = sum(term.num_bytes for term in self.terms if term.owner == KV_OWNER)
        return 0 if self.max_kv_bytes is None else max(0, kv_bytes - self.max_kv_bytes)

    @property
    def fits(self) -> bool:
        return self.short_bytes == 0

    @property
    def rows(self) -> tuple[OwnerRow, ...]:
        """By the first part of the owner's path, the largest first."""
        groups: dict[str, list[Term]] = {}
        for term in self.terms:
            groups.setdefault(term.group, []).append(term)
        rows = []
        for owner, terms in groups.items():
            phases = {phase: [term.num_bytes for term in terms if phase in term.phases] for phase in PHASES}
            sums = {phase: sum(sizes) for phase, sizes in phases.items() if sizes}
            rows.append(OwnerRow(owner, sums, _reason(terms)))
        return tuple(sorted(rows, key=lambda row: -row.peak_bytes))

    @property
    def kv_words(self) -> str:
        """The plan in tokens, in the words that people search logs for."""
        if not self.fits:
            return f"a token of KV takes {token_words(self.kv_bytes_per_token)}"
        words = (
            f"KV cache size: {self.kv_tokens:,} tokens ({token_words(self.kv_bytes_per_token)} each), "
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.max_concurrency:.2f}x"
        )
        if not self.tokens_without_groups:
            return words
        return f"{words}; {self.tokens_without_groups:,} tokens if every layer kept all of them"

    def as_dict(self) -> dict[str, object]:
        """For a program; names stay as they are."""
        return {
            "model": self.model,
            "target": self.target,
            "fits": self.fits,
            "short_bytes": self.short_bytes,
            "budget": {"bytes": self.budget_bytes, "reason": self.budget_reason},
            "kv_bytes_per_token": plain_number(self.kv_bytes_per_token),
            "kv_tokens": self.kv_tokens,
            "max_model_len": self.max_model_len,
            "context_note": self.context_note,
            "max_concurrency": round(self.max_concurrency, 4),
            "terms": [
                {"owner": term.owner, "bytes": term.num_bytes, "phases": list(term.phases), "reason": term.reason}
                for term in self.terms
            ],
            "phases": self.phase_bytes,
            "choices": [
                {"name": choice.name, "value": choice.value, "reason": choice.reason} for choice in self.choices
            ],
            "alternatives": [
                {
                    "change": way.change,
                    "kind": way.kind,
                    "option": way.option,
                    "value": way.value,
                    "settings": dict(way.settings),
                    "command": command,
                    "fits": way.fits,
                    "kv_tokens": way.kv_tokens,
                    "max_model_len": way.max_model_len,
                    "max_concurrency": round(way.max_concurrency, 4),
                    "is_smallest": way.is_smallest,
                }
                for way, command in zip(self.alternatives, self.commands, strict=True)
            ],
            "not_in_this_version": list(self.not_in_this_version),
            "command": self.command,
            **({} if self.disk is None else {"weights_on_disk": self.disk.as_dict()}),
            **self._groups_as_dict(),
            **(
                {}
                if not self.ranks
                else {"ranks": [row._asdict() | {"differs": dict(row.differs)} for row in self.ranks]}
            ),
        }

    def _groups_as_dict(self) -> dict[str, object]:
        if not self.groups:
            return {}
        return {
            "cache_groups": [asdict(group) for group in self.groups],
            "tokens_without_groups": self.tokens_without_groups,
        }


def view_of(request: PlanRequest, model: str | None, ranks: RankPlans | None = None) -> PlanView:
    """Plan, and put beside it what else would fit. A plan that does not fit is shown as the smallest that would do.

    Of several ranks the request is that of the one that decides for all; `ranks` are the plans of all of them."""
    try:
        plan, fits = fit_runner(request), True
    except MemoryPlanError:
        plan, fits = unfitting_runner(request), False
    memory, resolved, listed = plan.memory, plan.resolved, list_alternatives(request)
    smallest = next((item for item in listed if item.is_smallest), None)
    can_start = not plan.not_in_this_version and (fits or smallest is not None)
    return PlanView(
        model=request.declared.name,
        target=request.target.name,
        asked=asked_words(request, resolved),
        budget_bytes=memory.budget_bytes,
        budget_reason=memory.budget_reason,
        terms=(*memory.terms, _page_term(memory, plan.groups)),
        kv_bytes_per_token=plan.kv_bytes_per_token,
        kv_tokens=plan.kv_tokens if fits else 0,
        max_model_len=resolved.limits.max_model_len,
        max_concurrency=plan.max_concurrency if fits else 0.0,
        choices=tuple(choice for choice in resolved.choices if choice.name != "memory"),
        alternatives=listed,
        command=start_command(request, model, None if fits else smallest) if can_start else None,
        not_in_this_version=plan.not_in_this_version,
        disk=disk_account(request.declared, resolved, request.mesh),
        context_note=context_note(request, plan, listed) if fits else "",
        commands=tuple(plan_command(request, model, item) for item in listed),
        groups=plan.groups,
        max_kv_bytes=resolved.max_kv_bytes if resolved.max_kv_reason == KV_IS_ASKED else None,
        tokens_without_groups=plan.tokens_without_groups if fits and plan.groups and not plan.states else 0,
        ranks=() if ranks is None else rank_rows(ranks),
    )


class RankRow(NamedTuple):
    """One rank beside the one that decides for all."""

    rank: int
    layers: tuple[int, int] | None
    """The layers of its stage, from the first to before the last; None: all."""
    total_bytes: int
    """While serving."""
    own_pages: int
    """Pages that it would have by itself."""
    differs: Mapping[str, int]
    """Bytes more or less than the one that decides, by owner; empty for that one."""
    is_worst: bool


def rank_rows(ranks: RankPlans) -> tuple[RankRow, ...]:
    """Every rank, and what differs from the one that has the fewest pages."""
    worst = _bytes_of(ranks.plans[ranks.worst])
    rows = []
    for rank, plan in enumerate(ranks.plans):
        own = _bytes_of(plan)
        changes = {owner: own.get(owner, 0) - worst.get(owner, 0) for owner in dict.fromkeys((*own, *worst))}
        differs = {owner: num_bytes for owner, num_bytes in changes.items() if num_bytes}
        rows.append(
            RankRow(rank, plan.mesh.layers, plan.memory.total_bytes, ranks.least[rank], differs, rank == ranks.worst)
        )
    return tuple(rows)


def _bytes_of(plan: RunnerPlan) -> dict[str, int]:
    terms = {term.owner: term.num_bytes for term in plan.memory.terms if "serve" in term.phases}
    return terms | {KV_OWNER: plan.memory.kv_bytes}


def plain_number(number: Fraction) -> int | float:
    """A whole number where it is one."""
    return int(number) if number.denominator == 1 else float(number)


def _reason(terms: list[Term]) -> str:
    """Of the largest term, which is named where it is one of several."""
    largest = max(terms, key=lambda term: term.num_bytes)
    if len(terms) == 1:
        return largest.reason
    name = largest.owner.partition("/")[2]
    return f"{name + ': ' if name else ''}{largest.reason}; and {len(terms) - 1} more"


def _page_term(memory: MemoryPlan, groups: tuple[GroupAccount, ...]) -> Term:
    pages = "1 page" if memory.num_pages == 1 else f"{memory.num_pages:,} pages"
    pages += f" {page_words(groups)}" if groups else ""
    return Term(KV_OWNER, memory.kv_bytes, f"{pages}: {memory.pages_reason}", PAGE_PHASES)


class Cell(NamedTuple):
    """One plan of a sweep."""

    kv_cache_dtype: str
    quantization: str
    """"none" leaves weights as they are."""
    kv_tokens: int
    """0 where it does not fit."""
    is_asked: bool
    runs: bool
    """An engine of this version takes it."""
    kv_protected_layers: int = 0
    """Layers whose pages are in a wider format."""


class _Pages(NamedTuple):
    """A KV format that can be planned."""

    name: str
    request: PlanRequest
    bytes_per_token: Fraction
    num_protected: int


def sweep(request: PlanRequest) -> tuple[Cell, ...]:
    """Every KV format that takes no more than the asked one, with weights as they are and in fewer bits."""
    asked, quantization = settle(request)[1].kv_format.name, request.config.quantization or UNQUANTIZED
    schemes = _schemes(request, quantization)
    return tuple(
        Cell(
            pages.name,
            scheme,
            _tokens(in_scheme(pages.request, scheme)),
            is_asked=(pages.name, scheme) == (asked, quantization),
            runs=not missing_here(request),
            kv_protected_layers=pages.num_protected,
        )
        for pages in _formats(request, asked)
        for scheme in schemes
    )


def _formats(request: PlanRequest, asked: str) -> list[_Pages]:
    """The asked one first, then fewer and fewer bytes; of plain ones one for each number of bytes."""
    first = _pages_in(request, asked)
    found = {} if first is None else {(first.bytes_per_token, ALL_KV_FORMATS[asked].is_quantized and asked): first}
    for kv_format in formats_of(request.declared.keeps_latents, request.declared.is_compressed).values():
        pages = _pages_in(request, kv_format.name)
        if pages is not None and first is not None and pages.bytes_per_token <= first.bytes_per_token:
            found.setdefault((pages.bytes_per_token, kv_format.is_quantized and kv_format.name), pages)
    return sorted(found.values(), key=lambda pages: -pages.bytes_per_token)


def _pages_in(request: PlanRequest, name: str) -> _Pages | None:
    """The same request with pages in that format; None where it contradicts another option, or where no attention reads it."""
    moved = request.with_config(replace(request.config, kv_cache_dtype=name))
    try:
        layout, resolved = settle(moved)
        list_needs(layout, resolved)
    except (ConfigError, UnsupportedModelError):
        return None
    return _Pages(name, moved, layout.bytes_per_token(resolved), len(resolved.protected.layers))


def _schemes(request: PlanRequest, asked: str) -> list[str]:
    """Weights as they are, and the first scheme of each number of bits that can be had; the asked one in any case."""
    return list(dict.fromkeys((UNQUANTIZED, *narrower_schemes(in_scheme(request, UNQUANTIZED)), asked)))


def _tokens(request: PlanRequest) -> int:
    try:
        return find_fit(request).kv_tokens
    except (ConfigError, MemoryPlanError):
        return 0

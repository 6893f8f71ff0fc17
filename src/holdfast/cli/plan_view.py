"""PlanView: data of a plan's table, JSON and page, with verdict, commands and sweep; no torch."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from fractions import Fraction
from typing import NamedTuple

from holdfast.cli.layout import speed_text
from holdfast.cli.plan_commands import Purpose, plan_command, start_command
from holdfast.errors import ConfigError, MemoryPlanError, UnsupportedModelError
from holdfast.memory.on_disk import DiskAccount
from holdfast.memory.planner import KV_OWNER, PAGE_PHASES, PHASES, MemoryPlan, Term
from holdfast.memory.report import GroupAccount, page_words
from holdfast.memory.sizes import format_bytes
from holdfast.planning.alternatives import (
    Alternative,
    best_change,
    context_note,
    in_scheme,
    list_alternatives,
    list_levers,
    narrower_schemes,
)
from holdfast.planning.fit import RunnerPlan, fit_runner, missing_here, plan_resolved, try_fit, unfitting_runner
from holdfast.planning.plan import disk_account
from holdfast.planning.ranks import RankPlans
from holdfast.planning.resolve import KV_IS_GIVEN, Choice, PlanRequest, Resolved, resolve
from holdfast.planning.speed import Range, SpeedEstimate, estimate_speed
from holdfast.planning.terms import list_needs
from holdfast.quant.formats import ALL_KV_FORMATS, formats_of
from holdfast.quant.weight_schemes import UNQUANTIZED

FITS, DOES_NOT_FIT, CANNOT_START = "fits", "does_not_fit", "cannot_start"
"""The statuses of a plan."""
SMALL_SHARE = 0.01
"""Fold owners below this share of the memory into one row."""
NEVER_SMALL = ("weights", KV_OWNER)


def summary_of(request: PlanRequest, resolved: Resolved) -> str:
    """Describe what is planned on one line."""
    limits, ranks, recipe = resolved.limits, request.mesh.num_ranks, resolved.recipe
    weights = f"in {resolved.dtype if recipe.scheme is None else recipe.scheme.name}"
    if request.declared.packed and resolved.packed_account.num_kept:
        weights = f"in {request.declared.release}" if request.declared.release else "as stored"
    if recipe.expert_scheme is not None:
        weights += f" and {recipe.expert_scheme.name}"
    device = "the CPU of this machine" if request.target.kind == "cpu" else request.target.name
    # An unset context shrinks to fit; if nothing fits, it stays unset.
    has_no_context = resolved.may_shorten and limits.max_model_len == 1
    context = "of any length" if has_no_context else f"{limits.max_model_len:,}"
    sequences = "one sequence" if limits.max_num_seqs == 1 else f"up to {limits.max_num_seqs:,} sequences"
    step = "1 token" if limits.max_num_batched_tokens == 1 else f"{limits.max_num_batched_tokens:,} tokens"
    return (
        f"{printable(request.declared.name)} on {f'each of {ranks} x ' if ranks > 1 else ''}{device}: "
        f"weights {weights}, KV pages in {format_text(request, resolved)}, context {context}, {sequences}, "
        f"{step} a step"
    )


def format_text(request: PlanRequest, resolved: Resolved) -> str:
    """Return the format of KV pages, and the number of protected layers."""
    protected = resolved.protected
    if not protected.layers:
        return resolved.kv_format.name
    count = f"{len(protected.layers)} of {len(resolved.all_layers.paged_layers)} layers"
    return f"{resolved.kv_format.name}, {count} in {protected.format.name}"


def printable(name: str) -> str:
    """Replace characters that would move a cursor or end a line."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def token_text(bytes_per_token: Fraction) -> str:
    """Format the bytes of a token; a mean if the cache keeps one row for several tokens."""
    if bytes_per_token.denominator == 1:
        return format_bytes(int(bytes_per_token))
    return f"{float(bytes_per_token):,.2f} B on average"


def device_text(request: PlanRequest) -> str:
    """Return the device as people type it."""
    target, ranks = request.target, request.mesh.num_ranks
    name = "the CPU of this machine" if target.kind == "cpu" else target.key or target.name
    return name if ranks == 1 else f"each of {ranks} x {name}"


def blocked_text(request: PlanRequest) -> str:
    """Say what this version cannot run; empty if it runs the whole request."""
    name = printable(request.declared.name)
    if not missing_here(request):
        return ""
    if "--parameters" in request.declared.typed:
        return "an estimate has no weights"
    if request.declared.not_runnable is not None:
        return f"this version does not run {name}"
    return f"this version does not run on {device_text(request)}"


def speed_dict(speed: SpeedEstimate | None) -> dict[str, object] | None:
    """Return an estimate for JSON."""
    if speed is None:
        return None
    return {name: value._asdict() if isinstance(value, Range) else value for name, value in speed._asdict().items()}


class Start(NamedTuple):
    """A command to paste, and what it gives."""

    title: str
    command: str
    kv_tokens: int
    speed: SpeedEstimate | None


class OwnerRow(NamedTuple):
    """One group of owners: bytes by phase, without phases of no bytes."""

    owner: str
    phase_bytes: dict[str, int]
    reason: str

    @property
    def peak_bytes(self) -> int:
        return max(self.phase_bytes.values())


class PlanView(NamedTuple):
    """A plan and its alternatives; with several ranks, the plan of the rank with the fewest pages."""

    model: str
    target: str
    summary: str
    """Settings, both given and chosen."""
    budget_bytes: int
    budget_reason: str
    terms: tuple[Term, ...]
    """Terms with KV pages; if the plan does not fit, with pages for one longest sequence."""
    kv_bytes_per_token: Fraction
    kv_tokens: int
    """KV capacity in tokens; 0 if nothing fits."""
    max_model_len: int
    max_concurrency: float
    choices: tuple[Choice, ...]
    alternatives: tuple[Alternative, ...]
    command: str | None
    """Command that starts it, with the smallest change that fits; None if nothing fits."""
    not_in_this_version: tuple[str, ...]
    """Parts that cannot run yet."""
    context_note: str
    """The limit that shortened the context, and how to lift it; empty if none did."""
    commands: tuple[str | None, ...]
    """Plan command of each alternative; None if `plan` has no option for it."""
    disk: DiskAccount | None = None
    """Bytes on disk and in memory of a GGUF file."""
    groups: tuple[GroupAccount, ...] = ()
    """Cache groups, if some layers free pages."""
    tokens_without_groups: int = 0
    """Tokens that would fit if every layer kept every token."""
    max_kv_bytes: int | None = None
    """The bound of kv_cache_memory."""
    ranks: "tuple[RankRow, ...]" = ()
    device: str = ""
    """The device as people type it."""
    blocked: str = ""
    """Part that this version cannot run; empty if it can start."""
    purpose: Purpose = "serve"
    is_few: bool = False
    """True if only one sequence fits, so that this is a plan for a chat."""
    speed: SpeedEstimate | None = None
    """Speed estimate; None if it does not fit or the device's speed is unknown."""
    starts: tuple[Start, ...] = ()
    """Commands that start it or the best change that fits, best first."""

    @property
    def status(self) -> str:
        return CANNOT_START if self.blocked else FITS if self.fits else DOES_NOT_FIT

    @property
    def verdict(self) -> str:
        tokens, short = f"{self.kv_tokens:,} tokens", f"{self.short_text} on {self.device}"
        if self.blocked:
            would = f"it would fit: {tokens}" if self.fits else f"nor does it fit: {short}"
            return f"CANNOT START: {self.blocked}; {would}"
        if not self.fits:
            return f"NO: {short}"
        speed = f", {speed_text(self.speed)} for one stream" if self.speed is not None else ""
        return f"YES{', for one chat' if self.is_few else ''}: {tokens}{speed}"

    @property
    def best_command(self) -> str | None:
        return self.starts[0].command if self.starts else None

    @property
    def phase_bytes(self) -> dict[str, int]:
        return {phase: sum(term.num_bytes for term in self.terms if phase in term.phases) for phase in PHASES}

    @property
    def short_bytes(self) -> int:
        """Bytes missing in the largest phase, or in kv_cache_memory if that is more; 0 if all fits."""
        return max(self._short_kv_bytes, max(self.phase_bytes.values()) - self.budget_bytes, 0)

    @property
    def short_text(self) -> str:
        """The shortfall as text, with its limit unless that is the budget."""
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
    def folded_rows(self) -> tuple[OwnerRow, ...]:
        """`rows` with small owners in one row, at the end."""
        whole = max(self.budget_bytes, *self.phase_bytes.values(), 1)
        small = [row for row in self.rows if row.peak_bytes < SMALL_SHARE * whole and row.owner not in NEVER_SMALL]
        if len(small) < 2:
            return self.rows
        sums = {phase: sum(row.phase_bytes.get(phase, 0) for row in small) for phase in PHASES}
        names = ", ".join(row.owner for row in small)
        folded = OwnerRow(f"{len(small)} small owners", {phase: size for phase, size in sums.items() if size}, names)
        return (*(row for row in self.rows if row not in small), folded)

    @property
    def rows(self) -> tuple[OwnerRow, ...]:
        """Owners by the first part of their path, the largest first."""
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
    def kv_text(self) -> str:
        """The plan in tokens, in the phrases that people search logs for."""
        if not self.fits:
            return f"a token of KV takes {token_text(self.kv_bytes_per_token)}"
        text = (
            f"KV cache size: {self.kv_tokens:,} tokens ({token_text(self.kv_bytes_per_token)} each), "
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.max_concurrency:.2f}x"
        )
        if not self.tokens_without_groups:
            return text
        return f"{text}; {self.tokens_without_groups:,} tokens if every layer kept all of them"

    def as_dict(self) -> dict[str, object]:
        """Return the plan for JSON; its keys never change."""
        found: dict[str, object] = {
            "verdict": self.verdict,
            "status": self.status,
            "for": self.purpose,
            "speed": speed_dict(self.speed),
            "best_command": self.best_command,
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
            "choices": [choice._asdict() for choice in self.choices],
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
                    "speed": speed_dict(way.speed),
                }
                for way, command in zip(self.alternatives, self.commands, strict=True)
            ],
            "not_in_this_version": list(self.not_in_this_version),
            "command": self.command,
        }
        if self.disk is not None:
            found["weights_on_disk"] = self.disk.as_dict()
        if self.groups:
            found["cache_groups"] = [asdict(group) for group in self.groups]
            found["tokens_without_groups"] = self.tokens_without_groups
        if self.ranks:
            found["ranks"] = [row._asdict() | {"differs": dict(row.differs)} for row in self.ranks]
        return found


class Beside(NamedTuple):
    """Plans besides the shown one."""

    chat: PlanRequest | None = None
    """One chat, if the plan has more sequences and fits."""
    many: PlanRequest | None = None
    """The plan with the default sequences, if only one chat fits."""


def view_of(
    request: PlanRequest,
    model: str | None,
    ranks: RankPlans | None = None,
    purpose: Purpose = "serve",
    beside: Beside | None = None,
) -> PlanView:
    """Plan a request and list what else would fit. A plan that does not fit shows the smallest that would do.

    With several ranks, `request` is that of the rank with the fewest pages; `ranks` has all plans.
    """
    beside = Beside() if beside is None else beside
    settled = resolve(request)
    found = plan_resolved(settled)
    fits = isinstance(found, RunnerPlan)
    planned = found if isinstance(found, RunnerPlan) else unfitting_runner(settled)
    memory, resolved, listed = planned.memory, planned.resolved, list_alternatives(settled)
    smallest = next((item for item in listed if item.is_smallest), None)
    can_start = not planned.not_in_this_version and (fits or smallest is not None)
    # A stage of a model with entries may have none, and windows alone. Near pages come beside those of every token.
    has_windows = any(group.window is not None and not group.is_blocked for group in planned.cache_groups)
    has_windows = has_windows and not request.declared.is_compressed
    speed = estimate_speed(planned) if fits else None
    started = None
    if can_start:
        started = start_command(request, model, None if fits else smallest, purpose)
    view = PlanView(
        model=request.declared.name,
        target=request.target.name,
        summary=summary_of(request, resolved),
        budget_bytes=memory.budget_bytes,
        budget_reason=memory.budget_reason,
        terms=(*memory.terms, _page_term(memory, planned.groups)),
        kv_bytes_per_token=planned.kv_bytes_per_token,
        kv_tokens=planned.kv_tokens if fits else 0,
        max_model_len=resolved.limits.max_model_len,
        max_concurrency=planned.max_concurrency if fits else 0.0,
        choices=(*_purpose_choices(beside), *(choice for choice in resolved.choices if choice.name != "memory")),
        alternatives=listed,
        command=started,
        not_in_this_version=planned.not_in_this_version,
        disk=disk_account(resolved),
        context_note=context_note(settled, planned, listed) if fits else "",
        commands=tuple(plan_command(request, model, item, purpose) for item in listed),
        groups=planned.groups,
        max_kv_bytes=resolved.max_kv_bytes if resolved.max_kv_reason == KV_IS_GIVEN else None,
        tokens_without_groups=planned.tokens_without_groups if fits and has_windows else 0,
        ranks=() if ranks is None else rank_rows(ranks),
        device=device_text(request),
        blocked=blocked_text(request),
        purpose=purpose,
        is_few=beside.many is not None,
        speed=speed,
    )
    if not can_start:
        return view
    return view._replace(starts=_starts(view, request, model, beside) if fits else _ways_out(view, request, model))


def _purpose_choices(beside: Beside) -> tuple[Choice, ...]:
    """Explain why the plan is for one chat if --for did not request it."""
    if beside.many is None:
        return ()
    num_seqs = resolve(beside.many).limits.max_num_seqs
    return (Choice("for", "chat", f"one sequence fits, and up to {num_seqs} at once do not"),)


TITLES: Mapping[Purpose, str] = {"serve": "to serve it", "chat": "to chat with it", "run": "to run one prompt"}


def _starts(view: PlanView, request: PlanRequest, model: str | None, beside: Beside) -> tuple[Start, ...]:
    """List commands of a plan that fits: its own, then those of one chat, or of a small server beside a chat."""
    assert view.command is not None, "what fits and runs can be started"
    starts = [Start(TITLES[view.purpose], view.command, view.kv_tokens, view.speed)]
    chat = None if beside.chat is None else try_fit(resolve(beside.chat))
    if chat is not None and beside.chat is not None:
        command = start_command(beside.chat, model, None, "chat")
        if command is not None and command.startswith("holdfast chat"):
            speed = estimate_speed(chat)
            starts.append(Start("to chat with it, one sequence", command, chat.kv_tokens, speed))
    if beside.many is not None:
        fewer = best_change(list_levers(resolve(beside.many), None))
        command = None if fewer is None else start_command(beside.many, model, fewer)
        if fewer is not None and command is not None:
            starts.append(Start(f"to serve it: {fewer.change}", command, fewer.kv_tokens, fewer.speed))
    return tuple(starts)


def _ways_out(view: PlanView, request: PlanRequest, model: str | None) -> tuple[Start, ...]:
    """Return the best change that fits; for another GPU, the command of its plan."""
    best = best_change(view.alternatives)
    if best is None:
        return ()
    command = start_command(request, model, best, view.purpose) or plan_command(request, model, best, view.purpose)
    return () if command is None else (Start(f"what fits best: {best.change}", command, best.kv_tokens, best.speed),)


class RankRow(NamedTuple):
    """One rank, compared with the one with the fewest pages."""

    rank: int
    layers: tuple[int, int] | None
    """First and end layer of its stage; None for all layers."""
    total_bytes: int
    """Bytes while serving."""
    own_pages: int
    """Pages that fit on this rank alone."""
    differs: Mapping[str, int]
    """Difference in bytes by owner."""
    is_worst: bool


def rank_rows(ranks: RankPlans) -> tuple[RankRow, ...]:
    """Compare every rank with the one with the fewest pages."""
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
    """Return an integer if the number is one."""
    return int(number) if number.denominator == 1 else float(number)


def _reason(terms: list[Term]) -> str:
    """Return the reason of the largest term, with its name if there are several."""
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
    """Weight scheme; "none" keeps weights as stored."""
    kv_tokens: int
    """KV capacity in tokens; 0 if it does not fit."""
    is_planned: bool
    """True for the plan that is shown."""
    runs: bool
    """True if this version runs it."""
    kv_protected_layers: int = 0
    """Protected layers, whose KV keeps more bits."""

    def as_dict(self) -> dict[str, object]:
        """Return the cell for JSON."""
        fields = self._asdict()
        return {("is_asked" if name == "is_planned" else name): value for name, value in fields.items()}


class _Pages(NamedTuple):
    """A KV format that can be planned."""

    name: str
    request: PlanRequest
    bytes_per_token: Fraction
    num_protected: int


def sweep(request: PlanRequest) -> tuple[Cell, ...]:
    """Plan every KV format at most as wide as the request's, with weights as stored and in fewer bits."""
    own, quantization = resolve(request).kv_format.name, request.config.quantization or UNQUANTIZED
    schemes = dict.fromkeys((UNQUANTIZED, *narrower_schemes(resolve(in_scheme(request, UNQUANTIZED))), quantization))
    return tuple(
        Cell(
            pages.name,
            scheme,
            _tokens(in_scheme(pages.request, scheme)),
            is_planned=(pages.name, scheme) == (own, quantization),
            runs=not missing_here(request),
            kv_protected_layers=pages.num_protected,
        )
        for pages in _formats(request, own)
        for scheme in schemes
    )


def _formats(request: PlanRequest, own: str) -> list[_Pages]:
    """List the request's own format, then narrower ones; of plain formats one per size."""
    first = _pages_in(request, own)
    found = {} if first is None else {(first.bytes_per_token, ALL_KV_FORMATS[own].is_quantized and own): first}
    for kv_format in formats_of(request.declared.keeps_latents, request.declared.is_compressed).values():
        pages = _pages_in(request, kv_format.name)
        if pages is not None and first is not None and pages.bytes_per_token <= first.bytes_per_token:
            found.setdefault((pages.bytes_per_token, kv_format.is_quantized and kv_format.name), pages)
    return sorted(found.values(), key=lambda pages: -pages.bytes_per_token)


def _pages_in(request: PlanRequest, name: str) -> _Pages | None:
    """Change the KV format of a request; None if it conflicts with an option or no attention backend reads it."""
    moved = replace(request, config=replace(request.config, kv_cache_dtype=name))
    try:
        resolved = resolve(moved)
        list_needs(resolved)
    except (ConfigError, UnsupportedModelError):
        return None
    return _Pages(name, moved, resolved.bytes_per_token(), len(resolved.protected.layers))


def _tokens(request: PlanRequest) -> int:
    try:
        return fit_runner(request).kv_tokens
    except (ConfigError, MemoryPlanError):
        return 0

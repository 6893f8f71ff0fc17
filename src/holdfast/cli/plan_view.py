"""PlanView: one value behind table, JSON and page of a plan, whether it fits or not; its verdict; the sweep; no torch."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from fractions import Fraction
from typing import NamedTuple

from holdfast.cli.plan_commands import Purpose, plan_command, start_command
from holdfast.cli.tables import speed_words
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
from holdfast.planning.disk_account import disk_account
from holdfast.planning.fit import RunnerPlan, fit_runner, missing_here, plan_resolved, try_fit, unfitting_runner
from holdfast.planning.ranks import RankPlans
from holdfast.planning.resolve import KV_IS_GIVEN, Choice, PlanRequest, Resolved, resolve
from holdfast.planning.speed import Range, SpeedEstimate, estimate_speed
from holdfast.planning.target import too_old_reason
from holdfast.planning.terms import list_needs
from holdfast.quant.formats import ALL_KV_FORMATS, formats_of
from holdfast.quant.weight_schemes import UNQUANTIZED

FITS, DOES_NOT_FIT, CANNOT_START = "fits", "does_not_fit", "cannot_start"
"""What a plan may come to."""
SMALL_SHARE = 0.01
"""Of the memory: owners below it share one row, unless all are shown."""
NEVER_SMALL = ("weights", KV_OWNER)


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


def device_words(request: PlanRequest) -> str:
    """The device in as few words as a person types."""
    target, ranks = request.target, request.mesh.num_ranks
    name = "the CPU of this machine" if target.kind == "cpu" else target.key or target.name
    return name if ranks == 1 else f"each of {ranks} x {name}"


def blocked_words(request: PlanRequest) -> str:
    """What this version does not run, in words; empty if it runs all of the request."""
    name = printable(request.declared.name)
    if not missing_here(request):
        return ""
    if "--parameters" in request.declared.typed:
        return "an estimate has no weights"
    if request.declared.not_runnable is not None:
        return f"this version does not run {name}"
    if too_old_reason(request.target) is not None:
        return f"this version does not run on {device_words(request)}"
    return f"this version does not run {name} on several GPUs"


def speed_dict(speed: SpeedEstimate | None) -> dict[str, object] | None:
    """For a program: every range with its two bounds."""
    if speed is None:
        return None
    return {name: value._asdict() if isinstance(value, Range) else value for name, value in speed._asdict().items()}


class Start(NamedTuple):
    """A command that can be pasted, and what it gives."""

    title: str
    command: str
    kv_tokens: int
    speed: SpeedEstimate | None


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
    device: str = ""
    """The device as a person types it."""
    blocked: str = ""
    """What this version does not run, in words; empty if it can be started."""
    purpose: Purpose = "serve"
    """The command that it is a plan for."""
    is_few: bool = False
    """More sequences at once do not fit, so that this is a plan for a chat."""
    speed: SpeedEstimate | None = None
    """None if it does not fit, or if nothing is known of the device's speed."""
    starts: tuple[Start, ...] = ()
    """Commands that start it, or what fits best, the best first."""

    @property
    def status(self) -> str:
        """One of FITS, DOES_NOT_FIT and CANNOT_START."""
        return CANNOT_START if self.blocked else FITS if self.fits else DOES_NOT_FIT

    @property
    def verdict(self) -> str:
        """The answer, on one line."""
        tokens, short = f"{self.kv_tokens:,} tokens", f"{self.short_words} on {self.device}"
        if self.blocked:
            would = f"it would fit: {tokens}" if self.fits else f"nor does it fit: {short}"
            return f"CANNOT START: {self.blocked}; {would}"
        if not self.fits:
            return f"NO: {short}"
        speed = f", {speed_words(self.speed)} for one stream" if self.speed is not None else ""
        return f"YES{', for one chat' if self.is_few else ''}: {tokens}{speed}"

    @property
    def best_command(self) -> str | None:
        """What starts it, or what fits best; None if this version starts nothing of it."""
        return self.starts[0].command if self.starts else None

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
    def folded_rows(self) -> tuple[OwnerRow, ...]:
        """The same with small owners in one row, at the end."""
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
                    "speed": speed_dict(way.speed),
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


class Beside(NamedTuple):
    """Plans beside the one that is shown, for the commands that need them."""

    chat: PlanRequest | None = None
    """That of one chat, if the plan is of more sequences and fits."""
    many: PlanRequest | None = None
    """That of as many sequences as an engine takes by default, if it does not fit and one chat does."""


def view_of(
    request: PlanRequest,
    model: str | None,
    ranks: RankPlans | None = None,
    purpose: Purpose = "serve",
    beside: Beside | None = None,
) -> PlanView:
    """Plan, and put beside it what else would fit. A plan that does not fit is shown as the smallest that would do.

    Of several ranks the request is that of the one that decides for all; `ranks` are the plans of all of them."""
    beside = Beside() if beside is None else beside
    settled = resolve(request)
    found = plan_resolved(settled)
    fits = isinstance(found, RunnerPlan)
    planned = found if isinstance(found, RunnerPlan) else unfitting_runner(settled)
    memory, resolved, listed = planned.memory, planned.resolved, list_alternatives(settled)
    smallest = next((item for item in listed if item.is_smallest), None)
    can_start = not planned.not_in_this_version and (fits or smallest is not None)
    speed = estimate_speed(planned) if fits else None
    started = None
    if can_start:
        started = start_command(request, model, None if fits else smallest, purpose)
    view = PlanView(
        model=request.declared.name,
        target=request.target.name,
        asked=asked_words(request, resolved),
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
        tokens_without_groups=planned.tokens_without_groups if fits and planned.groups and not planned.states else 0,
        ranks=() if ranks is None else rank_rows(ranks),
        device=device_words(request),
        blocked=blocked_words(request),
        purpose=purpose,
        is_few=beside.many is not None,
        speed=speed,
    )
    if not can_start:
        return view
    return view._replace(starts=_starts(view, request, model, beside) if fits else _ways_out(view, request, model))


def _purpose_choices(beside: Beside) -> tuple[Choice, ...]:
    """Why a plan is one for a chat, if nothing said so."""
    if beside.many is None:
        return ()
    num_seqs = resolve(beside.many).limits.max_num_seqs
    return (Choice("for", "chat", f"one sequence fits, and up to {num_seqs} at once do not"),)


TITLES: Mapping[Purpose, str] = {"serve": "to serve it", "chat": "to chat with it", "run": "to run one prompt"}


def _starts(view: PlanView, request: PlanRequest, model: str | None, beside: Beside) -> tuple[Start, ...]:
    """What starts a plan that fits; then one chat beside a server, or a server of few sequences beside a chat."""
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
    """What fits best of a plan that does not; on another GPU the plan of it, since nothing starts that here."""
    best = best_change(view.alternatives)
    if best is None:
        return ()
    command = start_command(request, model, best, view.purpose) or plan_command(request, model, best, view.purpose)
    return () if command is None else (Start(f"what fits best: {best.change}", command, best.kv_tokens, best.speed),)


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
    asked, quantization = resolve(request).kv_format.name, request.config.quantization or UNQUANTIZED
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
    moved = replace(request, config=replace(request.config, kv_cache_dtype=name))
    try:
        resolved = resolve(moved)
        list_needs(resolved)
    except (ConfigError, UnsupportedModelError):
        return None
    return _Pages(name, moved, resolved.bytes_per_token(), len(resolved.protected.layers))


def _schemes(request: PlanRequest, asked: str) -> list[str]:
    """Weights as they are, and the first scheme of each number of bits that can be had; the asked one in any case."""
    return list(dict.fromkeys((UNQUANTIZED, *narrower_schemes(resolve(in_scheme(request, UNQUANTIZED))), asked)))


def _tokens(request: PlanRequest) -> int:
    try:
        return fit_runner(request).kv_tokens
    except (ConfigError, MemoryPlanError):
        return 0

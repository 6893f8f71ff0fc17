"""A plan as everybody shows it, whether it fits or not: one value behind the table, the JSON and the page; no torch."""

from fractions import Fraction
from typing import NamedTuple

from holdfast.cli.plan_words import asked_words, start_command, token_words
from holdfast.errors import MemoryPlanError
from holdfast.memory.planner import KV_OWNER, PAGE_PHASES, PHASES, MemoryPlan, Term
from holdfast.runner.planning.alternatives import Alternative, list_alternatives
from holdfast.runner.planning.plan_fit import Wish, fit_runner, unfitting_runner
from holdfast.runner.planning.resolve import Choice


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

    @property
    def phase_bytes(self) -> dict[str, int]:
        return {phase: sum(term.num_bytes for term in self.terms if phase in term.phases) for phase in PHASES}

    @property
    def short_bytes(self) -> int:
        """How much more the phase that needs most would need; 0 where all of them fit."""
        return max(0, max(self.phase_bytes.values()) - self.budget_bytes)

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
        return (
            f"KV cache size: {self.kv_tokens:,} tokens ({token_words(self.kv_bytes_per_token)} each), "
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.max_concurrency:.2f}x"
        )

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
                    "option": way.option,
                    "value": way.value,
                    "fits": way.fits,
                    "kv_tokens": way.kv_tokens,
                    "max_concurrency": round(way.max_concurrency, 4),
                    "not_in_this_version": way.not_in_this_version,
                    "is_smallest": way.is_smallest,
                }
                for way in self.alternatives
            ],
            "not_in_this_version": list(self.not_in_this_version),
            "command": self.command,
        }


def view_of(wish: Wish, model: str | None) -> PlanView:
    """Plan, and put beside it what else would fit. A plan that does not fit is shown as the smallest that would do."""
    try:
        plan, fits = fit_runner(wish), True
    except MemoryPlanError:
        plan, fits = unfitting_runner(wish), False
    memory, resolved, listed = plan.memory, plan.resolved, list_alternatives(wish)
    smallest = next((item for item in listed if item.is_smallest), None)
    can_start = not plan.not_in_this_version and (fits or smallest is not None)
    return PlanView(
        model=wish.blueprint.name,
        target=wish.target.name,
        asked=asked_words(wish, resolved),
        budget_bytes=memory.budget_bytes,
        budget_reason=memory.budget_reason,
        terms=(*memory.terms, _pages(memory)),
        kv_bytes_per_token=plan.kv_bytes_per_token,
        kv_tokens=plan.kv_tokens if fits else 0,
        max_model_len=resolved.limits.max_model_len,
        max_concurrency=plan.max_concurrency if fits else 0.0,
        choices=tuple(choice for choice in resolved.choices if choice.name != "memory"),
        alternatives=listed,
        command=start_command(wish, model, None if fits else smallest) if can_start else None,
        not_in_this_version=plan.not_in_this_version,
    )


def plain_number(number: Fraction) -> int | float:
    """A whole number where it is one."""
    return int(number) if number.denominator == 1 else float(number)


def _reason(terms: list[Term]) -> str:
    """Of the largest term, which is named where it is one of several."""
    largest = max(terms, key=lambda term: term.num_bytes)
    if len(terms) == 1:
        return largest.reason
    return f"{largest.owner.partition('/')[2]}: {largest.reason}; and {len(terms) - 1} more"


def _pages(memory: MemoryPlan) -> Term:
    pages = "1 page" if memory.num_pages == 1 else f"{memory.num_pages:,} pages"
    return Term(KV_OWNER, memory.kv_bytes, f"{pages}: {memory.pages_reason}", PAGE_PHASES)

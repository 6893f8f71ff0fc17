"""The memory table: what each owner was planned to take, what it holds, and what the device says of it all; no torch."""

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from holdfast.memory.ledger import Entry, Ledger
from holdfast.memory.on_disk import DiskAccount
from holdfast.memory.planner import KV_OWNER, PHASES, MemoryPlan


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One owner. What it holds is None where it has nothing of its own: the plan then is a bound, or the phase is over."""

    owner: str
    planned_bytes: int
    """While serving; for an owner that is gone by then, the most of any phase."""
    held_bytes: int | None
    reason: str
    phases: tuple[str, ...] = PHASES
    peak_bytes: int | None = None
    """The most that it ever held at one time."""


@dataclass(frozen=True, slots=True)
class GroupAccount:
    """One cache group in numbers that a person can check."""

    name: str
    num_layers: int
    page_tokens: int
    """Tokens that a page holds for all of its layers."""
    prompt_pages: int
    """That one longest sequence holds at the most, while its prompt is computed."""
    decode_pages: int
    """That it holds at the most from then on."""
    padding_bytes: int
    """Of a page that the group has taken, what it has no layer for."""
    padding_share: float


class RankMemory(NamedTuple):
    """What another rank of the same engine was planned to take, holds, and took as its device says."""

    rank: int
    device: str
    planned_bytes: int
    """While serving."""
    held_bytes: int
    measured_bytes: int | None = None
    """None where nobody measured."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The table, and what it means in tokens."""

    rows: tuple[MemoryRow, ...]
    """The largest first."""
    budget_bytes: int
    budget_reason: str
    kv_bytes_per_token: int
    kv_tokens: int
    max_model_len: int
    phase_bytes: dict[str, int] = field(default_factory=dict)
    """Planned bytes of each phase."""
    measured_bytes: int | None = None
    """What this engine took of its device, as the device says; None where nobody measured."""
    entries: tuple[Entry, ...] = ()
    """Every owner by its full path, in the order in which they were taken."""
    disk: DiskAccount | None = None
    """What the weights took on disk, where that is something else than what they take here."""
    context_note: str = ""
    """Which limit shortened the context, and what would lift it; empty where none did."""
    kv_note: str = ""
    """What quantized pages mean for answers, on one line; empty where they are not."""
    kv_groups: tuple[GroupAccount, ...] = ()
    """Where some layers give pages back: who shares the pages."""
    ranks: tuple[RankMemory, ...] = ()
    """The other ranks, where there are several: all above is of rank 0."""

    @property
    def planned_bytes(self) -> int:
        """While serving."""
        return sum(row.planned_bytes for row in self.rows if "serve" in row.phases)

    @property
    def held_bytes(self) -> int:
        return sum(row.held_bytes or 0 for row in self.rows)

    @property
    def unaccounted_bytes(self) -> int | None:
        """What the device says was taken and no owner holds; None where nobody measured."""
        return None if self.measured_bytes is None else self.measured_bytes - self.held_bytes

    def as_dict(self) -> dict[str, object]:
        """The same for a program."""
        fields = asdict(self)
        del fields["entries"]
        del fields["disk"]
        if not self.kv_groups:
            del fields["kv_groups"]
        del fields["ranks"]
        if self.ranks:
            fields["ranks"] = [rank._asdict() for rank in self.ranks]
        disk = {} if self.disk is None else {"weights_on_disk": self.disk.as_dict()}
        return (
            fields
            | disk
            | {
                "planned_bytes": self.planned_bytes,
                "held_bytes": self.held_bytes,
                "unaccounted_bytes": self.unaccounted_bytes,
            }
        )


def memory_report(
    plan: MemoryPlan,
    ledger: Ledger,
    page_tokens: int,
    max_model_len: int,
    measured_bytes: int | None = None,
    groups: tuple[GroupAccount, ...] = (),
) -> MemoryReport:
    """Hold the plan against the ledger, owner by owner (the first part of each path), and both against the device."""
    planned: dict[str, dict[str, int]] = {}
    reasons: dict[str, str] = {}
    for phase in reversed(PHASES):
        for row in plan.table(phase).rows:
            planned.setdefault(row.owner, {})[phase] = row.num_bytes
            reasons.setdefault(row.owner, row.reason)
    words = page_words(groups) or f"of {page_tokens} tokens"
    reasons[KV_OWNER] = f"{plan.num_pages} pages {words}: {plan.pages_reason}"
    held, peaks = ledger.group_bytes(), ledger.group_peaks()
    unplanned = held.keys() - planned.keys()
    assert not unplanned, f"the ledger holds owners that no plan knows: {sorted(unplanned)}"
    rows = [
        MemoryRow(
            owner,
            by_phase.get("serve", max(by_phase.values())),
            held.get(owner),
            reasons[owner],
            tuple(phase for phase in PHASES if phase in by_phase),
            peaks.get(owner),
        )
        for owner, by_phase in planned.items()
    ]
    return MemoryReport(
        tuple(sorted(rows, key=lambda row: -row.planned_bytes)),
        plan.budget_bytes,
        plan.budget_reason,
        plan.page_bytes // page_tokens,
        plan.num_pages * page_tokens,
        max_model_len,
        plan.phase_bytes,
        measured_bytes,
        tuple(ledger),
        kv_groups=groups,
    )


def page_words(groups: tuple[GroupAccount, ...]) -> str:
    """What a page holds, where that is not the same for all layers, or pages are given back; else nothing."""
    return f"of {' or '.join(f'{group.page_tokens} tokens ({group.name})' for group in groups)}" if groups else ""

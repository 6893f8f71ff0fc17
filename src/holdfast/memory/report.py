"""MemoryReport: planned and held bytes of each owner, and what the device reports; no torch."""

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from holdfast.memory.ledger import Entry, Ledger
from holdfast.memory.on_disk import DiskAccount
from holdfast.memory.planner import KV_OWNER, PHASES, MemoryPlan


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One owner. Its held bytes are None without memory of its own: the plan is a bound, or the phase is over."""

    owner: str
    planned_bytes: int
    """Bytes while serving; for an owner that is gone by then, the most of any phase."""
    held_bytes: int | None
    reason: str
    phases: tuple[str, ...] = PHASES
    peak_bytes: int | None = None
    """Most bytes that it held at one time."""


@dataclass(frozen=True, slots=True)
class GroupAccount:
    """Page counts of one cache group."""

    name: str
    num_layers: int
    page_tokens: int
    """Tokens that a page holds for all of its layers."""
    prompt_pages: int
    """Most pages of one longest sequence during prefill."""
    decode_pages: int
    """Most pages of that sequence during decode."""
    padding_bytes: int
    """Bytes of a group's page that no layer uses."""
    padding_share: float


class RankMemory(NamedTuple):
    """Planned, held and measured bytes of another rank of the engine."""

    rank: int
    device: str
    planned_bytes: int
    """Bytes while serving."""
    held_bytes: int
    measured_bytes: int | None = None
    """None if not measured."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory by owner, and its capacity in tokens."""

    rows: tuple[MemoryRow, ...]
    """Rows, the largest first."""
    budget_bytes: int
    budget_reason: str
    kv_bytes_per_token: int
    kv_tokens: int
    max_model_len: int
    phase_bytes: dict[str, int] = field(default_factory=dict)
    """Planned bytes of each phase."""
    measured_bytes: int | None = None
    """Bytes of this engine, as the device reports; None if not measured."""
    entries: tuple[Entry, ...] = ()
    """Every owner by its full path, in the order in which they were taken."""
    disk: DiskAccount | None = None
    """Bytes of the weights on disk, if they differ from memory."""
    context_note: str = ""
    """The limit that shortened the context, and how to lift it; empty if none did."""
    kv_note: str = ""
    """Effect of quantized pages on answers, on one line; empty if they are not quantized."""
    kv_groups: tuple[GroupAccount, ...] = ()
    """Cache groups, if some layers free pages."""
    ranks: tuple[RankMemory, ...] = ()
    """The other ranks; everything above is about rank 0."""

    @property
    def planned_bytes(self) -> int:
        """Bytes while serving."""
        return sum(row.planned_bytes for row in self.rows if "serve" in row.phases)

    @property
    def held_bytes(self) -> int:
        return sum(row.held_bytes or 0 for row in self.rows)

    @property
    def unaccounted_bytes(self) -> int | None:
        """Bytes that the device reports beyond all owners; None if not measured."""
        return None if self.measured_bytes is None else self.measured_bytes - self.held_bytes

    def as_dict(self) -> dict[str, object]:
        """Return JSON values."""
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
    """Compare the plan with the ledger by owner (the first part of each path), and both with the device."""
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
    """Describe a page's content if layers differ or free pages; else return an empty string."""
    return f"of {' or '.join(f'{group.page_tokens} tokens ({group.name})' for group in groups)}" if groups else ""

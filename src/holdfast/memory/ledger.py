"""Who holds how many bytes, and why: one ledger per engine, owners as paths such as weights/layers.3.qkv.weight; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One owner's bytes."""

    owner: str
    num_bytes: int
    reason: str


class Ledger:
    """Bytes by owner. Two engines in a process have two ledgers and never see each other."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def record(self, owner: str, num_bytes: int, reason: str) -> None:
        """Enter an owner's bytes; an owner is entered once."""
        assert owner not in self._entries, f"{owner=} is in the ledger already"
        assert num_bytes >= 0, f"{owner=} cannot hold {num_bytes=}"
        self._entries[owner] = Entry(owner, num_bytes, reason)

    def release(self, owner: str) -> None:
        """Take an owner out."""
        del self._entries[owner]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def total_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries.values())

    def group_bytes(self) -> dict[str, int]:
        """Bytes by the first part of the owner's path, in the order of entry."""
        groups: dict[str, int] = {}
        for entry in self._entries.values():
            group = entry.owner.partition("/")[0]
            groups[group] = groups.get(group, 0) + entry.num_bytes
        return groups

    def group_reasons(self) -> dict[str, str]:
        """The first reason given in each group, for the table."""
        reasons: dict[str, str] = {}
        for entry in self._entries.values():
            reasons.setdefault(entry.owner.partition("/")[0], entry.reason)
        return reasons

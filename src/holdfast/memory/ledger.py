"""Ledger: current bytes, peak bytes and reason of each owner; no torch.

One for each engine; owners are paths such as weights/layers.3.qkv.weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One owner's bytes."""

    owner: str
    num_bytes: int
    reason: str
    peak_bytes: int
    """Most bytes that this owner ever held: more than now if it was released and recorded again."""


class Ledger:
    """Bytes by owner. Two engines in a process have two ledgers and never see each other."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._peaks: dict[str, int] = {}
        self._group_now: dict[str, int] = {}
        self._group_peaks: dict[str, int] = {}
        self.total_bytes = 0
        self.peak_bytes = 0
        """Most bytes held at one time."""

    def record(self, owner: str, num_bytes: int, reason: str) -> None:
        """Record an owner's bytes; an owner is recorded once."""
        assert owner not in self._entries, f"{owner=} is in the ledger already"
        assert num_bytes >= 0, f"{owner=} cannot hold {num_bytes=}"
        self._peaks[owner] = max(num_bytes, self._peaks.get(owner, 0))
        self._entries[owner] = Entry(owner, num_bytes, reason, self._peaks[owner])
        self._add(owner, num_bytes)

    def release(self, owner: str) -> None:
        """Remove an owner; its peak stays."""
        assert owner in self._entries, f"{owner=} is not in the ledger"
        self._add(owner, -self._entries.pop(owner).num_bytes)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def peaks(self) -> dict[str, int]:
        """Return the peak bytes of each owner, released ones included."""
        return dict(self._peaks)

    def group_bytes(self) -> dict[str, int]:
        """Return bytes by the first part of the owner's path, in order of entry."""
        return {group: self._group_now[group] for group in self.group_reasons()}

    def group_peaks(self) -> dict[str, int]:
        """Return the peak bytes of each group, released ones included."""
        return dict(self._group_peaks)

    def group_reasons(self) -> dict[str, str]:
        """Return the first reason in each group, for the table."""
        reasons: dict[str, str] = {}
        for entry in self._entries.values():
            reasons.setdefault(_group(entry.owner), entry.reason)
        return reasons

    def _add(self, owner: str, num_bytes: int) -> None:
        group = _group(owner)
        self._group_now[group] = self._group_now.get(group, 0) + num_bytes
        self._group_peaks[group] = max(self._group_now[group], self._group_peaks.get(group, 0))
        self.total_bytes += num_bytes
        self.peak_bytes = max(self.total_bytes, self.peak_bytes)


def _group(owner: str) -> str:
    return owner.partition("/")[0]

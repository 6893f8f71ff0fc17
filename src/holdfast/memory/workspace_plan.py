"""TensorSpec (name, shape, type) and WorkspacePlan, the scratch buffers of a step before they are allocated; no torch.

A lane is memory that its owners use in turn, as large as its largest request. Work that may overlap (two micro-batches,
two streams) takes separate lanes.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import WorkspaceError, shown
from holdfast.memory.planner import PAGE_PHASES, Term
from holdfast.quant.formats import DTYPE_BYTES, bytes_for

ALIGNMENT_BYTES = 256
"""Alignment of every view: that of CUDA's allocator, and four cache lines of a CPU."""


class TensorSpec(NamedTuple):
    """One future tensor. A tuple, because requests are looked up by it twice a layer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the type."""

    @property
    def num_bytes(self) -> int:
        return bytes_for(self.dtype, self.shape)

    @property
    def aligned_bytes(self) -> int:
        return aligned(self.num_bytes)

    @property
    def problem(self) -> str | None:
        """Reason that no tensor can have this spec; None if one can."""
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            return f"{shown(self.dtype)} is not the name of a type ({', '.join(DTYPE_BYTES)} are)"
        if not isinstance(self.shape, tuple) or any(type(size) is not int or size < 0 for size in self.shape):
            return f"{shown(self.shape)} is not a shape (a tuple of whole numbers from 0 on is)"
        return None

    def __str__(self) -> str:
        return f"{self.name} {self.dtype if isinstance(self.dtype, str) else shown(self.dtype)} {shown(self.shape)}"


def aligned(num_bytes: int) -> int:
    """Round up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def arena_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes of adjacent, aligned tensors."""
    return sum(spec.aligned_bytes for spec in specs)


OWNER = "workspace"
DEFAULT_LANE = "layers"
MAX_SHOWN_SPECS = 8
MEMORY_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Reservation:
    """The largest request of one owner."""

    num_bytes: int
    specs: tuple[TensorSpec, ...]


class WorkspacePlan:
    """Requests by lane and owner. One per engine: two engines never share scratch buffers."""

    def __init__(self) -> None:
        self._lanes: dict[str, dict[str, Reservation]] = {}
        self._is_locked = False

    def reserve(self, owner: str, specs: tuple[TensorSpec, ...], lane: str = DEFAULT_LANE) -> None:
        """Reserve tensors that an owner acquires together. Its largest request counts."""
        specs = checked_specs(owner, specs, lane)
        assert "/" not in (lane or "/"), f"{lane=} is not a name"
        num_bytes = arena_bytes(specs)
        held = self.reserved_bytes(owner, lane)
        if held is not None and num_bytes <= held:
            return
        if self._is_locked:
            values = request_values(owner, specs, lane)
            raise WorkspaceError("memory.reserved_too_late", **values, held=held or 0)
        self._lanes.setdefault(lane, {})[owner] = Reservation(num_bytes, specs)

    def lock(self) -> None:
        """Forbid larger reservations. Called when the workspace is allocated."""
        self._is_locked = True

    def reserved_bytes(self, owner: str, lane: str = DEFAULT_LANE) -> int | None:
        """Return the bytes that an owner may acquire on a lane; None if it reserved nothing."""
        reservation = self._lanes.get(lane, {}).get(owner)
        return None if reservation is None else reservation.num_bytes

    def requesters(self, lane: str) -> dict[str, int]:
        """Return the bytes by owner on one lane."""
        return {owner: reservation.num_bytes for owner, reservation in self._lanes.get(lane, {}).items()}

    @property
    def lane_bytes(self) -> dict[str, int]:
        """Bytes of each lane, in the order of the first request."""
        return {lane: max(self.requesters(lane).values()) for lane in self._lanes}

    @property
    def total_bytes(self) -> int:
        return sum(self.lane_bytes.values())

    def lane_reason(self, lane: str) -> str:
        """Name the owner of the largest request."""
        owner, largest = max(self._lanes[lane].items(), key=lambda item: item[1].num_bytes)
        return f"{owner} needs most: {described(largest.specs)}; {len(self._lanes[lane])} take turns"

    def terms(self) -> tuple[Term, ...]:
        """Return one term for each lane."""
        return tuple(
            Term(f"{OWNER}/{lane}", num_bytes, self.lane_reason(lane), PAGE_PHASES)
            for lane, num_bytes in self.lane_bytes.items()
        )


def checked_specs(owner: str, specs: tuple[TensorSpec, ...], lane: str) -> tuple[TensorSpec, ...]:
    """Return the specs, or raise if no tensor can have one of them."""
    for spec in specs:
        if spec.problem is not None:
            values = {"request": _printed(owner, specs, lane), "caller": caller()}
            raise WorkspaceError("memory.bad_scratch_spec", **values, problem=f"{spec.name}: {spec.problem}")
    return tuple(specs)


def request_values(owner: str, specs: tuple[TensorSpec, ...], lane: str) -> dict[str, object]:
    """Return the values of a request for error messages."""
    return {"request": _printed(owner, specs, lane), "caller": caller(), "num_bytes": arena_bytes(specs)}


def described(specs: tuple[TensorSpec, ...]) -> str:
    """Print shapes and types on one line."""
    more = f", {len(specs) - MAX_SHOWN_SPECS} more" if len(specs) > MAX_SHOWN_SPECS else ""
    return (", ".join(map(str, specs[:MAX_SHOWN_SPECS])) or "nothing") + more


def caller() -> str:
    """Return file and line of the call into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(MEMORY_FOLDER):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _printed(owner: str, specs: tuple[TensorSpec, ...], lane: str) -> str:
    return f"workspace for {shown(owner)} on lane {shown(lane)} ({described(specs)})"

"""Tensors before they exist: TensorSpec (name, shape, type) and WorkspacePlan (who will want which scratch); no torch.

A lane is memory that its owners use in turn: it is as large as its largest request, however many owners and layers there
are. Work that may overlap (two micro-batches, two streams) takes lanes of its own.
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
"""Every view begins at a multiple of this: what CUDA's allocator gives, and four cache lines of a CPU."""


class TensorSpec(NamedTuple):
    """One tensor that somebody will ask for. A tuple, because requests are looked up by it twice a layer."""

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
        """None, or why no tensor can be made of it, in words."""
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            return f"{shown(self.dtype)} is not the name of a type ({', '.join(DTYPE_BYTES)} are)"
        if not isinstance(self.shape, tuple) or any(type(size) is not int or size < 0 for size in self.shape):
            return f"{shown(self.shape)} is not a shape (a tuple of whole numbers from 0 on is)"
        return None

    def __str__(self) -> str:
        return f"{self.name} {self.dtype if isinstance(self.dtype, str) else shown(self.dtype)} {shown(self.shape)}"


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def arena_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of tensors that lie one after the other, each at an aligned place."""
    return sum(spec.aligned_bytes for spec in specs)


OWNER = "workspace"
DEFAULT_LANE = "layers"
MAX_SHOWN_SPECS = 8
MEMORY_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Reservation:
    """The largest that one owner said it would ask for."""

    num_bytes: int
    specs: tuple[TensorSpec, ...]


class WorkspacePlan:
    """Requests by lane and owner. One per engine: two engines never share or resize each other's scratch."""

    def __init__(self) -> None:
        self._lanes: dict[str, dict[str, Reservation]] = {}
        self._is_locked = False

    def reserve(self, owner: str, specs: tuple[TensorSpec, ...], lane: str = DEFAULT_LANE) -> None:
        """Say that an owner will acquire these together. It may say so often; its largest request counts."""
        specs = checked_specs(owner, specs, lane)
        assert "/" not in (lane or "/"), f"{lane=} is not a name"
        num_bytes = arena_bytes(specs)
        held = self.reserved_bytes(owner, lane)
        if held is not None and num_bytes <= held:
            return
        if self._is_locked:
            raise WorkspaceError(
                f"{_asked(owner, specs, lane)} was reserved at {caller()}: {num_bytes} bytes",
                f"the workspace is allocated and holds {held or 0} bytes for {shown(owner)}",
                "reserve before the workspace is made",
            )
        self._lanes.setdefault(lane, {})[owner] = Reservation(num_bytes, specs)

    def lock(self) -> None:
        """From now on nothing larger can be reserved; whoever allocates the workspace calls this."""
        self._is_locked = True

    def reserved_bytes(self, owner: str, lane: str = DEFAULT_LANE) -> int | None:
        """What an owner may acquire on a lane; None where it reserved nothing."""
        reservation = self._lanes.get(lane, {}).get(owner)
        return None if reservation is None else reservation.num_bytes

    def requesters(self, lane: str) -> dict[str, int]:
        """Bytes by owner on one lane; they take turns, so the lane is as large as the largest."""
        return {owner: reservation.num_bytes for owner, reservation in self._lanes.get(lane, {}).items()}

    @property
    def lane_bytes(self) -> dict[str, int]:
        """Bytes of each lane, in the order of the first request."""
        return {lane: max(self.requesters(lane).values()) for lane in self._lanes}

    @property
    def total_bytes(self) -> int:
        return sum(self.lane_bytes.values())

    def lane_reason(self, lane: str) -> str:
        """Whose request makes the lane as large as it is."""
        owner, largest = max(self._lanes[lane].items(), key=lambda item: item[1].num_bytes)
        return f"{owner} needs most: {described(largest.specs)}; {len(self._lanes[lane])} take turns"

    def terms(self) -> tuple[Term, ...]:
        """A line of the plan for each lane."""
        return tuple(
            Term(f"{OWNER}/{lane}", num_bytes, self.lane_reason(lane), PAGE_PHASES)
            for lane, num_bytes in self.lane_bytes.items()
        )


def checked_specs(owner: str, specs: tuple[TensorSpec, ...], lane: str) -> tuple[TensorSpec, ...]:
    """The same, or an error that says which of them no tensor can be made of."""
    for spec in specs:
        if spec.problem is not None:
            raise WorkspaceError(
                f"{_asked(owner, specs, lane)} was asked at {caller()}",
                f"{spec.name}: {spec.problem}",
                "correct the request",
            )
    return tuple(specs)


def too_large(owner: str, specs: tuple[TensorSpec, ...], lane: str, held_bytes: int) -> WorkspaceError:
    """The refusal of more than was reserved."""
    return WorkspaceError(
        f"{_asked(owner, specs, lane)} was asked at {caller()}: {arena_bytes(specs)} bytes",
        f"{held_bytes} bytes are held for {shown(owner)}",
        "reserve the largest shapes before the workspace is made",
    )


def not_reserved(
    owner: str, specs: tuple[TensorSpec, ...], lane: str, kind: str, names: tuple[str, ...]
) -> WorkspaceError:
    """The refusal of an owner or a lane that nobody reserved."""
    return WorkspaceError(
        f"{_asked(owner, specs, lane)} was asked at {caller()}: {arena_bytes(specs)} bytes",
        f"0 bytes are held for that {kind}; reserved are {', '.join(names) or 'none'}",
        "reserve it before the workspace is made",
    )


def described(specs: tuple[TensorSpec, ...]) -> str:
    """Shapes and types in a line."""
    more = f", {len(specs) - MAX_SHOWN_SPECS} more" if len(specs) > MAX_SHOWN_SPECS else ""
    return (", ".join(map(str, specs[:MAX_SHOWN_SPECS])) or "nothing") + more


def caller() -> str:
    """File and line of whoever called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(MEMORY_FOLDER):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _asked(owner: str, specs: tuple[TensorSpec, ...], lane: str) -> str:
    return f"workspace for {shown(owner)} on lane {shown(lane)} ({described(specs)})"

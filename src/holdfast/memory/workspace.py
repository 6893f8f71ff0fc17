"""Workspace: one locked arena for each lane, and views of it for owners that reserved them. It never allocates later."""

import torch

from holdfast.errors import WorkspaceError
from holdfast.memory.arena import Arena, views_of
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import (
    DEFAULT_LANE,
    OWNER,
    TensorSpec,
    WorkspacePlan,
    arena_bytes,
    checked_specs,
    request_values,
)

MAX_CACHED_REQUESTS = 512
"""Most cached requests. Views of the oldest are made again: a server sees new row counts for hours."""


class Workspace:
    """Scratch buffers of one engine. Views of one `acquire` are valid until the next one on the same lane."""

    def __init__(self, plan: WorkspacePlan, device: torch.device, ledger: Ledger) -> None:
        plan.lock()
        self._plan = plan
        self._arenas: dict[str, Arena] = {}
        self._views: dict[tuple[str, str, tuple[TensorSpec, ...]], tuple[torch.Tensor, ...]] = {}
        try:
            for lane, num_bytes in plan.lane_bytes.items():
                spec = TensorSpec(lane, (num_bytes,), "uint8")
                self._arenas[lane] = Arena(OWNER, (spec,), device, ledger, plan.lane_reason(lane))
        except BaseException:
            self.release()
            raise

    def acquire(self, owner: str, specs: tuple[TensorSpec, ...], lane: str = DEFAULT_LANE) -> tuple[torch.Tensor, ...]:
        """Return disjoint, aligned views for the specs, with whatever the last owner wrote.

        Equal requests get the same views. A request may be smaller than its owner's reservation, never larger.
        """
        try:
            views = self._views.get((lane, owner, specs))
        except TypeError:  # a part is unhashable: wrong, or a list
            specs = checked_specs(owner, specs, lane)
            views = self._views.get((lane, owner, specs))
        return self._first_views(owner, specs, lane) if views is None else views

    def acquire_named(
        self, owner: str, specs: tuple[TensorSpec, ...], lane: str = DEFAULT_LANE
    ) -> dict[str, torch.Tensor]:
        """Like `acquire`, by spec name."""
        return {spec.name: view for spec, view in zip(specs, self.acquire(owner, specs, lane), strict=True)}

    @property
    def lanes(self) -> dict[str, torch.Tensor]:
        """Raw bytes of each lane."""
        return {lane: arena.tensors[lane] for lane, arena in self._arenas.items()}

    def release(self) -> None:
        """Release every lane; nothing can be acquired afterwards."""
        self._views.clear()
        while self._arenas:
            self._arenas.popitem()[1].release()

    def _first_views(self, owner: str, specs: tuple[TensorSpec, ...], lane: str) -> tuple[torch.Tensor, ...]:
        specs = checked_specs(owner, specs, lane)
        if lane not in self._arenas:
            raise self._not_reserved(owner, specs, lane, "lane", tuple(self._arenas))
        held_bytes = self._plan.reserved_bytes(owner, lane)
        if held_bytes is None:
            raise self._not_reserved(owner, specs, lane, "owner", tuple(self._plan.requesters(lane)))
        if arena_bytes(specs) > held_bytes:
            values = request_values(owner, specs, lane)
            raise WorkspaceError("memory.scratch_too_small", **values, held=held_bytes)
        while len(self._views) >= MAX_CACHED_REQUESTS:
            # Evict one entry, not all: clearing the cache makes RSS oscillate.
            del self._views[next(iter(self._views))]
        views = self._views[lane, owner, specs] = views_of(self._arenas[lane].tensors[lane], specs)
        return views

    @staticmethod
    def _not_reserved(
        owner: str, specs: tuple[TensorSpec, ...], lane: str, kind: str, names: tuple[str, ...]
    ) -> WorkspaceError:
        values = request_values(owner, specs, lane)
        return WorkspaceError("memory.scratch_not_reserved", **values, kind=kind, accepted=names or ("none",))

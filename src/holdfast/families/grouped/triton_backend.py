"""Attention over half-precision and quantized pages on a GPU: a kernel for each kind of page, all over lists of tiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.attention.backend import Batch, EagerStep, LayerStep, wanted_rows
from holdfast.attention.declarations import StepBounds, max_partials
from holdfast.attention.tile_scheduler import ListRoom, Machine, NearTokens, StepRows, TileScheduler
from holdfast.cache.storage import PageStorage
from holdfast.families.grouped.declarations import (
    TileKind,
    lane_bytes,
    lane_of_kind,
    least_tile_rows,
    max_tiles,
    near_block,
    near_first_tokens,
    tile_kinds,
)
from holdfast.families.grouped.pages import (
    GroupedBackend,
    KeyBiases,
    KeyMeans,
    PairScales,
    PlainPages,
    QuantizedPages,
    Sinks,
)
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.attention.lane_rows import lane_of
from holdfast.kernels.attention.lane_warpgroups import runs_lane
from holdfast.kernels.attention.paged_attention import Scoring
from holdfast.kernels.attention.tile_work import TileCall, TileWork
from holdfast.kernels.geometry import LaneGeometry
from holdfast.observability.log import get_logger

log = get_logger(__name__)

WorkKey = tuple[TileKind, int | None]
"""What layers that share tile lists have in common: the kind of tiles, and the window."""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One step's tile lists for each kind of tiles and window, and the page table of each cache group."""

    work: dict[WorkKey, TileWork]
    page_tables: tuple[torch.Tensor, ...]
    wanted_rows_R: torch.Tensor | None


class TritonPagedAttention(GroupedBackend):
    """The backend."""

    name: ClassVar[str] = "triton_paged"

    def __init__(
        self,
        specs: Sequence[GroupedAttentionSpec],
        storage: PageStorage,
        bounds: StepBounds,
        num_sms: int,
        batch_invariant: bool = False,
        k_means: KeyMeans | None = None,
        key_biases: KeyBiases | None = None,
        sinks: Sinks | None = None,
        pair_scales: PairScales | None = None,
    ) -> None:
        super().__init__(specs, storage, k_means, False, key_biases, sinks, pair_scales)
        self._num_sms = num_sms
        self._most_rows = min(bounds.max_num_rows, specs[0].max_model_len)
        self._keys: list[WorkKey] = [(TileKind.of(spec), spec.window) for spec in specs]
        machine = Machine(num_sms, batch_invariant, self._device)
        for large in dict.fromkeys(pages.large for pages in self.pages if isinstance(pages, PlainPages)):
            log.info("prefill_attention=%s because %s", large.name, large.reason)
        lanes = self._lanes(bounds)
        self._lists: dict[WorkKey, TileScheduler] = {}
        for kind in tile_kinds(specs):
            pages = self.pages[next(layer for layer, (other, _) in enumerate(self._keys) if other == kind)]
            geometry = pages.tile_geometry(kind.num_heads)
            least_rows = least_tile_rows(kind)
            assert geometry.large_rows >= least_rows, f"{geometry=}: lists are made for tiles of {least_rows} rows"
            near = 0 if kind.key_bits is None else near_block(specs)
            room = ListRoom(
                max_tiles(kind, specs[0].max_model_len, bounds, near),
                bounds.max_num_rows,
                bounds.max_num_seqs,
                max_partials(specs[0].max_model_len, bounds),
            )
            for window in dict.fromkeys(spec.window for spec in specs):
                tokens = NearTokens(near, near_first_tokens(specs, window)) if near else None
                lists = TileScheduler(geometry, kind.num_kv_heads, window, room, machine, tokens, lanes.get(kind))
                self._lists[kind, window] = lists

    def _lanes(self, bounds: StepBounds) -> dict[TileKind, LaneGeometry]:
        """Allocate the lane, hand it to the layers whose prompts may read it, and return its geometry by kind."""
        specs, lanes = self._specs, dict[TileKind, LaneGeometry]()
        memory_E = torch.empty(lane_bytes(specs, bounds) // 2, dtype=torch.float16, device=self._device)
        self._lane_bytes = memory_E.nbytes
        if not runs_lane(self._device):
            return lanes
        for (kind, _), pages in zip(self._keys, self.pages, strict=True):
            lane = lane_of_kind(kind, specs[0].max_model_len, bounds, near_block(specs))
            if lane is not None:
                assert isinstance(pages, QuantizedPages), f"{kind=} has plain pages"
                lanes[kind], pages.lane = lane, lane_of(memory_E, kind.lane_dim, lane)
        if lanes:
            log.info("prefill_attention=lane over quantized pages because the kernel in warpgroups supports them")
        return lanes

    def held_bytes(self) -> dict[str, int]:
        lists = self._lists.values()
        return {
            "attention/tiles": sum(one.tile_bytes for one in lists),
            "attention/rows": sum(one.row_bytes for one in lists),
            **({"attention/lane": self._lane_bytes + sum(one.lane_bytes for one in lists)} if self._lane_bytes else {}),
            **super().held_bytes(),
        }

    def eager_steps(self) -> tuple[EagerStep, ...]:
        """List one step whose prompt reads the lane: graphs do without it."""
        least_rows = max((lists.least_lane_rows for lists in self._lists.values()), default=0)
        return (EagerStep(0, least_rows),) if 0 < least_rows <= self._most_rows else ()

    def plan(self, batch: Batch, captured: bool = False) -> TritonPlan:
        assert batch.page_tables is not None, "the batch has no page tables on the device"
        step = StepRows.of(batch.sequences, batch.num_rows)
        work = {key: self._lists[key].fill(step, captured) for key in dict.fromkeys(self._keys)}
        return TritonPlan(work, batch.page_tables, batch.logits.rows_R if batch.logits else None)

    def attend(self, q_THD: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool) -> torch.Tensor:
        layer, plan, scratch = step
        spec, work = self._specs[layer], plan.work[self._keys[layer]]
        partials = (scratch["partial_out"], scratch["partial_lse"]) if scratch else (out_TX, out_TX)
        scoring = Scoring(spec.scale, spec.window, self._sinks[layer], spec.softcap)
        call = TileCall(q_THD, plan.page_tables[spec.group], work, scoring, *partials, out_TX, self._num_sms)
        self.pages[layer].attend_tiles(call, None if spec.near is None else plan.page_tables[spec.near.group])
        return wanted_rows(q_THD, out_TX, plan.wanted_rows_R if wanted_only else None)

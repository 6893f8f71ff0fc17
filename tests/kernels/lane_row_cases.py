"""Steps whose large tiles go through rows of the lane , amid NaN and red zones, with near tokens in place."""

from collections.abc import Callable
from dataclasses import replace

import torch

from holdfast.kernels.attention import lane_rows, lane_warpgroups
from holdfast.kernels.attention.lane_rows import Lane, LaneSource
from holdfast.kernels.attention.near_tokens import NearPages
from holdfast.kernels.attention.quantized_attention import quantized_attention
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.tile_work import TileCall
from kernels.lane_cases import near_pages, near_tiles
from kernels.quantized_kv_cases import QuantizedStep
from kernels.tiled_cases import Tiles
from scratch_memory import Memory

Attend = Callable[[TileCall, QuantizedPlanes], torch.Tensor]


def by_rows(
    near: NearPages | None = None,
    heads: int | None = None,
    is_scaled: bool = False,
    more_rows: int = 0,
    fill: Callable[..., None] = lane_rows.fill_lane,
) -> Attend:
    """Attention over a lane that just holds `heads` heads of the step, and some rows more; on a CPU the reference attends."""

    def attend(call: TileCall, planes: QuantizedPlanes) -> torch.Tensor:
        device = call.q_THD.device
        memory, source, num_heads = Memory(device), LaneSource(planes, near), heads or planes.num_kv_heads
        tiles, num_tables = call.work.tiles_X8.cpu().numpy(), len(call.page_table_NP)
        plan = lane_rows.plan_lane(tiles, num_tables, call.scoring.window, device, near)
        num_rows = 64 * num_heads * max(1, plan.num_blocks) + more_rows
        k_LD = memory.take("k", num_rows, planes.head_dim, dtype=call.q_THD.dtype if is_scaled else torch.float16)
        v_LD = memory.take("v", num_rows, planes.head_dim, dtype=torch.float16)
        lane = Lane(k_LD, v_LD, memory.take("scales", lane_rows.NUM_SCALES, num_rows) if is_scaled else None)
        if call.work.has_small:
            quantized_attention(call._replace(work=replace(call.work, has_large=False, has_merge=False)), planes, near)
        for first in range(0, planes.num_kv_heads, num_heads):
            count = min(num_heads, planes.num_kv_heads - first)
            fill(call, source, lane, plan, first, count)
            if device.type == "cpu":
                lane_warpgroups.attend_lane_reference(call, source, lane, plan, first, count)
            else:
                lane_warpgroups.attend_lane_warpgroups(call, source, lane, plan, first, count)
        memory.check()
        if call.work.has_merge:
            quantized_attention(call._replace(work=replace(call.work, has_small=False, has_large=False)), planes, near)
        return call.out_TX

    return attend


def with_near(
    step: QuantizedStep, first: int, device: torch.device, tile_rows: int = 32
) -> tuple[NearPages, Tiles, Tiles]:
    """Near pages, tiles over codes alone, and tiles that read near tokens where they lie."""
    near, tiles = near_pages(step, 64, first, device), near_tiles(step, 64, first, tile_rows)
    whole = Tiles(rows=tiles.rows)
    for table_row, row, count, position, _, _, partial, splits in tiles.large:
        low = 0 if step.window is None else max(0, position - step.window + 1) // 64 * 64
        whole.large.append((table_row, row, count, position, low, position + count, partial, splits))
    return near, tiles, whole

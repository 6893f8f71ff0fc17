"""Steps whose large tiles read the lane (kernels/attention/lane_rows.py), amid NaN and red zones, and near pages beside them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from holdfast.attention.lane_scheduler import LaneScheduler
from holdfast.kernels.attention import lane_rows, lane_warpgroups
from holdfast.kernels.attention.lane_rows import Lane, LaneSource
from holdfast.kernels.attention.near_tokens import NearPages
from holdfast.kernels.attention.quantized_attention import quantized_attention, quantized_attention_reference
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.tile_work import TileCall
from holdfast.kernels.geometry import LaneGeometry
from kernels.exactness import random
from kernels.quantized_kv_cases import QuantizedStep
from kernels.tiled_cases import BEYOND, NAN, Tiles, amid
from scratch_memory import Memory

Attend = Callable[[TileCall, QuantizedPlanes], torch.Tensor]


def with_lane(call: TileCall, near: NearPages | None, num_kv_heads: int) -> TileCall:
    """The call with all of its large tiles in one round of the lane, as the scheduler would list their tokens."""
    num_small, num_large = call.work.tiles_X8[0, :2].tolist()
    rows: dict[int, list[int]] = {}
    for table_row, row, count, position, *_ in call.work.tiles_X8[1 + num_small : 1 + num_small + num_large].tolist():
        first_row, start, end = rows.get(table_row, (row, position, position))[:3]
        rows[table_row] = [min(row, first_row), min(start, position), max(end, position + count)]
    columns = [(table_row, row, end - start, start) for table_row, (row, start, end) in rows.items()]
    near_block = 0 if near is None else near.block_tokens
    lanes = LaneScheduler(
        LaneGeometry(1, 2**20, num_kv_heads),
        call.scoring.window,
        len(call.page_table_NP),
        1,
        near_block,
        call.q_THD.device,
    )
    columns_4N = np.array(columns, dtype=np.int64).T
    groups = lanes.groups(columns_4N, np.ones(len(columns), dtype=np.bool_))
    lane = lanes.fill(columns_4N, groups, [(1 + num_small, num_large)])
    return call._replace(work=replace(call.work, lane=lane))


def by_lane(
    near: NearPages | None = None,
    heads: int | None = None,
    more_rows: int = 0,
    fill: Callable[..., None] = lane_rows.fill_lane,
) -> Attend:
    """Attention over a lane of NaN that just holds `heads` heads of the step, and some rows more.

    On a CPU the reference attends.
    """

    def attend(call: TileCall, planes: QuantizedPlanes) -> torch.Tensor:
        device = call.q_THD.device
        memory, source, num_heads = Memory(device), LaneSource(planes, near), heads or planes.num_kv_heads
        if call.work.has_small or call.work.has_merge:
            quantized_attention(call._replace(work=replace(call.work, has_large=False)), planes, near)
        call = with_lane(call, near, planes.num_kv_heads)
        assert call.work.lane is not None
        (part,) = call.work.lane.rounds
        num_rows = 64 * num_heads * part.num_blocks + more_rows
        k_LD = memory.take("k", num_rows, planes.head_dim, dtype=torch.float16)
        v_LD = memory.take("v", num_rows, planes.head_dim, dtype=torch.float16)
        lane = Lane(k_LD, v_LD, LaneGeometry(1, num_rows // 64, planes.num_kv_heads))
        attend_rows = lane_warpgroups.attend_lane if device.type == "cuda" else lane_warpgroups.attend_lane_reference
        for first in range(0, planes.num_kv_heads, num_heads):
            count = min(num_heads, planes.num_kv_heads - first)
            fill(call, source, lane, part, first, count)
            attend_rows(call, source, lane, part, first, count)
        memory.check()
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


def near_reference(near: NearPages) -> Attend:
    """The reference beside near pages."""
    on_host = near._replace(
        **{name: getattr(near, name).cpu() for name in ("k_plane_SKD", "v_plane_SKD", "page_table_NP")}
    )
    return lambda call, planes: quantized_attention_reference(call, planes, on_host)


def near_pages(step: QuantizedStep, block: int, first: int, device: torch.device, page: int = 16) -> NearPages:
    """Near rows that differ from the codes' on scattered pages amid NaN; tables name only pages that rows may read."""
    num_kv_heads, head_dim = step.tokens[0][0].shape[1:]
    counts = [-(-len(k) // page) for k, _ in step.tokens]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(step.seed + 5)).tolist()
    planes = torch.full((2, len(order) * page, num_kv_heads, head_dim), NAN, dtype=step.q.dtype)
    table = torch.full((len(counts), max(counts) + 2), BEYOND, dtype=torch.int32)
    for index, ((start, _), (k, _)) in enumerate(zip(step.rows, step.tokens, strict=True)):
        for position in range(len(k)):
            if position < first or position >= start // block * block:
                place = position // page
                if table[len(counts) - 1 - index, place] == BEYOND:
                    table[len(counts) - 1 - index, place] = order.pop()
                slot = int(table[len(counts) - 1 - index, place]) * page + position % page
                rows = random(2, num_kv_heads, head_dim, seed=1000 * index + position).to(step.q.dtype)
                planes[0, slot], planes[1, slot] = rows[0], rows[1]
    # Kernels load keys and values of near tokens as words, so the planes begin aligned.
    return NearPages(amid(planes[0], device), amid(planes[1], device), table.to(device), page, block, first)


def near_tiles(step: QuantizedStep, block: int, first: int, tile_rows: int) -> Tiles:
    """Large tiles over codes beside near pages: rows of a tile share their own block."""
    made = Tiles()
    for index, ((start, count), row_start) in enumerate(zip(step.rows, step.row_starts, strict=True)):
        position = start
        while position < start + count:
            own = position // block * block
            rows = min(tile_rows, own + block - position, start + count - position)
            low = 0 if step.window is None else max(0, position - step.window + 1) // 64 * 64
            low = min(max(low, first), own)
            made.large.append(
                (len(step.rows) - 1 - index, row_start + position - start, rows, position, low, own, -1, 1)
            )
            position += rows
        made.rows += count * [(0, 1)]
    return made

"""Steps whose large tiles go through a lane (benchmarks/lane_attention.py): the lane amid NaN and red zones, and near pages."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.kernels.attention.near_tokens import NearPages
from holdfast.kernels.attention.quantized_attention import quantized_attention_reference
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.tile_work import TileCall
from kernels.exactness import random
from kernels.quantized_kv_cases import QuantizedStep
from kernels.tiled_cases import BEYOND, NAN, Tiles, amid
from scratch_memory import Memory

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import lane_attention
from lane_attention import LaneForm

__all__ = ["LaneForm", "by_lane", "guarded_lane", "lane_attention", "near_pages", "near_reference", "near_tiles"]

Attend = Callable[[TileCall, QuantizedPlanes], torch.Tensor]


def guarded_lane(memory: Memory, num_rows: int, head_dim: int, dtype: torch.dtype) -> lane_attention.Lane:
    """A lane of so many rows of keys, in what the memory holds."""
    k_LD = memory.take("lane_k", num_rows, head_dim, dtype=dtype)
    v_LD = memory.take("lane_v", num_rows, head_dim, dtype=torch.float16)
    return lane_attention.Lane(k_LD, v_LD, memory.take("lane_scales", lane_attention.NUM_SCALES, num_rows))


def by_lane(
    near: NearPages | None = None, heads: int | None = None, form: LaneForm | None = None, more_rows: int = 0
) -> Attend:
    """Attention with a lane that just holds `heads` heads of the step, and some rows more."""

    def attend(call: TileCall, planes: QuantizedPlanes) -> torch.Tensor:
        memory, num_tables = Memory(call.q_THD.device), len(call.page_table_NP)
        chosen = form or lane_attention.lane_form(planes.head_dim, planes.key_bias is not None)
        plan = lane_attention.plan_lane(
            call.work.tiles_X8.cpu().numpy(), num_tables, call.scoring.window, call.q_THD.device, chosen.tokens
        )
        num_heads = heads or planes.num_kv_heads
        lane = guarded_lane(
            memory, 64 * num_heads * max(1, plan.num_blocks) + more_rows, planes.head_dim, call.q_THD.dtype
        )
        out = lane_attention.attend_by_lane(call, planes, near, lane, plan, form, heads)
        memory.check()
        return out

    return attend


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

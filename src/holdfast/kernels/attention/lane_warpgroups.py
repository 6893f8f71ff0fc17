"""Large tiles over compressed pages on Hopper: rows of the lane (lane_rows.py) in the warpgroups of prefill_warpgroups.py, in Gluon.

T rows, H query heads, K key/value heads, G = H / K, D head dim, L rows of the lane; M rows of a tile times heads, N tokens of a block

Work, tiles and the two multiplying warpgroups are those of plain pages. Three things differ:

copies      a block is copied in boxes of LANE_TOKENS from the run of codes, or from the run of near tokens, which begins at the
            block of the tile's rows. So a block of the kernel may have both, and near tokens cost nothing.
operands    rows of the lane are half precision. Queries are rounded to it once a tile. p is up to 2^14, so half precision holds
            it for any context.
rotation    an output that codes have rotated is rotated back at the end of its tile: one more product, whose second operand
            stays in shared memory.

Boxes outside a tile's range come from outside the lane, which gives zeros. Other rows hold numbers, so nothing is zeroed.
"""

from itertools import product

import torch
from torch import Tensor

from holdfast.kernels.attention.lane_rows import Lane, LaneSource, fill_lane
from holdfast.kernels.attention.prefill_warpgroups import (
    COPY_REGISTERS,
    COPY_WARPS,
    HEIGHT,
    PANEL,
    REGISTERS,
    STAGES,
    STOP_ASM,
    _await_turn,
    _block_d,
    _blocks_of,
    _elements_of,
    _exp2,
    _give_turn,
    _item_of,
    _place_of,
    _seen_scores,
    _sum_tokens,
    prefill_block_tokens,
)
from holdfast.kernels.attention.split_kv import LOG2_E, NUM_TILE_FIELDS, PER_NAT
from holdfast.kernels.attention.tile_work import LaneRound, TileCall
from holdfast.kernels.attention.warpgroup_tiles import (
    launch_dependents,
    load_tile,
    wait_for_kernels_before,
)
from holdfast.kernels.geometry import BLOCK_TOKENS
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import (
    TensorDescriptor,
    constexpr,
    gl,
    gluon_jit,
    gluon_jit_counting,
    hopper,
    kernel_constant,
)
from holdfast.quant.kv_quantize import hadamard_block, rotate_heads

# Triton cannot unpack into a tuple, but adds tuples.
# pyright: reportGeneralTypeIssues=false

LANE_TOKENS = kernel_constant(BLOCK_TOKENS)
"""Tokens of a copy: what lies side by side in the lane."""
P_SHIFT = kernel_constant(14.0)
"""p = 1 of the softmax is 2 ** P_SHIFT in half precision, so that small p keep their bits."""
OUTSIDE = kernel_constant(-(2**20))
"""Row before the lane: a copy from there gives zeros."""


def runs_lane(device: torch.device) -> bool:
    """Return True if this process can attend to the lane: it has Gluon, or the reference stands in on a CPU."""
    return gl is not None or device.type == "cpu"


def attend_by_lane(call: TileCall, source: LaneSource, lane: Lane) -> None:
    """Fill and attend in all rounds of a step, some heads at a time."""
    assert call.work.lane is not None, "the step has no round"
    num_kv_heads = source.planes.num_kv_heads
    # The interpreter cannot run Gluon.
    attend = attend_lane if call.q_THD.is_cuda else attend_lane_reference
    for part in call.work.lane.rounds:
        most = lane.geometry.heads(part.num_blocks)
        for first_head in range(0, num_kv_heads, most):
            num_heads = min(most, num_kv_heads - first_head)
            fill_lane(call, source, lane, part, first_head, num_heads)
            attend(call, source, lane, part, first_head, num_heads)


def attend_lane(
    call: TileCall,
    source: LaneSource,
    lane: Lane,
    part: LaneRound,
    first_head: int,
    num_heads: int,
) -> None:
    """Launch the large tiles of query heads that share KV heads [first_head, first_head + num_heads), without the merge."""
    (_, num_query_heads, head_dim), planes = call.q_THD.shape, source.planes
    scale, window, sinks_H, softcap = call.scoring
    work = call.work.lane
    assert work is not None, "the step has no round"
    # A capped score is softcap * tanh(inner * product), and exponentials have base 2.
    inner, outer = (0.0, scale) if softcap is None else (scale / softcap, softcap)
    near_block = 0 if source.near is None else source.near.block_tokens
    _attend_kernel[(call.num_sms,)](
        call.q_THD, _describe(lane.k_LD), _describe(lane.v_LD), planes.rotation_DD,
        call.out_TX, call.work.tiles_X8, work.starts_2N, work.starts_2N.stride(0), sinks_H, inner,
        outer * LOG2_E, window or 0, hadamard_block(head_dim) ** -0.5, part.first_tile, part.num_tiles, first_head, num_heads, part.num_blocks,
        NUM_HEADS=num_query_heads, GROUP=num_query_heads // planes.num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=_block_d(head_dim), HADAMARD=hadamard_block(head_dim), NEAR_BLOCK=near_block, ROTATED=planes.rotates_values,
        HAS_WINDOW=window is not None, HAS_SINKS=sinks_H is not None, HAS_CAP=softcap is not None,
        TOKENS=prefill_block_tokens(head_dim), num_warps=4, **pdl_flags(call.q_THD),
    )  # fmt: skip


def attend_lane_reference(
    call: TileCall, source: LaneSource, lane: Lane, part: LaneRound, first_head: int, num_heads: int
) -> None:
    """Like `attend_lane` in plain torch, one tile and head at a time with its whole score matrix."""
    planes, near, group = source.planes, source.near, call.q_THD.shape[1] // source.planes.num_kv_heads
    (scale, window, sinks_H, softcap), work = call.scoring, call.work.lane
    assert work is not None, "the step has no round"
    out_THD, device = call.out_TX.view(call.q_THD.shape), call.q_THD.device
    tiles = call.work.tiles_X8[part.first_tile : part.first_tile + part.num_tiles].tolist()
    for (table_row, row, count, position, low, high, *_), i_head in product(tiles, range(num_heads)):
        seen = low if window is None else max(low, position - window + 1)
        own = high if near is None else position // near.block_tokens * near.block_tokens
        token_L = torch.arange(seen, high, device=device)
        start_L = torch.where(token_L < own, work.starts_2N[0, table_row], work.starts_2N[1, table_row])
        place_L = (i_head * part.num_blocks + start_L) * BLOCK_TOKENS + token_L
        k_LD, v_LD = lane.k_LD[place_L].float(), lane.v_LD[place_L].float()
        heads = slice((first_head + i_head) * group, (first_head + i_head + 1) * group)
        scores_nGL = call.q_THD[row : row + count, heads].float() @ k_LD.T * scale
        if softcap is not None:
            scores_nGL = softcap * torch.tanh(scores_nGL / softcap)
        distance_nL = torch.arange(position, position + count, device=device).unsqueeze(1) - token_L
        seen_nL = distance_nL >= 0 if window is None else (distance_nL >= 0) & (distance_nL < window)
        scores_nGL = scores_nGL.masked_fill(~seen_nL.unsqueeze(1), float("-inf"))
        lse_nG = scores_nGL.logsumexp(-1)
        if sinks_H is not None:
            lse_nG = torch.logaddexp(lse_nG, sinks_H[heads])
        out_nGD = (scores_nGL - lse_nG.unsqueeze(-1)).exp() @ v_LD
        out_nGD = rotate_heads(out_nGD) if planes.rotates_values else out_nGD
        out_THD[row : row + count, heads] = out_nGD.to(out_THD.dtype)


def _describe(rows_LD: Tensor) -> object:
    """Describe boxes of LANE_TOKENS rows x 64 columns. Columns after an odd head dim are copied as zeros."""
    return TensorDescriptor.from_tensor(rows_LD, [BLOCK_TOKENS, 64], gl.NVMMASharedLayout(128, 16, rank=2))


@gluon_jit
def _count_items(num_items):
    """Return this program's number of items: a tile and a KV head each."""
    num_rounds = num_items // gl.num_programs(0)
    return num_rounds + gl.where(_item_of(num_rounds) < num_items, 1, 0)


@gluon_jit
def _copy_boxes(rows, bar, s_boxes, first_box, o_row_0, o_row_1, NUM_PANELS: constexpr, NUM_BOXES: constexpr):
    """Start the copies of a block of keys or values from its boxes' first rows."""
    for i_panel in gl.static_range(NUM_PANELS):
        s_box = s_boxes.index(first_box + i_panel * NUM_BOXES)
        hopper.tma.async_copy_global_to_shared(rows, [o_row_0, i_panel * PANEL], bar, s_box)
        if NUM_BOXES == 2:
            s_box = s_boxes.index(first_box + i_panel * NUM_BOXES + 1)
            hopper.tma.async_copy_global_to_shared(rows, [o_row_1, i_panel * PANEL], bar, s_box)


@gluon_jit
def _row_of(n, seen, high, own, codes_row, near_row, NEAR_BLOCK: constexpr):
    """Return the lane's row of token n, which begins a copy, or one outside if no row of the tile sees the copy's tokens."""
    row = codes_row + n
    if NEAR_BLOCK > 0:
        row = gl.where(n < own, row, near_row + n)
    return gl.where((n < high) & (n + LANE_TOKENS > seen), row, OUTSIDE)


@gluon_jit
def _copy(
    k_rows, v_rows, p_tiles, p_starts, starts_stride, window, first_tile, num_tiles, num_heads, lane_blocks, s_k, s_v,
    k_filled, k_freed, v_filled, v_freed,
    NEAR_BLOCK: constexpr, HAS_WINDOW: constexpr,
):  # fmt: skip
    """Copy the blocks of all of this program's tiles."""
    TOKENS: constexpr = s_k.shape[1]
    NUM_BOXES: constexpr = TOKENS // LANE_TOKENS
    NUM_PANELS: constexpr = s_k.shape[2] // PANEL
    PLACE_BOXES: constexpr = NUM_PANELS * NUM_BOXES
    NUM_BYTES: constexpr = NUM_BOXES * NUM_PANELS * k_rows.block_type.nbytes
    s_k_boxes = s_k._reinterpret(s_k.dtype, [STAGES * PLACE_BOXES, LANE_TOKENS, PANEL], k_rows.layout)
    s_v_boxes = s_v._reinterpret(s_v.dtype, [STAGES * PLACE_BOXES, LANE_TOKENS, PANEL], v_rows.layout)
    num_rounds = _count_items(num_tiles * num_heads)
    count = 0  # blocks so far
    for i_round in range(num_rounds):
        i_item = _item_of(i_round)
        table_row, _, _, position, low, high, _, _ = load_tile(p_tiles, first_tile + i_item // num_heads)
        seen, begin, num_blocks = _blocks_of(low, high, position, window, HAS_WINDOW, TOKENS)
        first_block = i_item % num_heads * lane_blocks
        codes_row = (first_block + gl.load(p_starts + table_row)) * LANE_TOKENS
        near_row = codes_row
        own = position
        if NEAR_BLOCK > 0:
            near_row = (first_block + gl.load(p_starts + starts_stride + table_row)) * LANE_TOKENS
            own = position // NEAR_BLOCK * NEAR_BLOCK
        for i_block in range(num_blocks):
            n = begin + i_block * TOKENS
            o_row_0 = _row_of(n, seen, high, own, codes_row, near_row, NEAR_BLOCK)
            o_row_1 = _row_of(n + LANE_TOKENS, seen, high, own, codes_row, near_row, NEAR_BLOCK)
            place, phase = _place_of(count + i_block)
            bar = k_filled.index(place)
            hopper.mbarrier.wait(k_freed.index(place), phase ^ 1)
            hopper.mbarrier.expect(bar, NUM_BYTES)
            _copy_boxes(k_rows, bar, s_k_boxes, place * PLACE_BOXES, o_row_0, o_row_1, NUM_PANELS, NUM_BOXES)
            bar = v_filled.index(place)
            hopper.mbarrier.wait(v_freed.index(place), phase ^ 1)
            hopper.mbarrier.expect(bar, NUM_BYTES)
            _copy_boxes(v_rows, bar, s_v_boxes, place * PLACE_BOXES, o_row_0, o_row_1, NUM_PANELS, NUM_BOXES)
        count += num_blocks


@gluon_jit
def _load_next(p_tiles, first_tile, i_round, num_rounds, num_heads):
    """Return the fields of a round's tile that a multiplying warp uses, and its head of the launch; no rows after the last."""
    exists = i_round < num_rounds
    i_item = gl.where(exists, _item_of(i_round), 0)
    p_tile = p_tiles + (first_tile + i_item // num_heads) * NUM_TILE_FIELDS
    row, num_rows = gl.load(p_tile + 1, mask=exists, other=0), gl.load(p_tile + 2, mask=exists, other=0)
    position, low = gl.load(p_tile + 3, mask=exists, other=0), gl.load(p_tile + 4, mask=exists, other=0)
    high = gl.load(p_tile + 5, mask=exists, other=0)
    return row, num_rows, position, low, high, i_item % num_heads


@gluon_jit
def _load_queries(
    p_q, tile, first_head, HALF: constexpr, NUM_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, layout: constexpr
):  # fmt: skip
    """Load half of the queries of a tile; zeros without a row."""
    first = (first_head + tile[5]) * GROUP
    o_x, m_x = _elements_of(tile[0], tile[1], first, HALF, NUM_HEADS, GROUP, HEAD_DIM, layout)
    return gl.load(p_q + o_x, mask=m_x, other=0.0)


@gluon_jit
def _operand(b_x, dtype: constexpr):
    """Round to the type of an operand; numbers beyond half precision become its largest."""
    if b_x.dtype == dtype:
        return b_x
    else:
        return gl.minimum(gl.maximum(b_x.to(gl.float32), -65504.0), 65504.0).to(dtype)


@gluon_jit
def _soften(b_score, b_m, b_l, outer):
    """Return p, the factor of earlier sums, the new maximum and the new sums of threads."""
    b_m_new = gl.maximum(b_m, gl.max(b_score, axis=1) * outer)
    b_m_safe = gl.where(b_m_new == -float("inf"), 0.0, b_m_new)
    b_outer = gl.full([b_score.shape[0], b_score.shape[1]], 0.0, gl.float32, b_score.type.layout) + outer
    b_p = _exp2(gl.fma(b_score, b_outer, gl.expand_dims(P_SHIFT - b_m_safe, 1) + gl.zeros_like(b_outer)))
    b_alpha = _exp2(b_m - b_m_safe)
    b_factor = gl.expand_dims(gl.convert_layout(b_alpha, gl.SliceLayout(1, b_l.type.layout)), 1)
    return b_p, b_alpha, b_m_new, b_l * b_factor + _sum_tokens(b_p)


@gluon_jit
def _attend(
    p_q, p_out, p_tiles, p_sinks, inner, outer, window, rotation_scale, first_tile, num_tiles,
    first_kv_head, num_heads, s_q, s_k, s_v, s_rotation, k_filled, k_freed, v_filled, v_freed,
    HALF: constexpr, NUM_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, ROTATED: constexpr, HADAMARD: constexpr,
    HAS_WINDOW: constexpr, HAS_SINKS: constexpr, HAS_CAP: constexpr,
):  # fmt: skip
    """Attend 64 rows times heads of all of this program's tiles: the first or second half of each."""
    TOKENS: constexpr = s_k.shape[1]
    BLOCK_D: constexpr = s_k.shape[2]
    score_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    out_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: constexpr = gl.DotOperandLayout(0, out_layout, 2)
    wide_layout: constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    row_layout: constexpr = gl.SliceLayout(1, score_layout)
    s_rows = s_q.index(HALF)
    s_out = s_q._reinterpret(p_out.dtype.element_ty, s_q.shape, s_q.layout).index(HALF)
    o_m = HALF * HEIGHT + gl.arange(0, HEIGHT, row_layout)
    b_none = gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout)
    num_rounds = _count_items(num_tiles * num_heads)
    # Queries of a tile are loaded while the last product of the tile before runs.
    tile = _load_next(p_tiles, first_tile, 0, num_rounds, num_heads)
    b_q = _load_queries(p_q, tile, first_kv_head, HALF, NUM_HEADS, GROUP, HEAD_DIM, wide_layout)
    count = 0  # blocks so far: select places of the ring
    if HALF == 1:
        _give_turn(HALF)
    for i_round in range(num_rounds):
        row, num_rows, position, low, high, i_head = tile
        first_head = (first_kv_head + i_head) * GROUP
        next_tile = _load_next(p_tiles, first_tile, i_round + 1, num_rounds, num_heads)
        seen, begin, num_blocks = _blocks_of(low, high, position, window, HAS_WINDOW, TOKENS)
        # All rows see the tokens of a block from first_clear to clear.
        clear = gl.minimum(high, position + 1)
        first_clear = seen
        if HAS_WINDOW:
            first_clear = gl.maximum(seen, position + num_rows - window)
        s_rows.store(_operand(b_q, s_rows.dtype))
        hopper.fence_async_shared()
        b_acc = gl.zeros([HEIGHT, BLOCK_D], gl.float32, out_layout)
        b_m = gl.full([HEIGHT], -float("inf"), gl.float32, row_layout)
        b_l = _sum_tokens(b_none)
        place, phase = _place_of(count)
        hopper.mbarrier.wait(k_filled.index(place), phase)
        score = hopper.warpgroup_mma(s_rows, s_k.index(place).permute((1, 0)), b_none, use_acc=False, is_async=True)
        b_score = hopper.warpgroup_mma_wait(0, deps=[score])
        hopper.mbarrier.arrive(k_freed.index(place), count=1)
        b_score = _seen_scores(
            b_score, begin, o_m // GROUP, seen, first_clear, high, clear, position, window, inner, HAS_WINDOW, HAS_CAP
        )
        b_soft, _, b_m, b_l = _soften(b_score, b_m, b_l, outer)
        b_p = gl.convert_layout(b_soft.to(s_v.dtype), p_layout)
        for i_block in range(1, num_blocks):
            v_place, v_phase = _place_of(count + i_block - 1)
            place, phase = _place_of(count + i_block)
            hopper.mbarrier.wait(k_filled.index(place), phase)
            _await_turn(HALF)
            score = hopper.warpgroup_mma(s_rows, s_k.index(place).permute((1, 0)), b_none, use_acc=False, is_async=True)
            hopper.mbarrier.wait(v_filled.index(v_place), v_phase)
            acc = hopper.warpgroup_mma(b_p, s_v.index(v_place), b_acc, is_async=True)
            _give_turn(HALF)
            b_score = hopper.warpgroup_mma_wait(1, deps=[score])
            hopper.mbarrier.arrive(k_freed.index(place), count=1)
            b_score = _seen_scores(
                b_score, begin + i_block * TOKENS, o_m // GROUP, seen, first_clear, high, clear, position, window, inner,
                HAS_WINDOW, HAS_CAP,
            )  # fmt: skip
            b_soft, b_alpha, b_m, b_l = _soften(b_score, b_m, b_l, outer)
            gl.inline_asm_elementwise(STOP_ASM, "=r", [], gl.int32, False, 1)
            # Wait before the loop's end: ptxas serializes all wgmma if one is still in flight there.
            b_acc, b_soft = hopper.warpgroup_mma_wait(0, deps=[acc, b_soft])
            hopper.mbarrier.arrive(v_freed.index(v_place), count=1)
            b_acc = b_acc * gl.convert_layout(b_alpha, gl.SliceLayout(1, out_layout))[:, None]
            b_p = gl.convert_layout(b_soft.to(s_v.dtype), p_layout)
        count += num_blocks
        v_place, v_phase = _place_of(count - 1)
        hopper.mbarrier.wait(v_filled.index(v_place), v_phase)
        acc = hopper.warpgroup_mma(b_p, s_v.index(v_place), b_acc, is_async=True)
        if BLOCK_D <= 128:
            b_q = _load_queries(p_q, next_tile, first_kv_head, HALF, NUM_HEADS, GROUP, HEAD_DIM, wide_layout)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(v_freed.index(v_place), count=1)
        b_sum = gl.convert_layout(gl.sum(b_l, axis=1), row_layout)
        if HAS_SINKS:
            o_head, m_m = first_head + o_m % GROUP, o_m // GROUP < num_rows
            b_sink = gl.load(p_sinks + o_head, mask=m_m, other=-float("inf")) * PER_NAT
            b_sum += _exp2(b_sink - gl.where(b_m == -float("inf"), 0.0, b_m) + P_SHIFT)
        b_share = 1.0 / gl.where(b_sum > 0, b_sum, 1.0)
        b_out = b_acc * gl.convert_layout(b_share, gl.SliceLayout(1, out_layout))[:, None]
        if ROTATED:
            b_out = _rotate(b_out, s_rotation, rotation_scale, HADAMARD)
        # Through shared memory, so threads write whole lines.
        s_out.store(b_out.to(s_out.dtype))
        o_x, m_x = _elements_of(row, num_rows, first_head, HALF, NUM_HEADS, GROUP, HEAD_DIM, wide_layout)
        gl.store(p_out + o_x, s_out.load(wide_layout), mask=m_x)
        if BLOCK_D > 128:  # no registers are left earlier
            b_q = _load_queries(p_q, next_tile, first_kv_head, HALF, NUM_HEADS, GROUP, HEAD_DIM, wide_layout)
        tile = next_tile
    if HALF == 0:
        _await_turn(HALF)


@gluon_jit
def _halves(b_x):
    """Split [M, D] into its lower and upper columns."""
    M: constexpr = b_x.shape[0]
    HALF_D: constexpr = b_x.shape[1] // 2
    return gl.split(b_x.reshape([M, 2, HALF_D]).permute((0, 2, 1)))


@gluon_jit
def _rotate(b_out, s_rotation, rotation_scale, HADAMARD: constexpr):
    """Multiply outputs by the rotation of values."""
    HEIGHT_M: constexpr = b_out.shape[0]
    BLOCK_D: constexpr = b_out.shape[1]
    SIDE: constexpr = s_rotation.shape[0]
    layout: constexpr = b_out.type.layout
    if SIDE == BLOCK_D:
        b_operand = gl.convert_layout(b_out.to(s_rotation.dtype), gl.DotOperandLayout(0, layout, 2))
        b_none = gl.zeros([HEIGHT_M, BLOCK_D], gl.float32, layout)
        turned = hopper.warpgroup_mma(b_operand, s_rotation, b_none, use_acc=False, is_async=True)
        return hopper.warpgroup_mma_wait(0, deps=[turned]) * rotation_scale
    else:
        # A Hadamard matrix of twice the side is [[H, H], [H, -H]]. Smaller ones lie along the diagonal of both halves alike.
        side_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
        operand_layout: constexpr = gl.DotOperandLayout(0, side_layout, 2)
        b_none = gl.zeros([HEIGHT_M, SIDE], gl.float32, side_layout)
        b_lower, b_upper = _halves(b_out)
        if HADAMARD == BLOCK_D:
            b_lower, b_upper = b_lower + b_upper, b_lower - b_upper
        b_first = gl.convert_layout(b_lower.to(s_rotation.dtype), operand_layout)
        b_second = gl.convert_layout(b_upper.to(s_rotation.dtype), operand_layout)
        turned = hopper.warpgroup_mma(b_first, s_rotation, b_none, use_acc=False, is_async=True)
        b_lower = hopper.warpgroup_mma_wait(0, deps=[turned]) * rotation_scale
        turned = hopper.warpgroup_mma(b_second, s_rotation, b_none, use_acc=False, is_async=True)
        b_upper = hopper.warpgroup_mma_wait(0, deps=[turned]) * rotation_scale
        b_both = gl.join(b_lower, b_upper).permute((0, 2, 1)).reshape([HEIGHT_M, BLOCK_D])
        return gl.convert_layout(b_both, layout)


@gluon_jit
def _store_rotation(p_rotation, s_rotation, HEAD_DIM: constexpr):
    """Copy the signs of the rotation into shared memory, 32 rows at a time; zeros beyond the head."""
    SIDE: constexpr = s_rotation.shape[0]
    layout: constexpr = gl.BlockedLayout([1, 8], [256 // SIDE, SIDE // 8], [4, 1], [1, 0])
    o_d = gl.arange(0, SIDE, gl.SliceLayout(0, layout))
    for i in gl.static_range(SIDE // 32):
        o_row = i * 32 + gl.arange(0, 32, gl.SliceLayout(1, layout))
        m_table = (o_row < HEAD_DIM)[:, None] & (o_d < HEAD_DIM)[None, :]
        b_table = gl.load(p_rotation + o_row[:, None] * HEAD_DIM + o_d[None, :], mask=m_table, other=0.0)
        s_rotation.slice(i * 32, 32, dim=0).store(b_table.to(s_rotation.dtype))
    hopper.fence_async_shared()


@gluon_jit_counting("starts_stride", "window", "first_tile", "num_tiles", "first_head", "num_heads", "lane_blocks")
def _attend_kernel(
    p_q, k_rows, v_rows, p_rotation, p_out, p_tiles, p_starts, starts_stride,
    p_sinks, inner, outer, window, rotation_scale, first_tile, num_tiles, first_head, num_heads, lane_blocks,
    NUM_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, BLOCK_D: constexpr, NEAR_BLOCK: constexpr,
    ROTATED: constexpr, HAS_WINDOW: constexpr, HAS_SINKS: constexpr, HAS_CAP: constexpr,
    TOKENS: constexpr, HADAMARD: constexpr, PDL: constexpr,
):  # fmt: skip
    SIDE: constexpr = BLOCK_D if BLOCK_D <= 128 else 128
    shared: constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    s_q = gl.allocate_shared_memory(k_rows.dtype, [2, HEIGHT, BLOCK_D], shared)
    s_k = gl.allocate_shared_memory(k_rows.dtype, [STAGES, TOKENS, BLOCK_D], shared)
    s_v = gl.allocate_shared_memory(v_rows.dtype, [STAGES, TOKENS, BLOCK_D], shared)
    s_rotation = s_q
    if ROTATED:
        s_rotation = gl.allocate_shared_memory(gl.float16, [SIDE, SIDE], shared)
        _store_rotation(p_rotation, s_rotation, HEAD_DIM)
    k_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    k_freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(k_filled.index(i), count=1)
        hopper.mbarrier.init(v_filled.index(i), count=1)
        hopper.mbarrier.init(k_freed.index(i), count=2)
        hopper.mbarrier.init(v_freed.index(i), count=2)
    if PDL:
        wait_for_kernels_before()  # earlier kernels write queries and the lane
    # Heads of a tile run one after the other. Triton 3.6 keeps constants in these tuples only if they are written here.
    gl.warp_specialize([(_attend, (
        p_q, p_out, p_tiles, p_sinks, inner, outer, window, rotation_scale, first_tile,
        num_tiles, first_head, num_heads, s_q, s_k, s_v, s_rotation, k_filled, k_freed, v_filled, v_freed,
        0, NUM_HEADS, GROUP, HEAD_DIM, ROTATED, HADAMARD, HAS_WINDOW, HAS_SINKS, HAS_CAP,
    )), (_attend, (
        p_q, p_out, p_tiles, p_sinks, inner, outer, window, rotation_scale, first_tile,
        num_tiles, first_head, num_heads, s_q, s_k, s_v, s_rotation, k_filled, k_freed, v_filled, v_freed,
        1, NUM_HEADS, GROUP, HEAD_DIM, ROTATED, HADAMARD, HAS_WINDOW, HAS_SINKS, HAS_CAP,
    )), (_copy, (
        k_rows, v_rows, p_tiles, p_starts, starts_stride, window, first_tile, num_tiles, num_heads, lane_blocks,
        s_k, s_v, k_filled, k_freed, v_filled, v_freed, NEAR_BLOCK, HAS_WINDOW,
    ))], [4, COPY_WARPS], [REGISTERS, COPY_REGISTERS])  # fmt: skip
    for i in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(k_filled.index(i))
        hopper.mbarrier.invalidate(v_filled.index(i))
        hopper.mbarrier.invalidate(k_freed.index(i))
        hopper.mbarrier.invalidate(v_freed.index(i))
    if PDL:
        launch_dependents()  # release late: programs of the next kernel would share the multiprocessors unevenly

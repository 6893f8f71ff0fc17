"""Latent attention (MLA) on Hopper for tiles of 64 rows times heads: warps gather rows, two warpgroups multiply (wgmma), in Gluon.

T rows, N query heads, L latent, R rotated elements, K places of a list, C split-KV partials, M rows of a tile times heads

The source of tokens is a range of quantized pages, or a list of selected tokens (DSA) over any pages. Over ranges
programs are persistent and take tiles in turn; over lists it has one row, one block of heads and one split of the row's
list. Four of its warps gather rows and decode codes (sparse_gather.py), at most two blocks of 64 tokens ahead.

A warpgroup has half of the tokens of a block for scores, and half of the latent's columns for outputs, as in
latent_warpgroups.py. They exchange p through shared memory. Each token has one factor, which multiplies its scores and its p.
"""

import torch
from torch import Tensor

from holdfast.kernels.attention.dequantize import EXP2_ASM, LOG2_ASM
from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE
from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.attention.warpgroup_tiles import (
    first_tile,
    launch_dependents,
    load_tile,
    wait_for_kernels_before,
)
from holdfast.kernels.geometry import BLOCK_TOKENS
from holdfast.kernels.latent.latent_geometry import head_blocks
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes, SparseRows
from holdfast.kernels.latent.latent_tiles import ListSplits
from holdfast.kernels.latent.latent_warpgroups import (
    HEIGHT,
    LATENT,
    LATENT_DIM,
    ROPE,
    ROPE_DIM,
    TOKENS,
    store_queries,
)
from holdfast.kernels.latent.sparse_gather import gather_rows
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, gluon_jit_counting, hopper, kernel_constant

RING = kernel_constant(2)
"""Blocks of latents in shared memory: one is multiplied while the other is filled."""
GATHER_WARPS, GATHER_REGISTERS = kernel_constant(4), kernel_constant(88)
"""Gathering warps and registers of their threads; 208 registers are left per thread of the warpgroups."""


def takes_gathering(call: LatentCall) -> bool:
    """Return True if these kernels support tiles of 64 rows: Hopper, half precision, the sizes of released models."""
    q_TNX, planes = call.q_TNX, call.planes
    return (
        gl is not None
        and (planes.latent_dim, planes.rope_dim) == (LATENT_DIM, ROPE_DIM)
        and q_TNX.dtype in (torch.bfloat16, torch.float16)
        and (planes.kind != "plain" or planes.rows_SX.dtype == q_TNX.dtype)
        and q_TNX.is_cuda
        and torch.cuda.get_device_capability(q_TNX.device)[0] == 9
    )


def gathered_memory(planes: LatentPlanes) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and rotated elements as 32-bit words; plain rows unchanged."""
    rows_SX = planes.rows_SX
    if planes.kind == "plain":
        return rows_SX, rows_SX, rows_SX
    words_SX = rows_SX.view(torch.int32)
    if planes.kind == "fp8_ds_mla":  # all of them are in its rows
        return words_SX, rows_SX.view(torch.float32), words_SX
    assert planes.scales_SC is not None, "TurboQuant has a plane of scales"
    assert planes.rope_SR is not None, "TurboQuant has a plane of rotated elements"
    return words_SX, planes.scales_SC, planes.rope_SR.view(torch.int32)


def _constants(call: LatentCall, large: bool) -> dict[str, int]:
    num_heads, planes = call.q_TNX.shape[1], call.planes
    num_blocks, group = head_blocks(num_heads, large)
    return {
        "LARGE": large, "PLAIN_ROWS": planes.kind == "plain", "FP8": planes.kind == "fp8_ds_mla",
        "SMALL_ROPE": planes.has_small_rope, "NUM_HEADS": num_heads, "NUM_BLOCKS": num_blocks, "GROUP": group,
        "PAGE_TOKENS": planes.page_tokens, "num_warps": 8, **pdl_flags(call.q_TNX),
    }  # fmt: skip


def attend_gathered_tiles(call: LatentCall, work: TileWork, large: bool) -> None:
    """Launch all small or all large tiles of a step, without the merge."""
    _attend_kernel[(call.num_sms,)](
        call.q_TNX, *gathered_memory(call.planes), call.out_TNL, *call.partials, call.page_table_NP, work.tiles_X8,
        None, None, None, call.page_table_NP.stride(0), None, None, call.scale * LOG2_E, 0,
        LISTED=False, **_constants(call, large),
    )  # fmt: skip


def attend_gathered_lists(call: LatentCall, rows: SparseRows, tokens_TK: Tensor) -> int:
    """Launch all lists of a step, without the merge; return the number of splits."""
    constants, splits = _constants(call, large=False), ListSplits.of(call, tokens_TK.shape[1], BLOCK_TOKENS)
    _attend_kernel[(len(call.q_TNX) * constants["NUM_BLOCKS"], splits.num_splits)](
        call.q_TNX, *gathered_memory(call.planes), call.out_TNL, *call.partials, call.page_table_NP, None,
        *rows, tokens_TK, call.page_table_NP.stride(0), tokens_TK.stride(0), tokens_TK.shape[1], call.scale * LOG2_E,
        splits.places, LISTED=True, **constants,
    )  # fmt: skip
    return splits.num_splits


@gluon_jit
def token_sums(b_p):
    """Sum the numbers of a row that one thread holds, without synchronizing threads."""
    # Axes of the tokens: warpgroup, tiles of an instruction, four threads, pair.
    b_p = b_p.reshape([HEIGHT, 2, TOKENS // 16, 4, 2])
    return gl.sum(gl.sum(b_p, axis=4), axis=2)


@gluon_jit
def attend_gathered(
    p_q, p_out, p_partial_out, p_partial_lse, row, num_rows, first_head, position, low, high, first_partial, num_splits,
    scale_log2, s_q, s_q_rope, s_latents, s_ropes, s_factors, s_p, filled, freed, count,
    PLAIN_ROWS: constexpr, CAUSAL: constexpr, NUM_HEADS: constexpr, GROUP: constexpr,
):  # fmt: skip
    """Attend one tile: rows from `row`, heads from `first_head`, places `low` to `high`, after `count` blocks of the ring.

    CAUSAL: places are tokens, and a row sees those up to its own; the first row's own is `position`.
    """
    # Four warps per 64 rows: a warpgroup has half of the tokens of scores, and half of the columns of outputs.
    score_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TOKENS // 2, 16])
    out_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    wide_layout: constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow_layout: constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    store_queries(p_q, s_q, row, num_rows, first_head, wide_layout, NUM_HEADS, GROUP)
    store_queries(p_q + LATENT, s_q_rope, row, num_rows, first_head, narrow_layout, NUM_HEADS, GROUP)
    hopper.fence_async_shared()
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, score_layout))
    o_n = gl.arange(0, TOKENS, gl.SliceLayout(0, score_layout))
    b_acc = gl.zeros([HEIGHT, LATENT], gl.float32, out_layout)
    b_m = gl.full([HEIGHT], -float("inf"), gl.float32, gl.SliceLayout(1, score_layout))
    b_l = token_sums(gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout))
    sum_layout: constexpr = gl.SliceLayout(1, gl.SliceLayout(2, b_l.type.layout))
    clear = gl.minimum(high, position + 1)  # all rows see the tokens up to the first row's own
    for i_loop in range((high - low + TOKENS - 1) // TOKENS):
        i_ring = (count + i_loop) % RING
        s_k = s_latents.index(i_ring)
        s_k_rope = s_ropes.index(i_ring)
        hopper.mbarrier.wait(filled.index(i_ring), (count + i_loop) // RING & 1)
        b_score = gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout)
        b_factor = s_factors.index(i_ring).load(gl.SliceLayout(0, score_layout))
        if PLAIN_ROWS:
            score = hopper.warpgroup_mma(s_q, s_k.permute((1, 0)), b_score, use_acc=False, is_async=True)
            score = hopper.warpgroup_mma(s_q_rope, s_k_rope.permute((1, 0)), score, is_async=True)
            b_score = hopper.warpgroup_mma_wait(0, deps=[score]) * scale_log2
        else:
            rope = hopper.warpgroup_mma(s_q_rope, s_k_rope.permute((1, 0)), b_score, use_acc=False, is_async=True)
            score = hopper.warpgroup_mma(s_q, s_k.permute((1, 0)), b_score, use_acc=False, is_async=True)
            b_score, b_rope = hopper.warpgroup_mma_wait(0, deps=[score, rope])
            b_score = b_score * (b_factor * scale_log2)[None, :] + b_rope * scale_log2
        b_score = gl.where((b_factor >= 0)[None, :], b_score, -float("inf"))
        if CAUSAL:
            n = low + i_loop * TOKENS
            if n + TOKENS > clear:
                m_seen = (position + o_m // GROUP)[:, None] >= (n + o_n)[None, :]
                b_score = gl.where(m_seen, b_score, -float("inf"))
        if PLAIN_ROWS:
            b_most = gl.max(b_score, axis=1)
        else:
            # p in half precision includes its factor.
            b_factor = gl.maximum(b_factor, 0.0)
            b_bound = gl.inline_asm_elementwise(LOG2_ASM, "=f,f", [b_factor], gl.float32, True, 1)
            b_most = gl.max(b_score + gl.maximum(b_bound, LEAST_LOG2)[None, :], axis=1)
        b_m_new = gl.maximum(b_m, b_most)
        b_m_safe = gl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_p = gl.inline_asm_elementwise(EXP2_ASM, "=f,f", [b_score - b_m_safe[:, None]], gl.float32, True, 1)
        b_alpha = gl.inline_asm_elementwise(EXP2_ASM, "=f,f", [b_m - b_m_safe], gl.float32, True, 1)
        b_m = b_m_new
        if PLAIN_ROWS:
            s_p.store(b_p.to(s_p.dtype))
        else:
            s_p.store((b_p * (b_factor * P_ONE)[None, :]).to(s_p.dtype))
        hopper.fence_async_shared()
        b_l = b_l * gl.convert_layout(b_alpha, sum_layout)[:, None, None] + token_sums(b_p)
        b_acc = b_acc * gl.convert_layout(b_alpha, gl.SliceLayout(1, out_layout))[:, None]
        # Wait at once: ptxas serializes all wgmma if one is still in flight at the end of a loop.
        acc = hopper.warpgroup_mma(s_p, s_k, b_acc, is_async=True)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(freed.index(i_ring), count=1)
    # If a row sees nothing of a split, its partial is neutral: zeros, with -inf as lse.
    b_sum = gl.convert_layout(gl.sum(gl.sum(b_l, axis=2), axis=1), gl.SliceLayout(1, score_layout))
    b_whole = gl.where(b_sum > 0, b_sum, 1.0)
    if not PLAIN_ROWS:
        b_whole = b_whole * P_ONE
    b_out = b_acc * gl.convert_layout(1.0 / b_whole, gl.SliceLayout(1, out_layout))[:, None]
    o_m_out = gl.arange(0, HEIGHT, gl.SliceLayout(1, out_layout))
    o_l = gl.arange(0, LATENT, gl.SliceLayout(0, out_layout))
    o_head = first_head + o_m_out % GROUP
    m_out = (o_m_out // GROUP < num_rows) & (o_head < NUM_HEADS)
    if first_partial < 0:
        o_out = ((row + o_m_out // GROUP).to(gl.int64) * NUM_HEADS + o_head) * LATENT
        gl.store(p_out + o_out[:, None] + o_l[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out[:, None])
    else:
        o_out = ((first_partial + o_m_out // GROUP * num_splits).to(gl.int64) * NUM_HEADS + o_head) * LATENT
        gl.store(p_partial_out + o_out[:, None] + o_l[None, :], b_out, mask=m_out[:, None])
        o_lse_head = first_head + o_m % GROUP
        m_lse = (o_m // GROUP < num_rows) & (o_lse_head < NUM_HEADS)
        o_lse = (first_partial + o_m // GROUP * num_splits).to(gl.int64) * NUM_HEADS + o_lse_head
        gl.store(p_partial_lse + o_lse, b_m + gl.log2(b_sum), mask=m_lse)


@gluon_jit
def _list_of(p_num_tokens, i_row, num_places, places):
    """Return the first place of this split, its end, and the number of tokens of the row."""
    num_tokens = gl.load(p_num_tokens + i_row)
    low = gl.program_id(1) * places
    return low, gl.minimum(low + places, gl.minimum(num_tokens, num_places)), num_tokens


@gluon_jit
def _gather(
    p_codes, p_scales, p_rope, p_pages, p_tiles, p_table_rows, p_num_tokens, p_tokens, table_stride, tokens_stride,
    num_places, places, s_latents, s_ropes, s_factors, filled, freed,
    LISTED: constexpr, LARGE: constexpr, PLAIN_ROWS: constexpr, FP8: constexpr, SMALL_ROPE: constexpr,
    NUM_BLOCKS: constexpr, PAGE_TOKENS: constexpr,
):  # fmt: skip
    if LISTED:
        i_row = (gl.program_id(0) // NUM_BLOCKS).to(gl.int64)
        low, high, num_tokens = _list_of(p_num_tokens, i_row, num_places, places)
        p_row_tokens = p_tokens + i_row * tokens_stride
        p_row_pages = p_pages + gl.load(p_table_rows + i_row).to(gl.int64) * table_stride
        gather_rows(
            p_codes, p_scales, p_rope, p_row_tokens, p_row_pages, low, high, num_tokens, s_latents, s_ropes, s_factors,
            filled, freed, 0, PLAIN_ROWS, FP8, SMALL_ROPE, False, PAGE_TOKENS,
        )  # fmt: skip
    else:
        first, num_tiles = first_tile(p_tiles, LARGE)
        count = 0  # blocks so far
        for i_item in range(gl.program_id(0), num_tiles * NUM_BLOCKS, gl.num_programs(0)):
            table_row, _, _, _, low, high, _, _ = load_tile(p_tiles, first + i_item // NUM_BLOCKS)
            p_row_pages = p_pages + table_row.to(gl.int64) * table_stride
            gather_rows(
                p_codes, p_scales, p_rope, p_tiles, p_row_pages, low, high, high, s_latents, s_ropes, s_factors,
                filled, freed, count, PLAIN_ROWS, FP8, SMALL_ROPE, True, PAGE_TOKENS,
            )  # fmt: skip
            count += gl.maximum(high - low + TOKENS - 1, 0) // TOKENS


@gluon_jit
def _attend(
    p_q, p_out, p_partial_out, p_partial_lse, p_tiles, p_num_tokens, num_places, scale_log2, places, s_q, s_q_rope,
    s_latents, s_ropes, s_factors, s_p, filled, freed,
    LISTED: constexpr, LARGE: constexpr, PLAIN_ROWS: constexpr, NUM_HEADS: constexpr, NUM_BLOCKS: constexpr,
    GROUP: constexpr,
):  # fmt: skip
    if LISTED:
        i_row = gl.program_id(0) // NUM_BLOCKS
        low, high, num_tokens = _list_of(p_num_tokens, i_row, num_places, places)
        num_splits = gl.num_programs(1)
        num_rows = gl.where(num_tokens > 0, 1, 0)  # nothing is written for a row that selects no tokens
        first_head = gl.program_id(0) % NUM_BLOCKS * GROUP
        first_partial = gl.where(num_splits > 1, i_row * num_splits + gl.program_id(1), -1)
        attend_gathered(
            p_q, p_out, p_partial_out, p_partial_lse, i_row, num_rows, first_head, 0, low, high, first_partial,
            num_splits, scale_log2, s_q, s_q_rope, s_latents, s_ropes, s_factors, s_p, filled, freed, 0,
            PLAIN_ROWS, False, NUM_HEADS, GROUP,
        )  # fmt: skip
    else:
        first, num_tiles = first_tile(p_tiles, LARGE)
        count = 0
        for i_item in range(gl.program_id(0), num_tiles * NUM_BLOCKS, gl.num_programs(0)):
            _, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
                p_tiles, first + i_item // NUM_BLOCKS
            )
            attend_gathered(
                p_q, p_out, p_partial_out, p_partial_lse, row, num_rows, i_item % NUM_BLOCKS * GROUP, position, low, high,
                first_partial, num_splits, scale_log2, s_q, s_q_rope, s_latents, s_ropes, s_factors, s_p, filled, freed,
                count, PLAIN_ROWS, True, NUM_HEADS, GROUP,
            )  # fmt: skip
            count += gl.maximum(high - low + TOKENS - 1, 0) // TOKENS


@gluon_jit_counting("places")
def _attend_kernel(
    p_q, p_codes, p_scales, p_rope, p_out, p_partial_out, p_partial_lse, p_pages, p_tiles, p_table_rows, p_num_tokens,
    p_tokens, table_stride, tokens_stride, num_places, scale_log2, places,
    LISTED: constexpr, LARGE: constexpr, PLAIN_ROWS: constexpr, FP8: constexpr, SMALL_ROPE: constexpr,
    NUM_HEADS: constexpr, NUM_BLOCKS: constexpr, GROUP: constexpr, PAGE_TOKENS: constexpr, PDL: constexpr,
):  # fmt: skip
    q_dtype: constexpr = p_q.dtype.element_ty
    dtype: constexpr = q_dtype if PLAIN_ROWS else gl.float16
    rope_dtype: constexpr = gl.float16 if SMALL_ROPE else q_dtype
    shared: constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    s_latents = gl.allocate_shared_memory(dtype, [RING, TOKENS, LATENT], shared)
    s_ropes = gl.allocate_shared_memory(rope_dtype, [RING, TOKENS, ROPE], shared)
    s_q = gl.allocate_shared_memory(dtype, [HEIGHT, LATENT], shared)
    s_q_rope = gl.allocate_shared_memory(rope_dtype, [HEIGHT, ROPE], shared)
    s_p = gl.allocate_shared_memory(dtype, [HEIGHT, TOKENS], shared)
    s_factors = gl.allocate_shared_memory(gl.float32, [RING, TOKENS], flat)
    filled = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        hopper.mbarrier.init(filled.index(i), count=1)
        hopper.mbarrier.init(freed.index(i), count=1)
    if PDL:
        wait_for_kernels_before()  # earlier kernels write lists, queries and new latents
    # Blocks of heads of a tile or row run one after the other, so all but the first find its latents in the cache.
    # Triton 3.6 keeps constants in these tuples only if they are written inside the call.
    gl.warp_specialize([(_attend, (
        p_q, p_out, p_partial_out, p_partial_lse, p_tiles, p_num_tokens, num_places, scale_log2, places, s_q, s_q_rope,
        s_latents, s_ropes, s_factors, s_p, filled, freed, LISTED, LARGE, PLAIN_ROWS, NUM_HEADS, NUM_BLOCKS, GROUP,
    )), (_gather, (
        p_codes, p_scales, p_rope, p_pages, p_tiles, p_table_rows, p_num_tokens, p_tokens, table_stride, tokens_stride,
        num_places, places, s_latents, s_ropes, s_factors, filled, freed, LISTED, LARGE, PLAIN_ROWS, FP8, SMALL_ROPE,
        NUM_BLOCKS, PAGE_TOKENS,
    ))], [GATHER_WARPS], [GATHER_REGISTERS])  # fmt: skip
    for i in gl.static_range(RING):
        hopper.mbarrier.invalidate(filled.index(i))
        hopper.mbarrier.invalidate(freed.index(i))
    if PDL:
        launch_dependents()  # release late: programs of the next kernel would share the multiprocessors unevenly

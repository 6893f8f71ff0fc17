"""Absorbed latent attention (MLA) to chosen tokens (DSA) for tiles of up to 64 heads on a Hopper: warps gather, warpgroups multiply, in Gluon.

T rows, N query heads, L latent, R rotated elements, K tokens that a row attends to at the most, C split-KV partials

A program has one row, one block of heads and one split of the row's list. Four of its warps gather rows and take codes apart
(sparse_gather.py), two blocks of 64 tokens ahead at the most; two warpgroups multiply as those of latent_warpgroups.py do: each has
half of the tokens for scores, and half of the latent's columns for outputs. Factors of tokens are left to scores and to p.
"""

import torch

from holdfast.kernels.attention.dequantize import EXP2_ASM, LOG2_ASM
from holdfast.kernels.attention.latent_geometry import LARGE_HEIGHT, head_blocks, tile_height
from holdfast.kernels.attention.latent_planes import LatentPlanes, SparseRows
from holdfast.kernels.attention.latent_warpgroups import (
    HEIGHT,
    LATENT,
    LATENT_DIM,
    LAUNCH_DEPENDENTS,
    ROPE,
    ROPE_DIM,
    TOKENS,
    WAIT,
)
from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE
from holdfast.kernels.attention.sparse_gather import gather_codes, gather_plain
from holdfast.kernels.attention.sparse_tiles import ListSplits, merge_lists
from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.kernels.geometry import BLOCK_TOKENS
from holdfast.kernels.triton_compat import (
    constexpr,
    gl,
    gluon_jit,
    gluon_jit_counting,
    hopper,
    kernel_constant,
    pdl_launch,
    supports_pdl,
)

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

RING = kernel_constant(2)
"""Blocks of latents in shared memory: one that is multiplied with, one that is filled."""
GATHER_WARPS, GATHER_REGISTERS = kernel_constant(4), kernel_constant(88)
"""Leave 208 registers to a thread of the warpgroups."""


def takes_warpgroups(planes: LatentPlanes, q_TNX: torch.Tensor) -> bool:
    """Whether these queries are taken here: a Hopper, half precision, the sizes, tiles of 64 heads."""
    return (
        gl is not None
        and (planes.latent_dim, planes.rope_dim) == (LATENT_DIM, ROPE_DIM)
        and tile_height(q_TNX.shape[1], large=False) == LARGE_HEIGHT
        and q_TNX.dtype in (torch.bfloat16, torch.float16)
        and (planes.kind != "plain" or planes.rows_SX.dtype == q_TNX.dtype)
        and q_TNX.is_cuda
        and torch.cuda.get_device_capability(q_TNX.device)[0] == 9
    )


def sparse_warpgroup_attention(
    q_TNX: torch.Tensor,
    planes: LatentPlanes,
    page_table_NP: torch.Tensor,
    rows: SparseRows,
    tokens_TK: torch.Tensor,
    scale: float,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
    num_sms: int,
) -> torch.Tensor:
    """[T, N, L] of the rows that choose, as `sparse_attention`; outputs over TurboQuant's pages are in the rotated space."""
    num_rows, num_heads, _ = q_TNX.shape
    num_blocks, group = head_blocks(num_heads)
    splits = ListSplits.of(q_TNX, tokens_TK, partial_lse_CH, num_sms, BLOCK_TOKENS)
    pdl = supports_pdl(q_TNX)
    codes, scales, rope = _memory(planes)
    _attend_kernel[(num_rows * num_blocks, splits.num_splits)](
        q_TNX,
        codes,
        scales,
        rope,
        out_TNL,
        partial_out_CX,
        partial_lse_CH,
        page_table_NP,
        rows.table_rows_T,
        rows.num_tokens_T,
        tokens_TK,
        page_table_NP.stride(0),
        tokens_TK.stride(0),
        tokens_TK.shape[1],
        scale * LOG2_E,
        splits.places,
        PLAIN_ROWS=planes.kind == "plain",
        FP8=planes.kind == "fp8_ds_mla",
        SMALL_ROPE=planes.has_small_rope,
        NUM_HEADS=num_heads,
        NUM_BLOCKS=num_blocks,
        GROUP=group,
        PAGE_TOKENS=planes.page_tokens,
        PDL=pdl,
        num_warps=8,
        **pdl_launch(pdl),
    )
    if splits.num_splits > 1:
        merge_lists(rows, splits.num_splits, partial_out_CX, partial_lse_CH, out_TNL)
    return out_TNL


def _memory(planes: LatentPlanes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and rotated elements as a kernel reads them; those of fp8_ds_mla lie in its rows."""
    rows_SX = planes.rows_SX
    if planes.kind == "plain":
        return rows_SX, rows_SX, rows_SX
    if planes.kind == "fp8_ds_mla":
        words_SX = rows_SX.view(torch.int32)
        return words_SX, rows_SX.view(torch.float32), words_SX
    assert planes.scales_SC is not None, "TurboQuant has a plane of scales"
    assert planes.rope_SR is not None, "TurboQuant has a plane of rotated elements"
    return rows_SX.view(torch.int32), planes.scales_SC, planes.rope_SR.view(torch.int32)


@gluon_jit
def _gather(
    p_codes,
    p_scales,
    p_rope,
    p_row_tokens,
    p_row_pages,
    low,
    high,
    num_tokens,
    s_latents,
    s_ropes,
    s_factors,
    filled,
    freed,
    PLAIN_ROWS: constexpr,
    FP8: constexpr,
    SMALL_ROPE: constexpr,
    PAGE_TOKENS: constexpr,
):
    if PLAIN_ROWS:
        gather_plain(
            p_codes,
            p_row_tokens,
            p_row_pages,
            low,
            high,
            num_tokens,
            s_latents,
            s_ropes,
            s_factors,
            filled,
            freed,
            0,
            PAGE_TOKENS,
        )
    else:
        gather_codes(
            p_codes,
            p_scales,
            p_rope,
            p_row_tokens,
            p_row_pages,
            low,
            high,
            num_tokens,
            s_latents,
            s_ropes,
            s_factors,
            filled,
            freed,
            0,
            FP8,
            SMALL_ROPE,
            PAGE_TOKENS,
        )


@gluon_jit
def _load_queries(p_q, s_q, o_first, num_heads, layout: constexpr):
    """Some columns of a tile's queries into shared memory; zeros where there is no head. What is beyond half precision is cut."""
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    o_x = gl.arange(0, s_q.shape[1], gl.SliceLayout(0, layout))
    o_q = (o_first + o_m) * (LATENT + ROPE)
    b_q = gl.load(p_q + o_q[:, None] + o_x[None, :], mask=(o_m < num_heads)[:, None], other=0.0)
    if s_q.dtype != b_q.dtype:
        b_q = gl.minimum(gl.maximum(b_q.to(gl.float32), -65504.0), 65504.0).to(s_q.dtype)
    s_q.store(b_q)


@gluon_jit
def _attend(
    p_q,
    p_out,
    p_partial_out,
    p_partial_lse,
    o_first,
    o_partial,
    num_heads,
    num_splits,
    num_loops,
    scale_log2,
    s_q,
    s_q_rope,
    s_latents,
    s_ropes,
    s_factors,
    s_p,
    filled,
    freed,
    PLAIN_ROWS: constexpr,
):
    """What two warpgroups do: products of one tile and one split, and their output."""
    # Both: four warps to 64 heads; a warpgroup has half of the tokens of scores, and half of the columns of outputs.
    score_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TOKENS // 2, 16])
    out_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    wide_layout: constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow_layout: constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    _load_queries(p_q, s_q, o_first, num_heads, wide_layout)
    _load_queries(p_q + LATENT, s_q_rope, o_first, num_heads, narrow_layout)
    hopper.fence_async_shared()
    b_acc = gl.zeros([HEIGHT, LATENT], gl.float32, out_layout)
    b_m = gl.full([HEIGHT], -float("inf"), gl.float32, gl.SliceLayout(1, score_layout))
    b_l = gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout)  # added up at the end: no warp waits for another's
    for i_loop in range(num_loops):
        i_ring = i_loop % RING
        s_k = s_latents.index(i_ring)
        s_k_rope = s_ropes.index(i_ring)
        hopper.mbarrier.wait(filled.index(i_ring), i_loop // RING & 1)
        b_score = gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout)
        b_rope = gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout)
        b_factor = s_factors.index(i_ring).load(gl.SliceLayout(0, score_layout))
        if PLAIN_ROWS:
            score = hopper.warpgroup_mma(s_q, s_k.permute((1, 0)), b_score, use_acc=False, is_async=True)
            score = hopper.warpgroup_mma(s_q_rope, s_k_rope.permute((1, 0)), score, is_async=True)
            b_score = hopper.warpgroup_mma_wait(0, deps=[score])
            b_score = gl.where((b_factor >= 0)[None, :], b_score * scale_log2, -float("inf"))
            b_most = gl.max(b_score, axis=1)
        else:
            rope = hopper.warpgroup_mma(s_q_rope, s_k_rope.permute((1, 0)), b_rope, use_acc=False, is_async=True)
            score = hopper.warpgroup_mma(s_q, s_k.permute((1, 0)), b_score, use_acc=False, is_async=True)
            b_score, b_rope = hopper.warpgroup_mma_wait(0, deps=[score, rope])
            b_score = b_score * (b_factor * scale_log2)[None, :] + b_rope * scale_log2
            b_score = gl.where((b_factor >= 0)[None, :], b_score, -float("inf"))
            b_factor = gl.maximum(b_factor, 0.0)
            b_bound = gl.inline_asm_elementwise(LOG2_ASM, "=f,f", [b_factor], gl.float32, True, 1)
            b_most = gl.max(b_score + gl.maximum(b_bound, LEAST_LOG2)[None, :], axis=1)
        b_m_new = gl.maximum(b_m, b_most)
        b_m_safe = gl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_p = gl.inline_asm_elementwise(EXP2_ASM, "=f,f", [b_score - b_m_safe[:, None]], gl.float32, True, 1)
        b_alpha = gl.inline_asm_elementwise(EXP2_ASM, "=f,f", [b_m - b_m_safe], gl.float32, True, 1)
        b_l = b_l * b_alpha[:, None] + b_p
        b_m = b_m_new
        if PLAIN_ROWS:
            s_p.store(b_p.to(s_p.dtype))
        else:
            s_p.store((b_p * (b_factor * P_ONE)[None, :]).to(s_p.dtype))
        hopper.fence_async_shared()
        b_acc = b_acc * gl.convert_layout(b_alpha, gl.SliceLayout(1, out_layout))[:, None]
        # Waited for at once: the assembler makes all products wait for each other where one is still under way at the
        # end of a loop.
        acc = hopper.warpgroup_mma(s_p, s_k, b_acc, is_async=True)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(freed.index(i_ring), count=1)
    # A split without tokens is neutral: zeros, with -inf as lse.
    b_sum = gl.sum(b_l, axis=1)
    b_whole = gl.where(b_sum > 0, b_sum, 1.0)
    if not PLAIN_ROWS:
        b_whole = b_whole * P_ONE
    b_share = gl.convert_layout(1.0 / b_whole, gl.SliceLayout(1, out_layout))
    b_out = b_acc * b_share[:, None]
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, score_layout))
    o_m_out = gl.arange(0, HEIGHT, gl.SliceLayout(1, out_layout))
    o_l = gl.arange(0, LATENT, gl.SliceLayout(0, out_layout))
    m_out = (o_m_out < num_heads)[:, None]
    if num_splits == 1:
        o_out = ((o_first + o_m_out) * LATENT)[:, None] + o_l[None, :]
        gl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_out)
    else:
        o_out = ((o_partial + o_m_out) * LATENT)[:, None] + o_l[None, :]
        gl.store(p_partial_out + o_out, b_out, mask=m_out)
        gl.store(p_partial_lse + o_partial + o_m, b_m + gl.log2(b_sum), mask=o_m < num_heads)


@gluon_jit_counting("places")
def _attend_kernel(
    p_q,
    p_codes,
    p_scales,
    p_rope,
    p_out,
    p_partial_out,
    p_partial_lse,
    p_pages,
    p_table_rows,
    p_num_tokens,
    p_tokens,
    table_stride,
    tokens_stride,
    num_places,
    scale_log2,
    places,
    PLAIN_ROWS: constexpr,
    FP8: constexpr,
    SMALL_ROPE: constexpr,
    NUM_HEADS: constexpr,
    NUM_BLOCKS: constexpr,
    GROUP: constexpr,
    PAGE_TOKENS: constexpr,
    PDL: constexpr,
):
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
    # Blocks of heads of a row come one after the other, so that all but the first find its latents in the cache.
    i_row = (gl.program_id(0) // NUM_BLOCKS).to(gl.int64)
    i_split = gl.program_id(1)
    num_splits = gl.num_programs(1)
    if PDL:
        gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, False, 1)  # lists and queries come from kernels before
    num_tokens = gl.load(p_num_tokens + i_row)
    table_row = gl.load(p_table_rows + i_row)
    low = i_split * places
    high = gl.minimum(low + places, gl.minimum(num_tokens, num_places))
    num_loops = gl.maximum(high - low + TOKENS - 1, 0) // TOKENS
    p_row_tokens = p_tokens + i_row * tokens_stride
    p_row_pages = p_pages + table_row.to(gl.int64) * table_stride
    first_head = gl.program_id(0) % NUM_BLOCKS * GROUP
    # Rows that do not choose have no heads: nothing of them is written.
    num_heads = gl.where(num_tokens > 0, gl.minimum(NUM_HEADS - first_head, GROUP), 0)
    o_first = i_row * NUM_HEADS + first_head
    o_partial = (i_row * num_splits + i_split) * NUM_HEADS + first_head
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    p_q,
                    p_out,
                    p_partial_out,
                    p_partial_lse,
                    o_first,
                    o_partial,
                    num_heads,
                    num_splits,
                    num_loops,
                    scale_log2,
                    s_q,
                    s_q_rope,
                    s_latents,
                    s_ropes,
                    s_factors,
                    s_p,
                    filled,
                    freed,
                    PLAIN_ROWS,
                ),
            ),
            (
                _gather,
                (
                    p_codes,
                    p_scales,
                    p_rope,
                    p_row_tokens,
                    p_row_pages,
                    low,
                    high,
                    num_tokens,
                    s_latents,
                    s_ropes,
                    s_factors,
                    filled,
                    freed,
                    PLAIN_ROWS,
                    FP8,
                    SMALL_ROPE,
                    PAGE_TOKENS,
                ),
            ),
        ],
        [GATHER_WARPS],
        [GATHER_REGISTERS],
    )
    for i in gl.static_range(RING):
        hopper.mbarrier.invalidate(filled.index(i))
        hopper.mbarrier.invalidate(freed.index(i))
    if PDL:
        # Not sooner: programs of the next kernel would take places beside these.
        gl.inline_asm_elementwise(LAUNCH_DEPENDENTS, "=r", [], gl.int32, False, 1)

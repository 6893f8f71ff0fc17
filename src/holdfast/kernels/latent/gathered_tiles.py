"""Tiles of 64 rows times heads over latents (MLA) that other warps gather into shared memory: two warpgroups on a Hopper, in Gluon.

M rows of a tile times heads, N tokens of a block, L latent, R rotated elements

What latent_warpgroups.py does with copies of plain pages: a warpgroup has half of the tokens of a block for scores, and half of the
latent's columns for outputs; p goes from one to the other through shared memory. Blocks come from sparse_gather.py, with one
factor a token that is left to scores and to p.
"""

import torch

from holdfast.kernels.attention.dequantize import EXP2_ASM, LOG2_ASM
from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE
from holdfast.kernels.latent.latent_planes import LatentPlanes
from holdfast.kernels.latent.latent_warpgroups import HEIGHT, LATENT, LATENT_DIM, ROPE, ROPE_DIM, TOKENS
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, hopper, kernel_constant

# ruff: noqa: ANN001, ANN201, ANN202 the arguments of kernels have no types

RING = kernel_constant(2)
"""Blocks of latents in shared memory: one that is multiplied with, one that is filled."""
GATHER_WARPS, GATHER_REGISTERS = kernel_constant(4), kernel_constant(88)
"""Leave 208 registers to a thread of the warpgroups."""


def takes_gathering(planes: LatentPlanes, q_TNX: torch.Tensor) -> bool:
    """Whether tiles of 64 rows over these planes are taken so: a Hopper, half precision, the sizes that released models have."""
    return (
        gl is not None
        and (planes.latent_dim, planes.rope_dim) == (LATENT_DIM, ROPE_DIM)
        and q_TNX.dtype in (torch.bfloat16, torch.float16)
        and (planes.kind != "plain" or planes.rows_SX.dtype == q_TNX.dtype)
        and q_TNX.is_cuda
        and torch.cuda.get_device_capability(q_TNX.device)[0] == 9
    )


def gathered_memory(planes: LatentPlanes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and rotated elements as words of a row; those of fp8_ds_mla all lie in its rows. Plain rows as they are."""
    rows_SX = planes.rows_SX
    if planes.kind == "plain":
        return rows_SX, rows_SX, rows_SX
    words_SX = rows_SX.view(torch.int32)
    if planes.kind == "fp8_ds_mla":
        return words_SX, rows_SX.view(torch.float32), words_SX
    assert planes.scales_SC is not None, "TurboQuant has a plane of scales"
    assert planes.rope_SR is not None, "TurboQuant has a plane of rotated elements"
    return words_SX, planes.scales_SC, planes.rope_SR.view(torch.int32)


@gluon_jit
def _load_queries(p_q, s_q, row, num_rows, first_head, layout: constexpr, NUM_HEADS: constexpr, GROUP: constexpr):
    """Some columns of a tile's queries into shared memory; zeros where there is no row or head. Beyond half precision they are cut."""
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    o_x = gl.arange(0, s_q.shape[1], gl.SliceLayout(0, layout))
    o_head = first_head + o_m % GROUP
    m_m = (o_m // GROUP < num_rows) & (o_head < NUM_HEADS)
    o_q = ((row + o_m // GROUP).to(gl.int64) * NUM_HEADS + o_head) * (LATENT + ROPE)
    b_q = gl.load(p_q + o_q[:, None] + o_x[None, :], mask=m_m[:, None], other=0.0)
    if s_q.dtype != b_q.dtype:
        b_q = gl.minimum(gl.maximum(b_q.to(gl.float32), -65504.0), 65504.0).to(s_q.dtype)
    s_q.store(b_q)


@gluon_jit
def _token_sums(b_p):
    """Sums of those of a thread's numbers that are about one row: no thread waits for another's."""
    # Tokens of a score: those of a warpgroup, of an instruction's tiles, of four threads, of a pair.
    b_p = b_p.reshape([HEIGHT, 2, TOKENS // 16, 4, 2])
    return gl.sum(gl.sum(b_p, axis=4), axis=2)


@gluon_jit
def attend_gathered(
    p_q,
    p_out,
    p_partial_out,
    p_partial_lse,
    row,
    num_rows,
    first_head,
    position,
    low,
    high,
    first_partial,
    num_splits,
    scale_log2,
    s_q,
    s_q_rope,
    s_latents,
    s_ropes,
    s_factors,
    s_p,
    filled,
    freed,
    count,
    PLAIN_ROWS: constexpr,
    CAUSAL: constexpr,
    NUM_HEADS: constexpr,
    GROUP: constexpr,
):
    """One tile: rows from `row` on, heads from `first_head` on, places `low` to `high`; `count` blocks went through the ring before.

    CAUSAL: places are tokens, of which a row sees those up to its own, the first row those up to `position`.
    """
    # Both: four warps to 64 rows; a warpgroup has half of the tokens of scores, and half of the columns of outputs.
    score_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TOKENS // 2, 16])
    out_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    wide_layout: constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow_layout: constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    _load_queries(p_q, s_q, row, num_rows, first_head, wide_layout, NUM_HEADS, GROUP)
    _load_queries(p_q + LATENT, s_q_rope, row, num_rows, first_head, narrow_layout, NUM_HEADS, GROUP)
    hopper.fence_async_shared()
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, score_layout))
    o_n = gl.arange(0, TOKENS, gl.SliceLayout(0, score_layout))
    b_acc = gl.zeros([HEIGHT, LATENT], gl.float32, out_layout)
    b_m = gl.full([HEIGHT], -float("inf"), gl.float32, gl.SliceLayout(1, score_layout))
    b_l = _token_sums(gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout))
    sum_layout: constexpr = gl.SliceLayout(1, gl.SliceLayout(2, b_l.type.layout))
    clear = gl.minimum(high, position + 1)  # tokens up to the first row's own are seen by every row
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
            # What p becomes in half precision has its factor in it.
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
        b_l = b_l * gl.convert_layout(b_alpha, sum_layout)[:, None, None] + _token_sums(b_p)
        b_acc = b_acc * gl.convert_layout(b_alpha, gl.SliceLayout(1, out_layout))[:, None]
        # Waited for at once: the assembler makes all products wait for each other where one is still under way at the
        # end of a loop.
        acc = hopper.warpgroup_mma(s_p, s_k, b_acc, is_async=True)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(freed.index(i_ring), count=1)
    # A split that a row sees nothing of is neutral: zeros, with -inf as lse.
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

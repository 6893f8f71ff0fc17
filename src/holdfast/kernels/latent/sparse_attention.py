"""Absorbed latent attention (MLA) to chosen tokens (DSA): rows of pages are gathered, and dequantized, inside the kernel.

T rows, N query heads, L latent, R rotated elements, K tokens that a row attends to at the most, C split-KV partials

A row has a list of its own, so that a tile is one row and a block of heads; few rows split their lists, by a number that follows
from the number of rows alone, so that a graph serves any step. What compiled kernels differ in by the number of rows is the form
of the merge, that of latent_tiles.py.
"""

import torch

from holdfast.kernels.attention.split_kv import LOG2_E, finite_max
from holdfast.kernels.latent.latent_attention import LatentBlocks, latent_blocks
from holdfast.kernels.latent.latent_geometry import head_blocks, tile_height
from holdfast.kernels.latent.latent_low_tiles import takes_low
from holdfast.kernels.latent.latent_planes import LatentPlanes, SparseRows, read_latents
from holdfast.kernels.latent.latent_tiles import RowForm
from holdfast.kernels.latent.latent_tiles import row_form as merge_form
from holdfast.kernels.latent.sparse_low_attention import sparse_low_attention
from holdfast.kernels.latent.sparse_quantized_attention import sparse_quantized_attention
from holdfast.kernels.latent.sparse_tiles import (
    ListSplits,
    find_slots,
    load_pages,
    load_places,
    merge_lists,
    seen_tokens,
)
from holdfast.kernels.latent.sparse_warpgroups import sparse_warpgroup_attention, takes_warpgroups
from holdfast.kernels.triton_compat import (
    constexpr,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    shared_bytes,
    supports_pdl,
    tl,
)

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types


BLOCKS = {
    16: (LatentBlocks(32, 3, 4), LatentBlocks(32, 2, 4), LatentBlocks(16, 2, 4)),
    32: (LatentBlocks(64, 3, 8), LatentBlocks(32, 3, 8), LatentBlocks(32, 2, 8), LatentBlocks(16, 2, 8)),
    64: (LatentBlocks(64, 2, 8), LatentBlocks(32, 2, 8), LatentBlocks(16, 2, 8)),
}
"""By the height of tiles. Addresses of latents that lie apart take registers, so that low tiles take fewer at once than ranges do:
two programs of those fit a multiprocessor. To be measured."""


def row_form(num_rows: int) -> RowForm:
    """What of the launches follows from the number of rows; splits are mere numbers."""
    return merge_form(num_rows)


def sparse_attention(
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
    """[T, N, L] of the rows that choose: softmax over their tokens (int32 positions, -1: none); others stay as they are.

    Partials: as many rows times heads as `sparse_splits` of the step's rows asks for.
    """
    if takes_low(q_TNX, planes):
        return sparse_low_attention(
            q_TNX, planes, page_table_NP, rows, tokens_TK, scale, partial_out_CX, partial_lse_CH, out_TNL, num_sms
        )
    if takes_warpgroups(planes, q_TNX):
        return sparse_warpgroup_attention(
            q_TNX, planes, page_table_NP, rows, tokens_TK, scale, partial_out_CX, partial_lse_CH, out_TNL, num_sms
        )
    if planes.kind != "plain":
        return sparse_quantized_attention(
            q_TNX, planes, page_table_NP, rows, tokens_TK, scale, partial_out_CX, partial_lse_CH, out_TNL, num_sms
        )
    num_rows, num_heads, _ = q_TNX.shape
    block_l, block_r = (max(16, next_power_of_two(size)) for size in (planes.latent_dim, planes.rope_dim))
    height, (num_blocks, group) = tile_height(num_heads, large=False), head_blocks(num_heads)
    row_bytes, pdl = (block_l + block_r) * planes.rows_SX.element_size(), supports_pdl(q_TNX)
    blocks = latent_blocks(height, row_bytes, shared_bytes(q_TNX), BLOCKS)
    splits = ListSplits.of(q_TNX, tokens_TK, partial_lse_CH, num_sms, blocks.tokens)
    _attend_kernel[(num_rows * num_blocks, splits.num_splits)](
        q_TNX,
        planes.rows_SX,
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
        NUM_HEADS=num_heads,
        NUM_BLOCKS=num_blocks,
        GROUP=group,
        LATENT_DIM=planes.latent_dim,
        ROPE_DIM=planes.rope_dim,
        PAGE_TOKENS=planes.page_tokens,
        BLOCK_M=height,
        BLOCK_N=blocks.tokens,
        BLOCK_L=block_l,
        BLOCK_R=block_r,
        NUM_STAGES=blocks.num_stages,
        PDL=pdl,
        num_warps=blocks.num_warps,
        **pdl_launch(pdl),
    )
    if splits.num_splits > 1:
        merge_lists(rows, splits.num_splits, partial_out_CX, partial_lse_CH, out_TNL)
    return out_TNL


def sparse_attention_reference(
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
    """The same in plain torch, a row at a time, without splits. Places of a list that name no token of the row weigh nothing."""
    num_rows, page_tokens = len(q_TNX), planes.page_tokens
    table_rows, counts = rows.table_rows_T[:num_rows].tolist(), rows.num_tokens_T[:num_rows].tolist()
    for row, (table_row, num_tokens) in enumerate(zip(table_rows, counts, strict=True)):
        if num_tokens <= 0:
            continue
        listed_S = tokens_TK[row, :num_tokens].long()
        token_S = listed_S[(listed_S >= 0) & (listed_S < num_tokens)]
        slot_S = page_table_NP[table_row, token_S // page_tokens].long() * page_tokens + token_S % page_tokens
        latents_SX = read_latents(planes, slot_S, torch.float32)
        weights_NS = (q_TNX[row].float() @ latents_SX.T * scale).softmax(-1)
        out_TNL[row] = (weights_NS @ latents_SX[:, : planes.latent_dim]).to(out_TNL.dtype)
    return out_TNL


@jit_counting("places")
def _attend_kernel(
    p_q,
    p_latents,
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
    NUM_HEADS: constexpr,
    NUM_BLOCKS: constexpr,
    GROUP: constexpr,
    LATENT_DIM: constexpr,
    ROPE_DIM: constexpr,
    PAGE_TOKENS: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_L: constexpr,
    BLOCK_R: constexpr,
    NUM_STAGES: constexpr,
    PDL: constexpr,
):
    WIDTH: constexpr = LATENT_DIM + ROPE_DIM
    # Blocks of heads of a row come one after the other, so that all but the first find its latents in the cache.
    i_row = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    i_split = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()  # lists and queries come from kernels before
    num_tokens = tl.load(p_num_tokens + i_row)
    if num_tokens <= 0:
        return
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_l = tl.arange(0, BLOCK_L)
    o_r = tl.arange(0, BLOCK_R)
    m_l = o_l < LATENT_DIM
    m_r = o_r < ROPE_DIM
    low = i_split * places
    high = tl.minimum(low + places, tl.minimum(num_tokens, num_places))
    # Tokens are read two blocks ahead and their pages one, so that no load of latents waits for another load.
    p_row_tokens = p_tokens + i_row * tokens_stride
    p_row_pages = p_pages + tl.load(p_table_rows + i_row).to(tl.int64) * table_stride
    b_token = seen_tokens(load_places(p_row_tokens, low + o_n, high), num_tokens)
    b_ahead = load_places(p_row_tokens, low + BLOCK_N + o_n, high)
    b_page = load_pages(p_row_pages, b_token, PAGE_TOKENS)
    o_head = tl.program_id(0) % NUM_BLOCKS * GROUP + o_m
    m_m = (o_m < GROUP) & (o_head < NUM_HEADS)
    o_q = i_row * NUM_HEADS + o_head
    p_q_m = p_q + (o_q * WIDTH)[:, None]
    b_q = tl.load(p_q_m + o_l[None, :], mask=m_m[:, None] & m_l[None, :], other=0.0)
    b_q_rope = tl.load(p_q_m + LATENT_DIM + o_r[None, :], mask=m_m[:, None] & m_r[None, :], other=0.0)
    b_acc = tl.zeros((BLOCK_M, BLOCK_L), dtype=tl.float32)
    b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for n in tl.range(low, high, BLOCK_N, num_stages=NUM_STAGES):
        o_slot = find_slots(b_page, b_token, PAGE_TOKENS)
        b_token = seen_tokens(b_ahead, num_tokens)
        b_page = load_pages(p_row_pages, b_token, PAGE_TOKENS)
        b_ahead = load_places(p_row_tokens, n + 2 * BLOCK_N + o_n, high)
        m_n = o_slot >= 0
        p_n = p_latents + (tl.maximum(o_slot, 0) * WIDTH)[:, None]
        b_k = tl.load(p_n + o_l[None, :], mask=m_n[:, None] & m_l[None, :], other=0.0)
        b_k_rope = tl.load(p_n + LATENT_DIM + o_r[None, :], mask=m_n[:, None] & m_r[None, :], other=0.0)
        b_score = tl.dot(b_q, tl.trans(b_k))
        b_score = tl.dot(b_q_rope, tl.trans(b_k_rope), b_score) * scale_log2
        # Read once more: carried as scores lie, lists would take the registers of sums.
        b_here = seen_tokens(load_places(p_row_tokens, n + o_n, high), num_tokens)
        b_score = tl.where((b_here >= 0)[None, :], b_score, -float("inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_score, axis=1))
        b_m_safe = finite_max(b_m_new)
        b_p = tl.exp2(b_score - b_m_safe[:, None])
        b_alpha = tl.exp2(b_m - b_m_safe)
        b_l = b_l * b_alpha + tl.sum(b_p, axis=1)
        b_acc = tl.dot(b_p.to(b_k.dtype), b_k, b_acc * b_alpha[:, None])
        b_m = b_m_new
    # A split without tokens is neutral: zeros, with -inf as lse.
    b_out = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
    m_out = m_m[:, None] & m_l[None, :]
    num_splits = tl.num_programs(1)
    if num_splits == 1:
        p_y = p_out + (o_q * LATENT_DIM)[:, None] + o_l[None, :]
        tl.store(p_y, b_out.to(p_out.dtype.element_ty), mask=m_out)
    else:
        o_partial = (i_row * num_splits + i_split) * NUM_HEADS + o_head
        tl.store(p_partial_out + (o_partial * LATENT_DIM)[:, None] + o_l[None, :], b_out, mask=m_out)
        tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # not sooner: programs of the next kernel would take places beside these

"""Absorbed latent attention (MLA) to chosen tokens (DSA), straight from the codes of quantized pages: fp8_ds_mla and TurboQuant.

T rows, N query heads, L latent, R rotated elements, K tokens that a row attends to at the most, C split-KV partials, M heads of a
tile, W columns of words

Tiles, splits and partials are those of sparse_attention.py, and what becomes of codes is that of latent_quantized_attention.py,
whose reference over ranges stands for this kernel too: sparse_attention_reference reads any pages.
"""

import torch

from holdfast.kernels.attention.dequantize import fast_exp2, fast_log2
from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE
from holdfast.kernels.attention.split_kv import LOG2_E, finite_max
from holdfast.kernels.latent.latent_geometry import head_blocks, tile_height
from holdfast.kernels.latent.latent_planes import LatentPlanes, SparseRows
from holdfast.kernels.latent.latent_quantized_attention import quantized_blocks
from holdfast.kernels.latent.latent_words import (
    group_scores,
    load_queries,
    load_rope_queries,
    load_scales,
    load_words,
    rope_plane,
    rope_scores,
    scale_factor,
    store_parts,
    take_apart,
    word_shape,
)
from holdfast.kernels.latent.sparse_tiles import (
    ListSplits,
    find_slots,
    load_pages,
    load_places,
    merge_lists,
    seen_tokens,
)
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit_counting,
    pdl_launch,
    shared_bytes,
    supports_pdl,
    tl,
)

# Triton unpacks nothing into a tuple, but adds tuples.
# ruff: noqa: ANN001, ANN202, RUF005 the arguments of kernels have no types


def sparse_quantized_attention(
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
    assert planes.kind != "plain", "plain pages are attended to by a kernel of their own"
    num_rows, num_heads, _ = q_TNX.shape
    shape, pdl, plain = word_shape(planes), supports_pdl(q_TNX), is_interpreted()
    height, (num_blocks, group) = tile_height(num_heads, large=False), head_blocks(num_heads)
    blocks = quantized_blocks(height, planes, shared_bytes(q_TNX))
    splits = ListSplits.of(q_TNX, tokens_TK, partial_lse_CH, num_sms, blocks.tokens)
    num_turns = -(-group // blocks.height)
    _attend_kernel[(num_rows * num_blocks * num_turns, splits.num_splits)](
        q_TNX,
        planes.rows_SX.view(torch.int16),
        planes.scales_SC,
        rope_plane(planes),
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
        FP8=planes.kind == "fp8_ds_mla",
        SMALL_ROPE=planes.has_small_rope,
        NUM_HEADS=num_heads,
        NUM_BLOCKS=num_blocks,
        NUM_TURNS=num_turns,
        GROUP=group,
        LATENT_DIM=planes.latent_dim,
        ROPE_DIM=planes.rope_dim,
        PAGE_TOKENS=planes.page_tokens,
        NUM_GROUPS=shape.groups,
        ROW_WORDS=planes.rows_SX.shape[1] // 2,
        BLOCK_M=blocks.height,
        BLOCK_N=blocks.tokens,
        BLOCK_W=shape.block_columns,
        BLOCK_R=shape.block_rope,
        NUM_STAGES=blocks.num_stages,
        PLAIN=plain,
        PDL=pdl,
        num_warps=blocks.num_warps,
        **pdl_launch(pdl),
    )
    if splits.num_splits > 1:
        merge_lists(rows, splits.num_splits, partial_out_CX, partial_lse_CH, out_TNL)
    return out_TNL


@jit_counting("places")
def _attend_kernel(
    p_q,
    p_words,
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
    FP8: constexpr,
    SMALL_ROPE: constexpr,
    NUM_HEADS: constexpr,
    NUM_BLOCKS: constexpr,
    NUM_TURNS: constexpr,
    GROUP: constexpr,
    LATENT_DIM: constexpr,
    ROPE_DIM: constexpr,
    PAGE_TOKENS: constexpr,
    NUM_GROUPS: constexpr,
    ROW_WORDS: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_W: constexpr,
    BLOCK_R: constexpr,
    NUM_STAGES: constexpr,
    PLAIN: constexpr,
    PDL: constexpr,
):
    WIDTH: constexpr = LATENT_DIM + ROPE_DIM
    NUM_PARTS: constexpr = 2 if FP8 else 4
    # Blocks of heads and turns of a row come one after the other, so that all but the first find its codes in the cache.
    i_item = tl.program_id(0)
    i_row = (i_item // (NUM_BLOCKS * NUM_TURNS)).to(tl.int64)
    i_split = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()  # lists and queries come from kernels before
    num_tokens = tl.load(p_num_tokens + i_row)
    if num_tokens <= 0:
        return
    o_n = tl.arange(0, BLOCK_N)
    low = i_split * places
    high = tl.minimum(low + places, tl.minimum(num_tokens, num_places))
    # Tokens are read three blocks ahead, their pages two and their scales one: in a block nothing waits for memory but the
    # codes' own copies.
    p_row_tokens = p_tokens + i_row * tokens_stride
    p_row_pages = p_pages + tl.load(p_table_rows + i_row).to(tl.int64) * table_stride
    b_first = seen_tokens(load_places(p_row_tokens, low + o_n, high), num_tokens)
    b_token = seen_tokens(load_places(p_row_tokens, low + BLOCK_N + o_n, high), num_tokens)
    b_ahead = load_places(p_row_tokens, low + 2 * BLOCK_N + o_n, high)
    o_found = find_slots(load_pages(p_row_pages, b_first, PAGE_TOKENS), b_first, PAGE_TOKENS)
    b_page = load_pages(p_row_pages, b_token, PAGE_TOKENS)
    o_m = i_item % NUM_TURNS * BLOCK_M + tl.arange(0, BLOCK_M)
    o_head = i_item // NUM_TURNS % NUM_BLOCKS * GROUP + o_m
    m_m = (o_m < GROUP) & (o_head < NUM_HEADS)
    o_q = i_row * NUM_HEADS + o_head
    p_q_m = p_q + (o_q * WIDTH)[:, None]
    b_q = load_queries(p_q_m, m_m, FP8, NUM_GROUPS, LATENT_DIM, BLOCK_W)
    b_q_rope = load_rope_queries(p_q_m + LATENT_DIM, m_m, SMALL_ROPE, ROPE_DIM, BLOCK_R, PLAIN)
    b_acc = ()
    for _ in tl.static_range(NUM_GROUPS * NUM_PARTS):
        b_acc = b_acc + (tl.zeros((BLOCK_M, BLOCK_W), dtype=tl.float32),)
    b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    b_l_tokens = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    o_any = tl.maximum(o_found, 0)
    b_scale = load_scales(p_words, p_scales, o_any, FP8, SMALL_ROPE, NUM_GROUPS, LATENT_DIM, ROW_WORDS)
    for n in tl.range(low, high, BLOCK_N, num_stages=NUM_STAGES):
        m_n = o_found >= 0
        o_slot = tl.maximum(o_found, 0)
        o_found = find_slots(b_page, b_token, PAGE_TOKENS)
        o_next = tl.maximum(o_found, 0)
        b_next = load_scales(p_words, p_scales, o_next, FP8, SMALL_ROPE, NUM_GROUPS, LATENT_DIM, ROW_WORDS)
        b_token = seen_tokens(b_ahead, num_tokens)
        b_page = load_pages(p_row_pages, b_token, PAGE_TOKENS)
        b_ahead = load_places(p_row_tokens, n + 3 * BLOCK_N + o_n, high)
        # Read once more: carried as scores lie, lists would take the registers of sums.
        m_seen = seen_tokens(load_places(p_row_tokens, n + o_n, high), num_tokens) >= 0
        b_score = rope_scores(
            b_q_rope,
            p_rope,
            o_slot,
            m_n,
            True,
            FP8,
            SMALL_ROPE,
            LATENT_DIM,
            ROPE_DIM,
            NUM_GROUPS,
            ROW_WORDS,
            BLOCK_R,
            PLAIN,
        )
        if SMALL_ROPE:
            b_score = b_score * scale_factor(b_scale[1], m_seen, True)[None, :]
        b_groups = ()
        b_bound = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for g in tl.static_range(NUM_GROUPS):
            b_factor = scale_factor(b_scale[g], m_seen, True)
            b_bound = tl.maximum(b_bound, b_factor)
            b_words = load_words(p_words, o_slot, m_n, g, True, FP8, LATENT_DIM, ROW_WORDS, BLOCK_W)
            b_score += group_scores(b_q, b_words, g, FP8, PLAIN) * b_factor[None, :]
            b_groups = b_groups + (b_words,)
        b_score = tl.where(m_seen[None, :], b_score * scale_log2, -float("inf"))
        b_bound = tl.maximum(fast_log2(b_bound, PLAIN), LEAST_LOG2)
        b_m_new = tl.maximum(b_m, tl.max(b_score + b_bound[None, :], axis=1))
        b_m_safe = finite_max(b_m_new)
        b_p = fast_exp2(b_score - b_m_safe[:, None], PLAIN)
        b_alpha = fast_exp2(b_m - b_m_safe, PLAIN)
        b_l_tokens = b_l_tokens * b_alpha[:, None] + b_p
        b_new = ()
        for g in tl.static_range(NUM_GROUPS):
            b_factor = scale_factor(b_scale[g], m_seen, True)
            b_weight = (b_p * (b_factor * P_ONE)[None, :]).to(tl.float16)
            b_values = take_apart(b_groups[g], FP8, PLAIN)
            for j in tl.static_range(NUM_PARTS):
                b_new = b_new + (tl.dot(b_weight, b_values[j], b_acc[g * NUM_PARTS + j] * b_alpha[:, None]),)
        b_acc, b_m, b_scale = b_new, b_m_new, b_next
    b_l = tl.sum(b_l_tokens, axis=1)
    # A split without tokens is neutral: zeros, with -inf as lse.
    b_share = 1.0 / tl.where(b_l > 0, b_l * P_ONE, 1.0)[:, None]
    num_splits = tl.num_programs(1)
    if num_splits == 1:
        store_parts(b_acc, b_share, p_out + (o_q * LATENT_DIM)[:, None], m_m, FP8, NUM_GROUPS, LATENT_DIM, BLOCK_W)
    else:
        o_partial = (i_row * num_splits + i_split) * NUM_HEADS + o_head
        p_partial = p_partial_out + (o_partial * LATENT_DIM)[:, None]
        store_parts(b_acc, b_share, p_partial, m_m, FP8, NUM_GROUPS, LATENT_DIM, BLOCK_W)
        tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # not sooner: programs of the next kernel would take places beside these

"""Absorbed latent attention (MLA) to chosen tokens (DSA) for tiles of 64 heads over quantized pages: codes become operands once.

T rows, N query heads, L latent, R rotated elements, K tokens that a row attends to at the most, C split-KV partials, M heads of a
tile, N tokens of a block, W columns of words

Tiles so high multiply out of shared memory (wgmma). Other kernels leave every scale to scores and to p, one of each group, which
here would be more registers than sums leave. So parts of fp8_ds_mla are multiplied by the share of their group's scale in the
largest of their token, at most one, and lie in shared memory in half precision for both products; what is left to scores and p
is one number a token. Parts of a kind lie side by side, so that products are as wide as can be.

    fp8_ds_mla   part j at column c is element 2 c + j, j < 2; columns in groups of 64
    TurboQuant   part j at column c is coordinate j L / 4 + c, j < 4; one group
"""

import torch

from holdfast.kernels.attention.dequantize import fast_exp2, fast_log2
from holdfast.kernels.attention.latent_geometry import LARGE_HEIGHT, head_blocks, tile_height
from holdfast.kernels.attention.latent_planes import LatentPlanes, SparseRows
from holdfast.kernels.attention.latent_words import (
    half,
    load_rope_queries,
    rope_plane,
    rope_scores,
    take_apart,
    word_shape,
)
from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE
from holdfast.kernels.attention.sparse_tiles import ListSplits, find_slots, load_pages, load_places, seen_tokens
from holdfast.kernels.attention.split_kv import LOG2_E, finite_max
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit,
    jit_counting,
    pdl_launch,
    supports_pdl,
    tl,
)
from holdfast.quant.formats import LATENT_TILE
from holdfast.quant.latent_quantize import LATENT_PARTS

# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false

# Triton unpacks nothing into a tuple, but adds tuples.
# ruff: noqa: ANN001, ANN202, RET505, RUF005 the arguments of kernels have no types

BLOCK_TOKENS, NUM_STAGES, NUM_WARPS = 64, 2, 8
"""Of a program. To be measured; with 32 tokens fewer registers are spilled, of which 6 % of a block's instructions are about."""
SHARED_BYTES = 192 * 1024
"""Of the largest: what a GPU has to let a program have."""


def takes_wide(planes: LatentPlanes, num_heads: int, room: int) -> bool:
    """Whether tiles over these planes are taken here: 64 heads high, parts as wide as a power of two, a large GPU."""
    if tile_height(num_heads, large=False) < LARGE_HEIGHT or room < SHARED_BYTES:
        return False
    unit = LATENT_TILE if planes.kind == "fp8_ds_mla" else 16 * LATENT_PARTS
    count, rest = divmod(planes.latent_dim, unit)
    return rest == 0 and count > 0 and count & (count - 1) == 0


def attend_wide(
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
) -> int:
    """All tiles of a step, without the merge of their partials; the number of splits."""
    num_rows, num_heads, _ = q_TNX.shape
    shape, pdl, is_fp8 = word_shape(planes), supports_pdl(q_TNX), planes.kind == "fp8_ds_mla"
    num_blocks, group = head_blocks(num_heads)
    splits = ListSplits.of(q_TNX, tokens_TK, partial_lse_CH, num_sms, BLOCK_TOKENS)
    _attend_kernel[(num_rows * num_blocks, splits.num_splits)](
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
        FP8=is_fp8,
        SMALL_ROPE=planes.has_small_rope,
        NUM_HEADS=num_heads,
        NUM_BLOCKS=num_blocks,
        GROUP=group,
        LATENT_DIM=planes.latent_dim,
        ROPE_DIM=planes.rope_dim,
        PAGE_TOKENS=planes.page_tokens,
        NUM_GROUPS=shape.groups,
        GROUP_WORDS=planes.latent_dim // shape.parts // shape.groups,
        ROW_WORDS=planes.rows_SX.shape[1] // 2,
        BLOCK_M=LARGE_HEIGHT,
        BLOCK_N=BLOCK_TOKENS,
        BLOCK_R=shape.block_rope,
        NUM_STAGES=NUM_STAGES,
        PLAIN=is_interpreted(),
        PDL=pdl,
        num_warps=NUM_WARPS,
        **pdl_launch(pdl),
    )
    return splits.num_splits


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
    GROUP: constexpr,
    LATENT_DIM: constexpr,
    ROPE_DIM: constexpr,
    PAGE_TOKENS: constexpr,
    NUM_GROUPS: constexpr,
    GROUP_WORDS: constexpr,
    ROW_WORDS: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_R: constexpr,
    NUM_STAGES: constexpr,
    PLAIN: constexpr,
    PDL: constexpr,
):
    WIDTH: constexpr = LATENT_DIM + ROPE_DIM
    NUM_PARTS: constexpr = 2 if FP8 else 4
    BLOCK_W: constexpr = NUM_GROUPS * GROUP_WORDS
    # Blocks of heads of a row come one after the other, so that all but the first find its codes in the cache.
    i_row = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    i_split = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()  # lists and queries come from kernels before
    num_tokens = tl.load(p_num_tokens + i_row)
    if num_tokens <= 0:
        return
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    low = i_split * places
    high = tl.minimum(low + places, tl.minimum(num_tokens, num_places))
    # Tokens are read two blocks ahead and their pages one, so that no load of codes waits for another load.
    p_row_tokens = p_tokens + i_row * tokens_stride
    p_row_pages = p_pages + tl.load(p_table_rows + i_row).to(tl.int64) * table_stride
    b_token = seen_tokens(load_places(p_row_tokens, low + o_n, high), num_tokens)
    b_ahead = load_places(p_row_tokens, low + BLOCK_N + o_n, high)
    b_page = load_pages(p_row_pages, b_token, PAGE_TOKENS)
    o_head = tl.program_id(0) % NUM_BLOCKS * GROUP + o_m
    m_m = (o_m < GROUP) & (o_head < NUM_HEADS)
    o_q = i_row * NUM_HEADS + o_head
    p_q_m = p_q + (o_q * WIDTH)[:, None]
    b_q = ()
    b_acc = ()
    for j in tl.static_range(NUM_PARTS):
        b_x = tl.load(p_q_m + _part_dims(j, FP8, BLOCK_W)[None, :], mask=m_m[:, None], other=0.0)
        b_q = b_q + (half(b_x),)
        b_acc = b_acc + (tl.zeros((BLOCK_M, BLOCK_W), dtype=tl.float32),)
    b_q_rope = load_rope_queries(p_q_m + LATENT_DIM, m_m, SMALL_ROPE, ROPE_DIM, BLOCK_R, PLAIN)
    b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for n in tl.range(low, high, BLOCK_N, num_stages=NUM_STAGES):
        o_found = find_slots(b_page, b_token, PAGE_TOKENS)
        b_token = seen_tokens(b_ahead, num_tokens)
        b_page = load_pages(p_row_pages, b_token, PAGE_TOKENS)
        b_ahead = load_places(p_row_tokens, n + 2 * BLOCK_N + o_n, high)
        m_n = o_found >= 0
        o_slot = tl.maximum(o_found, 0)
        b_parts, b_factor = _load_parts(
            p_words, p_scales, o_slot, m_n, FP8, SMALL_ROPE, NUM_GROUPS, GROUP_WORDS, LATENT_DIM, ROW_WORDS, PLAIN
        )
        b_score = _part_scores(b_q, b_parts, NUM_PARTS)
        b_rope = rope_scores(
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
            b_rope = b_rope * tl.load(p_scales + o_slot * 2 + 1, mask=m_n, other=0.0).to(tl.float32)[None, :]
        # Read once more: carried as scores lie, lists would take the registers of sums.
        m_seen = seen_tokens(load_places(p_row_tokens, n + o_n, high), num_tokens) >= 0
        b_score = (b_score * b_factor[None, :] + b_rope) * scale_log2
        b_score = tl.where(m_seen[None, :], b_score, -float("inf"))
        b_bound = tl.maximum(fast_log2(b_factor, PLAIN), LEAST_LOG2)
        b_m_new = tl.maximum(b_m, tl.max(b_score + b_bound[None, :], axis=1))
        b_m_safe = finite_max(b_m_new)
        b_p = fast_exp2(b_score - b_m_safe[:, None], PLAIN)
        b_alpha = fast_exp2(b_m - b_m_safe, PLAIN)
        b_l = b_l * b_alpha + tl.sum(b_p, axis=1)
        b_weight = (b_p * (b_factor * P_ONE)[None, :]).to(tl.float16)
        b_new = ()
        for j in tl.static_range(NUM_PARTS):
            b_new = b_new + (tl.dot(b_weight, b_parts[j], b_acc[j] * b_alpha[:, None]),)
        b_acc, b_m = b_new, b_m_new
    # A split without tokens is neutral: zeros, with -inf as lse.
    b_share = 1.0 / tl.where(b_l > 0, b_l * P_ONE, 1.0)[:, None]
    num_splits = tl.num_programs(1)
    if num_splits == 1:
        _store_parts(b_acc, b_share, p_out + (o_q * LATENT_DIM)[:, None], m_m, FP8, BLOCK_W)
    else:
        o_partial = (i_row * num_splits + i_split) * NUM_HEADS + o_head
        _store_parts(b_acc, b_share, p_partial_out + (o_partial * LATENT_DIM)[:, None], m_m, FP8, BLOCK_W)
        tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # not sooner: programs of the next kernel would take places beside these


@jit
def _part_dims(i_part, FP8: constexpr, BLOCK_W: constexpr):
    """The elements of a latent that a part has."""
    o_c = tl.arange(0, BLOCK_W)
    return 2 * o_c + i_part if FP8 else i_part * BLOCK_W + o_c


@jit
def _load_parts(
    p_words,
    p_scales,
    o_slot,
    m_n,
    FP8: constexpr,
    SMALL_ROPE: constexpr,
    NUM_GROUPS: constexpr,
    GROUP_WORDS: constexpr,
    LATENT_DIM: constexpr,
    ROW_WORDS: constexpr,
    PLAIN: constexpr,
):
    """Parts [N, W] in half precision, and the scale of each token that is left to be applied, zero where there is no token."""
    BLOCK_N: constexpr = o_slot.shape[0]
    BLOCK_W: constexpr = NUM_GROUPS * GROUP_WORDS
    if FP8:
        o_g = tl.arange(0, NUM_GROUPS)
        o_word = (o_g * GROUP_WORDS)[:, None] + tl.arange(0, GROUP_WORDS)[None, :]
        p = p_words + (o_slot * ROW_WORDS)[:, None, None] + o_word[None, :, :]
        b_words = tl.load(p, mask=m_n[:, None, None], other=0)
        p_row = p_words.to(tl.pointer_type(tl.float32)) + o_slot * (ROW_WORDS // 2) + LATENT_DIM // 4
        b_scales = tl.load(p_row[:, None] + o_g[None, :], mask=m_n[:, None], other=0.0)
        b_factor = tl.max(b_scales, axis=1)
        b_ratio = (b_scales / tl.where(b_factor > 0, b_factor, 1.0)[:, None]).to(tl.float16)
        b_even, b_odd = take_apart(b_words, FP8, PLAIN)
        b_even = (b_even * b_ratio[:, :, None]).to(tl.float16)
        b_odd = (b_odd * b_ratio[:, :, None]).to(tl.float16)
        return (tl.reshape(b_even, (BLOCK_N, BLOCK_W)), tl.reshape(b_odd, (BLOCK_N, BLOCK_W))), b_factor
    else:
        p = p_words + (o_slot * ROW_WORDS)[:, None] + tl.arange(0, BLOCK_W)[None, :]
        b_parts = take_apart(tl.load(p, mask=m_n[:, None], other=0), FP8, PLAIN)
        b_factor = tl.load(p_scales + o_slot * (2 if SMALL_ROPE else 1), mask=m_n, other=0.0).to(tl.float32)
        return b_parts, b_factor


@jit
def _part_scores(b_q, b_parts, NUM_PARTS: constexpr):
    """[M, N] without the scales of tokens."""
    b_score = tl.dot(b_q[0], tl.trans(b_parts[0]))
    for j in tl.static_range(1, NUM_PARTS):
        b_score = tl.dot(b_q[j], tl.trans(b_parts[j]), b_score)
    return b_score


@jit
def _store_parts(b_acc, b_share, p_m, m_m, FP8: constexpr, BLOCK_W: constexpr):
    NUM_PARTS: constexpr = 2 if FP8 else 4
    for j in tl.static_range(NUM_PARTS):
        b_out = (b_acc[j] * b_share).to(p_m.dtype.element_ty)
        tl.store(p_m + _part_dims(j, FP8, BLOCK_W)[None, :], b_out, mask=m_m[:, None])

"""Absorbed latent attention (MLA) straight from the codes of quantized pages: fp8_ds_mla and TurboQuant.

T rows, N query heads, L latent, R rotated elements, S slots, C split-KV partials, M rows of a tile times heads, W columns of words

The work is that of latent_attention.py, tile by tile. Codes are taken apart as latent_words.py says, into parts in half precision
without their scale, which multiplies scores of keys and, for values, p of the softmax. p is kept below 2^14 by a bound that
knows the scales, so that half precision holds it however long the context is. Queries of TurboQuant's pages come in the
rotated space, and outputs stay in it.
"""

from typing import NamedTuple

import torch

from holdfast.kernels.attention.dequantize import fast_exp2, fast_log2
from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE
from holdfast.kernels.attention.split_kv import LOG2_E, finite_max, load_tile
from holdfast.kernels.attention.tiled_attention import TileWork
from holdfast.kernels.latent.gathered_tiles import takes_gathering
from holdfast.kernels.latent.latent_geometry import LARGE_HEIGHT, head_blocks, tile_height
from holdfast.kernels.latent.latent_planes import LatentPlanes, read_latents
from holdfast.kernels.latent.latent_quantized_warpgroups import attend_quantized_warpgroups
from holdfast.kernels.latent.latent_tiles import merge_latents
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
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit,
    pdl_launch,
    shared_bytes,
    supports_pdl,
    tl,
)

# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false

# A branch on a constant is taken when the kernel is compiled, so both must stand in an if and an else.
# Triton unpacks nothing into a tuple, but adds tuples.
# ruff: noqa: ANN001, ANN202, RET505, RUF005 the arguments of kernels have no types


class QuantizedBlocks(NamedTuple):
    """How a program takes the tokens of a tile."""

    height: int
    """Rows times heads: a tile that is higher is done in several turns, each of which reads the codes anew."""
    tokens: int
    num_stages: int
    num_warps: int
    programs_per_sm: int


BLOCKS = {
    16: (QuantizedBlocks(16, 64, 3, 4, 2), QuantizedBlocks(16, 32, 3, 4, 2), QuantizedBlocks(16, 16, 2, 4, 2)),
    32: (QuantizedBlocks(32, 64, 2, 8, 1), QuantizedBlocks(32, 32, 2, 8, 1), QuantizedBlocks(32, 16, 2, 8, 1)),
}
"""By height, the first that fits; on an H200 the first of each, of those that were tried (docs/log.md)."""


def quantized_blocks(height: int, planes: LatentPlanes, room: int) -> QuantizedBlocks:
    """The first whose codes and queries fit into `room`, the bytes of shared memory that a program may have."""
    shape = word_shape(planes)
    code_bytes, rope_bytes = 2 * shape.groups * shape.block_columns, 2 * shape.block_rope
    choices = BLOCKS[min(height, 32)]
    for blocks in choices:
        # Operands are read into registers, so that one place less is under way than there are stages.
        held = blocks.tokens * (blocks.num_stages - 1) * (code_bytes + rope_bytes)
        queries = blocks.height * (shape.parts * code_bytes + rope_bytes * (1 + planes.has_small_rope))
        if held + queries + 4 * blocks.height * blocks.tokens < room:
            return blocks
    return choices[-1]


def latent_quantized_attention(
    q_TNX: torch.Tensor,
    planes: LatentPlanes,
    page_table_NP: torch.Tensor,
    work: TileWork,
    scale: float,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
    num_sms: int,
) -> torch.Tensor:
    """Each row sees its sequence's tokens up to its own position: [T, N, L]; padded rows become zeros."""
    assert planes.kind != "plain", "plain pages are attended to by a kernel of their own"
    for large in (False, True):
        if not (work.has_large if large else work.has_small):
            continue
        is_high = tile_height(q_TNX.shape[1], large) == LARGE_HEIGHT
        attend = attend_quantized_warpgroups if is_high and takes_gathering(planes, q_TNX) else _attend_codes
        attend(q_TNX, planes, page_table_NP, work, large, scale, partial_out_CX, partial_lse_CH, out_TNL, num_sms)
    if work.has_merge:
        merge_latents(work, len(q_TNX), partial_out_CX, partial_lse_CH, out_TNL)
    return out_TNL


def _attend_codes(
    q_TNX: torch.Tensor,
    planes: LatentPlanes,
    page_table_NP: torch.Tensor,
    work: TileWork,
    large: bool,
    scale: float,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
    num_sms: int,
) -> None:
    """All small or all large tiles of a step, without the merge of their partials."""
    num_heads = q_TNX.shape[1]
    shape, pdl, plain = word_shape(planes), supports_pdl(q_TNX), is_interpreted()
    height = tile_height(num_heads, large)
    num_blocks, group = head_blocks(num_heads, large)
    blocks = quantized_blocks(height, planes, shared_bytes(q_TNX))
    _attend_kernel[(num_sms * blocks.programs_per_sm,)](
        q_TNX,
        planes.rows_SX.view(torch.int16),
        planes.scales_SC,
        rope_plane(planes),
        out_TNL,
        partial_out_CX,
        partial_lse_CH,
        page_table_NP,
        work.tiles_X8,
        page_table_NP.stride(0),
        scale * LOG2_E,
        LARGE=large,
        FP8=planes.kind == "fp8_ds_mla",
        SMALL_ROPE=planes.has_small_rope,
        NUM_HEADS=num_heads,
        NUM_BLOCKS=num_blocks,
        NUM_TURNS=height // blocks.height,
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


def latent_quantized_attention_reference(
    q_TNX: torch.Tensor,
    planes: LatentPlanes,
    page_table_NP: torch.Tensor,
    work: TileWork,
    scale: float,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
    num_sms: int,
) -> torch.Tensor:
    """The same in plain torch, a row at a time over all its tokens, without splits."""
    num_rows, page_tokens = len(q_TNX), planes.page_tokens
    num_small, num_large = work.tiles_X8[0, :2].tolist()
    num_tiles = num_small * work.has_small + num_large * work.has_large
    rows: dict[int, tuple[int, int]] = {}
    for table_row, row, count, position, *_ in work.tiles_X8[1 : 1 + num_tiles].tolist():
        rows |= {row + i: (table_row, position + i) for i in range(count)}
    for row, (table_row, position) in rows.items():
        token_S = torch.arange(position + 1, device=q_TNX.device)
        slot_S = page_table_NP[table_row, token_S // page_tokens].long() * page_tokens + token_S % page_tokens
        latents_SX = read_latents(planes, slot_S, torch.float32)
        weights_NS = (q_TNX[row].float() @ latents_SX.T * scale).softmax(-1)
        out_TNL[row] = (weights_NS @ latents_SX[:, : planes.latent_dim]).to(out_TNL.dtype)
    if work.has_merge:
        out_TNL[work.rows_T2[:num_rows, 1] == 0] = 0
    return out_TNL


@jit
def _attend_kernel(
    p_q,
    p_words,
    p_scales,
    p_rope,
    p_out,
    p_partial_out,
    p_partial_lse,
    p_pages,
    p_tiles,
    table_stride,
    scale_log2,
    LARGE: constexpr,
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
    num_small = tl.load(p_tiles)
    num_tiles = tl.load(p_tiles + 1) if LARGE else num_small
    first_tile = 1 + num_small if LARGE else 1
    o_n = tl.arange(0, BLOCK_N)
    # Blocks of heads and turns of a tile come one after the other, so that all but the first find its codes in the cache.
    for i_item in range(tl.program_id(0), num_tiles * (NUM_BLOCKS * NUM_TURNS), tl.num_programs(0)):
        table_row, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
            p_tiles, first_tile + i_item // (NUM_BLOCKS * NUM_TURNS)
        )
        o_m = i_item % NUM_TURNS * BLOCK_M + tl.arange(0, BLOCK_M)
        o_row = o_m // GROUP
        p_row_pages = p_pages + table_row.to(tl.int64) * table_stride
        b_page = _pages(p_row_pages, low, o_n, high, PAGE_TOKENS, BLOCK_N)
        if PDL:
            tl.extra.cuda.gdc_wait()  # tiles and pages were there before; queries and new latents come from the last kernel
        o_head = i_item // NUM_TURNS % NUM_BLOCKS * GROUP + o_m % GROUP
        m_m = (o_row < num_rows) & (o_head < NUM_HEADS)
        o_q = (row + o_row).to(tl.int64) * NUM_HEADS + o_head
        p_q_m = p_q + (o_q * WIDTH)[:, None]
        b_q = load_queries(p_q_m, m_m, FP8, NUM_GROUPS, LATENT_DIM, BLOCK_W)
        b_q_rope = load_rope_queries(p_q_m + LATENT_DIM, m_m, SMALL_ROPE, ROPE_DIM, BLOCK_R, PLAIN)
        b_acc = ()
        for _ in tl.static_range(NUM_GROUPS * NUM_PARTS):
            b_acc = b_acc + (tl.zeros((BLOCK_M, BLOCK_W), dtype=tl.float32),)
        b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
        b_l_tokens = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        # Scales come a block ahead, as pages do: nothing in a block waits for memory but the codes' own copies.
        o_slot = _slots(b_page, low, o_n, PAGE_TOKENS, BLOCK_N)
        b_scale = load_scales(p_words, p_scales, o_slot, FP8, SMALL_ROPE, NUM_GROUPS, LATENT_DIM, ROW_WORDS)
        # Tokens up to the first row's own are seen by every row: whole blocks of them come first and need no mask.
        clear = low + tl.maximum(tl.minimum(high, position + 1) - low, 0) // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(2):
            first = clear if MASKED else low
            end = high if MASKED else clear
            for n in tl.range(first, end, BLOCK_N, num_stages=1 if MASKED else NUM_STAGES):
                o_token = n + o_n
                m_n = o_token < high
                o_slot = _slots(b_page, n, o_n, PAGE_TOKENS, BLOCK_N)
                b_page = _pages(p_row_pages, n + BLOCK_N, o_n, high, PAGE_TOKENS, BLOCK_N)
                o_next = _slots(b_page, n + BLOCK_N, o_n, PAGE_TOKENS, BLOCK_N)
                b_next = load_scales(p_words, p_scales, o_next, FP8, SMALL_ROPE, NUM_GROUPS, LATENT_DIM, ROW_WORDS)
                b_score = rope_scores(
                    b_q_rope,
                    p_rope,
                    o_slot,
                    m_n,
                    MASKED,
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
                    b_score = b_score * scale_factor(b_scale[1], m_n, MASKED)[None, :]
                b_groups = ()
                b_bound = tl.zeros((BLOCK_N,), dtype=tl.float32)
                for g in tl.static_range(NUM_GROUPS):
                    b_factor = scale_factor(b_scale[g], m_n, MASKED)
                    b_bound = tl.maximum(b_bound, b_factor)
                    b_words = load_words(p_words, o_slot, m_n, g, MASKED, FP8, LATENT_DIM, ROW_WORDS, BLOCK_W)
                    b_score += group_scores(b_q, b_words, g, FP8, PLAIN) * b_factor[None, :]
                    b_groups = b_groups + (b_words,)
                b_score = b_score * scale_log2
                if MASKED:
                    m_seen = ((position + o_row)[:, None] >= o_token[None, :]) & m_n[None, :]
                    b_score = tl.where(m_seen, b_score, -float("inf"))
                b_bound = tl.maximum(fast_log2(b_bound, PLAIN), LEAST_LOG2)
                b_m_new = tl.maximum(b_m, tl.max(b_score + b_bound[None, :], axis=1))
                b_m_safe = finite_max(b_m_new) if MASKED else b_m_new
                b_p = fast_exp2(b_score - b_m_safe[:, None], PLAIN)
                b_alpha = fast_exp2(b_m - b_m_safe, PLAIN)
                b_l_tokens = b_l_tokens * b_alpha[:, None] + b_p
                b_new = ()
                for g in tl.static_range(NUM_GROUPS):
                    b_factor = scale_factor(b_scale[g], m_n, MASKED)
                    b_weight = (b_p * (b_factor * P_ONE)[None, :]).to(tl.float16)
                    b_values = take_apart(b_groups[g], FP8, PLAIN)
                    for j in tl.static_range(NUM_PARTS):
                        b_new = b_new + (tl.dot(b_weight, b_values[j], b_acc[g * NUM_PARTS + j] * b_alpha[:, None]),)
                b_acc, b_m, b_scale = b_new, b_m_new, b_next
        b_l = tl.sum(b_l_tokens, axis=1)
        # A split that a row sees nothing of is neutral: zeros, with -inf as lse.
        b_share = 1.0 / tl.where(b_l > 0, b_l * P_ONE, 1.0)[:, None]
        if first_partial < 0:
            store_parts(b_acc, b_share, p_out + (o_q * LATENT_DIM)[:, None], m_m, FP8, NUM_GROUPS, LATENT_DIM, BLOCK_W)
        else:
            o_partial = (first_partial + o_row * num_splits).to(tl.int64) * NUM_HEADS + o_head
            p_partial = p_partial_out + (o_partial * LATENT_DIM)[:, None]
            store_parts(b_acc, b_share, p_partial, m_m, FP8, NUM_GROUPS, LATENT_DIM, BLOCK_W)
            tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        # Not sooner: programs of the next kernel would take places beside these, more of them here than there.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # also where there was no tile: who follows counts on all before it


@jit
def _pages(p_row_pages, n, o_n, high, PAGE_TOKENS: constexpr, BLOCK_N: constexpr):
    """The page of a block, or of each token of it where a page is smaller; read a block ahead."""
    if PAGE_TOKENS % BLOCK_N == 0:
        return tl.load(p_row_pages + n // PAGE_TOKENS, mask=n < high, other=0)
    else:
        return tl.load(p_row_pages + (n + o_n) // PAGE_TOKENS, mask=n + o_n < high, other=0)


@jit
def _slots(b_page, n, o_n, PAGE_TOKENS: constexpr, BLOCK_N: constexpr):
    if PAGE_TOKENS % BLOCK_N == 0:
        return b_page.to(tl.int64) * PAGE_TOKENS + n % PAGE_TOKENS + o_n
    else:
        return b_page.to(tl.int64) * PAGE_TOKENS + (n + o_n) % PAGE_TOKENS

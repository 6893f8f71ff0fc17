"""Absorbed latent attention (MLA) over paged latents, tile by tile, with long contexts split and merged; plain pages.

T rows, N query heads, L latent, R rotated elements, S slots, C split-KV partials

Multi-query attention whose one key is [L | R] wide and whose value is the first L elements of the same row, read once. Tiles,
partials and their letters are those of tiled_attention.py: the heads of a block stand side by side with the rows, and where
there are several blocks of heads each is an item of its own, as key heads are there. Ranges of tokens begin at multiples of
BLOCK_TOKENS, so that no block of tokens lies in two pages unless pages are smaller than it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from holdfast.kernels.attention.split_kv import LOG2_E, finite_max, load_tile
from holdfast.kernels.attention.tiled_attention import TileWork
from holdfast.kernels.latent.latent_geometry import (
    LARGE_HEIGHT,
    PLAIN_PROGRAMS_PER_SM,
    SMALL_HEIGHT,
    head_blocks,
    tile_height,
)
from holdfast.kernels.latent.latent_planes import LatentPlanes, read_latents
from holdfast.kernels.latent.latent_quantized_attention import latent_quantized_attention
from holdfast.kernels.latent.latent_tiles import merge_latents
from holdfast.kernels.latent.latent_warpgroups import attend_warpgroups, takes_warpgroups
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, pdl_launch, shared_bytes, supports_pdl, tl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types


class LatentBlocks(NamedTuple):
    """How a program takes the tokens of a tile."""

    tokens: int
    num_stages: int
    num_warps: int


BLOCKS = {
    16: (LatentBlocks(64, 3, 4), LatentBlocks(32, 3, 4), LatentBlocks(32, 2, 4), LatentBlocks(16, 2, 4)),
    32: (LatentBlocks(64, 3, 8), LatentBlocks(32, 3, 4), LatentBlocks(32, 2, 4), LatentBlocks(16, 2, 4)),
    64: (LatentBlocks(64, 2, 8), LatentBlocks(32, 2, 8), LatentBlocks(16, 2, 8)),
}
"""By the height of tiles, the fastest on an H200 first; those of 64 are latent_warpgroups.py's where it takes them."""


def latent_blocks(
    height: int, row_bytes: int, shared_bytes: int, choices: Mapping[int, tuple[LatentBlocks, ...]] = BLOCKS
) -> LatentBlocks:
    """The fastest whose latents and queries a program's shared memory has room for."""
    for blocks in choices[height]:
        # Products of less than 64 rows read their operands into registers, and one place less is under way.
        places = blocks.num_stages - (height < LARGE_HEIGHT)
        if (blocks.tokens * places + height) * row_bytes < shared_bytes:
            return blocks
    return choices[height][-1]


def latent_attention(
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
    if planes.kind != "plain":
        return latent_quantized_attention(
            q_TNX, planes, page_table_NP, work, scale, partial_out_CX, partial_lse_CH, out_TNL, num_sms
        )
    for large in (False, True):
        if not (work.has_large if large else work.has_small):
            continue
        attend = (
            attend_warpgroups
            if tile_height(q_TNX.shape[1], large) > SMALL_HEIGHT and takes_warpgroups(planes)
            else _attend_plain
        )
        attend(q_TNX, planes, page_table_NP, work, large, scale, partial_out_CX, partial_lse_CH, out_TNL, num_sms)
    if work.has_merge:
        merge_latents(work, len(q_TNX), partial_out_CX, partial_lse_CH, out_TNL)
    return out_TNL


def _attend_plain(
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
    block_l, block_r = (max(16, next_power_of_two(size)) for size in (planes.latent_dim, planes.rope_dim))
    pdl, row_bytes = supports_pdl(q_TNX), (block_l + block_r) * planes.rows_SX.element_size()
    height = tile_height(num_heads, large)
    num_blocks, group = head_blocks(num_heads, large)
    blocks = latent_blocks(height, row_bytes, shared_bytes(q_TNX))
    _attend_kernel[(num_sms * PLAIN_PROGRAMS_PER_SM,)](
        q_TNX,
        planes.rows_SX,
        out_TNL,
        partial_out_CX,
        partial_lse_CH,
        page_table_NP,
        work.tiles_X8,
        page_table_NP.stride(0),
        scale * LOG2_E,
        LARGE=large,
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


def latent_attention_reference(
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
    """The same in plain torch, a tile at a time, with the whole score matrix of the tile; partials are merged as they come."""
    page_tokens, num_rows = planes.page_tokens, len(q_TNX)
    merged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    num_small, num_large = work.tiles_X8[0, :2].tolist()
    num_tiles = num_small * work.has_small + num_large * work.has_large
    for table_row, row, count, position, low, high, first_partial, _ in work.tiles_X8[1 : 1 + num_tiles].tolist():
        token_S = torch.arange(low, high, device=q_TNX.device)
        slot_S = page_table_NP[table_row, token_S // page_tokens].long() * page_tokens + token_S % page_tokens
        rows_SX = read_latents(planes, slot_S, torch.float32)
        seen_nS = torch.arange(position, position + count, device=q_TNX.device).unsqueeze(1) >= token_S
        scores_nNS = q_TNX[row : row + count].float() @ rows_SX.T * scale
        scores_nNS = scores_nNS.masked_fill(~seen_nS.unsqueeze(1), float("-inf"))
        lse_nN = scores_nNS.logsumexp(-1)
        weights_nNS = torch.nan_to_num((scores_nNS - lse_nN.unsqueeze(-1)).exp(), nan=0.0)
        out_nNL = weights_nNS @ rows_SX[:, : planes.latent_dim]
        for i in range(count):
            if first_partial < 0:
                out_TNL[row + i] = out_nNL[i].to(out_TNL.dtype)
                continue
            nothing = torch.zeros_like(out_nNL[i]), torch.full_like(lse_nN[i], -torch.inf)
            old_NL, old_lse_N = merged.get(row + i, nothing)
            lse_N = torch.logaddexp(old_lse_N, lse_nN[i])
            parts = ((old_NL, old_lse_N), (out_nNL[i], lse_nN[i]))
            new_NL = sum(x * torch.nan_to_num((lse - lse_N).exp(), nan=0.0).unsqueeze(-1) for x, lse in parts)
            merged[row + i] = (torch.as_tensor(new_NL), lse_N)
    for row, (whole_NL, _) in merged.items():
        out_TNL[row] = whole_NL.to(out_TNL.dtype)
    if work.has_merge:
        out_TNL[work.rows_T2[:num_rows, 1] == 0] = 0
    return out_TNL


@jit
def _attend_kernel(
    p_q,
    p_latents,
    p_out,
    p_partial_out,
    p_partial_lse,
    p_pages,
    p_tiles,
    table_stride,
    scale_log2,
    LARGE: constexpr,
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
    # Of a block of tokens that lies in one page the page id is one number, and its rows one after the other.
    IN_ONE_PAGE: constexpr = PAGE_TOKENS % BLOCK_N == 0
    num_small = tl.load(p_tiles)
    num_tiles = tl.load(p_tiles + 1) if LARGE else num_small
    first_tile = 1 + num_small if LARGE else 1
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_l = tl.arange(0, BLOCK_L)
    o_r = tl.arange(0, BLOCK_R)
    m_l = o_l < LATENT_DIM
    m_r = o_r < ROPE_DIM
    o_row = o_m // GROUP
    for i_item in range(tl.program_id(0), num_tiles * NUM_BLOCKS, tl.num_programs(0)):
        table_row, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
            p_tiles, first_tile + i_item // NUM_BLOCKS
        )
        # Page ids are read one block ahead, so that no load of latents waits for another load.
        p_row_pages = p_pages + table_row.to(tl.int64) * table_stride
        if IN_ONE_PAGE:
            b_next_page = tl.load(p_row_pages + low // PAGE_TOKENS, mask=low < high, other=0)
        else:
            b_next_page = tl.load(p_row_pages + (low + o_n) // PAGE_TOKENS, mask=low + o_n < high, other=0)
        if PDL:
            tl.extra.cuda.gdc_wait()  # tiles and pages were there before; queries and new latents come from the last kernel
        o_head = i_item % NUM_BLOCKS * GROUP + o_m % GROUP
        m_m = (o_row < num_rows) & (o_head < NUM_HEADS)
        o_q = (row + o_row).to(tl.int64) * NUM_HEADS + o_head
        p_q_m = p_q + (o_q * WIDTH)[:, None]
        b_q = tl.load(p_q_m + o_l[None, :], mask=m_m[:, None] & m_l[None, :], other=0.0)
        b_q_rope = tl.load(p_q_m + LATENT_DIM + o_r[None, :], mask=m_m[:, None] & m_r[None, :], other=0.0)
        b_acc = tl.zeros((BLOCK_M, BLOCK_L), dtype=tl.float32)
        b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
        b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
        # Tokens up to the first row's own are seen by every row: whole blocks of them come first and need no mask.
        clear = low + tl.maximum(tl.minimum(high, position + 1) - low, 0) // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(2):
            first = clear if MASKED else low
            end = high if MASKED else clear
            for n in tl.range(first, end, BLOCK_N, num_stages=NUM_STAGES):
                o_token = n + o_n
                m_n = o_token < high
                b_page = b_next_page
                if IN_ONE_PAGE:
                    b_next_page = tl.load(p_row_pages + (n + BLOCK_N) // PAGE_TOKENS, mask=n + BLOCK_N < high, other=0)
                    p_block = p_latents + (b_page.to(tl.int64) * PAGE_TOKENS + n % PAGE_TOKENS) * WIDTH
                    p_n = p_block + (o_n * WIDTH)[:, None]
                else:
                    b_next_page = tl.load(
                        p_row_pages + (o_token + BLOCK_N) // PAGE_TOKENS, mask=o_token + BLOCK_N < high, other=0
                    )
                    o_slot = b_page.to(tl.int64) * PAGE_TOKENS + o_token % PAGE_TOKENS
                    p_n = p_latents + (o_slot * WIDTH)[:, None]
                # Not masks alone: where nothing can be out of range there is none.
                if MASKED:
                    b_k = tl.load(p_n + o_l[None, :], mask=m_n[:, None] & m_l[None, :], other=0.0)
                    b_k_rope = tl.load(p_n + LATENT_DIM + o_r[None, :], mask=m_n[:, None] & m_r[None, :], other=0.0)
                elif LATENT_DIM == BLOCK_L and ROPE_DIM == BLOCK_R:
                    b_k = tl.load(p_n + o_l[None, :])
                    b_k_rope = tl.load(p_n + LATENT_DIM + o_r[None, :])
                else:
                    b_k = tl.load(p_n + o_l[None, :], mask=m_l[None, :], other=0.0)
                    b_k_rope = tl.load(p_n + LATENT_DIM + o_r[None, :], mask=m_r[None, :], other=0.0)
                b_score = tl.dot(b_q, tl.trans(b_k))
                b_score = tl.dot(b_q_rope, tl.trans(b_k_rope), b_score) * scale_log2
                if MASKED:
                    m_seen = ((position + o_row)[:, None] >= o_token[None, :]) & m_n[None, :]
                    b_score = tl.where(m_seen, b_score, -float("inf"))
                b_m_new = tl.maximum(b_m, tl.max(b_score, axis=1))
                b_m_safe = finite_max(b_m_new) if MASKED else b_m_new
                b_p = tl.exp2(b_score - b_m_safe[:, None])
                b_alpha = tl.exp2(b_m - b_m_safe)
                b_l = b_l * b_alpha + tl.sum(b_p, axis=1)
                b_acc = tl.dot(b_p.to(b_k.dtype), b_k, b_acc * b_alpha[:, None])
                b_m = b_m_new
        # A split that a row sees nothing of is neutral: zeros, with -inf as lse.
        b_out = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
        m_out = m_m[:, None] & m_l[None, :]
        if first_partial < 0:
            p_y = p_out + (o_q * LATENT_DIM)[:, None] + o_l[None, :]
            tl.store(p_y, b_out.to(p_out.dtype.element_ty), mask=m_out)
        else:
            o_partial = (first_partial + o_row * num_splits).to(tl.int64) * NUM_HEADS + o_head
            tl.store(p_partial_out + (o_partial * LATENT_DIM)[:, None] + o_l[None, :], b_out, mask=m_out)
            tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        # Not sooner: programs of the next kernel would take places beside these, more of them here than there.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # also where there was no tile: who follows counts on all before it

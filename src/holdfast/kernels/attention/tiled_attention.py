"""Paged attention, tile by tile, with long contexts split and merged (split-KV).

T rows, H query heads, K key/value heads, G = H / K, D head dim, S slots, N rows of the page table, P pages of a row,
C split-KV partials

A tile is a few rows of one sequence against a range of its stored tokens. The G heads of a GQA group are rows of the same
product, so they fill the tensor cores and each key is read once. The grid has as many programs as the GPU runs at once; they
take tiles in turn. The number of tiles is read from the device, so a captured graph serves any step. With a window, a tile
begins at the first token that its first row sees. The tokens between that and what later rows see still belong to the
sequence, because pages are freed by what a whole step sees. Large tiles of most layers on Hopper run in prefill_warpgroups.py.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.prefill_warpgroups import (
    PREFILL_PROGRAMS_PER_SM,
    attend_prefill,
    declined_prefill,
    prefill_block_tokens,
)
from holdfast.kernels.attention.split_kv import (
    LOG2_E,
    MERGE_BY_HEAD_ROWS,
    MERGED_HEADS,
    MergeShape,
    add_sinks,
    clear_end,
    finite_max,
    load_tile,
    merge_tiles,
    soft_capped,
)
from holdfast.kernels.attention.tile_work import TileCall
from holdfast.kernels.geometry import BLOCK_TOKENS, LARGE_TILE
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, shared_bytes, tl

SMALL_TILE = 16
SMALL_BATCH_ROWS = 2
"""Most rows of a step that ends before many programs could start: it runs fewer programs with more warps."""
LARGE_PROGRAMS_PER_SM = 2


class LargeKernel(NamedTuple):
    """The kernel of a layer's large tiles. It follows from the layer, its pages and the device, never from a step."""

    name: Literal["warpgroups", "triton"]
    """The kernel of prefill_warpgroups.py, or the one of this file."""
    reason: str
    programs_per_sm: int = LARGE_PROGRAMS_PER_SM
    block_tokens: int = BLOCK_TOKENS
    """Splits of large tiles are multiples of so many tokens."""


TRITON_TILES = LargeKernel("triton", "no other kernel was chosen")


def choose_large_kernel(k_plane_SKD: Tensor, page_tokens: int, num_heads: int, scale: float) -> LargeKernel:
    """Choose the kernel of a layer's large tiles: the one in warpgroups if it supports the layer."""
    declined = declined_prefill(k_plane_SKD, page_tokens, num_heads, scale)
    if declined is not None:
        return TRITON_TILES._replace(reason=f"the kernel in warpgroups declines: {declined}")
    tokens = prefill_block_tokens(k_plane_SKD.shape[2])
    return LargeKernel("warpgroups", "it supports the layer, its pages and the GPU", PREFILL_PROGRAMS_PER_SM, tokens)


class RowForm(NamedTuple):
    """The part of a launch that depends on the number of rows, padding included."""

    is_small_batch: bool
    """True if small tiles run fewer programs with more warps."""
    merges_by_head: bool
    """True if a merge takes one head per program."""


def row_form(num_rows: int) -> RowForm:
    """Return the row-dependent part of a launch."""
    return RowForm(num_rows <= SMALL_BATCH_ROWS, num_rows <= MERGE_BY_HEAD_ROWS)


def tile_rows(num_heads: int, num_kv_heads: int, large: bool) -> int:
    """Return the rows of a tile: its height divided by the heads of a GQA group, at least one."""
    group = num_heads // num_kv_heads
    return max(1, LARGE_TILE // group) if large else max(1, SMALL_TILE // group)


def small_programs(num_rows: int) -> tuple[int, int]:
    """Return programs per SM and warps per program for small tiles; measured on an H200 (docs/log.md)."""
    return (2, 4) if row_form(num_rows).is_small_batch else (4, 2)


def large_blocks(block_d: int, shared_bytes: int) -> tuple[int, int]:
    """Return tokens per block and pipeline stages for large tiles: the fastest that shared memory allows."""
    if shared_bytes >= 160 * 1024 and block_d <= 128:
        return 64, 3
    return (32, 2) if block_d <= 128 or shared_bytes >= 160 * 1024 else (16, 2)


def tiled_attention(
    call: TileCall,
    k_plane_SKD: Tensor,
    v_plane_SKD: Tensor,
    page_tokens: int,
    large_kernel: LargeKernel = TRITON_TILES,
) -> Tensor:
    """Attend each row to the tokens of its sequence up to its own position: [T, H * D]."""
    (num_rows, num_heads, head_dim), num_kv_heads = call.q_THD.shape, k_plane_SKD.shape[1]
    group, form = num_heads // num_kv_heads, row_form(num_rows)
    block_d = max(16, next_power_of_two(head_dim))  # tensor cores take at least 16
    scale, window, sinks_H, softcap = call.scoring
    for large in (False, True):
        if not (call.work.has_large if large else call.work.has_small):
            continue
        if large and large_kernel.name == "warpgroups":
            attend_prefill(call, k_plane_SKD, v_plane_SKD, page_tokens)
            continue
        block_m = LARGE_TILE if large else max(SMALL_TILE, next_power_of_two(group))
        programs_per_sm, num_warps = (LARGE_PROGRAMS_PER_SM, 8) if large else small_programs(num_rows)
        block_n, num_stages = (64 if block_d <= 128 else 32, 2)
        if large:
            block_n, num_stages = large_blocks(block_d, shared_bytes(call.q_THD))
        _attend_kernel[(call.num_sms * programs_per_sm,)](
            call.q_THD, k_plane_SKD, v_plane_SKD, call.out_TX, *call.partials, call.page_table_NP, call.work.tiles_X8,
            call.page_table_NP.stride(0), page_tokens, sinks_H, scale * LOG2_E,
            None if softcap is None else softcap * LOG2_E, window or 0,
            LARGE=large, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, HAS_WINDOW=window is not None,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, NUM_STAGES=num_stages,
            SMALL_BATCH=not large and form.is_small_batch, num_warps=num_warps, **pdl_flags(call.q_THD),
        )  # fmt: skip
    if call.work.has_merge:
        heads = 1 if form.merges_by_head else next_power_of_two(min(group, MERGED_HEADS))
        out_THD, shape = call.out_TX.view(call.q_THD.shape), MergeShape(heads, head_dim, heads == 1)
        merge_tiles(call.work.rows_T2, call.partials, out_THD, shape, num_warps=2, sinks_H=sinks_H)
    return call.out_TX


def tiled_attention_reference(call: TileCall, k_plane_SKD: Tensor, v_plane_SKD: Tensor, page_tokens: int) -> Tensor:
    """Like `tiled_attention` in plain torch, one tile at a time with its whole score matrix; merges partials as they come."""
    (num_rows, num_heads, _), q_THD, work = call.q_THD.shape, call.q_THD, call.work
    scale, window, sinks_H, softcap = call.scoring
    num_groups = num_heads // k_plane_SKD.shape[1]
    out_THD = call.out_TX.view(q_THD.shape)
    merged: dict[int, tuple[Tensor, Tensor]] = {}
    num_small, num_large = work.tiles_X8[0, :2].tolist()
    num_tiles = num_small * work.has_small + num_large * work.has_large
    for table_row, row, count, position, low, high, first_partial, _ in work.tiles_X8[1 : 1 + num_tiles].tolist():
        token_L = torch.arange(low, high, device=q_THD.device)
        slot_L = call.page_table_NP[table_row, token_L // page_tokens].long() * page_tokens + token_L % page_tokens
        k_HLD = k_plane_SKD[slot_L].float().repeat_interleave(num_groups, dim=1).transpose(0, 1)
        v_HLD = v_plane_SKD[slot_L].float().repeat_interleave(num_groups, dim=1).transpose(0, 1)
        distance_nL = torch.arange(position, position + count, device=q_THD.device).unsqueeze(1) - token_L
        seen_nL = distance_nL >= 0 if window is None else (distance_nL >= 0) & (distance_nL < window)
        scores_HnL = q_THD[row : row + count].float().transpose(0, 1) @ k_HLD.transpose(1, 2) * scale
        if softcap is not None:
            scores_HnL = softcap * torch.tanh(scores_HnL / softcap)
        scores_HnL = scores_HnL.masked_fill(~seen_nL, float("-inf"))
        lse_Hn = scores_HnL.logsumexp(-1)
        if sinks_H is not None and first_partial < 0:
            lse_Hn = torch.logaddexp(lse_Hn, sinks_H.unsqueeze(-1))
        out_HnD = torch.nan_to_num((scores_HnL - lse_Hn.unsqueeze(-1)).exp(), nan=0.0) @ v_HLD
        for i in range(count):
            if first_partial < 0:
                out_THD[row + i] = out_HnD[:, i].to(out_THD.dtype)
            else:
                merged[row + i] = add_partial(merged.get(row + i), out_HnD[:, i], lse_Hn[:, i])
    for row, (out_HD, lse_H) in merged.items():
        if sinks_H is not None:
            out_HD = out_HD * torch.sigmoid(lse_H - sinks_H).unsqueeze(-1)
        out_THD[row] = out_HD.to(out_THD.dtype)
    if work.has_merge:
        out_THD[work.rows_T2[:num_rows, 1] == 0] = 0
    return call.out_TX


def add_partial(old: tuple[Tensor, Tensor] | None, out_HD: Tensor, lse_H: Tensor) -> tuple[Tensor, Tensor]:
    """Merge a partial of a row into the result of its earlier splits, in plain torch."""
    old_HD, old_lse_H = old or (torch.zeros_like(out_HD), torch.full_like(lse_H, -torch.inf))
    merged_H = torch.logaddexp(old_lse_H, lse_H)
    parts = ((old_HD, old_lse_H), (out_HD, lse_H))
    whole_HD = sum(x * torch.nan_to_num((lse - merged_H).exp(), nan=0.0).unsqueeze(-1) for x, lse in parts)
    return torch.as_tensor(whole_HD), merged_H


@jit
def _attend_kernel(
    p_q, p_k, p_v, p_out, p_partial_out, p_partial_lse, p_pages, p_tiles, table_stride, page_tokens, p_sinks,
    scale_log2, softcap_log2, window,
    LARGE: constexpr, NUM_KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, HAS_WINDOW: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_D: constexpr, NUM_STAGES: constexpr, PDL: constexpr,
    SMALL_BATCH: constexpr,
):  # fmt: skip
    NUM_HEADS: constexpr = NUM_KV_HEADS * GROUP
    if PDL and SMALL_BATCH:
        tl.extra.cuda.gdc_launch_dependents()
    num_small = tl.load(p_tiles)
    num_tiles = tl.load(p_tiles + 1) if LARGE else num_small
    first_tile = 1 + num_small if LARGE else 1
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    o_row = o_m // GROUP
    for i_item in range(tl.program_id(0), num_tiles * NUM_KV_HEADS, tl.num_programs(0)):
        i_head = i_item % NUM_KV_HEADS
        table_row, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
            p_tiles, first_tile + i_item // NUM_KV_HEADS
        )
        # Page ids are loaded one block ahead, so no load of keys waits for another load.
        p_row_pages = p_pages + table_row.to(tl.int64) * table_stride
        b_next_page = tl.load(p_row_pages + (low + o_n) // page_tokens, mask=low + o_n < high, other=0)
        if PDL:
            tl.extra.cuda.gdc_wait()  # tiles and pages are older; queries and new keys come from the last kernel
        m_m = o_row < num_rows
        o_head = i_head * GROUP + o_m % GROUP
        o_q = (row + o_row).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + o_head * HEAD_DIM
        b_q = tl.load(p_q + o_q[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
        b_acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
        b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
        clear = clear_end(low, high, position, HAS_WINDOW, BLOCK_N)
        for MASKED in tl.static_range(2):
            first = clear if MASKED else low
            end = high if MASKED else clear
            for n in tl.range(first, end, BLOCK_N, num_stages=NUM_STAGES):
                o_token = n + o_n
                m_n = o_token < high
                if HAS_WINDOW:
                    m_n = m_n & (o_token > position - window)  # a tile may begin before the tokens that its rows see
                b_page = b_next_page
                b_next_page = tl.load(
                    p_row_pages + (o_token + BLOCK_N) // page_tokens, mask=o_token + BLOCK_N < high, other=0
                )
                o_slot = b_page.to(tl.int64) * page_tokens + o_token % page_tokens
                o_kv = o_slot * (NUM_KV_HEADS * HEAD_DIM) + i_head * HEAD_DIM
                m_k = m_d[:, None] & m_n[None, :] if MASKED else m_d[:, None]
                b_k = tl.load(p_k + o_kv[None, :] + o_d[:, None], mask=m_k, other=0.0)
                b_score = tl.dot(b_q, b_k) * scale_log2
                if softcap_log2 is not None:
                    b_score = soft_capped(b_score, softcap_log2)
                b_seen, m_seen = b_score, m_n[None, :]
                if MASKED:
                    distance = (position + o_row)[:, None] - o_token[None, :]
                    m_seen = (distance >= 0) & m_seen
                    if HAS_WINDOW:
                        m_seen = m_seen & (distance < window)
                    b_seen = tl.where(m_seen, b_score, -float("inf"))
                b_m_new = tl.maximum(b_m, tl.max(b_seen, axis=1))
                b_m_safe = finite_max(b_m_new) if MASKED else b_m_new
                b_p = tl.exp2(b_score - b_m_safe[:, None])
                if MASKED:
                    # Mask only here: a masked product is not contracted to fma and would round differently than in an
                    # unmasked block. Another cut of the step may leave this block unmasked (batch_invariant).
                    b_p = tl.where(m_seen, b_p, 0.0)
                b_alpha = tl.exp2(b_m - b_m_safe)
                b_l = b_l * b_alpha + tl.sum(b_p, axis=1)
                m_v = m_d[None, :] & m_n[:, None] if MASKED else m_d[None, :]
                b_v = tl.load(p_v + o_kv[:, None] + o_d[None, :], mask=m_v, other=0.0)
                b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None])
                b_m = b_m_new
        if p_sinks is not None:
            b_l = add_sinks(b_l, b_m, p_sinks, o_head, first_partial < 0)
        # If a row sees nothing of a split, its partial is neutral: zeros, with -inf as lse.
        b_out = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
        m_out = m_m[:, None] & m_d[None, :]
        if first_partial < 0:
            tl.store(p_out + o_q[:, None] + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
        else:
            o_partial = (first_partial + o_row * num_splits).to(tl.int64) * NUM_HEADS + o_head
            tl.store(p_partial_out + o_partial[:, None] * HEAD_DIM + o_d[None, :], b_out, mask=m_out)
            tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        if not SMALL_BATCH:
            # Release late: programs of the next kernel would share the multiprocessors unevenly.
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # wait even without a tile: the next kernel relies on all earlier ones

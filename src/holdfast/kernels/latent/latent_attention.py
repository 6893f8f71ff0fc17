"""Absorbed latent attention (MLA) over paged latents: ranges of tokens cut into tiles, or lists of selected tokens (DSA).

T rows, N query heads, L latent, R rotated elements, S slots, K tokens of a list, C split-KV partials, M rows of a tile times
heads, W columns of words

This is multi-query attention. The one key is [L | R] wide and the value is the first L elements of the same row, read once.
The heads of a block are rows of the same product, as in tiled_attention.py. Ranges of tokens begin at multiples of
BLOCK_TOKENS, so a block of tokens lies in one page unless pages are smaller than it.

Each row over a list has its own tokens, so its tile is one row and a block of heads. The number of splits of a list depends
on the number of rows alone, so one graph serves any step.

Codes are attended straight from quantized pages. latent_words.py splits them into parts of half precision without their scale.
The scale multiplies scores of keys and, for values, p of the softmax. A bound that knows the scales keeps p below 2^14, so half
precision holds it for any context. Queries over TurboQuant pages come in the rotated space; outputs stay in it.

This file selects the kernel of a step and has the Triton kernels.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.dequantize import fast_exp2, fast_log2
from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE
from holdfast.kernels.attention.split_kv import LOG2_E, clear_end, finite_max, load_tile
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.attention.tiled_attention import add_partial
from holdfast.kernels.latent.gathered_attention import attend_gathered_lists, attend_gathered_tiles, takes_gathering
from holdfast.kernels.latent.latent_geometry import (
    LARGE_HEIGHT,
    PLAIN_PROGRAMS_PER_SM,
    SMALL_HEIGHT,
    head_blocks,
    tile_height,
)
from holdfast.kernels.latent.latent_low_tiles import takes_low
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes, SparseRows, read_tokens
from holdfast.kernels.latent.latent_tiles import (
    ListSplits,
    find_slots,
    load_pages,
    load_places,
    merge_latents,
    merge_lists,
    seen_tokens,
)
from holdfast.kernels.latent.latent_warpgroups import attend_warpgroups, takes_warpgroups
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
from holdfast.kernels.latent.sparse_low_attention import attend_low_lists
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit,
    jit_counting,
    next_power_of_two,
    shared_bytes,
    tl,
)

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

# Triton resolves branches on constants at compile time, so both sides must stand in an if and an else.
# Triton cannot unpack into a tuple, but adds tuples.


class LatentBlocks(NamedTuple):
    """Blocks and pipeline stages of a program's loads."""

    tokens: int
    num_stages: int
    num_warps: int


BLOCKS = {
    16: (LatentBlocks(64, 3, 4), LatentBlocks(32, 3, 4), LatentBlocks(32, 2, 4), LatentBlocks(16, 2, 4)),
    32: (LatentBlocks(64, 3, 8), LatentBlocks(32, 3, 4), LatentBlocks(32, 2, 4), LatentBlocks(16, 2, 4)),
    64: (LatentBlocks(64, 2, 8), LatentBlocks(32, 2, 8), LatentBlocks(16, 2, 8)),
}
"""Choices over ranges, by the height of tiles, the fastest on an H200 first."""
LIST_BLOCKS = {
    16: (LatentBlocks(32, 3, 4), LatentBlocks(32, 2, 4), LatentBlocks(16, 2, 4)),
    32: (LatentBlocks(64, 3, 8), LatentBlocks(32, 3, 8), LatentBlocks(32, 2, 8), LatentBlocks(16, 2, 8)),
    64: (LatentBlocks(64, 2, 8), LatentBlocks(32, 2, 8), LatentBlocks(16, 2, 8)),
}
"""Choices over lists. Addresses of scattered latents take registers, so low tiles load fewer at once. Not yet
measured."""
CODED_BLOCKS = {
    16: (LatentBlocks(64, 3, 4), LatentBlocks(32, 3, 4), LatentBlocks(16, 2, 4)),
    32: (LatentBlocks(64, 2, 8), LatentBlocks(32, 2, 8), LatentBlocks(16, 2, 8)),
}
"""Choices over codes, by the height of a pass, the fastest on an H200 first (docs/log.md). A higher tile takes several
passes, which each read the codes again."""


def latent_blocks(
    height: int, row_bytes: int, shared_bytes: int, choices: Mapping[int, tuple[LatentBlocks, ...]] = BLOCKS
) -> LatentBlocks:
    """Return the fastest choice whose latents and queries fit into the shared memory of a program."""
    for blocks in choices[height]:
        # Products of fewer than 64 rows read their operands into registers, so one stage less is held.
        places = blocks.num_stages - (height < LARGE_HEIGHT)
        if (blocks.tokens * places + height) * row_bytes < shared_bytes:
            return blocks
    return choices[height][-1]


def coded_blocks(height: int, planes: LatentPlanes, room: int) -> LatentBlocks:
    """Return the first choice whose codes and queries fit into `room` bytes of shared memory."""
    shape = word_shape(planes)
    code_bytes, rope_bytes = 2 * shape.groups * shape.block_columns, 2 * shape.block_rope
    for blocks in CODED_BLOCKS[height]:
        # Operands are read into registers, so one stage less is held.
        held = blocks.tokens * (blocks.num_stages - 1) * (code_bytes + rope_bytes)
        queries = height * (shape.parts * code_bytes + rope_bytes * (1 + planes.has_small_rope))
        if held + queries + 4 * height * blocks.tokens < room:
            return blocks
    return CODED_BLOCKS[height][-1]


def latent_attention(call: LatentCall, work: TileWork) -> Tensor:
    """Attend each row to the tokens of its sequence up to its own position: [T, N, L]; zeros in padded rows.

    Outputs over TurboQuant pages are in the rotated space.
    """
    for large in (False, True):
        if not (work.has_large if large else work.has_small):
            continue
        height = tile_height(call.q_TNX.shape[1], large)
        attend = _attend_tiles
        if call.planes.kind == "plain":
            if height > SMALL_HEIGHT and takes_warpgroups(call.planes):
                attend = attend_warpgroups
        elif height == LARGE_HEIGHT and takes_gathering(call):
            attend = attend_gathered_tiles
        attend(call, work, large)
    if work.has_merge:
        merge_latents(work, call)
    return call.out_TNL


def sparse_attention(call: LatentCall, rows: SparseRows, tokens_TK: Tensor) -> Tensor:
    """Attend the rows that select tokens to their lists: [T, N, L]; other rows do not change.

    `tokens_TK`: int32 positions, -1 for none. Partials hold the rows times heads of `sparse_splits`. Outputs over TurboQuant
    pages are in the rotated space.
    """
    is_high = tile_height(call.q_TNX.shape[1], large=False) == LARGE_HEIGHT
    if takes_low(call):
        num_splits = attend_low_lists(call, rows, tokens_TK)
    elif is_high and takes_gathering(call):
        num_splits = attend_gathered_lists(call, rows, tokens_TK)
    else:
        num_splits = _attend_lists(call, rows, tokens_TK)
    if num_splits > 1:
        merge_lists(call, rows, num_splits)
    return call.out_TNL


def latent_attention_reference(call: LatentCall, work: TileWork) -> Tensor:
    """Like `latent_attention` in plain torch, one tile at a time with its whole score matrix; merges partials as they come."""
    q_TNX, planes, out_TNL = call.q_TNX, call.planes, call.out_TNL
    merged: dict[int, tuple[Tensor, Tensor]] = {}
    num_small, num_large = work.tiles_X8[0, :2].tolist()
    num_tiles = num_small * work.has_small + num_large * work.has_large
    for table_row, row, count, position, low, high, first_partial, _ in work.tiles_X8[1 : 1 + num_tiles].tolist():
        token_S = torch.arange(low, high, device=q_TNX.device)
        rows_SX = read_tokens(call.planes, call.page_table_NP[table_row], token_S)
        seen_nS = torch.arange(position, position + count, device=q_TNX.device).unsqueeze(1) >= token_S
        scores_nNS = q_TNX[row : row + count].float() @ rows_SX.T * call.scale
        scores_nNS = scores_nNS.masked_fill(~seen_nS.unsqueeze(1), float("-inf"))
        lse_nN = scores_nNS.logsumexp(-1)
        weights_nNS = torch.nan_to_num((scores_nNS - lse_nN.unsqueeze(-1)).exp(), nan=0.0)
        out_nNL = weights_nNS @ rows_SX[:, : planes.latent_dim]
        for i in range(count):
            if first_partial < 0:
                out_TNL[row + i] = out_nNL[i].to(out_TNL.dtype)
            else:
                merged[row + i] = add_partial(merged.get(row + i), out_nNL[i], lse_nN[i])
    for row, (whole_NL, _) in merged.items():
        out_TNL[row] = whole_NL.to(out_TNL.dtype)
    if work.has_merge:
        out_TNL[work.rows_T2[: len(q_TNX), 1] == 0] = 0
    return out_TNL


def sparse_attention_reference(call: LatentCall, rows: SparseRows, tokens_TK: Tensor) -> Tensor:
    """Like `sparse_attention` in plain torch, one row at a time, without splits. Places that name no token are ignored."""
    table_rows, counts = (tensor[: len(call.q_TNX)].tolist() for tensor in rows)
    for row, (table_row, num_tokens) in enumerate(zip(table_rows, counts, strict=True)):
        if num_tokens > 0:
            listed_S = tokens_TK[row, :num_tokens].long()
            _attend_row(call, row, table_row, listed_S[(listed_S >= 0) & (listed_S < num_tokens)])
    return call.out_TNL


def _attend_row(call: LatentCall, row: int, table_row: int, token_S: Tensor) -> None:
    latents_SX = read_tokens(call.planes, call.page_table_NP[table_row], token_S)
    weights_NS = (call.q_TNX[row].float() @ latents_SX.T * call.scale).softmax(-1)
    call.out_TNL[row] = (weights_NS @ latents_SX[:, : call.planes.latent_dim]).to(call.out_TNL.dtype)


class _Launch(NamedTuple):
    """Operands and constants of a Triton launch, besides its source of tokens."""

    planes: tuple[Tensor | None, ...]
    """Planes: rows or words, scales, rotated elements."""
    programs_per_sm: int
    constants: dict[str, int]

    @classmethod
    def of(cls, call: LatentCall, large: bool, choices: Mapping[int, tuple[LatentBlocks, ...]]) -> "_Launch":
        """Choose blocks, for plain pages among `choices`."""
        planes, num_heads = call.planes, call.q_TNX.shape[1]
        height, (num_blocks, group), room = (
            tile_height(num_heads, large),
            head_blocks(num_heads, large),
            shared_bytes(call.q_TNX),
        )
        if planes.kind == "plain":
            block_l, block_r = (max(16, next_power_of_two(size)) for size in (planes.latent_dim, planes.rope_dim))
            row_bytes = (block_l + block_r) * planes.rows_SX.element_size()
            blocks, programs_per_sm = latent_blocks(height, row_bytes, room, choices), PLAIN_PROGRAMS_PER_SM
            pass_height, num_turns, num_groups, row_words = height, 1, 0, 0
            tensors = planes.rows_SX, None, None
        else:
            shape, pass_height = word_shape(planes), min(height, 32)
            blocks, programs_per_sm = coded_blocks(pass_height, planes, room), 32 // pass_height
            block_l, block_r, num_groups = shape.block_columns, shape.block_rope, shape.groups
            num_turns, row_words = -(-(height if large else group) // pass_height), planes.rows_SX.shape[1] // 2
            tensors = planes.rows_SX.view(torch.int16), planes.scales_SC, rope_plane(planes)
        constants = {
            "PLAIN_ROWS": planes.kind == "plain", "FP8": planes.kind == "fp8_ds_mla", "SMALL_ROPE": planes.has_small_rope,
            "NUM_HEADS": num_heads, "NUM_BLOCKS": num_blocks, "NUM_TURNS": num_turns, "GROUP": group,
            "LATENT_DIM": planes.latent_dim, "ROPE_DIM": planes.rope_dim, "PAGE_TOKENS": planes.page_tokens,
            "NUM_GROUPS": num_groups, "ROW_WORDS": row_words, "BLOCK_M": pass_height, "BLOCK_N": blocks.tokens,
            "BLOCK_L": block_l, "BLOCK_R": block_r, "NUM_STAGES": blocks.num_stages, "PLAIN": is_interpreted(),
            "num_warps": blocks.num_warps, **pdl_flags(call.q_TNX),
        }  # fmt: skip
        return cls(tensors, programs_per_sm, constants)


def _attend_tiles(call: LatentCall, work: TileWork, large: bool) -> None:
    """Launch all small or all large tiles of a step, without the merge."""
    launch = _Launch.of(call, large, BLOCKS)
    _tiles_kernel[(call.num_sms * launch.programs_per_sm,)](
        call.q_TNX, *launch.planes, call.out_TNL, *call.partials, call.page_table_NP, work.tiles_X8,
        call.page_table_NP.stride(0), call.scale * LOG2_E, LARGE=large, **launch.constants,
    )  # fmt: skip


def _attend_lists(call: LatentCall, rows: SparseRows, tokens_TK: Tensor) -> int:
    """Launch all lists of a step, without the merge; return the number of splits."""
    launch = _Launch.of(call, False, LIST_BLOCKS)
    splits = ListSplits.of(call, tokens_TK.shape[1], launch.constants["BLOCK_N"])
    num_items = len(call.q_TNX) * launch.constants["NUM_BLOCKS"] * launch.constants["NUM_TURNS"]
    _lists_kernel[(num_items, splits.num_splits)](
        call.q_TNX, *launch.planes, call.out_TNL, *call.partials, call.page_table_NP, *rows, tokens_TK,
        call.page_table_NP.stride(0), tokens_TK.stride(0), tokens_TK.shape[1], call.scale * LOG2_E, splits.places,
        **launch.constants,
    )  # fmt: skip
    return splits.num_splits


@jit
def _attend_plain(
    p_q_m, m_m, o_n, o_l, o_r, m_l, m_r, p_latents, p_row_pages, p_row_tokens, b_token, b_ahead, b_page, o_row, position,
    low, high, num_tokens, scale_log2,
    LISTED: constexpr, LATENT_DIM: constexpr, ROPE_DIM: constexpr, PAGE_TOKENS: constexpr, BLOCK_M: constexpr,
    BLOCK_N: constexpr, BLOCK_L: constexpr, BLOCK_R: constexpr, NUM_STAGES: constexpr,
):  # fmt: skip
    """Return outputs [M, L] before division, maxima and sums of one tile over tokens, or over a list (LISTED).

    `b_page` is loaded for the first block. For a list, `b_token` holds its tokens and `b_ahead` the places of the next block.
    """
    WIDTH: constexpr = LATENT_DIM + ROPE_DIM
    # If a block lies in one page, its page id is a scalar and its rows are contiguous.
    IN_ONE_PAGE: constexpr = PAGE_TOKENS % BLOCK_N == 0
    b_q = tl.load(p_q_m + o_l[None, :], mask=m_m[:, None] & m_l[None, :], other=0.0)
    b_q_rope = tl.load(p_q_m + LATENT_DIM + o_r[None, :], mask=m_m[:, None] & m_r[None, :], other=0.0)
    b_acc = tl.zeros((BLOCK_M, BLOCK_L), dtype=tl.float32)
    b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    clear = low if LISTED else clear_end(low, high, position, False, BLOCK_N)
    for MASKED in tl.static_range(1 if LISTED else 0, 2):
        first = clear if MASKED else low
        end = high if MASKED else clear
        for n in tl.range(first, end, BLOCK_N, num_stages=NUM_STAGES):
            # Pages are loaded one block ahead and places two, so no load of latents waits for another load.
            if LISTED:
                o_slot = find_slots(b_page, b_token, PAGE_TOKENS)
                b_token = seen_tokens(b_ahead, num_tokens)
                b_page = load_pages(p_row_pages, b_token, PAGE_TOKENS)
                b_ahead = load_places(p_row_tokens, n + 2 * BLOCK_N + o_n, high)
                m_n = o_slot >= 0
                p_n = p_latents + (tl.maximum(o_slot, 0) * WIDTH)[:, None]
            else:
                o_token = n + o_n
                m_n = o_token < high
                b_here = b_page
                if IN_ONE_PAGE:
                    b_page = tl.load(p_row_pages + (n + BLOCK_N) // PAGE_TOKENS, mask=n + BLOCK_N < high, other=0)
                    p_block = p_latents + (b_here.to(tl.int64) * PAGE_TOKENS + n % PAGE_TOKENS) * WIDTH
                    p_n = p_block + (o_n * WIDTH)[:, None]
                else:
                    o_ahead = o_token + BLOCK_N
                    b_page = tl.load(p_row_pages + o_ahead // PAGE_TOKENS, mask=o_ahead < high, other=0)
                    o_slot = b_here.to(tl.int64) * PAGE_TOKENS + o_token % PAGE_TOKENS
                    p_n = p_latents + (o_slot * WIDTH)[:, None]
            # A branch per mask: a load that cannot be out of range has none.
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
            if LISTED:
                # Loaded again: carried in the layout of scores, a list would take the registers of the sums.
                b_seen = seen_tokens(load_places(p_row_tokens, n + o_n, high), num_tokens)
                b_score = tl.where((b_seen >= 0)[None, :], b_score, -float("inf"))
            elif MASKED:
                m_seen = ((position + o_row)[:, None] >= o_token[None, :]) & m_n[None, :]
                b_score = tl.where(m_seen, b_score, -float("inf"))
            b_m_new = tl.maximum(b_m, tl.max(b_score, axis=1))
            b_m_safe = finite_max(b_m_new) if MASKED else b_m_new
            b_p = tl.exp2(b_score - b_m_safe[:, None])
            b_alpha = tl.exp2(b_m - b_m_safe)
            b_l = b_l * b_alpha + tl.sum(b_p, axis=1)
            b_acc = tl.dot(b_p.to(b_k.dtype), b_k, b_acc * b_alpha[:, None])
            b_m = b_m_new
    return b_acc, b_m, b_l


@jit
def _attend_codes(
    p_q_m, m_m, o_n, p_words, p_scales, p_rope, p_row_pages, p_row_tokens, b_token, b_ahead, o_found, b_page, o_row,
    position, low, high, num_tokens, scale_log2,
    LISTED: constexpr, FP8: constexpr, SMALL_ROPE: constexpr, LATENT_DIM: constexpr, ROPE_DIM: constexpr,
    PAGE_TOKENS: constexpr, NUM_GROUPS: constexpr, ROW_WORDS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
    BLOCK_W: constexpr, BLOCK_R: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Return outputs [M, W] of every part before division, maxima and sums of one tile over tokens or a list (LISTED).

    `b_page` is loaded for the first block. For a list `o_found` are the slots of the first block, `b_page` and `b_token` are
    of the second, and `b_ahead` are the places of the third.
    """
    NUM_PARTS: constexpr = 2 if FP8 else 4
    b_q = load_queries(p_q_m, m_m, FP8, NUM_GROUPS, LATENT_DIM, BLOCK_W)
    b_q_rope = load_rope_queries(p_q_m + LATENT_DIM, m_m, SMALL_ROPE, ROPE_DIM, BLOCK_R, PLAIN)
    b_acc = ()
    for _ in tl.static_range(NUM_GROUPS * NUM_PARTS):
        b_acc = b_acc + (tl.zeros((BLOCK_M, BLOCK_W), dtype=tl.float32),)
    b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    b_l_tokens = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Scales are loaded a block ahead, like pages: in a block only the copies of codes wait for memory.
    o_first = tl.maximum(o_found, 0) if LISTED else _slots(b_page, low, o_n, PAGE_TOKENS, BLOCK_N)
    b_scale = load_scales(p_words, p_scales, o_first, FP8, SMALL_ROPE, NUM_GROUPS, LATENT_DIM, ROW_WORDS)
    clear = low if LISTED else clear_end(low, high, position, False, BLOCK_N)
    for MASKED in tl.static_range(1 if LISTED else 0, 2):
        first = clear if MASKED else low
        end = high if MASKED else clear
        for n in tl.range(first, end, BLOCK_N, num_stages=1 if MASKED and not LISTED else NUM_STAGES):
            if LISTED:
                m_n = o_found >= 0
                o_slot = tl.maximum(o_found, 0)
                o_found = find_slots(b_page, b_token, PAGE_TOKENS)
                o_next = tl.maximum(o_found, 0)
            else:
                o_token = n + o_n
                m_n = o_token < high
                o_slot = _slots(b_page, n, o_n, PAGE_TOKENS, BLOCK_N)
                b_page = _pages(p_row_pages, n + BLOCK_N, o_n, high, PAGE_TOKENS, BLOCK_N)
                o_next = _slots(b_page, n + BLOCK_N, o_n, PAGE_TOKENS, BLOCK_N)
            b_next = load_scales(p_words, p_scales, o_next, FP8, SMALL_ROPE, NUM_GROUPS, LATENT_DIM, ROW_WORDS)
            m_here = m_n
            if LISTED:
                b_token = seen_tokens(b_ahead, num_tokens)
                b_page = load_pages(p_row_pages, b_token, PAGE_TOKENS)
                b_ahead = load_places(p_row_tokens, n + 3 * BLOCK_N + o_n, high)
                # Loaded again: carried in the layout of scores, a list would take the registers of the sums.
                m_here = seen_tokens(load_places(p_row_tokens, n + o_n, high), num_tokens) >= 0
            b_score = rope_scores(
                b_q_rope, p_rope, o_slot, m_n, MASKED, FP8, SMALL_ROPE, LATENT_DIM, ROPE_DIM, NUM_GROUPS, ROW_WORDS,
                BLOCK_R, PLAIN,
            )  # fmt: skip
            if SMALL_ROPE:
                b_score = b_score * scale_factor(b_scale[1], m_here, MASKED)[None, :]
            b_groups = ()
            b_bound = tl.zeros((BLOCK_N,), dtype=tl.float32)
            for g in tl.static_range(NUM_GROUPS):
                b_factor = scale_factor(b_scale[g], m_here, MASKED)
                b_bound = tl.maximum(b_bound, b_factor)
                b_words = load_words(p_words, o_slot, m_n, g, MASKED, FP8, LATENT_DIM, ROW_WORDS, BLOCK_W)
                b_score += group_scores(b_q, b_words, g, FP8, PLAIN) * b_factor[None, :]
                b_groups = b_groups + (b_words,)
            b_score = b_score * scale_log2
            if LISTED:
                b_score = tl.where(m_here[None, :], b_score, -float("inf"))
            elif MASKED:
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
                b_factor = scale_factor(b_scale[g], m_here, MASKED)
                b_weight = (b_p * (b_factor * P_ONE)[None, :]).to(tl.float16)
                b_values = take_apart(b_groups[g], FP8, PLAIN)
                for j in tl.static_range(NUM_PARTS):
                    b_new = b_new + (tl.dot(b_weight, b_values[j], b_acc[g * NUM_PARTS + j] * b_alpha[:, None]),)
            b_acc, b_m, b_scale = b_new, b_m_new, b_next
    return b_acc, b_m, tl.sum(b_l_tokens, axis=1)


@jit
def _normalized(b_acc, b_l, PLAIN_ROWS: constexpr):
    """Return outputs divided by their sums; for codes, outputs and the factor to apply when parts are stored."""
    # If a row sees nothing of a split, its partial is neutral: zeros, with -inf as lse.
    if PLAIN_ROWS:
        return (b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None],)
    else:
        return b_acc, 1.0 / tl.where(b_l > 0, b_l * P_ONE, 1.0)[:, None]


@jit
def _store_rows(
    b_out, p_m, m_m, o_l, m_l,
    PLAIN_ROWS: constexpr, FP8: constexpr, LATENT_DIM: constexpr, NUM_GROUPS: constexpr, BLOCK_L: constexpr,
):  # fmt: skip
    if PLAIN_ROWS:
        m_out = m_m[:, None] & m_l[None, :]
        tl.store(p_m + o_l[None, :], b_out[0].to(p_m.dtype.element_ty), mask=m_out)
    else:
        store_parts(b_out[0], b_out[1], p_m, m_m, FP8, NUM_GROUPS, LATENT_DIM, BLOCK_L)


@jit
def _tiles_kernel(
    p_q, p_rows, p_scales, p_rope, p_out, p_partial_out, p_partial_lse, p_pages, p_tiles, table_stride, scale_log2,
    LARGE: constexpr, PLAIN_ROWS: constexpr, FP8: constexpr, SMALL_ROPE: constexpr, NUM_HEADS: constexpr,
    NUM_BLOCKS: constexpr, NUM_TURNS: constexpr, GROUP: constexpr, LATENT_DIM: constexpr, ROPE_DIM: constexpr,
    PAGE_TOKENS: constexpr, NUM_GROUPS: constexpr, ROW_WORDS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
    BLOCK_L: constexpr, BLOCK_R: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    num_small = tl.load(p_tiles)
    num_tiles = tl.load(p_tiles + 1) if LARGE else num_small
    first_tile = 1 + num_small if LARGE else 1
    o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    o_l, o_r = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    m_l, m_r = o_l < LATENT_DIM, o_r < ROPE_DIM
    o_only_row = o_m // GROUP  # plain tiles take one pass, so this division stands before the loop
    # Blocks of heads and passes of a tile run one after the other, so all but the first find its codes in the cache.
    for i_item in range(tl.program_id(0), num_tiles * (NUM_BLOCKS * NUM_TURNS), tl.num_programs(0)):
        table_row, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
            p_tiles, first_tile + i_item // (NUM_BLOCKS * NUM_TURNS)
        )
        o_place = o_m if PLAIN_ROWS else i_item % NUM_TURNS * BLOCK_M + tl.arange(0, BLOCK_M)
        o_row = o_only_row if PLAIN_ROWS else o_place // GROUP
        p_row_pages = p_pages + table_row.to(tl.int64) * table_stride
        b_page = _pages(p_row_pages, low, o_n, high, PAGE_TOKENS, BLOCK_N)
        if PDL:
            tl.extra.cuda.gdc_wait()  # tiles and pages are older; queries and new latents come from the last kernel
        o_head = i_item // NUM_TURNS % NUM_BLOCKS * GROUP + o_place % GROUP
        m_m = (o_row < num_rows) & (o_head < NUM_HEADS)
        o_q = (row + o_row).to(tl.int64) * NUM_HEADS + o_head
        p_q_m = p_q + (o_q * (LATENT_DIM + ROPE_DIM))[:, None]
        if PLAIN_ROWS:
            b_acc, b_m, b_l = _attend_plain(
                p_q_m, m_m, o_n, o_l, o_r, m_l, m_r, p_rows, p_row_pages, None, None, None, b_page, o_row, position, low,
                high, None, scale_log2, False, LATENT_DIM, ROPE_DIM, PAGE_TOKENS, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R,
                NUM_STAGES,
            )  # fmt: skip
        else:
            b_acc, b_m, b_l = _attend_codes(
                p_q_m, m_m, o_n, p_rows, p_scales, p_rope, p_row_pages, None, None, None, None, b_page, o_row, position,
                low, high, None, scale_log2, False, FP8, SMALL_ROPE, LATENT_DIM, ROPE_DIM, PAGE_TOKENS, NUM_GROUPS,
                ROW_WORDS, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R, NUM_STAGES, PLAIN,
            )  # fmt: skip
        b_out = _normalized(b_acc, b_l, PLAIN_ROWS)
        if first_partial < 0:
            p_y = p_out + (o_q * LATENT_DIM)[:, None]
            _store_rows(b_out, p_y, m_m, o_l, m_l, PLAIN_ROWS, FP8, LATENT_DIM, NUM_GROUPS, BLOCK_L)
        else:
            o_partial = (first_partial + o_row * num_splits).to(tl.int64) * NUM_HEADS + o_head
            p_partial = p_partial_out + (o_partial * LATENT_DIM)[:, None]
            _store_rows(b_out, p_partial, m_m, o_l, m_l, PLAIN_ROWS, FP8, LATENT_DIM, NUM_GROUPS, BLOCK_L)
            tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        # Release late: programs of the next kernel would share the multiprocessors unevenly.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # wait even without a tile: the next kernel relies on all earlier ones


@jit_counting("places")
def _lists_kernel(
    p_q, p_rows, p_scales, p_rope, p_out, p_partial_out, p_partial_lse, p_pages, p_table_rows, p_num_tokens, p_tokens,
    table_stride, tokens_stride, num_places, scale_log2, places,
    PLAIN_ROWS: constexpr, FP8: constexpr, SMALL_ROPE: constexpr, NUM_HEADS: constexpr, NUM_BLOCKS: constexpr,
    NUM_TURNS: constexpr, GROUP: constexpr, LATENT_DIM: constexpr, ROPE_DIM: constexpr, PAGE_TOKENS: constexpr,
    NUM_GROUPS: constexpr, ROW_WORDS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_L: constexpr,
    BLOCK_R: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    # Blocks of heads and passes of a row run one after the other, so all but the first find its codes in the cache.
    i_item = tl.program_id(0)
    i_row = (i_item // (NUM_BLOCKS * NUM_TURNS)).to(tl.int64)
    i_split = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()  # earlier kernels write lists and queries
    num_tokens = tl.load(p_num_tokens + i_row)
    if num_tokens <= 0:
        return
    o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    o_l, o_r = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    m_l, m_r = o_l < LATENT_DIM, o_r < ROPE_DIM
    low = i_split * places
    high = tl.minimum(low + places, tl.minimum(num_tokens, num_places))
    p_row_tokens = p_tokens + i_row * tokens_stride
    p_row_pages = p_pages + tl.load(p_table_rows + i_row).to(tl.int64) * table_stride
    b_token = seen_tokens(load_places(p_row_tokens, low + o_n, high), num_tokens)
    if PLAIN_ROWS:
        b_ahead = load_places(p_row_tokens, low + BLOCK_N + o_n, high)
    else:
        # Tokens are loaded three blocks ahead, their pages two and their scales one.
        b_first = b_token
        b_token = seen_tokens(load_places(p_row_tokens, low + BLOCK_N + o_n, high), num_tokens)
        b_ahead = load_places(p_row_tokens, low + 2 * BLOCK_N + o_n, high)
        o_found = find_slots(load_pages(p_row_pages, b_first, PAGE_TOKENS), b_first, PAGE_TOKENS)
    b_page = load_pages(p_row_pages, b_token, PAGE_TOKENS)
    o_place = o_m if PLAIN_ROWS else i_item % NUM_TURNS * BLOCK_M + tl.arange(0, BLOCK_M)
    o_head = i_item // NUM_TURNS % NUM_BLOCKS * GROUP + o_place
    m_m = (o_place < GROUP) & (o_head < NUM_HEADS)
    o_q = i_row * NUM_HEADS + o_head
    p_q_m = p_q + (o_q * (LATENT_DIM + ROPE_DIM))[:, None]
    if PLAIN_ROWS:
        b_acc, b_m, b_l = _attend_plain(
            p_q_m, m_m, o_n, o_l, o_r, m_l, m_r, p_rows, p_row_pages, p_row_tokens, b_token, b_ahead, b_page, None, None,
            low, high, num_tokens, scale_log2, True, LATENT_DIM, ROPE_DIM, PAGE_TOKENS, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R,
            NUM_STAGES,
        )  # fmt: skip
    else:
        b_acc, b_m, b_l = _attend_codes(
            p_q_m, m_m, o_n, p_rows, p_scales, p_rope, p_row_pages, p_row_tokens, b_token, b_ahead, o_found, b_page, None,
            None, low, high, num_tokens, scale_log2, True, FP8, SMALL_ROPE, LATENT_DIM, ROPE_DIM, PAGE_TOKENS, NUM_GROUPS,
            ROW_WORDS, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R, NUM_STAGES, PLAIN,
        )  # fmt: skip
    b_out = _normalized(b_acc, b_l, PLAIN_ROWS)
    num_splits = tl.num_programs(1)
    if num_splits == 1:
        p_y = p_out + (o_q * LATENT_DIM)[:, None]
        _store_rows(b_out, p_y, m_m, o_l, m_l, PLAIN_ROWS, FP8, LATENT_DIM, NUM_GROUPS, BLOCK_L)
    else:
        o_partial = (i_row * num_splits + i_split) * NUM_HEADS + o_head
        p_partial = p_partial_out + (o_partial * LATENT_DIM)[:, None]
        _store_rows(b_out, p_partial, m_m, o_l, m_l, PLAIN_ROWS, FP8, LATENT_DIM, NUM_GROUPS, BLOCK_L)
        tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # release late: programs of the next kernel would run beside these


@jit
def _pages(p_row_pages, n, o_n, high, PAGE_TOKENS: constexpr, BLOCK_N: constexpr):
    """Load the page of a block, or of each of its tokens if pages are smaller; called a block ahead."""
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

"""Absorbed latent attention (MLA) straight from the codes of quantized pages, fp8_ds_mla and TurboQuant: Triton kernels.

T rows, N query heads, L latent, R rotated elements, S slots, K places of a list, C split-KV partials, M rows of a tile times
heads, W columns of words

Tiles, lists and splits are those of latent_attention.py. latent_words.py splits codes into parts of half precision without
their scale. The scale multiplies scores of keys and, for values, p of the softmax. A bound that knows the scales keeps p below
2^14, so half precision holds it for any context. Queries over TurboQuant pages come in the rotated space; outputs stay in it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.dequantize import fast_exp2, fast_log2
from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE
from holdfast.kernels.attention.split_kv import LOG2_E, finite_max, load_tile
from holdfast.kernels.attention.tiled_attention import TileWork
from holdfast.kernels.latent.latent_geometry import head_blocks, tile_height
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes, SparseRows
from holdfast.kernels.latent.latent_tiles import ListSplits, find_slots, load_pages, load_places, seen_tokens
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
    jit_counting,
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
    """How a program loads the tokens of a tile."""

    height: int
    """Rows times heads: a higher tile takes several passes, and each reads the codes again."""
    tokens: int
    num_stages: int
    num_warps: int
    programs_per_sm: int


BLOCKS = {
    16: (QuantizedBlocks(16, 64, 3, 4, 2), QuantizedBlocks(16, 32, 3, 4, 2), QuantizedBlocks(16, 16, 2, 4, 2)),
    32: (QuantizedBlocks(32, 64, 2, 8, 1), QuantizedBlocks(32, 32, 2, 8, 1), QuantizedBlocks(32, 16, 2, 8, 1)),
}
"""By height, the fastest on an H200 first (docs/log.md)."""


def quantized_blocks(height: int, planes: LatentPlanes, room: int) -> QuantizedBlocks:
    """Return the first choice whose codes and queries fit into `room` bytes of shared memory."""
    shape = word_shape(planes)
    code_bytes, rope_bytes = 2 * shape.groups * shape.block_columns, 2 * shape.block_rope
    choices = BLOCKS[min(height, 32)]
    for blocks in choices:
        # Operands are read into registers, so one stage less is held.
        held = blocks.tokens * (blocks.num_stages - 1) * (code_bytes + rope_bytes)
        queries = blocks.height * (shape.parts * code_bytes + rope_bytes * (1 + planes.has_small_rope))
        if held + queries + 4 * blocks.height * blocks.tokens < room:
            return blocks
    return choices[-1]


def _planes_of(call: LatentCall) -> tuple[Tensor | None, ...]:
    assert call.planes.kind != "plain", "plain pages have kernels of their own"
    return call.planes.rows_SX.view(torch.int16), call.planes.scales_SC, rope_plane(call.planes)


def _constants(call: LatentCall, blocks: QuantizedBlocks, large: bool) -> dict[str, int]:
    """Return the constants and options of a launch over codes."""
    planes, num_heads, pdl = call.planes, call.q_TNX.shape[1], supports_pdl(call.q_TNX)
    shape, (num_blocks, group) = word_shape(planes), head_blocks(num_heads, large)
    return {
        "FP8": planes.kind == "fp8_ds_mla", "SMALL_ROPE": planes.has_small_rope, "NUM_HEADS": num_heads,
        "NUM_BLOCKS": num_blocks, "GROUP": group, "LATENT_DIM": planes.latent_dim, "ROPE_DIM": planes.rope_dim,
        "PAGE_TOKENS": planes.page_tokens, "NUM_GROUPS": shape.groups, "ROW_WORDS": planes.rows_SX.shape[1] // 2,
        "BLOCK_M": blocks.height, "BLOCK_N": blocks.tokens, "BLOCK_W": shape.block_columns, "BLOCK_R": shape.block_rope,
        "NUM_STAGES": blocks.num_stages, "PLAIN": is_interpreted(), "PDL": pdl, "num_warps": blocks.num_warps,
        **pdl_launch(pdl),
    }  # fmt: skip


def attend_coded_tiles(call: LatentCall, work: TileWork, large: bool) -> None:
    """Launch all small or all large tiles of a step over codes, without the merge."""
    height = tile_height(call.q_TNX.shape[1], large)
    blocks = quantized_blocks(height, call.planes, shared_bytes(call.q_TNX))
    _tiles_kernel[(call.num_sms * blocks.programs_per_sm,)](
        call.q_TNX, *_planes_of(call), call.out_TNL, *call.partials, call.page_table_NP, work.tiles_X8,
        call.page_table_NP.stride(0), call.scale * LOG2_E,
        LARGE=large, NUM_TURNS=height // blocks.height, **_constants(call, blocks, large),
    )  # fmt: skip


def attend_coded_lists(call: LatentCall, rows: SparseRows, tokens_TK: Tensor) -> int:
    """Launch all lists of a step over codes, without the merge; return the number of splits."""
    num_rows, num_heads, _ = call.q_TNX.shape
    num_blocks, group = head_blocks(num_heads)
    blocks = quantized_blocks(tile_height(num_heads, large=False), call.planes, shared_bytes(call.q_TNX))
    splits, num_turns = ListSplits.of(call, tokens_TK.shape[1], blocks.tokens), -(-group // blocks.height)
    _lists_kernel[(num_rows * num_blocks * num_turns, splits.num_splits)](
        call.q_TNX, *_planes_of(call), call.out_TNL, *call.partials, call.page_table_NP, *rows, tokens_TK,
        call.page_table_NP.stride(0), tokens_TK.stride(0), tokens_TK.shape[1], call.scale * LOG2_E, splits.places,
        NUM_TURNS=num_turns, **_constants(call, blocks, large=False),
    )  # fmt: skip
    return splits.num_splits


@jit
def _attend_tile(
    p_q_m, m_m, o_n, p_words, p_scales, p_rope, p_row_pages, p_row_tokens, b_token, b_ahead, o_found, b_page, o_row,
    position, low, high, num_tokens, scale_log2,
    LISTED: constexpr, FP8: constexpr, SMALL_ROPE: constexpr, LATENT_DIM: constexpr, ROPE_DIM: constexpr,
    PAGE_TOKENS: constexpr, NUM_GROUPS: constexpr, ROW_WORDS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
    BLOCK_W: constexpr, BLOCK_R: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Outputs [M, W] of every part before the division, maxima and sums of one tile over tokens, or over a list (LISTED).

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
    clear = low
    if not LISTED:
        # All rows see the tokens up to the first row's own: whole blocks of them come first, without a mask.
        clear = low + tl.maximum(tl.minimum(high, position + 1) - low, 0) // BLOCK_N * BLOCK_N
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
def _tiles_kernel(
    p_q, p_words, p_scales, p_rope, p_out, p_partial_out, p_partial_lse, p_pages, p_tiles, table_stride, scale_log2,
    LARGE: constexpr, FP8: constexpr, SMALL_ROPE: constexpr, NUM_HEADS: constexpr, NUM_BLOCKS: constexpr,
    NUM_TURNS: constexpr, GROUP: constexpr, LATENT_DIM: constexpr, ROPE_DIM: constexpr, PAGE_TOKENS: constexpr,
    NUM_GROUPS: constexpr, ROW_WORDS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_W: constexpr,
    BLOCK_R: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    num_small = tl.load(p_tiles)
    num_tiles = tl.load(p_tiles + 1) if LARGE else num_small
    first_tile = 1 + num_small if LARGE else 1
    o_n = tl.arange(0, BLOCK_N)
    # Blocks of heads and passes of a tile run one after the other, so all but the first find its codes in the cache.
    for i_item in range(tl.program_id(0), num_tiles * (NUM_BLOCKS * NUM_TURNS), tl.num_programs(0)):
        table_row, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
            p_tiles, first_tile + i_item // (NUM_BLOCKS * NUM_TURNS)
        )
        o_m = i_item % NUM_TURNS * BLOCK_M + tl.arange(0, BLOCK_M)
        o_row = o_m // GROUP
        p_row_pages = p_pages + table_row.to(tl.int64) * table_stride
        b_page = _pages(p_row_pages, low, o_n, high, PAGE_TOKENS, BLOCK_N)
        if PDL:
            tl.extra.cuda.gdc_wait()  # tiles and pages are older; queries and new latents come from the last kernel
        o_head = i_item // NUM_TURNS % NUM_BLOCKS * GROUP + o_m % GROUP
        m_m = (o_row < num_rows) & (o_head < NUM_HEADS)
        o_q = (row + o_row).to(tl.int64) * NUM_HEADS + o_head
        b_acc, b_m, b_l = _attend_tile(
            p_q + (o_q * (LATENT_DIM + ROPE_DIM))[:, None], m_m, o_n, p_words, p_scales, p_rope, p_row_pages, None,
            None, None, None, b_page, o_row, position, low, high, None, scale_log2,
            False, FP8, SMALL_ROPE, LATENT_DIM, ROPE_DIM, PAGE_TOKENS, NUM_GROUPS, ROW_WORDS, BLOCK_M, BLOCK_N, BLOCK_W,
            BLOCK_R, NUM_STAGES, PLAIN,
        )  # fmt: skip
        # If a row sees nothing of a split, its partial is neutral: zeros, with -inf as lse.
        b_share = 1.0 / tl.where(b_l > 0, b_l * P_ONE, 1.0)[:, None]
        if first_partial < 0:
            store_parts(b_acc, b_share, p_out + (o_q * LATENT_DIM)[:, None], m_m, FP8, NUM_GROUPS, LATENT_DIM, BLOCK_W)
        else:
            o_partial = (first_partial + o_row * num_splits).to(tl.int64) * NUM_HEADS + o_head
            p_partial = p_partial_out + (o_partial * LATENT_DIM)[:, None]
            store_parts(b_acc, b_share, p_partial, m_m, FP8, NUM_GROUPS, LATENT_DIM, BLOCK_W)
            tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        # Not sooner: programs of the next kernel would share the multiprocessors unevenly.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # also without a tile: the next kernel relies on all earlier ones


@jit_counting("places")
def _lists_kernel(
    p_q, p_words, p_scales, p_rope, p_out, p_partial_out, p_partial_lse, p_pages, p_table_rows, p_num_tokens, p_tokens,
    table_stride, tokens_stride, num_places, scale_log2, places,
    FP8: constexpr, SMALL_ROPE: constexpr, NUM_HEADS: constexpr, NUM_BLOCKS: constexpr, NUM_TURNS: constexpr,
    GROUP: constexpr, LATENT_DIM: constexpr, ROPE_DIM: constexpr, PAGE_TOKENS: constexpr, NUM_GROUPS: constexpr,
    ROW_WORDS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_W: constexpr, BLOCK_R: constexpr,
    NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
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
    o_n = tl.arange(0, BLOCK_N)
    low = i_split * places
    high = tl.minimum(low + places, tl.minimum(num_tokens, num_places))
    # Tokens are loaded three blocks ahead, their pages two and their scales one.
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
    b_acc, b_m, b_l = _attend_tile(
        p_q + (o_q * (LATENT_DIM + ROPE_DIM))[:, None], m_m, o_n, p_words, p_scales, p_rope, p_row_pages, p_row_tokens,
        b_token, b_ahead, o_found, b_page, None, None, low, high, num_tokens, scale_log2,
        True, FP8, SMALL_ROPE, LATENT_DIM, ROPE_DIM, PAGE_TOKENS, NUM_GROUPS, ROW_WORDS, BLOCK_M, BLOCK_N, BLOCK_W,
        BLOCK_R, NUM_STAGES, PLAIN,
    )  # fmt: skip
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
        tl.extra.cuda.gdc_launch_dependents()  # not sooner: programs of the next kernel would run beside these


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

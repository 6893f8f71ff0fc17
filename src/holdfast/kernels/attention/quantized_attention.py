"""Paged attention straight from quantized keys and values: nothing is dequantized into memory.

T rows, H query heads, K key/value heads, G = H / K, D head dim, C split-KV partials

The work is the list of tiles of tiled_attention.py. Queries are rotated if keys are; outputs are rotated back to the
model's coordinates. A key's scale multiplies its scores, a value's scale its p. A bound that knows the scales keeps p
below 2^14, so half precision holds it for any context.

decode     small tiles: tokens are rows of the product, the heads of a GQA group its columns. One warp computes a tile alone.
           Scores are keys times queries, [N, G], so eight heads fill an instruction that sixteen rows of queries would leave
           half empty. No warp waits for another, and a few shuffles turn p into an operand.
prefill    large tiles: codes become operands once for 128 rows of queries and heads

Some tokens may be exact instead (near_tokens.py).

In kernels G columns or M rows are the rows of a tile times the heads of a group, N tokens of a block, C columns of words.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.dequantize import (
    fast_exp2,
    fast_log2,
    key_numbers,
    key_parts_3,
    key_parts_3_halves,
    key_parts_4,
    key_parts_5,
    key_parts_5_halves,
    upper_columns,
    value_parts_3,
    value_parts_4,
    value_parts_8,
)
from holdfast.kernels.attention.key_bias import (
    KeyBias,
    KeyTurns,
    key_bias_rows,
    near_fragments,
    query_waves,
    turned_waves,
)
from holdfast.kernels.attention.lane_rows import Lane, LaneSource
from holdfast.kernels.attention.lane_warpgroups import attend_by_lane
from holdfast.kernels.attention.near_tokens import (
    LARGE_CHUNK,
    SMALL_CHUNK,
    SPLIT,
    NearPages,
    near_chunk,
    near_chunks,
    near_large,
    near_small,
)
from holdfast.kernels.attention.quantized_planes import (
    LEAST_LOG2,
    P_ONE,
    QuantizedPlanes,
    bytes_at,
    key_codes,
    pages_of,
    part_dims,
    slots_of,
    store_parts,
    store_rotated,
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
from holdfast.kernels.attention.tiled_attention import TileCall
from holdfast.kernels.geometry import BLOCK_TOKENS, QUANTIZED_LARGE_TILE, TileGeometry, pair_columns
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, next_power_of_two, tl
from holdfast.quant.kv_quantize import (
    KEY_PARTS,
    VALUE_PARTS,
    dequantize_keys,
    dequantize_values,
    hadamard_block,
    rotate_heads,
)

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

# Triton resolves branches on constants at compile time, so both sides must stand in an if and an else.
# Triton cannot unpack into a tuple, but adds tuples.

SMALL_COLUMNS = 8
"""Rows times heads of a small tile: one tensor-core instruction takes them with sixteen tokens."""
SMALL_PROGRAMS_PER_SM = 8
SMALL_REGISTERS = 232
"""Registers per thread with which an SM holds exactly SMALL_PROGRAMS_PER_SM programs."""


class LargeShape(NamedTuple):
    """Launch parameters of large tiles."""

    rows: int
    """Rows times heads."""
    warps: int
    stages: int
    programs_per_sm: int


def large_shape(key_bits: int) -> LargeShape:
    """Return the shape of large tiles: two programs per SM for 8-bit keys; costlier keys are shared by more rows."""
    return LargeShape(QUANTIZED_LARGE_TILE, 4, 2, 2) if key_bits == 8 else LargeShape(128, 8, 1, 1)


def quantized_geometry(num_heads: int, num_kv_heads: int, key_bits: int, value_bits: int) -> TileGeometry:
    """Return the tile sizes; measured on an H200 (docs/log.md)."""
    group = num_heads // num_kv_heads
    return TileGeometry(
        small_rows=max(1, SMALL_COLUMNS // group),
        large_rows=max(1, large_shape(key_bits).rows // group),
        small_programs_per_sm=SMALL_PROGRAMS_PER_SM,
        large_programs_per_sm=large_shape(key_bits).programs_per_sm,
        block_tokens=BLOCK_TOKENS,
        has_aligned_starts=True,
        takes_whole_turns=True,
    )


def row_form(num_rows: int) -> int:
    """Return the heads per program of the merge: the specialization for the number of rows."""
    return 1 if num_rows <= MERGE_BY_HEAD_ROWS else MERGED_HEADS


def quantized_attention(
    call: TileCall, planes: QuantizedPlanes, near: NearPages | None = None, lane: Lane | None = None
) -> Tensor:
    """Like `tiled_attention` over quantized pages: [T, H * D]. The soft cap applies to scores with the bias of the keys.

    Tiles of the lane read it (lane_warpgroups.py). With near pages all ranges of codes end with a block, before every row of their tile. With first tokens they may begin
    inside a block.
    """
    _, num_heads, head_dim = call.q_THD.shape
    group, plain = num_heads // planes.num_kv_heads, is_interpreted()
    scale, window, sinks_H, softcap = call.scoring
    first_tokens = 0 if near is None else near.first_tokens
    assert not first_tokens or window is None, f"{first_tokens=} are hidden by a window of {window}"
    rotation_scale = hadamard_block(head_dim) ** -0.5
    arguments = (
        call.q_THD, planes.k_codes_PKtB, planes.k_signs_PKtS, planes.k_scale_PKt,
        planes.v_codes_PKtB.view(torch.int16),
        None if planes.v_signs_PKtS is None else planes.v_signs_PKtS.view(torch.int16), planes.v_scale_PKt,
        planes.rotation_DD, call.out_TX, *call.partials, call.page_table_NP, call.work.tiles_X8,
        *_key_bias_tables(planes.key_bias), sinks_H, call.page_table_NP.stride(0), scale * LOG2_E,
        None if softcap is None else softcap * LOG2_E, rotation_scale, window or 0, *_near_operands(near, call.q_THD),
    )  # fmt: skip
    key_parts = KEY_PARTS[planes.key_bits]
    if planes.k_signs_PKtS is not None and head_dim % 32 == 0 and not plain:
        key_parts *= 2  # the kernel takes both halves of a row at once
    constants = {
        "KEY_BITS": planes.key_bits,
        "VALUE_BITS": planes.value_bits,
        "NUM_KV_HEADS": planes.num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_TOKENS": planes.page_tokens,
        "HAS_WINDOW": window is not None,
        "NEAR_BLOCK": 0 if near is None else near.block_tokens,
        "FIRST_TOKENS": first_tokens,
        "NEAR_PAGE": 0 if near is None else near.page_tokens,
        "HAS_KEY_BIAS": planes.key_bias is not None,
        "BLOCK_N": BLOCK_TOKENS,
        "VALUE_COLUMNS": max(16, next_power_of_two(head_dim // VALUE_PARTS[planes.value_bits])),
        "PAIR_COLUMNS": pair_columns(head_dim),
        "PLAIN": plain,
    } | pdl_flags(call.q_THD)
    if call.work.has_small:
        limited = {} if plain else {"maxnreg": SMALL_REGISTERS}
        _decode_kernel[(call.num_sms * SMALL_PROGRAMS_PER_SM,)](
            *arguments, **constants, BLOCK_G=max(SMALL_COLUMNS, next_power_of_two(group)),
            BLOCK_D=max(16, next_power_of_two(head_dim)), KEY_COLUMNS=max(16, next_power_of_two(head_dim // key_parts)),
            NUM_STAGES=2 if planes.key_bits == planes.value_bits == 8 else 3, num_warps=1, **limited,
        )  # fmt: skip
    if call.work.has_large:
        large = large_shape(planes.key_bits)
        _prefill_kernel[(call.num_sms * large.programs_per_sm,)](
            *arguments, **constants, BLOCK_M=max(large.rows, next_power_of_two(group)),
            BLOCK_D=VALUE_PARTS[planes.value_bits] * constants["VALUE_COLUMNS"],
            KEY_COLUMNS=max(16, next_power_of_two(head_dim // KEY_PARTS[planes.key_bits])),
            NUM_STAGES=large.stages, num_warps=large.warps,
        )  # fmt: skip
    if call.work.lane is not None:
        assert lane is not None, "the step has tiles of the lane"
        attend_by_lane(call, LaneSource(planes, near), lane)
    if call.work.has_merge:
        heads = row_form(len(call.q_THD))
        out_THD, shape = call.out_TX.view(call.q_THD.shape), MergeShape(heads, head_dim, heads == 1)
        rotation = (planes.rotation_DD if planes.rotates_values else None, rotation_scale)
        merge_tiles(call.work.rows_T2, call.partials, out_THD, shape, sinks_H=sinks_H, rotation=rotation)
    return call.out_TX


def quantized_attention_reference(call: TileCall, planes: QuantizedPlanes, near: NearPages | None = None) -> Tensor:
    """Like `quantized_attention` in plain torch, one row at a time over all its tokens, without splits."""
    (num_rows, num_heads, head_dim), q_THD, work = call.q_THD.shape, call.q_THD, call.work
    scale, window, sinks_H, softcap = call.scoring
    out_THD = call.out_TX.view(q_THD.shape)
    group, page_tokens = num_heads // planes.num_kv_heads, planes.page_tokens
    num_small, num_large = work.tiles_X8[0, :2].tolist()
    num_tiles = num_small * work.has_small + num_large * work.has_large
    rows: dict[int, tuple[int, int]] = {}
    for table_row, row, count, position, *_ in work.tiles_X8[1 : 1 + num_tiles].tolist():
        rows |= {row + i: (table_row, position + i) for i in range(count)}
    for row, (table_row, position) in rows.items():
        first = 0 if window is None else max(0, position - window + 1)
        token_L = torch.arange(first, position + 1, device=q_THD.device)
        page_L, offset_L = call.page_table_NP[table_row, token_L // page_tokens].long(), token_L % page_tokens
        k_LKD = dequantize_keys(planes.keys_at(page_L, offset_L), planes.key_bits, head_dim)
        v_LKD = dequantize_values(planes.values_at(page_L, offset_L), planes.value_bits, head_dim)
        if planes.key_bias is not None:
            bias_LKD = key_bias_rows(planes.key_bias, token_L).transpose(0, 1)
            k_LKD = k_LKD + (rotate_heads(bias_LKD) if planes.rotates_keys else bias_LKD)
        if near is not None:
            own = position // near.block_tokens * near.block_tokens
            is_near_L = (token_L >= own) | (token_L < near.first_tokens)
            near_L = token_L[is_near_L]
            slot_L = near.page_table_NP[table_row, near_L // near.page_tokens].long() * near.page_tokens
            slot_L += near_L % near.page_tokens
            k_LKD[is_near_L], v_LKD[is_near_L] = near.k_plane_SKD[slot_L].float(), near.v_plane_SKD[slot_L].float()
        scores_HL = torch.einsum("hd,lhd->hl", q_THD[row].float(), k_LKD.repeat_interleave(group, dim=1)) * scale
        if softcap is not None:
            scores_HL = softcap * torch.tanh(scores_HL / softcap)
        out_HD = torch.einsum("hl,lhd->hd", scores_HL.softmax(-1), v_LKD.repeat_interleave(group, dim=1))
        if sinks_H is not None:
            out_HD = out_HD * torch.sigmoid(scores_HL.logsumexp(-1) - sinks_H).unsqueeze(-1)
        out_THD[row] = (rotate_heads(out_HD) if planes.rotates_values else out_HD).to(out_THD.dtype)
    if work.has_merge:
        out_THD[work.rows_T2[:num_rows, 1] == 0] = 0
    return call.out_TX


def _near_operands(near: NearPages | None, q_THD: Tensor) -> tuple[Tensor | int | None, ...]:
    """Return the planes, the page table and its stride in the order of the kernels' arguments."""
    if near is None:
        return None, None, None, None
    k_plane_SKD, v_plane_SKD, page_table_NP = near[:3]
    for plane in (k_plane_SKD, v_plane_SKD):
        assert plane.is_contiguous() and plane.dtype == q_THD.dtype, "near rows are queries' type, side by side"  # noqa: PT018
        assert plane.element_size() == 2 and plane.data_ptr() % 8 == 0, f"{plane.dtype=}: words of near values"  # noqa: PT018
    return k_plane_SKD, v_plane_SKD, page_table_NP, page_table_NP.stride(0)


def _key_bias_tables(key_bias: KeyBias | None) -> tuple[Tensor | None, ...]:
    """Return the tables in the order of the kernels' arguments."""
    if key_bias is None:
        return (None,) * (1 + len(KeyTurns._fields))
    assert key_bias.turns.fragments_F is not None, f"{key_bias.turns.near_2NC.dtype=}: these tables are not for kernels"
    for table in (key_bias.bias_KD, *key_bias.turns):
        assert table is not None and table.is_contiguous(), "the rows of a table must lie side by side"  # noqa: PT018
    return key_bias.bias_KD, *key_bias.turns


@jit
def _decode_kernel(
    p_q, p_k, p_k_signs, p_k_scale, p_v, p_v_signs, p_v_scale, p_rotation, p_out, p_partial_out, p_partial_lse, p_pages,
    p_tiles, p_bias, p_cos, p_sin, p_near, p_fragments, p_sinks, table_stride, scale_log2, softcap_log2, rotation_scale,
    window, p_near_k, p_near_v, p_near_pages, near_stride,
    KEY_BITS: constexpr, VALUE_BITS: constexpr, NUM_KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr,
    PAGE_TOKENS: constexpr, HAS_WINDOW: constexpr, NEAR_BLOCK: constexpr, FIRST_TOKENS: constexpr, NEAR_PAGE: constexpr,
    HAS_KEY_BIAS: constexpr, BLOCK_G: constexpr, BLOCK_N: constexpr, BLOCK_D: constexpr, KEY_COLUMNS: constexpr,
    VALUE_COLUMNS: constexpr, PAIR_COLUMNS: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_HEADS: constexpr = NUM_KV_HEADS * GROUP
    HAS_FIRST: constexpr = FIRST_TOKENS > 0
    num_tiles = tl.load(p_tiles)
    o_g = tl.arange(0, BLOCK_G)
    o_n = tl.arange(0, BLOCK_N)
    o_row = o_g // GROUP
    for i_item in range(tl.program_id(0), num_tiles * NUM_KV_HEADS, tl.num_programs(0)):
        i_head = i_item % NUM_KV_HEADS
        table_row, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
            p_tiles, 1 + i_item // NUM_KV_HEADS
        )
        p_row_pages = p_pages + table_row.to(tl.int64) * table_stride
        # Of the first row: other sequences may own earlier pages. First tokens are hidden from all rows.
        seen = low if HAS_FIRST else position - window + 1
        begin = low // BLOCK_N * BLOCK_N if HAS_FIRST else low
        page = pages_of(p_row_pages, begin, o_n, seen, high, HAS_WINDOW, PAGE_TOKENS, BLOCK_N)
        if NEAR_BLOCK > 0:
            near_begin, near_end = near_chunks(position, num_rows, num_splits, NEAR_BLOCK, FIRST_TOKENS, SMALL_CHUNK)
            num_splits = num_splits % SPLIT
            p_row_near = p_near_pages + table_row.to(tl.int64) * near_stride
            o_near, near_page = near_chunk(
                p_row_near, near_begin, near_end, position, num_rows, NEAR_BLOCK, FIRST_TOKENS, NEAR_PAGE, SMALL_CHUNK
            )
        if PDL:
            tl.extra.cuda.gdc_wait()  # tiles and pages are older; queries and new keys come from the last kernel
        m_g = o_row < num_rows
        o_head = i_head * GROUP + o_g % GROUP
        o_q = (row + o_row).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + o_head * HEAD_DIM
        b_q = _queries(p_q, o_q, m_g, scale_log2, 1, KEY_BITS, HEAD_DIM, KEY_COLUMNS, PLAIN)
        if HAS_KEY_BIAS:
            b_even, b_odd = query_waves(
                p_q, o_q, m_g, p_bias + i_head * HEAD_DIM, p_rotation, scale_log2, rotation_scale, 1, KEY_BITS < 8,
                HEAD_DIM, PAIR_COLUMNS,
            )  # fmt: skip
        # Scales are loaded a block ahead, like pages: in a block only the copies of codes wait for memory.
        o_slot = slots_of(page, i_head, low // BLOCK_N * BLOCK_N, o_n, NUM_KV_HEADS, PAGE_TOKENS, BLOCK_N)
        b_ks = tl.load(p_k_scale + o_slot)
        b_vs = tl.load(p_v_scale + o_slot)
        if NEAR_BLOCK > 0:
            b_acc, b_m, b_l = near_small(
                p_q, o_q, m_g, p_near_k, p_near_v, p_row_near, near_begin, near_end, o_near, near_page, position, num_rows,
                o_row, i_head, scale_log2, softcap_log2, window,
                VALUE_BITS, NUM_KV_HEADS, HEAD_DIM, NEAR_BLOCK, FIRST_TOKENS, NEAR_PAGE, HAS_WINDOW, BLOCK_G, BLOCK_D, VALUE_COLUMNS,
            )  # fmt: skip
            b_l_tokens = tl.where(o_n[:, None] == 0, b_l[None, :], 0.0)
        else:
            b_m = tl.full((BLOCK_G,), -float("inf"), dtype=tl.float32)
            b_l_tokens = tl.zeros((BLOCK_N, BLOCK_G), dtype=tl.float32)
            b_acc = ()
            for _ in tl.static_range(2 if VALUE_BITS == 8 else (4 if VALUE_BITS == 4 else 8)):
                b_acc = b_acc + (tl.zeros((VALUE_COLUMNS, BLOCK_G), dtype=tl.float32),)
        # Masked blocks come last. With first tokens only the first block can be masked.
        if HAS_FIRST:
            clear = tl.cdiv(low, BLOCK_N) * BLOCK_N
        else:
            clear = clear_end(low, high, position, HAS_WINDOW, BLOCK_N)
        for MASKED in tl.static_range(1 if HAS_FIRST else 0, -1 if HAS_FIRST else 2, -1 if HAS_FIRST else 1):
            # Count in blocks, so the compiler knows the alignment of tokens.
            first_block = low // BLOCK_N if MASKED == HAS_FIRST else clear // BLOCK_N
            end_block = clear // BLOCK_N if MASKED == HAS_FIRST else tl.cdiv(high, BLOCK_N)
            for i_block in tl.range(first_block, end_block, num_stages=1 if MASKED else NUM_STAGES):
                n = i_block * BLOCK_N
                o_token = n + o_n
                o_slot, m_n, b_ks, b_vs, page, b_next_ks, b_next_vs = _next_block(
                    page, b_ks, b_vs, p_k_scale, p_v_scale, p_row_pages, i_head, n, o_n, o_token, seen, high, MASKED,
                    HAS_WINDOW, HAS_FIRST, NUM_KV_HEADS, PAGE_TOKENS, BLOCK_N,
                )  # fmt: skip
                b_score = _scores(b_q, p_k, p_k_signs, o_slot, m_n, 1, MASKED, KEY_BITS, HEAD_DIM, KEY_COLUMNS, PLAIN)
                b_score = b_score * b_ks.to(tl.float32)[:, None]
                if HAS_KEY_BIAS:
                    b_score += _bias_scores(
                        b_even, b_odd, p_cos, p_sin, p_fragments, i_block, HEAD_DIM, BLOCK_N, PAIR_COLUMNS
                    )
                if softcap_log2 is not None:
                    b_score = soft_capped(b_score, softcap_log2)
                if MASKED:
                    distance = (position + o_row)[None, :] - o_token[:, None]
                    m_seen = (distance >= 0) & m_n[:, None]
                    if HAS_WINDOW:
                        m_seen = m_seen & (distance < window)
                    b_score = tl.where(m_seen, b_score, -float("inf"))
                b_value_scale = b_vs.to(tl.float32)
                b_bound = tl.maximum(fast_log2(b_value_scale, PLAIN), LEAST_LOG2)
                b_m_new = tl.maximum(b_m, tl.max(b_score + b_bound[:, None], axis=0))
                b_m_safe = finite_max(b_m_new) if MASKED else b_m_new
                b_p = fast_exp2(b_score - b_m_safe[None, :], PLAIN)
                b_alpha = fast_exp2(b_m - b_m_safe, PLAIN)
                b_l_tokens = b_l_tokens * b_alpha[None, :] + b_p
                b_p = (b_p * (b_value_scale * P_ONE)[:, None]).to(tl.float16)
                b_acc = _add_values(
                    b_acc, b_p, b_alpha, p_v, p_v_signs, p_rotation + HEAD_DIM * HEAD_DIM, o_slot, m_n, MASKED,
                    VALUE_BITS, HEAD_DIM, VALUE_COLUMNS, PLAIN,
                )  # fmt: skip
                b_m, b_ks, b_vs = b_m_new, b_next_ks, b_next_vs
        b_l = tl.sum(b_l_tokens, axis=0)
        if p_sinks is not None:
            # Add sinks only here: in the running maximum a sink would push p out of the range of half precision.
            b_l = add_sinks(b_l, b_m, p_sinks, o_head, first_partial < 0)
        # If a row sees nothing of a split, its partial is neutral: zeros, with -inf as lse.
        b_scale = 1.0 / tl.where(b_l > 0, b_l * P_ONE, 1.0)
        if first_partial < 0:
            store_rotated(
                b_acc, b_scale, rotation_scale, p_rotation, p_out, o_q, m_g, VALUE_BITS, HEAD_DIM, VALUE_COLUMNS,
                BLOCK_D,
            )  # fmt: skip
        else:
            o_partial = (first_partial + o_row * num_splits).to(tl.int64) * NUM_HEADS + o_head
            store_parts(b_acc, b_scale, p_partial_out, o_partial * HEAD_DIM, m_g, VALUE_BITS, HEAD_DIM, VALUE_COLUMNS)
            tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_g)
    if PDL:
        # Release late: programs of the next kernel would share the multiprocessors unevenly.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # wait even without a tile: the next kernel relies on all earlier ones


@jit
def _prefill_kernel(
    p_q, p_k, p_k_signs, p_k_scale, p_v, p_v_signs, p_v_scale, p_rotation, p_out, p_partial_out, p_partial_lse, p_pages,
    p_tiles, p_bias, p_cos, p_sin, p_near, p_fragments, p_sinks, table_stride, scale_log2, softcap_log2, rotation_scale,
    window, p_near_k, p_near_v, p_near_pages, near_stride,
    KEY_BITS: constexpr, VALUE_BITS: constexpr, NUM_KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr,
    PAGE_TOKENS: constexpr, HAS_WINDOW: constexpr, NEAR_BLOCK: constexpr, FIRST_TOKENS: constexpr, NEAR_PAGE: constexpr,
    HAS_KEY_BIAS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_D: constexpr, KEY_COLUMNS: constexpr,
    VALUE_COLUMNS: constexpr, PAIR_COLUMNS: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_HEADS: constexpr = NUM_KV_HEADS * GROUP
    HAS_FIRST: constexpr = FIRST_TOKENS > 0
    num_small = tl.load(p_tiles)
    num_tiles = tl.load(p_tiles + 1)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_row = o_m // GROUP
    if HAS_KEY_BIAS:
        o_pair = tl.arange(0, PAIR_COLUMNS)[None, :]
        p_cosines = p_near + o_n[:, None] * (HEAD_DIM // 2) + o_pair
        m_near = o_pair < HEAD_DIM // 2
        b_near_cos = tl.load(p_cosines, mask=m_near, other=0.0)
        b_near_sin = tl.load(p_cosines + BLOCK_N * (HEAD_DIM // 2), mask=m_near, other=0.0)
    for i_item in range(tl.program_id(0), num_tiles * NUM_KV_HEADS, tl.num_programs(0)):
        i_head = i_item % NUM_KV_HEADS
        table_row, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
            p_tiles, 1 + num_small + i_item // NUM_KV_HEADS
        )
        p_row_pages = p_pages + table_row.to(tl.int64) * table_stride
        # Of the first row: other sequences may own earlier pages. First tokens are hidden from all rows.
        seen = low if HAS_FIRST else position - window + 1
        begin = low // BLOCK_N * BLOCK_N if HAS_FIRST else low
        page = pages_of(p_row_pages, begin, o_n, seen, high, HAS_WINDOW, PAGE_TOKENS, BLOCK_N)
        if PDL:
            tl.extra.cuda.gdc_wait()  # tiles and pages are older; queries and new keys come from the last kernel
        m_m = o_row < num_rows
        o_head = i_head * GROUP + o_m % GROUP
        o_q = (row + o_row).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + o_head * HEAD_DIM
        b_q = _queries(p_q, o_q, m_m, scale_log2, 0, KEY_BITS, HEAD_DIM, KEY_COLUMNS, PLAIN)
        if HAS_KEY_BIAS:
            b_even, b_odd = query_waves(
                p_q, o_q, m_m, p_bias + i_head * HEAD_DIM, p_rotation, scale_log2, rotation_scale, 0, KEY_BITS < 8,
                HEAD_DIM, PAIR_COLUMNS,
            )  # fmt: skip
            # Rounded to save registers: less than the rounding of the query itself.
            b_even, b_odd = b_even.to(tl.float16), b_odd.to(tl.float16)
        # Scales are loaded a block ahead, like pages.
        o_slot = slots_of(page, i_head, low // BLOCK_N * BLOCK_N, o_n, NUM_KV_HEADS, PAGE_TOKENS, BLOCK_N)
        b_ks = tl.load(p_k_scale + o_slot)
        b_vs = tl.load(p_v_scale + o_slot)
        if NEAR_BLOCK > 0:
            near_begin, near_end = near_chunks(position, num_rows, num_splits, NEAR_BLOCK, FIRST_TOKENS, LARGE_CHUNK)
            num_splits = num_splits % SPLIT
            b_acc, b_m, b_l = near_large(
                p_q, o_q, m_m, p_near_k, p_near_v, p_near_pages + table_row.to(tl.int64) * near_stride,
                near_begin, near_end, position, num_rows, o_row, i_head, scale_log2, softcap_log2, window,
                NUM_KV_HEADS, HEAD_DIM, NEAR_BLOCK, FIRST_TOKENS, NEAR_PAGE, HAS_WINDOW, BLOCK_M, BLOCK_D,
            )  # fmt: skip
        else:
            b_acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
            b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
            b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
        # Masked blocks come last. With first tokens only the first block can be masked.
        if HAS_FIRST:
            clear = tl.cdiv(low, BLOCK_N) * BLOCK_N
        else:
            clear = clear_end(low, high, position, HAS_WINDOW, BLOCK_N)
        for MASKED in tl.static_range(1 if HAS_FIRST else 0, -1 if HAS_FIRST else 2, -1 if HAS_FIRST else 1):
            # Count in blocks, so the compiler knows the alignment of tokens.
            first_block = low // BLOCK_N if MASKED == HAS_FIRST else clear // BLOCK_N
            end_block = clear // BLOCK_N if MASKED == HAS_FIRST else tl.cdiv(high, BLOCK_N)
            for i_block in tl.range(first_block, end_block, num_stages=1 if MASKED else NUM_STAGES):
                n = i_block * BLOCK_N
                o_token = n + o_n
                o_slot, m_n, b_ks, b_vs, page, b_next_ks, b_next_vs = _next_block(
                    page, b_ks, b_vs, p_k_scale, p_v_scale, p_row_pages, i_head, n, o_n, o_token, seen, high, MASKED,
                    HAS_WINDOW, HAS_FIRST, NUM_KV_HEADS, PAGE_TOKENS, BLOCK_N,
                )  # fmt: skip
                b_score = _scores(b_q, p_k, p_k_signs, o_slot, m_n, 0, MASKED, KEY_BITS, HEAD_DIM, KEY_COLUMNS, PLAIN)
                b_score = b_score * b_ks.to(tl.float32)[None, :]
                if HAS_KEY_BIAS:
                    b_turned_even, b_turned_odd, b_all = turned_waves(
                        b_even.to(tl.float32), b_odd.to(tl.float32), p_cos, p_sin, i_block, 0, HEAD_DIM
                    )
                    b_bias = tl.dot(b_turned_even, tl.trans(b_near_cos))
                    b_score += tl.dot(b_turned_odd, tl.trans(b_near_sin), b_bias) + b_all
                if softcap_log2 is not None:
                    b_score = soft_capped(b_score, softcap_log2)
                b_value_scale = b_vs.to(tl.float32)
                b_bound = tl.maximum(fast_log2(b_value_scale, PLAIN), LEAST_LOG2)
                b_seen = b_score + b_bound[None, :]
                if MASKED:
                    distance = (position + o_row)[:, None] - o_token[None, :]
                    m_seen = (distance >= 0) & m_n[None, :]
                    if HAS_WINDOW:
                        m_seen = m_seen & (distance < window)
                    b_seen = tl.where(m_seen, b_seen, -float("inf"))
                b_m_new = tl.maximum(b_m, tl.max(b_seen, axis=1))
                b_m_safe = finite_max(b_m_new) if MASKED else b_m_new
                b_p = fast_exp2(b_score - b_m_safe[:, None], PLAIN)
                if MASKED:
                    # Mask only here: a masked product is not contracted to fma and would round differently than in an
                    # unmasked block. Another cut of the step may leave this block unmasked (batch_invariant).
                    b_p = tl.where(m_seen, b_p, 0.0)
                b_alpha = fast_exp2(b_m - b_m_safe, PLAIN)
                b_l = b_l * b_alpha + tl.sum(b_p, axis=1)
                b_p = (b_p * (b_value_scale * P_ONE)[None, :]).to(tl.float16)
                b_v = _value_rows(
                    p_v, p_v_signs, o_slot, m_n, MASKED, VALUE_BITS, HEAD_DIM, VALUE_COLUMNS, BLOCK_D, PLAIN
                )
                b_acc = tl.dot(b_p, b_v, b_acc * b_alpha[:, None])
                b_m, b_ks, b_vs = b_m_new, b_next_ks, b_next_vs
        if p_sinks is not None:
            # Add sinks only here: in the running maximum a sink would push p out of the range of half precision.
            b_l = add_sinks(b_l, b_m, p_sinks, o_head, first_partial < 0)
        # If a row sees nothing of a split, its partial is neutral: zeros, with -inf as lse.
        b_out = b_acc / tl.where(b_l > 0, b_l * P_ONE, 1.0)[:, None]
        # The halves of a head lie in halves of the block.
        o_dim = o_d // (BLOCK_D // 2) * (HEAD_DIM // 2) + o_d % (BLOCK_D // 2)
        m_d = o_d % (BLOCK_D // 2) < HEAD_DIM // 2
        m_out = m_m[:, None] & m_d[None, :]
        if first_partial < 0:
            if VALUE_BITS < 8:
                p_table = p_rotation + o_dim[:, None] * HEAD_DIM + o_dim[None, :]
                b_table = tl.load(p_table, mask=m_d[:, None] & m_d[None, :], other=0.0).to(tl.float16)
                b_out = tl.dot(b_out.to(tl.float16), b_table) * rotation_scale
            tl.store(p_out + o_q[:, None] + o_dim[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
        else:
            o_partial = (first_partial + o_row * num_splits).to(tl.int64) * NUM_HEADS + o_head
            tl.store(p_partial_out + o_partial[:, None] * HEAD_DIM + o_dim[None, :], b_out, mask=m_out)
            tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        # Release late: programs of the next kernel would share the multiprocessors unevenly.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # wait even without a tile: the next kernel relies on all earlier ones


@jit
def _next_block(
    page, b_ks, b_vs, p_k_scale, p_v_scale, p_row_pages, i_head, n, o_n, o_token, seen, high,
    MASKED: constexpr, HAS_WINDOW: constexpr, HAS_FIRST: constexpr, NUM_KV_HEADS: constexpr, PAGE_TOKENS: constexpr,
    BLOCK_N: constexpr,
):  # fmt: skip
    """Return slots, mask and scales of a block, and page and scales of the next one, loaded a block ahead."""
    m_n = o_token < high if MASKED else o_n >= 0
    if MASKED and (HAS_WINDOW or HAS_FIRST):
        m_n = m_n & (o_token >= seen)  # older tokens may hold anything
    o_slot = slots_of(page, i_head, n, o_n, NUM_KV_HEADS, PAGE_TOKENS, BLOCK_N)
    page = pages_of(p_row_pages, n + BLOCK_N, o_n, seen, high, HAS_WINDOW, PAGE_TOKENS, BLOCK_N)
    o_next = slots_of(page, i_head, n + BLOCK_N, o_n, NUM_KV_HEADS, PAGE_TOKENS, BLOCK_N)
    b_next_ks = tl.load(p_k_scale + o_next)
    b_next_vs = tl.load(p_v_scale + o_next)
    if MASKED:
        b_ks = tl.where(m_n, b_ks, 0.0)
        b_vs = tl.where(m_n, b_vs, 0.0)
    return o_slot, m_n, b_ks, b_vs, page, b_next_ks, b_next_vs


@jit
def _query_part(
    p_q, o_q, m_q, o_c, limit, scale_log2,
    QUERY_AXIS: constexpr, PART: constexpr, NUM_PARTS: constexpr, HEAD_DIM: constexpr,
):  # fmt: skip
    """Load [C, G], or [M, C] if QUERY_AXIS is 0, times the score scale, in half precision and clamped to its range."""
    PART_AXIS: constexpr = 1 - QUERY_AXIS
    m_part = tl.expand_dims(m_q, PART_AXIS) & tl.expand_dims(o_c < limit, QUERY_AXIS)
    o_d = part_dims(o_c, PART, NUM_PARTS, HEAD_DIM)
    p_part = p_q + tl.expand_dims(o_q, PART_AXIS) + tl.expand_dims(o_d, QUERY_AXIS)
    b_q = tl.load(p_part, mask=m_part, other=0.0).to(tl.float32) * scale_log2
    return tl.minimum(tl.maximum(b_q, -65504.0), 65504.0).to(tl.float16)


@jit
def _queries(
    p_q, o_q, m_q, scale_log2,
    QUERY_AXIS: constexpr, KEY_BITS: constexpr, HEAD_DIM: constexpr, KEY_COLUMNS: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Load the parts of the queries that match the parts of the keys."""
    NUM_PARTS: constexpr = 1 if KEY_BITS == 8 else (2 if KEY_BITS == 4 else 4)
    # Small tiles take keys with signs apart as parts of the lower and of the upper half of columns.
    HALVED: constexpr = QUERY_AXIS == 1 and (KEY_BITS == 3 or KEY_BITS == 5) and HEAD_DIM % 32 == 0 and not PLAIN
    COLUMNS: constexpr = HEAD_DIM // 8 if HALVED else HEAD_DIM // NUM_PARTS
    o_c = tl.arange(0, KEY_COLUMNS)
    b_q = ()
    for i in tl.static_range(NUM_PARTS):
        b_q = b_q + (_query_part(p_q, o_q, m_q, o_c, COLUMNS, scale_log2, QUERY_AXIS, i, NUM_PARTS, HEAD_DIM),)
    if HALVED:
        limit = tl.where(o_c < COLUMNS, 2 * COLUMNS, 0)
        for i in tl.static_range(NUM_PARTS):
            b_upper = _query_part(p_q, o_q, m_q, o_c + COLUMNS, limit, scale_log2, QUERY_AXIS, i, NUM_PARTS, HEAD_DIM)
            b_q = b_q + (b_upper,)
    return b_q


@jit
def _scores(
    b_q, p_k, p_signs, o_slot, m_n,
    QUERY_AXIS: constexpr, MASKED: constexpr, KEY_BITS: constexpr, HEAD_DIM: constexpr, KEY_COLUMNS: constexpr,
    PLAIN: constexpr,
):  # fmt: skip
    """Return keys without their scale times queries: [N, G], or [M, N] if QUERY_AXIS is 0."""
    SIGNS: constexpr = HEAD_DIM // 8
    o_c = tl.arange(0, KEY_COLUMNS)
    if QUERY_AXIS == 1 and (KEY_BITS == 3 or KEY_BITS == 5) and HEAD_DIM % 32 == 0 and not PLAIN:
        ROW: constexpr = (KEY_BITS - 1) * SIGNS
        MASK: constexpr = MASKED or SIGNS < KEY_COLUMNS
        b_lower = bytes_at(p_k, o_slot, o_c, m_n, SIGNS, ROW, MASK)
        b_upper = bytes_at(p_k + SIGNS, o_slot, o_c, m_n, SIGNS, ROW, MASK)
        if KEY_BITS == 5:
            b_lower_2 = bytes_at(p_k + 2 * SIGNS, o_slot, o_c, m_n, SIGNS, ROW, MASK)
            b_upper_2 = bytes_at(p_k + 3 * SIGNS, o_slot, o_c, m_n, SIGNS, ROW, MASK)
        b_signs = bytes_at(p_signs, o_slot, o_c, m_n, SIGNS, SIGNS, MASK)
        if KEY_BITS == 5:
            b_keys = key_parts_5_halves(b_lower, b_lower_2, b_upper, b_upper_2, b_signs)
        else:
            b_keys = key_parts_3_halves(b_lower, b_upper, b_signs)
    else:
        b_codes = key_codes(p_k, o_slot, o_c, m_n, MASKED, KEY_BITS, HEAD_DIM, PLAIN)
        if KEY_BITS == 8:
            b_keys = (key_numbers(b_codes, PLAIN),)
        elif KEY_BITS == 4:
            b_keys = key_parts_4(b_codes, o_c, PLAIN)
        elif KEY_BITS == 5:
            b_upper = key_codes(p_k + 2 * SIGNS, o_slot, o_c, m_n, MASKED, KEY_BITS, HEAD_DIM, PLAIN)
            b_signs = bytes_at(p_signs, o_slot, o_c % SIGNS, m_n, SIGNS, SIGNS, MASKED or QUERY_AXIS == 1)
            b_keys = key_parts_5(b_codes, b_upper, b_signs, o_c, SIGNS, PLAIN)
        else:
            b_signs = bytes_at(p_signs, o_slot, o_c % SIGNS, m_n, SIGNS, SIGNS, MASKED or QUERY_AXIS == 1)
            b_keys = key_parts_3(b_codes, b_signs, o_c, SIGNS, PLAIN)
    if QUERY_AXIS == 1:
        b_score = tl.dot(b_keys[0], b_q[0])
        for i in tl.static_range(1, len(b_keys)):
            b_score = tl.dot(b_keys[i], b_q[i], b_score)
    else:
        b_score = tl.dot(b_q[0], tl.trans(b_keys[0]))
        for i in tl.static_range(1, len(b_keys)):
            b_score = tl.dot(b_q[i], tl.trans(b_keys[i]), b_score)
    return b_score


@jit
def _bias_scores(
    b_even, b_odd, p_cos, p_sin, p_fragments, i_block, HEAD_DIM: constexpr, BLOCK_N: constexpr, PAIR_COLUMNS: constexpr
):
    """Return the key bias in the scores of a block: [N, G]."""
    b_even, b_odd, b_all = turned_waves(b_even, b_odd, p_cos, p_sin, i_block, 1, HEAD_DIM)
    b_score = tl.broadcast_to(b_all, (BLOCK_N, b_all.shape[1]))
    # Always true. The compiler does not move a conditional load: hoisted out of the loop, the table would take 128
    # registers per thread; pipelined, it would take the shared memory of other programs.
    if i_block >= 0:
        b_score = tl.dot(near_fragments(p_fragments, BLOCK_N, PAIR_COLUMNS), b_even, b_score)
        p_sines = p_fragments + BLOCK_N * PAIR_COLUMNS
        b_score = tl.dot(near_fragments(p_sines, BLOCK_N, PAIR_COLUMNS), b_odd, b_score)
    return b_score


@jit
def _add_values(
    b_acc, b_p, b_alpha, p_v, p_signs, p_upper, o_slot, m_n,
    MASKED: constexpr, VALUE_BITS: constexpr, HEAD_DIM: constexpr, VALUE_COLUMNS: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Rescale the accumulators and add p times a block of values, part by part."""
    WORDS: constexpr = HEAD_DIM // 2 if VALUE_BITS == 8 else (HEAD_DIM // 4 if VALUE_BITS == 4 else HEAD_DIM // 8)
    o_c = tl.arange(0, VALUE_COLUMNS)
    p_words = p_v + o_slot[None, :] * WORDS + o_c[:, None]
    if MASKED or WORDS < VALUE_COLUMNS:
        b_words = tl.load(p_words, mask=m_n[None, :] & (o_c < WORDS)[:, None], other=0)
    else:
        b_words = tl.load(p_words)
    b_alpha = b_alpha[None, :]
    if VALUE_BITS == 8:
        b_values = value_parts_8(b_words, PLAIN)
    elif VALUE_BITS == 4:
        b_values = value_parts_4(b_words, PLAIN)
    else:
        p_twice = p_signs + o_slot[None, :] * (HEAD_DIM // 16) + (o_c % (HEAD_DIM // 16))[:, None]
        if MASKED or WORDS < VALUE_COLUMNS:
            b_signs = tl.load(p_twice, mask=m_n[None, :] & (o_c < WORDS)[:, None], other=0)
        else:
            b_signs = tl.load(p_twice)
        b_values = value_parts_3(b_words, b_signs, upper_columns(p_upper, o_c), PLAIN)
    b_new = ()
    for i in tl.static_range(len(b_values)):
        b_new = b_new + (tl.dot(b_values[i], b_p, b_acc[i] * b_alpha),)
    return b_new


@jit
def _side_by_side(b_0, b_1):
    """Join two [N, C] to [N, 2 C], columns alternating."""
    return tl.reshape(tl.join(b_0, b_1), (b_0.shape[0], 2 * b_0.shape[1]))


@jit
def _one_after_other(b_0, b_1, BLOCK_D: constexpr):
    """Join two [N, C] to [N, 2 C], the first before the second."""
    return tl.reshape(tl.permute(tl.join(b_0, b_1), (0, 2, 1)), (b_0.shape[0], BLOCK_D))


@jit
def _value_rows(
    p_v, p_signs, o_slot, m_n,
    MASKED: constexpr, VALUE_BITS: constexpr, HEAD_DIM: constexpr, VALUE_COLUMNS: constexpr, BLOCK_D: constexpr,
    PLAIN: constexpr,
):  # fmt: skip
    """Decode values to [N, D] without their scale, in order of coordinates if the head is a power of two."""
    WORDS: constexpr = HEAD_DIM // 2 if VALUE_BITS == 8 else (HEAD_DIM // 4 if VALUE_BITS == 4 else HEAD_DIM // 8)
    o_c = tl.arange(0, VALUE_COLUMNS)
    b_words = bytes_at(p_v, o_slot, o_c, m_n, WORDS, WORDS, MASKED or WORDS < VALUE_COLUMNS)
    if VALUE_BITS == 8:
        b_0, b_1 = value_parts_8(b_words, PLAIN)
        return _one_after_other(b_0, b_1, BLOCK_D)
    elif VALUE_BITS == 4:
        b_0, b_1, b_2, b_3 = value_parts_4(b_words, PLAIN)
        return _one_after_other(_side_by_side(b_0, b_1), _side_by_side(b_2, b_3), BLOCK_D)
    else:
        b_signs = bytes_at(p_signs, o_slot, o_c % (WORDS // 2), m_n, WORDS, WORDS // 2, MASKED)
        b_upper = tl.where(o_c < WORDS // 2, 0, -1).to(tl.int16)[None, :]
        b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = value_parts_3(b_words, b_signs, b_upper, PLAIN)
        b_left = _side_by_side(_side_by_side(b_0, b_2), _side_by_side(b_1, b_3))
        b_right = _side_by_side(_side_by_side(b_4, b_6), _side_by_side(b_5, b_7))
        return _one_after_other(b_left, b_right, BLOCK_D)

"""Prefill attention to quantized pages, in large tiles: codes become operands once for 128 rows of queries and heads.

M rows of a tile: its rows times the heads of a group, N tokens of a block, C columns of words, D head dim
"""

from holdfast.kernels.attention.dequantize import (
    fast_exp2,
    fast_log2,
    key_numbers,
    key_parts_3,
    key_parts_4,
    value_parts_3,
    value_parts_4,
    value_parts_8,
)
from holdfast.kernels.attention.key_bias import query_waves, turned_waves
from holdfast.kernels.attention.quantized_planes import (
    LEAST_LOG2,
    P_ONE,
    bytes_at,
    key_codes,
    pages_of,
    part_dims,
    slots_of,
)
from holdfast.kernels.attention.split_kv import add_sinks, finite_max, load_tile, soft_capped
from holdfast.kernels.triton_compat import constexpr, jit, tl

# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false

# A branch on a constant is taken when the kernel is compiled, so both must stand in an if and an else.
# ruff: noqa: ANN001, ANN201, ANN202, RET505 the arguments of kernels have no types


@jit
def prefill_kernel(
    p_q, p_k, p_k_signs, p_k_scale, p_v, p_v_signs, p_v_scale, p_rotation, p_out, p_partial_out, p_partial_lse, p_pages,
    p_tiles, p_bias, p_cos, p_sin, p_near, p_fragments, p_sinks, table_stride, scale_log2, softcap_log2, rotation_scale,
    window,
    KEY_BITS: constexpr, VALUE_BITS: constexpr, NUM_KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr,
    PAGE_TOKENS: constexpr, HAS_WINDOW: constexpr, HAS_KEY_BIAS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
    BLOCK_D: constexpr, KEY_COLUMNS: constexpr, VALUE_COLUMNS: constexpr, PAIR_COLUMNS: constexpr,
    NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_HEADS: constexpr = NUM_KV_HEADS * GROUP
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
        seen = position - window + 1  # by the first row: other sequences may own earlier pages
        page = pages_of(p_row_pages, low, o_n, seen, high, HAS_WINDOW, PAGE_TOKENS, BLOCK_N)
        if PDL:
            tl.extra.cuda.gdc_wait()  # tiles and pages are older; queries and new keys come from the last kernel
        m_m = o_row < num_rows
        o_head = i_head * GROUP + o_m % GROUP
        o_q = (row + o_row).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + o_head * HEAD_DIM
        b_q = _query_rows(p_q, o_q, m_m, scale_log2, KEY_BITS, HEAD_DIM, KEY_COLUMNS)
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
        b_acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
        b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
        # All rows see the tokens up to the first row's own: whole blocks of them come first, without a mask.
        clear = tl.minimum(high, position + 1)
        if HAS_WINDOW:
            clear = low
        clear = low + tl.maximum(clear - low, 0) // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(2):
            # Count in blocks, so the compiler knows the alignment of tokens.
            first_block = clear // BLOCK_N if MASKED else low // BLOCK_N
            end_block = tl.cdiv(high, BLOCK_N) if MASKED else clear // BLOCK_N
            for i_block in tl.range(first_block, end_block, num_stages=1 if MASKED else NUM_STAGES):
                n = i_block * BLOCK_N
                o_token = n + o_n
                m_n = o_token < high if MASKED else o_n >= 0
                if MASKED and HAS_WINDOW:
                    m_n = m_n & (o_token >= seen)  # older tokens may hold anything
                o_slot = slots_of(page, i_head, n, o_n, NUM_KV_HEADS, PAGE_TOKENS, BLOCK_N)
                page = pages_of(p_row_pages, n + BLOCK_N, o_n, seen, high, HAS_WINDOW, PAGE_TOKENS, BLOCK_N)
                o_next = slots_of(page, i_head, n + BLOCK_N, o_n, NUM_KV_HEADS, PAGE_TOKENS, BLOCK_N)
                b_next_ks = tl.load(p_k_scale + o_next)
                b_next_vs = tl.load(p_v_scale + o_next)
                if MASKED:
                    b_ks = tl.where(m_n, b_ks, 0.0)
                    b_vs = tl.where(m_n, b_vs, 0.0)
                b_score = _row_scores(b_q, p_k, p_k_signs, o_slot, m_n, MASKED, KEY_BITS, HEAD_DIM, KEY_COLUMNS, PLAIN)
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
                    # Only here: a masked product is not contracted to fma and would round differently than in an unmasked
                    # block. Another cut of the step may leave this block unmasked (batch_invariant).
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
            # Only here: in the running maximum a sink would push p out of the range of half precision.
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
        # Not sooner: programs of the next kernel would share the multiprocessors unevenly.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # also without a tile: the next kernel relies on all earlier ones


@jit
def _query_row_part(p_q, o_q, m_m, o_c, PART: constexpr, NUM_PARTS: constexpr, HEAD_DIM: constexpr, scale_log2):
    """[M, C] in half precision, clamped to its range, with the scale of the scores."""
    m_q = m_m[:, None] & (o_c < HEAD_DIM // NUM_PARTS)[None, :]
    o_d = part_dims(o_c, PART, NUM_PARTS, HEAD_DIM)
    b_q = tl.load(p_q + o_q[:, None] + o_d[None, :], mask=m_q, other=0.0).to(tl.float32) * scale_log2
    return tl.minimum(tl.maximum(b_q, -65504.0), 65504.0).to(tl.float16)


@jit
def _query_rows(p_q, o_q, m_m, scale_log2, KEY_BITS: constexpr, HEAD_DIM: constexpr, KEY_COLUMNS: constexpr):
    """The parts of the queries for the parts of the keys."""
    o_c = tl.arange(0, KEY_COLUMNS)
    if KEY_BITS == 8:
        return (_query_row_part(p_q, o_q, m_m, o_c, 0, 1, HEAD_DIM, scale_log2),)
    elif KEY_BITS == 4:
        return (
            _query_row_part(p_q, o_q, m_m, o_c, 0, 2, HEAD_DIM, scale_log2),
            _query_row_part(p_q, o_q, m_m, o_c, 1, 2, HEAD_DIM, scale_log2),
        )
    else:
        return (
            _query_row_part(p_q, o_q, m_m, o_c, 0, 4, HEAD_DIM, scale_log2),
            _query_row_part(p_q, o_q, m_m, o_c, 1, 4, HEAD_DIM, scale_log2),
            _query_row_part(p_q, o_q, m_m, o_c, 2, 4, HEAD_DIM, scale_log2),
            _query_row_part(p_q, o_q, m_m, o_c, 3, 4, HEAD_DIM, scale_log2),
        )


@jit
def _row_scores(
    b_q, p_k, p_signs, o_slot, m_n,
    MASKED: constexpr, KEY_BITS: constexpr, HEAD_DIM: constexpr, KEY_COLUMNS: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """[M, N]: queries times keys without their scale."""
    SIGNS: constexpr = HEAD_DIM // 8
    o_c = tl.arange(0, KEY_COLUMNS)
    b_codes = key_codes(p_k, o_slot, o_c, m_n, MASKED, KEY_BITS, HEAD_DIM, PLAIN)
    if KEY_BITS == 8:
        return tl.dot(b_q[0], tl.trans(key_numbers(b_codes, PLAIN)))
    elif KEY_BITS == 4:
        b_0, b_1 = key_parts_4(b_codes, o_c, PLAIN)
        return tl.dot(b_q[1], tl.trans(b_1), tl.dot(b_q[0], tl.trans(b_0)))
    else:
        b_signs = bytes_at(p_signs, o_slot, o_c % SIGNS, m_n, SIGNS, SIGNS, MASKED)
        b_0, b_1, b_2, b_3 = key_parts_3(b_codes, b_signs, o_c, SIGNS, PLAIN)
        b_score = tl.dot(b_q[1], tl.trans(b_1), tl.dot(b_q[0], tl.trans(b_0)))
        return tl.dot(b_q[3], tl.trans(b_3), tl.dot(b_q[2], tl.trans(b_2), b_score))


@jit
def _side_by_side(b_0, b_1):
    """[N, C] twice: [N, 2 C], columns alternating."""
    return tl.reshape(tl.join(b_0, b_1), (b_0.shape[0], 2 * b_0.shape[1]))


@jit
def _one_after_other(b_0, b_1, BLOCK_D: constexpr):
    """[N, C] twice: [N, 2 C], all of the first before the second."""
    return tl.reshape(tl.permute(tl.join(b_0, b_1), (0, 2, 1)), (b_0.shape[0], BLOCK_D))


@jit
def _value_rows(
    p_v, p_signs, o_slot, m_n,
    MASKED: constexpr, VALUE_BITS: constexpr, HEAD_DIM: constexpr, VALUE_COLUMNS: constexpr, BLOCK_D: constexpr,
    PLAIN: constexpr,
):  # fmt: skip
    """[N, D] without their scale, in the order of coordinates if the head is a power of two."""
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

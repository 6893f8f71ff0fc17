"""Decode attention to quantized pages, in small tiles: tokens are rows of the product, the heads of a GQA group its columns.

G columns: the rows of a tile times the heads of a group, N tokens of a block, C columns of words

One warp computes a tile alone. Scores are keys times queries, [N, G], so eight heads fill an instruction that sixteen rows of
queries would leave half empty. No warp waits for another, and a few shuffles turn p into an operand. A key's scale multiplies
its scores, a value's scale its p. A bound that knows the scales keeps p below 2^14, so half precision holds it for any context.
"""

from holdfast.kernels.attention.dequantize import (
    fast_exp2,
    fast_log2,
    key_numbers,
    key_parts_3,
    key_parts_3_halves,
    key_parts_4,
    upper_columns,
    value_parts_3,
    value_parts_4,
    value_parts_8,
)
from holdfast.kernels.attention.key_bias import near_fragments, query_waves, turned_waves
from holdfast.kernels.attention.quantized_planes import (
    LEAST_LOG2,
    P_ONE,
    bytes_at,
    key_codes,
    pages_of,
    part_dims,
    slots_of,
    store_parts,
    store_rotated,
)
from holdfast.kernels.attention.split_kv import add_sinks, finite_max, load_tile, soft_capped
from holdfast.kernels.triton_compat import constexpr, jit, tl

# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false

# A branch on a constant is taken when the kernel is compiled, so both must stand in an if and an else.
# ruff: noqa: ANN001, ANN201, ANN202, RET505 the arguments of kernels have no types


@jit
def decode_kernel(
    p_q, p_k, p_k_signs, p_k_scale, p_v, p_v_signs, p_v_scale, p_rotation, p_out, p_partial_out, p_partial_lse, p_pages,
    p_tiles, p_bias, p_cos, p_sin, p_near, p_fragments, p_sinks, table_stride, scale_log2, softcap_log2, rotation_scale,
    window,
    KEY_BITS: constexpr, VALUE_BITS: constexpr, NUM_KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr,
    PAGE_TOKENS: constexpr, HAS_WINDOW: constexpr, HAS_KEY_BIAS: constexpr, BLOCK_G: constexpr, BLOCK_N: constexpr,
    BLOCK_D: constexpr, KEY_COLUMNS: constexpr, VALUE_COLUMNS: constexpr, PAIR_COLUMNS: constexpr,
    NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_HEADS: constexpr = NUM_KV_HEADS * GROUP
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
        seen = position - window + 1  # by the first row: other sequences may own earlier pages
        page = pages_of(p_row_pages, low, o_n, seen, high, HAS_WINDOW, PAGE_TOKENS, BLOCK_N)
        if PDL:
            tl.extra.cuda.gdc_wait()  # tiles and pages are older; queries and new keys come from the last kernel
        m_g = o_row < num_rows
        o_head = i_head * GROUP + o_g % GROUP
        o_q = (row + o_row).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + o_head * HEAD_DIM
        b_q = _queries(p_q, o_q, m_g, scale_log2, KEY_BITS, HEAD_DIM, KEY_COLUMNS, PLAIN)
        if HAS_KEY_BIAS:
            b_even, b_odd = query_waves(
                p_q, o_q, m_g, p_bias + i_head * HEAD_DIM, p_rotation, scale_log2, rotation_scale, 1, KEY_BITS < 8,
                HEAD_DIM, PAIR_COLUMNS,
            )  # fmt: skip
        # Scales are loaded a block ahead, like pages: in a block only the copies of codes wait for memory.
        o_slot = slots_of(page, i_head, low // BLOCK_N * BLOCK_N, o_n, NUM_KV_HEADS, PAGE_TOKENS, BLOCK_N)
        b_ks = tl.load(p_k_scale + o_slot)
        b_vs = tl.load(p_v_scale + o_slot)
        b_m = tl.full((BLOCK_G,), -float("inf"), dtype=tl.float32)
        b_l_tokens = tl.zeros((BLOCK_N, BLOCK_G), dtype=tl.float32)
        b_acc = _no_output(VALUE_BITS, VALUE_COLUMNS, BLOCK_G)
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
                b_score = _scores(b_q, p_k, p_k_signs, o_slot, m_n, MASKED, KEY_BITS, HEAD_DIM, KEY_COLUMNS, PLAIN)
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
            # Only here: in the running maximum a sink would push p out of the range of half precision.
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
        # Not sooner: programs of the next kernel would share the multiprocessors unevenly.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # also without a tile: the next kernel relies on all earlier ones


@jit
def _query_part(p_q, o_q, m_g, o_c, limit, PART: constexpr, NUM_PARTS: constexpr, HEAD_DIM: constexpr, scale_log2):
    """[C, G] in half precision, clamped to its range, with the scale of the scores."""
    m_q = m_g[None, :] & (o_c < limit)[:, None]
    o_d = part_dims(o_c, PART, NUM_PARTS, HEAD_DIM)
    b_q = tl.load(p_q + o_q[None, :] + o_d[:, None], mask=m_q, other=0.0).to(tl.float32) * scale_log2
    return tl.minimum(tl.maximum(b_q, -65504.0), 65504.0).to(tl.float16)


@jit
def _queries(
    p_q, o_q, m_g, scale_log2,
    KEY_BITS: constexpr, HEAD_DIM: constexpr, KEY_COLUMNS: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """The parts of the queries for the parts of the keys."""
    o_c = tl.arange(0, KEY_COLUMNS)
    if KEY_BITS == 8:
        return (_query_part(p_q, o_q, m_g, o_c, HEAD_DIM, 0, 1, HEAD_DIM, scale_log2),)
    elif KEY_BITS == 4:
        return (
            _query_part(p_q, o_q, m_g, o_c, HEAD_DIM // 2, 0, 2, HEAD_DIM, scale_log2),
            _query_part(p_q, o_q, m_g, o_c, HEAD_DIM // 2, 1, 2, HEAD_DIM, scale_log2),
        )
    elif HEAD_DIM % 32 == 0 and not PLAIN:
        o_u = o_c + HEAD_DIM // 8
        return (
            _query_part(p_q, o_q, m_g, o_c, HEAD_DIM // 8, 0, 4, HEAD_DIM, scale_log2),
            _query_part(p_q, o_q, m_g, o_c, HEAD_DIM // 8, 1, 4, HEAD_DIM, scale_log2),
            _query_part(p_q, o_q, m_g, o_c, HEAD_DIM // 8, 2, 4, HEAD_DIM, scale_log2),
            _query_part(p_q, o_q, m_g, o_c, HEAD_DIM // 8, 3, 4, HEAD_DIM, scale_log2),
            _query_part(
                p_q, o_q, m_g, o_u, tl.where(o_c < HEAD_DIM // 8, HEAD_DIM // 4, 0), 0, 4, HEAD_DIM, scale_log2
            ),
            _query_part(
                p_q, o_q, m_g, o_u, tl.where(o_c < HEAD_DIM // 8, HEAD_DIM // 4, 0), 1, 4, HEAD_DIM, scale_log2
            ),
            _query_part(
                p_q, o_q, m_g, o_u, tl.where(o_c < HEAD_DIM // 8, HEAD_DIM // 4, 0), 2, 4, HEAD_DIM, scale_log2
            ),
            _query_part(
                p_q, o_q, m_g, o_u, tl.where(o_c < HEAD_DIM // 8, HEAD_DIM // 4, 0), 3, 4, HEAD_DIM, scale_log2
            ),
        )
    else:
        return (
            _query_part(p_q, o_q, m_g, o_c, HEAD_DIM // 4, 0, 4, HEAD_DIM, scale_log2),
            _query_part(p_q, o_q, m_g, o_c, HEAD_DIM // 4, 1, 4, HEAD_DIM, scale_log2),
            _query_part(p_q, o_q, m_g, o_c, HEAD_DIM // 4, 2, 4, HEAD_DIM, scale_log2),
            _query_part(p_q, o_q, m_g, o_c, HEAD_DIM // 4, 3, 4, HEAD_DIM, scale_log2),
        )


@jit
def _scores(
    b_q, p_k, p_signs, o_slot, m_n,
    MASKED: constexpr, KEY_BITS: constexpr, HEAD_DIM: constexpr, KEY_COLUMNS: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """[N, G]: keys without their scale times queries."""
    SIGNS: constexpr = HEAD_DIM // 8
    o_c = tl.arange(0, KEY_COLUMNS)
    if KEY_BITS == 3 and HEAD_DIM % 32 == 0 and not PLAIN:
        ROW: constexpr = 2 * SIGNS
        MASK: constexpr = MASKED or SIGNS < KEY_COLUMNS
        b_lower = bytes_at(p_k, o_slot, o_c, m_n, SIGNS, ROW, MASK)
        b_upper = bytes_at(p_k + SIGNS, o_slot, o_c, m_n, SIGNS, ROW, MASK)
        b_signs = bytes_at(p_signs, o_slot, o_c, m_n, SIGNS, SIGNS, MASK)
        b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = key_parts_3_halves(b_lower, b_upper, b_signs)
        b_score = tl.dot(b_3, b_q[3], tl.dot(b_2, b_q[2], tl.dot(b_1, b_q[1], tl.dot(b_0, b_q[0]))))
        return tl.dot(b_7, b_q[7], tl.dot(b_6, b_q[6], tl.dot(b_5, b_q[5], tl.dot(b_4, b_q[4], b_score))))
    else:
        b_codes = key_codes(p_k, o_slot, o_c, m_n, MASKED, KEY_BITS, HEAD_DIM, PLAIN)
        if KEY_BITS == 8:
            return tl.dot(key_numbers(b_codes, PLAIN), b_q[0])
        elif KEY_BITS == 4:
            b_0, b_1 = key_parts_4(b_codes, o_c, PLAIN)
            return tl.dot(b_1, b_q[1], tl.dot(b_0, b_q[0]))
        else:
            b_signs = bytes_at(p_signs, o_slot, o_c % SIGNS, m_n, SIGNS, SIGNS, True)
            b_0, b_1, b_2, b_3 = key_parts_3(b_codes, b_signs, o_c, SIGNS, PLAIN)
            return tl.dot(b_3, b_q[3], tl.dot(b_2, b_q[2], tl.dot(b_1, b_q[1], tl.dot(b_0, b_q[0]))))


@jit
def _bias_scores(
    b_even, b_odd, p_cos, p_sin, p_fragments, i_block, HEAD_DIM: constexpr, BLOCK_N: constexpr, PAIR_COLUMNS: constexpr
):
    """[N, G]: the bias of the keys in the scores of a block."""
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
def _no_output(VALUE_BITS: constexpr, VALUE_COLUMNS: constexpr, BLOCK_G: constexpr):
    """Zeros for every part: [C, G] each."""
    b = tl.zeros((VALUE_COLUMNS, BLOCK_G), dtype=tl.float32)
    if VALUE_BITS == 8:
        return b, b
    else:
        if VALUE_BITS == 4:
            return b, b, b, b
        else:
            return b, b, b, b, b, b, b, b


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
        b_0, b_1 = value_parts_8(b_words, PLAIN)
        return tl.dot(b_0, b_p, b_acc[0] * b_alpha), tl.dot(b_1, b_p, b_acc[1] * b_alpha)
    else:
        if VALUE_BITS == 4:
            b_0, b_1, b_2, b_3 = value_parts_4(b_words, PLAIN)
            return (
                tl.dot(b_0, b_p, b_acc[0] * b_alpha),
                tl.dot(b_1, b_p, b_acc[1] * b_alpha),
                tl.dot(b_2, b_p, b_acc[2] * b_alpha),
                tl.dot(b_3, b_p, b_acc[3] * b_alpha),
            )
        else:
            p_twice = p_signs + o_slot[None, :] * (HEAD_DIM // 16) + (o_c % (HEAD_DIM // 16))[:, None]
            if MASKED or WORDS < VALUE_COLUMNS:
                b_signs = tl.load(p_twice, mask=m_n[None, :] & (o_c < WORDS)[:, None], other=0)
            else:
                b_signs = tl.load(p_twice)
            b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = value_parts_3(b_words, b_signs, upper_columns(p_upper, o_c), PLAIN)
            return (
                tl.dot(b_0, b_p, b_acc[0] * b_alpha),
                tl.dot(b_1, b_p, b_acc[1] * b_alpha),
                tl.dot(b_2, b_p, b_acc[2] * b_alpha),
                tl.dot(b_3, b_p, b_acc[3] * b_alpha),
                tl.dot(b_4, b_p, b_acc[4] * b_alpha),
                tl.dot(b_5, b_p, b_acc[5] * b_alpha),
                tl.dot(b_6, b_p, b_acc[6] * b_alpha),
                tl.dot(b_7, b_p, b_acc[7] * b_alpha),
            )

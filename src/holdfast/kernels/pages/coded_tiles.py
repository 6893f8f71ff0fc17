"""Where a kernel finds the codes of a tile, and where it puts the sums: pages, slots, the coordinates of a part of a head.

N tokens of a block, C columns of words, G columns of queries
"""

# A branch on a constant is taken when the kernel is compiled, so both must stand in an if and an else.
# ruff: noqa: ANN001, ANN201, RET505 the arguments of kernels have no types

from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl

WEIGHT_ONE = kernel_constant(16384.0)
"""What a weight of one becomes in half precision."""
LEAST_LOG2 = kernel_constant(-24.0)
"""Of a float16 scale that is not zero."""


@jit
def pages_of(p_row_pages, n, o_n, high, PAGE_TOKENS: constexpr, BLOCK_N: constexpr):
    """The page of a block, or of each token of it; read a block ahead, so that no load of keys waits for another load."""
    if PAGE_TOKENS >= BLOCK_N:
        return tl.load(p_row_pages + n // PAGE_TOKENS, mask=n < high, other=0)
    else:
        return tl.load(p_row_pages + (n + o_n) // PAGE_TOKENS, mask=n + o_n < high, other=0)


@jit
def slots_of(page, i_head, n, o_n, NUM_KV_HEADS: constexpr, PAGE_TOKENS: constexpr, BLOCK_N: constexpr):
    """Where a head's tokens lie: pages hold one head after the other."""
    if PAGE_TOKENS >= BLOCK_N:
        return (page.to(tl.int64) * NUM_KV_HEADS + i_head) * PAGE_TOKENS + n % PAGE_TOKENS + o_n
    else:
        return (page.to(tl.int64) * NUM_KV_HEADS + i_head) * PAGE_TOKENS + (n + o_n) % PAGE_TOKENS


@jit
def part_dims(o_c, PART: constexpr, NUM_PARTS: constexpr, HEAD_DIM: constexpr):
    """The coordinates of a part (quant/head_codes.py)."""
    PER_HALF: constexpr = 1 if NUM_PARTS == 1 else NUM_PARTS // 2
    return (PART // PER_HALF) * (HEAD_DIM // 2) + PER_HALF * o_c + PART % PER_HALF


@jit
def bytes_at(p, o_slot, o_c, m_n, limit, ROW: constexpr, MASKED: constexpr):
    """[N, C] of a plane whose rows have ROW bytes."""
    if MASKED:
        return tl.load(p + o_slot[:, None] * ROW + o_c[None, :], mask=m_n[:, None] & (o_c < limit)[None, :], other=0)
    else:
        return tl.load(p + o_slot[:, None] * ROW + o_c[None, :])


@jit
def key_codes(p_k, o_slot, o_c, m_n, MASKED: constexpr, KEY_BITS: constexpr, HEAD_DIM: constexpr, PLAIN: constexpr):
    """[N, C] of the codes of keys, as code_parts.py takes them apart: bytes, or for codes without assembler whole words."""
    ROW: constexpr = HEAD_DIM if KEY_BITS == 8 else (HEAD_DIM // 2 if KEY_BITS == 4 else HEAD_DIM // 4)
    if PLAIN and KEY_BITS < 8:
        p_words = p_k.to(tl.pointer_type(tl.int32)) + o_slot[:, None] * (ROW // 4) + (o_c // 4)[None, :]
        return tl.load(p_words, mask=m_n[:, None] & (o_c < ROW)[None, :], other=0)
    else:
        return bytes_at(p_k, o_slot, o_c, m_n, ROW, ROW, MASKED or o_c.shape[0] > ROW)


@jit
def store_parts(
    b_acc, b_scale, p_partial, o_pair, m_g, VALUE_BITS: constexpr, HEAD_DIM: constexpr, VALUE_COLUMNS: constexpr
):
    """Sums in the order of coordinates, rotated as they are."""
    NUM_PARTS: constexpr = 2 if VALUE_BITS == 8 else (4 if VALUE_BITS == 4 else 8)
    o_c = tl.arange(0, VALUE_COLUMNS)
    m_out = m_g[None, :] & (o_c < HEAD_DIM // NUM_PARTS)[:, None]
    for part in tl.static_range(NUM_PARTS):
        o_d = part_dims(o_c, part, NUM_PARTS, HEAD_DIM)
        tl.store(p_partial + o_pair[None, :] + o_d[:, None], b_acc[part] * b_scale[None, :], mask=m_out)


@jit
def store_rotated(
    b_acc,
    b_scale,
    rotation_scale,
    p_rotation,
    p_out,
    o_q,
    m_g,
    VALUE_BITS: constexpr,
    HEAD_DIM: constexpr,
    VALUE_COLUMNS: constexpr,
    BLOCK_D: constexpr,
):
    """Sums rotated back, in the type of the output."""
    NUM_PARTS: constexpr = 2 if VALUE_BITS == 8 else (4 if VALUE_BITS == 4 else 8)
    o_c = tl.arange(0, VALUE_COLUMNS)
    o_d = tl.arange(0, BLOCK_D)
    m_out = m_g[None, :] & (o_d < HEAD_DIM)[:, None]
    m_c = o_c < HEAD_DIM // NUM_PARTS
    if VALUE_BITS == 8:
        m_part = m_g[None, :] & m_c[:, None]
        for part in tl.static_range(NUM_PARTS):
            o_part = part_dims(o_c, part, NUM_PARTS, HEAD_DIM)
            b_out = (b_acc[part] * b_scale[None, :]).to(p_out.dtype.element_ty)
            tl.store(p_out + o_q[None, :] + o_part[:, None], b_out, mask=m_part)
    else:
        b_out = tl.zeros((BLOCK_D, m_g.shape[0]), dtype=tl.float32)
        for part in tl.static_range(NUM_PARTS):
            o_part = part_dims(o_c, part, NUM_PARTS, HEAD_DIM)
            m_table = (o_d < HEAD_DIM)[:, None] & m_c[None, :]
            b_table = tl.load(p_rotation + o_d[:, None] * HEAD_DIM + o_part[None, :], mask=m_table, other=0.0)
            b_out = tl.dot(b_table.to(tl.float16), (b_acc[part] * b_scale[None, :]).to(tl.float16), b_out)
        b_out = b_out * rotation_scale
        tl.store(p_out + o_q[None, :] + o_d[:, None], b_out.to(p_out.dtype.element_ty), mask=m_out)

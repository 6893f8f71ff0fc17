"""Near tokens in attention over quantized pages: a row sees some tokens exact, those of its own block and the first ones.

S slots of near pages, K key/value heads, D head dim, N rows of the page table, P pages of a row

Near pages (cache/near.py) hold keys and values in the type of the model and in the coordinates of the codes, keys with their
bias. A tile reads them in chunks before its codes, with the same running maximum and sum. So near tokens add no tile, no
partial and no launch. The chunks of a row are those of the first tokens and then those of its own block:

    chunk      0, 1, ...  first tokens | own block ...
    split s    of n reads chunks [s * C // n, (s + 1) * C // n), where C is what a full block has

So the chunks of a split follow from its number alone, whatever other rows a tile has. Rows of a tile share their own block.

In kernels G columns or M rows are the rows of a tile times the heads of a group, X tokens of a chunk, C columns of a part.
"""

from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.attention.quantized_planes import P_ONE, part_dims
from holdfast.kernels.attention.split_kv import finite_max, soft_capped
from holdfast.kernels.geometry import NEAR_SPLIT
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl

SMALL_CHUNK, LARGE_CHUNK = kernel_constant(16), kernel_constant(64)
"""Near tokens that a tile reads at once."""
SPLIT = kernel_constant(NEAR_SPLIT)


class NearPages(NamedTuple):
    """Near planes of a layer, their page table, and which tokens rows read there."""

    k_plane_SKD: Tensor
    v_plane_SKD: Tensor
    page_table_NP: Tensor
    page_tokens: int
    block_tokens: int
    """A row sees the tokens of its own block exact: those from its position // block_tokens * block_tokens on."""
    first_tokens: int
    """A row sees so many tokens at the start exact too; 0 with a window."""


@jit
def near_chunks(
    position, num_rows, packed_splits, NEAR_BLOCK: constexpr, FIRST_TOKENS: constexpr, CHUNK: constexpr
):  # fmt: skip
    """Return the range of chunks that this split reads."""
    FIRST_CHUNKS: constexpr = (FIRST_TOKENS + CHUNK - 1) // CHUNK
    NUM_CHUNKS: constexpr = FIRST_CHUNKS + (NEAR_BLOCK + CHUNK - 1) // CHUNK
    i_split, num_splits = packed_splits // SPLIT, packed_splits % SPLIT
    own = position // NEAR_BLOCK * NEAR_BLOCK
    # Rows of the first block read the first tokens there.
    begin = tl.maximum(i_split * NUM_CHUNKS // num_splits, tl.where(own == 0, FIRST_CHUNKS, 0))
    num_chunks = tl.cdiv(position + num_rows - own, CHUNK) + FIRST_CHUNKS
    return begin, tl.minimum((i_split + 1) * NUM_CHUNKS // num_splits, num_chunks)


@jit
def near_chunk(
    p_row_pages, i_chunk, end, position, num_rows,
    NEAR_BLOCK: constexpr, FIRST_TOKENS: constexpr, NEAR_PAGE: constexpr, CHUNK: constexpr,
):  # fmt: skip
    """Return the tokens of a chunk, and their pages: -1 for what is no near token."""
    FIRST_CHUNKS: constexpr = (FIRST_TOKENS + CHUNK - 1) // CHUNK
    own = position // NEAR_BLOCK * NEAR_BLOCK
    is_first = i_chunk < FIRST_CHUNKS
    o_token = tl.where(is_first, i_chunk * CHUNK, own + (i_chunk - FIRST_CHUNKS) * CHUNK) + tl.arange(0, CHUNK)
    m_x = (o_token < tl.where(is_first, FIRST_TOKENS, position + num_rows)) & (i_chunk < end)
    return o_token, tl.load(p_row_pages + o_token // NEAR_PAGE, mask=m_x, other=-1)


@jit
def _near_rows(page, o_token, i_head, NEAR_PAGE: constexpr, NUM_KV_HEADS: constexpr, HEAD_DIM: constexpr):
    """Return where the rows of a head begin, [X]."""
    return ((page.to(tl.int64) * NEAR_PAGE + o_token % NEAR_PAGE) * NUM_KV_HEADS + i_head) * HEAD_DIM


@jit
def near_small(
    p_q, o_q, m_g, p_k, p_v, p_row_pages, begin, end, o_token, page, position, num_rows, o_row, i_head, scale_log2,
    softcap_log2, window,
    VALUE_BITS: constexpr, NUM_KV_HEADS: constexpr, HEAD_DIM: constexpr, NEAR_BLOCK: constexpr, FIRST_TOKENS: constexpr,
    NEAR_PAGE: constexpr, HAS_WINDOW: constexpr, BLOCK_G: constexpr, BLOCK_D: constexpr, VALUE_COLUMNS: constexpr,
):  # fmt: skip
    """Begin a small tile with its near tokens: accumulators by part [C, G], maxima [G] and sums [G].

    The pages of the first chunk are loaded already.
    """
    b_m = tl.full((BLOCK_G,), -float("inf"), dtype=tl.float32)
    b_l = tl.zeros((BLOCK_G,), dtype=tl.float32)
    b_acc = ()
    for _ in tl.static_range(2 if VALUE_BITS == 8 else (4 if VALUE_BITS == 4 else 8)):
        b_acc = b_acc + (tl.zeros((VALUE_COLUMNS, BLOCK_G), dtype=tl.float32),)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    for i_chunk in tl.range(begin, end, num_stages=1):
        m_x, o_kv = page >= 0, _near_rows(page, o_token, i_head, NEAR_PAGE, NUM_KV_HEADS, HEAD_DIM)
        b_k = tl.load(p_k + o_kv[:, None] + o_d[None, :], mask=m_x[:, None] & m_d[None, :], other=0.0)
        b_values = _value_parts(p_v, o_kv, m_x, VALUE_BITS, HEAD_DIM, VALUE_COLUMNS)
        b_q = tl.load(p_q + o_q[None, :] + o_d[:, None], mask=m_g[None, :] & m_d[:, None], other=0.0)
        distance = (position + o_row)[None, :] - o_token[:, None]
        o_token, page = near_chunk(
            p_row_pages, i_chunk + 1, end, position, num_rows, NEAR_BLOCK, FIRST_TOKENS, NEAR_PAGE, SMALL_CHUNK
        )
        b_score = tl.dot(b_k, b_q) * scale_log2
        if softcap_log2 is not None:
            b_score = soft_capped(b_score, softcap_log2)
        m_seen = (distance >= 0) & m_x[:, None]
        if HAS_WINDOW:
            m_seen = m_seen & (distance < window)
        b_score = tl.where(m_seen, b_score, -float("inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_score, axis=0))
        b_m_safe = finite_max(b_m_new)
        b_p = tl.exp2(b_score - b_m_safe[None, :])
        b_alpha = tl.exp2(b_m - b_m_safe)
        b_l = b_l * b_alpha + tl.sum(b_p, axis=0)
        b_p = (b_p * P_ONE).to(p_v.dtype.element_ty)
        b_new = ()
        for i in tl.static_range(len(b_values)):
            b_new = b_new + (tl.dot(b_values[i], b_p, b_acc[i] * b_alpha[None, :]),)
        b_acc = b_new
        b_m = b_m_new
    return b_acc, b_m, b_l


@jit
def near_large(
    p_q, o_q, m_m, p_k, p_v, p_row_pages, begin, end, position, num_rows, o_row, i_head, scale_log2, softcap_log2, window,
    NUM_KV_HEADS: constexpr, HEAD_DIM: constexpr, NEAR_BLOCK: constexpr, FIRST_TOKENS: constexpr, NEAR_PAGE: constexpr,
    HAS_WINDOW: constexpr, BLOCK_M: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Begin a large tile with its near tokens: the accumulator [M, D], maxima [M] and sums [M]."""
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    o_d = tl.arange(0, BLOCK_D)
    # The halves of a head lie in halves of the block, as those of values from codes do.
    o_dim = o_d // (BLOCK_D // 2) * (HEAD_DIM // 2) + o_d % (BLOCK_D // 2)
    m_d = o_d % (BLOCK_D // 2) < HEAD_DIM // 2
    for i_chunk in tl.range(begin, end, num_stages=1):
        o_token, page = near_chunk(
            p_row_pages, i_chunk, end, position, num_rows, NEAR_BLOCK, FIRST_TOKENS, NEAR_PAGE, LARGE_CHUNK
        )
        m_x, o_kv = page >= 0, _near_rows(page, o_token, i_head, NEAR_PAGE, NUM_KV_HEADS, HEAD_DIM)
        b_q = tl.load(p_q + o_q[:, None] + o_dim[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
        b_k = tl.load(p_k + o_kv[None, :] + o_dim[:, None], mask=m_x[None, :] & m_d[:, None], other=0.0)
        b_score = tl.dot(b_q, b_k) * scale_log2
        if softcap_log2 is not None:
            b_score = soft_capped(b_score, softcap_log2)
        distance = (position + o_row)[:, None] - o_token[None, :]
        m_seen = (distance >= 0) & m_x[None, :]
        if HAS_WINDOW:
            m_seen = m_seen & (distance < window)
        b_score = tl.where(m_seen, b_score, -float("inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_score, axis=1))
        b_m_safe = finite_max(b_m_new)
        b_p = tl.exp2(b_score - b_m_safe[:, None])
        b_alpha = tl.exp2(b_m - b_m_safe)
        b_l = b_l * b_alpha + tl.sum(b_p, axis=1)
        b_v = tl.load(p_v + o_kv[:, None] + o_dim[None, :], mask=m_x[:, None] & m_d[None, :], other=0.0)
        b_acc = tl.dot((b_p * P_ONE).to(b_v.dtype), b_v, b_acc * b_alpha[:, None])
        b_m = b_m_new
    return b_acc, b_m, b_l


@jit
def _value_parts(p_v, o_kv, m_x, VALUE_BITS: constexpr, HEAD_DIM: constexpr, VALUE_COLUMNS: constexpr):
    """Load values as the parts that codes decode to, [C, X] each. Coordinates of a column lie side by side in one word."""
    NUM_PARTS: constexpr = 2 if VALUE_BITS == 8 else (4 if VALUE_BITS == 4 else 8)
    PER_WORD: constexpr = NUM_PARTS // 2
    o_c = tl.arange(0, VALUE_COLUMNS)
    mask = m_x[None, :] & (o_c < HEAD_DIM // NUM_PARTS)[:, None]
    b_parts = ()
    for half in tl.static_range(2):
        if VALUE_BITS == 8:
            p_half = p_v + o_kv[None, :] + part_dims(o_c, half, NUM_PARTS, HEAD_DIM)[:, None]
            b_parts = b_parts + (tl.load(p_half, mask=mask, other=0.0),)
        else:
            word = tl.int32 if VALUE_BITS == 4 else tl.int64
            o_word = o_kv[None, :] // PER_WORD + (half * (HEAD_DIM // 2) // PER_WORD + o_c)[:, None]
            b_words = tl.load(p_v.to(tl.pointer_type(word)) + o_word, mask=mask, other=0)
            for i in tl.static_range(PER_WORD):
                b_bits = (b_words >> (16 * i)).to(tl.int16)
                b_parts = b_parts + (b_bits.to(p_v.dtype.element_ty, bitcast=True),)
    return b_parts

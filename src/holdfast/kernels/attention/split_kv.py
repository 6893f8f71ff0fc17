"""What attention kernels over tiles share, plain or quantized: reading a tile, the online softmax, soft-capping, sinks, the merge of split-KV partials.

H query heads, D head dim, S splits of a row

A partial is the normalized output of a row and head over one split, with the logarithm to base 2 of its softmax's sum (lse).
The partials of a row lie one after the other. In names: m is the running maximum, l the running sum, p what a score or a
partial weighs beside the maximum, alpha what rescales everything before a larger maximum.

A sink is a logit of a query head that joins the sum and has no value. It is added once a row and head, where the sum is
complete: at the end of a tile that is not split, and in the merge of those that are. It may be many times the sum: an
infinite sum gives zeros, which is what is left of such a row in float32.
"""

from holdfast.kernels.geometry import TILE_FIELDS
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl

# ruff: noqa: ANN001, ANN201 the arguments of kernels have no types

MERGE_BY_HEAD_ROWS = 8
"""Steps of so few rows merge one head a program, with all splits side by side."""
MERGED_HEADS = 8
"""Most rows of a larger step are not split: a program that looks at several heads has less to bring up for nothing."""
MERGED_SPLITS = 16
"""Splits of a row that are merged side by side."""
NUM_TILE_FIELDS = kernel_constant(len(TILE_FIELDS))
LOG2_E = 1.4426950408889634
PER_NAT = kernel_constant(LOG2_E)
"""Scores in kernels are to base 2."""
SERIES_BELOW = kernel_constant(0.25)
"""Of tanh: from here on its closed form has lost less than two bits."""


@jit
def load_tile(p_tiles, i_tile):
    """The fields of a tile, in the order of TILE_FIELDS; row 0 of the list is the counts."""
    p_tile = p_tiles + i_tile * NUM_TILE_FIELDS
    table_row = tl.load(p_tile)
    row = tl.load(p_tile + 1)
    num_rows = tl.load(p_tile + 2)
    position = tl.load(p_tile + 3)
    low = tl.load(p_tile + 4)
    high = tl.load(p_tile + 5)
    first_partial = tl.load(p_tile + 6)
    num_splits = tl.load(p_tile + 7)
    return table_row, row, num_rows, position, low, high, first_partial, num_splits


@jit
def finite_max(b_m):
    """What is subtracted from scores: where nothing has been seen yet, -inf minus -inf would be NaN."""
    return tl.where(b_m == -float("inf"), 0.0, b_m)


@jit
def soft_capped(b_score, cap):
    """cap * tanh(score / cap), all to base 2: as exact as float32 near zero, and cap itself far from it."""
    b_x = b_score / cap
    b_size = tl.abs(b_x)
    b_e = tl.exp2(b_size * (-2.0 * PER_NAT))
    b_square = b_x * b_x
    b_series = b_square * (62.0 / 2835.0) - 17.0 / 315.0
    b_series = b_square * (b_square * b_series + 2.0 / 15.0) - 1.0 / 3.0
    b_series = b_size + b_size * b_square * b_series
    b_tanh = tl.where(b_size < SERIES_BELOW, b_series, (1.0 - b_e) / (1.0 + b_e))
    return cap * tl.where(b_x < 0, -b_tanh, b_tanh)


@jit
def add_sinks(b_l, b_m, p_sinks, o_head, is_whole):
    """The sums of these heads with their sinks, in the scale of their maxima; as they are where `is_whole` is not."""
    b_sink = tl.load(p_sinks + o_head, mask=is_whole, other=-float("inf")) * PER_NAT
    return b_l + tl.exp2(b_sink - finite_max(b_m))


@jit
def merge_head(
    p_partial_out,
    p_partial_lse,
    p_sinks,
    first_partial,
    num_splits,
    i_head,
    NUM_HEADS: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_S: constexpr,
    BLOCK_D: constexpr,
):
    """[D]: the output of one row and head, its splits side by side; zeros where there are none.

    `p_sinks` is None where heads have no sinks, here and in `merge_heads`.
    """
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    b_acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    b_m = -float("inf")
    b_l = 0.0
    for first in range(0, num_splits, BLOCK_S):
        m_s = first + o_s < num_splits
        o_partial = (first_partial + first + o_s) * NUM_HEADS + i_head
        b_lse = tl.load(p_partial_lse + o_partial, mask=m_s, other=-float("inf"))
        p_part = p_partial_out + o_partial[:, None] * HEAD_DIM + o_d[None, :]
        b_part = tl.load(p_part, mask=m_s[:, None] & m_d[None, :], other=0.0)
        b_m_new = tl.maximum(b_m, tl.max(b_lse, axis=0))
        b_m_safe = finite_max(b_m_new)
        b_p = tl.exp2(b_lse - b_m_safe)
        b_alpha = tl.exp2(b_m - b_m_safe)
        b_acc = b_acc * b_alpha + tl.sum(b_part * b_p[:, None], axis=0)
        b_l = b_l * b_alpha + tl.sum(b_p, axis=0)
        b_m = b_m_new
    if p_sinks is not None:
        b_l = add_sinks(b_l, b_m, p_sinks, i_head, True)
    return b_acc / tl.where(b_l > 0, b_l, 1.0)


@jit
def merge_heads(
    p_partial_out,
    p_partial_lse,
    p_sinks,
    first_partial,
    num_splits,
    o_head,
    HEAD_AXIS: constexpr,
    NUM_HEADS: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_D: constexpr,
):
    """[heads, D], or [D, heads] where HEAD_AXIS is 1: the outputs of a row, one split after the other."""
    HEADS: constexpr = o_head.shape[0]
    D_AXIS: constexpr = 1 - HEAD_AXIS
    m_head = o_head < NUM_HEADS
    o_d = tl.arange(0, BLOCK_D)
    m_part = tl.expand_dims(m_head, D_AXIS) & tl.expand_dims(o_d < HEAD_DIM, HEAD_AXIS)
    b_acc = tl.zeros((HEADS, BLOCK_D) if HEAD_AXIS == 0 else (BLOCK_D, HEADS), dtype=tl.float32)
    b_m = tl.full((HEADS,), -float("inf"), dtype=tl.float32)
    b_l = tl.zeros((HEADS,), dtype=tl.float32)
    for i_split in range(num_splits):
        o_partial = (first_partial + i_split) * NUM_HEADS + o_head
        b_lse = tl.load(p_partial_lse + o_partial, mask=m_head, other=-float("inf"))
        p_part = p_partial_out + tl.expand_dims(o_partial, D_AXIS) * HEAD_DIM + tl.expand_dims(o_d, HEAD_AXIS)
        b_part = tl.load(p_part, mask=m_part, other=0.0)
        b_m_new = tl.maximum(b_m, b_lse)
        b_m_safe = finite_max(b_m_new)
        b_p = tl.exp2(b_lse - b_m_safe)
        b_alpha = tl.exp2(b_m - b_m_safe)
        b_acc = b_acc * tl.expand_dims(b_alpha, D_AXIS) + b_part * tl.expand_dims(b_p, D_AXIS)
        b_l = b_l * b_alpha + b_p
        b_m = b_m_new
    if p_sinks is not None:
        b_l = add_sinks(b_l, b_m, p_sinks, o_head, m_head)
    return b_acc / tl.expand_dims(tl.where(b_l > 0, b_l, 1.0), D_AXIS)

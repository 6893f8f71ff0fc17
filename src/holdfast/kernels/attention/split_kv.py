"""Split-KV attention: tile fields, online softmax, soft-capping, sinks, and the one merge of partials.

T rows, H query heads, D head dim, C split-KV partials

A partial is the normalized output of a row and head over one split, with the base-2 logarithm of its softmax sum (lse). The
partials of a row are contiguous. Names in kernels: m is the running maximum, l the running sum, p the weight of a score or a
partial, alpha the factor that rescales earlier sums to a new maximum.

A sink is a logit of a query head that joins the sum and has no value. It is added once per row and head when the sum is
complete: at the end of an unsplit tile, or in the merge. If the sum becomes infinite the output is zero.
"""

from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.geometry import TILE_FIELDS
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, next_power_of_two, tl

MERGE_BY_HEAD_ROWS = 8
"""Most rows of a step that merges one head per program, with all splits side by side."""
MERGED_HEADS = 8
"""Heads per program of a larger merge. Most of its rows are not split, so more programs would only add launches."""
MERGED_SPLITS = 16
"""Splits of a row that are merged side by side."""
NUM_TILE_FIELDS = kernel_constant(len(TILE_FIELDS))
LOG2_E = 1.4426950408889634
PER_NAT = kernel_constant(LOG2_E)
"""log2(e): kernels compute scores in base 2."""
SERIES_BELOW = kernel_constant(0.25)
"""Argument below which tanh is a series. Above it the closed form loses less than two bits."""


@jit
def load_tile(p_tiles, i_tile):
    """Load the fields of a tile in the order of TILE_FIELDS; row 0 of the list holds the counts."""
    p_tile = p_tiles + i_tile * NUM_TILE_FIELDS
    table_row, row, num_rows, position = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2), tl.load(p_tile + 3)
    low, high = tl.load(p_tile + 4), tl.load(p_tile + 5)
    first_partial, num_splits = tl.load(p_tile + 6), tl.load(p_tile + 7)
    return table_row, row, num_rows, position, low, high, first_partial, num_splits


@jit
def finite_max(b_m):
    """Replace -inf by 0 before it is subtracted from scores: -inf minus -inf is NaN."""
    return tl.where(b_m == -float("inf"), 0.0, b_m)


@jit
def clear_end(low, high, position, HAS_WINDOW: constexpr, BLOCK_N: constexpr):
    """Return the end of a tile's clear blocks: leading whole blocks that all its rows see, so they need no mask."""
    clear = tl.minimum(high, position + 1)
    if HAS_WINDOW:
        clear = low
    return low + tl.maximum(clear - low, 0) // BLOCK_N * BLOCK_N


@jit
def soft_capped(b_score, cap):
    """Return cap * tanh(score / cap) in base 2, exact to float32 near zero."""
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
    """Add the sinks of these heads to their sums, relative to their maxima; only if `is_whole`."""
    b_sink = tl.load(p_sinks + o_head, mask=is_whole, other=-float("inf")) * PER_NAT
    return b_l + tl.exp2(b_sink - finite_max(b_m))


class MergeShape(NamedTuple):
    """Heads and columns per program of a merge, and how it takes splits."""

    heads: int
    columns: int
    is_side_by_side: bool
    """Load many splits of one head at once; else loop over the splits of several heads."""


def merge_tiles(
    rows_T2: Tensor,
    partials: tuple[Tensor, Tensor],
    out_THD: Tensor,
    shape: MergeShape,
    block_splits: int = MERGED_SPLITS,
    num_warps: int = 4,
    sinks_H: Tensor | None = None,
    rotation: tuple[Tensor | None, float] | None = None,
) -> None:
    """Merge rows that were split and write zeros to padded rows; rows of one split stay as their tile wrote them.

    `rotation`: for pages of the rotated space, the table that rotates outputs back (None: values are not rotated) and its
    scale.
    """
    num_rows, num_heads, head_dim = out_THD.shape
    table, factor = rotation or (None, None)
    _merge_kernel[(num_rows, -(-num_heads // shape.heads), head_dim // shape.columns)](
        out_THD, *partials, sinks_H, rows_T2, table, factor,
        NUM_HEADS=num_heads, HEADS=shape.heads, HEAD_DIM=head_dim, COLUMNS=shape.columns,
        SIDE_BY_SIDE=shape.is_side_by_side, HEAD_AXIS=0 if rotation is None else 1, BLOCK_S=block_splits,
        BLOCK_D=max(16, next_power_of_two(shape.columns)), num_warps=num_warps, **pdl_flags(out_THD),
    )  # fmt: skip


@jit
def _merge_kernel(
    p_out, p_partial_out, p_partial_lse, p_sinks, p_rows, p_rotation, rotation_scale,
    NUM_HEADS: constexpr, HEADS: constexpr, HEAD_DIM: constexpr, COLUMNS: constexpr, SIDE_BY_SIDE: constexpr,
    HEAD_AXIS: constexpr, BLOCK_S: constexpr, BLOCK_D: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_partial = tl.load(p_rows + i_row * 2).to(tl.int64)
    num_splits = tl.load(p_rows + i_row * 2 + 1)
    b_table = None
    if p_rotation is not None:
        b_table = _rotation_table(p_rotation, num_splits, HEAD_DIM, BLOCK_D)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_splits == 1:
        return
    merge_row(
        p_out, p_partial_out, p_partial_lse, p_sinks, b_table, rotation_scale, i_row, first_partial, num_splits,
        NUM_HEADS, HEADS, HEAD_DIM, COLUMNS, SIDE_BY_SIDE, HEAD_AXIS, BLOCK_S, BLOCK_D,
    )  # fmt: skip


@jit
def _rotation_table(p_rotation, num_splits, HEAD_DIM: constexpr, BLOCK_D: constexpr):
    """Load the rotation [D, D] before the partials are ready."""
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    if num_splits > 1:
        p_table = p_rotation + o_d[:, None] * HEAD_DIM + o_d[None, :]
        b_table = tl.load(p_table, mask=m_d[:, None] & m_d[None, :], other=0.0)
    else:
        b_table = tl.zeros((BLOCK_D, BLOCK_D), dtype=p_rotation.dtype.element_ty)
    return b_table


@jit
def merge_row(
    p_out, p_partial_out, p_partial_lse, p_sinks, b_table, rotation_scale, i_row, first_partial, num_splits,
    NUM_HEADS: constexpr, HEADS: constexpr, HEAD_DIM: constexpr, COLUMNS: constexpr, SIDE_BY_SIDE: constexpr,
    HEAD_AXIS: constexpr, BLOCK_S: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Merge one row for a grid (rows, blocks of heads, blocks of columns); zeros if it has no splits.

    `p_sinks` is None if heads have no sinks, `b_table` if outputs are not rotated.
    """
    o_d = tl.arange(0, BLOCK_D)
    if SIDE_BY_SIDE:
        i_head = tl.program_id(1)
        first_column = 0
        if COLUMNS < HEAD_DIM:
            first_column = tl.program_id(2) * BLOCK_D
        b_out = merge_head(
            p_partial_out + first_column, p_partial_lse, p_sinks, first_partial, num_splits, i_head,
            NUM_HEADS, HEAD_DIM, BLOCK_S, BLOCK_D,
        )  # fmt: skip
        if b_table is not None:
            b_out = tl.sum(b_table.to(tl.float32) * b_out[:, None], axis=0) * rotation_scale
        p_y = p_out + (i_row * NUM_HEADS + i_head) * HEAD_DIM + first_column + o_d
        if COLUMNS < HEAD_DIM:
            tl.store(p_y, b_out.to(p_out.dtype.element_ty))
        else:
            tl.store(p_y, b_out.to(p_out.dtype.element_ty), mask=o_d < HEAD_DIM)
    else:
        # With HEAD_AXIS 1 tensor cores rotate all heads at once.
        D_AXIS: constexpr = 1 - HEAD_AXIS
        o_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        b_out = merge_heads(
            p_partial_out, p_partial_lse, p_sinks, first_partial, num_splits, o_head,
            HEAD_AXIS, NUM_HEADS, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        if b_table is not None:
            b_out = tl.dot(b_table.to(tl.float16), b_out.to(tl.float16)) * rotation_scale
        p_y = p_out + tl.expand_dims(i_row * NUM_HEADS + o_head, D_AXIS) * HEAD_DIM + tl.expand_dims(o_d, HEAD_AXIS)
        m_out = tl.expand_dims(o_head < NUM_HEADS, D_AXIS) & tl.expand_dims(o_d < HEAD_DIM, HEAD_AXIS)
        tl.store(p_y, b_out.to(p_out.dtype.element_ty), mask=m_out)


@jit
def merge_head(
    p_partial_out, p_partial_lse, p_sinks, first_partial, num_splits, i_head,
    NUM_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_S: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Return the output [D] of one row and head, with BLOCK_S splits loaded at once; zeros if there are none."""
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
    p_partial_out, p_partial_lse, p_sinks, first_partial, num_splits, o_head,
    HEAD_AXIS: constexpr, NUM_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Return a row's outputs, one split after the other: [heads, D], or [D, heads] if HEAD_AXIS is 1."""
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

"""What kernels over paged latents (MLA) share, plain or quantized: forms of a launch, the merge of split-KV partials.

T rows, N query heads, L latent, C split-KV partials
"""

from typing import NamedTuple

import torch

from holdfast.kernels.attention.split_kv import MERGE_BY_HEAD_ROWS, MERGED_HEADS, merge_head, merge_heads
from holdfast.kernels.attention.tiled_attention import TileWork
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, pdl_launch, supports_pdl, tl

# ruff: noqa: ANN001, ANN201, ANN202 the arguments of kernels have no types

SPREAD_MERGE_ROWS = 64
"""Steps of up to so many rows have many splits of a row, and merge one head a program."""
MERGED_SPLITS, MERGED_COLUMNS = 64, 64
"""Splits and columns that a program merges side by side in steps of few rows, where a row may have hundreds of splits."""


class RowForm(NamedTuple):
    """What of a launch follows from the number of rows, padding included."""

    merges_side_by_side: bool
    """A merge takes many splits of some columns of one head at once."""
    merges_by_head: bool
    """A merge takes one head a program; else several."""


def row_form(num_rows: int) -> RowForm:
    """The form of a step of so many rows. Beyond 16 all forms compute the same to the bit."""
    return RowForm(num_rows <= MERGE_BY_HEAD_ROWS, num_rows <= SPREAD_MERGE_ROWS)


class MergeShape(NamedTuple):
    """What a program of a merge takes."""

    is_side_by_side: bool
    heads: int
    columns: int


def merge_shape(num_rows: int, num_heads: int, latent_dim: int) -> MergeShape:
    """By the form of the step."""
    form = row_form(num_rows)
    heads = 1 if form.merges_by_head else next_power_of_two(min(num_heads, MERGED_HEADS))
    # Whole columns only: the largest power of two that divides the latent.
    columns = min(latent_dim & -latent_dim, MERGED_COLUMNS) if form.merges_side_by_side else latent_dim
    return MergeShape(form.merges_side_by_side, heads, columns)


def merge_latents(
    work: TileWork,
    num_rows: int,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
) -> None:
    """Rows that were split, from their partials; zeros in padded rows. The others stay as their tiles wrote them."""
    _, num_heads, latent_dim = out_TNL.shape
    pdl, shape = supports_pdl(out_TNL), merge_shape(num_rows, num_heads, latent_dim)
    _merge_kernel[(num_rows, -(-num_heads // shape.heads), latent_dim // shape.columns)](
        out_TNL,
        partial_out_CX,
        partial_lse_CH,
        work.rows_T2,
        NUM_HEADS=num_heads,
        HEADS=shape.heads,
        LATENT_DIM=latent_dim,
        SIDE_BY_SIDE=shape.is_side_by_side,
        BLOCK_S=MERGED_SPLITS,
        BLOCK_D=next_power_of_two(shape.columns),
        PDL=pdl,
        num_warps=4,
        **pdl_launch(pdl),
    )


@jit
def _merge_kernel(
    p_out,
    p_partial_out,
    p_partial_lse,
    p_rows,
    NUM_HEADS: constexpr,
    HEADS: constexpr,
    LATENT_DIM: constexpr,
    SIDE_BY_SIDE: constexpr,
    BLOCK_S: constexpr,
    BLOCK_D: constexpr,
    PDL: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_partial = tl.load(p_rows + i_row * 2).to(tl.int64)
    num_splits = tl.load(p_rows + i_row * 2 + 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_splits == 1:
        return
    merge_row(
        p_out,
        p_partial_out,
        p_partial_lse,
        i_row,
        first_partial,
        num_splits,
        NUM_HEADS,
        HEADS,
        LATENT_DIM,
        SIDE_BY_SIDE,
        BLOCK_S,
        BLOCK_D,
    )


@jit
def merge_row(
    p_out,
    p_partial_out,
    p_partial_lse,
    i_row,
    first_partial,
    num_splits,
    NUM_HEADS: constexpr,
    HEADS: constexpr,
    LATENT_DIM: constexpr,
    SIDE_BY_SIDE: constexpr,
    BLOCK_S: constexpr,
    BLOCK_D: constexpr,
):
    """What of a row falls to this program of a grid (rows, blocks of heads, blocks of columns); zeros where it has no splits."""
    o_d = tl.arange(0, BLOCK_D)
    p_sinks = None
    if SIDE_BY_SIDE:
        i_head = tl.program_id(1)
        first_column = tl.program_id(2) * BLOCK_D
        b_out = merge_head(
            p_partial_out + first_column,
            p_partial_lse,
            p_sinks,
            first_partial,
            num_splits,
            i_head,
            NUM_HEADS,
            LATENT_DIM,
            BLOCK_S,
            BLOCK_D,
        )
        p_y = p_out + (i_row * NUM_HEADS + i_head) * LATENT_DIM + first_column + o_d
        tl.store(p_y, b_out.to(p_out.dtype.element_ty))
    else:
        o_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        b_out = merge_heads(
            p_partial_out, p_partial_lse, p_sinks, first_partial, num_splits, o_head, 0, NUM_HEADS, LATENT_DIM, BLOCK_D
        )
        p_y = p_out + (i_row * NUM_HEADS + o_head)[:, None] * LATENT_DIM + o_d[None, :]
        m_out = (o_head < NUM_HEADS)[:, None] & (o_d < LATENT_DIM)[None, :]
        tl.store(p_y, b_out.to(p_out.dtype.element_ty), mask=m_out)

"""What kernels of compressed attention (DeepSeek-V4) share: the two scopes of a row, their splits, the merge of partials with sinks.

T rows, N query heads, D head dim, R rotated elements, K entries that a row attends to at the most, C split-KV partials

A row at position p sees the newest tokens of a window, its own included, and the entries that end at its own token or before it:
all (p + 1) // ratio of them, or those that a list names where there are more than K. Both scopes are one row of places,
entries first, and a split has some neighbours of them. All of it follows from a position: nothing is planned by the host, and the number of
splits follows from the number of rows, so that a graph serves rows of any length.
"""

from typing import NamedTuple

import torch

from holdfast.kernels.geometry import BLOCK_TOKENS
from holdfast.kernels.latent.compressed_geometry import compressed_splits
from holdfast.kernels.latent.latent_planes import LatentPlanes
from holdfast.kernels.latent.latent_tiles import merge_row, merge_shape
from holdfast.kernels.triton_compat import (
    constexpr,
    jit,
    jit_counting,
    kernel_constant,
    next_power_of_two,
    pdl_launch,
    supports_pdl,
    tl,
)

# ruff: noqa: ANN001, ANN201, ANN202 the arguments of kernels have no types

MERGED_SPLITS = kernel_constant(32)
"""That are merged side by side."""
SPLIT_UNIT = kernel_constant(BLOCK_TOKENS)
"""Places that splits are multiples of: a block of the kernels that are made for it."""


class CompressedRows(NamedTuple):
    """The rows of a step on the device, in memory that stays where it is."""

    table_rows_T: torch.Tensor
    """int32: the row of the page tables of each row's sequence."""
    positions_T: torch.Tensor
    """int32: the row's own; -1: padding, whose output is zeros."""


class Scopes(NamedTuple):
    """What rows of one layer attend to."""

    window_size: int
    window: LatentPlanes
    window_table_NP: torch.Tensor
    ratio: int = 0
    """Tokens of an entry; 0: the layer has no entries."""
    entries: LatentPlanes | None = None
    entries_table_NP: torch.Tensor | None = None
    selected_TK: torch.Tensor | None = None
    """int32: entries of every row that sees more than K of them, -1 for none; None: all are attended to."""


def choose_splits(q_TND: torch.Tensor, partial_lse_CH: torch.Tensor, num_sms: int) -> int:
    """`compressed_splits` of these queries, for which there must be room."""
    num_rows, num_heads, _ = q_TND.shape
    num_splits = compressed_splits(num_rows, num_heads, num_sms)
    needed, there = num_rows * num_heads * num_splits, partial_lse_CH.numel()
    assert num_splits == 1 or needed <= there, f"{needed} partials of rows and heads, and room for {there}"
    return num_splits


def merge_scopes(
    scopes: Scopes,
    rows: CompressedRows,
    num_splits: int,
    sinks_N: torch.Tensor,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TND: torch.Tensor,
) -> None:
    """Every row from the partials of its splits and the sinks; zeros in padded rows."""
    num_rows, num_heads, head_dim = out_TND.shape
    pdl, shape = supports_pdl(out_TND), merge_shape(num_rows, num_heads, head_dim)
    _merge_kernel[(num_rows, -(-num_heads // shape.heads), head_dim // shape.columns)](
        out_TND,
        partial_out_CX,
        partial_lse_CH,
        sinks_N,
        rows.positions_T,
        list_length(scopes),
        num_splits,
        WINDOW=scopes.window_size,
        RATIO=scopes.ratio,
        LISTED=scopes.selected_TK is not None,
        NUM_HEADS=num_heads,
        HEADS=shape.heads,
        HEAD_DIM=head_dim,
        SIDE_BY_SIDE=shape.is_side_by_side,
        BLOCK_D=next_power_of_two(shape.columns),
        PDL=pdl,
        num_warps=4,
        **pdl_launch(pdl),
    )


def list_length(scopes: Scopes) -> int:
    """K, or 0 where rows attend to all entries."""
    return 0 if scopes.selected_TK is None else scopes.selected_TK.shape[1]


@jit
def row_places(position, num_listed, WINDOW: constexpr, RATIO: constexpr, LISTED: constexpr):
    """Tokens of the window, entries that a row sees, and places of both scopes; none of a padded row."""
    num_window = tl.maximum(tl.minimum(position + 1, WINDOW), 0)
    num_entries = num_window * 0
    num_places = num_window
    if RATIO > 0:
        num_entries = tl.maximum(position + 1, 0) // RATIO
        num_taken = num_entries
        if LISTED:
            num_taken = tl.minimum(num_entries, num_listed)
        num_places = num_window + num_taken
    return num_window, num_entries, num_places


@jit
def split_size(num_places, num_splits):
    """Places of every split of a row but the last one that has any."""
    return ((num_places + num_splits - 1) // num_splits + SPLIT_UNIT - 1) // SPLIT_UNIT * SPLIT_UNIT


@jit_counting("num_splits", "num_listed")
def _merge_kernel(
    p_out,
    p_partial_out,
    p_partial_lse,
    p_sinks,
    p_positions,
    num_listed,
    num_splits,
    WINDOW: constexpr,
    RATIO: constexpr,
    LISTED: constexpr,
    NUM_HEADS: constexpr,
    HEADS: constexpr,
    HEAD_DIM: constexpr,
    SIDE_BY_SIDE: constexpr,
    BLOCK_D: constexpr,
    PDL: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _, _, num_places = row_places(tl.load(p_positions + i_row), num_listed, WINDOW, RATIO, LISTED)
    size = tl.maximum(split_size(num_places, num_splits), 1)
    merge_row(
        p_out,
        p_partial_out,
        p_partial_lse,
        p_sinks,
        i_row,
        i_row * num_splits,
        (num_places + size - 1) // size,  # splits behind the last place have written nothing
        NUM_HEADS,
        HEADS,
        HEAD_DIM,
        SIDE_BY_SIDE,
        MERGED_SPLITS,
        BLOCK_D,
    )

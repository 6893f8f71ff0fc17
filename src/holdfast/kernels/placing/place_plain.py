"""Triton kernels for rows of a checkpoint that are copied or converted, and for their peak (kernels/placing/place_rows.py).

A call is one launch, allocates nothing and waits for nothing. R rows, C all of their columns, K those that are kept. Rows
may lie anyhow: loads follow the axis that is dense, stores the columns of the target.
"""

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

import torch

from holdfast.kernels.numbers.number_bits import (
    EXPONENT_BITS,
    as_bits,
    as_kernels_read,
    finite_bits,
    narrowed_bits,
)
from holdfast.kernels.placing.row_launch import RowLaunch, Tile, jit_for_rows
from holdfast.kernels.placing.row_tiles import numbers_at, report_rows, tile_place
from holdfast.kernels.triton_compat import constexpr, tl

WIDE, MIDDLE, NARROW, TALL = Tile(1, 4096, 4), Tile(16, 256, 4), Tile(256, 16, 4), Tile(64, 64, 4)
"""Of dense rows by width, and of rows whose columns lie apart."""


def place_plain_triton(
    rows_RK: torch.Tensor,
    out_RK: torch.Tensor,
    first_row: int,
    nonfinite: torch.Tensor,
    differing: torch.Tensor,
    verify: bool,
) -> None:
    """`place_plain` of the columns that are kept: bit by bit in the same type, exponents as numbers, else rounded once."""
    launch = plain_launch(rows_RK.dtype, out_RK.dtype, rows_RK.shape[1], rows_RK.stride(), out_RK.stride(), verify)
    x_RK = as_bits(rows_RK) if rows_RK.dtype == out_RK.dtype else as_kernels_read(rows_RK)
    launch.start(rows_RK.shape[0], x_RK, as_bits(out_RK), nonfinite, differing, first_row)


def plain_launch(
    source: torch.dtype,
    target: torch.dtype,
    num_columns: int,
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    verify: bool,
) -> RowLaunch:
    """The launch for rows of one kind, which leads with p_x, p_y, p_nonfinite, p_differing and first_row."""
    tile = _plain_tile(num_columns, strides)
    return RowLaunch(
        _place_plain_kernel,
        tile,
        -(-num_columns // tile.columns),
        (num_columns, *strides, *out_strides),
        (
            "" if source == target else str(target).removeprefix("torch."),
            EXPONENT_BITS.get(target, 0),
            verify,
            tile.rows,
            tile.columns,
        ),
    )


def find_peak_triton(rows_RC: torch.Tensor, peak: torch.Tensor) -> None:
    """`find_peak`; magnitudes are compared as integers."""
    launch = peak_launch(rows_RC.shape[1], rows_RC.stride())
    launch.start(rows_RC.shape[0], as_kernels_read(rows_RC), as_bits(peak))


def peak_launch(num_columns: int, strides: tuple[int, ...]) -> RowLaunch:
    """The launch for rows of one kind, which leads with p_x and p_peak."""
    tile = _plain_tile(num_columns, strides)
    column_tiles = -(-num_columns // tile.columns)
    return RowLaunch(_find_peak_kernel, tile, column_tiles, (num_columns, *strides), (tile.rows, tile.columns))


def _plain_tile(num_columns: int, strides: tuple[int, ...]) -> Tile:
    if strides[1] != 1 and strides[0] == 1:
        return TALL
    return WIDE if num_columns >= 1024 else MIDDLE if num_columns >= 64 else NARROW


@jit_for_rows
def _place_plain_kernel(
    p_x,
    p_y,
    p_nonfinite,
    p_differing,
    first_row,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    y_row_stride,
    y_column_stride,
    TARGET: constexpr,
    EXPONENT: constexpr,
    VERIFY: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    i_row, i_start = tile_place(num_columns, ROWS, BLOCK)
    i_column = i_start + tl.arange(0, BLOCK)
    m_x = (i_row < num_rows)[:, None] & (i_column < num_columns)[None, :]
    i_row64, i_column64 = i_row.to(tl.int64)[:, None], i_column.to(tl.int64)[None, :]
    b_bits = tl.load(p_x + i_row64 * row_stride + i_column64 * column_stride, mask=m_x, other=0)
    if TARGET != "":
        b_bits = narrowed_bits(b_bits, TARGET)
    if EXPONENT != 0:
        m_bad = tl.max(((b_bits & EXPONENT) == EXPONENT).to(tl.int32), axis=1) > 0
        report_rows(p_nonfinite, first_row + i_row, m_bad)
    p_out = p_y + i_row64 * y_row_stride + i_column64 * y_column_stride
    if VERIFY:
        m_bad = tl.max(((tl.load(p_out, mask=m_x, other=0) != b_bits) & m_x).to(tl.int32), axis=1) > 0
        report_rows(p_differing, first_row + i_row, m_bad)
    else:
        tl.store(p_out, b_bits, mask=m_x)


@jit_for_rows
def _find_peak_kernel(p_x, p_peak, num_rows, num_columns, row_stride, column_stride, ROWS: constexpr, BLOCK: constexpr):
    i_row, i_start = tile_place(num_columns, ROWS, BLOCK)
    i_column = i_start + tl.arange(0, BLOCK)
    p_rows = p_x + i_row.to(tl.int64)[:, None] * row_stride
    b_x = numbers_at(p_rows, i_column, i_row < num_rows, num_columns, column_stride)
    tl.atomic_max(p_peak, tl.max(tl.max(finite_bits(b_x), axis=1), axis=0), sem="relaxed")

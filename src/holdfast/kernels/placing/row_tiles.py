"""The tile of rows and columns that a program of a load works on: where it lies, its numbers, and rows to be reported.

R rows, C columns of a tile
"""

# ruff: noqa: ANN001, ANN201 the arguments of kernels have no types

from holdfast.kernels.numbers.number_bits import float32_of
from holdfast.kernels.triton_compat import constexpr, jit, tl


@jit
def tile_place(num_columns, ROWS: constexpr, BLOCK: constexpr):
    """The rows of this program's tile [R], and its first column; tiles of the same rows are neighbours."""
    num_blocks = tl.cdiv(num_columns, BLOCK)
    i_row = tl.program_id(0) // num_blocks * ROWS + tl.arange(0, ROWS)
    return i_row, tl.program_id(0) % num_blocks * BLOCK


@jit
def numbers_at(p_rows, i_column, m_row, num_columns, column_stride):
    """Columns [C] of rows that begin at p_rows [R, 1], in float32; zeros where no row or no column is."""
    m_x = m_row[:, None] & (i_column < num_columns)[None, :]
    return float32_of(tl.load(p_rows + i_column.to(tl.int64)[None, :] * column_stride, mask=m_x, other=0))


@jit
def report_rows(p_finding, i_row, m_row):
    """Lower a finding to the first of these rows that the mask has."""
    tl.atomic_min(p_finding + tl.zeros_like(i_row), i_row, mask=m_row, sem="relaxed")

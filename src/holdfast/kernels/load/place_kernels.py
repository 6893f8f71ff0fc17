"""Triton kernels of kernels/load/place_rows.py.

R rows, C the columns that scales depend on, K those that are kept

A call is one launch, allocates nothing and does not synchronize. Loads follow the dense axis of the rows, stores the columns
of the target.

Triton looks up the specialization at every launch over tensors. Loading launches thousands over the same kind of rows, so
`RowLaunch` takes addresses, looks up once, and reuses the compiled program while all addresses stay aligned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.fp8 import (
    EXPONENT_BITS,
    LEAST_SCALE,
    as_bits,
    as_kernels_read,
    e2m1_of,
    e4m3_of,
    finite_bits,
    float32_of,
    int8_of,
    narrowed_bits,
    size_bits,
)
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, kernel_constant, next_power_of_two, tl, triton
from holdfast.quant.weight_quantize import E8M0_MOST, LEAST_INT8_SCALE
from holdfast.quant.weight_schemes import WeightScheme

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


@jit
def tile_place(num_columns, ROWS: constexpr, BLOCK: constexpr):
    """Return the rows of this program's tile [R] and its first column; tiles of the same rows are neighbours."""
    num_blocks = tl.cdiv(num_columns, BLOCK)
    i_row = tl.program_id(0) // num_blocks * ROWS + tl.arange(0, ROWS)
    return i_row, tl.program_id(0) % num_blocks * BLOCK


@jit
def numbers_at(p_rows, i_column, m_row, num_columns, column_stride):
    """Load columns [C] of rows that begin at p_rows [R, 1] in float32; zeros outside."""
    m_x = m_row[:, None] & (i_column < num_columns)[None, :]
    return float32_of(tl.load(p_rows + i_column.to(tl.int64)[None, :] * column_stride, mask=m_x, other=0))


@jit
def report_rows(p_finding, i_row, m_row):
    """Lower a finding to the first row that the mask marks."""
    tl.atomic_min(p_finding + tl.zeros_like(i_row), i_row, mask=m_row, sem="relaxed")


UNSPECIALIZED = ("first_row", "num_rows", "p_scales", "p_amax", "p_nonfinite", "p_differing")
"""Arguments that change between calls and give the compiler nothing to specialize on."""
ALIGNMENT_BYTES = 16
"""Triton specializes on addresses that are multiples of this."""


UNSEEN = 2**31 - 1
"""Value of a finding with no faulty row."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Lowest faulty rows of one move, counted from its first row; UNSEEN for none. Both are [1] int32."""

    nonfinite: Tensor
    """First row with NaN or infinity, or that overflows to infinity in a narrower type."""
    differing: Tensor
    """First row that differs from the stored one when verifying."""


class Tile(NamedTuple):
    """Rows and columns per loop iteration of a program, and its warps."""

    rows: int
    columns: int
    num_warps: int


class Pointer:
    """Device address that kernels accept in place of a tensor."""

    __slots__ = ("address", "dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self.address = 0
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


def jit_for_rows(function: Callable[..., Any]) -> Any:  # noqa: ANN401 a kernel is launched by subscript, which no type describes
    """Apply triton.jit without a specialization for UNSPECIALIZED arguments."""
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(do_not_specialize=[name for name in UNSPECIALIZED if name in names])(function)


class RowLaunch:
    """Launch of a kernel with fixed constants. Arguments: leading ones, the number of rows, counts, constants."""

    __slots__ = ("_column_tiles", "_kernel", "_num_warps", "_program", "_rest", "_tile_rows")

    def __init__(
        self,
        kernel: Any,  # noqa: ANN401 as above
        tile: Tile,
        column_tiles: int,
        counts: tuple[int, ...],
        constants: tuple[object, ...],
    ) -> None:
        self._kernel = kernel
        self._tile_rows = tile.rows
        self._num_warps = tile.num_warps
        self._column_tiles = column_tiles
        self._rest = (*counts, *constants)
        self._program: Any = None
        """Program compiled for aligned addresses, once looked up."""

    def start(self, num_rows: int, *leading: object) -> Any:  # noqa: ANN401 Triton's program, or None in the interpreter
        """Launch over tensors, or nothing if there are no rows."""
        num_programs = -(-num_rows // self._tile_rows) * self._column_tiles
        if num_programs == 0:
            return None
        return self._kernel[(num_programs,)](*leading, num_rows, *self._rest, num_warps=self._num_warps)

    def start_at(self, num_rows: int, addresses: int, *leading: object) -> None:
        """Launch over `Pointer`s; `addresses` is the bitwise or of all that Triton specializes on."""
        if addresses % ALIGNMENT_BYTES:
            self.start(num_rows, *leading)
        elif self._program is None:
            self._program = self.start(num_rows, *leading)
        else:
            num_programs = -(-num_rows // self._tile_rows) * self._column_tiles
            if num_programs:
                self._program[(num_programs, 1, 1)](*leading, num_rows, *self._rest)


WIDE, MIDDLE, NARROW, TALL = Tile(1, 4096, 4), Tile(16, 256, 4), Tile(256, 16, 4), Tile(64, 64, 4)
"""Tiles for dense rows by width, and for rows with strided columns (TALL)."""


def place_plain_triton(rows_RK: Tensor, out_RK: Tensor, first_row: int, findings: Findings, verify: bool) -> None:
    """Like `place_plain`, for the kept columns."""
    launch = plain_launch(rows_RK.dtype, out_RK.dtype, rows_RK.shape[1], rows_RK.stride(), out_RK.stride(), verify)
    x_RK = as_bits(rows_RK) if rows_RK.dtype == out_RK.dtype else as_kernels_read(rows_RK)
    launch.start(rows_RK.shape[0], x_RK, as_bits(out_RK), findings.nonfinite, findings.differing, first_row)


def plain_launch(
    source: torch.dtype,
    target: torch.dtype,
    num_columns: int,
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    verify: bool,
) -> RowLaunch:
    """Return the launch for rows of one kind; it leads with p_x, p_y, p_nonfinite, p_differing and first_row."""
    tile = _plain_tile(num_columns, strides)
    counts = (num_columns, *strides, *out_strides)
    name = "" if source == target else str(target).removeprefix("torch.")
    constants = (name, EXPONENT_BITS.get(target, 0), verify, tile.rows, tile.columns)
    return RowLaunch(_place_plain_kernel, tile, -(-num_columns // tile.columns), counts, constants)


def find_amax_triton(rows_RC: Tensor, amax: Tensor) -> None:
    """Like `find_amax`; the kernel compares magnitudes as integers."""
    launch = amax_launch(rows_RC.shape[1], rows_RC.stride())
    launch.start(rows_RC.shape[0], as_kernels_read(rows_RC), as_bits(amax))


def amax_launch(num_columns: int, strides: tuple[int, ...]) -> RowLaunch:
    """Return the launch for rows of one kind; it leads with p_x and p_amax."""
    tile = _plain_tile(num_columns, strides)
    column_tiles = -(-num_columns // tile.columns)
    return RowLaunch(_find_amax_kernel, tile, column_tiles, (num_columns, *strides), (tile.rows, tile.columns))


def _plain_tile(num_columns: int, strides: tuple[int, ...]) -> Tile:
    if strides[1] != 1 and strides[0] == 1:
        return TALL
    return WIDE if num_columns >= 1024 else MIDDLE if num_columns >= 64 else NARROW


@jit_for_rows
def _place_plain_kernel(
    p_x, p_y, p_nonfinite, p_differing,
    first_row, num_rows, num_columns, row_stride, column_stride, y_row_stride, y_column_stride,
    TARGET: constexpr, EXPONENT: constexpr, VERIFY: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
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
def _find_amax_kernel(p_x, p_amax, num_rows, num_columns, row_stride, column_stride, ROWS: constexpr, BLOCK: constexpr):
    i_row, i_start = tile_place(num_columns, ROWS, BLOCK)
    i_column = i_start + tl.arange(0, BLOCK)
    p_rows = p_x + i_row.to(tl.int64)[:, None] * row_stride
    b_x = numbers_at(p_rows, i_column, i_row < num_rows, num_columns, column_stride)
    tl.atomic_max(p_amax, tl.max(tl.max(finite_bits(b_x), axis=1), axis=0), sem="relaxed")


LEAST_INT8 = kernel_constant(LEAST_INT8_SCALE)
MOST_E8M0 = kernel_constant(E8M0_MOST)
WHOLE_ROWS = (Tile(4, 1024, 4), Tile(2, 2048, 4), Tile(1, 4096, 4), Tile(1, 8192, 8), Tile(1, 16384, 16))
"""Tiles for rows that fit into registers."""
LONG_ROW = Tile(1, 8192, 8)
"""Tile for longer rows, which are read twice, the second time from the cache."""
TALL_ROWS = Tile(16, 512, 8)
"""Tile for rows with strided columns: 16 adjacent rows fill sectors, and a few hundred rows still fill a GPU."""
WIDE_BLOCKS, TALL_BLOCKS = Tile(1, 2048, 4), Tile(32, 64, 4)
"""Tiles for scales of 32 columns: dense rows, and rows with strided columns."""


def place_quantized_triton(
    rows_RC: Tensor,
    kept: tuple[int, int],
    scheme: WeightScheme,
    codes: Tensor,
    scales: Tensor,
    amax: Tensor | None,
    first_row: int,
    findings: Findings,
    verify: bool,
) -> None:
    """Like `place_quantized`; rows have all columns that their scales depend on, `kept` counts in these."""
    check_dense(codes, scales)
    if codes.numel() == 0:
        return
    planes = as_kernels_read(rows_RC), as_bits(codes), as_bits(scales)
    row_amax = () if scheme.block_columns else (None if amax is None else as_bits(amax),)
    launch = codes_launch(scheme, rows_RC.shape[1], kept, rows_RC.stride(), verify)
    launch.start(rows_RC.shape[0], *planes, *row_amax, findings.nonfinite, findings.differing, first_row)


def codes_launch(
    scheme: WeightScheme, num_columns: int, kept: tuple[int, int], strides: tuple[int, ...], verify: bool
) -> RowLaunch:
    """Return the launch for rows of one kind; it leads with p_x, p_codes, p_scales, p_nonfinite, p_differing, first_row.

    Without blocks of columns p_amax, or None, comes before p_nonfinite.
    """
    counts = (num_columns, kept[0], kept[1] - kept[0], *strides)
    if scheme.block_columns == 0:
        tile = _row_tile(num_columns, strides)
        constants = (scheme.code_dtype == "int8", num_columns <= tile.columns, verify, tile.rows, tile.columns)
        return RowLaunch(_by_row_kernel, tile, 1, counts, constants)
    if scheme.scale_is_power_of_two:
        tile = WIDE_BLOCKS if strides[1] == 1 else TALL_BLOCKS
        constants = (verify, tile.rows, tile.columns, scheme.block_columns)
        return RowLaunch(_by_power_kernel, tile, -(-num_columns // tile.columns), counts, constants)
    size = scheme.block_rows * scheme.block_columns
    tile = Tile(scheme.block_rows, scheme.block_columns, min(8, next_power_of_two(max(1, size // 1024))))
    constants = (verify, tile.rows, tile.columns)
    return RowLaunch(_by_block_kernel, tile, -(-num_columns // tile.columns), counts, constants)


def _row_tile(num_columns: int, strides: tuple[int, ...]) -> Tile:
    if strides[1] != 1 and strides[0] == 1:
        return TALL_ROWS
    return next((tile for tile in WHOLE_ROWS if num_columns <= tile.columns), LONG_ROW)


@jit_for_rows
def _by_row_kernel(
    p_x, p_codes, p_scales, p_amax, p_nonfinite, p_differing,
    first_row, num_rows, num_columns, kept_start, num_kept, row_stride, column_stride,
    IS_INT8: constexpr, IS_ONE_SWEEP: constexpr, VERIFY: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Quantize with a scale per row, from its largest number or from the amax of the tensor."""
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < num_rows
    p_rows = p_x + i_row.to(tl.int64)[:, None] * row_stride
    p_out = p_codes + i_row.to(tl.int64)[:, None] * num_kept
    o_block = tl.arange(0, BLOCK)
    b_amax, b_largest = tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32)
    if IS_ONE_SWEEP:
        b_x = numbers_at(p_rows, o_block, m_row, num_columns, column_stride)
        b_largest = tl.max(size_bits(b_x), axis=1)
        b_amax = tl.max(finite_bits(b_x), axis=1)
    elif p_amax is None:
        for start in range(0, num_columns, BLOCK):
            b_x = numbers_at(p_rows, start + o_block, m_row, num_columns, column_stride)
            b_largest = tl.maximum(b_largest, tl.max(size_bits(b_x), axis=1))
            b_amax = tl.maximum(b_amax, tl.max(finite_bits(b_x), axis=1))
    if p_amax is not None:
        b_amax = tl.zeros_like(b_amax) + tl.load(p_amax)
    b_scale = _scale_of(b_amax.to(tl.float32, bitcast=True), IS_INT8)
    b_differs = tl.zeros((ROWS,), tl.int32)
    if IS_ONE_SWEEP:
        b_differs = _put_codes(p_out, b_x, b_scale, o_block - kept_start, num_kept, m_row, IS_INT8, VERIFY)
    else:
        for start in range(0, num_columns, BLOCK):
            i_column = start + o_block
            b_x = numbers_at(p_rows, i_column, m_row, num_columns, column_stride)
            if p_amax is not None:
                b_largest = tl.maximum(b_largest, tl.max(size_bits(b_x), axis=1))
            b_differs |= _put_codes(p_out, b_x, b_scale, i_column - kept_start, num_kept, m_row, IS_INT8, VERIFY)
    _put_scales(
        p_scales + i_row, b_scale.to(tl.int32, bitcast=True), m_row, b_differs, first_row + i_row, p_differing, VERIFY
    )
    report_rows(p_nonfinite, first_row + i_row, b_largest >= 0x7F800000)


@jit_for_rows
def _by_block_kernel(
    p_x, p_codes, p_scales, p_nonfinite, p_differing,
    first_row, num_rows, num_columns, kept_start, num_kept, row_stride, column_stride,
    VERIFY: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Quantize one block of rows and columns that share a scale."""
    i_row, i_start = tile_place(num_columns, ROWS, BLOCK)
    i_column = i_start + tl.arange(0, BLOCK)
    m_row = i_row < num_rows
    i_row64 = i_row.to(tl.int64)[:, None]
    b_x = numbers_at(p_x + i_row64 * row_stride, i_column, m_row, num_columns, column_stride)
    b_amax = tl.max(tl.max(finite_bits(b_x), axis=1), axis=0)
    b_scale = _scale_of((tl.zeros((ROWS,), tl.int32) + b_amax).to(tl.float32, bitcast=True), False)
    p_out = p_codes + i_row64 * num_kept
    b_differs = _put_codes(p_out, b_x, b_scale, i_column - kept_start, num_kept, m_row, False, VERIFY)
    # The scale is one number; the first row stands for all.
    m_first = tl.arange(0, ROWS) == 0
    p_scale = p_scales + tl.program_id(0) + tl.zeros_like(i_row)
    _put_scales(p_scale, b_scale.to(tl.int32, bitcast=True), m_first, b_differs, first_row + i_row, p_differing, VERIFY)
    report_rows(p_nonfinite, first_row + i_row, tl.max(size_bits(b_x), axis=1) >= 0x7F800000)


@jit_for_rows
def _by_power_kernel(
    p_x, p_codes, p_scales, p_nonfinite, p_differing,
    first_row, num_rows, num_columns, kept_start, num_kept, row_stride, column_stride,
    VERIFY: constexpr, ROWS: constexpr, BLOCK: constexpr, WIDTH: constexpr,
):  # fmt: skip
    """Quantize to e2m1, two codes to a byte, with an exponent for every `WIDTH` columns of a row."""
    i_row, i_start = tile_place(num_columns, ROWS, BLOCK)
    m_row = i_row < num_rows
    i_row64 = i_row.to(tl.int64)[:, None]
    b_x = numbers_at(p_x + i_row64 * row_stride, i_start + tl.arange(0, BLOCK), m_row, num_columns, column_stride)
    m_bad = tl.max(size_bits(b_x), axis=1) >= 0x7F800000
    b_x = tl.reshape(b_x, (ROWS, BLOCK // WIDTH, WIDTH))
    b_exponent = (tl.max(finite_bits(b_x), axis=2) + 0x200000 >> 23) - 2
    b_exponent = tl.minimum(tl.maximum(b_exponent, 0), MOST_E8M0)
    b_code = e2m1_of(b_x * (254 - b_exponent << 23).to(tl.float32, bitcast=True)[:, :, None])
    b_code = tl.reshape(b_code << 4 * (tl.arange(0, WIDTH) % 2)[None, None, :], (ROWS, BLOCK // 2, 2))
    b_byte = tl.sum(b_code, axis=2).to(tl.uint8)
    i_byte = (i_start - kept_start) // 2 + tl.arange(0, BLOCK // 2)
    m_byte = m_row[:, None] & ((i_byte >= 0) & (i_byte < num_kept // 2))[None, :]
    p_out = p_codes + i_row64 * (num_kept // 2) + i_byte[None, :]
    i_block = i_start // WIDTH + tl.arange(0, BLOCK // WIDTH)
    num_scales = tl.cdiv(num_columns, WIDTH)
    m_scale = m_row[:, None] & (i_block < num_scales)[None, :]
    p_scale = p_scales + i_row64 * num_scales + i_block[None, :]
    b_scale = b_exponent.to(tl.uint8)
    if VERIFY:
        m_differs = (tl.load(p_out, mask=m_byte, other=0) != b_byte) & m_byte
        m_scale_differs = (tl.load(p_scale, mask=m_scale, other=0) != b_scale) & m_scale
        b_differs = tl.max(m_differs.to(tl.int32), axis=1) + tl.max(m_scale_differs.to(tl.int32), axis=1)
        report_rows(p_differing, first_row + i_row, b_differs > 0)
    else:
        tl.store(p_out, b_byte, mask=m_byte)
        tl.store(p_scale, b_scale, mask=m_scale)
    report_rows(p_nonfinite, first_row + i_row, m_bad)


@jit
def _scale_of(b_amax, IS_INT8: constexpr):
    """Return the scale that maps an amax to the largest code; never 0."""
    b_scale = tl.div_rn(b_amax, tl.full(b_amax.shape, 127.0 if IS_INT8 else 448.0, tl.float32))
    return tl.maximum(b_scale, LEAST_INT8 if IS_INT8 else LEAST_SCALE)


@jit
def _put_codes(p_out, b_x, b_scale, i_kept, num_kept, m_row, IS_INT8: constexpr, VERIFY: constexpr):
    """Store codes of a tile to the kept columns, or return 1 for every row that differs."""
    b_quotient = tl.div_rn(b_x, tl.broadcast_to(b_scale[:, None], b_x.shape))
    b_code = (int8_of(b_quotient) if IS_INT8 else e4m3_of(b_quotient)).to(tl.uint8)
    m_code = m_row[:, None] & ((i_kept >= 0) & (i_kept < num_kept))[None, :]
    b_differs = tl.zeros(b_scale.shape, tl.int32)
    if VERIFY:
        b_there = tl.load(p_out + i_kept[None, :], mask=m_code, other=0)
        b_differs = tl.max(((b_there != b_code) & m_code).to(tl.int32), axis=1)
    else:
        tl.store(p_out + i_kept[None, :], b_code, mask=m_code)
    return b_differs


@jit
def _put_scales(p_scale, b_bits, m_scale, b_differs, i_row, p_differing, VERIFY: constexpr):
    """Store the bits of scales, one per row, or report rows whose scale or codes differ."""
    if VERIFY:
        m_other = (tl.load(p_scale, mask=m_scale, other=0) != b_bits) & m_scale
        report_rows(p_differing, i_row, m_other | (b_differs > 0))
    else:
        tl.store(p_scale, b_bits, mask=m_scale)

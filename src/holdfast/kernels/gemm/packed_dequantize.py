"""Rows of packed weights dequantized by one kernel: pieces for a plain product, and rows of a table by id.

R rows, K columns, B bytes of codes, T tokens

A scheme is a `CodeForm`: how codes lie in bytes. `_number` applies scales and minima, selected by its family at compile
time. Results equal quant/packed_values.py to the bit: products of scale and code are exact in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.fp8 import as_bits, as_kernels_read, e4m3_value, float32_of, narrowed_bits
from holdfast.kernels.packed_kernels import DEQUANTIZED_FAMILIES
from holdfast.kernels.triton_compat import constexpr, jit, jit_counting, kernel_constant, tl
from holdfast.quant.packed_blocks import E2M1_VALUES, NONLINEAR_VALUES
from holdfast.quant.packed_schemes import PackedScheme
from holdfast.quant.packed_weight import PackedPart

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

BLOCK_BYTES = 256
"""Bytes of codes of a row in a program."""
BLOCK_ROWS = 4
"""Rows in a program."""
EXTRA_BITS = ("fifth", "third", "high")
"""Planes that hold upper bits of codes."""


def table_words(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return sixteen signed bytes as four words."""
    data = bytes(value & 0xFF for value in values)
    return tuple(int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, 16, 4))


E2M1_0, E2M1_1, E2M1_2, E2M1_3 = (kernel_constant(word) for word in table_words(E2M1_VALUES))
"""Twice the numbers of e2m1."""
LINES_0, LINES_1, LINES_2, LINES_3 = (kernel_constant(word) for word in table_words(NONLINEAR_VALUES))


class CodeForm(NamedTuple):
    """How codes lie in bytes."""

    per_byte: int
    half: int
    """Bytes of a run whose low codes come before the next ones; 1: neighbours."""


def code_form(scheme: PackedScheme) -> CodeForm:
    """Return how a scheme's codes lie. Quarters are runs of 32 bytes."""
    per_byte = scheme.plane("codes").columns
    return CodeForm(per_byte, 32 if per_byte == 4 else scheme.half_bytes)


def takes(scheme: PackedScheme) -> bool:
    """Return True if the kernel dequantizes a scheme: not grids, nor groups in an order of their own."""
    return scheme.family in DEQUANTIZED_FAMILIES and not scheme.order_groups


def dequantize_piece(part: PackedPart, matrix: int, rows: tuple[int, int], out_RK: Tensor) -> Tensor:
    """Fill `out_RK` with rows [start, end) of a part of one matrix, rounded once to its type."""
    start, end = rows
    assert out_RK.shape == (end - start, part.shape[-1]), f"{out_RK.shape=}: {rows} of {part.shape}"
    _launch(part, None, matrix * part.num_rows + start, 0, out_RK)
    return out_RK


def dequantize_ids(ids_T: Tensor, part: PackedPart, out_TK: Tensor, first_row: int | None = None) -> Tensor:
    """Fill row t of `out_TK` with row ids_T[t]; with `first_row` the part is a rank's share, and other rows are zeros."""
    assert out_TK.shape == (len(ids_T), part.shape[-1]), f"{out_TK.shape=} {ids_T.shape=} {part.shape=}"
    _launch(part, ids_T, first_row or 0, part.num_rows if first_row is not None else 0, out_TK)
    return out_TK


def _launch(part: PackedPart, ids_T: Tensor | None, first_row: int, share_rows: int, out_RK: Tensor) -> None:
    """Launch a program for each block of rows and bytes."""
    scheme, (num_rows, size_k) = part.scheme, out_RK.shape
    assert out_RK.stride(1) == 1, f"{out_RK.stride()=}: columns lie apart"
    if not num_rows:
        return
    form, planes = code_form(scheme), named_planes(part)
    codes = as_bits(planes["codes"])
    extra = next((planes[name] for name in EXTRA_BITS if name in planes), codes)
    scales = planes.get("scales", planes.get("sub", codes))
    tensors = (
        codes,
        extra,
        as_kernels_read(scales),
        *(planes.get(name, codes) for name in ("mins", "zeros", "d", "dmin", "second")),
    )
    num_bytes = codes.shape[-1]
    _dequantize_kernel[(-(-num_rows // BLOCK_ROWS), -(-num_bytes // BLOCK_BYTES))](
        *tensors, codes if ids_T is None else ids_T, as_bits(out_RK), num_rows, first_row, share_rows, size_k,
        out_RK.stride(0),
        FAMILY=scheme.family, TARGET=str(out_RK.dtype).removeprefix("torch."), PER_BYTE=form.per_byte, HALF=form.half,
        GROUP=scheme.group_columns or -1, MIDDLE=scheme.middle, HAS_ZEROS="zeros" in planes, SECOND=scheme.second,
        SIGNED=planes["codes"].dtype == torch.int8, HAS_IDS=ids_T is not None, BLOCK_R=BLOCK_ROWS, BLOCK_B=BLOCK_BYTES, num_warps=4,
    )  # fmt: skip


def named_planes(part: PackedPart) -> dict[str, Tensor]:
    """Return a part's planes by name."""
    return {plane.name: tensor for plane, tensor in zip(part.scheme.planes, part.planes, strict=True)}


@jit_counting("num_rows", "first_row", "share_rows")
def _dequantize_kernel(
    p_codes, p_extra, p_scales, p_mins, p_zeros, p_d, p_dmin, p_second, p_ids, p_out,
    num_rows, first_row, share_rows, size_k, out_stride,
    FAMILY: constexpr, TARGET: constexpr, PER_BYTE: constexpr, HALF: constexpr, GROUP: constexpr, MIDDLE: constexpr,
    HAS_ZEROS: constexpr, SECOND: constexpr, SIGNED: constexpr, HAS_IDS: constexpr, BLOCK_R: constexpr, BLOCK_B: constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    m_r = o_r < num_rows
    row_bytes = (size_k + PER_BYTE - 1) // PER_BYTE
    m_mine = m_r
    if HAS_IDS:
        b_row = tl.load(p_ids + o_r, mask=m_r, other=0).to(tl.int64) - first_row
        if share_rows > 0:
            m_mine = m_r & (b_row >= 0) & (b_row < share_rows)
        b_row = tl.where(m_mine, b_row, 0)[:, None]
    else:
        b_row = (tl.where(m_r, o_r, 0).to(tl.int64) + first_row)[:, None]
    m_b = (o_b < row_bytes)[None, :]
    b_codes = (
        tl.load(p_codes + b_row * row_bytes + o_b[None, :], mask=m_mine[:, None] & m_b, other=0).to(tl.int32) & 255
    )
    p_rows = p_out + o_r.to(tl.int64)[:, None] * out_stride
    for i in tl.static_range(PER_BYTE):
        if HALF == 1:
            o_k = o_b * PER_BYTE + i
        else:
            o_k = o_b // HALF * (PER_BYTE * HALF) + i * HALF + o_b % HALF
        b_code = b_codes >> (i * (8 // PER_BYTE))
        if PER_BYTE > 1:
            b_code = b_code & ((1 << (8 // PER_BYTE)) - 1)
        m_k = m_mine[:, None] & (o_k < size_k)[None, :]
        b_y = _number(
            p_extra, p_scales, p_mins, p_zeros, p_d, p_dmin, p_second, b_code, b_row, o_k[None, :], m_k, size_k,
            FAMILY, GROUP, MIDDLE, HAS_ZEROS, SECOND, SIGNED,
        )  # fmt: skip
        b_y = tl.where(m_mine[:, None], b_y, 0.0)
        tl.store(p_rows + o_k[None, :], narrowed_bits(b_y, TARGET), mask=m_r[:, None] & (o_k < size_k)[None, :])


@jit
def _loaded(p_plane, b_row, row_elements, o_element, m_k):
    """Load an element of a plane for each column."""
    return tl.load(p_plane + b_row * row_elements + o_element, mask=m_k, other=0)


@jit
def _table_byte(b_code, W_0: constexpr, W_1: constexpr, W_2: constexpr, W_3: constexpr):
    """Look up one of sixteen signed bytes, as float32."""
    b_word = tl.where(b_code < 8, tl.where(b_code < 4, W_0, W_1), tl.where(b_code < 12, W_2, W_3))
    b_word = b_word.to(tl.int32) >> (8 * (b_code & 3))
    return (b_word << 24 >> 24).to(tl.float32)


@jit
def _block_exponent(b_byte):
    """Return half of 2^(e - 127): two scales are subnormal numbers."""
    b_bits = tl.where(b_byte < 2, 0x200000 << (b_byte & 1), (b_byte - 1) << 23)
    return b_bits.to(tl.float32, bitcast=True)


@jit
def _number(
    p_extra, p_scales, p_mins, p_zeros, p_d, p_dmin, p_second, b_code, b_row, o_k, m_k, size_k,
    FAMILY: constexpr, GROUP: constexpr, MIDDLE: constexpr, HAS_ZEROS: constexpr, SECOND: constexpr, SIGNED: constexpr,
):  # fmt: skip
    """Return the numbers of codes (int32) of some columns in float32."""
    if FAMILY == "q5_0" or FAMILY == "q5_1":
        b_code |= (_loaded(p_extra, b_row, size_k // 8, o_k // 8, m_k).to(tl.int32) >> (o_k % 8) & 1) << 4
    elif FAMILY == "q5_k":
        b_bits = _loaded(p_extra, b_row, size_k // 8, o_k // 256 * 32 + o_k % 32, m_k).to(tl.int32)
        b_code |= (b_bits >> (o_k % 256 // 32) & 1) << 4
    elif FAMILY == "q3_k":
        b_bits = _loaded(p_extra, b_row, size_k // 8, o_k // 256 * 32 + o_k % 32, m_k).to(tl.int32)
        b_code |= (b_bits >> (o_k % 256 // 32) & 1) << 2
    elif FAMILY == "q6_k":
        b_bits = _loaded(p_extra, b_row, size_k // 4, o_k // 128 * 32 + o_k % 32, m_k).to(tl.int32)
        b_code |= (b_bits >> (2 * (o_k % 128 // 32)) & 3) << 4
    if (
        FAMILY == "q2_k"
        or FAMILY == "q3_k"
        or FAMILY == "q4_k"
        or FAMILY == "q5_k"
        or FAMILY == "q6_k"
        or FAMILY == "iq4_xs"
    ):
        b_d = _loaded(p_d, b_row, size_k // 256, o_k // 256, m_k).to(tl.float32)
    if FAMILY == "q2_k" or FAMILY == "q4_k" or FAMILY == "q5_k":
        b_dmin = _loaded(p_dmin, b_row, size_k // 256, o_k // 256, m_k).to(tl.float32)
    if FAMILY == "q2_k":
        b_sub = _loaded(p_scales, b_row, size_k // 16, o_k // 16, m_k).to(tl.int32)
        b_y = b_d * (b_sub & 15).to(tl.float32) * b_code.to(tl.float32) - b_dmin * (b_sub >> 4 & 15).to(tl.float32)
    elif FAMILY == "q3_k":
        o_sub = o_k % 256 // 16
        o_block = o_k // 256 * 12
        b_low = _loaded(p_scales, b_row, size_k // 256 * 12, o_block + o_sub % 8, m_k).to(tl.int32)
        b_high = _loaded(p_scales, b_row, size_k // 256 * 12, o_block + 8 + o_sub % 4, m_k).to(tl.int32)
        b_sub = (b_low >> (o_sub // 8 * 4) & 15) | (b_high >> (o_sub // 4 * 2) & 3) << 4
        b_y = b_d * (b_sub - 32).to(tl.float32) * (b_code - 4).to(tl.float32)
    elif FAMILY == "q4_k" or FAMILY == "q5_k":
        b_sub = _loaded(p_scales, b_row, size_k // 32, o_k // 32, m_k).to(tl.float32)
        b_min = _loaded(p_mins, b_row, size_k // 32, o_k // 32, m_k).to(tl.float32)
        b_y = b_d * b_sub * b_code.to(tl.float32) - b_dmin * b_min
    elif FAMILY == "q6_k":
        b_sub = _loaded(p_scales, b_row, size_k // 16, o_k // 16, m_k).to(tl.float32)
        b_y = b_d * b_sub * (b_code - 32).to(tl.float32)
    elif FAMILY == "iq4_xs":
        b_sub = _loaded(p_scales, b_row, size_k // 32, o_k // 32, m_k).to(tl.float32)
        b_y = b_d * b_sub * _table_byte(b_code, LINES_0, LINES_1, LINES_2, LINES_3)
    else:
        # One scale a group; -1: a row is a group.
        if GROUP > 0:
            o_group = o_k // GROUP
            num_groups = (size_k + GROUP - 1) // GROUP
        else:
            o_group = o_k * 0
            num_groups = 1
        b_scale = _loaded(p_scales, b_row, num_groups, o_group, m_k)
        if FAMILY == "q4_0":
            b_y = b_scale.to(tl.float32) * (b_code - 8).to(tl.float32)
        elif FAMILY == "q5_0":
            b_y = b_scale.to(tl.float32) * (b_code - 16).to(tl.float32)
        elif FAMILY == "q4_1" or FAMILY == "q5_1":
            b_min = _loaded(p_mins, b_row, num_groups, o_group, m_k).to(tl.float32)
            b_y = b_scale.to(tl.float32) * b_code.to(tl.float32) + b_min
        elif FAMILY == "q8_0":
            b_y = b_scale.to(tl.float32) * (b_code << 24 >> 24).to(tl.float32)
        elif FAMILY == "iq4_nl":
            b_y = b_scale.to(tl.float32) * _table_byte(b_code, LINES_0, LINES_1, LINES_2, LINES_3)
        elif FAMILY == "block_mxfp4":
            b_y = _table_byte(b_code, E2M1_0, E2M1_1, E2M1_2, E2M1_3) * _block_exponent(b_scale.to(tl.int32) & 255)
        elif FAMILY == "mxfp4":
            b_byte = b_scale.to(tl.int32) & 255
            b_bits = tl.where(b_byte == 0, 0x400000, b_byte << 23)
            b_y = _e2m1(b_code) * b_bits.to(tl.float32, bitcast=True)
        elif FAMILY == "block_nvfp4":
            b_byte = b_scale.to(tl.int32) & 255
            b_half = e4m3_value(b_byte & 127) * 0.5
            b_half = tl.where(b_byte == 127, 0.0, tl.where(b_byte == 255, 240.0, b_half))
            b_y = b_half * _table_byte(b_code, E2M1_0, E2M1_1, E2M1_2, E2M1_3)
            if SECOND == "values_times":
                b_y = b_y * _loaded(p_second, b_row, 1, o_group * 0, m_k)
        elif FAMILY == "nvfp4":
            b_second = _loaded(p_second, b_row, 1, o_group * 0, m_k)
            b_scale = e4m3_value(b_scale.to(tl.int32) & 255)
            if SECOND == "scales_over":
                b_scale = tl.div_rn(b_scale, tl.where(m_k, b_second, 1.0))
            else:
                b_scale = b_scale * b_second
            b_y = _e2m1(b_code) * b_scale
        elif FAMILY == "fp8":
            b_y = e4m3_value(b_code & 255) * float32_of(b_scale)
        else:
            tl.static_assert(FAMILY == "int" or FAMILY == "int8")
            if SIGNED:
                b_code = b_code << 24 >> 24
            if HAS_ZEROS:
                b_zero = _loaded(p_zeros, b_row, num_groups, o_group, m_k).to(tl.int32)
                b_code -= b_zero
            b_y = (b_code - MIDDLE).to(tl.float32) * float32_of(b_scale)
    return b_y


@jit
def _e2m1(b_code):
    """Return the number of an e2m1 code, with its negative zero."""
    b_size = _table_byte(b_code & 7, E2M1_0, E2M1_1, E2M1_0, E2M1_1) * 0.5
    return (b_size.to(tl.int32, bitcast=True) | (b_code & 8) << 28).to(tl.float32, bitcast=True)

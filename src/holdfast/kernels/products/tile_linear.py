"""Products with coded weights in tiles: codes become numbers where they are multiplied, for any scheme and any number of rows.

M rows, N outputs, K inputs

The weight is the first operand of the tensor cores and the rows are the second, so that few rows waste little.
"""

# ruff: noqa: ANN001, ANN201, ANN202 the arguments of kernels have no types
# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false

import torch

from holdfast.kernels.numbers.e4m3_parts import loaded_numbers
from holdfast.kernels.products.quantize_rows import CodedRows
from holdfast.kernels.products.weight_operands import (
    CODED_ROWS,
    E2M1_GROUPS,
    INT8_ROWS,
    Coding,
    e2m1_numbers,
    e8m0_numbers,
    operands_of,
)
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, jit_counting, next_power_of_two, tl
from holdfast.quant.quantized_weight import QuantizedWeight

BLOCK_K = 128
"""Columns that are multiplied at a time; of e4m3 with scales for blocks of columns, such a block."""
FEW_PROGRAMS = 132
"""Below so many programs a large GPU is not busy, and tiles are made lower."""


def row_form(num_rows: int) -> int:
    """Rows of a tile: what of a launch follows from the number of rows."""
    return min(128, max(16, next_power_of_two(num_rows)))


def tile_linear(
    x_MK: torch.Tensor,
    weight: QuantizedWeight,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    coded: CodedRows | None,
) -> torch.Tensor:
    """x @ weight.T + bias into `out_MN`, in its type. `coded` are the same rows as codes, for schemes that take them so."""
    num_rows, size_k = x_MK.shape
    size_n, operands = weight.shape[0], operands_of(x_MK, weight, coded)
    assert operands.group in (0, BLOCK_K), f"scales for {operands.group} columns, and tiles of {BLOCK_K}"
    block_m = row_form(num_rows)
    block_n = 64 if block_m <= 64 or operands.coding == Coding.CODED_BLOCKS else 128
    if block_m == 16 and -(-size_n // block_n) < FEW_PROGRAMS:
        block_n = 32
    tile_kernel[(-(-size_n // block_n), -(-num_rows // block_m))](
        *operands.tensors,
        bias_N if bias_N is not None else weight.scales,
        out_MN,
        num_rows,
        size_n,
        size_k,
        operands.scale_columns,
        CODING=int(operands.coding),
        BLOCK_ROWS=operands.block_rows,
        HAS_BIAS=bias_N is not None,
        EVEN_K=size_k % BLOCK_K == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K,
        PLAIN=is_interpreted(),
        num_warps=8 if block_m == 128 else 4,
        num_stages=3 if block_m == 128 else 4,
    )
    return out_MN


@jit
def _scaled_e2m1(b_codes, b_scales, dtype: constexpr):
    """Codes of four bits (int32) times their scales, in the type of the rows."""
    return (e2m1_numbers(b_codes).to(tl.float32) * b_scales).to(dtype)


@jit_counting("num_rows")
def tile_kernel(
    p_x,
    p_x_scales,
    p_codes,
    p_scales,
    p_bias,
    p_out,
    num_rows,
    size_n,
    size_k,
    scale_columns,
    CODING: constexpr,
    BLOCK_ROWS: constexpr,
    HAS_BIAS: constexpr,
    EVEN_K: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    PLAIN: constexpr,
):
    i_n = tl.program_id(0)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_n = o_n < size_n
    m_m = o_m < num_rows
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if CODING == E2M1_GROUPS:
        o_b = tl.arange(0, BLOCK_K // 2)
        o_s = tl.arange(0, BLOCK_K // 32)
        p_w = p_codes + o_n[:, None].to(tl.int64) * (size_k // 2) + o_b[None, :]
        p_s = p_scales + o_n[:, None].to(tl.int64) * (size_k // 32) + o_s[None, :]
        p_rows = p_x + o_m[None, :].to(tl.int64) * size_k + 2 * o_b[:, None]
        for k in range(0, size_k, BLOCK_K):
            m_w = m_n[:, None]
            m_s = m_n[:, None]
            m_x = m_m[None, :]
            if not EVEN_K:
                m_w = m_w & (k // 2 + o_b < size_k // 2)[None, :]
                m_s = m_s & (k // 32 + o_s < size_k // 32)[None, :]
                m_x = m_x & (k // 2 + o_b < size_k // 2)[:, None]
            b_codes = tl.load(p_w + k // 2, mask=m_w, other=0.0).to(tl.int32)
            b_scales = e8m0_numbers(tl.load(p_s + k // 32, mask=m_s, other=0.0))
            b_scales = tl.broadcast_to(b_scales[:, :, None], (BLOCK_N, BLOCK_K // 32, 16))
            b_scales = tl.reshape(b_scales, (BLOCK_N, BLOCK_K // 2))
            b_even = tl.load(p_rows + k, mask=m_x, other=0.0)
            b_odd = tl.load(p_rows + k + 1, mask=m_x, other=0.0)
            b_y = tl.dot(_scaled_e2m1(b_codes & 15, b_scales, b_even.dtype), b_even, b_y)
            b_y = tl.dot(_scaled_e2m1(b_codes >> 4, b_scales, b_odd.dtype), b_odd, b_y)
    else:
        o_k = tl.arange(0, BLOCK_K)
        p_w = p_codes + o_n[:, None].to(tl.int64) * size_k + o_k[None, :]
        p_rows = p_x + o_m[None, :].to(tl.int64) * size_k + o_k[:, None]
        for k in range(0, size_k, BLOCK_K):
            m_w = m_n[:, None]
            m_x = m_m[None, :]
            if not EVEN_K:
                m_w = m_w & (k + o_k < size_k)[None, :]
                m_x = m_x & (k + o_k < size_k)[:, None]
            b_w = tl.load(p_w + k, mask=m_w, other=0.0)
            b_x = tl.load(p_rows + k, mask=m_x, other=0.0)
            if CODING == INT8_ROWS:
                b_y = tl.dot(b_w.to(b_x.dtype), b_x, b_y)
            elif CODING == CODED_ROWS:
                # Tensor cores add e4m3 products in few bits: the sum goes on in float32 after every block.
                b_w, b_x = loaded_numbers(b_w, PLAIN), loaded_numbers(b_x, PLAIN)
                b_y = tl.dot(b_w, b_x, b_y, max_num_imprecise_acc=128)
            else:
                i_k = k // BLOCK_K
                p_s = p_scales + (o_n // BLOCK_ROWS).to(tl.int64) * scale_columns + i_k
                b_scales = tl.load(p_s, mask=m_n, other=0.0)
                b_x_scales = tl.load(p_x_scales + o_m.to(tl.int64) * scale_columns + i_k, mask=m_m, other=0.0)
                b_block = tl.dot(loaded_numbers(b_w, PLAIN), loaded_numbers(b_x, PLAIN))
                b_y += b_block * b_scales[:, None] * b_x_scales[None, :]
    if CODING == INT8_ROWS:
        b_y *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[:, None]
    if CODING == CODED_ROWS:
        b_x_scales = tl.load(p_x_scales + o_m.to(tl.int64), mask=m_m, other=0.0)
        b_y *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[:, None] * b_x_scales[None, :]
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    o_y = o_m[None, :].to(tl.int64) * size_n + o_n[:, None]
    tl.store(p_out + o_y, b_y.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])

"""Tensor-core tiles for quantized weights of any scheme, dequantized in registers, for any number of rows.

M rows, N outputs, K inputs

The weight is the first operand of wgmma and the rows are the second, so a small batch wastes little.
"""

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.fp8 import kernel_codes, loaded_numbers
from holdfast.kernels.gemm.e2m1 import e2m1_numbers, e8m0_numbers
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit,
    jit_counting,
    kernel_constant,
    next_power_of_two,
    tl,
)
from holdfast.quant.packed_weight import AnyWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import MXFP4

# Triton resolves branches on constants at compile time, so both sides must stand in an if and an else.
# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


class OperandKind(IntEnum):
    """Operand types of a product."""

    PLAIN = 0
    FP8_ROWS = 1
    """e4m3 by e4m3, with a scale per row of the weight and of x."""
    FP8_BLOCKS = 2
    """Like FP8_ROWS, with scales per block of columns too."""
    INT8_ROWS = 3
    """x by int8, with a scale for each row of the weight."""
    E2M1_GROUPS = 4
    """x by e2m1, two to a byte, with a power of two for every 32 columns."""


FP8_ROWS, FP8_BLOCKS, INT8_ROWS, E2M1_GROUPS = (
    kernel_constant(int(kind))
    for kind in (OperandKind.FP8_ROWS, OperandKind.FP8_BLOCKS, OperandKind.INT8_ROWS, OperandKind.E2M1_GROUPS)
)


class WeightOperands(NamedTuple):
    """Kernel arguments of a product with a weight."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """Rows, their scales, weight, its scales. Without scales any tensor stands in for them."""
    kind: OperandKind
    block_rows: int = 1
    """Rows of the weight that share a scale."""
    group: int = 0
    """Columns that share a scale; 0: all."""
    scale_columns: int = 1


def operands_of(x_XK: Tensor, weight: AnyWeight, quantized: QuantizedRows | None) -> WeightOperands:
    """Return the operands of x by the weight; `quantized` are the rows as codes, if the scheme needs them."""
    if isinstance(weight, Tensor):
        return WeightOperands((x_XK, x_XK, weight, weight), OperandKind.PLAIN)
    assert isinstance(weight, QuantizedWeight), "packed weights have products of their own"
    scheme = weight.scheme
    assert (quantized is not None) == scheme.quantizes_activations, f"{scheme.name} with {quantized=}"
    if quantized is None:
        is_packed = scheme.codes_per_byte == 2
        assert not is_packed or scheme.name == MXFP4.name, f"{scheme.name}: kernels decode e2m1 alone"
        kind = OperandKind.E2M1_GROUPS if is_packed else OperandKind.INT8_ROWS
        return WeightOperands((x_XK, x_XK, weight.codes, weight.scales), kind)
    tensors = (kernel_codes(quantized.codes_TK), quantized.scales_TB, kernel_codes(weight.codes), weight.scales)
    if scheme.block_columns == 0:
        return WeightOperands(tensors, OperandKind.FP8_ROWS)
    num_columns = quantized.scales_TB.shape[1]
    assert weight.scales.shape[-1] == num_columns, f"{weight.scales.shape=} {quantized.scales_TB.shape=}"
    return WeightOperands(tensors, OperandKind.FP8_BLOCKS, scheme.block_rows, scheme.block_columns, num_columns)


BLOCK_K = 128
"""Columns per K step, and of a block of block-scaled e4m3."""
FULL_GPU_PROGRAMS = 132
"""Programs that fill a large GPU. With fewer, tiles get fewer outputs."""


def row_form(num_rows: int) -> int:
    """Return the rows of a tile: the specialization for the number of rows."""
    return min(128, max(16, next_power_of_two(num_rows)))


def tile_linear(
    x_MK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor, quantized: QuantizedRows | None
) -> Tensor:
    """Compute x @ weight.T + bias into `out_MN`, in its type; `quantized` are the rows as codes, if the scheme needs them."""
    num_rows, size_k = x_MK.shape
    size_n, operands = weight.shape[0], operands_of(x_MK, weight, quantized)
    assert operands.group in (0, BLOCK_K), f"scales for {operands.group} columns, and tiles of {BLOCK_K}"
    block_m = row_form(num_rows)
    block_n = 64 if block_m <= 64 or operands.kind == OperandKind.FP8_BLOCKS else 128
    if block_m == 16 and -(-weight.form_rows // block_n) < FULL_GPU_PROGRAMS:
        block_n = 32
    tile_kernel[(-(-size_n // block_n), -(-num_rows // block_m))](
        *operands.tensors, bias_N if bias_N is not None else weight.scales, out_MN, num_rows, size_n, size_k,
        operands.scale_columns,
        KIND=int(operands.kind), BLOCK_ROWS=operands.block_rows, HAS_BIAS=bias_N is not None,
        EVEN_K=size_k % BLOCK_K == 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, PLAIN=is_interpreted(),
        num_warps=8 if block_m == 128 else 4, num_stages=3 if block_m == 128 else 4,
    )  # fmt: skip
    return out_MN


@jit
def _scaled_e2m1(b_codes, b_scales, dtype: constexpr):
    """Decode 4-bit codes (int32) times their scales, in the type of the rows."""
    return (e2m1_numbers(b_codes).to(tl.float32) * b_scales).to(dtype)


@jit_counting("num_rows")
def tile_kernel(
    p_x, p_x_scales, p_codes, p_scales, p_bias, p_out, num_rows, size_n, size_k, scale_columns,
    KIND: constexpr, BLOCK_ROWS: constexpr, HAS_BIAS: constexpr, EVEN_K: constexpr, BLOCK_M: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, PLAIN: constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_n = o_n < size_n
    m_m = o_m < num_rows
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if KIND == E2M1_GROUPS:
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
            if KIND == INT8_ROWS:
                b_y = tl.dot(b_w.to(b_x.dtype), b_x, b_y)
            elif KIND == FP8_ROWS:
                # Tensor cores add e4m3 products with few bits: accumulate in float32 after every block.
                b_w, b_x = loaded_numbers(b_w, PLAIN), loaded_numbers(b_x, PLAIN)
                b_y = tl.dot(b_w, b_x, b_y, max_num_imprecise_acc=128)
            else:
                i_k = k // BLOCK_K
                p_s = p_scales + (o_n // BLOCK_ROWS).to(tl.int64) * scale_columns + i_k
                b_scales = tl.load(p_s, mask=m_n, other=0.0)
                b_x_scales = tl.load(p_x_scales + o_m.to(tl.int64) * scale_columns + i_k, mask=m_m, other=0.0)
                b_block = tl.dot(loaded_numbers(b_w, PLAIN), loaded_numbers(b_x, PLAIN))
                b_y += b_block * b_scales[:, None] * b_x_scales[None, :]
    if KIND == INT8_ROWS:
        b_y *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[:, None]
    if KIND == FP8_ROWS:
        b_x_scales = tl.load(p_x_scales + o_m.to(tl.int64), mask=m_m, other=0.0)
        b_y *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[:, None] * b_x_scales[None, :]
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    o_y = o_m[None, :].to(tl.int64) * size_n + o_n[:, None]
    tl.store(p_out + o_y, b_y.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])

"""Small batches: up to 16 rows by a weight, bound by memory, with RMSNorm in the prologue and gate or residual in the epilogue.

M rows, N outputs, K inputs, J blocks of K or N

A decode step reads every weight once, so memory bounds it, and only time between products can be lost. So everything
between two of them happens in the epilogue of the first and the prologue of the second:

    prologue   deferred RMSNorm: the producer stored x * norm_weight and the squares of x summed by block; this product
               scales its result by 1 / rms, which is the same for a whole row
    epilogue   y                                           plain
               silu(gate) * up                             gated: the upper and the lower half of the weight's rows
               x += y;  x * next norm_weight;  squares     residual, with the next norm deferred

A weight is packed (kernels/gemm/packed_small_batch.py), plain, or has 8 bits and a scale per row. For e4m3 the prologue quantizes rows: their producer stored amax
by block, which gives the scale. For int8 rows are not quantized. A deferred RMSNorm does not change a row's codes: 1 /
rms is a factor of the whole row, like its scale.

One row is a GEMV (kernels/gemm/gemv.py). More rows go through the tensor cores: the weight is the first operand and the
rows are the second, so that sixteen rows fill an instruction. A weight with few outputs is split along K (split-K). The
shape alone decides the number of splits, and the last program to finish adds the partial sums in order. So steps of 2 to
FUSED_DECODE_ROWS rows are batch invariant.
"""

from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.fp8 import LEAST_SCALE, kernel_codes, loaded_numbers, quantized_numbers
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, ResidualStream, RowAmax, SmallBatchScratch
from holdfast.kernels.gemm.gemv import (
    GATE_AMAX,
    SIDE_COLUMNS_PER_WARP,
    SIDE_OUTPUTS,
    arrive,
    gemv_kernel,
    num_k_splits,
    plain_gemv_blocks,
    quantized_gemv_blocks,
    residual_epilogue_rows,
    row_form,
    sum_partials,
)
from holdfast.kernels.gemm.packed_small_batch import packed_batch_linear, packed_linear_add, packed_normed_linear
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, SMALL_BATCH_BLOCK_N
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import (
    check_dense,
    constexpr,
    is_interpreted,
    jit,
    jit_counting,
    kernel_constant,
    next_power_of_two,
    release_then_wait,
    tl,
)
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


BLOCK_K, QUANTIZED_BLOCK_K = 128, 256
"""Columns per K step, for a plain and for a quantized weight."""
SIDE_K, SIDE_STAGES = kernel_constant(128), kernel_constant(4)
"""Columns per K step of a side product, and its stages."""


class SideProduct(NamedTuple):
    """A small plain weight that multiplies the same rows in the same launch, with a float32 result."""

    weight_PK: Tensor
    out_MP: Tensor


def takes_weight(weight: AnyWeight) -> bool:
    """Return True if these kernels take the quantized weight: 8-bit with a scale per row."""
    return isinstance(weight, QuantizedWeight) and weight.scheme.block_columns == 0 and len(weight.shape) == 2


def normed_linear(
    rows: NormedRows,
    weight: AnyWeight,
    bias_N: Tensor | None,
    gated: bool,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    side: SideProduct | None = None,
) -> Tensor:
    """Compute norm(x) @ weight.T + bias, or silu(upper half) * lower half of it, into `y_MN`, in its type.

    With `side`, also norm(x) @ side.T.
    """
    if isinstance(weight, PackedWeight):
        if side is not None:
            _launch(rows.scaled_MK, side.weight_PK, None, side.out_MP, scratch, rows=rows)
        return packed_normed_linear(rows, weight, bias_N, gated, y_MN, scratch)
    _launch(rows.scaled_MK, weight, bias_N, y_MN, scratch, rows=rows, gated=gated, side=side)
    return y_MN


def small_batch_linear(
    a_MK: Tensor,
    weight: AnyWeight,
    bias_N: Tensor | None,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    amax: RowAmax | None = None,
) -> Tensor:
    """Compute a @ weight.T + bias into `y_MN` without prologue or epilogue: a rank's part of a sum."""
    if isinstance(weight, PackedWeight):
        return packed_batch_linear(a_MK, weight, bias_N, y_MN)
    _launch(a_MK, weight, bias_N, y_MN, scratch, amax=amax)
    return y_MN


def linear_add(
    a_MK: Tensor,
    weight: AnyWeight,
    bias_N: Tensor | None,
    stream: ResidualStream,
    amax: RowAmax | None = None,
) -> NormedRows:
    """x += a @ weight.T + bias, with the next RMSNorm deferred; `amax` is that of `a`, if the weight quantizes rows."""
    if isinstance(weight, PackedWeight):
        return packed_linear_add(a_MK, weight, bias_N, stream)
    num_blocks = _launch(a_MK, weight, bias_N, stream.x_MN, stream.scratch, stream=stream, amax=amax)
    return NormedRows(stream.scaled_MN, num_blocks, stream.eps)


def single_row_linear(x_1X: Tensor, weight_NK: Tensor, out_1N: Tensor, num_groups: int = 1) -> Tensor:
    """Compute one row by a plain weight into `out_1N`, in its type.

    With groups, x has as many parts of K columns; each is multiplied by its own rows of the weight.
    """
    size_n, size_k = weight_NK.shape
    assert x_1X.shape == (1, num_groups * size_k), f"{x_1X.shape=} {weight_NK.shape=} {num_groups=}"
    assert out_1N.shape == (1, size_n), f"{out_1N.shape=} {weight_NK.shape=}"
    check_dense(weight_NK)
    group_rows = size_n // num_groups
    block_n, block_k, _, num_warps = plain_gemv_blocks(size_k, gated=False)
    if num_groups > 1:
        block_n = min(block_n, group_rows & -group_rows)  # a program stays within a group
    gemv_kernel[(-(-size_n // block_n),)](
        x_1X, weight_NK, out_1N, out_1N, out_1N, out_1N, *(out_1N,) * 3, *(None,) * 7, 1, size_n, size_k, 1, None, 0.0,
        EVEN=size_k % block_k == 0 and size_n % block_n == 0, BLOCK_N=block_n, BLOCK_K=block_k, DEPTH=0, HAS_BIAS=False,
        GATED=False, RESIDUAL=False, DEFERRED_NORM=False, IS_QUANTIZED=False, QUANTIZES_ROWS=False, OFFSET=0.0,
        GROUP_ROWS=group_rows if num_groups > 1 else 0, BLOCK_J=1, BLOCK_P=1, SIDE_K=0, PLAIN=is_interpreted(),
        num_warps=num_warps, **pdl_flags(x_1X),
    )  # fmt: skip
    return out_1N


def _launch(
    x_MK: Tensor,
    weight: AnyWeight,
    bias_N: Tensor | None,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    rows: NormedRows | None = None,
    gated: bool = False,
    stream: ResidualStream | None = None,
    amax: RowAmax | None = None,
    side: SideProduct | None = None,
) -> int:
    """Launch the kernel for this many rows, and return its blocks of outputs.

    `rows` is the deferred RMSNorm of x_MK; without it, `amax` is that of x_MK if the weight quantizes rows.
    """
    (num_rows, size_k), size_n = x_MK.shape, y_MN.shape[1]
    residual, quantizes_rows, num_amax = stream is not None, False, None
    codes, quantized = weight, (None,) * 4
    if isinstance(weight, QuantizedWeight):
        own, quantizes_rows = scratch.amax, weight.scheme.quantizes_activations
        assert own is not None, "a quantized product needs amax"
        amax = RowAmax(own.normed, rows.num_squares) if rows else amax
        assert amax is not None or not quantizes_rows, "rows that become codes need amax"
        values, num_amax = amax or RowAmax(own.normed, 1)
        codes, quantized = kernel_codes(weight.codes), (weight.scales, values, own.normed, own.gated)
    num_squares, eps = (rows.num_squares, rows.eps) if rows else (1, 0.0)
    arguments = (
        x_MK, codes, y_MN if bias_N is None else bias_N, y_MN, y_MN if stream is None else stream.norm_weight_N,
        y_MN if stream is None else stream.scaled_MN, scratch.squares, scratch.partials, scratch.arrived, *quantized,
        *((None,) * 3 if side is None else (*side, len(side.weight_PK))), num_rows, size_n, size_k,
    )  # fmt: skip
    if side is not None:
        _check_side(side, x_MK, rows)
    flags = {
        "HAS_BIAS": bias_N is not None, "GATED": gated, "RESIDUAL": residual, "DEFERRED_NORM": rows is not None,
        "IS_QUANTIZED": codes is not weight, "QUANTIZES_ROWS": quantizes_rows,
        "OFFSET": 0.0 if stream is None else stream.offset,
        "BLOCK_J": next_power_of_two(num_squares), "BLOCK_P": next_power_of_two(num_amax or 1), "PLAIN": is_interpreted(),
        **pdl_flags(x_MK),
    }  # fmt: skip
    if row_form(num_rows):
        if isinstance(weight, QuantizedWeight):
            blocks = quantized_gemv_blocks(size_k, gated, residual, quantizes_rows)
        else:
            blocks = plain_gemv_blocks(size_k, gated)
        block_n, block_k, depth, num_warps = blocks
        num_blocks = -(-size_n // block_n)
        is_even = codes is weight and size_k % block_k == 0 and size_n % block_n == 0
        num_side = 0 if side is None else -(-len(side.weight_PK) // SIDE_OUTPUTS)
        gemv_kernel[(num_side + num_blocks,)](
            *arguments, num_squares, num_amax, eps,
            EVEN=is_even, BLOCK_N=block_n, BLOCK_K=block_k, DEPTH=depth, GROUP_ROWS=0,
            SIDE_K=SIDE_COLUMNS_PER_WARP * num_warps, num_warps=num_warps, **flags,
        )  # fmt: skip
        return num_blocks
    block_k = BLOCK_K if codes is weight else QUANTIZED_BLOCK_K
    splits = 1 if gated else num_k_splits(size_n, size_k, block_k)
    num_blocks = -(-size_n // SMALL_BATCH_BLOCK_N)
    num_side = 0 if side is None else -(-len(side.weight_PK) // SMALL_BATCH_BLOCK_N)
    _small_batch_kernel[(num_side + num_blocks, splits)](
        *arguments, size_k // splits, num_squares, num_amax, eps,
        EVEN_K=size_k % block_k == 0, NUM_SPLITS=splits, BLOCK_M=FUSED_DECODE_ROWS, BLOCK_N=SMALL_BATCH_BLOCK_N,
        BLOCK_K=block_k, NUM_STAGES=5 if codes is weight and not gated else 4, num_warps=4, **flags,
    )  # fmt: skip
    return num_blocks


def _check_side(side: SideProduct, x_MK: Tensor, rows: NormedRows | None) -> None:
    (num_rows, size_k), num_outputs = x_MK.shape, len(side.weight_PK)
    assert rows is not None, "a side product has a deferred norm"
    assert side.weight_PK.shape == (num_outputs, size_k), f"{side.weight_PK.shape=} {x_MK.shape=}"
    assert side.out_MP.shape == (num_rows, num_outputs), f"{side.out_MP.shape=} {side.weight_PK.shape=}"
    check_dense(*side)


@jit
def _side_rows(
    p_x, p_side, p_side_out, p_squares, i_p, num_rows, side_n, size_k, num_squares, eps,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_J: constexpr,
):  # fmt: skip
    """Compute a block of a side product's outputs, of all rows."""
    o_p = i_p * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, SIDE_K)
    m_p = o_p < side_n
    m_m = o_m < num_rows
    p_w = p_side + o_p[:, None].to(tl.int64) * size_k + o_k[None, :]
    p_rows = p_x + o_m[None, :].to(tl.int64) * size_k + o_k[:, None]
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in tl.range(0, size_k, SIDE_K, num_stages=SIDE_STAGES):
        m_k = k + o_k < size_k
        b_w = tl.load(p_w + k, mask=m_p[:, None] & m_k[None, :], other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_rows + k, mask=m_m[None, :] & m_k[:, None], other=0.0)
        b_y = tl.dot(b_w.to(b_x.dtype), b_x, b_y)
    o_j = tl.arange(0, BLOCK_J)
    m_j = m_m[:, None] & (o_j < num_squares)[None, :]
    b_squares = tl.load(p_squares + o_m[:, None] * num_squares + o_j[None, :], mask=m_j, other=0.0)
    b_y *= tl.rsqrt(tl.sum(b_squares, axis=1) / size_k + eps)[None, :]
    tl.store(p_side_out + o_m[None, :] * side_n + o_p[:, None], b_y, mask=m_p[:, None] & m_m[None, :])


@jit_counting("num_rows")
def _small_batch_kernel(
    p_x, p_weight, p_bias, p_y, p_norm_weight, p_scaled, p_squares, p_partials, p_arrived,
    p_scales, p_amax, p_new_amax, p_gate_amax, p_side, p_side_out, side_n, num_rows, size_n, size_k, split_k,
    num_squares, num_amax, eps,
    EVEN_K: constexpr, NUM_SPLITS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
    NUM_STAGES: constexpr, HAS_BIAS: constexpr, GATED: constexpr, RESIDUAL: constexpr, DEFERRED_NORM: constexpr,
    IS_QUANTIZED: constexpr, QUANTIZES_ROWS: constexpr, OFFSET: constexpr, BLOCK_J: constexpr, BLOCK_P: constexpr,
    PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_split = tl.program_id(1)
    if p_side is not None:
        num_side = tl.cdiv(side_n, BLOCK_N)
        if i_n < num_side:
            if PDL:
                tl.extra.cuda.gdc_wait()
            if i_split == 0:
                _side_rows(
                    p_x, p_side, p_side_out, p_squares, i_n, num_rows, side_n, size_k, num_squares, eps, BLOCK_M,
                    BLOCK_N, BLOCK_J,
                )  # fmt: skip
            return
        i_n -= num_side
        p_arrived -= num_side  # counters of split-K go by program
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < size_n
    m_m = o_m < num_rows
    k_start = i_split * split_k
    up_offset = tl.cast(size_n, tl.int64) * size_k
    p_w = p_weight + o_n[:, None].to(tl.int64) * size_k + k_start + o_k[None, :]
    p_rows = p_x + o_m[None, :].to(tl.int64) * size_k + k_start + o_k[:, None]
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    b_up_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if IS_QUANTIZED:
        if PDL:
            tl.extra.cuda.gdc_wait()
    else:
        release_then_wait(PDL)
    b_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
    if QUANTIZES_ROWS:
        o_p = tl.arange(0, BLOCK_P)
        m_p = m_m[:, None] & (o_p < num_amax)[None, :]
        b_row_amax = tl.load(p_amax + o_m[:, None] * num_amax + o_p[None, :], mask=m_p, other=0.0)
        if b_row_amax.dtype == tl.int32:
            b_row_amax = b_row_amax.to(tl.float32, bitcast=True)
        b_scale = tl.maximum(tl.max(b_row_amax, axis=1) / 448.0, LEAST_SCALE)
    b_factor = 1.0 / b_scale
    if DEFERRED_NORM:
        o_j = tl.arange(0, BLOCK_J)
        m_j = m_m[:, None] & (o_j < num_squares)[None, :]
        b_squares = tl.load(p_squares + o_m[:, None] * num_squares + o_j[None, :], mask=m_j, other=0.0)
        if IS_QUANTIZED:
            b_scale *= tl.rsqrt(tl.sum(b_squares, axis=1) / size_k + eps)
    for k in tl.range(0, split_k, BLOCK_K, num_stages=NUM_STAGES):
        m_w = m_n[:, None]
        m_x = m_m[None, :]
        if not EVEN_K:
            m_w = m_w & (k + o_k < split_k)[None, :]
            m_x = m_x & (k + o_k < split_k)[:, None]
        b_w = tl.load(p_w + k, mask=m_w, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_rows + k, mask=m_x, other=0.0)
        if QUANTIZES_ROWS:
            b_x = quantized_numbers(b_x.to(tl.float32) * b_factor[None, :], PLAIN)
            b_y = tl.dot(loaded_numbers(b_w, PLAIN), b_x, b_y, max_num_imprecise_acc=128)
        else:
            b_y = tl.dot(b_w.to(b_x.dtype), b_x, b_y)
        if GATED:
            b_up = tl.load(p_w + up_offset + k, mask=m_w, other=0.0, eviction_policy="evict_first")
            if QUANTIZES_ROWS:
                b_up_y = tl.dot(loaded_numbers(b_up, PLAIN), b_x, b_up_y, max_num_imprecise_acc=128)
            else:
                b_up_y = tl.dot(b_up.to(b_x.dtype), b_x, b_up_y)
    if PDL and IS_QUANTIZED:
        # Release late: programs of the next kernel would take occupancy from this one.
        tl.extra.cuda.gdc_launch_dependents()
    m_nm = m_n[:, None] & m_m[None, :]
    if NUM_SPLITS > 1:
        p_partial = p_partials + (o_m[None, :] * size_n + o_n[:, None])
        arrived = arrive(p_partial, p_arrived, b_y, num_rows * size_n, m_nm)
        if arrived != NUM_SPLITS - 1:
            return
        b_y = sum_partials(p_partial, p_arrived, num_rows * size_n, m_nm, NUM_SPLITS)
    if IS_QUANTIZED:
        b_y *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[:, None] * b_scale[None, :]
    elif DEFERRED_NORM:
        b_scale = tl.rsqrt(tl.sum(b_squares, axis=1) / size_k + eps)
        b_y *= b_scale[None, :]
        b_up_y *= b_scale[None, :]
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if IS_QUANTIZED:
            b_up_y *= tl.load(p_scales + size_n + o_n, mask=m_n, other=0.0)[:, None] * b_scale[None, :]
        if HAS_BIAS:
            b_up_y += tl.load(p_bias + size_n + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        b_y = b_y * tl.sigmoid(b_y) * b_up_y
        if QUANTIZES_ROWS:
            b_size = tl.abs(tl.where(m_n[:, None], b_y, 0.0).to(p_y.dtype.element_ty).to(tl.float32))
            b_amax = tl.max(b_size, axis=0).to(tl.int32, bitcast=True)
            tl.atomic_max(p_gate_amax + o_m * GATE_AMAX + i_n % GATE_AMAX, b_amax, mask=m_m, sem="relaxed")
    o_y = o_m[None, :].to(tl.int64) * size_n + o_n[:, None]
    if RESIDUAL:
        b_y, b_scaled = residual_epilogue_rows(
            b_y, p_y, p_norm_weight, p_scaled, p_squares, i_n, o_n, o_m, o_y, m_n, m_m, OFFSET
        )
        if IS_QUANTIZED:
            b_amax = tl.max(tl.where(m_n[:, None], tl.abs(b_scaled.to(tl.float32)), 0.0), axis=0)
            tl.store(p_new_amax + o_m * tl.num_programs(0) + i_n, b_amax, mask=m_m)
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_nm)

"""Small batches: up to 16 rows by a weight, bound by memory, with RMSNorm in the prologue and gate or residual in the epilogue.

M rows, N outputs, K inputs, J blocks of K or N

A decode step reads every weight once, so memory bounds it, and only time between products can be lost. So everything
between two of them happens in the epilogue of the first and the prologue of the second:

    prologue   deferred RMSNorm: the producer stored x * norm_weight and the squares of x summed by block; this product
               scales its result by 1 / rms, which is the same for a whole row
    epilogue   y                                           plain
               silu(gate) * up                             gated: the upper and the lower half of the weight's rows
               x += y;  x * next norm_weight;  squares     residual, with the next norm deferred

One row is a GEMV (kernels/gemm/gemv.py). More rows go through the tensor cores: the weight is the first operand and the
rows are the second, so that sixteen rows fill an instruction. A weight with few outputs is split along K (split-K). The
shape alone decides the number of splits, and the last program to finish adds the partial sums in order. So steps of 2 to
FUSED_DECODE_ROWS rows are batch invariant.
"""

from torch import Tensor

from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, RowAmax, SmallBatchScratch
from holdfast.kernels.gemm.gemv import (
    gemv_blocks,
    gemv_kernel,
    num_k_splits,
    residual_epilogue_rows,
    row_form,
    sum_partials,
)
from holdfast.kernels.gemm.small_batch_quantized import launch_quantized
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, SMALL_BATCH_BLOCK_N
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit_counting, next_power_of_two, release_then_wait, tl
from holdfast.quant.quantized_weight import QuantizedWeight

# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false


BLOCK_K = 128


def normed_linear(
    rows: NormedRows,
    weight: Tensor | QuantizedWeight,
    bias_N: Tensor | None,
    gated: bool,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
) -> Tensor:
    """Compute norm(x) @ weight.T + bias, or silu(upper half) * lower half of it, into `y_MN`, in its type."""
    _launch(rows.scaled_MK, weight, bias_N, y_MN, scratch, rows=rows, gated=gated)
    return y_MN


def small_batch_linear(
    a_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_N: Tensor | None,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    amax: RowAmax | None = None,
) -> Tensor:
    """Compute a @ weight.T + bias into `y_MN` without prologue or epilogue: a rank's part of a sum."""
    _launch(a_MK, weight, bias_N, y_MN, scratch, amax=amax)
    return y_MN


def linear_add(
    a_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_N: Tensor | None,
    x_MN: Tensor,
    norm_weight_N: Tensor,
    eps: float,
    scaled_MN: Tensor,
    scratch: SmallBatchScratch,
    amax: RowAmax | None = None,
) -> NormedRows:
    """x += a @ weight.T + bias, with the next RMSNorm deferred; `amax` is that of `a`, if the weight quantizes rows."""
    num_blocks = _launch(
        a_MK, weight, bias_N, x_MN, scratch, norm_weight_N=norm_weight_N, scaled_MN=scaled_MN, amax=amax
    )
    return NormedRows(scaled_MN, num_blocks, eps)


def _launch(
    x_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_N: Tensor | None,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    rows: NormedRows | None = None,
    gated: bool = False,
    norm_weight_N: Tensor | None = None,
    scaled_MN: Tensor | None = None,
    amax: RowAmax | None = None,
) -> int:
    """Launch the kernel for this many rows, and return its blocks of outputs; `amax` is for quantized weights only."""
    if isinstance(weight, QuantizedWeight):
        return launch_quantized(x_MK, weight, bias_N, y_MN, scratch, rows, gated, norm_weight_N, scaled_MN, amax)
    num_rows, size_k = x_MK.shape
    size_n = y_MN.shape[1]
    num_squares, eps = (rows.num_squares, rows.eps) if rows else (1, 0.0)
    arguments = (
        x_MK, weight, bias_N if bias_N is not None else weight, y_MN,
        norm_weight_N if norm_weight_N is not None else weight, scaled_MN if scaled_MN is not None else y_MN,
        scratch.squares, scratch.partials, scratch.arrived, num_rows, size_n, size_k,
    )  # fmt: skip
    flags = {
        "HAS_BIAS": bias_N is not None, "GATED": gated, "RESIDUAL": norm_weight_N is not None,
        "DEFERRED_NORM": rows is not None, "BLOCK_J": next_power_of_two(num_squares), **pdl_flags(x_MK),
    }  # fmt: skip
    if row_form(num_rows):
        block_n, block_k, num_warps = gemv_blocks(size_k, gated)
        num_blocks = -(-size_n // block_n)
        gemv_kernel[(num_blocks,)](
            *arguments, num_squares, eps,
            EVEN=size_k % block_k == 0 and size_n % block_n == 0, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps,
            **flags,
        )  # fmt: skip
        return num_blocks
    splits = 1 if gated else num_k_splits(size_n, size_k, BLOCK_K)
    num_blocks = -(-size_n // SMALL_BATCH_BLOCK_N)
    _small_batch_kernel[(num_blocks, splits)](
        *arguments, size_k // splits, num_squares, eps,
        EVEN_K=size_k % BLOCK_K == 0, NUM_SPLITS=splits, BLOCK_M=FUSED_DECODE_ROWS, BLOCK_N=SMALL_BATCH_BLOCK_N,
        BLOCK_K=BLOCK_K, NUM_STAGES=4 if gated else 5, num_warps=4, **flags,
    )  # fmt: skip
    return num_blocks


@jit_counting("num_rows")
def _small_batch_kernel(
    p_x, p_weight, p_bias, p_y, p_norm_weight, p_scaled, p_squares, p_partials, p_arrived,
    num_rows, size_n, size_k, split_k, num_squares, eps,
    EVEN_K: constexpr, NUM_SPLITS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
    NUM_STAGES: constexpr, HAS_BIAS: constexpr, GATED: constexpr, RESIDUAL: constexpr, DEFERRED_NORM: constexpr,
    BLOCK_J: constexpr, PDL: constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_split = tl.program_id(1)
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
    release_then_wait(PDL)
    if DEFERRED_NORM:
        o_j = tl.arange(0, BLOCK_J)
        m_j = m_m[:, None] & (o_j < num_squares)[None, :]
        b_squares = tl.load(p_squares + o_m[:, None] * num_squares + o_j[None, :], mask=m_j, other=0.0)
    for k in tl.range(0, split_k, BLOCK_K, num_stages=NUM_STAGES):
        m_w = m_n[:, None]
        m_x = m_m[None, :]
        if not EVEN_K:
            m_w = m_w & (k + o_k < split_k)[None, :]
            m_x = m_x & (k + o_k < split_k)[:, None]
        b_w = tl.load(p_w + k, mask=m_w, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_rows + k, mask=m_x, other=0.0)
        b_y = tl.dot(b_w, b_x, b_y)
        if GATED:
            b_up = tl.load(p_w + up_offset + k, mask=m_w, other=0.0, eviction_policy="evict_first")
            b_up_y = tl.dot(b_up, b_x, b_up_y)
    m_nm = m_n[:, None] & m_m[None, :]
    if NUM_SPLITS > 1:
        p_partial = p_partials + (o_m[None, :] * size_n + o_n[:, None])
        partial_size = num_rows * size_n
        tl.store(p_partial + i_split * partial_size, b_y, mask=m_nm)
        tl.debug_barrier()
        arrived = tl.atomic_add(p_arrived + i_n, 1, sem="acq_rel")
        if arrived != NUM_SPLITS - 1:
            return
        tl.store(p_arrived + i_n, 0)
        b_y = sum_partials(p_partial, partial_size, m_nm, NUM_SPLITS)
    if DEFERRED_NORM:
        b_scale = tl.rsqrt(tl.sum(b_squares, axis=1) / size_k + eps)
        b_y *= b_scale[None, :]
        b_up_y *= b_scale[None, :]
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            b_up_y += tl.load(p_bias + size_n + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        b_y = b_y * tl.sigmoid(b_y) * b_up_y
    o_y = o_m[None, :].to(tl.int64) * size_n + o_n[:, None]
    if RESIDUAL:
        b_y, _ = residual_epilogue_rows(b_y, p_y, p_norm_weight, p_scaled, p_squares, i_n, o_n, o_m, o_y, m_n, m_m)
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_nm)

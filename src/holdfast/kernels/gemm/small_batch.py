"""Small batches: up to 16 rows by a weight at the speed of memory, with RMSNorm in the prologue and gate or residual in the epilogue.

M rows, N outputs, K inputs, J blocks of K or N

A decode step reads every weight once, so its time is that of the memory; what can be lost is the time between products.
So everything between two of them happens in the epilogue of the first and the prologue of the second:

    prologue   deferred RMSNorm: the producer has left x * norm_weight and the squares of x summed by block; this product
               is scaled by 1 / rms when it is done, because the scale is the same for the whole row
    epilogue   y                                           plain
               silu(gate) * up                             gated: the upper and the lower half of the weight's rows
               x += y;  x * next norm_weight;  squares     residual, with the next norm deferred

One row is a GEMV: it is multiplied where the weight is loaded (kernels/gemm/gemv.py). More rows go through the tensor cores:
the weight is their first operand and the rows are the second, so that sixteen rows fill an instruction. A weight of few
outputs is split along K (split-K) into a number of splits that its shape alone decides, and whoever finishes last adds the
partial sums in their order. So among steps of 2 to FUSED_DECODE_ROWS rows a row's bits do not depend on the others.
"""

import torch
from torch import Tensor

from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, RowAmax, SmallBatchScratch, defer_rms_norm_reference
from holdfast.kernels.gemm.gemv import (
    gemv_blocks,
    gemv_kernel,
    num_k_splits,
    residual_epilogue_rows,
    row_form,
    sum_partials,
)
from holdfast.kernels.gemm.small_batch_quantized import gate_amax_reference, launch_quantized, quantized_sums_reference
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, SMALL_BATCH_BLOCK_N
from holdfast.kernels.triton_compat import (
    constexpr,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    release_then_wait,
    supports_pdl,
    tl,
)
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
    """norm(x) @ weight.T + bias, or silu(upper half) * lower half of it, into `y_MN`, in its type."""
    if isinstance(weight, QuantizedWeight):
        launch_quantized(rows.scaled_MK, weight, bias_N, y_MN, scratch, rows=rows, gated=gated)
    else:
        _launch(rows.scaled_MK, weight, bias_N, y_MN, scratch, rows=rows, gated=gated)
    return y_MN


def normed_linear_reference(
    rows: NormedRows,
    weight: Tensor | QuantizedWeight,
    bias_N: Tensor | None,
    gated: bool,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
) -> Tensor:
    """The same in plain torch."""
    num_rows, size_k = rows.scaled_MK.shape
    squares_MJ = scratch.squares[: num_rows * rows.num_squares].view(num_rows, rows.num_squares)
    scale_M1 = (squares_MJ.sum(-1, keepdim=True) / size_k + rows.eps).rsqrt()
    if isinstance(weight, QuantizedWeight):
        assert scratch.amax is not None, "a quantized product needs amax"
        sums = quantized_sums_reference(rows.scaled_MK, weight, RowAmax(scratch.amax.normed, rows.num_squares))
    else:
        sums = rows.scaled_MK.float() @ weight.float().t()
    y = sums * scale_M1
    if bias_N is not None:
        y = y + bias_N.float()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    y_MN.copy_(y.to(y_MN.dtype))
    if gated and isinstance(weight, QuantizedWeight):
        gate_amax_reference(y_MN, weight, scratch)
    return y_MN


def small_batch_linear(
    a_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_N: Tensor | None,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    amax: RowAmax | None = None,
) -> Tensor:
    """a @ weight.T + bias into `y_MN`, with nothing before or behind it: a rank's part of a sum; `amax` as in `linear_add`."""
    if isinstance(weight, QuantizedWeight):
        launch_quantized(a_MK, weight, bias_N, y_MN, scratch, amax=amax)
    else:
        _launch(a_MK, weight, bias_N, y_MN, scratch)
    return y_MN


def small_batch_linear_reference(
    a_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_N: Tensor | None,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    amax: RowAmax | None = None,
) -> Tensor:
    """The same in plain torch."""
    return y_MN.copy_(_sums_reference(a_MK, weight, bias_N, amax))


def _sums_reference(
    a_MK: Tensor, weight: Tensor | QuantizedWeight, bias_N: Tensor | None, amax: RowAmax | None
) -> Tensor:
    """float32 a @ weight.T + bias."""
    if isinstance(weight, QuantizedWeight):
        y = quantized_sums_reference(a_MK, weight, amax)
    else:
        y = a_MK.float() @ weight.float().t()
    return y if bias_N is None else y + bias_N.float()


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
    """x += a @ weight.T + bias, with the next RMSNorm deferred; `amax` are those of `a`, for a weight that takes rows as codes."""
    if isinstance(weight, QuantizedWeight):
        num_blocks = launch_quantized(
            a_MK, weight, bias_N, x_MN, scratch, norm_weight_N=norm_weight_N, scaled_MN=scaled_MN, amax=amax
        )
    else:
        num_blocks = _launch(a_MK, weight, bias_N, x_MN, scratch, norm_weight_N=norm_weight_N, scaled_MN=scaled_MN)
    return NormedRows(scaled_MN, num_blocks, eps)


def linear_add_reference(
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
    """The same in plain torch; the squares of a row are summed as one block."""
    y = _sums_reference(a_MK, weight, bias_N, amax)
    x_MN.copy_((x_MN.float() + y.to(x_MN.dtype).float()).to(x_MN.dtype))
    return defer_rms_norm_reference(x_MN, norm_weight_N, eps, scaled_MN, scratch)


def _launch(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    rows: NormedRows | None = None,
    gated: bool = False,
    norm_weight_N: Tensor | None = None,
    scaled_MN: Tensor | None = None,
) -> int:
    """Launch the kernel for this many rows; how many blocks of outputs it was cut into."""
    num_rows, size_k = x_MK.shape
    size_n = y_MN.shape[1]
    num_squares, eps = (rows.num_squares, rows.eps) if rows else (1, 0.0)
    pdl = supports_pdl(x_MK)
    arguments = (
        x_MK,
        weight_NK,
        bias_N if bias_N is not None else weight_NK,
        y_MN,
        norm_weight_N if norm_weight_N is not None else weight_NK,
        scaled_MN if scaled_MN is not None else y_MN,
        scratch.squares,
        scratch.partials,
        scratch.arrived,
        num_rows,
        size_n,
        size_k,
    )
    flags = {
        "HAS_BIAS": bias_N is not None,
        "GATED": gated,
        "RESIDUAL": norm_weight_N is not None,
        "DEFERRED_NORM": rows is not None,
        "BLOCK_J": next_power_of_two(num_squares),
        "PDL": pdl,
        **pdl_launch(pdl),
    }
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

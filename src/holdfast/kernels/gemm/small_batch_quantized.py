"""Small batches by an 8-bit weight with a scale a row: the products of kernels/gemm/small_batch.py for half the bytes.

M rows, N outputs, K inputs, J blocks of K or N, P amax values

Prologue and epilogue are those of kernels/gemm/small_batch.py. For e4m3 weights the prologue quantizes rows to e4m3: their
producer stored amax by block, which gives the scale. For int8 weights rows are not quantized. A deferred RMSNorm does not
change a row's codes: 1 / rms is a factor of the whole row, like its scale.
"""

from torch import Tensor

from holdfast.kernels.fp8 import kernel_codes, loaded_numbers, quantized_numbers
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, RowAmax, SmallBatchScratch
from holdfast.kernels.gemm.gemv import (
    GATE_AMAX,
    LEAST_SCALE,
    num_k_splits,
    quantized_gemv_blocks,
    quantized_gemv_kernel,
    residual_epilogue_rows,
    row_form,
    sum_partials,
)
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, SMALL_BATCH_BLOCK_N
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit_counting, next_power_of_two, tl
from holdfast.quant.quantized_weight import QuantizedWeight

# ruff: noqa: ANN001, ANN201 the arguments of kernels have no types
# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false


BLOCK_K = 256


def takes_weight(weight: QuantizedWeight | Tensor) -> bool:
    """Return True if these kernels take the weight: 8-bit with a scale a row."""
    return isinstance(weight, QuantizedWeight) and weight.scheme.block_columns == 0 and len(weight.shape) == 2


def launch_quantized(
    x_MK: Tensor,
    weight: QuantizedWeight,
    bias_N: Tensor | None,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    rows: NormedRows | None = None,
    gated: bool = False,
    norm_weight_N: Tensor | None = None,
    scaled_MN: Tensor | None = None,
    amax: RowAmax | None = None,
) -> int:
    """Launch the kernel for this many rows, and return its blocks of outputs.

    `rows` is the deferred RMSNorm of x_MK; without it, `amax` is that of x_MK.
    """
    num_rows, size_k = x_MK.shape
    size_n = y_MN.shape[1]
    own = scratch.amax
    assert own is not None, "a quantized product needs amax"
    quantizes_rows = weight.scheme.quantizes_activations
    if rows is not None:
        amax = RowAmax(own.normed, rows.num_squares)
    assert amax is not None or not quantizes_rows, "rows that become codes need amax"
    num_squares, num_amax = rows.num_squares if rows else 1, amax.num_amax if amax else 1
    arguments = (
        x_MK, kernel_codes(weight.codes), weight.scales, bias_N if bias_N is not None else weight.scales, y_MN,
        norm_weight_N if norm_weight_N is not None else weight.scales, scaled_MN if scaled_MN is not None else y_MN,
        scratch.squares, amax.values if amax is not None else own.normed, own.normed, own.gated,
        scratch.partials, scratch.arrived, num_rows, size_n, size_k,
    )  # fmt: skip
    flags = {
        "HAS_BIAS": bias_N is not None, "GATED": gated, "RESIDUAL": norm_weight_N is not None,
        "DEFERRED_NORM": rows is not None, "QUANTIZES_ROWS": quantizes_rows,
        "BLOCK_J": next_power_of_two(num_squares), "BLOCK_P": next_power_of_two(num_amax),
        "PLAIN": is_interpreted(),
    }  # fmt: skip
    eps, options = rows.eps if rows else 0.0, pdl_flags(x_MK)
    if row_form(num_rows):
        blocks = quantized_gemv_blocks(size_k, gated, norm_weight_N is not None, quantizes_rows)
        num_blocks = -(-size_n // blocks.block_n)
        quantized_gemv_kernel[(num_blocks,)](
            *arguments, num_squares, num_amax, eps,
            BLOCK_N=blocks.block_n, BLOCK_K=blocks.block_k, DEPTH=blocks.depth, num_warps=blocks.num_warps, **flags,
            **options,
        )  # fmt: skip
        return num_blocks
    splits = 1 if gated else num_k_splits(size_n, size_k, BLOCK_K)
    num_blocks = -(-size_n // SMALL_BATCH_BLOCK_N)
    small_batch_quantized_kernel[(num_blocks, splits)](
        *arguments, size_k // splits, num_squares, num_amax, eps,
        EVEN_K=size_k % BLOCK_K == 0, NUM_SPLITS=splits, BLOCK_M=FUSED_DECODE_ROWS, BLOCK_N=SMALL_BATCH_BLOCK_N,
        BLOCK_K=BLOCK_K, NUM_STAGES=4, num_warps=4, **flags, **options,
    )  # fmt: skip
    return num_blocks


@jit_counting("num_rows")
def small_batch_quantized_kernel(
    p_x, p_codes, p_scales, p_bias, p_y, p_norm_weight, p_scaled, p_squares, p_amax, p_new_amax, p_gate_amax,
    p_partials, p_arrived,
    num_rows, size_n, size_k, split_k, num_squares, num_amax, eps,
    EVEN_K: constexpr, NUM_SPLITS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
    NUM_STAGES: constexpr, HAS_BIAS: constexpr, GATED: constexpr, RESIDUAL: constexpr, DEFERRED_NORM: constexpr,
    QUANTIZES_ROWS: constexpr, BLOCK_J: constexpr, BLOCK_P: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_split = tl.program_id(1)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < size_n
    m_m = o_m < num_rows
    k_start = i_split * split_k
    up_offset = size_n.to(tl.int64) * size_k
    p_w = p_codes + o_n[:, None].to(tl.int64) * size_k + k_start + o_k[None, :]
    p_rows = p_x + o_m[None, :].to(tl.int64) * size_k + k_start + o_k[:, None]
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    b_up_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
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
    if PDL:
        # Not sooner: programs of the next kernel would take occupancy from this one.
        tl.extra.cuda.gdc_launch_dependents()
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
    b_y *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[:, None] * b_scale[None, :]
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
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
            b_y, p_y, p_norm_weight, p_scaled, p_squares, i_n, o_n, o_m, o_y, m_n, m_m
        )
        b_amax = tl.max(tl.where(m_n[:, None], tl.abs(b_scaled.to(tl.float32)), 0.0), axis=0)
        tl.store(p_new_amax + o_m * tl.num_programs(0) + i_n, b_amax, mask=m_m)
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_nm)

"""Products of a few rows with a large weight, at the speed of memory, with norm, gate and residual sum inside.

M rows, N outputs, K inputs, J blocks of K or N

A decode step reads every weight once, so its time is that of the memory; what can be lost is the time between products.
So everything between two of them happens at the end of the first and the beginning of the second:

    before   rms norm: the producer has left x * norm_weight and the squares of x summed by block; this product is scaled
             by 1 / rms when it is done, because the scale is the same for the whole row
    after    y                                           plain
             silu(gate) * up                             gated: the upper and the lower half of the weight's rows
             x += y;  x * next norm_weight;  squares     residual

One row is multiplied where it is loaded. More rows go through the tensor cores: the weight is their first operand and the
rows are the second, so that sixteen rows fill an instruction; a weight with few rows is cut along K into a number of parts
that its shape alone decides, and whoever finishes last adds the parts in their order. So among steps of 2 to MAX_ROWS rows
a row's bits do not depend on the others.
"""

import torch

from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, RowAmax, SmallBatchScratch, defer_rms_norm_reference
from holdfast.kernels.gemm.gemv import BLOCK_N, MAX_ROWS, leave_row, leave_rows, num_parts, row_form, summed_parts
from holdfast.kernels.gemm.small_batch_quantized import gate_amax_reference, launch_quantized, quantized_sums_reference
from holdfast.kernels.triton_compat import (
    constexpr,
    jit,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    supports_pdl,
    tl,
)
from holdfast.quant.quantized_weight import QuantizedWeight

# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false


BLOCK_K = 128
MIN_SQUARE_COLUMNS = 2
"""The fewest columns of x whose squares are summed as one block."""


def normed_linear(
    rows: NormedRows,
    weight: torch.Tensor | QuantizedWeight,
    bias_N: torch.Tensor | None,
    gated: bool,
    y_MN: torch.Tensor,
    scratch: SmallBatchScratch,
) -> torch.Tensor:
    """norm(x) @ weight.T + bias, or silu(upper half) * lower half of it, into `y_MN`, in its type."""
    if isinstance(weight, QuantizedWeight):
        launch_quantized(rows.scaled_MK, weight, bias_N, y_MN, scratch, rows=rows, gated=gated)
    else:
        _launch(rows.scaled_MK, weight, bias_N, y_MN, scratch, rows=rows, gated=gated)
    return y_MN


def normed_linear_reference(
    rows: NormedRows,
    weight: torch.Tensor | QuantizedWeight,
    bias_N: torch.Tensor | None,
    gated: bool,
    y_MN: torch.Tensor,
    scratch: SmallBatchScratch,
) -> torch.Tensor:
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


def linear_add(
    a_MK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias_N: torch.Tensor | None,
    x_MN: torch.Tensor,
    norm_weight_N: torch.Tensor,
    eps: float,
    scaled_MN: torch.Tensor,
    scratch: SmallBatchScratch,
    amax: RowAmax | None = None,
) -> NormedRows:
    """x += a @ weight.T + bias, and x as the next norm's half-done input; `amax` are those of `a`, for a weight that wants codes."""
    if isinstance(weight, QuantizedWeight):
        num_blocks = launch_quantized(
            a_MK, weight, bias_N, x_MN, scratch, norm_weight_N=norm_weight_N, scaled_MN=scaled_MN, amax=amax
        )
    else:
        num_blocks = _launch(a_MK, weight, bias_N, x_MN, scratch, norm_weight_N=norm_weight_N, scaled_MN=scaled_MN)
    return NormedRows(scaled_MN, num_blocks, eps)


def linear_add_reference(
    a_MK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias_N: torch.Tensor | None,
    x_MN: torch.Tensor,
    norm_weight_N: torch.Tensor,
    eps: float,
    scaled_MN: torch.Tensor,
    scratch: SmallBatchScratch,
    amax: RowAmax | None = None,
) -> NormedRows:
    """The same in plain torch; the squares of a row are summed as one block."""
    if isinstance(weight, QuantizedWeight):
        y = quantized_sums_reference(a_MK, weight, amax)
    else:
        y = a_MK.float() @ weight.float().t()
    if bias_N is not None:
        y = y + bias_N.float()
    x_MN.copy_((x_MN.float() + y.to(x_MN.dtype).float()).to(x_MN.dtype))
    return defer_rms_norm_reference(x_MN, norm_weight_N, eps, scaled_MN, scratch)


def _launch(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    y_MN: torch.Tensor,
    scratch: SmallBatchScratch,
    rows: NormedRows | None = None,
    gated: bool = False,
    norm_weight_N: torch.Tensor | None = None,
    scaled_MN: torch.Tensor | None = None,
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
        scratch.parts,
        scratch.arrived,
        num_rows,
        size_n,
        size_k,
    )
    flags = {
        "HAS_BIAS": bias_N is not None,
        "GATED": gated,
        "RESIDUAL": norm_weight_N is not None,
        "SCALED": rows is not None,
        "BLOCK_J": next_power_of_two(num_squares),
        "PDL": pdl,
        **pdl_launch(pdl),
    }
    if row_form(num_rows):
        block_n, block_k, num_warps = _row_blocks(size_k, gated)
        num_blocks = -(-size_n // block_n)
        _row_kernel[(num_blocks,)](
            *arguments,
            num_squares,
            eps,
            EVEN=size_k % block_k == 0 and size_n % block_n == 0,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=num_warps,
            **flags,
        )
        return num_blocks
    parts = 1 if gated else num_parts(size_n, size_k, BLOCK_K)
    num_blocks = -(-size_n // BLOCK_N)
    _rows_kernel[(num_blocks, parts)](
        *arguments,
        size_k // parts,
        num_squares,
        eps,
        EVEN_K=size_k % BLOCK_K == 0,
        NUM_PARTS=parts,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        NUM_STAGES=4 if gated else 5,
        num_warps=4,
        **flags,
    )
    return num_blocks


def _row_blocks(size_k: int, gated: bool) -> tuple[int, int, int]:
    """Outputs and inputs of a block, and warps, for one row: measured on an H200 (docs/log.md)."""
    if size_k > 16384:
        return 4, 512, 2
    if size_k > 6144:
        return 8, 512, 8
    block_k = next((size for size in (1024, 512, 256, 128) if size_k % size == 0), 512)
    return (MIN_SQUARE_COLUMNS if gated else 4) * 1024 // block_k, block_k, 4


@jit
def _row_kernel(
    p_x,
    p_weight,
    p_bias,
    p_y,
    p_norm_weight,
    p_scaled,
    p_squares,
    p_parts,
    p_arrived,
    num_rows,
    size_n,
    size_k,
    num_squares,
    eps,
    EVEN: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    HAS_BIAS: constexpr,
    GATED: constexpr,
    RESIDUAL: constexpr,
    SCALED: constexpr,
    BLOCK_J: constexpr,
    PDL: constexpr,
):
    i_n = tl.program_id(0)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < size_n
    p_w = p_weight + o_n[:, None].to(tl.int64) * size_k + o_k[None, :]
    up_offset = size_n.to(tl.int64) * size_k
    b_sum = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    b_up_sum = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    # The weight waits for nobody: its first block is on the way before the producer of x has ended.
    m_k = o_k < size_k
    m_w = m_n[:, None] & m_k[None, :]
    b_first_w = tl.load(p_w, mask=m_w, other=0.0, eviction_policy="evict_first")
    if GATED:
        b_first_up = tl.load(p_w + up_offset, mask=m_w, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if SCALED:
        o_j = tl.arange(0, BLOCK_J)
        b_squares = tl.load(p_squares + o_j, mask=o_j < num_squares, other=0.0)
    b_x = tl.load(p_x + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_sum += b_first_w.to(tl.float32) * b_x[None, :]
    if GATED:
        b_up_sum += b_first_up.to(tl.float32) * b_x[None, :]
    for k in range(BLOCK_K, size_k, BLOCK_K):
        if EVEN:
            b_x = tl.load(p_x + k + o_k).to(tl.float32)
            b_w = tl.load(p_w + k, eviction_policy="evict_first").to(tl.float32)
        else:
            m_k = k + o_k < size_k
            m_w = m_n[:, None] & m_k[None, :]
            b_x = tl.load(p_x + k + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_w = tl.load(p_w + k, mask=m_w, other=0.0, eviction_policy="evict_first").to(tl.float32)
        b_sum += b_w * b_x[None, :]
        if GATED:
            if EVEN:
                b_up = tl.load(p_w + up_offset + k, eviction_policy="evict_first").to(tl.float32)
            else:
                b_up = tl.load(p_w + up_offset + k, mask=m_w, other=0.0, eviction_policy="evict_first").to(tl.float32)
            b_up_sum += b_up * b_x[None, :]
    b_y = tl.sum(b_sum, axis=1)
    b_up_y = tl.sum(b_up_sum, axis=1)
    if SCALED:
        scale = tl.rsqrt(tl.sum(b_squares, axis=0) / size_k + eps)
        b_y *= scale
        b_up_y *= scale
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
        if GATED:
            b_up_y += tl.load(p_bias + size_n + o_n, mask=m_n, other=0.0).to(tl.float32)
    if GATED:
        b_y = b_y * tl.sigmoid(b_y) * b_up_y
    if RESIDUAL:
        b_y, _ = leave_row(b_y, p_y, p_norm_weight, p_scaled, p_squares, i_n, o_n, m_n)
    tl.store(p_y + o_n, b_y.to(p_y.dtype.element_ty), mask=m_n)


@jit_counting("num_rows")
def _rows_kernel(
    p_x,
    p_weight,
    p_bias,
    p_y,
    p_norm_weight,
    p_scaled,
    p_squares,
    p_parts,
    p_arrived,
    num_rows,
    size_n,
    size_k,
    part_k,
    num_squares,
    eps,
    EVEN_K: constexpr,
    NUM_PARTS: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    NUM_STAGES: constexpr,
    HAS_BIAS: constexpr,
    GATED: constexpr,
    RESIDUAL: constexpr,
    SCALED: constexpr,
    BLOCK_J: constexpr,
    PDL: constexpr,
):
    i_n = tl.program_id(0)
    i_part = tl.program_id(1)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < size_n
    m_m = o_m < num_rows
    k_start = i_part * part_k
    up_offset = size_n.to(tl.int64) * size_k
    p_w = p_weight + o_n[:, None].to(tl.int64) * size_k + k_start + o_k[None, :]
    p_rows = p_x + o_m[None, :].to(tl.int64) * size_k + k_start + o_k[:, None]
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    b_up_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if SCALED:
        o_j = tl.arange(0, BLOCK_J)
        m_j = m_m[:, None] & (o_j < num_squares)[None, :]
        b_squares = tl.load(p_squares + o_m[:, None] * num_squares + o_j[None, :], mask=m_j, other=0.0)
    for k in tl.range(0, part_k, BLOCK_K, num_stages=NUM_STAGES):
        m_w = m_n[:, None]
        m_x = m_m[None, :]
        if not EVEN_K:
            m_w = m_w & (k + o_k < part_k)[None, :]
            m_x = m_x & (k + o_k < part_k)[:, None]
        b_w = tl.load(p_w + k, mask=m_w, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_rows + k, mask=m_x, other=0.0)
        b_y = tl.dot(b_w, b_x, b_y)
        if GATED:
            b_up = tl.load(p_w + up_offset + k, mask=m_w, other=0.0, eviction_policy="evict_first")
            b_up_y = tl.dot(b_up, b_x, b_up_y)
    m_nm = m_n[:, None] & m_m[None, :]
    if NUM_PARTS > 1:
        p_part = p_parts + (o_m[None, :] * size_n + o_n[:, None])
        part_size = num_rows * size_n
        tl.store(p_part + i_part * part_size, b_y, mask=m_nm)
        tl.debug_barrier()
        arrived = tl.atomic_add(p_arrived + i_n, 1, sem="acq_rel")
        if arrived != NUM_PARTS - 1:
            return
        tl.store(p_arrived + i_n, 0)
        b_y = summed_parts(p_part, part_size, m_nm, NUM_PARTS)
    if SCALED:
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
        b_y, _ = leave_rows(b_y, p_y, p_norm_weight, p_scaled, p_squares, i_n, o_n, o_m, o_y, m_n, m_m)
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_nm)

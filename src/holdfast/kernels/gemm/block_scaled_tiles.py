"""Up to 64 rows by block-scaled e4m3 weights (fp8_block): tensor-core tiles of quantized rows, nearly bound by memory.

M rows, N outputs, K inputs, B blocks of 128 columns

The weight is the first operand of wgmma and the rows are the second, as in kernels/gemm/row_scaled_tiles.py. A block's
sums are scaled before the next block, so a program waits for every product. Several programs on a multiprocessor hide
that wait: a weight with few outputs is split along K (split-K). The last program to finish adds the partial sums in
order. The weight's shape alone decides the number of splits, so the order of a sum does not depend on the rows.
"""

from torch import Tensor

from holdfast.kernels.fp8 import BLOCK_COLUMNS, kernel_codes, loaded_numbers
from holdfast.kernels.gemm.gemv import arrive, sum_partials
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, TileScratch
from holdfast.kernels.geometry import BLOCK_SCALED_BLOCK_N, BLOCK_SCALED_ROWS, block_scaled_splits
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit_counting, next_power_of_two, tl
from holdfast.quant.quantized_weight import QuantizedWeight

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


NUM_STAGES = 4
"""Pipeline stages. Stated at the loop, they include the loads of scales: with 64 rows those cost as much as the product."""


def row_form(num_rows: int) -> int:
    """Return the rows of a tile, or 0 for too many rows: the specialization for the number of rows."""
    return max(16, next_power_of_two(num_rows)) if num_rows <= BLOCK_SCALED_ROWS else 0


def takes(weight: QuantizedWeight, num_rows: int, scratch: TileScratch | None) -> bool:
    """Return True if these kernels take this many rows and this weight, with room for partial sums."""
    scheme = weight.scheme
    if not scheme.quantizes_activations or scheme.block_columns != BLOCK_COLUMNS or len(weight.shape) != 2:
        return False
    is_cut_alike = scheme.block_rows % BLOCK_SCALED_BLOCK_N == 0
    return row_form(num_rows) > 0 and is_cut_alike and scratch is not None


def block_scaled_linear(rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor) -> Tensor:
    """Compute rows @ weight.T + bias into `out_MN`, in its type. `takes` must accept the weight and rows."""
    (num_rows, size_k), (size_n, _), scratch = rows.codes_TK.shape, weight.shape, rows.scratch
    assert weight.shape == (size_n, size_k), f"{weight.shape=} {size_k=}"
    assert out_MN.shape == (num_rows, size_n), f"{out_MN.shape=} {weight.shape=} {num_rows=}"
    assert rows.scales_TB.shape[1] == weight.scales.shape[1], f"{rows.scales_TB.shape=} {weight.scales.shape=}"
    assert scratch is not None, "no room for partial sums"
    num_blocks, splits = -(-size_n // BLOCK_SCALED_BLOCK_N), block_scaled_splits(weight.form_rows, size_k)
    assert splits == 1 or splits * num_rows * size_n <= scratch.partials.numel(), f"{scratch.partials.shape=}"
    assert splits == 1 or num_blocks <= scratch.arrived.numel(), f"{scratch.arrived.shape=}"
    block_scaled_tile_kernel[(num_blocks, splits)](
        kernel_codes(rows.codes_TK), rows.scales_TB, kernel_codes(weight.codes), weight.scales,
        bias_N if bias_N is not None else weight.scales, out_MN, scratch.partials, scratch.arrived, num_rows, size_n,
        size_k, -(-size_k // (splits * BLOCK_COLUMNS)) * BLOCK_COLUMNS, weight.scales.shape[1],
        BLOCK_ROWS=weight.scheme.block_rows, HAS_BIAS=bias_N is not None, EVEN_K=size_k % BLOCK_COLUMNS == 0,
        NUM_SPLITS=splits, BLOCK_M=row_form(num_rows), BLOCK_N=BLOCK_SCALED_BLOCK_N, BLOCK_K=BLOCK_COLUMNS,
        NUM_STAGES=NUM_STAGES, PLAIN=is_interpreted(), num_warps=4, **pdl_flags(out_MN),
    )  # fmt: skip
    return out_MN


@jit_counting("num_rows")
def block_scaled_tile_kernel(
    p_x, p_x_scales, p_codes, p_scales, p_bias, p_out, p_partials, p_arrived,
    num_rows, size_n, size_k, split_k, scale_columns,
    BLOCK_ROWS: constexpr, HAS_BIAS: constexpr, EVEN_K: constexpr, NUM_SPLITS: constexpr, BLOCK_M: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < size_n
    m_m = o_m < num_rows
    m_nm = m_n[:, None] & m_m[None, :]
    p_w = p_codes + o_n[:, None].to(tl.int64) * size_k + o_k[None, :]
    p_rows = p_x + o_m[None, :].to(tl.int64) * size_k + o_k[:, None]
    p_x_scales += o_m * scale_columns
    p_scales += (i_n * BLOCK_N // BLOCK_ROWS).to(tl.int64) * scale_columns
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first_k = tl.program_id(1) * split_k
    if PDL:
        tl.extra.cuda.gdc_wait()
    for k in tl.range(first_k, tl.minimum(first_k + split_k, size_k), BLOCK_K, num_stages=NUM_STAGES):
        m_w = m_n[:, None]
        m_x = m_m[None, :]
        if not EVEN_K:
            m_w = m_w & (k + o_k < size_k)[None, :]
            m_x = m_x & (k + o_k < size_k)[:, None]
        b_w = tl.load(p_w + k, mask=m_w, other=0.0, eviction_policy="evict_first")
        b_x = loaded_numbers(tl.load(p_rows + k, mask=m_x, other=0.0), PLAIN)
        i_k = k // BLOCK_K
        weight_scale = tl.load(p_scales + i_k)
        b_x_scales = tl.load(p_x_scales + i_k, mask=m_m, other=0.0)
        b_y += tl.dot(loaded_numbers(b_w, PLAIN), b_x) * weight_scale * b_x_scales[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NUM_SPLITS > 1:
        p_partial = p_partials + (o_m[None, :] * size_n + o_n[:, None])
        arrived = arrive(p_partial, p_arrived, b_y, num_rows * size_n, m_nm)
        if arrived != NUM_SPLITS - 1:
            return
        b_y = sum_partials(p_partial, p_arrived, num_rows * size_n, m_nm, NUM_SPLITS)
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    p_y = p_out + o_m[None, :].to(tl.int64) * size_n + o_n[:, None]
    tl.store(p_y, b_y.to(p_out.dtype.element_ty), mask=m_nm)

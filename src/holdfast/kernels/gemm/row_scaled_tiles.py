"""Small and middle batches by row-scaled e4m3 weights: quantized rows through the tensor cores, nearly bound by memory.

M rows, N outputs, K inputs, J blocks of N

The weight is the first operand of wgmma and the rows are the second, as in kernels/gemm/quantized_tiles.py. The epilogue
applies the scales of weight and rows. A weight with few outputs is split along K (split-K): its shape alone decides the
number of splits, and the last program to finish adds the partial sums in order. So results are batch invariant. Gate and
up are one product with the gate in its epilogue, which also stores the amax of every row by block of outputs; then the
next kernel quantizes the rows in one pass.
"""

from torch import Tensor

from holdfast.kernels.activation import activated_numbers
from holdfast.kernels.fp8 import kernel_codes, loaded_numbers, size_bits
from holdfast.kernels.gemm.gemv import arrive, sum_partials
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, RowAmaxBits, TileScratch
from holdfast.kernels.geometry import (
    ROW_SCALED_BLOCK_K,
    ROW_SCALED_BLOCK_N,
    ROW_SCALED_PROGRAMS,
    ROW_SCALED_ROWS,
    ROW_SCALED_SPLIT_ROWS,
    row_scaled_splits,
)
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit_counting,
    next_power_of_two,
    shared_bytes,
    tl,
)
from holdfast.quant.packed_weight import AnyWeight
from holdfast.quant.quantized_weight import QuantizedWeight

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


LEAST_STAGES, MOST_STAGES = 3, 10
"""Pipeline stages of up to 16 rows."""
RESERVED_BYTES = 1024
"""Shared memory of a program that CUDA keeps for itself."""


def row_form(num_rows: int) -> int:
    """Return the rows of a tile, or 0 for too many rows: the specialization for the number of rows."""
    return max(16, next_power_of_two(num_rows)) if num_rows <= ROW_SCALED_SPLIT_ROWS else 0


def takes(weight: AnyWeight, num_rows: int, scratch: TileScratch | None) -> bool:
    """Return True if these kernels, not torch's scaled product, take this many rows (see kernels/geometry.py)."""
    if not isinstance(weight, QuantizedWeight) or len(weight.shape) != 2:
        return False
    if not weight.scheme.quantizes_activations or weight.scheme.block_columns:
        return False
    is_split = scratch is not None and row_scaled_splits(*weight.shape) > 1
    return num_rows <= (ROW_SCALED_SPLIT_ROWS if is_split else ROW_SCALED_ROWS)


def takes_gate(gate_up: AnyWeight, down: AnyWeight, num_rows: int, scratch: TileScratch | None) -> bool:
    """Return True if the gate is fused into the gate-and-up product, whose result is quantized for the down product."""
    both = (gate_up, down)
    return num_rows <= ROW_SCALED_ROWS and scratch is not None and all(takes(one, num_rows, None) for one in both)


def row_scaled_linear(rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor) -> Tensor:
    """Compute rows @ weight.T + bias into `out_MN`, in its type."""
    _launch(rows, weight, bias_N, out_MN)
    return out_MN


def row_scaled_gate(
    rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, kind: str, out_MI: Tensor
) -> RowAmaxBits:
    """Store activation(upper half) * lower half of rows @ weight.T + bias into `out_MI`; return its amax."""
    assert rows.scratch is not None, "a gated product needs amax"
    return RowAmaxBits(rows.scratch.amax, _launch(rows, weight, bias_N, out_MI, kind))


def _launch(rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor, kind: str = "") -> int:
    """Launch the kernel, and return its blocks of outputs."""
    (num_rows, size_k), size_n, scratch = rows.codes_TK.shape, out_MN.shape[1], rows.scratch
    block_m, num_blocks = row_form(num_rows), -(-size_n // ROW_SCALED_BLOCK_N)
    assert block_m, f"{num_rows} rows, and these kernels take {ROW_SCALED_SPLIT_ROWS}"
    assert weight.shape == (size_n * (2 if kind else 1), size_k), f"{weight.shape=} {out_MN.shape=} {size_k=}"
    splits = 1 if kind or scratch is None else row_scaled_splits(size_n, size_k)
    if scratch is not None:
        assert splits == 1 or splits * num_rows * size_n <= scratch.partials.numel(), f"{scratch.partials.shape=}"
        assert splits == 1 or num_blocks <= scratch.arrived.numel(), f"{scratch.arrived.shape=}"
        assert not kind or num_rows * num_blocks <= scratch.amax.numel(), f"{scratch.amax.shape=}"
    shared = (weight.scales,) * 3 if scratch is None else scratch
    row_scaled_tile_kernel[(num_blocks, splits)](
        kernel_codes(rows.codes_TK), rows.scales_TB, kernel_codes(weight.codes), weight.scales,
        bias_N if bias_N is not None else weight.scales, out_MN, *shared, num_rows, size_n, size_k,
        -(-size_k // (splits * ROW_SCALED_BLOCK_K)) * ROW_SCALED_BLOCK_K,
        KIND=kind, HAS_BIAS=bias_N is not None, EVEN_K=size_k % ROW_SCALED_BLOCK_K == 0, NUM_SPLITS=splits,
        BLOCK_M=block_m, BLOCK_N=ROW_SCALED_BLOCK_N, BLOCK_K=ROW_SCALED_BLOCK_K,
        NUM_STAGES=num_stages(block_m, num_blocks * splits, bool(kind), shared_bytes(out_MN)), PLAIN=is_interpreted(),
        num_warps=8 if block_m == 128 else 4, **pdl_flags(out_MN),
    )  # fmt: skip
    return num_blocks


def num_stages(block_m: int, num_programs: int, gated: bool, shared: int) -> int:
    """Return the pipeline stages; `shared` is the shared memory of a multiprocessor.

    Up to 16 rows: as many as let all programs run at once. With one stage more, the last few of 400 programs ran alone.
    With more rows: six, or four if a multiprocessor runs several programs at once.
    """
    if block_m == 16:
        of_program = shared // -(-num_programs // ROW_SCALED_PROGRAMS) - RESERVED_BYTES
        stage = ((2 if gated else 1) * ROW_SCALED_BLOCK_N + block_m) * ROW_SCALED_BLOCK_K
        return min(MOST_STAGES, max(LEAST_STAGES, of_program // stage))
    return 4 if block_m == 128 or num_programs > 2 * ROW_SCALED_PROGRAMS else 6


@jit_counting("num_rows")
def row_scaled_tile_kernel(
    p_x, p_x_scales, p_codes, p_scales, p_bias, p_out, p_partials, p_arrived, p_amax,
    num_rows, size_n, size_k, split_k,
    KIND: constexpr, HAS_BIAS: constexpr, EVEN_K: constexpr, NUM_SPLITS: constexpr, BLOCK_M: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    GATED: constexpr = KIND != ""
    i_n = tl.program_id(0)
    i_split = tl.program_id(1)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < size_n
    m_m = o_m < num_rows
    m_nm = m_n[:, None] & m_m[None, :]
    p_w = p_codes + o_n[:, None].to(tl.int64) * size_k + o_k[None, :]
    p_rows = p_x + o_m[None, :].to(tl.int64) * size_k + o_k[:, None]
    up_offset = size_n.to(tl.int64) * size_k
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    b_up_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first_k = i_split * split_k
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
        # Tensor cores add e4m3 products with few bits: accumulate in float32 every 128 columns.
        b_y = tl.dot(loaded_numbers(b_w, PLAIN), b_x, b_y, max_num_imprecise_acc=128)
        if GATED:
            b_up = tl.load(p_w + up_offset + k, mask=m_w, other=0.0, eviction_policy="evict_first")
            b_up_y = tl.dot(loaded_numbers(b_up, PLAIN), b_x, b_up_y, max_num_imprecise_acc=128)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NUM_SPLITS > 1:
        p_partial = p_partials + (o_m[None, :] * size_n + o_n[:, None])
        arrived = arrive(p_partial, p_arrived, b_y, num_rows * size_n, m_nm)
        if arrived != NUM_SPLITS - 1:
            return
        b_y = sum_partials(p_partial, p_arrived, num_rows * size_n, m_nm, NUM_SPLITS)
    b_x_scales = tl.load(p_x_scales + o_m, mask=m_m, other=0.0)
    b_y *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[:, None] * b_x_scales[None, :]
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        b_up_y *= tl.load(p_scales + size_n + o_n, mask=m_n, other=0.0)[:, None] * b_x_scales[None, :]
        if HAS_BIAS:
            b_up_y += tl.load(p_bias + size_n + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        b_y = activated_numbers(b_y, KIND) * b_up_y
    b_out = b_y.to(p_out.dtype.element_ty)
    tl.store(p_out + o_m[None, :].to(tl.int64) * size_n + o_n[:, None], b_out, mask=m_nm)
    if GATED:
        # Compare as integers: NaN is above all numbers, so it is not lost.
        b_sizes = tl.where(m_n[:, None], size_bits(b_out.to(tl.float32)), 0)
        tl.store(p_amax + o_m * tl.num_programs(0) + i_n, tl.max(b_sizes, axis=0), mask=m_m)

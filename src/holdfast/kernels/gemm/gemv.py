"""GEMV, bound by memory: one row by a weight, plain or row-scaled 8-bit; and functions that small_batch.py shares.

M rows, N outputs, K inputs, J blocks of K or N, P amax values

kernels/gemm/small_batch.py describes prologue and epilogue, and launches this kernel for a single row.
"""

from typing import NamedTuple

from holdfast.kernels.fp8 import LEAST_SCALE, loaded_numbers, quantized_numbers
from holdfast.kernels.geometry import GEMV_MIN_BLOCK_N, NUM_GATE_AMAX, SMALL_BATCH_BLOCK_N, SPLIT_K_PROGRAMS
from holdfast.kernels.norm import load_norm_weight
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, release_then_wait, tl

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


MAX_K_SPLITS = 8
GATE_AMAX = kernel_constant(NUM_GATE_AMAX)
SIDE_OUTPUTS, SIDE_COLUMNS_PER_WARP = 4, 256
"""Outputs per program of a side product of one row (`SideProduct`), and its columns per load and warp."""
SIDE_N = kernel_constant(SIDE_OUTPUTS)


def row_form(num_rows: int) -> bool:
    """Return True if a product is a GEMV: the specialization for the number of rows."""
    return num_rows == 1


def num_k_splits(size_n: int, size_k: int, block_k: int) -> int:
    """Return the split-K for this shape: enough programs, with whole blocks of K in each."""
    splits = 1
    num_blocks = -(-size_n // SMALL_BATCH_BLOCK_N)
    while num_blocks * splits < SPLIT_K_PROGRAMS and splits < MAX_K_SPLITS and size_k % (2 * splits * block_k) == 0:
        splits *= 2
    return splits


@jit
def arrive(p_partial, p_arrived, b_y, partial_size, m_nm):
    """Split-K: store this split's partial sums; return how many programs of the block have already stored theirs."""
    tl.store(p_partial + tl.program_id(1) * partial_size, b_y, mask=m_nm)
    tl.debug_barrier()
    return tl.atomic_add(p_arrived + tl.program_id(0), 1, sem="acq_rel")


@jit
def sum_partials(p_partial, p_arrived, partial_size, m_nm, NUM_SPLITS: constexpr):
    """Finish split-K in the last program: add the partial sums in order, as other programs stored them, and clear the count."""
    tl.store(p_arrived + tl.program_id(0), 0)
    b_y = tl.load(p_partial, mask=m_nm, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, NUM_SPLITS):
        b_y += tl.load(p_partial + i * partial_size, mask=m_nm, other=0.0, cache_modifier=".cg")
    return b_y


@jit
def residual_epilogue_row(b_y, p_y, p_norm_weight, p_scaled, p_squares, i_n, o_n, m_n, OFFSET: constexpr):
    """Epilogue of one row: return x + y and x + y scaled by the norm's weight; store the latter and the squares."""
    b_x = tl.load(p_y + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_y = (b_x + b_y.to(p_y.dtype.element_ty).to(tl.float32)).to(p_y.dtype.element_ty).to(tl.float32)
    b_norm = load_norm_weight(p_norm_weight, o_n, m_n, OFFSET)
    b_scaled = (b_y * b_norm).to(p_scaled.dtype.element_ty)
    tl.store(p_scaled + o_n, b_scaled, mask=m_n)
    tl.store(p_squares + i_n, tl.sum(tl.where(m_n, b_y * b_y, 0.0), axis=0))
    return b_y, b_scaled


@jit
def residual_epilogue_rows(
    b_y, p_y, p_norm_weight, p_scaled, p_squares, i_n, o_n, o_m, o_y, m_n, m_m, OFFSET: constexpr
):
    """Like `residual_epilogue_row`, for a block of outputs of all rows, [N, M]."""
    m_nm = m_n[:, None] & m_m[None, :]
    b_old = tl.load(p_y + o_y, mask=m_nm, other=0.0).to(tl.float32)
    b_y = (b_old + b_y.to(p_y.dtype.element_ty).to(tl.float32)).to(p_y.dtype.element_ty).to(tl.float32)
    b_norm = load_norm_weight(p_norm_weight, o_n, m_n, OFFSET)
    b_scaled = (b_y * b_norm[:, None]).to(p_scaled.dtype.element_ty)
    tl.store(p_scaled + o_y, b_scaled, mask=m_nm)
    b_squares = tl.sum(tl.where(m_n[:, None], b_y * b_y, 0.0), axis=0)
    tl.store(p_squares + o_m * tl.num_programs(0) + i_n, b_squares, mask=m_m)
    return b_y, b_scaled


@jit
def side_row(
    p_x, p_side, p_side_out, p_squares, i_p, side_n, size_k, num_squares, eps,
    BLOCK_N: constexpr, BLOCK_K: constexpr, BLOCK_J: constexpr, RELEASES: constexpr, PDL: constexpr,
):  # fmt: skip
    """Compute some outputs of a side product of one row."""
    o_p = i_p * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_p = o_p < side_n
    p_w = p_side + o_p[:, None].to(tl.int64) * size_k + o_k[None, :]
    if RELEASES:
        release_then_wait(PDL)
    elif PDL:
        tl.extra.cuda.gdc_wait()
    o_j = tl.arange(0, BLOCK_J)
    b_side_squares = tl.load(p_squares + o_j, mask=o_j < num_squares, other=0.0)
    b_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(0, size_k, BLOCK_K):
        m_k = k + o_k < size_k
        b_w = tl.load(p_w + k, mask=m_p[:, None] & m_k[None, :], other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_x + k + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_sum += b_w.to(tl.float32) * b_x[None, :]
    scale = tl.rsqrt(tl.sum(b_side_squares, axis=0) / size_k + eps)
    tl.store(p_side_out + o_p, tl.sum(b_sum, axis=1) * scale, mask=m_p)


class GemvBlocks(NamedTuple):
    """Outputs per program, inputs per load, loads in flight, and warps."""

    block_n: int
    block_k: int
    depth: int
    """Loads whose products are added in half precision before float32; 0: all sums are float32."""
    num_warps: int


def plain_gemv_blocks(size_k: int, gated: bool) -> GemvBlocks:
    """Return the fastest blocks for a plain weight on an H200 (docs/log.md)."""
    if size_k > 16384:
        return GemvBlocks(4, 512, 0, 2)
    if size_k > 6144:
        return GemvBlocks(8, 512, 0, 8)
    block_k = next((size for size in (1024, 512, 256, 128) if size_k % size == 0), 512)
    if size_k > 1024 and size_k % block_k:
        return GemvBlocks(GEMV_MIN_BLOCK_N, 1024, 0, 1)  # masked, such as 2880 columns
    return GemvBlocks((GEMV_MIN_BLOCK_N if gated else 4) * 1024 // block_k, block_k, 0, 4)


def quantized_gemv_blocks(size_k: int, gated: bool, residual: bool, quantized: bool) -> GemvBlocks:
    """Return the fastest blocks for a quantized weight on an H200 (docs/log.md)."""
    block_k = next((size for size in (512, 256, 128) if size_k % size == 0), 0)
    if not quantized or block_k == 0:
        return GemvBlocks(4 if gated else 8, 512, 0, 4)
    loads = size_k // block_k
    if residual and size_k % 1024 == 0 and 3 <= size_k // 1024 <= 5:
        return GemvBlocks(8, 1024, size_k // 1024, 4)  # a program loads its whole weight at once
    if residual:
        # Programs with more outputs store fewer squares and amax for the next product to read.
        num_warps = 4 if size_k > 16384 else 2
        return GemvBlocks(8, block_k, next(depth for depth in (2, 5, 3, 1) if loads % depth == 0), num_warps)
    depth = next(depth for depth in (5, 4, 3, 2, 1) if loads % depth == 0)
    return GemvBlocks(4, block_k, depth, 2 if gated else 1)


HALF_SUMS_ASM = kernel_constant("""{
.reg .b16 low, high;
.reg .b32 a, b;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 a, low;
cvt.rn.f16x2.e4m3x2 b, high;
fma.rn.f16x2 $0, a, $3, $5;
fma.rn.f16x2 $1, b, $4, $6;
}""")
"""$2: four e4m3 weights; $3, $4: four inputs in half precision; $5, $6 and $0, $1: four sums before and after."""


@jit
def half_sums(b_w, b_x, b_sums, PLAIN: constexpr):
    """Compute sums + w * x in half precision."""
    if PLAIN:
        b_sums = (loaded_numbers(b_w, PLAIN).to(tl.float32) * b_x.to(tl.float32) + b_sums).to(tl.float16)
    else:
        b_sums = tl.inline_asm_elementwise(
            HALF_SUMS_ASM, "=r,=r,r,r,r,r,r", [b_w, b_x, b_sums], dtype=tl.float16, is_pure=True, pack=4
        )
    return b_sums


@jit
def _load_deep(p, BLOCK_K: constexpr, DEPTH: constexpr):
    """Load DEPTH consecutive blocks; the rest of the tuple repeats the first and is unused."""
    b_0 = tl.load(p, eviction_policy="evict_first")
    b_1 = b_0
    b_2 = b_0
    b_3 = b_0
    b_4 = b_0
    if DEPTH > 1:
        b_1 = tl.load(p + BLOCK_K, eviction_policy="evict_first")
    if DEPTH > 2:
        b_2 = tl.load(p + 2 * BLOCK_K, eviction_policy="evict_first")
    if DEPTH > 3:
        b_3 = tl.load(p + 3 * BLOCK_K, eviction_policy="evict_first")
    if DEPTH > 4:
        b_4 = tl.load(p + 4 * BLOCK_K, eviction_policy="evict_first")
    return b_0, b_1, b_2, b_3, b_4


@jit
def _halved_inputs(p_x, factor, BLOCK_N: constexpr, BLOCK_K: constexpr, PLAIN: constexpr):
    """Load a block of the row as codes / 16 in half precision: five products of 448 by 28 stay below 65504."""
    b_x = tl.load(p_x + tl.arange(0, BLOCK_K)).to(tl.float32) * factor
    b_x = quantized_numbers(b_x, PLAIN).to(tl.float16) * 0.0625
    return tl.broadcast_to(b_x.to(tl.float16)[None, :], (BLOCK_N, BLOCK_K))


@jit
def _deep_sums(b_w, p_x, factor, DEPTH: constexpr, PLAIN: constexpr):
    """Return the products of DEPTH blocks summed column by column, in float32."""
    BLOCK_N: constexpr = b_w[0].shape[0]
    BLOCK_K: constexpr = b_w[0].shape[1]
    b_sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float16)
    for i in tl.static_range(DEPTH):
        b_x = _halved_inputs(p_x + i * BLOCK_K, factor, BLOCK_N, BLOCK_K, PLAIN)
        b_sums = half_sums(b_w[i], b_x, b_sums, PLAIN)
    return b_sums.to(tl.float32)


@jit
def _row_scale(p_amax, i_row, num_amax, BLOCK_P: constexpr):
    """Return the scale of a row's codes: its largest magnitude maps to 448."""
    o_p = tl.arange(0, BLOCK_P)
    b_amax = tl.load(p_amax + i_row * num_amax + o_p, mask=o_p < num_amax, other=0.0)
    if b_amax.dtype == tl.int32:
        b_amax = b_amax.to(tl.float32, bitcast=True)
    return tl.maximum(tl.max(b_amax, axis=0) / 448.0, LEAST_SCALE)


@jit
def _single(b_codes, QUANTIZES_ROWS: constexpr, PLAIN: constexpr):
    """Convert a weight's numbers or codes to float32."""
    if QUANTIZES_ROWS:
        b_w = loaded_numbers(b_codes, PLAIN).to(tl.float32)
    else:
        b_w = b_codes.to(tl.float32)
    return b_w


@jit
def _even_load(p, m, POLICY: constexpr, EVEN: constexpr):
    """Load a block, under the mask unless all blocks are whole."""
    if EVEN:
        b = tl.load(p, eviction_policy=POLICY)
    else:
        b = tl.load(p, mask=m, other=0.0, eviction_policy=POLICY)
    return b


@jit
def gemv_kernel(
    p_x, p_weight, p_bias, p_y, p_norm_weight, p_scaled, p_squares, p_partials, p_arrived,
    p_scales, p_amax, p_new_amax, p_gate_amax, p_side, p_side_out, side_n, num_rows, size_n, size_k, num_squares,
    num_amax, eps,
    EVEN: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, DEPTH: constexpr, HAS_BIAS: constexpr, GATED: constexpr,
    RESIDUAL: constexpr, DEFERRED_NORM: constexpr, IS_QUANTIZED: constexpr, QUANTIZES_ROWS: constexpr,
    OFFSET: constexpr, GROUP_ROWS: constexpr, BLOCK_J: constexpr, BLOCK_P: constexpr, SIDE_K: constexpr,
    PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    if p_side is not None:
        num_side = tl.cdiv(side_n, SIDE_N)
        if i_n < num_side:
            side_row(
                p_x, p_side, p_side_out, p_squares, i_n, side_n, size_k, num_squares, eps, SIDE_N, SIDE_K, BLOCK_J,
                not IS_QUANTIZED, PDL,
            )  # fmt: skip
            return
        i_n -= num_side
    if GROUP_ROWS > 0:
        p_x += i_n * BLOCK_N // GROUP_ROWS * size_k  # a group of outputs has columns of x for itself
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < size_n
    p_w = p_weight + o_n[:, None].to(tl.int64) * size_k + o_k[None, :]
    up_offset = size_n.to(tl.int64) * size_k
    b_sum = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    b_up_sum = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    # Load the first blocks of the weight before the wait: they are constants.
    m_k = o_k < size_k
    m_w = m_n[:, None] & m_k[None, :]
    if DEPTH > 0:
        p_w = p_weight + tl.minimum(o_n, size_n - 1)[:, None].to(tl.int64) * size_k + o_k[None, :]
        b_first_w = _load_deep(p_w, BLOCK_K, DEPTH)
        if GATED:
            b_first_up = _load_deep(p_w + up_offset, BLOCK_K, DEPTH)
    else:
        b_first_w = tl.load(p_w, mask=m_w, other=0.0, eviction_policy="evict_first")
        if GATED:
            b_first_up = tl.load(p_w + up_offset, mask=m_w, other=0.0, eviction_policy="evict_first")
    if IS_QUANTIZED:
        b_scales = tl.load(p_scales + o_n, mask=m_n, other=0.0)
        if GATED:
            b_up_scales = tl.load(p_scales + size_n + o_n, mask=m_n, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
    else:
        release_then_wait(PDL)
    scale = 1.0
    factor = 1.0
    if QUANTIZES_ROWS:
        scale = _row_scale(p_amax, 0, num_amax, BLOCK_P)
        factor = 1.0 / scale
    if DEFERRED_NORM:
        o_j = tl.arange(0, BLOCK_J)
        b_squares = tl.load(p_squares + o_j, mask=o_j < num_squares, other=0.0)
        if IS_QUANTIZED:
            scale *= tl.rsqrt(tl.sum(b_squares, axis=0) / size_k + eps)
    if DEPTH > 0:
        scale *= 16.0
        b_sum += _deep_sums(b_first_w, p_x, factor, DEPTH, PLAIN)
        if GATED:
            b_up_sum += _deep_sums(b_first_up, p_x, factor, DEPTH, PLAIN)
        for k in range(BLOCK_K * DEPTH, size_k, BLOCK_K * DEPTH):
            b_w = _load_deep(p_w + k, BLOCK_K, DEPTH)
            if GATED:
                b_up = _load_deep(p_w + up_offset + k, BLOCK_K, DEPTH)
            b_sum += _deep_sums(b_w, p_x + k, factor, DEPTH, PLAIN)
            if GATED:
                b_up_sum += _deep_sums(b_up, p_x + k, factor, DEPTH, PLAIN)
    else:
        b_x = tl.load(p_x + o_k, mask=m_k, other=0.0).to(tl.float32)
        if QUANTIZES_ROWS:
            b_x = quantized_numbers(b_x * factor, PLAIN).to(tl.float32)
        b_sum += _single(b_first_w, QUANTIZES_ROWS, PLAIN) * b_x[None, :]
        if GATED:
            b_up_sum += _single(b_first_up, QUANTIZES_ROWS, PLAIN) * b_x[None, :]
        for k in range(BLOCK_K, size_k, BLOCK_K):
            m_k = k + o_k < size_k
            m_w = m_n[:, None] & m_k[None, :]
            b_x = _even_load(p_x + k + o_k, m_k, "", EVEN).to(tl.float32)
            b_w = _even_load(p_w + k, m_w, "evict_first", EVEN)
            if QUANTIZES_ROWS:
                b_x = quantized_numbers(b_x * factor, PLAIN).to(tl.float32)
            b_sum += _single(b_w, QUANTIZES_ROWS, PLAIN) * b_x[None, :]
            if GATED:
                b_up = _even_load(p_w + up_offset + k, m_w, "evict_first", EVEN)
                b_up_sum += _single(b_up, QUANTIZES_ROWS, PLAIN) * b_x[None, :]
    if PDL and IS_QUANTIZED:
        # Release late: programs of the next kernel would take occupancy from this one.
        tl.extra.cuda.gdc_launch_dependents()
    b_y = tl.sum(b_sum, axis=1)
    if IS_QUANTIZED:
        b_y = b_y * b_scales * scale
    else:
        b_up_y = tl.sum(b_up_sum, axis=1)
        if DEFERRED_NORM:
            scale = tl.rsqrt(tl.sum(b_squares, axis=0) / size_k + eps)
            b_y *= scale
            b_up_y *= scale
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    if GATED:
        if IS_QUANTIZED:
            b_up_y = tl.sum(b_up_sum, axis=1) * b_up_scales * scale
        if HAS_BIAS:
            b_up_y += tl.load(p_bias + size_n + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_y = b_y * tl.sigmoid(b_y) * b_up_y
        if QUANTIZES_ROWS:
            b_size = tl.abs(tl.where(m_n, b_y, 0.0).to(p_y.dtype.element_ty).to(tl.float32))
            amax = tl.max(b_size, axis=0).to(tl.int32, bitcast=True)
            tl.atomic_max(p_gate_amax + i_n % GATE_AMAX, amax, sem="relaxed")
    if RESIDUAL:
        b_y, b_scaled = residual_epilogue_row(b_y, p_y, p_norm_weight, p_scaled, p_squares, i_n, o_n, m_n, OFFSET)
        if IS_QUANTIZED:
            tl.store(p_new_amax + i_n, tl.max(tl.where(m_n, tl.abs(b_scaled.to(tl.float32)), 0.0), axis=0))
    tl.store(p_y + o_n, b_y.to(p_y.dtype.element_ty), mask=m_n)

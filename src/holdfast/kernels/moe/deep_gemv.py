"""Deep GEMV: each pair of token and expert by its expert's weight; a program issues all loads of its weight before it multiplies.

P pairs, N outputs, K inputs

A small batch is bound by reading its experts once. A row is a few consecutive loads. e4m3 products are added in half
precision over these loads, then in float32, as in kernels/gemm/gemv.py.
"""

from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.activation import gated_numbers
from holdfast.kernels.fp8 import loaded_numbers, quantized_numbers
from holdfast.kernels.gemm.gemv import GemvBlocks, half_sums
from holdfast.kernels.gemm.quantized_tiles import FP8_ROWS, INT8_ROWS, WeightOperands
from holdfast.kernels.moe.routing import ExpertProduct
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, next_power_of_two, tl
from holdfast.quant.packed_weight import AnyWeight
from holdfast.quant.quantized_weight import QuantizedWeight

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


MAX_DEPTH = 5
"""Most loads of a row whose products are added in half precision: five of 448 by 28 stay below 65504."""
BLOCKS_K = (256, 512, 1024)
"""Choices of columns per load."""
PROGRAM_BYTES = 16384
"""Bytes of the weight that a program loads."""


def takes_deep_loads(weight: AnyWeight) -> bool:
    """Return True if the weight is plain or 8-bit with scales by row, and not too wide."""
    return weight.shape[-1] <= MAX_DEPTH * BLOCKS_K[-1] and (
        isinstance(weight, Tensor)
        or (
            isinstance(weight, QuantizedWeight)
            and weight.scheme.block_columns == 0
            and weight.scheme.codes_per_byte == 1
        )
    )


def column_blocks(size_k: int) -> tuple[int, int]:
    """Return columns of a load and loads of a row with the least padding."""
    if size_k <= BLOCKS_K[0]:
        return max(16, next_power_of_two(size_k)), 1
    depths = {block_k: -(-size_k // block_k) for block_k in BLOCKS_K}
    block_k = min((block for block in BLOCKS_K if depths[block] <= MAX_DEPTH), key=lambda block: depths[block] * block)
    return block_k, depths[block_k]


def gemv_blocks(size_k: int, gated: bool, element_bytes: int) -> GemvBlocks:
    """Return the fastest blocks of a GEMV on an H200 (docs/log.md)."""
    block_k, depth = column_blocks(size_k)
    num_rows = PROGRAM_BYTES // (element_bytes * block_k * depth) // (2 if gated else 1)
    return GemvBlocks(min(16, 1 << max(0, num_rows.bit_length() - 1)), block_k, depth, 4)


class SharedProduct(NamedTuple):
    """Product of a single row by the shared expert's weight, beside those by the row's own experts."""

    weight: Tensor
    """Numbers or codes, of one expert's shape and type."""
    scales: Tensor
    """By row; any tensor stands in for them if the weight is plain."""
    out_1N: Tensor


def deep_gemv(product: ExpertProduct, operands: WeightOperands, shared: SharedProduct | None = None) -> Tensor:
    """Multiply each pair's row by its expert's weight, which `takes_deep_loads` accepts."""
    _, _, order, out_PN, gated, _, bias_EN, form = product
    (num_pairs, size_n), (num_rows, size_k) = out_PN.shape, operands.tensors[0].shape
    blocks = gemv_blocks(size_k, gated, operands.tensors[2].element_size())
    if shared is not None:
        assert num_rows == 1, f"a shared expert beside {num_rows} rows"
        assert bias_EN is None, "a shared expert beside biases"
        assert shared.out_1N.shape == (1, size_n), f"{shared.out_1N.shape=} {out_PN.shape=}"
    _deep_gemv_kernel[(-(-size_n // blocks.block_n), num_pairs + (shared is not None))](
        *operands.tensors, out_PN if bias_EN is None else bias_EN, order.expert_ids_TS, out_PN,
        *((None,) * 3 if shared is None else shared), size_n, size_k,
        KIND=int(operands.kind), HAS_BIAS=bias_EN is not None, PAIRS_PER_ROW=num_pairs // num_rows,
        EVEN=size_k == blocks.block_k * blocks.depth, BLOCK_N=blocks.block_n, BLOCK_K=blocks.block_k,
        DEPTH=blocks.depth, PLAIN=is_interpreted(), num_warps=blocks.num_warps, **form.flags(gated),
        **pdl_flags(out_PN),
    )  # fmt: skip
    return out_PN


@jit
def weight_rows(first_row, o_n, size_n, INTERLEAVED: constexpr):
    """Return the weight rows of outputs, or of their gates, and the distance from a gate to its up."""
    if INTERLEAVED:
        b_rows = first_row + 2 * o_n
        up_rows = first_row * 0 + 1
    else:
        b_rows = first_row + o_n
        up_rows = first_row * 0 + size_n
    return b_rows, up_rows


@jit
def deep_load(p, m, o_k, size_k, EVEN: constexpr, BLOCK_K: constexpr, DEPTH: constexpr):
    """Load DEPTH consecutive blocks; the rest of the tuple repeats the first and is unused."""
    b_0 = _block_load(p, m, o_k < size_k, EVEN)
    b_1 = b_0
    b_2 = b_0
    b_3 = b_0
    b_4 = b_0
    if DEPTH > 1:
        b_1 = _block_load(p + BLOCK_K, m, BLOCK_K + o_k < size_k, EVEN)
    if DEPTH > 2:
        b_2 = _block_load(p + 2 * BLOCK_K, m, 2 * BLOCK_K + o_k < size_k, EVEN)
    if DEPTH > 3:
        b_3 = _block_load(p + 3 * BLOCK_K, m, 3 * BLOCK_K + o_k < size_k, EVEN)
    if DEPTH > 4:
        b_4 = _block_load(p + 4 * BLOCK_K, m, 4 * BLOCK_K + o_k < size_k, EVEN)
    return b_0, b_1, b_2, b_3, b_4


@jit
def _block_load(p, m, m_k, EVEN: constexpr):
    if not EVEN:
        m = m & m_k
    return tl.load(p, mask=m, other=0.0)


@jit
def _as_factor(b_x, b_factors, KIND: constexpr, PLAIN: constexpr):
    """Convert a block of the row to a factor: codes / 16 in half precision, or float32."""
    if KIND == FP8_ROWS:
        if b_factors is not None:
            b_x = quantized_numbers(b_x.to(tl.float32) * b_factors, PLAIN)
        else:
            b_x = loaded_numbers(b_x, PLAIN)
        b_x = (b_x.to(tl.float16) * 0.0625).to(tl.float16)
    else:
        b_x = b_x.to(tl.float32)
    return b_x


@jit
def deep_products(b_w, b_x, b_factors, KIND: constexpr, DEPTH: constexpr, PLAIN: constexpr):
    """Return the products of DEPTH blocks summed column by column, in float32."""
    DTYPE: constexpr = tl.float16 if KIND == FP8_ROWS else tl.float32
    b_sums = tl.zeros(b_w[0].shape, DTYPE)
    for i in tl.static_range(DEPTH):
        b_sums = _added(b_w[i], b_x[i], b_factors, b_sums, KIND, PLAIN)
    return b_sums.to(tl.float32)


@jit
def _added(b_w, b_x, b_factors, b_sums, KIND: constexpr, PLAIN: constexpr):
    b_x = tl.broadcast_to(_as_factor(b_x, b_factors, KIND, PLAIN), b_w.shape)
    if KIND == FP8_ROWS:
        b_sums = half_sums(b_w, b_x, b_sums, PLAIN)
    else:
        b_sums += b_w.to(tl.float32) * b_x
    return b_sums


@jit
def _deep_gemv_kernel(
    p_x, p_x_scales, p_weight, p_scales, p_bias, p_ids, p_out, p_shared, p_shared_scales, p_shared_out, size_n, size_k,
    KIND: constexpr, GATED: constexpr, INTERLEAVED: constexpr, LIMIT: constexpr, IS_SCALED: constexpr,
    HAS_BIAS: constexpr, PAIRS_PER_ROW: constexpr, EVEN: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
    DEPTH: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_pair = tl.program_id(1)
    i_row = i_pair // PAIRS_PER_ROW
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)[None, :]
    m_n = o_n < size_n
    if PDL:
        tl.extra.cuda.gdc_wait()
    if p_shared is not None:
        # The last pair is the row and the shared expert.
        if i_pair == tl.num_programs(1) - 1:
            p_weight = p_shared
            p_scales = p_shared_scales
            p_out = p_shared_out - i_pair * size_n
            expert = tl.cast(0, tl.int64)
        else:
            expert = tl.load(p_ids + i_pair).to(tl.int64)
        i_row = 0
    else:
        expert = tl.load(p_ids + i_pair).to(tl.int64)
    if expert < 0:
        return  # its expert is on another rank
    # Load the row once per output: every thread loads the columns that it multiplies, without shared memory.
    p_row = p_x + i_row * size_k
    b_x = deep_load(p_row + o_k + 0 * o_n[:, None], m_n[:, None], o_k, size_k, EVEN, BLOCK_K, DEPTH)
    b_rows, up_rows = weight_rows(expert * size_n * (2 if GATED else 1), o_n, size_n, INTERLEAVED)
    p_w = p_weight + b_rows[:, None] * size_k + o_k
    b_w = deep_load(p_w, m_n[:, None], o_k, size_k, EVEN, BLOCK_K, DEPTH)
    if GATED:
        b_up = deep_load(p_w + up_rows * size_k, m_n[:, None], o_k, size_k, EVEN, BLOCK_K, DEPTH)
    scale = 1.0
    b_scales = 1.0
    b_up_scales = 1.0
    if KIND == FP8_ROWS:
        scale = tl.load(p_x_scales + i_row) * 16.0
    if KIND == FP8_ROWS or KIND == INT8_ROWS:
        b_scales = tl.load(p_scales + b_rows, mask=m_n, other=0.0)
        if GATED:
            b_up_scales = tl.load(p_scales + b_rows + up_rows, mask=m_n, other=0.0)
    b_y = tl.sum(deep_products(b_w, b_x, None, KIND, DEPTH, PLAIN), axis=1) * b_scales * scale
    if GATED:
        b_up_y = tl.sum(deep_products(b_up, b_x, None, KIND, DEPTH, PLAIN), axis=1) * b_up_scales * scale
    if PDL:
        # Release late: programs of the next kernel would take occupancy from this one.
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_BIAS:
        b_y += tl.load(p_bias + b_rows, mask=m_n, other=0.0).to(tl.float32)
    if GATED:
        if HAS_BIAS:
            b_up_y += tl.load(p_bias + b_rows + up_rows, mask=m_n, other=0.0).to(tl.float32)
        b_y = gated_numbers(b_y, b_up_y, LIMIT, IS_SCALED)
    tl.store(p_out + i_pair * size_n + o_n, b_y.to(p_out.dtype.element_ty), mask=m_n)

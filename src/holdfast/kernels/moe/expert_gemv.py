"""GEMV for each pair of token and expert, for small batches, without shared memory.

T tokens, S experts of a token, P = T * S pairs, N outputs, K inputs
"""

from torch import Tensor

from holdfast.kernels.activation import GateForm, gated_numbers
from holdfast.kernels.fp8 import loaded_numbers
from holdfast.kernels.gemm.packed_gemv import PackedProduct, packed_gemv
from holdfast.kernels.gemm.quantized_tiles import FP8_BLOCKS, FP8_ROWS, INT8_ROWS, OperandKind, operands_of
from holdfast.kernels.moe.deep_gemv import deep_gemv, takes_deep_loads, weight_rows
from holdfast.kernels.moe.routing import ExpertProduct
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, next_power_of_two, tl, wait_then_release
from holdfast.quant.quantized_weight import QuantizedWeight

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


def expert_gemv(product: ExpertProduct) -> Tensor:
    """Multiply each pair's row by its expert's weight. `product.quantized` holds the codes of x."""
    x_XK, weight, order, out_PN, gated, quantized, bias_EN, form = product
    num_pairs, size_n = out_PN.shape
    if not num_pairs:
        return out_PN
    size_k = x_XK.shape[1]
    operands = operands_of(x_XK, weight, quantized)
    if takes_deep_loads(weight):
        return deep_gemv(product, operands)
    if operands.kind == OperandKind.E2M1_GROUPS:
        assert isinstance(weight, QuantizedWeight), "codes are quantized"
        return packed_gemv(PackedProduct(x_XK, weight, out_PN, bias_EN, order.expert_ids_TS, gated, form))
    bias = out_PN if bias_EN is None else bias_EN
    arguments = (*operands.tensors, bias, order.expert_ids_TS, out_PN, size_n, size_k)
    flags = {"HAS_BIAS": bias_EN is not None, "PAIRS_PER_ROW": num_pairs // len(x_XK), "PLAIN": is_interpreted()}
    flags |= {**pdl_flags(x_XK), **form.flags(gated)}
    block_n, num_groups, group = _gemv_blocks(
        operands.tensors[2].element_size(), size_k, operands.block_rows, operands.group, gated, form
    )
    _expert_gemv_kernel[(-(-size_n // block_n), num_pairs)](
        *arguments, operands.scale_columns,
        EVEN=size_n % block_n == 0 and size_k % (num_groups * group) == 0, KIND=int(operands.kind),
        BLOCK_ROWS=operands.block_rows, BLOCK_N=block_n, BLOCK_G=num_groups, GROUP=group, num_warps=4, **flags,
    )  # fmt: skip
    return out_PN


def _gemv_blocks(
    element_bytes: int, size_k: int, block_rows: int, group: int, gated: bool, form: GateForm
) -> tuple[int, int, int]:
    """Return outputs per program, groups of inputs that share a scale, and inputs per group: 8 or 16 KiB of the weight.

    If blocks of rows share scales, a program stays within one of them.
    """
    block_k = next((size for size in (1024, 512, 256, 128) if size_k % size == 0), 512)
    block_k = min(block_k, max(16, next_power_of_two(size_k)))
    block_n = max(1, min(32, (4096 if gated else 8192) // element_bytes // block_k))
    if not group:
        return block_n, 1, block_k
    lone_rows = block_rows & -block_rows  # the largest power of two that divides it
    if gated and form.is_interleaved:
        assert lone_rows > 1, f"scales for {block_rows} rows, and gate and up are two"
        lone_rows //= 2
    return min(block_n, lone_rows), max(1, block_k // group), group


@jit
def _expert_gemv_kernel(
    p_x, p_x_scales, p_weight, p_scales, p_bias, p_ids, p_out, size_n, size_k, scale_columns,
    EVEN: constexpr, KIND: constexpr, BLOCK_ROWS: constexpr, GATED: constexpr, INTERLEAVED: constexpr, LIMIT: constexpr,
    IS_SCALED: constexpr, HAS_BIAS: constexpr, PAIRS_PER_ROW: constexpr, BLOCK_N: constexpr, BLOCK_G: constexpr,
    GROUP: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_pair = tl.program_id(1)
    i_row = (i_pair // PAIRS_PER_ROW).to(tl.int64)
    BLOCK_K: constexpr = BLOCK_G * GROUP
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_g = tl.arange(0, BLOCK_G)
    o_k = o_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    m_n = o_n < size_n
    b_sum = tl.zeros((BLOCK_N, BLOCK_G, GROUP), dtype=tl.float32)
    b_up_sum = tl.zeros((BLOCK_N, BLOCK_G, GROUP), dtype=tl.float32)
    wait_then_release(PDL)  # a packed GEMV after it reads ids before its own wait
    expert = tl.load(p_ids + i_pair).to(tl.int64)
    if expert < 0:
        return  # its expert is on another rank
    first_row = expert * size_n * (2 if GATED else 1)
    p_rows = p_x + i_row * size_k + o_k
    b_weight_rows, up_rows = weight_rows(first_row, o_n, size_n, INTERLEAVED)
    p_w = p_weight + b_weight_rows[:, None, None] * size_k + o_k[None, :, :]
    up_offset = up_rows * size_k
    if KIND == FP8_BLOCKS:
        p_x_s = p_x_scales + i_row * scale_columns + o_g
        scale_row = first_row + i_n * BLOCK_N * (2 if INTERLEAVED else 1)
        p_s = p_scales + scale_row // BLOCK_ROWS * scale_columns + o_g
        p_up_s = p_scales + (scale_row + up_rows) // BLOCK_ROWS * scale_columns + o_g
    for k in range(0, size_k, BLOCK_K):
        if EVEN:
            b_x = tl.load(p_rows + k)
            b_w = tl.load(p_w + k, eviction_policy="evict_first")
            if GATED:
                b_up = tl.load(p_w + up_offset + k, eviction_policy="evict_first")
        else:
            m_k = k + o_k < size_k
            m_w = m_n[:, None, None] & m_k[None, :, :]
            b_x = tl.load(p_rows + k, mask=m_k, other=0.0)
            b_w = tl.load(p_w + k, mask=m_w, other=0.0, eviction_policy="evict_first")
            if GATED:
                b_up = tl.load(p_w + up_offset + k, mask=m_w, other=0.0, eviction_policy="evict_first")
        b_x = _single(b_x, KIND, PLAIN)
        if KIND == FP8_BLOCKS:
            m_g = k // GROUP + o_g < scale_columns
            b_x_s = tl.load(p_x_s + k // GROUP, mask=m_g, other=0.0)
            b_s = tl.load(p_s + k // GROUP, mask=m_g, other=0.0) * b_x_s
            b_sum += _single(b_w, KIND, PLAIN) * (b_x * b_s[:, None])[None, :, :]
            if GATED:
                b_s = tl.load(p_up_s + k // GROUP, mask=m_g, other=0.0) * b_x_s
                b_up_sum += _single(b_up, KIND, PLAIN) * (b_x * b_s[:, None])[None, :, :]
        else:
            b_sum += _single(b_w, KIND, PLAIN) * b_x[None, :, :]
            if GATED:
                b_up_sum += _single(b_up, KIND, PLAIN) * b_x[None, :, :]
    b_y = tl.sum(tl.reshape(b_sum, (BLOCK_N, BLOCK_K)), axis=1)
    b_up_y = tl.sum(tl.reshape(b_up_sum, (BLOCK_N, BLOCK_K)), axis=1)
    if KIND == FP8_ROWS or KIND == INT8_ROWS:
        if KIND == FP8_ROWS:
            x_scale = tl.load(p_x_scales + i_row)
            b_y *= x_scale
            b_up_y *= x_scale
        b_y *= tl.load(p_scales + b_weight_rows, mask=m_n, other=0.0)
        if GATED:
            b_up_y *= tl.load(p_scales + b_weight_rows + up_rows, mask=m_n, other=0.0)
    if HAS_BIAS:
        b_y += tl.load(p_bias + b_weight_rows, mask=m_n, other=0.0).to(tl.float32)
    if GATED:
        if HAS_BIAS:
            b_up_y += tl.load(p_bias + b_weight_rows + up_rows, mask=m_n, other=0.0).to(tl.float32)
        b_y = gated_numbers(b_y, b_up_y, LIMIT, IS_SCALED)
    tl.store(p_out + i_pair.to(tl.int64) * size_n + o_n, b_y.to(p_out.dtype.element_ty), mask=m_n)


@jit
def _single(b_numbers, KIND: constexpr, PLAIN: constexpr):
    """Convert numbers or codes to float32."""
    if KIND == FP8_ROWS or KIND == FP8_BLOCKS:
        b_numbers = loaded_numbers(b_numbers, PLAIN)
    return b_numbers.to(tl.float32)

"""GEMV for each pair of token and expert, for small batches, without shared memory.

T tokens, S experts of a token, P = T * S pairs, N outputs, K inputs
"""

from torch import Tensor

from holdfast.kernels.activation import GateForm, gated_numbers
from holdfast.kernels.fp8 import loaded_numbers
from holdfast.kernels.gemm.e2m1 import e2m1_parts, e8m0_numbers
from holdfast.kernels.gemm.quantized_tiles import FP8_BLOCKS, FP8_ROWS, INT8_ROWS, OperandKind, operands_of
from holdfast.kernels.moe.deep_gemv import deep_gemv, takes_deep_loads, weight_rows
from holdfast.kernels.moe.routing import ExpertProduct
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, next_power_of_two, release_then_wait, tl

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


MXFP4_ELEMENTS, MXFP4_GROUPS = 8 * 64, (64, 32, 16)
"""For 4-bit codes: outputs times groups of 32 inputs per program, and choices of groups per load."""


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
    bias = out_PN if bias_EN is None else bias_EN
    arguments = (*operands.tensors, bias, order.expert_ids_TS, out_PN, size_n, size_k)
    flags = {"HAS_BIAS": bias_EN is not None, "PAIRS_PER_ROW": num_pairs // len(x_XK), "PLAIN": is_interpreted()}
    flags |= {**pdl_flags(x_XK), **form.flags(gated)}
    if operands.kind == OperandKind.E2M1_GROUPS:
        block_n, groups = _mxfp4_blocks(size_k // 32)
        _mxfp4_gemv_kernel[(-(-size_n // block_n), num_pairs)](
            *arguments,
            EVEN=size_n % block_n == 0 and size_k // 32 % groups == 0, BLOCK_N=block_n, BLOCK_G=groups, num_warps=4,
            **flags,
        )  # fmt: skip
        return out_PN
    block_n, num_groups, group = _gemv_blocks(
        operands.tensors[2].element_size(), size_k, operands.block_rows, operands.group, gated, form
    )
    _expert_gemv_kernel[(-(-size_n // block_n), num_pairs)](
        *arguments, operands.scale_columns,
        EVEN=size_n % block_n == 0 and size_k % (num_groups * group) == 0, KIND=int(operands.kind),
        BLOCK_ROWS=operands.block_rows, BLOCK_N=block_n, BLOCK_G=num_groups, GROUP=group, num_warps=4, **flags,
    )  # fmt: skip
    return out_PN


def _mxfp4_blocks(num_groups: int) -> tuple[int, int]:
    """Return the outputs and groups per program that pad the last groups least."""
    most = next_power_of_two(num_groups)
    sizes = [size for size in MXFP4_GROUPS if size <= most] or [most]
    groups = min(sizes, key=lambda size: -(-num_groups // size) * size)
    return min(16, MXFP4_ELEMENTS // groups), groups


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
    release_then_wait(PDL)
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


@jit
def _mxfp4_gemv_kernel(
    p_x, p_x_scales, p_weight, p_scales, p_bias, p_ids, p_out, size_n, size_k,
    EVEN: constexpr, GATED: constexpr, INTERLEAVED: constexpr, LIMIT: constexpr, IS_SCALED: constexpr,
    HAS_BIAS: constexpr, PAIRS_PER_ROW: constexpr, BLOCK_N: constexpr, BLOCK_G: constexpr, PLAIN: constexpr,
    PDL: constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_pair = tl.program_id(1)
    i_row = (i_pair // PAIRS_PER_ROW).to(tl.int64)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_g = tl.arange(0, BLOCK_G)
    o_b = o_g[:, None] * 16 + tl.arange(0, 16)[None, :]
    m_n = o_n < size_n
    num_groups = size_k // 32
    b_sum = tl.zeros((BLOCK_N, BLOCK_G), dtype=tl.float32)
    b_up_sum = tl.zeros((BLOCK_N, BLOCK_G), dtype=tl.float32)
    release_then_wait(PDL)
    expert = tl.load(p_ids + i_pair).to(tl.int64)
    if expert < 0:
        return  # its expert is on another rank
    first_row = expert * size_n * (2 if GATED else 1)
    b_weight_rows, up_rows = weight_rows(first_row, o_n, size_n, INTERLEAVED)
    row_bytes = tl.multiple_of(size_k // 2, 16)
    p_w = p_weight + b_weight_rows[:, None, None] * row_bytes + o_b[None, :, :]
    p_s = p_scales + b_weight_rows[:, None] * num_groups + o_g[None, :]
    p_row = p_x + i_row * size_k
    for g in range(0, num_groups, BLOCK_G):
        m_g = g + o_g < num_groups
        m_s = m_n[:, None] & m_g[None, :]
        b_even, b_odd = _halves(p_row, g * 16 + o_b, m_g[:, None], EVEN)
        b_sum += _groups(p_w + g * 16, p_s + g, b_even, b_odd, m_s, EVEN, PLAIN)
        if GATED:
            p_up = p_w + up_rows * row_bytes + g * 16
            p_up_s = p_s + up_rows * num_groups + g
            b_up_sum += _groups(p_up, p_up_s, b_even, b_odd, m_s, EVEN, PLAIN)
    b_y = tl.sum(b_sum, axis=1)
    if HAS_BIAS:
        b_y += tl.load(p_bias + b_weight_rows, mask=m_n, other=0.0).to(tl.float32)
    if GATED:
        b_up_y = tl.sum(b_up_sum, axis=1)
        if HAS_BIAS:
            b_up_y += tl.load(p_bias + b_weight_rows + up_rows, mask=m_n, other=0.0).to(tl.float32)
        b_y = gated_numbers(b_y, b_up_y, LIMIT, IS_SCALED)
    tl.store(p_out + i_pair.to(tl.int64) * size_n + o_n, b_y.to(p_out.dtype.element_ty), mask=m_n)


@jit
def _halves(p_row, o_b, m_b, EVEN: constexpr):
    """Load even and odd inputs as float32; 16-bit types are loaded as 32-bit words of two."""
    if p_row.dtype.element_ty == tl.float32:
        b_even = _taken(p_row + 2 * o_b, m_b, EVEN)
        b_odd = _taken(p_row + 2 * o_b + 1, m_b, EVEN)
    else:
        b_words = _taken(p_row.to(tl.pointer_type(tl.int32)) + o_b, m_b, EVEN)
        if p_row.dtype.element_ty == tl.bfloat16:
            b_even = (b_words << 16).to(tl.float32, bitcast=True)
            b_odd = (b_words & -65536).to(tl.float32, bitcast=True)
        else:
            b_even = b_words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            b_odd = (b_words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return b_even, b_odd


@jit
def _taken(p, m, EVEN: constexpr):
    """Load inputs, with 0 after the last: a code of 0 times NaN or infinity would be NaN."""
    if EVEN:
        b = tl.load(p)
    else:
        b = tl.load(p, mask=m, other=0)
    return b


@jit
def _groups(p_w, p_s, b_even, b_odd, m_s, EVEN: constexpr, PLAIN: constexpr):
    """Sum products over groups of 32 inputs, times the scale of each."""
    if EVEN:
        b_codes = tl.load(p_w, eviction_policy="evict_first")
        b_exponents = tl.load(p_s, eviction_policy="evict_first")
    else:
        b_codes = tl.load(p_w, mask=m_s[:, :, None], other=0, eviction_policy="evict_first")
        b_exponents = tl.load(p_s, mask=m_s, other=0, eviction_policy="evict_first")
    b_low, b_high = e2m1_parts(b_codes, PLAIN)
    b_products = b_low.to(tl.float32) * b_even[None, :, :] + b_high.to(tl.float32) * b_odd[None, :, :]
    return tl.sum(b_products, axis=2) * e8m0_numbers(b_exponents)

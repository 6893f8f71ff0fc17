"""Down projection of one token's experts: products weighted by shares, summed and added to the residual, in one launch.

S experts of the token, N outputs, K inputs

A shared expert of the same width is one more product, with a share of its own.

Tiles take packed weights (kernels/gemm/packed_mma.py). For others the kernel quantizes its input while reading it. A program computes some outputs of all experts and loads their weights
before the gate and up kernel ends (see kernels/moe/deep_gemv.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.fp8 import LEAST_SCALE, kernel_codes
from holdfast.kernels.gemm import packed_mma
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, ResidualStream, defer_rms_norm_reference
from holdfast.kernels.gemm.gemv import GemvBlocks
from holdfast.kernels.gemm.packed_small_batch import room_of
from holdfast.kernels.gemm.quantized_tiles import FP8_ROWS, INT8_ROWS, OperandKind
from holdfast.kernels.geometry import GEMV_MIN_BLOCK_N
from holdfast.kernels.moe.deep_gemv import column_blocks, deep_load, deep_products, takes_deep_loads
from holdfast.kernels.norm import load_norm_weight
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.packed_kernels import has_tiles
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, jit_counting, next_power_of_two, tl
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import E4M3_MAX, LEAST_E4M3_SCALE, dequantize

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


MAX_REGISTERS = 100
"""Most registers per thread for weights and sums."""


def takes_down_row(x_1K: Tensor, gate_up: AnyWeight, down: AnyWeight) -> bool:
    """Return True if `down_row_add` takes the second product, and the first triggers it after its own wait."""
    if isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight):
        tiled = (len(one.parts) == 1 and has_tiles(one.parts[0].scheme, one.shape[-1]) for one in (gate_up, down))
        return packed_mma.takes_rows(x_1K) and all(tiled)
    return takes_deep_loads(gate_up) and takes_deep_loads(down)


def down_blocks(size_k: int, top_k: int, kind: OperandKind, element_bytes: int) -> GemvBlocks:
    """Choose blocks so that weights of all experts for a few outputs fit into registers with their sums."""
    block_k, depth = column_blocks(size_k)
    block_n, num_warps = 8, 8
    sum_registers = 0.5 if kind == OperandKind.FP8_ROWS else 1.0
    registers = next_power_of_two(top_k) * block_k * (depth * element_bytes / 4 + sum_registers)
    while block_n * registers > MAX_REGISTERS * 32 * num_warps and num_warps < 16:
        if block_n > GEMV_MIN_BLOCK_N:
            block_n //= 2
        else:
            num_warps *= 2
    return GemvBlocks(block_n, block_k, depth, num_warps)


def _kind(weight: AnyWeight) -> OperandKind:
    if isinstance(weight, Tensor):
        return OperandKind.PLAIN
    assert isinstance(weight, QuantizedWeight), "packed weights have products of their own"
    return OperandKind.FP8_ROWS if weight.scheme.quantizes_activations else OperandKind.INT8_ROWS


def _operands(weight: AnyWeight) -> tuple[Tensor, Tensor]:
    """Return codes and scales; a plain weight twice."""
    if isinstance(weight, QuantizedWeight):
        return kernel_codes(weight.codes), weight.scales
    assert isinstance(weight, Tensor), "packed weights have products of their own"
    return weight, weight


class SharedRow(NamedTuple):
    """The shared expert of a token."""

    active_1K: Tensor
    weight: AnyWeight
    """[N, K], stored as the other experts' are."""
    logit_11: Tensor | None
    """Logit whose sigmoid is its share; None: a share of 1."""


def down_row_add_reference(
    active_SK: Tensor,
    weight: AnyWeight,
    expert_ids_1S: Tensor,
    shares_1S: Tensor,
    bias_EN: Tensor | None,
    stream: ResidualStream,
    shared: SharedRow | None = None,
) -> NormedRows:
    """x += the sum of share * (active @ down.T + bias) over the experts of a token, with the next RMSNorm deferred.

    The Triton kernel reads ids and shares before its wait. So the kernel before it must have waited for them itself before
    it triggers this one, as deep GEMVs do.
    """
    rows_SK, x_1N = _as_multiplied(active_SK, weight), stream.x_MN
    total_1N = torch.zeros_like(x_1N, dtype=torch.float32)
    for pair, expert in enumerate(expert_ids_1S.flatten().tolist()):
        y_1N = rows_SK[pair : pair + 1] @ _numbers(weight, expert).t()
        if bias_EN is not None:
            y_1N += bias_EN[expert].float()
        total_1N += shares_1S[0, pair] * y_1N
    if shared is not None:
        share = 1.0 if shared.logit_11 is None else shared.logit_11.float().sigmoid()
        own_NK = dequantize(shared.weight) if isinstance(shared.weight, QuantizedWeight) else shared.weight
        assert isinstance(own_NK, Tensor), "packed weights have products of their own"
        total_1N += share * (_as_multiplied(shared.active_1K, weight) @ own_NK.float().t())
    x_1N.copy_((x_1N.float() + total_1N.to(x_1N.dtype).float()).to(x_1N.dtype))
    return defer_rms_norm_reference(stream)


def _as_multiplied(rows_SK: Tensor, weight: AnyWeight) -> Tensor:
    """Return the float32 numbers that the weight multiplies: of codes if it is e4m3."""
    rows_SK = rows_SK.float()
    if isinstance(weight, PackedWeight) or _kind(weight) != OperandKind.FP8_ROWS:
        return rows_SK
    scales_S1 = (rows_SK.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(LEAST_E4M3_SCALE)
    codes_SK = (rows_SK * (1.0 / scales_S1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes_SK.float() * scales_S1


def _numbers(weight: AnyWeight, expert: int) -> Tensor:
    """Return an expert's weight in float32."""
    if isinstance(weight, Tensor):
        return weight[expert].float()
    size_n = weight.shape[1]
    if isinstance(weight, PackedWeight):
        values = torch.empty(weight.shape[1:], device=weight.parts[0].planes[0].device)
        for part in weight.parts:
            rows_RK = values[part.row_start : part.row_start + part.num_rows]
            dequantize_rows(part, expert, (0, part.num_rows), rows_RK)
        return values
    return dequantize(weight, (expert * size_n, (expert + 1) * size_n))


def down_row_add_triton(
    active_SK: Tensor,
    weight: AnyWeight,
    expert_ids_1S: Tensor,
    shares_1S: Tensor,
    bias_EN: Tensor | None,
    stream: ResidualStream,
    shared: SharedRow | None = None,
) -> NormedRows:
    """Launch one program for some outputs of all experts, summed in a fixed order; tiles have one for each expert."""
    if isinstance(weight, PackedWeight):
        assert shared is None, "a shared expert beside packed ones has launches of its own"
        (part,), fusion = weight.parts, packed_mma.Fusion(stream=stream, shares_1S=shares_1S)
        room_X = room_of(weight, part, active_SK)
        return packed_mma.packed_experts_add(active_SK, part, bias_EN, expert_ids_1S, room_X, fusion)
    x_1N, norm_weight_N, eps, scaled_1N, scratch, offset = stream
    (top_k, size_k), size_n = active_SK.shape, x_1N.shape[1]
    assert weight.shape[1:] == (size_n, size_k), f"{weight.shape=} {active_SK.shape=} {x_1N.shape=}"
    assert expert_ids_1S.shape == shares_1S.shape == (1, top_k), f"{expert_ids_1S.shape=} {shares_1S.shape=}"
    codes, weight_scales = _operands(weight)
    blocks = down_blocks(size_k, top_k, _kind(weight), codes.element_size())
    num_blocks = -(-size_n // blocks.block_n)
    own = (None,) * 4
    if shared is not None:
        assert _kind(shared.weight) == _kind(weight), "the shared expert's weight is stored as the others' are"
        assert shared.weight.shape == (size_n, size_k), f"{shared.weight.shape=} {weight.shape=}"
        own = (shared.active_1K, *_operands(shared.weight), shared.logit_11)
    _down_kernel[(num_blocks,)](
        active_SK, codes, weight_scales, x_1N if bias_EN is None else bias_EN, expert_ids_1S, shares_1S, x_1N,
        norm_weight_N, scaled_1N, scratch.squares, scratch.squares if scratch.amax is None else scratch.amax.normed,
        *own, size_n, size_k,
        KIND=int(_kind(weight)), HAS_BIAS=bias_EN is not None, HAS_AMAX=scratch.amax is not None, OFFSET=offset,
        EVEN=size_k == blocks.block_k * blocks.depth,
        COLUMNS_AT_A_TIME=16 // active_SK.element_size() if size_k % 8 == 0 else 1, TOP_K=top_k,
        BLOCK_S=next_power_of_two(top_k), BLOCK_N=blocks.block_n, BLOCK_K=blocks.block_k, DEPTH=blocks.depth,
        PLAIN=is_interpreted(), num_warps=blocks.num_warps, **pdl_flags(x_1N),
    )  # fmt: skip
    return NormedRows(scaled_1N, num_blocks, eps)


down_row_add = operation(reference=down_row_add_reference, triton=down_row_add_triton)


@jit
def _deep_amax(b_x, DEPTH: constexpr):
    """Return the largest magnitudes over DEPTH blocks, column by column."""
    b_amax = tl.abs(b_x[0].to(tl.float32))
    for i in tl.static_range(1, DEPTH):
        b_amax = tl.maximum(b_amax, tl.abs(b_x[i].to(tl.float32)))
    return b_amax


@jit_counting("size_k")
def _down_kernel(
    p_active, p_weight, p_scales, p_bias, p_ids, p_shares, p_x, p_norm_weight, p_scaled, p_squares, p_amax,
    p_shared_active, p_shared_weight, p_shared_scales, p_shared_logit, size_n, size_k,
    KIND: constexpr, HAS_BIAS: constexpr, HAS_AMAX: constexpr, OFFSET: constexpr, EVEN: constexpr,
    COLUMNS_AT_A_TIME: constexpr, TOP_K: constexpr, BLOCK_S: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
    DEPTH: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    # Blocks are [N, S, K]. Weights are loaded as many columns at a time as the wider rows, so that both lie in the same
    # threads and only the sum over experts goes through shared memory.
    i_n = tl.program_id(0)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_s = tl.arange(0, BLOCK_S)
    o_k = tl.arange(0, BLOCK_K)[None, None, :]
    m_n = o_n < size_n
    m_s = o_s < TOP_K
    row_size = size_k // COLUMNS_AT_A_TIME * COLUMNS_AT_A_TIME  # equals size_k, with a divisor that the compiler sees
    # Before the wait: the kernel before this one waited for ids and shares, then triggered this one. So weights load early.
    b_ids = tl.load(p_ids + o_s, mask=m_s, other=0, cache_modifier=".cg").to(tl.int64)
    b_shares = tl.load(p_shares + o_s, mask=m_s, other=0.0, cache_modifier=".cg")
    m_ns = m_n[:, None] & m_s[None, :]
    b_rows = b_ids[None, :] * size_n + o_n[:, None]
    p_w = p_weight + b_rows[:, :, None] * row_size + o_k
    b_w = deep_load(p_w, m_ns[:, :, None], o_k, row_size, EVEN, BLOCK_K, DEPTH)
    b_scales = tl.full((BLOCK_N, BLOCK_S), 1.0, tl.float32)
    if KIND == FP8_ROWS or KIND == INT8_ROWS:
        b_scales = tl.load(p_scales + b_rows, mask=m_ns, other=0.0)
    b_norm = load_norm_weight(p_norm_weight, o_n, m_n, OFFSET)
    if p_shared_weight is not None:
        m_own = m_n[:, None, None]
        p_own = p_shared_weight + o_n.to(tl.int64)[:, None, None] * row_size + o_k
        b_own_w = deep_load(p_own, m_own, o_k, row_size, EVEN, BLOCK_K, DEPTH)
        b_own_scales = tl.full((BLOCK_N, 1), 1.0, tl.float32)
        if KIND == FP8_ROWS or KIND == INT8_ROWS:
            b_own_scales = tl.load(p_shared_scales + o_n, mask=m_n, other=0.0)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_x_old = tl.load(p_x + o_n, mask=m_n, other=0.0).to(tl.float32)
    p_rows = p_active + o_s[None, :, None] * row_size + o_k
    b_x = deep_load(p_rows, m_s[None, :, None], o_k, row_size, EVEN, BLOCK_K, DEPTH)
    if p_shared_weight is not None:
        b_own_x = deep_load(p_shared_active + 0 * o_n[:, None, None] + o_k, m_own, o_k, row_size, EVEN, BLOCK_K, DEPTH)
    b_factors = None
    if KIND == FP8_ROWS:
        b_amax = tl.max(_deep_amax(b_x, DEPTH), axis=2)
        b_row_scales = tl.maximum(b_amax / 448.0, LEAST_SCALE)
        b_factors = (1.0 / b_row_scales)[:, :, None]
        b_scales *= b_row_scales * 16.0
    b_y = tl.sum(deep_products(b_w, b_x, b_factors, KIND, DEPTH, PLAIN), axis=2) * b_scales
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_BIAS:
        b_y += tl.load(p_bias + b_rows, mask=m_ns, other=0.0).to(tl.float32)
    b_y = tl.sum(tl.where(m_s[None, :], b_y * b_shares[None, :], 0.0), axis=1)
    if p_shared_weight is not None:
        b_factors = None
        if KIND == FP8_ROWS:
            b_row_scales = tl.maximum(tl.max(_deep_amax(b_own_x, DEPTH), axis=2) / 448.0, LEAST_SCALE)
            b_factors = (1.0 / b_row_scales)[:, :, None]
            b_own_scales *= b_row_scales * 16.0
        b_own_y = tl.sum(deep_products(b_own_w, b_own_x, b_factors, KIND, DEPTH, PLAIN), axis=2) * b_own_scales
        b_own_y = tl.sum(b_own_y, axis=1)
        if p_shared_logit is not None:
            b_own_y *= tl.sigmoid(tl.load(p_shared_logit))
        b_y += b_own_y
    b_y = (b_x_old + b_y.to(p_x.dtype.element_ty).to(tl.float32)).to(p_x.dtype.element_ty)
    tl.store(p_x + o_n, b_y, mask=m_n)
    b_y = b_y.to(tl.float32)
    b_scaled = (b_y * b_norm).to(p_scaled.dtype.element_ty)
    tl.store(p_scaled + o_n, b_scaled, mask=m_n)
    tl.store(p_squares + i_n, tl.sum(tl.where(m_n, b_y * b_y, 0.0), axis=0))
    if HAS_AMAX:
        tl.store(p_amax + i_n, tl.max(tl.where(m_n, tl.abs(b_scaled.to(tl.float32)), 0.0), axis=0))

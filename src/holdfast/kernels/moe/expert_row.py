"""The experts of one token: gate and up of all of them, then down with shares, their sum and the residual in its epilogue.

S experts of the token, N outputs, K inputs

One token reads its experts once, and nothing else counts: every program has all of its weight on the way before it
multiplies. Products of e4m3 are added in half precision a few at a time, as kernels/gemm/gemv.py does. Down rows wait for no
kernel between: what gate and up left is quantized where it is read.
"""

from typing import NamedTuple

import torch

from holdfast.kernels.activation import SILU_HALVES, GateForm, gate_up_product, gated_numbers
from holdfast.kernels.fp8 import kernel_codes, loaded_numbers, quantized_numbers
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, SmallBatchScratch, defer_rms_norm_reference
from holdfast.kernels.gemm.gemv import LEAST_SCALE, half_sums, residual_epilogue_row
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.gemm.quantized_tiles import FP8_ROWS, INT8_ROWS, OperandKind
from holdfast.kernels.geometry import GEMV_MIN_BLOCK_N
from holdfast.kernels.moe.expert_gemv import weight_rows
from holdfast.kernels.triton_compat import (
    can_run,
    constexpr,
    is_interpreted,
    jit,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    supports_pdl,
    tl,
)
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import E4M3_MAX, LEAST_E4M3_SCALE, dequantize

# ruff: noqa: ANN001, ANN202 pointers of kernels have no types
# ruff: noqa: SIM109 constants of a kernel are compared one by one
# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false


MAX_DEPTH = 5
"""Loads of a row's columns whose products are added in half precision: five of 448 by 28 stay below 65504."""
BLOCKS_K = (256, 512, 1024)
"""Columns of a load."""


MAX_REGISTERS = 100
"""Of a thread, for weights and sums."""


class RowBlocks(NamedTuple):
    """How a launch is cut."""

    block_n: int
    """Outputs of a program."""
    block_k: int
    depth: int
    """Loads of `block_k` columns that make a row."""
    num_warps: int


def takes_row_kernels(weight: torch.Tensor | QuantizedWeight) -> bool:
    """Whether these kernels take the weight: plain, or of eight bits with scales by row, and not too wide."""
    return weight.shape[-1] <= MAX_DEPTH * BLOCKS_K[-1] and (
        isinstance(weight, torch.Tensor) or (weight.scheme.block_columns == 0 and weight.scheme.codes_per_byte == 1)
    )


def column_blocks(size_k: int) -> tuple[int, int]:
    """Columns of a load and how many there are, so that least is loaded in vain."""
    if size_k <= BLOCKS_K[0]:
        return max(16, next_power_of_two(size_k)), 1
    depths = {block_k: -(-size_k // block_k) for block_k in BLOCKS_K}
    block_k = min((block for block in BLOCKS_K if depths[block] <= MAX_DEPTH), key=lambda block: depths[block] * block)
    return block_k, depths[block_k]


def gate_up_blocks(size_k: int, element_bytes: int) -> RowBlocks:
    """Of gate and up: all of a program's weight is on the way at once, 16 KiB of it where rows are of 2048 bytes."""
    block_k, depth = column_blocks(size_k)
    return RowBlocks(max(1, 4 // element_bytes), block_k, depth, 4)


def down_blocks(size_k: int, top_k: int, kind: OperandKind, element_bytes: int) -> RowBlocks:
    """Of down: the rows of all experts for a few outputs, as many as registers hold with their sums."""
    block_k, depth = column_blocks(size_k)
    block_n, num_warps = 4, 4
    registers = next_power_of_two(top_k) * block_k * (depth * element_bytes / 4 + (0.5 if kind == OperandKind.FP8_ROWS else 1.0))
    while block_n * registers > MAX_REGISTERS * 32 * num_warps and num_warps < 16:
        if block_n > GEMV_MIN_BLOCK_N:
            block_n //= 2
        else:
            num_warps *= 2
    return RowBlocks(block_n, block_k, depth, num_warps)


def _kind(weight: torch.Tensor | QuantizedWeight) -> OperandKind:
    if isinstance(weight, torch.Tensor):
        return OperandKind.PLAIN
    return OperandKind.FP8_ROWS if weight.scheme.quantizes_activations else OperandKind.INT8_ROWS


def _operands(weight: torch.Tensor | QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales; a plain weight twice."""
    return (weight, weight) if isinstance(weight, torch.Tensor) else (kernel_codes(weight.codes), weight.scales)


def gate_up_row(
    x: QuantizedRows | torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    expert_ids_1S: torch.Tensor,
    active_SI: torch.Tensor,
    bias_EX: torch.Tensor | None = None,
    form: GateForm = SILU_HALVES,
) -> torch.Tensor:
    """One row by gate and up of its experts, gated as `form` says; the row comes as codes where the weight is e4m3."""
    launch = gate_up_row_triton if can_run(active_SI) else gate_up_row_reference
    return launch(x, weight, expert_ids_1S, active_SI, bias_EX, form)


def gate_up_row_reference(
    x: QuantizedRows | torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    expert_ids_1S: torch.Tensor,
    active_SI: torch.Tensor,
    bias_EX: torch.Tensor | None = None,
    form: GateForm = SILU_HALVES,
) -> torch.Tensor:
    """The same in plain torch."""
    numbers = x.float() if isinstance(x, torch.Tensor) else x.codes_TK.float() * x.scales_TB
    ids_S = expert_ids_1S.flatten().long()
    for pair, expert in enumerate(ids_S.tolist()):
        y_1X = numbers @ _numbers(weight, expert).t()
        if bias_EX is not None:
            y_1X += bias_EX[expert].float()
        active_SI[pair] = gate_up_product(y_1X, form)[0].to(active_SI.dtype)
    return active_SI


def _numbers(weight: torch.Tensor | QuantizedWeight, expert: int) -> torch.Tensor:
    """An expert's weight in float32."""
    if isinstance(weight, torch.Tensor):
        return weight[expert].float()
    size_n = weight.shape[1]
    return dequantize(weight, (expert * size_n, (expert + 1) * size_n))


def gate_up_row_triton(
    x: QuantizedRows | torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    expert_ids_1S: torch.Tensor,
    active_SI: torch.Tensor,
    bias_EX: torch.Tensor | None = None,
    form: GateForm = SILU_HALVES,
) -> torch.Tensor:
    """The same as a Triton kernel, a program for some outputs of one expert."""
    top_k, size_n = active_SI.shape
    rows, scales = (x, x) if isinstance(x, torch.Tensor) else (kernel_codes(x.codes_TK), x.scales_TB)
    kind, pdl = _kind(weight), supports_pdl(active_SI)
    assert (kind == OperandKind.FP8_ROWS) == isinstance(x, QuantizedRows), f"{kind.name} by {x}"
    assert rows.shape == (1, weight.shape[2]), f"{rows.shape=} {weight.shape=}"
    assert weight.shape[1] == 2 * size_n, f"{weight.shape=} {active_SI.shape=}"
    codes, weight_scales = _operands(weight)
    blocks = gate_up_blocks(weight.shape[2], codes.element_size())
    _gate_up_kernel[(-(-size_n // blocks.block_n), top_k)](
        rows,
        scales,
        codes,
        weight_scales,
        active_SI if bias_EX is None else bias_EX,
        expert_ids_1S,
        active_SI,
        size_n,
        weight.shape[2],
        KIND=int(kind),
        INTERLEAVED=form.is_interleaved,
        LIMIT=form.limit or 0.0,
        HAS_BIAS=bias_EX is not None,
        EVEN=weight.shape[2] == blocks.block_k * blocks.depth,
        BLOCK_N=blocks.block_n,
        BLOCK_K=blocks.block_k,
        DEPTH=blocks.depth,
        PLAIN=is_interpreted(),
        PDL=pdl,
        num_warps=blocks.num_warps,
        **pdl_launch(pdl),
    )
    return active_SI


def down_row_add(
    active_SK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    expert_ids_1S: torch.Tensor,
    shares_1S: torch.Tensor,
    bias_EN: torch.Tensor | None,
    x_1N: torch.Tensor,
    norm_weight_N: torch.Tensor,
    eps: float,
    scaled_1N: torch.Tensor,
    scratch: SmallBatchScratch,
) -> NormedRows:
    """x += the sum of share * (active @ down.T + bias) over the experts of a token, with the next RMSNorm deferred."""
    launch = down_row_add_triton if can_run(x_1N) else down_row_add_reference
    return launch(
        active_SK, weight, expert_ids_1S, shares_1S, bias_EN, x_1N, norm_weight_N, eps, scaled_1N, scratch
    )  # fmt: skip


def down_row_add_reference(
    active_SK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    expert_ids_1S: torch.Tensor,
    shares_1S: torch.Tensor,
    bias_EN: torch.Tensor | None,
    x_1N: torch.Tensor,
    norm_weight_N: torch.Tensor,
    eps: float,
    scaled_1N: torch.Tensor,
    scratch: SmallBatchScratch,
) -> NormedRows:
    """The same in plain torch; the squares are summed as one block."""
    rows_SK = active_SK.float()
    if _kind(weight) == OperandKind.FP8_ROWS:
        scales_S1 = (rows_SK.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(LEAST_E4M3_SCALE)
        codes_SK = (rows_SK * (1.0 / scales_S1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        rows_SK = codes_SK.float() * scales_S1
    total_1N = torch.zeros_like(x_1N, dtype=torch.float32)
    for pair, expert in enumerate(expert_ids_1S.flatten().tolist()):
        y_1N = rows_SK[pair : pair + 1] @ _numbers(weight, expert).t()
        if bias_EN is not None:
            y_1N += bias_EN[expert].float()
        total_1N += shares_1S[0, pair] * y_1N
    x_1N.copy_((x_1N.float() + total_1N.to(x_1N.dtype).float()).to(x_1N.dtype))
    return defer_rms_norm_reference(x_1N, norm_weight_N, eps, scaled_1N, scratch)


def down_row_add_triton(
    active_SK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    expert_ids_1S: torch.Tensor,
    shares_1S: torch.Tensor,
    bias_EN: torch.Tensor | None,
    x_1N: torch.Tensor,
    norm_weight_N: torch.Tensor,
    eps: float,
    scaled_1N: torch.Tensor,
    scratch: SmallBatchScratch,
) -> NormedRows:
    """The same as a Triton kernel, a program for some outputs of all experts, which are summed in a fixed order."""
    (top_k, size_k), size_n = active_SK.shape, x_1N.shape[1]
    assert weight.shape[1:] == (size_n, size_k), f"{weight.shape=} {active_SK.shape=} {x_1N.shape=}"
    assert expert_ids_1S.shape == shares_1S.shape == (1, top_k), f"{expert_ids_1S.shape=} {shares_1S.shape=}"
    codes, weight_scales = _operands(weight)
    blocks = down_blocks(size_k, top_k, _kind(weight), codes.element_size())
    num_blocks, pdl = -(-size_n // blocks.block_n), supports_pdl(x_1N)
    _down_kernel[(num_blocks,)](
        active_SK,
        codes,
        weight_scales,
        x_1N if bias_EN is None else bias_EN,
        expert_ids_1S,
        shares_1S,
        x_1N,
        norm_weight_N,
        scaled_1N,
        scratch.squares,
        scratch.squares if scratch.amax is None else scratch.amax.normed,
        size_n,
        size_k,
        KIND=int(_kind(weight)),
        HAS_BIAS=bias_EN is not None,
        HAS_AMAX=scratch.amax is not None,
        EVEN=size_k == blocks.block_k * blocks.depth,
        COLUMNS_AT_A_TIME=16 // active_SK.element_size() if size_k % 8 == 0 else 1,
        TOP_K=top_k,
        BLOCK_S=next_power_of_two(top_k),
        BLOCK_N=blocks.block_n,
        BLOCK_K=blocks.block_k,
        DEPTH=blocks.depth,
        PLAIN=is_interpreted(),
        PDL=pdl,
        num_warps=blocks.num_warps,
        **pdl_launch(pdl),
    )
    return NormedRows(scaled_1N, num_blocks, eps)


@jit
def _deep_load(p, m, o_k, size_k, EVEN: constexpr, BLOCK_K: constexpr, DEPTH: constexpr):
    """DEPTH blocks of rows, one behind the other; what is beyond is the first one again, and unused."""
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
    """A block of the row as what a weight is multiplied by: codes by sixteenths in half precision, or float32."""
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
def _deep_products(b_w, b_x, b_factors, KIND: constexpr, DEPTH: constexpr, PLAIN: constexpr):
    """float32 sums of DEPTH blocks' products, for each column of a block."""
    DTYPE: constexpr = tl.float16 if KIND == FP8_ROWS else tl.float32
    b_sums = tl.zeros(b_w[0].shape, DTYPE)
    b_sums = _added(b_w[0], b_x[0], b_factors, b_sums, KIND, PLAIN)
    if DEPTH > 1:
        b_sums = _added(b_w[1], b_x[1], b_factors, b_sums, KIND, PLAIN)
    if DEPTH > 2:
        b_sums = _added(b_w[2], b_x[2], b_factors, b_sums, KIND, PLAIN)
    if DEPTH > 3:
        b_sums = _added(b_w[3], b_x[3], b_factors, b_sums, KIND, PLAIN)
    if DEPTH > 4:
        b_sums = _added(b_w[4], b_x[4], b_factors, b_sums, KIND, PLAIN)
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
def _gate_up_kernel(
    p_x,
    p_x_scales,
    p_weight,
    p_scales,
    p_bias,
    p_ids,
    p_out,
    size_n,
    size_k,
    KIND: constexpr,
    INTERLEAVED: constexpr,
    LIMIT: constexpr,
    HAS_BIAS: constexpr,
    EVEN: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    DEPTH: constexpr,
    PLAIN: constexpr,
    PDL: constexpr,
):
    i_pair = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)[None, :]
    m_n = o_n < size_n
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(p_ids + i_pair).to(tl.int64)
    # A row for each output: every thread loads the columns that it multiplies, and nothing goes through shared memory.
    b_x = _deep_load(p_x + o_k + 0 * o_n[:, None], m_n[:, None], o_k, size_k, EVEN, BLOCK_K, DEPTH)
    b_rows, up_rows = weight_rows(expert * size_n * 2, o_n, size_n, INTERLEAVED)
    p_w = p_weight + b_rows[:, None] * size_k + o_k
    b_gate = _deep_load(p_w, m_n[:, None], o_k, size_k, EVEN, BLOCK_K, DEPTH)
    b_up = _deep_load(p_w + up_rows * size_k, m_n[:, None], o_k, size_k, EVEN, BLOCK_K, DEPTH)
    scale = 1.0
    b_scales = 1.0
    b_up_scales = 1.0
    if KIND == FP8_ROWS:
        scale = tl.load(p_x_scales) * 16.0
    if KIND == FP8_ROWS or KIND == INT8_ROWS:
        b_scales = tl.load(p_scales + b_rows, mask=m_n, other=0.0)
        b_up_scales = tl.load(p_scales + b_rows + up_rows, mask=m_n, other=0.0)
    b_y = tl.sum(_deep_products(b_gate, b_x, None, KIND, DEPTH, PLAIN), axis=1) * b_scales * scale
    b_up_y = tl.sum(_deep_products(b_up, b_x, None, KIND, DEPTH, PLAIN), axis=1) * b_up_scales * scale
    if PDL:
        # Not sooner: the programs of the next kernel would take places from those of this one.
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_BIAS:
        b_y += tl.load(p_bias + b_rows, mask=m_n, other=0.0).to(tl.float32)
        b_up_y += tl.load(p_bias + b_rows + up_rows, mask=m_n, other=0.0).to(tl.float32)
    b_y = gated_numbers(b_y, b_up_y, LIMIT)
    tl.store(p_out + i_pair * size_n + o_n, b_y.to(p_out.dtype.element_ty), mask=m_n)


@jit
def _deep_amax(b_x, DEPTH: constexpr):
    """Largest magnitudes of the columns of DEPTH blocks, float32 of each row."""
    b_amax = tl.abs(b_x[0].to(tl.float32))
    if DEPTH > 1:
        b_amax = tl.maximum(b_amax, tl.abs(b_x[1].to(tl.float32)))
    if DEPTH > 2:
        b_amax = tl.maximum(b_amax, tl.abs(b_x[2].to(tl.float32)))
    if DEPTH > 3:
        b_amax = tl.maximum(b_amax, tl.abs(b_x[3].to(tl.float32)))
    if DEPTH > 4:
        b_amax = tl.maximum(b_amax, tl.abs(b_x[4].to(tl.float32)))
    return b_amax


@jit_counting("size_k")
def _down_kernel(
    p_active,
    p_weight,
    p_scales,
    p_bias,
    p_ids,
    p_shares,
    p_x,
    p_norm_weight,
    p_scaled,
    p_squares,
    p_amax,
    size_n,
    size_k,
    KIND: constexpr,
    HAS_BIAS: constexpr,
    HAS_AMAX: constexpr,
    EVEN: constexpr,
    COLUMNS_AT_A_TIME: constexpr,
    TOP_K: constexpr,
    BLOCK_S: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    DEPTH: constexpr,
    PLAIN: constexpr,
    PDL: constexpr,
):
    # Blocks are [N, S, K], and weights are loaded as many columns at a time as the rows, which are wider: so that both lie
    # in the same threads, and nothing but the sum of the experts goes through shared memory.
    i_n = tl.program_id(0)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_s = tl.arange(0, BLOCK_S)
    o_k = tl.arange(0, BLOCK_K)[None, None, :]
    m_n = o_n < size_n
    m_s = o_s < TOP_K
    row_size = size_k // COLUMNS_AT_A_TIME * COLUMNS_AT_A_TIME  # the same, and all that is to be known of its divisors
    # Ids and shares are older than what this kernel waits for: the kernel before it has waited for them, and only then
    # let this one begin. So the weights are on the way meanwhile.
    b_ids = tl.load(p_ids + o_s, mask=m_s, other=0, cache_modifier=".cg").to(tl.int64)
    b_shares = tl.load(p_shares + o_s, mask=m_s, other=0.0, cache_modifier=".cg")
    m_ns = m_n[:, None] & m_s[None, :]
    b_rows = b_ids[None, :] * size_n + o_n[:, None]
    p_w = p_weight + b_rows[:, :, None] * row_size + o_k
    b_w = _deep_load(p_w, m_ns[:, :, None], o_k, row_size, EVEN, BLOCK_K, DEPTH)
    b_scales = tl.full((BLOCK_N, BLOCK_S), 1.0, tl.float32)
    if KIND == FP8_ROWS or KIND == INT8_ROWS:
        b_scales = tl.load(p_scales + b_rows, mask=m_ns, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_rows = p_active + o_s[None, :, None] * row_size + o_k
    b_x = _deep_load(p_rows, m_s[None, :, None], o_k, row_size, EVEN, BLOCK_K, DEPTH)
    b_factors = None
    if KIND == FP8_ROWS:
        b_amax = tl.max(_deep_amax(b_x, DEPTH), axis=2)
        b_row_scales = tl.maximum(b_amax / 448.0, LEAST_SCALE)
        b_factors = (1.0 / b_row_scales)[:, :, None]
        b_scales *= b_row_scales * 16.0
    b_y = tl.sum(_deep_products(b_w, b_x, b_factors, KIND, DEPTH, PLAIN), axis=2) * b_scales
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_BIAS:
        b_y += tl.load(p_bias + b_rows, mask=m_ns, other=0.0).to(tl.float32)
    b_y = tl.sum(tl.where(m_s[None, :], b_y * b_shares[None, :], 0.0), axis=1)
    b_y, b_scaled = residual_epilogue_row(b_y, p_x, p_norm_weight, p_scaled, p_squares, i_n, o_n, m_n)
    if HAS_AMAX:
        tl.store(p_amax + i_n, tl.max(tl.where(m_n, tl.abs(b_scaled.to(tl.float32)), 0.0), axis=0))
    tl.store(p_x + o_n, b_y.to(p_x.dtype.element_ty), mask=m_n)

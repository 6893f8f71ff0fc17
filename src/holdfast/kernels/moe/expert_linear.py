"""Products of a mixture of experts, and their sum: each token's row by the weights of its experts, then by the shares of these.

T tokens, S experts of a token, P = T * S pairs of token and expert, E experts, N outputs, K inputs, B blocks of K, H columns

A small batch takes a GEMV for each pair (kernels/moe/expert_gemv.py), a larger one a grouped GEMM over blocks of pairs that
share an expert (kernels/moe/grouped_gemm.py); kernels/geometry.py says which it is, by the number of tokens.
"""

import torch
import torch.nn.functional as F

from holdfast.kernels.activation import SILU_HALVES, GateForm, gate_up_product
from holdfast.kernels.gemm.linear import WIDENED_ELEMENTS, plain_linear, plain_linear_float32, quantized_view
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, quantize_rows, quantize_rows_reference
from holdfast.kernels.moe.expert_gemv import expert_gemv
from holdfast.kernels.moe.grouped_gemm import grouped_gemm
from holdfast.kernels.moe.routing import ExpertOrder
from holdfast.kernels.triton_compat import can_run, constexpr, jit, pdl_launch, supports_pdl, tl
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize

# ruff: noqa: ANN001, ANN202 pointers of kernels have no types


SMALL_BATCH_TOKENS = 16
SMALL_BATCH_COLUMNS, LARGE_BATCH_COLUMNS = 256, 1024
"""Of a program that sums. A small batch is spread over many processors; a large one is read sixteen bytes a thread."""


def expert_linear(
    x_XK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    order: ExpertOrder,
    out_PN: torch.Tensor,
    gated: bool,
    quantized: QuantizedRows | None,
    bias_EN: torch.Tensor | None = None,
    form: GateForm = SILU_HALVES,
) -> torch.Tensor:
    """Each pair's row by the weight [E, N, K] of its expert, plus its bias, into `out_PN`; gated: [P, N / 2], as `form` says.

    Row p // S of `x_XK` [T, K] belongs to pair p, or row p of [P, K]. A scheme that quantizes activations gets room in `quantized`
    for all rows of x at least. On CPU a row's result does not depend, to the bit, on the other rows.
    """
    if not can_run(x_XK):
        return expert_linear_reference(x_XK, weight, order, out_PN, gated, quantized, bias_EN, form)
    check_operands(x_XK, weight, order, out_PN, gated, quantized, bias_EN)
    room = _room(quantized, weight, len(x_XK))
    rows = None if room is None else quantize_rows(x_XK, room)
    launch = expert_gemv if order.block_rows == 1 else grouped_gemm
    return launch(x_XK, weight, order, out_PN, gated, rows, bias_EN, form)


def expert_linear_reference(
    x_XK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    order: ExpertOrder,
    out_PN: torch.Tensor,
    gated: bool,
    quantized: QuantizedRows | None,
    bias_EN: torch.Tensor | None = None,
    form: GateForm = SILU_HALVES,
) -> torch.Tensor:
    """The same in plain torch: one expert after the other, and of each only if it has rows."""
    check_operands(x_XK, weight, order, out_PN, gated, quantized, bias_EN)
    room = _room(quantized, weight, len(x_XK))
    rows = None if room is None else quantize_rows_reference(x_XK, room)
    pairs_per_row = order.num_pairs // max(1, len(x_XK))
    ids_P = order.expert_ids_TS.flatten()
    for expert in ids_P.unique().tolist():
        pairs = (ids_P == expert).nonzero().flatten()
        chosen = pairs // pairs_per_row
        if isinstance(weight, torch.Tensor):
            y = torch.empty(len(pairs), weight.shape[1], device=x_XK.device)
            plain_linear_float32(x_XK[chosen], weight[expert], y)
        elif rows is None:
            y = _widened(x_XK[chosen].float(), weight, expert)
        else:
            y = _quantized(rows.codes_TK[chosen].float(), rows.scales_TB[chosen], weight, expert)
        if bias_EN is not None:
            y += bias_EN[expert].float()
        if gated:
            y = gate_up_product(y, form)
        out_PN[pairs] = y.to(out_PN.dtype)
    return out_PN


def check_operands(
    x_XK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    order: ExpertOrder,
    out_PN: torch.Tensor,
    gated: bool,
    quantized: QuantizedRows | None,
    bias_EN: torch.Tensor | None,
) -> None:
    """Sizes go together, and rows lie one after the other."""
    num_experts, size_n, size_k = weight.shape
    num_pairs, width = order.num_pairs, size_n // 2 if gated else size_n
    assert num_experts == order.num_experts, f"{weight.shape=}, and pairs of {order.num_experts} experts"
    assert x_XK.shape[0] in (num_pairs, num_pairs // order.top_k), f"{x_XK.shape=} for {num_pairs} pairs"
    assert x_XK.shape[1] == size_k, f"{x_XK.shape=} {weight.shape=}"
    assert out_PN.shape == (num_pairs, width), f"{out_PN.shape=}, not {(num_pairs, width)}"
    assert not gated or size_n % 2 == 0, f"{size_n} rows are no gates and ups"
    assert bias_EN is None or bias_EN.shape == (num_experts, size_n), f"{bias_EN.shape=} beside {weight.shape=}"
    tensors = (weight,) if isinstance(weight, torch.Tensor) else (weight.codes, weight.scales)
    for tensor in (x_XK, out_PN, *tensors, *(quantized or ()), *(() if bias_EN is None else (bias_EN,))):
        assert tensor.is_contiguous(), f"{tensor.shape} with strides {tensor.stride()}"


def _room(
    quantized: QuantizedRows | None, weight: torch.Tensor | QuantizedWeight, num_rows: int
) -> QuantizedRows | None:
    """Room for rows as codes; None where the weight takes them as they are."""
    return None if isinstance(weight, torch.Tensor) else quantized_view(quantized, weight, num_rows)


def _widened(x_RK: torch.Tensor, weight: QuantizedWeight, expert: int) -> torch.Tensor:
    """Rows by an expert's weight as float32, some of its rows at a time."""
    y_RN = x_RK.new_empty(len(x_RK), weight.shape[1])
    for start, end in _pieces(weight):
        first = expert * weight.shape[1]
        y_RN[:, start:end] = plain_linear(x_RK, dequantize(weight, (first + start, first + end)), None)
    return y_RN


def _quantized(codes_RK: torch.Tensor, scales_RB: torch.Tensor, weight: QuantizedWeight, expert: int) -> torch.Tensor:
    """Codes by codes, then the scales of both; block by block of columns where these have scales of their own."""
    scheme, (_, size_n, size_k) = weight.scheme, weight.shape
    width = scheme.block_columns or size_k
    y_RN = codes_RK.new_zeros(len(codes_RK), size_n)
    for start, end in _pieces(weight):
        codes_NK = weight.codes[expert, start:end].float()
        scales_NB = weight.scales[expert].view(-1, scales_RB.shape[1])
        scales_NB = scales_NB.repeat_interleave(scheme.block_rows, dim=0)[start:end]
        for block in range(scales_RB.shape[1]):
            columns = slice(block * width, (block + 1) * width)
            y = plain_linear(codes_RK[:, columns].contiguous(), codes_NK[:, columns].contiguous(), None)
            y_RN[:, start:end] += y * scales_RB[:, block, None] * scales_NB[:, block]
    return y_RN


def _pieces(weight: QuantizedWeight) -> list[tuple[int, int]]:
    """Ranges of an expert's rows that are few enough to be widened at a time, in whole blocks."""
    _, size_n, size_k = weight.shape
    block_rows = weight.scheme.block_rows
    height = max(1, WIDENED_ELEMENTS // (size_k * block_rows)) * block_rows
    return [(start, min(start + height, size_n)) for start in range(0, size_n, height)]


def row_form(num_rows: int) -> int:
    """Columns of a program: what of a launch follows from the number of tokens."""
    return SMALL_BATCH_COLUMNS if num_rows <= SMALL_BATCH_TOKENS else LARGE_BATCH_COLUMNS


def sum_experts(
    routed_PH: torch.Tensor,
    shares_TS: torch.Tensor,
    shared_TH: torch.Tensor | None,
    shared_logit_T1: torch.Tensor | None,
    out_TH: torch.Tensor,
) -> torch.Tensor:
    """out = the sum of share * routed, expert by expert in float32, plus sigmoid(logit) * shared where they are given."""
    if can_run(routed_PH):
        return sum_experts_triton(routed_PH, shares_TS, shared_TH, shared_logit_T1, out_TH)
    return sum_experts_reference(routed_PH, shares_TS, shared_TH, shared_logit_T1, out_TH)


def sum_experts_reference(
    routed_PH: torch.Tensor,
    shares_TS: torch.Tensor,
    shared_TH: torch.Tensor | None,
    shared_logit_T1: torch.Tensor | None,
    out_TH: torch.Tensor,
) -> torch.Tensor:
    """The same in plain torch."""
    _check(routed_PH, shares_TS, shared_TH, shared_logit_T1, out_TH)
    num_rows, top_k = shares_TS.shape
    routed_TSH = routed_PH.view(num_rows, top_k, out_TH.shape[1])
    total_TH = routed_TSH[:, 0].float() * shares_TS[:, :1]
    for s in range(1, top_k):
        total_TH += routed_TSH[:, s].float() * shares_TS[:, s : s + 1]
    if shared_TH is not None:
        gate_T1 = 1.0 if shared_logit_T1 is None else _sigmoid(shared_logit_T1.float())
        total_TH += shared_TH.float() * gate_T1
    return out_TH.copy_(total_TH)


def _sigmoid(x_T1: torch.Tensor) -> torch.Tensor:
    """As a softmax of two: each row is computed alone, where torch's sigmoid rounds the last rows of many differently."""
    return F.pad(x_T1, (0, 1)).softmax(dim=1)[:, :1]


def _check(
    routed_PH: torch.Tensor,
    shares_TS: torch.Tensor,
    shared_TH: torch.Tensor | None,
    shared_logit_T1: torch.Tensor | None,
    out_TH: torch.Tensor,
) -> None:
    num_rows, top_k = shares_TS.shape
    assert out_TH.shape[0] == num_rows, f"{out_TH.shape=} for {num_rows} tokens"
    assert routed_PH.shape == (num_rows * top_k, out_TH.shape[1]), (
        f"{routed_PH.shape=} {shares_TS.shape=} {out_TH.shape=}"
    )
    assert shared_TH is None or shared_TH.shape == out_TH.shape, f"{shared_TH.shape=} {out_TH.shape=}"
    assert shared_logit_T1 is None or shared_TH is not None, "a gate, and no shared expert behind it"
    assert shared_logit_T1 is None or shared_logit_T1.shape == (num_rows, 1), f"{shared_logit_T1.shape=}"
    for tensor in (routed_PH, shares_TS, shared_TH, shared_logit_T1, out_TH):
        assert tensor is None or tensor.is_contiguous(), f"{tensor.shape} with strides {tensor.stride()}"


def sum_experts_triton(
    routed_PH: torch.Tensor,
    shares_TS: torch.Tensor,
    shared_TH: torch.Tensor | None,
    shared_logit_T1: torch.Tensor | None,
    out_TH: torch.Tensor,
) -> torch.Tensor:
    """The same as a Triton kernel, a program for some columns of a token."""
    _check(routed_PH, shares_TS, shared_TH, shared_logit_T1, out_TH)
    (num_rows, top_k), size = shares_TS.shape, out_TH.shape[1]
    if not out_TH.numel():
        return out_TH
    columns = row_form(num_rows)
    pdl = supports_pdl(routed_PH)
    _sum_kernel[(num_rows, -(-size // columns))](
        routed_PH,
        shares_TS,
        shared_TH if shared_TH is not None else routed_PH,
        shared_logit_T1 if shared_logit_T1 is not None else shares_TS,
        out_TH,
        size,
        TOP_K=top_k,
        HAS_SHARED=shared_TH is not None,
        HAS_GATE=shared_logit_T1 is not None,
        BLOCK=columns,
        PDL=pdl,
        num_warps=columns // 256,
        **pdl_launch(pdl),
    )
    return out_TH


@jit
def _sum_kernel(
    p_routed,
    p_shares,
    p_shared,
    p_logit,
    p_out,
    size,
    TOP_K: constexpr,
    HAS_SHARED: constexpr,
    HAS_GATE: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_h = o_h < size
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    p_first = p_routed + i_row * TOP_K * size + o_h
    b_sum = tl.load(p_first, mask=m_h, other=0.0).to(tl.float32) * tl.load(p_shares + i_row * TOP_K)
    for s in tl.static_range(1, TOP_K):
        b_sum += tl.load(p_first + s * size, mask=m_h, other=0.0).to(tl.float32) * tl.load(p_shares + i_row * TOP_K + s)
    if HAS_SHARED:
        b_shared = tl.load(p_shared + i_row * size + o_h, mask=m_h, other=0.0).to(tl.float32)
        if HAS_GATE:
            b_shared *= tl.sigmoid(tl.load(p_logit + i_row).to(tl.float32))
        b_sum += b_shared
    tl.store(p_out + i_row * size + o_h, b_sum.to(p_out.dtype.element_ty), mask=m_h)

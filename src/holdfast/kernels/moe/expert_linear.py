"""Products of a mixture of experts: each token's row by the weights of its experts.

T tokens, S experts of a token, P = T * S pairs of token and expert, E experts, N outputs, K inputs, B blocks of K

A small batch takes a GEMV for each pair (kernels/moe/expert_gemv.py), a larger one a grouped GEMM over blocks of pairs that
share an expert (kernels/moe/grouped_gemm.py); kernels/geometry.py says which it is, by the number of tokens.
"""

import torch
from torch import Tensor

from holdfast.kernels.activation import SILU_HALVES, GateForm, gate_up_product
from holdfast.kernels.gemm.linear import WIDENED_ELEMENTS, plain_linear, plain_linear_float32, quantized_view
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, quantize_rows, quantize_rows_reference
from holdfast.kernels.moe.expert_gemv import expert_gemv
from holdfast.kernels.moe.grouped_gemm import grouped_gemm
from holdfast.kernels.moe.routing import PADDING, ExpertOrder
from holdfast.kernels.triton_compat import can_run
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize


def expert_linear(
    x_XK: Tensor,
    weight: Tensor | QuantizedWeight,
    order: ExpertOrder,
    out_PN: Tensor,
    gated: bool,
    quantized: QuantizedRows | None,
    bias_EN: Tensor | None = None,
    form: GateForm = SILU_HALVES,
    is_coded: bool = False,
) -> Tensor:
    """Each pair's row by the weight [E, N, K] of its expert, plus its bias, into `out_PN`; gated: [P, N / 2], as `form` says.

    Row p // S of `x_XK` [T, K] belongs to pair p, or row p of [P, K]. A scheme that quantizes activations gets room in `quantized`
    for all rows of x at least; `is_coded`: they lie there as codes already, and of x only the shape is looked at. On CPU a row's
    result does not depend, to the bit, on the other rows. Pairs of experts that are not here (PADDING) are not written.
    """
    if not can_run(x_XK):
        return expert_linear_reference(x_XK, weight, order, out_PN, gated, quantized, bias_EN, form, is_coded)
    check_operands(x_XK, weight, order, out_PN, gated, quantized, bias_EN)
    room = _room(quantized, weight, len(x_XK))
    rows = room if room is None or is_coded else quantize_rows(x_XK, room)
    launch = expert_gemv if order.block_rows == 1 else grouped_gemm
    return launch(x_XK, weight, order, out_PN, gated, rows, bias_EN, form)


def expert_linear_reference(
    x_XK: Tensor,
    weight: Tensor | QuantizedWeight,
    order: ExpertOrder,
    out_PN: Tensor,
    gated: bool,
    quantized: QuantizedRows | None,
    bias_EN: Tensor | None = None,
    form: GateForm = SILU_HALVES,
    is_coded: bool = False,
) -> Tensor:
    """The same in plain torch: one expert after the other, and of each only if it has rows."""
    check_operands(x_XK, weight, order, out_PN, gated, quantized, bias_EN)
    room = _room(quantized, weight, len(x_XK))
    rows = room if room is None or is_coded else quantize_rows_reference(x_XK, room)
    pairs_per_row = order.num_pairs // max(1, len(x_XK))
    ids_P = order.expert_ids_TS.flatten()
    pairs_P = ids_P.argsort(stable=True)
    experts, counts = ids_P[pairs_P].unique_consecutive(return_counts=True)
    for expert, pairs in zip(experts.tolist(), pairs_P.split(counts.tolist()), strict=True):
        if expert == PADDING:
            continue
        chosen = pairs // pairs_per_row
        if isinstance(weight, Tensor):
            y = torch.empty(len(pairs), weight.shape[1], device=x_XK.device)
            plain_linear_float32(x_XK.index_select(0, chosen), weight[expert], y)
        elif rows is None:
            y = _widened(x_XK[chosen].float(), weight, expert)
        else:
            y = _quantized(rows.codes_TK[chosen].float(), rows.scales_TB[chosen], weight, expert)
        if bias_EN is not None:
            y += bias_EN[expert].float()
        if gated:
            y = gate_up_product(y, form)
        out_PN.index_copy_(0, pairs, y.to(out_PN.dtype))
    return out_PN


def check_operands(
    x_XK: Tensor,
    weight: Tensor | QuantizedWeight,
    order: ExpertOrder,
    out_PN: Tensor,
    gated: bool,
    quantized: QuantizedRows | None,
    bias_EN: Tensor | None,
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
    tensors = (weight,) if isinstance(weight, Tensor) else (weight.codes, weight.scales)
    rows = () if quantized is None else (quantized.codes_TK, quantized.scales_TB)
    for tensor in (x_XK, out_PN, *tensors, *rows, *(() if bias_EN is None else (bias_EN,))):
        assert tensor.is_contiguous(), f"{tensor.shape} with strides {tensor.stride()}"


def _room(quantized: QuantizedRows | None, weight: Tensor | QuantizedWeight, num_rows: int) -> QuantizedRows | None:
    """Room for rows as codes; None where the weight takes them as they are."""
    return None if isinstance(weight, Tensor) else quantized_view(quantized, weight, num_rows)


def _widened(x_RK: Tensor, weight: QuantizedWeight, expert: int) -> Tensor:
    """Rows by an expert's weight as float32, some of its rows at a time."""
    y_RN = x_RK.new_empty(len(x_RK), weight.shape[1])
    for start, end in _pieces(weight):
        first = expert * weight.shape[1]
        y_RN[:, start:end] = plain_linear(x_RK, dequantize(weight, (first + start, first + end)), None)
    return y_RN


def _quantized(codes_RK: Tensor, scales_RB: Tensor, weight: QuantizedWeight, expert: int) -> Tensor:
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

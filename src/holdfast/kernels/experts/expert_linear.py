"""Products of rows with the weights of their experts: plain, or gated as silu(gate) * up.

T tokens, S experts of a token, P = T * S pairs, E experts, N outputs, K inputs, B blocks of K

Few pairs are multiplied one by one (kernels/experts/expert_pairs.py), more of them in blocks that share an expert
(kernels/experts/expert_rows.py); kernels/experts/expert_order.py says which it is.
"""

import torch

from holdfast.kernels.experts.expert_order import ExpertOrder
from holdfast.kernels.experts.expert_pairs import expert_pairs
from holdfast.kernels.experts.expert_rows import expert_rows
from holdfast.kernels.products.plain_linear import WIDENED_ELEMENTS, plain_linear, plain_linear_float32
from holdfast.kernels.products.quantize_rows import CodedRows, quantize_rows, quantize_rows_reference
from holdfast.kernels.products.quantized_linear import coded_view
from holdfast.kernels.silu_mul import silu_mul
from holdfast.kernels.triton_compat import can_run
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_codes import dequantize


def expert_linear(
    x_XK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    order: ExpertOrder,
    out_PN: torch.Tensor,
    gated: bool,
    coded: CodedRows | None,
) -> torch.Tensor:
    """Each pair's row by the weight [E, N, K] of its expert, into `out_PN`; gated: [P, N / 2], gates in the upper rows.

    Row p // S of `x_XK` [T, K] belongs to pair p, or row p of [P, K]. A scheme that codes activations gets room in `coded`
    for all rows of x at least. On CPU a row's result does not depend, to the bit, on the other rows.
    """
    if not can_run(x_XK):
        return expert_linear_reference(x_XK, weight, order, out_PN, gated, coded)
    check_operands(x_XK, weight, order, out_PN, gated, coded)
    room = _room(coded, weight, len(x_XK))
    rows = None if room is None else quantize_rows(x_XK, room)
    launch = expert_pairs if order.block_rows == 1 else expert_rows
    return launch(x_XK, weight, order, out_PN, gated, rows)


def expert_linear_reference(
    x_XK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    order: ExpertOrder,
    out_PN: torch.Tensor,
    gated: bool,
    coded: CodedRows | None,
) -> torch.Tensor:
    """The same in plain torch: one expert after the other, and of each only if it has rows."""
    check_operands(x_XK, weight, order, out_PN, gated, coded)
    room = _room(coded, weight, len(x_XK))
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
            y = _coded(rows.codes_TK[chosen].float(), rows.scales_TB[chosen], weight, expert)
        if gated:
            y = silu_mul(y)
        out_PN[pairs] = y.to(out_PN.dtype)
    return out_PN


def check_operands(
    x_XK: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    order: ExpertOrder,
    out_PN: torch.Tensor,
    gated: bool,
    coded: CodedRows | None,
) -> None:
    """Sizes go together, and rows lie one after the other."""
    num_experts, size_n, size_k = weight.shape
    num_pairs, width = order.num_pairs, size_n // 2 if gated else size_n
    assert num_experts == order.num_experts, f"{weight.shape=}, and pairs of {order.num_experts} experts"
    assert x_XK.shape[0] in (num_pairs, num_pairs // order.top_k), f"{x_XK.shape=} for {num_pairs} pairs"
    assert x_XK.shape[1] == size_k, f"{x_XK.shape=} {weight.shape=}"
    assert out_PN.shape == (num_pairs, width), f"{out_PN.shape=}, not {(num_pairs, width)}"
    assert not gated or size_n % 2 == 0, f"{size_n} rows are no gates and ups"
    tensors = (weight,) if isinstance(weight, torch.Tensor) else (weight.codes, weight.scales)
    for tensor in (x_XK, out_PN, *tensors, *(coded or ())):
        assert tensor.is_contiguous(), f"{tensor.shape} with strides {tensor.stride()}"


def _room(coded: CodedRows | None, weight: torch.Tensor | QuantizedWeight, num_rows: int) -> CodedRows | None:
    """Room for rows as codes; None where the weight takes them as they are."""
    return None if isinstance(weight, torch.Tensor) else coded_view(coded, weight, num_rows)


def _widened(x_RK: torch.Tensor, weight: QuantizedWeight, expert: int) -> torch.Tensor:
    """Rows by an expert's weight as float32, some of its rows at a time."""
    y_RN = x_RK.new_empty(len(x_RK), weight.shape[1])
    for start, end in _pieces(weight):
        first = expert * weight.shape[1]
        y_RN[:, start:end] = plain_linear(x_RK, dequantize(weight, (first + start, first + end)), None)
    return y_RN


def _coded(codes_RK: torch.Tensor, scales_RB: torch.Tensor, weight: QuantizedWeight, expert: int) -> torch.Tensor:
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

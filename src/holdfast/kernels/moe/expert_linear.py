"""Linear layer of a mixture of experts: each token's row by the weights of its experts.

T tokens, S experts of a token, P = T * S pairs of token and expert, E experts, N outputs, K inputs, B blocks of K

A small batch takes one GEMV per pair (kernels/moe/expert_gemv.py), a larger one a grouped GEMM over blocks of pairs
that share an expert (kernels/moe/grouped_gemm.py). kernels/geometry.py chooses by the number of tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.activation import gate_up_product
from holdfast.kernels.gemm import packed_mma
from holdfast.kernels.gemm.linear import (
    WIDENED_ELEMENTS,
    dequantize_rows,
    plain_linear,
    plain_linear_float32,
    quantized_view,
)
from holdfast.kernels.gemm.packed_linear import packed_linear
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, quantize_rows, quantize_rows_reference
from holdfast.kernels.gemm.quantized_tiles import operands_of
from holdfast.kernels.moe.deep_gemv import SharedProduct, deep_gemv, takes_deep_loads
from holdfast.kernels.moe.expert_gemv import expert_gemv
from holdfast.kernels.moe.grouped_gemm import grouped_gemm
from holdfast.kernels.moe.routing import PADDING, ExpertProduct
from holdfast.kernels.operation import operation
from holdfast.kernels.packed_kernels import has_tiles
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize


def expert_linear_triton(product: ExpertProduct, is_coded: bool = False) -> Tensor:
    """Launch one GEMV per pair, or a grouped GEMM over sorted pairs; packed weights take tiles, or else the reference."""
    if isinstance(product.weight, PackedWeight):
        return packed_expert_linear(product) if takes_packed(product) else expert_linear_reference(product, is_coded)
    buffers = _checked_buffers(product)
    rows = buffers if buffers is None or is_coded else quantize_rows(product.x_XK, buffers)
    launch = expert_gemv if product.order.block_rows == 1 else grouped_gemm
    return launch(product._replace(quantized=rows))


def takes_packed(product: ExpertProduct) -> bool:
    """Return True if tiles multiply these packed experts: gate and up are packed alike, and tiles take their codes."""
    weight, x_XK = product.weight, product.x_XK
    assert isinstance(weight, PackedWeight), "the weight is packed"
    part, *others = weight.parts
    return not others and packed_mma.takes_rows(x_XK) and has_tiles(part.scheme, x_XK.shape[1])


def packed_expert_linear(product: ExpertProduct) -> Tensor:
    """Launch tiles over pairs, each alone or with the others of its expert."""
    x_XK, weight, order, out_PN, gated, _, bias_EN, form = product
    assert isinstance(weight, PackedWeight), "the weight is packed"
    product.check()
    if not order.num_pairs:
        return out_PN
    ids_TS = order.expert_ids_TS
    block_m, kind = 8, packed_mma.ORDERS.index("pairs")
    if order.block_rows > 1:
        block_m = min(order.block_rows, packed_mma.MOST_BLOCK_ROWS)
        kind = packed_mma.ORDERS.index("sorted" if order.is_sorted else "searched")
    tensors = (order.pairs_BR, order.block_experts_B) if order.is_sorted and order.block_rows > 1 else (ids_TS, ids_TS)
    blocks = packed_mma.RowBlocks(
        kind, *tensors, order.num_blocks, block_m, max(1, order.block_rows // block_m), len(ids_TS), order.top_k,
        order.num_pairs,
    )  # fmt: skip
    return packed_mma.packed_experts(x_XK, weight.parts[0], bias_EN, out_PN, blocks, gated, form)


def expert_linear_reference(product: ExpertProduct, is_coded: bool = False) -> Tensor:
    """Multiply each pair's row by the weight [E, N, K] of its expert, plus its bias; if gated, apply the gate of `form`.

    Pair p reads row p // S of `x_XK` if that is [T, K], or row p if it is [P, K]. If `is_coded`, x is already quantized
    in `product.quantized`, and its values are ignored. On CPU a row's result does not depend on other rows. Pairs of
    other ranks' experts (PADDING) are not written.
    """
    x_XK, weight, order, out_PN, gated, _, bias_EN, form = product
    buffers = _checked_buffers(product)
    rows = buffers if buffers is None or is_coded else quantize_rows_reference(x_XK, buffers)
    pairs_per_row = order.num_pairs // max(1, len(x_XK))
    ids_P = order.expert_ids_TS.flatten()
    pairs_P = ids_P.argsort(stable=True)
    experts, counts = ids_P[pairs_P].unique_consecutive(return_counts=True)
    for expert, pairs in zip(experts.tolist(), pairs_P.split(counts.tolist()), strict=True):
        if expert == PADDING:
            continue
        chosen = pairs // pairs_per_row
        if isinstance(weight, PackedWeight):
            y = torch.empty(len(pairs), weight.shape[1], device=x_XK.device)
            packed_linear(x_XK.index_select(0, chosen), weight, None, y, expert)
        elif isinstance(weight, Tensor):
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


expert_linear = operation(
    reference=expert_linear_reference,
    triton=expert_linear_triton,
    place=lambda product, is_coded=False: product.x_XK,
)


class SharedLinear(NamedTuple):
    """The shared expert's product of a single row, beside those of the row's own experts."""

    weight: AnyWeight
    """[N, K]."""
    out_1N: Tensor


def stored_alike(weight: AnyWeight, experts: AnyWeight) -> bool:
    """Return True if `weight` could be one of the experts, and deep GEMVs take it."""
    if weight.shape != experts.shape[1:] or not takes_deep_loads(experts):
        return False
    if isinstance(weight, QuantizedWeight) and isinstance(experts, QuantizedWeight):
        return takes_deep_loads(weight) and weight.scheme.code_dtype == experts.scheme.code_dtype
    return isinstance(weight, Tensor) and isinstance(experts, Tensor) and weight.dtype == experts.dtype


def expert_row_linear_reference(product: ExpertProduct, shared: SharedLinear, is_coded: bool = False) -> Tensor:
    """Call `expert_linear` of one row, and multiply the row by the shared expert's weight, gated as the others are."""
    expert_linear_reference(product, is_coded)
    rows = _checked_buffers(product)
    x_1K = product.x_XK.float() if rows is None else dequantize_rows(rows)
    weight = shared.weight
    assert not isinstance(weight, PackedWeight), "packed weights have products of their own"
    weight_NK = dequantize(weight) if isinstance(weight, QuantizedWeight) else weight.float()
    y_1N = x_1K @ weight_NK.t()
    shared.out_1N.copy_(gate_up_product(y_1N, product.form) if product.gated else y_1N)
    return product.out_PN


def expert_row_linear_triton(product: ExpertProduct, shared: SharedLinear, is_coded: bool = False) -> Tensor:
    """Launch one GEMV per pair, and one for the shared expert, in one grid."""
    buffers = _checked_buffers(product)
    rows = buffers if buffers is None or is_coded else quantize_rows(product.x_XK, buffers)
    operands, own = (operands_of(product.x_XK, weight, rows) for weight in (product.weight, shared.weight))
    assert own.kind == operands.kind, f"{own.kind=} {operands.kind=}"
    return deep_gemv(product._replace(quantized=rows), operands, SharedProduct(*own.tensors[2:], shared.out_1N))


expert_row_linear = operation(
    reference=expert_row_linear_reference,
    triton=expert_row_linear_triton,
    place=lambda product, shared, is_coded=False: product.x_XK,
)


def _checked_buffers(product: ExpertProduct) -> QuantizedRows | None:
    """Check the operands; return buffers for rows as codes, or None if the weight takes them unquantized."""
    product.check()
    return quantized_view(product.quantized, product.weight, len(product.x_XK))


def _widened(x_RK: Tensor, weight: QuantizedWeight, expert: int) -> Tensor:
    """Multiply rows by an expert's weight, dequantized piece by piece to float32."""
    y_RN = x_RK.new_empty(len(x_RK), weight.shape[1])
    for start, end in _pieces(weight):
        first = expert * weight.shape[1]
        y_RN[:, start:end] = plain_linear(x_RK, dequantize(weight, (first + start, first + end)), None)
    return y_RN


def _quantized(codes_RK: Tensor, scales_RB: Tensor, weight: QuantizedWeight, expert: int) -> Tensor:
    """Multiply codes by codes and by both scales, one block of columns at a time."""
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
    """Return ranges of an expert's rows, in whole blocks, small enough to dequantize."""
    _, size_n, size_k = weight.shape
    block_rows = weight.scheme.block_rows
    height = max(1, WIDENED_ELEMENTS // (size_k * block_rows)) * block_rows
    return [(start, min(start + height, size_n)) for start in range(0, size_n, height)]

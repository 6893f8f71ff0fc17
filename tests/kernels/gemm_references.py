"""Products in plain torch: what the GPU-only kernels of kernels/gemm and kernels/exchange must compute.

M rows, N outputs, K inputs, T rows, G groups
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.activation import REFERENCES
from holdfast.kernels.gemm.deferred_rms_norm import (
    NormedRows,
    ResidualStream,
    RowAmax,
    SmallBatchScratch,
    defer_rms_norm_reference,
)
from holdfast.kernels.gemm.linear import dequantized_rows, native_quantized_linear_reference
from holdfast.kernels.gemm.quantize_activations import (
    BLOCK_COLUMNS,
    QuantizedRows,
    RowAmaxBits,
    quantize_rows_reference,
)
from holdfast.kernels.gemm.small_batch import SideProduct
from holdfast.kernels.geometry import NUM_GATE_AMAX
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import E4M3_MAX, LEAST_E4M3_SCALE, dequantize


def plain_linear_float32_reference(x_TK: Tensor, weight_NK: Tensor, out_TN: Tensor) -> Tensor:
    return torch.mm(x_TK.float(), weight_NK.float().t(), out=out_TN)


def quantized_linear_reference(
    x_TK: Tensor,
    weight: QuantizedWeight,
    bias_N: Tensor | None,
    out_TN: Tensor,
    quantized: QuantizedRows | None = None,
    is_coded: bool = False,
) -> Tensor:
    """Dequantize rows and weight, then multiply in float32."""
    return native_quantized_linear_reference(
        dequantized_rows(x_TK, weight, quantized, is_coded), weight, bias_N, out_TN
    )


def block_scaled_gemv_reference(x_MK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor) -> Tensor:
    num_blocks = -(-x_MK.shape[1] // BLOCK_COLUMNS)
    codes, scales = torch.empty_like(x_MK, dtype=torch.float8_e4m3fn), x_MK.new_empty(len(x_MK), num_blocks).float()
    quantize_rows_reference(x_MK, QuantizedRows(codes, scales))
    rows = codes.float() * scales.repeat_interleave(BLOCK_COLUMNS, dim=1)[:, : x_MK.shape[1]]
    y = rows @ dequantize(weight).t()
    return out_MN.copy_(y if bias_N is None else y + bias_N.float())


def values_of(weight: Tensor | PackedWeight) -> Tensor:
    """Return a plain or packed weight in float32."""
    if isinstance(weight, Tensor):
        return weight.float()
    values_NK = torch.empty(weight.shape, device=weight.parts[0].planes[0].device)
    for part in weight.parts:
        rows_RK = values_NK[part.row_start : part.row_start + part.num_rows]
        dequantize_rows(part, 0, (0, part.num_rows), rows_RK)
    return values_NK


def row_amax_reference(x_MK: Tensor, values: Tensor, cleared: Tensor) -> RowAmax:
    cleared.zero_()
    values[: x_MK.shape[0]] = x_MK.float().abs().amax(-1)
    return RowAmax(values, 1)


def normed_linear_reference(
    rows: NormedRows,
    weight: AnyWeight,
    bias_N: Tensor | None,
    gated: bool,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    side: SideProduct | None = None,
) -> Tensor:
    num_rows, size_k = rows.scaled_MK.shape
    squares_MJ = scratch.squares[: num_rows * rows.num_squares].view(num_rows, rows.num_squares)
    scale_M1 = (squares_MJ.sum(-1, keepdim=True) / size_k + rows.eps).rsqrt()
    if side is not None:
        side.out_MP.copy_(rows.scaled_MK.float() @ side.weight_PK.float().t() * scale_M1)
    if isinstance(weight, QuantizedWeight):
        assert scratch.amax is not None, "a quantized product needs amax"
        sums = quantized_sums_reference(rows.scaled_MK, weight, RowAmax(scratch.amax.normed, rows.num_squares))
    else:
        sums = rows.scaled_MK.float() @ values_of(weight).t()
    y = sums * scale_M1
    if bias_N is not None:
        y = y + bias_N.float()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    y_MN.copy_(y.to(y_MN.dtype))
    if gated and isinstance(weight, QuantizedWeight):
        gate_amax_reference(y_MN, weight, scratch)
    return y_MN


def small_batch_linear_reference(
    a_MK: Tensor,
    weight: AnyWeight,
    bias_N: Tensor | None,
    y_MN: Tensor,
    scratch: SmallBatchScratch,
    amax: RowAmax | None = None,
) -> Tensor:
    return y_MN.copy_(_sums_reference(a_MK, weight, bias_N, amax))


def linear_add_reference(
    a_MK: Tensor,
    weight: AnyWeight,
    bias_N: Tensor | None,
    stream: ResidualStream,
    amax: RowAmax | None = None,
) -> NormedRows:
    y, x_MN = _sums_reference(a_MK, weight, bias_N, amax), stream.x_MN
    x_MN.copy_((x_MN.float() + y.to(x_MN.dtype).float()).to(x_MN.dtype))
    return defer_rms_norm_reference(stream)


def _sums_reference(a_MK: Tensor, weight: AnyWeight, bias_N: Tensor | None, amax: RowAmax | None) -> Tensor:
    """Compute a @ weight.T + bias in float32."""
    if isinstance(weight, QuantizedWeight):
        y = quantized_sums_reference(a_MK, weight, amax)
    else:
        y = a_MK.float() @ values_of(weight).t()
    return y if bias_N is None else y + bias_N.float()


def quantized_sums_reference(x_MK: Tensor, weight: QuantizedWeight, amax: RowAmax | None) -> Tensor:
    """Compute float32 x @ weight.T with the kernels' rounding: rows times the inverse of their scale."""
    x = x_MK.float()
    scale_M1 = torch.ones(len(x), 1, device=x.device)
    if weight.scheme.quantizes_activations:
        assert amax is not None, "rows that become codes need amax"
        values = amax.values[: len(x) * amax.num_amax].view(torch.float32).view(len(x), amax.num_amax)
        scale_M1 = (values.amax(-1, keepdim=True) / E4M3_MAX).clamp_min(LEAST_E4M3_SCALE)
        x = (x * (1.0 / scale_M1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return x @ weight.codes.float().t() * scale_M1 * weight.scales


def gate_amax_reference(y_MN: Tensor, weight: QuantizedWeight, scratch: SmallBatchScratch) -> None:
    """Raise the first amax of each row by the result of a gated product."""
    if not weight.scheme.quantizes_activations:
        return
    assert scratch.amax is not None, "a quantized product needs amax"
    first_M = scratch.amax.gated[: len(y_MN) * NUM_GATE_AMAX].view(len(y_MN), NUM_GATE_AMAX)[:, 0]
    first_M.copy_(torch.maximum(first_M, y_MN.float().abs().amax(-1).view(torch.int32)))


def row_scaled_linear_reference(
    rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor
) -> Tensor:
    y = rows.codes_TK.float() @ weight.codes.float().t() * (rows.scales_TB * weight.scales.view(1, -1))
    return out_MN.copy_((y if bias_N is None else y + bias_N.float()).to(out_MN.dtype))


def row_scaled_gate_reference(
    rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, kind: str, out_MI: Tensor
) -> RowAmaxBits:
    assert rows.scratch is not None, "a gated product needs amax"
    wide = torch.empty(len(out_MI), weight.shape[0], device=out_MI.device)
    gate, up = row_scaled_linear_reference(rows, weight, bias_N, wide).chunk(2, dim=-1)
    out_MI.copy_((REFERENCES[kind](gate) * up).to(out_MI.dtype))
    rows.scratch.amax[: len(out_MI)] = (out_MI.float().view(torch.int32) & 0x7FFFFFFF).amax(-1)
    return RowAmaxBits(rows.scratch.amax, 1)


def gather_small_reference(parts: Sequence[Tensor], out_SN: Tensor) -> Tensor:
    """Part by part."""
    return torch.stack(tuple(parts), out=out_SN)

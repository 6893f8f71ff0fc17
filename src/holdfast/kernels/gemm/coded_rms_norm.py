"""Residual add, RMSNorm and e4m3 quantization in one kernel.

T rows, D columns
"""

from torch import Tensor

from holdfast.kernels.gemm.quantize_activations import QuantizedRows, quantize_rows
from holdfast.kernels.norm import add_rms_norm, launch_rms_norm
from holdfast.kernels.operation import operation


def add_rms_norm_coded_reference(
    x_TD: Tensor,
    delta_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    out_TD: Tensor,
    quantized: QuantizedRows,
    offset: float = 0.0,
) -> Tensor:
    """Call `add_rms_norm`, then `quantize_rows` of `out_TD` with a scale a row."""
    quantize_rows(add_rms_norm(x_TD, delta_TD, weight_D, eps, out_TD, offset), quantized)
    return out_TD


def add_rms_norm_coded_triton(
    x_TD: Tensor,
    delta_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    out_TD: Tensor,
    quantized: QuantizedRows,
    offset: float = 0.0,
) -> Tensor:
    """Launch one program a row."""
    assert quantized.codes_TK.shape == x_TD.shape, f"{quantized.codes_TK.shape=} {x_TD.shape=}"
    assert quantized.scales_TB.shape == (len(x_TD), 1), f"{quantized.scales_TB.shape=}: a row has one scale"
    assert quantized.codes_TK.stride(1) == 1, "the elements of a row must lie side by side"
    return launch_rms_norm(x_TD, delta_TD, weight_D, eps, out_TD, offset, quantized[:2])


add_rms_norm_coded = operation(reference=add_rms_norm_coded_reference, triton=add_rms_norm_coded_triton)

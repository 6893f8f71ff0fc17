"""Residual add, RMSNorm and e4m3 quantization in one kernel.

T rows, D columns
"""

from torch import Tensor

from holdfast.kernels.fp8 import as_bits, e4m3_quotients, size_bits
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, quantize_rows, scale_of
from holdfast.kernels.norm import add_rms_norm, num_warps_for
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, next_power_of_two, release_then_wait, tl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types


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
    num_rows, size = x_TD.shape
    codes_TD, scales_T1, _ = quantized
    assert codes_TD.shape == x_TD.shape, f"{codes_TD.shape=} {x_TD.shape=}"
    assert scales_T1.shape == (num_rows, 1), f"{scales_T1.shape=}: a row has one scale"
    if x_TD.numel():
        block = next_power_of_two(size)
        rows = (x_TD, delta_TD, out_TD, codes_TD)
        assert all(row.stride(1) == 1 for row in rows), "the elements of a row must lie side by side"
        _add_rms_norm_coded_kernel[(num_rows,)](
            x_TD, delta_TD, weight_D, out_TD, as_bits(codes_TD), scales_T1,
            *(row.stride(0) for row in (*rows, scales_T1)), size, eps,
            OFFSET=offset, BLOCK=block, PLAIN=is_interpreted(), num_warps=num_warps_for(block), **pdl_flags(x_TD),
        )  # fmt: skip
    return out_TD


add_rms_norm_coded = operation(reference=add_rms_norm_coded_reference, triton=add_rms_norm_coded_triton)


@jit
def _add_rms_norm_coded_kernel(
    p_x, p_delta, p_weight, p_y, p_codes, p_scales,
    x_stride, delta_stride, y_stride, code_stride, scale_stride, size, eps,
    OFFSET: constexpr, BLOCK: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < size
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    release_then_wait(PDL)
    b_x = tl.load(p_x + i_row * x_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_delta = tl.load(p_delta + i_row * delta_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_stored = (b_x + b_delta).to(p_x.dtype.element_ty)
    tl.store(p_x + i_row * x_stride + o_d, b_stored, mask=m_d)
    b_x = b_stored.to(tl.float32)
    if OFFSET != 0.0:
        b_weight += OFFSET
    b_y = (b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / size + eps) * b_weight).to(p_y.dtype.element_ty)
    tl.store(p_y + i_row * y_stride + o_d, b_y, mask=m_d)
    b_y = b_y.to(tl.float32)  # quantize what was stored
    b_scale = scale_of(tl.max(size_bits(b_y), axis=0))
    tl.store(p_codes + i_row * code_stride + o_d, e4m3_quotients(b_y, b_scale, PLAIN), mask=m_d)
    tl.store(p_scales + i_row * scale_stride, b_scale)

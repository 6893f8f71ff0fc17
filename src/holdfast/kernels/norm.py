"""RMSNorm, alone, after a residual add, or with e4m3 codes too, and LayerNorm, over the last dimension.

T rows, D columns
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.fp8 import BLOCK_COLUMNS, as_bits, e4m3_quotients, e4m3_scale, size_bits, store_coded_groups
from holdfast.kernels.native_library import native_for
from holdfast.kernels.operation import DECLINED, operation, pdl_flags
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit,
    next_power_of_two,
    release_then_wait,
    tl,
)


def rms_norm_reference(
    x_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), row by row, rounded once to x's dtype.

    `out_TD` may be x itself. Rows may lie apart; the elements of a row may not.
    """
    if offset == 0.0 and weight_D.dtype == x_TD.dtype:
        y_TD = F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    else:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        y_TD = F.rms_norm(x_TD.to(wide), weight_D.shape, weight_D.to(wide) + offset, eps).to(x_TD.dtype)
    return y_TD if out_TD is None else out_TD.copy_(y_TD)


def rms_norm_native(
    x_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    library = native_for(x_TD[:0], weight_D, None if out_TD is None else out_TD[:0])
    if library is None:
        return DECLINED
    rows_TD = x_TD.contiguous()  # a single row is always contiguous; several rows must give the same bits
    y_TD = out_TD if out_TD is not None and out_TD.is_contiguous() else torch.empty_like(rows_TD)
    size = weight_D.shape[0]
    library.holdfast_rms_norm(
        rows_TD.data_ptr(), weight_D.data_ptr(), y_TD.data_ptr(), rows_TD.numel() // size, size, eps, offset
    )
    return y_TD if out_TD is None or y_TD is out_TD else out_TD.copy_(y_TD)


def rms_norm_triton(
    x_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if out_TD is None else out_TD
    return launch_rms_norm(x_TD, None, weight_D, eps, y_TD, offset)


rms_norm = operation(reference=rms_norm_reference, triton=rms_norm_triton, native=rms_norm_native)


def launch_rms_norm(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    out_TD: Tensor,
    offset: float,
    codes: tuple[Tensor, Tensor] | None = None,
    writes_out: bool = True,
) -> Tensor:
    """Launch one program per row: x += delta if given, its norm into `out_TD`, and into `codes` if given.

    `codes` are e4m3 with their scales: one per row, or one for every BLOCK_COLUMNS. Without `writes_out` only codes are.
    """
    size = weight_D.shape[0]
    for x in (x_TD, delta_TD, out_TD):
        assert x is None or x.stride(-1) == 1 or size == 1, (
            f"{x.stride()=}: the elements of a row must lie side by side"
        )
    x_RD, delta_RD, y_RD = (None if x is None else x.view(-1, size) for x in (x_TD, delta_TD, out_TD))
    codes_RD, scales_RB = (None, None) if codes is None else (as_bits(codes[0]), codes[1])
    if x_TD.numel():
        block = next_power_of_two(size)
        strides = (None if x is None else x.stride(0) for x in (x_RD, delta_RD, y_RD, codes_RD, scales_RB))
        has_groups = scales_RB is not None and scales_RB.shape[1] > 1
        _rms_norm_kernel[(x_TD.numel() // size,)](
            x_RD, delta_RD, weight_D, y_RD, codes_RD, scales_RB, *strides,
            scales_RB.stride(1) if scales_RB is not None and has_groups else None, size, eps,
            OFFSET=offset, BLOCK=block, GROUP=BLOCK_COLUMNS if has_groups else 0, WRITES_Y=writes_out, PLAIN=is_interpreted(),
            num_warps=max(1, min(16, block // 512)), **pdl_flags(x_TD),
        )  # fmt: skip
    return out_TD


@jit
def _rms_norm_kernel(
    p_x, p_delta, p_weight, p_y, p_codes, p_scales,
    x_stride, delta_stride, y_stride, code_stride, scale_stride, group_stride, size, eps,
    OFFSET: constexpr, BLOCK: constexpr, GROUP: constexpr, WRITES_Y: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < size
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    release_then_wait(PDL)
    b_x = tl.load(p_x + i_row * x_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
    if p_delta is not None:
        b_delta = tl.load(p_delta + i_row * delta_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_stored = (b_x + b_delta).to(p_x.dtype.element_ty)
        tl.store(p_x + i_row * x_stride + o_d, b_stored, mask=m_d)
        b_x = b_stored.to(tl.float32)  # normalize what the next layer will read
    if OFFSET != 0.0:
        b_weight += OFFSET
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / size + eps) * b_weight
    if p_codes is not None:
        b_y = b_y.to(p_y.dtype.element_ty)
    if WRITES_Y:
        tl.store(p_y + i_row * y_stride + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)
    if p_codes is not None:
        b_y = b_y.to(tl.float32)  # quantize what was stored
        IS_HALF: constexpr = p_y.dtype.element_ty.primitive_bitwidth == 16
        p_row_codes = p_codes + i_row * code_stride + o_d
        p_row_scales = p_scales + i_row * scale_stride
        if GROUP > 0:
            store_coded_groups(p_row_codes, p_row_scales, b_y, m_d, group_stride, size, GROUP, PLAIN, IS_HALF)
        else:
            b_scale = e4m3_scale(tl.max(size_bits(b_y), axis=0))
            tl.store(p_row_codes, e4m3_quotients(b_y, b_scale, PLAIN, IS_HALF), mask=m_d)
            tl.store(p_row_scales, b_scale)


@jit
def load_norm_weight(p_weight, o_d, m_d, OFFSET: constexpr):
    """Load weight + offset of a norm in float32."""
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        b_weight += OFFSET
    return b_weight


def add_rms_norm_reference(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor, offset: float = 0.0
) -> Tensor:
    """x += delta, rounded to x's dtype; then out = rms_norm(x). `out_TD` may be delta itself; rows may lie apart."""
    return rms_norm(x_TD.add_(delta_TD), weight_D, eps, out_TD, offset)


def add_rms_norm_triton(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor, offset: float = 0.0
) -> Tensor:
    return launch_rms_norm(x_TD, delta_TD, weight_D, eps, out_TD, offset)


add_rms_norm = operation(reference=add_rms_norm_reference, triton=add_rms_norm_triton)


def layer_norm_reference(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, out_TD: Tensor) -> Tensor:
    """(x - mean) / std * weight + bias, row by row, with float32 statistics; `out_TD` may be x itself."""
    return out_TD.copy_(F.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps))


def layer_norm_triton(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, out_TD: Tensor) -> Tensor:
    num_rows, size = x_TD.shape
    if num_rows:
        _layer_norm_kernel[(num_rows,)](x_TD, weight_D, bias_D, out_TD, size, eps, BLOCK=next_power_of_two(size))
    return out_TD


layer_norm = operation(reference=layer_norm_reference, triton=layer_norm_triton)


@jit
def _layer_norm_kernel(p_x, p_weight, p_bias, p_y, size, eps, BLOCK: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < size
    b_x = tl.load(p_x + i_row * size + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_centred = tl.where(m_d, b_x - tl.sum(b_x, axis=0) / size, 0.0)
    b_scale = tl.rsqrt(tl.sum(b_centred * b_centred, axis=0) / size + eps)
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = b_centred * b_scale * b_weight + b_bias
    tl.store(p_y + i_row * size + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)

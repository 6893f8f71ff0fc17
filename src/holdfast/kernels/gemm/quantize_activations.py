"""Quantization of activations to e4m3, with a scale per token or per block; also fused with RMSNorm or the gate of an MLP.

T rows, K columns, B blocks of columns, I columns of a gated row, X = 2 I
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.activation import gate_mul, gated_columns, launch_gate_mul
from holdfast.kernels.fp8 import (
    BLOCK_COLUMNS,
    as_bits,
    as_kernels_read,
    bfloat16_words,
    e4m3_of,
    e4m3_quotients,
    e4m3_scale,
    e4m3_words,
    float32_of,
    high_bfloat16,
    low_bfloat16,
    size_bits,
)
from holdfast.kernels.hyper_connections import HeadMix, MixNumbers, StreamMix, enter_block, launch_enter
from holdfast.kernels.norm import add_rms_norm, launch_rms_norm, rms_norm
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit,
    jit_counting,
    next_power_of_two,
    release_then_wait,
    tl,
)
from holdfast.quant.weight_quantize import E4M3_MAX, E4M3_NAN, LEAST_E4M3_SCALE

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


WHOLE_ROW = 32768
"""Most columns that fit into registers; longer rows are read twice."""
WARP_COLUMNS = 256
"""Columns of a row that a warp takes at once: 16 bytes of bfloat16 a thread."""
MOST_PARTS, MOST_WARPS = 5, 16
"""Such parts of a row that a warp holds, unless a row takes more than the most warps."""
SHORT_ROWS = 4
"""Rows of a program whose warps take one row each."""
COLUMNS_PER_PROGRAM = 2048
"""Columns per program: few enough to spread one row over a GPU."""


class TileScratch(NamedTuple):
    """Scratch buffers of kernels/gemm/row_scaled_tiles.py and kernels/gemm/block_scaled_tiles.py."""

    partials: Tensor
    """float32 split-K partial sums: splits x rows x outputs."""
    arrived: Tensor
    """int32 arrival counts for each block of outputs: zeros between launches."""
    amax: Tensor
    """int32: amax bits of a gated row-scaled product, for each row and block of outputs."""


class QuantizedRows(NamedTuple):
    """float8_e4m3fn codes and float32 scales of rows: x is about codes * scales."""

    codes_TK: Tensor
    scales_TB: Tensor
    """B is 1, or one for every 128 columns. Any strides."""
    scratch: TileScratch | None = None
    """Scratch of the product that takes the rows. If None, the product uses no split-K and fuses no gate."""


class RowAmaxBits(NamedTuple):
    """Bits of float32 magnitudes, `num_amax` per row; the row's amax is their maximum."""

    bits: Tensor
    """int32: NaN is above all numbers."""
    num_amax: int


def quantize_rows_reference(x_TK: Tensor, quantized: QuantizedRows) -> QuantizedRows:
    """Fill `quantized`: scale = max(|x|) / 448 of the row, or of every 128 columns; codes round to nearest even.

    A value that is not finite makes its scale, and all codes of that scale, NaN.
    """
    _check(x_TK, quantized)
    num_rows, num_columns = x_TK.shape
    num_blocks = quantized.scales_TB.shape[1]
    width = num_columns if num_blocks == 1 else BLOCK_COLUMNS
    x = F.pad(x_TK.float(), (0, num_blocks * width - num_columns)).view(num_rows, num_blocks, width)
    amax = x.abs().amax(-1)
    scales = (amax / E4M3_MAX).clamp_min_(LEAST_E4M3_SCALE).masked_fill_(~amax.isfinite(), float("nan"))
    quotients = (x / scales[..., None]).view(num_rows, num_blocks * width)[:, :num_columns]
    codes = quotients.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    codes.view(torch.uint8).masked_fill_(quotients.isnan(), E4M3_NAN)
    quantized.scales_TB.copy_(scales)
    quantized.codes_TK.copy_(codes)
    return quantized


def quantize_rows_triton(x_TK: Tensor, quantized: QuantizedRows) -> QuantizedRows:
    """Launch one program per row, for a few short rows, or for some blocks of a row."""
    _check(x_TK, quantized)
    num_rows, num_columns = x_TK.shape
    num_blocks = quantized.scales_TB.shape[1]
    assert x_TK.stride(1) == 1, f"{x_TK.stride()=}: columns lie apart"
    assert quantized.codes_TK.stride(1) == 1, f"{quantized.codes_TK.stride()=}: columns lie apart"
    if num_rows == 0:
        return quantized
    strides = x_TK.stride(0), quantized.codes_TK.stride(0), *quantized.scales_TB.stride()
    arguments = as_kernels_read(x_TK), as_bits(quantized.codes_TK), quantized.scales_TB, num_columns, *strides
    if num_blocks == 1:
        row_warps, num_parts = row_parts(num_columns)
        rows = SHORT_ROWS if row_warps == 1 else 1
        _quantize_rows_kernel[(-(-num_rows // rows),)](
            *arguments[:3], num_rows, *arguments[3:7],
            ROWS=rows, NUM_PARTS=num_parts, BLOCK=row_warps * WARP_COLUMNS, IS_ONE_SWEEP=num_columns <= WHOLE_ROW,
            IS_HALF=x_TK.element_size() == 2, PLAIN=is_interpreted(), num_warps=row_warps * rows, **pdl_flags(x_TK),
        )  # fmt: skip
    else:
        _quantize_blocks_kernel[(num_rows, -(-num_columns // COLUMNS_PER_PROGRAM))](
            *arguments,
            WIDTH=BLOCK_COLUMNS, BLOCKS=COLUMNS_PER_PROGRAM // BLOCK_COLUMNS, num_warps=4, **pdl_flags(x_TK),
        )  # fmt: skip
    return quantized


def row_parts(num_columns: int) -> tuple[int, int]:
    """Return the warps of a row, and the parts that each of them holds; longer rows than WHOLE_ROW take several turns."""
    warps = next((warps for warps in (1, 2, 4, 8) if num_columns <= warps * WARP_COLUMNS * MOST_PARTS), MOST_WARPS)
    return warps, -(-min(num_columns, WHOLE_ROW) // (warps * WARP_COLUMNS))


quantize_rows = operation(reference=quantize_rows_reference, triton=quantize_rows_triton)


def quantize_rows_by_amax(x_TK: Tensor, amax: RowAmaxBits, quantized: QuantizedRows) -> QuantizedRows:
    """Like `quantize_rows` with a scale per row, if the producer stored amax: many programs share a row."""
    num_rows, num_columns = x_TK.shape
    _check(x_TK, quantized)
    assert quantized.scales_TB.shape[1] == 1, f"{quantized.scales_TB.shape=}: amax are of whole rows"
    assert x_TK.stride(1) == quantized.codes_TK.stride(1) == 1, "columns lie apart"
    if num_rows == 0:
        return quantized
    _quantize_by_amax_kernel[(num_rows, -(-num_columns // COLUMNS_PER_PROGRAM))](
        as_kernels_read(x_TK), amax.bits, as_bits(quantized.codes_TK), quantized.scales_TB, num_columns, amax.num_amax,
        x_TK.stride(0), quantized.codes_TK.stride(0), quantized.scales_TB.stride(0),
        BLOCK=COLUMNS_PER_PROGRAM, BLOCK_P=next_power_of_two(amax.num_amax),
        IS_HALF=x_TK.element_size() == 2, PLAIN=is_interpreted(), num_warps=8, **pdl_flags(x_TK),
    )  # fmt: skip
    return quantized


def add_rms_norm_coded_reference(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    out_TD: Tensor,
    quantized: QuantizedRows,
    offset: float = 0.0,
) -> Tensor:
    """Call `add_rms_norm`, or `rms_norm` without a delta, then `quantize_rows` of `out_TD`."""
    if delta_TD is None:
        rms_norm(x_TD, weight_D, eps, out_TD, offset)
    else:
        add_rms_norm(x_TD, delta_TD, weight_D, eps, out_TD, offset)
    quantize_rows(out_TD, quantized)
    return out_TD


def add_rms_norm_coded_triton(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    out_TD: Tensor,
    quantized: QuantizedRows,
    offset: float = 0.0,
) -> Tensor:
    """Launch one program per row."""
    return launch_rms_norm(x_TD, delta_TD, weight_D, eps, out_TD, offset, _room(x_TD, quantized))


add_rms_norm_coded = operation(reference=add_rms_norm_coded_reference, triton=add_rms_norm_coded_triton)


def rms_norm_codes_reference(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    scratch_TD: Tensor,
    quantized: QuantizedRows,
    offset: float = 0.0,
) -> Tensor:
    """Like `add_rms_norm_coded` if nothing reads the norm itself: `scratch_TD` may stay unwritten."""
    return add_rms_norm_coded_reference(x_TD, delta_TD, weight_D, eps, scratch_TD, quantized, offset)


def rms_norm_codes_triton(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    scratch_TD: Tensor,
    quantized: QuantizedRows,
    offset: float = 0.0,
) -> Tensor:
    codes = _room(x_TD, quantized)
    return launch_rms_norm(x_TD, delta_TD, weight_D, eps, scratch_TD, offset, codes, writes_out=False)


rms_norm_codes = operation(reference=rms_norm_codes_reference, triton=rms_norm_codes_triton)


def gate_mul_coded_reference(
    gate_up_TX: Tensor, kind: str, out_TI: Tensor, limit: float | None, quantized: QuantizedRows
) -> Tensor:
    """Call `gate_mul`, then `quantize_rows` of `out_TI`. With a scale per row, `out_TI` may stay unwritten."""
    quantize_rows(gate_mul(gate_up_TX, kind, out_TI, limit), quantized)
    return out_TI


def gate_mul_coded_triton(
    gate_up_TX: Tensor, kind: str, out_TI: Tensor, limit: float | None, quantized: QuantizedRows
) -> Tensor:
    """Launch one program per row if it has one scale and fits into registers, else some for each row."""
    if takes_gated_row(gate_up_TX, quantized):
        assert quantized.codes_TK.shape == out_TI.shape, f"{out_TI.shape=} {quantized.codes_TK.shape=}"
        _launch_gated_rows(gate_up_TX, kind, limit, quantized)
    elif quantized.scales_TB.shape[1] == 1:
        quantize_rows_triton(gate_mul(gate_up_TX, kind, out_TI, limit), quantized)
    else:
        launch_gate_mul(gate_up_TX, kind, out_TI, limit, _room(out_TI, quantized))
    return out_TI


def takes_gated_row(gate_up_TX: Tensor, quantized: QuantizedRows) -> bool:
    """Return True if a program codes a whole gated row of bfloat16, two columns in each word."""
    num_rows, width = gate_up_TX.shape
    codes_TI, scales_TB = quantized.codes_TK, quantized.scales_TB
    places = gate_up_TX.data_ptr() // 2, *gate_up_TX.stride()[:1], codes_TI.data_ptr(), *codes_TI.stride()[:1]
    return (
        gate_up_TX.dtype == torch.bfloat16
        and width % 4 == 0
        and width // 2 <= WHOLE_ROW
        and scales_TB.shape == (num_rows, 1)
        and gate_up_TX.stride(1) == codes_TI.stride(1) == 1
        and all(place % 2 == 0 for place in places)
    )


def _launch_gated_rows(gate_up_TX: Tensor, kind: str, limit: float | None, quantized: QuantizedRows) -> None:
    num_rows, width = gate_up_TX.shape
    codes_TI, scales_T1 = quantized.codes_TK.view(torch.int16), quantized.scales_TB
    words_TI = gate_up_TX.view(torch.int32)
    num_warps, num_parts = row_parts(width // 2)
    if num_rows:
        _gate_rows_kernel[(num_rows,)](
            words_TI, codes_TI, scales_T1, words_TI.stride(0), codes_TI.stride(0), scales_T1.stride(0), width // 4,
            KIND=kind, LIMIT=limit or 0.0, NUM_PARTS=num_parts, BLOCK=num_warps * WARP_COLUMNS // 2,
            PLAIN=is_interpreted(), num_warps=num_warps, **gated_row_registers(), **pdl_flags(gate_up_TX),
        )  # fmt: skip


def gated_row_registers() -> dict[str, int]:
    """Return the bound that lets a multiprocessor run 32 warps: one row is read while another is coded."""
    return {} if is_interpreted() else {"maxnreg": 64}


gate_mul_coded = operation(reference=gate_mul_coded_reference, triton=gate_mul_coded_triton)


def enter_block_coded_reference(
    x_TSH: Tensor,
    parts: Tensor,
    mix: StreamMix | HeadMix,
    numbers: MixNumbers,
    shares_TM: Tensor,
    norm_weight_H: Tensor,
    rms_eps: float,
    out_TH: Tensor,
    quantized: QuantizedRows,
) -> Tensor:
    """Call `enter_block`, then `quantize_rows` of `out_TH`."""
    quantize_rows(enter_block(x_TSH, parts, mix, numbers, shares_TM, norm_weight_H, rms_eps, out_TH), quantized)
    return out_TH


def enter_block_coded_triton(
    x_TSH: Tensor,
    parts: Tensor,
    mix: StreamMix | HeadMix,
    numbers: MixNumbers,
    shares_TM: Tensor,
    norm_weight_H: Tensor,
    rms_eps: float,
    out_TH: Tensor,
    quantized: QuantizedRows,
) -> Tensor:
    codes = _room(out_TH, quantized)
    return launch_enter(x_TSH, parts, mix, numbers, shares_TM, norm_weight_H, rms_eps, out_TH, codes)


enter_block_coded = operation(reference=enter_block_coded_reference, triton=enter_block_coded_triton)


def _room(out_TK: Tensor, quantized: QuantizedRows) -> tuple[Tensor, Tensor]:
    """Return the buffers for codes of `out_TK`."""
    _check(out_TK, quantized)
    assert quantized.codes_TK.stride(1) == 1, "the elements of a row must lie side by side"
    return quantized[:2]


def _check(x_TK: Tensor, quantized: QuantizedRows) -> None:
    num_rows, num_columns = x_TK.shape
    assert quantized.codes_TK.shape == x_TK.shape, f"{x_TK.shape=} {quantized.codes_TK.shape=}"
    shapes = (num_rows, 1), (num_rows, -(-num_columns // BLOCK_COLUMNS))
    assert quantized.scales_TB.shape in shapes, f"{x_TK.shape=} {quantized.scales_TB.shape=}"


@jit_counting("num_rows")
def _quantize_rows_kernel(
    p_x, p_codes, p_scales, num_rows, num_columns, x_stride, code_stride, scale_stride,
    ROWS: constexpr, NUM_PARTS: constexpr, BLOCK: constexpr, IS_ONE_SWEEP: constexpr, IS_HALF: constexpr,
    PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    o_x = tl.arange(0, BLOCK)[None, :]
    m_row = i_row < num_rows
    release_then_wait(PDL)
    p_row = p_x + i_row * x_stride
    p_row_codes = p_codes + i_row * code_stride
    b_sizes = tl.zeros((ROWS, BLOCK), tl.int32)
    if IS_ONE_SWEEP:
        parts = ()
        for i in tl.static_range(NUM_PARTS):
            b_x = tl.load(p_row + i * BLOCK + o_x, mask=m_row & (i * BLOCK + o_x < num_columns), other=0)
            b_sizes = tl.maximum(b_sizes, size_bits(float32_of(b_x)))
            parts = parts + (b_x,)
        b_scale = e4m3_scale(tl.max(b_sizes, axis=1))[:, None]
        for i in tl.static_range(NUM_PARTS):
            b_codes = e4m3_quotients(float32_of(parts[i]), b_scale, PLAIN, IS_HALF)
            tl.store(p_row_codes + i * BLOCK + o_x, b_codes, mask=m_row & (i * BLOCK + o_x < num_columns))
    else:
        for start in range(0, num_columns, BLOCK):
            b_x = tl.load(p_row + start + o_x, mask=m_row & (start + o_x < num_columns), other=0)
            b_sizes = tl.maximum(b_sizes, size_bits(float32_of(b_x)))
        b_scale = e4m3_scale(tl.max(b_sizes, axis=1))[:, None]
        for start in range(0, num_columns, BLOCK):
            m_x = m_row & (start + o_x < num_columns)
            b_codes = e4m3_quotients(
                float32_of(tl.load(p_row + start + o_x, mask=m_x, other=0)), b_scale, PLAIN, IS_HALF
            )
            tl.store(p_row_codes + start + o_x, b_codes, mask=m_x)
    tl.store(p_scales + i_row * scale_stride, b_scale, mask=m_row)


@jit
def _gate_rows_kernel(
    p_gate_up, p_codes, p_scales, x_stride, code_stride, scale_stride, size,
    KIND: constexpr, LIMIT: constexpr, NUM_PARTS: constexpr, BLOCK: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    """Code a gated row. Words hold two columns: registers hold the whole row, rounded."""
    i_row = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, BLOCK)
    release_then_wait(PDL)
    p_gate = p_gate_up + i_row * x_stride
    p_row_codes = p_codes + i_row * code_stride
    b_sizes = tl.zeros((BLOCK,), tl.int32)
    parts = ()
    for i in tl.static_range(NUM_PARTS):
        m_x = i * BLOCK + o_x < size
        b_gate = tl.load(p_gate + i * BLOCK + o_x, mask=m_x, other=0)
        b_up = tl.load(p_gate + size + i * BLOCK + o_x, mask=m_x, other=0)
        b_low = gated_columns(low_bfloat16(b_gate), low_bfloat16(b_up), KIND, LIMIT, PLAIN)
        b_high = gated_columns(high_bfloat16(b_gate), high_bfloat16(b_up), KIND, LIMIT, PLAIN)
        b_y = bfloat16_words(b_low, b_high, PLAIN)
        b_sizes = tl.maximum(b_sizes, tl.maximum(size_bits(low_bfloat16(b_y)), size_bits(high_bfloat16(b_y))))
        parts = parts + (b_y,)
    b_scale = e4m3_scale(tl.max(b_sizes, axis=0))
    for i in tl.static_range(NUM_PARTS):
        b_codes = e4m3_words(low_bfloat16(parts[i]), high_bfloat16(parts[i]), b_scale, PLAIN)
        tl.store(p_row_codes + i * BLOCK + o_x, b_codes, mask=i * BLOCK + o_x < size)
    tl.store(p_scales + i_row * scale_stride, b_scale)


@jit
def _quantize_by_amax_kernel(
    p_x, p_amax, p_codes, p_scales, num_columns, num_amax, x_stride, code_stride, scale_stride,
    BLOCK: constexpr, BLOCK_P: constexpr, IS_HALF: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_p = tl.arange(0, BLOCK_P)
    m_x = o_x < num_columns
    release_then_wait(PDL)
    b_amax = tl.load(p_amax + i_row * num_amax + o_p, mask=o_p < num_amax, other=0)
    b_x = float32_of(tl.load(p_x + i_row * x_stride + o_x, mask=m_x, other=0))
    b_scale = e4m3_scale(tl.max(b_amax, axis=0))
    b_codes = e4m3_quotients(b_x, b_scale, PLAIN, IS_HALF)
    tl.store(p_codes + i_row * code_stride + o_x, b_codes, mask=m_x)
    if tl.program_id(1) == 0:
        tl.store(p_scales + i_row * scale_stride, b_scale)


@jit
def _quantize_blocks_kernel(
    p_x, p_codes, p_scales, num_columns, x_stride, code_stride, scale_stride, block_stride,
    WIDTH: constexpr, BLOCKS: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    release_then_wait(PDL)
    i_block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    i_column = i_block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    m_x = i_column < num_columns
    b_x = float32_of(tl.load(p_x + i_row * x_stride + i_column, mask=m_x, other=0))
    b_scale = e4m3_scale(tl.max(size_bits(b_x), axis=1))
    b_codes = e4m3_of(tl.div_rn(b_x, tl.broadcast_to(b_scale[:, None], b_x.shape)))
    tl.store(p_codes + i_row * code_stride + i_column, b_codes.to(tl.uint8), mask=m_x)
    p_scale = p_scales + i_row * scale_stride + i_block.to(tl.int64) * block_stride
    tl.store(p_scale, b_scale, mask=i_block * WIDTH < num_columns)

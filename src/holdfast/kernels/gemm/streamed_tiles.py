"""Weights read once by up to 64 rows: block-scaled e4m3 by codes, and plain ones in groups or with float32 results.

M rows, N outputs, K inputs, W warps, B blocks of 128 columns, G groups

Each warp multiplies its own block of 128 columns, and a program adds up its warps at the end. So a step of a program is
short although sums along K depend on each other, few outputs still fill a GPU, and no partial sums go through memory. The
shape alone decides how K is cut, so results are batch invariant.
"""

from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.fp8 import kernel_codes, loaded_numbers
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit_counting, next_power_of_two, tl
from holdfast.quant.quantized_weight import QuantizedWeight

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


MOST_ROWS = 64
BLOCK_K = 128


class TileForm(NamedTuple):
    """Outputs of a program, its warps, and its pipeline stages."""

    block_n: int
    num_warps: int
    num_stages: int


def row_form(num_rows: int) -> int:
    """Return the rows of a tile, or 0 for too many rows: the specialization for the number of rows."""
    return max(16, next_power_of_two(num_rows)) if num_rows <= MOST_ROWS else 0


def block_scaled_linear(
    rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor, form: TileForm
) -> Tensor:
    """Compute rows @ weight.T + bias into `out_MN`, in its type."""
    operands = kernel_codes(rows.codes_TK), rows.scales_TB, kernel_codes(weight.codes), weight.scales
    columns = weight.scales.shape[1]
    _launch(operands, bias_N, out_MN, form, block_rows=weight.scheme.block_rows, scale_columns=columns)
    return out_MN


def plain_tiles(x_MX: Tensor, weight_NK: Tensor, out_MN: Tensor, form: TileForm, num_groups: int = 1) -> Tensor:
    """Compute x @ weight.T into `out_MN`; with groups, each takes its own columns of x and its own rows of the weight."""
    _launch((x_MX, x_MX, weight_NK, weight_NK), None, out_MN, form, num_groups=num_groups)
    return out_MN


def _launch(
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    bias_N: Tensor | None,
    out_MN: Tensor,
    form: TileForm,
    block_rows: int = 0,
    scale_columns: int = 1,
    num_groups: int = 1,
) -> None:
    x_MX, _, weight_NK, _ = operands
    (size_n, size_k), num_rows = weight_NK.shape, len(out_MN)
    block_n, num_warps, num_stages = form
    block_m = row_form(num_rows)
    streamed_tile_kernel[(-(-size_n // block_n),)](
        *operands, bias_N if bias_N is not None else out_MN, out_MN, num_rows, size_n, size_k, scale_columns,
        x_MX.stride(0),
        BLOCK_ROWS=block_rows, GROUP_ROWS=size_n // num_groups if num_groups > 1 else 0, HAS_BIAS=bias_N is not None,
        EVEN_N=size_n % block_n == 0, EVEN_K=size_k % (num_warps * BLOCK_K) == 0, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=BLOCK_K, BLOCK_W=num_warps, NUM_STAGES=num_stages, PLAIN=is_interpreted(), num_warps=num_warps,
        **pdl_flags(out_MN),
    )  # fmt: skip


@jit_counting("num_rows")
def streamed_tile_kernel(
    p_x, p_x_scales, p_weight, p_scales, p_bias, p_out, num_rows, size_n, size_k, scale_columns, x_stride,
    BLOCK_ROWS: constexpr, GROUP_ROWS: constexpr, HAS_BIAS: constexpr, EVEN_N: constexpr, EVEN_K: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, BLOCK_W: constexpr, NUM_STAGES: constexpr,
    PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    o_n = first + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_w = tl.arange(0, BLOCK_W)
    m_n = o_n < size_n
    m_m = o_m < num_rows
    o_k = o_w[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    p_w = p_weight + o_n[None, :, None].to(tl.int64) * size_k + o_k[:, None, :]
    if GROUP_ROWS > 0:
        p_x += first // GROUP_ROWS * size_k
    p_rows = p_x + o_m[None, None, :].to(tl.int64) * x_stride + o_k[:, :, None]
    b_y = tl.zeros((BLOCK_W, BLOCK_N, BLOCK_M), dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for k in tl.range(0, size_k, BLOCK_K * BLOCK_W, num_stages=NUM_STAGES):
        m_w = m_n[None, :, None]
        m_x = m_m[None, None, :]
        if not EVEN_K:
            m_w = m_w & (k + o_k < size_k)[:, None, :]
            m_x = m_x & (k + o_k < size_k)[:, :, None]
        if EVEN_K and EVEN_N:
            b_w = tl.load(p_w + k)
        else:
            b_w = tl.load(p_w + k, mask=m_w, other=0.0)
        b_x = tl.load(p_rows + k, mask=m_x, other=0.0)
        if BLOCK_ROWS > 0:
            i_k = k // BLOCK_K + o_w
            m_k = i_k < scale_columns
            b_scales = tl.load(p_scales + first // BLOCK_ROWS * scale_columns + i_k, mask=m_k, other=0.0)
            p_xs = p_x_scales + o_m[None, :] * scale_columns + i_k[:, None]
            b_scales = tl.load(p_xs, mask=m_k[:, None] & m_m[None, :], other=0.0) * b_scales[:, None]
            b_y += tl.dot(loaded_numbers(b_w, PLAIN), loaded_numbers(b_x, PLAIN)) * b_scales[:, None, :]
        else:
            b_y = tl.dot(b_w, b_x, b_y)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    b_sum = tl.sum(b_y, axis=0)
    if HAS_BIAS:
        b_sum += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    p_y = p_out + o_m[None, :].to(tl.int64) * size_n + o_n[:, None]
    tl.store(p_y, b_sum.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])

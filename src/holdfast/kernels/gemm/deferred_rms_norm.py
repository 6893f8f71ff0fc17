"""Deferred RMSNorm: its first half, amax of rows, and the scratch buffers that products share.

M rows, K columns, J blocks of K

The norm of x is x * norm_weight / rms; some models add an offset to the weight. The producer of x stores x * norm_weight
and the squares of x, summed by block. The next product multiplies its result by 1 / rms. If that product quantizes its
rows, the producer also stores their amax, which gives the e4m3 scales.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.norm import load_norm_weight
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, release_then_wait, tl


class AmaxScratch(NamedTuple):
    """Amax of rows that a product quantizes (small_batch.py)."""

    normed: Tensor
    """float32 amax of x * norm_weight, one per sum of squares."""
    inputs: Tensor
    """float32 amax per row of inputs of a residual product that come from elsewhere."""
    gated: Tensor
    """int32 (bits of float32) amax of a gated product's result, several per row. Its blocks raise them from zero."""


@dataclass(frozen=True, slots=True)
class SmallBatchScratch:
    """Scratch buffers of products: sums of squares, split-K partial sums, and arrival counts (zeros between launches)."""

    squares: Tensor
    partials: Tensor
    arrived: Tensor
    amax: AmaxScratch | None = None
    """None if no weight is quantized."""


class ResidualStream(NamedTuple):
    """The residual stream of a small batch, and the buffers of its next RMSNorm, which is deferred."""

    x_MN: Tensor
    norm_weight_N: Tensor
    eps: float
    scaled_MN: Tensor
    """x * norm_weight."""
    scratch: SmallBatchScratch
    offset: float = 0.0
    """Added to the norm's weight."""


@dataclass(frozen=True, slots=True)
class NormedRows:
    """Input of a product with a deferred RMSNorm: x * norm_weight, with squares and amax in the scratch buffers."""

    scaled_MK: Tensor
    num_squares: int
    eps: float


def defer_rms_norm(stream: ResidualStream, delta_MK: Tensor | None = None) -> NormedRows:
    """x += delta if given; then defer the norm of x."""
    x_MK, norm_weight_K, eps, scaled_MK, scratch, offset = stream
    num_rows, size_k = x_MK.shape
    _defer_kernel[(num_rows,)](
        x_MK, norm_weight_K, x_MK if delta_MK is None else delta_MK, scaled_MK, scratch.squares,
        scratch.squares if scratch.amax is None else scratch.amax.normed, size_k,
        HAS_DELTA=delta_MK is not None, HAS_AMAX=scratch.amax is not None, OFFSET=offset,
        BLOCK=next_power_of_two(size_k), num_warps=8,
    )  # fmt: skip
    return NormedRows(scaled_MK, 1, eps)


def defer_rms_norm_reference(stream: ResidualStream, delta_MK: Tensor | None = None) -> NormedRows:
    """Like `defer_rms_norm`, in plain torch."""
    x_MK, norm_weight_K, eps, scaled_MK, scratch, offset = stream
    if delta_MK is not None:
        x_MK.add_(delta_MK)
    scaled_MK.copy_((x_MK.float() * (norm_weight_K.float() + offset)).to(x_MK.dtype))
    scratch.squares[: x_MK.shape[0]] = x_MK.float().square().sum(-1)
    if scratch.amax is not None:
        scratch.amax.normed[: x_MK.shape[0]] = scaled_MK.float().abs().amax(-1)
    return NormedRows(scaled_MK, 1, eps)


@jit
def _defer_kernel(
    p_x, p_norm_weight, p_delta, p_scaled, p_squares, p_amax, size,
    HAS_DELTA: constexpr, HAS_AMAX: constexpr, OFFSET: constexpr, BLOCK: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    m_k = o_k < size
    b_x = tl.load(p_x + i_row * size + o_k, mask=m_k, other=0.0).to(tl.float32)
    if HAS_DELTA:
        b_x += tl.load(p_delta + i_row * size + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_rounded = b_x.to(p_x.dtype.element_ty)
        tl.store(p_x + i_row * size + o_k, b_rounded, mask=m_k)
        b_x = b_rounded.to(tl.float32)
    b_weight = load_norm_weight(p_norm_weight, o_k, m_k, OFFSET)
    b_scaled = (b_x * b_weight).to(p_scaled.dtype.element_ty)
    tl.store(p_scaled + i_row * size + o_k, b_scaled, mask=m_k)
    tl.store(p_squares + i_row, tl.sum(b_x * b_x, axis=0))
    if HAS_AMAX:
        tl.store(p_amax + i_row, tl.max(tl.abs(b_scaled.to(tl.float32)), axis=0))


class RowAmax(NamedTuple):
    """float32 magnitudes, `num_amax` per row; the row's amax is their maximum."""

    values: Tensor
    num_amax: int


def row_amax(x_MK: Tensor, values: Tensor, cleared: Tensor) -> RowAmax:
    """Store one amax per row into `values`, and zero `cleared`, the amax of a later product."""
    num_rows, size_k = x_MK.shape
    share = -(-cleared.numel() // num_rows)
    _amax_kernel[(num_rows,)](
        x_MK, values, cleared, size_k, share, cleared.numel(),
        BLOCK=next_power_of_two(max(size_k, share)), num_warps=8, **pdl_flags(x_MK),
    )  # fmt: skip
    return RowAmax(values, 1)


@jit
def _amax_kernel(p_x, p_amax, p_cleared, size, share, num_cleared, BLOCK: constexpr, PDL: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    release_then_wait(PDL)
    b_x = tl.load(p_x + i_row * size + o_k, mask=o_k < size, other=0.0).to(tl.float32)
    tl.store(p_amax + i_row, tl.max(tl.abs(b_x), axis=0))
    o_c = i_row * share + o_k
    tl.store(p_cleared + o_c, tl.zeros((BLOCK,), tl.int32), mask=(o_k < share) & (o_c < num_cleared))

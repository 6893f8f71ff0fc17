"""An rms norm of few rows, left half done for the product that follows it.

M rows, K inputs
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, tl


class PeakScratch(NamedTuple):
    """Largest magnitudes, from which the scale of a row follows where products code their rows (skinny_coded.py)."""

    normed: torch.Tensor
    """float32, as many as there are squares: of x * norm_weight, by block."""
    inputs: torch.Tensor
    """float32, one a row: of what goes into a residual product and comes from elsewhere."""
    gated: torch.Tensor
    """int32, the bits of float32, some a row: of what a gated product leaves, raised by its blocks; zeros before it."""


@dataclass(frozen=True, slots=True)
class SkinnyScratch:
    """What products share: sums of squares, parts along K, and how many of them have arrived (zeros between launches)."""

    squares: torch.Tensor
    parts: torch.Tensor
    arrived: torch.Tensor
    peaks: PeakScratch | None = None
    """None where no product codes its rows."""


@dataclass(frozen=True, slots=True)
class NormedRows:
    """The input of a product whose rms norm is not finished: x * norm_weight, and squares of x by block; peaks too, if wanted."""

    scaled_MK: torch.Tensor
    num_squares: int
    eps: float


def begin_rows(
    x_MK: torch.Tensor,
    norm_weight_K: torch.Tensor,
    eps: float,
    scaled_MK: torch.Tensor,
    scratch: SkinnyScratch,
    delta_MK: torch.Tensor | None = None,
) -> NormedRows:
    """x += delta where there is one, and the norm of x left half done as every producer leaves it."""
    num_rows, size_k = x_MK.shape
    _begin_kernel[(num_rows,)](
        x_MK,
        norm_weight_K,
        x_MK if delta_MK is None else delta_MK,
        scaled_MK,
        scratch.squares,
        scratch.squares if scratch.peaks is None else scratch.peaks.normed,
        size_k,
        HAS_DELTA=delta_MK is not None,
        HAS_PEAKS=scratch.peaks is not None,
        BLOCK=next_power_of_two(size_k),
        num_warps=8,
    )
    return NormedRows(scaled_MK, 1, eps)


def begin_rows_reference(
    x_MK: torch.Tensor,
    norm_weight_K: torch.Tensor,
    eps: float,
    scaled_MK: torch.Tensor,
    scratch: SkinnyScratch,
    delta_MK: torch.Tensor | None = None,
) -> NormedRows:
    """The same in plain torch."""
    if delta_MK is not None:
        x_MK.add_(delta_MK)
    scaled_MK.copy_((x_MK.float() * norm_weight_K.float()).to(x_MK.dtype))
    scratch.squares[: x_MK.shape[0]] = x_MK.float().square().sum(-1)
    if scratch.peaks is not None:
        scratch.peaks.normed[: x_MK.shape[0]] = scaled_MK.float().abs().amax(-1)
    return NormedRows(scaled_MK, 1, eps)


@jit
def _begin_kernel(
    p_x,
    p_norm_weight,
    p_delta,
    p_scaled,
    p_squares,
    p_peaks,
    size,
    HAS_DELTA: constexpr,
    HAS_PEAKS: constexpr,
    BLOCK: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    m_k = o_k < size
    b_x = tl.load(p_x + i_row * size + o_k, mask=m_k, other=0.0).to(tl.float32)
    if HAS_DELTA:
        b_x += tl.load(p_delta + i_row * size + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_rounded = b_x.to(p_x.dtype.element_ty)
        tl.store(p_x + i_row * size + o_k, b_rounded, mask=m_k)
        b_x = b_rounded.to(tl.float32)
    b_weight = tl.load(p_norm_weight + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_scaled = (b_x * b_weight).to(p_scaled.dtype.element_ty)
    tl.store(p_scaled + i_row * size + o_k, b_scaled, mask=m_k)
    tl.store(p_squares + i_row, tl.sum(b_x * b_x, axis=0))
    if HAS_PEAKS:
        tl.store(p_peaks + i_row, tl.max(tl.abs(b_scaled.to(tl.float32)), axis=0))

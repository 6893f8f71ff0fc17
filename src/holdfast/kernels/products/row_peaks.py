"""The largest magnitude of every row: what a row's e4m3 scale follows from, left for the product that codes the row.

M rows, K columns
"""

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

from typing import NamedTuple

import torch

from holdfast.kernels.triton_compat import can_launch_early, constexpr, jit, launched_early, next_power_of_two, tl


class RowPeaks(NamedTuple):
    """Magnitudes of which the largest is a row's: `num_peaks` of them a row, one row behind the other."""

    values: torch.Tensor
    """float32."""
    num_peaks: int


def row_peaks(x_MK: torch.Tensor, values: torch.Tensor, cleared: torch.Tensor) -> RowPeaks:
    """One peak a row, into `values`; on the way the peaks of a later product are set to zero (`cleared`, a share by each row)."""
    num_rows, size_k = x_MK.shape
    share = -(-cleared.numel() // num_rows)
    early = can_launch_early(x_MK)
    _peak_kernel[(num_rows,)](
        x_MK,
        values,
        cleared,
        size_k,
        share,
        cleared.numel(),
        BLOCK=next_power_of_two(max(size_k, share)),
        EARLY=early,
        num_warps=8,
        **launched_early(early),
    )
    return RowPeaks(values, 1)


def row_peaks_reference(x_MK: torch.Tensor, values: torch.Tensor, cleared: torch.Tensor) -> RowPeaks:
    """The same in plain torch."""
    cleared.zero_()
    values[: x_MK.shape[0]] = x_MK.float().abs().amax(-1)
    return RowPeaks(values, 1)


@jit
def _peak_kernel(p_x, p_peaks, p_cleared, size, share, num_cleared, BLOCK: constexpr, EARLY: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b_x = tl.load(p_x + i_row * size + o_k, mask=o_k < size, other=0.0).to(tl.float32)
    tl.store(p_peaks + i_row, tl.max(tl.abs(b_x), axis=0))
    o_c = i_row * share + o_k
    tl.store(p_cleared + o_c, tl.zeros((BLOCK,), tl.int32), mask=(o_k < share) & (o_c < num_cleared))

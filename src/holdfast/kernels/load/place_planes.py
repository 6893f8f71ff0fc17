"""Placement of packed rows: bytes of one plane into their final place, checked for scales that are not finite.

R rows, B bytes of a row
"""

import torch
from torch import Tensor

from holdfast.kernels.load.place_kernels import UNSEEN
from holdfast.quant.packed_schemes import LARGEST_SCALE, SCALE_PLANES, PackedPlane
from holdfast.quant.weight_quantize import E4M3_NAN

HALF_INFINITY = 0x7C00
"""Exponent bits of float16: infinity and NaN have all of them."""


def place_plane(bytes_RB: Tensor, target_RE: Tensor, plane: PackedPlane, first_row: int, finding: Tensor) -> None:
    """Copy the bytes of some rows to `target_RE`.

    `finding` [1] is lowered to the first row with a scale that is not finite; `first_row` is the number of row 0.
    """
    target_RE.view(torch.uint8).view(bytes_RB.shape).copy_(bytes_RB)
    is_wrong_R = wrong_scales(target_RE, plane)
    if is_wrong_R is None:
        return
    rows_R = torch.arange(first_row, first_row + len(is_wrong_R), dtype=finding.dtype, device=finding.device)
    rows_R.masked_fill_(~is_wrong_R, UNSEEN)
    torch.minimum(finding, rows_R.min(), out=finding)  # without waiting for the device


def wrong_scales(rows_RE: Tensor, plane: PackedPlane) -> Tensor | None:
    """Return True for each row with a scale that is not finite, or too large for finite values; None without scales."""
    if plane.most_byte < 255:
        return (rows_RE > plane.most_byte).any(dim=1)
    if plane.has_scale_first:
        first_RJB = rows_RE.unflatten(1, (-1, plane.elements))[..., :2]
        return _is_wrong(first_RJB.flatten(1).view(torch.float16))
    if plane.name in SCALE_PLANES and "float" in plane.dtype:
        return _is_wrong(rows_RE)
    return None


def _is_wrong(scales_RE: Tensor) -> Tensor:
    if scales_RE.dtype == torch.float8_e4m3fn:
        return ((scales_RE.view(torch.uint8) & 0x7F) == E4M3_NAN).any(dim=1)
    if scales_RE.dtype == torch.float16 and scales_RE.is_cpu:  # a CPU compares integers ten times as fast
        return ((scales_RE.view(torch.int16) & HALF_INFINITY) == HALF_INFINITY).any(dim=1)
    if scales_RE.dtype == torch.float16:
        return ~scales_RE.isfinite().all(dim=1)
    return ~(scales_RE.abs() <= LARGEST_SCALE).all(dim=1)

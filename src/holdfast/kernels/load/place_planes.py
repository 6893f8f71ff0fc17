"""Placement of packed rows: bytes of one plane into their final place, checked for scales that are not finite.

R rows, B bytes of a row
"""

import torch
from torch import Tensor

from holdfast.kernels.load.place_kernels import UNSEEN
from holdfast.quant.packed_schemes import SCALE_PLANES, PackedPlane
from holdfast.quant.weight_quantize import E4M3_NAN


def place_plane(
    bytes_RB: Tensor, target_RE: Tensor, plane: PackedPlane, first_row: int, findings: Tensor, verify: bool
) -> None:
    """Copy the bytes of some rows to `target_RE`, or compare them if `verify`.

    `findings` [2] gets the least row that is not finite, and the least that differs; `first_row` is the number of row 0.
    """
    out_RB = target_RE.view(torch.uint8).view(bytes_RB.shape)
    if verify:
        _note((out_RB != bytes_RB).any(dim=1), first_row, findings[1])
        return
    out_RB.copy_(bytes_RB)
    if plane.nan_byte >= 0:
        _note((bytes_RB == plane.nan_byte).any(dim=1), first_row, findings[0])
    elif plane.name in SCALE_PLANES and "float" in plane.dtype:
        _note(_is_wrong(target_RE), first_row, findings[0])


def _is_wrong(scales_RE: Tensor) -> Tensor:
    """Return True for each row with a scale that is not finite [R]."""
    if scales_RE.dtype == torch.float8_e4m3fn:
        return ((scales_RE.view(torch.uint8) & 0x7F) == E4M3_NAN).any(dim=1)
    return ~scales_RE.isfinite().all(dim=1)


def _note(is_wrong_R: Tensor, first_row: int, finding: Tensor) -> None:
    """Lower `finding` to the first wrong row, without waiting for the device."""
    rows_R = torch.arange(first_row, first_row + len(is_wrong_R), dtype=finding.dtype, device=finding.device)
    rows_R.masked_fill_(~is_wrong_R, UNSEEN)
    torch.minimum(finding, rows_R.min(), out=finding)

"""Placement of packed rows: bytes of one plane into their final place, checked for scales that are not finite.

R rows, B bytes of a row
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.load.place_kernels import UNSEEN
from holdfast.kernels.native_library import native_library
from holdfast.quant.packed_schemes import LARGEST_SCALE, SCALE_PLANES, PackedPlane, PackedScheme
from holdfast.quant.packed_tiles import TILE_ROWS, stored_scheme, tile_fields
from holdfast.quant.tile_values import arrange_reference
from holdfast.quant.weight_quantize import E4M3_NAN

HALF_INFINITY = 0x7C00
"""Exponent bits of float16: infinity and NaN have all of them."""


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
    _check_scales(bytes_RB, target_RE, plane, first_row, findings)


def arrange_tiles(scheme: PackedScheme, planes: Sequence[Tensor], tiles_GX: Tensor) -> Tensor:
    """Like `arrange_reference`, in C if there is a compiler."""
    library = native_library()
    block_bytes = scheme.planes[0].elements
    num_rows, num_blocks = TILE_ROWS * len(tiles_GX), tiles_GX.shape[1] // block_bytes
    if library is None:
        return arrange_reference(scheme, planes, tiles_GX)
    assert tiles_GX.is_contiguous(), f"{tiles_GX.stride()=}"
    for rows, field in zip(planes, tile_fields(scheme.title), strict=True):
        assert rows.is_contiguous(), f"{scheme.title}: {rows.stride()=}"
        assert rows.nbytes == num_rows * num_blocks * field.num_bytes, f"{rows.shape=} {tiles_GX.shape=} {field}"
        unit = -field.unit_bytes if field.spreads_bits else field.unit_bytes
        place = tiles_GX.data_ptr() + field.offset
        library.holdfast_interleave(rows.data_ptr(), place, num_rows, num_blocks, field.num_bytes, unit, block_bytes)
    return tiles_GX


def place_tiles(
    planes_RB: Sequence[Tensor],
    tiles_GX: Tensor,
    scheme: PackedScheme,
    first_row: int,
    findings: Tensor,
    verify: bool,
) -> None:
    """Like `place_plane`, for all planes of rows that become tiles."""
    if verify:
        expected = arrange_tiles(scheme, planes_RB, torch.empty_like(tiles_GX))
        is_other_G = (tiles_GX != expected).any(dim=1)
        _note(is_other_G.repeat_interleave(scheme.row_group), first_row, findings[1])
        return
    arrange_tiles(scheme, planes_RB, tiles_GX)
    for plane, bytes_RB in zip(stored_scheme(scheme).planes, planes_RB, strict=True):
        _check_scales(bytes_RB, bytes_RB.view(getattr(torch, plane.dtype)), plane, first_row, findings)


def _check_scales(bytes_RB: Tensor, rows_RE: Tensor, plane: PackedPlane, first_row: int, findings: Tensor) -> None:
    if plane.most_byte < 255:
        _note((bytes_RB > plane.most_byte).any(dim=1), first_row, findings[0])
    elif plane.has_scale_first:
        first_RJB = bytes_RB.unflatten(1, (-1, plane.elements))[..., :2]
        _note(_is_wrong(first_RJB.flatten(1).view(torch.float16)), first_row, findings[0])
    elif plane.name in SCALE_PLANES and "float" in plane.dtype:
        _note(_is_wrong(rows_RE), first_row, findings[0])


def _is_wrong(scales_RE: Tensor) -> Tensor:
    """Return True for each row with a scale that is not finite, or too large for finite values [R]."""
    if scales_RE.dtype == torch.float8_e4m3fn:
        return ((scales_RE.view(torch.uint8) & 0x7F) == E4M3_NAN).any(dim=1)
    if scales_RE.dtype == torch.float16 and scales_RE.is_cpu:  # a CPU compares integers ten times as fast
        return ((scales_RE.view(torch.int16) & HALF_INFINITY) == HALF_INFINITY).any(dim=1)
    if scales_RE.dtype == torch.float16:
        return ~scales_RE.isfinite().all(dim=1)
    return ~(scales_RE.abs() <= LARGEST_SCALE).all(dim=1)


def _note(is_wrong_R: Tensor, first_row: int, finding: Tensor) -> None:
    """Lower `finding` to the first wrong row, without waiting for the device."""
    rows_R = torch.arange(first_row, first_row + len(is_wrong_R), dtype=finding.dtype, device=finding.device)
    rows_R.masked_fill_(~is_wrong_R, UNSEEN)
    torch.minimum(finding, rows_R.min(), out=finding)

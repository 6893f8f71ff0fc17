"""Values of packed weights from their planes, in plain torch: the reference of every kernel, equal to the bit.

R rows, K columns, J groups of columns, P codes in a byte
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from holdfast.quant.packed_blocks import BLOCK_FILLS
from holdfast.quant.packed_schemes import BLOCK_SCHEMES, GROUPS, PackedScheme
from holdfast.quant.packed_tiles import TILE_SCHEMES
from holdfast.quant.packed_weight import PackedPart
from holdfast.quant.tile_values import fill_tiles
from holdfast.quant.weight_quantize import E2M1_VALUES, e8m0_values

STEP_ELEMENTS = 2**18
"""Elements per step: few enough that each pass finds the previous pass's results in cache."""
Fill = Callable[[PackedScheme, Mapping[str, Tensor], Tensor], None]
"""fill(scheme, planes, out_RK): planes by name, [R, elements of a row]; shared ones have one row."""


def fill_rows(scheme: PackedScheme, planes: Sequence[Tensor], out_RK: Tensor) -> Tensor:
    """Fill `out_RK` (float32, contiguous) with the values of some rows of a matrix, given their rows of every plane."""
    named = {plane.name: rows for plane, rows in zip(scheme.planes, planes, strict=True)}
    num_rows, num_columns = out_RK.shape
    group = scheme.row_group
    step = max(1, STEP_ELEMENTS // (num_columns * group)) * group
    fill = FILLS[scheme.family]
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        some = {
            plane.name: named[plane.name] if plane.is_shared else named[plane.name][start // group : end // group]
            for plane in scheme.planes
        }
        fill(scheme, some, out_RK[start:end])
    return out_RK


def dequantize_rows(part: PackedPart, matrix: int, rows: tuple[int, int], out_RK: Tensor) -> Tensor:
    """Fill `out_RK` with rows [start, end) of a part of one matrix; `matrix` counts stacked experts.

    Rows that lie interleaved come in whole groups.
    """
    start, end = (row // part.scheme.row_group for row in rows)
    assert (start * part.scheme.row_group, end * part.scheme.row_group) == rows, (
        f"{rows} cut {part.scheme.title}'s groups"
    )
    planes = []
    for plane, tensor in zip(part.scheme.planes, part.planes, strict=True):
        rows_XE = tensor.view(-1, tensor.shape[-1])
        first = matrix * tensor.shape[-2]
        planes.append(rows_XE[first : first + 1] if plane.is_shared else rows_XE[first + start : first + end])
    return fill_rows(part.scheme, planes, out_RK)


def _fill_blocks(scheme: PackedScheme, planes: Mapping[str, Tensor], out_RK: Tensor) -> None:
    """Fill rows of GGUF blocks, then multiply by each row's second scale, if there is one."""
    base = BLOCK_SCHEMES[scheme.title]
    size = base.unit_columns
    blocks = [planes[plane.name].reshape(-1, plane.row_elements(size)) for plane in base.planes]
    BLOCK_FILLS[scheme.title](blocks, out_RK.view(-1, size))
    if scheme.second == "values_times":
        out_RK.mul_(planes["second"])


def _fill_tiles(scheme: PackedScheme, planes: Mapping[str, Tensor], out_RK: Tensor) -> None:
    fill_tiles(scheme, planes["tiles"], out_RK)


def _codes(scheme: PackedScheme, codes: Tensor, num_columns: int) -> Tensor:
    """Return one code a byte; neighbouring codes share a byte, the first in its low half."""
    if scheme.bits == 8:
        return codes
    return torch.stack((codes & 0x0F, codes >> 4), dim=2).flatten(1)[:, :num_columns]


def _fill_integers(scheme: PackedScheme, planes: Mapping[str, Tensor], out_RK: Tensor) -> None:
    """(code - zero) * scale: the difference is exact, so the product rounds at most once."""
    out_RK.copy_(_codes(scheme, planes["codes"], out_RK.shape[1]))
    if scheme.has("zeros"):
        _by_group(scheme, planes, planes["zeros"].float(), out_RK, torch.Tensor.sub_)
    elif scheme.middle:
        out_RK.sub_(scheme.middle)
    _by_group(scheme, planes, planes["scales"].float(), out_RK, torch.Tensor.mul_)


def _by_group(
    scheme: PackedScheme,
    planes: Mapping[str, Tensor],
    values_RJ: Tensor,
    out_RK: Tensor,
    apply: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Apply each group's value to its columns: runs of `group_columns`, or those that the plane of groups names."""
    num_columns = out_RK.shape[1]
    if scheme.order_groups:
        apply(out_RK, values_RJ.index_select(1, planes[GROUPS].view(-1)))
        return
    size = scheme.group_columns or num_columns
    whole = num_columns // size * size
    apply(out_RK[:, :whole].unflatten(1, (-1, size)), values_RJ[:, : whole // size].unsqueeze(2))
    if whole < num_columns:
        apply(out_RK[:, whole:], values_RJ[:, whole // size :])


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """Return the numbers of low and high half of each byte [256, 2]."""
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1).to(device)


def _fill_e2m1(codes: Tensor, out_RK: Tensor) -> None:
    pairs = _e2m1_pairs(codes.device).index_select(0, codes.reshape(-1).to(torch.int32))
    out_RK.copy_(pairs.view(codes.shape[0], -1)[:, : out_RK.shape[1]])


def _fill_nvfp4(scheme: PackedScheme, planes: Mapping[str, Tensor], out_RK: Tensor) -> None:
    """code * (scale * second) or code * (scale / second): both products round."""
    _fill_e2m1(planes["codes"], out_RK)
    scales_RJ, second_R1 = planes["scales"].float(), planes["second"]
    scales_RJ = scales_RJ.div_(second_R1) if scheme.second == "scales_over" else scales_RJ.mul_(second_R1)
    _by_group(scheme, planes, scales_RJ, out_RK, torch.Tensor.mul_)


def _fill_mxfp4(scheme: PackedScheme, planes: Mapping[str, Tensor], out_RK: Tensor) -> None:
    _fill_e2m1(planes["codes"], out_RK)
    _by_group(scheme, planes, e8m0_values(planes["scales"]), out_RK, torch.Tensor.mul_)


def _fill_fp8(scheme: PackedScheme, planes: Mapping[str, Tensor], out_RK: Tensor) -> None:
    out_RK.copy_(planes["codes"])
    _by_group(scheme, planes, planes["scales"].float(), out_RK, torch.Tensor.mul_)


def _fill_plain(scheme: PackedScheme, planes: Mapping[str, Tensor], out_RK: Tensor) -> None:
    out_RK.copy_(planes["values"])


FILLS: Mapping[str, Fill] = {
    **{scheme.family: _fill_blocks for scheme in BLOCK_SCHEMES.values()},
    **{scheme.family: _fill_tiles for scheme in TILE_SCHEMES.values()},
    "int": _fill_integers,
    "int8": _fill_integers,
    "nvfp4": _fill_nvfp4,
    "mxfp4": _fill_mxfp4,
    "fp8": _fill_fp8,
    "plain": _fill_plain,
}
"""By `PackedScheme.family`."""

"""Reads rows of a source as planes, as a load places them."""

from typing import Any

import torch

from holdfast.quant.packed_schemes import PackedScheme
from holdfast.quant.packed_weight import PackedPart, plane_bytes


def read_part(
    source: Any, name: str, scheme: PackedScheme, rows: tuple[int, int], columns: tuple[int, int]
) -> PackedPart:
    """Read rows of a tensor as planes, as a load places them; a shared plane is read beside them."""
    shape = rows[1] - rows[0], columns[1] - columns[0]
    out = torch.full((scheme.row_bytes(shape[1]) * shape[0],), 0xA5, dtype=torch.uint8)
    source.read_packed(name, scheme, rows, out.numpy().data, columns)
    views = iter(plane_bytes(scheme, *shape, out))
    planes = []
    for plane, wanted in zip(scheme.planes, scheme.shaped(shape), strict=True):
        if plane.is_shared:
            matrix = source._matrices[name]
            index_K = source.read(matrix.groups, (0, matrix.num_columns))[slice(*columns)].to(torch.int32)
            planes.append(index_K.view(1, -1).contiguous())
        else:
            planes.append(next(views).clone().view(getattr(torch, wanted.dtype)))
    part = PackedPart(scheme, 0, shape, tuple(planes))
    part.check()
    return part

"""Packed weights to planes: codes of AWQ, GPTQ and compressed-tensors in one order, beside their scales and zero points.

Codes are unpacked and packed again, so every layout becomes the planes of one scheme (quant/packed_schemes.py). Scales
keep their type; zero points become bytes.

R rows (outputs), C columns (inputs), J groups
"""

from __future__ import annotations

import torch

from holdfast.loading.packed.dequantize import FUNCTIONS, Reader, Scales, Span, group_index
from holdfast.loading.packed.matrices import PackedMatrix
from holdfast.loading.packed.tiles import tiles
from holdfast.quant.packed_schemes import PackedScheme
from holdfast.quant.packed_weight import plane_bytes


def repack(
    matrix: PackedMatrix, reader: Reader, scheme: PackedScheme, rows: Span, columns: Span, out: memoryview
) -> None:
    """Fill `out` with rows of every plane, one plane after another; `columns` are whole units of the scheme."""
    index_K = group_index(matrix, reader)
    if index_K is not None and not scheme.order_groups:
        problem = "orders groups by input, and the settings declare no act-order; take packed_weights=expanded"
        raise reader.wrong(matrix.groups, problem)
    bytes_X = torch.frombuffer(out, dtype=torch.uint8)
    names = [plane.name for plane in scheme.planes if not plane.is_shared]
    views = dict(zip(names, plane_bytes(scheme, rows[1] - rows[0], columns[1] - columns[0], bytes_X), strict=True))
    groups = columns[0] // matrix.scale_columns, -(-columns[1] // matrix.scale_columns)
    if scheme.order_groups:
        groups = 0, matrix.num_groups
    codes_of = FUNCTIONS[matrix.layout.format.name].codes
    for some, steps in tiles(matrix, rows, columns, groups[1] - groups[0]):
        own = slice(some[0] - rows[0], some[1] - rows[0])
        for step in steps:
            codes_RB = _packed(codes_of(matrix, reader, some, step), scheme.bits)
            first = (step[0] - columns[0]) * scheme.bits // 8
            views["codes"][own, first : first + codes_RB.shape[1]].copy_(codes_RB)
        for name, values in _beside_codes(matrix, reader, scheme, some, groups).items():
            views[name][own].copy_(values.clone(memory_format=torch.contiguous_format).view(torch.uint8))


def _packed(codes_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """Return bytes of two codes, the first in the low half; bytes of one code stay."""
    if bits == 8:
        return codes_RC.view(torch.uint8)
    low, high = codes_RC[:, 0::2], codes_RC[:, 1::2]
    if high.shape[1] < low.shape[1]:
        high = torch.nn.functional.pad(high, (0, 1))
    return low | high << 4


def _beside_codes(
    matrix: PackedMatrix, reader: Reader, scheme: PackedScheme, rows: Span, groups: Span
) -> dict[str, torch.Tensor]:
    """Return scales, zero points and second scales of some rows, in the types of their planes."""
    form = matrix.layout.format
    if form.numbers == "e2m1":
        found = {"scales": reader.read(matrix.scales, rows, groups)}
        if form.second:
            second = reader.read(matrix.second, (0, 1)).float().view(1, 1)
            found["second"] = second.expand(rows[1] - rows[0], 1)
        return found
    scales: Scales = FUNCTIONS[form.name].scales(matrix, reader, rows, groups)
    found = {"scales": scales.scales_RJ}
    if scales.zeros_RJ is not None:
        found["zeros"] = scales.zeros_RJ
    return {name: values.to(getattr(torch, scheme.plane(name).dtype)) for name, values in found.items()}

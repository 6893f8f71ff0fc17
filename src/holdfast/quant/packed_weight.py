"""PackedWeight: a weight matrix as the planes of its checkpoint's blocks, in parts of one scheme each."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from holdfast.quant.packed_schemes import PackedScheme
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import INT8, MXFP4, PackedActivations


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows [row_start, row_start + num_rows) of each matrix, and their planes in the order of the scheme's."""

    scheme: PackedScheme
    row_start: int
    shape: tuple[int, ...]
    """[..., num_rows, K]: leading dimensions are those of stacked experts."""
    planes: tuple[torch.Tensor, ...]
    """Contiguous views into the weights' arena, aligned to 256 bytes, as `PackedScheme.shaped` shapes them."""

    @property
    def num_rows(self) -> int:
        return self.shape[-2]

    def plane(self, name: str) -> torch.Tensor:
        return next(tensor for plane, tensor in zip(self.scheme.planes, self.planes, strict=True) if plane.name == name)

    def check(self) -> None:
        """Check that the planes are those that the scheme has for this shape."""
        for plane, tensor in zip(self.scheme.shaped(self.shape), self.planes, strict=True):
            what = f"{self.scheme.title} {self.shape}, plane {plane.suffix}"
            assert tuple(tensor.shape) == plane.shape, f"{what}: {tensor.shape=}, not {plane.shape}"
            assert str(tensor.dtype).removeprefix("torch.") == plane.dtype, f"{what}: {tensor.dtype}, not {plane.dtype}"
            assert tensor.is_contiguous(), f"{what}: strides {tensor.stride()}"


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [N, K], or stacked matrices [E, N, K], whose rows are packed parts."""

    shape: tuple[int, ...]
    parts: tuple[PackedPart, ...]
    """In order of rows: one, or several if fused rows (q, k, v; gate, up) are stored in different schemes."""
    room: torch.Tensor | None = None
    """Bytes of the workspace for dequantized pieces of rows or quantized activations; None until the workspace exists."""
    activations: PackedActivations = "full"
    """Activations of products: as they are, or with 8 bits if the kernel takes that."""
    is_invariant: bool = False
    """On a GPU, products of any number of rows take the kernel that sums each row alike."""

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the schemes."""
        return tuple(dict.fromkeys(part.scheme.title for part in self.parts))

    def planes(self) -> Iterable[torch.Tensor]:
        return (tensor for part in self.parts for tensor in part.planes)

    def check(self) -> None:
        """Check that parts follow each other, and every part's planes."""
        row = 0
        for part in self.parts:
            assert part.row_start == row, f"{part.scheme.title}: begins at row {part.row_start}, not {row}"
            expected = (*self.shape[:-2], part.num_rows, self.shape[-1])
            assert part.shape == expected, f"{part.scheme.title}: {part.shape} of {self.shape}"
            part.check()
            row += part.num_rows
        assert row == self.shape[-2], f"parts have {row} rows of {self.shape}"


QUANTIZED_FAMILIES = {"mxfp4": MXFP4, "int8": INT8}
"""Families with the planes of a weight scheme, whose kernels take them."""


def as_quantized(weight: PackedWeight) -> QuantizedWeight | None:
    """Return the same planes as a quantized weight; None if no weight scheme has them."""
    part, *others = weight.parts
    scheme = QUANTIZED_FAMILIES.get(part.scheme.family)
    if others or scheme is None:
        return None
    codes, scales = part.planes
    return QuantizedWeight(scheme, weight.shape, codes, scales.view(scheme.scale_shape(weight.shape)))


AnyWeight: TypeAlias = torch.Tensor | QuantizedWeight | PackedWeight
"""A weight as a product takes it: plain, quantized, or packed as its checkpoint stores it."""


def tensors_of(weight: AnyWeight) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold a weight."""
    if isinstance(weight, PackedWeight):
        return tuple(weight.planes())
    return (weight.codes, weight.scales) if isinstance(weight, QuantizedWeight) else (weight,)


def plane_bytes(scheme: PackedScheme, num_rows: int, num_columns: int, bytes_X: torch.Tensor) -> list[torch.Tensor]:
    """View `num_rows` packed rows, plane after plane: [rows, bytes of a row] for each plane that rows do not share."""
    views, start = [], 0
    for plane in scheme.planes:
        if plane.is_shared:
            continue
        width = plane.row_bytes(num_columns)
        count = num_rows // scheme.row_group
        views.append(bytes_X[start : start + count * width].view(count, width))
        start += count * width
    assert start == bytes_X.numel(), f"{scheme.title}: {bytes_X.numel()} bytes for {num_rows} rows of {num_columns}"
    return views

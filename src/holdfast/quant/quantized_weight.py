"""QuantizedWeight: a weight matrix as codes and scales, instead of a plain tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from holdfast.quant.weight_schemes import WeightScheme


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Codes and scales as `WeightScheme.planes` shapes them; both are views into the weights' arena."""

    scheme: WeightScheme
    shape: tuple[int, ...]
    """Shape of the matrix, or of the stacked matrices."""
    codes: torch.Tensor
    scales: torch.Tensor
    whole_rows: int = 0
    """Rows of the whole matrix if this is a rank's share that must multiply like it; 0: no such demand."""

    @property
    def form_rows(self) -> int:
        """The rows by which kernels choose a form: a form rounds in its own order."""
        return self.whole_rows or self.shape[-2]

    def check(self) -> None:
        """Check that the planes are those that the scheme has for this shape."""
        for plane, tensor in zip(self.scheme.planes(self.shape), (self.codes, self.scales), strict=True):
            dtype = str(tensor.dtype).removeprefix("torch.")
            assert tuple(tensor.shape) == plane.shape, f"{self.scheme.name} {self.shape}: {tensor.shape=}, not {plane}"
            assert dtype == plane.dtype, f"{self.scheme.name} {self.shape}: {dtype}, not {plane}"
            assert tensor.is_contiguous(), f"{self.scheme.name} {self.shape}: strides {tensor.stride()}"

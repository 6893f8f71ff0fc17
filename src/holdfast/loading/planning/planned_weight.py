"""PlannedWeight: one final weight before it exists, as a tensor in a type or as codes and scales; no torch."""

from dataclasses import dataclass

from holdfast.memory.tensor_spec import TensorSpec
from holdfast.quant.weight_schemes import WeightScheme


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """What a load will give under this name."""

    name: str
    shape: tuple[int, ...]
    """Of the matrix, however it is stored."""
    dtype: str
    """In which it is stored or, as codes, computed with."""
    scheme: WeightScheme | None = None
    """With blocks of rows as the weight's parts allow them."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors that it is made of: itself, or its codes and then its scales."""
        if self.scheme is None:
            return (TensorSpec(self.name, self.shape, self.dtype),)
        planes = self.scheme.planes(self.shape)
        return tuple(TensorSpec(self.name + plane.suffix, plane.shape, plane.dtype) for plane in planes)

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def stored_as(self) -> str:
        """The name of its scheme, or of its type."""
        return self.dtype if self.scheme is None else self.scheme.name

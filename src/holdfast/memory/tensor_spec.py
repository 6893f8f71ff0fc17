"""TensorSpec: a tensor before it exists, as name, shape and type; where it will lie in an arena; no torch."""

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.errors import shown
from holdfast.quant.formats import DTYPE_BYTES, bytes_for

ALIGNMENT_BYTES = 256
"""Every view begins at a multiple of this: what CUDA's allocator gives, and four cache lines of a CPU."""


class TensorSpec(NamedTuple):
    """One tensor that somebody will ask for. A tuple, because requests are looked up by it twice a layer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the type."""

    @property
    def num_bytes(self) -> int:
        return bytes_for(self.dtype, self.shape)

    @property
    def aligned_bytes(self) -> int:
        return aligned(self.num_bytes)

    @property
    def problem(self) -> str | None:
        """None, or why no tensor can be made of it, in words."""
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            return f"{shown(self.dtype)} is not the name of a type ({', '.join(DTYPE_BYTES)} are)"
        if not isinstance(self.shape, tuple) or any(type(size) is not int or size < 0 for size in self.shape):
            return f"{shown(self.shape)} is not a shape (a tuple of whole numbers from 0 on is)"
        return None

    def __str__(self) -> str:
        return f"{self.name} {self.dtype if isinstance(self.dtype, str) else shown(self.dtype)} {shown(self.shape)}"


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def arena_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of tensors that lie one after the other, each at an aligned place."""
    return sum(spec.aligned_bytes for spec in specs)

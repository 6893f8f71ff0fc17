"""Arranges planes for a device's kernels: the same bytes, interleaved over rows, piece by piece while a load reads them."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from holdfast.quant.packed_schemes import PackedScheme

Arrange = Callable[[PackedScheme, Sequence[Tensor], Sequence[Tensor]], None]
"""arrange(scheme, planes, out): fill the planes of the arranged scheme from those of the stored one, as bytes [rows, ...]."""
ARRANGE: Mapping[str, Arrange] = {}
"""By the family of the arranged scheme."""

"""Weights as a plan sees them: shapes with a kind, and their bytes under every quantization; no torch."""

import difflib
from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple

from holdfast.errors import ConfigError, shown
from holdfast.memory.tensor_spec import aligned
from holdfast.quant.formats import bytes_for

Kind = Literal["linear", "expert", "embedding", "head", "norm", "bias", "router"]
QUANTIZED_KINDS: tuple[Kind, ...] = ("linear", "expert", "head")
"""The rest is small, or is looked up by row, and stays as it is."""


class Weight(NamedTuple):
    """One tensor that a rank holds."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    native: str | None = None
    """The scheme in which the checkpoint stores it; None: unquantized."""
    dtype: str | None = None
    """Its own type, whatever the dtype of the engine; None: that one."""

    @property
    def group(self) -> str:
        """Whose bytes they are in a plan's table: all layers together, experts apart."""
        first = self.name.partition(".")[0]
        return "experts" if self.kind == "expert" and first == "layers" else first


class WeightScheme(NamedTuple):
    """How a quantized matrix is stored: codes, and a scale for every block of them."""

    name: str
    bits: int
    scale_bytes: int
    block: tuple[int, int]
    """Rows and columns that share a scale; 0 for all of them."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Of the codes and the scales, each aligned as a tensor of its own."""
        *leading, rows, columns = shape
        num_matrices = prod(leading)
        block_rows, block_columns = self.block[0] or rows, self.block[1] or columns
        num_scales = num_matrices * -(-rows // block_rows) * -(-columns // block_columns)
        code_bytes = num_matrices * rows * -(-columns * self.bits // 8)
        return aligned(code_bytes) + aligned(num_scales * self.scale_bytes)


QUANTIZATIONS: Mapping[str, WeightScheme] = {
    scheme.name: scheme
    for scheme in (
        WeightScheme("fp8", 8, 4, (1, 0)),
        WeightScheme("fp8_tensor", 8, 4, (0, 0)),
        WeightScheme("fp8_block", 8, 4, (128, 128)),
        WeightScheme("int8", 8, 4, (1, 0)),
        WeightScheme("mxfp4", 4, 1, (1, 32)),
    )
}
"""What weights can be planned in, by name. An engine of this version takes none of them yet."""
FP8_BLOCK_E8M0 = WeightScheme("fp8_block_e8m0", 8, 1, (128, 128))
"""As DeepSeek-V4 stores its matrices: a power of two for every block."""
_SCHEMES = {**QUANTIZATIONS, FP8_BLOCK_E8M0.name: FP8_BLOCK_E8M0}
UNQUANTIZED = "none"


def find_quantization(name: str | None) -> str | None:
    """A quantization by name; None and "none" leave weights as the checkpoint has them."""
    if name is None or name == UNQUANTIZED:
        return None
    if name not in QUANTIZATIONS:
        names = (UNQUANTIZED, *QUANTIZATIONS)
        near = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
        raise ConfigError(
            f"quantization={shown(name)} was asked",
            f"the choices are {', '.join(names)}",
            f"try {near[0] if near else 'fp8'}",
        )
    return name


def weight_bytes(weight: Weight, dtype: str, quantization: str | None) -> int:
    """What a weight takes in an arena, scales included."""
    scheme = weight.native
    if quantization is not None and weight.kind in QUANTIZED_KINDS:
        scheme = quantization
    if scheme is not None:
        return _SCHEMES[scheme].num_bytes(weight.shape)
    return aligned(bytes_for(weight.dtype or dtype, weight.shape))

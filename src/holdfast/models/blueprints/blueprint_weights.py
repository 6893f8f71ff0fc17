"""Weights as a plan sees them: shapes with a kind, and their bytes under every recipe of quantization; no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from holdfast.memory.tensor_spec import aligned
from holdfast.models.parameters import Kind, Parameter
from holdfast.quant.formats import bytes_for
from holdfast.quant.weight_recipe import WeightRecipe
from holdfast.quant.weight_schemes import FP8_BLOCK, WEIGHT_SCHEMES, WeightScheme

FP8_BLOCK_E8M0 = replace(FP8_BLOCK, name="fp8_block_e8m0", scale_dtype="uint8", scale_is_power_of_two=True)
"""As DeepSeek-V4 stores its matrices: a power of two for every block. Nobody asks for it: checkpoints have it."""
_NATIVE: Mapping[str, WeightScheme] = {**WEIGHT_SCHEMES, FP8_BLOCK_E8M0.name: FP8_BLOCK_E8M0}


class Weight(NamedTuple):
    """One tensor that a rank holds."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    native: str | WeightScheme | None = None
    """The scheme in which the checkpoint stores it, by name or as a load settles it; None: unquantized."""
    dtype: str | None = None
    """Its own type, whatever the dtype of the engine; None: that one."""
    tensors: tuple[str, ...] = ()
    """The checkpoint tensors that it is made of, where they are known."""
    seam_rows: int = 0
    """What divides every row at which two of them meet; 0 where none do."""

    @property
    def group(self) -> str:
        """Whose bytes they are in a plan's table: all layers together, experts apart."""
        first = self.name.partition(".")[0]
        return "experts" if self.kind == "expert" and first == "layers" else first

    @property
    def names(self) -> tuple[str, ...]:
        """Every name by which a pattern may mean it."""
        return (self.name, *self.tensors)

    def scheme(self, recipe: WeightRecipe) -> WeightScheme | None:
        """How it is stored: as it is asked, else as the checkpoint has it; None for plain numbers."""
        asked = self.stored_scheme or recipe.scheme_for(self.kind, self.names)
        if asked is None:
            return None
        # Stacked matrices end where a block does, each of them; those of a rank may be lower than the ones that were settled.
        return asked.with_parts((self.seam_rows, self.shape[-2] if len(self.shape) > 2 else 0))

    @property
    def stored_scheme(self) -> WeightScheme | None:
        """The scheme in which the checkpoint stores it; None: unquantized."""
        return _NATIVE[self.native] if isinstance(self.native, str) else self.native


def weight_of(parameter: Parameter, native: str | None = None) -> Weight:
    """A parameter of a decoder that runs."""
    return Weight(
        parameter.name,
        parameter.shape,
        parameter.kind,
        native,
        parameter.dtype,
        tuple(part.tensor for part in parameter.parts),
        parameter.seam_rows,
    )


def weight_bytes(weight: Weight, dtype: str, recipe: WeightRecipe) -> int:
    """What a weight takes in an arena, scales included."""
    return _bytes(weight, dtype, weight.scheme(recipe))


class WeightGroup(NamedTuple):
    """Weights that are one line of a plan."""

    num_tensors: int
    num_bytes: int
    """In an arena, scales included."""
    stored_as: tuple[str, ...]
    """Every scheme, then every type, in which some of them are stored; what most of them have comes first."""


def weight_groups(weights: Iterable[Weight], dtype: str, recipe: WeightRecipe) -> dict[str, WeightGroup]:
    """By group: embed, layers, experts, lm_head and so on."""
    sizes: Counter[str] = Counter()
    kinds: dict[str, Counter[tuple[bool, str]]] = {}
    for weight in weights:
        scheme = weight.scheme(recipe)
        sizes[weight.group] += _bytes(weight, dtype, scheme)
        kind = (True, weight.dtype or dtype) if scheme is None else (False, scheme.name)
        kinds.setdefault(weight.group, Counter())[kind] += 1
    groups: dict[str, WeightGroup] = {}
    for name, counts in kinds.items():
        ordered = sorted(counts, key=lambda kind: (kind[0], -counts[kind]))
        groups[name] = WeightGroup(counts.total(), sizes[name], tuple(stored_as for _, stored_as in ordered))
    return groups


def _bytes(weight: Weight, dtype: str, scheme: WeightScheme | None) -> int:
    if scheme is None:
        return aligned(bytes_for(weight.dtype or dtype, weight.shape))
    return sum(aligned(plane.num_bytes) for plane in scheme.planes(weight.shape))

"""What every kind of model must tell a plan: weights of a rank, bytes of its cache, tensors of a step; no torch."""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

from holdfast.memory.tensor_spec import TensorSpec
from holdfast.models.activations import Request
from holdfast.models.blueprints.blueprint_weights import Weight
from holdfast.models.settings import Settings
from holdfast.quant.formats import KVFormat
from holdfast.quant.weight_recipe import AS_STORED, WeightRecipe


class CacheRows(NamedTuple):
    """Layers that keep rows of one size: one row for every `ratio` tokens of a sequence."""

    name: str
    num_layers: int
    row_bytes: int
    ratio: int = 1

    @property
    def bytes_per_token(self) -> Fraction:
        return Fraction(self.num_layers * self.row_bytes, self.ratio)


class HeadGeometry(NamedTuple):
    """Attention with keys and values by head, as the backends of this version know it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """One entry a layer."""
    has_key_bias: bool = False


class StepShape(NamedTuple):
    """The largest step that scratch is planned for."""

    num_rows: int
    num_logit_rows: int
    max_model_len: int
    dtype: str
    device_kind: str = "cpu"
    recipe: WeightRecipe = AS_STORED
    """Which weights are quantized: some schemes take the inputs of products as codes, which need room."""


class Anatomy(Protocol):
    """One kind of model. A rank is one of `num_ranks` that share every layer."""

    @property
    def rope_width(self) -> int:
        """Elements of a row of the rotary table; 0 where positions are learned."""
        ...

    def indivisible(self, num_ranks: int) -> str | None:
        """None, or what does not divide into so many parts, in words."""
        ...

    def weights(self, num_ranks: int) -> tuple[Weight, ...]:
        """Every tensor of one rank."""
        ...

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        """None, or why the cache cannot be kept in that format, in words."""
        ...

    def cache_rows(self, kv_format: KVFormat, num_ranks: int) -> tuple[CacheRows, ...]:
        """What grows with the tokens of a sequence."""
        ...

    def sequence_bytes(self, kv_format: KVFormat, num_ranks: int) -> int:
        """What a sequence costs whatever its length."""
        ...

    def heads(self, num_ranks: int) -> HeadGeometry | None:
        """Keys and values by head, or None where the cache keeps something else."""
        ...

    def requests(self, step: StepShape, num_ranks: int, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        """Workspace of a step; `scratch` is what an attention backend wants beside queries and outputs."""
        ...


def split(size: int, num_ranks: int, what: str) -> str | None:
    """None where `size` divides into equal parts, else the reason in words."""
    return None if size % num_ranks == 0 else f"{size} {what} do not divide into {num_ranks} equal parts"


def needed(settings: Settings, key: str, high: int) -> int:
    """A whole number without which a plan would be a guess."""
    if settings.values.get(key) is None:
        raise settings.missing(key, "a plan would be a guess without it")
    return settings.count(key, 1, high)

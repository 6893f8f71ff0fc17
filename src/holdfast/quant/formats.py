"""Storage formats as values: element types and the planes of a KV page; no torch.

A KV format says which planes one token of one layer occupies. Everything else (page pool, planner, storage, scheduler)
works from bytes and never asks which format it is; only an attention backend and its kernels know what the planes mean.
"""

from dataclasses import dataclass
from math import prod

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's name of the type."""


def bytes_for(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor."""
    return DTYPE_BYTES[dtype] * prod(shape)


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a layer's cache, described by what a single token adds to it."""

    name: str
    dtype: str
    token_shape: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        return bytes_for(self.dtype, self.token_shape)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A way to store keys and values."""

    name: str
    key_dtype: str
    value_dtype: str

    def planes(self, num_kv_heads: int, head_dim: int) -> tuple[Plane, ...]:
        """The planes of one layer, in the order in which they are laid out."""
        token_shape = (num_kv_heads, head_dim)
        return (Plane("k", self.key_dtype, token_shape), Plane("v", self.value_dtype, token_shape))


KV_FORMATS: dict[str, KVFormat] = {name: KVFormat(name, name, name) for name in ("float32", "float16", "bfloat16")}
"""Every KV format by the name that `kv_cache_dtype` takes."""

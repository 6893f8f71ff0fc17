"""The geometry of the KV cache: which planes each layer keeps, bytes per token and per page; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.quant.formats import KVFormat, Plane


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps for each token. A layer may own several of these (latent, index) or none."""

    layer: int
    name: str
    format: KVFormat
    num_kv_heads: int
    head_dim: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        return self.format.planes(self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return self.format.bytes_per_token(self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All layers' caches over one page table: page p of a sequence means page p of every plane of every layer."""

    page_tokens: int
    layers: tuple[LayerCache, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_page(self) -> int:
        return self.page_tokens * self.bytes_per_token

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence occupy."""
        return -(-num_tokens // self.page_tokens)


def mixed_cache(formats: Sequence[KVFormat], num_kv_heads: int, head_dim: int, page_tokens: int) -> CacheSpec:
    """The cache of a decoder whose layers have the same heads, and a format each."""
    layers = (LayerCache(layer, "attention", form, num_kv_heads, head_dim) for layer, form in enumerate(formats))
    return CacheSpec(page_tokens, tuple(layers))


def uniform_cache(
    num_layers: int, kv_format: KVFormat, num_kv_heads: int, head_dim: int, page_tokens: int
) -> CacheSpec:
    """The cache of a decoder whose layers all keep keys and values in one format."""
    return mixed_cache((kv_format,) * num_layers, num_kv_heads, head_dim, page_tokens)

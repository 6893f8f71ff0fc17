"""The geometry of the KV cache: which planes each layer keeps, bytes per token and per page, and what aligning planes can cost; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from holdfast.memory.planner import KV_OWNER, PAGE_PHASES, Term
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES
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


def kv_padding_term(spec: CacheSpec) -> Term:
    """The most that lies unused behind planes, whatever the number of pages: nothing where whole pages are aligned."""
    page_bytes = [spec.page_tokens * plane.bytes_per_token for layer in spec.layers for plane in layer.planes]
    padding_bytes = sum(ALIGNMENT_BYTES - gcd(num_bytes, ALIGNMENT_BYTES) for num_bytes in page_bytes)
    reason = f"{len(page_bytes)} planes, each at a multiple of {ALIGNMENT_BYTES} bytes"
    return Term(f"{KV_OWNER}/padding", padding_bytes, reason, PAGE_PHASES)

"""LatentDeclaration: what a decoder with latent attention (MLA) declares differently from KV by head; no torch."""

from holdfast.distributed.mesh import Mesh
from holdfast.models.declaration import CacheRows, HeadGeometry
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.spec import LatentSpec
from holdfast.quant.formats import KVFormat, index_dtype_beside, index_planes


class LatentDeclaration(DecoderDeclaration):
    """A decoder whose layers keep one latent per token, and perhaps an index.

    Ranks split query heads, MLPs and experts; each has all latents and the whole index."""

    __slots__ = ()

    @property
    def latent(self) -> LatentSpec:
        latent = self.decoder.latent
        assert latent is not None, f"{self.decoder.architecture} keeps keys and values by head"
        return latent

    def indivisible(self, mesh: Mesh) -> str | None:
        index, first = self.latent.index, None if mesh.layers is None else mesh.layers[0]
        if index is not None and first in index.shared_layers:
            return f"layer {first} attends to tokens that a layer of the stage before it chose, which stages do not exchange"
        return super().indivisible(mesh)

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        if not kv_format.is_quantized or kv_format.is_latent:
            return None
        return f"{kv_format.name} keeps keys and values by head, and this model keeps latents"

    def cache_rows(self, kv_format: KVFormat, mesh: Mesh) -> tuple[CacheRows, ...]:
        spec, latent = self.rank(mesh), self.latent
        num_layers = spec.num_layers
        rows = CacheRows("latent", num_layers, kv_format.bytes_per_token(1, latent.row_dim, latent.rope_dim))
        if latent.index is None:
            return (rows,)
        planes = index_planes(index_dtype_beside(kv_format), latent.index.head_dim)
        num_indexed = sum(spec.layer_index(layer) is not None for layer in range(num_layers))
        return (rows, CacheRows("index", num_indexed, sum(plane.bytes_per_token for plane in planes)))

    def heads(self, mesh: Mesh) -> HeadGeometry:
        spec, latent = self.rank(mesh), self.latent
        geometry = HeadGeometry(
            num_heads=spec.num_heads,
            num_kv_heads=1,
            head_dim=latent.row_dim,
            windows=(None,) * spec.num_layers,
            scale=spec.score_scale,
            rope_dim=latent.rope_dim,
            nope_dim=latent.nope_dim,
            value_dim=latent.value_dim,
        )
        if latent.index is None:
            return geometry
        return geometry._replace(
            index_heads=latent.index.num_heads,
            index_dim=latent.index.head_dim,
            index_top_k=latent.index.top_k,
            index_turns_neighbours=latent.index.turns_neighbours,
            shared_layers=frozenset(layer for layer in range(spec.num_layers) if spec.layer_index(layer) is None),
        )

"""CompressedDeclaration: weights, caches (window, entries), states and scratch of DeepSeek-V4's decoder; no torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from holdfast.cache.places import place_bytes
from holdfast.distributed.mesh import Mesh
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import (
    Request,
    gathered_request,
    head_request,
    quantized_rows_request,
    row_scaled_request,
)
from holdfast.models.compressed_activations import compressed_requests
from holdfast.models.declaration import CacheRows, HeadGeometry, StepShape, split
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.spec import CompressedSpec, ModelSpec
from holdfast.quant.formats import (
    COMPRESSED_FORMATS,
    EXPONENT_TILE,
    LATENT_MULTIPLE,
    KVFormat,
    index_dtype_beside,
    index_planes,
)


class CompressedDeclaration(DecoderDeclaration):
    """A decoder whose layers keep a window, and entries that stand for several tokens each.

    Ranks split query heads, their groups, and experts. Each rank has all vectors, entries, states and streams.
    """

    __slots__ = ()

    @property
    def compressed(self) -> CompressedSpec:
        compressed = self.decoder.compressed
        assert compressed is not None, f"{self.decoder.architecture} does not compress"
        return compressed

    def indivisible(self, mesh: Mesh) -> str | None:
        reason = super().indivisible(mesh)
        return reason or split(self.compressed.num_output_groups, mesh.tensor_size, "groups of heads")

    def rank(self, mesh: Mesh) -> ModelSpec:
        spec = super().rank(mesh)
        assert spec.compressed is not None, f"{spec.architecture} does not compress"
        groups = spec.compressed.num_output_groups // mesh.tensor_size
        return replace(spec, compressed=replace(spec.compressed, num_output_groups=groups))

    def compressed_of(self, mesh: Mesh) -> CompressedSpec:
        """Return the attention of a rank's layers."""
        compressed = self.rank(mesh).compressed
        assert compressed is not None, f"{self.decoder.architecture} does not compress"
        return compressed

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        plain = self.decoder.head_dim - self.compressed.rope_dim
        if not kv_format.is_quantized:
            return None
        if kv_format.name not in COMPRESSED_FORMATS:
            kept = "latents" if kv_format.is_latent else "keys and values by head"
            return f"{kv_format.name} keeps {kept}, and this model keeps vectors of compressed attention"
        if kv_format.rotates_latents and plain % LATENT_MULTIPLE:
            return f"{plain} elements of a vector are not rotated, and a multiple of {LATENT_MULTIPLE} can be quantized"
        if kv_format.has_exponents and plain % EXPONENT_TILE:
            return f"{plain} elements of a vector are not rotated, and {EXPONENT_TILE} of them share a scale"
        return None

    def cache_rows(self, kv_format: KVFormat, mesh: Mesh) -> tuple[CacheRows, ...]:
        """List rows of entries and their index. Windows do not grow with a sequence; the cache counts their pages."""
        compressed, rows = self.compressed_of(mesh), []
        row_bytes = kv_format.bytes_per_token(1, self.decoder.head_dim, compressed.rope_dim)
        counts = Counter(one for one in compressed.compressors if one is not None)
        for one, num_layers in sorted(counts.items(), key=lambda item: item[0].ratio):
            rows.append(CacheRows(f"entries of {one.ratio}", num_layers, row_bytes, one.ratio))
            if one.is_overlapped and compressed.index is not None:
                planes = index_planes(index_dtype_beside(kv_format), compressed.index.head_dim)
                index_bytes = sum(plane.bytes_per_token for plane in planes)
                rows.append(CacheRows("index", num_layers, index_bytes, one.ratio))
        return tuple(rows)

    def sequence_bytes(self, kv_format: KVFormat, mesh: Mesh) -> int:
        """Return the bytes of the states that the next entries are made from, float32 in every format."""
        return place_bytes(self.heads(mesh).states)

    def heads(self, mesh: Mesh) -> HeadGeometry:
        spec, compressed = self.rank(mesh), self.compressed_of(mesh)
        compressors = compressed.compressors
        overlapped = frozenset(layer for layer, one in enumerate(compressors) if one is not None and one.is_overlapped)
        geometry = HeadGeometry(
            num_heads=spec.num_heads,
            num_kv_heads=1,
            head_dim=spec.head_dim,
            windows=(compressed.window,) * spec.num_layers,
            scale=spec.score_scale,
            has_sinks=spec.has_sinks,
            rope_dim=compressed.rope_dim,
            ratios=tuple(0 if one is None else one.ratio for one in compressors),
            overlapped_layers=overlapped,
            form_heads=spec.form_heads,
        )
        index = compressed.index
        if index is None:
            return geometry
        return geometry._replace(
            index_heads=index.num_heads,
            index_dim=index.head_dim,
            index_top_k=index.top_k,
            index_turns_neighbours=index.turns_neighbours,
        )

    def requests(self, step: StepShape, mesh: Mesh, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        spec = self.rank(mesh)
        own = compressed_requests(spec, step.num_rows, step.dtype, tuple(scratch), step.recipe)
        codes = quantized_rows_request(spec, step.num_rows, step.num_logit_rows, step.recipe)
        requests = [own.stream, own.attention, own.experts, codes, gathered_request(spec, step.num_rows, step.dtype)]
        if step.device_kind == "cuda":
            requests.append(row_scaled_request(spec, step.recipe))
        requests = [request for request in requests if request.specs]
        return (*requests, head_request(spec, step.num_logit_rows, step.dtype))

"""Backends of latent attention (MLA), as the planner sees them: Triton and plain torch, the fastest first; no torch."""

from collections.abc import Sequence

from holdfast.attention.declarations import (
    BLOCK_TOKENS,
    PARTIAL_HEAD_ROWS,
    ROWS_AT_ONCE,
    AttentionSpec,
    BackendDeclaration,
    StepBounds,
    head_block_rows,
    max_partials,
    partial_specs,
    unsupported_device,
    unsupported_pages,
)
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.kernels.geometry import LATENT_MULTIPLE, LATENT_ROPE_DIMS, MAX_LATENT_DIM, TILE_FIELDS
from holdfast.kernels.latent.latent_geometry import latent_geometry
from holdfast.kernels.up_projection import LEAST_ROWS, expanded_specs
from holdfast.memory.planner import Term
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import bytes_for

HEAD_ROWS = 2**16
"""Most rows times heads in the latent space at once. Larger parts of a step run in groups of heads."""
HEADS_AT_ONCE = 64
"""Heads in such a group, as many as a tile has side by side."""


class LatentDeclaration(BackendDeclaration):
    """A backend over latents; `scratch` and `terms` see layers of the latent family only."""

    def unsupported(self, spec: AttentionSpec) -> str | None:
        cache = spec.cache
        if cache.format.is_quantized and not cache.format.is_latent:
            return f"the format {cache.format.name} keeps keys and values by head"
        if spec.window is not None:
            return "it has no sliding windows"
        if cache.latent_dim % LATENT_MULTIPLE or not 0 < cache.latent_dim <= MAX_LATENT_DIM:
            return f"latents have {cache.latent_dim} elements, and a multiple of {LATENT_MULTIPLE} up to {MAX_LATENT_DIM} is computed"
        if cache.rope_dim not in LATENT_ROPE_DIMS:
            return f"{cache.rope_dim} elements are rotated, and {', '.join(map(str, LATENT_ROPE_DIMS))} can be"
        return None


class TritonLatentDeclaration(LatentDeclaration):
    """Triton kernels over pages of latents on a GPU."""

    name = "triton_latent"
    can_be_captured = True

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if declined := unsupported_device(spec) or unsupported_pages(spec):
            return declined
        query_dim = latent(spec).nope_dim + spec.cache.rope_dim
        if latent(spec).value_dim > query_dim:
            return f"values of {latent(spec).value_dim} elements are wider than queries of {query_dim}"
        return super().unsupported(spec)

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """Declare queries and outputs in the latent space, as vectors of which a step takes its part; and partials."""
        spec, cache = latent(specs[0]), specs[0].cache
        head_rows = latent_head_rows(spec.num_heads, bounds)
        return (
            TensorSpec("absorbed", (head_rows * cache.head_dim,), spec.dtype),
            TensorSpec("attended_latent", (head_rows * cache.latent_dim,), spec.dtype),
            *partial_specs(self.num_partials(spec, bounds), spec.num_heads, spec.num_heads * cache.latent_dim),
            *up_projection_specs(spec, bounds),
        )

    def num_partials(self, spec: AttentionSpec, bounds: StepBounds) -> int:
        return latent_partials(spec, bounds)

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        parts = latent_parts(bounds)
        num_tiles = sum(max_latent_tiles(specs[0], part) for part in parts)
        list_bytes = bytes_for("int32", (num_tiles + len(parts), len(TILE_FIELDS)))
        row_bytes = sum(bytes_for("int32", (part.max_num_rows, 2)) for part in parts)
        return (
            Term("attention/tiles", list_bytes, f"{num_tiles} tiles of a step's work, in {len(parts)} lists"),
            Term("attention/rows", row_bytes, "where each row's partial results lie"),
        )


class TorchLatentDeclaration(LatentDeclaration):
    """Plain torch over pages of latents, anywhere."""

    name = "torch_latent"

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        cache, rows, tokens = specs[0].cache, head_block_rows(specs[0].num_heads), BLOCK_TOKENS
        head_rows = rows * specs[0].num_heads
        num_elements = 3 * head_rows * tokens + 5 * head_rows * cache.head_dim + 3 * tokens * cache.head_dim
        reason = f"scores of {rows} rows against {tokens} tokens at a time, and what they are made of"
        return (Term("attention/blocks", bytes_for("float32", (num_elements,)), reason),)


DECLARATIONS = TritonLatentDeclaration(), TorchLatentDeclaration()


def latent(spec: AttentionSpec) -> LatentAttentionSpec:
    """Narrow the type of a layer that belongs to this family."""
    assert isinstance(spec, LatentAttentionSpec), f"{type(spec).__name__} keeps no latents"
    return spec


def up_projection_specs(spec: LatentAttentionSpec, bounds: StepBounds) -> tuple[TensorSpec, ...]:
    """Declare buffers for prompts with keys and values of every head; none if no step has enough rows."""
    if bounds.max_num_rows < LEAST_ROWS:
        return ()
    return expanded_specs(spec.up_projection, spec.dtype, bounds.max_num_rows, spec.max_model_len)


def latent_head_rows(num_heads: int, bounds: StepBounds) -> int:
    """Return the most rows times heads that are in the latent space at once."""
    rows = min(ROWS_AT_ONCE, bounds.max_num_rows)
    return min(rows * num_heads, max(HEAD_ROWS, rows * min(num_heads, HEADS_AT_ONCE)))


def latent_heads_at_once(num_heads: int, num_rows: int) -> int:
    """Return the heads of a group, for a part of a step of so many rows."""
    return num_heads if num_rows * num_heads <= HEAD_ROWS else min(num_heads, HEADS_AT_ONCE)


def latent_parts(bounds: StepBounds) -> tuple[StepBounds, ...]:
    """Cut the largest step into parts of ROWS_AT_ONCE rows; a decode step has one."""
    starts = range(0, bounds.max_num_rows, ROWS_AT_ONCE)
    rows = (min(ROWS_AT_ONCE, bounds.max_num_rows - start) for start in starts)
    return tuple(StepBounds(min(bounds.max_num_seqs, count), count, bounds.page_tokens) for count in rows)


def latent_partials(spec: AttentionSpec, bounds: StepBounds) -> int:
    """Count the split-KV partials of a part of a step: capped by rows and by rows times heads."""
    return min(max_partials(spec.max_model_len, latent_parts(bounds)[0]), PARTIAL_HEAD_ROWS // spec.num_heads)


def max_latent_tiles(spec: AttentionSpec, part: StepBounds) -> int:
    """Count the tiles of the largest part of a step, as `max_tiles` of grouped attention does."""
    rows_per_tile = latent_geometry(spec.num_heads).large_rows
    tiles = -(-part.max_num_rows // rows_per_tile) + min(part.max_num_seqs, part.max_num_rows)
    return tiles + latent_partials(spec, part)

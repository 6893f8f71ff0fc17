"""Backends of compressed attention (DeepSeek-V4), as the planner sees them: Triton and plain torch; no torch of its own."""

from collections.abc import Sequence

from holdfast.attention.declarations import (
    BLOCK_TOKENS,
    SELECTED,
    AttentionSpec,
    BackendDeclaration,
    StepBounds,
    index_term,
    partial_specs,
    unsupported_device,
    unsupported_pages,
)
from holdfast.families.compressed.spec import CompressedAttentionSpec
from holdfast.families.sparse.declarations import selection_specs
from holdfast.kernels.geometry import MAX_LATENT_DIM
from holdfast.kernels.latent.latent_geometry import compressed_partials
from holdfast.kernels.latent.top_k_geometry import unsupported_top_k
from holdfast.memory.planner import Term
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import COMPRESSED_FORMATS, bytes_for

BLOCK_ROWS = 8
"""Rows that plain torch attends for at once: not by heads, because ranks that share those take equal blocks."""


class TritonCompressedDeclaration(BackendDeclaration):
    """Triton kernels over windows and entries on a GPU."""

    name = "triton_compressed"
    can_be_captured = True

    def unsupported(self, spec: AttentionSpec) -> str | None:
        own, cache = compressed(spec), spec.cache
        if declined := unsupported_device(spec) or unsupported_pages(spec):
            return declined
        if cache.format.is_quantized and cache.format.name not in COMPRESSED_FORMATS:
            return f"the format {cache.format.name} is not one of windows and entries"
        if cache.head_dim > MAX_LATENT_DIM or cache.head_dim % 2:
            return f"head_dim is {cache.head_dim}, and an even number up to {MAX_LATENT_DIM} is computed"
        return unsupported_top_k(own.index_top_k, own.most_entries) if own.is_overlapped else None

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """Declare partials for few rows, and scratch for choosing among all entries if rows choose."""
        heads, dim = specs[0].num_heads, specs[0].cache.head_dim
        num_partials = compressed_partials(bounds.max_num_rows, heads)
        partials = partial_specs(
            num_partials, heads, heads * dim, "float32" if specs[0].dtype == "float32" else "float16"
        )
        spec = choosing_spec(specs)
        if spec is None or spec.entries is None:
            return partials
        index = spec.index_heads, spec.entries.index_dim, spec.index_top_k
        return (*partials, *selection_specs(*index, spec.most_entries, bounds))

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        num_bytes = bytes_for("int32", (3, bounds.max_num_rows))
        return (Term("attention/rows", num_bytes, "sequence, position and number of entries of each row"),)


class TorchCompressedDeclaration(BackendDeclaration):
    """Plain torch over windows and entries, anywhere."""

    name = "torch_compressed"

    def unsupported(self, spec: AttentionSpec) -> str | None:
        return None

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """Declare the choice of every row; nothing if no context is long enough."""
        spec = choosing_spec(specs)
        return () if spec is None else (TensorSpec(SELECTED, (bounds.max_num_rows * spec.index_top_k,), "int32"),)

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        spec, tokens = specs[0], BLOCK_TOKENS
        head_rows, dim = BLOCK_ROWS * spec.num_heads, spec.cache.head_dim
        num_elements = 5 * head_rows * tokens + 6 * head_rows * dim + 4 * tokens * dim
        reason = f"scores of {BLOCK_ROWS} rows against {tokens} vectors at a time, and what they are made of"
        blocks = Term("attention/blocks", bytes_for("float32", (num_elements,)), reason)
        for own in map(compressed, specs):
            if own.entries is not None and own.index_heads:
                return blocks, index_term(own.index_heads, own.entries.index_dim, own.most_entries, "entries")
        return (blocks,)


DECLARATIONS = TritonCompressedDeclaration(), TorchCompressedDeclaration()


def compressed(spec: AttentionSpec) -> CompressedAttentionSpec:
    """Narrow the type of a layer that belongs to this family."""
    assert isinstance(spec, CompressedAttentionSpec), f"{type(spec).__name__} has no entries"
    return spec


def choosing_spec(specs: Sequence[AttentionSpec]) -> CompressedAttentionSpec | None:
    """Return a layer whose rows choose entries; None if no context has more entries than a row attends to."""
    return next((own for own in map(compressed, specs) if own.can_choose), None)

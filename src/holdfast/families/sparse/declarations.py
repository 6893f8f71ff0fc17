"""Backends of sparse latent attention (DSA), as the planner sees them: Triton and plain torch; no torch of its own."""

from collections.abc import Sequence

from holdfast.attention.declarations import (
    SELECTED,
    AttentionSpec,
    StepBounds,
    index_term,
    score_columns,
    score_rows,
)
from holdfast.families.latent.declarations import (
    TorchLatentDeclaration,
    TritonLatentDeclaration,
    latent_partials,
    latent_parts,
)
from holdfast.families.sparse.spec import SparseAttentionSpec
from holdfast.kernels.latent.latent_geometry import sparse_partials
from holdfast.kernels.latent.top_k_geometry import top_k_specs, unsupported_top_k
from holdfast.memory.planner import Term
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import bytes_for


class TritonSparseDeclaration(TritonLatentDeclaration):
    """Triton kernels over pages of latents with an index, on a GPU."""

    name = "triton_sparse"

    def unsupported(self, spec: AttentionSpec) -> str | None:
        return super().unsupported(spec) or unsupported_top_k(sparse(spec).index_top_k, spec.max_model_len)

    def num_partials(self, spec: AttentionSpec, bounds: StepBounds) -> int:
        if not sparse(spec).can_choose:
            return super().num_partials(spec, bounds)
        rows = latent_parts(bounds)[0].max_num_rows
        return max(latent_partials(spec, bounds), sparse_partials(rows, spec.num_heads))

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """Declare the scratch of all latents, and of a choice among all tokens of the context."""
        dense, spec = super().scratch(specs, bounds), sparse(specs[0])
        if not spec.can_choose:
            return dense
        # The partials come last, in the order that every plan has used.
        partials = [one for one in dense if one.name.startswith("partial_")]
        others = [one for one in dense if one not in partials]
        choice = selection_specs(spec.index_heads, spec.cache.index_dim, spec.index_top_k, spec.max_model_len, bounds)
        return (*others, *partials, *choice)

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        num_bytes = bytes_for("int32", (2, bounds.max_num_rows))
        rows = Term("attention/index_rows", num_bytes, "which rows choose their tokens, and from how many")
        return (*super().terms(specs, bounds), rows)


class TorchSparseDeclaration(TorchLatentDeclaration):
    """Plain torch over pages of latents with an index, anywhere."""

    name = "torch_sparse"

    def unsupported(self, spec: AttentionSpec) -> str | None:
        # A GPU without kernels for the choice would be slow and without graphs, for no visible reason.
        top_k = sparse(spec).index_top_k
        declined = unsupported_top_k(top_k, spec.max_model_len) if spec.device_kind == "cuda" else None
        return declined or super().unsupported(spec)

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """Declare the choice of every row; nothing if no context is long enough."""
        spec = sparse(specs[0])
        return (TensorSpec(SELECTED, (bounds.max_num_rows * spec.index_top_k,), "int32"),) if spec.can_choose else ()

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        spec = sparse(specs[0])
        index = index_term(spec.index_heads, spec.cache.index_dim, spec.max_model_len, "tokens")
        return (*super().terms(specs, bounds), index)


DECLARATIONS = TritonSparseDeclaration(), TorchSparseDeclaration()


def sparse(spec: AttentionSpec) -> SparseAttentionSpec:
    """Narrow the type of a layer that belongs to this family."""
    assert isinstance(spec, SparseAttentionSpec), f"{type(spec).__name__} has no index"
    return spec


def selection_specs(
    index_heads: int, index_dim: int, top_k: int, num_keys: int, bounds: StepBounds
) -> tuple[TensorSpec, ...]:
    """Declare what GPU kernels choose `top_k` of up to `num_keys` keys in: lists, scores of some rows, quantized queries."""
    rows, columns = score_rows(num_keys, bounds), score_columns(num_keys)
    queries = rows, index_heads, index_dim
    return (
        TensorSpec(SELECTED, (bounds.max_num_rows * top_k,), "int32"),
        TensorSpec("index_scores", (rows * columns,), "float32"),
        TensorSpec("index_codes", queries, "float8_e4m3fn"),
        TensorSpec("index_factors", queries[:2], "float32"),
        *top_k_specs(rows, columns, top_k),
    )

"""Refusals of bitwise equality: what batches or ranks compute differently from one sequence on one rank; no torch.

    refuse_inequality                                 tensor_parallel_sums=exact: shares of weights and heads that use other kernels
    refuse_variant_weights, refuse_variant_attention  batch_invariant: products or attention that round by the batch
    row_sizes                                         the row counts to which steps of batch_invariant are padded

These follow from shapes, before anything is read. At load time runner/invariance.py compares the products on the device.
"""

from holdfast.attention.declarations import BackendDeclaration
from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.target import Target
from holdfast.quant.weight_schemes import WeightRecipe

INVARIANT_ROWS = 16
"""From this many rows cuBLAS multiplies a row the same way whatever the others are, given a small workspace."""
EXACT_ROWS = {4: INVARIANT_ROWS, 8: 64}
"""By number of ranks: the fewest rows of a largest step. Above it, startup compares: among 8 ranks an H200 multiplied
by shares of large weights as by whole weights from 26 rows, by small ones from 128 (benchmarks/gpu_invariance.py)."""

EXACT_ENTRY_RANKS = (2, 4)
"""Numbers of ranks whose products by groups of heads were compared on an H200; those of 8 ranks differ."""
MOST_EXACT_ROWS = 512
"""Most rows of an exact step of compressed attention, so that a start can compare products at every number of rows."""


def exact_rows(num_ranks: int) -> int | None:
    """Return the fewest rows that a largest step may have; None if so many ranks were never measured."""
    return next((rows for ranks, rows in EXACT_ROWS.items() if num_ranks <= ranks), None)


def row_sizes(most_rows: int, most_logits: int) -> tuple[int, ...]:
    """Return the row counts of steps on a GPU: those of graphs, and above them few enough that a start compares all.

    `most_logits`, the most sampled rows, is one of them.
    """
    ladder = (*range(INVARIANT_ROWS, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, most_rows, 256))
    return tuple(sorted({*(size for size in ladder if size < most_rows), min(most_logits, most_rows), most_rows}))


def refuse_inequality(
    config: EngineConfig, declared: DeclaredModel, most_rows: int, target: Target, mesh: Mesh
) -> None:
    """Refuse exact sums if ranks on a GPU would not compute what one rank does."""
    if not mesh.is_exact or target.kind != "cuda":
        return
    if declared.is_compressed:
        _refuse_unequal_entries(config, declared, most_rows, mesh)
        return
    name, value = "tensor_parallel_sums", config.tensor_parallel_sums
    if not config.batch_invariant:
        raise ConfigError("plan.exact_needs_invariance", name=name, value=value)
    heads, size = declared.num_kv_heads, mesh.tensor_size
    if size > heads:
        raise ConfigError("plan.exact_needs_fewer_ranks", name=name, value=value, num_ranks=size, num_kv_heads=heads)
    least_rows = exact_rows(size)
    if least_rows is None:
        raise ConfigError("plan.exact_never_measured", name=name, value=value, num_ranks=size)
    if most_rows < least_rows:
        rows = {"minimum": least_rows, "maximum": most_rows}
        raise ConfigError("plan.exact_needs_more_rows", name=name, value=value, num_ranks=size, **rows)


def _refuse_unequal_entries(config: EngineConfig, declared: DeclaredModel, most_rows: int, mesh: Mesh) -> None:
    """Refuse exact sums of compressed attention unless a rank computes its experts and rows as one rank does.

    It has no batch_invariant, so steps have any number of rows, and a start compares products at each.
    """
    values = {"name": "tensor_parallel_sums", "value": config.tensor_parallel_sums, "num_ranks": mesh.tensor_size}
    if mesh.tensor_size not in EXACT_ENTRY_RANKS:
        raise ConfigError("plan.exact_never_measured", **values)
    if mesh.expert_size == 1:
        raise ConfigError("plan.exact_needs_whole_experts", **values, model=declared.name)
    if most_rows > MOST_EXACT_ROWS:
        raise ConfigError("plan.exact_needs_fewer_rows", **values, rows=most_rows, maximum=MOST_EXACT_ROWS)


def refuse_variant_weights(config: EngineConfig, recipe: WeightRecipe, target: Target) -> None:
    """Refuse batch_invariant with quantized weights on a GPU."""
    if config.batch_invariant and recipe.scheme is not None and target.kind == "cuda":
        raise ConfigError("plan.variant_weights", name="batch_invariant", scheme=recipe.scheme.name)


def refuse_variant_attention(
    config: EngineConfig, declared: DeclaredModel, dtype: str, target: Target, declaration: BackendDeclaration | None
) -> None:
    """Refuse batch_invariant if attention rounds a row by what else is in its batch."""
    if not config.batch_invariant or declaration is None:
        return
    if config.speculative is not None and target.kind != "cpu":
        raise ConfigError("plan.variant_draft_tokens", name="batch_invariant", value=config.speculative)
    if declaration.can_be_invariant:
        return
    fix = "Run in half precision on a GPU or in float32 on a CPU with a C compiler, or leave it out."
    if declared.is_compressed or declared.keeps_latents:
        kind = "compressed attention" if declared.is_compressed else "latents (MLA)"
        fix = f"Leave it out: no such kernel exists for {kind}."
    elif target.kind == "cpu" and config.kv_cache_dtype not in ("auto", dtype):
        fix = f"On a CPU take kv_cache_dtype=auto in place of {config.kv_cache_dtype}, or leave it out."
    values = {"backend": declaration.name, "dtype": dtype, "device": target.name, "fix": fix}
    raise ConfigError("plan.variant_attention", name="batch_invariant", **values)

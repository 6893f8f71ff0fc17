"""Answers to the bit: what a batch, or several ranks, cannot compute as one sequence on one rank does, declined by shapes alone; no torch.

    refuse_inequality                                 tensor_parallel_sums=exact: shares of weights and heads that take other kernels
    refuse_variant_weights, refuse_variant_attention  batch_invariant: products or attention that add up otherwise in other company

    row_sizes                                         the few numbers of rows that steps of batch_invariant are padded to

Plans and starts ask here before anything is read. What only a device can tell, products of the shapes at hand, a start compares
when it loads (runner/invariance.py).
"""

from holdfast.attention.declarations import BackendDeclaration
from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.resolve import Resolved
from holdfast.planning.target import Target

INVARIANT_ROWS = 16
"""From this many rows on cuBLAS has kernels that multiply a row the same way whatever the others are, given a small workspace."""
EXACT_ROWS = {4: INVARIANT_ROWS, 8: 64}
"""By the most ranks: engines whose steps have fewer rows are declined before anything is read. Above, a start compares: an H200
multiplied by shares of large weights as by all of them from 26 rows on among 8 ranks, by small ones from 128 (benchmarks/gpu_invariance.py)."""


def exact_rows(num_ranks: int) -> int | None:
    """The fewest rows that a largest step may have; None where nobody has measured so many ranks."""
    return next((rows for ranks, rows in EXACT_ROWS.items() if num_ranks <= ranks), None)


def row_sizes(most_rows: int, most_logits: int) -> tuple[int, ...]:
    """Rows that a step may have on a GPU, and wanted ones among them, which are at most `most_logits` beside a prompt's: those of
    graphs, and beyond them few enough that a start compares all."""
    ladder = (*range(INVARIANT_ROWS, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, most_rows, 256))
    return tuple(sorted({*(size for size in ladder if size < most_rows), min(most_logits, most_rows), most_rows}))


def refuse_inequality(
    config: EngineConfig, declared: DeclaredModel, resolved: Resolved, target: Target, mesh: Mesh
) -> None:
    """What ranks that gather would not compute on a GPU as one rank does."""
    if not mesh.is_exact or target.kind != "cuda":
        return
    if not config.batch_invariant:
        has = "on a GPU products of few rows take kernels that cut a sum by the size of a weight, which ranks change"
        raise ConfigError("tensor_parallel_sums=exact was asked", has, "add batch_invariant=True, or leave it out")
    way = "exact" if config.tensor_parallel_sums == "exact" else "auto, with batch_invariant exact,"
    asked, num_kv_heads = f"tensor_parallel_sums={way} was asked of {mesh.tensor_size} ranks", declared.num_kv_heads
    if mesh.tensor_size > num_kv_heads:
        raise ConfigError(
            asked,
            f"they share {num_kv_heads} key heads, each with fewer query heads: attention takes other tiles on a GPU",
            f"take {'one rank' if num_kv_heads == 1 else f'at most {num_kv_heads} ranks'}, or tensor_parallel_sums=reduce",
        )
    least_rows, most_rows = exact_rows(mesh.tensor_size), resolved.limits.max_num_batched_tokens
    if least_rows is None or most_rows < least_rows:
        few = f"may differ from that by all of it below {least_rows} rows, and a step has at most {most_rows}"
        raise ConfigError(
            asked,
            f"the product of cuBLAS by a share of a weight {'was never compared' if least_rows is None else few}",
            "take 2 or 4 ranks, steps of more tokens, or tensor_parallel_sums=reduce",
        )


def refuse_variant_weights(config: EngineConfig, resolved: Resolved, target: Target) -> None:
    """Products of quantized weights on a GPU, where batches are to change nothing."""
    scheme = resolved.recipe.scheme
    if config.batch_invariant and scheme is not None and target.kind == "cuda":
        raise ConfigError(
            "batch_invariant=True was asked",
            f"products with weights in {scheme.name} choose their kernels by the number of rows on a GPU",
            "leave out batch_invariant, or take the model without quantized weights",
        )


def refuse_variant_attention(
    config: EngineConfig, declared: DeclaredModel, resolved: Resolved, declaration: BackendDeclaration | None
) -> None:
    """Attention that rounds a row by what else is in its batch, where batches are to change nothing."""
    if not config.batch_invariant or declaration is None:
        return
    if resolved.num_proposals and resolved.device != "cpu":
        raise ConfigError(
            f"batch_invariant=True and speculative={config.speculative} were asked",
            "on a GPU tokens that are guessed are computed beside each other, which rounds differently than one by one",
            "leave out one of them",
        )
    if declaration.can_be_invariant:
        return
    raise ConfigError(
        "batch_invariant=True was asked",
        f"{declaration.name} in {resolved.dtype} on {resolved.device} rounds differently in other company",
        "leave it out: compressed attention has no such kernels"
        if declared.is_compressed
        else "leave it out: latents (MLA) have no such kernels"
        if declared.keeps_latents
        else "run in half precision on a GPU, in float32 on a CPU with a C compiler, or leave it out",
    )

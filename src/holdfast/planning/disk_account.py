"""What the files of a model take on disk and its weights in memory, as a plan has settled them; no torch."""

from dataclasses import replace

from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.memory.on_disk import DiskAccount
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.resolve import Resolved, with_stored_embedding
from holdfast.quant.weight_schemes import INT8


def disk_account(declared: DeclaredModel, resolved: Resolved, mesh: Mesh = ALONE) -> DiskAccount | None:
    """None for a model whose files have not been read, or whose stored types are those that it is kept in."""
    on_disk, recipe = declared.on_disk, resolved.recipe
    if on_disk is None:
        return None
    memory_bytes = declared.weight_bytes(resolved.dtype, recipe, mesh)
    if recipe.scheme is not None:
        return DiskAccount(on_disk, memory_bytes, resolved.dtype, recipe.scheme.name)
    other = with_stored_embedding(replace(recipe, scheme=INT8), declared)
    other_bytes = declared.weight_bytes(resolved.dtype, other, mesh)
    return DiskAccount(on_disk, memory_bytes, resolved.dtype, None, INT8.name, other_bytes)

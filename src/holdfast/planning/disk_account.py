"""What the files of a model take on disk and its weights in memory, as a plan has settled them; no torch."""

from dataclasses import replace

from holdfast.distributed.mesh import Mesh
from holdfast.memory.on_disk import DiskAccount
from holdfast.planning.resolve import Resolved, with_stored_embedding
from holdfast.quant.weight_schemes import INT8


def disk_account(resolved: Resolved, mesh: Mesh | None = None) -> DiskAccount | None:
    """Return the account of a rank's share; None if the files were not read, or store the types that memory holds.

    `mesh` is another share than the rank's own, such as the whole model.
    """
    declared, recipe, mesh = resolved.declared, resolved.recipe, mesh or resolved.mesh
    if declared.on_disk is None:
        return None
    memory_bytes = declared.weight_bytes(resolved.dtype, recipe, mesh)
    if recipe.scheme is not None:
        return DiskAccount(declared.on_disk, memory_bytes, resolved.dtype, recipe.scheme.name)
    other = with_stored_embedding(replace(recipe, scheme=INT8), declared)
    other_bytes = declared.weight_bytes(resolved.dtype, other, mesh)
    return DiskAccount(declared.on_disk, memory_bytes, resolved.dtype, None, INT8.name, other_bytes)

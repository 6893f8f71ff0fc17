"""The attention backend of a model: the first of its family's that supports every layer; no torch of its own."""

from collections.abc import Sequence

from holdfast.attention.declarations import AttentionSpec, BackendDeclaration
from holdfast.errors import UnsupportedModelError
from holdfast.families.compressed import declarations as compressed
from holdfast.families.compressed.spec import CompressedAttentionSpec
from holdfast.families.grouped import declarations as grouped
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.families.latent import declarations as latent
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.families.sparse import declarations as sparse
from holdfast.families.sparse.spec import SparseAttentionSpec

DECLARATIONS: dict[type[AttentionSpec], tuple[BackendDeclaration, ...]] = {
    GroupedAttentionSpec: grouped.DECLARATIONS,
    LatentAttentionSpec: latent.DECLARATIONS,
    SparseAttentionSpec: sparse.DECLARATIONS,
    CompressedAttentionSpec: compressed.DECLARATIONS,
}
"""By family, the fastest first."""


def choose_declaration(specs: Sequence[AttentionSpec]) -> BackendDeclaration:
    """Return the first backend of the family that supports every layer, or raise with the reasons of all."""
    declined = []
    for declaration in DECLARATIONS[type(specs[0])]:
        reasons = {reason: None for spec in specs if (reason := declaration.unsupported(spec)) is not None}
        if not reasons:
            return declaration
        declined.append(f"{declaration.name}: {', '.join(reasons)}")
    raise UnsupportedModelError("attention.no_backend", reasons="; ".join(declined))

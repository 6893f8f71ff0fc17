"""The attention backend of a model: the first of each family's that supports every layer; no torch of its own."""

from collections.abc import Callable, Sequence
from typing import TypeVar

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
from holdfast.families.state import declarations as state
from holdfast.families.state.spec import StateLayers

DECLARATIONS: dict[type[AttentionSpec], tuple[BackendDeclaration, ...]] = {
    GroupedAttentionSpec: grouped.DECLARATIONS,
    LatentAttentionSpec: latent.DECLARATIONS,
    SparseAttentionSpec: sparse.DECLARATIONS,
    CompressedAttentionSpec: compressed.DECLARATIONS,
}
"""By family, the fastest first."""
DeclarationT = TypeVar("DeclarationT", BackendDeclaration, state.StateDeclaration)


def choose_declaration(specs: Sequence[AttentionSpec], states: StateLayers | None = None) -> BackendDeclaration:
    """Return the first backend of the family that supports every layer, or raise with the reasons of all.

    `states`: other layers, which keep states. The result is then a backend for each of the two kinds.
    """

    def reasons(declaration: BackendDeclaration) -> list[str]:
        found = (declaration.unsupported(spec) for spec in specs)
        return list(dict.fromkeys(reason for reason in found if reason is not None))

    attention = _first(DECLARATIONS[type(specs[0])], reasons)
    if states is None:
        return attention
    own = _first(state.DECLARATIONS, lambda one: [reason for reason in [one.unsupported(states)] if reason])
    return state.HybridDeclaration(attention, own, states)


def _first(declarations: Sequence[DeclarationT], reasons: Callable[[DeclarationT], list[str]]) -> DeclarationT:
    """Return the first declaration without a reason against it."""
    declined = []
    for declaration in declarations:
        found = reasons(declaration)
        if not found:
            return declaration
        declined.append(f"{declaration.name}: {', '.join(found)}")
    raise UnsupportedModelError("attention.no_backend", reasons="; ".join(declined))

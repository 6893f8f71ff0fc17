"""Places: what a sequence keeps outside its pages, whatever its length: kinds of states and their terms; no torch.

Places 0 .. max_num_seqs - 1 are the runner's slots. Snapshots of states follow them, if the prefix cache keeps some.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.memory.planner import PAGE_PHASES, Term
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import bytes_for

STATE_OWNER = "kv state"
CONV, RECURRENT = "conv", "recurrent"
"""Names of the two parts of a gated delta net's state."""


class PlaceKind(Protocol):
    """Layers whose states have one shape: one tensor, [layers, places, ...]."""

    @property
    def name(self) -> str: ...

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def what(self) -> str:
        """Noun of a plan's line."""
        ...

    @property
    def place_bytes(self) -> int:
        """Bytes of a place in all of these layers."""
        ...

    def tensor(self, num_places: int) -> TensorSpec:
        """Return the tensor of `num_places` places."""
        ...


class StatePart(NamedTuple):
    """A tensor that state layers keep of each sequence: the inputs of a convolution, or a recurrent state."""

    name: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of one place in one layer."""
    dtype: str

    @property
    def what(self) -> str:
        return f"{self.name} states"

    @property
    def place_bytes(self) -> int:
        return len(self.layers) * bytes_for(self.dtype, self.shape)

    def tensor(self, num_places: int) -> TensorSpec:
        return TensorSpec(self.name, (len(self.layers), num_places, *self.shape), self.dtype)


def place_bytes(kinds: Sequence[PlaceKind]) -> int:
    """Return the state bytes of one sequence."""
    return sum(kind.place_bytes for kind in kinds)


def state_terms(kinds: Sequence[PlaceKind], num_slots: int, num_snapshots: int = 0) -> tuple[Term, ...]:
    """Return the plan's terms for what StateStorage allocates."""
    num_places = num_slots + num_snapshots
    owners = "1 sequence" if num_slots == 1 else f"{num_slots} sequences"
    owners += f" and {num_snapshots} snapshots" if num_snapshots else ""
    return tuple(
        Term(
            f"{STATE_OWNER}/{kind.tensor(num_places).name}",
            kind.tensor(num_places).aligned_bytes,
            f"{kind.what} of {owners} in {len(kind.layers)} layers",
            PAGE_PHASES,
        )
        for kind in kinds
    )

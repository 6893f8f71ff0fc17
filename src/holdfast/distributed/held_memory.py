"""HeldMemory: tensors of an exchange: two alternating buffers, logits, signals, rows between stages.

distributed/exchange_plan.py declares them; each has its line in the ledger.
"""

from collections.abc import Mapping

import torch

from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.mesh import Mesh
from holdfast.memory.arena import Arena
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import TensorSpec


class HeldMemory:
    """The tensors, and which buffer is next."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], needs: ExchangeNeeds, mesh: Mesh) -> None:
        self.tensors = dict(tensors)
        self.needs = needs
        self.mesh = mesh
        self.turn = 0
        """Index of the next buffer."""

    def room(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the next buffer."""
        return self.room_at(self.turn, num_rows, width, dtype)

    def room_at(self, turn: int, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of one of the two buffers."""
        room = self.tensors["exchange/rows"][turn]
        num_bytes = num_rows * width * dtype.itemsize
        assert num_bytes <= room.nbytes, f"[{num_rows}, {width}] {dtype} in a room of {room.nbytes} bytes"
        return room[:num_bytes].view(dtype).view(num_rows, width)

    def take(self, part: torch.Tensor) -> int:
        """Return the part's buffer index, and switch to the other."""
        turn = self.turn
        begin = self.tensors["exchange/rows"][turn].data_ptr()
        assert part.is_contiguous(), f"{part.shape=} {part.stride()=} is not dense"
        assert not part.numel() or part.data_ptr() == begin, "a part must lie in the last room"
        self.turn = 1 - turn
        return turn

    def share_width(self, rank: int) -> int:
        """Count the logit columns of a tensor rank."""
        share = self.needs.vocab_share(self.mesh)
        return max(0, min(share, self.needs.vocab_size - rank * share))

    def share_room(self, num_rows: int, width: int) -> torch.Tensor:
        """Return the buffer of a share of the logits: [num_rows, width]."""
        return self.tensors["exchange/logits"][: num_rows * width].view(num_rows, width)

    def whole_logits(self, num_rows: int) -> torch.Tensor:
        """Return the buffer of whole logits: [num_rows, W], on rank 0."""
        assert self.mesh.rank == 0, f"whole logits are rank 0's; this is {self.mesh.rank}"
        return self.tensors["exchange/whole_logits"][:num_rows]

    def hidden_slot(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        """Return a slot for rows between stages, in the shape of `like`."""
        place = self.tensors["pipeline/hidden"][slot % self.mesh.num_stages]
        assert like.nbytes <= place.nbytes, f"{like.shape=} in a slot of {place.nbytes} bytes"
        return place[: like.nbytes].view(like.dtype).view(like.shape)


class HeldExchange:
    """The part of an exchange (distributed/exchange.py) that depends on its memory alone."""

    def __init__(self, held: HeldMemory) -> None:
        self._held = held
        self.mesh = held.mesh

    @property
    def rank(self) -> int:
        return self.mesh.tensor_rank

    @property
    def size(self) -> int:
        return self.mesh.tensor_size

    def room(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return self._held.room(num_rows, width, dtype)

    def whole_logits(self, num_rows: int) -> torch.Tensor:
        return self._held.whole_logits(num_rows)


def allocate_held(
    specs: Mapping[str, TensorSpec], device: torch.device, ledger: Ledger, reason: str
) -> tuple[dict[str, torch.Tensor], list[Arena]]:
    """Allocate an arena for each group of owners; return tensors by owner."""
    groups: dict[str, list[TensorSpec]] = {}
    for owner, spec in specs.items():
        group, _, name = owner.partition("/")
        assert name == spec.name, f"{owner=} {spec.name=}"
        groups.setdefault(group, []).append(spec)
    arenas = {group: Arena(group, tuple(members), device, ledger, reason) for group, members in groups.items()}
    tensors = {f"{group}/{name}": tensor for group, arena in arenas.items() for name, tensor in arena.tensors.items()}
    return tensors, list(arenas.values())

"""Scratch memory that stays from call to call, in three states: NaN, zeros, and what an earlier call left."""

from enum import StrEnum
from typing import TYPE_CHECKING

from red_zones import RedZones

if TYPE_CHECKING:
    import torch

ROOM = 4
"""Times the first call's need: later calls may be longer."""


class Poison(StrEnum):
    """What memory holds before a call."""

    NAN = "nan"
    """Every byte is 0xFF: NaN in each float type, -1 in each signed integer."""
    ZEROS = "zeros"
    LEFTOVERS = "leftovers"
    """Plausible numbers: another call with other inputs wrote them."""


class Memory:
    """Tensors by name. A second call gets the same addresses, with the first call's results in them."""

    def __init__(self, device: "torch.device", poison: Poison = Poison.NAN) -> None:
        """LEFTOVERS begins with NaN: the test makes an earlier call."""
        self.device = device
        self._byte = 0 if poison is Poison.ZEROS else 0xFF
        self._zones = RedZones(device)
        self._bodies: dict[str, torch.Tensor] = {}
        self._tails: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(
        self, name: str, *shape: int, dtype: "torch.dtype | None" = None, is_counter: bool = False
    ) -> "torch.Tensor":
        """Return the tensor of this name. A counter begins with zeros, as the engine hands it out; calls have to reset it."""
        import torch

        dtype = dtype or torch.float32
        num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        if name not in self._bodies:
            body = self._zones.allocate(-(-ROOM * num_bytes // 1024) * 1024 + 1024, dtype=torch.uint8)
            self._bodies[name] = body if is_counter else body.fill_(self._byte)
        body = self._bodies[name]
        assert num_bytes <= len(body), f"{name}: {shape} is more than {ROOM} times the first call's need"
        self._tails[name] = body[num_bytes:], body[num_bytes:].clone()
        return body[:num_bytes].view(dtype).view(shape)

    def check(self) -> None:
        """Check that calls wrote inside their tensors."""
        self._zones.check()
        for name, (tail, before) in self._tails.items():
            assert bool((tail == before).all()), f"{name} was written after its end"

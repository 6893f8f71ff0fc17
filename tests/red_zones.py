"""Tensors between two red zones: a write at slot -1 or one row too far is found instead of landing in silence."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GUARD_BYTES = 1024
"""Size of each red zone: a multiple of every alignment that kernels need."""
CANARY = 0xA5


class RedZones:
    """Hands out guarded tensors and knows their red zones."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._zones: list[tuple[str, torch.Tensor]] = []

    def allocate(self, *shape: int, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """A zeroed tensor with a red zone on both sides."""
        import torch

        dtype = dtype or torch.float32
        num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        buffer = torch.full((GUARD_BYTES + num_bytes + GUARD_BYTES,), CANARY, dtype=torch.uint8, device=self._device)
        self._zones.append((f"before a tensor of {shape} {dtype}", buffer[:GUARD_BYTES]))
        self._zones.append((f"after a tensor of {shape} {dtype}", buffer[GUARD_BYTES + num_bytes :]))
        body = buffer[GUARD_BYTES : GUARD_BYTES + num_bytes]
        body.zero_()
        return body.view(dtype).view(shape)

    def check(self) -> None:
        """Every red zone is as it was."""
        for place, zone in self._zones:
            changed = (zone != CANARY).nonzero().flatten().tolist()
            assert not changed, f"{len(changed)} bytes were written {place}, first at byte {changed[0]} of the red zone"

"""Arena: one allocation for many tensors, each a view at an aligned place with a line in the ledger."""

import torch

from holdfast.memory.ledger import Ledger
from holdfast.memory.tensor_spec import ALIGNMENT_BYTES, TensorSpec, arena_bytes

CPU_PAGE_BYTES = 4096
UNWRITTEN = 0xFF
"""What touching leaves in a byte of each page: the byte that torch fills unwritten memory with when asked to, so that
such memory stays NaN in every float."""


class Arena:
    """Tensors one after the other in the order of their specs. It never grows, and nothing in it moves."""

    def __init__(
        self, owner: str, specs: tuple[TensorSpec, ...], device: torch.device, ledger: Ledger, reason: str
    ) -> None:
        wrong = [f"{spec.name}: {spec.problem}" for spec in specs if spec.problem is not None]
        assert not wrong, f"{owner} cannot be laid out: {wrong}"
        assert len({spec.name for spec in specs}) == len(specs), f"{owner}: a name comes twice in {specs}"
        self.num_bytes = arena_bytes(specs)
        self._ledger = ledger
        buffer = allocate_bytes(self.num_bytes, device)
        self.tensors: dict[str, torch.Tensor] = dict(
            zip((spec.name for spec in specs), views_of(buffer, specs), strict=True)
        )
        self._owners: list[str] = []
        for spec in specs:
            # The bytes that it occupies, so that the ledger adds up to what was allocated.
            ledger.record(f"{owner}/{spec.name}", spec.aligned_bytes, reason)
            self._owners.append(f"{owner}/{spec.name}")

    def release(self) -> None:
        """Out of the ledger, and free as soon as nobody has a view; again is nothing."""
        self.tensors.clear()
        while self._owners:
            self._ledger.release(self._owners.pop())


def allocate_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Aligned bytes. On a CPU they are touched: a system that promises more than it has would take it back at the worst time."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    # A CPU allocator aligns less; through numpy the few bytes around stay out of the tensor's storage.
    around = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    start = -around.data_ptr() % ALIGNMENT_BYTES
    buffer = torch.from_numpy(around.numpy()[start : start + num_bytes])
    buffer[::CPU_PAGE_BYTES].fill_(UNWRITTEN)
    return buffer


def views_of(buffer: torch.Tensor, specs: tuple[TensorSpec, ...]) -> tuple[torch.Tensor, ...]:
    """A view for each spec, one behind the other, each at an aligned place."""
    views = []
    start = 0
    for spec in specs:
        views.append(buffer[start : start + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape))
        start += spec.aligned_bytes
    return tuple(views)

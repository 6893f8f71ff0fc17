"""Arena: one allocation for many tensors, each a view at an aligned place with a line in the ledger."""

import mmap
from contextlib import suppress

import torch

from holdfast.memory.ledger import Ledger
from holdfast.memory.tensor_spec import ALIGNMENT_BYTES, TensorSpec, arena_bytes

CPU_PAGE_BYTES = 4096
MAPPED_BYTES = 2**20
"""From here on an arena on a CPU is a mapping of its own."""
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
    if num_bytes >= MAPPED_BYTES:
        buffer = _mapped(num_bytes)
        buffer[::CPU_PAGE_BYTES].fill_(UNWRITTEN)
        return buffer
    # A CPU allocator aligns less; through numpy the few bytes around stay out of the tensor's storage.
    around = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    start = -around.data_ptr() % ALIGNMENT_BYTES
    buffer = torch.from_numpy(around.numpy()[start : start + num_bytes])
    buffer[::CPU_PAGE_BYTES].fill_(UNWRITTEN)
    return buffer


def _mapped(num_bytes: int) -> torch.Tensor:
    """Memory straight from the system, in large pages where it has them: it goes back when the last view is gone.

    torch's own allocator for CPUs keeps what was freed, where neither another process nor the next plan can see it.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise RuntimeError(f"{num_bytes} bytes could not be allocated: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def views_of(buffer: torch.Tensor, specs: tuple[TensorSpec, ...]) -> tuple[torch.Tensor, ...]:
    """A view for each spec, one behind the other, each at an aligned place."""
    views = []
    start = 0
    for spec in specs:
        views.append(buffer[start : start + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape))
        start += spec.aligned_bytes
    return tuple(views)

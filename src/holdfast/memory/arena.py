"""Arena: one allocation for many tensors, each a view and a ledger line; MirroredTensor: a pinned host copy.

**A device that has failed** does no more work for this process, and freeing pinned or symmetric memory would end the
process: torch synchronizes with the device first, and its error is thrown in a destructor. Such memory is kept until
the process ends (`has_failed`, `keep_with_process`).
"""

import ctypes
from collections.abc import Iterable

import torch

from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES, TensorSpec, arena_bytes

CPU_PAGE_BYTES = 4096
UNWRITTEN = 0xFF
"""Byte written to each page: torch can fill unwritten memory with it too, so it stays NaN in every float."""
OUT_OF_MEMORY = ("out of memory", "allocate", "ALLOC_FAILED")
"""Phrases of torch, the driver, cuBLAS, mmap and the CPU allocator; not all have an exception class."""


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
            # Bytes with alignment, so that the ledger adds up to what was allocated.
            ledger.record(f"{owner}/{spec.name}", spec.aligned_bytes, reason)
            self._owners.append(f"{owner}/{spec.name}")

    def release(self) -> None:
        """Remove it from the ledger; the memory is free after the last view. Idempotent."""
        self.tensors.clear()
        while self._owners:
            self._ledger.release(self._owners.pop())


def allocate_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate aligned bytes. On a CPU they are touched, so that an overcommitted system fails now."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    # A CPU allocator aligns less; through numpy the few bytes around stay out of the tensor's storage.
    around = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    start = -around.data_ptr() % ALIGNMENT_BYTES
    buffer = torch.from_numpy(around.numpy()[start : start + num_bytes])
    buffer[::CPU_PAGE_BYTES].fill_(UNWRITTEN)
    return buffer


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def has_failed(device: torch.device) -> bool:
    """Return True if the device is known to have failed, without synchronizing. A CPU or an unused GPU never fails."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    try:
        if not torch.cuda.is_current_stream_capturing():  # where it is, asking would be an error by itself
            torch.cuda.current_stream(device).query()
    except RuntimeError:
        return True
    return False


def keep_with_process(held: object) -> None:
    """Leak an object, also at the interpreter's exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def views_of(buffer: torch.Tensor, specs: tuple[TensorSpec, ...]) -> tuple[torch.Tensor, ...]:
    """Return a view for each spec, adjacent and aligned."""
    views = []
    start = 0
    for spec in specs:
        views.append(buffer[start : start + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape))
        start += spec.aligned_bytes
    return tuple(views)


class MirroredTensor:
    """A device tensor and its host copy; one tensor if the device is the host. It allocates only at construction.

    A copy may read the host tensor after `send` has returned: call `wait` before writing it again. Copies and kernels
    run on the current stream, so a copy for a step runs after the previous step. So preparing a step once the one
    before the last was collected never waits for the last one.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, is_shared: bool) -> None:
        is_cuda = device.type == "cuda"
        host = torch.zeros(shape, dtype=dtype, pin_memory=is_cuda)
        self.host = host.numpy()
        self.tensor = host if is_shared else torch.zeros(shape, dtype=dtype, device=device)
        self.is_shared = is_shared
        self._flat_host = host.view(-1)
        self._flat_tensor = self.tensor.view(-1)
        self._sent = torch.cuda.Event() if is_cuda else None

    def send(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Copy elements [start, end) of each range of the flat tensor to the device."""
        if self.is_shared:
            return
        for start, end in ranges:
            self._flat_tensor[start:end].copy_(self._flat_host[start:end], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.tensor.device))

    def wait(self) -> None:
        """Wait until all copies are done."""
        if self._sent is not None and not self._sent.query():
            self._sent.synchronize()

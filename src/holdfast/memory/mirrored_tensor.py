"""MirroredTensor: a tensor on the device and its double on the host, where it is written; changes follow by asynchronous copies."""

from collections.abc import Iterable

import torch


class MirroredTensor:
    """Two pieces of memory of one shape, or one where the device is the host itself. Nothing is allocated after construction.

    A copy reads the double some time after `send` has returned, and there is one double: call `wait` before it is
    written again. Who has read the results of a step never waits here for what was sent before it, since copies and
    kernels run on one stream, the current one. Only a step without results lets the host run that far ahead.
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
        """Bring elements [start, end) of each range to the device, counted over the flat tensor."""
        if self.is_shared:
            return
        for start, end in ranges:
            self._flat_tensor[start:end].copy_(self._flat_host[start:end], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.tensor.device))

    def wait(self) -> None:
        """Return once everything that was sent has been read."""
        if self._sent is not None and not self._sent.query():
            self._sent.synchronize()

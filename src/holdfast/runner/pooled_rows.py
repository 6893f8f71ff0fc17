"""PooledRows: final hidden states of pooled sequences, copied from the rows of a step to the host as float32 bytes.

R rows whose logits are wanted, P rows of the buffer, H hidden

Nothing is allocated on a GPU. Rows are copied to pinned host memory before the sampled tokens of the same step: when
those have been read, the rows have arrived too. Two steps may be in flight, so there are two buffers. If a step has
more pooled rows than a buffer holds, it waits for each round but the last. On a CPU the buffer is one float32 row.
"""

from collections import deque
from collections.abc import Sequence
from itertools import groupby

import torch

from holdfast.memory.ledger import Ledger
from holdfast.planning.terms import POOLED_OWNER, POOLED_REASON, pooled_spec
from holdfast.runner.sampling.device_sampler import MAX_UNDER_WAY


class PooledCopy:
    """The pooled rows of one step, in flight or read."""

    def __init__(self, early: list[bytes], rows_PH: torch.Tensor) -> None:
        self._early = early
        self._rows_PH = rows_PH

    def read(self) -> list[bytes]:
        """Return a vector per pooled row, in order; call it after reading the step's choices."""
        return [*self._early, *_vectors(self._rows_PH)]


class PooledRows:
    """Buffers allocated once; each step with pooled rows uses the next."""

    def __init__(self, hidden_size: int, dtype: str, device: torch.device, ledger: Ledger) -> None:
        is_cpu = device.type == "cpu"
        spec = pooled_spec(hidden_size, dtype, device.type)
        self._device = device
        self.buffers = deque(
            torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), pin_memory=device.type == "cuda")
            for _ in range(1 if is_cpu else MAX_UNDER_WAY)
        )
        if is_cpu:
            ledger.record(POOLED_OWNER, spec.num_bytes, POOLED_REASON)

    def send(self, hidden_RH: torch.Tensor, places: Sequence[int]) -> PooledCopy:
        """Copy these rows. On a GPU this enqueues the copies; enqueue the choices of the step after them."""
        self.buffers.rotate()
        rows_PH, early = self.buffers[0], list[bytes]()
        most = len(rows_PH)
        for first in range(0, len(places), most):
            if first:
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                early += _vectors(rows_PH)
            self._copy(hidden_RH, places[first : first + most], rows_PH)
        return PooledCopy(early, rows_PH[: (len(places) - 1) % most + 1])

    def _copy(self, hidden_RH: torch.Tensor, places: Sequence[int], rows_PH: torch.Tensor) -> None:
        """Copy each run of adjacent rows at once; a step of pooled prompts alone has one run."""
        target = 0
        for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
            near = [place for _, place in run]
            end = target + len(near)
            rows_PH[target:end].copy_(hidden_RH[near[0] : near[-1] + 1], non_blocking=True)
            target = end


def _vectors(rows_PH: torch.Tensor) -> list[bytes]:
    floats = rows_PH.float().numpy().astype("<f4", copy=False)
    return [row.tobytes() for row in floats]

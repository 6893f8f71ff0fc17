"""EditStaging: edits of single logits on their way to a device, through one pinned list of fixed length."""

import numpy as np
import torch

from holdfast.kernels.logits.edit_logits import PADDING, EditKind, edit_logits
from holdfast.kernels.logits.logit_chunks import EDITS_PER_PROGRAM
from holdfast.runner.sampling.logit_edits import Edits

# R rows of a block, V vocabulary, E edits


class EditStaging:
    """Edits are added kind after kind and then applied to a block, in the order in which they came.

    The list fills up in the course of a step. Where it is full the host waits until the device has read it.
    """

    def __init__(self, host_E2: torch.Tensor, device_E2: torch.Tensor) -> None:
        self._host_E2, self._device_E2 = host_E2, device_E2
        self._list_E2 = host_E2.numpy()
        self._places_E, self._numbers_E = self._list_E2[:, 0], self._list_E2[:, 1].view(np.float32)
        self._read = torch.cuda.Event() if device_E2.is_cuda else None
        self._start = self._end = 0
        self._runs: list[tuple[EditKind, int, int]] = []
        self._run_start = 0

    def reset(self) -> None:
        """Begin anew: the device has read everything that was here."""
        self._start = self._end = self._run_start = 0
        self._runs.clear()

    def add(self, first_place: int, edits: Edits, kind: EditKind, block_RV: torch.Tensor) -> None:
        """Edits of one row, whose first logit is at `first_place` of the flat block."""
        token_ids, numbers = edits
        while len(token_ids):
            count = min(len(token_ids), len(self._list_E2) - self._end)
            if not count:
                self.end_kind(kind)
                self.apply(block_RV)
                self._wait()
                continue
            end = self._end + count
            np.add(token_ids[:count], first_place, out=self._places_E[self._end : end])
            self._numbers_E[self._end : end] = numbers[:count] if isinstance(numbers, np.ndarray) else numbers
            self._end = end
            token_ids = token_ids[count:]
            numbers = numbers[count:] if isinstance(numbers, np.ndarray) else numbers

    def end_kind(self, kind: EditKind) -> None:
        """Edits that are added from now on are of another kind, or of another round."""
        if self._end > self._run_start:
            end = -(-self._end // EDITS_PER_PROGRAM) * EDITS_PER_PROGRAM
            self._list_E2[self._end : end] = PADDING
            self._runs.append((kind, self._run_start, end))
            self._run_start = self._end = end

    def apply(self, block_RV: torch.Tensor) -> None:
        """Change a block, kind after kind; nothing is waited for."""
        if self._runs:
            span = slice(self._start, self._end)
            self._device_E2[span].copy_(self._host_E2[span], non_blocking=True)
            for kind, start, end in self._runs:
                edit_logits(block_RV, self._device_E2[start:end], kind)
            self._runs.clear()
            self._start = self._end

    def _wait(self) -> None:
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device_E2.device))
            self._read.synchronize()
        self.reset()

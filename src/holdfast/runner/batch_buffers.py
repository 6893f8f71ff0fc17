"""The fixed buffers behind every Batch: filled from a Step by plain integers, at addresses that never change.

token_ids | positions | slots | logit_rows      int64, one piece of memory; each as long as the largest step

A step that is padded to T rows uses the first T of the first three, and of the last one the first R where not every
row's logits are wanted. On a GPU the piece has a double on the host, and what is used follows in one copy, unused
places in between included: at 8192 rows those are 128 to 192 KiB, 4 us on the link, and a copy more costs the host 5 us.
Only where steps may be so large that the gaps would outweigh that does each buffer go by itself. A layout without gaps
would begin elsewhere for each number of rows, and kernels are compiled for, and graphs captured at, aligned places.
"""

import numpy as np
import torch

from holdfast.attention.batch import Batch, LogitRows, SequenceRows
from holdfast.config import Limits
from holdfast.memory.ledger import Ledger
from holdfast.memory.mirrored_tensor import MirroredTensor
from holdfast.request.sequence import Step
from holdfast.runner.page_table import PageTable
from holdfast.runner.planning.batch_terms import batch_terms, input_specs, input_term

__all__ = ["BatchBuffers", "batch_terms"]

# T rows, R rows whose logits are wanted

MAX_GAP_BYTES = 512 * 1024
"""Two copies less are worth as many bytes between the used parts: some 10 us either way."""
PADDING_SLOT = -1


class BatchBuffers:
    """What a step is written into on the host, and what kernels read: the same memory on a CPU, unless it is `mirrored`.

    `mirrored` makes a CPU do as a GPU does, with a page table and two pieces of memory.
    """

    def __init__(self, limits: Limits, device: torch.device, ledger: Ledger, *, mirrored: bool = False) -> None:
        is_shared = device.type == "cpu" and not mirrored
        specs = input_specs(limits)
        self._page_tokens = limits.page_tokens
        self._num_places = specs[0].shape[0]
        self._inputs = MirroredTensor((len(specs), self._num_places), torch.int64, device, is_shared)
        for term in map(input_term, specs):
            ledger.record(term.owner, term.num_bytes, term.reason)
        self._host = tuple(self._inputs.host)
        self._buffers = tuple(self._inputs.tensor)
        self._is_one_copy = 2 * specs[0].num_bytes <= MAX_GAP_BYTES
        self._page_table = None if is_shared else PageTable(limits, device, ledger)

    def fill(
        self,
        step: Step,
        logit_rows: list[int],
        num_padded_rows: int | None = None,
        num_padded_logit_rows: int | None = None,
    ) -> Batch:
        """Lay a step out as rows; `logit_rows` are the rows whose logits are wanted, ascending.

        Rows of padding have token 0 at position 0 and no slot; padded `logit_rows` are row 0 again.
        """
        self._inputs.wait()
        sequences = self._write_rows(step)
        num_real = sequences[-1].row_start + sequences[-1].num_rows if sequences else 0
        num_rows = num_real if num_padded_rows is None else num_padded_rows
        assert num_real <= num_rows <= self._num_places, f"{num_real=} {num_rows=} of {self._num_places}"
        if num_rows > num_real:
            for host_T, padding in zip(self._host, (0, 0, PADDING_SLOT), strict=False):
                host_T[num_real:num_rows] = padding
        logits, counts = None, [num_rows, num_rows, num_rows]
        if len(logit_rows) != num_real:
            logits = self._write_logit_rows(logit_rows, sequences, num_padded_logit_rows)
            counts.append(logits.rows_R.shape[0])
        if not self._inputs.is_shared:
            self._send(counts)
        ids_T, positions_T, slots_T, _ = self._buffers
        table_NP = None if self._page_table is None else self._page_table.table_NP
        return Batch(ids_T[:num_rows], positions_T[:num_rows], slots_T[:num_rows], tuple(sequences), logits, table_NP)

    def _write_rows(self, step: Step) -> list[SequenceRows]:
        ids, positions, slots, _ = self._host
        table_rows = [-1] * len(step.scheduled)
        if self._page_table is not None:
            table_rows = self._page_table.rows([item.sequence for item in step.scheduled])
        page_tokens = self._page_tokens
        sequences = []
        row = 0
        for item, table_row in zip(step.scheduled, table_rows, strict=True):
            sequence, start, num_rows = item.sequence, item.start, item.num_new_tokens
            pages, end = sequence.pages, row + num_rows
            if num_rows == 1:
                ids[row] = sequence.token_ids[start]
                positions[row] = start
                slots[row] = pages[start // page_tokens] * page_tokens + start % page_tokens
            else:
                ids[row:end] = sequence.token_ids[start : start + num_rows]
                positions[row:end] = np.arange(start, start + num_rows)
                slots[row:end] = self._slots(pages, start, num_rows)
            sequences.append(SequenceRows(row, num_rows, start, pages, table_row))
            row = end
        return sequences

    def _slots(self, pages: list[int], start: int, num_rows: int) -> np.ndarray:
        positions = np.arange(start, start + num_rows)
        first = start // self._page_tokens
        held = np.asarray(pages[first : (start + num_rows - 1) // self._page_tokens + 1])
        return held[positions // self._page_tokens - first] * self._page_tokens + positions % self._page_tokens

    def _write_logit_rows(
        self, logit_rows: list[int], sequences: list[SequenceRows], num_padded: int | None
    ) -> LogitRows:
        num_wanted = len(logit_rows)
        num_rows = num_wanted if num_padded is None else num_padded
        assert num_wanted <= num_rows <= self._num_places, f"{num_wanted=} {num_rows=} of {self._num_places}"
        self._host[3][:num_wanted] = logit_rows
        self._host[3][num_wanted:num_rows] = 0
        singles, owners = [], iter(sequences)
        owner = next(owners)
        for index, row in enumerate(logit_rows):
            while row >= owner.row_start + owner.num_rows:
                owner = next(owners)
            position = owner.start + row - owner.row_start
            singles.append(SequenceRows(index, 1, position, owner.pages, owner.table_row))
        return LogitRows(self._buffers[3][:num_rows], tuple(singles))

    def _send(self, counts: list[int]) -> None:
        """The first `counts[i]` places of buffer i."""
        starts = [index * self._num_places for index in range(len(counts))]
        if self._is_one_copy:
            self._inputs.send([(0, starts[-1] + counts[-1])])
        else:
            self._inputs.send([(start, start + count) for start, count in zip(starts, counts, strict=True)])

"""The fixed buffers behind every Batch: filled from a Step by plain integers, at addresses that never change."""

import numpy as np
import torch

from holdfast.attention.batch import Batch, LogitRows, SequenceRows
from holdfast.config import Limits
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import Term
from holdfast.quant.formats import bytes_for
from holdfast.request.sequence import Step


def batch_terms(limits: Limits) -> tuple[Term, ...]:
    """Bytes of the buffers, from shapes."""
    rows = (limits.max_num_batched_tokens,)
    return tuple(
        Term(f"inputs/{name}", bytes_for("int64", rows), "one row a token of a step")
        for name in ("token_ids", "positions", "slots", "logit_rows")
    )


class BatchBuffers:
    """Host arrays, and the device tensors that follow them (the same memory on CPU)."""

    def __init__(self, limits: Limits, device: torch.device, ledger: Ledger) -> None:
        self._page_tokens = limits.page_tokens
        self._host: dict[str, np.ndarray] = {}
        self._device: dict[str, torch.Tensor] = {}
        self._is_shared = device.type == "cpu"
        for term in batch_terms(limits):
            name = term.owner.removeprefix("inputs/")
            host_T = torch.zeros(limits.max_num_batched_tokens, dtype=torch.int64)
            self._host[name] = host_T.numpy()
            self._device[name] = host_T if self._is_shared else host_T.to(device)
            ledger.record(term.owner, term.num_bytes, term.reason)

    def fill(self, step: Step, logit_rows: list[int]) -> Batch:
        """Lay a step out as rows; `logit_rows` are the rows whose logits are wanted, ascending."""
        ids, positions, slots = self._host["token_ids"], self._host["positions"], self._host["slots"]
        sequences = []
        row = 0
        for item in step.scheduled:
            sequence, start, num_rows = item.sequence, item.start, item.num_new_tokens
            end = row + num_rows
            if num_rows == 1:
                ids[row] = sequence.token_ids[start]
                positions[row] = start
                slots[row] = sequence.pages[start // self._page_tokens] * self._page_tokens + start % self._page_tokens
            else:
                ids[row:end] = sequence.token_ids[start : start + num_rows]
                positions[row:end] = np.arange(start, start + num_rows)
                slots[row:end] = self._slots(sequence.pages, start, num_rows)
            sequences.append(SequenceRows(row, num_rows, start, sequence.pages))
            row = end
        return Batch(
            self._rows("token_ids", row),
            self._rows("positions", row),
            self._rows("slots", row),
            tuple(sequences),
            None if len(logit_rows) == row else self._logit_rows(logit_rows, sequences),
        )

    def _logit_rows(self, logit_rows: list[int], sequences: list[SequenceRows]) -> LogitRows:
        self._host["logit_rows"][: len(logit_rows)] = logit_rows
        singles, owners = [], iter(sequences)
        owner = next(owners)
        for index, row in enumerate(logit_rows):
            while row >= owner.row_start + owner.num_rows:
                owner = next(owners)
            singles.append(SequenceRows(index, 1, owner.start + row - owner.row_start, owner.pages))
        return LogitRows(self._rows("logit_rows", len(logit_rows)), tuple(singles))

    def _slots(self, pages: list[int], start: int, num_rows: int) -> np.ndarray:
        positions = np.arange(start, start + num_rows)
        first = start // self._page_tokens
        held = np.asarray(pages[first : (start + num_rows - 1) // self._page_tokens + 1])
        return held[positions // self._page_tokens - first] * self._page_tokens + positions % self._page_tokens

    def _rows(self, name: str, num_rows: int) -> torch.Tensor:
        view = self._device[name][:num_rows]
        if not self._is_shared:
            view.copy_(torch.from_numpy(self._host[name][:num_rows]))
        return view

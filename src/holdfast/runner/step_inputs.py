"""Step inputs in fixed buffers: the page table (block table) of every sequence, and token ids, positions and slots of a step.

T rows of a step, R rows whose logits are wanted, N rows of the page table, P pages of a row, U entries of a list

The page table:

row n   [ page 0 | page 1 | ... | page k-1 | anything ...... ]      int32, N rows of P pages; readers stop at k

How entries reach the device, by what each way costs:
- A copy costs the host some 5 us whatever its length, and 65,536 pages (1M tokens) cross in another 5. So a sequence
  that brings many pages, an admission, has its range copied from the double: nothing else is as short, and a list of
  them would have to be as long as the table.
- 256 decoding sequences begin some 16 pages in a step, or 256 at once if they were admitted together: 80 us to 1.3 ms
  of single copies. As a list they are one copy and one launch, some 15 to 20 us together.
- Up to three short ranges are cheaper as single copies again, which is the rule at small batches.

Everything else:

token_ids | positions | slots | logit_rows      int64, one piece of memory; each as long as the largest step

A step that is padded to T rows uses the first T of the first three, and of the last one the first R where not every
row's logits are wanted. On a GPU the piece has a double on the host, and what is used follows in one copy, unused
places in between included: at 8192 rows those are 128 to 192 KiB, 4 us on the link, and a copy more costs the host 5 us.
Only where steps may be so large that the gaps would outweigh that does each buffer go by itself. A layout without gaps
would begin elsewhere for each number of rows, and kernels are compiled for, and graphs captured at, aligned places.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.attention.backend import Batch, LogitRows, SequenceRows
from holdfast.config import Limits
from holdfast.kernels.attention.write_kv import BLOCK, PADDING, scatter_pages
from holdfast.memory.arena import MirroredTensor
from holdfast.memory.ledger import Ledger
from holdfast.planning.terms import LISTED_PAGES, input_specs, input_term, page_table_specs
from holdfast.request.sequence import Sequence, Step

MAX_SINGLE_COPIES = 3
"""Up to this many short ranges of the page table go by a copy each."""
MAX_GAP_BYTES = 512 * 1024
"""Two copies less are worth as many bytes between the used parts of the inputs: some 10 us either way."""
PADDING_SLOT = -1


@dataclass(eq=False, slots=True)
class _Row:
    """Where a sequence's pages are, and how many of them are there already."""

    row: int
    num_pages: int = 0
    num_preemptions: int = -1


@dataclass(frozen=True, slots=True)
class _Growth:
    """Pages [first, end) of a sequence, which its row does not have yet."""

    own: _Row
    sequence: Sequence
    first: int
    end: int

    @property
    def is_short(self) -> bool:
        return self.end - self.first <= LISTED_PAGES


class PageTable:
    """Rows by sequence. A row stays a sequence's own until others need it, the longest unused first."""

    def __init__(self, limits: Limits, device: torch.device, ledger: Ledger) -> None:
        table, updates = page_table_specs(limits)
        assert LISTED_PAGES % BLOCK == 0, f"{LISTED_PAGES=} must be whole blocks of {BLOCK=}"
        self._max_num_seqs, self._max_num_pages = table.shape
        self.table = MirroredTensor(table.shape, torch.int32, device, is_shared=False)
        self.updates = MirroredTensor(updates.shape, torch.int64, device, is_shared=False)
        for spec in (table, updates):
            term = input_term(spec)
            ledger.record(term.owner, term.num_bytes, term.reason)
        self._rows: OrderedDict[int, _Row] = OrderedDict()
        """By sequence id, the longest unused first."""
        self.table_NP = self.table.tensor
        self._send_list([])  # compiles the kernel, so that no step has to

    def rows(self, sequences: SequenceABC[Sequence]) -> list[int]:
        """The row of each sequence of a step. Kernels that are launched from here on find all its pages there."""
        self._assign(sequences)
        rows, growths = [], []
        for sequence in sequences:
            own, end = self._rows[sequence.sequence_id], len(sequence.pages)
            # Pages only grow, unless they were all given back in between.
            first = own.num_pages if own.num_preemptions == sequence.num_preemptions else 0
            if first != end:
                growths.append(_Growth(own, sequence, first, end))
            rows.append(own.row)
        if growths:
            self._send(growths)
        return rows

    @property
    def num_pages_by_row(self) -> dict[int, int]:
        """How many places of each row are in use; what stands behind them is read by nobody."""
        return {own.row: own.num_pages for own in self._rows.values()}

    def _assign(self, sequences: SequenceABC[Sequence]) -> None:
        """Give each a row. Whose row is taken is not in this step: all of those have moved to the end before."""
        newcomers = []
        for sequence in sequences:
            if sequence.sequence_id in self._rows:
                self._rows.move_to_end(sequence.sequence_id)
            else:
                newcomers.append(sequence.sequence_id)
        if not newcomers:
            return
        assert len(sequences) <= self._max_num_seqs, f"{len(sequences)} sequences, {self._max_num_seqs} rows"
        while len(self._rows) > self._max_num_seqs - len(newcomers):
            self._rows.popitem(last=False)
        taken = {own.row for own in self._rows.values()}
        free = [row for row in range(self._max_num_seqs) if row not in taken]
        for sequence_id, row in zip(newcomers, free, strict=False):
            self._rows[sequence_id] = _Row(row)

    def _send(self, growths: list[_Growth]) -> None:
        self.table.wait()
        for growth in growths:
            first, end, sequence = growth.first, growth.end, growth.sequence
            assert first < end <= self._max_num_pages, f"{sequence.sequence_id=} went from {first} pages to {end}"
            self.table.host[growth.own.row, first:end] = sequence.pages[first:]
        takes_list = sum(growth.is_short for growth in growths) > MAX_SINGLE_COPIES
        if takes_list:
            self._send_list([growth for growth in growths if growth.is_short])
        ranges = []
        for growth in growths:
            if not (takes_list and growth.is_short):
                start = growth.own.row * self._max_num_pages
                ranges.append((start + growth.first, start + growth.end))
        if ranges:
            self.table.send(ranges)
        for growth in growths:  # last, so that what was interrupted is sent again
            growth.own.num_pages = growth.end
            growth.own.num_preemptions = growth.sequence.num_preemptions

    def _send_list(self, growths: list[_Growth]) -> None:
        self.updates.wait()
        places: list[int] = []
        pages: list[int] = []
        for growth in growths:
            start = growth.own.row * self._max_num_pages
            places.extend(range(start + growth.first, start + growth.end))
            pages.extend(growth.sequence.pages[growth.first :])
        num_updates = max(1, -(-len(places) // BLOCK)) * BLOCK
        updates_U2 = self.updates.host
        updates_U2[: len(places), 0] = places
        updates_U2[: len(places), 1] = pages
        updates_U2[len(places) : num_updates, 0] = PADDING
        self.updates.send([(0, 2 * num_updates)])
        scatter_pages(self.updates.tensor[:num_updates], self.table_NP)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Every row has one owner, and the rows of these sequences, as `rows` left them, hold their pages on both sides."""
        rows = sorted(own.row for own in self._rows.values())
        assert len(set(rows)) == len(rows), f"a row has two owners: {rows}"
        assert not rows or 0 <= rows[0] <= rows[-1] < self._max_num_seqs, f"{rows=} of {self._max_num_seqs}"
        table_NP = self.table_NP.cpu().numpy()
        for sequence in sequences:
            own = self._rows[sequence.sequence_id]
            num_pages = len(sequence.pages)
            assert own.num_pages == num_pages, (
                f"{sequence.sequence_id=} has {num_pages} pages, {own.num_pages} are known"
            )
            for place, held_NP in (("mirror", self.table.host), ("table", table_NP)):
                held = held_NP[own.row, :num_pages].tolist()
                assert held == sequence.pages, f"{sequence.sequence_id=}: {place} {held}, pages {sequence.pages}"


class BatchBuffers:
    """What a step is written into on the host, and what kernels read.

    With `is_shared`, as on a CPU, both are the same memory, and attention reads the pages of a sequence from the batch.
    Without it the device has its own memory, and a page table.
    """

    def __init__(self, limits: Limits, device: torch.device, ledger: Ledger, *, is_shared: bool) -> None:
        specs = input_specs(limits)
        self._page_tokens = limits.page_tokens
        self._num_places = specs[0].shape[0]
        self.inputs = MirroredTensor((len(specs), self._num_places), torch.int64, device, is_shared)
        for term in map(input_term, specs):
            ledger.record(term.owner, term.num_bytes, term.reason)
        self._host = tuple(self.inputs.host)
        self._buffers = tuple(self.inputs.tensor)
        self._is_one_copy = 2 * specs[0].num_bytes <= MAX_GAP_BYTES
        self.page_table = None if is_shared else PageTable(limits, device, ledger)

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
        self.inputs.wait()
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
        if not self.inputs.is_shared:
            self._send(counts)
        ids_T, positions_T, slots_T, _ = self._buffers
        table_NP = None if self.page_table is None else self.page_table.table_NP
        return Batch(ids_T[:num_rows], positions_T[:num_rows], slots_T[:num_rows], tuple(sequences), logits, table_NP)

    def _write_rows(self, step: Step) -> list[SequenceRows]:
        ids, positions, slots, _ = self._host
        table_rows = [-1] * len(step.scheduled)
        if self.page_table is not None:
            table_rows = self.page_table.rows([item.sequence for item in step.scheduled])
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
            self.inputs.send([(0, starts[-1] + counts[-1])])
        else:
            self.inputs.send([(start, start + count) for start, count in zip(starts, counts, strict=True)])

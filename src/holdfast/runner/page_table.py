"""PageTable: the pages of every sequence in a step as rows of one tensor on the device; only what is new is sent.

row n   [ page 0 | page 1 | ... | page k-1 | anything ...... ]      int32, N rows of P pages; readers stop at k

How entries reach the device, by what each way costs:
- A copy costs the host some 5 us whatever its length, and 65,536 pages (1M tokens) cross in another 5. So a sequence
  that brings many pages, an admission, has its range copied from the double: nothing else is as short, and a list of
  them would have to be as long as the table.
- 256 decoding sequences begin some 16 pages in a step, or 256 at once if they were admitted together: 80 us to 1.3 ms
  of single copies. As a list they are one copy and one launch, some 15 to 20 us together.
- Up to three short ranges are cheaper as single copies again, which is the rule at small batches.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch

from holdfast.config import Limits
from holdfast.kernels.pages.scatter_pages import BLOCK, PADDING, scatter_pages
from holdfast.memory.ledger import Ledger
from holdfast.memory.mirrored_tensor import MirroredTensor
from holdfast.request.sequence import Sequence
from holdfast.runner.planning.batch_terms import LISTED_PAGES, input_term, page_table_specs

# N rows, P pages, U entries of a list

MAX_SINGLE_COPIES = 3
"""Up to this many short ranges go by a copy each."""


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
        self._table = MirroredTensor(table.shape, torch.int32, device, is_shared=False)
        self._updates = MirroredTensor(updates.shape, torch.int64, device, is_shared=False)
        for spec in (table, updates):
            term = input_term(spec)
            ledger.record(term.owner, term.num_bytes, term.reason)
        self._rows: OrderedDict[int, _Row] = OrderedDict()
        """By sequence id, the longest unused first."""
        self.table_NP = self._table.tensor
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
        self._table.wait()
        for growth in growths:
            first, end, sequence = growth.first, growth.end, growth.sequence
            assert first < end <= self._max_num_pages, f"{sequence.sequence_id=} went from {first} pages to {end}"
            self._table.host[growth.own.row, first:end] = sequence.pages[first:]
        takes_list = sum(growth.is_short for growth in growths) > MAX_SINGLE_COPIES
        if takes_list:
            self._send_list([growth for growth in growths if growth.is_short])
        ranges = []
        for growth in growths:
            if not (takes_list and growth.is_short):
                start = growth.own.row * self._max_num_pages
                ranges.append((start + growth.first, start + growth.end))
        if ranges:
            self._table.send(ranges)
        for growth in growths:  # last, so that what was interrupted is sent again
            growth.own.num_pages = growth.end
            growth.own.num_preemptions = growth.sequence.num_preemptions

    def _send_list(self, growths: list[_Growth]) -> None:
        self._updates.wait()
        places: list[int] = []
        pages: list[int] = []
        for growth in growths:
            start = growth.own.row * self._max_num_pages
            places.extend(range(start + growth.first, start + growth.end))
            pages.extend(growth.sequence.pages[growth.first :])
        num_updates = max(1, -(-len(places) // BLOCK)) * BLOCK
        updates_U2 = self._updates.host
        updates_U2[: len(places), 0] = places
        updates_U2[: len(places), 1] = pages
        updates_U2[len(places) : num_updates, 0] = PADDING
        self._updates.send([(0, 2 * num_updates)])
        scatter_pages(self._updates.tensor[:num_updates], self.table_NP)

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
            for place, held_NP in (("mirror", self._table.host), ("table", table_NP)):
                held = held_NP[own.row, :num_pages].tolist()
                assert held == sequence.pages, f"{sequence.sequence_id=}: {place} {held}, pages {sequence.pages}"

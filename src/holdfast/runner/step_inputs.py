"""Step inputs in fixed buffers: page tables (block tables) of sequences; token ids, positions and slots of a step.

T rows of a step, R rows whose logits are wanted, G cache groups, N rows of a page table, P chunks of a row,
U entries of a list

The page table of each cache group (cache/spec.py says what a chunk is; with one group it is a page):

row n   [ chunk 0 | chunk 1 | ... | chunk k-1 | anything ...... ]      int32, N rows of P chunks; readers stop at k

If a row of a chunk stands for several tokens (cache/compressed.py), the last of them has its slot, and the others none.

Pages before a window are freed, but their entries stay: chunk numbers that other sequences may own by now.

How entries reach the device, by cost:
- A copy costs the host some 5 us whatever its length, and 65,536 pages (1M tokens) cross in another 5. So if a sequence
  brings many pages (an admission), its range is copied from the host mirror: a list would be as long as the table.
- 256 decoding sequences begin some 16 pages in a step, or 256 at once if they were admitted together: 80 us to 1.3 ms
  of single copies. As a list they take one copy and one launch, some 15 to 20 us together.
- Up to three short ranges are cheaper as single copies, the usual case at small batches.

Everything else:

token_ids | positions | slots | states | drafts | keep_slots | logit_rows     int64, one allocation; slots G times; each as
                                                                              long as the largest step; no keep_slots
                                                                              if device and host memory are one; states
                                                                              only if the cache has some; drafts if
                                                                              states must not keep them

If a step in flight is still choosing a token, its id is -1 - slot, the runner's slot of its sequence. A kernel replaces
it by the token (kernels/sampling/last_tokens.py). keep_slots says which slots store the tokens of this step.

A step padded to T rows uses the first T places of each buffer, but the first R of logit_rows and keep_slots if not all
logits are wanted. On a GPU the used part of the host mirror goes in one copy, gaps included: at 8192 rows gaps are
192 to 256 KiB, 5 us on the link, and each extra copy costs the host 5 us. Buffers are copied one by one only if steps
may be so large that the gaps cost more. A layout without gaps would move with the number of rows, and kernels are
compiled for, and graphs captured at, aligned addresses.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.attention.backend import Batch, LogitRows, SequenceRows
from holdfast.cache.chunks import ChunkShape
from holdfast.cache.groups import HOLE
from holdfast.config import Limits
from holdfast.kernels.attention.write_kv import BLOCK, PADDING, scatter_pages
from holdfast.kernels.sampling.last_tokens import NO_SLOT
from holdfast.kernels.state.state_rows import DRAFT
from holdfast.memory.arena import MirroredTensor
from holdfast.memory.ledger import Ledger
from holdfast.planning.terms import input_specs, input_term, listed_entries, page_table_specs
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence

MAX_SINGLE_COPIES = 3
"""Most short ranges of the page table that get a copy each."""
MAX_GAP_BYTES = 512 * 1024
"""Largest gap bytes worth copying to save two copies: some 10 us either way."""
PADDING_SLOT = -1
ONE_GROUP = (ChunkShape(),)


@dataclass(eq=False, slots=True)
class _Row:
    """Row of a sequence, and the pages per group that it holds already."""

    row: int
    num_pages: list[int]
    tables: list[list[int]] | None = None
    """The sequence's own lists. They only grow; a restart, say after a preemption, makes new ones."""


@dataclass(frozen=True, slots=True)
class _Growth:
    """New entries [first, end) of a row, which the device does not have yet."""

    row: int
    first: int
    chunks: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.chunks)


class GroupTable:
    """Page table of one cache group; sends its entries to the device."""

    def __init__(self, limits: Limits, shape: ChunkShape, group: int, device: torch.device, ledger: Ledger) -> None:
        table, updates = page_table_specs(limits, shape.chunks_per_page, group, shape.tokens_per_row, shape.near_tokens)
        self.shape = shape
        self._max_num_chunks = table.shape[1]
        self._most_listed = listed_entries(shape.chunks_per_page)
        assert self._most_listed % BLOCK == 0, f"{self._most_listed=} must be whole blocks of {BLOCK=}"
        self.table = MirroredTensor(table.shape, torch.int32, device, is_shared=False)
        self.updates = MirroredTensor(updates.shape, torch.int64, device, is_shared=False)
        for spec in (table, updates):
            term = input_term(spec)
            ledger.record(term.owner, term.num_bytes, term.reason)
        self.table_NP = self.table.tensor
        self._send_list([])  # compiles the kernel, so that no step has to

    def growths(self, row: int, sequence: Sequence, pages: list[int], first: int) -> list[_Growth]:
        """Return a sequence's entries from page `first` on. Holes come first, or after kept pages, and are skipped."""
        end, chunks = len(pages), self.shape.chunks_per_page
        assert first < end <= self._max_num_chunks // chunks, (
            f"{sequence.sequence_id=} went from {first} pages to {end}"
        )
        found: list[_Growth] = []
        while first < end:
            while first < end and pages[first] == HOLE:
                first += 1
            # The only holes behind pages are those of a sequence that starts with near pages.
            is_split = not found and self.shape.near_tokens > 0 and HOLE in pages[first:]
            last = pages.index(HOLE, first) if is_split else end
            if first < last:
                own = pages[first:last] if self.shape.is_page else self.shape.numbers(pages[first:last]).tolist()
                found.append(_Growth(row, first * chunks, own))
            first = last
        return found

    def send(self, growths: list[_Growth]) -> None:
        """Write entries on host and device, each by the cheaper way."""
        self.table.wait()
        for growth in growths:
            assert HOLE not in growth.chunks, f"row {growth.row} has a hole behind a page: {growth.chunks}"
            self.table.host[growth.row, growth.first : growth.end] = growth.chunks
        short = [growth for growth in growths if len(growth.chunks) <= self._most_listed]
        takes_list = len(short) > MAX_SINGLE_COPIES
        if takes_list:
            self._send_list(short)
        ranges = []
        for growth in growths:
            if not (takes_list and len(growth.chunks) <= self._most_listed):
                start = growth.row * self._max_num_chunks
                ranges.append((start + growth.first, start + growth.end))
        if ranges:
            self.table.send(ranges)

    def _send_list(self, growths: list[_Growth]) -> None:
        self.updates.wait()
        places: list[int] = []
        chunks: list[int] = []
        for growth in growths:
            start = growth.row * self._max_num_chunks
            places.extend(range(start + growth.first, start + growth.end))
            chunks.extend(growth.chunks)
        num_updates = max(1, -(-len(places) // BLOCK)) * BLOCK
        updates_U2 = self.updates.host
        updates_U2[: len(places), 0] = places
        updates_U2[: len(places), 1] = chunks
        updates_U2[len(places) : num_updates, 0] = PADDING
        self.updates.send([(0, 2 * num_updates)])
        scatter_pages(self.updates.tensor[:num_updates], self.table_NP)

    def check(self, sequence: Sequence, row: int, pages: list[int]) -> None:
        """Assert that host and device rows hold the chunks of these pages, and some valid chunk at each hole."""
        wanted = self.shape.numbers(pages)
        for place, held_NP in (("mirror", self.table.host), ("table", self.table_NP.cpu().numpy())):
            held = held_NP[row, : len(wanted)]
            assert (held[wanted != HOLE] == wanted[wanted != HOLE]).all(), (
                f"{sequence.sequence_id=}: {place} {held.tolist()}, pages {pages}"
            )
            assert (held >= 0).all(), f"{sequence.sequence_id=}: {place} names no chunk at a hole: {held.tolist()}"


class PageTable:
    """Rows by sequence, equal in the tables of all cache groups. A sequence keeps its row until others need it; the
    least recently used row is taken first."""

    def __init__(
        self, limits: Limits, device: torch.device, ledger: Ledger, shapes: SequenceABC[ChunkShape] = ONE_GROUP
    ) -> None:
        self._max_num_seqs = limits.max_num_seqs
        self.groups = tuple(GroupTable(limits, shape, group, device, ledger) for group, shape in enumerate(shapes))
        self.tables = tuple(group.table_NP for group in self.groups)
        self._rows: OrderedDict[int, _Row] = OrderedDict()
        """By sequence id, least recently used first."""

    def rows(self, sequences: SequenceABC[Sequence]) -> list[int]:
        """Return the row of each sequence. Kernels launched afterwards find all its chunks there."""
        self._assign(sequences)
        rows: list[int] = []
        grown: list[tuple[_Row, Sequence]] = []
        growths: list[list[_Growth]] = [[] for _ in self.groups]
        for sequence in sequences:
            own = self._rows[sequence.sequence_id]
            rows.append(own.row)
            is_known = own.tables is sequence.tables
            has_grown = not is_known
            for group, (known, pages) in enumerate(zip(own.num_pages, sequence.tables, strict=True)):
                first = known if is_known else 0
                if first != len(pages):
                    has_grown = True
                    growths[group] += self.groups[group].growths(own.row, sequence, pages, first)
            if has_grown:
                grown.append((own, sequence))
        for table, own_growths in zip(self.groups, growths, strict=True):
            if own_growths:
                table.send(own_growths)
        for own, sequence in grown:  # last, so that an interrupted send is repeated
            own.num_pages = list(map(len, sequence.tables))
            own.tables = sequence.tables
        return rows

    def num_chunks_by_row(self) -> list[dict[int, int]]:
        """Count the used places of each row, by group; the rest is never read."""
        sizes = [group.shape.chunks_per_page for group in self.groups]
        rows = self._rows.values()
        return [{own.row: size * own.num_pages[group] for own in rows} for group, size in enumerate(sizes)]

    def _assign(self, sequences: SequenceABC[Sequence]) -> None:
        """Give each sequence a row. Evict only sequences outside this step: its own have moved to the end."""
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
            self._rows[sequence_id] = _Row(row, [0] * len(self.groups))

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that each row has one owner, and that host and device rows of these sequences hold their pages."""
        rows = sorted(own.row for own in self._rows.values())
        assert len(set(rows)) == len(rows), f"a row has two owners: {rows}"
        assert not rows or 0 <= rows[0] <= rows[-1] < self._max_num_seqs, f"{rows=} of {self._max_num_seqs}"
        for sequence in sequences:
            own = self._rows[sequence.sequence_id]
            num_pages = list(map(len, sequence.tables))
            assert own.num_pages == num_pages, (
                f"{sequence.sequence_id=} has {num_pages} pages, {own.num_pages} are known"
            )
            for group, pages in zip(self.groups, sequence.tables, strict=True):
                group.check(sequence, own.row, pages)


class BatchBuffers:
    """Host buffers that a step is written into, and their device copies that kernels read.

    If `is_shared`, as on a CPU, both are the same memory, and attention reads the pages of a sequence from the batch.
    Otherwise the device has its own memory and page tables. `shapes` says how pages of each cache group become chunks.
    If `has_states`, each row holds the place of its sequence's state, which is its slot; if `has_drafts`, also what
    states must not keep, and what they lack (kernels/state/state_rows.py).
    """

    def __init__(
        self,
        limits: Limits,
        device: torch.device,
        ledger: Ledger,
        *,
        is_shared: bool,
        shapes: SequenceABC[ChunkShape] = ONE_GROUP,
        has_states: bool = False,
        has_drafts: bool = False,
    ) -> None:
        specs = input_specs(limits, len(shapes), "cpu" if is_shared else "cuda", has_states, has_drafts)
        self._page_tokens = limits.page_tokens
        self._shapes = tuple(shapes)
        self._has_pages_for_chunks = all(shape.is_page for shape in shapes)
        self._num_places = specs[0].shape[0]
        self.inputs = MirroredTensor((len(specs), self._num_places), torch.int64, device, is_shared)
        for term in map(input_term, specs):
            ledger.record(term.owner, term.num_bytes, term.reason)
        self._host = tuple(self.inputs.host)
        self._own_slots = slice(2, 2 + len(shapes))
        self._host_slots = self._host[self._own_slots]
        self._num_listed = 2 + len(shapes) + has_states + has_drafts
        """Buffers with an entry per row of a step; after the second, -1 means none."""
        self._host_states = self._host[2 + len(shapes)] if has_states else None
        self._states_T = self.inputs.tensor[2 + len(shapes)] if has_states else None
        self._host_drafts = self._host[self._num_listed - 1] if has_drafts else None
        self._drafts_T = self.inputs.tensor[self._num_listed - 1] if has_drafts else None
        self._ids_T, self._positions_T, self._logit_rows_T = (self.inputs.tensor[row] for row in (0, 1, -1))
        self._slots_GT = self.inputs.tensor[self._own_slots]
        self.keep_slots_T = None if is_shared else self.inputs.tensor[-2]
        """Slot that stores the token chosen from each wanted row."""
        self._is_one_copy = 2 * specs[0].num_bytes <= MAX_GAP_BYTES
        self.page_table = None if is_shared else PageTable(limits, device, ledger, shapes)

    def fill(
        self,
        step: LiveStep,
        logit_rows: list[int],
        num_padded_rows: int | None = None,
        num_padded_logit_rows: int | None = None,
        keep_slots: SequenceABC[int] = (),
        *,
        is_listed: bool = False,
    ) -> Batch:
        """Lay a step out as rows; `logit_rows` are rows whose logits are wanted, twice if a fork samples from one too.

        Padding rows have token 0 at position 0 and no slot; padded `logit_rows` repeat row 0. `keep_slots` belong to
        the first wanted rows; the others keep nothing. `is_listed`: list wanted rows even if they are all rows.
        """
        if not self.inputs.is_shared:
            self.inputs.wait()
        sequences = self._write_rows(step)
        num_real = sequences[-1].row_start + sequences[-1].num_rows if sequences else 0
        num_rows = num_real if num_padded_rows is None else num_padded_rows
        assert num_real <= num_rows <= self._num_places, f"{num_real=} {num_rows=} of {self._num_places}"
        if num_rows > num_real:
            self.inputs.host[:2, num_real:num_rows] = 0
            self.inputs.host[2 : self._num_listed, num_real:num_rows] = PADDING_SLOT
        logits, num_wanted = None, num_rows
        counts = [num_rows] * self._num_listed
        assert len(logit_rows) <= num_rows, f"{len(logit_rows)} wanted rows in the place of {num_rows}"
        if is_listed or step.has_forks or len(logit_rows) != num_real:
            logits = self._write_logit_rows(logit_rows, sequences, num_padded_logit_rows)
            num_wanted = logits.rows_R.shape[0]
        if not self.inputs.is_shared:
            self._host[-2][: len(keep_slots)] = keep_slots
            self._host[-2][len(keep_slots) : num_wanted] = NO_SLOT
            counts.append(num_wanted)
        if logits is not None:
            counts.append(num_wanted)
        if not self.inputs.is_shared:
            self._send(counts)
        return Batch(
            self._ids_T[:num_rows],
            self._positions_T[:num_rows],
            self._slots_GT[:, :num_rows],
            tuple(sequences),
            logits,
            None if self.page_table is None else self.page_table.tables,
            None if self._states_T is None else self._states_T[:num_rows],
            None if self._drafts_T is None else self._drafts_T[:num_rows],
        )

    def _write_rows(self, step: LiveStep) -> list[SequenceRows]:
        ids, positions = self._host[:2]
        items = [item for item in step.scheduled if item.source is None] if step.has_forks else step.scheduled
        table_rows = [-1] * len(items)
        if self.page_table is not None:
            table_rows = self.page_table.rows([item.sequence for item in items])
        sequences = []
        row = 0
        for item, table_row in zip(items, table_rows, strict=True):
            sequence, start, num_rows = item.sequence, item.start, item.num_new_tokens
            tables, end = tuple(sequence.tables), row + num_rows
            if num_rows == 1:
                ids[row] = sequence.token_ids[start] if start < len(sequence.token_ids) else _coming_id(item)
                positions[row] = start
                chunk, offset = divmod(start, self._page_tokens)
                for slots, shape, pages in zip(self._host_slots, self._shapes, tables, strict=True):
                    if shape.tokens_per_row > 1:
                        slots[row] = self._entry_slots(shape, pages, start, 1)[0]
                        continue
                    if shape.near_tokens:
                        place, near_offset = divmod(start, shape.near_tokens)
                        slots[row] = shape.number(pages, place) * shape.near_tokens + near_offset
                        continue
                    number = pages[chunk] if shape.chunks_per_page == 1 else shape.number(pages, chunk)
                    slots[row] = number * self._page_tokens + offset
            else:
                ids[row:end] = _token_ids(item)
                positions[row:end] = np.arange(start, start + num_rows)
                for slots, shape, pages in zip(self._host_slots, self._shapes, tables, strict=True):
                    make = self._slots if shape.tokens_per_row == 1 else self._entry_slots
                    slots[row:end] = make(shape, pages, start, num_rows)
            if self._host_states is not None:
                assert sequence.slot >= 0, f"{sequence.sequence_id=} has no slot, and a state needs a place"
                self._host_states[row:end] = sequence.slot
            num_drafts = len(item.proposals)
            if self._host_drafts is not None:
                self._host_drafts[row] = item.num_accepted
                if num_rows > 1:
                    self._host_drafts[row + 1 : end - num_drafts] = 0
                    self._host_drafts[end - num_drafts : end] = DRAFT
            if start < sequence.num_stored:  # recomputed for states only: pages hold these already
                self.inputs.host[self._own_slots, row : min(end, row + sequence.num_stored - start)] = PADDING_SLOT
            if not self._has_pages_for_chunks:
                tables = tuple(shape.table(pages) for shape, pages in zip(self._shapes, tables, strict=True))
            is_prompt = start < sequence.num_prompt_tokens
            place = -1 if self._host_states is None else sequence.slot
            sequences.append(SequenceRows(row, num_rows, start, tables, table_row, is_prompt, place, num_drafts))
            row = end
        return sequences

    def _entry_slots(self, shape: ChunkShape, pages: list[int], start: int, num_rows: int) -> np.ndarray:
        """Return slots if a row stands for several tokens: at the last token of each."""
        ratio = shape.tokens_per_row
        slots_T = np.full(num_rows, PADDING_SLOT)
        first, end = start // ratio, (start + num_rows) // ratio
        if end > first:
            slots_T[(first + 1) * ratio - 1 - start :: ratio] = self._slots(shape, pages, first, end - first)
        return slots_T

    def _slots(self, shape: ChunkShape, pages: list[int], start: int, num_rows: int) -> np.ndarray:
        """Return slots of rows: of positions, if each stands for one token."""
        positions = np.arange(start, start + num_rows)
        chunk_tokens = shape.near_tokens or self._page_tokens
        page_tokens = shape.chunks_per_page * chunk_tokens
        first = start // page_tokens
        chunks = shape.numbers(pages[first : (start + num_rows - 1) // page_tokens + 1])
        numbers = chunks[positions // chunk_tokens - first * shape.chunks_per_page]
        return numbers * chunk_tokens + positions % chunk_tokens

    def _write_logit_rows(
        self, logit_rows: list[int], sequences: list[SequenceRows], num_padded: int | None
    ) -> LogitRows:
        num_wanted = len(logit_rows)
        num_rows = num_wanted if num_padded is None else num_padded
        assert num_wanted <= num_rows <= self._num_places, f"{num_wanted=} {num_rows=} of {self._num_places}"
        self._host[-1][:num_wanted] = logit_rows
        self._host[-1][num_wanted:num_rows] = 0
        singles, starts = [], [own.row_start for own in sequences]
        for index, row in enumerate(logit_rows):
            owner = sequences[bisect_right(starts, row) - 1]
            position = owner.start + row - owner.row_start
            singles.append(SequenceRows(index, 1, position, owner.tables, owner.table_row))
        return LogitRows(self._logit_rows_T[:num_rows], tuple(singles))

    def _send(self, counts: list[int]) -> None:
        """Send the first `counts[i]` places of buffer i."""
        starts = [index * self._num_places for index in range(len(counts))]
        if self._is_one_copy:
            self.inputs.send([(0, starts[-1] + counts[-1])])
        else:
            self.inputs.send([(start, start + count) for start, count in zip(starts, counts, strict=True)])


def _coming_id(item: ScheduledSequence) -> int:
    """Return the placeholder id of a token that a step in flight is choosing."""
    sequence, coming = item.sequence, item.num_tokens - 1
    assert coming == len(sequence.token_ids), (
        f"{sequence.sequence_id=} runs {coming=} of {len(sequence.token_ids)} tokens"
    )
    assert sequence.slot >= 0, f"{sequence.sequence_id=} has no slot, and its newest token is not known"
    return -1 - sequence.slot


def _token_ids(item: ScheduledSequence) -> list[int]:
    """Return the ids of a sequence's rows: known tokens, one in flight, draft tokens."""
    known = item.sequence.token_ids[item.start : item.num_tokens]
    if len(known) + len(item.proposals) < item.num_new_tokens:
        known = [*known, _coming_id(item)]
    return [*known, *item.proposals] if item.proposals else known

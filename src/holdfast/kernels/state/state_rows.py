"""Rows of a step by sequence, for layers with a state: places, positions, lists of sequences and of chunks.

T rows, N sequences, M chunks

Rows of a sequence are adjacent, their positions consecutive. A sequence with one row takes the recurrent kernels, one
with more rows the chunk kernels. Pieces of prompts start at multiples of CHUNK_ROWS, so results do not depend on cuts.
A sequence that starts at position 0 starts from zeros: what its place held before is never read.

Draft tokens follow the one row of their sequence. The lists do not count them, so chunk kernels skip them. The step
writes the state after that one row, and keeps inputs of the draft tokens by slot. The sequence's next step applies the
accepted ones first (kernels/state/kept_drafts.py):

    step      rows              state read    applied first    state written    kept
    s         t  d1 d2 d3       before t      -                after t          d1 d2 d3
    s + 1     u  e1 e2          after t       d1 d2            after u          e1 e2         two were accepted
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.state.state_geometry import CHUNK_ROWS
from holdfast.kernels.triton_compat import constexpr, jit, tl

DRAFT = -2
"""Marks the row of a draft token in `StateRows.drafts_T`."""


class Piece(NamedTuple):
    """Rows of one sequence in a step, without draft tokens; a row of `StateRows.sequences_N4`."""

    row: int
    """Its first row."""
    num_rows: int
    place: int
    start: int
    """Position of its first row."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of a step. Tensors lie on the device of the states; a captured graph replays with other contents."""

    places_T: Tensor
    """int64: place of a row's sequence; -1: padding."""
    positions_T: Tensor
    """int64."""
    sequences_N4: Tensor | None = None
    """int32, a `Piece` each, by row; unused entries have 0 rows. None: each row is a sequence of its own."""
    chunks_M4: Tensor | None = None
    """int32: sequence, first row, rows, number of the chunk in its piece, for sequences with several rows; unused
    entries have 0 rows. None: no sequence has several rows."""
    drafts_T: Tensor | None = None
    """int64: DRAFT for a draft token. For the first row of a sequence: the accepted draft tokens of its last step, which
    its state lacks. None: no step has draft tokens."""

    def pieces(self) -> list[Piece]:
        """Return sequences that have rows. Waits for the device, so only references call it."""
        if self.sequences_N4 is not None:
            return [Piece(*entry) for entry in self.sequences_N4.tolist() if entry[1] > 0]
        rows = zip(self.places_T.tolist(), self.positions_T.tolist(), strict=True)
        return [Piece(row, 1, place, start) for row, (place, start) in enumerate(rows) if place >= 0]

    def single_rows(self) -> list[Piece]:
        """Return sequences with one row."""
        return [piece for piece in self.pieces() if piece.num_rows == 1]

    def long_pieces(self) -> list[Piece]:
        """Return sequences with several rows."""
        return [piece for piece in self.pieces() if piece.num_rows > 1]

    def draft_counts(self, pieces: list[Piece]) -> list[tuple[int, int]]:
        """Return the accepted draft tokens that each sequence's state lacks, and its own. Waits for the device."""
        assert self.drafts_T is not None, "no step has draft tokens"
        marks, counts = self.drafts_T.tolist(), list[tuple[int, int]]()
        for piece in pieces:
            end = piece.row + 1
            while end < len(marks) and marks[end] == DRAFT:
                end += 1
            counts.append((marks[piece.row], end - piece.row - 1))
        return counts

    def clear_padding(self, out_TX: Tensor) -> None:
        """Zero the rows of padding."""
        out_TX[self.places_T < 0] = 0


def fill_lists(pieces: Sequence[Piece], sequences_N4: Tensor, chunks_M4: Tensor) -> None:
    """Write the lists of `StateRows` for a step on the host; pieces are in the order of their rows."""
    chunks = [
        (number, piece.row + first, min(CHUNK_ROWS, piece.num_rows - first), first // CHUNK_ROWS)
        for number, piece in enumerate(pieces)
        if piece.num_rows > 1
        for first in range(0, piece.num_rows, CHUNK_ROWS)
    ]
    for entries, table in ((pieces, sequences_N4), (chunks, chunks_M4)):
        assert len(entries) <= len(table), f"{len(entries)} entries for a list of {len(table)}"
        table[len(entries) :] = 0
        if entries:
            table[: len(entries)] = torch.tensor(entries, dtype=table.dtype)


CLEARED_ROWS = 128
"""Rows that a program looks at for padding, in a step that lists its sequences."""
VECTOR_ELEMENTS = 32
"""torch computes this many float32 numbers at once on a CPU, or a divisor of it."""


def by_whole_vectors(function: Callable[[Tensor], Tensor], x_TX: Tensor) -> Tensor:
    """Apply an elementwise function to rows, so that a row's result does not depend on the number of rows.

    torch takes other code for the elements after the last whole vector of a tensor, and it rounds exp differently.
    """
    rows_TY = x_TX.flatten(1)
    width = rows_TY.shape[1]
    if not width % VECTOR_ELEMENTS:
        return function(x_TX.contiguous())
    padded_TY = F.pad(rows_TY, (0, -width % VECTOR_ELEMENTS))
    return function(padded_TY)[:, :width].unflatten(1, x_TX.shape[1:])


def chunk_slots(rows: StateRows) -> int:
    """Return the slots of scratch that chunks of these rows use at most (see `chunk_slot`)."""
    assert rows.sequences_N4 is not None, "a step with chunks lists its sequences"
    return len(rows.places_T) // CHUNK_ROWS + len(rows.sequences_N4)


@jit
def single_row(p_places, p_positions, p_sequences, i_seq):
    """Return row, whether it is the only one of its sequence, place and position."""
    if p_sequences is None:
        i_row = i_seq.to(tl.int64)
        is_single = i_row >= 0
        i_place = tl.load(p_places + i_row).to(tl.int64)
        start = tl.load(p_positions + i_row)
    else:
        i_row = tl.load(p_sequences + i_seq * 4).to(tl.int64)
        is_single = tl.load(p_sequences + i_seq * 4 + 1) == 1
        i_place = tl.load(p_sequences + i_seq * 4 + 2).to(tl.int64)
        start = tl.load(p_sequences + i_seq * 4 + 3)
    return i_row, is_single, i_place, start


@jit
def draft_counts(p_drafts, i_row, num_rows, MAX_DRAFTS: constexpr, BLOCK_D: constexpr):
    """Return the accepted draft tokens that the state of a row's sequence lacks, and the draft tokens after the row."""
    o_d = tl.arange(0, BLOCK_D)
    i_next = i_row + 1 + o_d
    b_mark = tl.load(p_drafts + i_next, mask=(o_d < MAX_DRAFTS) & (i_next < num_rows), other=0)
    num_drafts = tl.min(tl.where(b_mark == -2, MAX_DRAFTS, o_d), axis=0)  # DRAFT
    return tl.load(p_drafts + i_row).to(tl.int32), num_drafts


@jit
def chunk_slot(i_seq, first, CHUNK: constexpr):
    """Return the slot of scratch of a chunk: pieces are in the order of their rows, so no two chunks share one."""
    return (first // CHUNK + i_seq).to(tl.int64)


@jit
def clear_padded_rows(p_out, out_stride, p_places, first, num_rows, o_x, m_x, TILE: constexpr):
    """Zero columns `o_x` of the rows of padding among TILE rows."""
    o_row = first + tl.arange(0, TILE).to(tl.int64)
    m_row = o_row < num_rows
    m_row = m_row & (tl.load(p_places + o_row, mask=m_row, other=0) < 0)
    p_zeros = p_out + o_row[:, None] * out_stride + o_x[None, :]
    tl.store(p_zeros, tl.zeros(p_zeros.shape, p_out.dtype.element_ty), mask=m_row[:, None] & m_x[None, :])

"""Lists of a step's sequences and chunks, and the sizes that plans share with kernels."""

import pytest
import torch

from holdfast.kernels.state.state_geometry import CHUNK_ROWS, num_chunks, state_list_specs, unsupported_state
from holdfast.kernels.state.state_rows import Piece, StateRows, fill_lists


def test_fill_lists_writes_pieces_and_chunks() -> None:
    sequences_N4, chunks_M4 = (torch.full(spec.shape, 9, dtype=torch.int32) for spec in state_list_specs(256, 3))
    fill_lists([Piece(0, 1, 5, 700), Piece(1, 130, 2, 64)], sequences_N4, chunks_M4)
    assert sequences_N4.tolist() == [[0, 1, 5, 700], [1, 130, 2, 64], [0, 0, 0, 0]]
    assert chunks_M4[:4].tolist() == [[1, 1, 64, 0], [1, 65, 64, 1], [1, 129, 2, 2], [0, 0, 0, 0]]
    assert not chunks_M4[3:].any()
    fill_lists([], sequences_N4, chunks_M4)
    assert not sequences_N4.any()
    assert not chunks_M4.any()


@pytest.mark.parametrize("lengths", [[65] * 4, [64, 192], [2] * 7, [1, 255], [256], [63, 66, 127]])
def test_num_chunks_suffices_for_any_pieces(lengths) -> None:
    specs = state_list_specs(sum(lengths), len(lengths))
    pieces, row = [], 0
    for place, length in enumerate(lengths):
        pieces.append(Piece(row, length, place, 0))
        row += length
    sequences_N4, chunks_M4 = (torch.zeros(spec.shape, dtype=torch.int32) for spec in specs)
    fill_lists(pieces, sequences_N4, chunks_M4)
    slots = [first // CHUNK_ROWS + number for number, first, size, _ in chunks_M4.tolist() if size]
    assert len(set(slots)) == len(slots), "chunks share scratch"
    assert max(slots, default=0) < num_chunks(sum(lengths), len(lengths))


def test_fill_lists_refuses_more_than_fits() -> None:
    sequences_N4, chunks_M4 = (torch.zeros(spec.shape, dtype=torch.int32) for spec in state_list_specs(64, 1))
    with pytest.raises(AssertionError, match="2 entries for a list of 1"):
        fill_lists([Piece(0, 1, 0, 0), Piece(1, 1, 1, 0)], sequences_N4, chunks_M4)


def test_state_rows_without_lists_are_single_rows() -> None:
    rows = StateRows(torch.tensor([3, -1, 0]), torch.tensor([7, 10**9, 0]))
    assert rows.pieces() == rows.single_rows() == [Piece(0, 1, 3, 7), Piece(2, 1, 0, 0)]
    assert rows.long_pieces() == []


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((2, 3, 16, 16, 4), "no multiple of 2"),
        ((1, 1, 16, 257, 4), "not 257"),
        ((1, 1, 16, 16, 9), "not 9"),
        ((16, 48, 128, 128, 4), None),
    ],
)
def test_unsupported_state_names_reason(shape, reason) -> None:
    found = unsupported_state(*shape)
    assert found is reason if reason is None else reason in found

"""Moves: what is read for them, in which pieces, and where it goes; played through with small arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.loading.planning.moves import Move
from holdfast.models.parameters import Part
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, MXFP4


def move(part, scheme=None, dtype="bfloat16"):
    return Move(part.tensor, dtype, "w", part, scheme, 0)


def stored_rows(array, read):
    """What `read_into` would give, as rows of the stored tensor."""
    rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(-1, 1)
    rows = rows[read.row_start : read.row_end]
    return rows if read.columns is None else rows[:, read.columns[0] : read.columns[1]]


def played(own, array, max_bytes, out):
    """Carry out a move without quantizing, in pieces of at most so many bytes."""
    for start, end in own.row_ranges(max_bytes):
        chunk = stored_rows(array, own.read(start, end))
        assert chunk.size * 2 == (end - start) * own.row_bytes, "a chunk holds what it says"
        shape = (end - start, own.num_read_columns)
        rows = chunk.reshape(shape[::-1]).T if own.part.is_transposed else chunk.reshape(shape)
        first, last = own.kept_columns
        place, stop = own.target_rows(start, end)
        out[place:stop] = np.repeat(rows[:, first:last], own.part.repeats, axis=0)


@given(st.data())
def test_pieces_of_any_size_give_the_same_rows(data):
    lead, num_rows, num_columns = (data.draw(st.integers(1, 4)) for _ in range(3))
    is_transposed = data.draw(st.booleans())
    upright = np.arange(lead * num_rows * num_columns).reshape(lead, num_rows, num_columns)
    array = np.ascontiguousarray(upright.transpose(0, 2, 1)) if is_transposed else upright
    rows = sorted(data.draw(st.lists(st.integers(0, lead * num_rows), min_size=2, max_size=2, unique=True)))
    columns = sorted(data.draw(st.lists(st.integers(0, num_columns), min_size=2, max_size=2, unique=True)))
    repeats = data.draw(st.integers(1, 3))
    part = Part("t", 2, array.shape, tuple(rows), tuple(columns), is_transposed, repeats)
    scheme = data.draw(st.sampled_from([None, FP8, MXFP4]))
    own = move(part, scheme)
    out = np.full((2 + part.num_rows + 1, part.num_columns), -1)
    played(own, array, data.draw(st.integers(1, 40)), out)
    wanted = upright.reshape(-1, num_columns)[rows[0] : rows[1], columns[0] : columns[1]]
    assert (out[2:-1] == np.repeat(wanted, repeats, axis=0)).all()
    assert (out[:2] == -1).all()
    assert (out[-1] == -1).all()


def test_joined_rows_are_read_as_they_are_stored():
    array = np.arange(2 * 3 * 4 * 16).reshape(2, 3, 4, 16)
    part = Part("t_blocks", 0, array.shape, rows=(1, 5), columns=(16, 48), joined_rows=4)
    out = np.zeros((4, 32), dtype=int)
    played(move(part), array, 130, out)
    assert (out == array.reshape(6, 64)[1:5, 16:48]).all()
    assert move(part).read_columns is None, "stored rows are narrower than ours"


@pytest.mark.parametrize(
    ("scheme", "read_columns", "kept"),
    [(None, (128, 256), (0, 128)), (FP8_BLOCK, (128, 256), (0, 128)), (MXFP4, (128, 256), (0, 128))]
    + [(scheme, None, (128, 256)) for scheme in (FP8, FP8_TENSOR)],
    ids=["as stored", "fp8_block", "mxfp4", "fp8", "fp8_tensor"],
)
def test_a_scale_by_row_needs_whole_rows_and_others_only_what_is_kept(scheme, read_columns, kept):
    own = move(Part("t", 0, (256, 512), columns=(128, 256)), scheme)
    assert (own.read_columns, own.kept_columns) == (read_columns, kept)
    assert own.row_bytes == 2 * (512 if read_columns is None else 128)


def test_blocks_of_rows_are_never_cut():
    own = move(Part("t", 128, (300, 64), rows=(0, 300)), FP8_BLOCK)
    assert list(own.row_ranges(1)) == [(0, 128), (128, 256), (256, 300)]
    assert list(own.row_ranges(300 * 128)) == [(0, 256), (256, 300)]
    assert own.least_bytes == 128 * 128
    assert own.chunk_bytes == 300 * 128
    assert move(Part("t", 0, (40, 64)), FP8_BLOCK).least_bytes == 40 * 128


def test_rows_of_a_transposed_tensor_end_with_their_matrix():
    own = move(Part("t", 0, (3, 8, 5), is_transposed=True))
    assert list(own.row_ranges(10**6)) == [(0, 5), (5, 10), (10, 15)]
    assert own.read(5, 10) == (8, 16, None)
    assert own.read(6, 8) == (8, 16, (1, 3))
    with pytest.raises(AssertionError, match="two matrices"):
        own.read(4, 6)


def test_the_peak_of_a_share_is_that_of_the_whole():
    assert move(Part("t", 0, (8, 4), rows=(2, 4), whole_rows=(0, 4)), FP8_TENSOR).peak_rows == (0, 4)
    assert move(Part("t", 0, (8, 4)), FP8_TENSOR).peak_rows == (0, 8)
    assert move(Part("t", 0, (8, 4)), FP8).peak_rows is None
    own = move(Part("t", 0, (8, 4), rows=(2, 4), whole_rows=(0, 6)), FP8_TENSOR)
    assert list(own.row_ranges(16, own.peak_rows)) == [(0, 2), (2, 4), (4, 6)]

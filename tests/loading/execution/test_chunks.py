import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loading.execution.ring import cut_chunks
from holdfast.loading.planning.moves import Move
from holdfast.models.parameters import Part
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, MXFP4


def move(shape, scheme=None, dtype="bfloat16", **part):
    return Move("t", dtype, "w", Part("t", 0, shape, **part), scheme, 1000 + len(shape))


def pieces_of(chunks):
    return [piece for chunk in chunks for piece in chunk.pieces]


SHAPES = st.one_of(
    st.builds(lambda n, k: move((n, k)), st.integers(1, 300), st.integers(1, 40)),
    st.builds(lambda n: move((n,), dtype="float32"), st.integers(1, 300)),
    st.builds(
        lambda e, k, n, columns: move((e, k, n), is_transposed=True, columns=(0, max(1, k // 2)) if columns else None),
        st.integers(1, 4),
        st.integers(1, 40),
        st.integers(1, 60),
        st.booleans(),
    ),
    st.builds(
        lambda e, n, k: move((e, 128 * n, k), FP8_BLOCK), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40)
    ),
    st.builds(lambda n, k: move((n, k), FP8_BLOCK), st.integers(1, 300), st.integers(1, 40)),
    st.builds(lambda n, k: move((n, 32 * k), MXFP4, columns=(0, 32)), st.integers(1, 300), st.integers(2, 4)),
    st.builds(
        lambda n, k, share: move((n, k), FP8_TENSOR, rows=(0, max(1, n // 2)) if share else None, whole_rows=(0, n)),
        st.integers(1, 300),
        st.integers(1, 40),
        st.booleans(),
    ),
)


@settings(max_examples=200)
@given(st.lists(SHAPES, max_size=6), st.lists(SHAPES, max_size=2), st.sampled_from([1, 256, 1000, 5000, 2**20]))
def test_every_row_is_placed_once_in_chunks_that_are_bounded(moves, twins, chunk_bytes):
    chunks = list(cut_chunks(moves, twins, chunk_bytes))
    jobs = [*moves, *twins]
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    least = max((job.least_bytes for job in jobs), default=0)
    for chunk in chunks:
        assert chunk.num_bytes < max(chunk_bytes, least) + 256
        end = 0
        for piece in chunk.pieces:
            assert piece.offset % 256 == 0
            assert piece.offset >= end, "pieces overlap"
            end = piece.offset + piece.num_bytes
            job = jobs[piece.move]
            assert piece.num_bytes == piece.num_rows * job.row_bytes
            assert piece.read == job.read(piece.row, piece.row + piece.num_rows)
        assert end <= chunk.num_bytes
        assert chunk.after <= chunk.number
    assert sum(chunk.done_bytes for chunk in chunks) == pytest.approx(sum(job.num_bytes for job in jobs))
    for index, job in enumerate(jobs):
        own = [piece for piece in pieces_of(chunks) if piece.move == index]
        rows = [row for piece in own if piece.places for row in range(piece.row, piece.row + piece.num_rows)]
        assert rows == list(range(*job.part.row_range))
        starts = [piece.row - job.part.row_range[0] for piece in own if piece.places]
        assert all(start % job.block_rows == 0 for start in starts)
        looked_at = [row for piece in own if piece.finds_peak for row in range(piece.row, piece.row + piece.num_rows)]
        assert looked_at == (list(range(*job.peak_rows)) if job.peak_rows else [])


@settings(max_examples=100)
@given(st.lists(SHAPES, max_size=6), st.lists(SHAPES, max_size=2), st.sampled_from([256, 1000, 5000, 2**20]))
def test_peaks_come_before_rows_and_moves_before_twins(moves, twins, chunk_bytes):
    chunks = list(cut_chunks(moves, twins, chunk_bytes))
    for index in range(len(moves) + len(twins)):
        own = [
            (chunk, place, piece) for chunk in chunks for place, piece in enumerate(chunk.pieces) if piece.move == index
        ]
        peaks = [(chunk.number, place) for chunk, place, piece in own if piece.finds_peak]
        for chunk, place, piece in own:
            if piece.places and peaks:
                last_chunk, last_place = peaks[-1]
                is_same = last_chunk == chunk.number and last_place <= place
                assert is_same or (last_chunk < chunk.number and chunk.after > last_chunk)
    first_twin = next((chunk.number for chunk in chunks if chunk.pieces[-1].move >= len(moves)), len(chunks))
    for chunk in chunks[first_twin:]:
        assert all(piece.move >= len(moves) for piece in chunk.pieces)
        assert chunk.after >= first_twin


def test_small_moves_share_a_chunk_and_one_that_fits_is_never_cut():
    moves = [move((n, 64)) for n in (2, 3, 5, 30, 4, 200)]  # rows of 128 bytes, 32 to a chunk
    chunks = list(cut_chunks(moves, [], 4096))
    assert [[piece.move for piece in chunk.pieces] for chunk in chunks][:3] == [[0, 1, 2], [3], [4]]
    assert [piece.num_rows for piece in pieces_of(chunks) if piece.move == 5] == [32] * 6 + [8]
    assert all(chunk.after == 0 for chunk in chunks)


def test_a_transposed_matrix_is_read_whole_where_it_fits_and_by_columns_where_not():
    whole = pieces_of(cut_chunks([move((2, 10, 6), is_transposed=True)], [], 200))
    assert [(piece.row, piece.num_rows, piece.read) for piece in whole] == [
        (0, 6, (0, 10, None)),
        (6, 6, (10, 20, None)),
    ]
    cut = pieces_of(cut_chunks([move((2, 10, 6), is_transposed=True, columns=(2, 7))], [], 45))
    assert [piece.read for piece in cut] == [(2, 7, (0, 4)), (2, 7, (4, 6)), (12, 17, (0, 4)), (12, 17, (4, 6))]


def test_a_tensor_with_one_scale_is_read_once_if_it_fits_and_twice_if_not():
    (piece,) = pieces_of(cut_chunks([move((10, 10), FP8_TENSOR)], [], 256))
    assert (piece.finds_peak, piece.places) == (True, True)
    pieces = pieces_of(cut_chunks([move((10, 10), FP8_TENSOR)], [], 100))
    assert [(piece.finds_peak, piece.places, piece.row) for piece in pieces] == [
        (True, False, 0),
        (True, False, 5),
        (False, True, 0),
        (False, True, 5),
    ]
    shared = pieces_of(cut_chunks([move((10, 10), FP8_TENSOR, rows=(5, 10), whole_rows=(0, 10))], [], 512))
    assert [(piece.finds_peak, piece.places, piece.row, piece.num_rows) for piece in shared] == [
        (True, False, 0, 10),
        (False, True, 5, 5),
    ]


def test_rows_that_share_a_scale_stay_together_even_if_they_are_too_large():
    moves = [move((3,)), move((300, 100), FP8_BLOCK), move((3, 100), FP8)]
    sizes = [chunk.num_bytes for chunk in cut_chunks(moves, [], 1000)]
    assert sizes == [256, 128 * 200, 128 * 200, 44 * 200 + 160, 768]
    assert moves[1].least_bytes == 128 * 200


def test_chunks_are_cut_while_they_are_asked_for():
    """Twenty thousand tensors cost nothing before the first chunk, and little each."""
    moves = [move((64, 2048), FP8)] * 20_000
    start = time.perf_counter()
    chunks = cut_chunks(moves, [], 16 * 2**20)
    first = next(chunks)
    assert len(first.pieces) == 64
    assert time.perf_counter() - start < 0.05
    num_pieces = len(first.pieces) + sum(len(chunk.pieces) for chunk in chunks)
    assert num_pieces == 20_000
    assert time.perf_counter() - start < 5


def test_no_bytes_are_our_own_mistake():
    with pytest.raises(AssertionError, match="chunk_bytes=0"):
        list(cut_chunks([], [], 0))

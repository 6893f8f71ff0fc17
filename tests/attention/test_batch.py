import torch

from holdfast.attention.batch import Batch, SequenceRows


def test_a_sequence_ends_behind_its_rows():
    assert SequenceRows(row_start=5, num_rows=3, start=40, pages=[1]).end == 43


def test_a_batch_counts_its_rows_whoever_they_belong_to():
    rows = torch.zeros(7, dtype=torch.int64)
    sequences = (SequenceRows(0, 4, 0, [0]), SequenceRows(4, 3, 9, [1, 2]))
    batch = Batch(rows, rows, rows, sequences, None)
    assert batch.num_rows == 7 == sum(sequence.num_rows for sequence in batch.sequences)

from dataclasses import FrozenInstanceError

import pytest
import torch

from holdfast.attention.backend import Batch, LogitRows, SequenceRows


def test_a_sequence_ends_behind_its_rows():
    assert SequenceRows(row_start=5, num_rows=3, start=40, pages=[1]).end == 43


def test_a_batch_counts_its_rows_padding_included():
    rows = torch.zeros(9, dtype=torch.int64)
    sequences = (SequenceRows(0, 4, 0, [0]), SequenceRows(4, 3, 9, [1, 2]))
    batch = Batch(rows, rows, rows, sequences, None)
    assert batch.num_rows == 9
    assert sum(sequence.num_rows for sequence in batch.sequences) == 7


def test_without_a_device_there_is_no_page_table():
    rows = torch.zeros(1, dtype=torch.int64)
    sequence = SequenceRows(0, 1, 0, [0])
    assert sequence.table_row == -1
    assert Batch(rows, rows, rows, (sequence,), None).page_table_NP is None


def test_a_step_does_not_change_on_its_way():
    rows = torch.zeros(1, dtype=torch.int64)
    for value, field in ((Batch(rows, rows, rows, (), None), "logits"), (LogitRows(rows, ()), "sequences")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, ())

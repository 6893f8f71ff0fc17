"""Chunks of a vocabulary, rows of a table, and scratch that does not grow with what is worked on in turns."""

import pytest

from holdfast.kernels.geometry import (
    CHUNK_TOKENS,
    MAX_CANDIDATES,
    MAX_ROWS,
    NUM_FIELDS,
    LogitRow,
    num_chunks,
    scratch_specs,
)


@pytest.mark.parametrize("vocab_size", [1, 2, 8191, 8192, 8193, 151936])
@pytest.mark.parametrize("chunk_tokens", [1, 64, CHUNK_TOKENS])
def test_chunks_cover_a_vocabulary_and_none_is_empty(vocab_size, chunk_tokens):
    chunks = num_chunks(vocab_size, chunk_tokens)
    assert (chunks - 1) * chunk_tokens < vocab_size <= chunks * chunk_tokens


def test_a_row_of_a_table_is_aligned_anywhere():
    assert NUM_FIELDS * 8 % 16 == 0
    assert LogitRow._fields[:7] == ("source", "target", "negative_temperature", "min_p", "top_p", "top_k", "uniform")


def test_scratch_by_row_and_by_rows_at_once():
    shapes = {spec.name: spec.shape for spec in scratch_specs(1000, 151936)}
    assert shapes["chunk_largest"] == shapes["chunk_argmax"] == (1000, 19)
    assert shapes["chunk_weights"] == shapes["chunk_nearer"] == (MAX_ROWS, 19)
    assert shapes["listed_ids"] == shapes["listed_logits"] == (MAX_ROWS, MAX_CANDIDATES)


def test_little_is_held_for_little():
    assert sum(spec.num_bytes for spec in scratch_specs(1, 100)) < 2000

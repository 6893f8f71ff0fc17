"""Bytes that sampling declares: from shapes, without torch, and not growing with what blocks bound."""

import itertools
import subprocess
import sys

import pytest

from holdfast.runner.sampling_terms import BLOCK_ELEMENTS, rows_per_block, sampling_terms


def num_bytes(max_num_seqs: int, vocab_size: int) -> dict[str, int]:
    return {term.owner: term.num_bytes for term in sampling_terms(max_num_seqs, vocab_size)}


@pytest.mark.parametrize("vocab_size", [2, 100, 8193, 49152, 151936, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1])
def test_a_block_holds_at_least_a_row_and_at_most_its_elements(vocab_size):
    rows = rows_per_block(vocab_size)
    assert rows >= 1
    assert rows == 1 or rows * vocab_size <= BLOCK_ELEMENTS
    assert (rows + 1) * vocab_size > BLOCK_ELEMENTS


def test_logits_are_four_bytes_each():
    assert num_bytes(256, 151936)["logits"] == 256 * 151936 * 4


def test_temporaries_do_not_grow_with_sequences_once_a_block_is_full():
    few, many = num_bytes(27, 151936), num_bytes(1024, 151936)
    assert many["sampling/block"] == few["sampling/block"] < 104 * 2**20
    assert many["sampling/edits"] == few["sampling/edits"] < 4 * 2**20
    assert many["sampling/results"] < 4 * 2**20


def test_a_single_sequence_does_not_pay_for_a_whole_block():
    assert num_bytes(1, 151936)["sampling/block"] < num_bytes(27, 151936)["sampling/block"] / 26


@pytest.mark.parametrize("vocab_size", [2, 49152, 151936])
def test_more_sequences_never_need_less(vocab_size):
    plans = [num_bytes(max_num_seqs, vocab_size) for max_num_seqs in (1, 2, 27, 28, 256)]
    for fewer, more in itertools.pairwise(plans):
        assert all(fewer[owner] <= more[owner] for owner in fewer)


def test_reasons_are_words_for_the_table():
    assert all(term.reason and term.owner for term in sampling_terms(8, 1000))


def test_no_torch_is_imported():
    code = "import sys, holdfast.runner.sampling_terms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

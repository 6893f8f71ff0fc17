"""Bytes that sampling declares: from shapes, without torch, and not growing with what blocks bound."""

import itertools
import subprocess
import sys

import pytest

from holdfast.kernels.geometry import EDITS_PER_PROGRAM
from holdfast.planning.terms import (
    BLOCK_ELEMENTS,
    EDITED_ELEMENTS,
    PROMPT_ROWS,
    device_specs,
    edited_rows_per_block,
    host_specs,
    rows_per_block,
    sampling_terms,
)


def num_bytes(max_num_seqs: int, vocab_size: int, device_kind: str = "cpu") -> dict[str, int]:
    return {term.owner: term.num_bytes for term in sampling_terms(max_num_seqs, vocab_size, device_kind)}


@pytest.mark.parametrize("vocab_size", [2, 100, 8193, 49152, 151936, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1])
def test_a_block_holds_at_least_a_row_and_at_most_its_elements(vocab_size):
    rows = rows_per_block(vocab_size, 10**9)
    assert rows >= 1
    assert rows == 1 or rows * vocab_size <= BLOCK_ELEMENTS
    assert (rows + 1) * vocab_size > BLOCK_ELEMENTS
    assert rows_per_block(vocab_size, 1) == 1
    edited_rows = edited_rows_per_block(vocab_size, 10**9)
    assert edited_rows == 1 or edited_rows * vocab_size <= EDITED_ELEMENTS
    assert edited_rows_per_block(vocab_size, 1) == 1


@pytest.mark.parametrize(("max_num_seqs", "most_mib"), [(1, 14), (256, 60), (1024, 62)])
def test_what_a_gpu_holds(max_num_seqs, most_mib):
    """Edited rows are most of it; what grows with the sequences is little."""
    assert sum(num_bytes(max_num_seqs, 151936, "cuda").values()) < most_mib * 2**20


@pytest.mark.parametrize("vocab_size", [1, 100, 151936])
@pytest.mark.parametrize("max_num_seqs", [1, 64, 256])
def test_buffers_of_a_gpu(max_num_seqs, vocab_size):
    shapes = {spec.name: spec.shape for spec in device_specs(max_num_seqs, vocab_size)}
    rows = max(max_num_seqs, PROMPT_ROWS)
    assert shapes["argmax"] == shapes["chosen"] == (rows,)
    assert shapes["rows"][0] == 2 * rows  # a choice and log-probabilities
    assert shapes["block"][0] <= shapes["chunk_weights"][0] <= rows
    assert shapes["block_argmax"][0] >= max(PROMPT_ROWS, shapes["block"][0])
    assert shapes["edits"][0] % EDITS_PER_PROGRAM == 0
    assert shapes["edits"][0] >= min(4 * shapes["block"][0] * vocab_size, 2**20)
    assert all(shapes[spec.name] == spec.shape for spec in host_specs(max_num_seqs, vocab_size))


def test_each_buffer_of_a_gpu_is_a_term_while_serving():
    terms = sampling_terms(256, 151936, "cuda")
    assert [term.owner for term in terms] == [f"sampling/{spec.name}" for spec in device_specs(256, 151936)]
    assert {term.phases for term in terms} == {("capture", "serve")}


def test_temporaries_do_not_grow_with_sequences_once_a_block_is_full():
    few, many = num_bytes(27, 151936), num_bytes(1024, 151936)
    assert many["sampling/block"] == few["sampling/block"] < 104 * 2**20
    assert many["sampling/edits"] == few["sampling/edits"] < 4 * 2**20
    assert many["sampling/results"] < 4 * 2**20


def test_a_single_sequence_does_not_pay_for_a_whole_block():
    assert num_bytes(1, 151936)["sampling/block"] < num_bytes(27, 151936)["sampling/block"] / 26


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize("vocab_size", [2, 49152, 151936])
def test_more_sequences_never_need_less(vocab_size, device_kind):
    plans = [num_bytes(max_num_seqs, vocab_size, device_kind) for max_num_seqs in (1, 2, 27, 28, 256)]
    for fewer, more in itertools.pairwise(plans):
        assert all(fewer[owner] <= more[owner] for owner in fewer)


def test_reasons_are_words_for_the_table():
    assert all(term.reason and term.owner for kind in ("cpu", "cuda") for term in sampling_terms(8, 1000, kind))


def test_no_torch_is_imported():
    code = "import sys, holdfast.planning.terms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

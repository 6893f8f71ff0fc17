import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import Limits
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES
from holdfast.planning.terms import LISTED_PAGES, batch_terms, input_specs, page_table_specs

INPUTS = ["inputs/token_ids", "inputs/positions", "inputs/slots", "inputs/logit_rows"]


def test_figures_of_a_gpu():
    terms = {term.owner: term.num_bytes for term in batch_terms(Limits(256, 8192, 2**20, 16), "cuda")}
    assert terms == {
        **dict.fromkeys(INPUTS, 64 * 1024),
        "inputs/page_table": 64 * 1024**2,
        "inputs/page_updates": 64 * 1024,
    }


@pytest.mark.parametrize("max_num_seqs", [1, 512])
def test_a_cpu_has_no_page_table(max_num_seqs):
    terms = batch_terms(Limits(max_num_seqs, 2048, 2**20, 16), "cpu")
    assert [(term.owner, term.num_bytes) for term in terms] == [(owner, 8 * 2048) for owner in INPUTS]


@given(st.integers(1, 600), st.integers(1, 20000), st.integers(1, 2**21), st.sampled_from([1, 2, 16, 64, 256]))
def test_every_place_of_every_step_has_room(max_num_seqs, max_num_rows, max_model_len, page_tokens):
    limits = Limits(max_num_seqs, max_num_rows, max_model_len, page_tokens)
    for spec in input_specs(limits):
        assert 0 <= spec.shape[0] - max_num_rows < ALIGNMENT_BYTES // 8
        assert spec.num_bytes == spec.aligned_bytes
    table, updates = page_table_specs(limits)
    num_seqs, num_pages = table.shape
    assert num_seqs == max_num_seqs
    assert (num_pages - 1) * page_tokens < max_model_len <= num_pages * page_tokens
    assert updates.shape[0] == max_num_seqs * LISTED_PAGES
    specs = (*input_specs(limits), table, updates)
    assert [term.num_bytes for term in batch_terms(limits, "cuda")] == [spec.num_bytes for spec in specs]
    assert all(term.reason for term in batch_terms(limits, "cuda"))

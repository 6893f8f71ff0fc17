"""Numbers behind log-probabilities: exact against a sort, with lists and without."""

import pytest
import torch

from holdfast.kernels.geometry import CHUNK_TOKENS, MAX_CANDIDATES, NO_TOKEN, LogitRow
from holdfast.kernels.sampling.argmax import argmax_reference
from holdfast.kernels.sampling.logprobs import FIXED_COLUMNS, logprob_rows, logprob_rows_reference, logprob_rows_triton
from kernels.exactness import random
from kernels.logit_cases import INF, NAN, agreed_logits, make_scratch, make_table
from kernels.triton_cases import QUIET, amid_poison, assert_allocates_nothing

pytestmark = QUIET

MAX_TOP = 20
NUM_COLUMNS = FIXED_COLUMNS + 2 * MAX_TOP
LISTS = pytest.mark.parametrize("num_candidates", [MAX_CANDIDATES, 3], ids=["lists", "no lists"])


def argmax_of(logits):
    out = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    argmax_reference(logits, out, None)
    return out


def columns_of(measure, logits, tokens, rows, guarded, device, chunk_tokens=1024, num_candidates=MAX_CANDIDATES):
    columns = guarded(len(rows), NUM_COLUMNS, dtype=torch.float64).fill_(-9.0)
    scratch = make_scratch(guarded, len(rows), logits.shape[1], chunk_tokens, num_candidates)
    tokens = torch.tensor(tokens, device=device)
    measure(logits, argmax_of(logits).to(device), tokens, make_table(rows, device), columns, scratch)
    return columns.tolist()


def rows_with(*num_tops):
    return [LogitRow(row, row, negative_temperature=-1.0, top_k=num_top) for row, num_top in enumerate(num_tops)]


@pytest.mark.each_pair
@LISTS
@pytest.mark.parametrize("num_values", [500, 5], ids=["few ties", "many ties"])
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 1000, 4097], ids=lambda size: f"V{size}")
def test_logprob_rows_matches_reference_amid_poison(device, guarded, vocab_size, num_values, num_candidates):
    logits = agreed_logits(4, vocab_size, 1.0, device, num_values)
    tokens = [vocab_size - 1, vocab_size // 2, 0, vocab_size // 3]
    rows = rows_with(0, 1, min(5, vocab_size), min(MAX_TOP, vocab_size))
    rows = [
        row._replace(target=3 - row.target) for row in rows
    ]  # logits and tokens of a row lie at places of their own
    expected = columns_of(logprob_rows_reference, logits, tokens, rows, guarded, device)
    poisoned = amid_poison(logits, device)
    assert columns_of(logprob_rows_triton, poisoned, tokens, rows, guarded, device, 2048, num_candidates) == expected


def test_logprob_rows_fills_every_column(device, guarded):
    logits = torch.tensor([[1.0, 3.0, -INF, 3.0, 2.0]], device=device)
    for measure in (logprob_rows_triton, logprob_rows_reference):
        (columns,) = columns_of(measure, logits, [4], rows_with(5), guarded, device, chunk_tokens=4)
        assert columns[0] == 1.0
        assert columns[1] / 2**40 == pytest.approx(2 + 2.718281828**-1 + 2.718281828**-2)
        assert columns[2:4] == [1.0, 3.0]
        assert columns[FIXED_COLUMNS : FIXED_COLUMNS + 5] == [1.0, 3.0, 4.0, 0.0, 2.0]
        assert columns[FIXED_COLUMNS + MAX_TOP :][:5] == [0.0, 0.0, 1.0, 2.0, INF]


@LISTS
def test_logprob_rows_without_a_token_leave_others_alone(device, guarded, num_candidates):
    logits = random(4, 50).to(device)
    clean = columns_of(logprob_rows_triton, logits, [1, 2, 3, 4], rows_with(5, 5, 5, 5), guarded, device, 32)
    logits[1, 7], logits[2] = NAN, -INF
    for measure in (logprob_rows_triton, logprob_rows_reference):
        found = columns_of(measure, logits, [1, 2, 3, 4], rows_with(5, 5, 5, 5), guarded, device, 32, num_candidates)
        assert found[1] == found[2] == [0.0, *[-9.0] * (NUM_COLUMNS - 1)]
        if measure is logprob_rows_triton:
            assert (found[0], found[3]) == (clean[0], clean[3])


@LISTS
def test_logprob_rows_match_reference_for_infinite_logits(device, guarded, num_candidates):
    logits = torch.zeros(4, 70, device=device)
    logits[1, 60], logits[2, 5:], logits[3, :2] = INF, -INF, torch.tensor([-0.0, 0.0])
    rows = rows_with(20, 20, 20, 20)
    expected = columns_of(logprob_rows_reference, logits, [3, 60, 69, 1], rows, guarded, device)
    found = columns_of(logprob_rows_triton, logits, [3, 60, 69, 1], rows, guarded, device, 32, num_candidates)
    assert found == expected


def test_logprob_rows_reads_no_token_as_the_first_token(device, guarded):
    logits = random(1, 40).to(device)
    first, none = (
        columns_of(logprob_rows_triton, logits, [token], rows_with(2), guarded, device) for token in (0, NO_TOKEN)
    )
    assert first == none


@LISTS
def test_logprob_rows_are_batch_invariant(device, guarded, num_candidates):
    logits = random(5, 300, scale=2.0).to(device)
    tokens = [5, 299, 0, 7, 100]
    rows = rows_with(3, 20, 0, 7, 1)
    together = columns_of(logprob_rows_triton, logits, tokens, rows, guarded, device, 128, num_candidates)
    order = [3, 1, 4, 0, 2]
    moved = columns_of(
        logprob_rows_triton, logits, tokens, [rows[i] for i in order], guarded, device, 128, num_candidates
    )
    assert moved == [together[i] for i in order]
    for i in order:
        one = rows[i]._replace(source=0, target=0)
        alone = columns_of(
            logprob_rows_triton, logits[i : i + 1], tokens[i : i + 1], [one], guarded, device, 128, num_candidates
        )
        assert alone == [together[i]]


def test_logprob_rows_refuse_misfit_columns(device, guarded):
    logits, top = torch.zeros(2, 9, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    table, scratch = make_table(rows_with(1, 1), device), make_scratch(guarded, 2, 9, 16, 4)
    with pytest.raises(AssertionError, match="a row for each of 2"):
        logprob_rows_triton(logits, top, top, table, torch.zeros(3, NUM_COLUMNS, dtype=torch.float64), scratch)
    with pytest.raises(AssertionError, match="not dense"):
        logprob_rows_triton(logits, top, top, table, torch.zeros(NUM_COLUMNS, 2, dtype=torch.float64).T, scratch)


def test_logprob_rows_accepts_no_rows(device, guarded):
    logits, top = torch.zeros(1, 9, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    columns = torch.zeros(0, NUM_COLUMNS, dtype=torch.float64, device=device)
    logprob_rows_triton(
        logits, top, top, make_table(rows_with(1), device)[:0], columns, make_scratch(guarded, 1, 9, 16, 4)
    )


@pytest.mark.gpu
@LISTS
@pytest.mark.parametrize("num_values", [500, 20], ids=["few ties", "many ties"])
def test_logprob_rows_matches_reference_at_large_vocabulary(device, guarded, num_values, num_candidates):
    logits = agreed_logits(64, 151936, 1.0, device, num_values)
    tokens, rows = list(range(0, 64 * 2000, 2000)), rows_with(*(row % 21 for row in range(64)))
    expected = columns_of(logprob_rows_reference, logits, tokens, rows, guarded, device)
    found = columns_of(logprob_rows_triton, logits, tokens, rows, guarded, device, CHUNK_TOKENS, num_candidates)
    assert found == expected


@pytest.mark.gpu
def test_logprob_rows_allocates_nothing(device, guarded):
    logits = random(4, 151936, scale=3.0).to(device)
    top, table = argmax_of(logits), make_table(rows_with(0, 1, 5, 20), device)
    columns = torch.zeros(4, NUM_COLUMNS, dtype=torch.float64, device=device)
    scratch = make_scratch(guarded, 4, 151936, CHUNK_TOKENS, MAX_CANDIDATES)
    assert_allocates_nothing(lambda: logprob_rows(logits, top, top, table, columns, scratch))

"""Lists of tokens: enough for their readers, in the order of the vocabulary, and sums that are exact."""

import pytest
import torch

from holdfast.kernels.geometry import NO_TOKEN, LogitRow
from holdfast.kernels.sampling.argmax import argmax_reference
from holdfast.kernels.sampling.candidates import list_near_tokens, reference_distances, reference_weights
from kernels.exactness import random
from kernels.logit_cases import INF, NAN, agreed_logits, make_scratch, make_table
from kernels.triton_cases import QUIET, amid_poison

pytestmark = QUIET

FILTERS = {
    "top_k 1": LogitRow(negative_temperature=-1.0, top_k=1),
    "top_k 30": LogitRow(negative_temperature=-1.0, top_k=30),
    "all but one": LogitRow(negative_temperature=-1.0, top_k=999),
    "tiny top_p": LogitRow(negative_temperature=-1.0, top_p=1e-12),
    "top_p": LogitRow(negative_temperature=-1.0, top_p=0.95),
    "top_p almost 1": LogitRow(negative_temperature=-1.0, top_p=1 - 1e-9),
    "cold top_p": LogitRow(negative_temperature=-0.1, top_p=0.9),
    "hot top_p": LogitRow(negative_temperature=-100.0, top_p=0.5),
    "min_p and top_p": LogitRow(negative_temperature=-1.0, min_p=0.1, top_p=0.9),
    "top_k and top_p": LogitRow(negative_temperature=-1.0, top_k=9, top_p=0.5),
}


def argmax_of(logits):
    out = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    argmax_reference(logits, out, None)
    return out


def listed(logits, rows, guarded, device, chunk_tokens=256, num_candidates=4096, tokens=None):
    scratch = make_scratch(guarded, len(rows), logits.shape[1], chunk_tokens, num_candidates)
    top = argmax_of(logits).to(device)
    list_near_tokens(amid_poison(logits, device), top, make_table(rows, device), tokens, scratch)
    return scratch


@pytest.mark.parametrize("row", FILTERS.values(), ids=FILTERS.keys())
def test_list_near_tokens_holds_kept_tokens_and_few_more(device, guarded, row):
    logits = random(1, 1000, scale=3.0)
    scratch = listed(logits, [row], guarded, device)
    num_listed = int(scratch.num_listed_R[0])
    ids = scratch.listed_ids_RC[0, :num_listed].tolist()
    assert ids == sorted(set(ids))
    assert scratch.listed_logits_RC[0, :num_listed].tolist() == logits[0, ids].tolist()
    distance = reference_distances(logits[0], int(logits[0].argmax()))
    weight = reference_weights(distance, row.negative_temperature, row.min_p)
    order = distance.argsort(stable=True)
    if row.top_k:
        num_needed = row.top_k
    else:
        num_needed = 1 + int((weight[order].cumsum(0).double() < row.top_p * float(weight.sum()) * (1 - 1e-6)).sum())
    assert set(order[:num_needed].tolist()) <= set(ids)
    assert num_listed <= 2 * num_needed + 100


@pytest.mark.parametrize("size", [1, 2, 63, 1000], ids=lambda size: f"V{size}")
@pytest.mark.parametrize("chunk_tokens", [64, 1024])
def test_list_near_tokens_chunk_weights_are_exact(device, guarded, size, chunk_tokens):
    logits = agreed_logits(2, size, 0.7, device).cpu()
    rows = [LogitRow(source, 0, -0.7, min_p) for source, min_p in ((1, 0.0), (0, 0.05), (1, 0.05))]
    scratch = listed(logits, rows, guarded, device, chunk_tokens)
    for row, found in zip(rows, scratch.chunk_weights_RP.tolist(), strict=True):
        distance = reference_distances(logits[row.source], int(logits[row.source].argmax()))
        expected = reference_weights(distance, -0.7, row.min_p)
        assert found == [int(chunk.sum()) for chunk in expected.split(chunk_tokens)]


def test_list_near_tokens_min_p_keeps_tokens_on_the_edge(device, guarded):
    """The most likely ones have a share of exactly one."""
    logits = torch.tensor([[1.0, 3.0, 2.9, 3.0], [0.0, 0.0, -1.0, 0.0]])
    rows = [LogitRow(source, 0, -1.0, min_p=1.0) for source in range(2)]
    scratch = listed(logits, rows, guarded, device, chunk_tokens=4)
    assert (scratch.chunk_weights_RP[:, 0] >> 40).tolist() == [2, 3]
    for row, count in enumerate((2, 3)):
        weight = reference_weights(reference_distances(logits[row], int(logits[row].argmax())), -1.0, 1.0)
        assert int((weight > 0).sum()) == count


def test_list_near_tokens_counts_logits_above_the_given_token(device, guarded):
    logits = random(3, 300).round()
    tokens = torch.tensor([7, 299, NO_TOKEN], device=device)
    rows = [LogitRow(row, row, negative_temperature=-1.0) for row in range(3)]
    scratch = listed(logits, rows, guarded, device, chunk_tokens=128, tokens=tokens)
    expected = [int((logits[row] > logits[row, token]).sum()) for row, token in enumerate((7, 299, 0))]
    assert scratch.chunk_nearer_RP.sum(dim=1).tolist() == expected


def test_list_near_tokens_drops_lists_beyond_the_limit(device, guarded):
    rows = [LogitRow(row, 0, -1.0, top_k=top_k) for row, top_k in ((0, 9), (1, 9), (0, 16), (0, 17))]
    logits = torch.stack((-torch.arange(100.0), torch.zeros(100)))
    scratch = listed(logits, rows, guarded, device, chunk_tokens=32, num_candidates=16)
    assert scratch.num_listed_R.tolist()[1:] == [-1, 16, -1]
    assert 9 <= int(scratch.num_listed_R[0]) <= 16
    assert scratch.listed_ids_RC[2].tolist() == list(range(16))


def test_list_near_tokens_skips_rows_without_need_of_a_list(device, guarded):
    logits = random(4, 100)
    logits[1, 50] = NAN
    logits[2] = -INF
    rows = [
        LogitRow(0, 0, -1.0),
        LogitRow(0, 0, 0.0, top_k=3),
        LogitRow(1, 0, -1.0, top_k=3),
        LogitRow(2, 0, -1.0, top_p=0.5),
        LogitRow(3, 0, -1.0, top_k=3),
    ]
    scratch = listed(logits, rows, guarded, device, chunk_tokens=64)
    assert scratch.num_listed_R.tolist()[:4] == [-7] * 4
    assert int(scratch.num_listed_R[4]) >= 3
    assert (scratch.chunk_weights_RP[:4] == -7).all(dim=1).tolist() == [False, True, True, True]


def test_list_near_tokens_handles_infinite_logits(device, guarded):
    logits = torch.tensor([[INF, 3.0, -INF, INF], [-0.0, 0.0, -INF, -3.4e38]])
    rows = [LogitRow(row, 0, -1.0, top_k=4) for row in range(2)]
    for chunk_tokens in (4, 8):  # lanes beyond the vocabulary are as far as can be, and none of the tokens
        scratch = listed(logits, rows, guarded, device, chunk_tokens, num_candidates=4)
        assert (scratch.chunk_weights_RP[:, 0] >> 40).tolist() == [2, 2]
        assert scratch.num_listed_R.tolist() == [4, 4]
        assert scratch.listed_ids_RC.tolist() == [[0, 1, 2, 3]] * 2


def test_list_near_tokens_refuses_rows_beyond_scratch(device, guarded):
    scratch = make_scratch(guarded, 1, 100, 64, 8)
    logits, top = torch.zeros(2, 100, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    table = make_table([LogitRow(0), LogitRow(1)], device)
    with pytest.raises(AssertionError, match="num_rows=2 exceeds"):
        list_near_tokens(logits, top, table, None, scratch)
    with pytest.raises(AssertionError, match="chunks=1 of 60 tokens"):
        list_near_tokens(logits[:, :60], top, table[:1], None, scratch)
    with pytest.raises(AssertionError, match="side by side"):
        list_near_tokens(torch.zeros(100, 2, device=device).T, top, table[:1], None, scratch)
    with pytest.raises(AssertionError, match="not dense"):
        list_near_tokens(logits, top, table.T, None, make_scratch(guarded, 8, 100, 64, 8))

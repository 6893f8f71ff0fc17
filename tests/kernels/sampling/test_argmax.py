"""Argmax of rows of logits, the kernel and the reference; tables of rows, and scratch from the tensors that its specs describe."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.geometry import (
    CHUNK_TOKENS,
    MAX_CANDIDATES,
    MAX_LOGIT_ROWS,
    NO_TOKEN,
    NUM_FIELDS,
    LogitRow,
    logit_scratch_specs,
    num_chunks,
)
from holdfast.kernels.sampling.argmax import LogitScratch, argmax, argmax_reference, argmax_triton
from holdfast.request import sequence
from kernels.exactness import companies, random
from kernels.logit_cases import INF, NAN, make_scratch
from kernels.triton_cases import QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

SIZES = (1, 2, 63, 64, 65, 1000, 4097)
POISONS = {
    "nan": [NAN],
    "negative nan": [-NAN],
    "nan and inf": [INF, NAN],
    "nan and -inf": [-INF, NAN],
    "all -inf": [-INF],
    "inf": [INF],
    "inf and -inf": [-INF, INF],
    "both zeros": [-0.0, 0.0],
    "zeros": [0.0],
    "the least": [-INF, -3.4e38],
}


def found(logits, guarded, chunk_tokens=64):
    num_rows, vocab_size = logits.shape
    out = guarded(num_rows, dtype=torch.int64).fill_(-9)
    argmax_triton(logits, out, make_scratch(guarded, num_rows, vocab_size, chunk_tokens, 1))
    return out.tolist()


def expected(logits):
    out = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    argmax_reference(logits, out, None)
    return out.tolist()


def test_kernel_no_token_equals_sequence_no_token():
    assert NO_TOKEN == sequence.NO_TOKEN


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"V{size}")
@pytest.mark.parametrize("chunk_tokens", [64, 8192])
def test_argmax_matches_reference_amid_poison(device, guarded, size, chunk_tokens):
    logits = random(5, size)
    logits[3] = logits[3].round()  # ties
    expected_ids = logits.numpy().argmax(axis=1).tolist()
    assert expected(logits) == expected_ids
    assert found(amid_poison(logits, device), guarded, chunk_tokens) == expected_ids


@pytest.mark.each_value
@pytest.mark.parametrize("values", POISONS.values(), ids=POISONS.keys())
@pytest.mark.parametrize("size", [1, 63, 200], ids=lambda size: f"V{size}")
def test_argmax_of_odd_rows_matches_reference(device, guarded, size, values):
    logits = torch.tensor(values).repeat(size)[:size].expand(3, size).clone()
    logits[1] = random(size)
    assert found(logits.to(device), guarded) == expected(logits)


@pytest.mark.parametrize("place", [0, 63, 64, 130, 199])
def test_argmax_nan_anywhere_spoils_only_its_row(device, guarded, place):
    logits = random(3, 200)
    clean = expected(logits)
    logits[1, place] = NAN
    assert found(logits.to(device), guarded) == [clean[0], NO_TOKEN, clean[2]]


@given(st.lists(st.sampled_from([-INF, -0.0, 0.0, 1.0, INF, NAN]), min_size=1, max_size=40))
@settings(max_examples=50)
def test_argmax_finds_the_first_maximum_of_any_row(device, row):
    zones = RedZones(device)
    ids = found(torch.tensor([row], device=device), zones.allocate, chunk_tokens=16)
    zones.check()
    if any(value != value for value in row) or max(row) == -INF:
        assert ids == [NO_TOKEN]
    else:
        assert ids == [row.index(max(row))]


def test_argmax_is_batch_invariant(device, guarded):
    logits = random(17, 130).round().to(device)
    alone = [found(logits[row : row + 1], guarded)[0] for row in range(17)]
    for rows in companies(17):
        assert found(logits[rows], guarded) == [alone[row] for row in rows]


def test_argmax_refuses_rows_beyond_scratch(device, guarded):
    scratch = make_scratch(guarded, 2, 100, 64, 1)
    out = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError, match="num_rows=3 exceeds"):
        argmax_triton(torch.zeros(3, 100, device=device), out, scratch)
    with pytest.raises(AssertionError, match="chunks=4 of 200 tokens"):
        argmax_triton(torch.zeros(2, 200, device=device), out[:2], scratch)
    with pytest.raises(AssertionError, match="side by side"):
        argmax_triton(torch.zeros(100, 2, device=device).T, out[:2], scratch)
    with pytest.raises(AssertionError, match="a number a row"):
        argmax_triton(torch.zeros(2, 100, device=device), out, scratch)


def test_argmax_accepts_no_rows(device, guarded):
    scratch = make_scratch(guarded, 1, 100, 64, 1)
    argmax_triton(torch.zeros(0, 100, device=device), torch.zeros(0, dtype=torch.int64, device=device), scratch)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 512])
def test_argmax_in_graph_matches_reference_at_large_vocabulary(device, guarded, num_rows):
    vocab_size = 151936
    logits = random(num_rows, vocab_size).bfloat16().float().to(device)
    scratch = make_scratch(guarded, num_rows, vocab_size, 8192, 1)
    assert num_chunks(vocab_size) == scratch.chunk_largest_SP.shape[1]
    out = torch.zeros(num_rows, dtype=torch.int64, device=device)
    assert_allocates_nothing(lambda: argmax(logits, out, scratch))
    assert out.tolist() == expected(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        argmax(logits, out, scratch)
    logits.copy_(random(num_rows, vocab_size, seed=1))
    logits[num_rows // 2, 77] = NAN
    graph.replay()
    assert out.tolist() == expected(logits)


@pytest.mark.parametrize("vocab_size", [1, 2, 8191, 8192, 8193, 151936])
@pytest.mark.parametrize("chunk_tokens", [1, 64, CHUNK_TOKENS])
def test_num_chunks_cover_the_vocabulary_without_empty_chunks(vocab_size, chunk_tokens):
    chunks = num_chunks(vocab_size, chunk_tokens)
    assert (chunks - 1) * chunk_tokens < vocab_size <= chunks * chunk_tokens


def test_logit_row_of_a_table_is_aligned():
    assert NUM_FIELDS * 8 % 16 == 0
    assert LogitRow._fields[:7] == ("source", "target", "negative_temperature", "min_p", "top_p", "top_k", "uniform")


def test_logit_scratch_grows_by_rows_at_once():
    shapes = {spec.name: spec.shape for spec in logit_scratch_specs(1000, 151936)}
    assert shapes["chunk_largest"] == shapes["chunk_argmax"] == (1000, 19)
    assert shapes["chunk_weights"] == shapes["chunk_nearer"] == (MAX_LOGIT_ROWS, 19)
    assert shapes["listed_ids"] == shapes["listed_logits"] == (MAX_LOGIT_ROWS, MAX_CANDIDATES)


def test_logit_scratch_of_one_row_is_small():
    assert sum(spec.num_bytes for spec in logit_scratch_specs(1, 100)) < 2000


def test_logit_scratch_tensors_follow_their_specs():
    specs = logit_scratch_specs(3, 20_000)
    tensors = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
    scratch = LogitScratch.of(tensors)
    assert scratch.chunk_tokens == CHUNK_TOKENS
    fields = [getattr(scratch, name) for name in LogitScratch.__slots__ if name != "chunk_tokens"]
    assert [field.data_ptr() for field in fields] == [tensors[spec.name].data_ptr() for spec in specs]
    suffixes = [name.rpartition("_") for name in LogitScratch.__slots__ if name != "chunk_tokens"]
    assert [name for name, _, _ in suffixes] == [spec.name for spec in specs]
    assert [len(suffix) for _, _, suffix in suffixes] == [len(spec.shape) for spec in specs]

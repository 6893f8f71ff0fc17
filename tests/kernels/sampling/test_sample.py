"""Random tokens: the kernel and a sort agree on every token, with lists and without, at every edge."""

import pytest
import torch

from holdfast.kernels.geometry import CHUNK_TOKENS, MAX_CANDIDATES, NO_TOKEN, LogitRow
from holdfast.kernels.sampling import sample as kernel_file
from holdfast.kernels.sampling.argmax import argmax_reference
from holdfast.kernels.sampling.candidates import list_near_tokens
from holdfast.kernels.sampling.sample import sample_tokens, sample_tokens_reference, sample_tokens_triton
from kernels.exactness import random
from kernels.logit_cases import INF, LARGEST_UNIFORM, NAN, agreed_logits, make_scratch, make_table
from kernels.triton_cases import QUIET, amid_poison, assert_allocates_nothing

pytestmark = QUIET

TEMPERATURE = 0.7
FILTERS = {
    "none": {},
    "min_p": {"min_p": 0.05},
    "top_k 1": {"top_k": 1},
    "top_k": {"top_k": 30},
    "large top_k": {"top_k": 600},
    "top_p": {"top_p": 0.9},
    "tiny top_p": {"top_p": 1e-12},
    "top_p almost 1": {"top_p": 1 - 1e-9},
    "top_k and top_p": {"top_k": 40, "top_p": 0.6},
    "all": {"top_k": 600, "top_p": 0.9, "min_p": 0.001},
}
SOME = ("none", "top_p", "all")
"""A row without a list takes the interpreter a tenth of a second."""
UNIFORMS = (0.0, 0.3, 0.77, LARGEST_UNIFORM)
LISTS = pytest.mark.parametrize("num_candidates", [MAX_CANDIDATES, 3], ids=["lists", "no lists"])


def argmax_of(logits):
    out = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    argmax_reference(logits, out, None)
    return out


def chosen(choose, logits, rows, guarded, device, chunk_tokens=1024, num_candidates=MAX_CANDIDATES, raw=None):
    scratch = make_scratch(guarded, len(rows), logits.shape[1], chunk_tokens, num_candidates)
    top = argmax_of(logits).to(device)
    out = guarded(1 + max(row.target for row in rows), dtype=torch.int64).fill_(-9)
    raw = torch.zeros_like(out) if raw is None else raw
    choose(logits, top, make_table(rows, device), raw, out, scratch)
    return out.tolist()


def settings_rows(vocab_size, temperature=TEMPERATURE, names=tuple(FILTERS)):
    """Every filter with some random number, each in a row of its own."""
    rows = []
    for index, filters in enumerate(FILTERS[name] for name in names):
        kept = {name: value for name, value in filters.items() if name != "top_k" or value < vocab_size}
        rows.append(LogitRow(index % 4, index, -temperature, uniform=UNIFORMS[index % len(UNIFORMS)], **kept))
    return rows


@pytest.mark.each_value
@LISTS
@pytest.mark.parametrize(
    ("vocab_size", "num_values"),
    [(1, 500), (2, 500), (63, 500), (63, 6), (1000, 6), (4097, 500)],
    ids=lambda number: str(number),
)
def test_sample_tokens_matches_reference_amid_poison(device, guarded, vocab_size, num_values, num_candidates):
    logits = agreed_logits(4, vocab_size, TEMPERATURE, device, num_values)
    rows = settings_rows(vocab_size)
    expected = chosen(sample_tokens_reference, logits, rows, guarded, device)
    poisoned = amid_poison(logits, device)
    assert chosen(sample_tokens_triton, poisoned, rows, guarded, device, 2048, num_candidates) == expected
    assert vocab_size < 1000 or num_values < 500 or len(set(expected)) > 5


@pytest.mark.each_value
@LISTS
@pytest.mark.parametrize("name", SOME)
def test_sample_tokens_matches_reference_for_every_uniform(device, guarded, name, num_candidates):
    logits = agreed_logits(1, 200, TEMPERATURE, device, num_values=60)
    filters = {field: min(value, 100) for field, value in FILTERS[name].items()}
    rows = [LogitRow(0, i, -TEMPERATURE, uniform=number, **filters) for i, number in enumerate(UNIFORMS)]
    expected = chosen(sample_tokens_reference, logits, rows, guarded, device)
    assert chosen(sample_tokens_triton, logits, rows, guarded, device, 64, num_candidates) == expected


EDGES = {
    "all equal": lambda row: row.fill_(3.0),
    "one huge": lambda row: row[5:6].fill_(1e30),
    "one certain": lambda row: row[5:6].fill_(INF),
    "two certain": lambda row: row[5:7].fill_(INF),
    "one left": lambda row: _only(row, 6),
    "both zeros": lambda row: row.copy_(torch.tensor([-0.0, 0.0]).repeat(len(row))[: len(row)]),
    "a span beyond float32": lambda row: row.copy_(torch.tensor([3.4e38, -3.4e38]).repeat(len(row))[: len(row)]),
}


def _only(row, place):
    kept = float(row[place])
    row.fill_(-INF)
    row[place] = kept


@pytest.mark.each_value
@LISTS
@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES.keys())
def test_sample_tokens_rows_at_their_edges_match_reference(device, guarded, edge, num_candidates):
    logits = random(4, 70)
    for row in logits:
        edge(row)
    logits = logits.to(device)
    rows = settings_rows(70, names=("none", "top_k and top_p"))
    expected = chosen(sample_tokens_reference, logits, rows, guarded, device)
    assert chosen(sample_tokens_triton, logits, rows, guarded, device, 32, num_candidates) == expected


@LISTS
def test_sample_tokens_nucleus_ends_with_token_reaching_top_p(device, guarded, num_candidates):
    """Keep exactly half of equal tokens; and one more where half is not quite enough."""
    logits = torch.zeros(1, 6, device=device)
    top_ps = (0.5, 0.5 + 2.0**-50, 0.5 - 2.0**-50, 1 / 6 + 1e-9, 1 - 1e-9)
    for uniform, expected in ((0.999, [2, 3, 2, 1, 5]), (1.0, [2, 3, 2, 1, 5]), (0.0, [0] * 5)):
        rows = [LogitRow(0, i, -1.0, top_p=top_p, uniform=uniform) for i, top_p in enumerate(top_ps)]
        for choose in (sample_tokens_triton, sample_tokens_reference):
            assert chosen(choose, logits, rows, guarded, device, 16, num_candidates) == expected


def test_sample_tokens_uniform_of_one_takes_the_last_kept_token(device, guarded):
    rows = [LogitRow(0, i, -1.0, top_k=top_k, uniform=1.0) for i, top_k in enumerate((0, 5, 9))]
    for choose in (sample_tokens_triton, sample_tokens_reference):
        assert chosen(choose, torch.zeros(1, 10, device=device), rows, guarded, device, 4) == [9, 4, 8]


def test_sample_tokens_too_short_list_falls_back_to_the_row(device, guarded, monkeypatch):
    """As an exponential that does not fall with its argument could make it."""
    logits = agreed_logits(2, 100, TEMPERATURE, device, num_values=40)
    rows = [LogitRow(i, i, -TEMPERATURE, top_p=0.99, uniform=0.9) for i in range(2)]
    expected = chosen(sample_tokens_reference, logits, rows, guarded, device)

    def list_one(*arguments):
        list_near_tokens(*arguments)
        arguments[-1].num_listed_R.fill_(1)

    monkeypatch.setattr(kernel_file, "list_near_tokens", list_one)
    assert chosen(sample_tokens_triton, logits, rows, guarded, device) == expected


@pytest.mark.parametrize("temperature", [1e-30, 0.01, 1.0, 100.0])
def test_sample_tokens_matches_reference_at_any_temperature(device, guarded, temperature):
    logits = agreed_logits(4, 300, temperature, device, num_values=100)
    rows = settings_rows(300, temperature, SOME)
    expected = chosen(sample_tokens_reference, logits, rows, guarded, device)
    assert chosen(sample_tokens_triton, logits, rows, guarded, device, 128) == expected


@pytest.mark.parametrize("choose", [sample_tokens_triton, sample_tokens_reference], ids=["kernel", "reference"])
def test_sample_tokens_greedy_is_argmax_and_nan_row_has_no_token(device, guarded, choose):
    logits = random(4, 50).to(device)
    logits[1, 7] = NAN
    logits[2] = -INF
    raw = argmax_of(logits)
    raw[3] = NO_TOKEN
    top = int(argmax_of(logits)[0])
    rows = [
        LogitRow(0, 0),
        LogitRow(1, 1, -1.0, top_k=3),
        LogitRow(2, 2, -1.0),
        LogitRow(0, 3, -1.0, top_p=0.5),
        LogitRow(1, 5),
    ]
    raw = torch.cat((raw, raw[:2]))
    assert chosen(choose, logits, rows, guarded, device, raw=raw) == [top, NO_TOKEN, NO_TOKEN, NO_TOKEN, -9, NO_TOKEN]


@LISTS
def test_sample_tokens_is_batch_invariant(device, guarded, num_candidates):
    logits = random(4, 300, scale=2.0).to(device)
    rows = settings_rows(300, temperature=1.3, names=SOME)
    together = chosen(sample_tokens_triton, logits, rows, guarded, device, 128, num_candidates)
    for row in rows:
        alone = row._replace(source=0, target=0)
        one = logits[row.source : row.source + 1]
        assert chosen(sample_tokens_triton, one, [alone], guarded, device, 128, num_candidates) == [
            together[row.target]
        ]
    moved = [row._replace(target=len(rows) - 1 - row.target) for row in reversed(rows)]
    assert chosen(sample_tokens_triton, logits, moved, guarded, device, 128, num_candidates) == together[::-1]


def test_sample_tokens_does_not_depend_on_lists_and_chunks(device, guarded):
    """On any logits: the ways differ in what they cost."""
    logits = random(4, 1000, scale=4.0).to(device)
    rows = settings_rows(1000, names=SOME)
    choices = [
        chosen(sample_tokens_triton, logits, rows, guarded, device, chunk_tokens, num_candidates)
        for chunk_tokens, num_candidates in ((1024, 1024), (256, 40), (512, 1))
    ]
    assert choices[0] == choices[1] == choices[2]


def test_sample_tokens_accepts_no_rows(device, guarded):
    table = make_table([LogitRow()], device)[:0]
    top = torch.zeros(1, dtype=torch.int64, device=device)
    sample_tokens_triton(torch.zeros(1, 9, device=device), top, table, top, top, make_scratch(guarded, 1, 9, 16, 4))


@pytest.mark.gpu
@LISTS
@pytest.mark.parametrize("num_values", [500, 20], ids=["few ties", "many ties"])
def test_sample_tokens_matches_reference_at_large_vocabulary(device, guarded, num_values, num_candidates):
    vocab_size = 151936
    logits = agreed_logits(4, vocab_size, TEMPERATURE, device, num_values)
    rows = settings_rows(vocab_size)
    expected = chosen(sample_tokens_reference, logits, rows, guarded, device)
    assert chosen(sample_tokens_triton, logits, rows, guarded, device, CHUNK_TOKENS, num_candidates) == expected


@pytest.mark.gpu
def test_sample_tokens_allocates_nothing(device, guarded):
    logits = random(4, 151936, scale=3.0).to(device)
    rows = settings_rows(151936)
    scratch = make_scratch(guarded, len(rows), 151936, CHUNK_TOKENS, MAX_CANDIDATES)
    top, table = argmax_of(logits), make_table(rows, device)
    out = torch.zeros(len(rows), dtype=torch.int64, device=device)
    assert_allocates_nothing(lambda: sample_tokens(logits, top, table, out, out, scratch))

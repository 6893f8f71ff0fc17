"""The sampler of CPUs, where it differs from what every sampler does: blocks, and the most likely token by numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, Sequence
from holdfast.runner.sampling.batch import Choice, RowParameters
from holdfast.runner.sampling.logprobs import WEIGHT_BITS, distances_, draw_, nucleus_weight, weights
from holdfast.runner.sampling.sampler import HostSampler, choose_narrow, choose_unfiltered, choose_wide, cut

LARGEST_KEY = 0x7F800000


def reference_cut(keys: list[int], weights: list[int], needed: int) -> list[bool]:
    """Sort, add up, and drop what comes after `needed` has been reached."""
    dropped = [True] * len(keys)
    total = 0
    for place in sorted(range(len(keys)), key=lambda place: (keys[place], place)):
        if total >= needed:
            break
        dropped[place] = False
        total += weights[place]
    return dropped


def found_cut(keys: list[list[int]], weights: list[list[int]], needed: list[int]) -> list[list[bool]]:
    return cut(torch.tensor(keys, dtype=torch.int32), torch.tensor(weights), torch.tensor(needed).unsqueeze(1)).tolist()


def some_keys(size: int) -> st.SearchStrategy[list[int]]:
    near_edges = [shift + d for shift in (0, 1 << 9, 1 << 20, LARGEST_KEY - 1) for d in (-1, 0, 1) if shift + d >= 0]
    key = st.one_of(st.sampled_from(near_edges), st.integers(0, LARGEST_KEY), st.integers(0, 3))
    return st.lists(key, min_size=size, max_size=size)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_found_cut_matches_sorted_reference_with_ties_by_id(data):
    size = data.draw(st.integers(1, 30))
    keys = data.draw(some_keys(size))
    weight_of_key = {key: data.draw(st.integers(1, 2**40)) for key in set(keys)}
    weights = [weight_of_key[key] for key in keys]
    needed = data.draw(st.integers(1, sum(weights)))
    assert found_cut([keys], [weights], [needed]) == [reference_cut(keys, weights, needed)]


@given(hnp.arrays(np.float32, 50, elements=st.floats(0, 60, width=32)), st.integers(1, 50))
@settings(deadline=None, max_examples=100)
def test_counts_keep_exactly_k(distances, k):
    key = torch.from_numpy(distances + np.float32(0)).view(torch.int32).unsqueeze(0)
    one = torch.ones((), dtype=torch.int64).expand_as(key)
    dropped = cut(key, one, torch.tensor([[k]]))[0].tolist()
    assert dropped.count(False) == k
    assert dropped == reference_cut(key[0].tolist(), [1] * 50, k)


@pytest.mark.parametrize("vocab_size", [2, 100, 8193, 49152])
def test_rows_have_their_own_cutoffs(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    distance = (torch.randn(4, vocab_size, generator=generator) * 4).abs().round(decimals=1)
    keys = distance.view(torch.int32)
    weights = ((-distance).exp() * 2**40).to(torch.int64)
    needed = (weights.sum(1) * torch.tensor([0.01, 0.5, 0.9, 1.0])).to(torch.int64).clamp(min=1)
    needed = torch.minimum(needed, weights.sum(1))
    dropped = cut(keys, weights, needed.unsqueeze(1))
    for row in range(4):
        expected = reference_cut(keys[row].tolist(), weights[row].tolist(), int(needed[row]))
        assert dropped[row].tolist() == expected


def test_weightless_tokens_do_not_count():
    assert found_cut([[5, 5, 7, 9]], [[0, 4, 0, 4]], [5]) == [[False, False, False, False]]
    assert found_cut([[5, 6, 7, 9]], [[4, 0, 4, 4]], [5]) == [[False, False, False, True]]


def test_cut_nan_row_leaves_other_rows_intact():
    distance = torch.tensor([[torch.nan] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [-torch.nan] * 6])
    weights = torch.tensor([[-(2**63)] * 6, [8, 4, 2, 1, 1, 1], [0] * 6])
    dropped = cut(distance.view(torch.int32), weights, torch.tensor([[1], [12], [1]]))
    assert dropped[1].tolist() == [False, False, True, True, True, True]


NUM_ROWS = 48


def rows_of(vocab_size: int, scale: float, **params) -> tuple[torch.Tensor, RowParameters]:
    """Rows with many ties, as bfloat16 logits have, and all with the same parameters."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(NUM_ROWS, vocab_size, generator=generator) * scale).bfloat16().float()
    sequences = [Sequence(0, [1] * row, 0, SamplingParams(**params), row, 9) for row in range(NUM_ROWS)]
    distance, _ = distances_(logits)
    return distance, RowParameters.of(tuple(range(NUM_ROWS)), list(map(Choice.of, sequences)), vocab_size)


def vocabulary(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32)


def sorted_choice(distance: list[float], weight: list[int], top_k: int, top_p: float, number: float) -> int:
    """The rule, row by row: sort, cut, then look the number up in the vocabulary's order."""
    order = sorted(range(len(distance)), key=lambda token_id: (distance[token_id], token_id))[:top_k]
    total = sum(weight[token_id] for token_id in order)
    needed = int(nucleus_weight(torch.tensor([[total]]), torch.tensor([[top_p]], dtype=torch.float64)).item())
    kept, reached = set(), 0
    for token_id in order:
        if reached >= needed:
            break
        kept.add(token_id)
        reached += weight[token_id]
    looked_for = min(int(number * float(reached)), reached - 1)
    for token_id in sorted(kept):
        looked_for -= weight[token_id]
        if looked_for < 0:
            return token_id
    raise AssertionError("the weights did not reach the number")


FILTERS = {
    "top_k 1": {"top_k": 1},
    "top_k": {"top_k": 9},
    "top_k and top_p": {"top_k": 20, "top_p": 0.7, "temperature": 0.6},
    "top_p": {"top_p": 0.9},
    "tiny top_p": {"top_p": 1e-9},
    "top_p almost 1": {"top_p": 1 - 1e-9},
    "min_p and top_p": {"min_p": 0.02, "top_p": 0.8},
    "hot": {"temperature": 100.0, "top_p": 0.3},
    "cold": {"temperature": 1e-6, "top_p": 0.99},
}


@pytest.mark.each_value
@pytest.mark.parametrize("vocab_size", [2, 100, 1021])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_choose_wide_and_narrow_match_sorted_choice(vocab_size, filters):
    distance, params = rows_of(vocab_size, 3.0, **filters)
    weight = torch.div(distance, params.negative_temperature).exp()
    weight = torch.where(weight < params.min_p, 0, weight).mul(2**WEIGHT_BITS).long()
    top_k = min(filters.get("top_k", vocab_size), vocab_size)
    expected = [
        sorted_choice(*row, top_k, filters.get("top_p", 1.0), number)
        for *row, (number,) in zip(distance.tolist(), weight.tolist(), params.uniform.tolist(), strict=True)
    ]
    assert choose_wide(distance, params, vocabulary(vocab_size))[:, 0].tolist() == expected
    if params.max_top_k > 0:
        assert choose_narrow(distance, params, vocabulary(vocab_size))[:, 0].tolist() == expected


def cut_choice(distance: torch.Tensor, params: RowParameters) -> torch.Tensor:
    """The whole vocabulary is cut, whatever its numbers are."""
    key, weight = distance.view(torch.int32), weights(distance, params.negative_temperature, params.min_p)
    if params.max_top_k:
        weight.masked_fill_(cut(key, torch.ones_like(weight), params.top_k), 0)
    needed = nucleus_weight(weight.sum(dim=1, keepdim=True), params.top_p)
    return draw_(weight.masked_fill_(cut(key, weight, needed), 0), params.uniform)


@pytest.mark.each_value
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_choose_wide_large_vocabulary_equals_cut_choice(scale, filters):
    """The way that never looks at a number is the same as the one that takes candidates where a nucleus is small."""
    distance, params = rows_of(8193, scale, **filters)
    expected = cut_choice(distance.clone(), params)
    assert torch.equal(choose_wide(distance, params, vocabulary(8193)), expected)


def test_choose_unfiltered_equals_choose_wide():
    distance, params = rows_of(2000, 2.0)
    unfiltered = choose_unfiltered(distance, params, vocabulary(2000))
    assert torch.equal(unfiltered, choose_wide(distance, params, vocabulary(2000)))
    assert len(set(unfiltered[:, 0].tolist())) > NUM_ROWS / 2


def test_equal_tokens_are_kept_by_id():
    distance, params = rows_of(600, 0.0, top_p=0.5)
    chosen = choose_wide(distance, params, vocabulary(600))
    assert chosen.max() < 300
    distance, params = rows_of(600, 0.0, top_k=7)
    assert choose_narrow(distance, params, vocabulary(600)).max() < 7


@pytest.mark.parametrize("first_top_k", [1, 240], ids=["small", "large"])
def test_rows_have_their_own_top_k(first_top_k):
    """Among equals the token is the share of its top_k that the random number says."""
    top_ks = range(first_top_k, first_top_k + NUM_ROWS)
    sequences = [Sequence(0, [1], 1, SamplingParams(top_k=top_k), top_k, 9) for top_k in top_ks]
    params = RowParameters.of(tuple(range(NUM_ROWS)), list(map(Choice.of, sequences)), 5000)
    expected = [int(number * top_k) for top_k, (number,) in zip(top_ks, params.uniform.tolist(), strict=True)]
    for choose in (choose_narrow, choose_wide):
        assert choose(torch.zeros(NUM_ROWS, 5000), params, vocabulary(5000))[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, 3.0, 3.0], 1),
        ([-0.0, 0.0], 0),
        ([float("-inf"), -1e38], 1),
        ([float("inf"), 1.0], 0),
        ([1.0, float("nan")], NO_TOKEN),
        ([float("-inf")] * 3, NO_TOKEN),
    ],
    ids=str,
)
def test_host_sampler_find_argmax_gives_lowest_best_token(row, expected):
    sampler = HostSampler(len(row), 4)
    sampler.find_argmax(torch.tensor([row, row]))
    assert sampler.argmax_S.tolist() == [expected] * 2 + [0] * 2


def test_host_sampler_argmax_buffer_keeps_its_address():
    sampler = HostSampler(5, 4)
    place = sampler.argmax_S.data_ptr()
    sampler.find_argmax(torch.eye(5)[[4, 2]])
    assert sampler.argmax_S.tolist() == [4, 2, 0, 0]
    assert sampler.argmax_S.data_ptr() == place


def test_host_sampler_rows_beyond_plan_use_more_blocks():
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    sequences = [Sequence(row, [row], 1, SamplingParams(top_p=0.9, logprobs=2), row, 9) for row in range(9)]
    few, many = HostSampler(50, 2), HostSampler(50, 9)
    choices = list(map(Choice.of, sequences))
    assert few.launch(logits, choices, frozenset()).read() == many.launch(logits, choices, frozenset()).read()
    assert few.prompt_logprobs(logits, list(range(9)), 3) == many.prompt_logprobs(logits, list(range(9)), 3)

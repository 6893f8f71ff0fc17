"""Cutoffs by histograms against the sorted row that they stand for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.runner.sampling.host_sampler import cut

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
def test_as_the_sorted_row_says_with_ties_by_id(data):
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


def test_a_row_of_nonsense_stays_in_its_row():
    distance = torch.tensor([[torch.nan] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [-torch.nan] * 6])
    weights = torch.tensor([[-(2**63)] * 6, [8, 4, 2, 1, 1, 1], [0] * 6])
    dropped = cut(distance.view(torch.int32), weights, torch.tensor([[1], [12], [1]]))
    assert dropped[1].tolist() == [False, False, True, True, True, True]

"""The k likeliest tokens: sorted, unique, ties by id."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.runner.sampling.logprobs import nearest


def vocabulary(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32)


@given(
    st.lists(st.floats(0, 100, width=32) | st.sampled_from([0.0, 1.0, float("inf")]), min_size=1, max_size=40),
    st.data(),
)
@settings(deadline=None, max_examples=200)
def test_as_a_stable_sort_says(row, data):
    k = data.draw(st.integers(1, len(row)))
    distance, ids = nearest(torch.tensor([row]) + 0.0, vocabulary(len(row)), k)
    expected = sorted(range(len(row)), key=lambda token_id: (row[token_id], token_id))[:k]
    assert ids[0].tolist() == expected
    assert distance[0].tolist() == [row[token_id] for token_id in expected]


@pytest.mark.parametrize("vocab_size", [2, 100, 8193, 151936])
def test_equal_distances_give_the_first_ids(vocab_size):
    k = min(20, vocab_size)
    _, ids = nearest(torch.zeros(3, vocab_size), vocabulary(vocab_size), k)
    assert ids.tolist() == [list(range(k))] * 3


def test_a_row_of_nan_gives_ids_of_the_vocabulary():
    distance = torch.tensor([[torch.nan] * 5, [4.0, 3.0, 2.0, 1.0, 0.0]])
    _, ids = nearest(distance, vocabulary(5), 3)
    assert all(0 <= token_id < 5 for token_id in ids[0].tolist())
    assert ids[1].tolist() == [4, 3, 2]

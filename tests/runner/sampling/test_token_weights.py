"""Whole-number weights: what infinities become, and that a draw can only land on a weight."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.runner.sampling.logprobs import WEIGHT_BITS, distances_, draw_, nucleus_weight, weights

INF = math.inf
ALMOST_ONE = 1 - 2.0**-53


def column(*numbers: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype).unsqueeze(1)


def test_distances_reuse_the_memory_of_the_logits():
    logits = torch.tensor([[1.0, 3.0, 2.5]])
    distance, choosable = distances_(logits)
    assert distance.data_ptr() == logits.data_ptr()
    assert distance.tolist() == [[2.0, 0.0, 0.5]]
    assert choosable.tolist() == [[True]]


@pytest.mark.parametrize(
    ("row", "expected_weights"),
    [
        ([0.0, -INF, 0.0], [1, 0, 1]),
        ([INF, 3.0, -INF], [1, 0, 0]),
        ([INF, INF, 1e38], [1, 1, 0]),
        ([-3e38, -INF, -INF], [1, 0, 0]),
        ([3.4e38, -3.4e38, 0.0], [1, 0, 0]),
    ],
    ids=["one ruled out", "one certain", "two certain", "only a tiny one", "a span beyond float32"],
)
def test_infinite_logits_have_a_meaning(row, expected_weights):
    distance, choosable = distances_(torch.tensor([row]))
    found = weights(distance, column(-1.0, dtype=torch.float32), None)
    assert choosable.item()
    assert (found >> WEIGHT_BITS).tolist() == [expected_weights]


@pytest.mark.parametrize("row", [[-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0]], ids=str)
def test_both_zeros_are_the_same_zero(row):
    distance, _ = distances_(torch.tensor([row]))
    assert distance.view(torch.int32).tolist() == [[0, 0]]


@pytest.mark.parametrize("row", [[-INF, -INF], [math.nan, 1.0], [INF, math.nan], [-INF, math.nan]], ids=str)
def test_rows_without_a_token_are_named(row):
    distance, choosable = distances_(torch.tensor([row, [1.0, 2.0]]))
    assert choosable.tolist() == [[False], [True]]
    assert distance[1].tolist() == [1.0, 0.0]


def test_weights_are_shares_in_units_of_two_to_the_minus_40():
    distance = torch.tensor([[0.0, 1.0, 5.0, 30.0, INF]])
    found = weights(distance, column(-0.5, dtype=torch.float32), None)[0].tolist()
    for weight, expected in zip(found, [1.0, math.exp(-2), math.exp(-10), 0.0, 0.0], strict=True):
        assert weight / 2**WEIGHT_BITS == pytest.approx(expected, rel=1e-6, abs=2.0**-WEIGHT_BITS)


def test_min_p_zero_changes_no_bit_beside_a_row_that_uses_it():
    distance = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)) * 20
    alone = weights(distance[:1], column(-0.7, dtype=torch.float32), None)
    beside = weights(distance, column(-0.7, -0.7, dtype=torch.float32), column(0.0, 0.3, dtype=torch.float32))
    assert torch.equal(alone[0], beside[0])
    assert 0 < (beside[1] > 0).sum() < (beside[0] > 0).sum()


@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=40).filter(any),
    st.one_of(st.sampled_from([0.0, 2.0**-53, 0.5, ALMOST_ONE, 1.0]), st.floats(0, ALMOST_ONE)),
)
@example([5, 0], 1.0)
@settings(deadline=None, max_examples=300)
def test_a_draw_is_the_inverse_of_the_running_total(row, number):
    place = int(draw_(torch.tensor([row]), column(number)).item())
    assert row[place] > 0
    looked_for = min(int(number * float(sum(row))), sum(row) - 1)
    assert sum(row[:place]) <= looked_for < sum(row[: place + 1])


@pytest.mark.parametrize("vocab_size", [2, 100, 8193, 49152, 151936])
def test_the_last_bucket_is_the_last_token_that_weighs_anything(vocab_size):
    row = torch.zeros(1, vocab_size, dtype=torch.int64)
    row[0, : vocab_size // 2] = 2**WEIGHT_BITS
    assert draw_(row, column(ALMOST_ONE)).item() == vocab_size // 2 - 1


def test_the_largest_total_does_not_overflow():
    row = torch.full((1, 2**20), 2**WEIGHT_BITS)
    assert draw_(row.clone(), column(ALMOST_ONE)).item() == 2**20 - 1
    assert draw_(row, column(0.5)).item() == 2**19


@given(st.integers(2**40, 2**60), st.floats(0, 1, exclude_min=True))
@settings(deadline=None, max_examples=300)
def test_a_nucleus_needs_at_least_one_unit_and_at_most_everything(total, top_p):
    needed = int(nucleus_weight(torch.tensor([[total]]), column(top_p)).item())
    assert needed == (total if top_p == 1.0 else min(max(1, math.ceil(top_p * float(total))), total))

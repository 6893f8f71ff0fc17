"""Log-probabilities against float64 arithmetic, and ranks and most likely tokens against a sort."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.request.sequence import TokenLogprobs
from holdfast.runner.sampling.logprobs import (
    WEIGHT_BITS,
    distances_,
    draw_,
    logprob_columns,
    nearest,
    nucleus_weight,
    read_logprobs,
    weights,
)
from runner.sampling_rows import make_sampler


def vocabulary(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32)


@given(
    st.lists(st.floats(0, 100, width=32) | st.sampled_from([0.0, 1.0, float("inf")]), min_size=1, max_size=40),
    st.data(),
)
@settings(deadline=None, max_examples=200)
def test_nearest_matches_stable_sort(row, data):
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


def test_nearest_nan_row_gives_ids_in_vocabulary():
    distance = torch.tensor([[torch.nan] * 5, [4.0, 3.0, 2.0, 1.0, 0.0]])
    _, ids = nearest(distance, vocabulary(5), 3)
    assert all(0 <= token_id < 5 for token_id in ids[0].tolist())
    assert ids[1].tolist() == [4, 3, 2]


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
def test_distances_treat_both_zeros_as_equal(row):
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
def test_draw_inverts_cumulative_weight(row, number):
    place = int(draw_(torch.tensor([row]), column(number)).item())
    assert row[place] > 0
    looked_for = min(int(number * float(sum(row))), sum(row) - 1)
    assert sum(row[:place]) <= looked_for < sum(row[: place + 1])


@pytest.mark.parametrize("vocab_size", [2, 100, 8193, 49152, 151936])
def test_draw_last_bucket_is_last_token_with_weight(vocab_size):
    row = torch.zeros(1, vocab_size, dtype=torch.int64)
    row[0, : vocab_size // 2] = 2**WEIGHT_BITS
    assert draw_(row, column(ALMOST_ONE)).item() == vocab_size // 2 - 1


def test_draw_largest_total_does_not_overflow():
    row = torch.full((1, 2**20), 2**WEIGHT_BITS)
    assert draw_(row.clone(), column(ALMOST_ONE)).item() == 2**20 - 1
    assert draw_(row, column(0.5)).item() == 2**19


@given(st.integers(2**40, 2**60), st.floats(0, 1, exclude_min=True))
@settings(deadline=None, max_examples=300)
def test_nucleus_weight_is_between_one_unit_and_total(total, top_p):
    needed = int(nucleus_weight(torch.tensor([[total]]), column(top_p)).item())
    assert needed == (total if top_p == 1.0 else min(max(1, math.ceil(top_p * float(total))), total))


CPU = torch.device("cpu")


def found(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    return make_sampler(logits.shape[1], device=CPU).prompt_logprobs(logits, token_ids, num_top)


def reference(row: np.ndarray) -> np.ndarray:
    exact = row.astype(np.float64)
    return exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())


@pytest.mark.each_value
@pytest.mark.parametrize("vocab_size", [2, 100, 8193, 49152, 151936])
@pytest.mark.parametrize("scale", [0.0, 1.0, 12.0])
def test_values_ranks_and_tops(vocab_size, scale):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator) * scale + 3
    token_ids = [0, vocab_size - 1, vocab_size // 2]
    for row, token_id, result in zip(logits.numpy(), token_ids, found(logits, token_ids, 20), strict=True):
        expected = reference(row)
        assert result.token_id == token_id
        assert result.logprob == pytest.approx(expected[token_id], abs=3e-6)
        assert result.rank == 1 + int((row > row[token_id]).sum())
        order = np.argsort(-row, kind="stable")[:20].tolist()
        assert [top_id for top_id, _ in result.top] == order
        assert [value for _, value in result.top] == pytest.approx(expected[order].tolist(), abs=3e-6)


def test_probabilities_sum_to_one():
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(0)) * 3
    (result,) = found(logits, [3], 20)
    assert sum(math.exp(value) for _, value in result.top) == pytest.approx(1, abs=1e-6)


def test_logprobs_without_top_requested_gives_rank_only():
    (result,) = found(torch.tensor([[1.0, 2.0]]), [0], 0)
    assert result.top == ()
    assert result.rank == 2


def test_logprobs_more_tops_than_tokens_gives_all_tokens():
    (result,) = found(torch.tensor([[1.0, 2.0]]), [0], 20)
    assert [token_id for token_id, _ in result.top] == [1, 0]


def test_certain_and_impossible_tokens():
    logits = torch.tensor([[math.inf, 0.0, -math.inf], [0.0, 0.0, -math.inf]])
    certain, even = found(logits, [0, 2], 3)
    assert str(certain.logprob) == "0.0"
    assert [token_id for token_id, _ in certain.top] == [0, 1, 2]
    assert certain.top[1][1] < -1e38
    assert certain.top[2][1] == -math.inf
    assert even.logprob == -math.inf
    assert even.rank == 3
    assert even.top[0] == (0, pytest.approx(-math.log(2)))


@pytest.mark.parametrize("poison", [math.nan, -math.nan, -math.inf], ids=["nan", "negative nan", "all -inf"])
def test_logprobs_poisoned_row_is_nan_and_neighbours_intact(poison):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    clean = found(logits, [1, 2, 3], 5)
    logits[1] = poison
    before, broken, after = found(logits, [1, 2, 3], 5)
    assert math.isnan(broken.logprob)
    assert (broken.token_id, broken.rank, broken.top) == (2, 0, ())
    assert (before, after) == (clean[0], clean[2])


def test_results_do_not_depend_on_the_block_and_the_logits_stay():
    logits = torch.randn(23, 501, generator=torch.Generator().manual_seed(2)) * 4
    raw = logits.clone()
    sampler = make_sampler(501, device=CPU)
    together = sampler.prompt_logprobs(logits, list(range(23)), 7)
    alone = [sampler.prompt_logprobs(logits[i : i + 1], [i], 7)[0] for i in range(23)]
    assert together == alone
    assert torch.equal(logits, raw)
    assert sampler.prompt_logprobs(logits[:0], [], 7) == []


def test_read_logprobs_takes_fewer_tops_than_columns_hold():
    vocabulary = torch.arange(9, dtype=torch.int32)
    logits = torch.arange(9, dtype=torch.float32).unsqueeze(0)
    (row,) = logprob_columns(logits, torch.tensor([[4]]), vocabulary, 6).tolist()
    assert [token_id for token_id, _ in read_logprobs(4, row, 2).top] == [8, 7]
    assert len(read_logprobs(4, row, 6).top) == 6

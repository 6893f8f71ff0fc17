"""Log-probabilities against float64 arithmetic, and ranks and likeliest tokens against a sort."""

import math

import numpy as np
import pytest
import torch

from holdfast.runner.sampling.batch import TokenLogprobs
from holdfast.runner.sampling.logprobs import logprob_columns, read_logprobs
from runner.sampling_rows import make_sampler

CPU = torch.device("cpu")


def found(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    return make_sampler(logits.shape[1], device=CPU).prompt_logprobs(logits, token_ids, num_top)


def reference(row: np.ndarray) -> np.ndarray:
    exact = row.astype(np.float64)
    return exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())


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


def test_no_tops_were_asked():
    (result,) = found(torch.tensor([[1.0, 2.0]]), [0], 0)
    assert result.top == ()
    assert result.rank == 2


def test_more_tops_than_tokens():
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
def test_a_row_without_probabilities_says_so_and_leaves_its_neighbours_alone(poison):
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


def test_a_row_of_columns_holds_fewer_tops_than_the_widest_neighbour():
    vocabulary = torch.arange(9, dtype=torch.int32)
    logits = torch.arange(9, dtype=torch.float32).unsqueeze(0)
    (row,) = logprob_columns(logits, torch.tensor([[4]]), vocabulary, 6).tolist()
    assert [token_id for token_id, _ in read_logprobs(4, row, 2).top] == [8, 7]
    assert len(read_logprobs(4, row, 6).top) == 6

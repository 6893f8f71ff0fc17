"""The three ways to choose agree to the bit wherever two of them apply, and with a sorted row."""

import pytest
import torch

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from holdfast.runner.sampling import host_sampler as choices
from holdfast.runner.sampling.batch import RowParameters
from holdfast.runner.sampling.host_sampler import choose_narrow, choose_unfiltered, choose_wide
from holdfast.runner.sampling.logprobs import WEIGHT_BITS, distances_, nucleus_weight

NUM_ROWS = 48


def rows_of(vocab_size: int, scale: float, **params) -> tuple[torch.Tensor, RowParameters]:
    """Rows with many ties, as bfloat16 logits have, and all with the same parameters."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(NUM_ROWS, vocab_size, generator=generator) * scale).bfloat16().float()
    sequences = [Sequence(0, [1] * row, 0, SamplingParams(**params), row, 9) for row in range(NUM_ROWS)]
    distance, _ = distances_(logits)
    return distance, RowParameters.of(tuple(range(NUM_ROWS)), sequences, vocab_size)


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


@pytest.mark.parametrize("vocab_size", [2, 100, 1021])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_every_way_is_the_sorted_way(vocab_size, filters):
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


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_a_large_vocabulary_with_and_without_looking(scale, filters, monkeypatch):
    """The way that never looks at a number is the same as the one that does."""
    distance, params = rows_of(8193, scale, **filters)
    looking = choose_wide(distance, params, vocabulary(8193))
    monkeypatch.setattr(
        choices,
        "_choose_looking",
        lambda distance, weight, needed, uniform, _: choices._choose_nucleus(
            distance.view(torch.int32), weight, needed, uniform
        ),
    )
    assert torch.equal(looking, choose_wide(distance, params, vocabulary(8193)))


def test_without_filters_all_weights_are_kept():
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
    params = RowParameters.of(tuple(range(NUM_ROWS)), sequences, 5000)
    expected = [int(number * top_k) for top_k, (number,) in zip(top_ks, params.uniform.tolist(), strict=True)]
    for choose in (choose_narrow, choose_wide):
        assert choose(torch.zeros(NUM_ROWS, 5000), params, vocabulary(5000))[:, 0].tolist() == expected

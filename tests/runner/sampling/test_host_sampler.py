"""The sampler of CPUs, where it differs from what every sampler does: blocks, and the likeliest token by numpy."""

import pytest
import torch

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from holdfast.runner.sampling.batch import NO_TOKEN
from holdfast.runner.sampling.host_sampler import HostSampler


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
def test_the_likeliest_token(row, expected):
    sampler = HostSampler(len(row), 4)
    sampler.find_likeliest(torch.tensor([row, row]))
    assert [sample.token_id for sample in sampler.read_greedy(2)] == [expected] * 2


def test_the_likeliest_tokens_stay_in_their_place():
    sampler = HostSampler(5, 4)
    place = sampler.likeliest_S.data_ptr()
    sampler.find_likeliest(torch.eye(5)[[4, 2]])
    assert sampler.likeliest_S.tolist() == [4, 2, 0, 0]
    assert sampler.likeliest_S.data_ptr() == place


def test_a_block_is_no_larger_than_the_rows_that_were_planned():
    assert HostSampler(100, 3)._rows_per_block == 3
    assert HostSampler(2**30 // 100, 3)._rows_per_block == 1


def test_more_rows_than_planned_are_only_more_blocks():
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    sequences = [Sequence(row, [row], 1, SamplingParams(top_p=0.9, logprobs=2), row, 9) for row in range(9)]
    few, many = HostSampler(50, 2), HostSampler(50, 9)
    assert few.sample(logits, sequences, frozenset(), None) == many.sample(logits, sequences, frozenset(), None)
    assert few.prompt_logprobs(logits, list(range(9)), 3) == many.prompt_logprobs(logits, list(range(9)), 3)

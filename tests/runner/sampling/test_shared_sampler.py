"""SharedSampler: what ranks choose together from shares of the logits is what one rank chooses from all of them."""

import pytest
import torch

from distributed.lock_step import LockStep
from holdfast import SamplingParams
from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.mesh import meshes
from holdfast.memory.ledger import Ledger
from holdfast.request.sequence import NO_TOKEN, Sequence
from holdfast.runner.sampling.batch import Choice
from holdfast.runner.sampling.sampler import HostSampler
from holdfast.runner.sampling.shared_sampler import SharedSampler

VOCAB_SIZE, MAX_ROWS = 997, 12
CPU = torch.device("cpu")
PLAIN = SamplingParams(temperature=0.0)
REQUESTED = {
    "plain": [PLAIN] * 5,
    "mixed": [
        PLAIN,
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=1.0, top_k=5, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.7),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.7, min_p=0.1, logit_bias={3: 4.0}),
        SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=[7]),
        SamplingParams(temperature=0.0, allowed_token_ids=[1, 500, 996]),
    ],
}


def choices_of(requested: list[SamplingParams]) -> list[Choice]:
    return [
        Choice.of(Sequence(row, [1, 2, 3, row], 3, params, seed=row, max_tokens=9))
        for row, params in enumerate(requested)
    ]


def make_logits(num_rows: int) -> torch.Tensor:
    """Rows with ties across shares, infinities and NaN among ordinary ones."""
    logits_SW = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    logits_SW[0, [10, 400, 996]] = 9.0
    logits_SW[1 % num_rows, 600:] = -torch.inf
    logits_SW[2 % num_rows, 996] = torch.nan
    logits_SW[3 % num_rows, :900] = -torch.inf
    if num_rows > 4:
        logits_SW[4] = -torch.inf
    return logits_SW


def run_shared(num_ranks: int, logits_SW: torch.Tensor, work) -> list:
    share = -(-VOCAB_SIZE // num_ranks)
    needs = ExchangeNeeds(2**12, MAX_ROWS, VOCAB_SIZE, 0)

    def on_rank(mesh, exchange):
        first = mesh.tensor_rank * share
        sampler = HostSampler(VOCAB_SIZE, MAX_ROWS)
        shared = SharedSampler(sampler, exchange, mesh, needs, CPU, Ledger())
        return work(shared, logits_SW[:, first : first + share].contiguous())

    return LockStep(meshes(num_ranks), needs).run(on_rank)


@pytest.mark.parametrize("requested", REQUESTED)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_choices_are_those_of_one_rank(num_ranks, requested):
    choices = choices_of(REQUESTED[requested])
    logits_SW = make_logits(len(choices))
    alone = HostSampler(VOCAB_SIZE, MAX_ROWS).launch(logits_SW, choices, frozenset({2})).read()
    if requested == "plain":
        assert [one.token_id for one in alone] == [10, alone[1].token_id, NO_TOKEN, alone[3].token_id, NO_TOKEN]
    found = run_shared(
        num_ranks, logits_SW, lambda sampler, share_SV: sampler.launch(share_SV, choices, frozenset({2})).read()
    )
    assert found[0] == alone
    if requested == "plain":
        assert all(own == alone for own in found), "other ranks find the same argmax"


def test_prompt_logprobs_are_those_of_one_rank():
    logits_TW, targets = make_logits(4)[3:], [950]
    alone = HostSampler(VOCAB_SIZE, MAX_ROWS).prompt_logprobs(logits_TW, targets, 2)
    found = run_shared(3, logits_TW, lambda sampler, share_TV: sampler.prompt_logprobs(share_TV, targets, 2))
    assert found == [alone, [], []]


def test_shared_sampler_step_without_choices_is_empty_on_all():
    found = run_shared(2, make_logits(1), lambda sampler, share: sampler.launch(None, [], frozenset()).read())
    assert found == [[], []]

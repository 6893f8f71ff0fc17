"""Penalties, biases and bans against plain loops over tokens, and against transformers."""

import math
import random

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from holdfast.kernels.sampling.edit_logits import EditKind
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from holdfast.runner.sampling import logit_edits
from holdfast.runner.sampling.logit_edits import EDITS_OF, EditContext, SeenTokens, edit_rows

VOCAB_SIZE = 60
EOS = frozenset({7, 11})


def make_sequence(prompt: list[int], output: list[int], **params) -> Sequence:
    return Sequence(0, prompt + output, len(prompt), SamplingParams(**params), seed=0, max_tokens=1000)


def edit_logits(logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> None:
    vocab_size = logits.shape[1]
    edit_rows(logits, sequences, EditContext(eos_token_ids, SeenTokens(vocab_size, 8), vocab_size))


def make_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 5


def reference(row: list[float], sequence: Sequence) -> list[float]:
    params, output = sequence.params, sequence.output_token_ids
    edited = list(row)
    for token_id in set(sequence.token_ids):
        edited[token_id] *= params.repetition_penalty if edited[token_id] <= 0 else 1 / params.repetition_penalty
    for token_id in set(output):
        edited[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    for token_id, bias in (params.logit_bias or {}).items():
        edited[token_id] += bias
    if len(output) < params.min_tokens:
        for token_id in [*(() if params.ignore_eos else EOS), *params.stop_token_ids]:
            edited[token_id] = -math.inf
    return edited


CASES = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.4},
    "all penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {0: 5.0, 3: -100.0, VOCAB_SIZE - 1: 1.0}},
    "empty bias": {"logit_bias": {}},
    "min tokens": {"min_tokens": 90},
    "min tokens reached": {"min_tokens": 12},
    "min tokens and stop ids": {"min_tokens": 90, "stop_token_ids": (2, 7)},
    "min tokens past eos": {"min_tokens": 90, "stop_token_ids": (2,), "ignore_eos": True},
    "everything": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
        "logit_bias": {7: 100.0, 5: 2.0},
        "min_tokens": 90,
    },
}


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_one_row_as_the_loop_says(params):
    sequence = make_sequence(some_tokens(1, 30), some_tokens(2, 12), **params)
    logits = make_logits(1)
    expected = reference(logits[0].tolist(), sequence)
    edit_logits(logits, [sequence], EOS)
    assert logits[0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_mixed_rows_are_each_as_alone_to_the_bit():
    sequences = [
        make_sequence(some_tokens(seed, 20), some_tokens(seed + 100, seed), **params)
        for seed, params in enumerate(CASES.values())
    ]
    logits = make_logits(len(sequences))
    alone = logits.clone()
    for row, sequence in enumerate(sequences):
        edit_logits(alone[row : row + 1], [sequence], EOS)
    raw = logits.clone()
    edit_logits(logits, sequences, EOS)
    assert torch.equal(logits, alone)
    assert torch.equal(logits[0], raw[0])
    assert (logits != raw).any(dim=1).sum() > 8


def test_work_in_slices_is_the_same(monkeypatch):
    sequences = [
        make_sequence(some_tokens(row, 40), some_tokens(row + 9, 30), **CASES["everything"]) for row in range(5)
    ]
    whole, sliced = make_logits(5), make_logits(5)
    edit_logits(whole, sequences, EOS)
    monkeypatch.setattr(logit_edits, "EDIT_ENTRIES", 7)
    edit_logits(sliced, sequences, EOS)
    assert torch.equal(whole, sliced)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 2.0])
def test_repetition_is_that_of_transformers(penalty):
    sequence = make_sequence(some_tokens(3, 50), some_tokens(4, 20), repetition_penalty=penalty)
    logits = make_logits(1, seed=5)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([sequence.token_ids]), logits.clone())
    edit_logits(logits, [sequence], EOS)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("params", [CASES["presence"], CASES["frequency"]], ids=["presence", "frequency"])
def test_the_prompt_is_not_penalised_for_presence_or_frequency(params):
    logits = make_logits(1)
    raw = logits.clone()
    edit_logits(logits, [make_sequence([1, 2, 3, 3], [], **params)], EOS)
    assert torch.equal(logits, raw)


def test_infinities_stay_and_do_not_become_nan():
    sequence = make_sequence([0, 1], [0, 1], repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={0: 3.0, 1: 3.0})
    logits = torch.tensor([[math.inf, -math.inf, 0.0]])
    edit_logits(logits, [sequence], frozenset())
    assert logits.tolist() == [[math.inf, -math.inf, 0.0]]


def test_tokens_outside_the_vocabulary_touch_no_neighbour():
    wild = make_sequence(
        [1, 70, 61],
        [VOCAB_SIZE, 2**31 - 1],
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        logit_bias={VOCAB_SIZE: 9.0, 2**31 - 1: 9.0},
        stop_token_ids=(VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1),
        min_tokens=10,
    )
    logits = make_logits(2)
    raw = logits.clone()
    edit_logits(logits, [wild, make_sequence([1], [2])], EOS | {VOCAB_SIZE + 3})
    assert torch.equal(logits[1], raw[1])
    changed = np.flatnonzero((logits[0] != raw[0]).numpy()).tolist()
    assert changed == [1, 7, 11]


@pytest.mark.parametrize(("num_output", "banned"), [(0, True), (4, True), (5, False), (6, False)])
def test_bans_end_with_min_tokens(num_output, banned):
    logits = make_logits(1)
    edit_logits(logits, [make_sequence([1], [2] * num_output, min_tokens=5)], EOS)
    assert [token_id for token_id in range(VOCAB_SIZE) if logits[0, token_id] == -math.inf] == [7, 11] * banned


def test_kinds_come_in_their_order():
    assert list(EDITS_OF) == list(EditKind)


def test_a_sequence_of_a_hundred_thousand_tokens():
    sequence = make_sequence(some_tokens(1, 100_000), some_tokens(2, 1000), **CASES["all penalties"])
    logits = make_logits(1)
    expected = reference(logits[0].tolist(), sequence)
    edit_logits(logits, [sequence], EOS)
    assert logits[0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)

"""A row's token and log-probabilities are its own: in every company, after a preemption, beside poison."""

import math
import random

import pytest
import torch

from holdfast.request.sequence import Sequence
from holdfast.runner.sampling.batch import NO_TOKEN
from holdfast.runner.sampling.host_sampler import HostSampler
from holdfast.runner.sampling.sampler import Sampler, SequenceSample
from runner.sampling_rows import EOS, SETTINGS, make_logits, make_sampler, make_sequence


def sample_one(logits: torch.Tensor, sequence: Sequence) -> SequenceSample:
    (sample,) = make_sampler(logits.shape[-1]).sample(logits.reshape(1, -1), [sequence], EOS)
    return sample


def make_divided_sampler(vocab_size: int, max_rows: int, rows_at_once: int) -> Sampler:
    """One that divides its rows into blocks of so many."""
    chooser = make_sampler(vocab_size, max_rows)
    if isinstance(chooser._chooser, HostSampler):
        chooser._chooser._rows_per_block = rows_at_once
    else:
        chooser._chooser._rows_at_once = min(rows_at_once, chooser._chooser._rows_at_once)
        chooser._chooser._edited_at_once = min(rows_at_once, chooser._chooser._edited_at_once)
    return chooser


def test_inference_mode_is_the_same():
    sequences = [make_sequence(seed, **params) for seed, params in enumerate(SETTINGS.values())]
    chooser = make_sampler(100)
    expected = chooser.sample(make_logits(len(sequences), 100), sequences, EOS)
    expected_prompt = chooser.prompt_logprobs(make_logits(4, 100), [1, 2, 3, 4], 5)
    with torch.inference_mode():
        assert chooser.sample(make_logits(len(sequences), 100), sequences, EOS) == expected
        assert chooser.prompt_logprobs(make_logits(4, 100), [1, 2, 3, 4], 5) == expected_prompt


def test_the_logits_stay_as_they_are():
    sequences = [make_sequence(seed, **params) for seed, params in enumerate(SETTINGS.values())]
    logits = make_logits(len(sequences), 100)
    raw = logits.clone()
    make_sampler(100).sample(logits, sequences, EOS)
    assert torch.equal(logits, raw)


def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened():
    """The split of tokens into computed and not computed, pages and history leave no trace."""
    logits = make_logits(1, 300, scale=1.0)
    params = SETTINGS["everything"]
    calm, preempted = make_sequence(8, **params), make_sequence(8, **params)
    preempted.num_computed, preempted.num_preemptions, preempted.pages = 0, 3, [5, 6]
    assert sample_one(logits, calm) == sample_one(logits, preempted)


@pytest.mark.parametrize("vocab_size", [2, 100, 8193])
def test_every_row_is_the_same_to_the_bit_alone_and_in_32_companies(vocab_size):
    params = list(SETTINGS.values())
    num_rows = 2 * len(params)
    sequences = [make_sequence(seed, vocab_size=vocab_size, **params[seed % len(params)]) for seed in range(num_rows)]
    logits = make_logits(num_rows, vocab_size, seed=11)
    alone = [sample_one(logits[row], sequences[row]) for row in range(num_rows)]
    assert any(sample.logprobs for sample in alone)
    rng = random.Random(vocab_size)
    for company in range(32):
        rows = rng.choices(range(num_rows), k=rng.randint(2, 2 * num_rows))
        samples = make_divided_sampler(vocab_size, len(rows), rng.choice([1, 3, 7, 1000])).sample(
            logits[rows], [sequences[row] for row in rows], EOS
        )
        assert samples == [alone[row] for row in rows], f"{company=}"


@pytest.mark.parametrize("vocab_size", [49152, 151936])
def test_large_vocabularies_in_company(vocab_size):
    params = [SETTINGS[name] for name in ("temperature", "top_k", "top_p", "wide filters", "everything")]
    sequences = [make_sequence(seed, vocab_size=vocab_size, **settings) for seed, settings in enumerate(params)]
    logits = make_logits(len(params), vocab_size)
    alone = [sample_one(logits[row], sequence) for row, sequence in enumerate(sequences)]
    order = [3, 0, 4, 2, 1, 0]
    together = make_sampler(vocab_size).sample(logits[order], [sequences[row] for row in order], EOS)
    assert together == [alone[row] for row in order]


POISONS = {
    "nan": lambda row: row.fill_(math.nan),
    "one nan": lambda row: row[7:8].fill_(math.nan),
    "negative nan": lambda row: row[7:8].fill_(-math.nan),
    "nan and inf": lambda row: row.copy_(torch.tensor([math.nan, math.inf, -math.inf]).repeat(40)[: len(row)]),
    "all -inf": lambda row: row.fill_(-math.inf),
}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS.keys())
def test_poisoned_rows_fail_alone(poison):
    params = list(SETTINGS.values())
    sequences = [make_sequence(seed, **settings) for seed, settings in enumerate(params)]
    logits = make_logits(len(params), 100, seed=5)
    clean = make_sampler(100).sample(logits.clone(), sequences, EOS)
    for poisoned_rows in (range(0, len(params), 2), range(1, len(params), 2)):
        poisoned = logits.clone()
        for row in poisoned_rows:
            poison(poisoned[row])
        samples = make_sampler(100).sample(poisoned, sequences, EOS)
        for row, sample in enumerate(samples):
            assert sample == (SequenceSample(NO_TOKEN, None) if row in poisoned_rows else clean[row])

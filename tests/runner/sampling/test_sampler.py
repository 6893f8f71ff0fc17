"""Tokens are what the reference draws; a row's are its own: in every company, after a preemption, beside poison."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, Sequence
from holdfast.runner.sampling import batch as sampling_batch
from holdfast.runner.sampling.batch import SequenceSample, uniform
from runner.sampling_rows import (
    DEVICE,
    EOS,
    SETTINGS,
    FakeForms,
    make_divided_sampler,
    make_logits,
    make_sampler,
    make_sequence,
)

AMBIGUOUS = 2e-6
"""Closer than this to an edge, float32 and float64 may fall on different sides."""


def sample_one(logits: torch.Tensor, sequence: Sequence) -> SequenceSample:
    (sample,) = make_sampler(logits.shape[-1]).sample(logits.to(DEVICE).reshape(1, -1), [sequence], EOS)
    return sample


def edited_reference(row: np.ndarray, sequence: Sequence) -> np.ndarray:
    params, output = sequence.params, sequence.token_ids[sequence.num_prompt_tokens :]
    logits = row.astype(np.float64)
    if params.allowed_token_ids is not None:
        logits[[token_id for token_id in range(len(row)) if token_id not in params.allowed_token_ids]] = -np.inf
    for token_id in set(sequence.token_ids):
        logits[token_id] *= params.repetition_penalty if logits[token_id] < 0 else 1 / params.repetition_penalty
    for token_id in set(output):
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * output.count(token_id)
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    if params.structured_outputs is not None:
        is_allowed_V = FakeForms(len(row)).allowed(sequence)
        if len(output) < params.min_tokens and is_allowed_V.sum() > is_allowed_V[list(EOS)].sum():
            is_allowed_V[list(EOS)] = False
        logits[~is_allowed_V] = -np.inf
        return logits
    if len(output) < params.min_tokens:
        for token_id in [*(() if params.ignore_eos else EOS), *params.stop_token_ids]:
            logits[token_id] = -np.inf
    return logits


def filtered_reference(logits: np.ndarray, params: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Probabilities after every filter; with slack, those that are a hair below a threshold are kept as well."""
    with np.errstate(over="ignore"):
        probabilities = np.exp((logits - logits.max()) / params.temperature)
    probabilities[probabilities < params.min_p * (1 - slack)] = 0
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        probabilities[order[params.top_k :]] = 0
    if params.top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= params.top_p * probabilities.sum() + slack]] = 0
    return probabilities / probabilities.sum()


def assert_drawn(token_id: int, exact: np.ndarray, number: float, loose: np.ndarray | None = None) -> None:
    """The token is where the number falls, give or take float32 and what stands on a threshold."""
    loose = exact if loose is None else loose
    tolerance = AMBIGUOUS + 2 * np.abs(loose - exact).sum()
    running = np.cumsum(exact)
    assert loose[token_id] > 0
    assert running[token_id] - exact[token_id] - tolerance <= number <= running[token_id] + tolerance
    assert tolerance < 0.01


EVERY_SETTING = SETTINGS | {
    "temperature 1": {},
    "temperature 5": {"temperature": 5.0},
    "top_k 5": {"top_k": 5},
    "top_p 0.5": {"top_p": 0.5},
    "min_p 1": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 1.2},
    "large bias": {"logit_bias": {3: 8.0, 0: -50.0}},
    "stop ids": {"min_tokens": 50, "stop_token_ids": (2, 5)},
}


@pytest.mark.each_value
@pytest.mark.parametrize("vocab_size", [2, 100, 8193, 151936])
@pytest.mark.parametrize("params", EVERY_SETTING.values(), ids=EVERY_SETTING.keys())
def test_sampler_matches_reference_choice(params, vocab_size):
    if vocab_size == 2:
        params = {name: value for name, value in params.items() if name not in ("logit_bias", "min_tokens")}
    num_rows = {2: 40, 100: 40, 8193: 8, 151936: 2}[vocab_size]
    sequences = [make_sequence(seed, vocab_size=vocab_size, **params) for seed in range(num_rows)]
    logits = make_logits(num_rows, vocab_size)
    samples = make_sampler(vocab_size).sample(logits.clone(), sequences, EOS)
    for row, sequence, sample in zip(logits.cpu().numpy(), sequences, samples, strict=True):
        edited = edited_reference(row, sequence)
        if sequence.params.is_greedy:
            assert sample.token_id == edited.argmax()
        else:
            exact, loose = (filtered_reference(edited, sequence.params, slack) for slack in (0, AMBIGUOUS))
            assert_drawn(sample.token_id, exact, uniform(sequence.seed, sequence.num_tokens), loose)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.5, "min_p": 0.02, "top_p": 0.9, "repetition_penalty": 1.1},
    ],
    ids=lambda params: ",".join(params),
)
def test_sampler_filters_match_transformers(params):
    settings = SamplingParams(**params)
    processors = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.repetition_penalty != 1:
        processors.insert(0, RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.min_p:
        processors.append(MinPLogitsWarper(settings.min_p))
    if settings.top_k:
        processors.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        processors.append(TopPLogitsWarper(settings.top_p))
    sequences = [make_sequence(seed, vocab_size=1000, **params) for seed in range(200)]
    logits = make_logits(200, 1000, seed=3)
    scores = processors(torch.tensor([sequence.token_ids for sequence in sequences]), logits.cpu().clone())
    probabilities = scores.double().softmax(-1).numpy()
    samples = make_sampler(1000, 200).sample(logits, sequences, EOS)
    for sequence, sample, row in zip(sequences, samples, probabilities, strict=True):
        assert_drawn(sample.token_id, row, uniform(sequence.seed, sequence.num_tokens))


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 2.0, "top_k": 6, "top_p": 0.9}],
    ids=str,
)
def test_frequencies_are_the_probabilities(params):
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0, 2.5, -1.0, 1.5, 0.5])
    num_draws, shared = 20_000, SamplingParams(**params)
    sequences = [Sequence(0, [0] * (draw % 50), 0, shared, draw // 50, 99) for draw in range(num_draws)]
    samples = make_sampler(8, num_draws).sample(logits.repeat(num_draws, 1).to(DEVICE), sequences, EOS)
    counts = np.bincount([sample.token_id for sample in samples], minlength=8)
    probabilities = filtered_reference(logits.numpy().astype(np.float64), shared)
    assert (counts[probabilities == 0] == 0).all()
    kept = probabilities > 0
    expected = num_draws * probabilities[kept]
    degrees = max(1, int(kept.sum()) - 1)
    assert ((counts[kept] - expected) ** 2 / expected).sum() < degrees + 4 * math.sqrt(2 * degrees)


@given(
    temperature=st.floats(1e-4, 100),
    top_k=st.integers(0, 40),
    top_p=st.floats(1e-6, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    row=st.lists(st.floats(-30, 30, width=16), min_size=2, max_size=30).filter(lambda row: max(row) > -30),
    seed=st.integers(0, 2**64 - 1),
)
@settings(deadline=None, max_examples=300)
def test_sampler_chosen_token_passes_every_filter(temperature, top_k, top_p, min_p, row, seed):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.tensor(row)
    token_id = sample_one(logits, Sequence(0, [0], 1, params, seed, 9)).token_id
    distances = (logits.max() - logits).tolist()  # equal in float32 is equal
    order = sorted(range(len(row)), key=lambda token_id: (distances[token_id], token_id))
    place = order.index(token_id)
    if top_k:
        assert place < top_k
    shares = [math.exp((value - max(row)) / temperature) for value in row]
    assert shares[token_id] >= min_p * (1 - 1e-4)
    kept = [shares[i] if shares[i] >= min_p * (1 - 1e-4) else 0.0 for i in order[: top_k or None]]
    assert place == 0 or sum(kept[:place]) <= top_p * sum(kept) * (1 + 1e-4)


@given(st.lists(st.sampled_from([-0.0, 0.0, 1.0, -2.0]), min_size=2, max_size=20), st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=100)
def test_ties_go_to_the_lowest_id(row, seed):
    logits = torch.tensor(row)
    first = row.index(max(row))
    for params in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}):
        assert sample_one(logits, Sequence(0, [0], 1, SamplingParams(**params), seed, 9)).token_id == first


def test_sampler_choice_depends_on_seed_and_position_only():
    logits = make_logits(1, 5000, scale=0.5)
    here = make_sequence(3, vocab_size=5000)
    same = Sequence(99, [4] * here.num_tokens, 2, here.params, here.seed, 5)
    later = Sequence(3, [*here.token_ids, 0], 5, here.params, here.seed, 5)
    other = Sequence(3, here.token_ids, 5, here.params, here.seed + 1, 5)
    assert sample_one(logits, here) == sample_one(logits, same)
    assert len({sample_one(logits, sequence).token_id for sequence in (here, later, other)}) == 3


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_sampler_ban_does_not_hide_nan(params):
    logits = make_logits(1, 100)
    logits[0, 1] = math.nan
    assert sample_one(logits, make_sequence(min_tokens=50, **params)).token_id == NO_TOKEN


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_sampler_all_tokens_banned_gives_no_token(params):
    sequence = make_sequence(vocab_size=2, min_tokens=50, stop_token_ids=(0,), **params)
    assert sample_one(torch.zeros(1, 2), sequence).token_id == NO_TOKEN


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("vocab_size", [2, 100, 8193])
def test_sampler_infinite_logits_decide_the_token(params, vocab_size):
    last = vocab_size - 1
    certain = make_logits(1, vocab_size)
    certain[0, last] = math.inf
    only = torch.full((1, vocab_size), -math.inf)
    only[0, last] = -1e30
    for logits in (certain, only):
        for seed in range(5):
            assert sample_one(logits, make_sequence(seed, vocab_size=vocab_size, **params)).token_id == last


@pytest.mark.parametrize("vocab_size", [2, 100, 8193, 151936])
@pytest.mark.parametrize("number", [0.0, 2.0**-53, 1 - 2.0**-53], ids=["0", "least", "most"])
def test_extreme_random_numbers_stay_inside_the_kept_tokens(vocab_size, number, monkeypatch):
    monkeypatch.setattr(sampling_batch, "uniform", lambda seed, position: number)
    tail = torch.zeros(1, vocab_size)
    peak = torch.full((1, vocab_size), -25.0)
    peak[0, vocab_size // 2] = 0.0
    edge = 0 if number < 0.5 else vocab_size - 1
    assert sample_one(tail, make_sequence()).token_id == edge
    assert sample_one(tail, make_sequence(top_k=2)).token_id == min(edge, 1)
    assert sample_one(tail, make_sequence(top_p=0.5)).token_id == min(edge, (vocab_size + 1) // 2 - 1)
    for params in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.01}, {"temperature": 1e-300}):
        assert sample_one(peak, make_sequence(**params)).token_id == vocab_size // 2


def test_logprobs_are_of_raw_logits_and_only_where_requested():
    logits = make_logits(3, 100)
    sequences = [
        make_sequence(0, temperature=0.2, logit_bias={9: 100.0}, logprobs=2),
        make_sequence(1),
        make_sequence(2, temperature=0.0, logprobs=5),
    ]
    biased, silent, greedy = make_sampler(100).sample(logits.clone(), sequences, EOS)
    expected = logits.double().log_softmax(-1)
    assert biased.token_id == 9
    assert biased.logprobs is not None
    assert biased.logprobs.token_id == 9
    assert biased.logprobs.logprob == pytest.approx(expected[0, 9].item(), abs=1e-6)
    assert biased.logprobs.rank == 1 + int((logits[0] > logits[0, 9]).sum())
    assert [token_id for token_id, _ in biased.logprobs.top] == logits[0].topk(2).indices.tolist()
    assert silent.logprobs is None
    assert greedy.logprobs is not None
    assert greedy.logprobs.rank == 1
    assert greedy.logprobs.top[0] == (greedy.token_id, greedy.logprobs.logprob)
    assert len(greedy.logprobs.top) == 5


def test_sampler_without_rows_gives_no_samples():
    assert make_sampler(100).sample(torch.empty(0, 100, device=DEVICE), [], EOS) == []


def test_sampler_wrong_logits_shape_is_refused():
    with pytest.raises(AssertionError, match=r"\(2, 99\) for 1 sequences"):
        make_sampler(100).sample(torch.zeros(2, 99), [make_sequence()], EOS)


def test_rows_of_a_larger_buffer_will_do():
    buffer = make_logits(4, 128)
    sequences = [make_sequence(seed, **params) for seed, params in enumerate(({}, {"temperature": 0.0}, {"top_k": 4}))]
    view = buffer[1:, :100]
    assert make_sampler(100).sample(view, sequences, EOS) == make_sampler(100).sample(view.contiguous(), sequences, EOS)


def test_greedy_tokens_that_a_graph_has_found():
    logits = make_logits(5, 300)
    logits[2, 7] = math.nan
    sampler = make_sampler(300, 8)
    place = sampler.argmax_S.data_ptr()
    sampler.warm(logits)
    sampler.find_argmax(logits)
    greedy = [make_sequence(seed, temperature=0.0) for seed in range(5)]
    expected = sampler.sample(logits, greedy, EOS)
    assert expected[2].token_id == NO_TOKEN
    assert sampler.argmax_S[:5].tolist() == [sample.token_id for sample in expected]
    assert sampler.sample(logits, greedy, EOS, sampler.argmax_S) == expected
    assert sampler.argmax_S.data_ptr() == place
    mixed = [make_sequence(seed, **params) for seed, params in enumerate(list(EVERY_SETTING.values())[-5:])]
    assert sampler.sample(logits, mixed, EOS, sampler.argmax_S) == make_sampler(300).sample(logits, mixed, EOS)


def test_inference_mode_is_the_same():
    sequences = [make_sequence(seed, **params) for seed, params in enumerate(SETTINGS.values())]
    chooser = make_sampler(100)
    expected = chooser.sample(make_logits(len(sequences), 100), sequences, EOS)
    expected_prompt = chooser.prompt_logprobs(make_logits(4, 100), [1, 2, 3, 4], 5)
    with torch.inference_mode():
        assert chooser.sample(make_logits(len(sequences), 100), sequences, EOS) == expected
        assert chooser.prompt_logprobs(make_logits(4, 100), [1, 2, 3, 4], 5) == expected_prompt


def test_sampler_leaves_logits_unchanged():
    sequences = [make_sequence(seed, **params) for seed, params in enumerate(SETTINGS.values())]
    logits = make_logits(len(sequences), 100)
    raw = logits.clone()
    make_sampler(100).sample(logits, sequences, EOS)
    assert torch.equal(logits, raw)


def test_sampler_preempted_sequence_gives_same_token():
    """The split of tokens into computed and not computed, pages and history leave no trace."""
    logits = make_logits(1, 300, scale=1.0)
    params = SETTINGS["everything"]
    calm, preempted = make_sequence(8, **params), make_sequence(8, **params)
    preempted.num_computed, preempted.num_preemptions, preempted.tables = 0, 3, [[5, 6]]
    assert sample_one(logits, calm) == sample_one(logits, preempted)


@pytest.mark.parametrize("vocab_size", [2, 100, 8193])
def test_sampler_row_is_same_to_the_bit_in_any_batch(vocab_size):
    params = list(SETTINGS.values())
    num_rows = 2 * len(params)
    sequences = [make_sequence(seed, vocab_size=vocab_size, **params[seed % len(params)]) for seed in range(num_rows)]
    logits = make_logits(num_rows, vocab_size, seed=11)
    alone = [sample_one(logits[row], sequences[row]) for row in range(num_rows)]
    assert any(sample.logprobs for sample in alone)
    rng = random.Random(vocab_size)
    for company in range(14):
        rows = rng.choices(range(num_rows), k=rng.randint(2, 2 * num_rows))
        samples = make_divided_sampler(vocab_size, len(rows), rng.choice([1, 3, 7, 1000])).sample(
            logits[rows], [sequences[row] for row in rows], EOS
        )
        assert samples == [alone[row] for row in rows], f"{company=}"


def test_sampler_large_vocabulary_row_is_same_in_batch_as_alone():
    vocab_size = 151936
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

"""Rows by the work that they need, whatever stands beside them."""

import math
import statistics

import pytest

from holdfast.kernels.geometry import LogitRow
from holdfast.planning.terms import MAX_NARROW_TOP_K
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, Sequence, SequenceResult, StepResult, TokenLogprobs
from holdfast.runner.sampling.batch import Choice, RowParameters, SamplingBatch, logit_row, uniform


def test_sequence_result_no_token_differs_from_token_and_none() -> None:
    assert NO_TOKEN < 0, "token ids start at 0"
    assert SequenceResult.of(token_id=None).token_id is None
    assert SequenceResult.of(token_id=0).token_id == 0
    assert len({SequenceResult.of(None), SequenceResult.of(NO_TOKEN), SequenceResult.of(0)}) == 3


def test_results_are_values() -> None:
    logprobs = TokenLogprobs(5, -0.5, 1, ((5, -0.5), (7, -1.5)))
    result = StepResult((SequenceResult.of(5, logprobs), SequenceResult.of(None)))
    assert result == StepResult((SequenceResult.of(5, logprobs), SequenceResult.of(None)))
    with pytest.raises(AttributeError):
        result.results[0].token_ids = (6,)  # type: ignore[misc]


NUM_DRAWS = 20_000


def chi_square(counts: list[int], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in counts)


def chi_square_bound(degrees: int) -> float:
    """Five standard deviations above the mean: the draws are fixed, so this either always holds or never does."""
    return degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    ("seed", "position", "expected"),
    [
        (0, 0, 0.3325150162689374),
        (0, 1, 0.9541425519452321),
        (1, 0, 0.9276991116834613),
        (2**64 - 1, 131071, 0.561138215243478),
    ],
)
def test_numbers_never_change(seed, position, expected):
    assert uniform(seed, position) == expected


def test_numbers_are_in_the_half_open_interval_and_have_53_bits():
    for counter in range(2000):
        number = uniform(counter * 7919, counter)
        assert 0.0 <= number < 1.0
        assert (number * 2**53).is_integer()


def test_seeds_are_taken_modulo_two_to_the_64():
    assert uniform(2**64 + 5, 9) == uniform(5, 9)
    assert uniform(-1, 9) == uniform(2**64 - 1, 9)


STREAMS = {
    "positions of one seed": lambda i: uniform(1234, i),
    "seeds at one position": lambda i: uniform(i, 17),
    "seeds that differ in high bits": lambda i: uniform(i << 44, 3),
    "positions with their own seed": lambda i: uniform(i, i),
    "seed and position that cancel": lambda i: uniform(NUM_DRAWS - i, i),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_uniform_stream_passes_chi_square(stream):
    numbers = [stream(i) for i in range(NUM_DRAWS)]
    assert len(set(numbers)) == NUM_DRAWS
    counts = [0] * 256
    for number in numbers:
        counts[int(number * 256)] += 1
    assert chi_square(counts, NUM_DRAWS / 256) < chi_square_bound(255)
    low_counts = [0] * 256
    for number in numbers:
        low_counts[int(number * 2**53) & 255] += 1
    assert chi_square(low_counts, NUM_DRAWS / 256) < chi_square_bound(255)


@pytest.mark.each_value
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbours_in_a_stream_are_independent(stream, lag):
    numbers = [stream(i) for i in range(NUM_DRAWS + lag)]
    counts = [0] * 256
    for first, second in zip(numbers, numbers[lag:], strict=False):
        counts[int(first * 16) * 16 + int(second * 16)] += 1
    assert chi_square(counts, NUM_DRAWS / 256) < chi_square_bound(255)
    assert abs(statistics.correlation(numbers[:-lag], numbers[lag:])) < 5 / math.sqrt(NUM_DRAWS)


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 63])
def test_uniform_seed_bit_flips_half_of_the_bits(bit):
    changed = sum(
        (int(uniform(seed, 5) * 2**53) ^ int(uniform(seed ^ (1 << bit), 5) * 2**53)).bit_count() for seed in range(500)
    )
    assert changed / 500 == pytest.approx(26.5, abs=1.0)


VOCAB_SIZE = 1000


def make_choice(seed: int = 0, num_output: int = 3, num_coming: int = 0, bad_words=(), **params) -> Choice:
    sequence = Sequence(
        0, list(range(4 + num_output)), 4, SamplingParams(**params), seed, max_tokens=100, bad_word_ids=bad_words
    )
    return Choice(sequence, sequence.num_tokens + num_coming)


KINDS = {
    "plain greedy": ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, None),
    "penalised greedy": ({"temperature": 0.0, "presence_penalty": 0.1}, "edited_greedy"),
    "biased greedy": ({"temperature": 0.0, "logit_bias": {3: 1.0}}, "edited_greedy"),
    "greedy that may not end": ({"temperature": 0.0, "min_tokens": 4}, "edited_greedy"),
    "greedy that may end": ({"temperature": 0.0, "min_tokens": 3}, None),
    "greedy with an empty bias": ({"temperature": 0.0, "logit_bias": {}}, None),
    "temperature": ({}, "unfiltered"),
    "min_p": ({"min_p": 0.2}, "unfiltered"),
    "top_k of everything": ({"top_k": VOCAB_SIZE}, "unfiltered"),
    "top_k beyond everything": ({"top_k": 2**31 - 1}, "unfiltered"),
    "top_k": ({"top_k": 1}, "narrow"),
    "the largest small top_k": ({"top_k": MAX_NARROW_TOP_K, "top_p": 0.5}, "narrow"),
    "large top_k": ({"top_k": MAX_NARROW_TOP_K + 1}, "wide"),
    "top_p": ({"top_p": 0.999}, "wide"),
    "top_p with a top_k beyond everything": ({"top_p": 0.9, "top_k": 5000}, "wide"),
}


@pytest.mark.parametrize(("params", "expected"), KINDS.values(), ids=KINDS.keys())
def test_sampling_batch_puts_row_under_its_kind(params, expected):
    batch = SamplingBatch.of([make_choice(**params)], VOCAB_SIZE)
    kinds = {name: getattr(batch, name) for name in ("edited_greedy", "unfiltered", "narrow", "wide")}
    assert kinds == {name: (0,) if name == expected else () for name in kinds}
    assert batch.is_plain == (expected is None)


def test_sampling_batch_mixed_rows_appear_once_in_order():
    batch = SamplingBatch.of([make_choice(**params) for params, _ in KINDS.values()], VOCAB_SIZE)
    rows = [*batch.edited_greedy, *batch.unfiltered, *batch.narrow, *batch.wide]
    assert sorted(rows) == [row for row, (_, kind) in enumerate(KINDS.values()) if kind]
    assert not batch.is_plain


def test_logprobs_rows_and_the_most_that_was_requested():
    choices = [make_choice(logprobs=logprobs) for logprobs in (None, 0, 5, None, 3)]
    batch = SamplingBatch.of(choices, VOCAB_SIZE)
    assert batch.logprobs == (1, 2, 4)
    assert batch.num_top == 5
    assert SamplingBatch.of(choices, vocab_size=2).num_top == 2


def test_parameters_of_a_block():
    choices = [
        make_choice(seed=2**64 - 1, temperature=0.5, top_k=2**31 - 1),
        make_choice(temperature=0.0),
        make_choice(seed=5, num_output=9, temperature=1e-300, top_p=0.9, min_p=0.25, top_k=7),
    ]
    params = RowParameters.of((0, 2), choices, VOCAB_SIZE)
    assert params.rows.tolist() == [0, 2]
    assert params.negative_temperature.tolist() == [[-0.5], [pytest.approx(-1e-30)]]
    assert params.min_p.tolist() == [[0.0], [0.25]]
    assert params.top_p.tolist() == [[1.0], [0.9]]
    assert params.top_k.tolist() == [[VOCAB_SIZE], [7]]
    assert params.uniform.tolist() == [[uniform(2**64 - 1, 7)], [uniform(5, 13)]]
    assert (params.any_min_p, params.any_top_p, params.max_top_k) == (True, True, 7)


def test_row_parameters_without_filters_report_none():
    params = RowParameters.of((0,), [make_choice()], VOCAB_SIZE)
    assert (params.any_min_p, params.any_top_p, params.max_top_k) == (False, False, 0)


def test_penalties_at_their_neutral_values_are_no_edits():
    assert not make_choice(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0).is_edited
    assert make_choice(frequency_penalty=-0.5).is_edited


def test_logit_row_encodes_parameters_for_kernels():
    choice = make_choice(seed=5, num_output=9, temperature=1e-300, top_p=0.9, min_p=0.25, top_k=7)
    row = LogitRow(*logit_row(choice, 3, 8, VOCAB_SIZE))
    assert row == LogitRow(3, 8, -1e-30, 0.25, 0.9, 7, uniform(5, 13))
    for top_k in (0, VOCAB_SIZE, 2**31 - 1):
        assert LogitRow(*logit_row(make_choice(top_k=top_k), 0, 0, VOCAB_SIZE)).top_k == 0
    assert logit_row(make_choice(temperature=0.0, top_k=3), 1, 2, VOCAB_SIZE) == LogitRow(1, 2)


def test_choice_counts_tokens_in_flight_in_its_position():
    """Two tokens are coming: random numbers, and whether it may end, are those of the position behind them."""
    assert make_choice(num_output=1, num_coming=2, min_tokens=4).may_not_end
    assert not make_choice(num_output=1, num_coming=2, min_tokens=3).may_not_end
    assert logit_row(make_choice(num_coming=2), 0, 0, VOCAB_SIZE) == logit_row(
        make_choice(num_output=5), 0, 0, VOCAB_SIZE
    )


LATE = {
    "nothing": ({}, False),
    "bias, allowed tokens, an end that may not come": (
        {"logit_bias": {1: 2.0}, "allowed_token_ids": (1, 2), "min_tokens": 50},
        False,
    ),
    "repetition": ({"repetition_penalty": 1.1}, True),
    "presence": ({"presence_penalty": 0.1}, True),
    "frequency": ({"frequency_penalty": -0.1}, True),
    "bad words of one token, whatever stands before": ({"bad_words": ((5,), (6,))}, False),
    "bad words": ({"bad_words": ((5,), (6, 7))}, True),
}


@pytest.mark.parametrize(("params", "expected"), LATE.values(), ids=LATE.keys())
def test_choice_is_late_if_it_needs_tokens_in_flight(params, expected):
    assert make_choice(num_coming=1, **params).is_late is expected
    assert not make_choice(**params).is_late, "nothing is coming"

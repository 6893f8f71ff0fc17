"""The counter-based random numbers: fixed for ever, uniform, and unrelated from one counter to the next."""

import math
import statistics

import pytest

from holdfast.runner.sampling.batch import uniform

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
def test_a_stream_is_uniform(stream):
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
def test_one_bit_of_the_seed_changes_half_of_the_bits(bit):
    changed = sum(
        (int(uniform(seed, 5) * 2**53) ^ int(uniform(seed ^ (1 << bit), 5) * 2**53)).bit_count() for seed in range(500)
    )
    assert changed / 500 == pytest.approx(26.5, abs=1.0)

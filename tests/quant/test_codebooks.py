"""Codebooks: they are what hardware makes cheaply, and they lose what their docstring says."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch

from holdfast.quant import kv_quantize as codebooks
from holdfast.quant.kv_quantize import (
    CUBIC_3_BITS,
    CUBIC_4_BITS,
    FP8_MAX,
    FP16_MAX,
    KEY_CODEBOOKS,
    VALUE_CODEBOOKS,
    Codebook,
)

BOOKS = [*KEY_CODEBOOKS.values(), *VALUE_CODEBOOKS.values()]
NAMES = ["keys 4", "keys 3", "values 4", "values 3"]
NAMED = list(zip(BOOKS, NAMES, strict=True))
LLOYD_MAX = {4: 0.009501, 3: 0.034548}
STATED = {"keys 4": 0.009569, "keys 3": 0.034589, "values 4": 0.009685, "values 3": 0.034618}


def density(x: float) -> float:
    return 0.0 if math.isinf(x) else math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def moment(x: float) -> float:
    return 0.0 if math.isinf(x) else x * density(x)


def normal_mse(values: list[float]) -> float:
    """Mean squared error of N(0, 1) where each number becomes the nearest value: closed form, cell by cell."""
    edges = [-math.inf, *((low + high) / 2 for low, high in itertools.pairwise(values)), math.inf]
    total = 0.0
    for value, low, high in zip(values, edges, edges[1:], strict=False):
        weight = below(high) - below(low)
        total += weight * (1 + value**2) - (moment(high) - moment(low)) + 2 * value * (density(high) - density(low))
    return total


def book_mse(book: Codebook, gain: float) -> float:
    return normal_mse([value / gain for value in book.values])


def lloyd_max(num_values: int) -> list[float]:
    """Nearest cells and their centroids in turn, until nothing moves."""
    values = [4 * (index + 0.5) / num_values - 2 for index in range(num_values)]
    for _ in range(4000):
        edges = [-math.inf, *((low + high) / 2 for low, high in itertools.pairwise(values)), math.inf]
        new = [(density(low) - density(high)) / (below(high) - below(low)) for low, high in itertools.pairwise(edges)]
        moved = max(abs(a - b) for a, b in zip(values, new, strict=True))
        values = new
        if moved < 1e-13:
            break
    return values


def best_gain(book: Codebook) -> float:
    """By thirds, in an interval that holds one minimum."""
    low, high = book.gain * 0.8, book.gain * 1.25
    for _ in range(120):
        third = (high - low) / 3
        if book_mse(book, low + third) < book_mse(book, high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2


def test_the_numbers_of_a_codebook_are_all_there() -> None:
    assert {bits: len(book.values) for bits, book in KEY_CODEBOOKS.items()} == {4: 16, 3: 8}
    assert {bits: len(book.values) for bits, book in VALUE_CODEBOOKS.items()} == {4: 16, 3: 8}
    assert all(book.bits == bits for books in (KEY_CODEBOOKS, VALUE_CODEBOOKS) for bits, book in books.items())


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_values_rise_and_mirror(book: Codebook) -> None:
    assert list(book.values) == sorted(set(book.values))
    assert [-value for value in reversed(book.values)] == list(book.values)
    assert book.values[len(book.magnitudes) :] == book.magnitudes
    assert min(book.magnitudes) > 0


@pytest.mark.parametrize("book", KEY_CODEBOOKS.values(), ids=NAMES[:2])
def test_keys_are_e4m3_numbers(book: Codebook) -> None:
    values = torch.tensor(book.values)
    assert torch.equal(values.to(torch.float8_e4m3fn).float(), values)


@pytest.mark.parametrize(("bits", "beta"), [(4, CUBIC_4_BITS), (3, CUBIC_3_BITS)])
def test_values_are_what_half_precision_makes_of_the_cubic(bits: int, beta: float) -> None:
    assert float(np.float16(beta)) == beta
    made = []
    for code in range(2**bits):
        t = np.float16(code - (2**bits - 1) / 2)
        square = np.float16(t * t)
        # A fused multiplication and addition rounds once; every product here is exact in float64.
        slope = np.float16(float(square) * beta + 1.0)
        made.append(float(np.float16(float(slope) * float(t))))
    assert tuple(made) == VALUE_CODEBOOKS[bits].values


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_no_gain_is_better_by_a_thousandth(book: Codebook) -> None:
    best = best_gain(book)
    assert book.gain == pytest.approx(best, rel=0.01)
    assert book_mse(book, best) <= book_mse(book, book.gain) < 1.001 * book_mse(book, best)
    assert book_mse(book, 0.97 * best) > 1.002 * book_mse(book, best), "the measure would not see a wrong gain"


@pytest.mark.parametrize(("book", "name"), NAMED, ids=NAMES)
def test_errors_are_those_of_the_docstring(book: Codebook, name: str) -> None:
    mse = book_mse(book, book.gain)
    assert mse == pytest.approx(STATED[name], abs=5e-7)
    assert f"{STATED[name]:.6f} (+{100 * (mse / LLOYD_MAX[book.bits] - 1):.1f} %)" in str(codebooks.__doc__)


@pytest.mark.parametrize(("book", "name"), NAMED, ids=NAMES)
def test_a_sum_over_a_fine_grid_agrees(book: Codebook, name: str) -> None:
    step = 1e-4
    x = np.arange(-8, 8, step) + step / 2
    values = np.array(book.values) / book.gain
    nearest = values[np.abs(x[:, None] - values).argmin(axis=1)]
    mse = (np.exp(-x * x / 2) * (x - nearest) ** 2).sum() * step / math.sqrt(2 * math.pi)
    assert mse == pytest.approx(STATED[name], rel=1e-3)


@pytest.mark.parametrize("bits", [4, 3])
def test_lloyd_max_is_the_bound_that_the_docstring_states(bits: int) -> None:
    values = lloyd_max(2**bits)
    mse = normal_mse(values)
    assert mse == pytest.approx(LLOYD_MAX[bits], abs=5e-7)
    assert f"{LLOYD_MAX[bits]:.6f}" in str(codebooks.__doc__)
    for books in (KEY_CODEBOOKS, VALUE_CODEBOOKS):
        assert mse < book_mse(books[bits], books[bits].gain) < 1.02 * mse


def test_the_docstring_states_no_other_errors() -> None:
    stated = {float(number) for number in re.findall(r"0\.0\d{5}", str(codebooks.__doc__))}
    assert stated == {*LLOYD_MAX.values(), *STATED.values()}


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_a_code_is_that_of_the_nearest_value(book: Codebook) -> None:
    for code, value in enumerate(book.values):
        assert book.code(value) == code
    for number in np.linspace(-1.2 * book.values[-1], 1.2 * book.values[-1], 1001).tolist():
        distances = [abs(number - value) for value in book.values]
        assert distances[book.code(number)] == min(distances)
    assert book.code(-math.inf) == book.code(-1e30) == 0
    assert book.code(math.inf) == book.code(1e30) == len(book.values) - 1


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_a_boundary_belongs_to_the_lower_code(book: Codebook) -> None:
    assert len(book.boundaries) == len(book.values) - 1
    for code, boundary in enumerate(book.boundaries):
        assert book.code(boundary) == code
        assert book.code(math.nextafter(boundary, math.inf)) == code + 1


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_boundaries_are_exact_in_float32(book: Codebook) -> None:
    assert [float(np.float32(boundary)) for boundary in book.boundaries] == list(book.boundaries)


def test_the_largest_numbers_are_those_of_torch() -> None:
    assert torch.finfo(torch.float8_e4m3fn).max == FP8_MAX
    assert torch.finfo(torch.float16).max == FP16_MAX


def test_a_codebook_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KEY_CODEBOOKS[4].gain = 1.0  # type: ignore[misc]

"""Products that round a row differently in other company are found before an engine promises otherwise."""

import pytest
import torch

from holdfast.errors import ConfigError
from holdfast.kernels.gemm.linear import linear
from holdfast.runner import build as invariance
from holdfast.runner.build import refuse_variant_products
from kernels.exactness import random, require_native


def weights() -> list[torch.Tensor]:
    return [random(40, 24, seed=1), random(24, seed=2), random(7, 64, seed=3), random(40, 24, seed=4)]


@pytest.mark.parametrize("most_rows", [1, 16, 17, 100, 10_000])
def test_the_kernels_of_a_cpu_pass(most_rows):
    require_native()
    refuse_variant_products(weights(), 16, most_rows)


@pytest.mark.parametrize("from_rows", [17, 24, 65, 200])
def test_a_product_that_changes_with_the_number_of_rows_is_refused(monkeypatch, from_rows):
    def changing(x_TK, weight_NK, bias_N):
        y_TN = linear(x_TK, weight_NK, bias_N)
        y_TN[0, 0] += 1e-3 * (weight_NK.shape == (7, 64) and len(x_TK) >= from_rows)
        return y_TN

    monkeypatch.setattr(invariance, "linear", changing)
    with pytest.raises(ConfigError, match=r"16 and \d+ rows by a weight of \[7, 64\] differently"):
        refuse_variant_products(weights(), 16, 1000)
    refuse_variant_products(weights()[:1], 16, 1000)


def test_every_shape_is_asked_once_and_vectors_not_at_all(monkeypatch):
    asked: list[tuple[tuple[int, ...], int]] = []

    def watched(x_TK, weight_NK, bias_N):
        asked.append((tuple(weight_NK.shape), len(x_TK)))
        return linear(x_TK, weight_NK, bias_N)

    monkeypatch.setattr(invariance, "linear", watched)
    refuse_variant_products(weights(), 16, 100)
    assert {shape for shape, _ in asked} == {(40, 24), (7, 64)}
    counts = [num_rows for shape, num_rows in asked if shape == (40, 24)]
    assert min(counts) == 16
    assert max(counts) == 100, "no more than a step can have"
    assert len(counts) == len(asked) - len(counts)

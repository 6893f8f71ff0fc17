import pytest
import torch

from holdfast.layers.linear import Linear
from kernels.exactness import random


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_rows_times_weight_and_bias(with_bias):
    weight, bias, x = random(5, 7), random(5, seed=1), random(3, 7, seed=2)
    layer = Linear(weight, bias) if with_bias else Linear(weight)
    expected = x @ weight.T + (bias if with_bias else 0)
    torch.testing.assert_close(layer(x), expected)


def test_it_holds_the_weight_itself():
    weight, x = torch.zeros(2, 3), torch.ones(1, 3)
    layer = Linear(weight)
    weight.fill_(2)
    assert layer(x).tolist() == [[6, 6]]

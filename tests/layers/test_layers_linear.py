import pytest
import torch

from holdfast.layers.linear import Linear
from kernels.exactness import random


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_rows_times_weight_and_bias(with_bias):
    weight, bias, x = random(5, 7), random(5, seed=1), random(3, 7, seed=2)
    layer = Linear(weight, bias) if with_bias else Linear(weight)
    out = torch.full((3, 5), float("nan"))
    assert layer(x, out) is out
    torch.testing.assert_close(out, x @ weight.T + (bias if with_bias else 0))


def test_it_holds_the_weight_itself():
    weight, x = torch.zeros(2, 3), torch.ones(1, 3)
    layer = Linear(weight)
    assert layer.weight_NK is weight
    assert layer.bias_N is None
    weight.fill_(2)
    assert layer(x, torch.empty(1, 2)).tolist() == [[6, 6]]


def test_part_of_a_buffer_is_enough():
    weight, x, buffer = random(5, 7), random(2, 7, seed=1), torch.full((4, 5), float("nan"))
    layer = Linear(weight)
    torch.testing.assert_close(layer(x, buffer[:2]), x @ weight.T)
    assert buffer[2:].isnan().all()

import pytest
import torch

from holdfast.kernels.gemm.quantize_activations import CodedRows
from holdfast.layers.mlp import Linear
from holdfast.quant.quantized_weight import QuantizedWeight, quantize
from holdfast.quant.weight_schemes import FP8, INT8
from kernels.exactness import random
from kernels.quantized_cases import exact_rows, exact_weight


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


def test_codes_in_the_place_of_a_weight():
    """Rows are coded in the room that is given, and nothing else is."""
    values, x = random(6, 40), random(3, 40, seed=1)
    for scheme in (FP8, INT8):
        weight = QuantizedWeight(scheme, (6, 40), *quantize(values, scheme))
        room = CodedRows(torch.zeros(4, 50).to(torch.float8_e4m3fn), torch.zeros(4, 1))
        layer = Linear(weight, torch.ones(6))
        y = layer(x, torch.full((3, 6), float("nan")), room)
        expected = exact_rows(x, scheme) @ exact_weight(weight).T + 1
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
        assert bool(room.scales_TB[:3].all()) == scheme.codes_activations
    with pytest.raises(AssertionError, match="fp8 needs room for the codes of 3 rows"):
        Linear(QuantizedWeight(FP8, (6, 40), *quantize(values, FP8)))(x, torch.empty(3, 6))

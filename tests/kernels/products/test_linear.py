import pytest
import torch

from holdfast.kernels.gemm.linear import (
    linear,
    linear_float32,
    linear_float32_reference,
    linear_reference,
    plain_linear,
    plain_linear_float32,
    quantized_linear,
)
from holdfast.quant.weight_schemes import FP8, INT8
from kernels.exactness import random, same_bits
from kernels.quantized_cases import EVERY_SCHEME, coded_room, random_weight, scheme_id
from red_zones import RedZones

pytestmark = pytest.mark.usefixtures("native")

SCHEMES = pytest.mark.parametrize("scheme", EVERY_SCHEME, ids=scheme_id)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
CPU = torch.device("cpu")


@DTYPES
def test_numbers_go_to_the_plain_product(guarded_host, dtype):
    x, weight, bias = (random(*shape).to(dtype) for shape in ((5, 37), (70, 37), (70,)))
    for some_bias in (None, bias):
        expected = plain_linear(x, weight, some_bias)
        assert same_bits(linear(x, weight, some_bias), expected)
        out = guarded_host(5, 70, dtype=dtype)
        assert linear(x, weight, some_bias, out) is out
        assert same_bits(out, expected)
        near = linear_reference(x, weight, some_bias)
        torch.testing.assert_close(near, expected, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-2)
    out = guarded_host(5, 70)
    assert linear_float32(x, weight, out) is out
    assert same_bits(out, plain_linear_float32(x, weight, torch.empty(5, 70)))
    wide = linear_float32_reference(x, weight, torch.empty(5, 70))
    torch.testing.assert_close(wide, out, rtol=1e-5, atol=1e-4)


@SCHEMES
@DTYPES
def test_codes_go_to_the_quantized_product(guarded_host, scheme, dtype):
    x, weight, bias = random(5, 96).to(dtype), random_weight(70, 96, scheme), random(70, seed=3).to(dtype)
    room = coded_room(RedZones(CPU), 5, weight)
    for some_bias in (None, bias):
        expected = quantized_linear(x, weight, some_bias, torch.empty(5, 70, dtype=dtype), room)
        for function in (linear, linear_reference):
            alone = function(x, weight, some_bias, coded=room)
            assert alone.dtype == dtype
            assert same_bits(alone, expected)
            out = guarded_host(5, 70, dtype=dtype)
            assert function(x, weight, some_bias, out, room) is out
            assert same_bits(out, expected)
    wide = quantized_linear(x, weight, None, torch.empty(5, 70), room)
    for function in (linear_float32, linear_float32_reference):
        out = guarded_host(5, 70)
        assert function(x, weight, out, room) is out
        assert same_bits(out, wide)


def test_room_is_asked_for_where_rows_are_coded():
    x = random(3, 64)
    assert linear(x, random_weight(5, 64, INT8), None).shape == (3, 5)
    for call in (lambda weight: linear(x, weight, None), lambda weight: linear_float32(x, weight, torch.empty(3, 5))):
        with pytest.raises(AssertionError, match="needs room"):
            call(random_weight(5, 64, FP8))

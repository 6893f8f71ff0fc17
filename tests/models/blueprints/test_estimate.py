"""Estimates: as many parameters as were named, typical KV, and a plan that says what it assumed."""

from math import prod

import pytest

from error_codes import raises_code
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError
from holdfast.models.blueprints.estimate import LEAST, MOST, SHAPES, declare_estimate, parse_count
from holdfast.quant.weight_schemes import MXFP4, WeightRecipe


@pytest.mark.parametrize(
    "text", ["70M", "135M", "300M", "0.6B", "1.7b", "3B", "8B", "32B", "70B", "123B", "405B", "1T", "20T"]
)
def test_estimate_counts_every_parameter(text: str) -> None:
    found = declare_estimate(text)
    assert sum(prod(weight.shape) for weight in found.parameters()) == parse_count(text)
    assert abs(found.weight_bytes("bfloat16") / (2 * parse_count(text)) - 1) < 1e-3
    four = found.weight_bytes("bfloat16", WeightRecipe(MXFP4))
    assert found.review_recipe(WeightRecipe(MXFP4)).num_quantized
    assert four < found.weight_bytes("bfloat16")


def test_estimate_of_32b_keeps_the_kv_of_a_dense_model() -> None:
    found = declare_estimate("32B", "Qwen4-32B")
    assert found.kv_bytes_per_token("bfloat16") == 262_144
    assert found.name == "Qwen4-32B (estimate)"
    assert found.typed == ("Qwen4-32B", "--parameters", "32B")
    assert found.not_runnable == "an estimate of 32B parameters is not a model"
    assert "64 layers" in found.notes[0]
    assert "262,144 bytes of KV a token" in found.notes[0]
    assert found.declaration.indivisible(Mesh(tensor_size=4)) is None


def test_shapes_leave_room_for_an_mlp_at_both_ends() -> None:
    assert parse_count("70M") == LEAST
    assert parse_count("20T") == MOST
    assert [shape.billions for shape in SHAPES] == sorted(shape.billions for shape in SHAPES)


@pytest.mark.parametrize(
    "text", ["", "B", "32", "-3B", "1e9", "32GB", "69M", "21T", "nanB", "3 2B", "9" * 400 + "B", "\x1b[31m"]
)
def test_parse_count_of_nonsense_names_the_unit(text: str) -> None:
    with raises_code("plan.parameter_count", ConfigError) as caught:
        parse_count(text)
    assert "\x1b" not in str(caught.value)

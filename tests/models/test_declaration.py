"""Experts: their shapes by rank, and what a step needs for them."""

from fractions import Fraction
from math import prod

import pytest

from error_codes import raises_code
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ModelFormatError
from holdfast.models.activations import experts_request
from holdfast.models.declaration import CacheRows, Experts, StepShape, needed, split
from holdfast.models.settings import Settings
from holdfast.models.spec import ExpertsSpec


def test_a_row_may_stand_for_many_tokens() -> None:
    assert CacheRows("latent", 61, 1152).bytes_per_token == 70_272
    assert CacheRows("compressed by 128", 20, 584, 128).bytes_per_token == Fraction(365, 4)


def test_what_divides_has_no_reason() -> None:
    assert split(32, 8, "query heads") is None
    assert split(32, 3, "query heads") == "32 query heads do not divide into 3 equal parts"
    assert split(0, 3, "columns of the shared experts") is None


def test_what_is_needed_is_not_guessed() -> None:
    assert needed(Settings({"head_dim": 7}, "config.json"), "head_dim", 10) == 7
    for values in ({}, {"head_dim": None}):
        with raises_code("architecture.missing_key", ModelFormatError, key="head_dim"):
            needed(Settings(values, "config.json"), "head_dim", 10)
    for value in (0, 11, "7", True, 7.0):
        with raises_code("architecture.wrong_value", ModelFormatError, key="head_dim", value=value):
            needed(Settings({"head_dim": value}, "config.json"), "head_dim", 10)


EXPERTS = Experts(
    num_experts=6, top_k=2, intermediate_size=24, shared_size=48, has_shared_gate=True, has_router_bias=True
)
STEP = StepShape(num_rows=10, num_logit_rows=4, max_model_len=100, dtype="float16")


def elements(experts: Experts, num_ranks: int) -> dict[str, int]:
    return {weight.name: prod(weight.shape) for weight in experts.weights("layers.1.", 32, Mesh(tensor_size=num_ranks))}


def test_one_layer() -> None:
    assert elements(EXPERTS, 1) == {
        "layers.1.router.weight": 6 * 32,
        "layers.1.experts.gate_up.weight": 6 * 48 * 32,
        "layers.1.experts.down.weight": 6 * 32 * 24,
        "layers.1.router.bias": 6,
        "layers.1.shared.gate_up.weight": 96 * 32,
        "layers.1.shared.down.weight": 32 * 48,
        "layers.1.shared.gate.weight": 32,
    }


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_divide_the_inner_width_alone(num_ranks: int) -> None:
    whole, part = elements(EXPERTS, 1), elements(EXPERTS, num_ranks)
    for name, count in whole.items():
        shared = 1 if "router" in name or name.endswith("shared.gate.weight") else num_ranks
        assert part[name] * shared == count, name


def test_what_does_not_divide() -> None:
    assert EXPERTS.indivisible(Mesh(tensor_size=8)) is None
    assert EXPERTS.indivisible(Mesh(tensor_size=16)) == "24 columns of an expert do not divide into 16 equal parts"
    odd = EXPERTS._replace(intermediate_size=32, shared_size=24)
    assert odd.indivisible(Mesh(tensor_size=16)) == "24 columns of the shared experts do not divide into 16 equal parts"


def test_a_step_holds_every_chosen_expert_s_rows() -> None:
    rank = ExpertsSpec(6, 2, intermediate_size=12, shared_size=24, has_shared_gate=True)
    assert EXPERTS.request(STEP, 32, Mesh(tensor_size=2)) == experts_request(rank, 32, 10, "float16")
    plain = EXPERTS._replace(shared_size=0, has_shared_gate=False)
    assert plain.request(STEP, 32, ALONE) == experts_request(ExpertsSpec(6, 2, 24), 32, 10, "float16")


def test_natively_quantized_experts_beside_plain_routers() -> None:
    weights = EXPERTS._replace(expert_native="mxfp4", shared_native="fp8_block").weights("x.", 32, ALONE)
    natives = {weight.kind: weight.native for weight in weights}
    assert natives == {"router": None, "expert": "mxfp4", "bias": None, "linear": "fp8_block"}

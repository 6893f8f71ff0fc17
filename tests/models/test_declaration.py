"""Experts: their shapes by rank, and what a step needs for them."""

from dataclasses import replace
from fractions import Fraction
from math import prod

import pytest

from error_codes import raises_code
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ModelFormatError
from holdfast.models.declaration import CacheRows, indivisible_experts, needed, rank_experts, split
from holdfast.models.parameters import ExpertNames, list_experts
from holdfast.models.settings import Settings
from holdfast.models.sharding import shard_parameters
from holdfast.models.spec import ExpertsSpec


def test_cache_rows_bytes_per_token_divide_by_tokens_per_row() -> None:
    assert CacheRows("latent", 61, 1152).bytes_per_token == 70_272
    assert CacheRows("compressed by 128", 20, 584, 128).bytes_per_token == Fraction(365, 4)


def test_split_gives_reason_only_for_uneven_parts() -> None:
    assert split(32, 8, "query heads") is None
    assert split(32, 3, "query heads") == "32 query heads do not divide into 3 equal parts"
    assert split(0, 3, "columns of the shared experts") is None


def test_needed_missing_or_wrong_value_refused() -> None:
    assert needed(Settings({"head_dim": 7}, "config.json"), "head_dim", 10) == 7
    for values in ({}, {"head_dim": None}):
        with raises_code("architecture.missing_key", ModelFormatError, key="head_dim"):
            needed(Settings(values, "config.json"), "head_dim", 10)
    for value in (0, 11, "7", True, 7.0):
        with raises_code("architecture.wrong_value", ModelFormatError, key="head_dim", value=value):
            needed(Settings({"head_dim": value}, "config.json"), "head_dim", 10)


EXPERTS = ExpertsSpec(
    num_experts=6, top_k=2, intermediate_size=24, shared_size=48, has_shared_gate=True, has_router_bias=True
)


def elements(experts: ExpertsSpec, num_ranks: int) -> dict[str, int]:
    listed = list_experts(experts, ExpertNames(), 32, "layers.1.", "model.layers.1.")
    shares = shard_parameters(listed, Mesh(tensor_size=num_ranks), 1, 1)
    return {share.name: prod(share.shape) for share in shares}


def test_expert_elements_of_one_layer_by_hand() -> None:
    assert elements(EXPERTS, 1) == {
        "layers.1.router.weight": 6 * 32,
        "layers.1.router.bias": 6,
        "layers.1.experts.gate_up.weight": 6 * 48 * 32,
        "layers.1.experts.down.weight": 6 * 32 * 24,
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


def test_experts_that_do_not_divide_give_the_reason() -> None:
    assert indivisible_experts(EXPERTS, Mesh(tensor_size=8)) is None
    reason = "24 columns of an expert do not divide into 16 equal parts"
    assert indivisible_experts(EXPERTS, Mesh(tensor_size=16)) == reason
    odd = replace(EXPERTS, intermediate_size=32, shared_size=24)
    reason = "24 columns of the shared experts do not divide into 16 equal parts"
    assert indivisible_experts(odd, Mesh(tensor_size=16)) == reason


def test_rank_experts_has_a_share_of_the_inner_widths() -> None:
    rank = replace(EXPERTS, intermediate_size=12, shared_size=24)
    assert rank_experts(EXPERTS, Mesh(tensor_size=2)) == rank
    assert rank_experts(EXPERTS, ALONE) == EXPERTS

"""Experts from a config.json: what transformers makes of the same settings, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ModelFormatError
from holdfast.models.settings import ExpertDefaults, Settings, read_experts
from holdfast.models.spec import ExpertsSpec

SHARED = ExpertDefaults(60, 4, 1408, shared_size=5632)
PLAIN = ExpertDefaults(128, 8, 768)


def read(config: dict[str, Any], num_layers: int = 4, defaults: ExpertDefaults = PLAIN) -> ExpertsSpec | None:
    return read_experts(Settings(config, "config.json"), num_layers, defaults)


def dense_layers(num_layers: int = 4, **config: Any) -> frozenset[int]:
    experts = read(config, num_layers)
    assert experts is not None
    return experts.dense_layers


def test_what_is_left_out() -> None:
    assert read({}) == ExpertsSpec(128, 8, 768)
    assert read({}, defaults=SHARED) == ExpertsSpec(60, 4, 1408, shared_size=5632, has_shared_gate=True)


def test_what_is_said() -> None:
    config = {"num_experts": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 24, "norm_topk_prob": True}
    config["shared_expert_intermediate_size"] = 40
    assert read(config) == ExpertsSpec(6, 6, 24, normalizes=True), "a family without a shared expert reads over it"
    assert read(config, defaults=SHARED) == ExpertsSpec(6, 6, 24, 40, has_shared_gate=True, normalizes=True)


def test_either_name_of_the_number_of_experts() -> None:
    for config in ({"num_experts": 16}, {"num_local_experts": 16}, {"num_experts": 16, "num_local_experts": 16}):
        assert read(config) == ExpertsSpec(16, 8, 768)
    assert read({"num_experts": None, "num_local_experts": 16}) == ExpertsSpec(16, 8, 768)
    with pytest.raises(ModelFormatError, match="num_local_experts = 8; the same as num_experts = 16 is needed"):
        read({"num_experts": 16, "num_local_experts": 8})


def test_more_experts_than_can_be_listed_are_refused() -> None:
    assert read({"num_experts": 2**16}, num_layers=2) is not None
    assert read({"num_experts": 2**16, "mlp_only_layers": list(range(98))}, num_layers=100) is not None
    with pytest.raises(
        ModelFormatError, match="num_local_experts = 65536; at most 43690 in each of 3 layers is needed"
    ):
        read({"num_local_experts": 2**16}, num_layers=3)


@given(
    num_layers=st.integers(1, 12),
    step=st.integers(1, 13),
    listed=st.lists(st.integers(-1, 14), max_size=4),
)
def test_layers_are_sparse_where_transformers_has_them_so(num_layers: int, step: int, listed: list[int]) -> None:
    sparse = {layer for layer in range(num_layers) if layer not in listed and (layer + 1) % step == 0}
    experts = read({"decoder_sparse_step": step, "mlp_only_layers": listed}, num_layers)
    if not sparse:
        assert experts is None
    else:
        assert experts is not None
        assert experts.dense_layers == set(range(num_layers)) - sparse


def test_models_without_experts() -> None:
    assert read({"num_experts": 0}) is None
    assert read({"mlp_only_layers": [0, 1, 2, 3]}) is None
    assert dense_layers(mlp_only_layers=None) == frozenset()


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"num_experts": -1}, "num_experts = -1"),
        ({"num_experts": 2**40}, "num_experts"),
        ({"num_experts": "8"}, "num_experts"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5; a whole number from 1 to 4"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers"),
        ({"mlp_only_layers": [1, "2"]}, "mlp_only_layers"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(config: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelFormatError, match=word):
        read(config)


def test_fewer_experts_than_a_token_takes_by_default() -> None:
    assert read({"num_experts": 2}) == ExpertsSpec(2, 2, 768)

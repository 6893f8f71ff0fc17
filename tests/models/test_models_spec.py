"""ModelSpec: derived sizes, windows by layer."""

import dataclasses

import pytest

from holdfast.models.spec import ExpertsSpec, ModelSpec, RopeSpec

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    family="llama",
    vocab_size=100,
    hidden_size=48,
    intermediate_size=96,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
    checkpoint_dtype="float32",
    norm_eps=1e-5,
    rope=RopeSpec(theta=10_000.0),
)


def test_sizes_follow_from_heads_and_not_from_hidden_size() -> None:
    assert SPEC.query_size == 96 != SPEC.hidden_size
    assert SPEC.kv_size == 32
    assert SPEC.qkv_size == 96 + 2 * 32


def test_windows_are_per_layer_or_absent() -> None:
    assert [SPEC.window(layer) for layer in range(3)] == [None, None, None]
    windowed = dataclasses.replace(SPEC, sliding_windows=(4096, None, 1))
    assert [windowed.window(layer) for layer in range(3)] == [4096, None, 1]


def test_experts_take_the_place_of_the_mlp_in_all_layers_but_some() -> None:
    assert SPEC.has_mlp
    assert [SPEC.layer_experts(layer) for layer in range(3)] == [None, None, None]
    experts = ExpertsSpec(6, 2, 24)
    sparse = dataclasses.replace(SPEC, experts=experts)
    assert not sparse.has_mlp
    assert [sparse.layer_experts(layer) for layer in range(3)] == [experts] * 3
    mixed = dataclasses.replace(experts, dense_layers=frozenset({1}))
    sparse = dataclasses.replace(SPEC, experts=mixed)
    assert sparse.has_mlp
    assert [sparse.layer_experts(layer) for layer in range(3)] == [mixed, None, mixed]


def test_a_spec_is_a_frozen_value() -> None:
    assert dataclasses.replace(SPEC) == SPEC
    assert hash(dataclasses.replace(SPEC)) == hash(SPEC)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.vocab_size = 1  # type: ignore[misc]

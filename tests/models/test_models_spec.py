"""ModelSpec: derived sizes, facts by layer, and the same facts in slices of layers."""

import dataclasses

import pytest

from holdfast.models.spec import ExpertsSpec, ModelSpec, RopeSpec
from models.test_family_fields import CASES

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
    assert SPEC.attention_products[0] == (96 + 2 * 32, SPEC.hidden_size)


def test_windows_are_per_layer_or_absent() -> None:
    assert [SPEC.window(layer) for layer in range(3)] == [None, None, None]
    windowed = dataclasses.replace(SPEC, sliding_windows=(4096, None, 1))
    assert [windowed.window(layer) for layer in range(3)] == [4096, None, 1]


def test_layer_experts_is_none_in_dense_layers() -> None:
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


def test_model_spec_is_frozen_and_hashable() -> None:
    assert dataclasses.replace(SPEC) == SPEC
    assert hash(dataclasses.replace(SPEC)) == hash(SPEC)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.vocab_size = 1  # type: ignore[misc]


def facts_of(spec: ModelSpec, layer: int) -> dict[str, object]:
    """All that a layer is requested for; of an index and of experts without the numbers of other layers."""
    experts, index = spec.layer_experts(layer), spec.layer_index(layer)
    return {
        "window": spec.window(layer),
        "rope": spec.layer_rope(layer),
        "ratio": spec.entry_ratio(layer),
        "pooled": spec.compressed and spec.compressed.pooled_width(layer, spec.head_dim),
        "index": index and dataclasses.replace(index, shared_layers=frozenset()),
        "experts": experts and dataclasses.replace(experts, dense_layers=frozenset(), table_layers=frozenset()),
        "has_table": spec.layer_kind(layer).has_table,
        "compressor": spec.layer_kind(layer).compressor,
    }


@pytest.mark.parametrize("name", CASES)
def test_layer_slice_has_the_facts_of_its_layers(name: str) -> None:
    """Every cut of every family, and every cut of a cut."""
    whole = CASES[name][1]
    facts = [facts_of(whole, layer) for layer in range(whole.num_layers)]
    cuts = [(first, last) for last in range(1, whole.num_layers + 1) for first in range(last)]
    for first, last in cuts:
        part = whole.layer_slice(first, last)
        for low, high in ((low, high) for low, high in cuts if high <= part.num_layers):
            own = part.layer_slice(low, high)
            assert [facts_of(own, layer) for layer in range(own.num_layers)] == facts[first + low : first + high]
            assert own.first_layer == first + low
            assert own.is_first_stage == (first + low == 0)
            assert own.is_last_stage == (first + high == whole.num_layers)
            assert own.has_mlp == any(fact["experts"] is None for fact in facts[first + low : first + high])
    for num_layers in range(1, whole.num_layers + 1):
        fewer = whole.first_layers(num_layers)
        assert [facts_of(fewer, layer) for layer in range(num_layers)] == facts[:num_layers]
        assert (fewer.first_layer, fewer.is_last_stage) == (0, True)


def test_layers_of_v4_differ_by_kind() -> None:
    """Pooled: columns and gates of both halves, those of the index, and a weight for each of its heads."""
    spec = CASES["deepseek_v4"][1]
    assert spec.compressed is not None
    widths = [spec.compressed.pooled_width(layer, spec.head_dim) for layer in range(4)]
    assert widths == [2 * 96 + 2 * 96 + 6, 0, 2 * 48, 2 * 96 + 2 * 96 + 6]
    assert [spec.entry_ratio(layer) for layer in range(4)] == [8, 0, 16, 8]
    assert [spec.layer_index(layer) is not None for layer in range(4)] == [True, False, False, True]
    assert [spec.layer_rope(layer) is spec.rope for layer in range(4)] == [True, False, True, True]
    assert spec.rope_sets == ((spec.rope, 1), (spec.local_rope, 1), (spec.rope, 8), (spec.rope, 16))

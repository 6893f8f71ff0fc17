"""Settings: values of a config.json are checked as they are read; experts and rotary positions from them."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.models.settings import ExpertDefaults, Settings, read_experts, read_rope
from holdfast.models.spec import ExpertsSpec, RopeSpec


def settings(**values):
    return Settings(values, "config.json")


def test_settings_absent_key_defaults_null_only_if_optional():
    assert settings().count("n", 3, 10) == 3
    assert settings(n=None).optional_count("n", 3, 10) is None
    assert settings().optional_count("n", 3, 10) == 3
    assert settings().optional_count("n", None, 10) is None
    with pytest.raises(ModelFormatError, match="n = None"):
        settings(n=None).count("n", 3, 10)


@pytest.mark.parametrize("value", [0, 11, True, 1.0, "1", [], 10**40])
def test_counts_have_a_type_and_bounds(value):
    with pytest.raises(ModelFormatError, match=r"config.json has n = .*from 1 to 10"):
        settings(n=value).count("n", 1, 10)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "2", None, 10**400])
def test_numbers_are_finite_and_positive(value):
    with pytest.raises(ModelFormatError, match=r"config\.json has x"):
        settings(x=value).number("x", 1.0)


def test_nested_objects_are_named_with_their_path():
    part = settings(outer={"inner": "no"}).part("outer")
    assert part is not None
    with pytest.raises(ModelFormatError, match=r"outer\.inner = 'no'"):
        part.count("inner", 1, 2)
    with pytest.raises(ModelFormatError, match=r"no outer\.other"):
        part.number("other")


@pytest.mark.parametrize(
    ("value", "ids"), [(2, (2,)), ([1, 2], (1, 2)), (None, ()), (-1, ()), ([5, -1], (5,)), ([], ())]
)
def test_token_ids_are_a_number_or_a_list(value, ids):
    assert settings(eos=value).token_ids("eos", (7,)) == ids
    assert settings().token_ids("eos", (7,)) == (7,)


@pytest.mark.parametrize("value", ["2", [1, "2"], 1.5, True, 2**31, [[1]]])
def test_other_token_ids_are_refused(value):
    with pytest.raises(ModelFormatError, match="token id"):
        settings(eos=value).token_ids("eos", ())


def test_settings_required_count_refuses_absent_or_out_of_range() -> None:
    settings = Settings({"a": 3, "b": 0}, "config.json")
    assert settings.required_count("a", 3) == 3
    with pytest.raises(ModelFormatError, match="has no c: a whole number is needed"):
        settings.required_count("c", 3)
    for key, high in (("a", 2), ("b", 9)):
        with pytest.raises(ModelFormatError, match=f"a whole number from 1 to {high}"):
            settings.required_count(key, high)


SHARED = ExpertDefaults(60, 4, 1408, shared_size=5632)
PLAIN = ExpertDefaults(128, 8, 768)


def read(config: dict[str, Any], num_layers: int = 4, defaults: ExpertDefaults = PLAIN) -> ExpertsSpec | None:
    return read_experts(Settings(config, "config.json"), num_layers, defaults)


def dense_layers(num_layers: int = 4, **config: Any) -> frozenset[int]:
    experts = read(config, num_layers)
    assert experts is not None
    return experts.dense_layers


def test_read_experts_absent_keys_take_family_defaults() -> None:
    assert read({}) == ExpertsSpec(128, 8, 768)
    assert read({}, defaults=SHARED) == ExpertsSpec(60, 4, 1408, shared_size=5632, has_shared_gate=True)


def test_read_experts_given_keys_override_defaults() -> None:
    config = {"num_experts": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 24, "norm_topk_prob": True}
    config["shared_expert_intermediate_size"] = 40
    assert read(config) == ExpertsSpec(6, 6, 24, normalizes=True), "a family without a shared expert reads over it"
    assert read(config, defaults=SHARED) == ExpertsSpec(6, 6, 24, 40, has_shared_gate=True, normalizes=True)


def test_either_name_of_the_number_of_experts() -> None:
    for config in ({"num_experts": 16}, {"num_local_experts": 16}, {"num_experts": 16, "num_local_experts": 16}):
        assert read(config) == ExpertsSpec(16, 8, 768)
    assert read({"num_experts": None, "num_local_experts": 16}) == ExpertsSpec(16, 8, 768)
    with pytest.raises(ModelFormatError, match=r"num_local_experts = 8.* the same as num_experts = 16"):
        read({"num_experts": 16, "num_local_experts": 8})


def test_read_experts_too_many_for_layers_refused() -> None:
    assert read({"num_experts": 2**16}, num_layers=2) is not None
    assert read({"num_experts": 2**16, "mlp_only_layers": list(range(98))}, num_layers=100) is not None
    with pytest.raises(ModelFormatError, match=r"num_local_experts = 65536.* at most 43690 in each of 3 layers"):
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
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5.* a whole number from 1 to 4"),
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


HEAD_DIM = 16
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0 + i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2},
    "llama3": LLAMA3,
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn_all": {
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
    },
    "longrope": FACTORS | {"factor": 4.0, "original_max_position_embeddings": 128},
    "longrope_without_factor": FACTORS | {"original_max_position_embeddings": 128},
}


def kind_of(name: str) -> str:
    return name.partition("_")[0]


def read_rope_settings(config: dict[str, Any], max_position: int = 512) -> RopeSpec:
    return read_rope(Settings(config, "config.json"), HEAD_DIM, max_position)


@pytest.mark.parametrize("name", KINDS)
def test_old_and_new_spelling_mean_the_same(name):
    new = {"rope_parameters": KINDS[name] | {"rope_type": kind_of(name), "rope_theta": 5000.0}}
    old = {"rope_scaling": KINDS[name] | {"rope_type": kind_of(name)}, "rope_theta": 5000.0}
    older = {"rope_scaling": KINDS[name] | {"type": kind_of(name)}, "rope_theta": 5000.0}
    assert read_rope_settings(new) == read_rope_settings(old) == read_rope_settings(older)
    assert read_rope_settings(new).kind == kind_of(name)
    assert read_rope_settings(new).theta == 5000.0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_frequencies_of_transformers_follow_from_what_was_read(name, spelling):
    """transformers is given the same JSON; its own function and one that sees only the RopeSpec must agree."""
    import torch
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    json_config = {spelling: KINDS[name] | {"rope_type": kind_of(name)}, "rope_theta": 5000.0}
    spec = read_rope_settings(json_config)
    theirs = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=512, **copy.deepcopy(json_config)
    )
    if spec.kind == "default":
        assert theirs.rope_parameters["rope_type"] == "default"
        assert theirs.rope_parameters["rope_theta"] == spec.theta
        return
    mine = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": spec.kind,
            "rope_theta": spec.theta,
            "factor": spec.factor,
            "original_max_position_embeddings": spec.original_max_position,
            "low_freq_factor": spec.low_freq_factor,
            "high_freq_factor": spec.high_freq_factor,
            "beta_fast": spec.beta_fast,
            "beta_slow": spec.beta_slow,
            "attention_factor": spec.attention_factor,
            "mscale": spec.mscale,
            "mscale_all_dim": spec.mscale_all_dim,
            "truncate": spec.truncate,
            "short_factor": list(spec.short_factor) or [1.0] * 8,
            "long_factor": list(spec.long_factor) or [1.0] * 8,
        },
    )
    frequencies = ROPE_INIT_FUNCTIONS[spec.kind]
    for seq_len in (None, 400):
        expected, expected_scale = frequencies(theirs, torch.device("cpu"), seq_len=seq_len)
        actual, scale = frequencies(mine, torch.device("cpu"), seq_len=seq_len)
        assert torch.equal(actual, expected)
        assert scale == expected_scale


def test_read_rope_settings_empty_is_plain_base_ten_thousand():
    assert read_rope_settings({}) == RopeSpec(10_000.0)
    assert read_rope_settings({"rope_scaling": None, "rope_theta": 1e6}) == RopeSpec(1e6)


def test_read_rope_settings_outer_pretraining_length_wins():
    config = {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64}}
    assert read_rope_settings(config | {"original_max_position_embeddings": 32}).original_max_position == 32
    assert read_rope_settings({"rope_scaling": {"type": "yarn", "factor": 2}}).original_max_position == 512


def test_dynamic_starts_from_the_length_of_the_config():
    assert read_rope_settings({"rope_scaling": {"type": "dynamic", "factor": 2}}).original_max_position == 512


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        ({"type": "su"}, "'su'"),
        ({"type": "mrope", "mrope_section": [1, 2]}, "mrope_section"),
        ({"type": "proportional", "factor": 2}, "proportional"),
        ({"type": "linear", "factor": 2, "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_other_rotations_are_declined(rope, word):
    with pytest.raises(UnsupportedModelError, match=r"config\.json") as caught:
        read_rope_settings({"rope_scaling": rope})
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        ({"type": "linear"}, "rope_scaling.factor"),
        ({"type": "linear", "factor": None}, "rope_scaling.factor"),
        ({"type": "linear", "factor": 0}, "rope_scaling.factor"),
        ({"type": "linear", "factor": float("inf")}, "rope_scaling.factor"),
        ({"type": "yarn"}, "rope_scaling.factor"),
        ({"type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"type": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor"),
        ({"type": "longrope"} | FACTORS | {"short_factor": [1.0] * 7}, "short_factor"),
        ({"type": "longrope"} | FACTORS | {"long_factor": [1.0] * 7 + [10**400]}, "long_factor"),
        ({"type": 3}, "rope_scaling.type"),
        ({"type": "yarn", "factor": 2, "original_max_position_embeddings": "64"}, "original_max_position_embeddings"),
        ([1, 2], "rope_scaling"),
        ("linear", "rope_scaling"),
    ],
)
def test_broken_settings_are_refused_by_key(rope, word):
    with pytest.raises(ModelFormatError, match=r"config\.json") as caught:
        read_rope_settings({"rope_scaling": rope})
    assert word in str(caught.value)

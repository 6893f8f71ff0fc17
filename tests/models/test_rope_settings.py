import copy
from typing import Any

import pytest

from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.models.settings import Settings, read_rope
from holdfast.models.spec import RopeSpec

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


def read(config: dict[str, Any], max_position: int = 512) -> RopeSpec:
    return read_rope(Settings(config, "config.json"), HEAD_DIM, max_position)


@pytest.mark.parametrize("name", KINDS)
def test_old_and_new_spelling_mean_the_same(name):
    new = {"rope_parameters": KINDS[name] | {"rope_type": kind_of(name), "rope_theta": 5000.0}}
    old = {"rope_scaling": KINDS[name] | {"rope_type": kind_of(name)}, "rope_theta": 5000.0}
    older = {"rope_scaling": KINDS[name] | {"type": kind_of(name)}, "rope_theta": 5000.0}
    assert read(new) == read(old) == read(older)
    assert read(new).kind == kind_of(name)
    assert read(new).theta == 5000.0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_frequencies_of_transformers_follow_from_what_was_read(name, spelling):
    """transformers is given the same JSON; its own function and one that sees only the RopeSpec must agree."""
    import torch
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    json_config = {spelling: KINDS[name] | {"rope_type": kind_of(name)}, "rope_theta": 5000.0}
    spec = read(json_config)
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


def test_nothing_said_means_plain_rotation_at_ten_thousand():
    assert read({}) == RopeSpec(10_000.0)
    assert read({"rope_scaling": None, "rope_theta": 1e6}) == RopeSpec(1e6)


def test_the_pretraining_length_beside_the_rotary_settings_wins():
    config = {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64}}
    assert read(config | {"original_max_position_embeddings": 32}).original_max_position == 32
    assert read({"rope_scaling": {"type": "yarn", "factor": 2}}).original_max_position == 512


def test_dynamic_starts_from_the_length_of_the_config():
    assert read({"rope_scaling": {"type": "dynamic", "factor": 2}}).original_max_position == 512


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
        read({"rope_scaling": rope})
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
        read({"rope_scaling": rope})
    assert word in str(caught.value)

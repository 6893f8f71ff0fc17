"""EngineConfig: which values it refuses, with which codes, and what it suggests."""

import dataclasses
import math

import pytest

from error_codes import raises_code
from holdfast.config import ALIASES, EngineConfig, option_help, parse_layers, parse_patterns, parse_speculative
from holdfast.errors import ConfigError, shown
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.weight_schemes import INT8, WEIGHT_SCHEMES, WeightRecipe

WRONG = [
    ("dtype", "float8"),
    ("dtype", None),
    ("kv_cache_dtype", "fp32"),
    ("load_format", "pickle"),
    ("quantization", "int4"),
    ("quantization", 8),
    ("quantization", ["fp8"]),
    ("quantized_embeddings", "heads"),
    ("quantized_embeddings", None),
    ("quantized_embeddings", True),
    ("quantization_ignore", None),
    ("quantization_ignore", 7),
    ("quantization_ignore", "  "),
    ("quantization_ignore", "a,,b"),
    ("quantization_ignore", ["re:("]),
    ("quantization_ignore", ["re:"]),
    ("quantization_ignore", [b"lm_head"]),
    ("quantization_ignore", ["x"] * 300),
    ("allow_nonfinite", "yes"),
    ("save_quantized", ""),
    ("save_quantized", "a\0b"),
    ("save_quantized", 7),
    ("weight_cache", "maybe"),
    ("weight_cache", True),
    ("max_model_len", 0),
    ("max_model_len", -2),
    ("max_model_len", 2**31),
    ("max_model_len", 8.5),
    ("max_model_len", True),
    ("max_num_seqs", "8"),
    ("max_num_seqs", 10**5000),
    ("seed", 10**5000),
    ("memory_utilization", 10**5000),
    ("memory_limit", -(10**5000)),
    ("max_num_batched_tokens", 0),
    ("max_queue", 0),
    ("scheduling_policy", "lifo"),
    ("scheduling_policy", None),
    ("page_tokens", 0),
    ("page_tokens", 24),
    ("page_tokens", 512),
    ("page_tokens", True),
    ("page_tokens", 16.0),
    ("page_tokens", [16]),
    ("page_tokens", 10**5000),
    ("kv_cache_dtype", "turboquant_5bit_nc"),
    ("kv_protected_dtype", "int8"),
    ("kv_protected_dtype", None),
    ("kv_protected_layers", -1),
    ("kv_protected_layers", True),
    ("kv_protected_layers", 4.0),
    ("kv_protected_layers", 10**5000),
    ("kv_protected_layers", [0, 1]),
    ("kv_protected_layers", ""),
    ("kv_protected_layers", ","),
    ("kv_protected_layers", "first"),
    ("kv_protected_layers", "0,-1"),
    ("kv_protected_layers", "0,1,0"),
    ("kv_protected_layers", "0,,1"),
    ("kv_protected_layers", "0-3"),
    ("kv_protected_layers", "٣,1"),
    ("kv_protected_layers", "9" * 5000),
    ("kv_protected_layers", "0," * 5000),
    ("dtype", 10**5000),
    ("dtype", ["float32"]),
    ("memory_utilization", 0),
    ("memory_utilization", 1.01),
    ("memory_utilization", math.nan),
    ("memory_utilization", math.inf),
    ("memory_utilization", "0.9"),
    ("memory_limit", "lots"),
    ("memory_limit", 0),
    ("memory_limit", 1.5),
    ("kv_cache_memory", "-1GiB"),
    ("enable_prefix_caching", 1),
    ("batch_invariant", "yes"),
    ("enforce_eager", 0),
    ("speculative", ""),
    ("speculative", "ngram:"),
    ("speculative", "ngram:0"),
    ("speculative", "ngram:17"),
    ("speculative", "ngram:4.5"),
    ("speculative", "ngram:٣"),
    ("speculative", "ngram:" + "9" * 5000),
    ("speculative", "NGRAM:4:4"),
    ("speculative", "eagle:4"),
    ("speculative", 4),
    ("speculative", True),
    ("speculative", ["ngram"]),
    ("device", "tpu"),
    ("device", "cuda:"),
    ("device", "cuda:-1"),
    ("device", "cuda:٣٣٣٣"),
    ("device", 0),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("model", 7),
    ("tokenizer", b"folder"),
    ("chat_template", ["{{ x }}"]),
    *(("core_timeout", value) for value in (0, -1, 0.5, math.nan, math.inf, "30", None, True)),
    *(("max_step_stretch", value) for value in (1, 0.5, True, "fast", math.nan)),
    *(("tensor_parallel_size", value) for value in (0, 4097, True, None)),
    ("revision", "a..b"),
    ("revision", ""),
]


def test_config_with_a_wrong_value_names_the_option() -> None:
    for name, value in WRONG:
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_options(**{name: value})
        text = str(caught.value)
        assert caught.value.values["name"] == name, f"{name}={shown(value)}"
        assert caught.value.code.split(".")[0] in ("value", "config"), text
        assert name in text, text
        assert "no message" not in text, text
        assert "\n" not in text, text
        assert len(text) < 300, text


def test_config_with_a_sound_value_keeps_it() -> None:
    sound = [
        *(("page_tokens", 2**power) for power in range(9)),
        *(("kv_cache_dtype", name) for name in KV_FORMATS),
        *(("kv_protected_dtype", name) for name in ("auto", *KV_FORMATS)),
        *(("kv_protected_layers", value) for value in (None, 0, 4, "4", "7,", "0,1,30,31")),
        *(("quantization", name) for name in (None, "none", *WEIGHT_SCHEMES)),
        *(("quantized_embeddings", name) for name in ("none", "head", "all")),
        *(("weight_cache", name) for name in ("auto", "off")),
        *(("max_step_stretch", value) for value in (None, 0, 1.5, "auto")),
        *(("core_timeout", value) for value in (1, 30.5)),
        ("allow_nonfinite", True),
        ("device", "cuda:7"),
        ("memory_utilization", 1),
        ("memory_limit", "20GiB"),
        ("kv_cache_memory", 4096),
        ("seed", 2**64 - 1),
        ("max_model_len", 1),
        ("nnodes", 4096),
    ]
    for name, value in sound:
        assert getattr(EngineConfig.from_options(**{name: value}), name) == value, name


def test_layers_are_read_as_a_count_or_a_list() -> None:
    read = {None: None, 0: 0, 4: 4, "4": 4, " 12 ": 12, "7,": (7,), "31, 0,1,30": (0, 1, 30, 31), "0,1,": (0, 1)}
    for value, layers in read.items():
        assert parse_layers(value, "x") == layers, value


def test_patterns_are_read_from_a_string_or_a_list() -> None:
    assert parse_patterns((), "x") == parse_patterns("", "x") == ()
    assert parse_patterns("lm_head", "x") == ("lm_head",)
    assert parse_patterns(" lm_head, *.down_proj ,lm_head", "x") == ("lm_head", "*.down_proj")
    assert parse_patterns(["re:.*[qk]_proj{1,2}", "a"], "x") == ("re:.*[qk]_proj{1,2}", "a")


def test_config_recipe_has_the_scheme_and_patterns() -> None:
    assert EngineConfig().recipe == WeightRecipe()
    assert not EngineConfig(quantization="none").is_quantized
    config = EngineConfig(quantization="int8", quantized_embeddings="all", quantization_ignore="a,b")
    assert config.is_quantized
    assert config.recipe == WeightRecipe(INT8, "all", ("a", "b"))


@pytest.mark.parametrize(
    ("name", "value"), [("quantization_ignore", "lm_head"), ("save_quantized", "folder"), ("weight_cache", "on")]
)
def test_option_of_quantized_weights_needs_a_scheme(name: str, value: str) -> None:
    with raises_code("config.needs_quantization", ConfigError, name=name, value=value) as refused:
        EngineConfig.from_options(**{name: value})
    assert "for a model that is quantized already, its own scheme" in str(refused.value), "fp8 would be refused there"
    config = EngineConfig.from_options(quantization="fp8", **{name: value})
    assert getattr(config, name) == value
    assert config.with_quantization("mxfp4") == dataclasses.replace(config, quantization="mxfp4")
    assert config.with_quantization(None) == EngineConfig(), "options that need a scheme go too"


def test_config_with_a_wrong_choice_suggests_the_nearest() -> None:
    for name, value, near in (
        ("quantization", "fp8_blok", "fp8_block"),
        ("quantized_embeddings", "heads", "head"),
        ("dtype", "bfloat", "bfloat16"),
    ):
        with raises_code("value.not_one_of", ConfigError, name=name, value=value) as caught:
            EngineConfig.from_options(**{name: value})
        assert caught.value.hints == (f"Did you mean {near}?",)


def test_unknown_option_suggests_the_nearest_or_lists_all() -> None:
    for name, near in (
        ("max_model_length", "max_model_len"),
        ("kv_cache_type", "kv_cache_dtype"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("enable_prefix_cache", "enable_prefix_caching"),
    ):
        with raises_code("config.unknown_option", ConfigError, name=name) as caught:
            EngineConfig.from_options(**{name: 1})
        assert str(caught.value) == f"{name!r} is not an option. Did you mean {near}?"
    with raises_code("config.unknown_option", ConfigError, name="zzzzqqqq") as caught:
        EngineConfig.from_options(zzzzqqqq=1)
    assert all(field.name in str(caught.value) for field in dataclasses.fields(EngineConfig))


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_alias_sets_our_option_and_excludes_it(alias: str, name: str) -> None:
    value = {"memory_utilization": 0.5, "page_tokens": 32, "kv_cache_memory": "1GiB", "speculative": "ngram:3"}[name]
    assert getattr(EngineConfig.from_options(**{alias: value}), name) == value
    with raises_code("config.same_option", ConfigError):
        EngineConfig.from_options(**{alias: value, name: value})


def test_speculative_option_gives_the_most_draft_tokens() -> None:
    for value, number in {None: 0, "ngram": 4, "ngram:1": 1, "ngram:16": 16, " ngram:7 ": 7}.items():
        assert parse_speculative(EngineConfig(speculative=value).speculative) == number
    with raises_code("config.speculative", ConfigError) as caught:
        EngineConfig(speculative="eagle:4")
    assert str(caught.value) == (
        "speculative must be ngram:K with K from 1 to 16, or ngram for ngram:4, got 'eagle:4'. Try ngram:4."
    )


def test_config_defaults_are_sound_and_frozen() -> None:
    config = EngineConfig()
    assert EngineConfig.from_options() == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = "float16"  # type: ignore[misc]


def test_option_help_has_text_for_every_field() -> None:
    assert set(option_help()) == {field.name for field in dataclasses.fields(EngineConfig)}
    assert all(text.endswith((".", ")")) and "\n" not in text for text in option_help().values())

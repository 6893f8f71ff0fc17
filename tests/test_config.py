"""EngineConfig: what it refuses, in which words, and what it suggests."""

import dataclasses
import math

import pytest

from holdfast.config import ALIASES, EngineConfig, parse_layers, parse_patterns, parse_speculative
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
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={shown(value)}" for name, value in WRONG])
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**{name: value})
    assert name in caught.value.asked
    assert caught.value.has
    assert caught.value.do
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("page_tokens", 2**power) for power in range(9)),
        *(("kv_cache_dtype", name) for name in KV_FORMATS),
        *(("kv_protected_dtype", name) for name in ("auto", *KV_FORMATS)),
        *(("kv_protected_layers", value) for value in (None, 0, 4, "4", "7,", "0,1,30,31")),
        *(("quantization", name) for name in (None, "none", *WEIGHT_SCHEMES)),
        *(("quantized_embeddings", name) for name in ("none", "head", "all")),
        *(("weight_cache", name) for name in ("auto", "off")),
        ("allow_nonfinite", True),
        ("device", "cuda:7"),
        ("memory_utilization", 1),
        ("memory_limit", "20GiB"),
        ("kv_cache_memory", 4096),
        ("seed", 2**64 - 1),
        ("max_model_len", 1),
    ],
)
def test_a_sound_value_is_kept(name: str, value: object) -> None:
    assert getattr(EngineConfig.from_options(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        (None, None),
        (0, 0),
        (4, 4),
        ("4", 4),
        (" 12 ", 12),
        ("7,", (7,)),
        ("31, 0,1,30", (0, 1, 30, 31)),
        ("0,1,", (0, 1)),
    ],
)
def test_layers_are_a_count_or_a_list(value: object, layers: object) -> None:
    assert parse_layers(value, "x") == layers


@pytest.mark.parametrize(
    ("value", "patterns"),
    [
        ((), ()),
        ("", ()),
        ("lm_head", ("lm_head",)),
        (" lm_head, *.down_proj ,lm_head", ("lm_head", "*.down_proj")),
        (["re:.*[qk]_proj{1,2}", "a"], ("re:.*[qk]_proj{1,2}", "a")),
    ],
)
def test_patterns_are_a_text_with_commas_or_a_list(value: object, patterns: tuple[str, ...]) -> None:
    assert parse_patterns(value, "x") == patterns


def test_a_recipe_of_a_config() -> None:
    assert EngineConfig().recipe == WeightRecipe()
    assert not EngineConfig(quantization="none").is_quantized
    config = EngineConfig(quantization="int8", quantized_embeddings="all", quantization_ignore="a,b")
    assert config.is_quantized
    assert config.recipe == WeightRecipe(INT8, "all", ("a", "b"))


@pytest.mark.parametrize(
    ("name", "value"), [("quantization_ignore", "lm_head"), ("save_quantized", "folder"), ("weight_cache", "on")]
)
def test_what_is_for_quantized_weights_alone_says_so(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{value}' was asked; nothing is quantized without") as refused:
        EngineConfig.from_options(**{name: value})
    assert "for a model that is quantized already, its own scheme" in str(refused.value), "fp8 would be refused there"
    config = EngineConfig.from_options(quantization="fp8", **{name: value})
    assert getattr(config, name) == value
    assert config.with_quantization("mxfp4") == dataclasses.replace(config, quantization="mxfp4")
    assert config.with_quantization(None) == EngineConfig(), "what made sense with it goes too"


def test_a_scheme_that_is_nearly_one() -> None:
    with pytest.raises(ConfigError, match=r"quantization='fp8_blok' was asked; .*; try fp8_block"):
        EngineConfig(quantization="fp8_blok")
    with pytest.raises(ConfigError, match=r"quantized_embeddings='heads' was asked; .*; try head"):
        EngineConfig(quantized_embeddings="heads")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_model_length", "max_model_len"),
        ("kv_cache_type", "kv_cache_dtype"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("enable_prefix_cache", "enable_prefix_caching"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**{name: 1})
    assert caught.value.do == f"did you mean {near}?"


def test_an_option_like_none_lists_them_all() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(zzzzqqqq=1)
    assert all(field.name in caught.value.do for field in dataclasses.fields(EngineConfig))


def test_a_wrong_choice_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="try bfloat16"):
        EngineConfig(dtype="bfloat")


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_names_that_other_engines_use_are_understood(alias: str, name: str) -> None:
    value = {"memory_utilization": 0.5, "page_tokens": 32, "kv_cache_memory": "1GiB", "speculative": "ngram:3"}[name]
    assert getattr(EngineConfig.from_options(**{alias: value}), name) == value
    with pytest.raises(ConfigError, match="same option"):
        EngineConfig.from_options(**{alias: value, name: value})


@pytest.mark.parametrize(
    ("asked", "number"), [(None, 0), ("ngram", 4), ("ngram:1", 1), ("ngram:16", 16), (" ngram:7 ", 7)]
)
def test_how_many_tokens_are_proposed(asked: str | None, number: int) -> None:
    assert parse_speculative(EngineConfig(speculative=asked).speculative) == number


def test_a_wrong_method_is_told_what_works() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(speculative="eagle:4")
    assert str(caught.value) == (
        "speculative='eagle:4' was asked; ngram:K with K from 1 to 16 works, and ngram for ngram:4; "
        "try ngram:4, or leave it out"
    )


def test_the_defaults_are_sound_and_frozen() -> None:
    config = EngineConfig()
    assert EngineConfig.from_options() == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = "float16"  # type: ignore[misc]


def test_every_field_says_what_it_is() -> None:
    import ast
    import inspect

    body = ast.parse(inspect.getsource(EngineConfig)).body[0]
    assert isinstance(body, ast.ClassDef), body
    fields = [node for node in body.body if isinstance(node, ast.AnnAssign)]
    for node, after in zip(body.body, body.body[1:], strict=False):
        if node in fields:
            assert isinstance(after, ast.Expr), f"no words after {ast.unparse(node)}"


@pytest.mark.parametrize("seconds", [0, -1, 0.5, float("nan"), float("inf"), "30", None, True])
def test_a_core_is_given_a_second_at_the_least(seconds: object) -> None:
    with pytest.raises(ConfigError, match="a number of seconds from 1 up works"):
        EngineConfig(core_timeout=seconds)  # type: ignore[arg-type]

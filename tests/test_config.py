"""EngineConfig: what it refuses, in which words, and what it suggests."""

import dataclasses
import math

import pytest

from holdfast.config import ALIASES, EngineConfig, parse_layers
from holdfast.errors import ConfigError, shown
from holdfast.quant.formats import KV_FORMATS

WRONG = [
    ("dtype", "float8"),
    ("dtype", None),
    ("kv_cache_dtype", "fp32"),
    ("load_format", "pickle"),
    ("quantization", "int4"),
    ("max_model_len", 0),
    ("max_model_len", -1),
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
    ("enforce_eager", None),
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
    value = {"memory_utilization": 0.5, "page_tokens": 32, "kv_cache_memory": "1GiB"}[name]
    assert getattr(EngineConfig.from_options(**{alias: value}), name) == value
    with pytest.raises(ConfigError, match="same option"):
        EngineConfig.from_options(**{alias: value, name: value})


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

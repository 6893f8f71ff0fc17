"""Protected layers: how many, which and why; and refusals in words."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import EngineConfig, parse_layers
from holdfast.errors import ConfigError
from holdfast.models.blueprints.blueprint import Blueprint, spec_blueprint
from holdfast.planning.resolve import (
    ProtectedLayers,
    _from_the_ends,
    by_key_bias,
    by_position,
    choose_protected,
    listed,
)
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KV_FORMATS
from runner.plan_cases import blueprint

SMOL = blueprint("SmolLM2-135M")
NARROW = "turboquant_4bit_nc"


def chosen(model: Blueprint = SMOL, kv_format: str = NARROW, dtype: str = "bfloat16", **options) -> ProtectedLayers:
    return choose_protected(EngineConfig(**options), model, KV_FORMATS[kv_format], dtype)


def with_layers(num_layers: int) -> Blueprint:
    assert SMOL.spec is not None
    return spec_blueprint(replace(SMOL.spec, num_layers=num_layers), "made up")


@pytest.mark.parametrize("name", KV_FORMATS)
def test_the_default_of_every_format(name: str) -> None:
    protected = chosen(kv_format=name)
    assert len(protected.layers) == DEFAULT_PROTECTED_LAYERS.get(name, 0)
    assert bool(protected.reason) == KV_FORMATS[name].is_coded
    if protected.layers:
        assert protected == ((0, 1, 28, 29), KV_FORMATS["fp8"], False, protected.reason)


@pytest.mark.parametrize(("num_layers", "layers"), [(1, ()), (2, (0,)), (3, (0,)), (7, (0, 1, 6)), (8, (0, 1, 6, 7))])
def test_never_more_than_half_of_a_small_model(num_layers: int, layers: tuple[int, ...]) -> None:
    protected = chosen(with_layers(num_layers))
    assert protected.layers == layers
    assert ("half" in protected.reason) == (num_layers < 8)


@pytest.mark.parametrize(
    ("asked", "layers", "reason"),
    [
        (0, (), ""),
        (1, (0,), "asked; kept in fp8: the first (0,)"),
        ("3", (0, 1, 29), "asked; kept in fp8: the first and the last (0,1,29)"),
        (30, tuple(range(30)), None),
        ("29,3", (3, 29), ""),
        ("7,", (7,), ""),
    ],
)
def test_what_is_asked_is_taken(asked: object, layers: tuple[int, ...], reason: str | None) -> None:
    protected = chosen(kv_protected_layers=asked)
    assert protected.layers == layers
    assert not protected.is_open
    assert reason is None or protected.reason == reason


def test_weights_have_the_last_word_where_there_are_key_biases() -> None:
    biased = blueprint("Qwen2.5-7B-Instruct")
    protected = chosen(biased)
    assert protected.is_open
    assert protected.reason == f"the default of {NARROW}; kept in fp8: those with the largest key biases"
    assert protected.layers == (0, 1, 26, 27), "by position until then"
    assert not chosen(biased, kv_protected_layers="5,6").is_open, "a list is a list"
    assert not chosen(biased, kv_protected_layers=28).is_open, "all of them are all of them"
    assert not chosen(biased, kv_format="turboquant_k8v4").is_open, "none are none"
    assert chosen(biased, kv_format="turboquant_k8v4", kv_protected_layers=1).is_open


@pytest.mark.parametrize(
    ("kv_format", "options", "wider"),
    [
        (NARROW, {}, "fp8"),
        (NARROW, {"kv_protected_dtype": "auto"}, "bfloat16"),
        ("turboquant_3bit_nc", {"kv_protected_dtype": "turboquant_k8v4"}, "turboquant_k8v4"),
        ("turboquant_k8v4", {"kv_protected_layers": 2}, "fp8"),
        ("fp8", {"kv_protected_layers": 2, "kv_protected_dtype": "auto"}, "bfloat16"),
        ("bfloat16", {"kv_protected_layers": 2, "kv_protected_dtype": "float32"}, "float32"),
    ],
)
def test_the_wider_format(kv_format: str, options: dict, wider: str) -> None:
    protected = chosen(kv_format=kv_format, **options)
    assert protected.format.name == wider
    formats = protected.formats(KV_FORMATS[kv_format], 30)
    assert [form.name for form in formats].count(wider) == len(protected.layers) > 0
    assert all(form.name == kv_format for layer, form in enumerate(formats) if layer not in protected.layers)


@pytest.mark.parametrize(
    ("kv_format", "options", "words"),
    [
        (
            "fp8",
            {"kv_protected_layers": 4},
            "a head takes 132 bytes in it and 132 in fp8; set kv_protected_dtype to float32",
        ),
        (
            "bfloat16",
            {"kv_protected_layers": "3,"},
            "132 bytes in it and 256 in bfloat16; set kv_cache_dtype to a narrower format",
        ),
        ("float32", {"kv_protected_layers": 4, "kv_protected_dtype": "float32"}, "leave out kv_protected_layers"),
        (NARROW, {"kv_protected_dtype": "turboquant_3bit_nc"}, "protected layers in turboquant_3bit_nc were asked"),
        (
            NARROW,
            {"kv_protected_layers": 31},
            "kv_protected_layers=31 was asked; the model has 30 layers; ask for at most 30",
        ),
        (NARROW, {"kv_protected_layers": "1,30"}, "kv_protected_layers=1,30 was asked; the layers are 0 to 29"),
    ],
)
def test_what_cannot_be_is_told_in_words(kv_format: str, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")) as caught:
        chosen(kv_format=kv_format, **options)
    assert "\n" not in str(caught.value)


def test_models_without_heads_protect_nothing() -> None:
    latent = blueprint("DeepSeek-R1")
    assert chosen(latent, "fp8") == ((), KV_FORMATS["fp8"], False, "")
    assert chosen(latent, "fp8", kv_protected_layers=0).layers == ()
    for asked in (1, "0,"):
        with pytest.raises(ConfigError, match="keeps no keys and values by head"):
            chosen(latent, "fp8", kv_protected_layers=asked)


@given(st.integers(1, 80).flatmap(lambda number: st.tuples(st.integers(0, number), st.just(number))))
def test_positions_are_the_two_ends(sizes: tuple[int, int]) -> None:
    count, num_layers = sizes
    layers = by_position(count, num_layers)
    assert len(set(layers)) == count
    assert list(layers) == sorted(layers)
    assert set(layers) == set(_from_the_ends(num_layers)[:count])
    assert sorted(_from_the_ends(num_layers)) == list(range(num_layers))


@given(
    st.lists(st.floats(0, 1e30) | st.sampled_from([0.0, 1.0, math.inf, math.nan]), min_size=1, max_size=40),
    st.integers(1, 40),
)
def test_the_largest_biases_are_protected(norms: list[float], wanted: int) -> None:
    count = min(wanted, len(norms))
    layers, reason = by_key_bias(count, norms)
    assert len(set(layers)) == count
    assert list(layers) == sorted(layers)
    sizes = [math.inf if math.isnan(norm) else norm for norm in norms]
    left = [sizes[layer] for layer in range(len(sizes)) if layer not in layers]
    assert min(sizes[layer] for layer in layers) >= max(left, default=-1.0)
    assert reason
    assert "\n" not in reason


def test_biases_that_are_alike_are_taken_by_position() -> None:
    assert by_key_bias(4, [0.0] * 12) == (
        (0, 1, 10, 11),
        "all key biases are alike, and these are the first and the last",
    )
    assert by_key_bias(3, [1.0, 1.0, 5.0, 1.0, 1.0])[0] == (0, 2, 4), "the ends first among equals"


def test_the_reason_has_the_numbers() -> None:
    """The norms of a model that is known to break with 4-bit keys: the ends, and one in the middle."""
    norms = [605.0, 22.0, 20.0, 300.0, 25.0, 18.0, 30.0, 921.0]
    layers, reason = by_key_bias(3, norms)
    assert layers == (0, 3, 7)
    assert reason == "their key biases are the largest, 300 to 921 where the median is 25"


@given(st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True))
def test_a_list_is_written_as_it_is_read(layers: list[int]) -> None:
    assert parse_layers(listed(sorted(layers)), "x") == tuple(sorted(layers))

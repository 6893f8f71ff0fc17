"""Which weights are quantized here: what a device can multiply, what a checkpoint has already, and what is told of it."""

from dataclasses import replace

import pytest

from holdfast.config import EngineConfig
from holdfast.errors import ConfigError
from holdfast.models.blueprints.blueprint import Blueprint
from holdfast.planning.resolve import choose_recipe, unsupported_scheme
from holdfast.planning.target import Target, memory_target
from holdfast.quant.weight_schemes import (
    EMBEDDING_CHOICES,
    FP8,
    FP8_BLOCK,
    HEAD_SCHEME,
    WEIGHT_SCHEMES,
    QuantizedEmbeddings,
    WeightRecipe,
)
from runner.plan_cases import A100, H200, HOST, RTX4090, blueprint

CODED = [name for name, scheme in WEIGHT_SCHEMES.items() if scheme.codes_activations]


def choose(model: str | Blueprint = "Qwen3-8B", target: Target = H200, **options):
    known = blueprint(model) if isinstance(model, str) else model
    return choose_recipe(EngineConfig.from_options(**options), known, target)


def test_nothing_asked_is_nothing_told() -> None:
    assert choose() == (WeightRecipe(), ())
    assert choose(quantization="none") == (WeightRecipe(), ())


@pytest.mark.parametrize("name", WEIGHT_SCHEMES)
@pytest.mark.parametrize("target", [H200, RTX4090, HOST, memory_target("24GiB")], ids=lambda target: target.name)
def test_every_scheme_runs_here(name: str, target: Target) -> None:
    """A GPU of which only the size is known is taken to be a new one."""
    recipe, notes = choose(target=target, quantization=name)
    assert recipe == WeightRecipe(WEIGHT_SCHEMES[name])
    assert notes == (("quantization", name, "asked: 145 of 291 weights are quantized as they load"),)


@pytest.mark.parametrize("name", CODED)
def test_a_gpu_without_products_in_fp8_says_so_and_what_it_has(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(target=A100, quantization=name)
    assert caught.value.asked == f"quantization={name} was asked"
    assert "compute capability 8.0" in caught.value.has
    assert caught.value.do == "try int8 or mxfp4"
    assert [scheme for scheme in WEIGHT_SCHEMES if unsupported_scheme(scheme, A100) is None] == ["int8", "mxfp4"]


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
@pytest.mark.parametrize("embeddings", EMBEDDING_CHOICES)
def test_heads_and_embeddings_are_quantized_there_as_anywhere(name: str, embeddings: QuantizedEmbeddings) -> None:
    recipe, notes = choose(target=A100, quantization=name, quantized_embeddings=embeddings)
    assert recipe == WeightRecipe(WEIGHT_SCHEMES[name], embeddings)
    assert (recipe, notes) == choose(target=H200, quantization=name, quantized_embeddings=embeddings)
    head = recipe.scheme_for("head", ())
    assert head is None or not head.codes_activations, "else that GPU could not multiply by it"


def test_patterns_that_do_nothing_are_told_and_those_that_match_nothing_raise() -> None:
    _, notes = choose(quantization="fp8", quantization_ignore="*norm*,lm_head")
    assert notes[1] == ("quantization_ignore", "*norm*", "asked, but what it matches is never quantized")
    _, notes = choose(quantization="fp8", quantization_ignore="*")
    assert notes == (("quantization", "fp8", "asked, but no weight is quantized: quantization_ignore covers them all"),)
    with pytest.raises(ConfigError, match=r"'\*doun_proj\*' was asked; .*did you mean \*down_proj\*\?"):
        choose(quantization="fp8", quantization_ignore="*doun_proj*")


def test_a_checkpoint_that_is_quantized_stays_so() -> None:
    recipe, notes = choose("DeepSeek-R1")
    assert recipe.scheme == FP8_BLOCK
    assert notes == (("quantization", "fp8_block", "the checkpoint's own"),)
    assert choose("DeepSeek-R1", quantization="fp8_block")[0] == recipe, "that is what it is"
    with pytest.raises(
        ConfigError, match="quantization=mxfp4 was asked; DeepSeek-R1 has its weights in fp8_block already"
    ):
        choose("DeepSeek-R1", quantization="mxfp4")


STORED = {"layers.0.o.weight": FP8, "lm_head.weight": HEAD_SCHEME}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"quantization_ignore": "*o_proj*"},
            r"'\*o_proj\*' was asked; layers.0.o.weight is stored as fp8 already; leave",
        ),
        ({"quantization_ignore": "*o_porj*"}, r"did you mean \*o_proj\*\?"),
        ({"quantized_embeddings": "none"}, "lm_head.weight is stored as int8 already; leave quantized_embeddings out"),
        ({"quantized_embeddings": "all"}, "embed.weight is stored unquantized .* leave quantized_embeddings out"),
        ({"quantization": "int8"}, "leave quantization out to load it as it is, or take the model as it was before"),
    ],
)
def test_what_cannot_be_had_of_saved_weights_is_refused_with_what_can(options, words: str) -> None:
    """Nothing of them is open. Each advice, typed, is heard."""
    saved = replace(blueprint("Qwen3-8B"), stored=STORED)
    with pytest.raises(ConfigError, match=words):
        choose(saved, **{"quantization": "fp8"} | options)
    if "quantized_embeddings" in options:
        with pytest.raises(ConfigError, match=words):
            choose(saved, **options)
    as_it_is = choose(saved)[0]
    assert choose(saved, quantization="fp8")[0] == as_it_is
    assert choose(saved, quantization="fp8", quantization_ignore="*down_proj*")[0] == as_it_is, "that is plain anyway"


def test_the_checkpoint_s_own_scheme_is_for_what_it_left_open() -> None:
    plain = blueprint("Qwen3-8B")
    left = frozenset(weight.name for weight in plain.parameters() if "layers.1." not in weight.name)
    stored = replace(plain, stored={"layers.0.o.weight": FP8}, open_weights=left)
    recipe, notes = choose(stored, quantization="fp8", quantization_ignore="model.layers.2.*")
    (note,) = notes
    assert note[2] == "asked, and the checkpoint's own; 136 of its plain weights are quantized on load"
    assert recipe.scheme_for("linear", ["layers.3.o.weight"]) == FP8
    assert recipe.scheme_for("linear", ["layers.1.o.weight"]) is None, "its makers left it out"
    assert recipe.scheme_for("linear", ["layers.2.o.weight"]) is None, "asked"
    assert choose(stored)[0] == stored.stored_recipe


def test_what_is_open_is_not_guessed() -> None:
    plain = blueprint("Qwen3-8B")
    stored = replace(plain, stored={"layers.0.o.weight": FP8}, unread_pattern="re:(?!a)b")
    assert choose(stored)[0] == stored.stored_recipe
    with pytest.raises(
        ConfigError, match=r"quantization=fp8 was asked; Qwen3-8B leaves out 're:\(\?!a\)b'.*not followed"
    ):
        choose(stored, quantization="fp8")


def test_embeddings_without_a_scheme_are_told() -> None:
    recipe, notes = choose(quantized_embeddings="all")
    assert recipe.scheme is None
    assert notes == (("quantized_embeddings", "all", "asked, but nothing is quantized without quantization"),)


def test_a_checkpoint_in_fp8_is_declined_where_it_cannot_be_multiplied() -> None:
    stored = replace(blueprint("Qwen3-8B"), stored={"layers.0.o.weight": FP8})
    assert choose(stored)[0].scheme == FP8
    with pytest.raises(ConfigError, match=r"stored in fp8; .*8\.0.*; take the unquantized checkpoint"):
        choose(stored, A100)
    with pytest.raises(ConfigError, match="take the unquantized checkpoint, with int8 or mxfp4"):
        choose(stored, A100, quantization="int8")  # to leave that out would not help

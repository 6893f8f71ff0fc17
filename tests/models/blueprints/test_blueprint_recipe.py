"""Recipes against models: what they cover, what is a slip of the pen, and what a checkpoint has quantized already."""

import pytest

from holdfast.errors import ConfigError
from holdfast.models.blueprints.blueprint import Blueprint, read_blueprint
from holdfast.models.blueprints.weights import Review, Weight, review_recipe, stored_recipe
from holdfast.models.catalogue import CATALOGUE
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, MXFP4, WeightRecipe


def blueprint(name: str) -> Blueprint:
    return read_blueprint(CATALOGUE[name], name)


def test_matrices_and_the_head_are_covered() -> None:
    assert blueprint("Qwen3-8B").review_recipe(WeightRecipe(FP8)) == Review(399 - 108, 36 * 4 + 1, ())
    assert blueprint("Qwen3-8B").review_recipe(WeightRecipe(FP8, "none")).num_quantized == 36 * 4
    tied = blueprint("Qwen3-0.6B")
    assert tied.review_recipe(WeightRecipe(FP8)).num_quantized == 28 * 4 + 1, "the embedding is the head"
    assert blueprint("Qwen3-8B").review_recipe(WeightRecipe(FP8, "all")).num_quantized == 36 * 4 + 2
    experts = blueprint("Qwen1.5-MoE-A2.7B")
    assert experts.review_recipe(WeightRecipe(MXFP4)).num_quantized == 24 * 6 + 1


def test_patterns_take_weights_out_and_idle_ones_are_told() -> None:
    model = blueprint("Qwen3-8B")
    recipe = WeightRecipe(FP8, "head", ("*down_proj*", "lm_head", "*norm*", "embed"))
    assert model.review_recipe(recipe) == Review(291, 36 * 3, ("*norm*", "embed"))
    assert model.review_recipe(WeightRecipe(FP8, "head", ("*",))).num_quantized == 0


@pytest.mark.parametrize(
    ("name", "pattern", "do"),
    [
        ("Qwen3-8B", "*down_prj*", r"did you mean \*down_proj\*\?"),
        ("Qwen3-8B", "down_proj", r"did you mean \*down_proj\*\?"),
        ("Qwen3-8B", "lm_hed", r"did you mean \*lm_head\*\?"),
        ("Qwen3-8B", "zzz", "leave it out"),
        ("Qwen3-0.6B", "lm_head", "the head of this model is its embedding: ask for quantized_embeddings=none instead"),
        ("Qwen3-8B", "re:down_proj", r"did you mean \*down_proj\*\?"),
    ],
)
def test_a_pattern_that_matches_nothing_is_a_slip_of_the_pen(name: str, pattern: str, do: str) -> None:
    asked = f"quantization_ignore: the pattern '{pattern}' was asked; none of the ".replace("*", r"\*")
    with pytest.raises(ConfigError, match=f"{asked}.*{do}") as caught:
        blueprint(name).review_recipe(WeightRecipe(FP8, "head", (pattern,)))
    assert "\n" not in str(caught.value)


def test_columns_that_do_not_divide_are_named_with_what_works() -> None:
    odd = (Weight("layers.0.o.weight", (64, 48), "linear"), Weight("embed.weight", (64, 64), "embedding"))
    with pytest.raises(ConfigError, match=r"quantization=mxfp4 .*layers.0.o.weight .*48 columns.*int8") as caught:
        review_recipe(odd, WeightRecipe(MXFP4))
    advised = "layers.*.o.weight"
    assert f"add {advised} to quantization_ignore" in str(caught.value), "one pattern for all layers"
    assert review_recipe(odd, WeightRecipe(MXFP4, ignore=(advised,))).num_quantized == 0
    assert review_recipe(odd, WeightRecipe(INT8)).num_quantized == 1
    assert review_recipe(odd, WeightRecipe(MXFP4, ignore=("layers.0.o",))) == Review(2, 0, ())


def test_what_a_checkpoint_has_quantized() -> None:
    assert blueprint("Qwen3-8B").stored_recipe is None
    r1 = blueprint("DeepSeek-R1").stored_recipe
    assert r1 is not None
    assert r1.scheme == FP8_BLOCK
    assert r1.embeddings == "none"
    v4 = blueprint("DeepSeek-V4-Pro").stored_recipe
    assert v4 is not None
    assert v4.scheme is not None
    assert v4.scheme.codes_activations, "of fp8 and mxfp4 the one that needs more room"


def test_headers_say_which_weights_are_stored_how() -> None:
    settled = FP8_BLOCK.with_parts((64,))
    weights = (
        Weight("layers.0.qkv.weight", (128, 64), "linear", native=settled),
        Weight("layers.0.o.weight", (64, 64), "linear"),
        Weight("lm_head.weight", (64, 64), "head"),
    )
    assert stored_recipe(weights) == WeightRecipe(FP8_BLOCK, "none", ("layers.0.o.weight", "lm_head.weight"))
    assert stored_recipe(weights[1:]) is None


@pytest.mark.parametrize("kind", ["head", "embedding"])
def test_layers_say_what_a_checkpoint_is_stored_as_and_not_its_embedding(kind) -> None:
    weights = (
        Weight("embed.weight", (64, 64), kind, native="int8"),
        Weight("layers.0.qkv.weight", (128, 64), "linear", native="mxfp4"),
    )
    found = stored_recipe(weights)
    assert found is not None
    assert found.scheme == MXFP4, "a head is int8 beside any scheme"
    alone = stored_recipe(weights[:1])
    assert alone is not None
    assert alone.scheme == INT8

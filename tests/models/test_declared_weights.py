"""Recipes against models: what they cover, what is a slip of the pen, and what a checkpoint has quantized already."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from holdfast.errors import ConfigError
from holdfast.memory.workspace_plan import aligned
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.declared_weights import (
    Review,
    Weight,
    WeightGroup,
    review_recipe,
    stored_recipe,
    weight_bytes,
    weight_groups,
    weight_of,
)
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.weight_schemes import AS_STORED, FP8, FP8_BLOCK, INT8, MXFP4, WEIGHT_SCHEMES, WeightRecipe

LINEAR = Weight("layers.0.qkv.weight", (300, 96), "linear")
SIZES = {
    "fp8": (300 * 96, 4 * 300),
    "fp8_tensor": (300 * 96, 4 * 300),
    "fp8_block": (300 * 96, 4 * 3 * 1),
    "int8": (300 * 96, 4 * 300),
    "mxfp4": (300 * 48, 300 * 3),
}
RECIPES = {name: WeightRecipe(scheme) for name, scheme in WEIGHT_SCHEMES.items()}


@pytest.mark.parametrize("name", WEIGHT_SCHEMES)
def test_codes_and_scales(name: str) -> None:
    codes, scales = SIZES[name]
    assert weight_bytes(LINEAR, "bfloat16", RECIPES[name]) == aligned(codes) + aligned(scales)


@pytest.mark.parametrize("name", WEIGHT_SCHEMES)
def test_weight_bytes_count_scales_of_each_expert(name: str) -> None:
    codes, scales = SIZES[name]
    experts = Weight("layers.0.experts.down.weight", (7, 300, 96), "expert")
    if name == "fp8_block":
        scales = 4 * 300 // 4 * 1
        assert experts.scheme(RECIPES[name]) == FP8_BLOCK.with_parts((4,)), "300 rows in blocks that end with them"
    assert weight_bytes(experts, "bfloat16", RECIPES[name]) == aligned(7 * codes) + aligned(7 * scales)


def test_blocks_end_where_parts_do() -> None:
    fused = LINEAR._replace(shape=(960, 256), seam_rows=192)
    scheme = fused.scheme(RECIPES["fp8_block"])
    assert scheme is not None
    assert scheme.block_rows == 64
    assert weight_bytes(fused, "bfloat16", RECIPES["fp8_block"]) == aligned(960 * 256) + aligned(4 * 15 * 2)


@pytest.mark.parametrize("kind", ["embedding", "norm", "bias", "router"])
def test_weight_bytes_unquantized_kinds_stay_plain(kind) -> None:
    for recipe in RECIPES.values():
        assert weight_bytes(Weight("x", (300, 96), kind), "bfloat16", recipe) == aligned(2 * 300 * 96)


@pytest.mark.parametrize(("embeddings", "is_quantized"), [("none", False), ("head", False), ("all", True)])
def test_weight_bytes_quantize_embedding_under_all_only(embeddings, is_quantized: bool) -> None:
    recipe = WeightRecipe(MXFP4, embeddings)
    num_bytes = weight_bytes(Weight("embed.weight", (300, 96), "embedding"), "bfloat16", recipe)
    assert num_bytes == (aligned(300 * 96) + aligned(4 * 300) if is_quantized else aligned(2 * 300 * 96)), "in fp8"


def test_weight_scheme_ignore_matches_source_tensor_names() -> None:
    parts = (Part("model.layers.0.q.weight", 0, (64, 32)), Part("model.layers.0.k.weight", 64, (32, 32)))
    weight = weight_of(Parameter("layers.0.qkv.weight", (96, 32), parts))
    assert weight == Weight(
        "layers.0.qkv.weight",
        (96, 32),
        "linear",
        tensors=("model.layers.0.q.weight", "model.layers.0.k.weight"),
        seam_rows=64,
        part_rows=(64, 32),
    )
    for pattern in ("layers.0.qkv.weight", "*.k", "re:.*q[.]weight"):
        assert weight.scheme(WeightRecipe(MXFP4, ignore=(pattern,))) is None, pattern
    assert weight.scheme(WeightRecipe(MXFP4, ignore=("*.v",))) is MXFP4


def test_weight_bytes_own_dtype_overrides_model_dtype() -> None:
    assert weight_bytes(Weight("x", (10, 6), "router", dtype="int64"), "bfloat16", AS_STORED) == aligned(8 * 60)


def test_weight_scheme_rank_share_has_blocks_ending_with_it() -> None:
    settled = FP8_BLOCK.with_parts((32,))
    whole = Weight("layers.0.experts.gate_up.weight", (8, 64, 256), "expert", settled, seam_rows=32)
    assert whole.scheme(AS_STORED) == settled
    share = whole._replace(shape=(8, 16, 256))
    assert share.scheme(AS_STORED) == FP8_BLOCK.with_parts((16,))
    assert weight_bytes(share, "bfloat16", AS_STORED) == aligned(8 * 16 * 256) + aligned(4 * 8 * 1 * 2)


def test_weight_bytes_native_scheme_by_name_or_value() -> None:
    stored = LINEAR._replace(native=FP8_BLOCK.name)
    assert weight_bytes(stored, "bfloat16", AS_STORED) == aligned(300 * 96) + aligned(4 * 3)
    settled = LINEAR._replace(native=FP8_BLOCK.with_parts((4,)))
    assert weight_bytes(settled, "bfloat16", AS_STORED) == aligned(300 * 96) + aligned(4 * 75)


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from(sorted(WEIGHT_SCHEMES)))
def test_never_more_than_plain_fp32_and_never_less_than_the_bits(rows: int, columns: int, name: str) -> None:
    columns += -columns % 32
    num_bytes = weight_bytes(Weight("x", (rows, columns), "linear"), "float32", RECIPES[name])
    assert num_bytes % 256 == 0
    assert rows * columns / WEIGHT_SCHEMES[name].codes_per_byte < num_bytes
    assert num_bytes <= rows * columns + 4 * rows * -(-columns // 32) + 512


@pytest.mark.parametrize(
    ("name", "kind", "group"),
    [
        ("embed.weight", "embedding", "embed"),
        ("layers.3.qkv.weight", "linear", "layers"),
        ("layers.3.experts.down.weight", "expert", "experts"),
        ("mtp.0.experts.down.weight", "expert", "mtp"),
        ("lm_head.weight", "head", "lm_head"),
    ],
)
def test_groups_of_a_table(name, kind, group) -> None:
    assert Weight(name, (1, 1), kind).group == group


def test_groups_name_every_way_in_which_their_weights_are_stored() -> None:
    norms = [Weight(f"layers.{layer}.norm.weight", (96,), "norm") for layer in range(3)]
    router = Weight("layers.0.router.weight", (8, 96), "router", dtype="float32")
    stored = Weight("layers.1.qkv.weight", (300, 96), "linear", "int8")
    head = Weight("lm_head.weight", (300, 96), "head")
    weights = (*norms, router, LINEAR, LINEAR._replace(name="layers.2.qkv.weight"), stored, head)
    groups = weight_groups(weights, "bfloat16", RECIPES["mxfp4"])
    in_layers = sum(weight_bytes(weight, "bfloat16", RECIPES["mxfp4"]) for weight in weights[:-1])
    assert groups == {
        "layers": WeightGroup(7, in_layers, ("mxfp4", "int8", "bfloat16", "float32")),
        "lm_head": WeightGroup(1, aligned(300 * 96) + aligned(4 * 300), ("int8",)),
    }
    assert weight_groups(norms, "float16", AS_STORED) == {"layers": WeightGroup(3, 3 * 256, ("float16",))}
    assert weight_groups((), "float16", AS_STORED) == {}


def declared(name: str) -> DeclaredModel:
    return declare_config(CATALOGUE[name], name)


def test_matrices_and_the_head_are_covered() -> None:
    assert declared("Qwen3-8B").review_recipe(WeightRecipe(FP8)) == Review(399 - 108, 36 * 4 + 1, ())
    assert declared("Qwen3-8B").review_recipe(WeightRecipe(FP8, "none")).num_quantized == 36 * 4
    tied = declared("Qwen3-0.6B")
    assert tied.review_recipe(WeightRecipe(FP8)).num_quantized == 28 * 4 + 1, "the embedding is the head"
    assert declared("Qwen3-8B").review_recipe(WeightRecipe(FP8, "all")).num_quantized == 36 * 4 + 2
    experts = declared("Qwen1.5-MoE-A2.7B")
    assert experts.review_recipe(WeightRecipe(MXFP4)).num_quantized == 24 * 6 + 1


def test_review_recipe_counts_ignored_and_reports_idle_patterns() -> None:
    model = declared("Qwen3-8B")
    recipe = WeightRecipe(FP8, "head", ("*down_proj*", "lm_head", "*norm*", "embed"))
    assert model.review_recipe(recipe) == Review(291, 36 * 3, ("*norm*", "embed"))
    assert model.review_recipe(WeightRecipe(FP8, "head", ("*",))).num_quantized == 0


@pytest.mark.parametrize(
    ("name", "pattern", "hint"),
    [
        ("Qwen3-8B", "*down_prj*", r"Did you mean \*down_proj\*\?"),
        ("Qwen3-8B", "down_proj", r"Did you mean \*down_proj\*\?"),
        ("Qwen3-8B", "lm_hed", r"Did you mean \*lm_head\*\?"),
        ("Qwen3-8B", "zzz", "Leave it out"),
        (
            "Qwen3-0.6B",
            "lm_head",
            "The head of this model is tied to its embedding: use quantized_embeddings=none instead",
        ),
        ("Qwen3-8B", "re:down_proj", r"Did you mean \*down_proj\*\?"),
    ],
)
def test_pattern_without_a_match_is_refused(name: str, pattern: str, hint: str) -> None:
    with raises_code("quant.no_such_weight", ConfigError, value=pattern) as caught:
        declared(name).review_recipe(WeightRecipe(FP8, "head", (pattern,)))
    assert re.search(hint, str(caught.value))
    assert "\n" not in str(caught.value)


def test_columns_that_do_not_divide_are_named_with_what_works() -> None:
    odd = (Weight("layers.0.o.weight", (64, 48), "linear"), Weight("embed.weight", (64, 64), "embedding"))
    with pytest.raises(ConfigError, match=r"quantization=mxfp4 .*layers.0.o.weight .*48 columns.*int8") as caught:
        review_recipe(odd, WeightRecipe(MXFP4))
    advised = "layers.*.o.weight"
    assert f"Add {advised} to quantization_ignore" in str(caught.value), "one pattern for all layers"
    assert review_recipe(odd, WeightRecipe(MXFP4, ignore=(advised,))).num_quantized == 0
    assert review_recipe(odd, WeightRecipe(INT8)).num_quantized == 1
    assert review_recipe(odd, WeightRecipe(MXFP4, ignore=("layers.0.o",))) == Review(2, 0, ())


def test_stored_recipe_names_scheme_of_checkpoint() -> None:
    assert declared("Qwen3-8B").stored_recipe is None
    r1 = declared("DeepSeek-R1").stored_recipe
    assert r1 is not None
    assert r1.scheme == FP8_BLOCK
    assert r1.embeddings == "none"
    v4 = declared("DeepSeek-V4-Pro").stored_recipe
    assert v4 is not None
    assert v4.scheme is not None
    assert v4.scheme.quantizes_activations, "of fp8 and mxfp4 the one that needs more room"


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
def test_stored_recipe_prefers_layer_scheme_to_embedding_scheme(kind) -> None:
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

"""Weight schemes and recipes: planes, what a scheme declines, and which weights of a model are quantized."""

from math import gcd

import pytest

from error_codes import raises_code
from holdfast.errors import ConfigError
from holdfast.quant.weight_schemes import (
    AS_STORED,
    FP8,
    FP8_BLOCK,
    FP8_TENSOR,
    HEAD_SCHEME,
    INT8,
    MXFP4,
    WEIGHT_SCHEMES,
    WeightPlane,
    WeightRecipe,
    find_scheme,
)


@pytest.mark.parametrize(
    ("scheme", "codes", "scales"),
    [
        (FP8, WeightPlane("", (96, 576), "float8_e4m3fn"), WeightPlane(".scale", (96,), "float32")),
        (FP8_TENSOR, WeightPlane("", (96, 576), "float8_e4m3fn"), WeightPlane(".scale", (96,), "float32")),
        (FP8_BLOCK, WeightPlane("", (96, 576), "float8_e4m3fn"), WeightPlane(".scale", (1, 5), "float32")),
        (INT8, WeightPlane("", (96, 576), "int8"), WeightPlane(".scale", (96,), "float32")),
        (MXFP4, WeightPlane("", (96, 288), "uint8"), WeightPlane(".scale", (96, 18), "uint8")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_weight_scheme_planes_follow_the_matrix_shape(scheme, codes, scales):
    assert scheme.planes((96, 576)) == (codes, scales)


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES.values(), ids=WEIGHT_SCHEMES)
def test_weight_scheme_planes_stack_matrices_as_rows(scheme):
    codes, scales = scheme.planes((3, 256, 384))
    flat_codes, flat_scales = scheme.planes((768, 384))
    assert codes.shape[0] == scales.shape[0] == 3
    assert codes.num_bytes == flat_codes.num_bytes
    assert scales.num_bytes == flat_scales.num_bytes


def test_weight_scheme_bits_of_a_weight_are_known():
    bytes_of = {
        name: sum(plane.num_bytes for plane in scheme.planes((1024, 4096))) for name, scheme in WEIGHT_SCHEMES.items()
    }
    bits = {name: 8 * count / (1024 * 4096) for name, count in bytes_of.items()}
    assert bits == {
        "fp8": 8 + 32 / 4096,
        "fp8_tensor": 8 + 32 / 4096,
        "fp8_block": 8 + 32 / 128**2,
        "int8": 8 + 32 / 4096,
        "mxfp4": 4.25,
    }


@pytest.mark.parametrize(
    ("part_rows", "block_rows"), [((576, 192, 192), 64), ((256, 128), 128), ((1408, 96), 32), ((7, 9), 1)]
)
def test_weight_scheme_with_parts_keeps_blocks_within_parts(part_rows, block_rows):
    scheme = FP8_BLOCK.with_parts(part_rows)
    assert scheme.block_rows == block_rows == gcd(128, *part_rows)
    assert scheme.planes((sum(part_rows), 256))[1].shape == (sum(part_rows) // block_rows, 2)


@pytest.mark.parametrize("scheme", [FP8, FP8_TENSOR, INT8, MXFP4], ids=lambda scheme: scheme.name)
def test_weight_scheme_with_parts_leaves_row_schemes_unchanged(scheme):
    assert scheme.with_parts((7, 9)) is scheme


def test_scale_shape_refuses_blocks_across_matrices():
    assert FP8_BLOCK.scale_shape((100, 256)) == (1, 2)
    with pytest.raises(AssertionError, match="100 rows of each of 3 matrices"):
        FP8_BLOCK.scale_shape((3, 100, 256))


def test_weight_scheme_unsupported_names_partial_blocks():
    assert MXFP4.unsupported((4, 576)) is None
    assert MXFP4.unsupported((4, 100)) == "it has 100 columns, and mxfp4 stores 32 at a time"
    assert all(scheme.unsupported((4, 100)) is None for scheme in (FP8, FP8_TENSOR, FP8_BLOCK, INT8))


def test_head_scheme_has_a_scale_for_every_row():
    assert HEAD_SCHEME.block_rows == 1
    assert HEAD_SCHEME.scale_shape((7, 64)) == (7,)


def test_find_scheme_finds_each_scheme_by_name():
    assert [find_scheme(name) for name in WEIGHT_SCHEMES] == list(WEIGHT_SCHEMES.values())
    assert find_scheme(None) is find_scheme("none") is None


@pytest.mark.parametrize(("name", "near"), [("fp8block", "fp8_block"), ("int4", "int8"), ("", ""), (8, ""), ([], "")])
def test_find_scheme_unknown_name_suggests_the_nearest(name, near):
    with raises_code("value.not_one_of", ConfigError, name="quantization", value=name) as caught:
        find_scheme(name)
    assert caught.value.hints == ((f"Did you mean {near}?",) if near else ())


KINDS = ("linear", "expert", "embedding", "head", "norm", "bias", "router")
QKV = ("layers.3.qkv.weight", "model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.k_proj.weight")


def quantized(recipe: WeightRecipe) -> dict[str, str]:
    """Names of schemes by kind, for kinds that are quantized."""
    schemes = {kind: recipe.scheme_for(kind, ["any"]) for kind in KINDS}
    return {kind: scheme.name for kind, scheme in schemes.items() if scheme is not None}


def test_weight_recipe_default_quantizes_nothing():
    assert quantized(AS_STORED) == {}
    assert quantized(WeightRecipe(None, "all")) == {}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (WeightRecipe(FP8), {"linear": "fp8", "expert": "fp8", "head": "int8"}),
        (WeightRecipe(INT8, "none"), {"linear": "int8", "expert": "int8"}),
        (WeightRecipe(INT8, "all"), {"linear": "int8", "expert": "int8", "embedding": "int8", "head": "int8"}),
        (WeightRecipe(MXFP4, "all"), {"linear": "mxfp4", "expert": "mxfp4", "embedding": "int8", "head": "int8"}),
        (WeightRecipe(FP8, "all", (), FP8), {"linear": "fp8", "expert": "fp8", "embedding": "int8", "head": "fp8"}),
        (WeightRecipe(FP8, "none", (), FP8), {"linear": "fp8", "expert": "fp8"}),
        (WeightRecipe(FP8_BLOCK), {"linear": "fp8_block", "expert": "fp8_block", "head": "int8"}),
        (WeightRecipe(FP8, "none", expert_scheme=MXFP4), {"linear": "fp8", "expert": "mxfp4"}),
        (WeightRecipe(None, "all", expert_scheme=MXFP4), {}),
    ],
)
def test_weight_recipe_quantizes_the_kinds_it_names(recipe, expected):
    assert quantized(recipe) == expected


@pytest.mark.parametrize(
    ("pattern", "is_ignored"),
    [
        ("layers.3.qkv", True),
        ("layers.3.qkv.weight", True),
        ("*.k_proj", True),
        ("*.k_proj*", True),
        ("k_proj", False),
        ("*.v_proj", False),
        ("layers.30.qkv", False),
        ("re:.*layers\\.[0-4]\\.", True),
        ("re:layers\\.4", False),
        ("*.K_PROJ", False),
        ("*.layers.[0-3].*", True),
    ],
)
def test_weight_recipe_ignores_a_weight_if_any_name_matches(pattern, is_ignored):
    recipe = WeightRecipe(FP8, ignore=("nothing", pattern))
    assert recipe.is_ignored(QKV) is is_ignored
    assert recipe.scheme_for("linear", QKV) == (None if is_ignored else FP8)


def test_weight_recipe_ignores_the_head_by_name():
    assert WeightRecipe(FP8, ignore=("lm_head",)).scheme_for("head", ["lm_head.weight"]) is None


def test_weight_recipe_refuses_a_broken_pattern():
    with raises_code("config.pattern", ConfigError, value="re:(a"):
        WeightRecipe(FP8, ignore=("*.a", "re:(a"))
    assert WeightRecipe(FP8, ignore=("(a",)).is_ignored(["(a"])


def test_weight_recipe_refuses_unknown_quantized_embeddings():
    with raises_code("value.not_one_of", ConfigError, name="quantized_embeddings", value="both"):
        WeightRecipe(FP8, "both")

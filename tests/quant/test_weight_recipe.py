import pytest

from holdfast.errors import ConfigError
from holdfast.quant.weight_schemes import AS_STORED, FP8, FP8_BLOCK, INT8, MXFP4, WeightRecipe

KINDS = ("linear", "expert", "embedding", "head", "norm", "bias", "router")
QKV = ("layers.3.qkv.weight", "model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.k_proj.weight")


def quantized(recipe: WeightRecipe) -> dict[str, str]:
    """Names of schemes by kind, for kinds that are quantized."""
    schemes = {kind: recipe.scheme_for(kind, ["any"]) for kind in KINDS}
    return {kind: scheme.name for kind, scheme in schemes.items() if scheme is not None}


def test_nothing_is_quantized_unless_asked():
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
    ],
)
def test_kinds(recipe, expected):
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
def test_a_weight_is_left_alone_when_any_of_its_names_is(pattern, is_ignored):
    recipe = WeightRecipe(FP8, ignore=("nothing", pattern))
    assert recipe.is_ignored(QKV) is is_ignored
    assert recipe.scheme_for("linear", QKV) == (None if is_ignored else FP8)


def test_the_head_is_ignored_by_name_too():
    assert WeightRecipe(FP8, ignore=("lm_head",)).scheme_for("head", ["lm_head.weight"]) is None


def test_a_broken_expression_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"'re:\(a'.*no regular expression"):
        WeightRecipe(FP8, ignore=("*.a", "re:(a"))
    assert WeightRecipe(FP8, ignore=("(a",)).is_ignored(["(a"])


def test_an_unknown_choice_of_embeddings_is_refused():
    with pytest.raises(ConfigError, match=r"'both'.*the choices are none, head, all"):
        WeightRecipe(FP8, "both")

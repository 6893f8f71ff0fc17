"""Planned bytes of weights are those of the arena that a load allocates, to the byte: every scheme, every model that runs."""

from functools import cache

import pytest

from holdfast.loading.planning.plan import plan_load
from holdfast.loading.sources.dummy import DummySource
from holdfast.models.blueprints.blueprint import Blueprint, read_blueprint
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.families import parameters
from holdfast.models.parameters import Parameter
from holdfast.quant.weight_recipe import WeightRecipe
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES

TINY = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "torch_dtype": "bfloat16",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 64,
}
MODELS = {name: config for name, config in CATALOGUE.items() if "Deepseek" not in str(config["architectures"])}
MODELS |= {
    f"tiny {architecture} {tied=}": TINY
    | {"architectures": [architecture], "tie_word_embeddings": tied}
    | ({} if "Moe" in architecture else {"num_experts": None})
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
    for tied in (False, True)
}
RECIPES = [WeightRecipe(), *(WeightRecipe(scheme) for scheme in WEIGHT_SCHEMES.values())]
RECIPES += [
    WeightRecipe(WEIGHT_SCHEMES["mxfp4"], "none"),
    WeightRecipe(WEIGHT_SCHEMES["fp8_block"], "all", ("*.down_proj*", "re:.*layers[.]1[.].*q_proj.*")),
]


@cache
def model(name: str) -> tuple[Blueprint, tuple[Parameter, ...]]:
    blueprint = read_blueprint(MODELS[name], name)
    assert blueprint.spec is not None, blueprint.not_runnable
    return blueprint, parameters(blueprint.spec)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("Llama-3.1-70B", "Qwen3-30B"))])
@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda recipe: f"{recipe.scheme.name if recipe.scheme else 'none'}-{recipe.embeddings}"
)
def test_planned_bytes_are_loaded_bytes(name: str, recipe: WeightRecipe) -> None:
    blueprint, wanted = model(name)
    for dtype in ("float32", "bfloat16") if name.startswith("tiny") else ("bfloat16",):
        plan = plan_load(wanted, DummySource(wanted, "bfloat16"), dtype, recipe)
        assert blueprint.weight_bytes(dtype, recipe) == plan.final_bytes
        planned = {weight.name: weight.scheme(recipe) for weight in blueprint.parameters()}
        assert planned == {weight.name: weight.scheme for weight in plan.weights}
    if recipe.scheme is not None and not recipe.ignore:
        assert blueprint.review_recipe(recipe).num_quantized == plan.num_quantized > 0


def test_a_large_mixture_of_experts() -> None:
    """One scheme: it has 37 thousand tensors."""
    blueprint, wanted = model("Qwen3-30B-A3B")
    recipe = WeightRecipe(WEIGHT_SCHEMES["fp8_block"])
    plan = plan_load(wanted, DummySource(wanted, "bfloat16"), "bfloat16", recipe)
    assert blueprint.weight_bytes("bfloat16", recipe) == plan.final_bytes

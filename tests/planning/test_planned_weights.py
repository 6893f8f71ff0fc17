"""Planned bytes of weights are those of the arena that a load allocates, to the byte: every scheme, every model that runs."""

from functools import cache
from pathlib import Path

import pytest

from holdfast.config import EngineConfig
from holdfast.loading.declared import open_declared
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.sources.dummy import DummySource
from holdfast.memory.ledger import Ledger
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.grouped_readers import FAMILIES, parameters
from holdfast.models.parameters import Parameter
from holdfast.planning.resolve import PlanRequest, resolve
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES, WeightRecipe
from holdfast.runner.build import plan_model
from loading.stored_models import MOE, make_stored
from models.model_sample import SOME_MODELS
from planning.plan_cases import HOST

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
MODELS = {name: CATALOGUE[name] for name in SOME_MODELS if str(CATALOGUE[name]["architectures"][0]) in FAMILIES}  # type: ignore[index]
MODELS |= {
    f"tiny {architecture} {tied=}": TINY
    | {"architectures": [architecture], "tie_word_embeddings": tied}
    | ({} if "Moe" in architecture else {"num_experts": None})
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
    for tied in (False, True)
}
MODELS["small GLM-5.2"] = {
    **CATALOGUE["GLM-5.2"],
    "num_hidden_layers": 7,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
RECIPES = [WeightRecipe(), *(WeightRecipe(scheme) for scheme in WEIGHT_SCHEMES.values())]
RECIPES += [
    WeightRecipe(WEIGHT_SCHEMES["mxfp4"], "none"),
    WeightRecipe(WEIGHT_SCHEMES["fp8_block"], "all", ("*.down_proj*", "re:.*layers[.]1[.].*q_proj.*")),
]


@cache
def model(name: str) -> tuple[DeclaredModel, tuple[Parameter, ...]]:
    declared = declare_config({**MODELS[name], "quantization_config": None}, name)  # as before it was quantized
    assert declared.spec is not None, declared.not_runnable
    return declared, parameters(declared.spec)


LARGE = ("Qwen3-30B", "Qwen1.5-MoE", "DeepSeek-V3", "GLM-5")
"""Thousands of tensors of shapes that a smaller model has too."""


@pytest.mark.each_value
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(LARGE)])
@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda recipe: f"{recipe.scheme.name if recipe.scheme else 'none'}-{recipe.embeddings}"
)
def test_planned_bytes_are_loaded_bytes(name: str, recipe: WeightRecipe) -> None:
    declared, wanted = model(name)
    for dtype in ("float32", "bfloat16") if name.startswith("tiny") else ("bfloat16",):
        plan = plan_load(wanted, DummySource(wanted, "bfloat16"), dtype, recipe)
        assert declared.weight_bytes(dtype, recipe) == plan.final_bytes
        planned = {weight.name: weight.scheme(recipe) for weight in declared.parameters()}
        assert planned == {weight.name: weight.scheme for weight in plan.weights}
    if recipe.scheme is not None and not recipe.ignore:
        assert declared.review_recipe(recipe).num_quantized == plan.num_quantized > 0


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V3"])
def test_planned_bytes_of_large_expert_models_equal_load(name: str) -> None:
    """One scheme: they have tens of thousands of tensors."""
    declared, wanted = model(name)
    recipe = WeightRecipe(WEIGHT_SCHEMES["fp8_block"])
    plan = plan_load(wanted, DummySource(wanted, "bfloat16"), "bfloat16", recipe)
    assert declared.weight_bytes("bfloat16", recipe) == plan.final_bytes


STORED = {
    "fp8, o_proj plain": ("fp8", ("o_proj",), (), {}),
    "fp8_block, of two that are plain the makers tell of one": ("fp8_block", ("down_proj", "o_proj"), ("o_proj",), {}),
    "fp8_block, experts plain": ("fp8_block", (".experts.",), (), MOE),
    "mxfp4 experts, attention left out": ("mxfp4", (), ("self_attn",), MOE),
    "mxfp4 experts": ("mxfp4", (), (), MOE),
    "fp8, of a layer two are left out by an expression": (
        "fp8",
        ("layers.0.mlp",),
        (r"re:.*layers\.0\.mlp\.(gate|up)_proj",),
        {},
    ),
}
OPTIONS = ({}, {"quantized_embeddings": "none"}, {"quantized_embeddings": "all", "quantization_ignore": "lm_head"})


@pytest.mark.parametrize("case", STORED)
def test_planned_bytes_of_quantized_checkpoint_equal_load(case: str, tmp_path: Path) -> None:
    """Its own scheme, where it is requested, is for what it left plain and its makers did not leave out."""
    scheme, plain, said, settings = STORED[case]
    folder = str(make_stored(tmp_path / "model", scheme, plain, said, **settings))
    sizes = []
    for options in ({}, *({"quantization": scheme, "weight_cache": "off"} | more for more in OPTIONS)):
        config = EngineConfig.from_options(model=folder, device="cpu", **options)
        resolved = resolve(PlanRequest(config, open_declared(folder), HOST))
        planned = open_declared(folder).weight_bytes(resolved.dtype, resolved.recipe)
        load, plan = plan_model(config, open_model(folder, "auto"), HOST)
        assert resolved.recipe == plan.resolved.recipe
        ledger = Ledger()
        load.run("cpu", ledger, lambda done, total: None)
        assert planned == ledger.group_bytes()["weights"], options
        sizes.append(planned)
    as_stored, quantized, bare, embedded = sizes
    assert embedded == quantized < bare <= as_stored, "head and embedding have the same size"
    is_alike = case.endswith("attention left out")
    assert (bare == as_stored) == is_alike, "nothing but head and embedding is open there"


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("said", [("model", "lm_head"), ("model",)], ids=" and ".join)
def test_planned_bytes_of_checkpoint_without_codes_equal_plain(said, load_format, tmp_path: Path) -> None:
    """Whatever its settings say: what is requested is done to all of it."""
    folder = str(make_stored(tmp_path / "model", "fp8", ("model.",), said))
    for scheme in ("fp8", "int8"):
        config = EngineConfig.from_options(model=folder, device="cpu", quantization=scheme, weight_cache="off")
        resolved = resolve(PlanRequest(config, open_declared(folder), HOST))
        load, plan = plan_model(config, open_model(folder, load_format), HOST)
        assert resolved.recipe == plan.resolved.recipe
        assert open_declared(folder).weight_bytes(resolved.dtype, resolved.recipe) == load.plan.final_bytes
        assert load.plan.num_quantized == 9


def test_open_declared_without_weights_uses_settings(tmp_path: Path) -> None:
    folder = make_stored(tmp_path / "model", "fp8_block", ("o_proj",), ("o_proj",))
    known = open_declared(str(folder))
    (folder / "model.safetensors").unlink()
    alone = open_declared(str(folder))
    assert alone.weight_bytes("bfloat16") == known.weight_bytes("bfloat16")
    assert alone.open_weights == known.open_weights
    assert "layers.0.o.weight" not in alone.open_weights

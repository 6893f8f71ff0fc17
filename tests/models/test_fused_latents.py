"""The fused decode path of models with latents comes to the logits of the ordinary way; and which of them take it."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from holdfast.models import activations
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, WeightRecipe
from kernels.gemm_references import normed_linear_reference
from models.fused_decode_steps import decode, make_rig, placed, use_references
from models.tiny_experts import assembled, config_of, make_random, tensors_of
from models.tiny_latents import LATENT_MODELS, tiny
from runner.drive import LoadedModel

ROUNDING = 2e-5
DENSE = [case for case in LATENT_MODELS if not case.startswith("sparse")]


@pytest.mark.parametrize("case", DENSE)
def test_logits_are_those_of_the_ordinary_way(case, monkeypatch):
    use_references(monkeypatch)
    _, model = tiny(case)
    for num_rows in (1, 3):
        wanted = decode(make_rig(model, fused=False, backend="torch_latent"), num_rows)
        found = decode(make_rig(model, backend="torch_latent"), num_rows)
        assert found.isfinite().all()
        assert float((found - wanted).abs().max()) < ROUNDING


def test_fused_decode_defers_norms_of_latent_and_query_products(monkeypatch):
    use_references(monkeypatch)
    shapes = []
    _, model = tiny("v2 like V2-Lite")

    def counted(rows, weight, *others):
        shapes.append(tuple(weight.shape))
        return normed_linear_reference(rows, weight, *others)

    for module in ("holdfast.families.latent.layer", "holdfast.models.fused_decode"):
        monkeypatch.setattr(f"{module}.normed_linear", counted)
    decode(make_rig(model, backend="torch_latent"), 2, num_steps=1)
    own = {shape for shape in shapes if shape[1] == model.spec.hidden_size}
    assert {(48, 60), (84, 60)} <= own, "latents and queries"


@pytest.mark.parametrize(
    ("name", "takes"),
    [("DeepSeek-V2-Lite", True), ("GLM-4.7-Flash", True), ("DeepSeek-V3", False), ("DeepSeek-V3.2", False)],
)
def test_which_models_take_it(name, takes):
    """V3's makers store it in fp8 by block, and an index is not on this path."""
    declared = declare_config(CATALOGUE[name], name)
    spec, recipe = declared.spec, declared.stored_recipe or WeightRecipe()
    assert spec is not None
    assert activations.takes_fused_decode(spec, "bfloat16", "cuda", recipe) == takes
    if takes:
        for scheme in (FP8, INT8):
            assert activations.takes_fused_decode(spec, "bfloat16", "cuda", WeightRecipe(scheme))
        assert not activations.takes_fused_decode(spec, "bfloat16", "cuda", WeightRecipe(FP8_BLOCK))
        odd = replace(spec, latent=replace(spec.latent, kv_rank=496))
        assert not activations.takes_fused_decode(odd, "bfloat16", "cuda")


WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 0.25,
}
"""Widths that the path's kernels take, and experts that a rounding of their scores changes little by."""


@cache
def wide(case: str) -> LoadedModel:
    prefix, settings = LATENT_MODELS[case]
    latent = {} if settings["q_lora_rank"] is None else {"q_lora_rank": 64}
    theirs = make_random(prefix, settings | WIDE | latent, seed=3)
    spec = read_spec(config_of(theirs))
    return LoadedModel(spec, assembled(parameters(spec), tensors_of(theirs, "separate")))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("case", ["v2 like V2-Lite", "v3 like R1", "glm like GLM-4.7-Flash"])
def test_fused_decode_with_real_kernels_matches_unfused(device, case, num_rows):
    """As exact in bfloat16 on a GPU as the ordinary way there."""
    exact = decode(make_rig(wide(case), fused=False, backend="torch_latent"), num_rows)
    kept = {name: tensor.to(device) for name, tensor in wide(case).weights.items() if name.endswith("score_bias")}
    model = placed(wide(case), torch.bfloat16, device)
    model.weights.update(kept)  # always in float32

    def off(fused: bool) -> float:
        rig = make_rig(model, fused=fused, backend="triton_latent", dtype="bfloat16", device=device)
        return float((decode(rig, num_rows).cpu() - exact).square().mean().sqrt())

    assert off(fused=True) < 3 * off(fused=False) + ROUNDING
    assert exact.std() > 0.1, "errors are to be small beside it"

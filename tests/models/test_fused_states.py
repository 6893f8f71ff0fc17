"""The fused decode path of gated delta nets and gated attention comes to the logits of the ordinary way."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch

from holdfast.families.state import layer as state_layer
from holdfast.layers import moe
from holdfast.layers.mlp import Linear
from holdfast.models import fused_decode
from holdfast.models.grouped_readers import parameters
from holdfast.quant.weight_schemes import FP8, INT8, WeightRecipe, WeightScheme
from kernels.exactness import same_bits
from kernels.triton_cases import QUIET
from models.fused_decode_steps import CPU, decode, make_rig, placed, use_references
from models.test_decoder_quantized import quantized
from models.tiny_states import STATE_MODELS, save_state_model, tiny
from runner.drive import LoadedModel, load_model

ROUNDING = 2e-5
JOINED = "3.5 moe, all experts as wide"


@cache
def model_in(name: str, scheme: WeightScheme | None) -> LoadedModel:
    """The model of `tiny` with its products in codes."""
    ours, recipe = joined() if name == JOINED else tiny(name)[1], WeightRecipe(scheme)
    weights = dict(ours.weights)
    for parameter in parameters(ours.spec):
        own, values = recipe.scheme_for(parameter.kind, (parameter.name,)), weights[parameter.name]
        if own is not None and isinstance(values, torch.Tensor):
            weights[parameter.name] = quantized(values, own, parameter)
    return LoadedModel(ours.spec, weights)


@cache
def joined() -> LoadedModel:
    """A model whose shared expert is as wide as the others."""
    with TemporaryDirectory() as folder:
        save_state_model("3.5 moe", Path(folder), shared_expert_intermediate_size=24)
        return load_model(Path(folder))


@pytest.mark.parametrize("name", [*STATE_MODELS, JOINED])
@pytest.mark.parametrize("scheme", [None, INT8, FP8], ids=lambda one: one.name if one else "plain")
def test_fused_states_have_logits_of_the_ordinary_way(name, scheme, monkeypatch):
    use_references(monkeypatch)
    model, recipe = model_in(name, scheme), WeightRecipe(scheme)
    for num_rows in (1, 5):
        wanted = decode(make_rig(model, recipe, fused=False), num_rows)
        found = decode(make_rig(model, recipe), num_rows)
        off = (found - wanted).abs().amax(-1).flatten()
        assert wanted.std() > 0.1, "logits that do nothing"
        if scheme is FP8:  # a number between two codes may become either
            assert off.median() < ROUNDING
            assert off.max() < 0.05
        else:
            assert off.max() < ROUNDING


@pytest.mark.parametrize("scheme", [FP8, INT8], ids=lambda one: one.name)
def test_state_layer_takes_codes_of_its_norm(scheme, monkeypatch):
    """The norm leaves codes for the projection, which makes none. Weights in int8 take numbers."""
    made: list[bool] = []
    joint = Linear.joint

    def watched(self: Linear, *given: Any) -> torch.Tensor:
        made.append(given[-1])
        return joint(self, *given)

    monkeypatch.setattr(Linear, "joint", watched)
    recipe = WeightRecipe(scheme)
    rig = make_rig(model_in("3.5", scheme), recipe, fused=False)
    found = decode(rig, 2, num_steps=1)
    assert made == [scheme is FP8] * 6, "three states of a prompt, and of a decode step"
    monkeypatch.setattr(state_layer.StateLayer, "room_for_codes", lambda *_: None)
    assert same_bits(found, decode(make_rig(model_in("3.5", scheme), recipe, fused=False), 2, num_steps=1))


def elsewhere(model: LoadedModel, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """The model on a device with activations in another type. Gates stay float32."""
    found = dict(placed(model, dtype, device).weights)
    for name, weight in model.weights.items():
        if name.endswith(("A_log", "dt_bias")):
            assert isinstance(weight, torch.Tensor), f"{name} is quantized"
            found[name] = weight.to(device)
    return LoadedModel(model.spec, found)


@QUIET
@pytest.mark.parametrize(
    ("name", "scheme", "num_rows", "num_steps"),
    [
        ("3.5", None, 1, 1),
        ("3.5 moe", None, 3, 1),
        (JOINED, None, 1, 1),
        pytest.param("3.5", None, 1, 5, marks=pytest.mark.gpu),
        pytest.param("3.5", FP8, 1, 5, marks=pytest.mark.gpu),
        pytest.param("3.5", INT8, 5, 5, marks=pytest.mark.gpu),
        pytest.param("3.5 moe", None, 1, 5, marks=pytest.mark.gpu),
        pytest.param("3.5 moe", FP8, 1, 5, marks=pytest.mark.gpu),
        pytest.param(JOINED, None, 1, 5, marks=pytest.mark.gpu),
        pytest.param(JOINED, FP8, 1, 5, marks=pytest.mark.gpu),
        pytest.param(JOINED, INT8, 1, 5, marks=pytest.mark.gpu),
        pytest.param("next", None, 5, 5, marks=pytest.mark.gpu),
    ],
    ids=lambda one: one.name if isinstance(one, WeightScheme) else str(one),
)
def test_fused_states_with_real_kernels_are_as_exact_as_unfused(device, name, scheme, num_rows, num_steps):
    """In the interpreter in float32, in bfloat16 on a GPU."""
    dtype, recipe = "float32" if device.type == "cpu" else "bfloat16", WeightRecipe(scheme)
    model = elsewhere(model_in(name, scheme), getattr(torch, dtype), device)
    exact = decode(make_rig(elsewhere(model, torch.float32, CPU), recipe, fused=False), num_rows, num_steps)

    def off(fused: bool) -> float:
        rig = make_rig(model, recipe, fused, "triton_paged", dtype, device=device)
        # A rounding may choose another expert for one row, so the median counts.
        return float((decode(rig, num_rows, num_steps).cpu() - exact).abs().median())

    between = 5e-3 if scheme is FP8 else ROUNDING  # a number between two codes may become either
    assert off(fused=True) < 3 * off(fused=False) + between
    assert exact.std() > 0.3, "errors are to be small beside it"


LAUNCHES = {
    "normed_linear": fused_decode,
    "linear_add": fused_decode,
    "causal_conv": state_layer,
    "delta_step": state_layer,
    "gated_norm": state_layer,
    "route_normed": moe,
    "expert_row_linear": moe,
    "down_row_add": moe,
}
"""What a layer with a state launches for one row, and where it is called."""
CHAIN = ("normed_linear", "causal_conv", "delta_step", "gated_norm", "linear_add")


@pytest.mark.parametrize(
    ("name", "after"),
    [("3.5", ("normed_linear", "linear_add")), (JOINED, ("route_normed", "expert_row_linear", "down_row_add"))],
)
def test_fused_states_one_row_takes_seven_or_eight_launches_a_layer(name, after, monkeypatch):
    """Projections and gates, convolution, step, gated norm, output projection; then the MLP's two, or three of experts."""
    use_references(monkeypatch)
    launched: list[str] = []

    def watch(module: ModuleType, launch: str) -> None:
        own = getattr(module, launch)

        def run(*given: object, **named: object) -> object:
            launched.append(launch)
            return own(*given, **named)

        monkeypatch.setattr(module, launch, run)

    for launch, module in LAUNCHES.items():
        watch(module, launch)
    watch(state_layer, "normed_linear")
    rig = make_rig(model_in(name, None))
    decode(rig, 1, num_steps=1)
    first, layer = launched.index("normed_linear"), (*CHAIN, *after)  # a prompt takes no deferred norm
    assert launched[first : first + 3 * len(layer)] == [*layer] * 3, "three states come before attention"

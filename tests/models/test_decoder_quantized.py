"""Decoders over quantized weights: near the same decoder over the numbers that the codes stand for, in room that was planned."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from tempfile import TemporaryDirectory

import pytest
import torch

from holdfast.config import Limits
from holdfast.kernels.gemm import linear
from holdfast.layers import moe as experts
from holdfast.models.declaration import StepShape
from holdfast.models.decoder_layer import DecoderParts
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.parameters import Parameter
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES, WeightRecipe, WeightScheme
from kernels.exactness import require_native, same_bits
from kernels.quantized_cases import exact_rows
from loading.tiny_models import FAMILIES, save_tiny
from models.test_decoder_workspace import EVERY_ROW, WatchedWorkspace, make_step
from models.tiny_experts import EXPERT_MODELS, assembled, config_of, make_tiny, tensors_of
from quant.whole_weights import quantize
from runner import drive
from runner.drive import Drive, LoadedModel, Request, Rig, workspace_plan

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=90, max_model_len=100, page_tokens=4)
MODELS = ("qwen2_moe", "qwen2_moe tied, every head its own keys", "qwen3_moe not normalized, dense layers")
DENSE = ("llama_tied", "opt_350m_like")
WIDTHS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "word_embed_proj_dim": 32,
}
"""What mxfp4 can store: whole blocks of 32 columns."""
SCHEMES = pytest.mark.parametrize("scheme", WEIGHT_SCHEMES.values(), ids=WEIGHT_SCHEMES)


@cache
def tiny(name: str) -> LoadedModel:
    settings = (EXPERT_MODELS | FAMILIES)[name][1]
    widths = {key: value for key, value in WIDTHS.items() if key in settings}
    with TemporaryDirectory() as folder:
        model = make_tiny(name, **widths) if name in EXPERT_MODELS else save_tiny(name, folder, **widths)
    spec = read_spec(config_of(model))
    return LoadedModel(spec, assembled(parameters(spec), tensors_of(model, "separate")))


def quantized(values: torch.Tensor, scheme: WeightScheme, parameter: Parameter) -> QuantizedWeight:
    scheme = scheme.with_parts((*(part.num_rows for part in parameter.parts), values.shape[-2]))
    amax = values.abs().amax().view(1) if scheme.is_whole_tensor else None
    codes, scales = quantize(values.reshape(-1, values.shape[-1]), scheme, amax)
    planes = zip(scheme.planes(tuple(values.shape)), (codes, scales), strict=True)
    weight = QuantizedWeight(scheme, tuple(values.shape), *(tensor.reshape(plane.shape) for plane, tensor in planes))
    weight.check()
    return weight


@cache
def quantized_model(name: str, recipe: WeightRecipe) -> tuple[LoadedModel, LoadedModel]:
    """A model with codes where the recipe says so, and the same with the numbers that they stand for."""
    model, codes, numbers = tiny(name), {}, {}
    for parameter in parameters(model.spec):
        values = model.weights[parameter.name]
        scheme = recipe.scheme_for(parameter.kind, (parameter.name,))
        codes[parameter.name] = values if scheme is None else quantized(values, scheme, parameter)
        weight = codes[parameter.name]
        numbers[parameter.name] = values if scheme is None else dequantize(weight).view(values.shape)
    return LoadedModel(model.spec, codes), LoadedModel(model.spec, numbers)


def make_rig(
    model: LoadedModel, recipe: WeightRecipe, monkeypatch: pytest.MonkeyPatch, backend: str = "torch_paged"
) -> Rig:
    """As the runner does it: plan and decoder hear of the recipe."""
    with monkeypatch.context() as patch:
        patch.setattr(drive, "DecoderParts", partial(DecoderParts, recipe=recipe))
        patch.setattr(drive, "StepShape", partial(StepShape, recipe=recipe))
        return Rig(model, backend, LIMITS, 100)


def run(rig: Rig, *lengths: int) -> list[dict[int, torch.Tensor]]:
    machine = Drive(rig, 100)
    requests = [Request(list(range(9, 9 + length)), 3, index, EVERY_ROW) for index, length in enumerate(lengths)]
    machine.run(requests)
    return [machine.logits(request) for request in requests]


@contextmanager
def rows_as_codes(ours: LoadedModel, numbers: LoadedModel) -> Iterator[None]:
    """Products of the numbers take their rows as the codes would: as they are, or as the nearest codes times a scale."""
    schemes = {
        numbers.weights[name].data_ptr(): weight.scheme
        for name, weight in ours.weights.items()
        if isinstance(weight, QuantizedWeight)
    }
    assert schemes

    def rounding(product):
        def multiply(x, weight, *others):
            scheme = schemes.get(weight.data_ptr())
            return product(x if scheme is None else exact_rows(x, scheme).float(), weight, *others)

        return multiply

    def multiply_experts(given, *others):
        def multiply(x, weight):
            return expert_linear(given._replace(x_XK=x, weight=weight), *others)

        return rounding(multiply)(given.x_XK, given.weight)

    expert_linear = experts.expert_linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "expert_linear", multiply_experts)
        for name in ("plain_linear", "plain_linear_float32"):
            patch.setattr(linear, name, rounding(getattr(linear, name)))
        yield


@pytest.mark.each_value
@pytest.mark.parametrize("name", [*MODELS, *DENSE])
@SCHEMES
def test_logits_are_those_of_the_numbers_that_codes_stand_for(name, scheme, monkeypatch):
    """For weights and of inputs, where these become codes too: rounding of sums is all that is left."""
    recipe = WeightRecipe(scheme, "all")
    ours, numbers = quantized_model(name, recipe)
    (found,) = run(make_rig(ours, recipe, monkeypatch), 30)
    with rows_as_codes(ours, numbers):
        (wanted,) = run(Rig(numbers, "torch_paged", LIMITS, 100), 30)
    errors = torch.stack([(found[position] - wanted[position]).abs().max() for position in range(29)])
    assert float(errors.median()) < 1e-5
    # An input that lies between two codes may take either, and moves its row, and a little those behind it.
    assert float(errors.max()) < (1e-2 if scheme.quantizes_activations else 1e-5)


@pytest.mark.each_pair
@pytest.mark.parametrize("name", ["qwen2_moe", "opt_350m_like"])
@pytest.mark.parametrize("embeddings", ["none", "head", "all"])
@SCHEMES
def test_room_for_codes_is_what_was_planned(name, scheme, embeddings, monkeypatch):
    """The largest step takes all that was reserved."""
    recipe = WeightRecipe(scheme, embeddings)
    rig = make_rig(quantized_model(name, recipe)[0], recipe, monkeypatch)
    watched = WatchedWorkspace(rig.workspace, monkeypatch)
    rig.execute(make_step(90, groups=rig.groups))
    with monkeypatch.context() as patch:
        patch.setattr(drive, "StepShape", partial(StepShape, recipe=recipe))
        plan = workspace_plan(tiny(name).spec, LIMITS, "float32", ())
    reserved = {(lane, owner): size for lane in plan.lane_bytes for owner, size in plan.requesters(lane).items()}
    assert watched.most_bytes == reserved
    assert (("quantized_rows", "quantized_rows") in reserved) == scheme.quantizes_activations


@SCHEMES
def test_rows_do_not_change_each_other(scheme, monkeypatch):
    require_native()
    recipe = WeightRecipe(scheme, "head")
    ours, _ = quantized_model("qwen2_moe", recipe)
    (alone,) = run(make_rig(ours, recipe, monkeypatch, "native_paged"), 20)
    beside = run(make_rig(ours, recipe, monkeypatch, "native_paged"), 20, 33, 7)
    assert all(same_bits(alone[position], beside[0][position]) for position in alone)

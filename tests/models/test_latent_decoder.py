"""LatentDecoder: the weights of every layer, tensors that are planned to the byte, and quantized weights near the numbers that they stand for."""

from functools import cache, partial

import pytest
import torch

from holdfast.config import Limits
from holdfast.families.latent.layer import LatentAttentionLayer
from holdfast.families.sparse.layer import SparseLatentAttentionLayer
from holdfast.layers.mlp import GatedMLP, Linear, RMSNorm
from holdfast.layers.moe import ExpertLayer
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.declaration import StepShape
from holdfast.models.decoder_layer import DecoderParts
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.layer_stack import LayerStack
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES, WeightRecipe
from loading.tiny_models import VOCAB
from models.test_decoder_quantized import quantized, rows_as_codes, run
from models.test_decoder_workspace import WatchedWorkspace, make_step
from models.tiny_experts import assembled, config_of, make_random, tensors_of
from models.tiny_latents import LATENT_MODELS, tiny
from runner import drive
from runner.drive import LoadedModel, Rig, workspace_plan

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=90, max_model_len=100, page_tokens=4)
WIDE = {"vocab_size": VOCAB, "hidden_size": 96, "moe_intermediate_size": 32, "intermediate_size": 96, "v_head_dim": 32}
"""What mxfp4 can store: whole blocks of 32 columns."""
SPARSE = "sparse like V3.2"
Q_RANKS = {"v3 like R1": 32, "v2 like V2-Lite": None, SPARSE: 32}
SCHEMES = pytest.mark.parametrize("scheme", WEIGHT_SCHEMES.values(), ids=WEIGHT_SCHEMES)


@pytest.mark.parametrize("case", ["v3 like R1", "v3 with biases, no query latent, no yarn"])
def test_decoder_layer_has_weights_of_its_index(case):
    model = tiny(case)[1]
    rig = Rig(model, "torch_latent", LIMITS, 25)
    assert isinstance(rig.decoder, LayerStack)
    layer = rig.decoder.layers[1]
    attention, weights = layer.attention, model.weights
    assert isinstance(attention, LatentAttentionLayer)
    q_name = "q" if model.spec.latent.q_rank is None else "q_b"
    for part, name in ((attention.qkv_a, "qkv_a"), (attention.q, q_name), (attention.o, "o")):
        assert isinstance(part, Linear)
        assert part.weight_NK is weights[f"layers.1.{name}.weight"]
        has_bias = model.spec.qkv_bias and name in ("qkv_a", "o")
        assert part.bias_N is (weights[f"layers.1.{name}.bias"] if has_bias else None)
    kv_b = weights["layers.1.kv_b.weight"]
    assert attention.kv_b_NXL.data_ptr() == kv_b.data_ptr(), "no second copy"
    assert attention.kv_b_NXL.shape == (5, 32, 32)
    assert isinstance(layer.attn_norm, RMSNorm)
    assert isinstance(layer.mlp, ExpertLayer)
    first = rig.decoder.layers[0].mlp
    assert isinstance(first, GatedMLP if model.spec.experts.dense_layers else ExpertLayer)


def test_sparse_layer_has_index_weights_of_its_number():
    model = tiny(SPARSE)[1]
    rig = Rig(model, "torch_sparse", LIMITS, 25)
    assert isinstance(rig.decoder, LayerStack)
    attention, weights = rig.decoder.layers[2].attention, model.weights
    assert isinstance(attention, SparseLatentAttentionLayer)
    index = attention.index
    assert index.q.weight_NK is weights["layers.2.index_q.weight"]
    assert index.k.weight_NK is weights["layers.2.index_k.weight"]
    assert index.weights_IH is weights["layers.2.index_weights.weight"]
    assert index.norm.weight_D is weights["layers.2.index_k_norm.weight"]
    assert index.norm.bias_D is weights["layers.2.index_k_norm.bias"]
    assert index.norm.eps == 1e-6
    assert (index.q.bias_N, index.k.bias_N) == (None, None)


def test_latent_decoder_index_refuses_dense_backend():
    with pytest.raises(AssertionError, match="torch_latent attends to all tokens"):
        Rig(tiny(SPARSE)[1], "torch_latent", LIMITS, 25)


@cache
def wide(case: str) -> LoadedModel:
    prefix, settings = LATENT_MODELS[case]
    model = make_random(prefix, settings | WIDE | {"q_lora_rank": Q_RANKS[case]})
    spec = read_spec(config_of(model))
    return LoadedModel(spec, assembled(parameters(spec), tensors_of(model, "separate")))


@cache
def both(case: str, recipe: WeightRecipe) -> tuple[LoadedModel, LoadedModel]:
    """A model with codes where the recipe says so, and the same with the numbers that they stand for."""
    model, codes, numbers = wide(case), {}, {}
    for parameter in parameters(model.spec):
        values = model.weights[parameter.name]
        assert isinstance(values, torch.Tensor)
        scheme = recipe.scheme_for(parameter.kind, (parameter.name,))
        codes[parameter.name] = weight = values if scheme is None else quantized(values, scheme, parameter)
        numbers[parameter.name] = weight if isinstance(weight, torch.Tensor) else dequantize(weight).view(values.shape)
    return LoadedModel(model.spec, codes), LoadedModel(model.spec, numbers)


def make_rig(model: LoadedModel, recipe: WeightRecipe, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """As the runner does it: plan and decoder hear of the recipe."""
    with monkeypatch.context() as patch:
        patch.setattr(drive, "DecoderParts", partial(DecoderParts, recipe=recipe))
        patch.setattr(drive, "StepShape", partial(StepShape, recipe=recipe))
        return Rig(model, backend_of(model), LIMITS, 100)


def backend_of(model: LoadedModel) -> str:
    assert model.spec.latent is not None
    return "torch_latent" if model.spec.latent.index is None else "torch_sparse"


@pytest.mark.each_value
@pytest.mark.parametrize("case", Q_RANKS)
@SCHEMES
def test_logits_are_those_of_the_numbers_that_codes_stand_for(case, scheme, monkeypatch):
    recipe = WeightRecipe(scheme)
    ours, numbers = both(case, recipe)
    assert isinstance(ours.weights["layers.1.kv_b.weight"], torch.Tensor), "it is never quantized"
    (found,) = run(make_rig(ours, recipe, monkeypatch), 30)
    with rows_as_codes(ours, numbers):
        (wanted,) = run(Rig(numbers, backend_of(numbers), LIMITS, 100), 30)
    errors = torch.stack([(found[position] - wanted[position]).abs().max() for position in range(29)])
    assert float(errors.median()) < 1e-5
    if case == SPARSE and scheme.quantizes_activations:
        return  # such a row may choose another token too
    # An input that lies between two codes may take either, and moves its row, and a little those behind it.
    assert float(errors.max()) < (3e-2 if scheme.quantizes_activations else 1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("case", Q_RANKS)
@SCHEMES
def test_tensors_of_a_step_are_what_was_planned(case, scheme, monkeypatch):
    """The largest step takes all that was reserved."""
    recipe = WeightRecipe(scheme)
    rig = make_rig(both(case, recipe)[0], recipe, monkeypatch)
    watched = WatchedWorkspace(rig.workspace, monkeypatch)
    rig.execute(make_step(90, groups=rig.groups))
    with monkeypatch.context() as patch:
        patch.setattr(drive, "StepShape", partial(StepShape, recipe=recipe))
        scratch = (TensorSpec("selected", (90 * 5,), "int32"),) if case == SPARSE else ()
        plan = workspace_plan(wide(case).spec, LIMITS, "float32", scratch)
    reserved = {(lane, owner): size for lane in plan.lane_bytes for owner, size in plan.requesters(lane).items()}
    assert watched.most_bytes == reserved

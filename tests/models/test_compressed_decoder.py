"""CompressedDecoder: the weights of every layer, tensors that are planned to the byte, ranges of layers, pages in fp8, quantized weights."""

from functools import cache, partial
from statistics import median

import pytest
import torch

from holdfast.attention.backend import Batch
from holdfast.config import Limits
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.compressed_decoder import CompressedDecoder
from holdfast.models.declaration import StepShape
from holdfast.models.decoder_layer import DecoderParts
from holdfast.models.grouped_readers import parameters
from holdfast.models.model import Stream
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, WeightRecipe, WeightScheme
from holdfast.request.sequence import LiveStep
from models.test_decoder_quantized import quantized, rows_as_codes
from models.test_decoder_workspace import WatchedWorkspace, make_step
from models.tiny_compressed import alone, make_compressed_drive, tiny_compressed
from models.tiny_latents import VOCAB, make_request
from runner import drive
from runner.drive import LoadedModel, Request, Rig, workspace_plan

FLASH = "like V4-Flash"
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=90, max_model_len=96, page_tokens=4)
NUM_PAGES = 200


def make_rig(model: LoadedModel) -> Rig:
    return Rig(model, "torch_compressed", LIMITS, NUM_PAGES)


def compressed_step(rig: Rig, *lengths: int) -> LiveStep:
    """Prompts of these lengths on pages of their own, each with a place for its states."""
    step = make_step(*lengths, groups=rig.groups)
    for place, item in enumerate(step.scheduled):
        item.sequence.slot = place
        item.sequence.token_ids[:] = [token_id % VOCAB for token_id in item.sequence.token_ids]
    return step


def test_decoder_layer_has_weights_of_its_index():
    model = tiny_compressed(FLASH)[1]
    decoder, weights = make_rig(model).decoder, model.weights
    assert isinstance(decoder, CompressedDecoder)
    layer = decoder.layers[1]
    attention, entries = layer.attention, layer.attention.entries
    assert entries is not None
    assert entries.chooser is not None
    for found, name in (
        (attention.qkv_a.weight_NK, "qkv_a.weight"),
        (attention.q.weight_NK, "q_b.weight"),
        (attention.out.b.weight_NK, "o_b.weight"),
        (entries.pool_XH, "pool.weight"),
        (entries.compressor.positions_RX, "compressor.positions"),
        (entries.compressor.weight_D, "compressor.norm.weight"),
        (entries.chooser.q.weight_NK, "index_q.weight"),
        (entries.chooser.compressor.positions_RX, "index.positions"),
        (entries.chooser.compressor.weight_D, "index.norm.weight"),
        (layer.attention_streams.mix.weight_MX, "attn_streams.weight"),
        (layer.expert_streams.mix.weight_MX, "mlp_streams.weight"),
    ):
        assert found is weights[f"layers.1.{name}"], name
    o_a = weights["layers.1.o_a.weight"]
    assert isinstance(o_a, torch.Tensor)
    assert attention.out.a_GNK.data_ptr() == o_a.data_ptr(), "no second copy"
    assert attention.out.a_GNK.shape == (2, 12, 64)
    assert decoder.layers[0].attention.entries is None
    third = decoder.layers[2].attention.entries
    assert third is not None
    assert third.chooser is None


def test_workspace_largest_step_uses_all_reserved_bytes(monkeypatch):
    model = tiny_compressed(FLASH)[1]
    rig = make_rig(model)
    watched = WatchedWorkspace(rig.workspace, monkeypatch)
    rig.execute(compressed_step(rig, 90))
    plan = workspace_plan(model.spec, LIMITS, "float32", (TensorSpec("selected", (90 * 3,), "int32"),))
    reserved = {(lane, owner): size for lane in plan.lane_bytes for owner, size in plan.requesters(lane).items()}
    assert watched.most_bytes == reserved


def test_layers_in_any_ranges_are_the_whole(monkeypatch):
    """One after the other, or some at a time: streams go from one range to the next."""
    model, found = tiny_compressed(FLASH)[1], []
    whole = CompressedDecoder.run_layers

    def ranged(cuts: tuple[int, ...]):
        def run(own: CompressedDecoder, stream: Stream, batch: Batch, plan: object, layers: range) -> Stream:
            for start, stop in zip(cuts, (*cuts[1:], layers.stop), strict=True):
                stream = whole(own, stream, batch, plan, range(start, stop))
            return stream

        return run

    for cuts in ((0,), (0, 1), (0, 2, 3), (0, 1, 2, 3)):
        monkeypatch.setattr(CompressedDecoder, "run_layers", ranged(cuts))
        machine, request = make_compressed_drive(model, 16), make_request(30, 3)
        machine.run([request])
        found.append(machine.logits(request))
    for other in found[1:]:
        assert all(torch.equal(other[position], row) for position, row in found[0].items())


def test_compressed_decoder_prefill_without_logits_keeps_state():
    answer = alone(FLASH, 22, 4)
    machine = make_compressed_drive(tiny_compressed(FLASH)[1], 7)
    request = Request(list(answer.prompt), 4)
    machine.run([request])
    answer.check(machine, request)


@pytest.mark.parametrize("format_name", ["fp8_ds_v4", "bfloat16"])
def test_pages_in_fewer_bits_are_near(format_name):
    """For vectors with 64 elements that are not rotated. A row may take another expert for it, and most do not."""
    case = "wide vectors"
    answer = alone(case, 45, 6)
    machine = make_compressed_drive(tiny_compressed(case)[1], 45, kv_dtype=format_name)
    request = make_request(45, 1)
    machine.run([request])
    distances = [float((row - answer.logits[place]).abs().max()) for place, row in machine.logits(request).items()]
    assert 1e-4 < median(distances) < (0.3 if format_name == "fp8_ds_v4" else 0.05)


def test_prefix_hit_in_fp8_reads_codes_as_written():
    """A prompt behind a prefix reads what the prompt by itself read: rows are coded once."""
    answer = alone("wide vectors", 45, 6)
    machine = make_compressed_drive(tiny_compressed("wide vectors")[1], 45, kv_dtype="fp8_ds_v4")
    first, again = Request(list(answer.prompt), 4), Request(list(answer.prompt), 4)
    machine.run([first])
    machine.run([again])
    assert again.sequence is not None
    assert again.sequence.num_cached_tokens == 40
    own, other = machine.logits(first), machine.logits(again)
    assert max(float((row - own[place]).abs().max()) for place, row in other.items()) < 1e-4


@cache
def both(recipe: WeightRecipe) -> tuple[LoadedModel, LoadedModel]:
    """A model with codes where the recipe says so, and the same with the numbers that they stand for."""
    model, codes, numbers = tiny_compressed("wide vectors")[1], {}, {}
    for parameter in parameters(model.spec):
        values = model.weights[parameter.name]
        assert isinstance(values, torch.Tensor)
        scheme = recipe.scheme_for(parameter.kind, (parameter.name,))
        codes[parameter.name] = weight = values if scheme is None else quantized(values, scheme, parameter)
        numbers[parameter.name] = weight if isinstance(weight, torch.Tensor) else dequantize(weight).view(values.shape)
    return LoadedModel(model.spec, codes), LoadedModel(model.spec, numbers)


@pytest.mark.parametrize("scheme", [INT8, FP8, FP8_BLOCK], ids=lambda scheme: scheme.name)
def test_logits_are_those_of_the_numbers_that_codes_stand_for(scheme: WeightScheme, monkeypatch):
    recipe = WeightRecipe(scheme)
    ours, numbers = both(recipe)
    for name in ("pool", "o_a", "attn_streams"):
        assert isinstance(ours.weights[f"layers.1.{name}.weight"], torch.Tensor), "it is never quantized"
    with monkeypatch.context() as patch:
        patch.setattr(drive, "DecoderParts", partial(DecoderParts, recipe=recipe))
        patch.setattr(drive, "StepShape", partial(StepShape, recipe=recipe))
        machine = make_compressed_drive(ours, 30)
    request, other = make_request(30, 1), make_request(30, 1)
    machine.run([request])
    with rows_as_codes(ours, numbers):
        reference = make_compressed_drive(numbers, 30)
        reference.run([other])
    wanted = reference.logits(other)
    errors = torch.stack([(row - wanted[place]).abs().max() for place, row in machine.logits(request).items()])
    assert float(errors.median()) < (2e-2 if scheme.quantizes_activations else 2e-5)

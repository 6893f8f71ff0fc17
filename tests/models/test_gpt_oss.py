"""gpt-oss against transformers: plain and MXFP4 checkpoints, windows of several widths, chunks, prefixes, preemption; bad input."""

import json
import random
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from error_codes import raises_code
from holdfast.errors import HoldfastError
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.plan import LoadPlan, plan_load
from holdfast.memory.ledger import Ledger
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import MXFP4, WEIGHT_SCHEMES, WeightRecipe
from kernels.exactness import require_native, same_bits
from models.test_decoder import (
    EVERY_POSITION,
    TOLERANCE,
    VOCAB,
    choose,
    judge,
    make_drive,
    make_requests,
    theirs_logits,
)
from models.tiny_experts import assembled, config_of, make_tiny, save_tiny_experts, tensors_of
from quant.whole_weights import quantize
from runner.drive import Drive, LoadedModel, Request

EXPERTS = ("gate_up_proj", "down_proj")
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@cache
def tiny(window: int) -> tuple[Any, LoadedModel]:
    """transformers' model with such a window in every other layer, and ours over the same weights."""
    theirs = make_tiny("gpt_oss", seed=window, sliding_window=window)
    spec = read_spec(config_of(theirs))
    return theirs, LoadedModel(spec, assembled(parameters(spec), tensors_of(theirs, "separate")))


def some_of(name: str, some: tuple[int, ...], every: range) -> pytest.MarkDecorator:
    """Some at once, and every one among the slow tests."""
    return pytest.mark.parametrize(name, [some, pytest.param(every, marks=pytest.mark.slow)], ids=["some", "every"])


@pytest.mark.parametrize(
    ("window", "page_tokens"),
    [(8, 16), (7, 4), (1, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((8, 4), (7, 16), (1, 16)))],
)
def test_windows_that_contexts_outgrow_many_times(window, page_tokens):
    require_native()
    theirs, ours = tiny(window)
    requests = make_requests((1, 40, 90))
    drive = make_drive(ours, "native_paged", 24, page_tokens)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


def test_torch_paged_logits_match_transformers(monkeypatch):
    theirs, ours = tiny(7)
    (request,) = make_requests((40,))
    drive = make_drive(ours, choose("torch_paged", monkeypatch), 128)
    drive.run([request])
    judge(theirs, drive, request)


@cache
def alone(length: int, num_output: int) -> tuple[tuple[int, ...], tuple[int, ...], dict[int, torch.Tensor]]:
    """A request by itself, in one chunk on fresh pages, and judged: its prompt, its output, and its logits by position."""
    require_native()
    theirs, ours = tiny(7)
    dice = random.Random(length)
    request = Request([dice.randrange(3, VOCAB) for _ in range(length)], num_output, params=EVERY_POSITION)
    drive = make_drive(ours, "native_paged", 128)
    drive.run([request])
    token_ids = (*request.prompt, *request.output)
    expected = theirs_logits(theirs, token_ids)[:-1]
    logits = drive.logits(request)
    assert float((torch.stack([logits[place] for place in sorted(logits)]) - expected).abs().max()) <= TOLERANCE
    assert request.output == expected[length - 1 :].argmax(-1).tolist()
    return tuple(request.prompt), tuple(request.output), logits


@some_of("chunks", (1, 2, 7, 8, 9, 16, 29, 30), range(1, 31))
def test_logits_match_at_every_chunk_size(chunks):
    prompt, output, logits = alone(30, 6)
    for max_rows in chunks:
        drive = make_drive(tiny(7)[1], "native_paged", max_rows)
        request = Request(list(prompt), 6, params=EVERY_POSITION)
        drive.run([request])
        assert tuple(request.output) == output, f"{max_rows=}"
        found = drive.logits(request)
        assert all(same_bits(found[place], logits[place]) for place in logits), f"{max_rows=}"


@some_of("places", (1, 3, 5, 6, 11, 17, 23), range(1, 24))
def test_preempted_at_every_position(places):
    prompt, output, logits = alone(18, 20)
    for place in places:
        drive = make_drive(tiny(7)[1], "native_paged", 4)
        request = Request(list(prompt), 20)
        preempt_after(drive, place)
        drive.run([request])
        drive.scheduler.check()
        assert request.sequence is not None
        assert request.sequence.num_preemptions == 1
        assert tuple(request.output) == output, f"{place=}"
        found = drive.logits(request)
        assert all(same_bits(found[position], logits[position]) for position in found), f"{place=}"


def preempt_after(drive: Drive, num_steps: int) -> None:
    """Take a sequence's pages after so many steps, as a neighbour would."""
    complete, steps = drive.scheduler.complete, count(1)

    def then_preempt(step: Any, token_ids: Any) -> None:
        complete(step, token_ids)
        if next(steps) == num_steps:
            drive.scheduler.preempt_last()

    drive.scheduler.complete = then_preempt


def test_prefix_hit_and_miss_keep_logits():
    (prompt, output, logits), (other, others, _) = alone(40, 8), alone(37, 8)
    drive = make_drive(tiny(7)[1], "native_paged", 16)
    num_cached = []
    for own, expected in ((prompt, output), (prompt, output), (other, others), (prompt, output)):
        request = Request(list(own), 8)
        drive.run([request])
        drive.scheduler.check()
        assert tuple(request.output) == expected
        assert request.sequence is not None
        num_cached.append(request.sequence.num_cached_tokens)
        if own is prompt:
            assert all(same_bits(row, logits[place]) for place, row in drive.logits(request).items())
    assert num_cached[0] == num_cached[2] == 0
    assert num_cached[1] > 7
    assert num_cached[3] > 7


def packed(weight_EKN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of a stacked weight, which transformers keeps transposed."""
    weight_ENK = weight_EKN.transpose(1, 2).contiguous()
    (count, num_rows, num_columns), groups = weight_ENK.shape, weight_ENK.shape[2] // 32
    codes, scales = quantize(weight_ENK.view(-1, num_columns), MXFP4)
    return codes.view(count, num_rows, groups, 16).clone(), scales.view(count, num_rows, groups).clone()


def save_mxfp4(folder: Path, **changes: Any) -> Any:
    """A checkpoint as its makers publish it; transformers' model has the weights that it stands for, as transformers unpacks them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = make_tiny("gpt_oss", seed=3, **changes)
    save_tiny_experts(theirs, folder)
    tensors = load_file(folder / "model.safetensors")
    state = theirs.state_dict()
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        blocks, scales = packed(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    theirs.load_state_dict(state)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    return theirs


def planned(folder: Path, recipe: WeightRecipe | None = None) -> tuple[Any, LoadPlan]:
    model = open_model(str(folder), "auto")
    return model, plan_load(model.parameters, model.source, "float32", recipe or WeightRecipe(), model.stored)


def loaded(folder: Path, recipe: WeightRecipe | None = None) -> LoadedModel:
    model, plan = planned(folder, recipe)
    weights = load_weights(plan, model.source, "cpu", Ledger(), lambda done, total: None).weights
    model.source.close()
    return LoadedModel(model.spec, weights)


def test_load_model_keeps_mxfp4_experts_as_stored(tmp_path):
    require_native()
    theirs = save_mxfp4(tmp_path)
    ours = loaded(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for layer in range(4):
        for name, module in zip(("gate_up", "down"), EXPERTS, strict=True):
            weight = ours.weights[f"layers.{layer}.experts.{name}.weight"]
            assert isinstance(weight, QuantizedWeight)
            assert weight.scheme == MXFP4
            prefix = f"model.layers.{layer}.mlp.experts.{module}"
            assert torch.equal(weight.codes.flatten(), stored[f"{prefix}_blocks"].flatten())
            assert torch.equal(weight.scales.flatten(), stored[f"{prefix}_scales"].flatten())
    assert all(isinstance(weight, torch.Tensor) for name, weight in ours.weights.items() if ".experts." not in name)
    requests = make_requests((17, 40))
    drive = make_drive(ours, "native_paged", 24)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


def test_load_model_transposes_plain_gpt_oss_experts(tmp_path):
    theirs, ours = tiny(8)
    save_tiny_experts(theirs, tmp_path)
    found = loaded(tmp_path)
    assert found.spec == ours.spec
    assert found.weights.keys() == ours.weights.keys()
    for name, weight in ours.weights.items():
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(found.weights[name], weight), name


@pytest.mark.parametrize("scheme", ["int8", "mxfp4"])
def test_load_model_quantizes_plain_gpt_oss_experts(scheme, tmp_path):
    theirs, _ = tiny(8)
    save_tiny_experts(theirs, tmp_path)
    ours = loaded(tmp_path, WeightRecipe(WEIGHT_SCHEMES[scheme]))
    (request,) = make_requests((33,))
    request.max_tokens = 2
    drive = make_drive(ours, "torch_paged", 128)
    drive.run([request])
    with torch.no_grad():
        expected = theirs(torch.tensor([request.prompt])).logits[0]
    logits = drive.logits(request)
    errors = torch.stack([(logits[place] - row).abs().mean() for place, row in enumerate(expected)])
    assert float(errors.median()) < {"int8": 0.05, "mxfp4": 0.5}[scheme] * float(expected.std())


def test_other_schemes_do_not_go_on_top_of_mxfp4(tmp_path):
    save_mxfp4(tmp_path)
    with raises_code("weights.already_quantized", stored="mxfp4", requested="fp8"):
        planned(tmp_path, WeightRecipe(WEIGHT_SCHEMES["fp8"]))


def changed(folder: Path, name: str, tensor: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert name in tensors
    save_file(tensors | {name: tensor}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp.experts.gate_up_proj_blocks", (6, 192, 2, 16)),
        ("mlp.experts.gate_up_proj_blocks", (6, 96, 3, 16)),
        ("mlp.experts.gate_up_proj_blocks", (6, 192, 48)),
        ("mlp.experts.down_proj_blocks", (5, 96, 3, 16)),
        ("mlp.experts.down_proj_scales", (6, 96, 2)),
        ("mlp.experts.gate_up_proj_scales", (6, 3, 192)),
    ],
)
def test_load_model_mxfp4_block_shape_mismatch_is_refused(name, shape, tmp_path):
    save_mxfp4(tmp_path)
    changed(tmp_path, f"model.layers.1.{name}", torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(HoldfastError, match=name) as refused:
        planned(tmp_path)
    assert str(list(shape)) in str(refused.value) or str(tuple(shape)) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("self_attn.sinks", torch.zeros(3)),
        ("self_attn.sinks", torch.zeros(4, 1)),
        ("mlp.experts.gate_up_proj", torch.zeros(6, 96, 96)),
        ("mlp.experts.gate_up_proj_bias", torch.zeros(6, 96)),
        ("mlp.experts.down_proj_bias", torch.zeros(96)),
        ("mlp.router.bias", torch.zeros(7)),
    ],
)
def test_tensors_of_the_wrong_shape_are_refused_in_a_sentence(name, tensor, tmp_path):
    save_tiny_experts(tiny(8)[0], tmp_path)
    changed(tmp_path, f"model.layers.1.{name}", tensor)
    with pytest.raises(HoldfastError, match=name) as refused:
        planned(tmp_path)
    assert "\n" not in str(refused.value)

"""Folders with latent attention: what is loaded is what was stored, plain or in fp8; planned bytes are held; layers that draft stay unread."""

import json
import logging

import pytest
import torch

from error_codes import raises_code
from holdfast.errors import ModelFormatError
from holdfast.loading.declared import open_declared
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_directory
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.quantized.source import open_quantized, plan_quantized
from holdfast.loading.quantized.writer import save_quantized
from holdfast.memory.ledger import Ledger
from holdfast.models.declared_weights import weight_bytes
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import FP8_TENSOR, WEIGHT_SCHEMES, WeightRecipe
from loading.latent_models import SAID, SOFTMAX, config_of, stored_as, tensors_of, write_folder
from quant.whole_weights import quantize

KV_B = "layers.1.kv_b.weight"
QKV_A = "layers.1.qkv_a.weight"
THEIRS = "model.layers.1.self_attn."


def load(opened, recipe=None):
    plan = plan_load(opened.parameters, opened.source, "float32", recipe or WeightRecipe(), opened.stored)
    return plan, load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None).weights


def fused(tensors, *names):
    return torch.cat([tensors[f"{THEIRS}{name}.weight"] for name in names])


@pytest.mark.parametrize("changes", [{}, SOFTMAX], ids=["latent queries", "plain queries"])
def test_load_latent_plain_folder_is_kept_as_stored(changes, tmp_path):
    config = config_of(**changes)
    tensors = tensors_of(config)
    _, weights = load(open_directory(write_folder(tmp_path / "m", config, tensors)))
    assert torch.equal(weights[KV_B], tensors[f"{THEIRS}kv_b_proj.weight"])
    if changes:
        assert torch.equal(weights["layers.1.q.weight"], tensors[f"{THEIRS}q_proj.weight"])
        assert torch.equal(weights[QKV_A], tensors[f"{THEIRS}kv_a_proj_with_mqa.weight"])
        assert "layers.1.router.score_bias" not in weights
    else:
        assert torch.equal(weights[QKV_A], fused(tensors, "q_a_proj", "kv_a_proj_with_mqa"))
        assert torch.equal(weights["layers.1.q_b.weight"], tensors[f"{THEIRS}q_b_proj.weight"])
        bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert torch.equal(weights["layers.1.router.score_bias"], bias)
    gate, up = (tensors[f"model.layers.1.mlp.experts.3.{half}_proj.weight"] for half in ("gate", "up"))
    assert torch.equal(weights["layers.1.experts.gate_up.weight"][3], torch.cat([gate, up]))


@pytest.mark.each_value
@pytest.mark.parametrize("q_rank", [128, 200, 77], ids=["whole blocks", "a seam in a block", "odd"])
@pytest.mark.parametrize("name", WEIGHT_SCHEMES)
def test_load_latent_stacked_projections_quantize_part_by_part(name, q_rank, tmp_path):
    """A scale by block or by tensor is never shared by q_a and kv_a; kv_b is not quantized at all."""
    config = config_of(q_lora_rank=q_rank)
    if q_rank % 32 and name == "mxfp4":  # q_b has q_rank columns
        config = config_of(q_lora_rank=96)
    tensors = tensors_of(config)
    recipe = WeightRecipe(WEIGHT_SCHEMES[name])
    folder = write_folder(tmp_path / "m", config, tensors)
    plan, weights = load(open_directory(folder), recipe)
    held = weights[QKV_A]
    assert isinstance(held, QuantizedWeight)
    scheme = recipe.scheme.with_parts((config["q_lora_rank"],))
    assert held.scheme == scheme
    row = 0
    for part in ("q_a_proj", "kv_a_proj_with_mqa"):
        values = tensors[f"{THEIRS}{part}.weight"]
        amax = values.abs().amax().view(1) if recipe.scheme is FP8_TENSOR else None
        codes, scales = quantize(values, scheme, amax)
        first = row // scheme.block_rows
        assert torch.equal(held.codes[row : row + len(values)].view(torch.uint8), codes.view(torch.uint8)), part
        assert torch.equal(held.scales[first : first + len(scales)], scales), part
        row += len(values)
    assert torch.equal(weights[KV_B], tensors[f"{THEIRS}kv_b_proj.weight"])
    declared = sum(weight_bytes(weight, "float32", recipe) for weight in open_declared(str(folder)).parameters())
    assert declared == plan.final_bytes


@pytest.mark.each_value
@pytest.mark.parametrize("q_rank", [128, 200], ids=["whole blocks", "a seam in a block"])
@pytest.mark.parametrize("scheme", SAID)
def test_load_latent_fp8_keeps_codes_and_dequantizes_kv_b(scheme, q_rank, tmp_path):
    config = config_of(q_lora_rank=q_rank)
    tensors = tensors_of(config)
    stored = stored_as(scheme, tensors)
    folder = write_folder(tmp_path / "m", config | {"quantization_config": SAID[scheme]}, stored)
    opened = open_directory(folder)
    plan, weights = load(opened)
    ending = "_scale_inv" if scheme == "fp8_block" else "_scale"

    def numbers(name):
        """code * scale, by rows and columns of the tensor itself."""
        codes, scales = stored[name].float(), stored[name + ending]
        if scheme == "fp8_block":
            scales = scales.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]
        return codes * (scales[:, None] if scheme == "fp8" else scales)

    assert torch.equal(weights[KV_B], numbers(f"{THEIRS}kv_b_proj.weight"))
    held = weights[QKV_A]
    assert isinstance(held, QuantizedWeight)
    parts = [f"{THEIRS}{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert torch.equal(held.codes.float(), torch.cat([stored[part].float() for part in parts]))
    assert torch.equal(dequantize(held), torch.cat([numbers(part) for part in parts]))
    declared = open_declared(str(folder))
    kinds = {weight.name: weight for weight in declared.parameters()}
    assert kinds[KV_B].stored_scheme is None
    assert sum(weight_bytes(one, "float32", WeightRecipe()) for one in kinds.values()) == plan.final_bytes


def test_open_declared_fp8_without_weights_plans_equal_bytes(tmp_path):
    config = config_of(q_lora_rank=128) | {"quantization_config": SAID["fp8_block"]}
    folder = write_folder(tmp_path / "m", config, stored_as("fp8_block", tensors_of(config)))
    with_weights = open_declared(str(folder)).parameters()
    (folder / "model.safetensors").unlink()
    without = open_declared(str(folder)).parameters()
    sizes = [
        {one.name: weight_bytes(one, "bfloat16", WeightRecipe()) for one in each} for each in (with_weights, without)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("is_stored", [False, True], ids=["plain folder", "folder in fp8"])
def test_load_latent_saved_weights_keep_kv_b_plain(is_stored, tmp_path):
    config = config_of()
    tensors = tensors_of(config)
    if is_stored:
        config = config | {"quantization_config": SAID["fp8_block"]}
        tensors = stored_as("fp8_block", tensors)
    opened = open_directory(write_folder(tmp_path / "m", config, tensors))
    plan, weights = load(opened, WeightRecipe(WEIGHT_SCHEMES["fp8_block"]))
    save_quantized(tmp_path / "saved", opened, plan, weights)
    saved = open_quantized(tmp_path / "saved")
    again = load_weights(
        plan_quantized(opened.parameters, saved, "float32"), saved, "cpu", Ledger(), lambda done, total: None
    ).weights
    held = again[KV_B]
    assert isinstance(held, torch.Tensor)
    assert torch.equal(held, weights[KV_B])
    assert isinstance(again[QKV_A], QuantizedWeight)


def with_drafts(config, tensors):
    """One more layer of the same shapes, and what a draft layer has besides."""
    last = {
        name.replace("layers.1.", "layers.2."): values.clone()
        for name, values in tensors.items()
        if "layers.1." in name
    }
    extra = {f"model.layers.2.{name}.weight": torch.ones(3) for name in ("enorm", "hnorm", "eh_proj", "embed_tokens")}
    return tensors | last | extra


@pytest.mark.parametrize("scheme", [None, "fp8_block"], ids=["plain", "fp8_block"])
def test_load_latent_draft_layers_are_left_unread(scheme, tmp_path, caplog):
    config = config_of(num_nextn_predict_layers=1)
    tensors = with_drafts(config, tensors_of(config))
    if scheme is not None:
        config = config | {"quantization_config": SAID[scheme]}
        tensors = stored_as(scheme, tensors)
    folder = write_folder(tmp_path / "m", config, tensors)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        opened = open_directory(folder)
    num_unread = sum("layers.2." in name for name in tensors)
    assert f"skipping {num_unread} tensors of {folder} for drafts of tokens" in caplog.text
    plan, weights = load(opened)
    assert not any("layers.2." in name for name in weights)
    assert not any("layers.2." in move.tensor for move in plan.moves)
    declared = sum(weight_bytes(one, "float32", WeightRecipe()) for one in open_declared(str(folder)).parameters())
    assert declared == plan.final_bytes


def test_load_latent_unannounced_draft_layers_are_refused(tmp_path):
    config = config_of()
    folder = write_folder(tmp_path / "m", config, with_drafts(config, tensors_of(config)))
    opened = open_directory(folder)
    with raises_code("weights.unexpected_tensors", ModelFormatError):
        load(opened)


def test_open_directory_q_lora_rank_mismatch_is_refused(tmp_path):
    config = config_of()
    folder = write_folder(tmp_path / "m", config, tensors_of(config))
    (folder / "config.json").write_text(json.dumps(config | {"q_lora_rank": None}))
    with raises_code("model.mismatch", ModelFormatError):
        open_directory(folder)
    config = config_of(q_lora_rank=None)
    folder = write_folder(tmp_path / "n", config, tensors_of(config))
    (folder / "config.json").write_text(json.dumps(config | {"q_lora_rank": 64}))
    with raises_code("model.mismatch", ModelFormatError):
        open_directory(folder)

"""Mixtures of experts in GGUF files: logits of transformers, values of the gguf package, codes of safetensors files."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from holdfast.errors import ModelFormatError
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.plan import plan_load
from holdfast.memory.ledger import Ledger
from holdfast.models.families import read_spec
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import AS_STORED, FP8, WeightRecipe
from kernels.exactness import same_bits
from models.test_decoder import judge, make_drive, make_requests
from models.tiny_experts import assembled, config_of, make_tiny, tensors_of
from runner.drive import LoadedModel

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
SIZES = {
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {"moe_intermediate_size": 64},
}
"""Widths of whole blocks. The last is also the outer one: stacked matrices have the shape of transposed ones."""
QUANTIZED = {"gate_proj": "Q8_0", "up_proj": "Q4_1", "down_proj": "Q8_0"}
"""Types of the experts' tensors, shared ones too."""


@cache
def tiny(name: str) -> Any:
    return make_tiny(name, **SIZES[name])


def write_mixture(
    path: Path, model: Any, kinds: Mapping[str, str] | None = None, changed: Mapping[str, torch.Tensor | None] = {}
) -> dict[str, torch.Tensor]:
    """Write it as a conversion does; returns what the tensors are worth, under Hugging Face names.

    `kinds` are the types of the experts' tensors, by module; F32 without. `changed` are tensors by Hugging Face names that
    take the place of the model's own; None for none at all.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    else:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_token_list([f"token{index}" for index in range(config.vocab_size)])
    worth: dict[str, torch.Tensor] = {}
    for name, tensor in (tensors_of(model, "by kind.weight") | dict(changed)).items():
        if tensor is None:
            continue
        kind = (kinds or {}).get(name.split(".")[-2], "F32") if "expert" in name else "F32"
        number = getattr(gguf.GGMLQuantizationType, kind)
        raw = gguf.quants.quantize(tensor.numpy(), number)
        worth[name] = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(raw, number)))
        # Conversions take the dimension of 1 away.
        raw = raw.squeeze(0) if name.endswith("shared_expert_gate.weight") else raw
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")) or name, raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


def load(path: Path, dtype: str, recipe: WeightRecipe = AS_STORED) -> LoadedModel:
    model = open_model(str(path), "auto")
    plan = plan_load(model.parameters, model.source, dtype, recipe)
    weights = load_weights(plan, model.source, "cpu", Ledger(), lambda done, total: None).weights
    model.source.close()
    return LoadedModel(model.spec, weights)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(name, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.kernels.native_library.native_library", lambda: None)
    theirs = tiny(name)
    write_mixture(tmp_path / "tiny.gguf", theirs)
    ours = load(tmp_path / "tiny.gguf", "float32")
    assert ours.spec == read_spec(config_of(theirs))
    (request,) = make_requests((33,))
    drive = make_drive(ours, "torch_paged", max_num_batched_tokens=128)
    drive.run([request])
    judge(theirs, drive, request)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_quantized_experts_are_worth_what_the_gguf_package_says_and_quantize_as_from_safetensors(name, tmp_path):
    path, folder = tmp_path / "tiny.gguf", tmp_path / "folder"
    folder.mkdir()
    worth = write_mixture(path, tiny(name), QUANTIZED)
    save_file(worth, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(tiny(name))))
    plain = load(path, "float32")
    listed = open_model(str(path), "dummy").parameters
    expected = assembled(listed, worth)
    assert plain.weights.keys() == expected.keys()
    for weight, values in plain.weights.items():
        assert isinstance(values, torch.Tensor)
        assert same_bits(values, expected[weight]), weight
    ours, theirs = (load(place, "bfloat16", WeightRecipe(FP8)) for place in (path, folder))
    assert replace(ours.spec, checkpoint_dtype="float32") == theirs.spec
    num_quantized = 0
    for weight, held in ours.weights.items():
        other = theirs.weights[weight]
        if isinstance(held, QuantizedWeight) and isinstance(other, QuantizedWeight):
            num_quantized += 1
            assert torch.equal(held.codes.view(torch.uint8), other.codes.view(torch.uint8)), weight
            held, other = held.scales, other.scales
        assert isinstance(held, torch.Tensor), weight
        assert isinstance(other, torch.Tensor), weight
        assert same_bits(held, other), weight
    assert num_quantized >= 2 * (4 if name == "qwen3_moe" else 6)


def test_wrong_tensors_fail_in_the_plan(tmp_path):
    """By file and tensor: a part of the experts missing, one expert short, and a shared expert where there is none."""
    path = tmp_path / "tiny.gguf"
    up, down = (f"model.layers.1.mlp.experts.{module}_proj.weight" for module in ("up", "down"))
    shared, gate = (f"model.layers.0.mlp.{module}.weight" for module in ("shared_expert.up_proj", "shared_expert_gate"))
    cases: list[tuple[str, dict[str, torch.Tensor | None], str]] = [
        ("qwen3_moe", {up: None}, up),
        ("qwen3_moe", {down: torch.ones(5, 64, 64)}, down),
        ("qwen3_moe", {"blk.0.ffn_up_shexp.weight": torch.ones(40, 64)}, shared),
        ("qwen2_moe", {shared: None}, shared),
        ("qwen2_moe", {gate: torch.ones(1, 32)}, gate),
    ]
    for name, changed, named in cases:
        write_mixture(path, tiny(name), changed=changed)
        opened = open_model(str(path), "auto")
        with pytest.raises(ModelFormatError, match=rf"tiny\.gguf.*{re.escape(named)}"):
            plan_load(opened.parameters, opened.source, "float32")

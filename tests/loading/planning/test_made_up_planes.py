"""Made-up weights of quantized models: planned and held like those of a checkpoint that was really stored so."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

from holdfast.errors import UnsupportedModelError
from holdfast.loading.blueprints import open_blueprint
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_directory, open_directory_without_weights
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.planning.stored_schemes import StoredSchemes, make_up_source
from holdfast.loading.sources import dummy
from holdfast.memory.ledger import Ledger
from holdfast.models.sharding import Mesh, shard_parameters
from holdfast.quant.quantized_weight import QuantizedWeight, dequantize
from holdfast.quant.weight_schemes import MXFP4
from loading.header_source import experts

E4M3 = torch.float8_e4m3fn
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "torch_dtype": "bfloat16",
}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
LEFT_OUT = "model.layers.0.self_attn.o_proj"
SETTINGS = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [LEFT_OUT]},
    "tensors": {"quant_method": "fp8"},
    "channels": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": GROUP},
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
SCHEMES = {"blocks": "fp8_block", "tensors": "fp8_tensor", "channels": "fp8", "mxfp4": "mxfp4"}


def stored_tensors(how, name, kind, shape):
    """What a checkpoint has for one tensor of the model."""
    if how == "mxfp4" or kind not in ("linear", "expert") or (how == "blocks" and name.startswith(LEFT_OUT)):
        return {name: torch.ones(shape, dtype=torch.bfloat16)}
    ending, scales = {
        "blocks": ("_scale_inv", (-(-shape[0] // 128), -(-shape[1] // 128))),
        "tensors": ("_scale", ()),
        "channels": ("_scale", (shape[0], 1)),
    }[how]
    return {name: torch.ones(shape).to(E4M3), name + ending: torch.ones(scales)}


def write_checkpoint(folder, how, parameters):
    tensors = {}
    for parameter in parameters:
        if how == "mxfp4" and parameter.kind == "expert":
            continue
        for part in parameter.parts:
            tensors |= stored_tensors(how, part.tensor, parameter.kind, part.shape)
    if how == "mxfp4":
        for name, rows, blocks in (("gate_up_proj", 128, 4), ("down_proj", 128, 2)):
            prefix = f"model.layers.0.mlp.experts.{name}"
            tensors[f"{prefix}_blocks"] = torch.ones(4, rows, blocks, 16, dtype=torch.uint8)
            tensors[f"{prefix}_scales"] = torch.ones(4, rows, blocks, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file(tensors, folder / "model.safetensors")


def write_config(folder, how):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": SETTINGS[how]}))


def loaded(model, plan):
    ledger = Ledger()
    weights = load_weights(plan, model.source, "cpu", ledger, lambda done, total: None).weights
    return weights, ledger.group_peaks()


@pytest.mark.parametrize("how", SETTINGS)
def test_made_up_planes_are_planned_and_held_as_real_ones(how, tmp_path, monkeypatch):
    monkeypatch.setattr(dummy, "TABLE_VALUES", 1021)  # a table that fits into the staging of so small a model
    write_config(tmp_path, how)
    made_up = open_directory_without_weights(tmp_path)
    write_checkpoint(tmp_path, how, made_up.parameters)
    real = open_directory(tmp_path)
    for mesh in (Mesh(), Mesh(0, 1, 1, 2) if how == "blocks" else Mesh(1, 2, 1, 2)):  # 64 columns would cut a block
        parameters = [shard_parameters(model.parameters, mesh, 4, 2) for model in (made_up, real)]
        plans = [
            plan_load(own, model.source, "bfloat16", stored=model.stored)
            for own, model in zip(parameters, (made_up, real), strict=True)
        ]
        assert plans[0].weights == plans[1].weights
        assert Counter(plans[0].moves) == Counter(plans[1].moves)
        for kind in ("cpu", "cuda"):
            assert plans[0].staging_bytes(kind) == plans[1].staging_bytes(kind)
        (weights, peaks), (_, real_peaks) = loaded(made_up, plans[0]), loaded(real, plans[1])
        assert peaks == real_peaks
        quantized = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedWeight)}
        assert {weight.scheme.name for weight in quantized.values()} == {SCHEMES[how]}
        assert ("layers.0.o.weight" in quantized) == (how in ("channels", "tensors"))
        for name, weight in quantized.items():
            spread = 64**-0.5 if "experts.down" in name else 128**-0.5
            values = dequantize(weight)
            assert values.isfinite().all(), name
            assert 0.8 * spread < values.std() < 1.25 * spread, name
            assert len(values.unique()) > 16, name


def test_a_scheme_that_is_not_read_is_not_made_up(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UnsupportedModelError, match="quant_method = 'awq'"):
        open_directory_without_weights(tmp_path)


def test_what_is_not_quantized_is_made_up_plain():
    entries = make_up_source([experts(2, 4, 32)], "float16", None).entries
    assert {entry.dtype for entry in entries.values()} == {"float16"}
    left_out = StoredSchemes(MXFP4, ignore=("experts",))
    source = make_up_source([experts(2, 4, 33)], "float16", left_out)
    assert plan_load([experts(2, 4, 33)], source, "float16", stored=left_out).num_quantized == 0
    with pytest.raises(UnsupportedModelError, match=r"is stored as mxfp4; it has 33 columns"):
        make_up_source([experts(2, 4, 33)], "float16", StoredSchemes(MXFP4))


def test_what_was_left_out_has_to_be_known(tmp_path):
    """Headers would tell; without them a pattern that is not followed leaves nothing to go by, in a plan neither."""
    stored = {"quant_method": "fp8", "modules_to_not_convert": [r"re:model\.layers\.\d+\.mlp"]}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": stored}))
    for use in (open_directory_without_weights, lambda folder: open_blueprint(str(folder))):
        with pytest.raises(UnsupportedModelError, match="is not followed here, and there are no weights"):
            use(tmp_path)

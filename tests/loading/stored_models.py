"""Tiny models on disk that are quantized already, as fp8, fp8_block or with experts in mxfp4, with some of it left plain."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cli.cli_models import make_model
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from quant.whole_weights import quantize

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
CHANNELS = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "targets": ["Linear"],
}
SAID: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "compressed-tensors", "config_groups": {"group_0": CHANNELS}},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
}


def make_stored(folder: Path, scheme: str, plain: tuple[str, ...] = (), said: tuple[str, ...] = (), **settings) -> Path:
    """A model whose matrices of layers (of mxfp4: of experts) are codes, except those that have a plain one's name in theirs.

    `said` are names of modules that config.json says were left out.
    """
    make_model(folder, **settings)
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        is_matrix = values.dim() == 2 and name.startswith("model.layers.") and not name.endswith("mlp.gate.weight")
        if not is_matrix or (scheme == "mxfp4" and ".experts." not in name) or any(part in name for part in plain):
            tensors[name] = values
            continue
        codes, scales = quantize(values, WEIGHT_SCHEMES[scheme])
        if scheme == "mxfp4":
            module = name.removesuffix(".weight")
            tensors |= {f"{module}_blocks": codes.view(len(codes), -1, 16), f"{module}_scales": scales}
        else:
            tensors |= {name: codes, f"{name}_scale{'_inv' * (scheme == 'fp8_block')}": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantization = SAID[scheme] | {"modules_to_not_convert": list(said)}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder

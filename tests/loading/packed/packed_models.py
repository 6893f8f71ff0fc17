"""Tiny models on disk whose layers are packed, and the same models with the dequantized weights stored plain."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from cli.cli_models import make_model
from loading.packed import packed_settings, packers
from loading.packed.packers import Packed

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
MOE: dict[str, Any] = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
Make = Callable[[np.random.Generator, int, int], Packed]
GROUP = 32
MODELS: dict[str, tuple[dict[str, Any], Make]] = {
    "awq": (packed_settings.awq(GROUP), lambda rng, rows, columns: packers.awq(rng, rows, columns, GROUP)),
    "gptq": (
        packed_settings.gptq(GROUP, order=True),
        lambda rng, rows, columns: packers.gptq(rng, rows, columns, GROUP, order=True),
    ),
    "gptq-8bit": (
        packed_settings.gptq(-1, bits=8, version=2),
        lambda rng, rows, columns: packers.gptq(rng, rows, columns, -1, bits=8, version=2),
    ),
    "pack-quantized": (
        packed_settings.compressed("pack-quantized", packed_settings.integers(GROUP, sym=False)),
        lambda rng, rows, columns: packers.packed_int(rng, rows, columns, GROUP, sym=False),
    ),
    "int-quantized": (
        packed_settings.compressed("int-quantized", packed_settings.integers(-1, 8)),
        packers.int8,
    ),
    "nvfp4": (packed_settings.compressed("nvfp4-pack-quantized", packed_settings.floats(16)), packers.nvfp4),
    "modelopt": (packed_settings.modelopt(), packers.modelopt_nvfp4),
    "mxfp4": (packed_settings.compressed("mxfp4-pack-quantized", packed_settings.floats(32)), packers.mxfp4),
}


def is_matrix(name: str, values: torch.Tensor) -> bool:
    """Tell whether publishers would pack it: a matrix of a layer, but no router."""
    return values.dim() == 2 and name.startswith("model.layers.") and not name.endswith("mlp.gate.weight")


def make_packed(folder: Path, settings: dict[str, Any], make: Make, plain: tuple[str, ...] = (), **sizes: Any) -> Path:
    """Write a packed model to `folder`, and with its dequantized weights to `folder`-plain; return the packed one.

    Matrices with a name of `plain` in theirs stay plain.
    """
    make_model(folder, **(SIZES | sizes))
    rng = np.random.default_rng(5)
    stored: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if not is_matrix(name, values) or any(part in name for part in plain):
            stored[name] = weights[name] = values
            continue
        made = make(rng, *values.shape)
        stored |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in made.tensors.items()}
        weights[name] = made.weight
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    other = make_model(folder.with_name(f"{folder.name}-plain"), **(SIZES | sizes))
    save_file({name: values.contiguous() for name, values in weights.items()}, other / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def plain_of(folder: Path) -> Path:
    """Return the folder of the same model, stored plain."""
    return folder.with_name(f"{folder.name}-plain")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the stored tensors of a model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def with_settings(folder: Path, settings: dict[str, Any] | None) -> None:
    """Write other settings into config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))

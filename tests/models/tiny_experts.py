"""Tiny random mixtures of experts, written in every layout in which checkpoints have them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VOCAB = 259
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
SHARED = SMALL | {"shared_expert_intermediate_size": 40}
EXPERT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", SHARED),
    "qwen2_moe normalized, every second layer": (
        "Qwen2Moe",
        SHARED | {"norm_topk_prob": True, "num_hidden_layers": 4, "decoder_sparse_step": 2},
    ),
    "qwen2_moe without biases, a window in every other layer": (
        "Qwen2Moe",
        SHARED | {"qkv_bias": False, "use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3},
    ),
    "qwen2_moe tied, every head its own keys": (
        "Qwen2Moe",
        SHARED | {"tie_word_embeddings": True, "num_key_value_heads": 4, "num_experts_per_tok": 6},
    ),
    "qwen3_moe": ("Qwen3Moe", SMALL | {"norm_topk_prob": True, "head_dim": 32}),
    "qwen3_moe not normalized, dense layers": (
        "Qwen3Moe",
        SMALL | {"mlp_only_layers": [0, 2], "num_hidden_layers": 3, "num_experts_per_tok": 1},
    ),
    "qwen3_moe tied, biases, windows": (
        "Qwen3Moe",
        SMALL | {"tie_word_embeddings": True, "attention_bias": True, "use_sliding_window": True, "sliding_window": 8},
    ),
}
GPT_OSS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "swiglu_limit": 0.9,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1500.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""Experts are square, as those of gpt-oss are; the limit is one that many gates are beyond."""
EXPERT_MODELS["gpt_oss"] = ("GptOss", GPT_OSS)
LAYOUTS = ("separate", "fused", "fused.weight", "transposed", "transposed.weight", "by kind", "by kind.weight")


def make_tiny(name: str, seed: int = 0, **changes: Any) -> Any:
    """One of EXPERT_MODELS."""
    prefix, settings = EXPERT_MODELS[name]
    return make_random(prefix, settings | changes, seed)


def make_random(prefix: str, settings: dict[str, Any], seed: int = 0) -> Any:
    """A model of transformers, such as Qwen2Moe, with every parameter drawn at random, in evaluation mode."""
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**settings, architectures=[f"{prefix}ForCausalLM"])
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(values * parameter.shape[-1] ** -0.5)
            elif path.endswith("sinks"):
                parameter.copy_(2.0 * values)
            else:
                parameter.copy_(values * 0.1 + (0.0 if path.endswith("bias") else 1.0))
    return model


def config_of(model: Any) -> dict[str, Any]:
    """As config.json would say it."""
    return json.loads(model.config.to_json_string(use_diff=False)) | {"dtype": "float32"}


def tensors_of(model: Any, layout: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of the model, its experts in one of the LAYOUTS."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    whole = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in whole.items():
        if ".mlp.experts." in name and model.config.model_type != "gpt_oss":
            tensors |= _expert_tensors(name, tensor, layout)
        else:
            tensors[name] = tensor
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _expert_tensors(name: str, tensor: torch.Tensor, layout: str) -> dict[str, torch.Tensor]:
    prefix, _, kind = name.rpartition(".")
    kind_of_layout, dot, suffix = layout.partition(".")
    end = dot + suffix
    if kind_of_layout == "fused":
        return {name + end: tensor}
    if kind_of_layout == "transposed":
        return {name + end: tensor.transpose(1, 2)}
    halves = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
    named = halves if kind == "gate_up_proj" else {kind: tensor}
    if kind_of_layout == "by kind":
        return {f"{prefix}.{own}{end}": stacked for own, stacked in named.items()}
    return {
        f"{prefix}.{expert}.{own}.weight": stacked[expert]
        for own, stacked in named.items()
        for expert in range(len(tensor))
    }


def save_tiny_experts(model: Any, folder: Path, layout: str = "separate") -> None:
    """Write it as a checkpoint."""
    from safetensors.torch import save_file

    save_file(tensors_of(model, layout), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(model)))


def assembled(parameters: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Final weights straight from what their parts say, in plain torch; each tensor must be used, and no row left."""
    weights, used = {}, set()
    for parameter in parameters:
        layouts = (parameter.parts, *parameter.layouts)
        parts = next(parts for parts in layouts if all(_fits(part, tensors) for part in parts))
        weight = torch.full((parameter.num_rows, parameter.num_columns), float("nan"))
        for part in parts:
            used.add(part.tensor)
            source = tensors[part.tensor]
            upright = source.transpose(-1, -2) if part.is_transposed else source
            rows = upright.reshape(part.source_rows, part.source_columns)[slice(*part.row_range)]
            weight[part.row_start : part.row_start + part.num_rows] = rows
        assert not weight.isnan().any(), f"rows of {parameter.name} are left"
        weights[parameter.name] = weight.view(parameter.shape)
    assert used == set(tensors), "tensors that no one wants"
    return weights


def _fits(part: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    return part.tensor in tensors and tuple(tensors[part.tensor].shape) == part.shape

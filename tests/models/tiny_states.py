"""Tiny random models with gated delta nets, transformers' and ours over the same weights, and what judges one by the other."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from runner.drive import LoadedModel, load_model

VOCAB = 259
FULL, LINEAR = "full_attention", "linear_attention"
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.03,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
"""The eps of norms is so large that it shows where it is taken for that of queries and keys."""
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
STATE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "3.5": ("Qwen3_5Text", SMALL),
    "3.5 tied, one key head, five taps, a state last": (
        "Qwen3_5Text",
        SMALL
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 5}
        | {"linear_key_head_dim": 24, "linear_value_head_dim": 16, "tie_word_embeddings": True}
        | {"num_hidden_layers": 3, "layer_types": [FULL, LINEAR, LINEAR]},
    ),
    "3.5 moe": ("Qwen3_5MoeText", SMALL | EXPERTS),
    "next": ("Qwen3Next", SMALL | EXPERTS),
    "next, shares as they are, an MLP, equal heads": (
        "Qwen3Next",
        SMALL
        | EXPERTS
        | {"norm_topk_prob": False, "mlp_only_layers": [1], "linear_num_key_heads": 4, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 2}
        | {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]},
    ),
}
TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def make_state_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model of transformers with every parameter drawn at random, in evaluation mode."""
    import transformers

    prefix, settings = STATE_MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**(settings | changes))
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config).eval()
    draw(model, seed)
    return model


def draw(model: Any, seed: int = 0) -> None:
    """Draw every parameter so that a dropped or swapped one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if path.endswith("conv1d.weight"):
                parameter.copy_(values * 0.7)
            elif parameter.ndim > 1:
                parameter.copy_(values * parameter.shape[-1] ** -0.5)
            elif path.endswith("A_log"):
                parameter.copy_(values * 1.5 - 1.0)
            elif path.endswith("linear_attn.norm.weight"):
                parameter.copy_(values * 0.2 + 1.0)
            elif path.endswith("bias"):
                parameter.copy_(values * 0.5)
            else:  # norms add 1 by themselves
                parameter.copy_(values * 0.3)


def save_state_model(name: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Write one as transformers does, and return it."""
    model = make_state_model(name, seed, **changes)
    model.save_pretrained(folder)
    return model


def save_with_images(folder: Path, *, moe: bool = False, seed: int = 0) -> Any:
    """Write a model with a tower for images and a draft layer, as it is published; return transformers' model of its text."""
    import transformers
    from safetensors.torch import load_file, save_file

    prefix = "Qwen3_5Moe" if moe else "Qwen3_5"
    text = SMALL | (EXPERTS if moe else {})
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=TOWER)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    draw(model, seed)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.zeros(64, 128)
    save_file(tensors, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    said["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(said))
    return model


@cache
def tiny(name: str) -> tuple[Any, LoadedModel]:
    """transformers' model and ours, from the same files."""
    with TemporaryDirectory() as folder:
        theirs = save_state_model(name, Path(folder))
        ours = load_model(Path(folder))
    return theirs, ours

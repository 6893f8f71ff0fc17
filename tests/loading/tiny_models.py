"""Tiny random models of every family, written as transformers writes them."""

from pathlib import Path
from typing import Any

VOCAB = 259
ROPE_LONG = {"max_position_embeddings": 512}
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
SMALL_OPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "ffn_dim": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 64,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL | {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "llama_tied": ("Llama", SMALL | {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "llama_bias": ("Llama", SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama3": (
        "Llama",
        SMALL
        | ROPE_LONG
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama_linear": (
        "Llama",
        SMALL | ROPE_LONG | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama_dynamic": (
        "Llama",
        SMALL
        | {"max_position_embeddings": 64}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama_yarn": (
        "Llama",
        SMALL
        | ROPE_LONG
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama_longrope": (
        "Llama",
        SMALL
        | ROPE_LONG
        | {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0 + 0.05 * i for i in range(8)],
                "long_factor": [1.5 + 0.5 * i for i in range(8)],
            }
        },
    ),
    "mistral": ("Mistral", SMALL | {"sliding_window": None}),
    "mistral_window": ("Mistral", SMALL | {"sliding_window": 8}),
    "qwen2": ("Qwen2", SMALL),
    "qwen2_window": (
        "Qwen2",
        SMALL | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 32, "num_hidden_layers": 3}),
    "gemma3": (
        "Gemma3",
        SMALL
        | {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "opt": ("OPT", SMALL_OPT),
    "opt_350m_like": ("OPT", SMALL_OPT | {"word_embed_proj_dim": 40, "do_layer_norm_before": False}),
}

CONFIGS = {"Gemma3": "Gemma3TextConfig"}
"""Settings that are not called like their model."""


def save_tiny(
    family: str,
    directory: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Any:
    """Write a tiny model of a family (overrides are config settings) and return it, in evaluation mode.

    Every parameter is drawn at random, norms and biases too, so that a dropped or swapped one shows; the scale keeps
    logits far enough apart for greedy tokens to be stable. `max_shard_size="40KB"` splits it into several files.
    """
    import torch
    import transformers

    prefix, settings = FAMILIES[family]
    config = getattr(transformers, CONFIGS.get(prefix, f"{prefix}Config"))(**(settings | overrides))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(values * parameter.shape[1] ** -0.5)
            else:
                # Norms of Gemma add 1 by themselves.
                middle, spread = (0.0, 0.3) if prefix in CONFIGS else (1.0, 0.1)
                parameter.copy_(values * 0.1 if name.endswith("bias") else values * spread + middle)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model

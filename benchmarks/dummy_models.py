"""Folders with the settings of a catalogue model and a byte tokenizer, for engines with dummy weights; no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from holdfast.models.catalogue import find_model

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
"""Shapes that replace a model's own if a script only has to run."""
TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
"""Like the one above, for a mixture of experts, whose shared expert is as wide as an MLP would be."""


TINY_LATENTS = {
    **TINY,
    "num_hidden_layers": 3,
    "num_key_value_heads": TINY["num_attention_heads"],
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
"""Like the one above, for latent attention (MLA)."""


TINY_ENTRIES = {
    **TINY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 1,
    "head_dim": 80,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_groups": 4,
    "o_lora_rank": 128,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "compress_ratios": [0, 4, 128, 4],
    "sliding_window": 24,
    "num_hash_layers": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
"""Like the one above, for windows and entries (DeepSeek-V4), with the sizes that kernels and formats need: 64 elements and 16 RoPE elements.
Two or four ranks cut no block of 128."""


TINY_STATES = {
    **TINY,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
"""Like the one above, for gated delta nets (Qwen3.5)."""
TEXT = "text_config"
"""Key of a decoder's settings in a config with more parts."""


def tiny_settings(name: str) -> dict[str, Any]:
    """Return settings that make a catalogue model tiny."""
    config = find_model(name)[1]
    config = config.get(TEXT, config)
    if "linear_num_key_heads" in config:
        shared = {"shared_expert_intermediate_size": TINY["intermediate_size"]}
        return TINY_STATES | (TINY_EXPERTS | shared if "num_experts" in config else {})
    if "kv_lora_rank" in config:
        latents = {key: value for key, value in TINY_LATENTS.items() if key != "head_dim"}
        return latents | ({} if config.get("q_lora_rank") else {"q_lora_rank": None})
    if "compress_ratios" in config:
        return {key: value for key, value in TINY_ENTRIES.items() if key != "intermediate_size"}
    if "num_experts" not in config:
        return TINY
    shared = {"shared_expert_intermediate_size": TINY["intermediate_size"]}
    return TINY | TINY_EXPERTS | (shared if "shared_expert_intermediate_size" in config else {})


def few_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the fewest layers that launch every kernel of a model: two, or four.

    Four have dense ones before experts, or attention after gated delta nets.
    """
    config = config.get(TEXT, config)
    num_all = config["num_hidden_layers"]
    num_layers = min(num_all, 4 if "q_lora_rank" in config or "linear_num_key_heads" in config else 2)
    lists = {key: value for key, value in config.items() if isinstance(value, list) and len(value) >= num_all}
    return {"num_hidden_layers": num_layers, **{key: value[:num_layers] for key, value in lists.items()}}


def write_dummy_model(folder: Path, name: str, **settings: object) -> Path:
    """Write a model folder for load_format="dummy"; `settings` replace those of its config.json, or of its text model."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    config = dict(find_model(name)[1])
    if TEXT in config:
        config[TEXT] = {**config[TEXT], **settings}
    else:
        config |= settings
    (path / "config.json").write_text(json.dumps(config))
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(path / "tokenizer.json"))
    return path

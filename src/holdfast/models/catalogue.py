"""The catalogue: facts of well-known models as their config.json states them, so that a plan needs no file; no torch."""

import difflib
from collections.abc import Mapping

from holdfast.errors import ModelNotFoundError, shown

Config = Mapping[str, object]


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def _qwen25(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> Config:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def _llama3(hidden: int, inner: int, layers: int, heads: int, head_dim: int, factor: float, *, tied: bool) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "max_position_embeddings": 131072,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def _smollm2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, theta: int) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "rope_theta": theta,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


MISTRAL_7B: Config = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
OPT_125M: Config = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "torch_dtype": "float16",
}
QWEN15_MOE: Config = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B: Config = {
    **_qwen3(2048, 6144, 48, 32, tied=False),
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V2_LITE: Config = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_method": "greedy",
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_R1: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
DEEPSEEK_V4_FLASH: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "compress_ratios": [0, 0, *(4, 128) * 20, 4, 0],
    "sliding_window": 128,
    "hc_mult": 4,
    "num_hash_layers": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1_048_576,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
DEEPSEEK_V4_PRO: Config = {
    **DEEPSEEK_V4_FLASH,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *(4, 128) * 29, 4, 0],
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
}
CATALOGUE: Mapping[str, Config] = {
    "SmolLM2-135M": _smollm2(576, 1536, 30, 9, 3, 100_000),
    "SmolLM2-360M": _smollm2(960, 2560, 32, 15, 5, 100_000),
    "SmolLM2-1.7B": _smollm2(2048, 8192, 24, 32, 32, 130_000),
    "OPT-125m": OPT_125M,
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen2.5-0.5B-Instruct": _qwen25(896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen2.5-1.5B-Instruct": _qwen25(1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen2.5-3B-Instruct": _qwen25(2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen2.5-7B-Instruct": _qwen25(3584, 18944, 28, 28, 4, 152064, tied=False),
    "Qwen2.5-14B-Instruct": _qwen25(5120, 13824, 48, 40, 8, 152064, tied=False),
    "Qwen2.5-32B-Instruct": _qwen25(5120, 27648, 64, 40, 8, 152064, tied=False),
    "Qwen2.5-72B-Instruct": _qwen25(8192, 29568, 80, 64, 8, 152064, tied=False),
    "Qwen1.5-MoE-A2.7B": QWEN15_MOE,
    "Llama-3.2-1B": _llama3(2048, 8192, 16, 32, 64, 32.0, tied=True),
    "Llama-3.2-3B": _llama3(3072, 8192, 28, 24, 128, 32.0, tied=True),
    "Llama-3.1-8B": _llama3(4096, 14336, 32, 32, 128, 8.0, tied=False),
    "Llama-3.1-70B": _llama3(8192, 28672, 80, 64, 128, 8.0, tied=False),
    "Mistral-7B-v0.3": MISTRAL_7B,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek-R1": DEEPSEEK_R1,
    "DeepSeek-V4-Flash": DEEPSEEK_V4_FLASH,
    "DeepSeek-V4-Pro": DEEPSEEK_V4_PRO,
}
"""Every model that can be planned by name."""
TUNED = ("-instruct", "-chat")
"""Endings that tell a tuned model from its base, which has the same shapes."""


def find_model(name: str) -> tuple[str, Config]:
    """The catalogue's spelling of a name and its config; owners ("Qwen/"), case and the endings of tuned models do not matter."""
    entries = {_plain(entry): entry for entry in CATALOGUE}
    wanted = _plain(name)
    if wanted in entries:
        found = entries[wanted]
        return found, CATALOGUE[found]
    near = difflib.get_close_matches(wanted, entries, n=3)
    raise ModelNotFoundError(
        f"model {shown(name)} was asked for",
        f"it is neither a path nor among the {len(CATALOGUE)} models known by name",
        f"did you mean {' or '.join(entries[match] for match in near)}?"
        if near
        else f"those are {', '.join(CATALOGUE)}",
    )


def _plain(name: str) -> str:
    plain = name.strip().rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for ending in TUNED:
        plain = plain.removesuffix(ending)
    return plain

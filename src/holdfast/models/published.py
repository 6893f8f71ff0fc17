"""Published figures: the config.json of well-known models, as their makers released them, and whose it is; no torch.

Only what a plan needs is here. `repository` is where the file is, on the Hugging Face Hub.
"""

from collections.abc import Mapping
from typing import NamedTuple

Config = Mapping[str, object]


class Published(NamedTuple):
    """One model."""

    repository: str
    """Owner and name on the Hub: the source of the figures."""
    config: Config
    same: tuple[str, ...] = ()
    """Names of other releases with the same figures."""

    @property
    def name(self) -> str:
        return self.repository.partition("/")[2]


def _decoder(
    family: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    length: int,
    **more: object,
) -> Config:
    """What every config.json says; `family` is that of transformers, such as Llama."""
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": MODEL_TYPES[family],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


MODEL_TYPES = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3_moe",
    "Phi3": "phi3",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3_text",
    "GptOss": "gpt_oss",
    "Glm": "glm",
    "Glm4": "glm4",
    "Glm4Moe": "glm4_moe",
}


def _llama2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Config:
    return _decoder(
        "Llama", hidden, inner, layers, heads, kv_heads, 32000, 4096, rms_norm_eps=1e-5, torch_dtype="float16"
    )


def _llama3(hidden: int, inner: int, layers: int, heads: int, head_dim: int = 128, factor: float = 8.0) -> Config:
    """3.1 to 3.3; the small ones of 3.2 have a factor of 32 and tied embeddings."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _decoder(
        *("Llama", hidden, inner, layers, heads, 8, 128256, 131072),
        head_dim=head_dim,
        rope_theta=500_000.0,
        rope_scaling=scaling,
        rms_norm_eps=1e-5,
        tie_word_embeddings=factor == 32.0,
    )


def _smollm2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, theta: int) -> Config:
    return _decoder(
        *("Llama", hidden, inner, layers, heads, kv_heads, 49152, 8192),
        rope_theta=theta,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )


def _mistral(hidden: int, inner: int, layers: int, vocab: int, length: int, theta: float, **more: object) -> Config:
    heads = 48 if hidden == 6144 else 96 if hidden == 12288 else 32
    return _decoder(
        *("Mistral", hidden, inner, layers, heads, 8, vocab, length),
        head_dim=128,
        rope_theta=theta,
        rms_norm_eps=1e-5,
        **{"sliding_window": None, **more},
    )


def _qwen25(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: object) -> Config:
    is_small = hidden <= 2048
    return _decoder(
        *("Qwen2", hidden, inner, layers, heads, kv_heads, 151936 if is_small else 152064, 32768),
        **{"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": is_small, **more},
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int, **more: object) -> Config:
    return _decoder(
        *("Qwen3", hidden, inner, layers, heads, 8, 151936, 40960),
        **{"head_dim": 128, "rope_theta": 1_000_000, "rms_norm_eps": 1e-6, **more},
    )


def _qwen3_moe(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, experts: int, width: int, **more: object
) -> Config:
    return {
        **_qwen3(hidden, inner, layers, heads),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": kv_heads,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **more,
    }


def _mixtral(hidden: int, inner: int, layers: int, heads: int, vocab: int, length: int) -> Config:
    return _decoder(
        *("Mixtral", hidden, inner, layers, heads, 8, vocab, length),
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-5,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    )


def _gemma(
    family: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, **more: object
) -> Config:
    is_second = family == "Gemma2"
    return _decoder(
        *(family, hidden, inner, layers, heads, kv_heads),
        *((256000, 8192) if is_second else (262208, 131072)),
        **{
            "head_dim": head_dim,
            "sliding_window": 4096 if is_second else 1024,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            **more,
        },
    )


def _gemma3(*shape: int, scalar: int = 256) -> Config:
    """One that sees images: the text model, and a tower for them."""
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": _nested(
            _gemma(
                *("Gemma3", *shape),
                query_pre_attn_scalar=scalar,
                rope_scaling={"rope_type": "linear", "factor": 8.0},
            )
        ),
        "vision_config": tower,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _nested(config: Config) -> Config:
    return {key: value for key, value in config.items() if key != "architectures"}


def _gpt_oss(layers: int, experts: int) -> Config:
    return _decoder(
        *("GptOss", 2880, 2880, layers, 64, 8, 201088, 131072),
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        attention_bias=True,
        rope_theta=150_000,
        rms_norm_eps=1e-5,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
            ],
        },
    )


def _glm45(hidden: int, inner: int, layers: int, experts: int, width: int, dense: int, **more: object) -> Config:
    return _decoder(
        *("Glm4Moe", hidden, inner, layers, 96, 8, 151552, 131072),
        **{
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "n_routed_experts": experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": width,
            "first_k_dense_replace": dense,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5,
            **more,
        },
    )


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


def _yarn(factor: float, mscale: float, beta_fast: int = 32) -> Config:
    """As DeepSeek stretches 4096 positions; scores are scaled with the rotations."""
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
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
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": _yarn(40, 0.707),
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V2: Config = {
    **DEEPSEEK_V2_LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
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
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": _yarn(40, 1.0),
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
DEEPSEEK_V32: Config = {
    **DEEPSEEK_R1,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
GLM_5: Config = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GLM_52: Config = {
    **GLM_5,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 1_048_576,
    "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
}
"""Of 78 layers 21 choose: the first three, and from there every fourth."""
KIMI_K2: Config = {
    **DEEPSEEK_R1,
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 131072,
    "rope_theta": 50000,
    "rope_scaling": _yarn(32, 1.0, beta_fast=1),
}
MOONLIGHT: Config = {
    **DEEPSEEK_V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "intermediate_size": 11264,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 8192,
    "rope_theta": 50000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
}
GLM47_FLASH: Config = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 202752,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
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
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
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
DEEPSEEK_V4_FLASH_BASE: Config = {**DEEPSEEK_V4_FLASH, "expert_dtype": "fp8"}
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
    "routed_scaling_factor": 2.5,
}
MISTRAL_SMALL: Config = _mistral(5120, 32768, 40, 131072, 32768, 100_000_000.0)
MISTRAL_SMALL_31: Config = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": _nested(
        {**MISTRAL_SMALL, "max_position_embeddings": 131072, "rope_theta": 1_000_000_000.0},
    ),
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": 64,
        "image_size": 1540,
        "patch_size": 14,
    },
    "spatial_merge_size": 2,
    "multimodal_projector_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LONG = {"max_position_embeddings": 262144}
CODER = "Qwen2.5-Coder-{}-Instruct"
PUBLISHED: tuple[Published, ...] = (
    Published("HuggingFaceTB/SmolLM2-135M", _smollm2(576, 1536, 30, 9, 3, 100_000)),
    Published("HuggingFaceTB/SmolLM2-360M", _smollm2(960, 2560, 32, 15, 5, 100_000)),
    Published("HuggingFaceTB/SmolLM2-1.7B", _smollm2(2048, 8192, 24, 32, 32, 130_000)),
    Published("facebook/OPT-125m", OPT_125M),
    Published(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        _decoder("Llama", 2048, 5632, 22, 32, 4, 32000, 2048, rms_norm_eps=1e-5),
        ("TinyLlama-1.1B",),
    ),
    Published("Qwen/Qwen3-0.6B", _qwen3(1024, 3072, 28, 16, tie_word_embeddings=True)),
    Published("Qwen/Qwen3-1.7B", _qwen3(2048, 6144, 28, 16, tie_word_embeddings=True)),
    Published("Qwen/Qwen3-4B", _qwen3(2560, 9728, 36, 32, tie_word_embeddings=True)),
    Published(
        "Qwen/Qwen3-4B-Instruct-2507",
        _qwen3(2560, 9728, 36, 32, tie_word_embeddings=True, rope_theta=5_000_000, **LONG),
        ("Qwen3-4B-Thinking-2507",),
    ),
    Published("Qwen/Qwen3-8B", _qwen3(4096, 12288, 36, 32)),
    Published("Qwen/Qwen3-14B", _qwen3(5120, 17408, 40, 40)),
    Published("Qwen/Qwen3-32B", _qwen3(5120, 25600, 64, 64)),
    Published("Qwen/Qwen3-30B-A3B", _qwen3_moe(2048, 6144, 48, 32, 4, 128, 768)),
    Published(
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        _qwen3_moe(2048, 6144, 48, 32, 4, 128, 768, rope_theta=10_000_000, **LONG),
        ("Qwen3-30B-A3B-Thinking-2507",),
    ),
    Published(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        _qwen3_moe(2048, 5472, 48, 32, 4, 128, 768, rope_theta=10_000_000, **LONG),
    ),
    Published("Qwen/Qwen3-235B-A22B", _qwen3_moe(4096, 12288, 94, 64, 4, 128, 1536)),
    Published(
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
        _qwen3_moe(4096, 12288, 94, 64, 4, 128, 1536, rope_theta=5_000_000, **LONG),
        ("Qwen3-235B-A22B-Thinking-2507",),
    ),
    Published(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        _qwen3_moe(6144, 8192, 62, 96, 8, 160, 2560, rope_theta=10_000_000, **LONG),
    ),
    Published("Qwen/Qwen2.5-0.5B-Instruct", _qwen25(896, 4864, 24, 14, 2), (CODER.format("0.5B"),)),
    Published("Qwen/Qwen2.5-1.5B-Instruct", _qwen25(1536, 8960, 28, 12, 2), (CODER.format("1.5B"),)),
    Published("Qwen/Qwen2.5-3B-Instruct", _qwen25(2048, 11008, 36, 16, 2), (CODER.format("3B"),)),
    Published("Qwen/Qwen2.5-7B-Instruct", _qwen25(3584, 18944, 28, 28, 4), (CODER.format("7B"),)),
    Published("Qwen/Qwen2.5-14B-Instruct", _qwen25(5120, 13824, 48, 40, 8), (CODER.format("14B"),)),
    Published("Qwen/Qwen2.5-32B-Instruct", _qwen25(5120, 27648, 64, 40, 8), (CODER.format("32B"),)),
    Published("Qwen/Qwen2.5-72B-Instruct", _qwen25(8192, 29568, 80, 64, 8)),
    Published("Qwen/QwQ-32B", _qwen25(5120, 27648, 64, 40, 8, max_position_embeddings=40960)),
    Published("Qwen/Qwen1.5-MoE-A2.7B", QWEN15_MOE),
    Published("meta-llama/Llama-2-7b-hf", _llama2(4096, 11008, 32, 32, 32)),
    Published("meta-llama/Llama-2-13b-hf", _llama2(5120, 13824, 40, 40, 40)),
    Published("meta-llama/Llama-2-70b-hf", _llama2(8192, 28672, 80, 64, 8)),
    Published(
        "meta-llama/Meta-Llama-3-8B",
        _decoder("Llama", 4096, 14336, 32, 32, 8, 128256, 8192, rope_theta=500_000.0, rms_norm_eps=1e-5),
    ),
    Published(
        "meta-llama/Meta-Llama-3-70B",
        _decoder("Llama", 8192, 28672, 80, 64, 8, 128256, 8192, rope_theta=500_000.0, rms_norm_eps=1e-5),
    ),
    Published("meta-llama/Llama-3.2-1B", _llama3(2048, 8192, 16, 32, 64, 32.0)),
    Published("meta-llama/Llama-3.2-3B", _llama3(3072, 8192, 28, 24, 128, 32.0)),
    Published("meta-llama/Llama-3.1-8B", _llama3(4096, 14336, 32, 32), ("DeepSeek-R1-Distill-Llama-8B",)),
    Published("meta-llama/Llama-3.1-70B", _llama3(8192, 28672, 80, 64), ("DeepSeek-R1-Distill-Llama-70B",)),
    Published("meta-llama/Llama-3.1-405B", _llama3(16384, 53248, 126, 128)),
    Published("meta-llama/Llama-3.3-70B-Instruct", _llama3(8192, 28672, 80, 64)),
    Published("mistralai/Mistral-7B-v0.1", _mistral(4096, 14336, 32, 32000, 32768, 10_000.0, sliding_window=4096)),
    Published("mistralai/Mistral-7B-Instruct-v0.2", _mistral(4096, 14336, 32, 32000, 32768, 1_000_000.0)),
    Published("mistralai/Mistral-7B-v0.3", _mistral(4096, 14336, 32, 32768, 32768, 1_000_000.0), ("Mistral-7B",)),
    Published(
        "mistralai/Mistral-Nemo-Instruct-2407",
        _mistral(5120, 14336, 40, 131072, 131072, 1_000_000.0),
        ("Mistral-Nemo", "Mistral-Nemo-12B"),
    ),
    Published("mistralai/Codestral-22B-v0.1", _mistral(6144, 16384, 56, 32768, 32768, 1_000_000.0), ("Codestral-22B",)),
    Published(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        MISTRAL_SMALL,
        ("Mistral-Small-24B", "Mistral-Small-3-24B"),
    ),
    Published(
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
        MISTRAL_SMALL_31,
        ("Mistral-Small-3.1-24B-Instruct-2503", "Mistral-Small-3.1-24B", "Mistral-Small-3.2-24B"),
    ),
    Published("mistralai/Mixtral-8x7B-v0.1", _mixtral(4096, 14336, 32, 32, 32000, 32768), ("Mixtral-8x7B",)),
    Published("mistralai/Mixtral-8x22B-v0.1", _mixtral(6144, 16384, 56, 48, 32000, 65536), ("Mixtral-8x22B",)),
    Published("openai/gpt-oss-20b", _gpt_oss(24, 32)),
    Published("openai/gpt-oss-120b", _gpt_oss(36, 128)),
    Published("google/gemma-2-2b", _gemma("Gemma2", 2304, 9216, 26, 8, 4, 256)),
    Published("google/gemma-2-9b", _gemma("Gemma2", 3584, 14336, 42, 16, 8, 256)),
    Published("google/gemma-2-27b", _gemma("Gemma2", 4608, 36864, 46, 32, 16, 128)),
    Published(
        "google/gemma-3-1b-it",
        _gemma(
            "Gemma3", 1152, 6912, 26, 4, 1, 256, vocab_size=262144, max_position_embeddings=32768, sliding_window=512
        ),
    ),
    Published("google/gemma-3-4b-it", _gemma3(2560, 10240, 34, 8, 4, 256)),
    Published("google/gemma-3-12b-it", _gemma3(3840, 15360, 48, 16, 8, 256)),
    Published("google/gemma-3-27b-it", _gemma3(5376, 21504, 62, 32, 16, 128, scalar=168)),
    Published(
        "microsoft/phi-4",
        _decoder("Phi3", 5120, 17920, 40, 40, 10, 100352, 16384, rope_theta=250_000, rms_norm_eps=1e-5),
        ("phi-4-14b",),
    ),
    Published(
        "microsoft/Phi-4-mini-instruct",
        _decoder(
            *("Phi3", 3072, 8192, 32, 24, 8, 200064, 131072),
            partial_rotary_factor=0.75,
            sliding_window=262144,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
        ("Phi-4-mini-reasoning",),
    ),
    Published(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        _qwen25(*(1536, 8960, 28, 12, 2), tie_word_embeddings=False, max_position_embeddings=131072, rope_theta=10_000),
    ),
    Published(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        _qwen25(3584, 18944, 28, 28, 4, max_position_embeddings=131072, rope_theta=10_000),
    ),
    Published(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
        _qwen25(5120, 13824, 48, 40, 8, max_position_embeddings=131072, rms_norm_eps=1e-5),
    ),
    Published(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
        _qwen25(5120, 27648, 64, 40, 8, max_position_embeddings=131072, rms_norm_eps=1e-5),
    ),
    Published("deepseek-ai/DeepSeek-V2-Lite", DEEPSEEK_V2_LITE, ("DeepSeek-Coder-V2-Lite-Instruct",)),
    Published("deepseek-ai/DeepSeek-V2", DEEPSEEK_V2, ("DeepSeek-V2.5", "DeepSeek-Coder-V2-Instruct")),
    Published("deepseek-ai/DeepSeek-V3", DEEPSEEK_R1, ("DeepSeek-V3-0324", "DeepSeek-V3.1", "DeepSeek-V3.1-Terminus")),
    Published("deepseek-ai/DeepSeek-R1", DEEPSEEK_R1, ("DeepSeek-R1-0528",)),
    Published("deepseek-ai/DeepSeek-V3.2", DEEPSEEK_V32, ("DeepSeek-V3.2-Exp",)),
    Published("deepseek-ai/DeepSeek-V4-Flash-Base", DEEPSEEK_V4_FLASH_BASE),
    Published("deepseek-ai/DeepSeek-V4-Flash", DEEPSEEK_V4_FLASH),
    Published("deepseek-ai/DeepSeek-V4-Pro", DEEPSEEK_V4_PRO),
    Published(
        "zai-org/glm-4-9b-chat-hf",
        _decoder(
            *("Glm", 4096, 13696, 40, 32, 2, 151552, 131072),
            head_dim=128,
            attention_bias=True,
            partial_rotary_factor=0.5,
            rms_norm_eps=1.5625e-07,
        ),
    ),
    Published(
        "zai-org/GLM-4-9B-0414",
        _decoder(
            *("Glm4", 4096, 13696, 40, 32, 2, 151552, 32768),
            head_dim=128,
            attention_bias=True,
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-5,
        ),
        ("GLM-Z1-9B-0414",),
    ),
    Published(
        "zai-org/GLM-4-32B-0414",
        _decoder(
            *("Glm4", 6144, 23040, 61, 48, 2, 151552, 32768),
            head_dim=128,
            attention_bias=False,
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-5,
        ),
        ("GLM-4-32B", "GLM-Z1-32B-0414"),
    ),
    Published("zai-org/GLM-4.5", _glm45(5120, 12288, 92, 160, 1536, 3, use_qk_norm=True)),
    Published("zai-org/GLM-4.5-Air", _glm45(4096, 10944, 46, 128, 1408, 1, use_qk_norm=False)),
    Published(
        "zai-org/GLM-4.6", _glm45(5120, 12288, 92, 160, 1536, 3, use_qk_norm=True, max_position_embeddings=202752)
    ),
    Published("zai-org/GLM-4.7-Flash", GLM47_FLASH),
    Published("zai-org/GLM-5", GLM_5),
    Published("zai-org/GLM-5.2", GLM_52),
    Published("moonshotai/Moonlight-16B-A3B", MOONLIGHT),
    Published("moonshotai/Kimi-K2-Instruct", KIMI_K2),
    Published(
        "moonshotai/Kimi-K2-Instruct-0905",
        {**KIMI_K2, "max_position_embeddings": 262144, "rope_scaling": _yarn(64, 1.0, beta_fast=1)},
    ),
)
"""Every model that can be planned by name, by family."""

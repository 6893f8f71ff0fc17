"""Tiny checkpoints with latent attention, of numbers at random: as safetensors, plain or in fp8, and as GGUF files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from holdfast.models.grouped_readers import FAMILIES, read_spec
from holdfast.models.parameters import list_parameters
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from quant.whole_weights import quantize

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "float32",
    "vocab_size": 40,
    "hidden_size": 256,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "q_lora_rank": 200,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 96,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 640,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 10,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "tie_word_embeddings": False,
}
"""q_a has 200 rows and kv_a 288: their seam is 8 rows into a block. A head of kv_b has 160 rows, more than a block."""
SOFTMAX = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
}
"""What DeepSeek-V2 says otherwise, here without a latent of queries as its smaller model."""


def config_of(**changes: Any) -> dict[str, Any]:
    return CONFIG | changes


def tensors_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint in float32 by the names of Hugging Face, every expert apart."""
    spec = read_spec({**config, "quantization_config": None})
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for parameter in list_parameters(spec, FAMILIES[spec.architecture].names, with_layouts=False):
        for part in parameter.parts:
            values = torch.randn(part.shape, generator=generator)
            tensors[part.tensor] = values * 0.1 + 1.0 if parameter.kind == "norm" else values * part.shape[-1] ** -0.5
    return tensors


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


IN_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CHANNELS = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "targets": ["Linear"],
}
SAID: dict[str, dict[str, Any]] = {
    "fp8_block": IN_BLOCKS,
    "fp8": {"quant_method": "compressed-tensors", "config_groups": {"group_0": CHANNELS}},
    "fp8_tensor": {"quant_method": "fp8"},
}
PLAIN_ENDS = ("mlp.gate.weight", "e_score_correction_bias")


def stored_as(scheme: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every matrix of layers as codes and scales, as DeepSeek stores them: kv_b too, routers and the ends not."""
    stored: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        if not name.startswith("model.layers.") or name.endswith(PLAIN_ENDS) or values.dim() == 1:
            stored[name] = values
            continue
        amax = values.abs().amax().view(1) if scheme == "fp8_tensor" else None
        codes, scales = quantize(values, WEIGHT_SCHEMES[scheme], amax)
        if scheme == "fp8_tensor":
            scales = scales[0].clone()
        stored |= {name: codes, f"{name}_scale{'_inv' * (scheme == 'fp8_block')}": scales}
    return stored


GGUF_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
GGUF_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], is_split: bool
) -> dict[str, torch.Tensor]:
    """The tensors of a conversion: experts stacked; kv_b whole, or keys transposed and values, each [heads, ...]."""
    heads, nope, value = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    found: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        module, _, kind = name.rpartition(".")
        if module in GGUF_ENDS:
            found[f"{GGUF_ENDS[module]}.{kind}"] = values
            continue
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        block = f"blk.{layer}."
        if kind == "e_score_correction_bias":
            found[f"{block}exp_probs_b.bias"] = values
        elif rest.startswith("mlp.experts."):
            half = rest.rpartition(".")[2].removesuffix("_proj")
            found.setdefault(f"{block}ffn_{half}_exps.weight", torch.stack([
                tensors[f"model.layers.{layer}.mlp.experts.{expert}.{half}_proj.weight"]
                for expert in range(config["n_routed_experts"])
            ]))  # fmt: skip
        elif rest == "self_attn.kv_b_proj" and is_split:
            keys, values_of = values.view(heads, nope + value, -1).split([nope, value], 1)
            found[f"{block}attn_k_b.weight"] = keys.transpose(1, 2).contiguous()
            found[f"{block}attn_v_b.weight"] = values_of.contiguous()
        else:
            found[f"{block}{GGUF_MODULES[rest]}.{kind}"] = values
    return found


def gguf_metadata(config: Mapping[str, Any], is_old: bool = False) -> dict[str, Any]:
    """What a conversion writes; an old one has the widths of a head where a new one has those of what is cached."""
    rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    key, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    scaling = config["rope_scaling"]
    metadata = {
        "block_count": config["num_hidden_layers"] + config["num_nextn_predict_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_attention_heads"] if is_old else 1,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": key if is_old else rank + rope,
        "attention.value_length": value if is_old else rank,
        "attention.key_length_mla": None if is_old else key,
        "attention.value_length_mla": None if is_old else value,
        "rope.dimension_count": rope,
        "rope.freq_base": config["rope_theta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"] or None,
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        "nextn_predict_layers": config["num_nextn_predict_layers"] or None,
    }
    return {f"deepseek2.{key}": value for key, value in metadata.items() if value is not None}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    quantize: Callable[[str, torch.Tensor], tuple[Any, Any] | None] = lambda name, values: None,
) -> Path:
    """`quantize` gives the bytes of a tensor and their type; None: float32."""
    import gguf

    writer = gguf.GGUFWriter(path, "deepseek2")
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    writer.add_token_list([f"token{index}" for index in range(len(tensors["token_embd.weight"]))])
    for name, values in tensors.items():
        coded = quantize(name, values)
        if coded is None:
            writer.add_tensor(name, values.numpy())
        else:
            writer.add_tensor(name, coded[0], raw_dtype=coded[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

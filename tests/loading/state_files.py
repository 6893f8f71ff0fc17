"""GGUF files of gated delta nets as llama.cpp's conversion writes them, by the `gguf` package from a model of transformers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
NUM_DRAFTS = 1


def settings_of(config: Any) -> dict[str, Any]:
    """The metadata of a conversion, without the prefix of the architecture."""
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
    }
    if config.model_type != "qwen3_next":
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    if getattr(config, "num_experts", 0):
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    if getattr(config, "intermediate_size", None):
        found["feed_forward_length"] = config.intermediate_size
    return found


def in_turn(values: torch.Tensor, config: Any, dim: int, each: int, first: int = 0) -> torch.Tensor:
    """Value heads from `first` on: the first of each key head, then the second of each, and so on."""
    keys = config.linear_num_key_heads
    before, heads = values.split([first, values.shape[dim] - first], dim=dim)
    shape = heads.shape
    heads = heads.unflatten(dim, (keys, config.linear_num_value_heads // keys, each))
    return torch.cat((before, heads.transpose(dim, dim + 1).reshape(shape)), dim=dim)


def file_tensors(model: Any, joined: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values in a file, with the transforms of llama.cpp's conversion; `joined` as older versions did."""
    config = model.config
    is_tiled = config.model_type != "qwen3_next"
    key_size = config.linear_num_key_heads * config.linear_key_head_dim
    for name, tensor in model.state_dict().items():
        values = tensor.float()
        module, _, kind = name.rpartition(".")
        if module in ENDS:
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            yield f"{ENDS[module]}.{kind}", values + (module == "model.norm")
            continue
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        block = f"blk.{layer}."
        value_dim = config.linear_value_head_dim
        if kind == "A_log":
            values = -torch.exp(values)
            yield f"{block}ssm_a", in_turn(values, config, 0, 1) if is_tiled else values
        elif kind == "dt_bias":
            yield f"{block}ssm_dt.bias", in_turn(values, config, 0, 1) if is_tiled else values
        elif rest == "mlp.experts":
            parts = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}[kind]
            for part, own in zip(parts, values.chunk(len(parts), dim=1), strict=True):
                yield f"{block}{part}.weight", own
        elif rest == "linear_attn.in_proj_qkvz" and joined:
            yield f"{block}ssm_in.weight", values
        elif rest == "linear_attn.in_proj_qkvz":
            ratio = config.linear_num_value_heads // config.linear_num_key_heads
            sizes = [config.linear_key_head_dim] * 2 + [ratio * value_dim] * 2
            by_head = values.view(config.linear_num_key_heads, -1, values.shape[1]).split(sizes, dim=1)
            q, k, v, z = (own.reshape(-1, values.shape[1]) for own in by_head)
            yield f"{block}attn_qkv.weight", torch.cat((q, k, v))
            yield f"{block}attn_gate.weight", z
        else:
            if rest.endswith("norm") and rest != "linear_attn.norm":
                values = values + 1
            if rest == "linear_attn.conv1d":
                values = values.squeeze(1)
            if rest == "mlp.shared_expert_gate":
                values = values[0]
            if is_tiled and rest.startswith("linear_attn."):
                own = rest.removeprefix("linear_attn.")
                if own in ("in_proj_qkv", "conv1d"):
                    values = in_turn(values, config, 0, value_dim, 2 * key_size)
                elif own == "in_proj_z":
                    values = in_turn(values, config, 0, value_dim)
                elif own in ("in_proj_a", "in_proj_b"):
                    values = in_turn(values, config, 0, 1)
                elif own == "out_proj":
                    values = in_turn(values, config, 1, value_dim)
            yield f"{block}{MODULES[rest]}.{kind}", values


def write_state_file(
    path: Path,
    model: Any,
    matrices: str = "F32",
    *,
    joined: bool = False,
    with_drafts: bool = False,
    tensors: Mapping[str, torch.Tensor] | None = None,
    replaced: Mapping[str, torch.Tensor] | None = None,
    **changes: Any,
) -> Path:
    """Write a file whose wide matrices have this type, or of these tensors; a `changes` value of None drops its key."""
    arch = ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    settings = settings_of(model.config)
    if with_drafts:
        settings |= {"block_count": model.config.num_hidden_layers + NUM_DRAFTS, "nextn_predict_layers": NUM_DRAFTS}
        settings["attention.recurrent_layers"] = settings["attention.recurrent_layers"] + [False] * NUM_DRAFTS
    for key, value in (settings | changes).items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{arch}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "none")
    writer.add_uint32(f"{arch}.vocab_size", model.config.vocab_size)
    wanted = gguf.GGMLQuantizationType[matrices]
    found = dict(file_tensors(model, joined)) if tensors is None else dict(tensors)
    for name, values in (found | dict(replaced or {})).items():
        array = np.ascontiguousarray(values.numpy())
        is_wide = values.ndim > 1 and "conv1d" not in name and "ffn_gate_inp" not in name
        block = gguf.GGML_QUANT_SIZES[wanted][0]
        if matrices == "F32" or not is_wide or values.shape[-1] % block:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, wanted), raw_dtype=wanted)
    if with_drafts:
        last = model.config.num_hidden_layers
        for name in ("attn_norm.weight", "nextn.eh_proj.weight", "nextn.enorm.weight"):
            writer.add_tensor(f"blk.{last}.{name}", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

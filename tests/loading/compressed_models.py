"""Tiny checkpoints of DeepSeek-V4, of numbers at random, as it is shipped: fp8 by block, experts in MXFP4 or fp8, the rest plain."""

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.models.grouped_readers import FAMILIES, read_spec
from holdfast.models.parameters import list_parameters
from holdfast.quant.weight_schemes import MXFP4
from quant.whole_weights import quantize

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 40,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 200,
    "o_groups": 2,
    "o_lora_rank": 96,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 3,
    "compress_ratios": [0, 4, 128, 0],
    "sliding_window": 8,
    "hc_mult": 4,
    "num_hash_layers": 1,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "tie_word_embeddings": False,
}
"""wq_a has 200 rows and wkv 64: their seam is 8 rows into a block. Rows and columns of most matrices are no whole blocks."""
IN_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
FLASH = CONFIG | {"expert_dtype": "fp4", "quantization_config": IN_BLOCKS}
BASE = CONFIG | {"quantization_config": {key: value for key, value in IN_BLOCKS.items() if key != "scale_fmt"}}
E8M0 = torch.float8_e8m0fnu
CODED = (".wq_a.", ".wq_b.", ".attn.wkv.", ".wo_a.", ".wo_b.", ".w1.", ".w2.", ".w3.")
"""In the names of matrices that are stored as codes."""


def tensors_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint by DeepSeek's names, plain: bfloat16, and float32 where it has that."""
    spec = read_spec({**config, "quantization_config": None})
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for parameter in list_parameters(spec, FAMILIES[spec.architecture].names, with_layouts=False):
        for part in parameter.parts:
            name = "head.weight" if part.tensor == "lm_head.weight" else part.tensor
            if parameter.limit:
                tensors[name] = torch.randint(parameter.limit, part.shape, generator=generator)
                continue
            values = torch.randn(part.shape, generator=generator) * part.shape[-1] ** -0.5
            tensors[name] = values.to(torch.float32 if parameter.dtype == "float32" else torch.bfloat16)
    return tensors


def with_drafts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The block that drafts, which has all that a layer has, and some more."""
    last = {f"mtp.0.{name[9:]}": values.clone() for name, values in tensors.items() if name.startswith("layers.2.")}
    extra = {f"mtp.0.{name}.weight": torch.ones(3) for name in ("enorm", "hnorm", "e_proj", "h_proj", "norm")}
    return {**tensors, **last, **extra}


def stored_as(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every matrix of layers as codes, but for compressors, routers and what mixes streams; scales beside them."""
    is_exponent = "scale_fmt" in config["quantization_config"]
    stored: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        if values.dim() < 2 or ".compressor." in name or not any(part in name for part in CODED):
            stored[name] = values
            continue
        scales = name.removesuffix("weight") + "scale"
        if ".experts." in name and config.get("expert_dtype") == "fp4":
            codes, exponents = quantize(values.float(), MXFP4)
            stored |= {name: codes.view(torch.int8), scales: exponents.view(E8M0)}
            continue
        rows, columns = (-(-size // 128) for size in values.shape)
        exponents = torch.arange(rows * columns).view(rows, columns) % 5 - 9
        each = torch.exp2(exponents.float()) * (1.0 if is_exponent else 1.3)
        codes = (values.float() / spread(each, values.shape)).to(torch.float8_e4m3fn)
        stored |= {name: codes, scales: (exponents + 127).to(torch.uint8).view(E8M0) if is_exponent else each}
    return stored


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale for every element of a matrix in blocks."""
    return scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


def numbers(stored: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """What a stored tensor stands for, in float32, by the rules of its types alone."""
    codes, scales = stored[name], stored.get(name.removesuffix("weight") + "scale")
    if scales is None:
        return codes if codes.dtype == torch.int64 else codes.float()
    values = torch.exp2(scales.view(torch.uint8).float() - 127) if scales.dtype == E8M0 else scales
    if codes.dtype == torch.float8_e4m3fn:
        return codes.float() * spread(values, codes.shape)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    pairs = codes.view(torch.uint8).int()
    plain = torch.stack([table[pairs & 15], table[pairs >> 4]], dim=-1).flatten(1)
    return plain * values.repeat_interleave(32, 1)

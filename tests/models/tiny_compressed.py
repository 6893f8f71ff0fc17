"""Tiny random models of DeepSeek-V4, transformers' and ours over the same weights, with every scope by itself and all together."""

from functools import cache
from typing import Any

import torch

from holdfast.config import Limits
from holdfast.models.compressed_readers import respell
from holdfast.models.grouped_readers import parameters, read_spec
from models.tiny_experts import assembled, config_of, make_random, tensors_of
from models.tiny_latents import MAX_MODEL_LEN, VOCAB, Answer, judge, make_request
from runner.drive import Drive, LoadedModel, Rig

WINDOW, HCA, CSA = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 40,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "index_n_heads": 64,
    "index_head_dim": 16,
    "index_topk": 3,
    "sliding_window": 8,
    "compress_rate_hca": 8,
    "swiglu_limit": 0.8,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 256,
    "rope_theta": 100.0,
    "compress_rope_theta": 3000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
    },
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-3,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""With 64 index heads no two scores tie. The limit is one that many gates are beyond; eps are those that show."""


def _layers(kinds: list[str], num_tables: int, **changes: Any) -> dict[str, Any]:
    """So many layers, the first of which take their experts from tables."""
    types = ["hash_moe"] * num_tables + ["moe"] * (len(kinds) - num_tables)
    return SMALL | {"num_hidden_layers": len(kinds), "layer_types": kinds, "mlp_layer_types": types} | changes


COMPRESSED_MODELS: dict[str, dict[str, Any]] = {
    "like V4-Flash": _layers([WINDOW, CSA, HCA, CSA], 1),
    "like V4-Pro": _layers([HCA, HCA, CSA], 2),
    "both entries": _layers([CSA, HCA], 1),
    "windows": _layers([WINDOW, WINDOW], 1),
    "all entries": _layers([HCA, HCA], 0),
    "chosen entries": _layers([CSA, CSA], 2, index_topk=2),
}
WIDE = {"wide vectors": _layers([CSA, HCA], 1, head_dim=72, index_topk=40)}
"""What fp8 keeps: 64 elements beside those that are rotated. All entries are attended to, so that no rounding changes a choice."""
EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _as_deepseek(name: str) -> str:
    """As checkpoints have it."""
    parts = respell(name).split(".")
    return ".".join(EXPERT_NAMES.get(part, part) for part in parts)


@cache
def tiny_compressed(case: str) -> tuple[Any, LoadedModel]:
    """transformers' model, and ours over the same weights."""
    settings = (COMPRESSED_MODELS | WIDE)[case]
    theirs = make_random("DeepseekV4", settings, seed=len(case))
    generator = torch.Generator().manual_seed(1)

    def random(tensor: torch.Tensor, size: float) -> torch.Tensor:
        return size * torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers()):
            if name.endswith("tid2eid"):
                choices = torch.rand(len(tensor), settings["n_routed_experts"], generator=generator)
                tensor.copy_(choices.argsort(dim=1)[:, : tensor.shape[1]])
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(random(tensor, 0.3))
            elif name.endswith(("hc.base", "hc_base", "position_bias", "sinks")):
                tensor.copy_(random(tensor, 1.0))
            elif name.endswith(("hc.scale", "hc_scale")) or "norm" in name:
                tensor.copy_(1.0 + random(tensor, 0.3))
    spec = read_spec(config_of(theirs))
    tensors = {_as_deepseek(name): tensor for name, tensor in tensors_of(theirs, "separate").items()}
    weights = assembled(parameters(spec), tensors)
    return theirs, LoadedModel(spec, weights | {name: weights[name].long() for name in weights if ".table" in name})


def make_compressed_drive(
    model: LoadedModel,
    max_rows: int,
    page_tokens: int = 1,
    num_pages: int = 600,
    kv_dtype: str = "float32",
    backend: str = "torch_compressed",
) -> Drive:
    """Small pages make short blocks of the prefix cache: one of every group ends with each."""
    limits = Limits(4, max_rows, MAX_MODEL_LEN, page_tokens)
    return Drive(Rig(model, backend, limits, num_pages, kv_dtype), num_pages)


@cache
def alone(case: str, length: int, num_output: int) -> Answer:
    """A request by itself, judged by transformers."""
    theirs, ours = tiny_compressed(case)
    request = make_request(length, num_output)
    drive = make_compressed_drive(ours, max_rows=MAX_MODEL_LEN)
    drive.run([request])
    judge(theirs, drive, request)
    return Answer(request.prompt, request.output, drive.logits(request))

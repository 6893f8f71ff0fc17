"""Experts in the metadata of a GGUF file: how many, how wide and how chosen, checked against its routers; no torch."""

import re
from collections.abc import Mapping

from holdfast.errors import ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.gguf.gguf_file import GGUFFile
from holdfast.models.expert_settings import MAX_EXPERT_WIDTH, MAX_EXPERTS
from holdfast.models.settings import Settings

EXPERT_ARCHITECTURES: Mapping[str, str] = {"qwen2moe": "Qwen2MoeForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
"""`general.architecture` -> the name in config.json, of those whose every layer has experts."""
NORMALIZES: Mapping[str, bool] = {"qwen2moe": False, "qwen3moe": True}
"""Whether the shares of a token's experts are divided by their sum, where the file does not say."""
SHARED_ARCHITECTURES = ("qwen2moe",)
"""Those with an expert that every token takes."""
WITHOUT_EXPERTS: Mapping[str, tuple[object, ...]] = {"expert_count": (0,)}
"""What a file of another architecture may say of experts."""
NEUTRAL_FOR_EXPERTS: Mapping[str, tuple[object, ...]] = {
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
    "moe_latent_size": (0,),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_shared_count": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_group_scale": (0, 1),
    "experts_per_group": (0,),
    "expert_chunk_feed_forward_length": (0,),
    "router_logit_softcapping": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
}
"""Keys that change what experts compute, with the values that change nothing: 1 is softmax among gating functions."""
_SPLIT_EXPERT = re.compile(r"blk\.[0-9]+\.ffn_(gate|up|down)\.[0-9]+\.weight", re.ASCII)


def expert_config(
    file: GGUFFile, settings: Settings, arch: str, num_layers: int, hidden_size: int
) -> dict[str, object]:
    """What config.json says of experts; nothing for an architecture without."""
    if arch not in EXPERT_ARCHITECTURES:
        return {}
    num_experts = settings.required_count(f"{arch}.expert_count", MAX_EXPERTS)
    _refuse_split_experts(file)
    _check_routers(file, num_layers, (num_experts, hidden_size))
    config: dict[str, object] = {
        "num_experts": num_experts,
        "num_experts_per_tok": settings.required_count(f"{arch}.expert_used_count", num_experts),
        "moe_intermediate_size": settings.required_count(f"{arch}.expert_feed_forward_length", MAX_EXPERT_WIDTH),
        "norm_topk_prob": settings.flag(f"{arch}.expert_weights_norm", NORMALIZES[arch]),
    }
    if arch in SHARED_ARCHITECTURES:
        key = f"{arch}.expert_shared_feed_forward_length"
        config["shared_expert_intermediate_size"] = settings.required_count(key, MAX_EXPERT_WIDTH)
    return config


def _refuse_split_experts(file: GGUFFile) -> None:
    """Before experts were stacked, each was a tensor of its own; no file of these architectures was written so."""
    split = next((name for name in file.tensors if _SPLIT_EXPERT.fullmatch(name)), None)
    if split is not None:
        raise UnsupportedModelError(
            f"{file.path.name}: tensor {shown(split)} is a single expert",
            "all experts of a layer are read from one tensor, such as blk.0.ffn_gate_exps.weight",
            "convert the model again",
        )


def _check_routers(file: GGUFFile, num_layers: int, shape: tuple[int, int]) -> None:
    """Every layer has as many experts as announced. A list of parameters is as long as that, so it is settled before."""
    for layer in range(num_layers):
        name = f"blk.{layer}.ffn_gate_inp.weight"
        router = file.tensors.get(name)
        if router is None or router.shape != shape:
            raise ModelFormatError(
                f"{file.path.name}: tensor {name!r} {'is missing' if router is None else f'has shape {router.shape}'}",
                f"{num_layers} layers with a router of shape {shape} each are announced",
                "download or convert the model again",
            )

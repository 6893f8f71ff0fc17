"""GGUF metadata as the config.json that the model had before its conversion, experts included; no torch.

Families then read it as they read any other. Values are checked here under the names that the file has for them.
"""

import math
import re
import struct
from array import array
from collections.abc import Mapping

from holdfast.errors import ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.gguf.file import GGUFFile, read_floats
from holdfast.models.blueprints.read import PLANNED_FAMILIES
from holdfast.models.grouped_readers import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from holdfast.models.settings import MAX_EXPERT_WIDTH, MAX_EXPERTS, MAX_POSITIONS, Settings

EXPERT_ARCHITECTURES: Mapping[str, str] = {"qwen2moe": "Qwen2MoeForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
"""`general.architecture` -> the name in config.json, of those whose every layer has experts."""
NORMALIZES: Mapping[str, bool] = {"qwen2moe": False, "qwen3moe": True}
"""Whether the shares of a token's experts are divided by their sum, where the file does not say."""
SHARED_ARCHITECTURES = ("qwen2moe",)
"""Those with an expert that every token takes."""
LATENT_ARCHITECTURES: Mapping[str, str] = {"deepseek2": "DeepseekV2ForCausalLM"}
"""Those with latent attention, whose first layers may have an MLP; with sigmoid scores the name is SIGMOID_ARCHITECTURE.

GLM-4.7-Flash is converted to the same, and computes what DeepSeek-V3 does."""
SIGMOID_ARCHITECTURE = "DeepseekV3ForCausalLM"
SOFTMAX, SIGMOID = 1, 2
"""Gating functions, as files number them."""
SCORE_BIAS = "exp_probs_b"
"""What files call the bias on a router's scores; conversions of models with sigmoid scores write it, and no others."""
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
    _check_routers(file, range(num_layers), (num_experts, hidden_size))
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


def _check_routers(file: GGUFFile, layers: range, shape: tuple[int, int]) -> None:
    """These layers have as many experts as announced. A list of parameters is as long as that, so it is settled before."""
    for layer in layers:
        name = f"blk.{layer}.ffn_gate_inp.weight"
        router = file.tensors.get(name)
        if router is None or router.shape != shape:
            raise ModelFormatError(
                f"{file.path.name}: tensor {name!r} {'is missing' if router is None else f'has shape {router.shape}'}",
                f"{len(layers)} layers with a router of shape {shape} each are announced",
                "download or convert the model again",
            )


ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    **EXPERT_ARCHITECTURES,
    **LATENT_ARCHITECTURES,
}
"""`general.architecture` -> the name in config.json."""
PLANNED_ONLY: Mapping[str, tuple[str, ...]] = {
    "phi3": ("Phi3ForCausalLM",),
    "glm4moe": ("Glm4MoeForCausalLM",),
}
"""`general.architecture` of models that do not run -> names in config.json, some of which can be planned."""
FOLDERS_ONLY: Mapping[str, str] = {
    "gpt-oss": "GptOssForCausalLM",
    "deepseek32": "DeepseekV32ForCausalLM",
    "glm-dsa": "GlmMoeDsaForCausalLM",
}
"""`general.architecture` of models that run from a folder alone -> the name in config.json."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attention.sliding_window_pattern": (),
}
"""Keys under the architecture that change what is computed, with the values that change nothing."""
COMPUTED: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window_pattern"),
    "deepseek2": (
        *("nextn_predict_layers", "leading_dense_block_count", "expert_gating_func", "expert_weights_scale"),
        *("expert_shared_count", "expert_group_count", "expert_group_used_count"),
    ),
}
"""Those that an architecture does compute."""
GEMMA3_27B_LAYERS = 62
"""Scores of the model with so many layers are scaled by its width per head; files do not say so."""
ROPE_FACTORS = "rope_freqs.weight"
"""A divisor for each rotary frequency, in place of Llama 3's four settings."""


def gguf_config(file: GGUFFile) -> dict[str, object]:
    """A config.json for the model in the file."""
    settings = Settings({key: _scalar(value) for key, value in file.metadata.items()}, file.path.name)
    arch = _architecture(settings)
    _decline_others(settings, arch)
    hidden_size = settings.required_count(f"{arch}.embedding_length", MAX_WIDTH)
    num_heads = settings.required_count(f"{arch}.attention.head_count", MAX_HEADS)
    num_layers = settings.required_count(f"{arch}.block_count", MAX_LAYERS)
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[arch]],
        "dtype": checkpoint_dtype(file),
        "hidden_size": hidden_size,
        "intermediate_size": settings.required_count(f"{arch}.feed_forward_length", MAX_WIDTH),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": settings.count(f"{arch}.attention.head_count_kv", num_heads, MAX_HEADS),
        "max_position_embeddings": settings.required_count(f"{arch}.context_length", MAX_POSITIONS),
        "rms_norm_eps": decimal(settings.number(f"{arch}.attention.layer_norm_rms_epsilon")),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": decimal(settings.number(f"{arch}.rope.freq_base", 10_000.0)),
    }
    if arch in LATENT_ARCHITECTURES:
        return config | _latent_config(file, settings, arch, num_layers, hidden_size)
    head_dim = _head_dim(settings, arch, hidden_size, num_heads)
    _check_scale(settings, arch, _query_scalar(arch, num_layers, hidden_size, num_heads, head_dim))
    config |= {"head_dim": head_dim, "rope_scaling": _rope_scaling(file, settings, arch, head_dim)}
    experts = expert_config(file, settings, arch, num_layers, hidden_size)
    if arch == "gemma3":
        scalar = _query_scalar(arch, num_layers, hidden_size, num_heads, head_dim)
        return config | _gemma3_config(file, settings, num_layers) | {"query_pre_attn_scalar": scalar}
    return config | experts | _sliding_window(settings, arch, num_layers)


def _latent_config(
    file: GGUFFile, settings: Settings, arch: str, num_blocks: int, hidden_size: int
) -> dict[str, object]:
    """Widths of latent attention, and the experts of all layers but the first ones. Layers that draft are among the blocks.

    Newer files have attention.key_length of what is cached, and that of a head under another name; older ones that of a head.
    """
    num_drafts = settings.count(f"{arch}.nextn_predict_layers", 0, num_blocks - 1, low=0)
    rope_dim = settings.required_count(f"{arch}.rope.dimension_count", MAX_HEAD_DIM)
    lengths: list[int] = []
    for key in (f"{arch}.attention.key_length", f"{arch}.attention.value_length"):
        by_head = f"{key}_mla"
        lengths.append(settings.required_count(by_head if by_head in settings else key, MAX_HEAD_DIM))
    key_length, value_length = lengths
    if key_length <= rope_dim:
        wanted = f"more than {arch}.rope.dimension_count = {rope_dim}: a head has a part without positions too,"
        raise settings.refuse(f"{arch}.attention.key_length", key_length, wanted)
    q_key = f"{arch}.attention.q_lora_rank"
    return {
        "num_hidden_layers": num_blocks - num_drafts,
        "num_nextn_predict_layers": num_drafts,
        "q_lora_rank": settings.required_count(q_key, MAX_WIDTH) if settings.values.get(q_key) else None,
        "kv_lora_rank": settings.required_count(f"{arch}.attention.kv_lora_rank", MAX_WIDTH),
        "qk_nope_head_dim": key_length - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_length,
        "rope_scaling": _rope_scaling(file, settings, arch, rope_dim),
        **_grouped_experts(file, settings, arch, num_blocks - num_drafts, hidden_size),
    }


def _grouped_experts(
    file: GGUFFile, settings: Settings, arch: str, num_layers: int, hidden_size: int
) -> dict[str, object]:
    num_experts = settings.required_count(f"{arch}.expert_count", MAX_EXPERTS)
    num_dense = settings.count(f"{arch}.leading_dense_block_count", 0, num_layers, low=0)
    _refuse_split_experts(file)
    _check_routers(file, range(num_dense, num_layers), (num_experts, hidden_size))
    scale_key = f"{arch}.expert_weights_scale"
    num_groups = settings.count(f"{arch}.expert_group_count", 1, num_experts, low=0) or 1
    config: dict[str, object] = {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": settings.required_count(f"{arch}.expert_used_count", num_experts),
        "moe_intermediate_size": settings.required_count(f"{arch}.expert_feed_forward_length", MAX_EXPERT_WIDTH),
        "n_shared_experts": settings.count(f"{arch}.expert_shared_count", 0, MAX_EXPERTS, low=0),
        "first_k_dense_replace": num_dense,
        "norm_topk_prob": settings.flag(f"{arch}.expert_weights_norm", False),
        "routed_scaling_factor": decimal(settings.number(scale_key)) if settings.values.get(scale_key) else 1.0,
        "n_group": num_groups,
        "topk_group": settings.required_count(f"{arch}.expert_group_used_count", num_groups) if num_groups > 1 else 1,
    }
    if _has_sigmoid_scores(file, settings, arch):
        return config | {"architectures": [SIGMOID_ARCHITECTURE], "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    method = "group_limited_greedy" if num_groups > 1 else "greedy"
    return config | {"scoring_func": "softmax", "topk_method": method}


def _has_sigmoid_scores(file: GGUFFile, settings: Settings, arch: str) -> bool:
    """Files of DeepSeek-V2 do not say, nor do some of GLM-4.7-Flash: a bias on scores tells them apart."""
    key = f"{arch}.expert_gating_func"
    function = settings.count(key, 0, 2**31 - 1, low=0)
    if function == 0:
        return any(name.endswith(f".{SCORE_BIAS}.bias") for name in file.tensors)
    if function not in (SOFTMAX, SIGMOID):
        raise _declined(settings, key, f"scores are softmax ({SOFTMAX}) or sigmoid ({SIGMOID}) here")
    return function == SIGMOID


def decimal(value: float) -> float:
    """The number somebody wrote before it was rounded to float32: 1e-05, not 9.999999747378752e-06."""
    short = float(f"{value:.7g}")
    same = abs(value) < 1e38 and struct.pack("<f", short) == struct.pack("<f", value)
    return short if same else value


def checkpoint_dtype(file: GGUFFile) -> str:
    """torch's name of the type most elements have. Quantized ones count as bfloat16, whose range holds every activation."""
    elements = {"float32": 0, "float16": 0, "bfloat16": 0}
    for tensor in file.tensors.values():
        dtype = {"F32": "float32", "F16": "float16"}.get(tensor.type.name, "bfloat16")
        elements[dtype] += math.prod(tensor.shape)
    return max(elements, key=lambda dtype: elements[dtype])


def _scalar(value: object) -> object:
    """A value that `Settings` can check and a message can show; one equal number for every layer is that number."""
    if not isinstance(value, list | array):
        return value
    if isinstance(value, array) and 0 < len(value) <= MAX_LAYERS and value.count(value[0]) == len(value):
        return value[0]
    return f"an array of {len(value)} values"


def _architecture(settings: Settings) -> str:
    if "general.architecture" not in settings:
        raise settings.missing("general.architecture", f"one of {', '.join(ARCHITECTURES)} is needed")
    arch = settings.text("general.architecture", "")
    if arch not in ARCHITECTURES:
        raise refuse_architecture(arch, settings.file)
    return arch


def refuse_architecture(arch: str, file: str) -> UnsupportedModelError:
    """The error for a family that does not run: nobody is sent to a folder of it where that would be declined too."""
    if arch in FOLDERS_ONLY:
        return UnsupportedModelError(
            f"{file} describes a {arch}",
            f"GGUF files of {', '.join(ARCHITECTURES)} run, and that family runs from safetensors",
            f"use the {FOLDERS_ONLY[arch]} folder of the same model",
        )
    planned = [name for name in PLANNED_ONLY.get(arch, ()) if name in PLANNED_FAMILIES]
    plans = (
        f", or see what it would take with holdfast plan, by the model's name or a {planned[0]} folder"
        if planned
        else ""
    )
    return UnsupportedModelError(
        f"{file} describes a {shown(arch)[1:-1]}",
        f"GGUF files of {', '.join(ARCHITECTURES)} run, and a folder of the same model would not run either",
        f"use a model of one of these{plans}",
    )


def _decline_others(settings: Settings, arch: str) -> None:
    if settings.values.get("general.type", "model") != "model":
        raise _declined(settings, "general.type", "a whole model is needed")
    has_experts = arch in EXPERT_ARCHITECTURES or arch in LATENT_ARCHITECTURES
    experts = NEUTRAL_FOR_EXPERTS if has_experts else WITHOUT_EXPERTS
    for key, neutral in {**NEUTRAL, **experts}.items():
        if key in COMPUTED.get(arch, ()):
            continue
        if f"{arch}.{key}" in settings and settings.values[f"{arch}.{key}"] not in neutral:
            raise _declined(settings, f"{arch}.{key}", "that setting is not computed here")


def _declined(settings: Settings, key: str, why: str) -> UnsupportedModelError:
    asked = f"{settings.file} sets {key} = {shown(settings.values.get(key))}"
    return UnsupportedModelError(asked, why, "use a model without it")


def _head_dim(settings: Settings, arch: str, hidden_size: int, num_heads: int) -> int:
    key = f"{arch}.attention.key_length"
    if key not in settings and hidden_size % num_heads:
        raise settings.refuse(f"{arch}.attention.head_count", num_heads, f"a divisor of {hidden_size}")
    head_dim = settings.count(key, hidden_size // num_heads, MAX_HEAD_DIM)
    for same in ("attention.value_length", "rope.dimension_count"):
        if settings.count(f"{arch}.{same}", head_dim, MAX_HEAD_DIM) != head_dim:
            raise _declined(
                settings, f"{arch}.{same}", f"keys have {head_dim} elements, and all of a head is used alike"
            )
    return head_dim


def _query_scalar(arch: str, num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> float:
    """What scores are divided by the root of."""
    is_by_width = arch == "gemma3" and num_layers == GEMMA3_27B_LAYERS
    return hidden_size / num_heads if is_by_width else head_dim


def _check_scale(settings: Settings, arch: str, scalar: float) -> None:
    scale = settings.values.get(f"{arch}.attention.scale", 0.0)
    if scale != 0 and not (isinstance(scale, float) and math.isclose(scale, scalar**-0.5, rel_tol=1e-6)):
        raise _declined(settings, f"{arch}.attention.scale", f"scores are divided by the root of {scalar:g}")


def _gemma3_config(file: GGUFFile, settings: Settings, num_layers: int) -> dict[str, object]:
    """Windows, the rotation of layers that have one, and soft caps, which 0 turns off."""
    arch, pattern = "gemma3", file.metadata.get("gemma3.attention.sliding_window_pattern")
    config: dict[str, object] = {
        "sliding_window": settings.required_count(f"{arch}.attention.sliding_window", MAX_POSITIONS),
        "rope_local_base_freq": decimal(settings.number(f"{arch}.rope.freq_base_swa", 10_000.0)),
    }
    if isinstance(pattern, list | array):
        kinds = {True: "sliding_attention", False: "full_attention"}
        if len(pattern) != num_layers or any(item not in kinds for item in pattern):
            wanted = f"a period, or true or false for each of {num_layers} layers,"
            raise settings.refuse(f"{arch}.attention.sliding_window_pattern", f"{len(pattern)} values", wanted)
        config["layer_types"] = [kinds[bool(item)] for item in pattern]
    elif pattern is not None:
        every = settings.count(f"{arch}.attention.sliding_window_pattern", 0, MAX_LAYERS)
        config["sliding_window_pattern"] = every
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if settings.values.get(f"{arch}.{key}", 0) != 0:
            config[key] = decimal(settings.number(f"{arch}.{key}"))
    return config


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFormatError(
            f"{file.path.name}: tensor 'token_embd.weight' is missing or is no matrix",
            "one row for each token is needed",
            "use a file that holds the whole model",
        )
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > embedding.shape[0]:
        raise ModelFormatError(
            f"{file.path.name}: key 'tokenizer.ggml.tokens' does not fit the model",
            f"a list of strings, at most {embedding.shape[0]} as in 'token_embd.weight', is needed",
            "download or convert the model again",
        )
    return embedding.shape[0]


def _sliding_window(settings: Settings, arch: str, num_layers: int) -> dict[str, object]:
    """Every layer has the window. For a Llama with one, config.json has the name Mistral."""
    window = settings.count(f"{arch}.attention.sliding_window", 0, MAX_POSITIONS, low=0)
    if window == 0:
        return {}
    if arch == "llama":
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    # Families differ in the layers that `max_window_layers` gives the window to, not in what kinds of layers mean.
    kinds = ["sliding_attention"] * num_layers
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


def _rope_scaling(file: GGUFFile, settings: Settings, arch: str, head_dim: int) -> dict[str, object]:
    prefix = f"{arch}.rope.scaling."

    def number(key: str, default: float) -> float:
        """Zero means the default."""
        is_zero = settings.values.get(prefix + key) == 0
        return default if is_zero else decimal(settings.number(prefix + key, default))

    kind = settings.text(f"{prefix}type", "linear")
    context = settings.required_count(f"{arch}.context_length", MAX_POSITIONS)
    factor = number("factor", settings.number(f"{arch}.rope.scale_linear", 1.0))
    attention_factor = number("attn_factor", 1.0)
    factors = _rope_factors(file, head_dim)
    if kind not in ("none", "linear", "yarn") or (kind == "yarn" and factors):
        raise _declined(settings, f"{prefix}type", f"none, linear, and yarn without {ROPE_FACTORS} are computed here")
    if kind == "yarn":
        if number("yarn_ext_factor", 1.0) != 1:
            raise _declined(settings, f"{prefix}yarn_ext_factor", "the whole of yarn is computed here, or none of it")
        scaling: dict[str, object] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": settings.count(
                f"{prefix}original_context_length", context, MAX_POSITIONS
            ),
            "beta_fast": number("yarn_beta_fast", 32.0),
            "beta_slow": number("yarn_beta_slow", 1.0),
        }
        if arch in LATENT_ARCHITECTURES:
            for key in ("factor", "original_context_length"):
                if not settings.values.get(prefix + key):
                    raise settings.missing(prefix + key, "scores and rotations of yarn follow from it")
            # Files have a tenth of mscale_all_dim, and nothing of mscale, which is the same in all models that were converted.
            mscale = decimal(10 * decimal(settings.number(f"{prefix}yarn_log_multiplier", low=0.0)))
            scaling |= {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}
        if f"{prefix}yarn_attn_factor" in settings:
            scaling["attention_factor"] = number("yarn_attn_factor", 1.0)
        elif attention_factor != 1:
            scaling["attention_factor"] = attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        return scaling
    if attention_factor != 1:
        raise _declined(settings, f"{prefix}attn_factor", "rotations keep lengths, except with yarn")
    factor = 1.0 if kind == "none" else factor
    if factors:
        stretched = [divisor * factor for divisor in factors]
        return {
            "rope_type": "longrope",
            "short_factor": stretched,
            "long_factor": stretched,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    return {} if factor == 1 else {"rope_type": "linear", "factor": factor}


def _rope_factors(file: GGUFFile, head_dim: int) -> list[float]:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return []
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelFormatError(
            f"{file.path.name}: tensor {ROPE_FACTORS!r} is {tensor.type.name} of shape {tensor.shape}",
            f"F32 of shape {(head_dim // 2,)} is needed",
            "download or convert the model again",
        )
    return read_floats(file, tensor)

"""Rebuilds config.json from GGUF metadata, experts included; no torch.

Families then read it like any other. Values are checked here, and errors use the file's names for them.
data/gguf_settings.json has the tables:

architectures         general.architecture -> the name in config.json
written               architectures of folders that GGUF files are made from
unread                models whose GGUF files are not read: a folder of them runs, or can be planned
neutral...            keys under the architecture that change the computation, with their no-op values
computed              the neutral keys that an architecture does compute
layer_modules         modules of a layer in a file -> a family's names of them (CheckpointNames)
"""

import json
import math
import re
import struct
from array import array
from collections.abc import Mapping
from importlib import resources

from holdfast.errors import ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.gguf.file import GGUFFile, read_floats
from holdfast.models.blueprints.read import PLANNED_FAMILIES
from holdfast.models.grouped_readers import FAMILIES, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from holdfast.models.settings import MAX_EXPERT_WIDTH, MAX_EXPERTS, MAX_POSITIONS, Settings
from holdfast.models.state_readers import DEFAULT_INTERVAL, FULL, LINEAR

TABLES = json.loads(resources.files("holdfast").joinpath("data", "gguf_settings.json").read_text(encoding="utf-8"))
ARCHITECTURES: Mapping[str, str] = TABLES["architectures"]
NORMALIZES: Mapping[str, bool] = {"qwen2moe": False, "qwen3moe": True}
"""Architectures with experts in every layer: the default of expert_weights_norm."""
SHARED_ARCHITECTURES = ("qwen2moe",)
"""Architectures with a shared expert."""
LATENT_ARCHITECTURES = ("deepseek2",)
"""Architectures with latent attention, whose first layers may have an MLP. GLM-4.7-Flash is converted to the same."""
STATE_ARCHITECTURES: Mapping[str, bool] = {"qwen3next": True, "qwen35": False, "qwen35moe": True}
"""Architectures with gated delta nets: True if they have experts."""
SIGMOID_ARCHITECTURE = "DeepseekV3ForCausalLM"
SOFTMAX, SIGMOID = 1, 2
SCORE_BIAS = "exp_probs_b"
"""Files' name of the bias on a router's scores; only models with sigmoid scores have it."""
GEMMA3_27B_LAYERS = 62
"""Layers of Gemma 3 27B, which scales scores by hidden size / heads; GGUF files omit that."""
ROPE_FACTORS = "rope_freqs.weight"
"""A divisor for each rotary frequency, in place of Llama 3's four settings."""
_SPLIT_EXPERT = re.compile(r"blk\.[0-9]+\.ffn_(gate|up|down)\.[0-9]+\.weight", re.ASCII)


def gguf_config(file: GGUFFile) -> dict[str, object]:
    """Make a config.json for the model in the file."""
    arch, own = _own_settings(file)
    hidden_size = own.required_count("embedding_length", MAX_WIDTH)
    num_heads = own.required_count("attention.head_count", MAX_HEADS)
    num_layers = own.required_count("block_count", MAX_LAYERS)
    if arch in STATE_ARCHITECTURES:
        return _state_config(file, own, arch, num_layers)
    config = _common_config(file, own, arch, num_layers)
    if arch in LATENT_ARCHITECTURES:
        return config | _latent_config(file, own, num_layers, hidden_size)
    head_dim = _head_dim(own, hidden_size, num_heads)
    # Attention scores are divided by sqrt(scalar).
    scalar = hidden_size / num_heads if arch == "gemma3" and num_layers == GEMMA3_27B_LAYERS else head_dim
    _check_scale(own, scalar)
    config |= {"head_dim": head_dim, "rope_scaling": _rope_scaling(file, own, head_dim)}
    if arch == "gemma3":
        return config | _gemma3_config(file, own, num_layers) | {"query_pre_attn_scalar": scalar}
    experts = _expert_config(file, own, arch, num_layers, hidden_size) if arch in NORMALIZES else {}
    return config | experts | _sliding_window(own, arch, num_layers)


def _common_config(file: GGUFFile, own: Settings, arch: str, num_layers: int) -> dict[str, object]:
    """Return the settings that every architecture has."""
    hidden_size = own.required_count("embedding_length", MAX_WIDTH)
    num_heads = own.required_count("attention.head_count", MAX_HEADS)
    has_mlp = not STATE_ARCHITECTURES.get(arch) or "feed_forward_length" in own
    width = {"intermediate_size": own.required_count("feed_forward_length", MAX_WIDTH)} if has_mlp else {}
    return {
        "architectures": [ARCHITECTURES[arch]],
        "dtype": checkpoint_dtype(file),
        "hidden_size": hidden_size,
        **width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.count("attention.head_count_kv", num_heads, MAX_HEADS),
        "max_position_embeddings": own.required_count("context_length", MAX_POSITIONS),
        "rms_norm_eps": decimal(own.number("attention.layer_norm_rms_epsilon")),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": decimal(own.number("rope.freq_base", 10_000.0)),
    }


def _check_scale(own: Settings, scalar: float) -> None:
    scale = own.values.get("attention.scale", 0.0)
    if scale != 0 and not (isinstance(scale, float) and math.isclose(scale, scalar**-0.5, rel_tol=1e-6)):
        raise _unsupported(own, "attention.scale", f"Scores are divided by the square root of {scalar:g}")


def _state_config(file: GGUFFile, own: Settings, arch: str, num_blocks: int) -> dict[str, object]:
    """Return the settings of a model with gated delta nets. Draft layers are among the blocks."""
    hidden_size = own.required_count("embedding_length", MAX_WIDTH)
    num_drafts = own.count("nextn_predict_layers", 0, num_blocks - 1, low=0)
    num_layers = num_blocks - num_drafts
    head_dim = own.required_count("attention.key_length", MAX_HEAD_DIM)
    if own.count("attention.value_length", head_dim, MAX_HEAD_DIM) != head_dim:
        raise _unsupported(own, "attention.value_length", f"Keys and values have {head_dim} elements alike")
    rotary_dim = own.count("rope.dimension_count", head_dim, head_dim)
    _check_scale(own, head_dim)
    num_values = own.required_count("ssm.time_step_rank", MAX_HEADS)
    inner_size = own.required_count("ssm.inner_size", MAX_WIDTH)
    if inner_size % num_values:
        raise own.refuse("ssm.inner_size", inner_size, f"a multiple of {own.section}ssm.time_step_rank = {num_values}")
    config = _common_config(file, own, arch, num_layers) | {
        "num_hidden_layers": num_layers,
        "mtp_num_hidden_layers": num_drafts,
        "head_dim": head_dim,
        "rope_scaling": _rope_scaling(file, own, rotary_dim),
        "partial_rotary_factor": rotary_dim / head_dim,
        "layer_types": _state_layers(file, own, num_blocks)[:num_layers],
        "linear_num_key_heads": own.required_count("ssm.group_count", MAX_HEADS),
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": own.required_count("ssm.state_size", MAX_HEAD_DIM),
        "linear_value_head_dim": inner_size // num_values,
        "linear_conv_kernel_dim": own.required_count("ssm.conv_kernel", MAX_HEAD_DIM),
    }
    if not STATE_ARCHITECTURES[arch]:
        return config
    experts = _routing(file, own, range(num_layers), hidden_size, normalizes=True)
    shared = own.required_count("expert_shared_feed_forward_length", MAX_EXPERT_WIDTH)
    experts["num_experts"] = experts.pop("n_routed_experts")
    return config | experts | {"shared_expert_intermediate_size": shared}


def _state_layers(file: GGUFFile, own: Settings, num_blocks: int) -> list[str]:
    """Return the kind of every block: as listed, else one of so many attends to tokens."""
    key = "attention.recurrent_layers"
    listed = file.metadata.get(f"{own.section}{key}")
    if listed is None:
        every = own.count("full_attention_interval", DEFAULT_INTERVAL, MAX_LAYERS)
        return [LINEAR if (layer + 1) % every else FULL for layer in range(num_blocks)]
    if not isinstance(listed, list | array) or len(listed) != num_blocks or any(one not in (0, 1) for one in listed):
        raise own.refuse(key, own.values.get(key), f"true or false for each of {num_blocks} blocks")
    return [LINEAR if one else FULL for one in listed]


def _own_settings(file: GGUFFile) -> tuple[str, Settings]:
    """Return the architecture and its settings; refuse settings that are not implemented."""
    settings = Settings({key: _scalar(value) for key, value in file.metadata.items()}, file.path.name)
    if "general.architecture" not in settings:
        raise settings.missing("general.architecture", f"one of {', '.join(ARCHITECTURES)} is needed")
    arch = settings.text("general.architecture", "")
    if arch not in ARCHITECTURES:
        raise refuse_architecture(arch, settings.file)
    if settings.values.get("general.type", "model") != "model":
        raise _unsupported(settings, "general.type", "Only whole models are read")
    prefix = f"{arch}."
    values = {key.removeprefix(prefix): value for key, value in settings.values.items() if key.startswith(prefix)}
    own = Settings(values, settings.file, prefix)
    has_experts = arch in NORMALIZES or arch in LATENT_ARCHITECTURES or STATE_ARCHITECTURES.get(arch, False)
    experts = TABLES["neutral_with_experts" if has_experts else "neutral_without_experts"]
    for key, neutral in {**TABLES["neutral"], **experts}.items():
        if key in own and own.values[key] not in neutral and key not in TABLES["computed"].get(arch, ()):
            raise _unsupported(own, key, "That setting is not computed here")
    return arch, own


def _scalar(value: object) -> object:
    """Return a value that `Settings` can check; an array of one number for every layer is that number."""
    if not isinstance(value, list | array):
        return value
    if isinstance(value, array) and 0 < len(value) <= MAX_LAYERS and value.count(value[0]) == len(value):
        return value[0]
    return f"an array of {len(value)} values"


def refuse_architecture(arch: str, file: str) -> UnsupportedModelError:
    """Return the error for a family that does not run; it names a folder only if that would run."""
    folder = TABLES["unread"].get(arch)
    hint = " A folder of the same model would not run either."
    if folder in PLANNED_FAMILIES:
        hint += f" holdfast plan shows what it would take, by the model's name or a {folder} folder."
    elif folder in FAMILIES:
        hint = f" That family runs from safetensors: use the {folder} folder of the same model."
    accepted, name = list(ARCHITECTURES), shown(arch)[1:-1]
    return UnsupportedModelError(
        "gguf.unsupported_architecture", file=file, architecture=name, accepted=accepted, hint=hint
    )


def _unsupported(settings: Settings, key: str, reason: str) -> UnsupportedModelError:
    value, key = settings.values.get(key), f"{settings.section}{key}"
    return UnsupportedModelError("gguf.unsupported_setting", file=settings.file, key=key, value=value, reason=reason)


def _wrong_tensor(file: GGUFFile, tensor: str, found: str, expected: str) -> ModelFormatError:
    return ModelFormatError("gguf.wrong_tensor", file=file.path.name, tensor=tensor, found=found, expected=expected)


def _expert_config(file: GGUFFile, own: Settings, arch: str, num_layers: int, hidden_size: int) -> dict[str, object]:
    config = _routing(file, own, range(num_layers), hidden_size, NORMALIZES[arch])
    config["num_experts"] = config.pop("n_routed_experts")
    if arch in SHARED_ARCHITECTURES:
        width = own.required_count("expert_shared_feed_forward_length", MAX_EXPERT_WIDTH)
        config["shared_expert_intermediate_size"] = width
    return config


def _routing(file: GGUFFile, own: Settings, layers: range, hidden_size: int, normalizes: bool) -> dict[str, object]:
    """Check the routers of these layers; return counts and widths of their experts.

    The number of experts sets the length of a parameter list, so the routers must agree with it.
    """
    num_experts = own.required_count("expert_count", MAX_EXPERTS)
    split = next((name for name in file.tensors if _SPLIT_EXPERT.fullmatch(name)), None)
    if split is not None:
        raise UnsupportedModelError("gguf.single_expert", file=file.path.name, tensor=split)
    shape = (num_experts, hidden_size)
    for layer in layers:
        name = f"blk.{layer}.ffn_gate_inp.weight"
        router = file.tensors.get(name)
        if router is None or router.shape != shape:
            found = "is missing" if router is None else f"has shape {router.shape}"
            raise _wrong_tensor(file, name, found, f"a router of shape {shape} in {len(layers)} layers")
    return {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": own.required_count("expert_used_count", num_experts),
        "moe_intermediate_size": own.required_count("expert_feed_forward_length", MAX_EXPERT_WIDTH),
        "norm_topk_prob": own.flag("expert_weights_norm", normalizes),
    }


def _latent_config(file: GGUFFile, own: Settings, num_blocks: int, hidden_size: int) -> dict[str, object]:
    """Return widths of latent attention, and the experts of all layers but the first. Draft layers are among the blocks.

    In newer files attention.key_length is the cached length, and attention.key_length_mla that of a head.
    """
    num_drafts = own.count("nextn_predict_layers", 0, num_blocks - 1, low=0)
    rope_dim = own.required_count("rope.dimension_count", MAX_HEAD_DIM)
    key_length, value_length = (
        own.required_count(f"{key}_mla" if f"{key}_mla" in own else key, MAX_HEAD_DIM)
        for key in ("attention.key_length", "attention.value_length")
    )
    if key_length <= rope_dim:
        wanted = f"more than {own.section}rope.dimension_count = {rope_dim}: a head has a part without positions too,"
        raise own.refuse("attention.key_length", key_length, wanted)
    q_key = "attention.q_lora_rank"
    return {
        "num_hidden_layers": num_blocks - num_drafts,
        "num_nextn_predict_layers": num_drafts,
        "q_lora_rank": own.required_count(q_key, MAX_WIDTH) if own.values.get(q_key) else None,
        "kv_lora_rank": own.required_count("attention.kv_lora_rank", MAX_WIDTH),
        "qk_nope_head_dim": key_length - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_length,
        "rope_scaling": _rope_scaling(file, own, rope_dim),
        **_grouped_experts(file, own, num_blocks - num_drafts, hidden_size),
    }


def _grouped_experts(file: GGUFFile, own: Settings, num_layers: int, hidden_size: int) -> dict[str, object]:
    num_experts = own.required_count("expert_count", MAX_EXPERTS)
    num_dense = own.count("leading_dense_block_count", 0, num_layers, low=0)
    num_groups = own.count("expert_group_count", 1, num_experts, low=0) or 1
    scale = own.values.get("expert_weights_scale")
    config = _routing(file, own, range(num_dense, num_layers), hidden_size, normalizes=False) | {
        "n_shared_experts": own.count("expert_shared_count", 0, MAX_EXPERTS, low=0),
        "first_k_dense_replace": num_dense,
        "routed_scaling_factor": decimal(own.number("expert_weights_scale")) if scale else 1.0,
        "n_group": num_groups,
        "topk_group": own.required_count("expert_group_used_count", num_groups) if num_groups > 1 else 1,
    }
    function = own.count("expert_gating_func", 0, 2**31 - 1, low=0)
    if function not in (0, SOFTMAX, SIGMOID):
        reason = f"Scores are softmax ({SOFTMAX}) or sigmoid ({SIGMOID})"
        raise _unsupported(own, "expert_gating_func", reason)
    # Files of DeepSeek-V2 leave it out, as do some of GLM-4.7-Flash: a bias on scores tells them apart.
    has_bias = any(name.endswith(f".{SCORE_BIAS}.bias") for name in file.tensors)
    if function == SIGMOID or (function == 0 and has_bias):
        return config | {"architectures": [SIGMOID_ARCHITECTURE], "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    method = "group_limited_greedy" if num_groups > 1 else "greedy"
    return config | {"scoring_func": "softmax", "topk_method": method}


def decimal(value: float) -> float:
    """Undo rounding to float32: 1e-05, not 9.999999747378752e-06."""
    short = float(f"{value:.7g}")
    same = abs(value) < 1e38 and struct.pack("<f", short) == struct.pack("<f", value)
    return short if same else value


def checkpoint_dtype(file: GGUFFile) -> str:
    """Return the torch dtype of most elements. Quantized ones count as bfloat16, whose range holds every activation."""
    elements = {"float32": 0, "float16": 0, "bfloat16": 0}
    for tensor in file.tensors.values():
        dtype = {"F32": "float32", "F16": "float16"}.get(tensor.type.name, "bfloat16")
        elements[dtype] += math.prod(tensor.shape)
    return max(elements, key=lambda dtype: elements[dtype])


def _head_dim(own: Settings, hidden_size: int, num_heads: int) -> int:
    if "attention.key_length" not in own and hidden_size % num_heads:
        raise own.refuse("attention.head_count", num_heads, f"a divisor of {hidden_size}")
    head_dim = own.count("attention.key_length", hidden_size // num_heads, MAX_HEAD_DIM)
    for same in ("attention.value_length", "rope.dimension_count"):
        if own.count(same, head_dim, MAX_HEAD_DIM) != head_dim:
            raise _unsupported(own, same, f"Keys, values and rotations have {head_dim} elements alike")
    return head_dim


def _gemma3_config(file: GGUFFile, own: Settings, num_layers: int) -> dict[str, object]:
    """Return windows, the rotation of layers that have one, and soft caps, which 0 turns off."""
    pattern_key = "attention.sliding_window_pattern"
    pattern = file.metadata.get(f"{own.section}{pattern_key}")
    config: dict[str, object] = {
        "sliding_window": own.required_count("attention.sliding_window", MAX_POSITIONS),
        "rope_local_base_freq": decimal(own.number("rope.freq_base_swa", 10_000.0)),
    }
    if isinstance(pattern, list | array):
        kinds = {True: "sliding_attention", False: "full_attention"}
        if len(pattern) != num_layers or any(item not in kinds for item in pattern):
            wanted = f"a period, or true or false for each of {num_layers} layers,"
            raise own.refuse(pattern_key, f"{len(pattern)} values", wanted)
        config["layer_types"] = [kinds[bool(item)] for item in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = own.count(pattern_key, 0, MAX_LAYERS)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if own.values.get(key, 0) != 0:
            config[key] = decimal(own.number(key))
    return config


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise _wrong_tensor(file, "token_embd.weight", "is missing or is no matrix", "one row for each token")
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > embedding.shape[0]:
        problem = f"tokenizer.ggml.tokens is no list of at most {embedding.shape[0]} strings, as token_embd.weight has"
        raise ModelFormatError("gguf.malformed", file=file.path.name, problem=problem)
    return embedding.shape[0]


def _sliding_window(own: Settings, arch: str, num_layers: int) -> dict[str, object]:
    """Return the window of every layer. In config.json a Llama with one is a Mistral."""
    window = own.count("attention.sliding_window", 0, MAX_POSITIONS, low=0)
    if window == 0:
        return {}
    if arch == "llama":
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    # Families differ in which layers `max_window_layers` gives the window to, not in the kinds of layers.
    kinds = ["sliding_attention"] * num_layers
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


def _rope_scaling(file: GGUFFile, own: Settings, head_dim: int) -> dict[str, object]:
    def number(key: str, default: float) -> float:
        """Read a number of rope.scaling; zero means the default."""
        key = f"rope.scaling.{key}"
        return default if own.values.get(key) == 0 else decimal(own.number(key, default))

    kind = own.text("rope.scaling.type", "linear")
    context = own.required_count("context_length", MAX_POSITIONS)
    factor = number("factor", own.number("rope.scale_linear", 1.0))
    attention_factor = number("attn_factor", 1.0)
    factors = _rope_factors(file, head_dim)
    if kind not in ("none", "linear", "yarn") or (kind == "yarn" and factors):
        raise _unsupported(own, "rope.scaling.type", f"none, linear, and yarn without {ROPE_FACTORS} are computed")
    if kind == "yarn":
        if number("yarn_ext_factor", 1.0) != 1:
            raise _unsupported(own, "rope.scaling.yarn_ext_factor", "Yarn is computed whole or not at all")
        original = own.count("rope.scaling.original_context_length", context, MAX_POSITIONS)
        scaling: dict[str, object] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": number("yarn_beta_fast", 32.0),
            "beta_slow": number("yarn_beta_slow", 1.0),
        }
        if own.section.removesuffix(".") in LATENT_ARCHITECTURES:
            for key in ("rope.scaling.factor", "rope.scaling.original_context_length"):
                if not own.values.get(key):
                    raise own.missing(key, "scores and rotations of yarn follow from it")
            # Files have a tenth of mscale_all_dim, and nothing of mscale, which is equal in all converted models.
            mscale = decimal(10 * decimal(own.number("rope.scaling.yarn_log_multiplier", low=0.0)))
            scaling |= {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}
        if "rope.scaling.yarn_attn_factor" in own:
            scaling["attention_factor"] = number("yarn_attn_factor", 1.0)
        elif attention_factor != 1:
            scaling["attention_factor"] = attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        return scaling
    if attention_factor != 1:
        raise _unsupported(own, "rope.scaling.attn_factor", "Rotations keep lengths, except with yarn")
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
        found = f"is {tensor.type.name} of shape {tensor.shape}"
        raise _wrong_tensor(file, ROPE_FACTORS, found, f"F32 of shape {(head_dim // 2,)}")
    return read_floats(file, tensor)

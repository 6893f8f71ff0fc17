"""The families: read an architecture's config.json into a ModelSpec, and name its tensors; no torch.

A new family needs a reader, and a row with defaults in data/families.json. An absent key takes the default of
transformers; a setting that the decoder does not compute raises.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import UnsupportedModelError, shown
from holdfast.memory.devices import read_data
from holdfast.models.compressed_readers import NAME as DEEPSEEK_V4_TYPE
from holdfast.models.compressed_readers import read_compressed, respell
from holdfast.models.latent_readers import LATENT_FAMILIES, read_latent
from holdfast.models.parameters import (
    NAMES,
    CheckpointNames,
    Parameter,
    list_parameters,
)
from holdfast.models.settings import (
    DEFAULT_THETA,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    ExpertDefaults,
    Settings,
    plain,
    read_activation,
    read_clamped_experts,
    read_dtype,
    read_experts,
    read_layer_rope,
    read_rope,
    stretched,
)
from holdfast.models.spec import ModelSpec
from holdfast.models.state_readers import read_rotary_dim, read_state, without_partial_rope

TYPE_ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Maps a `model_type` that differs from its architecture's name to the one that does not."""
_DATA = read_data("families.json")
NEUTRAL: Mapping[str, list[object]] = _DATA["neutral"]
"""Settings that most families here do not compute, with the values at which they have no effect."""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its reader, tensor names and special tokens."""

    name: str
    """Equal to the `model_type` of its config.json."""
    architecture: str
    read: "Reader"
    names: CheckpointNames
    renames: tuple[tuple[str, str], ...] = ()
    """Prefixes of tensor names in some checkpoints, and our prefixes."""
    respell: Callable[[str], str] | None = None
    """Maps a tensor's name to ours, if more than prefixes differ."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Defaults of transformers."""
    reads: tuple[str, ...] = ()
    """Settings in NEUTRAL that this family computes."""
    text_key: str = ""
    """Key of the decoder's settings in the config.json of a model with more parts; empty: the whole file."""
    text_type: str = ""
    """`model_type` of that part."""
    unread: tuple[str, ...] = ()
    """Prefixes of the tensors of the other parts, which are not read."""
    unread_words: str = ""
    """What these tensors are for."""
    draft: str = ""
    """Prefix of draft layers; empty: they are the layers after the last one."""


Reader = Callable[[Settings, Family], ModelSpec]


def read_spec(config: Mapping[str, object], file: str = "config.json") -> ModelSpec:
    """Read the decoder of a config.json."""
    settings = Settings(config, file)
    family = find_family(settings)
    own = model_settings(settings)
    for part in (settings, own):
        for key, neutral in NEUTRAL.items():
            if key not in family.reads and part.values.get(key) not in neutral:
                raise part.unsupported(key, "that setting is not supported here")
    return family.read(own, family)


SHARED_KEYS = ("dtype", "torch_dtype")
"""Keys of the whole file that apply to a part unless it has its own."""
OUTER_KEYS = ("bos_token_id", "eos_token_id", "quantization_config")
"""Keys of the whole file that override a part's."""


def model_settings(settings: Settings) -> Settings:
    """Return the decoder's settings: the whole config.json, or its part of a larger model."""
    family = find_family(settings)
    if not family.text_key:
        return settings
    part = settings.part(family.text_key) or Settings({}, settings.file, f"{family.text_key}.")
    if part.text("model_type", family.text_type) != family.text_type:
        raise part.refuse("model_type", part.values["model_type"], f"{family.text_type!r}")
    shared = {key: settings.values[key] for key in SHARED_KEYS if key in settings}
    outer = {key: settings.values[key] for key in OUTER_KEYS if key in settings}
    outer["tie_word_embeddings"] = settings.flag("tie_word_embeddings", DEFAULTS[family.text_type].is_tied)
    return Settings({**shared, **part.values, **outer}, part.file, part.section)


def parameters(spec: ModelSpec) -> tuple[Parameter, ...]:
    """List every final tensor of a decoder, and the checkpoint tensors that fill it."""
    return list_parameters(spec, FAMILIES[spec.architecture].names)


DRAFTS = "drafts of tokens"


def unread_tensors(spec: ModelSpec) -> tuple[tuple[str, ...], str]:
    """Return the prefixes of tensors that are never read, and what they are for."""
    family = FAMILIES[spec.architecture]
    after = range(spec.num_layers, spec.num_layers + spec.num_draft_layers)
    drafts = tuple(family.names.layer.format(layer) for layer in after) + ((family.draft,) if family.draft else ())
    if not drafts:
        return family.unread, family.unread_words
    words = f"{family.unread_words} and {DRAFTS}" if family.unread_words else DRAFTS
    return (*family.unread, *drafts), words


def find_family(settings: Settings) -> Family:
    """Find the family of a config.json."""
    architecture = named_architecture(settings, FAMILIES)
    family = FAMILIES.get(architecture)
    if family is None:
        values = {"file": settings.file, "architecture": plain(architecture), "accepted": tuple(FAMILIES)}
        raise UnsupportedModelError("architecture.not_supported", **values)
    model_type = settings.text("model_type", family.name)
    if TYPE_ALIASES.get(model_type, model_type) != family.name:
        raise settings.refuse("model_type", model_type, f"{family.name!r}, the type of {family.architecture}")
    return family


def named_architecture(settings: Settings, known: Collection[str]) -> str:
    """Return the architecture of a config.json, by `architectures`, else by `model_type`."""
    architectures = settings.texts("architectures")
    if architectures:
        return _with_head(settings, architectures[0], known)
    if settings.values.get("model_type") is None:
        raise settings.missing("architectures and no model_type", f"one of {', '.join(known)} is needed")
    model_type = settings.text("model_type", "")
    plain_type = TYPE_ALIASES.get(model_type, model_type).removesuffix("_text").replace("_", "").lower()
    by_type = {family.name: name for name, family in FAMILIES.items() if name in known}
    first_of = {name.partition("For")[0].replace("_", "").lower(): name for name in reversed(tuple(known))}
    found = by_type.get(model_type) or first_of.get(plain_type)
    if found is None:
        types = tuple(_type_of(name) for name in known)
        raise UnsupportedModelError("architecture.unknown_type", file=settings.file, value=model_type, accepted=types)
    return found


BARE = "Model"
"""Suffix of an architecture that is saved without its head, such as an embedding model."""
CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def _with_head(settings: Settings, architecture: str, known: Collection[str]) -> str:
    """Map Qwen3Model to Qwen3ForCausalLM, and refuse a classifier head."""
    causal = architecture.removesuffix(BARE) + CAUSAL
    if architecture.endswith(BARE) and causal in known:
        return causal
    if architecture.endswith(CLASSIFIER):
        name = plain(architecture)
        raise UnsupportedModelError("architecture.classifier", file=settings.file, architecture=name)
    return architecture


BARE_RENAMES = tuple((f"{name}.", f"model.{name}.") for name in ("embed_tokens", "layers", "norm"))
"""Prefixes of a decoder that was saved without its head, and those of the whole model."""


def bare_renames(names: Collection[str], family: Family) -> tuple[tuple[str, str], ...]:
    """Return BARE_RENAMES if these tensors are a decoder without its head; else nothing."""
    embed = f"{family.names.embed}.weight"
    is_bare = embed not in names and embed.removeprefix("model.") in names
    return BARE_RENAMES if is_bare and family.names.embed == "model.embed_tokens" else ()


def _type_of(architecture: str) -> str:
    """Return the `model_type` of an architecture."""
    if architecture in FAMILIES:
        return FAMILIES[architecture].name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", architecture.partition("For")[0]).lower()


def _read_llama(settings: Settings, family: Family) -> ModelSpec:
    for key in ("sliding_window", "layer_types"):
        if settings.values.get(key) is not None and set(settings.texts("layer_types") or ["?"]) != {"full_attention"}:
            raise settings.unsupported(key, "every layer of this family sees all tokens")
    has_bias = settings.flag("attention_bias", False)
    spec = _read_rotary(settings, family)
    return replace(spec, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=settings.flag("mlp_bias", False))


def _read_mistral(settings: Settings, family: Family) -> ModelSpec:
    window = settings.optional_count("sliding_window", 4096, MAX_POSITIONS)
    kind = "full_attention" if window is None else "sliding_attention"
    if set(settings.texts("layer_types") or [kind]) != {kind}:
        raise settings.unsupported("layer_types", f"with sliding_window = {window} every layer here is {kind}")
    spec = _read_rotary(settings, family)
    return replace(spec, sliding_windows=() if window is None else (window,) * spec.num_layers)


def _read_qwen2(settings: Settings, family: Family) -> ModelSpec:
    spec = _read_rotary(settings, family)
    return replace(spec, sliding_windows=_qwen_windows(settings, spec.num_layers), qkv_bias=True)


def _read_qwen3(settings: Settings, family: Family) -> ModelSpec:
    has_bias = settings.flag("attention_bias", False)
    spec = _read_rotary(settings, family)
    windows = _qwen_windows(settings, spec.num_layers)
    return replace(spec, sliding_windows=windows, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True)


def _read_qwen2_moe(settings: Settings, family: Family) -> ModelSpec:
    spec = _read_rotary(settings, family)
    window = _moe_window(settings)
    windows: tuple[int | None, ...] = ()
    if settings.texts("layer_types") is not None:
        windows = _typed_windows(settings, spec.num_layers, window)
    elif window is not None:
        # Every other one of the first layers: transformers reads the same settings like this for this family alone.
        num_windowed = settings.count("max_window_layers", 28, MAX_POSITIONS, low=0)
        windows = tuple(window if layer < num_windowed and layer % 2 == 0 else None for layer in range(spec.num_layers))
    experts = _read_silu_experts(settings, spec, ExpertDefaults(60, 4, 1408, shared_size=5632))
    return replace(experts, sliding_windows=_unless_none(windows), qkv_bias=settings.flag("qkv_bias", True))


def _read_qwen3_moe(settings: Settings, family: Family) -> ModelSpec:
    has_bias = settings.flag("attention_bias", False)
    spec = _read_rotary(settings, family)
    windows = _unless_none((_moe_window(settings),) * spec.num_layers)
    spec = _read_silu_experts(settings, spec, ExpertDefaults(128, 8, 768))
    return replace(spec, sliding_windows=windows, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True)


def _read_silu_experts(settings: Settings, spec: ModelSpec, defaults: ExpertDefaults) -> ModelSpec:
    experts = read_experts(settings, spec.num_layers, defaults)
    if experts is not None and spec.activation != "silu":
        raise settings.unsupported("hidden_act", "experts are gated with silu here")
    return replace(spec, experts=experts)


GEMMA3_PATTERN = 6
"""One of so many layers has full attention."""


def _read_gemma3(settings: Settings, family: Family) -> ModelSpec:
    spec = _read_rotary(settings, family)
    windows = _gemma3_windows(settings, spec.num_layers)
    # The longest context in this family's config.json already includes RoPE scaling.
    max_position = settings.count(
        "max_position_embeddings", DEFAULTS[family.text_type or family.name].max_position, MAX_POSITIONS
    )
    local_theta = settings.number("rope_local_base_freq", 10_000.0, low=2.0)
    local_rope = read_layer_rope(settings, "sliding_attention", local_theta, spec.head_dim, max_position)
    has_bias = settings.flag("attention_bias", False)
    return replace(
        spec,
        max_position=max_position,
        activation=read_activation(settings, "hidden_activation", "gelu_pytorch_tanh"),
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=True,
        sliding_windows=windows,
        attention_scale=settings.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=settings.optional_number("attn_logit_softcapping"),
        logit_softcap=settings.optional_number("final_logit_softcapping"),
        norm_offset=1.0,
        float32_norms=True,
        has_output_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        local_rope=local_rope if windows else None,
    )


def _gemma3_windows(settings: Settings, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows of listed layers, else of all but one in so many, a key with two spellings."""
    window = settings.optional_count("sliding_window", 4096, MAX_POSITIONS)
    pattern = settings.count("_sliding_window_pattern", GEMMA3_PATTERN, MAX_LAYERS)
    every = settings.count("sliding_window_pattern", pattern, MAX_LAYERS)
    if settings.texts("layer_types") is not None:
        return _typed_windows(settings, num_layers, window, "a sliding_window beside it")
    kinds = [(layer + 1) % every != 0 for layer in range(num_layers)]
    if window is None and any(kinds):
        raise settings.refuse("sliding_window", None, f"a width for {sum(kinds)} layers that have a window")
    return _unless_none(tuple(window if is_local else None for is_local in kinds))


GPT_OSS_ROPE = _DATA["gpt_oss_rope"]
"""Default rotary positions of transformers."""


def _read_gpt_oss(settings: Settings, family: Family) -> ModelSpec:
    if settings.number("swiglu_alpha", 1.702) != 1.702:
        raise settings.unsupported("swiglu_alpha", "gates are multiplied by 1.702 before the sigmoid here")
    if settings.part("rope_scaling") is None and settings.part("rope_parameters") is None:
        settings = Settings({**settings.values, "rope_parameters": GPT_OSS_ROPE}, settings.file, settings.section)
    spec = _read_rotary(settings, family)
    if spec.activation != "silu":
        raise settings.unsupported("hidden_act", "experts of this family have a gate of their own, which goes by silu")
    has_bias = settings.flag("attention_bias", True)
    window = settings.optional_count("sliding_window", 128, MAX_POSITIONS)
    if settings.texts("layer_types") is None:
        kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(spec.num_layers)]
        settings = Settings({**settings.values, "layer_types": kinds}, settings.file, settings.section)
    return replace(
        spec,
        sliding_windows=_typed_windows(settings, spec.num_layers, window, "a sliding_window beside it"),
        qkv_bias=has_bias,
        o_bias=has_bias,
        has_sinks=True,
        experts=read_clamped_experts(settings, spec.num_layers, spec.intermediate_size, ExpertDefaults(128, 4, 0)),
    )


def _read_delta(settings: Settings, family: Family) -> ModelSpec:
    """Read Qwen3-Next, 3.5 and 3.6: gated delta nets, and attention with output gates between them."""
    for key in ("attention_bias", "mlp_bias"):
        if settings.flag(key, False):
            raise settings.unsupported(key, "projections of this family have no biases here")
    spec = _read_rotary(without_partial_rope(settings), family)
    if spec.activation != "silu":
        raise settings.unsupported("hidden_act", "convolutions and gates of this family go by silu")
    own_type, rotary_dim = family.text_type or family.name, read_rotary_dim(settings, spec.head_dim)
    spec = replace(
        spec,
        qk_norm=True,
        norm_offset=1.0,
        rotary_dim=None if rotary_dim == spec.head_dim else rotary_dim,
        has_output_gate=settings.flag("attn_output_gate", True),
        state=read_state(settings, spec.num_layers, is_joined=own_type == QWEN3_NEXT),
        num_draft_layers=settings.count("mtp_num_hidden_layers", 0, MAX_LAYERS, low=0),
    )
    if own_type not in DELTA_EXPERTS:
        return spec
    spec = _read_silu_experts(settings, spec, DELTA_EXPERTS[own_type])
    # Qwen3.5 divides the chosen shares by their sum whatever its config says.
    normalizes = own_type != QWEN3_NEXT or settings.flag("norm_topk_prob", True)
    return replace(spec, experts=None if spec.experts is None else replace(spec.experts, normalizes=normalizes))


QWEN3_NEXT = "qwen3_next"
DELTA_EXPERTS = {
    QWEN3_NEXT: ExpertDefaults(512, 10, 512, shared_size=512),
    "qwen3_5_moe_text": ExpertDefaults(256, 8, 512, shared_size=512),
}
"""Defaults of transformers by `model_type`; families that are not here have MLPs."""


def _read_opt(settings: Settings, family: Family) -> ModelSpec:
    if not settings.flag("layer_norm_elementwise_affine", True):
        raise settings.unsupported("layer_norm_elementwise_affine", "norms have weights here")
    hidden_size = settings.count("hidden_size", 768, MAX_WIDTH)
    num_heads = settings.count("num_attention_heads", 12, MAX_HEADS)
    embedding_size = settings.optional_count("word_embed_proj_dim", None, MAX_WIDTH)
    has_bias = settings.flag("enable_bias", True)
    norm_first = settings.flag("do_layer_norm_before", True)
    return ModelSpec(
        architecture=family.architecture,
        family=family.name,
        vocab_size=settings.count("vocab_size", 50272, MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=settings.count("ffn_dim", 3072, MAX_WIDTH),
        num_layers=settings.count("num_hidden_layers", 12, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_head_dim(settings, hidden_size, num_heads),
        max_position=settings.count("max_position_embeddings", 2048, MAX_WIDTH),
        checkpoint_dtype=read_dtype(settings),
        norm_eps=1e-5,
        norm="layer",
        norm_first=norm_first,
        has_final_norm=norm_first and not settings.flag("_remove_final_layer_norm", False),
        activation=read_activation(settings, "activation_function", "relu"),
        gated_mlp=False,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        position_offset=2,
        embedding_size=None if embedding_size == hidden_size else embedding_size,
        tied_embeddings=settings.flag("tie_word_embeddings", True),
    )


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Defaults of transformers that differ among families with RoPE."""

    vocab_size: int
    intermediate_size: int
    num_kv_heads: int | None
    max_position: int
    head_dim: int | None = None
    hidden_size: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    is_tied: bool = False
    global_theta: float | None = None
    """Theta of layers with full attention, if it differs by kind of layer."""
    norm_eps: float = 1e-6
    rope_theta: float = DEFAULT_THETA


DEFAULTS = {name: _Defaults(**row) for name, row in _DATA["grouped"].items()}
"""Keyed by `model_type`."""


def _read_rotary(settings: Settings, family: Family) -> ModelSpec:
    """Read what Llama and its descendants share."""
    defaults = DEFAULTS[family.text_type or family.name]
    hidden_size = settings.count("hidden_size", defaults.hidden_size, MAX_WIDTH)
    num_heads = settings.count("num_attention_heads", defaults.num_heads, MAX_HEADS)
    num_kv_heads = settings.optional_count("num_key_value_heads", defaults.num_kv_heads, MAX_HEADS) or num_heads
    if num_heads % num_kv_heads:
        raise settings.refuse("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}")
    head_dim = settings.optional_count("head_dim", defaults.head_dim, MAX_HEAD_DIM)
    if head_dim is None:
        head_dim = _head_dim(settings, hidden_size, num_heads)
    max_position = settings.count("max_position_embeddings", defaults.max_position, MAX_POSITIONS)
    if defaults.global_theta is None:
        rope = read_rope(settings, head_dim, max_position, defaults.rope_theta)
    else:
        theta = settings.number("rope_theta", defaults.global_theta, low=2.0)
        rope = read_layer_rope(settings, "full_attention", theta, head_dim, max_position)
    return ModelSpec(
        architecture=family.architecture,
        family=family.name,
        vocab_size=settings.count("vocab_size", defaults.vocab_size, MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=settings.count("intermediate_size", defaults.intermediate_size, MAX_WIDTH),
        num_layers=settings.count("num_hidden_layers", defaults.num_layers, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=stretched(rope, max_position),
        checkpoint_dtype=read_dtype(settings),
        norm_eps=settings.number("rms_norm_eps", defaults.norm_eps),
        activation=read_activation(settings, "hidden_act", "silu"),
        rope=rope,
        tied_embeddings=settings.flag("tie_word_embeddings", defaults.is_tied),
    )


def _qwen_windows(settings: Settings, num_layers: int) -> tuple[int | None, ...]:
    window = settings.optional_count("sliding_window", 4096, MAX_POSITIONS)
    if not settings.flag("use_sliding_window", False):
        window = None
    first_windowed = settings.count("max_window_layers", 28, MAX_POSITIONS, low=0)
    if settings.texts("layer_types") is None:
        return _unless_none(tuple(window if layer >= first_windowed else None for layer in range(num_layers)))
    return _typed_windows(settings, num_layers, window)


def _moe_window(settings: Settings) -> int | None:
    """Return None if windows are off: transformers then writes a width of 0."""
    if not settings.flag("use_sliding_window", False):
        return None
    return settings.optional_count("sliding_window", 4096, MAX_POSITIONS)


def _typed_windows(
    settings: Settings,
    num_layers: int,
    window: int | None,
    wanted: str = "a sliding_window, with use_sliding_window true",
) -> tuple[int | None, ...]:
    """Return the window of every layer by its kind in `layer_types`."""
    kinds = settings.texts("layer_types") or ()
    if len(kinds) != num_layers:
        raise settings.refuse("layer_types", list(kinds), f"one entry for each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "attention", "sliding_attention"):
            raise settings.unsupported("layer_types", f"layers of kind {shown(kind)} are not supported here")
        if kind == "sliding_attention" and window is None:
            raise settings.refuse("layer_types", list(kinds), wanted)
    return _unless_none(tuple(window if kind == "sliding_attention" else None for kind in kinds))


def _unless_none(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return windows if any(windows) else ()


def _head_dim(settings: Settings, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads or hidden_size // num_heads > MAX_HEAD_DIM:
        wanted = f"a number that divides hidden_size = {hidden_size} into heads of at most {MAX_HEAD_DIM}"
        raise settings.refuse("num_attention_heads", num_heads, wanted)
    return hidden_size // num_heads


READERS: Mapping[str, Reader] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "qwen2_moe": _read_qwen2_moe,
    "qwen3_moe": _read_qwen3_moe,
    "gemma3_text": _read_gemma3,
    "gemma3": _read_gemma3,
    "gpt_oss": _read_gpt_oss,
    **dict.fromkeys((QWEN3_NEXT, "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"), _read_delta),
    "opt": _read_opt,
    **dict.fromkeys(LATENT_FAMILIES, lambda settings, family: read_latent(LATENT_FAMILIES[family.name], settings)),
    DEEPSEEK_V4_TYPE: lambda settings, _: read_compressed(settings),
}
"""Keyed by `model_type`."""


def _read_family(row: Mapping[str, Any]) -> Family:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    values["renames"] = tuple((theirs, ours) for theirs, ours in row.get("renames", ()))
    values["respell"] = respell if row["name"] == DEEPSEEK_V4_TYPE else None
    return Family(**{**values, "read": READERS[row["name"]], "names": NAMES[row["names"]]})


FAMILIES: Mapping[str, Family] = {row["architecture"]: _read_family(row) for row in _DATA["families"]}
"""Every architecture that runs, by the name in config.json."""

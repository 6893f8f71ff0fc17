"""The families: architecture name -> how its config.json becomes a ModelSpec, and what its tensors are called; no torch.

A new family is a reader and a row in FAMILIES. Keys that a config.json leaves out take the value that transformers gives
them; a setting that the decoder does not compute is declined in words.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from holdfast.errors import UnsupportedModelError, shown
from holdfast.models.compressed_readers import ARCHITECTURE as DEEPSEEK_V4
from holdfast.models.compressed_readers import NAME as DEEPSEEK_V4_TYPE
from holdfast.models.compressed_readers import read_compressed, respell
from holdfast.models.latent_readers import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_LITE,
    GLM_DSA,
    LatentFamily,
    read_latent,
)
from holdfast.models.parameters import (
    COMPRESSED_NAMES,
    DEEPSEEK_NAMES,
    GEMMA3_NAMES,
    GPT_OSS_NAMES,
    LLAMA_NAMES,
    OPT_NAMES,
    CheckpointNames,
    Parameter,
    list_parameters,
)
from holdfast.models.settings import (
    DEFAULT_THETA,
    EXPERT_COUNT_KEYS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    ExpertDefaults,
    Settings,
    declined,
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

TYPE_ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""A `model_type` that is not its architecture's name, and one that is."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "quantization_config": (None, {}),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "dual_chunk_attention_config": (None, {}),
    "use_mrope": (None, False),
    "rope_interleaved": (None, False),
    "no_rope_layers": (None, []),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "qk_layernorm": (None, False),
    "use_qk_norm": (None, False),
    "clip_qkv": (None,),
    "logit_scale": (None, 1.0),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
}
"""Settings that some checkpoints carry and most families here do not compute, with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table."""

    name: str
    """Also the `model_type` of its config.json."""
    architecture: str
    read: Callable[[Settings], ModelSpec]
    names: CheckpointNames
    renames: tuple[tuple[str, str], ...] = ()
    """Prefixes of tensor names in some checkpoints, and what they stand for."""
    respell: Callable[[str], str] | None = None
    """What a tensor's name stands for where other than prefixes differ; None: itself."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """What transformers assumes where config.json does not say."""
    reads: tuple[str, ...] = ()
    """Settings in NEUTRAL that this family does compute."""
    text_key: str = ""
    """Where config.json has the decoder's settings, of a model that has more parts; nothing: they are all of it."""
    text_type: str = ""
    """The `model_type` there."""
    unread: tuple[str, ...] = ()
    """Prefixes of the tensors of the other parts, which are left where they are."""
    unread_words: str = ""
    """What these are."""
    draft: str = ""
    """What names of layers that draft tokens begin with; nothing: they are layers behind the last, as many as settings say."""


def read_spec(config: Mapping[str, object], file: str = "config.json") -> ModelSpec:
    """The decoder that a config.json describes."""
    settings = Settings(config, file)
    family = find_family(settings)
    own = model_settings(settings)
    for part in (settings, own):
        for key, neutral in NEUTRAL.items():
            if key not in family.reads and part.values.get(key) not in neutral:
                raise declined(part, key, "that setting is not computed here")
    return family.read(own)


SHARED_KEYS = ("dtype", "torch_dtype")
"""Said of all parts of a model, unless one says otherwise."""
OUTER_KEYS = ("bos_token_id", "eos_token_id", "quantization_config")
"""Said of all parts, whatever one says."""


def model_settings(settings: Settings) -> Settings:
    """The settings of the decoder: the whole config.json, or a part of it where the model has others."""
    family = find_family(settings)
    if not family.text_key:
        return settings
    part = settings.part(family.text_key) or Settings({}, settings.file, f"{family.text_key}.")
    if part.text("model_type", family.text_type) != family.text_type:
        raise part.refuse("model_type", part.values["model_type"], f"{family.text_type!r}")
    shared = {key: settings.values[key] for key in SHARED_KEYS if key in settings}
    outer = {key: settings.values[key] for key in OUTER_KEYS if key in settings}
    outer["tie_word_embeddings"] = settings.flag("tie_word_embeddings", True)
    return Settings({**shared, **part.values, **outer}, part.file, part.section)


def parameters(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Every final tensor of a decoder, and the checkpoint tensors that fill it."""
    return list_parameters(spec, FAMILIES[spec.architecture].names)


DRAFTS = "drafts of tokens"


def unread_tensors(spec: ModelSpec) -> tuple[tuple[str, ...], str]:
    """Prefixes of tensors that a checkpoint of the model may hold and nobody reads, and what these are for, in words."""
    family = FAMILIES[spec.architecture]
    behind = range(spec.num_layers, spec.num_layers + spec.num_draft_layers)
    drafts = (family.draft,) if family.draft else tuple(family.names.layer.format(layer) for layer in behind)
    if not drafts:
        return family.unread, family.unread_words
    words = f"{family.unread_words} and {DRAFTS}" if family.unread_words else DRAFTS
    return (*family.unread, *drafts), words


def find_family(settings: Settings) -> Family:
    """The family that a config.json names."""
    architecture = named_architecture(settings, FAMILIES)
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModelError(
            f"{settings.file} describes a {plain(architecture)}",
            f"what runs, in any format, is {', '.join(FAMILIES)}",
            "use a model of one of these",
        )
    model_type = settings.text("model_type", family.name)
    if TYPE_ALIASES.get(model_type, model_type) != family.name:
        raise settings.refuse("model_type", model_type, f"{family.name!r}, the type of {family.architecture},")
    return family


def named_architecture(settings: Settings, known: Collection[str]) -> str:
    """The architecture that a config.json names: by `architectures`, and by `model_type` where that is left out."""
    architectures = settings.texts("architectures")
    if architectures:
        return _with_head(settings, architectures[0], known)
    if settings.values.get("model_type") is None:
        raise settings.missing("architectures and no model_type", f"one of {', '.join(known)} is needed")
    model_type = settings.text("model_type", "")
    plain_type = TYPE_ALIASES.get(model_type, model_type).removesuffix("_text").replace("_", "").lower()
    by_type = {family.name: name for name, family in FAMILIES.items() if name in known}
    first_of = {_bare_type(name): name for name in reversed(tuple(known))}
    found = by_type.get(model_type) or first_of.get(plain_type)
    if found is None:
        raise UnsupportedModelError(
            f"{settings.file} says model_type = {shown(model_type)} and names no architecture",
            f"the types here are {', '.join(_type_of(name) for name in known)}",
            "use a model of one of these",
        )
    return found


def _bare_type(architecture: str) -> str:
    """What an architecture and its `model_type` share."""
    return architecture.partition("For")[0].replace("_", "").lower()


BARE = "Model"
"""The end of an architecture's name that is saved without its head, as embedding models are."""
CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def _with_head(settings: Settings, architecture: str, known: Collection[str]) -> str:
    """Qwen3Model is the decoder of Qwen3ForCausalLM; one with a classifier as its head has nothing that runs here."""
    causal = architecture.removesuffix(BARE) + CAUSAL
    if architecture.endswith(BARE) and causal in known:
        return causal
    if architecture.endswith(CLASSIFIER):
        raise UnsupportedModelError(
            f"{settings.file} describes a {plain(architecture)}",
            "it has a classifier in place of the language-model head",
            "use the reranker that it was converted from, such as Qwen/Qwen3-Reranker-0.6B: the scores are the same",
        )
    return architecture


BARE_RENAMES = tuple((f"{name}.", f"model.{name}.") for name in ("embed_tokens", "layers", "norm"))
"""Tensor names of a decoder that was saved without its head, and those of the whole model."""


def bare_renames(names: Collection[str], family: Family) -> tuple[tuple[str, str], ...]:
    """BARE_RENAMES if a checkpoint with these tensors is a decoder without its head; else nothing."""
    embed = f"{family.names.embed}.weight"
    is_bare = embed not in names and embed.removeprefix("model.") in names
    return BARE_RENAMES if is_bare and family.names.embed == "model.embed_tokens" else ()


def _type_of(architecture: str) -> str:
    """The `model_type` that belongs to an architecture."""
    if architecture in FAMILIES:
        return FAMILIES[architecture].name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", architecture.partition("For")[0]).lower()


def _read_llama(settings: Settings) -> ModelSpec:
    for key in ("sliding_window", "layer_types"):
        if settings.values.get(key) is not None and set(settings.texts("layer_types") or ["?"]) != {"full_attention"}:
            raise declined(settings, key, "every layer of this family sees all tokens")
    defaults = _Defaults(vocab_size=32000, intermediate_size=11008, num_kv_heads=None, max_position=2048)
    has_bias = settings.flag("attention_bias", False)
    spec = _read_rotary(settings, LLAMA, defaults)
    return replace(spec, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=settings.flag("mlp_bias", False))


def _read_mistral(settings: Settings) -> ModelSpec:
    window = settings.optional_count("sliding_window", 4096, MAX_POSITIONS)
    kind = "full_attention" if window is None else "sliding_attention"
    if set(settings.texts("layer_types") or [kind]) != {kind}:
        raise declined(settings, "layer_types", f"with sliding_window = {window} every layer here is {kind}")
    defaults = _Defaults(vocab_size=32000, intermediate_size=14336, num_kv_heads=8, max_position=131072)
    spec = _read_rotary(settings, MISTRAL, defaults)
    return replace(spec, sliding_windows=() if window is None else (window,) * spec.num_layers)


def _read_qwen2(settings: Settings) -> ModelSpec:
    defaults = _Defaults(vocab_size=151936, intermediate_size=22016, num_kv_heads=32, max_position=32768)
    spec = _read_rotary(settings, QWEN2, defaults)
    return replace(spec, sliding_windows=_qwen_windows(settings, spec.num_layers), qkv_bias=True)


def _read_qwen3(settings: Settings) -> ModelSpec:
    defaults = _Defaults(vocab_size=151936, intermediate_size=22016, num_kv_heads=32, max_position=32768, head_dim=128)
    has_bias = settings.flag("attention_bias", False)
    spec = _read_rotary(settings, QWEN3, defaults)
    windows = _qwen_windows(settings, spec.num_layers)
    return replace(spec, sliding_windows=windows, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True)


def _read_qwen2_moe(settings: Settings) -> ModelSpec:
    defaults = _Defaults(
        vocab_size=151936,
        intermediate_size=5632,
        num_kv_heads=16,
        max_position=32768,
        hidden_size=2048,
        num_layers=24,
        num_heads=16,
    )
    spec = _read_rotary(settings, QWEN2_MOE, defaults)
    window = _moe_window(settings)
    windows: tuple[int | None, ...] = ()
    if settings.texts("layer_types") is not None:
        windows = _typed_windows(settings, spec.num_layers, window)
    elif window is not None:
        # Every other layer among the first ones: so transformers reads the same settings for this family alone.
        num_windowed = settings.count("max_window_layers", 28, MAX_POSITIONS, low=0)
        windows = tuple(window if layer < num_windowed and layer % 2 == 0 else None for layer in range(spec.num_layers))
    experts = _read_silu_experts(settings, spec, ExpertDefaults(60, 4, 1408, shared_size=5632))
    return replace(experts, sliding_windows=_unless_none(windows), qkv_bias=settings.flag("qkv_bias", True))


def _read_qwen3_moe(settings: Settings) -> ModelSpec:
    defaults = _Defaults(
        vocab_size=151936,
        intermediate_size=6144,
        num_kv_heads=4,
        max_position=32768,
        hidden_size=2048,
        num_layers=24,
        num_heads=32,
    )
    has_bias = settings.flag("attention_bias", False)
    spec = _read_rotary(settings, QWEN3_MOE, defaults)
    windows = _unless_none((_moe_window(settings),) * spec.num_layers)
    spec = _read_silu_experts(settings, spec, ExpertDefaults(128, 8, 768))
    return replace(spec, sliding_windows=windows, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True)


def _read_silu_experts(settings: Settings, spec: ModelSpec, defaults: ExpertDefaults) -> ModelSpec:
    experts = read_experts(settings, spec.num_layers, defaults)
    if experts is not None and spec.activation != "silu":
        raise declined(settings, "hidden_act", "experts are gated with silu here")
    return replace(spec, experts=experts)


GEMMA3_PATTERN = 6
"""Every so many layers one sees all tokens."""


def _read_gemma3(settings: Settings) -> ModelSpec:
    return _read_gemma3_text(settings, GEMMA3)


def _read_gemma3_images(settings: Settings) -> ModelSpec:
    return _read_gemma3_text(settings, GEMMA3_IMAGES)


def _read_gemma3_text(settings: Settings, family: Family) -> ModelSpec:
    defaults = _Defaults(
        vocab_size=262208,
        intermediate_size=9216,
        num_kv_heads=4,
        max_position=131072,
        head_dim=256,
        hidden_size=2304,
        num_layers=26,
        num_heads=8,
        is_tied=True,
        global_theta=1_000_000.0,
    )
    spec = _read_rotary(settings, family, defaults)
    windows = _gemma3_windows(settings, spec.num_layers)
    # Positions are stretched already in what a config.json of this family calls the longest context.
    max_position = settings.count("max_position_embeddings", defaults.max_position, MAX_POSITIONS)
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
    """As layers are listed, else of all but every so many; what says how many has two spellings."""
    window = settings.optional_count("sliding_window", 4096, MAX_POSITIONS)
    pattern = settings.count("_sliding_window_pattern", GEMMA3_PATTERN, MAX_LAYERS)
    every = settings.count("sliding_window_pattern", pattern, MAX_LAYERS)
    if settings.texts("layer_types") is not None:
        return _typed_windows(settings, num_layers, window, "a sliding_window beside it")
    kinds = [(layer + 1) % every != 0 for layer in range(num_layers)]
    if window is None and any(kinds):
        raise settings.refuse("sliding_window", None, f"a width for {sum(kinds)} layers that have a window")
    return _unless_none(tuple(window if is_local else None for is_local in kinds))


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers assumes where config.json says nothing of rotary positions."""


def _read_gpt_oss(settings: Settings) -> ModelSpec:
    if settings.number("swiglu_alpha", 1.702) != 1.702:
        raise declined(settings, "swiglu_alpha", "gates are multiplied by 1.702 before the sigmoid here")
    if settings.part("rope_scaling") is None and settings.part("rope_parameters") is None:
        settings = Settings({**settings.values, "rope_parameters": GPT_OSS_ROPE}, settings.file, settings.section)
    defaults = _Defaults(
        vocab_size=201088,
        intermediate_size=2880,
        num_kv_heads=8,
        max_position=131072,
        head_dim=64,
        hidden_size=2880,
        num_layers=36,
        num_heads=64,
        norm_eps=1e-5,
        rope_theta=150_000.0,
    )
    spec = _read_rotary(settings, GPT_OSS, defaults)
    if spec.activation != "silu":
        raise declined(settings, "hidden_act", "experts of this family have a gate of their own, which goes by silu")
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


def _read_opt(settings: Settings) -> ModelSpec:
    if not settings.flag("layer_norm_elementwise_affine", True):
        raise declined(settings, "layer_norm_elementwise_affine", "norms have weights here")
    hidden_size = settings.count("hidden_size", 768, MAX_WIDTH)
    num_heads = settings.count("num_attention_heads", 12, MAX_HEADS)
    embedding_size = settings.optional_count("word_embed_proj_dim", None, MAX_WIDTH)
    has_bias = settings.flag("enable_bias", True)
    norm_first = settings.flag("do_layer_norm_before", True)
    return ModelSpec(
        architecture=OPT.architecture,
        family=OPT.name,
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
    """What transformers assumes where families with rotary positions differ; the rest they share."""

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
    """Rotations may differ by kind of layer: theirs in the layers that see all tokens."""
    norm_eps: float = 1e-6
    rope_theta: float = DEFAULT_THETA


def _read_rotary(settings: Settings, family: Family, defaults: _Defaults) -> ModelSpec:
    """What Llama and its descendants share."""
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
    """None where windows are off; transformers then writes a width of 0."""
    if not settings.flag("use_sliding_window", False):
        return None
    return settings.optional_count("sliding_window", 4096, MAX_POSITIONS)


def _typed_windows(
    settings: Settings,
    num_layers: int,
    window: int | None,
    wanted: str = "a sliding_window, with use_sliding_window true,",
) -> tuple[int | None, ...]:
    """The window of every layer whose kind is said to have one."""
    kinds = settings.texts("layer_types") or ()
    if len(kinds) != num_layers:
        raise settings.refuse("layer_types", list(kinds), f"one entry for each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "attention", "sliding_attention"):
            raise declined(settings, "layer_types", f"layers of kind {shown(kind)} are not computed here")
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


LLAMA = Family("llama", "LlamaForCausalLM", _read_llama, LLAMA_NAMES, bos_token_id=1, eos_token_ids=(2,))
MISTRAL = Family("mistral", "MistralForCausalLM", _read_mistral, LLAMA_NAMES, bos_token_id=1, eos_token_ids=(2,))
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, LLAMA_NAMES)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, LLAMA_NAMES)
QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", _read_qwen2_moe, LLAMA_NAMES, reads=EXPERT_COUNT_KEYS)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, LLAMA_NAMES, reads=EXPERT_COUNT_KEYS)
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _read_gemma3,
    GEMMA3_NAMES,
    bos_token_id=2,
    eos_token_ids=(1,),
    reads=SOFT_CAPS,
)
GEMMA3_IMAGES = replace(
    GEMMA3,
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    read=_read_gemma3_images,
    renames=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    text_key="text_config",
    text_type="gemma3_text",
    unread=tuple(
        f"{prefix}{module}." for prefix in ("", "model.") for module in ("vision_tower", "multi_modal_projector")
    ),
    unread_words="images",
)
GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", _read_gpt_oss, GPT_OSS_NAMES, reads=EXPERT_COUNT_KEYS)


def _latent_family(row: LatentFamily, bos_token_id: int, eos_token_id: int) -> Family:
    read = partial(read_latent, row)
    return Family(
        row.name, row.architecture, read, DEEPSEEK_NAMES, bos_token_id=bos_token_id, eos_token_ids=(eos_token_id,)
    )


COMPRESSED = Family(
    DEEPSEEK_V4_TYPE,
    DEEPSEEK_V4,
    read_compressed,
    COMPRESSED_NAMES,
    respell=respell,
    bos_token_id=0,
    eos_token_ids=(1,),
    draft="mtp.",
)
OPT = Family(
    "opt",
    "OPTForCausalLM",
    _read_opt,
    OPT_NAMES,
    renames=(("decoder.", "model.decoder."),),
    bos_token_id=2,
    eos_token_ids=(2,),
)
FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE),
        *(GEMMA3, GEMMA3_IMAGES, GPT_OSS, OPT),
        _latent_family(DEEPSEEK_V2, 1, 2),
        *(_latent_family(row, 0, 1) for row in (DEEPSEEK_V3, DEEPSEEK_V32, GLM4_LITE, GLM_DSA)),
        COMPRESSED,
    )
}
"""Every architecture that is run, by the name in config.json."""

"""Readers of hybrid decoders: Gemma 4, Llama 4, MiniMax-M2, Nemotron 3; no torch.

Only the text model of a multimodal model is read. Layers that draft tokens are not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from holdfast.models.blueprints.layered import (
    Layer,
    LayeredBlueprint,
    Part,
    State,
    attention,
    experts,
    matrix,
    mlp,
    norm,
    router,
)
from holdfast.models.blueprints.planned import read_decoder, read_part
from holdfast.models.declaration import needed
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.parameters import LLAMA_NAMES
from holdfast.models.settings import (
    MAX_EXPERT_WIDTH,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Settings,
    check_total,
)
from holdfast.models.spec import ExpertsSpec, ModelSpec

TEXT = "text_config"
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
MAX_GROUPS, MAX_CONV, MAX_STATE = 4096, 64, 2**16


def _text(settings: Settings, *, is_tied: bool = False) -> Settings:
    """Return the decoder's own settings; `tie_word_embeddings` of the whole model holds for it too."""
    if settings.part(TEXT) is None:
        return settings
    part = read_part(settings, TEXT)
    tied = settings.flag("tie_word_embeddings", part.flag("tie_word_embeddings", is_tied))
    return Settings({**part.values, "tie_word_embeddings": tied}, part.file, part.section)


def _kinds(settings: Settings, num_layers: int, default: Sequence[str]) -> tuple[str, ...]:
    """Return the kind of every layer, as listed or by default."""
    kinds = settings.texts("layer_types") or tuple(default)
    known = set(default) | {FULL}
    if len(kinds) != num_layers or not set(kinds) <= known:
        wanted = f"one of {', '.join(sorted(known))} for each of {num_layers} layers"
        raise settings.refuse("layer_types", list(kinds), wanted)
    return kinds


def _window(settings: Settings, key: str, spec: ModelSpec) -> int | None:
    """Read how many tokens a windowed layer keeps; None if that is the whole context."""
    window = needed(settings, key, MAX_POSITIONS)
    return window if window < spec.max_position else None


def _with_experts(
    settings: Settings,
    spec: ModelSpec,
    count_key: str,
    top_key: str,
    inner: int,
    shared: int,
    dense: Sequence[int] = (),
) -> tuple[ModelSpec, int]:
    """Return the decoder with its experts, as workspaces and steps see them, and their number in a layer."""
    count = needed(settings, count_key, MAX_EXPERTS)
    check_total(settings, count_key, count, spec.num_layers)
    top_k = needed(settings, top_key, count)
    return replace(spec, experts=ExpertsSpec(count, top_k, inner, shared, dense_layers=frozenset(dense))), count


def _rotated(settings: Settings, head_dim: int) -> int:
    """Return how many elements of a head RoPE rotates."""
    rope = settings.part("rope_parameters") or settings
    share = rope.optional_number("partial_rotary_factor") or settings.optional_number("partial_rotary_factor") or 1.0
    return int(head_dim * min(1.0, share))


def _blueprint(spec: ModelSpec, native: str | None, layers: Sequence[Layer], rotated: int) -> LayeredBlueprint:
    return LayeredBlueprint(DecoderDeclaration(spec, LLAMA_NAMES, native), rotated, tuple(layers))


PER_LAYER_WIDTH = 256
"""Default of transformers. Models that take images and sound without towers have no per-layer embeddings."""


def read_gemma4(settings: Settings, native: str | None) -> LayeredBlueprint:
    """Read Gemma 4: windows, wider heads in full layers, shared KV, K=V, per-layer embeddings, experts and an MLP."""
    text = _text(settings, is_tied=True)
    if "hidden_size_per_layer_input" not in text:
        is_unified = "unified" in text.text("model_type", "") or "unified" in settings.text("model_type", "")
        width = 0 if is_unified else PER_LAYER_WIDTH
        text = Settings({**text.values, "hidden_size_per_layer_input": width}, text.file, text.section)
    spec = read_decoder(text, is_tied=True, head_dim=256)
    default = [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(spec.num_layers - 1)] + [FULL]
    kinds = _kinds(text, spec.num_layers, default)
    full_dim = text.optional_count("global_head_dim", 512, MAX_HEAD_DIM) or spec.head_dim
    is_joint = text.flag("attention_k_eq_v", False)
    full_kv = text.optional_count("num_global_key_value_heads", None, MAX_HEADS) if is_joint else None
    shapes = {
        SLIDING: (spec.num_kv_heads, spec.head_dim, _window(text, "sliding_window", spec)),
        FULL: (full_kv or spec.num_kv_heads, full_dim, None),
    }
    num_shared = text.count("num_kv_shared_layers", 0, spec.num_layers - 1, low=0)
    is_double = text.flag("use_double_wide_mlp", False)
    more, spec = _gemma4_more(text, spec)
    layers = []
    for index, kind in enumerate(kinds):
        kv_heads, head_dim, window = shapes[kind]
        is_own = index < spec.num_layers - num_shared
        has_values = not (is_joint and kind == FULL)
        parts = attention(spec.hidden_size, spec.num_heads, kv_heads, head_dim, has_keys=is_own, has_values=has_values)
        parts += (norm("q_norm", head_dim), *((norm("k_norm", head_dim),) if is_own else ()))
        parts += mlp(spec.hidden_size, spec.intermediate_size * (2 if is_double and not is_own else 1))
        layers.append(Layer((*parts, *more), kv_heads if is_own else 0, head_dim, window if is_own else None))
    if is_double and num_shared:
        spec = replace(spec, intermediate_size=2 * spec.intermediate_size)
    spec = replace(spec, head_dim=full_dim, num_kv_heads=shapes[FULL][0], activation="gelu_tanh")
    found = _blueprint(spec, native, layers, spec.head_dim)
    return replace(found, ends=_per_layer_embeddings(text, spec))


def _gemma4_more(text: Settings, spec: ModelSpec) -> tuple[tuple[Part, ...], ModelSpec]:
    """List what every layer has besides attention and MLP."""
    hidden = spec.hidden_size
    parts = [norm(name, hidden) for name in ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")]
    parts.append(Part("scalar", (1,), "norm"))
    if text.flag("enable_moe_block", False):
        inner = needed(text, "moe_intermediate_size", MAX_EXPERT_WIDTH)
        spec, count = _with_experts(text, spec, "num_experts", "top_k_experts", inner, spec.intermediate_size)
        parts += (*router(count, hidden), Part("router.scale", (hidden,), "norm"), *experts(count, hidden, inner))
        parts += [Part("router.expert_scale", (count,), "norm")]
        parts += [norm(name, hidden) for name in ("mlp_out_norm_1", "experts_norm", "experts_out_norm")]
    width = text.count("hidden_size_per_layer_input", 0, MAX_WIDTH, low=0)
    if width:
        parts += [matrix("per_layer_gate", width, hidden, "whole"), matrix("per_layer_out", hidden, width, "whole")]
        parts.append(norm("per_layer_norm", hidden))
    return tuple(parts), spec


def _per_layer_embeddings(text: Settings, spec: ModelSpec) -> tuple[Part, ...]:
    """List the second embedding table, with a row per layer; empty for the larger models."""
    width = text.count("hidden_size_per_layer_input", 0, MAX_WIDTH, low=0)
    if not width:
        return ()
    columns = spec.num_layers * width
    vocab = text.count("vocab_size_per_layer_input", 262_144, MAX_VOCAB)
    return (
        Part("embed_per_layer.weight", (vocab, columns), "embedding"),
        matrix("embed_per_layer_in", columns, spec.hidden_size, "whole"),
        norm("embed_per_layer_norm", width),
    )


def read_llama4(settings: Settings, native: str | None) -> LayeredBlueprint:
    """Read Llama 4: three of four layers attend within a chunk; every layer or every other has experts."""
    text = _text(settings)
    spec = read_decoder(text, head_dim=128, inner_key="intermediate_size_mlp")
    hidden, inner = spec.hidden_size, needed(text, "intermediate_size", MAX_WIDTH)
    dense = _llama4_dense(text, spec.num_layers)
    spec, count = _with_experts(text, spec, "num_local_experts", "num_experts_per_tok", inner, inner, dense)
    default = [CHUNKED if (layer + 1) % 4 else FULL for layer in range(spec.num_layers)]
    kinds = _kinds(text, spec.num_layers, default)
    window = _window(text, "attention_chunk_size", spec)
    shared = (norm("attn_norm", hidden), norm("mlp_norm", hidden))
    shared += attention(hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    sparse = (*router(count, hidden), *experts(count, hidden, inner), *mlp(hidden, inner, prefix="shared."))
    plain = mlp(hidden, spec.intermediate_size)
    layers = [
        Layer(
            (*shared, *(plain if layer in dense else sparse)),
            spec.num_kv_heads,
            spec.head_dim,
            None if kind == FULL else window,
        )
        for layer, kind in enumerate(kinds)
    ]
    return _blueprint(spec, native, layers, spec.head_dim)


def _llama4_dense(text: Settings, num_layers: int) -> list[int]:
    """List the layers with an MLP: by the list of expert layers, else by a step."""
    step = text.count("interleave_moe_layer_step", 1, MAX_LAYERS)
    sparse = text.values.get("moe_layers") or list(range(step - 1, num_layers, step))
    if not isinstance(sparse, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in sparse):
        raise text.refuse("moe_layers", sparse, f"a list of layers from 0 to {num_layers - 1}")
    return [layer for layer in range(num_layers) if layer not in sparse]


def read_minimax(settings: Settings, native: str | None) -> LayeredBlueprint:
    """Read MiniMax-M2: norms over all query heads and all key heads; experts in every layer, chosen with a bias."""
    spec = read_decoder(settings, head_dim=128)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    spec, count = _with_experts(settings, spec, "num_local_experts", "num_experts_per_tok", inner, 0)
    parts = (norm("attn_norm", hidden), norm("mlp_norm", hidden))
    parts += attention(hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    if settings.flag("use_qk_norm", True):
        sizes = {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads}
        parts += tuple(
            Part(f"{name}.weight", (heads * spec.head_dim,), "norm", "rows", heads) for name, heads in sizes.items()
        )
    parts += (*router(count, hidden, has_bias=settings.flag("use_routing_bias", True)), *experts(count, hidden, inner))
    layer = Layer(parts, spec.num_kv_heads, spec.head_dim)
    rotated = settings.count("rotary_dim", spec.head_dim, spec.head_dim)
    return _blueprint(spec, native, [layer] * spec.num_layers, rotated)


SYMBOLS: Mapping[str, str] = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
"""Maps letters of `hybrid_override_pattern` to names of `layers_block_type`."""


def read_nemotron(settings: Settings, native: str | None) -> LayeredBlueprint:
    """Read Nemotron 3 and Nemotron-H: a layer is one of Mamba2, experts, an MLP or attention without positions."""
    kinds = _mixers(settings)
    known = Settings({**settings.values, "num_hidden_layers": len(kinds)}, settings.file)
    spec = replace(read_decoder(known, head_dim=128), gated_mlp=False, activation="relu")
    hidden, made = spec.hidden_size, dict[str, Layer]()
    own = norm("norm", hidden)
    if "attention" in kinds:
        parts = attention(hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        made["attention"] = Layer((own, *parts), spec.num_kv_heads, spec.head_dim)
    if "mlp" in kinds:
        made["mlp"] = Layer((own, *mlp(hidden, spec.intermediate_size, gated=False)))
    if "moe" in kinds:
        parts, spec = _nemotron_experts(settings, spec, [i for i, kind in enumerate(kinds) if kind != "moe"])
        made["moe"] = Layer((own, *parts))
    width = 0
    if "mamba" in kinds:
        parts, state, width = _mamba(settings, hidden)
        made["mamba"] = Layer((own, *parts), state=state)
    found = _blueprint(spec, native, [made[kind] for kind in kinds], 0)
    return replace(found, linear_width=width)


def _mixers(settings: Settings) -> tuple[str, ...]:
    """Return the kind of each layer, from a list of words or a string of symbols."""
    words = settings.texts("layers_block_type")
    if words is None:
        if "hybrid_override_pattern" not in settings:
            raise settings.missing("hybrid_override_pattern", "a plan would be a guess without it")
        pattern = settings.text("hybrid_override_pattern", "")
        words = tuple(SYMBOLS.get(symbol, symbol) for symbol in pattern)
    if not 0 < len(words) <= MAX_LAYERS or not set(words) <= set(SYMBOLS.values()):
        key = "layers_block_type" if "layers_block_type" in settings else "hybrid_override_pattern"
        raise settings.refuse(key, settings.values[key], f"1 to {MAX_LAYERS} of {', '.join(SYMBOLS.values())}")
    return words


def _nemotron_experts(settings: Settings, spec: ModelSpec, dense: list[int]) -> tuple[tuple[Part, ...], ModelSpec]:
    """List experts without a gate, over a narrower stream in the larger models, and a shared one."""
    hidden, inner = spec.hidden_size, needed(settings, "moe_intermediate_size", MAX_EXPERT_WIDTH)
    shared = settings.optional_count("moe_shared_expert_intermediate_size", None, MAX_EXPERT_WIDTH) or 0
    shared *= settings.count("n_shared_experts", 1, MAX_EXPERTS, low=0)
    spec, count = _with_experts(settings, spec, "n_routed_experts", "num_experts_per_tok", inner, shared, dense)
    latent = settings.optional_count("moe_latent_size", None, MAX_WIDTH)
    parts = (*router(count, hidden, has_bias=True), *experts(count, latent or hidden, inner, gated=False))
    if shared:
        parts += mlp(hidden, shared, gated=False, prefix="shared.")
    if latent is not None:
        parts += (matrix("latent_in", latent, hidden, "whole"), matrix("latent_out", hidden, latent, "whole"))
    return parts, spec


def _mamba(settings: Settings, hidden: int) -> tuple[tuple[Part, ...], State, int]:
    """Return a Mamba2 mixer, its state, and its columns. Ranks split heads and share groups that are too few."""
    heads, head_dim = needed(settings, "mamba_num_heads", MAX_HEADS), needed(settings, "mamba_head_dim", MAX_HEAD_DIM)
    groups, size = needed(settings, "n_groups", MAX_GROUPS), needed(settings, "ssm_state_size", MAX_STATE)
    width = needed(settings, "conv_kernel", MAX_CONV)
    inner, shared = heads * head_dim, 2 * groups * size
    parts = [
        matrix("in_zx", 2 * inner, hidden, "rows", heads),
        matrix("in_bc", shared, hidden, "rows", groups),
        matrix("in_dt", heads, hidden, "rows", heads),
        Part("conv_x.weight", (inner, width), "norm", "rows", heads),
        Part("conv_bc.weight", (shared, width), "norm", "rows", groups),
        *(Part(name, (heads,), "norm", "rows", heads) for name in ("a_log", "d", "dt_bias")),
        Part("out_norm.weight", (inner,), "norm", "rows", heads),
        matrix("out", hidden, inner, "columns"),
    ]
    if settings.flag("use_conv_bias", True):
        parts += [
            Part("conv_x.bias", (inner,), "norm", "rows", heads),
            Part("conv_bc.bias", (shared,), "norm", "rows", groups),
        ]
    state = State(heads, head_dim * size, groups, 2 * size, head_dim, width)
    return tuple(parts), state, 2 * inner + shared + heads


Reader = Callable[[Settings, str | None], LayeredBlueprint]
READERS: Mapping[str, Reader] = {
    "Gemma4ForCausalLM": read_gemma4,
    "Gemma4ForConditionalGeneration": read_gemma4,
    "Gemma4UnifiedForConditionalGeneration": read_gemma4,
    "Llama4ForCausalLM": read_llama4,
    "Llama4ForConditionalGeneration": read_llama4,
    "MiniMaxM2ForCausalLM": read_minimax,
    "NemotronHForCausalLM": read_nemotron,
}

"""Planned decoders with KV by head: Mixtral, Phi, Ministral 3, Gemma 2, GLM; image towers; no torch.

Layers with a sliding window keep that many tokens of a sequence, as the models' authors intend. Models that
run here keep all tokens of all layers.
"""

from dataclasses import dataclass, replace

from holdfast.distributed.mesh import Mesh
from holdfast.errors import shown
from holdfast.models.blueprints.layered import Blueprint
from holdfast.models.declaration import CacheRows, needed
from holdfast.models.declared_weights import Weight
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.parameters import LLAMA_NAMES, Kind
from holdfast.models.settings import (
    DTYPES,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Settings,
)
from holdfast.models.spec import ExpertsSpec, ModelSpec, RopeSpec
from holdfast.quant.formats import KVFormat

STAYS: Kind = "router"
"""The kind of weights that no scheme applies to: towers stay as they are stored."""


@dataclass(frozen=True)
class PlannedBlueprint(Blueprint):
    """A decoder as running families declare it, with sliding windows and additional weights."""

    more: tuple[Weight, ...] = ()
    """Weights that every rank has whole: an image tower, and norms after attention and MLP."""

    @property
    def is_paged(self) -> bool:
        return not self.decoder.sliding_windows

    def weights(self, mesh: Mesh) -> tuple[Weight, ...]:
        weights = [weight._replace(tensors=()) for weight in self.grouped.weights(mesh)]
        # Experts follow all other weights, so that owners keep their order in tables.
        return (*sorted(weights, key=lambda weight: weight.group == "experts"), *self.more)

    def cache_rows(self, kv_format: KVFormat, mesh: Mesh) -> tuple[CacheRows, ...]:
        num_layers = sum(window is None for window in self._windows)
        return (CacheRows("attention", num_layers, self._row_bytes(kv_format, mesh)),) if num_layers else ()

    def sequence_bytes(self, kv_format: KVFormat, mesh: Mesh) -> int:
        num_rows = sum(window for window in self._windows if window is not None)
        return num_rows * self._row_bytes(kv_format, mesh)

    @property
    def _windows(self) -> tuple[int | None, ...]:
        return self.decoder.sliding_windows or (None,) * self.decoder.num_layers

    def _row_bytes(self, kv_format: KVFormat, mesh: Mesh) -> int:
        spec = self.grouped.rank(mesh)
        return kv_format.bytes_per_token(spec.num_kv_heads, spec.head_dim)


def _read_plain(settings: Settings, native: str | None) -> PlannedBlueprint:
    return _blueprint(settings, read_decoder(settings), native)


def _read_mixtral(settings: Settings, native: str | None) -> PlannedBlueprint:
    spec = read_decoder(settings)
    num_experts = needed(settings, "num_local_experts", MAX_EXPERTS)
    top_k = needed(settings, "num_experts_per_tok", num_experts)
    experts = ExpertsSpec(num_experts, top_k, spec.intermediate_size)
    return _blueprint(settings, replace(spec, experts=experts), native)


def _read_gemma2(settings: Settings, native: str | None) -> PlannedBlueprint:
    spec = replace(read_decoder(settings, is_tied=True, head_dim=256), activation="gelu_tanh")
    window = settings.optional_count("sliding_window", 4096, MAX_POSITIONS)
    spec = replace(spec, sliding_windows=_windows(settings, spec, window, 2))
    return _with_output_norms(_blueprint(settings, spec, native))


def _read_glm(settings: Settings, native: str | None) -> PlannedBlueprint:
    spec = replace(read_decoder(settings, head_dim=128), qkv_bias=settings.flag("attention_bias", False))
    return _blueprint(settings, spec, native, rotated=0.5)


def _read_glm4(settings: Settings, native: str | None) -> PlannedBlueprint:
    return _with_output_norms(_read_glm(settings, native))


def _with_output_norms(blueprint: PlannedBlueprint) -> PlannedBlueprint:
    """Add norms after attention and after the MLP of every layer."""
    names = ("attn_out_norm", "mlp_out_norm")
    norms = (f"layers.{layer}.{name}.weight" for layer in range(blueprint.decoder.num_layers) for name in names)
    return replace(blueprint, more=tuple(Weight(name, (blueprint.decoder.hidden_size,), "norm") for name in norms))


def _read_glm4_moe(settings: Settings, native: str | None) -> PlannedBlueprint:
    spec = read_decoder(settings, head_dim=128)
    num_experts, inner = (
        needed(settings, "n_routed_experts", MAX_EXPERTS),
        needed(settings, "moe_intermediate_size", 2**20),
    )
    num_dense = settings.count("first_k_dense_replace", 1, spec.num_layers, low=0)
    experts = ExpertsSpec(
        num_experts,
        needed(settings, "num_experts_per_tok", num_experts),
        inner,
        shared_size=inner * (settings.optional_count("n_shared_experts", None, MAX_EXPERTS) or 0),
        has_score_bias=True,
        dense_layers=frozenset(range(num_dense)),
    )
    spec = replace(
        spec,
        experts=experts,
        qkv_bias=settings.flag("attention_bias", False),
        qk_norm=settings.flag("use_qk_norm", False),
    )
    return _blueprint(settings, spec, native, rotated=0.5)


def _read_mistral3(settings: Settings, native: str | None) -> PlannedBlueprint:
    text, vision = read_part(settings, "text_config"), read_part(settings, "vision_config")
    declaration = _blueprint(text, read_decoder(text), native)
    merged = settings.count("spatial_merge_size", 2, 64)
    return replace(declaration, more=_pixtral(vision, declaration.decoder.hidden_size, merged))


READERS = {
    "Phi3ForCausalLM": _read_plain,
    "Ministral3ForCausalLM": _read_plain,
    "MixtralForCausalLM": _read_mixtral,
    "Gemma2ForCausalLM": _read_gemma2,
    "Mistral3ForConditionalGeneration": _read_mistral3,
    "GlmForCausalLM": _read_glm,
    "Glm4ForCausalLM": _read_glm4,
    "Glm4MoeForCausalLM": _read_glm4_moe,
}


def read_part(settings: Settings, key: str) -> Settings:
    """Read a nested model, which inherits settings of the whole."""
    part = settings.part(key)
    if part is None:
        raise settings.missing(key, "a plan would be a guess without it")
    shared = {name: settings.values[name] for name in ("dtype", "torch_dtype") if name in settings}
    return Settings({**shared, **part.values}, part.file, part.section)


def read_decoder(
    settings: Settings, *, is_tied: bool = False, head_dim: int | None = None, inner_key: str = "intermediate_size"
) -> ModelSpec:
    """Read the settings that all of these decoders share."""
    hidden, num_heads = needed(settings, "hidden_size", MAX_WIDTH), needed(settings, "num_attention_heads", MAX_HEADS)
    num_kv_heads = settings.optional_count("num_key_value_heads", None, MAX_HEADS) or num_heads
    if num_heads % num_kv_heads:
        raise settings.refuse("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}")
    spec = ModelSpec(
        architecture=(settings.texts("architectures") or ("",))[0],
        family=settings.text("model_type", ""),
        vocab_size=needed(settings, "vocab_size", MAX_VOCAB),
        hidden_size=hidden,
        intermediate_size=needed(settings, inner_key, MAX_WIDTH),
        num_layers=needed(settings, "num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=settings.optional_count("head_dim", head_dim, MAX_HEAD_DIM) or hidden // num_heads,
        max_position=needed(settings, "max_position_embeddings", MAX_POSITIONS),
        checkpoint_dtype=read_dtype(settings),
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=RopeSpec(settings.number("rope_theta", 10_000.0)),
        tied_embeddings=settings.flag("tie_word_embeddings", is_tied),
    )
    window = settings.optional_count("sliding_window", None, MAX_POSITIONS)
    is_windowed = window is not None and window < spec.max_position
    return replace(spec, sliding_windows=(window,) * spec.num_layers if is_windowed else ())


def read_dtype(settings: Settings) -> str:
    """Read the type in which the checkpoint is stored."""
    name = settings.text("dtype", settings.text("torch_dtype", "bfloat16")).removeprefix("torch.")
    if name not in DTYPES:
        raise settings.refuse("torch_dtype", name, f"one of {', '.join(DTYPES)}")
    return name


def _blueprint(settings: Settings, spec: ModelSpec, native: str | None, rotated: float = 1.0) -> PlannedBlueprint:
    share = settings.optional_number("partial_rotary_factor") or rotated
    return PlannedBlueprint(DecoderDeclaration(spec, LLAMA_NAMES, native), int(spec.head_dim * share))


def _windows(settings: Settings, spec: ModelSpec, window: int | None, every: int) -> tuple[int | None, ...]:
    """Return the window of each layer: as listed, else for all but every `every`-th layer."""
    if window is None or window >= spec.max_position:
        return ()
    kinds = settings.texts("layer_types")
    if kinds is None:
        return tuple(window if (layer + 1) % every else None for layer in range(spec.num_layers))
    if len(kinds) != spec.num_layers:
        raise settings.refuse("layer_types", list(kinds), f"one entry for each of {spec.num_layers} layers")
    unknown = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if unknown is not None:
        raise settings.unsupported("layer_types", f"a plan has no layers of kind {shown(unknown)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _pixtral(settings: Settings, text_width: int, merged: int) -> tuple[Weight, ...]:
    """List the weights of Pixtral: RoPE in two dimensions; patches are merged and projected to the text model."""
    hidden, inner = needed(settings, "hidden_size", MAX_WIDTH), needed(settings, "intermediate_size", MAX_WIDTH)
    num_layers, patch = needed(settings, "num_hidden_layers", MAX_LAYERS), needed(settings, "patch_size", MAX_WIDTH)
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("patch", (hidden, 3 * patch * patch)),
        ("norm", (hidden,)),
    ]
    for layer in range(num_layers):
        names = {"attn_norm": (hidden,), "mlp_norm": (hidden,), "qkv": (3 * hidden, hidden), "o": (hidden, hidden)}
        names |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        shapes += [(f"layers.{layer}.{name}", shape) for name, shape in names.items()]
    shapes += [
        ("projection_norm", (hidden,)),
        ("merge", (hidden, hidden * merged * merged)),
        ("projection_in", (text_width, hidden)),
        ("projection_out", (text_width, text_width)),
    ]
    return tuple(Weight(f"vision.{name}.weight", shape, "norm" if len(shape) == 1 else STAYS) for name, shape in shapes)

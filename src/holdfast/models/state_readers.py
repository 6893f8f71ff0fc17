"""Readers of layers with a state: gated delta nets of Qwen3-Next, 3.5 and 3.6, and partial RoPE beside them; no torch."""

from typing import Literal

from holdfast.families.state.spec import StateSpec
from holdfast.kernels.state.state_geometry import MAX_HEAD_DIM as MAX_STATE_DIM
from holdfast.models.settings import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, Settings

FULL, LINEAR = "full_attention", "linear_attention"
MAX_CONV_WIDTH = 8
DEFAULT_INTERVAL = 4
"""Every fourth layer attends to tokens."""
ROTATED_SHARE = 0.25
"""Default of transformers for `partial_rotary_factor`."""
IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""RoPE by time, row and column of an image. All three are the position of a text's token."""


def read_state(settings: Settings, num_layers: int, *, is_joined: bool) -> StateSpec | None:
    """Read the gated delta nets of a config; None if every layer attends to tokens."""
    kinds = _layer_kinds(settings, num_layers)
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    if len(layers) == num_layers:
        _refuse_states_alone(settings, kinds)
    keys = settings.count("linear_num_key_heads", 16, MAX_HEADS)
    values = settings.count("linear_num_value_heads", 32, MAX_HEADS)
    if values % keys:
        raise settings.refuse("linear_num_value_heads", values, f"a multiple of linear_num_key_heads = {keys}")
    key_dim, value_dim = (_head_dim(settings, f"linear_{name}_head_dim") for name in ("key", "value"))
    width = settings.count("linear_conv_kernel_dim", 4, MAX_CONV_WIDTH, low=2)
    gate = _output_gate(settings)
    if not layers:
        return None
    return StateSpec(
        layers, keys, values, key_dim, value_dim, width, output_gate=gate, is_joined=is_joined, joins_gates=is_joined
    )


def _layer_kinds(settings: Settings, num_layers: int) -> tuple[str, ...]:
    """Return the kind of every layer: as listed, else one of so many attends to tokens."""
    kinds = settings.texts("layer_types")
    if kinds is None:
        every = settings.count("full_attention_interval", DEFAULT_INTERVAL, MAX_LAYERS)
        return tuple(LINEAR if (layer + 1) % every else FULL for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {FULL, LINEAR}:
        raise settings.refuse("layer_types", list(kinds), f"{FULL} or {LINEAR} for each of {num_layers} layers")
    return kinds


def _refuse_states_alone(settings: Settings, kinds: tuple[str, ...]) -> None:
    """Refuse a model without a layer that attends to tokens, by the key that says so."""
    reason = "pages are planned by layers that attend to tokens"
    if settings.texts("layer_types") is not None:
        raise settings.refuse("layer_types", list(kinds), f"at least one {FULL}: {reason}")
    key, most = "full_attention_interval", len(kinds)
    raise settings.refuse(
        key, settings.values.get(key, DEFAULT_INTERVAL), f"at most {most}, the number of layers: {reason}"
    )


def _head_dim(settings: Settings, key: str) -> int:
    """Return the elements of a key or of a value."""
    dim = settings.count(key, 128, MAX_HEAD_DIM)
    if dim > MAX_STATE_DIM:
        raise settings.unsupported(key, f"kernels of states take up to {MAX_STATE_DIM} elements of a head")
    return dim


def _output_gate(settings: Settings) -> Literal["silu", "sigmoid"]:
    match settings.text("output_gate_type", "silu"):
        case "silu" | "swish":
            return "silu"
        case "sigmoid":
            return "sigmoid"
    raise settings.unsupported("output_gate_type", "output gates are silu or sigmoid here")


def read_rotary_dim(settings: Settings, head_dim: int) -> int:
    """Return how many elements of a head RoPE turns."""
    parts = [part for key in ("rope_scaling", "rope_parameters") if (part := settings.part(key)) is not None]
    key = "partial_rotary_factor"
    where = next((part for part in (*parts, settings) if part.values.get(key) is not None), settings)
    rotary_dim = int(head_dim * where.number(key, ROTATED_SHARE))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        wanted = f"a share that turns an even number of the {head_dim} elements of a head"
        raise where.refuse(key, where.values.get(key, ROTATED_SHARE), wanted)
    return rotary_dim


def without_partial_rope(settings: Settings) -> Settings:
    """Return the settings without the keys that `read_rotary_dim` reads, and those of images."""
    dropped = ("partial_rotary_factor", *IMAGE_ROPE_KEYS)
    values = {key: value for key, value in settings.values.items() if key not in dropped}
    for key in ("rope_scaling", "rope_parameters"):
        part = settings.part(key)
        if part is not None:
            values[key] = {name: value for name, value in part.values.items() if name not in dropped}
    return Settings(values, settings.file, settings.section)

"""Settings: checked values of a config.json, with experts, RoPE and other values that families share; no torch.

RoPE settings come in an old spelling (rope_theta, rope_scaling) and a new one (rope_parameters).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, get_args

from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.kernels.geometry import INDEX_MULTIPLE, MAX_INDEX_DIM, MAX_INDEX_HEADS
from holdfast.models.spec import Activation, ExpertsSpec, RopeKind, RopeSpec

MAX_SHOWN = 60
"""Most characters of a name in a message."""
MAX_LISTED = 5
"""Most names in a message."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds that keep arithmetic finite."""
_ABSENT = object()

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_WIDTH = 2**20
MAX_VOCAB = 2**24
"""Bounds far above any model, and low enough to be harmless."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
EXPERT_DTYPES: Mapping[str, str | None] = {"fp4": "mxfp4", "fp8": None}
"""Maps `expert_dtype` beside fp8 matrices to the scheme of experts; None: that of the matrices."""
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
MAX_EXPERTS = 2**16
MAX_MODEL_EXPERTS = 2**17
"""Most experts over all layers: each is listed before a file is read. The largest models have about 23 thousand."""
MAX_EXPERT_WIDTH = 2**20
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts")
"""Two names of one key, which depend on family and transformers version."""

DEFAULT_THETA = 10_000.0
KINDS: tuple[str, ...] = get_args(RopeKind)
MAX_POSITIONS = 2**31 - 1
KNOWN_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "finetuned"),
    }
)
"""`finetuned` is a remark in older yarn checkpoints; the code below reads the rest."""


def plain(text: str) -> str:
    """Escape and shorten a name from a file."""
    return repr(text[:MAX_SHOWN])[1:-1] + ("..." if len(text) > MAX_SHOWN else "")


def listed(names: Sequence[str]) -> str:
    """Join the first few names, and count the rest."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(plain(name) for name in names[:MAX_LISTED]) + more


class Settings:
    """One JSON object of a config file. An absent key takes the default; null counts only if it has a meaning."""

    def __init__(self, values: Mapping[str, object], file: str, section: str = "") -> None:
        self.values = values
        self.file = file
        self.section = section

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def refuse(self, key: str, value: object, wanted: str) -> ModelFormatError:
        """Return the error for a value of the wrong type or out of bounds."""
        key = f"{self.section}{key}"
        return ModelFormatError(
            "architecture.wrong_value", file=self.file, key=key, value=value, wanted=wanted.rstrip(",")
        )

    def missing(self, key: str, reason: str) -> ModelFormatError:
        """Return the error for a key that must be there."""
        return ModelFormatError("architecture.missing_key", file=self.file, key=f"{self.section}{key}", reason=reason)

    def unsupported(self, key: str, reason: str) -> UnsupportedModelError:
        """Return the error for a valid value that this version does not compute."""
        values = {"file": self.file, "key": f"{self.section}{key}", "value": self.values.get(key)}
        return UnsupportedModelError("architecture.unsupported_setting", **values, reason=reason)

    def count(self, key: str, default: int, high: int, low: int = 1) -> int:
        """Read a whole number from `low` to `high`."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, value, f"a whole number from {low} to {high}")
        return value

    def required_count(self, key: str, high: int) -> int:
        """Like `count`, without a default."""
        if key not in self:
            raise self.missing(key, "a whole number is needed")
        return self.count(key, 0, high)

    def optional_count(self, key: str, default: int | None, high: int) -> int | None:
        """Like `count`, with null for none."""
        return None if self.values.get(key, default) is None else self.count(key, default or 1, high)

    def number(self, key: str, default: float | None = None, low: float = SMALLEST) -> float:
        """Read a finite number, at least `low`; without a default the key must be there."""
        value = self.values.get(key, _ABSENT if default is None else default)
        if value is _ABSENT:
            raise self.missing(key, "a number is needed")
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= LARGEST:
            raise self.refuse(key, value, "a number above 0" if low == SMALLEST else f"a number from {low:g} up")
        return float(value)

    def optional_number(self, key: str, low: float = SMALLEST) -> float | None:
        """Like `number`, with None if the key is absent or null."""
        return None if self.values.get(key) is None else self.number(key, low=low)

    def numbers(self, key: str, num_values: int) -> tuple[float, ...]:
        """Read a list of exactly `num_values` finite numbers above zero."""
        value = self.values.get(key, _ABSENT)
        if value is _ABSENT:
            raise self.missing(key, f"a list of {num_values} numbers is needed")
        if not isinstance(value, list) or len(value) != num_values or not all(_is_positive(item) for item in value):
            raise self.refuse(key, value, f"a list of {num_values} numbers above 0")
        return tuple(float(item) for item in value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, value, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Read a list of strings, or None if the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, value, "a list of strings")
        return tuple(value)

    def part(self, key: str) -> "Settings | None":
        """Read a nested object, or None if the key is absent, null or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, value, "an object")
        return Settings(value, self.file, f"{self.section}{key}.")

    def token_ids(self, key: str, default: Sequence[int]) -> tuple[int, ...]:
        """Read token ids from a number or a list; null and negative ids mean none."""
        value = self.values.get(key, list(default))
        token_ids: list[int] = []
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(item, bool) or not isinstance(item, int) or item >= 2**31:
                raise self.refuse(key, value, "a token id or a list of them")
            if item >= 0:
                token_ids.append(item)
        return tuple(token_ids)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST


@dataclass(frozen=True, slots=True)
class ExpertDefaults:
    """Defaults of transformers."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_size: int = 0
    """0: the family has no shared expert, even if its config.json names one."""


def read_experts(settings: Settings, num_layers: int, defaults: ExpertDefaults) -> ExpertsSpec | None:
    """Read the experts of a model; None if no layer has any."""
    num_experts = _num_experts(settings, defaults.num_experts)
    dense_layers = _dense_layers(settings, num_layers)
    if num_experts == 0 or len(dense_layers) == num_layers:
        return None
    check_total(settings, _count_key(settings), num_experts, num_layers - len(dense_layers))
    shared_size = 0
    if defaults.shared_size:
        shared_size = settings.count("shared_expert_intermediate_size", defaults.shared_size, MAX_EXPERT_WIDTH)
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=settings.count("num_experts_per_tok", min(defaults.top_k, num_experts), num_experts),
        intermediate_size=settings.count("moe_intermediate_size", defaults.intermediate_size, MAX_EXPERT_WIDTH),
        shared_size=shared_size,
        has_shared_gate=shared_size > 0,
        normalizes=settings.flag("norm_topk_prob", False),
        dense_layers=dense_layers,
    )


def read_clamped_experts(
    settings: Settings, num_layers: int, intermediate_size: int, defaults: ExpertDefaults
) -> ExpertsSpec:
    """Read the experts of gpt-oss: biases, interleaved gate and up, and a clamp on both, in every layer."""
    num_experts = _num_experts(settings, defaults.num_experts, low=1)
    check_total(settings, _count_key(settings), num_experts, num_layers)
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=settings.count("num_experts_per_tok", min(defaults.top_k, num_experts), num_experts),
        intermediate_size=intermediate_size,
        normalizes=True,
        has_router_bias=True,
        has_bias=True,
        is_interleaved=True,
        swiglu_limit=settings.number("swiglu_limit", 7.0),
    )


def decline(settings: Settings, rows: Mapping[str, tuple[Sequence[object], str]]) -> None:
    """Refuse settings that a reader does not compute. `rows`: by key, values without effect, and the reason."""
    for key, (neutral, reason) in rows.items():
        if settings.values.get(key) not in neutral:
            raise settings.unsupported(key, reason)


def read_mlp_layers(
    settings: Settings, num_layers: int, kinds: tuple[str, str], kind: str, first_few: tuple[str, int]
) -> frozenset[int]:
    """Read which layers have this one of two kinds of MLP: as listed, else the first few, by a key and its default."""
    listed = settings.texts("mlp_layer_types")
    if listed is None:
        return frozenset(range(min(num_layers, settings.count(*first_few, MAX_LAYERS, low=0))))
    if len(listed) != num_layers or set(listed) - set(kinds):
        raise settings.refuse("mlp_layer_types", list(listed), f"{' or '.join(kinds)} for each of {num_layers} layers")
    return frozenset(layer for layer, one in enumerate(listed) if one == kind)


def check_total(settings: Settings, key: str, num_experts: int, num_sparse: int) -> None:
    """Refuse a total of experts over all layers that is too large to list."""
    if num_experts * num_sparse > MAX_MODEL_EXPERTS:
        most = f"at most {MAX_MODEL_EXPERTS // num_sparse} in each of {num_sparse} layers"
        raise settings.refuse(key, num_experts, most)


def _count_key(settings: Settings) -> str:
    """Return the key that holds the number of experts."""
    return next((key for key in EXPERT_COUNT_KEYS if settings.values.get(key) is not None), EXPERT_COUNT_KEYS[0])


def _num_experts(settings: Settings, default: int, low: int = 0) -> int:
    keys = [key for key in EXPERT_COUNT_KEYS if settings.values.get(key) is not None]
    counts = [settings.count(key, default, MAX_EXPERTS, low) for key in keys]
    if len(set(counts)) > 1:
        raise settings.refuse(keys[1], counts[1], f"the same as {keys[0]} = {counts[0]}")
    return counts[0] if counts else default


def _dense_layers(settings: Settings, num_layers: int) -> frozenset[int]:
    """Return layers without experts: all but every `decoder_sparse_step`-th, and those of `mlp_only_layers`."""
    step = settings.count("decoder_sparse_step", 1, MAX_EXPERTS)
    listed = settings.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise settings.refuse("mlp_only_layers", listed, "a list of layers")
    return frozenset(layer for layer in range(num_layers) if (layer + 1) % step or layer in listed)


def read_rope(config: Settings, head_dim: int, max_position: int, default_theta: float = DEFAULT_THETA) -> RopeSpec:
    """Read the rotary positions of a config, with the defaults of transformers."""
    rope = config.part("rope_scaling") or config.part("rope_parameters") or Settings({}, config.file)
    return rope_of(config, rope, config.number("rope_theta", default_theta), head_dim, max_position)


ROPE_LAYERS = ("full_attention", "sliding_attention")
"""Kinds of layers that may have their own RoPE settings."""


def read_layer_rope(config: Settings, kind: str, theta: float, head_dim: int, max_position: int) -> RopeSpec:
    """Read the rotary positions of one kind of layer. The old spelling scales layers with full attention."""
    by_kind = config.part("rope_parameters") or Settings({}, config.file)
    for key in by_kind.values:
        if key not in ROPE_LAYERS:
            raise by_kind.refuse(key, by_kind.values[key], f"rotary settings of {' and '.join(ROPE_LAYERS)}, no others")
    rope = by_kind.part(kind) or Settings({}, config.file)
    old = config.part("rope_scaling") if kind == "full_attention" else None
    if old is not None:
        rope = Settings({**rope.values, **old.values}, config.file, old.section)
    return rope_of(config, rope, theta, head_dim, max_position)


def rope_of(config: Settings, rope: Settings, default_theta: float, head_dim: int, max_position: int) -> RopeSpec:
    """Read rotary positions from these rotary settings of a config."""
    unknown = sorted(set(rope.values) - KNOWN_KEYS)
    if unknown:
        key = f"{rope.section}{plain(unknown[0])}"
        raise UnsupportedModelError("architecture.unknown_rope_setting", file=config.file, key=key)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in KINDS:
        key = "rope_type" if "rope_type" in rope else "type"
        raise rope.unsupported(key, f"the kinds of rotary positions are {', '.join(KINDS)}")
    if head_dim % 2:
        raise config.refuse("head_dim", head_dim, "an even number, for rotary positions")
    for part in (config, rope):
        if part.optional_number("partial_rotary_factor") not in (None, 1.0):
            raise part.unsupported("partial_rotary_factor", "whole heads are rotated here")
    theta = rope.number("rope_theta", default_theta, low=2.0)
    if kind == "default":
        return RopeSpec(theta)
    return _scaled(cast(RopeKind, kind), theta, config, rope, head_dim, max_position)


def _scaled(
    kind: RopeKind, theta: float, config: Settings, rope: Settings, head_dim: int, max_position: int
) -> RopeSpec:
    original = _original_max_position(config, rope, max_position) if kind in ("llama3", "yarn", "longrope") else 0
    stretch = max_position / original if original else None
    if kind == "linear":
        return RopeSpec(theta, kind, factor=rope.number("factor"))
    if kind == "dynamic":
        if head_dim == 2:
            raise config.refuse("head_dim", head_dim, "more than 2, for dynamic rotary positions")
        return RopeSpec(theta, kind, factor=rope.number("factor"), original_max_position=max_position)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.refuse("high_freq_factor", high, f"more than low_freq_factor = {low:g}")
        return RopeSpec(
            theta,
            kind,
            factor=rope.number("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        return RopeSpec(
            theta,
            kind,
            factor=_factor(rope, stretch) if "factor" in rope else rope.number("factor"),
            original_max_position=original,
            beta_fast=rope.optional_number("beta_fast") or 32.0,
            beta_slow=rope.optional_number("beta_slow") or 1.0,
            attention_factor=rope.optional_number("attention_factor"),
            mscale=rope.optional_number("mscale", low=0.0),
            mscale_all_dim=rope.optional_number("mscale_all_dim", low=0.0),
            truncate=rope.flag("truncate", True),
        )
    return RopeSpec(
        theta,
        kind,
        factor=_factor(rope, stretch),
        original_max_position=original,
        attention_factor=rope.optional_number("attention_factor"),
        short_factor=rope.numbers("short_factor", head_dim // 2),
        long_factor=rope.numbers("long_factor", head_dim // 2),
    )


def _original_max_position(config: Settings, rope: Settings, max_position: int) -> int:
    # The outer key wins over the one in the RoPE settings: Phi3's checkpoints rely on that.
    inner = rope.count("original_max_position_embeddings", max_position, MAX_POSITIONS)
    return config.count("original_max_position_embeddings", inner, MAX_POSITIONS, low=2)


def _factor(rope: Settings, stretch: float | None) -> float:
    return rope.optional_number("factor") or stretch or 1.0


def read_index_sizes(settings: Settings, num_heads: int, head_dim: int, rope_dim: int) -> tuple[int, int]:
    """Read heads and head dim of an index that chooses the tokens to attend to, with these defaults."""
    num_heads = settings.count("index_n_heads", num_heads, MAX_HEADS)
    if num_heads > MAX_INDEX_HEADS:
        raise settings.refuse("index_n_heads", num_heads, f"up to {MAX_INDEX_HEADS} heads, which kernels support")
    head_dim = settings.count("index_head_dim", head_dim, MAX_WIDTH)
    if head_dim % INDEX_MULTIPLE or head_dim > MAX_INDEX_DIM:
        wanted = f"a multiple of {INDEX_MULTIPLE} up to {MAX_INDEX_DIM}, which kernels support"
        raise settings.refuse("index_head_dim", head_dim, wanted)
    if head_dim < rope_dim:
        wanted = f"at least qk_rope_head_dim = {rope_dim}, since so many of its elements are rotated,"
        raise settings.refuse("index_head_dim", head_dim, wanted)
    return num_heads, head_dim


def read_activation(settings: Settings, key: str, default: str) -> Activation:
    name = settings.text(key, default)
    if name not in ACTIVATIONS:
        raise settings.unsupported(key, f"the activations here are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def read_dtype(settings: Settings) -> str:
    """Read torch's name of the checkpoint's type."""
    key = "torch_dtype" if settings.values.get("dtype") is None else "dtype"
    if settings.values.get(key) is None:
        return "float32"
    name = settings.text(key, "").removeprefix("torch.")
    if name not in DTYPES:
        raise settings.unsupported(key, f"the types here are {', '.join(DTYPES)}")
    return name


def stretched(rope: RopeSpec, max_position: int) -> int:
    """Return the longest context: linear and yarn configs hold the length before or after stretching."""
    plain = {"linear": max_position, "yarn": rope.original_max_position}.get(rope.kind, 0)
    return min(max(max_position, int(plain * rope.factor)), MAX_POSITIONS)

"""Rotary settings of a config.json, in the old spelling (rope_theta, rope_scaling) and the new (rope_parameters); no torch."""

from typing import cast, get_args

from holdfast.errors import UnsupportedModelError, shown
from holdfast.models.settings import Settings, plain
from holdfast.models.spec import RopeKind, RopeSpec

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
"""`finetuned` is a remark of older yarn checkpoints; the rest is read below."""


def read_rope(config: Settings, head_dim: int, max_position: int) -> RopeSpec:
    """The rotation that a config describes, with what it leaves out filled in as transformers does."""
    rope = config.part("rope_scaling") or config.part("rope_parameters") or Settings({}, config.file)
    unknown = sorted(set(rope.values) - KNOWN_KEYS)
    if unknown:
        raise UnsupportedModelError(
            f"{config.file} sets {rope.section}{plain(unknown[0])}",
            "rotary positions are not computed with that setting",
            "use a model without it",
        )
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"{config.file} asks for rotary positions of kind {shown(kind)}",
            f"the kinds computed here are {', '.join(KINDS)}",
            "use a model with one of these",
        )
    if head_dim % 2:
        raise config.refuse("head_dim", head_dim, "an even number, for rotary positions,")
    for part in (config, rope):
        if part.optional_number("partial_rotary_factor") not in (None, 1.0):
            raise UnsupportedModelError(
                f"{config.file} rotates only a part of each head "
                f"({part.section}partial_rotary_factor = {shown(part.values['partial_rotary_factor'])})",
                "whole heads are rotated here",
                "use a model without it",
            )
    theta = rope.number("rope_theta", config.number("rope_theta", DEFAULT_THETA), low=2.0)
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
            raise config.refuse("head_dim", head_dim, "more than 2, for dynamic rotary positions,")
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
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
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
    # Beside the rotary settings the key wins over the one among them: Phi3's checkpoints rely on that.
    inner = rope.count("original_max_position_embeddings", max_position, MAX_POSITIONS)
    return config.count("original_max_position_embeddings", inner, MAX_POSITIONS, low=2)


def _factor(rope: Settings, stretch: float | None) -> float:
    return rope.optional_number("factor") or stretch or 1.0

"""StepRope: cos and sin of a step's rows for every layer; frequencies of every scaling kind; rotations of key biases.

Two kinds depend on the length of the text (dynamic, longrope). Cached keys cannot be rotated again when the
text grows, so max_model_len fixes the length once: a token then does not depend on when it was computed.
"""

import math
from dataclasses import dataclass

import torch

from holdfast.kernels.attention.key_bias import KeyTurns, make_key_turns
from holdfast.kernels.attention.rope_rows import RopeRows
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.models.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class StepRope:
    """Rows of all rotations of a model, which every step fills before its first layer."""

    rows: RopeRows | None
    """None: positions are learned."""
    rotaries: tuple[Rotary | None, ...]
    """Rotations of tokens, by layer; layers with equal RoPE share rows."""
    entries: tuple[Rotary | None, ...]
    """By layer, rotations of the first token of each row's entry; None in layers without entries."""


def make_step_rope(
    spec: ModelSpec, max_model_len: int, max_num_rows: int, dtype: torch.dtype, device: torch.device
) -> StepRope:
    """Allocate for steps of up to `max_num_rows` rows; cos and sin are [S, max_num_rows, rope_dim / 2] each."""
    sets = spec.rope_sets
    if not sets:
        nothing = (None,) * spec.num_layers
        return StepRope(None, nothing, nothing)
    found = [rope_frequencies(rope, spec.rope_dim, spec.max_position, max_model_len) for rope, _ in sets]
    shape = len(sets), max_num_rows, spec.rope_dim // 2
    rows = RopeRows(
        torch.stack([frequency_P for frequency_P, _ in found]).to(device),
        tuple(magnitude for _, magnitude in found),
        tuple(ratio for _, ratio in sets),
        *(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)),
    )
    by_set = {own: rows.rotary(number) for number, own in enumerate(sets)}
    ropes = [spec.layer_rope(layer) for layer in range(spec.num_layers)]
    tokens = tuple(None if rope is None else by_set[rope, 1] for rope in ropes)
    ratios = (spec.entry_ratio(layer) for layer in range(spec.num_layers))
    entries = (None if rope is None else by_set.get((rope, ratio)) for rope, ratio in zip(ropes, ratios, strict=True))
    return StepRope(rows, tokens, tuple(entries))


def key_turns(
    spec: ModelSpec, rope: RopeSpec, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> KeyTurns:
    """Compute the rotations of key biases that pages are stored without (kernels/attention/key_bias.py)."""
    turns = rope_frequencies(rope, spec.rope_dim, spec.max_position, max_model_len)
    return make_key_turns(*turns, max_model_len, dtype, device, spec.head_dim // 2)


def rope_frequencies(
    rope: RopeSpec, rope_dim: int, max_position: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """Compute inverse frequencies [rope_dim / 2] and the factor on cos and sin."""
    exponent_d = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    plain_d = 1.0 / rope.theta**exponent_d
    match rope.kind:
        case "default":
            return plain_d, 1.0
        case "linear":
            return plain_d / rope.factor, 1.0
        case "dynamic":
            stretch = rope.factor * max(max_model_len, max_position) / max_position - (rope.factor - 1)
            theta = rope.theta * stretch ** (rope_dim / (rope_dim - 2))
            return 1.0 / theta**exponent_d, 1.0
        case "llama3":
            return _llama3(rope, plain_d), 1.0
        case "yarn":
            return _yarn(rope, rope_dim, plain_d), _yarn_magnitude(rope)
        case "longrope":
            beyond = max_model_len > rope.original_max_position
            factors_d = torch.tensor(rope.long_factor if beyond else rope.short_factor, dtype=torch.float32)
            return 1.0 / (factors_d * rope.theta**exponent_d), _longrope_magnitude(rope)


def _llama3(rope: RopeSpec, plain_d: torch.Tensor) -> torch.Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend those between."""
    wavelength_d = 2 * math.pi / plain_d
    turns_d = rope.original_max_position / wavelength_d
    keep_d = (turns_d - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended_d = (1 - keep_d) * plain_d / rope.factor + keep_d * plain_d
    slow_d = torch.where(turns_d < rope.low_freq_factor, plain_d / rope.factor, blended_d)
    return torch.where(turns_d > rope.high_freq_factor, plain_d, slow_d)


def _yarn(rope: RopeSpec, rope_dim: int, plain_d: torch.Tensor) -> torch.Tensor:
    """Ramp linearly from kept to divided frequencies, between dimensions that rotate beta_fast and beta_slow times."""

    def dimension_of(turns: float) -> float:
        return rope_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    width = high - low if high != low else 0.001
    ramp_d = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain_d / rope.factor * ramp_d + plain_d * (1 - ramp_d)


def _yarn_magnitude(rope: RopeSpec) -> float:
    def growth(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)


def _longrope_magnitude(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))

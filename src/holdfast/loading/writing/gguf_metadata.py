"""GGUF metadata from a ModelSpec: the inverse of loading/gguf/config.py, with the keys that llama.cpp reads.

What has no key is not written. So a file must be read back and its spec compared (`unwritten`).
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace

import torch

from holdfast.loading.gguf.config import GEMMA3_27B_LAYERS
from holdfast.loading.writing.gguf_header import GGUFValue
from holdfast.loading.writing.gguf_plan import MIXES, architecture_of
from holdfast.models.rope import rope_frequencies
from holdfast.models.spec import ModelSpec, RopeSpec

QUANTIZATION_VERSION = 2
GEMMA3_PERIOD = 6
"""llama.cpp's default: one of so many layers has full attention."""
SAME = 1e-6
"""Relative difference of numbers that went through float32."""
FREE_FIELDS = ("architecture", "family", "checkpoint_dtype", "norm_offset", "attention_scale", "rope", "local_rope")
"""Fields that may differ, or are compared otherwise. A file has the offset of norms in their weights."""


def type_metadata(target: str) -> dict[str, GGUFValue]:
    """Return the keys that say how tensors are stored."""
    return {"general.file_type": MIXES[target].file_type, "general.quantization_version": QUANTIZATION_VERSION}


def spec_metadata(spec: ModelSpec, name: str) -> dict[str, GGUFValue]:
    """Return the keys about the model. `name` is for people."""
    arch = architecture_of(spec)
    experts = spec.experts
    own: dict[str, GGUFValue | None] = {
        "block_count": spec.num_layers,
        "context_length": _context_length(spec, arch),
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "rope.dimension_count": spec.head_dim,
        "vocab_size": spec.vocab_size,
        **_rope_metadata(spec),
    }
    if experts is not None:
        own["expert_count"] = experts.num_experts
        own["expert_used_count"] = experts.top_k
        own["expert_feed_forward_length"] = experts.intermediate_size
        own["expert_shared_feed_forward_length"] = experts.shared_size or None
    if arch == "gemma3":
        own |= _gemma3_metadata(spec)
    general: dict[str, GGUFValue] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": name,
    }
    return general | {f"{arch}.{key}": value for key, value in own.items() if value is not None}


def rope_factors(spec: ModelSpec) -> bytes:
    """Return a divisor for each rotary frequency in float32; empty if keys describe the rotation."""
    rope = spec.rope
    if rope is None or rope.kind != "llama3":
        return b""
    length = spec.max_position
    plain_d, _ = rope_frequencies(RopeSpec(rope.theta), spec.head_dim, length, length)
    scaled_d, _ = rope_frequencies(rope, spec.head_dim, length, length)
    return (plain_d / scaled_d).numpy().astype("<f4").tobytes()


def unwritten(written: ModelSpec, source: ModelSpec) -> str | None:
    """Return the first setting of the source that a file does not keep; None if it keeps all."""
    ours, theirs = (replace(spec, **dict.fromkeys(FREE_FIELDS)) for spec in (written, source))
    for field in fields(ModelSpec):
        if not _is_same(getattr(ours, field.name), getattr(theirs, field.name)):
            return field.name
    if not math.isclose(written.score_scale, source.score_scale, rel_tol=SAME):
        return "attention_scale"
    for layer in range(source.num_layers):
        one, other = written.layer_rope(layer), source.layer_rope(layer)
        if one is None or other is None or not _is_same_rope(one, other, source):
            return "rope"
    return None


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=SAME)
    return one == other


def _is_same_rope(one: RopeSpec, other: RopeSpec, spec: ModelSpec) -> bool:
    """Compare frequencies for the model's longest context, and for a longer one, which some kinds stretch to."""
    length = spec.max_position
    for max_model_len in (length, 4 * length):
        (one_d, factor), (other_d, other_factor) = (
            rope_frequencies(rope, spec.head_dim, length, max_model_len) for rope in (one, other)
        )
        if not torch.allclose(one_d, other_d, rtol=SAME, atol=0) or not _is_same(factor, other_factor):
            return False
    return True


def _context_length(spec: ModelSpec, arch: str) -> int:
    """Return the longest context before a linear stretch; config.json of Gemma 3 has the one after it."""
    if spec.rope is None or spec.rope.kind != "linear" or arch == "gemma3":
        return spec.max_position
    return round(spec.max_position / spec.rope.factor)


def _rope_metadata(spec: ModelSpec) -> Mapping[str, GGUFValue | None]:
    rope = spec.rope
    if rope is None:
        return {}
    found: dict[str, GGUFValue | None] = {"rope.freq_base": rope.theta}
    if rope.kind in ("linear", "yarn"):
        found["rope.scaling.type"] = rope.kind
        found["rope.scaling.factor"] = rope.factor
    if rope.kind == "yarn":
        found["rope.scaling.original_context_length"] = rope.original_max_position
        found["rope.scaling.yarn_beta_fast"] = rope.beta_fast
        found["rope.scaling.yarn_beta_slow"] = rope.beta_slow
    return found


def _gemma3_metadata(spec: ModelSpec) -> Mapping[str, GGUFValue | None]:
    """Return windows and soft caps. llama.cpp takes a period of windows; other patterns are a list."""
    found: dict[str, GGUFValue | None] = {
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.logit_softcap,
    }
    if spec.num_layers == GEMMA3_27B_LAYERS:
        found["attention.scale"] = spec.score_scale
    windows = [spec.window(layer) for layer in range(spec.num_layers)]
    sizes = {window for window in windows if window is not None}
    found["attention.sliding_window"] = max(sizes, default=spec.max_position)
    if spec.local_rope is not None:
        found["rope.freq_base_swa"] = spec.local_rope.theta
    is_local = [window is not None for window in windows]
    period = next((p for p in range(1, len(is_local) + 2) if _periodic(p, len(is_local)) == is_local), None)
    if period != GEMMA3_PERIOD:
        found["attention.sliding_window_pattern"] = is_local if period is None else period
    return found


def _periodic(period: int, num_layers: int) -> list[bool]:
    return [(layer + 1) % period != 0 for layer in range(num_layers)]

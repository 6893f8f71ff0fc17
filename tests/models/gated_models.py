"""Tiny models of full-attention layers alone, with RoPE on part of each head and output gates, as transformers writes them.

Their readers here serve tests of grouped attention: other layers of these architectures keep states.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.models.grouped_readers import FAMILIES, READERS, Family
from holdfast.models.settings import Settings
from holdfast.models.spec import ModelSpec
from loading import tiny_models

LAYERS = ["full_attention"] * 2
SMALL = tiny_models.SMALL | {"head_dim": 32, "layer_types": LAYERS, "rms_norm_eps": 1e-5}


def rope(share: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}


MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gated": ("Qwen3_5", SMALL | {"rope_parameters": rope(0.25)}),
    "gated biases": ("Qwen3_5", SMALL | {"rope_parameters": rope(0.75), "attention_bias": True}),
    "gated wide": (
        "Qwen3_5",
        SMALL
        | {"head_dim": 256, "num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": rope(0.25)}
        | {"tie_word_embeddings": True},
    ),
    "gated next": ("Qwen3Next", SMALL | {"rope_parameters": rope(0.25), "mlp_only_layers": [0, 1]}),
}
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig", "Qwen3Next": "Qwen3NextConfig"}


def read(settings: Settings, family: Family) -> ModelSpec:
    """Read as Qwen3, whose layers differ in norms, gates and the part that RoPE turns."""
    assert set(settings.texts("layer_types") or ()) == {"full_attention"}, "a layer keeps a state"
    rotary = dict(settings.values["rope_parameters"])  # type: ignore[call-overload]
    share = rotary.pop("partial_rotary_factor")
    own = {key: value for key, value in settings.values.items() if key != "partial_rotary_factor"}
    spec = READERS["qwen3"](Settings({**own, "rope_parameters": rotary}, settings.file), FAMILIES["Qwen3ForCausalLM"])
    rotary_dim = int(spec.head_dim * share)
    spec = replace(spec, rotary_dim=rotary_dim, has_output_gate=True, norm_offset=1.0)
    return replace(spec, architecture=family.architecture, family=family.name)


def families() -> dict[str, Family]:
    """The architectures of MODELS, by name."""
    qwen3 = FAMILIES["Qwen3ForCausalLM"]
    reads = ("num_experts", "num_local_experts")
    names = {"Qwen3_5ForCausalLM": "qwen3_5_text", "Qwen3NextForCausalLM": "qwen3_next"}
    return {
        architecture: replace(qwen3, name=name, architecture=architecture, read=read, reads=reads)
        for architecture, name in names.items()
    }

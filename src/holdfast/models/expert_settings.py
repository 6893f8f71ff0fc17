"""Experts from a config.json: how many, how wide, how a token chooses, and which layers have none; no torch."""

from dataclasses import dataclass

from holdfast.models.settings import Settings
from holdfast.models.spec import ExpertsSpec

MAX_EXPERTS = 2**16
MAX_MODEL_EXPERTS = 2**17
"""Of all layers together: every one is listed before a file is looked at. The largest models have some 23 thousand."""
MAX_EXPERT_WIDTH = 2**20
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts")
"""Both mean the same; transformers writes one or the other, by family and version."""


@dataclass(frozen=True, slots=True)
class ExpertDefaults:
    """What transformers assumes where config.json does not say."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_size: int = 0
    """0: the family has no shared expert, whatever its config.json says."""


def read_experts(settings: Settings, num_layers: int, defaults: ExpertDefaults) -> ExpertsSpec | None:
    """The experts of a model; None where no layer has any."""
    num_experts = _num_experts(settings, defaults.num_experts)
    dense_layers = _dense_layers(settings, num_layers)
    if num_experts == 0 or len(dense_layers) == num_layers:
        return None
    num_sparse = num_layers - len(dense_layers)
    if num_experts * num_sparse > MAX_MODEL_EXPERTS:
        key = next((key for key in EXPERT_COUNT_KEYS if settings.values.get(key) is not None), EXPERT_COUNT_KEYS[0])
        most = f"at most {MAX_MODEL_EXPERTS // num_sparse} in each of {num_sparse} layers"
        raise settings.refuse(key, num_experts, most)
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


def _num_experts(settings: Settings, default: int) -> int:
    keys = [key for key in EXPERT_COUNT_KEYS if settings.values.get(key) is not None]
    counts = [settings.count(key, default, MAX_EXPERTS, low=0) for key in keys]
    if len(set(counts)) > 1:
        raise settings.refuse(keys[1], counts[1], f"the same as {keys[0]} = {counts[0]}")
    return counts[0] if counts else default


def _dense_layers(settings: Settings, num_layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer has experts, less those that are listed as having none."""
    step = settings.count("decoder_sparse_step", 1, MAX_EXPERTS)
    listed = settings.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise settings.refuse("mlp_only_layers", listed, "a list of layers")
    return frozenset(layer for layer in range(num_layers) if (layer + 1) % step or layer in listed)

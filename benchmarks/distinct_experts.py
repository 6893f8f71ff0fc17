"""Distinct experts of a decode step: counted after timing, beside those of uniform routing; for records and roofs."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.models.spec import uniform_experts

if TYPE_CHECKING:
    from gpu_engines import OpenEngine

    from holdfast.engine.admission import TokensPrompt

COUNTED_STEPS = 3
"""Decode steps whose experts are counted."""


def count_experts(opened: "OpenEngine", made: Sequence["TokensPrompt"]) -> dict[str, float] | None:
    """Return means over layers and decode steps for these prompts, without graphs; None for a model without experts."""
    from holdfast.request.sampling_params import SamplingParams
    from holdfast.runner.expert_counts import counting_experts

    params = SamplingParams(temperature=0.0, max_tokens=1 + COUNTED_STEPS, ignore_eos=True)
    with counting_experts(opened.runner) as counts:
        if not counts.num_experts:
            return None
        opened.llm.generate([*made], params, progress=False)
    found = counts.summary(len(made))
    assert found is not None, f"no step of {len(made)} rows was run"
    print(json.dumps({"distinct_experts": found}), flush=True)
    return found


def unread_bytes(opened: "OpenEngine", num_distinct: float) -> int:
    """Return bytes of experts that a step skips if it uses this many of each layer."""
    from holdfast.quant.packed_weight import tensors_of
    from holdfast.runner.expert_counts import expert_layers

    layers = expert_layers(opened.runner)
    weights = [weight for layer in layers for weight in (layer.gate_up, layer.down)]
    held = sum(tensor.nbytes for weight in weights for tensor in tensors_of(weight))
    return round(held * (1 - num_distinct / len(layers[0].router_EH)))


def distinct_of(entry: Mapping[str, Any], num_experts: int, top_k: int) -> Mapping[str, float]:
    """Return the count for a batch; uniform routing if time ran out before the count."""
    uniform = round(uniform_experts(num_experts, top_k, entry["batch"]), 2)
    return entry.get("distinct_experts") or {"batch": entry["batch"], "measured": uniform, "uniform": uniform}


def shown_experts(distinct: Mapping[str, float] | None) -> str | None:
    """Format a table cell: counted experts, and those of uniform routing."""
    return None if distinct is None else f"{distinct['measured']:.1f}, uniform {distinct['uniform']:.1f}"

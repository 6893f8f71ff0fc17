"""Distinct experts that eager steps read, compared with uniform routing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.models.compressed_decoder import CompressedDecoder
from holdfast.models.layer_stack import LayerStack
from holdfast.models.spec import uniform_experts

if TYPE_CHECKING:
    import torch

    from holdfast.layers.moe import ExpertLayer
    from holdfast.runner.runner import Runner


@dataclass(slots=True)
class ExpertCounts:
    """Distinct experts of every sparse layer in every step that was counted."""

    num_experts: int
    rows: list[int] = field(default_factory=list)
    """Rows of a step, for each layer."""
    distinct: list[int] = field(default_factory=list)
    """Distinct experts of the same layer and step."""
    top_k: int = 0

    def add(self, expert_ids_TS: "torch.Tensor") -> None:
        num_rows, self.top_k = expert_ids_TS.shape
        self.rows.append(num_rows)
        self.distinct.append(expert_ids_TS.unique().numel())

    def summary(self, num_rows: int | None = None) -> dict[str, float] | None:
        """Return means over layers and steps, only those with `num_rows` rows if given; None if there are none."""
        found = [
            (rows, distinct, uniform_experts(self.num_experts, self.top_k, rows))
            for rows, distinct in zip(self.rows, self.distinct, strict=True)
            if num_rows in (None, rows)
        ]
        if not found:
            return None
        batch, measured, uniform = (round(sum(values) / len(found), 2) for values in zip(*found, strict=True))
        return {"batch": batch, "measured": measured, "uniform": uniform}


def expert_layers(runner: "Runner") -> "list[ExpertLayer]":
    """Return a model's sparse layers; none if it has no experts."""
    model = runner.model
    return model.expert_layers if isinstance(model, LayerStack | CompressedDecoder) else []


@contextmanager
def counting_experts(runner: "Runner") -> Iterator[ExpertCounts]:
    """Count experts of steps in this context. They run without graphs, and counting allocates: use it after timing."""
    layers = expert_layers(runner)
    counts = ExpertCounts(len(layers[0].router_EH) if layers else 0)
    graphs, runner.graphs = runner.graphs, None
    for layer in layers:
        layer.watch = counts.add
    try:
        yield counts
    finally:
        runner.graphs = graphs
        for layer in layers:
            layer.watch = None

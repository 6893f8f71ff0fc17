"""The sparse part of a mixture of experts, as weights and as tensors of a step; no torch."""

from typing import NamedTuple

from holdfast.memory.tensor_spec import TensorSpec
from holdfast.models.activations import LAYERS, Request
from holdfast.models.blueprint_anatomy import StepShape, split
from holdfast.models.blueprint_weights import Weight


class Experts(NamedTuple):
    """A router, its experts, and those that every token takes."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_size: int = 0
    """Inner width of the shared experts together; 0 for none."""
    has_shared_gate: bool = False
    has_router_bias: bool = False
    expert_native: str | None = None
    """The scheme in which the checkpoint stores experts."""
    shared_native: str | None = None

    def indivisible(self, num_ranks: int) -> str | None:
        """Ranks share every expert, a slice of its inner width each."""
        reason = split(self.intermediate_size, num_ranks, "columns of an expert")
        return reason or split(self.shared_size, num_ranks, "columns of the shared experts")

    def weights(self, prefix: str, hidden: int, num_ranks: int) -> tuple[Weight, ...]:
        """Of one layer, on one rank; gate and up are fused."""
        inner, shared = self.intermediate_size // num_ranks, self.shared_size // num_ranks
        count, native = self.num_experts, self.expert_native
        weights = [
            Weight(f"{prefix}router.weight", (count, hidden), "router"),
            Weight(f"{prefix}experts.gate_up.weight", (count, 2 * inner, hidden), "expert", native),
            Weight(f"{prefix}experts.down.weight", (count, hidden, inner), "expert", native),
        ]
        if self.has_router_bias:
            weights.append(Weight(f"{prefix}router.bias", (count,), "bias", dtype="float32"))
        if shared:
            weights += [
                Weight(f"{prefix}shared.gate_up.weight", (2 * shared, hidden), "linear", self.shared_native),
                Weight(f"{prefix}shared.down.weight", (hidden, shared), "linear", self.shared_native),
            ]
        if self.has_shared_gate:
            weights.append(Weight(f"{prefix}shared.gate.weight", (1, hidden), "router"))
        return tuple(weights)

    def request(self, step: StepShape, hidden: int, num_ranks: int) -> Request:
        """One layer's experts: every row goes through `top_k` of them, and its results are summed up."""
        rows, chosen = step.num_rows, step.num_rows * self.top_k
        inner, shared = self.intermediate_size // num_ranks, self.shared_size // num_ranks
        specs = [
            TensorSpec("router", (rows, self.num_experts), "float32"),
            TensorSpec("wide", (chosen, 2 * inner), step.dtype),
            TensorSpec("active", (chosen, inner), step.dtype),
            TensorSpec("routed", (chosen, hidden), step.dtype),
        ]
        if shared:
            specs += [
                TensorSpec("shared_wide", (rows, 2 * shared), step.dtype),
                TensorSpec("shared_active", (rows, shared), step.dtype),
            ]
        return Request(LAYERS, "experts", tuple(specs))

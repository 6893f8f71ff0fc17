"""The sparse part of a mixture of experts that is planned and not run, as weights and as tensors of a step; no torch."""

from typing import NamedTuple

from holdfast.models.activations import Request, experts_request
from holdfast.models.blueprints.blueprint_anatomy import StepShape, split
from holdfast.models.blueprints.blueprint_weights import Weight
from holdfast.models.spec import ExpertsSpec


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
        return indivisible_experts(self.intermediate_size, self.shared_size, num_ranks)

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
        return experts_request(self.rank(num_ranks), hidden, step.num_rows, step.dtype)

    def rank(self, num_ranks: int) -> ExpertsSpec:
        """The experts as one rank computes them."""
        return ExpertsSpec(
            num_experts=self.num_experts,
            top_k=self.top_k,
            intermediate_size=self.intermediate_size // num_ranks,
            shared_size=self.shared_size // num_ranks,
            has_shared_gate=self.has_shared_gate,
        )


def indivisible_experts(intermediate_size: int, shared_size: int, num_ranks: int) -> str | None:
    """None, or which width does not divide into so many parts, in words."""
    reason = split(intermediate_size, num_ranks, "columns of an expert")
    return reason or split(shared_size, num_ranks, "columns of the shared experts")

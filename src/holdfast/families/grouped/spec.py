"""Grouped attention (MHA, GQA, MQA): keys and values by head, with query heads in groups over them; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Optional

from holdfast.attention.declarations import AttentionSpec
from holdfast.memory.workspace_plan import TensorSpec

if TYPE_CHECKING:
    import torch

    from holdfast.kernels.gemm.quantize_activations import QuantizedRows

OWN = ("qkv", "q", "attended")


@dataclass(frozen=True, slots=True)
class GroupedAttentionSpec(AttentionSpec):
    """One layer with keys and values by head."""

    softcap: float | None = None
    """Replace every score by cap * tanh(score / cap), after `scale`."""
    has_sinks: bool = False
    """One logit per query head joins every softmax, in the denominator alone."""

    @property
    def key_part(self) -> slice:
        """Columns of the fused projection that are keys."""
        start, dim = self.num_heads * self.cache.head_dim, self.cache.head_dim
        return slice(start, start + self.cache.num_kv_heads * dim)

    @property
    def is_plain_softmax(self) -> bool:
        """True if adding one number to all scores of a row changes nothing. A sink or a cap would see it."""
        return self.softcap is None and not self.has_sinks


class GroupedSpec(NamedTuple):
    """Grouped attention of a model: what its projections and its scratch follow from."""

    num_kv_heads: int

    @property
    def modules(self) -> tuple[str, ...]:
        return "qkv", "o"

    def qkv_size(self, num_heads: int, head_dim: int) -> int:
        return (num_heads + 2 * self.num_kv_heads) * head_dim

    def products(self, hidden: int, num_heads: int, head_dim: int) -> tuple[tuple[int, int], ...]:
        """List outputs and inputs of the weights, in the order of computation."""
        return (self.qkv_size(num_heads, head_dim), hidden), (hidden, num_heads * head_dim)

    def tensors(self, num_heads: int, head_dim: int, num_rows: int, dtype: str) -> tuple[TensorSpec, ...]:
        """Declare the tensors of `GroupedBuffers`."""
        return (
            TensorSpec("qkv", (num_rows, self.qkv_size(num_heads, head_dim)), dtype),
            TensorSpec("q", (num_rows, num_heads, head_dim), dtype),
            TensorSpec("attended", (num_rows, num_heads * head_dim), dtype),
        )


class GroupedBuffers(NamedTuple):
    """One layer's tensors, one set for all layers."""

    qkv_TX: "torch.Tensor"
    q_THD: "torch.Tensor"
    attended_TX: "torch.Tensor"
    scratch: Mapping[str, "torch.Tensor"]
    """The backend's own, by name."""
    quantized: Optional["QuantizedRows"] = None
    """Holds the quantized rows of either product; None if no weight takes them."""

    @classmethod
    def of(cls, held: Mapping[str, "torch.Tensor"], quantized: Optional["QuantizedRows"]) -> "GroupedBuffers":
        """Take the tensors that `GroupedSpec.tensors` declares; the others are the backend's scratch."""
        scratch = {name: tensor for name, tensor in held.items() if name not in OWN}
        return cls(*(held[name] for name in OWN), scratch=scratch, quantized=quantized)

"""Grouped attention (MHA, GQA, MQA): keys and values by head, with query heads in groups over them; no torch."""

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.attention.declarations import AttentionSpec
from holdfast.memory.workspace_plan import TensorSpec


class NearSpec(NamedTuple):
    """Tokens that a layer with quantized pages keeps as they came, in the planes near_k and near_v (cache/near.py)."""

    block_tokens: int
    """A row sees the tokens of its own block exact: those from its position // block_tokens * block_tokens on."""
    group: int
    """Cache group of these planes: their slots and their page table."""
    page_tokens: int
    """Tokens of a chunk of these planes, which kernels call a page."""
    first_tokens: int
    """A row sees so many tokens at the start exact too; 0 in a layer with a window."""


@dataclass(frozen=True, slots=True)
class GroupedAttentionSpec(AttentionSpec):
    """One layer with keys and values by head."""

    softcap: float | None = None
    """Replace every score by cap * tanh(score / cap), after `scale`."""
    has_sinks: bool = False
    """One logit per query head joins every softmax, in the denominator alone."""
    near: NearSpec | None = None
    """Tokens that are exact beside quantized pages; None: every token is read as stored."""
    has_lane: bool = False
    """True if prompts may read quantized pages through the lane (kernels/attention/lane_rows.py)."""
    has_output_gate: bool = False
    """The fused projection has a gate after each query head."""

    @property
    def query_step(self) -> int:
        """Heads from one query head of the fused projection to the next."""
        return query_step(self.has_output_gate)

    @property
    def key_part(self) -> slice:
        """Columns of the fused projection that are keys."""
        start, dim = self.query_step * self.num_heads * self.cache.head_dim, self.cache.head_dim
        return slice(start, start + self.cache.num_kv_heads * dim)

    @property
    def is_plain_softmax(self) -> bool:
        """True if adding one number to all scores of a row changes nothing. A sink or a cap would see it."""
        return self.softcap is None and not self.has_sinks


def query_step(has_output_gate: bool) -> int:
    """Return the heads from one query head of a fused projection to the next: its gate follows each, if it has one."""
    return 2 if has_output_gate else 1


class GroupedSpec(NamedTuple):
    """Grouped attention of a model: what its projections and its scratch follow from."""

    num_kv_heads: int
    has_output_gate: bool = False
    """A gate follows each query head, and its sigmoid multiplies the head's output."""

    @property
    def modules(self) -> tuple[str, ...]:
        return "qkv", "o"

    def qkv_size(self, num_heads: int, head_dim: int) -> int:
        return (query_step(self.has_output_gate) * num_heads + 2 * self.num_kv_heads) * head_dim

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

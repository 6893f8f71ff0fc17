"""What one layer's attention computes, the bounds of a step, and what a backend declares about itself; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.cache.spec import LayerCache
from holdfast.memory.planner import Term
from holdfast.memory.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes, where, and what its cache keeps."""

    cache: LayerCache
    num_heads: int
    scale: float
    window: int | None
    """How many of the newest tokens, the current one included, a token sees; None for all."""
    max_model_len: int
    dtype: str
    """torch's name of the type of queries and outputs."""
    device_kind: str
    """cpu or cuda."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The most that one step can hold."""

    max_num_seqs: int
    max_num_rows: int
    page_tokens: int


class BackendDeclaration(Protocol):
    """What is known of a backend without building it: whether it takes a layer, and every byte it will want."""

    name: str
    can_be_captured: bool
    """Whether a graph of its launches serves other steps than the one it was captured with."""

    can_be_invariant: bool
    """Whether it can give a row the same bits in any company."""

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """None, or why this layer cannot run here, in words."""
        ...

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """Workspace that `attend` needs beside queries and outputs, one set for all layers."""
        ...

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        """What it holds from start to end: work lists, mask templates."""
        ...

"""The attention contract: a backend declines in words, plans once a step, and writes and attends once a layer.

A layer hands over its fused projection as it is. Norms, rotation, quantization and the write into pages belong to the
backend, because the formats and devices that matter do all of them in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch

from holdfast.attention.batch import Batch, SequenceRows
from holdfast.cache.spec import LayerCache
from holdfast.kernels.write_heads import HeadNorm, Rotary
from holdfast.memory.planner import Term

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes, where, and what its cache keeps."""

    cache: LayerCache
    num_heads: int
    scale: float
    window: int | None
    """How many of the newest tokens, the current one included, a token sees; None for all."""
    max_model_len: int
    dtype: torch.dtype
    device: torch.device


class AttentionBackend(Protocol[PlanT]):
    """One way to attend to paged keys and values. Nothing outside it knows what the planes of a page mean."""

    name: ClassVar[str]

    @staticmethod
    def unsupported(spec: AttentionSpec) -> str | None:
        """None, or why this layer cannot run here, in words; asked before anything is built."""
        ...

    @staticmethod
    def terms(specs: Sequence[AttentionSpec]) -> tuple[Term, ...]:
        """What it will hold for all layers together, from shapes."""
        ...

    def plan(self, sequences: Sequence[SequenceRows]) -> PlanT:
        """What attending to these rows has in common in all layers."""
        ...

    def write(
        self, qkv_TX: torch.Tensor, batch: Batch, head_norm: HeadNorm | None, rotary: Rotary | None, layer: int
    ) -> torch.Tensor:
        """Write the step's keys and values into their slots; the queries, in whatever form `attend` takes them: [T, H, D]."""
        ...

    def attend(self, q_RHD: torch.Tensor, layer: int, plan: PlanT) -> torch.Tensor:
        """Attend with the planned rows to all that is stored: [R, H * D]."""
        ...

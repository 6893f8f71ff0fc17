"""The attention contract: a backend declines in words, plans once a step, and runs once a layer.

A layer hands over its fused projection as it is. Norms, rotation, quantization and the write into pages belong to the
backend, because the formats and devices that matter do all of them in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch

from holdfast.attention.batch import Batch
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

    def plan(self, batch: Batch) -> PlanT:
        """What all layers of this step share."""
        ...

    def run(
        self, qkv_TX: torch.Tensor, head_norm: HeadNorm | None, rotary: Rotary | None, layer: int, plan: PlanT
    ) -> torch.Tensor:
        """Write this step's keys and values into their slots, attend to all that is stored, give [T, H * D] back."""
        ...

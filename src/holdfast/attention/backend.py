"""The attention contract: a backend plans once a step, and writes and attends once a layer.

A layer hands over its fused projection as it is. Norms, rotation, quantization and the write into pages belong to the
backend, because the formats and devices that matter do all of them in one pass. What a backend takes, and what it will
hold, is declared without building it (attention/declarations.py).
"""

from typing import ClassVar, Protocol, TypeVar

import torch

from holdfast.attention.batch import Batch
from holdfast.kernels.pages.write_heads import HeadNorm, Rotary

PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol[PlanT]):
    """One way to attend to paged keys and values. Nothing outside it knows what the planes of a page mean."""

    name: ClassVar[str]

    def held_bytes(self) -> dict[str, int]:
        """What it holds from start to end, by the owners that its declaration names."""
        ...

    def plan(self, batch: Batch, captured: bool = False) -> PlanT:
        """What attending to this step has in common in all layers, in memory that stays where it is.

        `captured`: the launches must not depend on the step's lengths, because a graph repeats them for other steps.
        """
        ...

    def write(
        self,
        qkv_TX: torch.Tensor,
        batch: Batch,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        layer: int,
        out_THD: torch.Tensor,
    ) -> None:
        """Write the step's keys and values into their slots, and the queries, in the form that `attend` takes."""
        ...

    def attend(
        self,
        q_THD: torch.Tensor,
        layer: int,
        plan: PlanT,
        scratch: tuple[torch.Tensor, ...],
        out_TX: torch.Tensor,
        wanted_only: bool,
    ) -> torch.Tensor:
        """Attend to all that is stored: [T, H * D]; or only with the rows whose logits are wanted: [R, H * D]."""
        ...

"""Attention over float32 pages on the CPU with the C kernel: bits independent of batch and chunking, no mask, no copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from holdfast.attention.backend import AttentionSpec
from holdfast.attention.batch import Batch, SequenceRows
from holdfast.cache.storage import PageStorage
from holdfast.kernels.paged_attention import SEQUENCE_FIELDS, paged_attention, supports
from holdfast.kernels.write_heads import HeadNorm, Rotary, write_heads
from holdfast.memory.planner import Term


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Where each sequence's rows and pages lie, as the kernel reads it."""

    pages_P: torch.Tensor
    sequences_N4: torch.Tensor


class NativePagedAttention:
    """The backend. `specs[i]` and plane i of the storage belong to layer i."""

    name: ClassVar[str] = "native_paged"

    def __init__(self, specs: Sequence[AttentionSpec], storage: PageStorage) -> None:
        self._specs = specs
        self._planes = [(storage.plane(layer, "k"), storage.plane(layer, "v")) for layer in range(len(specs))]
        self._page_tokens = storage.spec.page_tokens

    @staticmethod
    def unsupported(spec: AttentionSpec) -> str | None:
        planes = {plane.name: plane.dtype for plane in spec.cache.planes}
        if planes.keys() != {"k", "v"}:
            return f"the format {spec.cache.format.name} is not plain keys and values"
        reasons = (supports(spec.dtype, getattr(torch, dtype), spec.device) for dtype in planes.values())
        return next((reason for reason in reasons if reason is not None), None)

    @staticmethod
    def terms(specs: Sequence[AttentionSpec]) -> tuple[Term, ...]:
        return ()

    def plan(self, sequences: Sequence[SequenceRows]) -> NativePlan:
        rows, pages = [], []
        for sequence in sequences:
            rows.append((sequence.row_start, sequence.num_rows, sequence.start, len(pages)))
            pages.extend(sequence.pages)
        pages_P = torch.from_numpy(np.array(pages, dtype=np.int32))
        return NativePlan(pages_P, torch.tensor(rows, dtype=torch.int64).view(-1, len(SEQUENCE_FIELDS)))

    def write(
        self, qkv_TX: torch.Tensor, batch: Batch, head_norm: HeadNorm | None, rotary: Rotary | None, layer: int
    ) -> torch.Tensor:
        return write_heads(qkv_TX, batch.positions_T, batch.slots_T, *self._planes[layer], head_norm, rotary)

    def attend(self, q_RHD: torch.Tensor, layer: int, plan: NativePlan) -> torch.Tensor:
        spec, planes = self._specs[layer], self._planes[layer]
        return paged_attention(
            q_RHD, *planes, plan.pages_P, plan.sequences_N4, self._page_tokens, spec.scale, spec.window
        )

"""Attention layer: fused projection, backend, output projection."""

from typing import Any

import torch

from holdfast.attention.backend import AttentionBackend
from holdfast.attention.batch import Batch
from holdfast.kernels.write_heads import HeadNorm, Rotary
from holdfast.layers.linear import Linear


class AttentionLayer:
    """One layer's attention over whatever backend it is given."""

    def __init__(
        self,
        layer: int,
        qkv: Linear,
        o: Linear,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        backend: AttentionBackend[Any],
    ) -> None:
        self._layer = layer
        self._qkv = qkv
        self._o = o
        self._head_norm = head_norm
        self._rotary = rotary
        self._backend = backend

    def __call__(
        self,
        x_TH: torch.Tensor,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All rows leave their keys and values; those of `rows_R`, or all, attend as the plan says."""
        q_THD = self._backend.write(self._qkv(x_TH), batch, self._head_norm, self._rotary, self._layer)
        q_RHD = q_THD if rows_R is None else q_THD.index_select(0, rows_R)
        return self._o(self._backend.attend(q_RHD, self._layer, plan))

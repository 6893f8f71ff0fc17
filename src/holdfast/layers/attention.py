"""Attention layer: fused projection, backend, output projection."""

from typing import Any

import torch

from holdfast.attention.backend import AttentionBackend
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

    def __call__(self, x_TH: torch.Tensor, plan: Any) -> torch.Tensor:  # noqa: ANN401 the backend's own type
        return self._o(self._backend.run(self._qkv(x_TH), self._head_norm, self._rotary, self._layer, plan))

"""Compressor: the weights by which tokens are pooled into entries (DeepSeek-V4).

R tokens of an entry, D elements of an entry, X = D columns, or 2 D where entries overlap
"""

from typing import NamedTuple

import torch


class Compressor(NamedTuple):
    """How one layer, or its index, makes entries."""

    ratio: int
    is_overlapped: bool
    positions_RX: torch.Tensor
    """float32: added to the gates of a token by its place in its entry."""
    weight_D: torch.Tensor
    """Of the RMSNorm of an entry, before it is rotated and kept."""
    eps: float

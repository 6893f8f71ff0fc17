"""Index keys of a step (DSA) normed, rotated and written into their slots, and index queries rotated, in one pass.

T rows, I index heads, D elements of a head, R rotated ones

LayerNorm with a bias, then rope on the first R elements by halves: element i with element i + R / 2, frequency i. The tables of
`Rotary` have R columns: cos twice, and -sin before sin.
"""

from typing import NamedTuple

import torch

from holdfast.kernels.attention.index_planes import IndexPlanes
from holdfast.kernels.attention.write_kv import Rotary


class IndexNorm(NamedTuple):
    """The LayerNorm of index keys."""

    weight_D: torch.Tensor
    bias_D: torch.Tensor
    eps: float


def write_index(
    k_TD: torch.Tensor,
    q_TID: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    norm: IndexNorm,
    rotary: Rotary,
    planes: IndexPlanes,
) -> None:
    """Each row's index key to its slot (-1: nowhere); the first R elements of its index heads are rotated in place."""
    raise NotImplementedError("a contract, until its kernel stands")

"""Rows in groups of columns, each group by a weight of its own, side by side (the output projection of DeepSeek-V4).

T rows, G groups, K inputs and N outputs of a group

On a GPU it is one batched product of cuBLAS, which takes rows and results as they lie: groups side by side in both.
"""

import torch
from torch import Tensor

from holdfast.kernels.gemm.linear import plain_linear
from holdfast.kernels.triton_compat import can_run


def grouped_linear(x_TX: Tensor, weight_GNK: Tensor, out_TX: Tensor) -> Tensor:
    """[T, G * K] by [G, N, K] to [T, G * N], into `out_TX`."""
    if x_TX.shape[0] == 0:
        return out_TX
    return _batched(x_TX, weight_GNK, out_TX) if can_run(x_TX) else _one_by_one(x_TX, weight_GNK, out_TX)


def grouped_linear_reference(x_TX: Tensor, weight_GNK: Tensor, out_TX: Tensor) -> Tensor:
    """The same in plain torch."""
    x_TGK = x_TX.unflatten(1, (weight_GNK.shape[0], -1))
    return out_TX.copy_(torch.einsum("tgk,gnk->tgn", x_TGK.float(), weight_GNK.float()).flatten(1))


def _batched(x_TX: Tensor, weight_GNK: Tensor, out_TX: Tensor) -> Tensor:
    num_groups = weight_GNK.shape[0]
    x_GTK, out_GTN = (rows_TX.unflatten(1, (num_groups, -1)).transpose(0, 1) for rows_TX in (x_TX, out_TX))
    torch.bmm(x_GTK, weight_GNK.transpose(1, 2), out=out_GTN)
    return out_TX


def _one_by_one(x_TX: Tensor, weight_GNK: Tensor, out_TX: Tensor) -> Tensor:
    """On a CPU, so that a row's result does not depend on the other rows."""
    num_groups = weight_GNK.shape[0]
    x_TGK, out_TGN = (rows_TX.unflatten(1, (num_groups, -1)) for rows_TX in (x_TX, out_TX))
    for group, weight_NK in enumerate(weight_GNK):
        out_TGN[:, group] = plain_linear(x_TGK[:, group].contiguous(), weight_NK, None)
    return out_TX

"""Grouped linear layer: each group of columns by its own weight (the output projection of DeepSeek-V4).

T rows, G groups, K inputs and N outputs of a group

On a GPU it is one batched cuBLAS product over strided views.
"""

import torch
from torch import Tensor

from holdfast.kernels.gemm.linear import plain_linear
from holdfast.kernels.operation import operation


def batched_linear(x_TX: Tensor, weight_GNK: Tensor, out_TX: Tensor) -> Tensor:
    """Like `grouped_linear`, as one torch.bmm."""
    if x_TX.shape[0]:
        num_groups = weight_GNK.shape[0]
        x_GTK, out_GTN = (rows_TX.unflatten(1, (num_groups, -1)).transpose(0, 1) for rows_TX in (x_TX, out_TX))
        torch.bmm(x_GTK, weight_GNK.transpose(1, 2), out=out_GTN)
    return out_TX


def grouped_linear_reference(x_TX: Tensor, weight_GNK: Tensor, out_TX: Tensor) -> Tensor:
    """Multiply [T, G * K] by [G, N, K] to [T, G * N], into `out_TX`; group by group, so that it is batch invariant."""
    if x_TX.shape[0] == 0:
        return out_TX
    num_groups = weight_GNK.shape[0]
    x_TGK, out_TGN = (rows_TX.unflatten(1, (num_groups, -1)) for rows_TX in (x_TX, out_TX))
    for group, weight_NK in enumerate(weight_GNK):
        out_TGN[:, group] = plain_linear(x_TGK[:, group].contiguous(), weight_NK, None)
    return out_TX


grouped_linear = operation(reference=grouped_linear_reference, triton=batched_linear)

"""Absorbed latent attention (MLA) to chosen tokens (DSA): rows of pages are gathered, and dequantized, inside the kernel.

T rows, N query heads, L latent, R rotated elements, K tokens that a row attends to at the most, C split-KV partials

A row has a list of its own, so that a tile is one row and a block of heads; few rows split their lists, by a number that follows
from the number of rows alone, so that a graph serves any step.
"""

import torch

from holdfast.kernels.attention.index_planes import SparseRows
from holdfast.kernels.attention.latent_planes import LatentPlanes


def sparse_attention(
    q_TNX: torch.Tensor,
    planes: LatentPlanes,
    page_table_NP: torch.Tensor,
    rows: SparseRows,
    tokens_TK: torch.Tensor,
    scale: float,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
    num_sms: int,
) -> torch.Tensor:
    """[T, N, L] of the rows that choose: softmax over their tokens (int32 positions, -1: none); others stay as they are.

    Partials: as many rows times heads as `sparse_splits` of the step's rows asks for.
    """
    raise NotImplementedError("a contract, until its kernel stands")

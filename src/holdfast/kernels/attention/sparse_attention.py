"""Absorbed latent attention (MLA) to chosen tokens (DSA): rows of pages are gathered, and dequantized, inside the kernel.

T rows, N query heads, L latent, R rotated elements, K tokens that a row attends to at the most, C split-KV partials

A row has a list of its own, so that a tile is one row and a block of heads; few rows split their lists, by a number that follows
from the number of rows alone, so that a graph serves any step.
"""

import torch

from holdfast.kernels.attention.index_planes import SparseRows
from holdfast.kernels.attention.latent_planes import LatentPlanes, read_latents


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


def sparse_attention_reference(
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
    """The same in plain torch, a row at a time, without splits. Places of a list that name no token of the row weigh nothing."""
    num_rows, page_tokens = len(q_TNX), planes.page_tokens
    table_rows, counts = rows.table_rows_T[:num_rows].tolist(), rows.num_tokens_T[:num_rows].tolist()
    for row, (table_row, num_tokens) in enumerate(zip(table_rows, counts, strict=True)):
        if num_tokens <= 0:
            continue
        listed_S = tokens_TK[row, :num_tokens].long()
        token_S = listed_S[(listed_S >= 0) & (listed_S < num_tokens)]
        slot_S = page_table_NP[table_row, token_S // page_tokens].long() * page_tokens + token_S % page_tokens
        latents_SX = read_latents(planes, slot_S, torch.float32)
        weights_NS = (q_TNX[row].float() @ latents_SX.T * scale).softmax(-1)
        out_TNL[row] = (weights_NS @ latents_SX[:, : planes.latent_dim]).to(out_TNL.dtype)
    return out_TNL

"""The top-k tokens of each row by score (DSA), exact, the same set whatever the batch, on the device inside a graph.

T rows, C tokens of the longest context, K tokens that are taken
"""

from collections.abc import Mapping

import torch

from holdfast.kernels.attention.index_planes import SparseRows


def top_k_tokens(
    scores_TC: torch.Tensor,
    rows: SparseRows,
    out_TK: torch.Tensor,
    scratch: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """int32 positions of the K largest scores of each row among its first num_tokens_T, rising; -1 behind them, and in rows that do not choose.

    Of equal scores the lower position is taken. A score that is NaN counts as the lowest, -0 as 0. Rows with up to K tokens take all.
    `scratch`: what `top_k_specs` lists, for as many rows and tokens or more; plain torch works without.
    """
    return top_k_tokens_reference(scores_TC, rows, out_TK, scratch)


def top_k_tokens_reference(
    scores_TC: torch.Tensor,
    rows: SparseRows,
    out_TK: torch.Tensor,
    scratch: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The same in plain torch, by stable sorts."""
    num_tokens_T1 = rows.num_tokens_T.unsqueeze(1)
    width, k = scores_TC.shape[1], out_TK.shape[1]
    position_C = torch.arange(width, device=scores_TC.device)
    m_unseen_TC = position_C >= num_tokens_T1
    # Below every number come NaN and then tokens that a row does not see, which are all taken for -inf and told apart by rank.
    rank_TC = scores_TC.isnan().to(torch.int8).masked_fill_(m_unseen_TC, 2)
    by_rank_TC = rank_TC.argsort(dim=1, stable=True)
    score_TC = scores_TC.masked_fill(rank_TC > 0, -torch.inf).gather(1, by_rank_TC)
    order_TC = by_rank_TC.gather(1, score_TC.argsort(dim=1, descending=True, stable=True))
    m_taken_K = torch.arange(min(k, width), device=scores_TC.device) < num_tokens_T1
    taken_TK = order_TC[:, :k].masked_fill(~m_taken_K, width).sort(dim=1).values
    out_TK.fill_(-1)
    out_TK[:, :width] = taken_TK.masked_fill_(taken_TK == width, -1)
    return out_TK

"""The top-k tokens of each row by score (DSA), exact, the same set whatever the batch, on the device inside a graph.

T rows, C tokens of the longest context, K tokens that are taken
"""

import torch

from holdfast.kernels.attention.index_planes import SparseRows


def top_k_tokens(scores_TC: torch.Tensor, rows: SparseRows, out_TK: torch.Tensor) -> torch.Tensor:
    """int32 positions of the K largest scores of each row among its first num_tokens_T, rising; -1 behind them, and in rows that do not choose.

    Of equal scores the lower position is taken. A score that is NaN counts as the lowest, -0 as 0. Rows with up to K tokens take all.
    """
    raise NotImplementedError("a contract, until its kernel stands")

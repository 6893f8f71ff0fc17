"""Scores of the index (DSA): how much each row wants each stored token, over paged index keys.

T rows, I index heads, D elements of a head, C tokens of the longest context, S slots

    score[t, s] = sum over heads of weight[t, h] * relu(q[t, h] . k[s])      in float32, for s below num_tokens_T[t]
"""

import torch

from holdfast.kernels.attention.index_planes import IndexPlanes, SparseRows


def index_scores(
    q_TID: torch.Tensor,
    weights_TI: torch.Tensor,
    planes: IndexPlanes,
    page_table_NP: torch.Tensor,
    rows: SparseRows,
    out_TC: torch.Tensor,
) -> torch.Tensor:
    """float32 scores of every token that a row sees; what lies behind them in `out_TC`, and rows that do not choose, stay as they are.

    `weights_TI`: float32, with all factors in them (head_dim ** -0.5 * heads ** -0.5, and the queries' scale where they are codes).
    The launch does not depend on lengths: programs read them on the device, so that a graph serves any step.
    """
    raise NotImplementedError("a contract, until its kernel stands")

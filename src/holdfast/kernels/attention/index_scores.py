"""Scores of the index (DSA): how much each row wants each stored token, over paged index keys.

T rows, I index heads, D elements of a head, C tokens of the longest context, S slots

    score[t, s] = sum over heads of weight[t, h] * relu(q[t, h] . k[s])      in float32, for s below num_tokens_T[t]
"""

import torch

from holdfast.kernels.attention.index_planes import IndexPlanes, SparseRows

TOKENS_AT_ONCE = 4096
"""Of the reference. Blocks begin at multiples of it, so that a row's scores do not depend on other rows."""


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
    return index_scores_reference(q_TID, weights_TI, planes, page_table_NP, rows, out_TC)


def index_scores_reference(
    q_TID: torch.Tensor,
    weights_TI: torch.Tensor,
    planes: IndexPlanes,
    page_table_NP: torch.Tensor,
    rows: SparseRows,
    out_TC: torch.Tensor,
) -> torch.Tensor:
    """The same in plain torch: a block of tokens is gathered once for neighbouring rows of a sequence, and each row computed alone."""
    num_rows = len(q_TID)
    table_rows, num_tokens = (tensor[:num_rows].tolist() for tensor in rows)
    first = 0
    while first < num_rows:
        end = first + 1
        while end < num_rows and table_rows[end] == table_rows[first]:
            end += 1
        for low in range(0, max(num_tokens[first:end]), TOKENS_AT_ONCE):
            high = min(low + TOKENS_AT_ONCE, max(num_tokens[first:end]))
            keys_SD = read_index(planes, page_table_NP[table_rows[first]], low, high)
            for row in range(first, end):
                count = min(num_tokens[row], high) - low
                if count > 0:
                    products_IS = (q_TID[row].float() @ keys_SD[:count].T).relu()
                    out_TC[row, low : low + count] = weights_TI[row].float() @ products_IS
        first = end
    return out_TC


def read_index(planes: IndexPlanes, pages_P: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """float32 [high - low, D]: the index keys of a range of a sequence's tokens, in plain torch."""
    token_S = torch.arange(low, high, device=pages_P.device)
    slot_S = pages_P[token_S // planes.page_tokens].long() * planes.page_tokens + token_S % planes.page_tokens
    if planes.scales_S1 is None:
        return planes.rows_SD[slot_S].float()
    codes_SD = planes.rows_SD.view(torch.uint8)[slot_S].view(torch.float8_e4m3fn)
    return codes_SD.float() * planes.scales_S1[slot_S]

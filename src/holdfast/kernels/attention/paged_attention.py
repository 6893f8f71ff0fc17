"""Paged attention over float32 pages on a CPU: the C kernel and its reference.

T rows, H query heads, K key/value heads, D head dim, S slots, N sequences
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.native_library import native_for

SEQUENCE_FIELDS = ("row", "num_rows", "start", "first_page")
"""Columns of `sequences_N4`: first row, number of rows, position of the first, and where its pages begin in `pages_P`."""


class Scoring(NamedTuple):
    """Score options of a layer: scale, window, sinks and soft cap."""

    scale: float
    window: int | None = None
    """A row sees only the newest `window` tokens up to its own position."""
    sinks_H: Tensor | None = None
    """A float32 logit per query head that joins its softmax and has no value."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""


def paged_attention(
    q_THD: Tensor,
    k_plane_SKD: Tensor,
    v_plane_SKD: Tensor,
    pages_P: Tensor,
    sequences_N4: Tensor,
    page_tokens: int,
    scoring: Scoring,
    out_TX: Tensor | None = None,
) -> Tensor:
    """Attend each row to the tokens of its sequence up to its own position: [T, H * D].

    Pages before the window of a sequence's first row are not read: other sequences may own them.
    """
    scale, window, sinks_H, softcap = scoring
    library = native_for(q_THD, k_plane_SKD, v_plane_SKD, out_TX, sinks_H)
    if library is None:
        return paged_attention_reference(
            q_THD, k_plane_SKD, v_plane_SKD, pages_P, sequences_N4, page_tokens, scoring, out_TX
        )
    num_rows, num_heads, head_dim = q_THD.shape
    if out_TX is None:
        out_TX = q_THD.new_empty(num_rows, num_heads * head_dim)
    tensors = (q_THD, k_plane_SKD, v_plane_SKD, out_TX, pages_P, sequences_N4)
    library.holdfast_paged_attention(
        *(tensor.data_ptr() for tensor in tensors), None if sinks_H is None else sinks_H.data_ptr(),
        sequences_N4.shape[0], num_heads, k_plane_SKD.shape[1], head_dim, page_tokens,
        window or 0, scale, softcap or 0.0,
    )  # fmt: skip
    return out_TX


def paged_attention_reference(
    q_THD: Tensor,
    k_plane_SKD: Tensor,
    v_plane_SKD: Tensor,
    pages_P: Tensor,
    sequences_N4: Tensor,
    page_tokens: int,
    scoring: Scoring,
    out_TX: Tensor | None = None,
) -> Tensor:
    """Like `paged_attention` in plain torch, one sequence at a time with its whole score matrix."""
    (num_rows, num_heads, head_dim), (scale, window, sinks_H, softcap) = q_THD.shape, scoring
    num_groups = num_heads // k_plane_SKD.shape[1]
    out_THD = (torch.empty_like(q_THD) if out_TX is None else out_TX.view_as(q_THD)).zero_()
    for row, count, start, first_page in sequences_N4.tolist():
        first = 0 if window is None else max(0, start - window + 1)
        position_L = torch.arange(first, start + count, device=q_THD.device)
        slot_L = pages_P[first_page + position_L // page_tokens] * page_tokens + position_L % page_tokens
        k_HLD = k_plane_SKD[slot_L].to(q_THD.dtype).repeat_interleave(num_groups, dim=1).transpose(0, 1)
        v_HLD = v_plane_SKD[slot_L].to(q_THD.dtype).repeat_interleave(num_groups, dim=1).transpose(0, 1)
        distance_nL = position_L[start - first :].unsqueeze(1) - position_L
        seen_nL = distance_nL >= 0 if window is None else (distance_nL >= 0) & (distance_nL < window)
        scores_HnL = q_THD[row : row + count].transpose(0, 1) @ k_HLD.transpose(1, 2) * scale
        if softcap is not None:
            scores_HnL = softcap * torch.tanh(scores_HnL / softcap)
        scores_HnL = scores_HnL.float().masked_fill(~seen_nL, float("-inf"))
        if sinks_H is not None:
            sink_Hn1 = sinks_H.float().view(-1, 1, 1).expand(-1, count, 1)
            scores_HnL = torch.cat((scores_HnL, sink_Hn1), dim=-1)
        weights_HnL = scores_HnL.softmax(-1)[..., : len(position_L)].to(q_THD.dtype)
        out_THD[row : row + count] = (weights_HnL @ v_HLD).transpose(0, 1)
    return out_THD.view(num_rows, num_heads * head_dim)

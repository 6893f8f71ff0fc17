"""Tokens of a step (DeepSeek-V4) normed, rotated and written into their slots, query heads normed and rotated, in one pass; outputs rotated back.

T rows, N query heads, D elements of a token and of a head, R rotated ones, the last

A token is one vector that is key and value of all heads: RMSNorm with a weight, then rope on neighbours. A query head has an
RMSNorm of its own, without a weight. All of it is in float32 and rounded once. Since values are rotated, what a row attends to is
rotated back by the row's own position.
"""

import torch

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.entry_rows import normed, rotate_last
from holdfast.kernels.latent.latent_planes import LatentPlanes, store_latents
from holdfast.kernels.latent.write_latent import LatentNorm, rotate_neighbours


def write_window(
    kv_TD: torch.Tensor,
    q_TND: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    states_T: torch.Tensor,
    norm: LatentNorm,
    q_eps: float,
    rotary: Rotary,
    planes: LatentPlanes,
) -> None:
    """Each row's vector to its slot (-1: nowhere); its query heads are normed and rotated in place.

    Rows may lie apart in `kv_TD` and `q_TND`. A row without a state is padding: nothing else of it is looked at. A row with a
    state and no slot is a row like others but for the write.
    """
    write_window_reference(kv_TD, q_TND, positions_T, slots_T, states_T, norm, q_eps, rotary, planes)


def rotate_back(out_TND: torch.Tensor, positions_T: torch.Tensor, rotary: Rotary) -> None:
    """The last R elements of every head turned by minus the row's position, in place.

    Padding may have any position."""
    rotate_back_reference(out_TND, positions_T, rotary)


def write_window_reference(
    kv_TD: torch.Tensor,
    q_TND: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    states_T: torch.Tensor,
    norm: LatentNorm,
    q_eps: float,
    rotary: Rotary,
    planes: LatentPlanes,
) -> None:
    """The same in plain torch."""
    is_row_T, is_kept_T = states_T >= 0, (states_T >= 0) & (slots_T >= 0)
    safe_T = torch.where(is_row_T, positions_T, 0)
    turned_TND = rotate_last(normed(q_TND, q_eps), safe_T, rotary).to(q_TND.dtype)
    q_TND.copy_(torch.where(is_row_T[:, None, None], turned_TND, q_TND))
    rows_TD = rotate_last(normed(kv_TD, norm.eps) * norm.weight_L.float(), safe_T, rotary)[is_kept_T]
    store_latents(planes, slots_T[is_kept_T], rows_TD[:, : planes.latent_dim], rows_TD[:, planes.latent_dim :])


def rotate_back_reference(out_TND: torch.Tensor, positions_T: torch.Tensor, rotary: Rotary) -> None:
    """The same in plain torch."""
    last_position, rope_dim = rotary.cos_LD.shape[0] - 1, rotary.cos_LD.shape[1]
    out_TNR = out_TND[..., out_TND.shape[-1] - rope_dim :]
    safe_T = positions_T.clamp(0, last_position)
    inverse = Rotary(rotary.cos_LD[safe_T], -rotary.sin_LD[safe_T])
    out_TNR.copy_(rotate_neighbours(out_TNR, torch.arange(len(safe_T), device=safe_T.device), inverse))

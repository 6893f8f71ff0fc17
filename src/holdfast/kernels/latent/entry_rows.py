"""Vectors of DeepSeek-V4 normed, rotated and put into their slots: entries of a layer or its index in plain torch, and what kernels do it with.

T rows, I index heads, D elements of a vector, R rotated ones, the last

RMSNorm of all D elements, then rope on neighbours; an entry's at the position of its first token. All of it is in float32 and
rounded once, to the type that it is kept in.
"""

import torch

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentPlanes, store_latents
from holdfast.kernels.latent.write_index import LEAST_KEY, quantize_index
from holdfast.kernels.latent.write_latent import LatentNorm, rotate_neighbours


def write_entries(
    entries_TD: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    norm: LatentNorm,
    ratio: int,
    rotary: Rotary,
    planes: LatentPlanes,
) -> None:
    """Each row's entry, float32, to its slot (-1: it has none, and nothing else of it is looked at), in plain torch."""
    is_kept_T = slots_T >= 0
    rows_XD = _finished(entries_TD[is_kept_T], positions_T[is_kept_T], norm, ratio, rotary)
    store_latents(planes, slots_T[is_kept_T], rows_XD[:, : planes.latent_dim], rows_XD[:, planes.latent_dim :])


def write_index_entries(
    entries_TD: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    norm: LatentNorm,
    ratio: int,
    rotary: Rotary,
    planes: IndexPlanes,
) -> None:
    """The same of entries of an index."""
    is_kept_T = slots_T >= 0
    rows_XD, slots_X = _finished(entries_TD[is_kept_T], positions_T[is_kept_T], norm, ratio, rotary), slots_T[is_kept_T]
    if planes.scales_S1 is None:
        planes.rows_SD[slots_X] = rows_XD.to(planes.rows_SD.dtype)
    else:
        codes_XD, planes.scales_S1[slots_X] = quantize_index(rows_XD, LEAST_KEY)
        planes.rows_SD.view(torch.uint8)[slots_X] = codes_XD.view(torch.uint8)


def rotate_index_queries(
    q_TID: torch.Tensor, positions_T: torch.Tensor, states_T: torch.Tensor, rotary: Rotary
) -> None:
    """The last R elements of index heads at the row's own position, in place, in plain torch; rows without a state stay."""
    is_row_T = states_T >= 0
    q_TIR = q_TID[..., q_TID.shape[-1] - rotary.cos_LD.shape[1] :]
    turned_TIR = rotate_neighbours(q_TIR, torch.where(is_row_T, positions_T, 0), rotary)
    q_TIR.copy_(torch.where(is_row_T[:, None, None], turned_TIR, q_TIR))


def rotate_last(x_TXD: torch.Tensor, positions_T: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rope on the last R elements, [T, D] or [T, N, D], in float32, in plain torch."""
    before = x_TXD.shape[-1] - rotary.cos_LD.shape[1]
    turned = rotate_neighbours(x_TXD[..., before:].float(), positions_T, rotary)
    return torch.cat((x_TXD[..., :before].float(), turned), dim=-1)


def normed(x_TXD: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the last dimension without a weight, in float32, in plain torch."""
    x = x_TXD.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _finished(
    entries_XD: torch.Tensor, positions_X: torch.Tensor, norm: LatentNorm, ratio: int, rotary: Rotary
) -> torch.Tensor:
    normed_XD = normed(entries_XD, norm.eps) * norm.weight_L.float()
    return rotate_last(normed_XD, positions_X // ratio * ratio, rotary)

"""Latents of a step (MLA) normed, rotated and written into their slots, and the rotated part of every query head, in one pass.

T rows, N query heads, D = P + R elements of a query head, L latent, R rotated elements

Rope turns neighbours: elements 2 i and 2 i + 1 by frequency i. The tables of `Rotary` (kernels/attention/write_kv.py) have R
columns, frequency i in columns i and i + R / 2: cos twice, and -sin before sin.
"""

from typing import NamedTuple

import torch

from holdfast.kernels.attention.latent_planes import LatentPlanes
from holdfast.kernels.attention.write_kv import Rotary


class LatentNorm(NamedTuple):
    """The RMSNorm of a latent, before it is kept."""

    weight_L: torch.Tensor
    eps: float


def write_latent(
    latent_TX: torch.Tensor,
    q_TND: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    norm: LatentNorm,
    rotary: Rotary,
    planes: LatentPlanes,
) -> None:
    """Each row's latent to its slot (-1: nowhere); the last R elements of its query heads are rotated in place."""
    write_latent_reference(latent_TX, q_TND, positions_T, slots_T, norm, rotary, planes)


def write_latent_reference(
    latent_TX: torch.Tensor,
    q_TND: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    norm: LatentNorm,
    rotary: Rotary,
    planes: LatentPlanes,
) -> None:
    """The same in plain torch."""
    latent_dim, rope_dim = planes.latent_dim, planes.rope_dim
    x_TL = latent_TX[:, :latent_dim].float()
    normed_TL = x_TL * torch.rsqrt(x_TL.square().mean(-1, keepdim=True) + norm.eps) * norm.weight_L.float()
    rope_TR = rotate_neighbours(latent_TX[:, latent_dim:], positions_T, rotary)
    q_TNR = q_TND[..., q_TND.shape[-1] - rope_dim :]
    q_TNR.copy_(rotate_neighbours(q_TNR, positions_T, rotary))
    assert planes.kind == "plain", f"{planes.kind} is written by its own function"
    is_kept_T = slots_T >= 0
    rows_TX = torch.cat((normed_TL, rope_TR.float()), dim=-1).to(planes.rows_SX.dtype)
    planes.rows_SX[slots_T[is_kept_T]] = rows_TX[is_kept_T]


def rotate_neighbours(x_TXR: torch.Tensor, positions_T: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rope on the last dimension, [T, R] or [T, N, R], in float32 and back."""
    half = x_TXR.shape[-1] // 2
    lift = (slice(None), *(None,) * (x_TXR.dim() - 2))
    cos = rotary.cos_LD[positions_T, :half].float()[lift]
    sin = rotary.sin_LD[positions_T, half : 2 * half].float()[lift]
    even, odd = x_TXR[..., 0::2].float(), x_TXR[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x_TXR.dtype)

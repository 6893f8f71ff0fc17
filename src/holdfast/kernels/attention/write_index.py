"""Index keys of a step (DSA) normed, rotated and written into their slots, and index queries rotated, in one pass; queries as e4m3.

T rows, I index heads, D elements of a head, R rotated ones

LayerNorm with a bias, then rope on the first R elements by halves: element i with element i + R / 2, frequency i. The tables of
`Rotary` have R columns: cos twice, and -sin before sin. All of it is in float32 and rounded once, to the type that it is kept in.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import layer_norm

from holdfast.kernels.attention.index_planes import IndexPlanes
from holdfast.kernels.attention.write_kv import Rotary

LEAST_KEY = 1e-4
LEAST_QUERY = 1e-10
"""The least amax of a key, and of a head of a query, that a scale is chosen for."""
E4M3_MAX = 448.0


class IndexNorm(NamedTuple):
    """The LayerNorm of index keys."""

    weight_D: torch.Tensor
    bias_D: torch.Tensor
    eps: float


def write_index(
    k_TD: torch.Tensor,
    q_TID: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    norm: IndexNorm,
    rotary: Rotary,
    planes: IndexPlanes,
) -> None:
    """Each row's index key to its slot (-1: nowhere); the first R elements of its index heads are rotated in place.

    Rows may lie apart in `k_TD` and `q_TID`. The position of a row without a slot is not looked at.
    """
    write_index_reference(k_TD, q_TID, positions_T, slots_T, norm, rotary, planes)


def write_index_reference(
    k_TD: torch.Tensor,
    q_TID: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    norm: IndexNorm,
    rotary: Rotary,
    planes: IndexPlanes,
) -> None:
    """The same in plain torch."""
    rope_dim, is_kept_T = rotary.cos_LD.shape[1], slots_T >= 0
    safe_T = torch.where(is_kept_T, positions_T, 0)
    q_TIR = q_TID[..., :rope_dim]
    q_TIR.copy_(rotate_halves(q_TIR, safe_T, rotary))
    normed_TD = layer_norm(k_TD.float(), k_TD.shape[1:], norm.weight_D.float(), norm.bias_D.float(), norm.eps)
    keys_TD = torch.cat((rotate_halves(normed_TD[:, :rope_dim], safe_T, rotary), normed_TD[:, rope_dim:]), dim=-1)
    keys_XD, slots_X = keys_TD[is_kept_T], slots_T[is_kept_T]
    if planes.scales_S1 is None:
        planes.rows_SD[slots_X] = keys_XD.to(planes.rows_SD.dtype)
    else:
        codes_XD, planes.scales_S1[slots_X] = quantize_index(keys_XD, LEAST_KEY)
        planes.rows_SD.view(torch.uint8)[slots_X] = codes_XD.view(torch.uint8)


def rotate_halves(x_TXR: torch.Tensor, positions_T: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rope on the last dimension, [T, R] or [T, I, R], in float32."""
    lift = (slice(None), *(None,) * (x_TXR.dim() - 2))
    cos, sin = rotary.cos_LD[positions_T].float()[lift], rotary.sin_LD[positions_T].float()[lift]
    x = x_TXR.float()
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def quantize_index(x_XD: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes, and float32 scales [X, 1]: the least power of two that takes the last dimension's amax to 448 at the most."""
    amax_X1 = x_XD.float().abs().amax(-1, keepdim=True).clamp(min=least)
    mantissa_X1, exponent_X1 = torch.frexp(amax_X1 / E4M3_MAX)
    exponent_X1 = torch.where(mantissa_X1 == 0.5, exponent_X1 - 1, exponent_X1)
    # What is not finite has no exponent, and stays.
    scales_X1 = torch.where(amax_X1.isfinite(), torch.ldexp(torch.ones_like(amax_X1), exponent_X1), amax_X1)
    return (x_XD.float() / scales_X1).to(torch.float8_e4m3fn), scales_X1


def quantize_index_queries(
    q_TID: torch.Tensor, weights_TI: torch.Tensor, codes_TID: torch.Tensor, out_weights_TI: torch.Tensor
) -> None:
    """Each head of a row as e4m3 codes; its scale, a power of two, is folded into its weight, in float32.

    `out_weights_TI` may be `weights_TI`. Rows may lie apart in all of them.
    """
    quantize_index_queries_reference(q_TID, weights_TI, codes_TID, out_weights_TI)


def quantize_index_queries_reference(
    q_TID: torch.Tensor, weights_TI: torch.Tensor, codes_TID: torch.Tensor, out_weights_TI: torch.Tensor
) -> None:
    """The same in plain torch."""
    codes, scales_TI1 = quantize_index(q_TID, LEAST_QUERY)
    codes_TID.copy_(codes)
    out_weights_TI.copy_(weights_TI.float() * scales_TI1.squeeze(-1))

"""The way of a fused projection into pages: norm and rotate query and key heads, store keys and values, give queries back.

T rows, H query heads, K key/value heads, D head dim, X = (H + 2 K) D, S slots, L positions
"""

from dataclasses import dataclass

import torch

from holdfast.kernels.native_library import native_for
from holdfast.kernels.rms_norm import rms_norm_reference


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norms over head_dim for query and key heads."""

    q_weight_D: torch.Tensor
    k_weight_D: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary tables by position, half-split pairs; the left half of sin is negated."""

    cos_LD: torch.Tensor
    sin_LD: torch.Tensor


def write_heads(
    qkv_TX: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    k_plane_SKD: torch.Tensor,
    v_plane_SKD: torch.Tensor,
    head_norm: HeadNorm | None,
    rotary: Rotary | None,
) -> torch.Tensor:
    """Keys and values of each row go to its slot; queries come back as [T, H, D]."""
    norms = (head_norm.q_weight_D, head_norm.k_weight_D) if head_norm else (None, None)
    tables = (rotary.cos_LD, rotary.sin_LD) if rotary else (None, None)
    library = native_for(qkv_TX, k_plane_SKD, v_plane_SKD, *norms, *tables)
    if library is None:
        return write_heads_reference(qkv_TX, positions_T, slots_T, k_plane_SKD, v_plane_SKD, head_norm, rotary)
    num_rows, _, num_kv_heads, head_dim, num_heads = (
        *qkv_TX.shape,
        *k_plane_SKD.shape[1:],
        _num_heads(qkv_TX, k_plane_SKD),
    )
    q_THD = qkv_TX.new_empty(num_rows, num_heads, head_dim)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*tables, *norms)]
    library.holdfast_write_heads(
        qkv_TX.data_ptr(),
        positions_T.data_ptr(),
        slots_T.data_ptr(),
        *pointers,
        head_norm.eps if head_norm else 0.0,
        q_THD.data_ptr(),
        k_plane_SKD.data_ptr(),
        v_plane_SKD.data_ptr(),
        num_rows,
        num_heads,
        num_kv_heads,
        head_dim,
    )
    return q_THD


def write_heads_reference(
    qkv_TX: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    k_plane_SKD: torch.Tensor,
    v_plane_SKD: torch.Tensor,
    head_norm: HeadNorm | None,
    rotary: Rotary | None,
) -> torch.Tensor:
    """The same in plain torch."""
    num_heads = _num_heads(qkv_TX, k_plane_SKD)
    heads_TXD = qkv_TX.unflatten(-1, (-1, k_plane_SKD.shape[-1]))
    q_THD, k_TKD, v_TKD = heads_TXD.split((num_heads, k_plane_SKD.shape[1], k_plane_SKD.shape[1]), dim=1)
    if head_norm is not None:
        q_THD = rms_norm_reference(q_THD, head_norm.q_weight_D, head_norm.eps)
        k_TKD = rms_norm_reference(k_TKD, head_norm.k_weight_D, head_norm.eps)
    if rotary is not None:
        cos_T1D, sin_T1D = rotary.cos_LD[positions_T].unsqueeze(1), rotary.sin_LD[positions_T].unsqueeze(1)
        q_THD, k_TKD = _rotate(q_THD, cos_T1D, sin_T1D), _rotate(k_TKD, cos_T1D, sin_T1D)
    k_plane_SKD.index_copy_(0, slots_T, k_TKD.to(k_plane_SKD.dtype))
    v_plane_SKD.index_copy_(0, slots_T, v_TKD.to(v_plane_SKD.dtype))
    return q_THD


def _rotate(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    swapped_THD = x_THD.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(x_THD * cos_T1D, swapped_THD, sin_T1D)


def _num_heads(qkv_TX: torch.Tensor, k_plane_SKD: torch.Tensor) -> int:
    _, num_kv_heads, head_dim = k_plane_SKD.shape
    return qkv_TX.shape[1] // head_dim - 2 * num_kv_heads

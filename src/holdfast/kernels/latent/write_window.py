"""Norm, RoPE and write of a step's window tokens (DeepSeek-V4), and norm and RoPE of query heads, in one pass; RoPE back of outputs.

T rows, N query heads, D elements of a token and of a head, R rotated ones, the last

A token is one vector that is key and value of all heads: RMSNorm with a weight, then RoPE on neighbours. A query head has its
own RMSNorm without a weight. All of it is in float32 and rounded once. Since values are rotated, outputs are rotated back by
the row's position.
"""

import torch
from torch import Tensor

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.entry_rows import (
    finished_vectors,
    load_turn,
    normed,
    rotate_last,
    rotated_latents,
    store_vector,
    turn_heads,
)
from holdfast.kernels.latent.latent_planes import LatentPlanes, bits_of_rope, store_latents
from holdfast.kernels.latent.write_latent import LatentNorm, rotate_neighbours
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, release_then_wait, tl
from holdfast.quant.kv_quantize import rotate_heads

ELEMENTS_PER_PROGRAM = 2048
"""Elements of query heads, or rotated elements of outputs, per program."""
NUM_WARPS = 4


def write_window_reference(
    kv_TD: Tensor,
    q_TND: Tensor,
    slots_T: Tensor,
    states_T: Tensor,
    norm: LatentNorm,
    q_eps: float,
    rotary: Rotary,
    planes: LatentPlanes,
    is_rotated: bool = False,
) -> None:
    """Write each row's vector to its slot (-1: none); norm and rotate its query heads in place.

    Rows of `kv_TD` and `q_TND` may be strided. A row without a state is padding and is not read. `is_rotated`: put vectors and
    heads into TurboQuant's rotated space, because entries are stored in it. A TurboQuant window always is.
    """
    is_row_T, is_kept_T = states_T >= 0, (states_T >= 0) & (slots_T >= 0)
    latent_dim, is_coded = planes.latent_dim, planes.kind == "turboquant"
    turned_TND = rotate_last(normed(q_TND, q_eps), rotary)
    rows_TD = rotate_last(normed(kv_TD, norm.eps) * norm.weight_L.float(), rotary)
    if is_rotated or is_coded:
        turned_TND[..., :latent_dim] = rotate_heads(turned_TND[..., :latent_dim])
    if is_rotated and not is_coded:  # `store_latents` rotates before it quantizes
        rows_TD[:, :latent_dim] = rotate_heads(rows_TD[:, :latent_dim])
    q_TND.copy_(torch.where(is_row_T[:, None, None], turned_TND.to(q_TND.dtype), q_TND))
    rows_XD = rows_TD[is_kept_T]
    store_latents(planes, slots_T[is_kept_T], rows_XD[:, :latent_dim], rows_XD[:, latent_dim:])


def rotate_back_reference(out_TND: Tensor, rotary: Rotary) -> None:
    """Rotate the last R elements of every head by minus the row's position, in place."""
    out_TNR = out_TND[..., out_TND.shape[-1] - rotary.dim :]
    out_TNR.copy_(rotate_neighbours(out_TNR, rotary.back()))


def write_window_triton(
    kv_TD: Tensor,
    q_TND: Tensor,
    slots_T: Tensor,
    states_T: Tensor,
    norm: LatentNorm,
    q_eps: float,
    rotary: Rotary,
    planes: LatentPlanes,
    is_rotated: bool = False,
) -> None:
    """Launch one program for the vector of a row, and more for its query heads."""
    num_rows, num_heads, dim = q_TND.shape
    _check_layout(q_TND, rotary)
    assert dim == kv_TD.shape[1] == planes.latent_dim + planes.rope_dim, f"{q_TND.shape=}, {kv_TD.shape=}"
    assert rotary.dim == planes.rope_dim, f"{rotary.dim=} for {planes.rope_dim=}"
    assert kv_TD.stride(1) == 1, f"{kv_TD.stride()=}: the elements of a row must lie side by side"
    assert not planes.has_small_rope, "rotated elements in e4m3 have no kernel here"
    if num_rows == 0:
        return
    block_d = next_power_of_two(dim)
    heads = min(next_power_of_two(num_heads), max(1, ELEMENTS_PER_PROGRAM // block_d))
    _write_window_kernel[(num_rows * (1 + -(-num_heads // heads)),)](
        kv_TD, q_TND, slots_T, states_T, norm.weight_L, rotary.cos_TP, rotary.sin_TP, planes.rows_SX, planes.scales_SC,
        bits_of_rope(planes), norm.eps, q_eps, kv_TD.stride(0), q_TND.stride(0), q_TND.stride(1),
        planes.rows_SX.stride(0), rotary.cos_TP.stride(0),
        KIND=planes.kind, ROTATED=is_rotated or planes.kind == "turboquant", NUM_HEADS=num_heads,
        LATENT_DIM=planes.latent_dim, ROPE_DIM=planes.rope_dim, HEADS=heads, BLOCK_D=block_d,
        num_warps=NUM_WARPS, **pdl_flags(kv_TD),
    )  # fmt: skip


write_window = operation(reference=write_window_reference, triton=write_window_triton)


def rotate_back_triton(out_TND: Tensor, rotary: Rotary) -> None:
    """Launch one program per block of heads of a row."""
    num_rows, num_heads, dim = out_TND.shape
    _check_layout(out_TND, rotary)
    if num_rows == 0:
        return
    rope_dim = rotary.dim
    block_r = next_power_of_two(rope_dim)
    heads = min(next_power_of_two(num_heads), max(1, ELEMENTS_PER_PROGRAM // block_r))
    _rotate_back_kernel[(num_rows * -(-num_heads // heads),)](
        out_TND, rotary.cos_TP, rotary.sin_TP, out_TND.stride(0), out_TND.stride(1), rotary.cos_TP.stride(0),
        NUM_HEADS=num_heads, DIM=dim, ROPE_DIM=rope_dim, HEADS=heads, BLOCK_R=block_r, num_warps=NUM_WARPS,
        **pdl_flags(out_TND),
    )  # fmt: skip


rotate_back = operation(reference=rotate_back_reference, triton=rotate_back_triton)


def _check_layout(x_TND: Tensor, rotary: Rotary) -> None:
    dim, rope_dim = x_TND.shape[2], rotary.dim
    assert dim % 2 == rope_dim % 2 == 0 < rope_dim <= dim, f"{rope_dim=} of {dim=}: rope turns pairs"
    assert x_TND.stride(2) == 1, f"{x_TND.stride()=}: the elements of a head must lie side by side"
    rotary.check_layout()


@jit
def _write_window_kernel(
    p_kv, p_q, p_slots, p_states, p_norm, p_cosine, p_sine, p_rows, p_scales, p_rope, eps, q_eps, kv_stride, q_stride,
    head_stride, row_stride, rotary_stride,
    KIND: constexpr, ROTATED: constexpr, NUM_HEADS: constexpr, LATENT_DIM: constexpr, ROPE_DIM: constexpr,
    HEADS: constexpr, BLOCK_D: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_BLOCKS: constexpr = 1 + (NUM_HEADS + HEADS - 1) // HEADS
    DIM: constexpr = LATENT_DIM + ROPE_DIM
    i_program = tl.program_id(0)
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    i_block = i_program % NUM_BLOCKS
    is_row = tl.load(p_states + i_row) >= 0
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_d = (o_d < DIM) & is_row
    if i_block > 0:
        release_then_wait(PDL)
        b_q_cos, b_q_sin = load_turn(p_cosine, p_sine, i_row, rotary_stride, DIM, ROPE_DIM, BLOCK_D)
        o_head = (i_block - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        m_q = (o_head < NUM_HEADS) & m_d
        p_query = p_q + i_row * q_stride + o_head * head_stride + o_d
        b_q = tl.load(p_query, mask=m_q, other=0.0).to(tl.float32)
        b_q = finished_vectors(b_q, 1.0, b_q_cos, b_q_sin, q_eps, DIM)
        if ROTATED:
            b_q = rotated_latents(b_q, LATENT_DIM)
        tl.store(p_query, b_q.to(p_q.dtype.element_ty), mask=m_q)
    else:
        # Constants are loaded before the wait.
        b_weight = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32)
        i_slot = tl.where(is_row, tl.load(p_slots + i_row).to(tl.int64), -1)
        release_then_wait(PDL)
        b_cos, b_sin = load_turn(p_cosine, p_sine, i_row, rotary_stride, DIM, ROPE_DIM, BLOCK_D)
        b_x = tl.load(p_kv + i_row * kv_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_x = finished_vectors(b_x, b_weight, b_cos, b_sin, eps, DIM)
        if ROTATED:
            b_x = rotated_latents(b_x, LATENT_DIM)
        store_vector(p_rows, p_scales, p_rope, i_slot, row_stride, b_x, KIND, LATENT_DIM, DIM)


@jit
def _rotate_back_kernel(
    p_out, p_cosine, p_sine, out_stride, head_stride, rotary_stride,
    NUM_HEADS: constexpr, DIM: constexpr, ROPE_DIM: constexpr, HEADS: constexpr, BLOCK_R: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_BLOCKS: constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    i_program = tl.program_id(0)
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    i_first = i_program % NUM_BLOCKS * HEADS
    p_heads = p_out + i_row * out_stride
    turn_heads(
        p_heads, head_stride, i_first, p_cosine, p_sine, i_row, rotary_stride, -1, NUM_HEADS, HEADS, DIM, ROPE_DIM,
        BLOCK_R, PDL,
    )  # fmt: skip

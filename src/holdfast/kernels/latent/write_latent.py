"""Norm, RoPE and write of a step's latents (MLA), and RoPE of every query head, in one pass.

T rows, N query heads, D elements of a query head, L latent, R rotated elements

RoPE rotates neighbours: elements 2 i and 2 i + 1 by column i of the step's rows (`Rotary` of kernels/attention/write_kv.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.fp8 import bfloat16_bits, e4m3_of, nearest_magnitudes, size_bits
from holdfast.kernels.latent.latent_planes import LatentPlanes, store_latents
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, next_power_of_two, release_then_wait, tl
from holdfast.quant.formats import LATENT_TILE
from holdfast.quant.latent_quantize import LATENT_CODEBOOK

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

ELEMENTS_PER_PROGRAM = 2048
"""Rotated elements of query heads per program."""
NUM_WARPS = 4
KRONECKER_DIM = 256
"""Least latent (a power of two) that is rotated as a matrix of 16 columns, with tl.dot."""
TILE = kernel_constant(LATENT_TILE)
MAGNITUDES = kernel_constant(LATENT_CODEBOOK.magnitudes)
GAIN = kernel_constant(LATENT_CODEBOOK.gain)


class LatentNorm(NamedTuple):
    """The RMSNorm of a latent."""

    weight_L: Tensor
    eps: float


def write_latent_reference(
    latent_TX: Tensor, q_TND: Tensor, slots_T: Tensor, norm: LatentNorm, rotary: Rotary, planes: LatentPlanes
) -> None:
    """Write each row's latent to its slot (-1: none); rotate the last R elements of its query heads in place.

    Rows of `latent_TX` and `q_TND` may be strided.
    """
    latent_dim, rope_dim = planes.latent_dim, planes.rope_dim
    is_kept_T = slots_T >= 0
    x_TL = latent_TX[:, :latent_dim].float()
    normed_TL = x_TL * torch.rsqrt(x_TL.square().mean(-1, keepdim=True) + norm.eps) * norm.weight_L.float()
    rope_TR = rotate_neighbours(latent_TX[:, latent_dim:], rotary)
    q_TNR = q_TND[..., q_TND.shape[-1] - rope_dim :]
    q_TNR.copy_(rotate_neighbours(q_TNR, rotary))
    store_latents(planes, slots_T[is_kept_T], normed_TL[is_kept_T], rope_TR[is_kept_T])


def rotate_neighbours(x_TXR: Tensor, rotary: Rotary) -> Tensor:
    """Apply RoPE to the last dimension by neighbours, [T, R] or [T, N, R], in float32 and back."""
    lift = (slice(len(x_TXR)), *(None,) * (x_TXR.dim() - 2))
    cos, sin = rotary.cos_TP.float()[lift], rotary.sin_TP.float()[lift]
    even, odd = x_TXR[..., 0::2].float(), x_TXR[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x_TXR.dtype)


def write_latent_triton(
    latent_TX: Tensor, q_TND: Tensor, slots_T: Tensor, norm: LatentNorm, rotary: Rotary, planes: LatentPlanes
) -> None:
    """Launch one program for the latent of a row, and more for its query heads."""
    (num_rows, num_heads, head_dim), rope_dim = q_TND.shape, planes.rope_dim
    _check_layout(latent_TX, q_TND, rotary, planes)
    if num_rows == 0:
        return
    rope_block = next_power_of_two(rope_dim)
    heads = min(next_power_of_two(num_heads), max(1, ELEMENTS_PER_PROGRAM // rope_block))
    scales_SC, rope_SR = planes.scales_SC, planes.rope_SR
    if rope_SR is not None:
        rope_SR = rope_SR.view(torch.uint8 if planes.has_small_rope else torch.int16)
    _write_latent_kernel[(num_rows * (1 + -(-num_heads // heads)),)](
        latent_TX, q_TND, slots_T, norm.weight_L, rotary.cos_TP, rotary.sin_TP, planes.rows_SX, scales_SC, rope_SR,
        norm.eps, latent_TX.stride(0), q_TND.stride(0), q_TND.stride(1), planes.rows_SX.stride(0),
        rotary.cos_TP.stride(0),
        KIND=planes.kind, SMALL_ROPE=planes.has_small_rope, NUM_HEADS=num_heads, HEAD_DIM=head_dim,
        LATENT_DIM=planes.latent_dim, ROPE_DIM=rope_dim, HEADS=heads, BLOCK_L=next_power_of_two(planes.latent_dim),
        BLOCK_R=rope_block, KRONECKER=planes.latent_dim == next_power_of_two(planes.latent_dim) >= KRONECKER_DIM,
        num_warps=NUM_WARPS, **pdl_flags(latent_TX),
    )  # fmt: skip


write_latent = operation(reference=write_latent_reference, triton=write_latent_triton)


def _check_layout(latent_TX: Tensor, q_TND: Tensor, rotary: Rotary, planes: LatentPlanes) -> None:
    assert latent_TX.shape[1] == planes.latent_dim + planes.rope_dim, f"{latent_TX.shape=} for {planes.latent_dim=}"
    assert planes.rope_dim % 2 == 0, f"{planes.rope_dim=}: rope turns pairs"
    assert latent_TX.stride(1) == 1, f"{latent_TX.stride()=}: the elements of a row must lie side by side"
    assert q_TND.stride(2) == 1, f"{q_TND.stride()=}: the elements of a head must lie side by side"
    rotary.check_layout()
    for plane in (planes.rows_SX, planes.scales_SC, planes.rope_SR):
        assert plane is None or plane.is_contiguous(), f"{plane.stride()=}: the slots of a plane must lie side by side"


@jit
def _write_latent_kernel(
    p_latent, p_q, p_slots, p_norm, p_cosine, p_sine, p_rows, p_scales, p_rope, eps, latent_stride, q_stride,
    head_stride, row_stride, rotary_stride,
    KIND: constexpr, SMALL_ROPE: constexpr, NUM_HEADS: constexpr, HEAD_DIM: constexpr, LATENT_DIM: constexpr,
    ROPE_DIM: constexpr, HEADS: constexpr, BLOCK_L: constexpr, BLOCK_R: constexpr, KRONECKER: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_BLOCKS: constexpr = 1 + (NUM_HEADS + HEADS - 1) // HEADS
    i_program = tl.program_id(0)
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    i_block = i_program % NUM_BLOCKS
    i_slot = tl.load(p_slots + i_row).to(tl.int64)
    o_f = tl.arange(0, BLOCK_R // 2)
    m_f = o_f < ROPE_DIM // 2
    o_table = i_row * rotary_stride + o_f
    o_r = tl.arange(0, BLOCK_R)[None, :]
    if i_block > 0:
        release_then_wait(PDL)
        b_cos = tl.load(p_cosine + o_table, mask=m_f, other=0.0).to(tl.float32)[None, :]
        b_sin = tl.load(p_sine + o_table, mask=m_f, other=0.0).to(tl.float32)[None, :]
        o_head = (i_block - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        m_q = (o_head < NUM_HEADS) & (o_r < ROPE_DIM)
        p_query = p_q + i_row * q_stride + o_head * head_stride + (HEAD_DIM - ROPE_DIM) + o_r
        b_q = turned(tl.load(p_query, mask=m_q, other=0.0).to(tl.float32), b_cos, b_sin)
        tl.store(p_query, b_q.to(p_q.dtype.element_ty), mask=m_q)
    else:
        p_x = p_latent + i_row * latent_stride
        if KIND == "plain":
            o_plain = tl.arange(0, BLOCK_L)[None, :]
            b_plain = _normed(p_x, p_norm, o_plain, o_plain < LATENT_DIM, eps, LATENT_DIM, PDL)
            m_plain = (o_plain < LATENT_DIM) & (i_slot >= 0)
            tl.store(p_rows + i_slot * row_stride + o_plain, b_plain.to(p_rows.dtype.element_ty), mask=m_plain)
        elif KIND == "fp8_ds_mla":
            NUM_TILES: constexpr = (LATENT_DIM + TILE - 1) // TILE
            TILES: constexpr = (BLOCK_L + TILE - 1) // TILE
            o_tile = tl.arange(0, TILES)
            o_fp8 = o_tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
            b_fp8 = _normed(p_x, p_norm, o_fp8, o_fp8 < LATENT_DIM, eps, LATENT_DIM, PDL)
            # Compare as integers: NaN is above all numbers, so it is not lost.
            b_amax = tl.max(size_bits(b_fp8), axis=1).to(tl.float32, bitcast=True)
            b_scale = size_bits(tl.div_rn(b_amax, tl.full((TILES,), 448.0, tl.float32)))
            b_scale = tl.maximum(b_scale, 0x00800000)  # the smallest normal number
            b_divisor = tl.broadcast_to(b_scale.to(tl.float32, bitcast=True)[:, None], (TILES, TILE))
            b_code = e4m3_of(tl.div_rn(b_fp8, b_divisor)).to(tl.uint8)
            p_row = p_rows + i_slot * row_stride
            tl.store(p_row + o_fp8, b_code, mask=(o_fp8 < LATENT_DIM) & (i_slot >= 0))
            p_row_scales = (p_row + LATENT_DIM).to(tl.pointer_type(tl.int32))
            tl.store(p_row_scales + o_tile, b_scale, mask=(o_tile < NUM_TILES) & (i_slot >= 0))
        else:
            COLUMNS: constexpr = LATENT_DIM // 4
            o_c = tl.arange(0, BLOCK_L // 4)
            o_4 = tl.arange(0, 4)[:, None] * COLUMNS + o_c[None, :]
            m_4 = tl.broadcast_to((o_c < COLUMNS)[None, :], (4, BLOCK_L // 4))
            b_normed = _normed(p_x, p_norm, o_4, m_4, eps, LATENT_DIM, PDL)
            b_y = _rotated(b_normed, p_x, p_norm, o_4, m_4, eps, LATENT_DIM, BLOCK_L, KRONECKER)
            b_words, b_latent_scale = coded_latent(b_y, m_4, LATENT_DIM)
            m_c = (o_c < COLUMNS) & (i_slot >= 0)
            p_words = p_rows.to(tl.pointer_type(tl.int16)) + i_slot * COLUMNS + o_c
            tl.store(p_words, b_words.to(tl.int16), mask=m_c)
            NUM_SCALES: constexpr = 2 if SMALL_ROPE else 1
            tl.store(p_scales + i_slot * NUM_SCALES, b_latent_scale, mask=i_slot >= 0)
        m_r = (o_r < ROPE_DIM) & (i_slot >= 0)
        b_x = tl.load(p_x + LATENT_DIM + o_r, mask=o_r < ROPE_DIM, other=0.0).to(tl.float32)
        b_key_cos = tl.load(p_cosine + o_table, mask=m_f, other=0.0).to(tl.float32)[None, :]
        b_key_sin = tl.load(p_sine + o_table, mask=m_f, other=0.0).to(tl.float32)[None, :]
        b_rope = turned(b_x, b_key_cos, b_key_sin).to(p_latent.dtype.element_ty).to(tl.float32)
        if KIND == "plain":
            p_rope_row = p_rows + i_slot * row_stride + LATENT_DIM + o_r
            tl.store(p_rope_row, b_rope.to(p_rows.dtype.element_ty), mask=m_r)
        elif KIND == "fp8_ds_mla":
            ROPE_AT: constexpr = LATENT_DIM + 4 * ((LATENT_DIM + TILE - 1) // TILE)
            p_bf16 = (p_rows + i_slot * row_stride + ROPE_AT).to(tl.pointer_type(tl.int16)) + o_r
            tl.store(p_bf16, bfloat16_bits(b_rope), mask=m_r)
        elif SMALL_ROPE:
            b_size = tl.max(size_bits(b_rope), axis=1).to(tl.float32, bitcast=True)
            b_rope_scale = tl.div_rn(b_size, tl.full((1,), 448.0, tl.float32))
            b_rope_scale = tl.where(b_rope_scale > 65504.0, 65504.0, b_rope_scale).to(tl.float16)
            b_rope_divisor = tl.where(b_rope_scale == 0, 1.0, b_rope_scale.to(tl.float32))
            b_factor = tl.div_rn(tl.full((1,), 1.0, tl.float32), b_rope_divisor)
            b_factor = tl.where(b_rope_scale == 0, 0.0, b_factor)
            tl.store(p_rope + i_slot * ROPE_DIM + o_r, e4m3_of(b_rope * b_factor[:, None]).to(tl.uint8), mask=m_r)
            o_1 = tl.arange(0, 1)
            tl.store(p_scales + i_slot * 2 + 1 + o_1, b_rope_scale, mask=(o_1 == 0) & (i_slot >= 0))
        else:
            tl.store(p_rope + i_slot * ROPE_DIM + o_r, bfloat16_bits(b_rope), mask=m_r)


@jit
def turned(b_x, b_cos, b_sin):
    """Rotate neighbours: [H, R] by a frequency per pair."""
    b_even, b_odd = tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2)))
    b_turned = tl.join(b_even * b_cos - b_odd * b_sin, b_odd * b_cos + b_even * b_sin)
    return tl.reshape(b_turned, b_x.shape)


@jit
def _normed(p_x, p_norm, o_x, m_x, eps, LATENT_DIM: constexpr, PDL: constexpr):
    """Norm the latent of a row, in the order of `o_x`, in float32."""
    b_norm = tl.load(p_norm + o_x, mask=m_x, other=0.0).to(tl.float32)
    release_then_wait(PDL)
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    return b_x * tl.rsqrt(tl.sum(b_x * b_x) / LATENT_DIM + eps) * b_norm


@jit
def hadamard_sign(o_i, o_j):
    """Return +1 or -1 of a Hadamard matrix: the parity of the common bits of both indices."""
    b_bits = o_i & o_j
    b_bits = b_bits ^ b_bits >> 8
    b_bits = b_bits ^ b_bits >> 4
    b_bits = b_bits ^ b_bits >> 2
    b_bits = (b_bits ^ b_bits >> 1) & 1
    return (1 - 2 * b_bits).to(tl.float32)


@jit
def _rotated(b_normed, p_x, p_norm, o_4, m_4, eps, LATENT_DIM: constexpr, BLOCK_L: constexpr, KRONECKER: constexpr):
    """Return the latent in the rotated space, by quarters: float32 sums of exact products."""
    SIDE: constexpr = LATENT_DIM & -LATENT_DIM
    if KRONECKER:
        # A Hadamard matrix is a Kronecker product: one factor on each side of the latent as a matrix.
        ROWS: constexpr = BLOCK_L // 16
        o_row, o_column = tl.arange(0, ROWS), tl.arange(0, 16)
        b_x = tl.reshape(b_normed, (ROWS, 16))
        b_x = tl.dot(b_x, hadamard_sign(o_column[:, None], o_column[None, :]), input_precision="ieee")
        b_x = tl.dot(hadamard_sign(o_row[:, None], o_row[None, :]), b_x, input_precision="ieee")
        b_y = tl.reshape(b_x, (4, BLOCK_L // 4))
    else:
        b_y = tl.zeros(o_4.shape, tl.float32)
        o_i = tl.arange(0, 16)
        b_squares = 0.0
        for first in range(0, LATENT_DIM, 16):
            b_x = tl.load(p_x + first + o_i).to(tl.float32)
            b_squares += tl.sum(b_x * b_x)
            b_x = b_x * tl.load(p_norm + first + o_i).to(tl.float32)
            o_j = (first + o_i)[None, None, :]
            m_block = o_j // SIDE == o_4[:, :, None] // SIDE
            b_sign = hadamard_sign(o_j % SIDE, o_4[:, :, None] % SIDE)
            b_y += tl.sum(tl.where(m_block, b_sign * b_x[None, None, :], 0.0), axis=2)
        b_y = b_y * tl.rsqrt(b_squares / LATENT_DIM + eps)
    return tl.where(m_4, b_y * (SIDE**-0.5), 0.0)


@jit
def coded_latent(b_y, m_4, LATENT_DIM: constexpr):
    """Return words of four codes, and the scale that preserves the norm."""
    b_length = tl.sqrt_rn(tl.sum(tl.sum(b_y * b_y, axis=1, keep_dims=True), axis=0, keep_dims=True))
    b_gain = tl.full((1, 1), GAIN * LATENT_DIM**0.5, tl.float32)
    b_factor = tl.div_rn(b_gain, tl.where(b_length > 0, b_length, 1.0))
    b_number, b_sign, b_size = nearest_magnitudes(b_y * b_factor, m_4, 4, MAGNITUDES)
    b_rising = tl.where(b_sign == 1, 7 - b_number, 8 + b_number)
    b_words = tl.sum(b_rising << 4 * tl.arange(0, 4)[:, None], axis=0)
    b_sizes = tl.sqrt_rn(tl.sum(tl.sum(b_size * b_size, axis=1, keep_dims=True), axis=0, keep_dims=True))
    b_scale = tl.div_rn(b_length, b_sizes)
    b_scale = tl.where(b_scale > 65504.0, 65504.0, b_scale).to(tl.float16)
    return b_words, tl.sum(tl.sum(b_scale.to(tl.float32), axis=1), axis=0).to(tl.float16)

"""Norm, RoPE and storage of DeepSeek-V4 vectors: entries of a layer or its index in plain torch, and functions for kernels.

T rows, I index heads, D elements of a vector, R rotated ones, the last

RMSNorm of all D elements, then RoPE on neighbours; cos and sin of an entry are those of its first token. All of it is in
float32 and rounded once, to the stored type. TurboQuant stores the elements before the last R in the rotated space
(quant/kv_quantize.py), in blocks of the largest power of two that divides them.
"""

import torch
from torch import Tensor

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.fp8 import bfloat16_bits, e4m3_of, size_bits
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentPlanes, store_latents
from holdfast.kernels.latent.write_index import LEAST_KEY, coded_index, store_index
from holdfast.kernels.latent.write_latent import LatentNorm, coded_latent, hadamard_sign, rotate_neighbours, turned
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, release_then_wait, tl
from holdfast.quant.formats import EXPONENT_ALIGNMENT, EXPONENT_TILE
from holdfast.quant.latent_quantize import LEAST_TILE

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

TILE = kernel_constant(EXPONENT_TILE)
ALIGNMENT = kernel_constant(EXPONENT_ALIGNMENT)
LEAST = kernel_constant(LEAST_TILE)
LEAST_INDEX = kernel_constant(LEAST_KEY)


def write_entries(entries_TD: Tensor, slots_T: Tensor, norm: LatentNorm, rotary: Rotary, planes: LatentPlanes) -> None:
    """Write each row's float32 entry to its slot, in plain torch; rows with slot -1 are not read."""
    slots_X, rows_XD = _finished(entries_TD, slots_T, norm, rotary)
    store_latents(planes, slots_X, rows_XD[:, : planes.latent_dim], rows_XD[:, planes.latent_dim :])


def write_index_entries(
    entries_TD: Tensor, slots_T: Tensor, norm: LatentNorm, rotary: Rotary, planes: IndexPlanes
) -> None:
    """Like `write_entries` for an index."""
    store_index(planes, *_finished(entries_TD, slots_T, norm, rotary))


def rotate_index_queries(q_TID: Tensor, states_T: Tensor, rotary: Rotary) -> None:
    """Rotate the last R elements of index heads by the row's position, in place, in plain torch; skip rows without a state."""
    is_row_T = states_T >= 0
    q_TIR = q_TID[..., q_TID.shape[-1] - rotary.dim :]
    turned_TIR = rotate_neighbours(q_TIR, rotary)
    q_TIR.copy_(torch.where(is_row_T[:, None, None], turned_TIR, q_TIR))


def rotate_last(x_TXD: Tensor, rotary: Rotary) -> Tensor:
    """Apply RoPE to the last R elements, [T, D] or [T, N, D], in float32, in plain torch."""
    before = x_TXD.shape[-1] - rotary.dim
    turned = rotate_neighbours(x_TXD[..., before:].float(), rotary)
    return torch.cat((x_TXD[..., :before].float(), turned), dim=-1)


def normed(x_TXD: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm without a weight to the last dimension, in float32, in plain torch."""
    x = x_TXD.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _finished(entries_TD: Tensor, slots_T: Tensor, norm: LatentNorm, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Return the slots of rows that have one, and their entries after norm and RoPE."""
    rows_X = (slots_T >= 0).nonzero().squeeze(1)
    normed_XD = normed(entries_TD[rows_X], norm.eps) * norm.weight_L.float()
    return slots_T[rows_X], rotate_last(normed_XD, rotary.at(rows_X))


@jit
def load_turn(p_cosine, p_sine, i_row, rotary_stride, DIM: constexpr, ROPE_DIM: constexpr, BLOCK_D: constexpr):
    """Load cos and sin of each pair of a row's vector, [1, BLOCK_D / 2]; 1 and 0 before the last ROPE_DIM elements."""
    o_f = (tl.arange(0, BLOCK_D // 2) - (DIM - ROPE_DIM) // 2)[None, :]
    m_f = (o_f >= 0) & (o_f < ROPE_DIM // 2)
    o_table = i_row * rotary_stride + o_f
    b_cos = tl.load(p_cosine + o_table, mask=m_f, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sine + o_table, mask=m_f, other=0.0).to(tl.float32)
    return b_cos, b_sin


@jit
def finished_vectors(b_x, b_weight, b_cos, b_sin, eps, DIM: constexpr):
    """Apply norm, weight and RoPE to [H, BLOCK_D]; elements from DIM on must be zero."""
    b_mean = tl.sum(b_x * b_x, axis=1, keep_dims=True) / DIM
    return turned(b_x * tl.rsqrt(b_mean + eps) * b_weight, b_cos, b_sin)


@jit
def rotated_latents(b_x, LATENT_DIM: constexpr):
    """Move the first LATENT_DIM elements of [H, BLOCK_D] into the rotated space, or back."""
    SIDE: constexpr = LATENT_DIM & -LATENT_DIM
    # A Hadamard matrix is the Kronecker product of two smaller ones: for the low and the high bits of an index.
    LOW: constexpr = 8 if SIDE >= 32 else (4 if SIDE >= 8 else SIDE)
    HIGH: constexpr = SIDE // LOW
    BLOCKS: constexpr = b_x.shape[0] * b_x.shape[1] // SIDE
    o_low, o_high = tl.arange(0, LOW), tl.arange(0, HIGH)
    b_low = hadamard_sign(o_low[:, None], o_low[None, :])[None, None, :, :]
    b_high = hadamard_sign(o_high[:, None], o_high[None, :])[None, :, :, None]
    b_y = tl.sum(tl.reshape(b_x, (BLOCKS, HIGH, LOW))[:, :, :, None] * b_low, axis=2)
    b_y = tl.sum(b_y[:, :, None, :] * b_high, axis=1) * (SIDE**-0.5)
    m_latent = (tl.arange(0, b_x.shape[1]) < LATENT_DIM)[None, :]
    return tl.where(m_latent, tl.reshape(b_y, b_x.shape), b_x)


@jit
def store_vector(
    p_rows, p_scales, p_rope, i_slot, row_stride, b_x, KIND: constexpr, LATENT_DIM: constexpr, DIM: constexpr
):
    """Store a vector [1, BLOCK_D] in its slot (-1: none), in the format of its planes; TurboQuant expects the rotated space."""
    BLOCK_D: constexpr = b_x.shape[1]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_d = (o_d < DIM) & (i_slot >= 0)
    p_row = p_rows + i_slot * row_stride
    if KIND == "plain":
        tl.store(p_row + o_d, b_x.to(p_rows.dtype.element_ty), mask=m_d)
    elif KIND == "index":
        b_key, b_scale = coded_index(b_x, LEAST_INDEX)
        tl.store(p_row + o_d, b_key, mask=m_d)
        o_1 = tl.arange(0, 1)
        tl.store(p_scales + i_slot + o_1, b_scale, mask=(o_1 == 0) & (i_slot >= 0))
    elif KIND == "turboquant":
        o_rope = i_slot * (DIM - LATENT_DIM) + (o_d - LATENT_DIM)
        tl.store(p_rope + o_rope, bfloat16_bits(b_x), mask=m_d & (o_d >= LATENT_DIM))
        COLUMNS: constexpr = LATENT_DIM // 4
        o_c = tl.arange(0, BLOCK_D // 4)
        m_4 = tl.broadcast_to((o_c < COLUMNS)[None, :], (4, BLOCK_D // 4))
        o_4 = tl.where(m_4, tl.arange(0, 4)[:, None] * COLUMNS + o_c[None, :], 0)
        b_y = tl.gather(tl.reshape(b_x, (BLOCK_D,)), tl.reshape(o_4, (BLOCK_D,)), 0)
        b_y = tl.where(m_4, tl.reshape(b_y, (4, BLOCK_D // 4)), 0.0)
        b_words, b_size = coded_latent(b_y, m_4, LATENT_DIM)
        p_words = p_rows.to(tl.pointer_type(tl.int16)) + i_slot * COLUMNS + o_c
        tl.store(p_words, b_words.to(tl.int16), mask=(o_c < COLUMNS) & (i_slot >= 0))
        tl.store(p_scales + i_slot, b_size, mask=i_slot >= 0)
    else:
        b_bits = bfloat16_bits(b_x)
        p_last = (p_row + LATENT_DIM).to(tl.pointer_type(tl.int16)) + (o_d - LATENT_DIM)
        tl.store(p_last, b_bits, mask=m_d & (o_d >= LATENT_DIM))
        TILES: constexpr = BLOCK_D // TILE
        NUM_TILES: constexpr = LATENT_DIM // TILE
        b_tile = tl.reshape((b_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True), (TILES, TILE))
        # Compare as integers: NaN is above all numbers, so it is not lost.
        b_amax = tl.max(size_bits(b_tile), axis=1).to(tl.float32, bitcast=True)
        b_amax = tl.where(b_amax < LEAST, LEAST, b_amax)
        b_quotient = size_bits(tl.div_rn(b_amax, tl.full((TILES,), 448.0, tl.float32)))
        b_exponent = tl.where(b_quotient < 0x7F800000, (b_quotient + 0x7FFFFF) >> 23, 255)
        b_inverse = tl.where(b_exponent == 255, 0x7FC00000, (254 - b_exponent) << 23).to(tl.float32, bitcast=True)
        b_code = e4m3_of(b_tile * b_inverse[:, None]).to(tl.uint8)
        o_tile = tl.arange(0, TILES)
        o_code = o_tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        tl.store(p_row + o_code, b_code, mask=(o_code < LATENT_DIM) & (i_slot >= 0))
        NUM_EXPONENTS: constexpr = (NUM_TILES + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        p_exponents = p_scales + i_slot * NUM_EXPONENTS
        tl.store(p_exponents + o_tile, b_exponent.to(tl.uint8), mask=(o_tile < NUM_TILES) & (i_slot >= 0))
        o_rest = NUM_TILES + tl.arange(0, ALIGNMENT)
        b_zero = tl.zeros((ALIGNMENT,), tl.uint8)
        tl.store(p_exponents + o_rest, b_zero, mask=(o_rest < NUM_EXPONENTS) & (i_slot >= 0))


@jit
def turn_heads(
    p_heads, head_stride, i_first, p_cosine, p_sine, i_row, rotary_stride,
    DIRECTION: constexpr, NUM_HEADS: constexpr, HEADS: constexpr, DIM: constexpr, ROPE_DIM: constexpr,
    BLOCK_R: constexpr, PDL: constexpr,
):  # fmt: skip
    """Rotate the last elements of some heads of a row in place, from `i_first` on; DIRECTION -1: back."""
    o_f = tl.arange(0, BLOCK_R // 2)[None, :]
    o_table = i_row * rotary_stride + o_f
    release_then_wait(PDL)
    b_cos = tl.load(p_cosine + o_table, mask=o_f < ROPE_DIM // 2, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sine + o_table, mask=o_f < ROPE_DIM // 2, other=0.0).to(tl.float32)
    o_head, o_r = i_first + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK_R)[None, :]
    p_head = p_heads + o_head * head_stride + (DIM - ROPE_DIM) + o_r
    m_head = (o_head < NUM_HEADS) & (o_r < ROPE_DIM)
    b_x = turned(tl.load(p_head, mask=m_head, other=0.0).to(tl.float32), b_cos, b_sin * DIRECTION)
    tl.store(p_head, b_x.to(p_heads.dtype.element_ty), mask=m_head)

"""Decoding of words of quantized latents (MLA) in Triton attention kernels.

M rows of a tile times heads, N tokens of a block, W columns of words, R rotated elements

Codes lie in 16-bit words (quant/latent_quantize.py); a group of words shares a scale. A part is one bit field of all words of
a group, converted to half precision without the scale.

    fp8_ds_mla   a group for every tile of 128 elements, part j at column c is element 128 g + 2 c + j, j < 2
    TurboQuant   one group, part j at column c is coordinate j L / 4 + c, j < 4
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.dequantize import latent_parts_4, value_parts_8
from holdfast.kernels.fp8 import float32_of
from holdfast.kernels.latent.latent_planes import LatentPlanes
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, next_power_of_two, tl
from holdfast.quant.formats import LATENT_TILE
from holdfast.quant.latent_quantize import LATENT_PARTS, num_fp8_tiles

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

# Triton resolves branches on constants at compile time, so both sides must stand in an if and an else.
# Triton cannot unpack into a tuple, but adds tuples.


class WordShape(NamedTuple):
    """Groups of a row's words, and the block sizes of a kernel."""

    groups: int
    parts: int
    block_columns: int
    block_rope: int


def word_shape(planes: LatentPlanes) -> WordShape:
    latent_dim, rope_dim, is_fp8 = planes.latent_dim, planes.rope_dim, planes.kind == "fp8_ds_mla"
    columns = min(LATENT_TILE, latent_dim) // 2 if is_fp8 else latent_dim // LATENT_PARTS
    rope_columns = rope_dim // 2 if planes.has_small_rope else rope_dim
    return WordShape(
        num_fp8_tiles(latent_dim) if is_fp8 else 1,
        2 if is_fp8 else LATENT_PARTS,
        max(16, next_power_of_two(columns)),
        max(16, next_power_of_two(rope_columns)),
    )


def rope_plane(planes: LatentPlanes) -> Tensor:
    """Return the plane with the rotated elements, as words; fp8_ds_mla has them in its rows."""
    if planes.rope_SR is None:
        return planes.rows_SX.view(torch.int16 if is_interpreted() else torch.bfloat16)
    return planes.rope_SR.view(torch.int16) if planes.has_small_rope or is_interpreted() else planes.rope_SR


@jit
def part_dims(o_c, i_group, i_part, FP8: constexpr, LATENT_DIM: constexpr):
    """Return the elements of a part, and a mask: a column may be beyond its group."""
    if FP8:
        o_d = 128 * i_group + 2 * o_c + i_part
        return o_d, (2 * o_c < 128) & (o_d < LATENT_DIM)
    else:
        return i_part * (LATENT_DIM // 4) + o_c, o_c < LATENT_DIM // 4


@jit
def half(b_x):
    """Convert to half precision, clamped to its range."""
    return tl.minimum(tl.maximum(b_x.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


@jit
def load_queries(p_q_m, m_m, FP8: constexpr, NUM_GROUPS: constexpr, LATENT_DIM: constexpr, BLOCK_W: constexpr):
    """Load queries [M, W] of every part, in half precision."""
    NUM_PARTS: constexpr = 2 if FP8 else 4
    o_c = tl.arange(0, BLOCK_W)
    b_q = ()
    for i in tl.static_range(NUM_GROUPS * NUM_PARTS):
        o_d, m_d = part_dims(o_c, i // NUM_PARTS, i % NUM_PARTS, FP8, LATENT_DIM)
        b_x = tl.load(p_q_m + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
        b_q = b_q + (half(b_x),)
    return b_q


@jit
def load_rope_queries(p_q_m, m_m, SMALL_ROPE: constexpr, ROPE_DIM: constexpr, BLOCK_R: constexpr, PLAIN: constexpr):
    """Load the rotated elements of queries: even and odd ones if keys are bytes, else all in the type of queries."""
    o_r = tl.arange(0, BLOCK_R)
    if SMALL_ROPE:
        m_r = m_m[:, None] & (o_r < ROPE_DIM // 2)[None, :]
        b_even = tl.load(p_q_m + 2 * o_r[None, :], mask=m_r, other=0.0)
        b_odd = tl.load(p_q_m + 2 * o_r[None, :] + 1, mask=m_r, other=0.0)
        return half(b_even), half(b_odd)
    else:
        b_x = tl.load(p_q_m + o_r[None, :], mask=m_m[:, None] & (o_r < ROPE_DIM)[None, :], other=0.0)
        return (b_x.to(tl.float32) if PLAIN else b_x,)


@jit
def load_scales(
    p_words, p_scales, o_slot,
    FP8: constexpr, SMALL_ROPE: constexpr, NUM_GROUPS: constexpr, LATENT_DIM: constexpr, ROW_WORDS: constexpr,
):  # fmt: skip
    """Load [N] scales of every group, then of rotated elements. Slots that are masked later may hold anything."""
    b_scales = ()
    if FP8:
        p_row = p_words.to(tl.pointer_type(tl.float32)) + o_slot * (ROW_WORDS // 2) + LATENT_DIM // 4
        for g in tl.static_range(NUM_GROUPS):
            b_scales = b_scales + (tl.load(p_row + g),)
    else:
        NUM_SCALES: constexpr = 2 if SMALL_ROPE else 1
        for i in tl.static_range(NUM_SCALES):
            b_scales = b_scales + (tl.load(p_scales + o_slot * NUM_SCALES + i),)
    return b_scales


@jit
def scale_factor(b_scale, m_n, MASKED: constexpr):
    b_factor = b_scale.to(tl.float32)
    return tl.where(m_n, b_factor, 0.0) if MASKED else b_factor


@jit
def load_words(
    p_words, o_slot, m_n, i_group,
    MASKED: constexpr, FP8: constexpr, LATENT_DIM: constexpr, ROW_WORDS: constexpr, BLOCK_W: constexpr,
):  # fmt: skip
    """Load the words of a group: [N, W]."""
    WHOLE: constexpr = LATENT_DIM % 128 == 0 if FP8 else LATENT_DIM // 4 == BLOCK_W
    o_c = tl.arange(0, BLOCK_W)
    o_word = i_group * 64 + o_c
    p = p_words + (o_slot * ROW_WORDS)[:, None] + o_word[None, :]
    m_c = (o_word < LATENT_DIM // 2 if FP8 else o_word < LATENT_DIM // 4)[None, :]
    # A branch per mask: a load that cannot be out of range has none.
    if MASKED:
        return tl.load(p, mask=m_n[:, None] & m_c, other=0)
    elif WHOLE:
        return tl.load(p)
    else:
        return tl.load(p, mask=m_c, other=0)


@jit
def take_apart(b_words, FP8: constexpr, PLAIN: constexpr):
    if FP8:
        return value_parts_8(b_words, PLAIN)
    else:
        return latent_parts_4(b_words, PLAIN)


@jit
def group_scores(b_q, b_words, i_group, FP8: constexpr, PLAIN: constexpr):
    """Return scores [M, N] without a scale. Words are transposed: they go from shared memory straight to operands."""
    NUM_PARTS: constexpr = 2 if FP8 else 4
    b_keys = take_apart(tl.trans(b_words), FP8, PLAIN)
    b_score = tl.dot(b_q[i_group * NUM_PARTS], b_keys[0])
    for j in tl.static_range(1, NUM_PARTS):
        b_score = tl.dot(b_q[i_group * NUM_PARTS + j], b_keys[j], b_score)
    return b_score


@jit
def rope_scores(
    b_q, p_rope, o_slot, m_n,
    MASKED: constexpr, FP8: constexpr, SMALL_ROPE: constexpr, LATENT_DIM: constexpr, ROPE_DIM: constexpr,
    NUM_GROUPS: constexpr, ROW_WORDS: constexpr, BLOCK_R: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Return scores [M, N] of the rotated elements, without their scale."""
    COLUMNS: constexpr = ROPE_DIM // 2 if SMALL_ROPE else ROPE_DIM
    STRIDE: constexpr = ROW_WORDS if FP8 else COLUMNS
    FIRST: constexpr = LATENT_DIM // 2 + 2 * NUM_GROUPS if FP8 else 0
    o_r = tl.arange(0, BLOCK_R)
    p = p_rope + (o_slot * STRIDE)[:, None] + (FIRST + o_r)[None, :]
    if MASKED:
        b_words = tl.load(p, mask=m_n[:, None] & (o_r < COLUMNS)[None, :], other=0)
    elif COLUMNS == BLOCK_R:
        b_words = tl.load(p)
    else:
        b_words = tl.load(p, mask=(o_r < COLUMNS)[None, :], other=0)
    if SMALL_ROPE:
        b_even, b_odd = value_parts_8(tl.trans(b_words), PLAIN)
        return tl.dot(b_q[1], b_odd, tl.dot(b_q[0], b_even))
    elif PLAIN:
        return tl.dot(b_q[0], tl.trans(float32_of(b_words)))
    else:
        return tl.dot(b_q[0], tl.trans(b_words.to(b_q[0].dtype)))


@jit
def store_parts(
    b_acc, b_share, p_m, m_m, FP8: constexpr, NUM_GROUPS: constexpr, LATENT_DIM: constexpr, BLOCK_W: constexpr
):
    NUM_PARTS: constexpr = 2 if FP8 else 4
    o_c = tl.arange(0, BLOCK_W)
    for i in tl.static_range(NUM_GROUPS * NUM_PARTS):
        o_d, m_d = part_dims(o_c, i // NUM_PARTS, i % NUM_PARTS, FP8, LATENT_DIM)
        b_out = (b_acc[i] * b_share).to(p_m.dtype.element_ty)
        tl.store(p_m + o_d[None, :], b_out, mask=m_m[:, None] & m_d[None, :])

"""Norm, RoPE and write of a step's index keys (DSA), and RoPE of index queries, in one pass; quantization of index queries.

T rows, I index heads, D elements of a head, R rotated ones

LayerNorm with a bias, then RoPE on the first R elements. Frequency i rotates elements i and i + R / 2 (halves), or 2 i and
2 i + 1 (neighbours). All of it is in float32 and rounded once, to the stored type.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.fp8 import e4m3_of, size_bits
from holdfast.kernels.latent.latent_planes import IndexPlanes
from holdfast.kernels.latent.write_latent import rotate_neighbours
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, release_then_wait, tl

ELEMENTS_PER_PROGRAM = 2048
"""Elements of index heads per program."""
NUM_WARPS = 4
LEAST_KEY = 1e-4
LEAST_QUERY = 1e-10
"""Least amax of a key, or of a query head, when a scale is chosen."""
E4M3_MAX = 448.0


class IndexNorm(NamedTuple):
    """The LayerNorm of index keys."""

    weight_D: Tensor
    bias_D: Tensor
    eps: float


def write_index_reference(
    k_TD: Tensor,
    q_TID: Tensor,
    slots_T: Tensor,
    norm: IndexNorm,
    rotary: Rotary,
    planes: IndexPlanes,
    by_neighbours: bool = False,
) -> None:
    """Write each row's index key to its slot (-1: none); rotate the first R elements of its index heads in place.

    Rows of `k_TD` and `q_TID` may be strided.
    """
    rope_dim, is_kept_T = rotary.dim, slots_T >= 0
    q_TIR, rotate = q_TID[..., :rope_dim], rotate_neighbours if by_neighbours else rotate_halves
    q_TIR.copy_(rotate(q_TIR, rotary))
    normed_TD = layer_norm(k_TD.float(), k_TD.shape[1:], norm.weight_D.float(), norm.bias_D.float(), norm.eps)
    keys_TD = torch.cat((rotate(normed_TD[:, :rope_dim], rotary), normed_TD[:, rope_dim:]), dim=-1)
    store_index(planes, slots_T[is_kept_T], keys_TD[is_kept_T])


def store_index(planes: IndexPlanes, slots_X: Tensor, keys_XD: Tensor) -> None:
    """Store normed and rotated keys in some slots, in plain torch."""
    if planes.scales_S1 is None:
        planes.rows_SD[slots_X] = keys_XD.to(planes.rows_SD.dtype)
    else:
        codes_XD, planes.scales_S1[slots_X] = quantize_index(keys_XD, LEAST_KEY)
        planes.rows_SD.view(torch.uint8)[slots_X] = codes_XD.view(torch.uint8)


def rotate_halves(x_TXR: Tensor, rotary: Rotary) -> Tensor:
    """Apply RoPE to the last dimension by halves, [T, R] or [T, I, R], in float32."""
    lift = (slice(len(x_TXR)), *(None,) * (x_TXR.dim() - 2))
    cos, sin = rotary.cos_TP.float()[lift], rotary.sin_TP.float()[lift]
    left, right = x_TXR.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def quantize_index(x_XD: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes and float32 scales [X, 1]: the least power of two that scales the amax to at most 448."""
    amax_X1 = x_XD.float().abs().amax(-1, keepdim=True).clamp(min=least)
    mantissa_X1, exponent_X1 = torch.frexp(amax_X1 / E4M3_MAX)
    exponent_X1 = torch.where(mantissa_X1 == 0.5, exponent_X1 - 1, exponent_X1)
    # Scales that are not finite have no exponent and stay.
    scales_X1 = torch.where(amax_X1.isfinite(), torch.ldexp(torch.ones_like(amax_X1), exponent_X1), amax_X1)
    return (x_XD.float() / scales_X1).to(torch.float8_e4m3fn), scales_X1


def quantize_index_queries_reference(
    q_TID: Tensor, weights_TI: Tensor, codes_TID: Tensor, out_weights_TI: Tensor
) -> None:
    """Quantize each head of a row to e4m3; fold its scale, a power of two, into its float32 weight.

    `out_weights_TI` may be `weights_TI`. Rows may be strided.
    """
    codes, scales_TI1 = quantize_index(q_TID, LEAST_QUERY)
    codes_TID.copy_(codes)
    out_weights_TI.copy_(weights_TI.float() * scales_TI1.squeeze(-1))


def write_index_triton(
    k_TD: Tensor,
    q_TID: Tensor,
    slots_T: Tensor,
    norm: IndexNorm,
    rotary: Rotary,
    planes: IndexPlanes,
    by_neighbours: bool = False,
) -> None:
    """Launch one program for the key of a row, and more for its index heads."""
    (num_rows, num_heads, dim), rope_dim = q_TID.shape, rotary.dim
    _check_layout(k_TD, q_TID, rotary, planes)
    if num_rows == 0:
        return
    half_block = next_power_of_two(rope_dim // 2)
    heads = min(next_power_of_two(num_heads), max(1, ELEMENTS_PER_PROGRAM // (2 * half_block)))
    _write_index_kernel[(num_rows * (1 + -(-num_heads // heads)),)](
        k_TD, q_TID, slots_T, norm.weight_D, norm.bias_D, rotary.cos_TP, rotary.sin_TP,
        planes.rows_SD.view(torch.uint8) if planes.is_quantized else planes.rows_SD, planes.scales_S1, norm.eps,
        k_TD.stride(0), q_TID.stride(0), q_TID.stride(1), rotary.cos_TP.stride(0),
        LEAST=LEAST_KEY, NUM_HEADS=num_heads, DIM=dim, ROPE_DIM=rope_dim, HEADS=heads, BLOCK_D=next_power_of_two(dim),
        HALF_BLOCK=half_block, NEIGHBOURS=by_neighbours, num_warps=NUM_WARPS, **pdl_flags(k_TD),
    )  # fmt: skip


write_index = operation(reference=write_index_reference, triton=write_index_triton)


def quantize_index_queries_triton(q_TID: Tensor, weights_TI: Tensor, codes_TID: Tensor, out_weights_TI: Tensor) -> None:
    """Launch one program per block of heads of a row."""
    num_rows, num_heads, dim = q_TID.shape
    assert codes_TID.shape == q_TID.shape, f"{codes_TID.shape=} for {q_TID.shape=}"
    for rows in (q_TID, weights_TI, codes_TID, out_weights_TI):
        assert rows.stride(-1) == 1, f"{rows.stride()=}: what belongs to a row must lie side by side"
    if num_rows == 0:
        return
    block_d = next_power_of_two(dim)
    heads = min(next_power_of_two(num_heads), max(1, ELEMENTS_PER_PROGRAM // block_d))
    _quantize_queries_kernel[(num_rows * -(-num_heads // heads),)](
        q_TID, weights_TI, codes_TID.view(torch.uint8), out_weights_TI, q_TID.stride(0), q_TID.stride(1),
        weights_TI.stride(0), codes_TID.stride(0), codes_TID.stride(1), out_weights_TI.stride(0),
        LEAST=LEAST_QUERY, NUM_HEADS=num_heads, DIM=dim, HEADS=heads, BLOCK_D=block_d, num_warps=NUM_WARPS,
        **pdl_flags(q_TID),
    )  # fmt: skip


quantize_index_queries = operation(reference=quantize_index_queries_reference, triton=quantize_index_queries_triton)


def _check_layout(k_TD: Tensor, q_TID: Tensor, rotary: Rotary, planes: IndexPlanes) -> None:
    (dim,), rope_dim = k_TD.shape[1:], rotary.dim
    assert dim == q_TID.shape[2] == planes.rows_SD.shape[1], f"{k_TD.shape=}, {q_TID.shape=}, {planes.rows_SD.shape=}"
    assert rope_dim % 2 == 0 < rope_dim <= dim, f"{rope_dim=} of {dim=}: rope turns pairs"
    assert k_TD.stride(1) == 1, f"{k_TD.stride()=}: the elements of a row must lie side by side"
    assert q_TID.stride(2) == 1, f"{q_TID.stride()=}: the elements of a head must lie side by side"
    rotary.check_layout()
    for plane in (planes.rows_SD, planes.scales_S1):
        assert plane is None or plane.is_contiguous(), f"{plane.stride()=}: the slots of a plane must lie side by side"


@jit
def _write_index_kernel(
    p_k, p_q, p_slots, p_norm, p_bias, p_cosine, p_sine, p_rows, p_scales, eps, k_stride, q_stride, head_stride,
    rotary_stride,
    LEAST: constexpr, NUM_HEADS: constexpr, DIM: constexpr, ROPE_DIM: constexpr, HEADS: constexpr, BLOCK_D: constexpr,
    HALF_BLOCK: constexpr, NEIGHBOURS: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_BLOCKS: constexpr = 1 + (NUM_HEADS + HEADS - 1) // HEADS
    HALF: constexpr = ROPE_DIM // 2
    # Strides to the next element of a half, and to the partner.
    STEP: constexpr = 2 if NEIGHBOURS else 1
    APART: constexpr = 1 if NEIGHBOURS else HALF
    i_program = tl.program_id(0)
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    i_block = i_program % NUM_BLOCKS
    i_slot = tl.load(p_slots + i_row).to(tl.int64)
    # Constants are loaded before the wait. A kernel of the step writes cos and sin.
    if i_block > 0:
        # Queries are rotated in place: a thread must load both elements of a pair.
        o_f = tl.arange(0, HALF_BLOCK)[None, :]
        o_half = i_row * rotary_stride + o_f
        release_then_wait(PDL)
        b_cos = tl.load(p_cosine + o_half, mask=o_f < HALF, other=0.0).to(tl.float32)
        b_sin = tl.load(p_sine + o_half, mask=o_f < HALF, other=0.0).to(tl.float32)
        o_head = (i_block - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        m_q = (o_head < NUM_HEADS) & (o_f < HALF)
        p_left = p_q + i_row * q_stride + o_head * head_stride + o_f * STEP
        b_left = tl.load(p_left, mask=m_q, other=0.0).to(tl.float32)
        b_right = tl.load(p_left + APART, mask=m_q, other=0.0).to(tl.float32)
        tl.store(p_left, (b_left * b_cos - b_right * b_sin).to(p_q.dtype.element_ty), mask=m_q)
        tl.store(p_left + APART, (b_right * b_cos + b_left * b_sin).to(p_q.dtype.element_ty), mask=m_q)
    else:
        o_d = tl.arange(0, BLOCK_D)[None, :]
        m_d, m_rope = o_d < DIM, o_d < ROPE_DIM
        if NEIGHBOURS:
            o_partner = tl.where(m_rope, o_d ^ 1, o_d)
            o_pair, m_first = o_d // 2, o_d % 2 == 0
        else:
            o_partner = tl.where(m_rope, (o_d + HALF) % ROPE_DIM, o_d)
            o_pair, m_first = o_d % HALF, o_d < HALF
        o_table = i_row * rotary_stride + o_pair
        b_weight = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_bias = tl.load(p_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_partner_weight = tl.load(p_norm + o_partner, mask=m_d, other=0.0).to(tl.float32)
        b_partner_bias = tl.load(p_bias + o_partner, mask=m_d, other=0.0).to(tl.float32)
        release_then_wait(PDL)
        b_cos_d = tl.load(p_cosine + o_table, mask=m_rope, other=1.0).to(tl.float32)
        b_sin_d = tl.load(p_sine + o_table, mask=m_rope, other=0.0).to(tl.float32)
        b_sin_d = tl.where(m_first, -b_sin_d, b_sin_d)
        p_row = p_k + i_row * k_stride
        b_x = tl.load(p_row + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_partner = tl.load(p_row + o_partner, mask=m_d, other=0.0).to(tl.float32)
        b_mean = tl.sum(b_x, axis=1, keep_dims=True) / DIM
        b_x = tl.where(m_d, b_x - b_mean, 0.0)
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1, keep_dims=True) / DIM + eps)
        b_x = b_x * b_rstd * b_weight + b_bias
        b_partner = (b_partner - b_mean) * b_rstd * b_partner_weight + b_partner_bias
        b_x = tl.where(m_rope, b_x * b_cos_d + b_partner * b_sin_d, b_x)
        m_store = m_d & (i_slot >= 0)
        p_y = p_rows + i_slot * DIM + o_d
        if p_scales is None:
            tl.store(p_y, b_x.to(p_rows.dtype.element_ty), mask=m_store)
        else:
            b_codes, b_scale = coded_index(b_x, LEAST)
            tl.store(p_y, b_codes, mask=m_store)
            o_1 = tl.arange(0, 1)
            tl.store(p_scales + i_slot + o_1, b_scale, mask=(o_1 == 0) & (i_slot >= 0))


@jit
def _quantize_queries_kernel(
    p_q, p_weights, p_codes, p_out, q_stride, head_stride, weights_stride, codes_stride, codes_head_stride, out_stride,
    LEAST: constexpr, NUM_HEADS: constexpr, DIM: constexpr, HEADS: constexpr, BLOCK_D: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_BLOCKS: constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    i_program = tl.program_id(0)
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    o_head = i_program % NUM_BLOCKS * HEADS + tl.arange(0, HEADS)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_head = o_head < NUM_HEADS
    m_x = m_head[:, None] & (o_d < DIM)
    release_then_wait(PDL)
    b_x = tl.load(p_q + i_row * q_stride + o_head[:, None] * head_stride + o_d, mask=m_x, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weights + i_row * weights_stride + o_head, mask=m_head, other=0.0).to(tl.float32)
    b_codes, b_scale = coded_index(b_x, LEAST)
    tl.store(p_codes + i_row * codes_stride + o_head[:, None] * codes_head_stride + o_d, b_codes, mask=m_x)
    tl.store(p_out + i_row * out_stride + o_head, b_weight * b_scale, mask=m_head)


@jit
def coded_index(b_x, LEAST: constexpr):
    """Return codes [H, D] and row scales: the least power of two >= max(amax, LEAST) / 448; non-finite ones stay."""
    # Compare as integers: NaN is above all numbers, so it is not lost.
    b_amax = tl.max(size_bits(b_x), axis=1).to(tl.float32, bitcast=True)
    b_amax = tl.where(b_amax < LEAST, LEAST, b_amax)
    b_bits = size_bits(tl.div_rn(b_amax, tl.full(b_amax.shape, 448.0, tl.float32)))
    b_bits = tl.where(b_bits < 0x7F800000, (b_bits + 0x7FFFFF) & 0x7F800000, b_bits)
    b_scale = b_bits.to(tl.float32, bitcast=True)
    # The inverse of a power of two is exact, and so is the product.
    b_inverse = tl.div_rn(tl.full(b_amax.shape, 1.0, tl.float32), b_scale)
    return e4m3_of(b_x * b_inverse[:, None]).to(tl.uint8), b_scale

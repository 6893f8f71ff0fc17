"""KV cache writes into quantized pages: norm and rotate heads of a fused projection, quantize keys and values, return queries.

T rows, H query heads, K key/value heads, D head dim, X = (s H + 2 K) D, R rows that are not padding

Query heads of a row lie s = `query_step` heads apart, as in write_kv.py. Pages, near rows, tables and the returned queries have
keys in pair order (`in_pair_order`): RoPE turns places i and i + D / 2 of a head, and the last pairs of a partial one stay.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.key_bias import NEAR_SCALE, KeyBias, key_bias_rows
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.write_kv import (
    HeadNorm,
    Rotary,
    in_pair_order,
    num_query_heads,
    num_turned_pairs,
    turned_heads,
)
from holdfast.kernels.fp8 import quarters, store_keys, store_values, sum_of_products
from holdfast.kernels.geometry import BLOCK_TOKENS
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, next_power_of_two, release_then_wait, tl
from holdfast.quant.kv_quantize import (
    KEY_CODEBOOKS,
    VALUE_CODEBOOKS,
    Codebook,
    hadamard_block,
    quantize_keys,
    quantize_values,
)

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


ELEMENTS_PER_PROGRAM = 1024
"""Elements of whole heads per program: 8 of 128. Independent of the number of rows, so a row's sums have one order."""
LEAST_HEADS = 8
LEAST_BLOCK = 16
"""Least length of a tensor-core sum."""
NUM_WARPS = 4
NO_CODEBOOK = Codebook(bits=8, magnitudes=(), gain=0.0)
TURN_TOKENS = kernel_constant(BLOCK_TOKENS)
"""Tokens that share a row of `KeyTurns.cos_BC`."""
TURN_SCALE = kernel_constant(NEAR_SCALE)


class NearWrite(NamedTuple):
    """Where a write also stores keys and values as they are before quantization: scaled, rotated, less the mean of the keys.

    If codes leave out a key bias, these keys have it.
    """

    slots_T: Tensor
    """-1: the row stores none."""
    positions_T: Tensor
    """A key bias turns by them."""
    k_plane_SKD: Tensor
    v_plane_SKD: Tensor


def write_quantized_kv_reference(
    qkv_TX: Tensor,
    slots_T: Tensor,
    planes: QuantizedPlanes,
    head_norm: HeadNorm | None,
    rotary: Rotary | None,
    out_THD: Tensor | None = None,
    near: NearWrite | None = None,
    query_step: int = 1,
) -> Tensor:
    """Quantize keys and values of each row into its slot; return queries as [T, H, D], in `out_THD` if given.

    Queries are rotated like the keys (quant/kv_quantize.py), so their products need no inverse. A row with a negative slot is
    padding: it stores nothing, and its queries are zeros. `out_THD` may be the query part of `qkv_TX`. Rows may be strided.
    """
    shape = planes.num_kv_heads, planes.head_dim
    q_THD, k_TKD, v_TKD = turned_heads(qkv_TX, *shape, head_norm, rotary, query_step)
    if rotary is not None:
        q_THD, k_TKD = in_pair_order(q_THD, rotary.dim), in_pair_order(k_TKD, rotary.dim)
    if planes.pair_scale_2KD is not None:
        q_THD, k_TKD = _balanced(q_THD, k_TKD, planes.pair_scale_2KD)
    if near is not None:
        _store_near(near, k_TKD, v_TKD, planes)
    used_T = slots_T >= 0
    rows_R = used_T.nonzero().squeeze(1)
    slots_R, k_RKD, v_RKD = slots_T[rows_R], k_TKD[rows_R], v_TKD[rows_R]
    if planes.rotates_keys:
        q_THD, k_RKD = _rotated(q_THD, planes).to(qkv_TX.dtype), _rotated(k_RKD, planes)
    if planes.rotates_values:
        v_RKD = _rotated(v_RKD, planes)
    if planes.k_mean_KD is not None:
        k_RKD = k_RKD.float() - planes.k_mean_KD
    pages_R, tokens_R = slots_R // planes.page_tokens, slots_R % planes.page_tokens
    keys, values = quantize_keys(k_RKD, planes.key_bits), quantize_values(v_RKD, planes.value_bits)
    planes.store(pages_R, tokens_R, keys, values)
    q_THD = torch.where(used_T[:, None, None], q_THD, 0)
    return q_THD if out_THD is None else out_THD.copy_(q_THD)


def write_quantized_kv_triton(
    qkv_TX: Tensor,
    slots_T: Tensor,
    planes: QuantizedPlanes,
    head_norm: HeadNorm | None,
    rotary: Rotary | None,
    out_THD: Tensor | None = None,
    near: NearWrite | None = None,
    query_step: int = 1,
) -> Tensor:
    """Launch one program per block of heads of one kind; it rounds where the reference rounds."""
    num_rows, num_kv_heads, head_dim = len(qkv_TX), planes.num_kv_heads, planes.head_dim
    num_heads = num_query_heads(qkv_TX, num_kv_heads, head_dim, query_step)
    q_THD = qkv_TX.new_empty(num_rows, num_heads, head_dim) if out_THD is None else out_THD
    _check_layout(qkv_TX, q_THD, planes, rotary)
    if near is not None:
        _check_near(near, planes)
    bias = None if near is None else planes.key_bias
    if num_rows:
        block = max(LEAST_BLOCK, next_power_of_two(head_dim // 4))
        most_heads = max(LEAST_HEADS, ELEMENTS_PER_PROGRAM // (4 * block))
        query_heads, kv_heads = (
            max(LEAST_HEADS, min(most_heads, next_power_of_two(count))) for count in (num_heads, num_kv_heads)
        )
        key_codebook = KEY_CODEBOOKS.get(planes.key_bits, NO_CODEBOOK)
        value_codebook = VALUE_CODEBOOKS.get(planes.value_bits, NO_CODEBOOK)
        num_blocks = -(-num_heads // query_heads) + 2 * -(-num_kv_heads // kv_heads)
        _write_quantized_kv_kernel[(num_rows * num_blocks,)](
            qkv_TX, slots_T, planes.k_codes_PKtB.view(torch.int32) if planes.key_bits == 4 else planes.k_codes_PKtB,
            planes.k_signs_PKtS, planes.k_scale_PKt, planes.v_codes_PKtB.view(torch.int16),
            None if planes.v_signs_PKtS is None else planes.v_signs_PKtS.view(torch.int16), planes.v_scale_PKt, q_THD,
            planes.rotation_DD, planes.k_mean_KD, planes.pair_scale_2KD, head_norm.q_weight_D if head_norm else None,
            head_norm.k_weight_D if head_norm else None, rotary.cos_TP if rotary else None,
            rotary.sin_TP if rotary else None, *(near or (None,) * len(NearWrite._fields)), *_bias_tables(bias),
            head_norm.eps if head_norm else 0.0, qkv_TX.stride(0), q_THD.stride(0),
            OFFSET=head_norm.offset if head_norm else 0.0, KEY_BITS=planes.key_bits, VALUE_BITS=planes.value_bits,
            KEY_MAGNITUDES=key_codebook.magnitudes, VALUE_MAGNITUDES=value_codebook.magnitudes,
            KEY_GAIN=key_codebook.gain * head_dim**0.5, VALUE_GAIN=value_codebook.gain * head_dim**0.5,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE_TOKENS=planes.page_tokens,
            PAIRS=num_turned_pairs(rotary, head_dim) if rotary else head_dim // 2, QUERY_STEP=query_step,
            QUERY_HEADS=query_heads, KV_HEADS=kv_heads, BLOCK=block, num_warps=NUM_WARPS, **pdl_flags(qkv_TX),
        )  # fmt: skip
    return q_THD


write_quantized_kv = operation(reference=write_quantized_kv_reference, triton=write_quantized_kv_triton)


def _check_layout(qkv_TX: Tensor, q_THD: Tensor, planes: QuantizedPlanes, rotary: Rotary | None) -> None:
    head_dim = planes.head_dim
    assert head_dim % 16 == 0, f"{head_dim=}: quantized heads are multiples of 16"
    assert qkv_TX.stride(1) == 1, f"{qkv_TX.stride()=}: the elements of a row must lie side by side"
    assert q_THD.stride()[1:] == (head_dim, 1), f"{q_THD.stride()=}: the heads of a row must lie side by side"
    tables = (planes.rotation_DD, rotary.cos_TP, rotary.sin_TP) if rotary else (planes.rotation_DD,)
    for table in tables:
        assert table.dtype == qkv_TX.dtype, f"{table.dtype=} of a table for rows of {qkv_TX.dtype=}"
        assert table.is_contiguous(), f"{table.stride()=}: the rows of a table must lie side by side"
    for plane in (planes.k_codes_PKtB, planes.k_scale_PKt, planes.v_codes_PKtB, planes.v_scale_PKt):
        assert plane.is_contiguous(), f"{plane.stride()=}: the pages of a plane must lie side by side"
    if planes.k_mean_KD is not None:
        assert planes.k_mean_KD.is_contiguous(), f"{planes.k_mean_KD.stride()=}: the means must lie side by side"
    if planes.pair_scale_2KD is not None:
        assert planes.rotates_keys, f"{planes.key_bits=}: keys of 8 bits have no pair scale"
        assert planes.pair_scale_2KD.is_contiguous(), f"{planes.pair_scale_2KD.stride()=}: scales must lie side by side"


def _check_near(near: NearWrite, planes: QuantizedPlanes) -> None:
    shape = planes.num_kv_heads, planes.head_dim
    for plane_SKD in (near.k_plane_SKD, near.v_plane_SKD):
        assert plane_SKD.shape[1:] == shape, f"{plane_SKD.shape=} of near rows, whose codes have heads of {shape}"
        assert plane_SKD.is_contiguous(), f"{plane_SKD.stride()=}: the rows of a plane must lie side by side"


def _bias_tables(bias: KeyBias | None) -> tuple[Tensor | None, ...]:
    """Return the bias and its turns in the order of the kernel's arguments."""
    if bias is None:
        return (None,) * 4
    tables = bias.bias_KD, bias.turns.cos_BC, bias.turns.sin_BC, bias.turns.near_2NC
    for table in tables:
        assert table.is_contiguous(), f"{table.stride()=}: the rows of a table must lie side by side"
    return tables


def _store_near(near: NearWrite, k_TKD: Tensor, v_TKD: Tensor, planes: QuantizedPlanes) -> None:
    """Store keys and values of the rows that have a near slot."""
    rows_R = (near.slots_T >= 0).nonzero().squeeze(1)
    slots_R, k_RKD, v_RKD = near.slots_T[rows_R], k_TKD[rows_R], v_TKD[rows_R]
    if planes.key_bias is not None:
        bias_RKD = key_bias_rows(planes.key_bias, near.positions_T[rows_R]).transpose(0, 1)
        k_RKD = (k_RKD.float() + bias_RKD).to(k_TKD.dtype)
    k_RKD = _rotated(k_RKD, planes) if planes.rotates_keys else k_RKD
    v_RKD = _rotated(v_RKD, planes) if planes.rotates_values else v_RKD
    if planes.k_mean_KD is not None:
        k_RKD = k_RKD.float() - planes.k_mean_KD
    near.k_plane_SKD.index_copy_(0, slots_R, k_RKD.to(near.k_plane_SKD.dtype))
    near.v_plane_SKD.index_copy_(0, slots_R, v_RKD.to(near.v_plane_SKD.dtype))


def _balanced(q_THD: Tensor, k_TKD: Tensor, pair_scale_2KD: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply keys by their scale and queries by its inverse, rounded to the type of the rows."""
    scale_KD, inverse_KD = pair_scale_2KD.unbind()
    inverse_HD = inverse_KD.repeat_interleave(q_THD.shape[1] // len(scale_KD), dim=0)
    return (q_THD.float() * inverse_HD).to(q_THD.dtype), (k_TKD.float() * scale_KD).to(k_TKD.dtype)


def _rotated(x_XD: Tensor, planes: QuantizedPlanes) -> Tensor:
    return x_XD.float() @ planes.rotation_DD[: planes.head_dim].float() * hadamard_block(planes.head_dim) ** -0.5


@jit
def _write_quantized_kv_kernel(
    p_qkv, p_slots, p_k_codes, p_k_signs, p_k_scale, p_v_codes, p_v_signs, p_v_scale, p_q, p_rotation, p_k_mean,
    p_pair_scale, p_q_norm, p_k_norm, p_cosine, p_sine, p_near_slots, p_positions, p_near_k, p_near_v, p_bias,
    p_turn_cos, p_turn_sin, p_turn_near, eps, qkv_stride, q_stride,
    OFFSET: constexpr, KEY_BITS: constexpr, VALUE_BITS: constexpr, KEY_MAGNITUDES: constexpr,
    VALUE_MAGNITUDES: constexpr, KEY_GAIN: constexpr, VALUE_GAIN: constexpr, NUM_HEADS: constexpr,
    NUM_KV_HEADS: constexpr, HEAD_DIM: constexpr, PAGE_TOKENS: constexpr, PAIRS: constexpr, QUERY_STEP: constexpr,
    QUERY_HEADS: constexpr, KV_HEADS: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    # A program has heads of one kind, as four blocks: their quarters. Names differ by kind because types may.
    QUERY_BLOCKS: constexpr = (NUM_HEADS + QUERY_HEADS - 1) // QUERY_HEADS
    KV_BLOCKS: constexpr = (NUM_KV_HEADS + KV_HEADS - 1) // KV_HEADS
    NUM_BLOCKS: constexpr = QUERY_BLOCKS + 2 * KV_BLOCKS
    i_program = tl.program_id(0)
    i_block = i_program % NUM_BLOCKS
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    i_slot = tl.load(p_slots + i_row).to(tl.int64)
    o_d = tl.arange(0, BLOCK)[None, :]
    m_d = o_d < HEAD_DIM // 4
    o_table = i_row * PAIRS + o_d
    p_row = p_qkv + i_row * qkv_stride + o_d

    if i_block < QUERY_BLOCKS:
        o_query = i_block * QUERY_HEADS + tl.arange(0, QUERY_HEADS)[:, None]
        m_query = (o_query < NUM_HEADS) & m_d
        p_query = p_row + o_query * (QUERY_STEP * HEAD_DIM)
        b_q_table = _rotation_table(p_rotation, HEAD_DIM, BLOCK, KEY_BITS)
        if p_pair_scale is not None:
            o_inverse = (NUM_KV_HEADS + o_query // (NUM_HEADS // NUM_KV_HEADS)) * HEAD_DIM + o_d
            b_inverse = quarters(p_pair_scale + o_inverse, m_query, HEAD_DIM)
        b_q = _turned(p_query, m_query, p_q_norm, p_cosine, p_sine, o_table, eps, OFFSET, HEAD_DIM, PAIRS, PDL)
        if p_pair_scale is not None:
            b_q = _times(b_q, b_inverse, p_qkv)
        b_q = _rotated_quarters(b_q, b_q_table, p_rotation, HEAD_DIM, BLOCK, KEY_BITS)
        p_y = p_q + i_row * q_stride + o_query * HEAD_DIM + o_d
        for i in tl.static_range(4):
            b_y = tl.where(i_slot < 0, 0.0, b_q[i]).to(p_q.dtype.element_ty)
            tl.store(p_y + i * (HEAD_DIM // 4), b_y, mask=m_query)
    else:
        o_head = (i_block - QUERY_BLOCKS) % KV_BLOCKS * KV_HEADS + tl.arange(0, KV_HEADS)
        m_head = o_head < NUM_KV_HEADS
        m_x = m_head[:, None] & m_d
        m_store = m_head & (i_slot >= 0)
        p_key = p_row + (QUERY_STEP * NUM_HEADS + o_head)[:, None] * HEAD_DIM
        if p_near_slots is not None:
            i_near = tl.load(p_near_slots + i_row).to(tl.int64)
            m_near = m_x & (i_near >= 0)
            o_near = (i_near * NUM_KV_HEADS + o_head[:, None]) * HEAD_DIM + o_d
        i_place = (i_slot // PAGE_TOKENS * NUM_KV_HEADS + o_head) * PAGE_TOKENS + i_slot % PAGE_TOKENS
        if i_block < QUERY_BLOCKS + KV_BLOCKS:
            b_k_table = _rotation_table(p_rotation, HEAD_DIM, BLOCK, KEY_BITS)
            if p_k_mean is not None:
                b_mean = quarters(p_k_mean + o_head[:, None] * HEAD_DIM + o_d, m_x, HEAD_DIM)
            if p_pair_scale is not None:
                b_scale = quarters(p_pair_scale + o_head[:, None] * HEAD_DIM + o_d, m_x, HEAD_DIM)
            b_turned = _turned(p_key, m_x, p_k_norm, p_cosine, p_sine, o_table, eps, OFFSET, HEAD_DIM, PAIRS, PDL)
            if p_pair_scale is not None:
                b_turned = _times(b_turned, b_scale, p_qkv)
            b_k = _rotated_quarters(b_turned, b_k_table, p_rotation, HEAD_DIM, BLOCK, KEY_BITS)
            if p_near_k is not None:
                b_near = b_k
                if p_bias is not None:
                    position = tl.load(p_positions + i_row).to(tl.int64)
                    b_biased = _biased(
                        b_turned, p_bias + o_head[:, None] * HEAD_DIM, m_x, p_turn_cos, p_turn_sin, p_turn_near,
                        position, m_d & (i_near >= 0), p_qkv, HEAD_DIM,
                    )  # fmt: skip
                    b_near = _rotated_quarters(b_biased, b_k_table, p_rotation, HEAD_DIM, BLOCK, KEY_BITS)
                if p_k_mean is not None:
                    b_near = (
                        b_near[0] - b_mean[0],
                        b_near[1] - b_mean[1],
                        b_near[2] - b_mean[2],
                        b_near[3] - b_mean[3],
                    )
                _store_quarters(p_near_k + o_near, b_near, m_near, HEAD_DIM)
            if p_k_mean is not None:
                b_k = (b_k[0] - b_mean[0], b_k[1] - b_mean[1], b_k[2] - b_mean[2], b_k[3] - b_mean[3])
            b_k_scale = store_keys(
                p_k_codes, p_k_signs, i_place, m_store, b_k, HEAD_DIM, KEY_BITS, KEY_GAIN, KEY_MAGNITUDES
            )
            tl.store(p_k_scale + i_place, b_k_scale, mask=m_store)
        else:
            b_v_table = _rotation_table(p_rotation, HEAD_DIM, BLOCK, VALUE_BITS)
            release_then_wait(PDL)
            b_v = quarters(p_key + NUM_KV_HEADS * HEAD_DIM, m_x, HEAD_DIM)
            b_v = _rotated_quarters(b_v, b_v_table, p_rotation, HEAD_DIM, BLOCK, VALUE_BITS)
            if p_near_v is not None:
                _store_quarters(p_near_v + o_near, b_v, m_near, HEAD_DIM)
            b_v_scale = store_values(
                p_v_codes, p_v_signs, i_place, m_store, b_v, HEAD_DIM, VALUE_BITS, VALUE_GAIN, VALUE_MAGNITUDES
            )
            tl.store(p_v_scale + i_place, b_v_scale, mask=m_store)


@jit
def _turned(
    p_x, m_x, p_norm, p_cosine, p_sine, o_table, eps, OFFSET: constexpr, HEAD_DIM: constexpr, PAIRS: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """Norm and rotate heads of a row by their position, in pair order, rounded like the reference."""
    o_d = tl.arange(0, m_x.shape[1])[None, :]
    m_d = o_d < HEAD_DIM // 4
    # Constants are loaded before the wait.
    if p_norm is not None:
        b_norm = _paired_quarters(p_norm + o_d, o_d, m_d, HEAD_DIM, PAIRS)
        if OFFSET != 0.0:
            b_norm = (b_norm[0] + OFFSET, b_norm[1] + OFFSET, b_norm[2] + OFFSET, b_norm[3] + OFFSET)
    release_then_wait(PDL)
    if p_cosine is not None:
        m_0, m_1 = m_d, m_d
        if PAIRS < HEAD_DIM // 2:
            m_0, m_1 = m_d & (o_d < PAIRS), m_d & (o_d < PAIRS - HEAD_DIM // 4)
        b_cos_0 = tl.load(p_cosine + o_table, mask=m_0, other=0.0).to(tl.float32)
        b_cos_1 = tl.load(p_cosine + o_table + HEAD_DIM // 4, mask=m_1, other=0.0).to(tl.float32)
        b_sin_0 = tl.load(p_sine + o_table, mask=m_0, other=0.0).to(tl.float32)
        b_sin_1 = tl.load(p_sine + o_table + HEAD_DIM // 4, mask=m_1, other=0.0).to(tl.float32)
    b_x = _paired_quarters(p_x, o_d, m_x, HEAD_DIM, PAIRS)
    if p_norm is not None:
        b_scale = tl.rsqrt(sum_of_products(b_x, b_x) / HEAD_DIM + eps)[:, None]
        b_x = (
            _rounded(b_x[0] * b_scale * b_norm[0], p_x),
            _rounded(b_x[1] * b_scale * b_norm[1], p_x),
            _rounded(b_x[2] * b_scale * b_norm[2], p_x),
            _rounded(b_x[3] * b_scale * b_norm[3], p_x),
        )
    if p_cosine is not None:
        b_y = (
            _rounded(_rounded(b_x[0] * b_cos_0, p_x) - b_x[2] * b_sin_0, p_x),
            _rounded(_rounded(b_x[1] * b_cos_1, p_x) - b_x[3] * b_sin_1, p_x),
            _rounded(_rounded(b_x[2] * b_cos_0, p_x) + b_x[0] * b_sin_0, p_x),
            _rounded(_rounded(b_x[3] * b_cos_1, p_x) + b_x[1] * b_sin_1, p_x),
        )
        if PAIRS < HEAD_DIM // 2:
            b_y = (
                tl.where(m_0, b_y[0], b_x[0]),
                tl.where(m_1, b_y[1], b_x[1]),
                tl.where(m_0, b_y[2], b_x[2]),
                tl.where(m_1, b_y[3], b_x[3]),
            )
        b_x = b_y
    return b_x


@jit
def _paired_quarters(p_x, o_d, m_x, HEAD_DIM: constexpr, PAIRS: constexpr):
    """Load heads in pair order as float32, from pointers to the first quarter, whose elements are `o_d`."""
    HALF: constexpr = HEAD_DIM // 2
    QUARTER: constexpr = HEAD_DIM // 4
    if PAIRS == HALF:
        b_x = quarters(p_x, m_x, HEAD_DIM)
    else:
        m_0, m_1 = o_d < PAIRS, o_d < PAIRS - QUARTER
        b_x = (
            tl.load(p_x + tl.where(m_0, 0, PAIRS), mask=m_x, other=0.0).to(tl.float32),
            tl.load(p_x + QUARTER + tl.where(m_1, 0, PAIRS), mask=m_x, other=0.0).to(tl.float32),
            tl.load(p_x + tl.where(m_0, PAIRS, HALF), mask=m_x, other=0.0).to(tl.float32),
            tl.load(p_x + QUARTER + tl.where(m_1, PAIRS, HALF), mask=m_x, other=0.0).to(tl.float32),
        )
    return b_x


@jit
def _times(b_x, b_factor, p_like):
    """Multiply quarters of heads; round to the type of `p_like`."""
    return (
        _rounded(b_x[0] * b_factor[0], p_like),
        _rounded(b_x[1] * b_factor[1], p_like),
        _rounded(b_x[2] * b_factor[2], p_like),
        _rounded(b_x[3] * b_factor[3], p_like),
    )


@jit
def _biased(b_x, p_bias, m_x, p_cos, p_sin, p_near, position, m_turn, p_like, HEAD_DIM: constexpr):
    """Add the bias of keys to heads of a row, turned by its position as attention turns it; round to the type of `p_like`."""
    PAIRS: constexpr = HEAD_DIM // 2
    o_d = tl.arange(0, m_x.shape[1])[None, :]
    i_near = position % TURN_TOKENS * PAIRS
    i_block = position // TURN_TOKENS * PAIRS
    b_bias = quarters(p_bias + o_d, m_x, HEAD_DIM)
    p_cos, p_sin = p_cos + i_block + o_d, p_sin + i_block + o_d
    p_near_cos, p_near_sin = p_near + i_near + o_d, p_near + TURN_TOKENS * PAIRS + i_near + o_d
    b_cos_0, b_sin_0 = _turn(p_cos, p_sin, p_near_cos, p_near_sin, m_turn, 0)
    b_cos_1, b_sin_1 = _turn(p_cos, p_sin, p_near_cos, p_near_sin, m_turn, HEAD_DIM // 4)
    return (
        _rounded(b_x[0] + (b_bias[0] * b_cos_0 - b_bias[2] * b_sin_0), p_like),
        _rounded(b_x[1] + (b_bias[1] * b_cos_1 - b_bias[3] * b_sin_1), p_like),
        _rounded(b_x[2] + (b_bias[2] * b_cos_0 + b_bias[0] * b_sin_0), p_like),
        _rounded(b_x[3] + (b_bias[3] * b_cos_1 + b_bias[1] * b_sin_1), p_like),
    )


@jit
def _turn(p_cos, p_sin, p_near_cos, p_near_sin, m_turn, PAIR: constexpr):
    """Return cos and sin of pairs from PAIR on, from those of the middle of a block and of the distance to it."""
    b_cos = tl.load(p_cos + PAIR, mask=m_turn, other=0.0)
    b_sin = tl.load(p_sin + PAIR, mask=m_turn, other=0.0)
    b_near_cos = tl.load(p_near_cos + PAIR, mask=m_turn, other=0.0).to(tl.float32) / TURN_SCALE
    b_near_sin = tl.load(p_near_sin + PAIR, mask=m_turn, other=0.0).to(tl.float32) / TURN_SCALE
    return b_cos + (b_cos * b_near_cos - b_sin * b_near_sin), b_sin + (b_sin * b_near_cos + b_cos * b_near_sin)


@jit
def _store_quarters(p_y, b_x, m_x, HEAD_DIM: constexpr):
    for i in tl.static_range(4):
        tl.store(p_y + i * (HEAD_DIM // 4), b_x[i].to(p_y.dtype.element_ty), mask=m_x)


@jit
def _rounded(b_x, p_x):
    """Round to the pointer's type."""
    return b_x.to(p_x.dtype.element_ty).to(tl.float32)


@jit
def _rotation_table(p_rotation, HEAD_DIM: constexpr, BLOCK: constexpr, BITS: constexpr):
    """Load the one piece of the rotation that serves all quarters, if there is one."""
    b_table = None
    if BITS < 8 and HEAD_DIM & (HEAD_DIM - 1) == 0:
        b_table = _rotation_piece(p_rotation, 0, 0, HEAD_DIM, BLOCK)
    return b_table


@jit
def _rotation_piece(p_rotation, ROW: constexpr, COLUMN: constexpr, HEAD_DIM: constexpr, BLOCK: constexpr):
    """Load the part of the rotation from one quarter to another."""
    QUARTER: constexpr = HEAD_DIM // 4
    o_row, o_column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    p_piece = p_rotation + (ROW * QUARTER + o_row) * HEAD_DIM + COLUMN * QUARTER + o_column
    return tl.load(p_piece, mask=(o_row < QUARTER) & (o_column < QUARTER), other=0.0)


@jit
def _rotated_quarters(b_x, b_table, p_rotation, HEAD_DIM: constexpr, BLOCK: constexpr, BITS: constexpr):
    """Rotate by exact products with +1, -1 and 0, summed in float32; 8 bits need no rotation."""
    ROOT: constexpr = (HEAD_DIM & -HEAD_DIM) ** -0.5
    if BITS == 8:
        b_y = b_x
    elif b_table is not None:
        # The rest of the Hadamard matrix is sums and differences of quarters.
        b_0, b_1 = _multiplied(b_x[0], b_table), _multiplied(b_x[1], b_table)
        b_2, b_3 = _multiplied(b_x[2], b_table), _multiplied(b_x[3], b_table)
        b_0, b_1, b_2, b_3 = b_0 + b_1, b_0 - b_1, b_2 + b_3, b_2 - b_3
        b_y = ((b_0 + b_2) * ROOT, (b_1 + b_3) * ROOT, (b_0 - b_2) * ROOT, (b_1 - b_3) * ROOT)
    else:
        b_0 = _rotated_quarter(b_x, p_rotation, 0, HEAD_DIM, BLOCK) * ROOT
        b_1 = _rotated_quarter(b_x, p_rotation, 1, HEAD_DIM, BLOCK) * ROOT
        b_2 = _rotated_quarter(b_x, p_rotation, 2, HEAD_DIM, BLOCK) * ROOT
        b_3 = _rotated_quarter(b_x, p_rotation, 3, HEAD_DIM, BLOCK) * ROOT
        b_y = (b_0, b_1, b_2, b_3)
    return b_y


@jit
def _rotated_quarter(b_x, p_rotation, COLUMN: constexpr, HEAD_DIM: constexpr, BLOCK: constexpr):
    b_y = _multiplied(b_x[COLUMN], _rotation_piece(p_rotation, COLUMN, COLUMN, HEAD_DIM, BLOCK))
    for i in tl.static_range(4):
        # Only adjacent quarters share a block of the rotation.
        if i == COLUMN - 1 or i == COLUMN + 1:
            b_y += _multiplied(b_x[i], _rotation_piece(p_rotation, i, COLUMN, HEAD_DIM, BLOCK))
    return b_y


@jit
def _multiplied(b_x, b_table):
    return tl.dot(b_x.to(b_table.dtype), b_table, input_precision="ieee")

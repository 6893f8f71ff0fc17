"""The lane: codes of a step's tokens as rows that tensor cores take, made once for all tiles of queries.

K key/value heads, D head dim, L rows of the lane, N page table rows, B blocks of BLOCK_TOKENS tokens; in kernels N tokens, C columns

A sequence has one run of codes in the lane: whole blocks of its tokens, head after head. With near tokens it has a second run:
those that rows of the step see exact in their own block. The first tokens, exact for all rows, replace their codes.

Rows are half precision, in the space of the codes. They have their scale, so attention over them is attention over plain rows.
A decoded number times its scale is rounded once, as p times the scale is in decode.

Places of a run that hold no token are zeros. If the scale of a value is NaN, the value is zeros and its key is NaN: so rows that
do not see the token stay as they are. A row's result depends neither on the heads of a launch nor on places in the lane.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.dequantize import (
    key_numbers,
    key_parts_3,
    key_parts_4,
    key_parts_5,
    value_parts_3,
    value_parts_4,
    value_parts_8,
)
from holdfast.kernels.attention.near_tokens import NearPages
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes, bytes_at, key_codes
from holdfast.kernels.attention.tile_work import LaneRound, TileCall
from holdfast.kernels.geometry import BLOCK_TOKENS, LANE_RUNS, RUN_FIELDS, LaneGeometry
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit,
    jit_counting,
    kernel_constant,
    next_power_of_two,
    tl,
)
from holdfast.quant.kv_quantize import FP16_MAX, KEY_PARTS, VALUE_PARTS, dequantize_keys, dequantize_values

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

NUM_RUN_FIELDS, MOST_RUNS = kernel_constant(len(RUN_FIELDS)), kernel_constant(LANE_RUNS)
FILL_PROGRAMS_PER_SM, FILL_WARPS = 8, 4
F16_MAX = kernel_constant(65504.0)
FAR = kernel_constant(2**30)


class Lane(NamedTuple):
    """Memory that layers and steps share: float16 rows."""

    k_LD: Tensor
    v_LD: Tensor
    geometry: LaneGeometry


class LaneSource(NamedTuple):
    """Pages whose tokens go into the lane."""

    planes: QuantizedPlanes
    near: NearPages | None = None


def lane_of(memory_E: Tensor, head_dim: int, geometry: LaneGeometry) -> Lane:
    """View memory in half precision as a lane."""
    num_rows = geometry.num_blocks * BLOCK_TOKENS
    k_LD, v_LD = memory_E[: 2 * num_rows * head_dim].view(2, num_rows, head_dim)
    return Lane(k_LD, v_LD, geometry)


def fill_lane(call: TileCall, source: LaneSource, lane: Lane, part: LaneRound, first_head: int, num_heads: int) -> None:
    """Write the rows of KV heads [first_head, first_head + num_heads) for all tokens of a round."""
    (planes, near), page_table_NP = source, call.page_table_NP
    head_dim, work = planes.head_dim, call.work.lane
    assert work is not None, "the step has no round"
    near_operands = (None,) * 4 if near is None else (*near[:3], near.page_table_NP.stride(0))
    _fill_kernel[(call.num_sms * FILL_PROGRAMS_PER_SM,)](
        planes.k_codes_PKtB, planes.k_signs_PKtS, planes.k_scale_PKt, planes.v_codes_PKtB.view(torch.int16),
        None if planes.v_signs_PKtS is None else planes.v_signs_PKtS.view(torch.int16), planes.v_scale_PKt,
        lane.k_LD, lane.v_LD, page_table_NP, work.runs_R6, *near_operands, page_table_NP.stride(0),
        part.first_run, part.num_runs, first_head, num_heads, part.num_blocks,
        KEY_BITS=planes.key_bits, VALUE_BITS=planes.value_bits, NUM_KV_HEADS=planes.num_kv_heads, HEAD_DIM=head_dim,
        PAGE_TOKENS=planes.page_tokens, NEAR_PAGE=0 if near is None else near.page_tokens,
        FIRST_TOKENS=0 if near is None else near.first_tokens, BLOCK_N=BLOCK_TOKENS,
        KEY_COLUMNS=max(16, next_power_of_two(head_dim // KEY_PARTS[planes.key_bits])),
        VALUE_COLUMNS=max(16, next_power_of_two(head_dim // VALUE_PARTS[planes.value_bits])),
        BLOCK_D=max(16, next_power_of_two(head_dim)), PLAIN=is_interpreted(), num_warps=FILL_WARPS,
        **pdl_flags(call.q_THD),
    )  # fmt: skip


def fill_reference(
    call: TileCall, source: LaneSource, lane: Lane, part: LaneRound, first_head: int, num_heads: int
) -> None:
    """Like `fill_lane` in plain torch, one run at a time."""
    (planes, near), work = source, call.work.lane
    assert work is not None, "the step has no round"
    first_place = 0
    runs = work.runs_R6[part.first_run : part.first_run + part.num_runs].tolist()
    for end, table_row, first_block, low, high, is_near in runs:
        token_L = torch.arange(low, high, device=call.q_THD.device)
        first_tokens = 0 if near is None else near.first_tokens
        is_near_L = torch.full_like(token_L, is_near, dtype=torch.bool) if is_near else token_L < first_tokens
        rows_2LKD = torch.empty(2, len(token_L), planes.num_kv_heads, planes.head_dim, device=token_L.device)
        code_L, near_L = token_L[~is_near_L], token_L[is_near_L]
        page_L, offset_L = (
            call.page_table_NP[table_row, code_L // planes.page_tokens].long(),
            code_L % planes.page_tokens,
        )
        rows_2LKD[0, ~is_near_L] = dequantize_keys(planes.keys_at(page_L, offset_L), planes.key_bits, planes.head_dim)
        rows_2LKD[1, ~is_near_L] = dequantize_values(
            planes.values_at(page_L, offset_L), planes.value_bits, planes.head_dim
        )
        if near is not None:
            slot_L = near.page_table_NP[table_row, near_L // near.page_tokens].long() * near.page_tokens
            slot_L += near_L % near.page_tokens
            rows_2LKD[0, is_near_L], rows_2LKD[1, is_near_L] = (
                near.k_plane_SKD[slot_L].float(),
                near.v_plane_SKD[slot_L].float(),
            )
        is_nan_LK1 = rows_2LKD[1].isnan().any(-1, keepdim=True)
        rows_2LKD[0] = torch.where(is_nan_LK1, torch.nan, rows_2LKD[0])
        rows_2LKD[1] = torch.where(is_nan_LK1, 0.0, rows_2LKD[1])
        for i_head in range(num_heads):
            place = (i_head * part.num_blocks + first_place) * BLOCK_TOKENS
            num_rows, offset = (end - first_place) * BLOCK_TOKENS, low - first_block * BLOCK_TOKENS
            for rows_LD, rows_LKD in zip((lane.k_LD, lane.v_LD), rows_2LKD, strict=True):
                rows_LD[place : place + num_rows] = 0
                clamped_LD = rows_LKD[:, first_head + i_head].clamp(-FP16_MAX, FP16_MAX)  # NaN stays
                rows_LD[place + offset : place + offset + len(token_L)] = clamped_LD.to(rows_LD.dtype)
        first_place = end


@jit
def _between(b_0, b_1):
    """Join two [N, C] to [N, 2 C], columns alternating."""
    return tl.reshape(tl.join(b_0, b_1), (b_0.shape[0], 2 * b_0.shape[1]))


@jit
def _rows(b_numbers, b_scale):
    """Multiply numbers by the scale of their token. What half precision does not hold becomes its largest number; NaN stays."""
    b_rows = b_numbers.to(tl.float32) * b_scale[:, None]
    b_clamped = tl.minimum(tl.maximum(b_rows, -F16_MAX), F16_MAX)
    return tl.where(b_rows == b_rows, b_clamped, b_rows).to(tl.float16)


@jit
def _store_half(p_row, b_half, m_n, HALF: constexpr, HEAD_DIM: constexpr):
    """Store [N, C] as coordinates of the lower or upper half of rows of HEAD_DIM."""
    o_c = tl.arange(0, b_half.shape[1])
    o_d = HALF * (HEAD_DIM // 2) + o_c
    if b_half.shape[1] == HEAD_DIM // 2:
        tl.store(p_row[:, None] + o_d[None, :], b_half, mask=m_n[:, None])
    else:
        tl.store(p_row[:, None] + o_d[None, :], b_half, mask=m_n[:, None] & (o_c < HEAD_DIM // 2)[None, :])


@jit
def _fill_keys(
    p_k, p_signs, p_row, o_slot, m_n, m_store, b_scale,
    KEY_BITS: constexpr, HEAD_DIM: constexpr, KEY_COLUMNS: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Write a block of keys in the order of coordinates."""
    SIGNS: constexpr = HEAD_DIM // 8
    o_c = tl.arange(0, KEY_COLUMNS)
    b_codes = key_codes(p_k, o_slot, o_c, m_n, True, KEY_BITS, HEAD_DIM, PLAIN)
    if KEY_BITS == 8:
        b_keys = _rows(key_numbers(b_codes, PLAIN), b_scale)
        tl.store(p_row[:, None] + o_c[None, :], b_keys, mask=m_store[:, None] & (o_c < HEAD_DIM)[None, :])
    elif KEY_BITS == 4:
        b_0, b_1 = key_parts_4(b_codes, o_c, PLAIN)
        _store_half(p_row, _rows(b_0, b_scale), m_store, 0, HEAD_DIM)
        _store_half(p_row, _rows(b_1, b_scale), m_store, 1, HEAD_DIM)
    else:
        b_signs = bytes_at(p_signs, o_slot, o_c % SIGNS, m_n, SIGNS, SIGNS, True)
        if KEY_BITS == 5:
            b_upper = key_codes(p_k + 2 * SIGNS, o_slot, o_c, m_n, True, KEY_BITS, HEAD_DIM, PLAIN)
            b_0, b_1, b_2, b_3 = key_parts_5(b_codes, b_upper, b_signs, o_c, SIGNS, PLAIN)
        else:
            b_0, b_1, b_2, b_3 = key_parts_3(b_codes, b_signs, o_c, SIGNS, PLAIN)
        _store_half(p_row, _rows(_between(b_0, b_1), b_scale), m_store, 0, HEAD_DIM)
        _store_half(p_row, _rows(_between(b_2, b_3), b_scale), m_store, 1, HEAD_DIM)


@jit
def _fill_values(
    p_v, p_signs, p_row, o_slot, m_n, m_store, b_scale,
    VALUE_BITS: constexpr, HEAD_DIM: constexpr, VALUE_COLUMNS: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Write a block of values; zeros if their scale is zero or NaN."""
    WORDS: constexpr = HEAD_DIM // 2 if VALUE_BITS == 8 else (HEAD_DIM // 4 if VALUE_BITS == 4 else HEAD_DIM // 8)
    o_c = tl.arange(0, VALUE_COLUMNS)
    b_words = bytes_at(p_v, o_slot, o_c, m_n, WORDS, WORDS, True)
    if VALUE_BITS == 8:
        b_lower, b_upper = value_parts_8(b_words, PLAIN)
    elif VALUE_BITS == 4:
        b_0, b_1, b_2, b_3 = value_parts_4(b_words, PLAIN)
        b_lower, b_upper = _between(b_0, b_1), _between(b_2, b_3)
    else:
        b_signs = bytes_at(p_signs, o_slot, o_c % (WORDS // 2), m_n, WORDS, WORDS // 2, True)
        b_half = tl.where(o_c < WORDS // 2, 0, -1).to(tl.int16)[None, :]
        b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = value_parts_3(b_words, b_signs, b_half, PLAIN)
        b_lower = _between(_between(b_0, b_2), _between(b_1, b_3))
        b_upper = _between(_between(b_4, b_6), _between(b_5, b_7))
    m_some = ((b_scale > 0) | (b_scale < 0))[:, None]
    b_lower = tl.where(m_some, _rows(b_lower, b_scale), 0.0)
    b_upper = tl.where(m_some, _rows(b_upper, b_scale), 0.0)
    _store_half(p_row, b_lower, m_store, 0, HEAD_DIM)
    _store_half(p_row, b_upper, m_store, 1, HEAD_DIM)


@jit
def _fill_near(
    p_k, p_v, p_pages, p_k_row, p_v_row, o_token, m_n, m_store, i_head,
    NUM_KV_HEADS: constexpr, HEAD_DIM: constexpr, NEAR_PAGE: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Write a block of near rows; zeros without a token."""
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM)[None, :]
    page = tl.load(p_pages + o_token // NEAR_PAGE, mask=m_n, other=0)
    o_slot = (page.to(tl.int64) * NEAR_PAGE + o_token % NEAR_PAGE) * NUM_KV_HEADS + i_head
    o_x = o_slot[:, None] * HEAD_DIM + o_d[None, :]
    b_k = tl.load(p_k + o_x, mask=m_n[:, None] & m_d, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + o_x, mask=m_n[:, None] & m_d, other=0.0).to(tl.float32)
    is_nan = tl.max(tl.where(b_v == b_v, 0, 1), axis=1) > 0
    b_k = tl.where(is_nan[:, None] | (b_k != b_k), float("nan"), tl.minimum(tl.maximum(b_k, -F16_MAX), F16_MAX))
    b_v = tl.where(is_nan[:, None], 0.0, tl.minimum(tl.maximum(b_v, -F16_MAX), F16_MAX))
    m_row = m_store[:, None] & m_d
    tl.store(p_k_row[:, None] + o_d[None, :], b_k.to(p_k_row.dtype.element_ty), mask=m_row)
    tl.store(p_v_row[:, None] + o_d[None, :], b_v.to(p_v_row.dtype.element_ty), mask=m_row)


@jit_counting("table_stride", "near_stride", "first_run", "num_runs", "first_head", "num_heads", "num_blocks")
def _fill_kernel(
    p_k, p_k_signs, p_k_scale, p_v, p_v_signs, p_v_scale, p_lane_k, p_lane_v, p_pages, p_runs,
    p_near_k, p_near_v, p_near_pages, near_stride, table_stride, first_run, num_runs, first_head,
    num_heads, num_blocks,
    KEY_BITS: constexpr, VALUE_BITS: constexpr, NUM_KV_HEADS: constexpr, HEAD_DIM: constexpr, PAGE_TOKENS: constexpr,
    NEAR_PAGE: constexpr, FIRST_TOKENS: constexpr, KEY_COLUMNS: constexpr, VALUE_COLUMNS: constexpr,
    BLOCK_D: constexpr, BLOCK_N: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    o_n = tl.arange(0, BLOCK_N)
    o_r = tl.arange(0, MOST_RUNS)
    p_runs += first_run * NUM_RUN_FIELDS
    b_ends = tl.load(p_runs + o_r * NUM_RUN_FIELDS, mask=o_r < num_runs, other=FAR)
    for i_item in range(tl.program_id(0), num_blocks * num_heads, tl.num_programs(0)):
        i_block, i_lane_head = i_item // num_heads, i_item % num_heads
        i_run = tl.sum(tl.where(b_ends <= i_block, 1, 0), axis=0)
        begin = tl.max(tl.where(b_ends <= i_block, b_ends, 0), axis=0)
        p_run = p_runs + i_run * NUM_RUN_FIELDS
        table_row, token = tl.load(p_run + 1), (tl.load(p_run + 2) + i_block - begin) * BLOCK_N
        low, high, is_near = tl.load(p_run + 3), tl.load(p_run + 4), tl.load(p_run + 5)
        o_token = token + o_n
        m_n = (o_token >= low) & (o_token < high)
        i_head = first_head + i_lane_head
        o_row = (i_lane_head * num_blocks + i_block) * BLOCK_N + o_n
        p_k_row, p_v_row = p_lane_k + o_row * HEAD_DIM, p_lane_v + o_row * HEAD_DIM
        if is_near == 0:
            p_row_pages = p_pages + table_row.to(tl.int64) * table_stride
            if PAGE_TOKENS >= BLOCK_N and PAGE_TOKENS % BLOCK_N == 0:
                page = tl.load(p_row_pages + token // PAGE_TOKENS)
                o_slot = (page.to(tl.int64) * NUM_KV_HEADS + i_head) * PAGE_TOKENS + token % PAGE_TOKENS + o_n
            else:
                page = tl.load(p_row_pages + o_token // PAGE_TOKENS, mask=m_n, other=0)
                o_slot = (page.to(tl.int64) * NUM_KV_HEADS + i_head) * PAGE_TOKENS + o_token % PAGE_TOKENS
            if PDL:
                tl.extra.cuda.gdc_wait()  # new keys come from a kernel before; another may still read the lane
            m_store = o_token >= FIRST_TOKENS  # first tokens are exact for all rows that see codes
            b_ks = tl.load(p_k_scale + o_slot, mask=m_n, other=0.0).to(tl.float32)
            b_vs = tl.load(p_v_scale + o_slot, mask=m_n, other=0.0).to(tl.float32)
            b_ks = tl.where(b_vs == b_vs, b_ks, b_vs)
            _fill_keys(p_k, p_k_signs, p_k_row, o_slot, m_n, m_store, b_ks, KEY_BITS, HEAD_DIM, KEY_COLUMNS, PLAIN)
            _fill_values(
                p_v, p_v_signs, p_v_row, o_slot, m_n, m_store, b_vs, VALUE_BITS, HEAD_DIM, VALUE_COLUMNS, PLAIN
            )
        if NEAR_PAGE > 0:  # noqa: SIM102 known at compile time, unlike the next
            if (is_near != 0) | (token < FIRST_TOKENS):
                if PDL:
                    tl.extra.cuda.gdc_wait()
                m_near = (o_token < FIRST_TOKENS) | (is_near != 0)
                _fill_near(
                    p_near_k, p_near_v, p_near_pages + table_row.to(tl.int64) * near_stride, p_k_row, p_v_row, o_token,
                    m_n & m_near, m_near, i_head, NUM_KV_HEADS, HEAD_DIM, NEAR_PAGE, BLOCK_D,
                )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # wait even without a block: the next kernel relies on all earlier ones

"""Large tiles over quantized pages from a lane: codes of a step are taken apart once, not once for each tile of queries.

T rows, H query heads, K key/value heads, G = H / K, D head dim, L rows of the lane, R tokens of a head there, N page table rows;
in kernels M rows of a tile times heads, N tokens of a block

Two kernels alternate, for as many KV heads at a time as the lane holds:

fill     writes keys and values of all tokens that large tiles read as rows of numbers, with three scales by token
attend   the large tiles of quantized_attention.py; operands come from dense rows, without pages, decoding or masked loads

A sequence has one run in the lane: whole blocks of its tokens, head after head. Rows hold what codes stand for, without the
scale. Keys are in the type of queries, which holds e4m3 numbers exactly. So queries are operands as they are, not rounded.
A value's scale meets its score in base 2. One fma gives what the running maximum needs. p comes out of the exponential as the
operand of the product, and the sum takes p times the inverse of the scale:

    seen = key scale * score scale * (q . k) + log2(value scale)      p = 2^(seen - m + 14)      sum += p / value scale

Places of a run that hold no token have finite numbers, and zeros as values, so no load is masked. Blocks begin at multiples of
their size. A row's result depends neither on the number of heads in a launch nor on places in the lane, bit for bit.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.attention.dequantize import (
    fast_exp2,
    key_numbers,
    key_parts_3,
    key_parts_4,
    key_parts_5,
    value_parts_3,
    value_parts_4,
    value_parts_8,
)
from holdfast.kernels.attention.key_bias import query_waves, turned_waves
from holdfast.kernels.attention.near_tokens import LARGE_CHUNK, SPLIT, NearPages, near_chunks, near_large
from holdfast.kernels.attention.quantized_attention import (
    _key_bias_tables,
    _near_operands,
    quantized_attention,
)
from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE, QuantizedPlanes, bytes_at, key_codes
from holdfast.kernels.attention.split_kv import LOG2_E, add_sinks, finite_max, load_tile, soft_capped
from holdfast.kernels.attention.tile_work import TileCall
from holdfast.kernels.geometry import BLOCK_TOKENS, LARGE_TILE, pair_columns
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
from holdfast.quant.kv_quantize import KEY_PARTS, VALUE_PARTS, hadamard_block

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

LANE_ROW_BYTES = 32 * 2**20
"""Bytes of the lane's rows: 8,192 tokens of 8 heads of 128, or 65,536 tokens of one head."""
NUM_SCALES = 3
"""float32 numbers by token and head: key scale times score scale, log2 of the value scale, inverse of the value scale."""
RUN_TOKENS = kernel_constant(BLOCK_TOKENS)
BLOCK_FIELDS = kernel_constant(4)
P_SHIFT = kernel_constant(14.0)
"""log2 of P_ONE."""
FILL_PROGRAMS_PER_SM, FILL_WARPS = 8, 4


class LaneForm(NamedTuple):
    """Sizes of the attending kernel. `tokens` changes rounding, the others do not."""

    tokens: int
    """Tokens of a block: 64, or 128 without a key bias."""
    stages: int = 2
    by_descriptor: bool = True
    """Copy blocks by TMA instead of a copy per thread; only heads of a power of two."""
    programs_per_sm: int = 2
    """Programs launched. One runs at a time, so later ones fill gaps."""
    warps: int = 8
    rows: int = LARGE_TILE
    """Rows times heads of a tile."""
    scales_by_descriptor: bool = False
    """Copy scales by TMA too, which costs three barriers a block."""


def lane_form(head_dim: int, has_key_bias: bool = False) -> LaneForm:
    """Return the form that is expected to be fastest; not measured yet."""
    is_power = head_dim & (head_dim - 1) == 0
    return LaneForm(128 if is_power and head_dim <= 128 and not has_key_bias else 64, by_descriptor=is_power)


class Lane(NamedTuple):
    """Memory that layers and steps share."""

    k_LD: Tensor
    """In the type of queries, which holds all key numbers exactly: they are e4m3 numbers."""
    v_LD: Tensor
    """float16."""
    scales_3L: Tensor
    """float32."""


class LanePlan(NamedTuple):
    """Where a step's tokens lie in the lane, head by head; one for all layers with the same tile list."""

    blocks_B4: Tensor
    """int32. Row 0: number of blocks. Others, in order of places: page table row, first token, valid tokens [low, high)."""
    starts_N: Tensor
    """int32 by page table row: place of token 0 in blocks of BLOCK_TOKENS, maybe before the lane."""
    num_blocks: int


def row_bytes(head_dim: int) -> int:
    """Return the bytes of one token and head: a row of keys, and one of values."""
    return 2 * 2 * head_dim


def lane_capacity(head_dim: int, num_row_bytes: int = LANE_ROW_BYTES) -> int:
    """Return the rows of keys that the lane holds: whole blocks."""
    return num_row_bytes // (row_bytes(head_dim) * BLOCK_TOKENS) * BLOCK_TOKENS


def lane_bytes(head_dim: int, num_row_bytes: int = LANE_ROW_BYTES) -> int:
    """Return all bytes of a lane, scales included."""
    return lane_capacity(head_dim, num_row_bytes) * (row_bytes(head_dim) + 4 * NUM_SCALES)


def lane_heads(num_tokens: int, head_dim: int, num_kv_heads: int, num_row_bytes: int = LANE_ROW_BYTES) -> int:
    """Return the KV heads that one round takes, so that rounds are even; 0: not even one head fits."""
    fitting = min(num_kv_heads, lane_capacity(head_dim, num_row_bytes) // max(1, num_tokens))
    return -(-num_kv_heads // -(-num_kv_heads // fitting)) if fitting else 0


def make_lane(head_dim: int, dtype: torch.dtype, device: torch.device, num_row_bytes: int = LANE_ROW_BYTES) -> Lane:
    """Allocate a lane for queries of this type."""
    capacity = lane_capacity(head_dim, num_row_bytes)
    k_LD, v_LD = (torch.empty(capacity, head_dim, dtype=one, device=device) for one in (dtype, torch.float16))
    return Lane(k_LD, v_LD, torch.empty(NUM_SCALES, capacity, device=device))


def plan_lane(
    tiles_X8: np.ndarray,
    num_table_rows: int,
    window: int | None,
    device: torch.device,
    block_tokens: int = BLOCK_TOKENS,
) -> LanePlan:
    """Give each sequence of the large tiles a run of whole blocks that holds all tokens its tiles read."""
    num_small, num_large = (int(count) for count in tiles_X8[0, :2])
    tiles_X8 = tiles_X8[1 + num_small : 1 + num_small + num_large].astype(np.int64)
    tiles_X8 = tiles_X8[tiles_X8[:, 4] < tiles_X8[:, 5]]
    table_row_X, position_X, low_X, high_X = tiles_X8[:, (0, 3, 4, 5)].T
    # Before the window of a sequence's first row other sequences may own the pages.
    seen_X = low_X if window is None else np.maximum(low_X, position_X - window + 1)
    first_N, low_N = (np.full(num_table_rows, 2**31 - 1, dtype=np.int64) for _ in range(2))
    high_N = np.zeros(num_table_rows, dtype=np.int64)
    np.minimum.at(first_N, table_row_X, low_X // block_tokens * block_tokens)
    np.minimum.at(low_N, table_row_X, seen_X)
    np.maximum.at(high_N, table_row_X, high_X)
    has_run_N = high_N > 0
    first_N = np.where(has_run_N, first_N, 0) // BLOCK_TOKENS
    count_N = np.where(has_run_N, -(-high_N // block_tokens) * block_tokens // BLOCK_TOKENS - first_N, 0)
    place_N = np.cumsum(count_N) - count_N
    row_B = np.repeat(np.arange(num_table_rows), count_N)
    token_B = (np.arange(len(row_B)) - place_N[row_B] + first_N[row_B]) * BLOCK_TOKENS
    blocks_B4 = np.stack((row_B, token_B, low_N[row_B], high_N[row_B]), axis=1)
    blocks_B4 = np.concatenate(([(len(row_B), 0, 0, 0)], blocks_B4)).astype(np.int32)
    starts_N = (place_N - first_N).astype(np.int32)
    return LanePlan(torch.from_numpy(blocks_B4).to(device), torch.from_numpy(starts_N).to(device), len(row_B))


def attend_by_lane(
    call: TileCall,
    planes: QuantizedPlanes,
    near: NearPages | None,
    lane: Lane,
    plan: LanePlan,
    form: LaneForm | None = None,
    heads: int | None = None,
) -> Tensor:
    """Like `quantized_attention`, with large tiles from the lane. `heads`: KV heads of a round, fewer than fit."""
    work = call.work
    if work.has_small:
        quantized_attention(call._replace(work=replace(work, has_large=False, has_merge=False)), planes, near)
    if work.has_large:
        _attend_large(
            call, planes, near, lane, plan, form or lane_form(planes.head_dim, planes.key_bias is not None), heads
        )
    if work.has_merge:
        quantized_attention(call._replace(work=replace(work, has_small=False, has_large=False)), planes, near)
    return call.out_TX


def _attend_large(
    call: TileCall,
    planes: QuantizedPlanes,
    near: NearPages | None,
    lane: Lane,
    plan: LanePlan,
    form: LaneForm,
    heads: int | None,
) -> None:
    """Fill and attend, some heads at a time."""
    num_tokens = BLOCK_TOKENS * plan.num_blocks
    fitting = min(planes.num_kv_heads, len(lane.k_LD) // max(1, num_tokens))
    assert fitting > 0, f"{num_tokens} tokens are more than the lane's {len(lane.k_LD)} rows"
    num_rounds = -(-planes.num_kv_heads // min(fitting, heads or fitting))
    heads = -(-planes.num_kv_heads // num_rounds)
    for first_head in range(0, planes.num_kv_heads, heads):
        fill_lane(call, planes, lane, plan, first_head, min(heads, planes.num_kv_heads - first_head))
        lane_attention(call, planes, near, lane, plan, first_head, min(heads, planes.num_kv_heads - first_head), form)


def fill_lane(
    call: TileCall, planes: QuantizedPlanes, lane: Lane, plan: LanePlan, first_head: int, num_heads: int
) -> None:
    """Write the rows and scales of KV heads [first_head, first_head + num_heads) for all tokens of the plan."""
    head_dim, page_table_NP = planes.head_dim, call.page_table_NP
    _fill_kernel[(call.num_sms * FILL_PROGRAMS_PER_SM,)](
        planes.k_codes_PKtB, planes.k_signs_PKtS, planes.k_scale_PKt, planes.v_codes_PKtB.view(torch.int16),
        None if planes.v_signs_PKtS is None else planes.v_signs_PKtS.view(torch.int16), planes.v_scale_PKt,
        *lane, page_table_NP, plan.blocks_B4, page_table_NP.stride(0), lane.scales_3L.stride(0),
        call.scoring.scale * LOG2_E, first_head, num_heads, plan.num_blocks,
        KEY_BITS=planes.key_bits, VALUE_BITS=planes.value_bits, NUM_KV_HEADS=planes.num_kv_heads, HEAD_DIM=head_dim,
        PAGE_TOKENS=planes.page_tokens, BLOCK_N=BLOCK_TOKENS,
        KEY_COLUMNS=max(16, next_power_of_two(head_dim // KEY_PARTS[planes.key_bits])),
        VALUE_COLUMNS=max(16, next_power_of_two(head_dim // VALUE_PARTS[planes.value_bits])),
        PLAIN=is_interpreted(), num_warps=FILL_WARPS, **pdl_flags(call.q_THD),
    )  # fmt: skip


def lane_attention(
    call: TileCall,
    planes: QuantizedPlanes,
    near: NearPages | None,
    lane: Lane,
    plan: LanePlan,
    first_head: int,
    num_heads: int,
    form: LaneForm,
) -> None:
    """Attend the large tiles of query heads that share KV heads [first_head, first_head + num_heads)."""
    _, num_query_heads, head_dim = call.q_THD.shape
    group, plain = num_query_heads // planes.num_kv_heads, is_interpreted()
    scale, window, sinks_H, softcap = call.scoring
    first_tokens = 0 if near is None else near.first_tokens
    assert not first_tokens or window is None, f"{first_tokens=} are hidden by a window of {window}"
    assert form.tokens == BLOCK_TOKENS or planes.key_bias is None, (
        f"{form=}: a key bias comes in blocks of {BLOCK_TOKENS}"
    )
    block_d = max(16, next_power_of_two(head_dim))
    if form.by_descriptor:
        assert block_d == head_dim, f"{form=}: heads of {head_dim} are no power of two"
    _attend_kernel[(call.num_sms * form.programs_per_sm,)](
        call.q_THD, *_lane_operands(lane, form), plan.starts_N, planes.rotation_DD, call.out_TX, *call.partials,
        call.work.tiles_X8, *_key_bias_tables(planes.key_bias)[:4], sinks_H, lane.scales_3L.stride(0), scale * LOG2_E,
        None if softcap is None else softcap * LOG2_E, hadamard_block(head_dim) ** -0.5, window or 0,
        *_near_operands(near, call.q_THD), first_head, num_heads, plan.num_blocks,
        KEY_BITS=planes.key_bits, VALUE_BITS=planes.value_bits, NUM_KV_HEADS=planes.num_kv_heads, GROUP=group,
        HEAD_DIM=head_dim, HAS_WINDOW=window is not None, NEAR_BLOCK=0 if near is None else near.block_tokens,
        FIRST_TOKENS=first_tokens, NEAR_PAGE=0 if near is None else near.page_tokens,
        HAS_KEY_BIAS=planes.key_bias is not None, BLOCK_M=max(form.rows, next_power_of_two(group)),
        BLOCK_N=form.tokens, BLOCK_D=block_d, PAIR_COLUMNS=pair_columns(head_dim), NUM_STAGES=form.stages,
        BY_DESCRIPTOR=form.by_descriptor, SCALES_BY_DESCRIPTOR=form.by_descriptor and form.scales_by_descriptor,
        PLAIN=plain, num_warps=form.warps, **pdl_flags(call.q_THD),
    )  # fmt: skip


def _lane_operands(lane: Lane, form: LaneForm) -> tuple[object, ...]:
    """Return the lane as pointers, or as descriptors of blocks of rows, and of numbers by token."""
    if not form.by_descriptor:
        return lane
    from triton.tools.tensor_descriptor import TensorDescriptor  # the one of triton_compat is Gluon's

    rows = (TensorDescriptor.from_tensor(rows_LD, [form.tokens, rows_LD.shape[1]]) for rows_LD in lane[:2])
    if not form.scales_by_descriptor:
        return (*rows, lane.scales_3L)
    return (*rows, TensorDescriptor.from_tensor(lane.scales_3L.view(-1), [form.tokens]))


@jit
def _between(b_0, b_1):
    """Join two [N, C] to [N, 2 C], columns alternating."""
    return tl.reshape(tl.join(b_0, b_1), (b_0.shape[0], 2 * b_0.shape[1]))


@jit
def _store_half(p_row, b_half, HALF: constexpr, HEAD_DIM: constexpr):
    """Store [N, C] as coordinates of the lower or upper half of rows of HEAD_DIM."""
    o_c = tl.arange(0, b_half.shape[1])
    o_d = HALF * (HEAD_DIM // 2) + o_c
    if b_half.shape[1] == HEAD_DIM // 2:
        tl.store(p_row[:, None] + o_d[None, :], b_half.to(p_row.dtype.element_ty))
    else:
        tl.store(p_row[:, None] + o_d[None, :], b_half.to(p_row.dtype.element_ty), mask=(o_c < HEAD_DIM // 2)[None, :])


@jit
def _fill_keys(
    p_k, p_signs, p_row, o_slot, m_n, KEY_BITS: constexpr, HEAD_DIM: constexpr, KEY_COLUMNS: constexpr, PLAIN: constexpr
):  # fmt: skip
    """Write a block of keys without their scale, in the order of coordinates; any numbers where no token is."""
    SIGNS: constexpr = HEAD_DIM // 8
    o_c = tl.arange(0, KEY_COLUMNS)
    b_codes = key_codes(p_k, o_slot, o_c, m_n, True, KEY_BITS, HEAD_DIM, PLAIN)
    if KEY_BITS == 8:
        b_keys = key_numbers(b_codes, PLAIN)
        tl.store(p_row[:, None] + o_c[None, :], b_keys.to(p_row.dtype.element_ty), mask=(o_c < HEAD_DIM)[None, :])
    elif KEY_BITS == 4:
        b_0, b_1 = key_parts_4(b_codes, o_c, PLAIN)
        _store_half(p_row, b_0, 0, HEAD_DIM)
        _store_half(p_row, b_1, 1, HEAD_DIM)
    else:
        b_signs = bytes_at(p_signs, o_slot, o_c % SIGNS, m_n, SIGNS, SIGNS, True)
        if KEY_BITS == 5:
            b_upper = key_codes(p_k + 2 * SIGNS, o_slot, o_c, m_n, True, KEY_BITS, HEAD_DIM, PLAIN)
            b_0, b_1, b_2, b_3 = key_parts_5(b_codes, b_upper, b_signs, o_c, SIGNS, PLAIN)
        else:
            b_0, b_1, b_2, b_3 = key_parts_3(b_codes, b_signs, o_c, SIGNS, PLAIN)
        _store_half(p_row, _between(b_0, b_1), 0, HEAD_DIM)
        _store_half(p_row, _between(b_2, b_3), 1, HEAD_DIM)


@jit
def _fill_values(
    p_v, p_signs, p_row, o_slot, m_n, b_scale,
    VALUE_BITS: constexpr, HEAD_DIM: constexpr, VALUE_COLUMNS: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Write a block of values with the sign of their scale; zeros if it is zero, as where no token is, or NaN."""
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
    b_sign = tl.where(b_scale < 0, -1.0, 1.0).to(tl.float16)[:, None]
    m_some = ((b_scale > 0) | (b_scale < 0))[:, None]
    _store_half(p_row, tl.where(m_some, b_lower * b_sign, 0.0), 0, HEAD_DIM)
    _store_half(p_row, tl.where(m_some, b_upper * b_sign, 0.0), 1, HEAD_DIM)


@jit_counting("first_head", "num_heads", "lane_blocks")
def _fill_kernel(
    p_k, p_k_signs, p_k_scale, p_v, p_v_signs, p_v_scale, p_lane_k, p_lane_v, p_lane_scales, p_pages, p_blocks,
    table_stride, capacity, scale_log2, first_head, num_heads, lane_blocks,
    KEY_BITS: constexpr, VALUE_BITS: constexpr, NUM_KV_HEADS: constexpr, HEAD_DIM: constexpr, PAGE_TOKENS: constexpr,
    KEY_COLUMNS: constexpr, VALUE_COLUMNS: constexpr, BLOCK_N: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    num_blocks = tl.load(p_blocks)
    o_n = tl.arange(0, BLOCK_N)
    for i_item in range(tl.program_id(0), num_blocks * num_heads, tl.num_programs(0)):
        i_block, i_lane_head = i_item // num_heads, i_item % num_heads
        p_block = p_blocks + (1 + i_block) * BLOCK_FIELDS
        table_row, token = tl.load(p_block), tl.load(p_block + 1) // BLOCK_N * BLOCK_N
        low, high = tl.load(p_block + 2), tl.load(p_block + 3)
        o_token = token + o_n
        m_n = (o_token >= low) & (o_token < high)
        p_row_pages = p_pages + table_row.to(tl.int64) * table_stride
        i_head = first_head + i_lane_head
        if PAGE_TOKENS >= BLOCK_N and PAGE_TOKENS % BLOCK_N == 0:
            # A run of whole blocks of 128 tokens may end with 64 places that hold no token.
            page = tl.load(p_row_pages + token // PAGE_TOKENS, mask=(token < high) & (token + BLOCK_N > low), other=0)
            o_slot = (page.to(tl.int64) * NUM_KV_HEADS + i_head) * PAGE_TOKENS + token % PAGE_TOKENS + o_n
        else:
            page = tl.load(p_row_pages + o_token // PAGE_TOKENS, mask=m_n, other=0)
            o_slot = (page.to(tl.int64) * NUM_KV_HEADS + i_head) * PAGE_TOKENS + o_token % PAGE_TOKENS
        if PDL:
            tl.extra.cuda.gdc_wait()  # new keys come from a kernel before; another may still read the lane
        b_ks = tl.load(p_k_scale + o_slot, mask=m_n, other=0.0).to(tl.float32)
        b_vs = tl.load(p_v_scale + o_slot, mask=m_n, other=0.0).to(tl.float32)
        o_row = (i_lane_head * lane_blocks + i_block) * BLOCK_N + o_n
        _fill_keys(p_k, p_k_signs, p_lane_k + o_row * HEAD_DIM, o_slot, m_n, KEY_BITS, HEAD_DIM, KEY_COLUMNS, PLAIN)
        _fill_values(
            p_v, p_v_signs, p_lane_v + o_row * HEAD_DIM, o_slot, m_n, b_vs, VALUE_BITS, HEAD_DIM, VALUE_COLUMNS, PLAIN
        )
        # A zero has the logarithm of the least scale, so its token joins the sum. NaN stays NaN in the scores of rows that
        # see it. Its inverse is finite: rows that do not see it take it times zero.
        b_size = tl.abs(b_vs)
        b_log = tl.where(b_size == 0.0, LEAST_LOG2, tl.log2(tl.where(b_size == 0.0, 1.0, b_size)))
        b_inverse = tl.where(b_log == b_log, tl.exp2(-b_log), 1.0)
        tl.store(p_lane_scales + o_row, b_ks * scale_log2)
        tl.store(p_lane_scales + capacity + o_row, b_log)
        tl.store(p_lane_scales + 2 * capacity + o_row, b_inverse)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # wait even without a block: the next kernel relies on all earlier ones


@jit
def _item_of(i_round):
    """Return this program's item of a round. Every other round is reversed: tiles come longest first."""
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    return i_round * num_programs + tl.where(i_round % 2 == 0, i_program, num_programs - 1 - i_program)


@jit
def _lane_block(
    lane_rows, o_row, o_n, o_dim, m_d, TRANSPOSED: constexpr, HEAD_DIM: constexpr, BLOCK_D: constexpr,
    BY_DESCRIPTOR: constexpr,
):  # fmt: skip
    """Load rows of the lane, [N, D], or [D, N] if TRANSPOSED. Every row of a run holds numbers."""
    if BY_DESCRIPTOR:
        b_rows = lane_rows.load([o_row, 0])
        return tl.trans(b_rows) if TRANSPOSED else b_rows
    else:
        p_first = lane_rows + o_row * HEAD_DIM
        if TRANSPOSED:
            p_rows = p_first + (o_n[None, :] * HEAD_DIM + o_dim[:, None])
            m_rows = m_d[:, None]
        else:
            p_rows = p_first + (o_n[:, None] * HEAD_DIM + o_dim[None, :])
            m_rows = m_d[None, :]
        if BLOCK_D == HEAD_DIM:
            return tl.load(p_rows)
        else:
            return tl.load(p_rows, mask=m_rows, other=0.0)


@jit
def _lane_numbers(lane_scales, o_number, o_n, BY_DESCRIPTOR: constexpr):
    """Load one number by token, [N]."""
    if BY_DESCRIPTOR:
        return lane_scales.load([o_number])
    else:
        return tl.load(lane_scales + o_number + o_n)


@jit_counting("first_head", "num_heads", "lane_blocks")
def _attend_kernel(
    p_q, lane_k, lane_v, lane_scales, p_starts, p_rotation, p_out, p_partial_out, p_partial_lse, p_tiles,
    p_bias, p_cos, p_sin, p_near, p_sinks, capacity, scale_log2, softcap_log2, rotation_scale, window,
    p_near_k, p_near_v, p_near_pages, near_stride, first_head, num_heads, lane_blocks,
    KEY_BITS: constexpr, VALUE_BITS: constexpr, NUM_KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr,
    HAS_WINDOW: constexpr, NEAR_BLOCK: constexpr, FIRST_TOKENS: constexpr, NEAR_PAGE: constexpr,
    HAS_KEY_BIAS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_D: constexpr, PAIR_COLUMNS: constexpr,
    NUM_STAGES: constexpr, BY_DESCRIPTOR: constexpr, SCALES_BY_DESCRIPTOR: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_HEADS: constexpr = NUM_KV_HEADS * GROUP
    num_small = tl.load(p_tiles)
    num_tiles = tl.load(p_tiles + 1)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    if BLOCK_D == HEAD_DIM:
        o_dim = o_d
        m_d = o_d >= 0
    else:
        # The halves of a head lie in halves of the block, as those of near tokens do.
        o_dim = o_d // (BLOCK_D // 2) * (HEAD_DIM // 2) + o_d % (BLOCK_D // 2)
        m_d = o_d % (BLOCK_D // 2) < HEAD_DIM // 2
    o_row = o_m // GROUP
    if HAS_KEY_BIAS:
        o_pair = tl.arange(0, PAIR_COLUMNS)[None, :]
        p_cosines = p_near + o_n[:, None] * (HEAD_DIM // 2) + o_pair
        m_near = o_pair < HEAD_DIM // 2
        b_near_cos = tl.load(p_cosines, mask=m_near, other=0.0)
        b_near_sin = tl.load(p_cosines + BLOCK_N * (HEAD_DIM // 2), mask=m_near, other=0.0)
    num_items = num_tiles * num_heads
    num_rounds = num_items // tl.num_programs(0)
    num_rounds += tl.where(_item_of(num_rounds) < num_items, 1, 0)
    for i_round in range(num_rounds):
        i_item = _item_of(i_round)
        i_lane_head = i_item % num_heads
        i_head = first_head + i_lane_head
        table_row, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
            p_tiles, 1 + num_small + i_item // num_heads
        )
        first_row = (i_lane_head * lane_blocks + tl.load(p_starts + table_row)) * RUN_TOKENS
        if PDL:
            tl.extra.cuda.gdc_wait()  # tiles are older; queries and the lane come from kernels before
        m_m = o_row < num_rows
        o_head = i_head * GROUP + o_m % GROUP
        o_q = (row + o_row).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + o_head * HEAD_DIM
        # Straight from a load: so the operand lies in shared memory and takes no registers.
        b_q = tl.load(p_q + o_q[:, None] + o_dim[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
        if HAS_KEY_BIAS:
            b_even, b_odd = query_waves(
                p_q, o_q, m_m, p_bias + i_head * HEAD_DIM, p_rotation, scale_log2, rotation_scale, 0, KEY_BITS < 8,
                HEAD_DIM, PAIR_COLUMNS,
            )  # fmt: skip
            # Rounded to save registers: less than the rounding of the query itself.
            b_even, b_odd = b_even.to(tl.float16), b_odd.to(tl.float16)
        if NEAR_BLOCK > 0:
            near_begin, near_end = near_chunks(position, num_rows, num_splits, NEAR_BLOCK, FIRST_TOKENS, LARGE_CHUNK)
            num_splits = num_splits % SPLIT
            b_acc, b_m, b_l = near_large(
                p_q, o_q, m_m, p_near_k, p_near_v, p_near_pages + table_row.to(tl.int64) * near_stride,
                near_begin, near_end, position, num_rows, o_row, i_head, scale_log2, softcap_log2, window,
                NUM_KV_HEADS, HEAD_DIM, NEAR_BLOCK, FIRST_TOKENS, NEAR_PAGE, HAS_WINDOW, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            b_l = b_l * P_ONE  # as p: P_ONE stands for 1
        else:
            b_acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
            b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
            b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
        # Clear blocks come first, then masked ones. Only with first tokens, or in splits, a range begins inside a block.
        begin, end = low // BLOCK_N, tl.cdiv(high, BLOCK_N)
        if HAS_WINDOW:
            clear_begin, clear_end = begin, begin
        else:
            clear_begin = tl.cdiv(low, BLOCK_N)
            clear_end = tl.maximum(clear_begin, tl.minimum(high, position + 1) // BLOCK_N)
        num_leading = clear_begin - begin
        num_masked = tl.where(low < high, num_leading + end - clear_end, 0)
        for MASKED in tl.static_range(2):
            first = 0 if MASKED else clear_begin
            last = num_masked if MASKED else clear_end
            for i in tl.range(first, last, num_stages=NUM_STAGES):
                if MASKED:
                    i_block = tl.where(i < num_leading, begin + i, clear_end + i - num_leading)
                else:
                    i_block = i
                n = i_block * BLOCK_N
                o_lane = first_row + n
                b_k = _lane_block(lane_k, o_lane, o_n, o_dim, m_d, True, HEAD_DIM, BLOCK_D, BY_DESCRIPTOR)
                b_ks = _lane_numbers(lane_scales, o_lane, o_n, SCALES_BY_DESCRIPTOR)
                b_log = _lane_numbers(lane_scales, capacity + o_lane, o_n, SCALES_BY_DESCRIPTOR)
                b_score = tl.dot(b_q, b_k)
                if HAS_KEY_BIAS or softcap_log2 is not None:
                    b_score = b_score * b_ks[None, :]
                    if HAS_KEY_BIAS:
                        b_turned_even, b_turned_odd, b_all = turned_waves(
                            b_even.to(tl.float32), b_odd.to(tl.float32), p_cos, p_sin, i_block, 0, HEAD_DIM
                        )
                        b_bias = tl.dot(b_turned_even, tl.trans(b_near_cos))
                        b_score += tl.dot(b_turned_odd, tl.trans(b_near_sin), b_bias) + b_all
                    if softcap_log2 is not None:
                        b_score = soft_capped(b_score, softcap_log2)
                    b_seen = b_score + b_log[None, :]
                else:
                    shape: constexpr = (BLOCK_M, BLOCK_N)
                    b_seen = tl.fma(
                        b_score, tl.broadcast_to(b_ks[None, :], shape), tl.broadcast_to(b_log[None, :], shape)
                    )
                if MASKED:
                    o_token = n + o_n
                    distance = (position + o_row)[:, None] - o_token[None, :]
                    m_seen = (distance >= 0) & ((o_token >= low) & (o_token < high))[None, :]
                    if HAS_WINDOW:
                        m_seen = m_seen & (distance < window)
                    b_seen = tl.where(m_seen, b_seen, -float("inf"))
                b_m_new = tl.maximum(b_m, tl.max(b_seen, axis=1))
                b_m_safe = finite_max(b_m_new) if MASKED else b_m_new
                b_p = fast_exp2(b_seen - (b_m_safe - P_SHIFT)[:, None], PLAIN)
                b_alpha = fast_exp2(b_m - b_m_safe, PLAIN)
                b_inverse = _lane_numbers(lane_scales, 2 * capacity + o_lane, o_n, SCALES_BY_DESCRIPTOR)
                b_l = b_l * b_alpha + tl.sum(b_p * b_inverse[None, :], axis=1)
                b_v = _lane_block(lane_v, o_lane, o_n, o_dim, m_d, False, HEAD_DIM, BLOCK_D, BY_DESCRIPTOR)
                b_acc = tl.dot(b_p.to(tl.float16), b_v, b_acc * b_alpha[:, None])
                b_m = b_m_new
        b_m = b_m - P_SHIFT  # what p and its sum are relative to
        if p_sinks is not None:
            # Add sinks only here: in the running maximum a sink would push p out of the range of half precision.
            b_l = add_sinks(b_l, b_m, p_sinks, o_head, first_partial < 0)
        # If a row sees nothing of a split, its partial is neutral: zeros, with -inf as lse.
        b_out = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
        m_out = m_m[:, None] & m_d[None, :]
        if first_partial < 0:
            if VALUE_BITS < 8:
                p_table = p_rotation + o_dim[:, None] * HEAD_DIM + o_dim[None, :]
                b_table = tl.load(p_table, mask=m_d[:, None] & m_d[None, :], other=0.0).to(tl.float16)
                b_out = tl.dot(b_out.to(tl.float16), b_table) * rotation_scale
            tl.store(p_out + o_q[:, None] + o_dim[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
        else:
            o_partial = (first_partial + o_row * num_splits).to(tl.int64) * NUM_HEADS + o_head
            tl.store(p_partial_out + o_partial[:, None] * HEAD_DIM + o_dim[None, :], b_out, mask=m_out)
            tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        # Release late: programs of the next kernel would share the multiprocessors unevenly.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # wait even without a tile: the next kernel relies on all earlier ones

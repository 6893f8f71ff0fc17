"""Compressed attention (DeepSeek-V4): window tokens and compressed entries in one softmax with a sink, outputs rotated back.

T rows, N query heads, D head dim, R rotated elements, K entries of a list, C split-KV partials

A token or an entry is one row of D elements: key and value of all heads, so one load serves both products. A program
has one row, one block of heads and one split of the row's places (compressed_scopes.py). The last R elements of outputs are
rotated back by the row's position before they are written, so a merge need not.
"""

import torch
from torch import Tensor

from holdfast.kernels.attention.split_kv import add_sinks, finite_max
from holdfast.kernels.fp8 import e4m3_value, e8m0_bits
from holdfast.kernels.latent.compressed_scopes import (
    CompressedCall,
    Scopes,
    choose_splits,
    merge_scopes,
    row_places,
    split_size,
)
from holdfast.kernels.latent.compressed_warpgroups import attend_warpgroups, takes_warpgroups
from holdfast.kernels.latent.latent_geometry import tile_height
from holdfast.kernels.latent.latent_planes import bits_of_rope, read_tokens
from holdfast.kernels.latent.write_latent import rotate_neighbours
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import (
    can_run,
    constexpr,
    is_interpreted,
    jit,
    jit_counting,
    next_power_of_two,
    shared_bytes,
    tl,
)

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


def compressed_attention(call: CompressedCall) -> Tensor:
    """Attend each row to its window, its entries and the sink of each head: [T, N, D], rotated back; zeros in padded rows.

    Partials hold the rows times heads of `compressed_splits`.
    """
    is_compiled = can_run(call.q_TND) or is_interpreted()
    return compressed_attention_triton(call) if is_compiled else compressed_attention_reference(call)


def compressed_attention_reference(call: CompressedCall) -> Tensor:
    """Like `compressed_attention` in plain torch, one row at a time, without splits. Places that name no entry are ignored."""
    q_TND, scopes, out_TND, rope_dim = call.q_TND, call.scopes, call.out_TND, call.scopes.window.rope_dim
    table_rows, positions = (tensor[: len(q_TND)].tolist() for tensor in call.rows)
    for row, (table_row, position) in enumerate(zip(table_rows, positions, strict=True)):
        if position < 0:
            out_TND[row] = 0
            continue
        token_S = torch.arange(max(0, position + 1 - scopes.window_size), position + 1, device=q_TND.device)
        rows_SD = read_tokens(scopes.window, scopes.window_table_NP[table_row], token_S)
        if scopes.ratio:
            assert scopes.entries is not None, "a layer with a ratio has planes of entries"
            assert scopes.entries_table_NP is not None, "a layer with a ratio has a table of entries"
            entry_S = _seen_entries(scopes, row, (position + 1) // scopes.ratio)
            entries_SD = read_tokens(scopes.entries, scopes.entries_table_NP[table_row], entry_S)
            rows_SD = torch.cat((rows_SD, entries_SD))
        scores_NS = q_TND[row].float() @ rows_SD.T * call.scale
        weights_NS = torch.cat((scores_NS, call.sinks_N.float().unsqueeze(1)), dim=1).softmax(-1)[:, :-1]
        out_ND = weights_NS @ rows_SD
        back = call.rotary.at(slice(row, row + 1)).back()
        out_ND[:, -rope_dim:] = rotate_neighbours(out_ND[None, :, -rope_dim:], back)[0]
        out_TND[row] = out_ND.to(out_TND.dtype)
    return out_TND


def _seen_entries(scopes: Scopes, row: int, num_entries: int) -> Tensor:
    listed_TK = scopes.selected_TK
    if listed_TK is None or num_entries <= listed_TK.shape[1]:
        return torch.arange(num_entries, device=scopes.window.rows_SX.device)
    listed_S = listed_TK[row].long()
    return listed_S[(listed_S >= 0) & (listed_S < num_entries)]


def compressed_attention_triton(call: CompressedCall) -> Tensor:
    """Like `compressed_attention` with Triton or Gluon kernels."""
    if len(call.q_TND) == 0:
        return call.out_TND
    num_splits = choose_splits(call)
    attend = attend_warpgroups if takes_warpgroups(call) else _attend_plain
    attend(call, num_splits)
    if num_splits > 1:
        merge_scopes(call, num_splits)
    return call.out_TND


def _attend_plain(call: CompressedCall, num_splits: int) -> None:
    """Launch all tiles of a step without the merge, in Triton for any GPU and any sizes."""
    q_TND, window, entries, constants = call.q_TND, call.scopes.window, call.entries, call.constants()
    num_rows, _, head_dim = q_TND.shape
    block_d, height = max(16, next_power_of_two(head_dim)), tile_height(call.tiled_heads, large=False)
    room = shared_bytes(q_TND) - height * block_d * q_TND.element_size()
    block_n = 32 if room >= 3 * 32 * block_d * q_TND.element_size() else 16
    planes = (window.rows_SX, window.scales_SC, bits_of_rope(window))
    planes += (entries.rows_SX, entries.scales_SC, bits_of_rope(entries))
    _attend_kernel[(num_rows * constants["NUM_BLOCKS"], num_splits)](
        q_TND, *planes, *call.arguments(), **constants, KIND=window.kind, HEAD_DIM=head_dim, ROPE_DIM=window.rope_dim,
        NUM_SCALES=0 if window.scales_SC is None else window.scales_SC.shape[1], BLOCK_M=height, BLOCK_N=block_n,
        BLOCK_D=block_d, num_warps=8 if height >= 32 else 4, **pdl_flags(q_TND),
    )  # fmt: skip


@jit
def _load_tile(
    p_rows, p_scales, p_turned, o_slot, m_n,
    KIND: constexpr, HEAD_DIM: constexpr, ROPE_DIM: constexpr, NUM_SCALES: constexpr, BLOCK_D: constexpr,
    DTYPE: constexpr,
):  # fmt: skip
    """Load rows of one scope as operands [N, D]; zeros without a place."""
    NOPE_DIM: constexpr = HEAD_DIM - ROPE_DIM
    o_d = tl.arange(0, BLOCK_D)
    if KIND == "turboquant":
        COLUMNS: constexpr = NOPE_DIM // 4
        m_coded = m_n[:, None] & (o_d < NOPE_DIM)[None, :]
        m_turned = m_n[:, None] & ((o_d >= NOPE_DIM) & (o_d < HEAD_DIM))[None, :]
        o_part = o_d // COLUMNS
        o_byte = 2 * (o_d % COLUMNS) + o_part // 2
        b_word = tl.load(p_rows + (o_slot * (NOPE_DIM // 2))[:, None] + o_byte[None, :], mask=m_coded, other=0)
        # The codebook of quant/latent_quantize.py: t + t^3 as half precision rounds it.
        b_t = ((b_word.to(tl.int32) >> (4 * (o_part % 2))[None, :] & 15).to(tl.float32) - 7.5) * 0.09375
        b_t = ((b_t * b_t + 1.0).to(tl.float16).to(tl.float32) * b_t).to(tl.float16).to(tl.float32)
        b_size = tl.load(p_scales + o_slot, mask=m_n, other=0.0).to(tl.float32)
        o_turned = (o_slot * ROPE_DIM)[:, None] + (o_d - NOPE_DIM)[None, :]
        b_turned = tl.load(p_turned + o_turned, mask=m_turned, other=0).to(tl.int32) << 16
        b_tile = tl.where(m_coded, b_t * b_size[:, None], b_turned.to(tl.float32, bitcast=True))
        if tl.float16 == DTYPE:
            b_tile = tl.minimum(tl.maximum(b_tile, -65504.0), 65504.0)
        b_tile = b_tile.to(DTYPE)
    elif KIND == "fp8_ds_v4":
        ROW_BYTES: constexpr = NOPE_DIM + 2 * ROPE_DIM
        m_nope = m_n[:, None] & (o_d < NOPE_DIM)[None, :]
        m_rope = m_n[:, None] & ((o_d >= NOPE_DIM) & (o_d < HEAD_DIM))[None, :]
        p_n = p_rows + (o_slot * ROW_BYTES)[:, None]
        b_code = tl.load(p_n + o_d[None, :], mask=m_nope, other=0).to(tl.int32)
        b_scale = tl.load(p_scales + (o_slot * NUM_SCALES)[:, None] + o_d[None, :] // 64, mask=m_nope, other=0)
        # Byte by byte: the interpreter cannot cast a byte pointer to bfloat16.
        p_rope = p_n + (2 * o_d - NOPE_DIM)[None, :]
        b_rope = tl.load(p_rope, mask=m_rope, other=0).to(tl.int32)
        b_rope = b_rope | tl.load(p_rope + 1, mask=m_rope, other=0).to(tl.int32) << 8
        b_tile = e4m3_value(b_code) * e8m0_bits(b_scale).to(tl.float32, bitcast=True)
        b_tile = tl.where(m_nope, b_tile, (b_rope << 16).to(tl.float32, bitcast=True))
        if tl.float16 == DTYPE:
            b_tile = tl.minimum(tl.maximum(b_tile, -65504.0), 65504.0)
        b_tile = b_tile.to(DTYPE)
    else:
        p_n = p_rows + (o_slot * HEAD_DIM)[:, None] + o_d[None, :]
        b_tile = tl.load(p_n, mask=m_n[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
    return b_tile


@jit
def _rotate_back(b_x, p_cos, p_sin, ROPE_DIM: constexpr, NOPE_DIM: constexpr):
    """Rotate the last elements of heads back, by pairs of neighbours: cos and -sin of one row."""
    BLOCK_M: constexpr = b_x.shape[0]
    BLOCK_D: constexpr = b_x.shape[1]
    o_pair = tl.arange(0, BLOCK_D // 2) - NOPE_DIM // 2
    m_pair = (o_pair >= 0) & (o_pair < ROPE_DIM // 2)
    b_cos = tl.load(p_cos + o_pair, mask=m_pair, other=1.0).to(tl.float32)[None, :]
    b_sin = tl.load(p_sin + o_pair, mask=m_pair, other=0.0).to(tl.float32)[None, :]
    b_even, b_odd = tl.split(tl.reshape(b_x, (BLOCK_M, BLOCK_D // 2, 2)))
    b_pairs = tl.join(b_even * b_cos + b_odd * b_sin, b_odd * b_cos - b_even * b_sin)
    return tl.reshape(b_pairs, (BLOCK_M, BLOCK_D))


@jit_counting("num_listed")
def _attend_kernel(
    p_q, p_window, p_window_scales, p_window_rope, p_entries, p_entries_scales, p_entries_rope, p_window_pages,
    p_entries_pages, p_selected, p_table_rows, p_positions, p_sinks, p_cos, p_sin, p_out, p_partial_out, p_partial_lse,
    window_stride, entries_stride, selected_stride, rotary_stride, num_listed, scale_log2,
    WINDOW: constexpr, RATIO: constexpr, LISTED: constexpr, KIND: constexpr, NUM_HEADS: constexpr,
    NUM_BLOCKS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, ROPE_DIM: constexpr, NUM_SCALES: constexpr,
    WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_D: constexpr,
    PDL: constexpr,
):  # fmt: skip
    DTYPE: constexpr = p_q.dtype.element_ty
    # Blocks of heads of a row run one after the other, so all but the first find its rows in the cache.
    i_row = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    i_split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_head = tl.program_id(0) % NUM_BLOCKS * GROUP + o_m
    m_m = (o_m < GROUP) & (o_head < NUM_HEADS)
    m_out = m_m[:, None] & (o_d < HEAD_DIM)[None, :]
    o_q = ((i_row * NUM_HEADS + o_head) * HEAD_DIM)[:, None] + o_d[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()  # earlier kernels write lists, queries and rows of pages
    position = tl.load(p_positions + i_row)
    num_window, num_entries, num_places = row_places(position, num_listed, WINDOW, RATIO, LISTED)
    size = split_size(num_places, num_splits)
    low = i_split * size
    high = tl.minimum(low + size, num_places)
    if low >= high:
        # Padding, or more splits than places: the merge computes how many there are.
        if (num_splits == 1) & (position < 0):
            tl.store(p_out + o_q, tl.zeros((BLOCK_M, BLOCK_D), tl.float32).to(p_out.dtype.element_ty), mask=m_out)
        return
    num_taken = num_places - num_window
    first = position + 1 - num_window
    table_row = tl.load(p_table_rows + i_row).to(tl.int64)
    p_window_row = p_window_pages + table_row * window_stride
    p_entries_row = p_entries_pages + table_row * entries_stride
    p_listed = p_selected + i_row * selected_stride
    is_listed = LISTED & (num_entries > num_listed)
    b_q = tl.load(p_q + o_q, mask=m_out, other=0.0)
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for n in tl.range(low, high, BLOCK_N):
        o_place = n + o_n
        m_n = o_place < high
        m_window = m_n & (o_place >= num_taken)
        b_token = tl.where(m_window, first + o_place - num_taken, 0)
        b_page = tl.load(p_window_row + b_token // WINDOW_PAGE, mask=m_window, other=0).to(tl.int64)
        o_slot = tl.maximum(b_page, 0) * WINDOW_PAGE + b_token % WINDOW_PAGE
        b_k = _load_tile(
            p_window, p_window_scales, p_window_rope, o_slot, m_window, KIND, HEAD_DIM, ROPE_DIM, NUM_SCALES, BLOCK_D,
            DTYPE,
        )  # fmt: skip
        m_seen = m_window
        if RATIO > 0:
            m_entry = m_n & (o_place < num_taken)
            b_entry = tl.where(m_entry, o_place, 0)
            if LISTED:
                b_entry = tl.where(is_listed, tl.load(p_listed + b_entry, mask=m_entry & is_listed, other=-1), b_entry)
                m_entry = m_entry & (b_entry >= 0) & (b_entry < num_entries)
                b_entry = tl.where(m_entry, b_entry, 0)
            b_page = tl.load(p_entries_row + b_entry // ENTRIES_PAGE, mask=m_entry, other=0).to(tl.int64)
            o_slot = tl.maximum(b_page, 0) * ENTRIES_PAGE + b_entry % ENTRIES_PAGE
            b_e = _load_tile(
                p_entries, p_entries_scales, p_entries_rope, o_slot, m_entry, KIND, HEAD_DIM, ROPE_DIM, NUM_SCALES,
                BLOCK_D, DTYPE,
            )  # fmt: skip
            b_k = tl.where(m_window[:, None], b_k, b_e)
            m_seen = m_window | m_entry
        b_score = tl.dot(b_q, tl.trans(b_k)) * scale_log2
        b_score = tl.where(m_seen[None, :], b_score, -float("inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_score, axis=1))
        b_m_safe = finite_max(b_m_new)
        b_p = tl.exp2(b_score - b_m_safe[:, None])
        b_alpha = tl.exp2(b_m - b_m_safe)
        b_l = b_l * b_alpha + tl.sum(b_p, axis=1)
        b_acc = tl.dot(b_p.to(b_k.dtype), b_k, b_acc * b_alpha[:, None])
        b_m = b_m_new
    b_whole = b_l
    if num_splits == 1:
        b_whole = add_sinks(b_l, b_m, p_sinks, o_head, m_m)
    # If no place of a split names anything, its partial is neutral: zeros, with -inf as lse.
    b_out = b_acc / tl.where(b_whole > 0, b_whole, 1.0)[:, None]
    o_rotary = i_row * rotary_stride
    b_out = _rotate_back(b_out, p_cos + o_rotary, p_sin + o_rotary, ROPE_DIM, HEAD_DIM - ROPE_DIM)
    if num_splits == 1:
        tl.store(p_out + o_q, b_out.to(p_out.dtype.element_ty), mask=m_out)
    else:
        o_partial = (i_row * num_splits + i_split) * NUM_HEADS + o_head
        if p_partial_out.dtype.element_ty != tl.float32:
            b_out = tl.minimum(tl.maximum(b_out, -65504.0), 65504.0)
        p_partial = p_partial_out + (o_partial * HEAD_DIM)[:, None] + o_d[None, :]
        tl.store(p_partial, b_out.to(p_partial_out.dtype.element_ty), mask=m_out)
        tl.store(p_partial_lse + o_partial, b_m + tl.log2(b_l), mask=m_m)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # release late: programs of the next kernel would run beside these

"""Gated delta rule of sequences with one row and draft tokens after it: `delta_step`, row by row.

T rows, H value heads (G key heads), K elements of a key, V elements of a value, P places, S slots, D draft tokens,
M = 2 D + 1, C channels of the convolution, N rows that are computed together

    accepted draft tokens of the last step -> the one row -> [state is written] -> draft tokens of this step

All of these rows go through one body of the loop, so a token gives the same bits as a row, as a draft token, and again.
"""

import torch
from torch import Tensor

from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.state.delta_inputs import NORM_EPS, DeltaInputs, log_decay, write_strength
from holdfast.kernels.state.delta_step import VALUES_PER_PROGRAM, delta_step_reference
from holdfast.kernels.state.kept_drafts import KeptDrafts
from holdfast.kernels.state.state_rows import (
    CLEARED_ROWS,
    Piece,
    StateRows,
    clear_padded_rows,
    draft_counts,
    single_row,
)
from holdfast.kernels.triton_compat import constexpr, jit, jit_counting, next_power_of_two, release_then_wait, tl


def delta_drafts_reference(
    inputs: DeltaInputs, rows: StateRows, state_PHKV: Tensor, out_THV: Tensor, kept: KeptDrafts
) -> None:
    """Advance the states of sequences with one row by their accepted draft tokens and that row; write all outputs.

    Inputs of this step's draft tokens are kept. Rows of prompts with several rows are left alone. Padding becomes zeros.
    """
    _check(inputs, rows, state_PHKV, out_THV, kept)
    pieces = rows.single_rows()
    counts = rows.draft_counts(pieces)
    ring = kept.b_SMH.shape[1]
    for piece, (num_accepted, _) in zip(pieces, counts, strict=True):
        if num_accepted:
            again = _accepted(inputs, kept, piece, num_accepted)
            _step_rows(again, piece, state_PHKV[piece.place], torch.empty_like(again.v_THV))
    delta_step_reference(inputs, rows, state_PHKV, out_THV)
    for piece, (_, num_drafts) in zip(pieces, counts, strict=True):
        if num_drafts:
            own = torch.arange(piece.row + 1, piece.row + 1 + num_drafts)
            drafts = inputs.at(own)
            out_NHV = torch.empty_like(drafts.v_THV)
            _step_rows(drafts, piece, state_PHKV[piece.place].clone(), out_NHV)
            out_THV[own] = out_NHV
            places_N = torch.arange(piece.start + 1, piece.start + 1 + num_drafts) % ring
            kept.a_SMH[piece.place, places_N] = drafts.a_TH.float()
            kept.b_SMH[piece.place, places_N] = drafts.b_TH.float()


def _step_rows(inputs: DeltaInputs, piece: Piece, state_HKV: Tensor, out_NHV: Tensor) -> None:
    """Advance one state by rows that come one by one, none of them the first of its sequence."""
    place, position = torch.zeros(1, dtype=torch.int64), torch.full((1,), max(piece.start, 1))
    for row in range(len(out_NHV)):
        own = slice(row, row + 1)
        delta_step_reference(inputs.at(own), StateRows(place, position), state_HKV.unsqueeze(0), out_NHV[own])


def _accepted(inputs: DeltaInputs, kept: KeptDrafts, piece: Piece, num_accepted: int) -> DeltaInputs:
    """Return inputs of the accepted draft tokens before a row."""
    key_heads, key_dim = inputs.k_TGK.shape[1:]
    value_heads, value_dim = inputs.v_THV.shape[1:]
    places_N = torch.arange(piece.start - num_accepted, piece.start) % kept.b_SMH.shape[1]
    qkv_NC = kept.accepted_SDC[piece.place, :num_accepted]
    gates = kept.a_SMH[piece.place, places_N], kept.b_SMH[piece.place, places_N]
    heads = key_heads, key_dim, value_heads, value_dim
    return DeltaInputs.of(qkv_NC, *heads, *gates, inputs.A_log_H, inputs.dt_bias_H)


def _check(inputs: DeltaInputs, rows: StateRows, state_PHKV: Tensor, out_THV: Tensor, kept: KeptDrafts) -> None:
    inputs.check(state_PHKV, out_THV)
    assert rows.drafts_T is not None, "draft tokens are kept, and rows do not say which they are"
    num_keys, num_values = inputs.k_TGK.shape[1] * inputs.k_TGK.shape[2], out_THV.shape[1] * out_THV.shape[2]
    kept.check(2 * num_keys + num_values)
    assert kept.a_SMH.shape[2:] == inputs.a_TH.shape[1:], f"{kept.a_SMH.shape=} for {inputs.a_TH.shape=}"
    assert kept.a_SMH.dtype == kept.b_SMH.dtype == torch.float32, "gates are kept in float32"
    assert kept.accepted_SDC.dtype == inputs.v_THV.dtype, f"{kept.accepted_SDC.dtype=} {inputs.v_THV.dtype=}"


def delta_drafts_triton(
    inputs: DeltaInputs, rows: StateRows, state_PHKV: Tensor, out_THV: Tensor, kept: KeptDrafts
) -> None:
    """Launch one program per sequence, value head and block of values; a state is read and written once."""
    _check(inputs, rows, state_PHKV, out_THV, kept)
    num_rows, num_heads, value_dim = out_THV.shape
    key_heads, key_dim = inputs.k_TGK.shape[1:]
    if num_rows == 0:
        return
    num_seqs = num_rows if rows.sequences_N4 is None else len(rows.sequences_N4)
    num_tails = 0 if rows.sequences_N4 is None else -(-num_rows // CLEARED_ROWS)
    block_v = min(VALUES_PER_PROGRAM, next_power_of_two(value_dim))
    q_TGK, k_TGK, v_THV, a_TH, b_TH, A_log_H, dt_bias_H = inputs
    _drafts_kernel[(-(-value_dim // block_v) * num_heads, num_seqs + num_tails)](
        q_TGK, k_TGK, v_THV, a_TH, b_TH, A_log_H, dt_bias_H, rows.places_T, rows.positions_T, rows.sequences_N4,
        rows.drafts_T, state_PHKV, out_THV, kept.a_SMH, kept.b_SMH, kept.accepted_SDC, q_TGK.stride(0),
        k_TGK.stride(0), v_THV.stride(0), a_TH.stride(0), b_TH.stride(0), out_THV.stride(0), state_PHKV.stride(0),
        num_seqs, num_rows, key_dim**-0.5,
        NUM_HEADS=num_heads, GROUP=num_heads // key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BY_CHANNEL=inputs.by_channel, EPS=NORM_EPS, MAX_DRAFTS=kept.num_drafts,
        BLOCK_D=next_power_of_two(kept.num_drafts), BLOCK_K=next_power_of_two(key_dim), BLOCK_V=block_v,
        TILE=CLEARED_ROWS, num_warps=4, num_stages=1, **pdl_flags(state_PHKV),
    )  # fmt: skip


delta_drafts = operation(
    reference=delta_drafts_reference,
    triton=delta_drafts_triton,
    place=lambda inputs, rows, state_PHKV, out_THV, kept: state_PHKV,
)


@jit_counting("num_seqs", "num_rows")
def _drafts_kernel(
    p_q, p_k, p_v, p_a, p_b, p_log_rate, p_bias, p_places, p_positions, p_sequences, p_drafts, p_state, p_out,
    p_kept_a, p_kept_b, p_accepted, q_stride, k_stride, v_stride, a_stride, b_stride, out_stride, state_stride,
    num_seqs, num_rows, scale,
    NUM_HEADS: constexpr, GROUP: constexpr, KEY_DIM: constexpr, VALUE_DIM: constexpr, BY_CHANNEL: constexpr,
    EPS: constexpr, MAX_DRAFTS: constexpr, BLOCK_D: constexpr, BLOCK_K: constexpr, BLOCK_V: constexpr,
    TILE: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_BLOCKS: constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    RING: constexpr = 2 * MAX_DRAFTS + 1
    KEYS: constexpr = NUM_HEADS // GROUP * KEY_DIM
    NUM_CHANNELS: constexpr = 2 * KEYS + NUM_HEADS * VALUE_DIM
    i_head = tl.program_id(0) // NUM_BLOCKS
    i_block = tl.program_id(0) % NUM_BLOCKS
    i_seq = tl.program_id(1)
    o_k = tl.arange(0, BLOCK_K)
    o_v = i_block * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < KEY_DIM
    m_v = o_v < VALUE_DIM
    b_rate = tl.exp(tl.load(p_log_rate + i_head))
    release_then_wait(PDL)
    if i_seq >= num_seqs:
        first = (i_seq - num_seqs) * TILE
        clear_padded_rows(p_out, out_stride, p_places, first, num_rows, i_head * VALUE_DIM + o_v, m_v, TILE)
    else:
        i_row, is_single, i_place, start = single_row(p_places, p_positions, p_sequences, i_seq)
        p_row_out = p_out + i_row * out_stride + i_head * VALUE_DIM + o_v
        if is_single:
            if i_place < 0:
                tl.store(p_row_out, tl.zeros([BLOCK_V], p_out.dtype.element_ty), mask=m_v)
            else:
                num_accepted, num_drafts = draft_counts(p_drafts, i_row, num_rows, MAX_DRAFTS, BLOCK_D)
                p_tile = p_state + i_place * state_stride + i_head * KEY_DIM * VALUE_DIM
                p_tile = p_tile + o_k[:, None] * VALUE_DIM + o_v[None, :]
                m_tile = m_k[:, None] & m_v[None, :]
                # A state is read and written once a step, and does not fit the L2 cache beside all others.
                b_state = tl.load(p_tile, mask=m_tile & (start > 0), other=0.0, eviction_policy="evict_first")
                o_key = i_head // GROUP * KEY_DIM + o_k
                o_value = i_head * VALUE_DIM + o_v
                for i_step in range(-num_accepted, num_drafts + 1):
                    is_own = i_step >= 0
                    i_own = i_row + i_step
                    i_again = i_place * MAX_DRAFTS + num_accepted + i_step
                    i_kept = (i_place * RING + (start + i_step) % RING) * NUM_HEADS + i_head
                    p_again = p_accepted + i_again * NUM_CHANNELS
                    b_q = row_or_again(p_q + i_own * q_stride + o_key, p_again + o_key, is_own, m_k)
                    b_k = row_or_again(p_k + i_own * k_stride + o_key, p_again + KEYS + o_key, is_own, m_k)
                    b_v = row_or_again(p_v + i_own * v_stride + o_value, p_again + 2 * KEYS + o_value, is_own, m_v)
                    b_b = row_or_again(p_b + i_own * b_stride + i_head, p_kept_b + i_kept, is_own, True)
                    b_beta = write_strength(b_b)
                    q_square, k_square = tl.split(tl.sum(tl.join(b_q * b_q, b_k * b_k), axis=0))
                    q_scale = tl.rsqrt(q_square + EPS) * scale
                    k_scale = tl.rsqrt(k_square + EPS)
                    own = tl.sum(b_q * b_k, axis=0) * (q_scale * k_scale)
                    # Only the first block of a head writes gates; a step reads other places of the ring.
                    is_kept = (i_step > 0) & (i_block == 0)
                    tl.store(p_kept_b + i_kept, b_b, mask=is_kept)
                    if BY_CHANNEL:
                        p_kept = p_kept_a + i_kept * KEY_DIM + o_k
                        o_gate = i_head * KEY_DIM + o_k
                        b_a = row_or_again(p_a + i_own * a_stride + o_gate, p_kept, is_own, m_k)
                        tl.store(p_kept, b_a, mask=m_k & is_kept)
                        b_bias = tl.load(p_bias + o_gate, mask=m_k, other=0.0)
                        b_state = b_state * tl.exp(log_decay(b_a, b_bias, b_rate))[:, None]
                    else:
                        b_a = row_or_again(p_a + i_own * a_stride + i_head, p_kept_a + i_kept, is_own, True)
                        tl.store(p_kept_a + i_kept, b_a, mask=is_kept)
                        b_state = b_state * tl.exp(log_decay(b_a, tl.load(p_bias + i_head), b_rate))
                    # Both sums at once, of keys and queries as they came: lengths multiply after.
                    b_sums = tl.sum(tl.join(b_state * b_k[:, None], b_state * b_q[:, None]), axis=0)
                    b_read, b_before = tl.split(b_sums)
                    b_write = (b_v - b_read * k_scale) * b_beta
                    b_state = b_state + (b_k * k_scale)[:, None] * b_write[None, :]
                    # q (S + k w) = q S + (q k) w: both sums over the state run before the write.
                    b_out = b_before * q_scale + own * b_write
                    tl.store(p_tile, b_state, mask=m_tile & (i_step == 0), eviction_policy="evict_first")
                    p_step_out = p_row_out + i_step * out_stride
                    tl.store(p_step_out, b_out.to(p_out.dtype.element_ty), mask=m_v & is_own)


@jit
def row_or_again(p_own, p_again, is_own, m_x):
    """Load a row of the step, or what was kept of an accepted draft token, in float32."""
    b_own = tl.load(p_own, mask=is_own & m_x, other=0.0).to(tl.float32)
    b_again = tl.load(p_again, mask=(is_own == 0) & m_x, other=0.0).to(tl.float32)
    return tl.where(is_own, b_own, b_again)

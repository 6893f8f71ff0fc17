"""Gated delta rule of sequences with one row: the recurrence, one token a state.

T rows, H value heads (G key heads), K elements of a key, V elements of a value, P places

    S = decay * S;  S += k (beta * (v - S^T k))^T;  out = S^T q

q and k have unit length, q is divided by sqrt(K). States and sums are float32.
"""

import torch
from torch import Tensor

from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.state.delta_inputs import (
    NORM_EPS,
    DeltaInputs,
    delta_gates,
    log_decay,
    normed_heads,
    write_strength,
)
from holdfast.kernels.state.state_rows import CLEARED_ROWS, StateRows, clear_padded_rows, single_row
from holdfast.kernels.triton_compat import constexpr, jit_counting, next_power_of_two, release_then_wait, tl

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

VALUES_PER_PROGRAM = 32
"""Columns of a state per program."""
STEP_WARPS = 4
STEP_BLOCKS = 1
STEP_STAGES = 1
STATE_EVICTION = "evict_first"
"""States are read once a step, and do not fit the L2 cache together."""


def delta_step_reference(inputs: DeltaInputs, rows: StateRows, state_PHKV: Tensor, out_THV: Tensor) -> None:
    """Advance the states of sequences with one row and write their outputs. Padding becomes zeros.

    Rows of other sequences are left alone.
    """
    inputs.check(state_PHKV, out_THV)
    rows.clear_padding(out_THV)
    pieces = rows.single_rows()
    if not pieces:
        return
    taken = inputs.at(torch.tensor([piece.row for piece in pieces]))
    _, decay_NHK, beta_NH = delta_gates(taken)
    q_NHK, k_NHK = normed_heads(taken)
    if not inputs.by_channel:
        decay_NHK = decay_NHK.unsqueeze(2)
    v_NHV, beta_NH1 = taken.v_THV.float(), beta_NH.unsqueeze(2)
    # q (S + k w) = q S + (q k) w: one product reads the state for both.
    readers_NH2K = torch.stack((k_NHK * decay_NHK, q_NHK * decay_NHK), dim=2)
    own_NH1 = (q_NHK * k_NHK).sum(-1, keepdim=True)
    for i, piece in enumerate(pieces):
        # A state advances in place: a copy of all of them would cost more than the loop.
        state_HKV = state_PHKV[piece.place]
        if piece.start == 0:
            state_HKV.zero_()
        read_HV, out_HV = torch.bmm(readers_NH2K[i], state_HKV).unbind(1)
        write_HV = (v_NHV[i] - read_HV) * beta_NH1[i]
        state_HKV.mul_(decay_NHK[i].unsqueeze(2)).addcmul_(k_NHK[i].unsqueeze(2), write_HV.unsqueeze(1))
        out_THV[piece.row] = (out_HV + own_NH1[i] * write_HV).to(out_THV.dtype)


def delta_step_triton(inputs: DeltaInputs, rows: StateRows, state_PHKV: Tensor, out_THV: Tensor) -> None:
    """Launch one program per sequence, value head and block of values; a state is read and written once."""
    inputs.check(state_PHKV, out_THV)
    num_rows, num_heads, value_dim = out_THV.shape
    key_heads, key_dim = inputs.k_TGK.shape[1:]
    if num_rows == 0:
        return
    num_seqs = num_rows if rows.sequences_N4 is None else len(rows.sequences_N4)
    num_tails = 0 if rows.sequences_N4 is None else -(-num_rows // CLEARED_ROWS)
    block_v = min(VALUES_PER_PROGRAM, next_power_of_two(value_dim))
    q_TGK, k_TGK, v_THV, a_TH, b_TH, A_log_H, dt_bias_H = inputs
    blocks = min(STEP_BLOCKS, -(-value_dim // block_v))
    _step_kernel[(-(-value_dim // (block_v * blocks)) * num_heads, num_seqs + num_tails)](
        q_TGK, k_TGK, v_THV, a_TH, b_TH, A_log_H, dt_bias_H, rows.places_T, rows.positions_T, rows.sequences_N4,
        state_PHKV, out_THV, q_TGK.stride(0), k_TGK.stride(0), v_THV.stride(0), a_TH.stride(0), b_TH.stride(0),
        out_THV.stride(0), state_PHKV.stride(0), num_seqs, num_rows, key_dim**-0.5,
        NUM_HEADS=num_heads, GROUP=num_heads // key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BY_CHANNEL=inputs.by_channel, EPS=NORM_EPS, BLOCK_K=next_power_of_two(key_dim), BLOCK_V=block_v,
        TILE=CLEARED_ROWS, BLOCKS=blocks, STAGES=STEP_STAGES,
        EVICTION=STATE_EVICTION, num_warps=STEP_WARPS, **pdl_flags(state_PHKV),
    )  # fmt: skip


delta_step = operation(
    reference=delta_step_reference, triton=delta_step_triton, place=lambda inputs, rows, state_PHKV, out_THV: state_PHKV
)


@jit_counting("num_seqs", "num_rows")
def _step_kernel(
    p_q, p_k, p_v, p_a, p_b, p_log_rate, p_bias, p_places, p_positions, p_sequences, p_state, p_out,
    q_stride, k_stride, v_stride, a_stride, b_stride, out_stride, state_stride, num_seqs, num_rows, scale,
    NUM_HEADS: constexpr, GROUP: constexpr, KEY_DIM: constexpr, VALUE_DIM: constexpr, BY_CHANNEL: constexpr,
    EPS: constexpr, BLOCK_K: constexpr, BLOCK_V: constexpr, BLOCKS: constexpr,
    STAGES: constexpr, TILE: constexpr, EVICTION: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_PARTS: constexpr = (VALUE_DIM + BLOCK_V * BLOCKS - 1) // (BLOCK_V * BLOCKS)
    i_head = tl.program_id(0) // NUM_PARTS
    i_seq = tl.program_id(1)
    o_k = tl.arange(0, BLOCK_K)
    first_v = tl.program_id(0) % NUM_PARTS * (BLOCK_V * BLOCKS)
    m_k = o_k < KEY_DIM
    b_rate = tl.exp(tl.load(p_log_rate + i_head))
    release_then_wait(PDL)
    if i_seq >= num_seqs:
        first = (i_seq - num_seqs) * TILE
        for block in tl.static_range(BLOCKS):
            o_v = first_v + block * BLOCK_V + tl.arange(0, BLOCK_V)
            o_column = i_head * VALUE_DIM + o_v
            clear_padded_rows(p_out, out_stride, p_places, first, num_rows, o_column, o_v < VALUE_DIM, TILE)
    else:
        i_row, is_single, i_place, start = single_row(p_places, p_positions, p_sequences, i_seq)
        p_row_out = p_out + i_row * out_stride + i_head * VALUE_DIM
        if is_single:
            if i_place < 0:
                for block in tl.static_range(BLOCKS):
                    o_v = first_v + block * BLOCK_V + tl.arange(0, BLOCK_V)
                    tl.store(p_row_out + o_v, tl.zeros([BLOCK_V], p_out.dtype.element_ty), mask=o_v < VALUE_DIM)
            else:
                p_tile = p_state + i_place * state_stride + i_head * KEY_DIM * VALUE_DIM + o_k[:, None] * VALUE_DIM
                m_old = m_k[:, None] & (start > 0)
                o_v = first_v + tl.arange(0, BLOCK_V)
                if BLOCKS == 1:  # on its way while gates are computed
                    m_tile = m_old & (o_v < VALUE_DIM)[None, :]
                    b_state = tl.load(p_tile + o_v[None, :], mask=m_tile, other=0.0, eviction_policy=EVICTION)
                o_key = i_head // GROUP * KEY_DIM + o_k
                b_q = tl.load(p_q + i_row * q_stride + o_key, mask=m_k, other=0.0).to(tl.float32)
                b_k = tl.load(p_k + i_row * k_stride + o_key, mask=m_k, other=0.0).to(tl.float32)
                b_beta = write_strength(tl.load(p_b + i_row * b_stride + i_head))
                if BY_CHANNEL:
                    o_gate = i_head * KEY_DIM + o_k
                    b_a = tl.load(p_a + i_row * a_stride + o_gate, mask=m_k, other=0.0)
                    b_bias = tl.load(p_bias + o_gate, mask=m_k, other=0.0)
                    b_decay = tl.exp(log_decay(b_a, b_bias, b_rate))[:, None]
                else:
                    b_a = tl.load(p_a + i_row * a_stride + i_head)
                    b_decay = tl.exp(log_decay(b_a, tl.load(p_bias + i_head), b_rate))
                q_square, k_square = tl.split(tl.sum(tl.join(b_q * b_q, b_k * b_k), axis=0))
                q_scale = tl.rsqrt(q_square + EPS) * scale
                k_scale = tl.rsqrt(k_square + EPS)
                own = tl.sum(b_q * b_k, axis=0) * (q_scale * k_scale)
                for block in tl.range(0, BLOCKS, num_stages=STAGES):
                    o_v = first_v + block * BLOCK_V + tl.arange(0, BLOCK_V)
                    m_v = o_v < VALUE_DIM
                    if BLOCKS > 1:
                        m_tile = m_old & m_v[None, :]
                        b_state = tl.load(p_tile + o_v[None, :], mask=m_tile, other=0.0, eviction_policy=EVICTION)
                    b_v = tl.load(p_v + i_row * v_stride + i_head * VALUE_DIM + o_v, mask=m_v, other=0.0)
                    b_state = b_state * b_decay
                    # Both sums at once, of keys and queries as they came: lengths multiply after.
                    b_sums = tl.sum(tl.join(b_state * b_k[:, None], b_state * b_q[:, None]), axis=0)
                    b_read, b_before = tl.split(b_sums)
                    b_write = (b_v.to(tl.float32) - b_read * k_scale) * b_beta
                    b_new = b_state + (b_k * k_scale)[:, None] * b_write[None, :]
                    # q (S + k w) = q S + (q k) w: both sums over the state run before the write.
                    b_out = b_before * q_scale + own * b_write
                    m_new = m_k[:, None] & m_v[None, :]
                    tl.store(p_tile + o_v[None, :], b_new, mask=m_new, eviction_policy=EVICTION)
                    tl.store(p_row_out + o_v, b_out.to(p_out.dtype.element_ty), mask=m_v)

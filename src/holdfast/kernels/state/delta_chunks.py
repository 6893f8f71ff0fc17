"""Gated delta rule of sequences with several rows: chunks of C rows, each a product of matrices.

T rows, H value heads (G key heads), K elements of a key, V elements of a value, P places, C rows of a chunk, M chunks

With G the cumulative sum of the logarithm of the decay in a chunk, and D_ij = exp(G_i - G_j) for j <= i:

    A = strictly lower part of beta_i (k_i . k_j) D_ij
    W = (I + A)^-1 beta (v - exp(G) k S)                what the rows write
    out = exp(G) q S + lower part of (q k^T D) W
    S = exp(G_last) S + (exp(G_last - G) k)^T W

Chunks follow each other through S alone, and S is read once a chunk. So a cut between chunks changes no bit.
"""

from collections.abc import Mapping

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
from holdfast.kernels.state.scan_warpgroups import scan_in_warpgroups, takes_warpgroups
from holdfast.kernels.state.state_geometry import BLOCK_ROWS, CHUNK_ROWS, COEFFICIENTS
from holdfast.kernels.state.state_rows import StateRows, chunk_slot, chunk_slots
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, release_then_wait, tl

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

VALUES_PER_PROGRAM = 32
"""Fewest columns of a state that a program carries from chunk to chunk."""
WAVE_PROGRAMS = 132
"""Programs that run at once on an H200: their shared memory allows one per SM."""
SYSTEM_WARPS, INVERSE_WARPS = 4, 1
SCAN_STAGES = 2
"""Chunks whose inputs are in flight."""


def delta_chunks_reference(
    inputs: DeltaInputs,
    rows: StateRows,
    state_PHKV: Tensor,
    out_THV: Tensor,
    scratch: Mapping[str, Tensor] | None = None,
) -> None:
    """Advance the states of sequences with several rows and write their outputs; other rows are left alone.

    `out_THV` must not overlap inputs: kernels load the next chunk's early. `scratch` has the tensors of `delta_chunk_specs`; only kernels need it.
    """
    inputs.check(state_PHKV, out_THV)
    for piece in rows.long_pieces():
        state_HKV = state_PHKV[piece.place]
        if piece.start == 0:
            state_HKV.zero_()
        for first in range(piece.row, piece.row + piece.num_rows, CHUNK_ROWS):
            chunk = slice(first, min(first + CHUNK_ROWS, piece.row + piece.num_rows))
            out_HCV = _advance(inputs.at(chunk), state_HKV)
            out_THV[chunk] = out_HCV.transpose(0, 1).to(out_THV.dtype)


def _advance(chunk: DeltaInputs, state_HKV: Tensor) -> Tensor:
    """Advance a state by one chunk in place and return the chunk's outputs."""
    g_CH, _, beta_CH = delta_gates(chunk)
    q_HCK, k_HCK, v_HCV = (x.transpose(0, 1).contiguous() for x in (*normed_heads(chunk), chunk.v_THV.float()))
    beta_HC1 = beta_CH.T.unsqueeze(2)
    # [H, C, 1], or [H, C, K] with gates by channel.
    sum_HCK = (g_CH if chunk.by_channel else g_CH.unsqueeze(2)).transpose(0, 1).cumsum(1)
    decay_HCK, last_HCK = sum_HCK.exp(), sum_HCK[:, -1:]
    system_HCC = (beta_HC1 * _decayed_products(k_HCK, k_HCK, sum_HCK)).tril(-1)
    write_HCV = beta_HC1 * (v_HCV - torch.bmm(k_HCK * decay_HCK, state_HKV))
    write_HCV = torch.linalg.solve_triangular(system_HCC, write_HCV, upper=False, unitriangular=True)
    out_HCV = torch.bmm(q_HCK * decay_HCK, state_HKV)
    out_HCV += torch.bmm(_decayed_products(q_HCK, k_HCK, sum_HCK), write_HCV)
    state_HKV.mul_(last_HCK.exp().mT)
    state_HKV.baddbmm_((k_HCK * (last_HCK - sum_HCK).exp()).mT, write_HCV)
    return out_HCV


def _decayed_products(x_HCK: Tensor, k_HCK: Tensor, sum_HCK: Tensor) -> Tensor:
    """Return the sum over channels of x_i k_j exp(sum_i - sum_j) for j <= i, and zero above the diagonal."""
    if sum_HCK.shape[2] == 1:
        difference_HCC = sum_HCK - sum_HCK.mT
        is_later_CC = torch.ones(difference_HCC.shape[1:], dtype=torch.bool).triu(1)
        return torch.bmm(x_HCK, k_HCK.mT) * difference_HCC.masked_fill_(is_later_CC, -torch.inf).exp_()
    products_HCC = x_HCK.new_zeros((*x_HCK.shape[:2], x_HCK.shape[1]))
    for first in range(0, x_HCK.shape[1], BLOCK_ROWS):
        own = slice(first, first + BLOCK_ROWS)
        # Seen from the first row of a block, both factors of an earlier row's decay are at most 1.
        start_H1K, x_HBK, sum_HBK = sum_HCK[:, first : first + 1], x_HCK[:, own], sum_HCK[:, own]
        k_HEK = k_HCK[:, :first] * (start_H1K - sum_HCK[:, :first]).exp()
        products_HCC[:, own, :first] = torch.bmm(x_HBK * (sum_HBK - start_H1K).exp(), k_HEK.mT)
        decay_HBBK = (sum_HBK.unsqueeze(2) - sum_HBK.unsqueeze(1)).clamp_(max=0).exp_()
        products_HCC[:, own, own] = (decay_HBBK * x_HBK.unsqueeze(2) * k_HCK[:, own].unsqueeze(1)).sum(-1).tril()
    return products_HCC


def delta_chunks_triton(
    inputs: DeltaInputs,
    rows: StateRows,
    state_PHKV: Tensor,
    out_THV: Tensor,
    scratch: Mapping[str, Tensor] | None = None,
) -> None:
    """Launch one program per chunk and value head, then one per sequence, value head and block of values."""
    inputs.check(state_PHKV, out_THV)
    if rows.chunks_M4 is None:
        return
    assert rows.sequences_N4 is not None, "a step with chunks lists its sequences"
    assert scratch is not None, "kernels need the tensors of delta_chunk_specs"
    systems, scores, coefficients, decays = (
        scratch[name] for name in ("chunk systems", "chunk scores", "chunk coefficients", "chunk decays")
    )
    num_slots = chunk_slots(rows)
    assert len(systems) >= num_slots, f"scratch of {len(systems)} chunks for {num_slots}"
    assert scores.dtype == inputs.v_THV.dtype, f"{scores.dtype=} for inputs in {inputs.v_THV.dtype}"
    num_heads, value_dim = out_THV.shape[1:]
    key_heads, key_dim = inputs.k_TGK.shape[1:]
    q_TGK, k_TGK, v_THV, a_TH, b_TH, A_log_H, dt_bias_H = inputs
    sizes = {
        "NUM_HEADS": num_heads, "GROUP": num_heads // key_heads, "KEY_DIM": key_dim, "BY_CHANNEL": inputs.by_channel,
        "CHUNK": CHUNK_ROWS, "NUM_COEFFICIENTS": COEFFICIENTS, "BLOCK_K": max(16, next_power_of_two(key_dim)),
    }  # fmt: skip
    flags = pdl_flags(state_PHKV)
    members = 1 if inputs.by_channel else inputs.group
    chunk_systems_kernel[(len(rows.chunks_M4), num_heads // members)](
        q_TGK, k_TGK, a_TH, b_TH, A_log_H, dt_bias_H, rows.chunks_M4, systems, scores,
        coefficients, decays, q_TGK.stride(0), k_TGK.stride(0), a_TH.stride(0), b_TH.stride(0), key_dim**-0.5,
        EPS=NORM_EPS, BLOCK=BLOCK_ROWS, MEMBERS=members, **sizes, num_warps=SYSTEM_WARPS, **flags,
    )  # fmt: skip
    chunk_inverse_kernel[(len(rows.chunks_M4), num_heads)](
        b_TH, rows.chunks_M4, systems, systems.view(scores.dtype), b_TH.stride(0), NUM_HEADS=num_heads,
        CHUNK=CHUNK_ROWS, BLOCK=BLOCK_ROWS, num_warps=INVERSE_WARPS, **flags,
    )  # fmt: skip
    if takes_warpgroups(inputs, state_PHKV):
        inverses = systems.view(scores.dtype)
        scan_in_warpgroups(inputs, rows, inverses, scores, coefficients, state_PHKV, out_THV)
        return
    block_v = scan_values(num_heads, value_dim, scores.dtype, inputs.by_channel)
    chunk_scan_kernel[(-(-value_dim // block_v) * num_heads, len(rows.sequences_N4))](
        q_TGK, k_TGK, v_THV, rows.sequences_N4, systems.view(scores.dtype), scores, coefficients, decays, state_PHKV,
        out_THV, q_TGK.stride(0), k_TGK.stride(0), v_THV.stride(0), out_THV.stride(0), state_PHKV.stride(0),
        VALUE_DIM=value_dim, BLOCK_V=block_v, **sizes, num_warps=4, num_stages=SCAN_STAGES, **flags,
    )  # fmt: skip


def scan_values(num_heads: int, value_dim: int, dtype: torch.dtype, by_channel: bool) -> int:
    """Return the columns of a state per program, from the layer alone, so that batches change no bit.

    If one sequence needs more than a wave of programs, each takes twice as many columns.
    """
    is_narrow = by_channel or dtype == torch.float32 or num_heads * -(-value_dim // VALUES_PER_PROGRAM) <= WAVE_PROGRAMS
    return min(VALUES_PER_PROGRAM * (1 if is_narrow else 2), max(16, next_power_of_two(value_dim)))


delta_chunks = operation(
    reference=delta_chunks_reference,
    triton=delta_chunks_triton,
    place=lambda inputs, rows, state_PHKV, out_THV, scratch=None: state_PHKV,
)


@jit
def dot_exact(b_x, b_y):
    """Return x @ y of inputs as they are: products of 16-bit numbers are exact, those of float32 nearly."""
    if b_x.dtype == tl.float32:
        return tl.dot(b_x, b_y, input_precision="tf32x3")
    else:
        return tl.dot(b_x, b_y)


@jit
def halves(b_x, TYPE: constexpr):
    """Return float32 numbers as a sum of two of an input's type: 16 bits of their mantissa or more."""
    b_high = b_x.to(TYPE)
    return b_high, (b_x - b_high.to(tl.float32)).to(TYPE)


@jit
def dot_wide(b_x, b_y):
    """Return x @ y of inputs x and float32 y."""
    if b_x.dtype == tl.float32:
        return tl.dot(b_x, b_y, input_precision="tf32x3")
    else:
        b_high, b_low = halves(b_y, b_x.dtype)
        return tl.dot(b_x, b_high, tl.dot(b_x, b_low))


@jit
def dot_wider(b_x_high, b_x_low, b_y):
    """Return x @ y of float32 x in halves and float32 y."""
    if b_x_high.dtype == tl.float32:
        return tl.dot(b_x_high, b_y, input_precision="tf32x3")
    else:
        b_high, b_low = halves(b_y, b_x_high.dtype)
        return tl.dot(b_x_high, b_high, tl.dot(b_x_high, b_low, tl.dot(b_x_low, b_high)))


@jit
def chunk_systems_kernel(
    p_q, p_k, p_a, p_b, p_log_rate, p_bias, p_chunks, p_systems, p_scores, p_coefficients, p_decays,
    q_stride, k_stride, a_stride, b_stride, scale,
    NUM_HEADS: constexpr, GROUP: constexpr, KEY_DIM: constexpr, BY_CHANNEL: constexpr, CHUNK: constexpr,
    NUM_COEFFICIENTS: constexpr, BLOCK_K: constexpr, EPS: constexpr, BLOCK: constexpr, MEMBERS: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """Write the system of a chunk, its scores, and the coefficients of its rows.

    Coefficients are, by row, those of the key that reads, of the query, of the key that writes, and in the last plane
    the decay of the whole chunk. With gates by channel, decays are left out of them: their sums are stored instead.
    """
    release_then_wait(PDL)
    p_chunk = p_chunks + tl.program_id(0) * 4
    size = tl.load(p_chunk + 2)
    if size > 0:
        first = tl.load(p_chunk + 1)
        i_tile = chunk_slot(tl.load(p_chunk), first, CHUNK) * NUM_HEADS
        o_c = tl.arange(0, CHUNK)
        o_k = tl.arange(0, BLOCK_K)
        o_row = first.to(tl.int64) + o_c
        m_c = o_c < size
        m_tile = m_c[:, None] & (o_k < KEY_DIM)[None, :]
        first_head = tl.program_id(1) * MEMBERS
        o_key = (first_head // GROUP * KEY_DIM + o_k)[None, :]
        p_keys = p_k + o_key
        p_queries = p_q + o_key
        b_k = tl.load(p_keys + o_row[:, None] * k_stride, mask=m_tile, other=0.0)
        b_q = tl.load(p_queries + o_row[:, None] * q_stride, mask=m_tile, other=0.0)
        b_k_scale = row_scales(b_k, EPS)
        b_q_scale = row_scales(b_q, EPS) * scale
        o_i, o_j = o_c[:, None], o_c[None, :]
        if not BY_CHANNEL:  # value heads of a key head share products
            b_k_rows = tl.trans(b_k)
            b_pairs = dot_exact(b_k, b_k_rows) * (b_k_scale[:, None] * b_k_scale[None, :])
            b_scores = dot_exact(b_q, b_k_rows) * (b_q_scale[:, None] * b_k_scale[None, :])
        for i_member in range(MEMBERS):
            i_head = first_head + i_member
            b_beta = tl.where(m_c, write_strength(tl.load(p_b + o_row * b_stride + i_head, mask=m_c, other=0.0)), 0.0)
            b_rate = tl.exp(tl.load(p_log_rate + i_head))
            p_system = p_systems + (i_tile + i_head) * CHUNK * CHUNK
            p_score = p_scores + (i_tile + i_head) * CHUNK * CHUNK
            p_coefficient = p_coefficients + (i_tile + i_head) * NUM_COEFFICIENTS * CHUNK + o_c
            if BY_CHANNEL:
                o_gate = (i_head * KEY_DIM + o_k)[None, :]
                b_a = tl.load(p_a + o_row[:, None] * a_stride + o_gate, mask=m_tile, other=0.0)
                b_bias = tl.load(p_bias + o_gate, mask=(o_k < KEY_DIM)[None, :], other=0.0)
                b_sum = tl.cumsum(tl.where(m_tile, log_decay(b_a, b_bias, b_rate), 0.0), axis=0)
                p_sums = p_decays + (i_tile + i_head) * CHUNK * KEY_DIM
                tl.store(p_sums + o_c[:, None] * KEY_DIM + o_k[None, :], b_sum, mask=(o_k < KEY_DIM)[None, :])
                tl.store(p_coefficient, b_k_scale)
                tl.store(p_coefficient + CHUNK, b_q_scale)
                tl.debug_barrier()  # rows of the sums are read by other threads
                for start in range(0, CHUNK, BLOCK):
                    channel_block(
                        p_keys, p_queries, p_sums, p_b + i_head, p_system, p_score, k_stride, q_stride, b_stride,
                        scale, first, size, start, KEY_DIM, CHUNK, BLOCK_K, EPS, BLOCK,
                    )  # fmt: skip
            else:
                b_a = tl.load(p_a + o_row * a_stride + i_head, mask=m_c, other=0.0)
                b_sum = tl.cumsum(tl.where(m_c, log_decay(b_a, tl.load(p_bias + i_head), b_rate), 0.0), axis=0)
                last = tl.min(b_sum, axis=0)
                b_decay = tl.exp(tl.where(o_i >= o_j, b_sum[:, None] - b_sum[None, :], 0.0))
                b_system = b_pairs * b_beta[:, None] * b_decay
                m_lower = o_i // BLOCK >= o_j // BLOCK  # other blocks are never read
                tl.store(p_system + o_i * CHUNK + o_j, tl.where(o_i > o_j, b_system, 0.0), mask=m_lower)
                b_score = tl.where(o_i >= o_j, b_scores * b_decay, 0.0)
                tl.store(p_score + o_i * CHUNK + o_j, b_score.to(p_scores.dtype.element_ty))
                b_since = tl.exp(b_sum)
                tl.store(p_coefficient, b_k_scale * b_since)
                tl.store(p_coefficient + CHUNK, b_q_scale * b_since)
                tl.store(p_coefficient + 2 * CHUNK, b_k_scale * tl.exp(last - b_sum))
                tl.store(p_coefficient + 3 * CHUNK, tl.zeros([CHUNK], tl.float32) + tl.exp(last))


@jit
def row_scales(b_x, EPS: constexpr):
    """Return one over the length of each row."""
    b_wide = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(b_wide * b_wide, axis=1) + EPS)


@jit
def channel_block(
    p_keys, p_queries, p_sums, p_b, p_system, p_score, k_stride, q_stride, b_stride, scale, first, size, start,
    KEY_DIM: constexpr, CHUNK: constexpr, BLOCK_K: constexpr, EPS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Write BLOCK rows of a system and of scores whose decays differ by channel.

    Decays count from the block's first row. Both factors of an earlier row's decay are then at most 1. Rows of the block
    itself are compared one by one.
    """
    o_k = tl.arange(0, BLOCK_K)
    o_b = tl.arange(0, BLOCK)
    o_c = tl.arange(0, CHUNK)
    m_k = (o_k < KEY_DIM)[None, :]
    o_own = start + o_b
    o_row = first.to(tl.int64) + o_own
    m_own = (o_own < size)[:, None] & m_k
    b_k = tl.load(p_keys + o_row[:, None] * k_stride, mask=m_own, other=0.0).to(tl.float32)
    b_q = tl.load(p_queries + o_row[:, None] * q_stride, mask=m_own, other=0.0).to(tl.float32)
    b_beta = write_strength(tl.load(p_b + o_row * b_stride, mask=o_own < size, other=0.0))
    b_k = b_k * (row_scales(b_k, EPS) * tl.where(o_own < size, b_beta, 0.0))[:, None]
    b_q = b_q * (row_scales(b_q, EPS) * scale)[:, None]
    b_sum = tl.load(p_sums + o_own[:, None] * KEY_DIM + o_k[None, :], mask=m_k, other=0.0)
    b_start = tl.load(p_sums + start * KEY_DIM + o_k, mask=o_k < KEY_DIM, other=0.0)
    b_since = tl.exp(b_sum - b_start[None, :])
    m_earlier = (o_c < tl.minimum(start, size))[:, None] & m_k
    o_all = first.to(tl.int64) + o_c
    b_earlier = tl.load(p_keys + o_all[:, None] * k_stride, mask=m_earlier, other=0.0).to(tl.float32)
    b_sums = tl.load(p_sums + o_c[:, None] * KEY_DIM + o_k[None, :], mask=m_earlier, other=0.0)
    b_until = tl.exp(tl.where(m_earlier, b_start[None, :] - b_sums, 0.0))
    b_earlier = tl.trans(b_earlier * row_scales(b_earlier, EPS)[:, None] * b_until)
    b_system = tl.dot(b_k * b_since, b_earlier, input_precision="tf32x3")
    b_score = tl.dot(b_q * b_since, b_earlier, input_precision="tf32x3")
    for i in range(BLOCK):
        i_row = first.to(tl.int64) + start + i
        m_row = m_k & (start + i < size)
        b_key = tl.load(p_keys + i_row * k_stride, mask=m_row, other=0.0).to(tl.float32)
        b_key_sum = tl.load(p_sums + (start + i) * KEY_DIM + o_k[None, :], mask=m_k, other=0.0)
        b_key = b_key * row_scales(b_key, EPS)[:, None] * tl.exp(tl.minimum(b_sum - b_key_sum, 0.0))
        m_column = (o_c == start + i)[None, :]
        b_system = tl.where(m_column & (o_b > i)[:, None], tl.sum(b_k * b_key, axis=1)[:, None], b_system)
        b_score = tl.where(m_column & (o_b >= i)[:, None], tl.sum(b_q * b_key, axis=1)[:, None], b_score)
    o_tile = o_own[:, None] * CHUNK + o_c[None, :]
    tl.store(p_system + o_tile, b_system)
    tl.store(p_score + o_tile, b_score.to(p_score.dtype.element_ty))


@jit
def chunk_inverse_kernel(
    p_b, p_chunks, p_systems, p_inverses, b_stride,
    NUM_HEADS: constexpr, CHUNK: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    """Replace a system A by (I + A)^-1 with its columns times beta, in one plane of float32 or in halves.

    One warp a system: no step waits for another warp. Diagonal blocks are solved column by column, which stays exact for
    equal keys; powers of A would grow beyond float32.
    """
    release_then_wait(PDL)
    p_chunk = p_chunks + tl.program_id(0) * 4
    size = tl.load(p_chunk + 2)
    if size > 0:
        i_head = tl.program_id(1)
        first = tl.load(p_chunk + 1)
        i_tile = chunk_slot(tl.load(p_chunk), first, CHUNK) * NUM_HEADS + i_head
        PLANES: constexpr = 1 if p_inverses.dtype.element_ty == tl.float32 else 2
        p_inverse = p_inverses + i_tile * PLANES * CHUNK * CHUNK
        p_system = p_systems + i_tile * CHUNK * CHUNK
        invert_system(p_system, p_inverse, p_b + i_head, b_stride, first, size, CHUNK, BLOCK)


@jit
def invert_system(p_system, p_inverse, p_b, b_stride, first, size, CHUNK: constexpr, BLOCK: constexpr):
    """Store the inverse of a system, which it overwrites."""
    NUM_BLOCKS: constexpr = CHUNK // BLOCK
    tl.static_assert(NUM_BLOCKS == 4)
    o_n, o_i, o_j = tl.arange(0, NUM_BLOCKS), tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    o_diagonal = o_n[:, None, None] * (BLOCK * CHUNK + BLOCK) + o_i[None, :, None] * CHUNK + o_j[None, None, :]
    b_a = tl.load(p_system + o_diagonal)
    b_x = tl.where(o_i[None, :, None] == o_j[None, None, :], 1.0, 0.0) + tl.zeros_like(b_a)
    for j in range(BLOCK - 1):
        b_column = tl.sum(tl.where(o_j[None, None, :] == j, b_a, 0.0), axis=2)
        b_row = tl.sum(tl.where(o_i[None, :, None] == j, b_x, 0.0), axis=1)
        b_x = b_x - b_column[:, :, None] * b_row[:, None, :]
    b_00, b_11, b_22, b_33 = block_of(b_x, 0), block_of(b_x, 1), block_of(b_x, 2), block_of(b_x, 3)
    o_block = o_i[:, None] * CHUNK + o_j[None, :]
    b_a_10 = tl.load(p_system + BLOCK * CHUNK + o_block)
    b_a_20 = tl.load(p_system + 2 * BLOCK * CHUNK + o_block)
    b_a_21 = tl.load(p_system + 2 * BLOCK * CHUNK + BLOCK + o_block)
    b_a_30 = tl.load(p_system + 3 * BLOCK * CHUNK + o_block)
    b_a_31 = tl.load(p_system + 3 * BLOCK * CHUNK + BLOCK + o_block)
    b_a_32 = tl.load(p_system + 3 * BLOCK * CHUNK + 2 * BLOCK + o_block)
    b_10 = -dot_small(b_11, dot_small(b_a_10, b_00))
    b_21 = -dot_small(b_22, dot_small(b_a_21, b_11))
    b_32 = -dot_small(b_33, dot_small(b_a_32, b_22))
    b_20 = -dot_small(b_22, dot_small(b_a_20, b_00) + dot_small(b_a_21, b_10))
    b_31 = -dot_small(b_33, dot_small(b_a_31, b_11) + dot_small(b_a_32, b_21))
    b_30 = -dot_small(b_33, dot_small(b_a_30, b_00) + dot_small(b_a_31, b_10) + dot_small(b_a_32, b_20))
    tl.debug_barrier()  # every thread has read the system, which the inverse overwrites
    b_0 = column_betas(p_b, b_stride, first, size, 0, BLOCK)
    b_1 = column_betas(p_b, b_stride, first, size, 1, BLOCK)
    b_2 = column_betas(p_b, b_stride, first, size, 2, BLOCK)
    b_3 = column_betas(p_b, b_stride, first, size, 3, BLOCK)
    b_zeros = tl.zeros([BLOCK, BLOCK], tl.float32)
    store_block(p_inverse, b_00 * b_0, 0, 0, CHUNK, BLOCK)
    store_block(p_inverse, b_zeros, 0, 1, CHUNK, BLOCK)
    store_block(p_inverse, b_zeros, 0, 2, CHUNK, BLOCK)
    store_block(p_inverse, b_zeros, 0, 3, CHUNK, BLOCK)
    store_block(p_inverse, b_10 * b_0, 1, 0, CHUNK, BLOCK)
    store_block(p_inverse, b_11 * b_1, 1, 1, CHUNK, BLOCK)
    store_block(p_inverse, b_zeros, 1, 2, CHUNK, BLOCK)
    store_block(p_inverse, b_zeros, 1, 3, CHUNK, BLOCK)
    store_block(p_inverse, b_20 * b_0, 2, 0, CHUNK, BLOCK)
    store_block(p_inverse, b_21 * b_1, 2, 1, CHUNK, BLOCK)
    store_block(p_inverse, b_22 * b_2, 2, 2, CHUNK, BLOCK)
    store_block(p_inverse, b_zeros, 2, 3, CHUNK, BLOCK)
    store_block(p_inverse, b_30 * b_0, 3, 0, CHUNK, BLOCK)
    store_block(p_inverse, b_31 * b_1, 3, 1, CHUNK, BLOCK)
    store_block(p_inverse, b_32 * b_2, 3, 2, CHUNK, BLOCK)
    store_block(p_inverse, b_33 * b_3, 3, 3, CHUNK, BLOCK)


@jit
def block_of(b_x, NUMBER: constexpr):
    """Return one diagonal block."""
    o_n = tl.arange(0, b_x.shape[0])[:, None, None]
    return tl.sum(tl.where(o_n == NUMBER, b_x, 0.0), axis=0)


@jit
def dot_small(b_x, b_y):
    return tl.dot(b_x, b_y, input_precision="tf32x3")


@jit
def column_betas(p_b, b_stride, first, size, NUMBER: constexpr, BLOCK: constexpr):
    """Return beta of the rows of a block as columns; zero after the chunk's end."""
    o_c = NUMBER * BLOCK + tl.arange(0, BLOCK)
    b_b = tl.load(p_b + (first.to(tl.int64) + o_c) * b_stride, mask=o_c < size, other=0.0)
    return tl.where(o_c < size, write_strength(b_b), 0.0)[None, :]


@jit
def store_block(p_inverse, b_x, ROW: constexpr, COLUMN: constexpr, CHUNK: constexpr, BLOCK: constexpr):
    o_b = tl.arange(0, BLOCK)
    p_block = p_inverse + (ROW * BLOCK + o_b)[:, None] * CHUNK + (COLUMN * BLOCK + o_b)[None, :]
    if p_inverse.dtype.element_ty == tl.float32:
        tl.store(p_block, b_x)
    else:
        b_high, b_low = halves(b_x, p_inverse.dtype.element_ty)
        tl.store(p_block, b_high)
        tl.store(p_block + CHUNK * CHUNK, b_low)


@jit
def chunk_scan_kernel(
    p_q, p_k, p_v, p_sequences, p_inverses, p_scores, p_coefficients, p_decays, p_state, p_out,
    q_stride, k_stride, v_stride, out_stride, state_stride,
    NUM_HEADS: constexpr, GROUP: constexpr, KEY_DIM: constexpr, VALUE_DIM: constexpr, BY_CHANNEL: constexpr,
    CHUNK: constexpr, NUM_COEFFICIENTS: constexpr, BLOCK_K: constexpr, BLOCK_V: constexpr, PDL: constexpr,
):  # fmt: skip
    """Carry some columns of a state through the chunks of a sequence, and write the outputs of their rows."""
    release_then_wait(PDL)
    NUM_BLOCKS: constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    PLANES: constexpr = 1 if p_inverses.dtype.element_ty == tl.float32 else 2
    TYPE: constexpr = p_v.dtype.element_ty
    i_head = tl.program_id(0) // NUM_BLOCKS
    i_seq = tl.program_id(1)
    first = tl.load(p_sequences + i_seq * 4)
    num_rows = tl.load(p_sequences + i_seq * 4 + 1)
    if num_rows > 1:
        i_place = tl.load(p_sequences + i_seq * 4 + 2).to(tl.int64)
        has_state = tl.load(p_sequences + i_seq * 4 + 3) > 0
        o_c = tl.arange(0, CHUNK)
        o_k = tl.arange(0, BLOCK_K)
        o_v = tl.program_id(0) % NUM_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
        m_k = o_k < KEY_DIM
        m_v = (o_v < VALUE_DIM)[None, :]
        m_state = m_k[:, None] & m_v
        p_tile = p_state + i_place * state_stride + i_head * KEY_DIM * VALUE_DIM
        p_tile = p_tile + o_k[:, None] * VALUE_DIM + o_v[None, :]
        b_state = tl.load(p_tile, mask=m_state & has_state, other=0.0)
        p_keys = p_k + i_head // GROUP * KEY_DIM + o_k[None, :]
        p_queries = p_q + i_head // GROUP * KEY_DIM + o_k[None, :]
        p_values = p_v + i_head * VALUE_DIM + o_v[None, :]
        p_outs = p_out + i_head * VALUE_DIM + o_v[None, :]
        o_square = o_c[:, None] * CHUNK + o_c[None, :]
        for start in range(0, num_rows, CHUNK):
            i_tile = chunk_slot(i_seq, first + start, CHUNK) * NUM_HEADS + i_head
            o_row = (first + start).to(tl.int64) + o_c[:, None]
            m_c = (start + o_c < num_rows)[:, None]
            b_k = tl.load(p_keys + o_row * k_stride, mask=m_c & m_k[None, :], other=0.0)
            b_q = tl.load(p_queries + o_row * q_stride, mask=m_c & m_k[None, :], other=0.0)
            b_v = tl.load(p_values + o_row * v_stride, mask=m_c & m_v, other=0.0)
            p_inverse = p_inverses + i_tile * PLANES * CHUNK * CHUNK + o_square
            b_inverse = tl.load(p_inverse)
            b_inverse_low = tl.load(p_inverse + (PLANES - 1) * CHUNK * CHUNK)
            b_score = tl.load(p_scores + i_tile * CHUNK * CHUNK + o_square)
            p_coefficient = p_coefficients + i_tile * NUM_COEFFICIENTS * CHUNK
            b_k_scale = tl.load(p_coefficient + o_c)[:, None]
            b_q_scale = tl.load(p_coefficient + CHUNK + o_c)[:, None]
            p_rows, m_rows = p_outs + o_row * out_stride, m_c & m_v
            if BY_CHANNEL:
                p_sums = p_decays + i_tile * CHUNK * KEY_DIM + o_k
                b_sum = tl.load(p_sums[None, :] + o_c[:, None] * KEY_DIM, mask=m_k[None, :], other=0.0)
                b_last = tl.load(p_sums + (CHUNK - 1) * KEY_DIM, mask=m_k, other=0.0)
                b_decay = tl.exp(b_sum)
                b_high, b_low = halves(b_k.to(tl.float32) * (b_k_scale * b_decay), TYPE)
                b_read = dot_wider(b_high, b_low, b_state)
                b_high, b_low = halves(b_q.to(tl.float32) * (b_q_scale * b_decay), TYPE)
                b_out = dot_wider(b_high, b_low, b_state)
                b_write = dot_wider(b_inverse, b_inverse_low, b_v.to(tl.float32) - b_read)
                store_outputs(p_rows, b_out, b_score, b_write, m_rows)
                b_high, b_low = halves(
                    tl.trans(b_k.to(tl.float32) * (b_k_scale * tl.exp(b_last[None, :] - b_sum))), TYPE
                )
                b_state = b_state * tl.exp(b_last)[:, None] + dot_wider(b_high, b_low, b_write)
            else:
                b_read = dot_wide(b_k, b_state) * b_k_scale
                b_out = dot_wide(b_q, b_state) * b_q_scale
                b_write = dot_wider(b_inverse, b_inverse_low, b_v.to(tl.float32) - b_read)
                store_outputs(p_rows, b_out, b_score, b_write, m_rows)
                b_write = b_write * tl.load(p_coefficient + 2 * CHUNK + o_c)[:, None]
                b_state = b_state * tl.load(p_coefficient + 3 * CHUNK) + dot_wide(tl.trans(b_k), b_write)
        tl.store(p_tile, b_state, mask=m_state)


@jit
def store_outputs(p_rows, b_out, b_score, b_write, m_rows):
    """Add what rows of the chunk wrote, and store outputs."""
    b_out += dot_exact(b_score, b_write.to(b_score.dtype))
    tl.store(p_rows, b_out.to(p_rows.dtype.element_ty), mask=m_rows)

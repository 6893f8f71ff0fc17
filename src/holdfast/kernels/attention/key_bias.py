"""KeyBias: the contribution of a key projection's bias to scores of keys stored without it: tables, plain torch, kernel functions.

K key/value heads, D head dim, C = D / 2 pairs of coordinates, P of them that rope turns, B blocks of tokens, N tokens of a block, F
numbers of a table for tensor cores, L positions; in kernels G columns or M rows of queries, C padded to a power of two

A key is R_p (W x + b), with R_p the RoPE rotation of its position p. If b is much longer than W x, a code of few bits holds
little but b. So pages hold R_p W x, and q . R_p b is added to a score before masks, softmax and merges. For a pair
(q1, q2) of a query and (b1, b2) of the bias

    q . R_p b = even cos(w p) + odd sin(w p),   even = q1 b1 + q2 b2,   odd = q2 b1 - q1 b2

so the bias becomes two numbers per pair of each query. The other factor is the same for all heads and layers: one small table.
Tokens of a block count from its middle, p = middle + d. Even and odd are rotated to the middle once per block, which leaves
cos(w d) and sin(w d). The table holds cos - 1: pairs with a large bias mostly rotate slowly, so half precision rounds only what
changes from token to token. The rest is summed in float32.

Keys lie in pair order (`in_pair_order` of write_kv.py), and bias and tables too. If RoPE leaves some elements alone, their pairs
have frequency 0 and magnitude 1: they add the same number at every position, which sinks and caps see.

Without RoPE the bias adds q . b to all scores of a row. A softmax ignores that, so such a model needs no KeyBias. With
QK-norm keys are no sum of two parts, and KeyBias does not apply.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.geometry import BLOCK_TOKENS, key_turn_dtype, pair_columns
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl

NEAR_SCALE = 64.0
"""Factor of the table and divisor of even and odd: scores up to 4 million then fit half precision."""
FRAGMENT = 16
"""Rows and columns of a tensor-core operand."""


class KeyTurns(NamedTuple):
    """RoPE rotations of all positions, for all layers with the same RoPE."""

    cos_BC: Tensor
    """float32 cos at the middle of each block, times the magnitude of the RoPE table."""
    sin_BC: Tensor
    near_2NC: Tensor
    """cos - 1 and sin of the angle from the middle to each token, times NEAR_SCALE: float16, or float32 for float32 models."""
    fragments_F: Tensor | None
    """`near_2NC` in the order of `near_fragments`; None for float32 models, which no kernel runs."""

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self if table is not None)


class KeyBias(NamedTuple):
    """Bias of one layer's key projection."""

    bias_KD: Tensor
    """float32, in pair order, before any rotation."""
    turns: KeyTurns

    @property
    def num_bytes(self) -> int:
        return self.bias_KD.nbytes


def make_key_turns(
    inverse_frequency_P: Tensor,
    magnitude: float,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device | str,
    num_pairs: int | None = None,
) -> KeyTurns:
    """Make tables for positions below `max_model_len` of a model that computes in `dtype`; angles are float64.

    `num_pairs`: all pairs of a head, if RoPE turns only the first P of them.
    """
    num_same = 0 if num_pairs is None else num_pairs - len(inverse_frequency_P)
    frequency_C = torch.nn.functional.pad(inverse_frequency_P.double().cpu(), (0, num_same))
    magnitude_C = torch.ones_like(frequency_C)
    magnitude_C[: len(inverse_frequency_P)] = magnitude
    num_blocks, middle = -(-max_model_len // BLOCK_TOKENS), (BLOCK_TOKENS - 1) / 2
    angle_BC = torch.outer(torch.arange(num_blocks, dtype=torch.float64) * BLOCK_TOKENS + middle, frequency_C)
    near_NC = torch.outer(torch.arange(BLOCK_TOKENS, dtype=torch.float64) - middle, frequency_C)
    # cos - 1 is -2 sin^2 of half the angle, without cancellation.
    near_2NC = torch.stack((-2 * (near_NC / 2).sin().square(), near_NC.sin())) * NEAR_SCALE
    near_2NC = near_2NC.to(getattr(torch, key_turn_dtype(str(dtype).removeprefix("torch."))))
    return KeyTurns(
        (angle_BC.cos() * magnitude_C).float().to(device),
        (angle_BC.sin() * magnitude_C).float().to(device),
        near_2NC.to(device),
        None if near_2NC.dtype == torch.float32 else _fragments(near_2NC).to(device),
    )


def _fragments(near_2NC: Tensor) -> Tensor:
    """Order pieces of 16 x 16 by the lanes of a warp: a lane's 8 numbers are its part of an instruction."""
    num_pairs = near_2NC.shape[-1]
    padded_2NC = torch.nn.functional.pad(near_2NC, (0, pair_columns(2 * num_pairs) - num_pairs))
    rows, columns = padded_2NC.unflatten(2, (-1, 2, 4, 2)), (-1, 2, FRAGMENT // 2)
    pieces = rows.unflatten(1, columns)  # of 2 tables: piece, half and row; piece, half, lane and number
    return pieces.permute(0, 1, 4, 3, 6, 5, 2, 7).flatten()


def key_bias_rows(key_bias: KeyBias, positions_L: Tensor) -> Tensor:
    """Return the bias of the keys at these positions, float32 [K, L, D], in pair order."""
    cos_LC, sin_LC = _turns_at(key_bias.turns, positions_L)
    first_K1C, second_K1C = key_bias.bias_KD.unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((first_K1C * cos_LC - second_K1C * sin_LC, second_K1C * cos_LC + first_K1C * sin_LC), dim=-1)


def _turns_at(turns: KeyTurns, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions, [L, C] each, from those of the block and of the token, as kernels do."""
    block_L, token_L = positions_L // BLOCK_TOKENS, positions_L % BLOCK_TOKENS
    near_cos_LC, near_sin_LC = (turns.near_2NC.float() / NEAR_SCALE)[:, token_L].unbind()
    cos_LC, sin_LC = turns.cos_BC[block_L], turns.sin_BC[block_L]
    return (
        cos_LC + (cos_LC * near_cos_LC - sin_LC * near_sin_LC),
        sin_LC + (sin_LC * near_cos_LC + cos_LC * near_sin_LC),
    )


SCALE = kernel_constant(NEAR_SCALE)
MOST = kernel_constant(32000.0)
"""Limit of even and odd: after rotation and magnitude they still fit half precision."""


@jit
def query_waves(
    p_q, o_q, m_q, p_bias, p_rotation, scale_log2, rotation_scale,
    QUERY_AXIS: constexpr, IS_ROTATED: constexpr, HEAD_DIM: constexpr, PAIR_COLUMNS: constexpr,
):  # fmt: skip
    """Return even and odd of the queries at `o_q`, in float32: [C, G] each, or [M, C] if QUERY_AXIS is 0."""
    PAIRS: constexpr = HEAD_DIM // 2
    PAIR_AXIS: constexpr = 1 - QUERY_AXIS
    o_c = tl.expand_dims(tl.arange(0, PAIR_COLUMNS), QUERY_AXIS)
    m_c = o_c < PAIRS
    p_row = p_q + tl.expand_dims(o_q, PAIR_AXIS)
    m_row = tl.expand_dims(m_q, PAIR_AXIS)
    if IS_ROTATED:
        # Queries come rotated like the keys. The same rotation undoes it exactly: one more product per tile, and no
        # scratch for the original queries.
        o_d = tl.arange(0, 2 * PAIR_COLUMNS)
        o_x, o_table = tl.expand_dims(o_d, QUERY_AXIS), tl.expand_dims(o_d, PAIR_AXIS)
        b_x = tl.load(p_row + o_x, mask=m_row & (o_x < HEAD_DIM), other=0.0).to(tl.float32)
        b_x = tl.minimum(tl.maximum(b_x, -65504.0), 65504.0).to(tl.float16)
        p_table = p_rotation + o_c * HEAD_DIM + o_table
        m_table = m_c & (o_table < HEAD_DIM)
        b_upper = tl.load(p_table, mask=m_table, other=0.0).to(tl.float16)
        b_lower = tl.load(p_table + PAIRS * HEAD_DIM, mask=m_table, other=0.0).to(tl.float16)
        b_first = tl.dot(b_upper, b_x) if QUERY_AXIS == 1 else tl.dot(b_x, b_upper)
        b_second = tl.dot(b_lower, b_x) if QUERY_AXIS == 1 else tl.dot(b_x, b_lower)
        factor = scale_log2 * rotation_scale / SCALE
    else:
        b_first = tl.load(p_row + o_c, mask=m_row & m_c, other=0.0).to(tl.float32)
        b_second = tl.load(p_row + PAIRS + o_c, mask=m_row & m_c, other=0.0).to(tl.float32)
        factor = scale_log2 / SCALE
    b_bias_first = tl.load(p_bias + o_c, mask=m_c, other=0.0) * factor
    b_bias_second = tl.load(p_bias + PAIRS + o_c, mask=m_c, other=0.0) * factor
    b_even = b_first * b_bias_first + b_second * b_bias_second
    b_odd = b_second * b_bias_first - b_first * b_bias_second
    return tl.minimum(tl.maximum(b_even, -MOST), MOST), tl.minimum(tl.maximum(b_odd, -MOST), MOST)


@jit
def turned_waves(b_even, b_odd, p_cos, p_sin, i_block, QUERY_AXIS: constexpr, HEAD_DIM: constexpr):
    """Return even and odd rotated to a block's middle, in half precision; and the sum of even, common to its tokens."""
    PAIRS: constexpr = HEAD_DIM // 2
    PAIR_AXIS: constexpr = 1 - QUERY_AXIS
    o_c = tl.arange(0, b_even.shape[PAIR_AXIS])
    o_turn = i_block * PAIRS + o_c
    b_cos = tl.expand_dims(tl.load(p_cos + o_turn, mask=o_c < PAIRS, other=0.0), QUERY_AXIS)
    b_sin = tl.expand_dims(tl.load(p_sin + o_turn, mask=o_c < PAIRS, other=0.0), QUERY_AXIS)
    b_turned_even = b_even * b_cos + b_odd * b_sin
    b_turned_odd = b_odd * b_cos - b_even * b_sin
    b_all = tl.expand_dims(tl.sum(b_turned_even, axis=PAIR_AXIS), PAIR_AXIS) * SCALE
    return b_turned_even.to(tl.float16), b_turned_odd.to(tl.float16), b_all


@jit
def near_fragments(p_near, BLOCK_N: constexpr, PAIR_COLUMNS: constexpr):
    """Load the table as [N, C], in the order of a warp's lanes for a product."""
    b_near = tl.load(p_near + tl.arange(0, BLOCK_N * PAIR_COLUMNS))
    b_near = tl.reshape(b_near, (BLOCK_N // 16, PAIR_COLUMNS // 16, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(b_near, (0, 5, 2, 1, 4, 3, 6)), (BLOCK_N, PAIR_COLUMNS))

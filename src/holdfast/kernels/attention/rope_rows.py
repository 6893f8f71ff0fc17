"""RoPE tables of a step's rows: cos and sin from the positions of its tokens, computed once per step for all layers.

T rows, S sets of rows, P pairs of elements that RoPE rotates

A set has the frequencies of one rotation, a magnitude, and a ratio: row t has position p - p % ratio, with p the position of
token t. Tokens have ratio 1, compressed entries a larger one (DeepSeek-V4).

An angle is the product of position and frequency rounded to float32, as in transformers; at a million tokens the exact product
is 0.03 away. Its cos and sin are computed in float64, reduced by multiples of pi / 2 in two parts, rounded to float32,
multiplied by the magnitude and rounded to the type of the rows. float64 is cheap for so few angles. libdevice's sin and cos
would slow a step of one row by several us.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.operation import operation
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, tl

THREADS_PER_WARP = 32
MOST_WARPS = 4


class RopeRows(NamedTuple):
    """Sets of rows at fixed addresses, and their frequencies."""

    frequency_SP: Tensor
    """float32: inverse frequencies."""
    magnitudes: tuple[float, ...]
    ratios: tuple[int, ...]
    cos_STP: Tensor
    sin_STP: Tensor

    def rotary(self, number: int) -> Rotary:
        return Rotary(self.cos_STP[number], self.sin_STP[number])


def fill_rope_rows_reference(positions_T: Tensor, rows: RopeRows) -> None:
    """Fill rows [0, T) of every set from the step's positions; later rows stay. Negative positions give arbitrary finite rows."""
    num_rows = len(positions_T)
    for number, (magnitude, ratio) in enumerate(zip(rows.magnitudes, rows.ratios, strict=True)):
        start_T = positions_T if ratio == 1 else positions_T // ratio * ratio
        angle_TP = torch.outer(start_T.float(), rows.frequency_SP[number])
        rows.cos_STP[number, :num_rows] = angle_TP.cos().mul_(magnitude)
        rows.sin_STP[number, :num_rows] = angle_TP.sin_().mul_(magnitude)


def fill_rope_rows_triton(positions_T: Tensor, rows: RopeRows) -> None:
    """Launch one program per row.

    It launches without PDL: all kernels of the step rely on its rows, even after kernels that do not wait.
    """
    num_rows, num_pairs = len(positions_T), rows.cos_STP.shape[2]
    assert positions_T.is_contiguous(), f"{positions_T.stride()=}: positions must lie side by side"
    assert rows.frequency_SP.is_contiguous(), f"{rows.frequency_SP.stride()=}: frequencies must lie side by side"
    assert rows.frequency_SP.dtype == torch.float32, f"{rows.frequency_SP.dtype=}: not float32"
    for table_STP in (rows.cos_STP, rows.sin_STP):
        assert table_STP.is_contiguous(), f"{table_STP.stride()=}: rows must lie side by side"
        assert num_rows <= table_STP.shape[1], f"{num_rows=} for {table_STP.shape=}"
    if num_rows == 0:
        return
    block = next_power_of_two(num_pairs)
    _rope_rows_kernel[(num_rows,)](
        positions_T, rows.frequency_SP, rows.cos_STP, rows.sin_STP, rows.cos_STP.stride(0),
        MAGNITUDES=rows.magnitudes, RATIOS=rows.ratios, NUM_SETS=len(rows.ratios), NUM_PAIRS=num_pairs, BLOCK=block,
        num_warps=min(MOST_WARPS, max(1, block // THREADS_PER_WARP)),
    )  # fmt: skip


fill_rope_rows = operation(reference=fill_rope_rows_reference, triton=fill_rope_rows_triton)


@jit
def _cos_sin(b_angle):
    """Return float64 cos and sin, exact to 1e-11 for angles below 2**21 and finite for all others."""
    QUARTERS_PER_RADIAN: constexpr = 0.6366197723675814
    # pi / 2 to 32 bits, whose product with fewer than 2**21 quarter turns is exact, and the remainder.
    HALF_PI_HIGH: constexpr = 1.5707963267341256
    HALF_PI_LOW: constexpr = 6.077100506506192e-11
    b_quarters = tl.floor(b_angle * QUARTERS_PER_RADIAN + 0.5)
    b_rest = b_angle - b_quarters * HALF_PI_HIGH - b_quarters * HALF_PI_LOW
    b_rest = tl.minimum(tl.maximum(b_rest, -1.0), 1.0)
    b_square = b_rest * b_rest
    b_sin = b_square * (-1 / 39916800) + 1 / 362880
    b_sin = b_sin * b_square - 1 / 5040
    b_sin = b_sin * b_square + 1 / 120
    b_sin = b_sin * b_square - 1 / 6
    b_sin = b_sin * b_square * b_rest + b_rest
    b_cos = b_square * (1 / 479001600) - 1 / 3628800
    b_cos = b_cos * b_square + 1 / 40320
    b_cos = b_cos * b_square - 1 / 720
    b_cos = b_cos * b_square + 1 / 24
    b_cos = b_cos * b_square - 0.5
    b_cos = b_cos * b_square + 1.0
    b_turn = b_quarters.to(tl.int64) & 3
    m_odd = (b_turn & 1) == 1
    b_first, b_second = tl.where(m_odd, b_sin, b_cos), tl.where(m_odd, b_cos, b_sin)
    b_first = tl.where((b_turn == 1) | (b_turn == 2), -b_first, b_first)
    b_second = tl.where(b_turn >= 2, -b_second, b_second)
    return b_first, b_second


@jit
def _rope_rows_kernel(
    p_positions, p_frequency, p_cosine, p_sine, set_stride,
    MAGNITUDES: constexpr, RATIOS: constexpr, NUM_SETS: constexpr, NUM_PAIRS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_position = tl.load(p_positions + i_row)
    o_p = tl.arange(0, BLOCK)
    m_p = o_p < NUM_PAIRS
    for i in tl.static_range(NUM_SETS):
        i_start = i_position // RATIOS[i] * RATIOS[i]
        b_frequency = tl.load(p_frequency + i * NUM_PAIRS + o_p, mask=m_p, other=0.0)
        # Round the product to float32 first.
        b_angle = (i_start.to(tl.float32) * b_frequency).to(tl.float64)
        b_cos, b_sin = _cos_sin(b_angle)
        b_cos, b_sin = b_cos.to(tl.float32) * MAGNITUDES[i], b_sin.to(tl.float32) * MAGNITUDES[i]
        o_row = i * set_stride + i_row * NUM_PAIRS + o_p
        tl.store(p_cosine + o_row, b_cos.to(p_cosine.dtype.element_ty), mask=m_p)
        tl.store(p_sine + o_row, b_sin.to(p_sine.dtype.element_ty), mask=m_p)

"""cos and sin of any positions: by the formula that a table of the whole context had, and by the rows that a step fills."""

import torch

from holdfast.kernels.attention.rope_rows import RopeRows, fill_rope_rows
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.models.rope import rope_frequencies
from holdfast.models.spec import RopeSpec


def table_rows(
    rope: RopeSpec,
    head_dim: int,
    max_position: int,
    max_model_len: int,
    positions_T: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> Rotary:
    """Rows of the table: float32 products, and cos and sin of them by torch."""
    frequency_P, magnitude = rope_frequencies(rope, head_dim, max_position, max_model_len)
    angle_TP = torch.outer(positions_T.to(torch.float32), frequency_P)
    return Rotary(angle_TP.cos().mul_(magnitude).to(dtype), angle_TP.sin().mul_(magnitude).to(dtype))


def empty_rows(
    rope: RopeSpec,
    head_dim: int,
    max_position: int,
    max_model_len: int,
    num_rows: int,
    dtype: torch.dtype = torch.float32,
) -> RopeRows:
    """One set of rows, all NaN."""
    frequency_P, magnitude = rope_frequencies(rope, head_dim, max_position, max_model_len)
    cos_STP, sin_STP = (torch.full((1, num_rows, head_dim // 2), torch.nan, dtype=dtype) for _ in range(2))
    return RopeRows(frequency_P.unsqueeze(0), (magnitude,), (1,), cos_STP, sin_STP)


def step_rows(
    rope: RopeSpec,
    head_dim: int,
    max_position: int,
    max_model_len: int,
    positions_T: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> Rotary:
    """Rows as a step on a CPU has them."""
    rows = empty_rows(rope, head_dim, max_position, max_model_len, len(positions_T), dtype)
    fill_rope_rows(positions_T, rows)
    return rows.rotary(0)

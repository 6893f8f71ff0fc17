"""The newest token of every sequence, kept on the device by slot, so that a step can begin before the host has read the last.

R rows that were chosen from, T rows of a step, N slots

`keep_tokens` writes what was chosen. In the inputs of the next step `-1 - slot` stands for a token that the host does not know
yet, and `resolve_tokens` puts the token in its place before anything reads it. Both may be part of a CUDA graph.
"""

import torch
from torch import Tensor

from holdfast.kernels.triton_compat import can_run, constexpr, jit_counting, tl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

NO_SLOT = -1
"""In place of a slot: the row's token is kept nowhere."""
BLOCK = 256
"""Rows of a program."""


def keep_tokens(tokens_R: Tensor, slots_R: Tensor, last_N: Tensor) -> None:
    """last[slot] = token for each row with a slot, none twice; 0 for NO_TOKEN, so that whatever is kept can be looked up."""
    if can_run(last_N):
        keep_tokens_triton(tokens_R, slots_R, last_N)
    else:
        keep_tokens_reference(tokens_R, slots_R, last_N)


def keep_tokens_reference(tokens_R: Tensor, slots_R: Tensor, last_N: Tensor) -> None:
    """The same in plain torch."""
    is_kept_R = slots_R != NO_SLOT
    last_N[slots_R[is_kept_R]] = tokens_R[is_kept_R].clamp(min=0)


def keep_tokens_triton(tokens_R: Tensor, slots_R: Tensor, last_N: Tensor) -> None:
    """The same as a Triton kernel, a program a block of rows."""
    num_rows = tokens_R.shape[0]
    assert slots_R.shape == (num_rows,), f"{slots_R.shape=} must be a slot a row of {num_rows}"
    assert {tokens_R.dtype, slots_R.dtype, last_N.dtype} == {torch.int64}, "tokens and slots must be int64"
    assert tokens_R.is_contiguous(), f"{tokens_R.stride()=} is not dense"
    assert slots_R.is_contiguous(), f"{slots_R.stride()=} is not dense"
    if num_rows:
        _keep_kernel[(-(-num_rows // BLOCK),)](tokens_R, slots_R, last_N, num_rows, BLOCK=BLOCK, num_warps=1)


def resolve_tokens(ids_T: Tensor, last_N: Tensor) -> None:
    """ids[i] = last[slot] wherever it is -1 - slot."""
    if can_run(ids_T):
        resolve_tokens_triton(ids_T, last_N)
    else:
        resolve_tokens_reference(ids_T, last_N)


def resolve_tokens_reference(ids_T: Tensor, last_N: Tensor) -> None:
    """The same in plain torch."""
    ids_T.copy_(torch.where(ids_T < 0, last_N[(-1 - ids_T).clamp(min=0)], ids_T))


def resolve_tokens_triton(ids_T: Tensor, last_N: Tensor) -> None:
    """The same as a Triton kernel, a program a block of rows."""
    num_rows = ids_T.shape[0]
    assert {ids_T.dtype, last_N.dtype} == {torch.int64}, f"{ids_T.dtype=} and {last_N.dtype=} must be int64"
    assert ids_T.is_contiguous(), f"{ids_T.stride()=} is not dense"
    if num_rows:
        _resolve_kernel[(-(-num_rows // BLOCK),)](ids_T, last_N, num_rows, BLOCK=BLOCK, num_warps=1)


@jit_counting("num_rows")
def _keep_kernel(p_tokens, p_slots, p_last, num_rows, BLOCK: constexpr):
    o_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < num_rows
    b_slot = tl.load(p_slots + o_row, mask=m_row, other=-1)
    b_token = tl.load(p_tokens + o_row, mask=m_row, other=0)
    tl.store(p_last + b_slot, tl.maximum(b_token, 0), mask=b_slot >= 0)


@jit_counting("num_rows")
def _resolve_kernel(p_ids, p_last, num_rows, BLOCK: constexpr):
    o_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < num_rows
    b_id = tl.load(p_ids + o_row, mask=m_row, other=0)
    m_coming = b_id < 0
    b_token = tl.load(p_last + (-1 - b_id), mask=m_coming, other=0)
    tl.store(p_ids + o_row, b_token, mask=m_coming)

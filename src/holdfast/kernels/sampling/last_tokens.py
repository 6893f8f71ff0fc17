"""Newest token of every sequence, kept on the device by slot, so a step can start before the host reads it.

R sampled rows, T rows of a step, N slots

`keep_tokens` writes sampled tokens. The inputs of the next step hold `-1 - slot` for a token that the host has not read;
`resolve_tokens` replaces it. Both can be captured in a CUDA graph.
"""

import torch
from torch import Tensor

from holdfast.kernels.operation import operation
from holdfast.kernels.triton_compat import check_dense, constexpr, jit_counting, tl

NO_SLOT = -1
"""Slot of a row whose token is not kept."""
BLOCK = 256
"""Rows of a program."""


def keep_tokens_reference(tokens_R: Tensor, slots_R: Tensor, last_N: Tensor) -> None:
    """last[slot] = token for each row with a slot, none twice; 0 for NO_TOKEN, so that every kept id is valid."""
    is_kept_R = slots_R != NO_SLOT
    last_N[slots_R[is_kept_R]] = tokens_R[is_kept_R].clamp(min=0)


def keep_tokens_triton(tokens_R: Tensor, slots_R: Tensor, last_N: Tensor) -> None:
    num_rows = tokens_R.shape[0]
    assert slots_R.shape == (num_rows,), f"{slots_R.shape=} must be a slot a row of {num_rows}"
    assert {tokens_R.dtype, slots_R.dtype, last_N.dtype} == {torch.int64}, "tokens and slots must be int64"
    check_dense(tokens_R, slots_R)
    if num_rows:
        _keep_kernel[(-(-num_rows // BLOCK),)](tokens_R, slots_R, last_N, num_rows, BLOCK=BLOCK, num_warps=1)


keep_tokens = operation(reference=keep_tokens_reference, triton=keep_tokens_triton)


def resolve_tokens_reference(ids_T: Tensor, last_N: Tensor) -> None:
    """ids[i] = last[slot] for every id that is -1 - slot."""
    ids_T.copy_(torch.where(ids_T < 0, last_N[(-1 - ids_T).clamp(min=0)], ids_T))


def resolve_tokens_triton(ids_T: Tensor, last_N: Tensor) -> None:
    num_rows = ids_T.shape[0]
    assert {ids_T.dtype, last_N.dtype} == {torch.int64}, f"{ids_T.dtype=} and {last_N.dtype=} must be int64"
    check_dense(ids_T)
    if num_rows:
        _resolve_kernel[(-(-num_rows // BLOCK),)](ids_T, last_N, num_rows, BLOCK=BLOCK, num_warps=1)


resolve_tokens = operation(reference=resolve_tokens_reference, triton=resolve_tokens_triton)


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

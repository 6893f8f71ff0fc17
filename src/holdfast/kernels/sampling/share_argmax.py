"""Argmax over a vocabulary that ranks share: of each rank's share with its logit, then of all shares.

S rows of a step, V a rank's share of the vocabulary, P chunks of it, N shares, X id and logit

A share that holds NaN has NaN as its logit, so its row has no token.
"""

from dataclasses import replace

import torch
from torch import Tensor

from holdfast.kernels.geometry import NO_TOKEN, num_chunks
from holdfast.kernels.operation import operation
from holdfast.kernels.sampling.argmax import LogitScratch, argmax_chunks
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, jit_counting, next_power_of_two, tl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

BLOCK = 64
"""Rows of a program."""


def argmax_share_reference(logits_SV: Tensor, first_token: int, out_SX: Tensor, scratch: LogitScratch) -> None:
    """out = the id of a row's largest logit, the smallest among equals, counted from `first_token`; and that logit."""
    largest_S, ids_S = logits_SV.max(dim=1)  # NaN is the largest, and torch returns the first of equals
    out_SX[:, 0] = ids_S + first_token
    out_SX[:, 1] = largest_S


def argmax_share_triton(logits_SV: Tensor, first_token: int, out_SX: Tensor, scratch: LogitScratch) -> None:
    num_rows, share = logits_SV.shape
    assert out_SX.shape == (num_rows, 2), f"{out_SX.shape=} must be id and logit a row of {num_rows}"
    check_dense(out_SX)
    assert out_SX.dtype == torch.float32, f"{out_SX.dtype=} must be float32"
    if not num_rows:
        return
    own = _narrowed(scratch, num_chunks(share, scratch.chunk_tokens))
    chunks = argmax_chunks(logits_SV, own)
    _share_kernel[(num_rows,)](
        *(own.chunk_largest_SP, own.chunk_argmax_SP, out_SX, first_token, share, chunks),
        NO_TOKEN=NO_TOKEN, CHUNKS=next_power_of_two(chunks), num_warps=1,
    )  # fmt: skip


argmax_share = operation(reference=argmax_share_reference, triton=argmax_share_triton)


def _narrowed(scratch: LogitScratch, chunks: int) -> LogitScratch:
    """View the scratch buffer for rows of fewer chunks."""
    rows, held = scratch.chunk_largest_SP.shape
    assert chunks <= held, f"{chunks=} exceed the scratch for {held}"
    largest, ids = (plane.view(-1)[: rows * chunks] for plane in (scratch.chunk_largest_SP, scratch.chunk_argmax_SP))
    return replace(scratch, chunk_largest_SP=largest.view(rows, chunks), chunk_argmax_SP=ids.view(rows, chunks))


def first_largest_reference(all_NSX: Tensor, out_S: Tensor) -> None:
    """out = the id of the first share whose logit is the largest; NO_TOKEN if one is NaN or all are -inf."""
    largest_S, shares_S = all_NSX[:, :, 1].max(dim=0)
    ids_S = all_NSX[:, :, 0].gather(0, shares_S.unsqueeze(0)).squeeze(0).to(torch.int64)
    out_S.copy_(torch.where(largest_S > -torch.inf, ids_S, NO_TOKEN))


def first_largest_triton(all_NSX: Tensor, out_S: Tensor) -> None:
    num_shares, num_rows, num_fields = all_NSX.shape
    assert num_fields == 2, f"{all_NSX.shape=} must be id and logit of every share and row"
    check_dense(all_NSX)
    assert out_S.shape == (num_rows,), f"{out_S.shape=} must be a number a row of {num_rows}"
    assert out_S.dtype == torch.int64, f"{out_S.dtype=} must be int64"
    if num_rows:
        grid = (-(-num_rows // BLOCK),)
        _largest_kernel[grid](all_NSX, out_S, num_rows, NO_TOKEN=NO_TOKEN, SHARES=num_shares, BLOCK=BLOCK, num_warps=1)


first_largest = operation(reference=first_largest_reference, triton=first_largest_triton)


@jit
def _share_kernel(p_largest, p_argmax, p_out, first_token, share, num_chunks, NO_TOKEN: constexpr, CHUNKS: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_chunk = tl.arange(0, CHUNKS)
    m_chunk = o_chunk < num_chunks
    b_largest = tl.load(p_largest + i_row * num_chunks + o_chunk, mask=m_chunk, other=float("-inf"))
    b_token = tl.load(p_argmax + i_row * num_chunks + o_chunk, mask=m_chunk, other=share)
    largest = tl.max(b_largest, axis=0)
    token = tl.min(tl.where(b_largest == largest, b_token, share), axis=0)
    has_nan = tl.min(b_token, axis=0) == NO_TOKEN
    tl.store(p_out + 2 * i_row, (first_token + token).to(tl.float32))
    tl.store(p_out + 2 * i_row + 1, tl.where(has_nan, float("nan"), largest))


@jit_counting("num_rows")
def _largest_kernel(p_all, p_out, num_rows, NO_TOKEN: constexpr, SHARES: constexpr, BLOCK: constexpr):
    o_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < num_rows
    b_largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    b_token = tl.full((BLOCK,), NO_TOKEN, dtype=tl.int64)
    m_nan = o_row < 0
    for i_share in tl.static_range(SHARES):
        o_place = 2 * (i_share * num_rows + o_row)
        b_id = tl.load(p_all + o_place, mask=m_row, other=0.0)
        b_logit = tl.load(p_all + o_place + 1, mask=m_row, other=0.0)
        m_larger = b_logit > b_largest
        b_token = tl.where(m_larger, b_id.to(tl.int64), b_token)
        b_largest = tl.where(m_larger, b_logit, b_largest)
        m_nan = m_nan | (b_logit != b_logit)
    tl.store(p_out + o_row, tl.where(m_nan, NO_TOKEN, b_token), mask=m_row)

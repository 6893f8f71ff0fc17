"""Argmax of each row of logits, whole or in shares of ranks; and LogitScratch, the scratch of kernels over logits.

S rows of a step, R rows processed together, V vocabulary or a rank's share, P chunks of it, B buckets, C candidates, N shares,
X id and logit

A share that holds NaN has NaN as its logit, so its row has no token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from holdfast.kernels.geometry import CHUNK_TOKENS, NO_TOKEN, num_chunks
from holdfast.kernels.operation import operation
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, jit_counting, next_power_of_two, tl


@dataclass(frozen=True, slots=True)
class LogitScratch:
    """Scratch buffers of `logit_scratch_specs`. Contents are valid within one call only."""

    chunk_tokens: int
    """A power of two."""
    chunk_largest_SP: Tensor
    chunk_argmax_SP: Tensor
    chunk_weights_RP: Tensor
    chunk_nearer_RP: Tensor
    chunk_counts_RPB: Tensor
    num_listed_R: Tensor
    listed_logits_RC: Tensor
    listed_ids_RC: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], chunk_tokens: int = CHUNK_TOKENS) -> "LogitScratch":
        """Build from tensors by spec name: field names without shape suffixes."""
        names = [field.name.rpartition("_")[0] for field in fields(cls)]
        return cls(chunk_tokens, *(tensors[name] for name in names[1:]))


def argmax_reference(logits_SV: Tensor, out_S: Tensor, scratch: LogitScratch) -> None:
    """out = the id of a row's largest logit, the smallest among equals; NO_TOKEN if the row holds NaN or only -inf."""
    largest_S = logits_SV.amax(dim=1)
    ids_S = (logits_SV == largest_S.unsqueeze(1)).to(torch.int8).argmax(dim=1)
    out_S.copy_(torch.where(largest_S > -torch.inf, ids_S, NO_TOKEN))


def argmax_triton(logits_SV: Tensor, out_S: Tensor, scratch: LogitScratch) -> None:
    """Launch one program per chunk of a row, then one per row."""
    num_rows, vocab_size = logits_SV.shape
    assert out_S.shape == (num_rows,), f"{out_S.shape=} must be a number a row"
    chunks = argmax_chunks(logits_SV, scratch)
    if not num_rows:
        return
    partials = scratch.chunk_largest_SP, scratch.chunk_argmax_SP
    _row_kernel[(num_rows,)](
        *partials, out_S, vocab_size, chunks, NO_TOKEN=NO_TOKEN, CHUNKS=next_power_of_two(chunks), num_warps=1
    )


argmax = operation(reference=argmax_reference, triton=argmax_triton)


def argmax_chunks(logits_SV: Tensor, scratch: LogitScratch) -> int:
    """Write the largest logit of every chunk and its id into the scratch; return the chunks per row."""
    num_rows, vocab_size = logits_SV.shape
    chunks = num_chunks(vocab_size, scratch.chunk_tokens)
    held = scratch.chunk_largest_SP.shape
    assert num_rows <= held[0], f"{num_rows=} exceeds the scratch for {held[0]}"
    assert chunks == held[1], f"{chunks=} of {vocab_size} tokens differ from the scratch for {held[1]}"
    assert logits_SV.stride(1) == 1, f"{logits_SV.stride()=}: the logits of a row must lie side by side"
    if not num_rows:
        return chunks
    _chunk_kernel[(num_rows, chunks)](
        logits_SV, scratch.chunk_largest_SP, scratch.chunk_argmax_SP, logits_SV.stride(0), vocab_size, chunks,
        NO_TOKEN=NO_TOKEN, CHUNK=scratch.chunk_tokens, num_warps=8,
    )  # fmt: skip
    return chunks


@jit
def _chunk_kernel(
    p_logits, p_largest, p_argmax, row_stride, vocab_size, num_chunks, NO_TOKEN: constexpr, CHUNK: constexpr
):
    """Store the largest logit of a chunk and its id, or NO_TOKEN if the chunk holds NaN."""
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_logits = tl.load(p_logits + i_row * row_stride + o_token, mask=o_token < vocab_size, other=float("-inf"))
    m_nan = b_logits != b_logits
    b_logits = tl.where(m_nan, float("-inf"), b_logits)
    largest = tl.max(b_logits, axis=0)
    # A lane beyond the vocabulary holds -inf and sorts after every token.
    token = tl.min(tl.where(b_logits == largest, o_token, vocab_size), axis=0)
    token = tl.where(tl.max(m_nan.to(tl.int32), axis=0) > 0, NO_TOKEN, token)
    tl.store(p_largest + i_row * num_chunks + i_chunk, largest)
    tl.store(p_argmax + i_row * num_chunks + i_chunk, token)


@jit
def _row_kernel(p_largest, p_argmax, p_out, vocab_size, num_chunks, NO_TOKEN: constexpr, CHUNKS: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_chunk = tl.arange(0, CHUNKS)
    m_chunk = o_chunk < num_chunks
    b_largest = tl.load(p_largest + i_row * num_chunks + o_chunk, mask=m_chunk, other=float("-inf"))
    b_token = tl.load(p_argmax + i_row * num_chunks + o_chunk, mask=m_chunk, other=vocab_size)
    largest = tl.max(b_largest, axis=0)
    token = tl.min(tl.where(b_largest == largest, b_token, vocab_size), axis=0)
    is_empty = (largest == float("-inf")) | (tl.min(b_token, axis=0) == NO_TOKEN)
    tl.store(p_out + i_row, tl.where(is_empty, NO_TOKEN, token).to(tl.int64))


BLOCK = 64
"""Rows of a program that joins shares."""


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
